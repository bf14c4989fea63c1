"""The C++ of a kernel: CUTLASS's types for an operation and an epilogue, and the function that
calls it.

No number of a problem is in the text. Sizes, distances, offsets, scales, the order of tiles and the
card's processors are arguments of the function, so products of other sizes share the binary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tilewright.gemm.cutlass.evt import STAGED, Access, Epilogue, Leaf, computation
from tilewright.gemm.cutlass.matrices import CPP, METADATA, SHORT, Matrix
from tilewright.gemm.cutlass.operations import Operation
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.runtime.nvcc import Arg

NAME = "KERNEL_NAME"  # in the text until its hash is known
LAYOUTS = {"t": "cutlass::layout::RowMajor", "n": "cutlass::layout::ColumnMajor"}
ROUND = "cutlass::FloatRoundStyle::round_to_nearest"
TMA = {"f32": 4, "f16": 8, "bf16": 8, "e4m3": 16, "e5m2": 16, "s8": 16, "s32": 4, "void": 8}
CLUSTERS = ("cluster_shape", "cluster_shape_fallback")  # of CUTLASS's hardware information
NAMED_OPS = 4  # of an epilogue, in the name of its kernel

Value = Expr | float | Literal["swizzle", "sms"]


@dataclass(frozen=True)
class Plain:
    """No epilogue but `alpha * sum + beta * C`, which every operation has."""

    d: Matrix
    c: Matrix | None
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True)
class Request:
    """What a source is rendered from."""

    operation: Operation  # with the layouts and alignments of these
    a: Matrix
    b: Matrix
    sizes: tuple[Expr, Expr, Expr, Expr]  # batch, m, n, k
    finish: Epilogue | Plain
    meta: Matrix | None = None  # of a sparse left operand
    clusters: tuple[int, ...] = ()  # blocks that share what they load, where the call says


@dataclass(frozen=True)
class Rendered:
    """A source, its function, and what each argument of the function is."""

    text: str
    name: str
    buffers: tuple[str, ...]  # addresses come first
    numbers: tuple[tuple[str, Arg, Value], ...]  # then these
    includes_runner: bool = False

    @property
    def args(self) -> tuple[Arg, ...]:
        tail: tuple[Arg, ...] = ("ptr", "ptr", "ptr")  # size of the workspace, workspace, stream
        return (*("ptr" for _ in self.buffers), *(kind for _, kind, _ in self.numbers), *tail)


def render(request: Request) -> Rendered:
    made = _Text(request) if request.meta is None else _Sparse(request)
    text = made.whole()
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    fused = request.finish.operations[:NAMED_OPS] if isinstance(request.finish, Epilogue) else ()
    name = "_".join(["cutlass", *fused, digest])
    return Rendered(text.replace(NAME, name), name, tuple(made.buffers), tuple(made.numbers))


@dataclass
class _Text:
    request: Request
    buffers: list[str] = field(default_factory=list[str])
    numbers: list[tuple[str, Arg, Value]] = field(default_factory=list["tuple[str, Arg, Value]"])

    # ---- arguments

    def number(self, name: str, value: Value, kind: Arg = "int") -> str:
        """An argument; its name."""
        self.numbers.append((name, kind, value))
        return name

    def pointer(self, buffer: str, offset: Expr, element: str, const: bool = True) -> str:
        """Where a matrix begins. A buffer that two of them are in is passed once."""
        if buffer not in self.buffers:
            self.buffers.append(buffer)
        at = self.number(f"offset{sum(n.startswith('offset') for n, _, _ in self.numbers)}", offset)
        kind = f"{CPP.get(element, element)}{' const' if const else ''}*"
        return f"static_cast<{kind}>(p{self.buffers.index(buffer)}) + {at}"

    def stride(self, name: str, values: Sequence[Expr | str]) -> str:
        """A list of distances; 0 and 1 are types, all others are arguments."""
        return f"{{{', '.join(self._distance(name, k, v) for k, v in enumerate(values))}}}"

    def _distance(self, name: str, k: int, value: Expr | str) -> str:
        if isinstance(value, str):
            return value
        return self.number(f"{name}_{'mnl'[k]}", value)

    # ---- the whole

    def whole(self) -> str:
        r = self.request
        batch, m, n, k = r.sizes
        for name, value in zip("MNKB", (m, n, k, batch), strict=True):
            self.number(name, value)
        main = self._mainloop()
        finish = r.finish
        if isinstance(finish, Epilogue):
            types, thread, ends = self._visited(finish)
            fusion = "Fusion"
        else:
            types, thread, ends = self._scaled(finish)
            compute = CPP[r.operation.accumulator]
            fusion = f"cutlass::epilogue::fusion::LinearCombination<ElementD, {compute}, ElementC, {compute}>"  # noqa: E501
        swizzle, sms = self.number("swizzle", "swizzle"), self.number("sms", "sms")
        names = [f"{name}_{side}" for name in CLUSTERS for side in "mn"]
        for name, blocks in zip(names, r.clusters, strict=False):
            self.number(name, ix.as_index(blocks))
        body = [
            *self._head(),
            *types,
            *self._kernel(fusion),
            "}  // namespace",
            "",
            *self._function(main, thread, ends, swizzle, sms),
        ]
        return "\n".join([*_INCLUDES, "", "namespace {", "", *body]) + "\n"

    def _head(self) -> list[str]:
        op, finish = self.request.operation, self.request.finish
        shapes = {
            name: ", ".join(f"_{n}" if n else "int" for n in part)
            for name, part in ((self.tile, self._shape()), ("Cluster", op.cluster))
        }
        c, d = self._source(), finish.d.access if isinstance(finish, Epilogue) else finish.d
        layout_c = LAYOUTS[c.major if c is not None else op.layouts[2]]
        return [
            "using namespace cute;",
            "namespace fusion = cutlass::epilogue::fusion;",
            "namespace collective = cutlass::epilogue::collective;",
            "",
            f"using ElementA = {CPP[op.a]};",
            f"using ElementB = {CPP[op.b]};",
            f"using ElementC = {CPP[op.c]};",
            f"using ElementD = {CPP[op.d]};",
            f"using ElementAccumulator = {CPP[op.accumulator]};",
            f"using LayoutA = {LAYOUTS[op.layouts[0]]};",
            f"using LayoutB = {LAYOUTS[op.layouts[1]]};",
            f"using LayoutC = {layout_c};",
            f"using LayoutD = {LAYOUTS[d.major]};",
            *(f"using {name} = Shape<{numbers}>;" for name, numbers in shapes.items()),
            f"using EpilogueSchedule = {op.epilogue_schedule};",
            "",
        ]

    @property
    def tile(self) -> str:
        """The type of the tile that a multiplication of matrices computes: from sm_100 on it can be
        that of two blocks, and epilogues are told what one block does."""
        return "Tile" if self.request.operation.arch < 100 else "MmaTile"

    def _shape(self) -> tuple[int, ...]:
        op = self.request.operation
        return op.tile if op.arch < 100 else (*op.instruction[:2], op.tile[2])

    def _source(self) -> Matrix | Access | None:
        finish = self.request.finish
        if isinstance(finish, Plain):
            return finish.c
        return None if finish.c is None else finish.c.access

    def _kernel(self, fusion: str) -> list[str]:
        op = self.request.operation
        arch = f"cutlass::arch::Sm{op.arch}, cutlass::arch::OpClassTensorOp"
        c, d = op.aligned[2:]
        c, d = (TMA[op.c], TMA[op.d]) if op.is_tma else (c, d)
        stages = (
            f"StageCount<{op.stages}>"
            if op.stages
            else "StageCountAutoCarveout<"
            "static_cast<int>(sizeof(typename Epilogue::SharedStorage))>"
        )
        return [
            "using Epilogue = typename collective::CollectiveBuilder<",
            f"    {arch}, {self.tile}, Cluster, collective::EpilogueTileAuto,",
            f"    ElementAccumulator, {self._compute()}, ElementC, LayoutC, {c}, ElementD, LayoutD, {d},",  # noqa: E501
            f"    EpilogueSchedule, {fusion}>::CollectiveOp;",
            "using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<",
            f"    {arch},",
            f"    ElementA, LayoutA, {op.aligned[0]}, ElementB, LayoutB, {op.aligned[1]},",
            f"    ElementAccumulator, {self.tile}, Cluster,",
            f"    cutlass::gemm::collective::{stages},",
            f"    {op.kernel_schedule}>::CollectiveOp;",
            "using Kernel = cutlass::gemm::kernel::GemmUniversal<",
            f"    Shape<int, int, int, int>, Mainloop, Epilogue, {op.scheduler}>;",
            "using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;",
            "",
        ]

    def _compute(self) -> str:
        return "float" if isinstance(self.request.finish, Epilogue) else "ElementAccumulator"

    def _mainloop(self) -> str:
        r = self.request
        a = self.pointer(r.a.buffer, r.a.offset, r.operation.a)
        b = self.pointer(r.b.buffer, r.b.offset, r.operation.b)
        lda, ldb = self.number("lda", r.a.ld), self.number("ldb", r.b.ld)
        step_a, step_b = self.number("step_a", r.a.step), self.number("step_b", r.b.step)
        # CUTLASS walks B along n, then k
        at_a = f"{lda}, _1{{}}" if r.operation.layouts[0] == "t" else f"_1{{}}, {lda}"
        at_b = f"{ldb}, _1{{}}" if r.operation.layouts[1] == "n" else f"_1{{}}, {ldb}"
        return f"{{{a}, {{{at_a}, {step_a}}}, {b}, {{{at_b}, {step_b}}}}}"

    def _function(
        self, main: str, thread: list[str], ends: str, swizzle: str, sms: str
    ) -> list[str]:
        return [
            *self._signature(),
            *(f"  {line}" for line in thread),
            "  typename Gemm::Arguments arguments{",
            "      cutlass::gemm::GemmUniversalMode::kGemm, {int(M), int(N), int(K), int(B)},",
            f"      {main},",
            f"      {ends},",
            f"      {{0, int({sms}), 0}}, {{}}}};",
            f"  arguments.scheduler.max_swizzle_size = int({swizzle});",
            *self._clusters(),
            *_CALL,
        ]

    def _clusters(self) -> list[str]:
        return [
            f"  arguments.hw_info.{name} = dim3(unsigned({name}_m), unsigned({name}_n), 1);"
            for name in CLUSTERS
            if self.request.clusters
        ]

    def _signature(self) -> list[str]:
        kinds = {"int": "int64_t", "float": "float"}
        params = [f"void* p{k}" for k in range(len(self.buffers))]
        params += [f"{kinds[kind]} {name}" for name, kind, _ in self.numbers]
        params += ["size_t* workspace_size", "void* workspace", "cudaStream_t stream"]
        return [
            f'extern "C" __attribute__((visibility("default"))) int {NAME}(',
            f"    {_wrapped(params)}) {{",
        ]

    # ---- epilogues

    def _scaled(self, finish: Plain) -> tuple[list[str], list[str], str]:
        op = self.request.operation
        compute = CPP[op.accumulator]
        alpha = self.number("alpha", finish.alpha, "float")
        beta = self.number("beta", finish.beta, "float")
        thread = f"{{{compute}({alpha}), {compute}({beta})}}"
        c, d = finish.c, finish.d
        at_c = "nullptr, {}"
        if c is not None:
            at_c = f"{self.pointer(c.buffer, c.offset, op.c)}, {self._placed('c', c)}"
        at_d = f"{self.pointer(d.buffer, d.offset, op.d, const=False)}, {self._placed('d', d)}"
        return [], [], f"{{{thread}, {at_c}, {at_d}}}"

    def _placed(self, name: str, x: Matrix) -> str:
        ld, step = self.number(f"ld{name}", x.ld), self.number(f"step_{name}", x.step)
        return f"{{{ld}, _1{{}}, {step}}}" if x.major == "t" else f"{{_1{{}}, {ld}, {step}}}"

    def _visited(self, finish: Epilogue) -> tuple[list[str], list[str], str]:
        """Types of the nodes, their arguments, and those of the epilogue."""
        nodes = _Nodes(self, finish)
        nodes.build()
        d = finish.d.access
        at_c = "nullptr, {}"
        if finish.c is not None and finish.c.access is not None:
            c = finish.c.access
            at_c = f"{self.pointer(c.buffer, c.offset, SHORT[c.dtype])}, {self._strides('c', c)}"
        at_d = (
            f"{self.pointer(d.buffer, d.offset, SHORT[d.dtype], const=False)}, "
            f"{self._strides('d', d)}"
        )
        return nodes.types(), nodes.arguments, f"{{fused, {at_c}, {at_d}}}"

    def _strides(self, name: str, x: Access) -> str:
        return self.stride(name, static(x))


class _Sparse(_Text):
    """A kernel of CUTLASS 2.x with a 2:4 sparse left operand."""

    def whole(self) -> str:
        op, meta = self.request.operation, self.request.meta
        finish = self.request.finish
        assert meta is not None and isinstance(finish, Plain)
        batch, m, n, k = self.request.sizes
        for name, value in zip("MNKB", (m, n, k, batch), strict=True):
            self.number(name, value)
        a = self.pointer(self.request.a.buffer, self.request.a.offset, op.a)
        b = self.pointer(self.request.b.buffer, self.request.b.offset, op.b)
        e = self.pointer(meta.buffer, meta.offset, METADATA[meta.dtype])
        d = self.pointer(finish.d.buffer, finish.d.offset, op.d, const=False)
        distances = (
            ("lda", self.request.a.ld),
            ("ldb", self.request.b.ld),
            ("ldd", finish.d.ld),
            ("lde", meta.ld),
        )
        lda, ldb, ldd, lde = (self.number(name, value) for name, value in distances)
        self.number("swizzle", "swizzle")  # its order of tiles is a type
        self.number("sms", "sms")
        body = [
            "  typename Gemm::Arguments arguments{",
            "      cutlass::gemm::GemmUniversalMode::kGemm, {int(M), int(N), int(K)}, 1,",
            "      {ElementAccumulator(1), ElementAccumulator(0)},",
            f"      {a}, {b}, nullptr,",
            f"      {d}, {e},",
            f"      0, 0, 0, 0, 0, {lda}, {ldb}, {ldd}, {ldd}, {lde}}};",
        ]
        head = [*_INCLUDES_2X, "", "namespace {", "", *self._types(), "}  // namespace", ""]
        return "\n".join([*head, *self._signature(), *body, *_CALL]) + "\n"

    def _types(self) -> list[str]:
        op = self.request.operation
        warps = tuple(n // w for n, w in zip(op.tile, op.warps, strict=True))
        shapes = [f"cutlass::gemm::GemmShape<{', '.join(map(str, shape))}>,"
                  for shape in (op.tile, warps, op.instruction)]  # fmt: skip
        layouts = [LAYOUTS[c] for c in op.layouts]
        return [
            f"using ElementAccumulator = {CPP[op.accumulator]};",
            "using Gemm = cutlass::gemm::device::GemmSparseUniversal<",
            f"    {CPP[op.a]}, {layouts[0]}, {CPP[op.b]}, {layouts[1]},",
            f"    {CPP[op.d]}, {layouts[2]}, ElementAccumulator,",
            f"    cutlass::arch::OpClassTensorOp, cutlass::arch::Sm{op.arch},",
            *(f"    {shape}" for shape in shapes),
            "    cutlass::epilogue::thread::LinearCombination<",
            f"        {CPP[op.d]}, {op.aligned[3]}, ElementAccumulator, ElementAccumulator>,",
            f"    {op.swizzling}, {op.stages}, {op.aligned[0]}, {op.aligned[1]}, {op.math}>;",
            "",
        ]


def static(x: Access) -> tuple[Expr | str, Expr | str, Expr | str]:
    """Distances of a row-major or column-major matrix: the one that is 1 is a type."""
    m, n, batch = x.strides
    return ("_1{}", n, batch) if x.major == "n" else (m, "_1{}", batch)


@dataclass
class _Nodes:
    """The visitor: leaves, a computation for each result, stores; D is the last computation."""

    text: _Text
    finish: Epilogue
    lines: list[str] = field(default_factory=list[str])
    arguments: list[str] = field(default_factory=list[str])
    edges: list[tuple[int, ...]] = field(default_factory=list["tuple[int, ...]"])
    staged: int = 0

    def build(self) -> None:
        for leaf in self.finish.leaves:
            self._add(self._leaf(leaf), ())
        for k, result in enumerate(self.finish.results):
            inputs = [self.finish.leaves[i].value for i in result.inputs]
            self.lines += computation(f"Result{k}", result.value, inputs)
            self.lines += [f"template <class T> struct Each{k} : Each<Result{k}, T> {{}};"]
            last = result is self.finish.d
            element = "ElementD" if last else "float"
            node = f"fusion::Sm90Compute<Each{k}, {element}, float, {ROUND}>"
            place = self._add((node, "{}"), result.inputs)
            if not last:
                self._add(self._store(result.access), (place,))
        values = ", ".join(f"node{k}" for k in range(len(self.edges)))
        self.arguments.append(f"typename Fusion::Arguments fused{{{values}}};")

    def types(self) -> list[str]:
        edges = ", ".join(f"seq<{', '.join(map(str, e))}>" for e in self.edges)
        nodes = ", ".join(f"Node{k}" for k in range(len(self.edges)))
        return [
            *self._descriptor(),
            *_EACH,
            *self.lines,
            f"using Fusion = fusion::Sm90TopologicalVisitor<float, cute::tuple<{edges}>,",
            f"    {nodes}>;",
            "",
        ]

    def _descriptor(self) -> list[str]:
        if self.text.request.operation.arch < 100:
            return [
                "using Descriptor = collective::detail::EpilogueDescriptor<",
                "    Tile, collective::EpilogueTileAuto, ElementC, ElementD, EpilogueSchedule>;",
            ]
        return [
            "using Descriptor = collective::detail::Sm100EpilogueDescriptor<",
            "    cutlass::arch::OpClassTensorOp, MmaTile, collective::EpilogueTileAuto,",
            "    ElementAccumulator, ElementC, ElementD, EpilogueSchedule,",
            "    cutlass::detail::TagToStrideC_t<LayoutC>,",
            "    cutlass::detail::TagToStrideC_t<LayoutD>, false, false>;",
            "using Tile = typename Descriptor::TileShape;",
        ]

    @property
    def _generation(self) -> str:
        """In names of what describes memory beside C and D; nodes keep those of sm_90."""
        return "" if self.text.request.operation.arch < 100 else "Sm100"

    def _add(self, node: tuple[str, str], inputs: tuple[int, ...]) -> int:
        kind, arguments = node
        place = len(self.edges)
        self.lines.append(f"using Node{place} = {kind};")
        self.arguments.append(f"typename Node{place}::Arguments node{place}{arguments};")
        self.edges.append(inputs)
        return place

    def _leaf(self, leaf: Leaf) -> tuple[str, str]:
        if leaf.kind == "accumulator":
            return "fusion::Sm90AccFetch", "{}"
        if leaf.kind == "source":
            return "fusion::Sm90SrcFetch<ElementC>", "{}"
        k = len(self.edges)
        if leaf.kind == "number":
            value = self.text.number(f"number{k}", leaf.number, "float")
            return "fusion::Sm90ScalarBroadcast<float>", f"{{{{{value}}}, {{nullptr}}, {{}}}}"
        access = leaf.access
        assert access is not None
        element = CPP[SHORT[access.dtype]]
        pointer = self.text.pointer(access.buffer, access.offset, SHORT[access.dtype])
        batch = access.strides[2]
        if leaf.kind == "matrix":
            return self._matrix(k, access, element, pointer)
        step = "_0" if batch is ix.ZERO else "int64_t"
        last = "_0{}" if batch is ix.ZERO else self.text.number(f"x{k}_l", batch)
        if leaf.kind == "scalar":
            return (
                f"fusion::Sm90ScalarBroadcast<{element}, Stride<_0, _0, {step}>>",
                f"{{{{{element}(0)}}, {{{pointer}}}, {{{{_0{{}}, _0{{}}, {last}}}}}}}",
            )
        name, m, n = ("Row", "_0", "_1") if leaf.kind == "row" else ("Col", "_1", "_0")
        return (
            f"fusion::Sm90{name}Broadcast<0, Tile, {element}, float, Stride<{m}, {n}, {step}>>",
            f"{{{pointer}, {element}(0), {{{m}{{}}, {n}{{}}, {last}}}}}",
        )

    def _matrix(self, k: int, x: Access, element: str, pointer: str) -> tuple[str, str]:
        stride, distances = self._layout(k, x)
        arguments = f"{{{pointer}, {element}(0), {distances}}}"
        if not (x.is_wide and self._stage()):
            return (
                f"fusion::Sm90AuxLoad<0, void, {element}, {stride}, void, void, "
                f"{x.alignment}, false>"
            ), arguments
        self.lines.append(
            f"using Load{k} = collective::detail::{self._generation}AuxLoadDescriptor<"
            f"Descriptor, {stride}, {element}>;"
        )
        return (
            f"fusion::Sm90AuxLoad<Load{k}::Stages, typename Descriptor::EpilogueTile, {element}, "
            f"typename Load{k}::Stride, typename Load{k}::SmemLayoutAtom, "
            f"typename Load{k}::CopyOpS2R>"
        ), arguments

    def _store(self, x: Access) -> tuple[str, str]:
        k, element = len(self.edges), CPP[SHORT[x.dtype]]
        pointer = self.text.pointer(x.buffer, x.offset, SHORT[x.dtype], const=False)
        stride, distances = self._layout(k, x)
        arguments = f"{{{pointer}, {distances}}}"
        if not (x.is_wide and self._stage()):
            return (
                f"fusion::Sm90AuxStore<0, void, {element}, {ROUND}, {stride}, void, void, "
                f"{x.alignment}, false>"
            ), arguments
        self.lines.append(
            f"using Store{k} = collective::detail::{self._generation}AuxStoreDescriptor<"
            f"Descriptor, {stride}, {element}>;"
        )
        return (
            f"fusion::Sm90AuxStore<Store{k}::Stages, typename Descriptor::EpilogueTile, "
            f"{element}, {ROUND}, typename Store{k}::Stride, "
            f"typename Store{k}::SmemLayoutAtom, typename Store{k}::CopyOpR2S>"
        ), arguments

    def _stage(self) -> bool:
        self.staged += 1
        return self.staged <= STAGED

    def _layout(self, k: int, x: Access) -> tuple[str, str]:
        if x.major:
            kinds = ("_1, int64_t" if x.major == "n" else "int64_t, _1") + ", int64_t"
            return f"Stride<{kinds}>", self.text.stride(f"x{k}", static(x))
        return "Stride<int64_t, int64_t, int64_t>", self.text.stride(f"x{k}", x.strides)


def _wrapped(params: Sequence[str], width: int = 92) -> str:
    lines, line = [], ""
    for k, param in enumerate(params):
        piece = param + ("," if k + 1 < len(params) else "")
        if line and len(line) + 1 + len(piece) > width:
            lines.append(line)
            line = piece
        else:
            line = f"{line} {piece}" if line else piece
    return "\n    ".join([*lines, line])


_INCLUDES = (
    '#include "cutlass/cutlass.h"',
    '#include "cutlass/epilogue/collective/collective_builder.hpp"',
    '#include "cutlass/gemm/collective/collective_builder.hpp"',
    '#include "cutlass/gemm/device/gemm_universal_adapter.h"',
    '#include "cutlass/gemm/kernel/gemm_universal.hpp"',
)

_INCLUDES_2X = (
    '#include "cutlass/cutlass.h"',
    '#include "cutlass/epilogue/thread/linear_combination.h"',
    '#include "cutlass/gemm/device/gemm_sparse_universal.h"',
)

_EACH = (
    "CUTLASS_HOST_DEVICE float rounded_f16(float x) { return float(cutlass::half_t(x)); }",
    "CUTLASS_HOST_DEVICE float rounded_bf16(float x) { return float(cutlass::bfloat16_t(x)); }",
    "template <class F, class T> struct Each {};",
    "template <class F, class T, int N> struct Each<F, cutlass::Array<T, N>> {",
    "  template <class... X>",
    "  CUTLASS_HOST_DEVICE cutlass::Array<T, N> operator()(X const&... x) const {",
    "    cutlass::Array<T, N> y;",
    "    CUTLASS_PRAGMA_UNROLL",
    "    for (int i = 0; i < N; ++i) y[i] = F::at(x[i]...);",
    "    return y;",
    "  }",
    "};",
)

_CALL = (
    "  if (workspace_size != nullptr) {",
    "    *workspace_size = Gemm::get_workspace_size(arguments);",
    "    return 0;",
    "  }",
    "  Gemm gemm;",
    "  cutlass::Status status = Gemm::can_implement(arguments);",
    "  if (status == cutlass::Status::kSuccess)",
    "    status = gemm.initialize(arguments, workspace, stream);",
    "  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);",
    "  return int(status);",
    "}",
)
