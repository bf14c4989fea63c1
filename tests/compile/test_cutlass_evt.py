"""What follows a product as a visitor: right, or refused with a reason.

Every computation is run: see `tests/compile/visitors.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compile import visitors
from tests.compile.cutlass import BF16, F16, F32, offered, ran, refused
from tests.products import Builder, Made, problem
from tilewright import config, metrics
from tilewright.gemm.cutlass import evt
from tilewright.gemm.cutlass.evt import TEXT, Epilogue, epilogue
from tilewright.gemm.cutlass.matrices import matrix
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, const, load, make, sym
from tilewright.ir.ops import TABLE
from tilewright.lower.activations import gelu

M, N, K = 24, 40, 16
Stores = Mapping[str, tuple[torch.Tensor, Expr]]


def whole(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: sums of their products are exact, whatever the order."""
    return torch.randint(-2, 3, (rows, columns)).to(dtype)


def made_of(
    stores: Callable[[Builder, Expr], Stores],
    dtype: torch.dtype = F16,
    keeps: bool = False,
    **given: Any,
) -> Made:
    kind = "addmm" if "bias" in given else "mm"
    return problem(
        kind, whole(M, K, dtype), whole(K, N, dtype), epilogue=stores, keeps=keeps, **given
    )  # type: ignore[arg-type]


def visited(made: Made) -> Epilogue:
    found = epilogue(made.problem)
    assert isinstance(found, Epilogue), found
    return found


def check(made: Made, tmp_path: Path) -> Epilogue:
    """The visitor's results are the interpreter's."""
    found = visited(made)
    ((functions),) = visitors.compiled([found], tmp_path)
    compare(made, found, functions)
    return found


def compare(made: Made, found: Epilogue, functions: list[Any]) -> None:
    a, b = (
        made.tensors[o.view.buffer].reshape(-1)[: s[0] * s[1]].reshape(s)
        for o, s in zip(made.problem.operands, ((M, K), (K, N)), strict=True)
    )
    sums = (a.float() @ b.float()).reshape(1, M, N)
    stored, right = visitors.run(made, found, functions, sums), visitors.expected(made)
    assert stored.keys() == set(made.problem.writes)
    for result in found.results:
        name = result.access.buffer
        want = visitors.window(Made(made.problem, right, made.values), result.access)
        tight = 2e-6 if want.dtype == F32 else torch.finfo(want.dtype).eps
        torch.testing.assert_close(
            stored[name].double(), want.double(), rtol=2 * tight, atol=tight, equal_nan=True
        )


def f32(e: Expr) -> Expr:
    return cast(e, F32)


def rand(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def out(dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.empty(M, N, dtype=dtype)


# ---- one operation after the other


def _argument(name: str, x: Expr, y: Expr) -> Expr:
    """An expression with the operation in it, over values it is defined for."""
    row = TABLE[name]
    small = op("div", x, const(16.0, F32))
    match name:
        case "sqrt" | "rsqrt" | "log" | "log2" | "log10" | "log1p":
            return op(name, op("add", op("abs", x), const(0.5, F32)))
        case "pow":
            return op(name, op("add", op("abs", small), const(0.5, F32)), y)
        case "where":
            return op(name, op("gt", x, y), x, y)
        case "bit_and" | "bit_or" | "bit_xor":
            return f32(op(name, op("gt", x, y), op("lt", x, const(1.0, F32))))
        case "bit_not":
            return f32(op(name, op("gt", x, y)))
        case "tan" | "sinh" | "cosh" | "exp" | "exp2" | "expm1" | "sin" | "cos":
            return op(name, small)
        case _:
            made = op(name, x, y) if row.arity == 2 else op(name, x)
            return f32(made) if made.dtype == torch.bool else made


def test_cu_h22_every_operation_is_the_irs(tmp_path: Path) -> None:
    """All of the table, compiled in one text, on a product of halves and a float32 matrix."""
    cases: list[tuple[str, Made]] = []
    for name in sorted(TEXT):

        def stores(b: Builder, c: Expr, name: str = name) -> Stores:
            y = b.read("e", rand(M, N, dtype=F32), b.m, b.n)
            return {"y": (out(F32), _argument(name, f32(c), y))}

        cases.append((name, made_of(stores)))
    found = [visited(made) for _, made in cases]
    for (name, made), e, functions in zip(
        cases, found, visitors.compiled(found, tmp_path), strict=True
    ):
        try:
            compare(made, e, functions)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_not_a_number_wins(tmp_path: Path) -> None:
    """max and min, as torch's; comparisons with it are false."""

    def stores(b: Builder, c: Expr) -> Stores:
        odd = rand(M, N, dtype=F32)
        odd[::3] = float("nan")
        odd[1::3] = float("inf")
        y = b.read("e", odd, b.m, b.n)
        x = f32(c)
        return {
            "y0": (out(F32), op("max", x, y)),
            "y1": (out(F32), op("min", y, x)),
            "y2": (out(F32), op("where", op("lt", y, x), x, op("neg", x))),
        }

    check(made_of(stores), tmp_path)


# ---- the programs of the specification


def _activated(name: str, x: Expr) -> Expr:
    return op("max", x, const(0.0, F32)) if name == "relu" else op(name, x)


@pytest.mark.parametrize("name", ["relu", "tanh", "exp", "sigmoid", "add", "mul", "sub", "div"])
def test_cu_h1_h5_after_a_relu(name: str, tmp_path: Path) -> None:
    """CU-H1, CU-H2, CU-H3, CU-H5, CU-H8: op(relu(acc), extra), and the product itself stored."""

    def stores(b: Builder, c: Expr) -> Stores:
        relu = op("max", f32(c), const(0.0, F32))
        if name in ("add", "mul", "sub", "div"):
            extra = f32(b.read("e", torch.rand(M, N).half() + 0.5, b.m, b.n))
            value = op(name, relu, extra)
        else:
            value = _activated(name, op("div", relu, const(8.0, F32)))
        return {"y": (out(), cast(value, F16))}

    found = check(made_of(stores, keeps=True), tmp_path)
    assert [r.access.buffer for r in found.results] == ["c", "y"]
    assert len(found.results) == 2


def test_cu_h4_dtypes_are_mixed(tmp_path: Path) -> None:
    """float32 results of halves; each rounding of eager's is done."""

    def stores(b: Builder, c: Expr) -> Stores:
        extra = f32(b.read("e", rand(M, N), b.m, b.n))
        ones = b.read("o", rand(M, N, dtype=F32), b.m, b.n)
        half = cast(op("mul", op("max", f32(c), const(0.0, F32)), extra), F16)
        return {"y": (out(F32), op("add", f32(half), ones))}

    found = check(made_of(stores), tmp_path)
    assert found.d.access.dtype == F32


def test_cu_h6_an_operand_is_used_again() -> None:
    """CU-H6: passed once, read twice."""

    def function(a: torch.Tensor, b: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(a @ b) * extra) + a

    (source,), _ = ran(function, whole(64, 64, F16), whole(64, 64, F16), rand(64, 64))
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == 1
    assert len(source.names) == 4 and source.addresses == (0, 1, 2, 3)
    assert source.source.text.count("(p0)") == 2


def test_cu_h7_several_results(tmp_path: Path) -> None:
    def stores(b: Builder, c: Expr) -> Stores:
        extra = f32(b.read("e", rand(M, N), b.m, b.n))
        first = op("max", f32(c), const(0.0, F32))
        z = cast(op("mul", first, extra), F16)
        return {
            "z": (out(), z),
            "y": (torch.empty(N, M, dtype=BF16).t(), cast(op("add", f32(z), first), BF16)),
        }

    found = check(made_of(stores), tmp_path)
    assert {r.access.major for r in found.results} == {"t", "n"}


def test_cu_h11_constants_and_sizes(tmp_path: Path) -> None:
    """CU-H10, CU-H11: scaled, shifted, clamped to 6, of another dtype, divided by a size."""

    def stores(b: Builder, c: Expr) -> Stores:
        x = f32(c)
        affine = op("sub", op("mul", x, const(3.3, F32)), const(1.234, F32))
        relu6 = op("min", op("max", affine, const(0.0, F32)), const(6.0, F32))
        size = make("cast", F32, (sym("s0", lower=0, hint=N),), F32)
        return {
            "y0": (out(), cast(relu6, F16)),
            "y1": (out(F32), op("mul", x, const(1e-5, F32))),
            "y2": (out(), cast(op("div", x, size), F16)),
        }

    made = problem(
        "mm", whole(M, K, F16), whole(K, N, F16), epilogue=stores, keeps=False, dynamic=(N,)
    )
    found = check(made, tmp_path)
    assert [leaf.kind for leaf in found.leaves].count("number") == 1


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(approximate: str, tmp_path: Path) -> None:
    def stores(b: Builder, c: Expr) -> Stores:
        return {"y": (out(), cast(gelu(f32(c), approximate), F16))}

    check(made_of(stores, bias=rand(N), alpha=0.5, beta=2.0), tmp_path)


@pytest.mark.parametrize("shape", [(M, N), (M, 1), (1, N), (N,), (1, 1)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cu_h2_every_broadcast(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """CU-C2: the bias of addmm, scaled, in float32; CU-H14: a zero stride on either side."""
    made = made_of(
        lambda b, c: {}, dtype, keeps=True, bias=rand(*shape, dtype=dtype), alpha=2.0, beta=0.25
    )
    found = check(made, tmp_path)
    kinds = {(M, N): "source", (M, 1): "column", (1, 1): "scalar"}
    assert found.leaves[-1].kind == kinds.get(shape, "row")


# ---- forty random ones


def _drawn(rng: random.Random) -> tuple[Made, str]:
    """A random epilogue: operations, broadcasts, dtypes, layouts, one to three results."""
    unary = ["tanh", "sigmoid", "abs", "neg", "erf", "floor", "sin", "relu", "square"]
    binary = ["add", "sub", "mul", "max", "min", "where", "safe_div"]
    odd = rng.choice(["", "", "", "", "position", "int", "masked", "indirect", "erfinv"])
    dtype = rng.choice([F16, BF16])
    shapes = [(M, N), (M, N), (1, N), (M, 1), (1, 1)]

    def stores(b: Builder, c: Expr) -> Stores:
        values = [f32(c)]
        for k in range(rng.randint(1, 4)):
            kind, shape = rng.choice([F16, BF16, F32]), rng.choice(shapes)
            t = rand(*shape, dtype=kind)
            if shape == (M, N) and rng.random() < 0.3:
                t = rand(N, M, dtype=kind).t()
            elif shape == (M, N) and rng.random() < 0.3:
                t = rand(M, N + 3, dtype=kind)[:, 1 : N + 1]
            values.append(f32(b.read(f"e{k}", t, b.m, b.n)))
        values.append(const(rng.choice([0.5, -1.25, 3.0]), F32))
        for _ in range(rng.randint(2, 7)):
            x, y = rng.choice(values), rng.choice(values)
            name = rng.choice(unary + binary)
            match name:
                case "relu":
                    made = op("max", x, const(0.0, F32))
                case "square":
                    made = op("tanh", op("mul", x, x))
                case "where":
                    made = op("where", op("le", x, y), y, op("neg", x))
                case "safe_div":
                    made = op("div", x, op("add", op("abs", y), const(1.0, F32)))
                case _:
                    made = op(name, x) if name in unary else op(name, x, y)
            values.append(f32(cast(made, dtype)) if rng.random() < 0.25 else made)
        last = op("add", values[-1], f32(c))
        match odd:
            case "position":
                last = op("add", last, make("cast", F32, (b.n,), F32))
            case "int":
                t = torch.zeros(M, N, dtype=torch.int32)
                last = op("add", last, make("cast", F32, (b.read("i", t, b.m, b.n),), F32))
            case "masked":
                view = b.view("w", rand(M, N, dtype=F32))
                index = ix.linearize((b.m, b.n), view.stride, view.offset)
                inside = op("lt", b.m, const(3))
                last = op("add", last, load("w", F32, index, inside))
            case "indirect":
                view = b.view("w", rand(M * N, dtype=F32))
                last = op("add", last, load("w", F32, ix.floordiv(ix.add(b.m, b.n), 2)))
            case "erfinv":
                last = op("erfinv", op("tanh", last))
            case _:
                pass
        count = rng.randint(1, 3)
        found: dict[str, tuple[torch.Tensor, Expr]] = {}
        for k in range(count):
            kind = rng.choice([F16, BF16, F32])
            value = last if k == 0 else op("tanh", op("add", rng.choice(values), f32(c)))
            where = out(kind) if rng.random() < 0.8 else torch.empty(N, M, dtype=kind).t()
            found[f"y{k}"] = (where, cast(value, kind))
        return found

    bias = rand(rng.choice([1, M]), N, dtype=dtype) if rng.random() < 0.3 else None
    given: dict[str, Any] = {} if bias is None else {"bias": bias, "alpha": 0.5, "beta": 1.5}
    return made_of(stores, dtype, keeps=rng.random() < 0.3, **given), odd


def test_forty_random_epilogues(tmp_path: Path) -> None:
    _forty(20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 125))
def test_a_thousand_random_epilogues(seed: int, tmp_path: Path) -> None:
    _forty(seed, tmp_path)


def _forty(seed: int, tmp_path: Path) -> None:
    """Each is right or refused with a reason; and what is right is rendered."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    drawn = [_drawn(rng) for _ in range(40)]
    taken: list[tuple[Made, Epilogue]] = []
    reasons: set[str] = set()
    for made, odd in drawn:
        found = epilogue(made.problem)
        if isinstance(found, str):
            assert odd and found
            reasons.add(odd)
        else:
            assert not odd
            taken.append((made, found))
            candidate = offered(made.problem, cutlass_max_profiling_configs=1)[0]
            assert candidate.rendered.text.count("struct Result") == len(found.results)
    assert len(taken) > 10 and reasons <= {"position", "int", "masked", "indirect", "erfinv"}
    functions = visitors.compiled([e for _, e in taken], tmp_path)
    for (made, found), one in zip(taken, functions, strict=True):
        compare(made, found, one)


# ---- structure


def _three(b: Builder, c: Expr) -> Stores:
    """F = accumulator + C + aux; E = relu(F) + bias; D = E + F."""
    x = f32(b.read("C", rand(M, N, dtype=F32), b.m, b.n))
    aux = f32(b.read("aux", rand(M, N, dtype=F32), b.m, b.n))
    bias = f32(b.read("bias", rand(M, 1, dtype=F32), b.m, b.n))
    f = op("add", op("add", f32(c), x), aux)
    e = op("add", op("max", f, const(0.0, F32)), bias)
    return {"D": (out(F32), op("add", e, f)), "F": (out(F32), f)}


def test_cu_h12_reads_and_writes() -> None:
    """CU-H12, CU-H13: buffers that are read and written, each once; what is needed only inside is
    nowhere; the product is a result of its own where it is kept."""
    found = visited(made_of(_three))
    assert [leaf.access.buffer for leaf in found.leaves if leaf.access] == ["C", "aux", "bias"]
    assert [r.access.buffer for r in found.results] == ["F", "D"]
    kept = visited(made_of(_three, keeps=True))
    assert [r.access.buffer for r in kept.results] == ["F", "c", "D"]


def test_cu_h15_other_orders_are_other_strides(tmp_path: Path) -> None:
    """CU-H15: what is permuted is read where it is; what has no fixed distances is refused."""

    def turned(b: Builder, c: Expr) -> Stores:
        t = rand(N, M).t()
        return {"y": (out(), cast(op("add", f32(c), f32(b.read("e", t, b.m, b.n))), F16))}

    found = check(made_of(turned), tmp_path)
    source = found.c
    assert source is not None and source.access is not None and source.access.major == "n"

    def rolled(b: Builder, c: Expr) -> Stores:
        b.view("e", rand(M, N))
        other = load("e", F16, ix.mod(ix.add(ix.mul(b.m, N), b.n, 5), M * N))
        return {"y": (out(), cast(op("add", f32(c), f32(other)), F16))}

    reason = epilogue(made_of(rolled).problem)
    assert isinstance(reason, str) and "e is not read or written at a fixed distance" in reason


def test_cu_h16_layouts() -> None:
    """CU-H16: row-major, column-major, and neither."""
    for t, major in ((torch.empty(3, 4), "t"), (torch.empty(2, 3).t(), "n")):
        rows, columns = t.shape
        made = problem(
            "mm",
            torch.empty(rows, 2),
            torch.empty(2, columns),
            keeps=False,
            epilogue=lambda b, c, t=t: {"y": (t, c)},
        )
        found = evt._access(made.problem, "y", F32, made.problem.epilogue[0].index)
        assert not isinstance(found, str) and found.major == major
    apart = problem("mm", torch.empty(3, 16)[:, ::2], torch.empty(8, 2)).problem
    reason = "contiguous in neither direction: its sizes are (3, 8), distances (16, 2)"
    assert reason in str(matrix(apart.operands[0].view))
    wide = torch.empty(M, 2 * N)[:, ::2]

    def apart(b: Builder, c: Expr) -> Stores:
        return {"y": (wide, f32(c))}

    reason = epilogue(made_of(apart).problem)
    assert reason == "no result has rows that begin at multiples of 16 bytes"


def test_cu_h18_the_accumulator_is_a_result_too() -> None:
    """E = accumulator; D = E + bias: stored by the visitor, and added to in the next node."""

    def stores(b: Builder, c: Expr) -> Stores:
        return {"D": (out(F32), op("add", f32(c), f32(b.read("bias", rand(M, 1), b.m, b.n))))}

    text = offered(made_of(stores, keeps=True).problem)[0].rendered.text
    kinds = ("AccFetch", "ColBroadcast<0", "Compute<Each0", "AuxStore<Store3", "Compute<Each1")
    for k, kind in enumerate(kinds):
        assert f"using Node{k} = fusion::Sm90{kind}" in text, kind
    assert "cute::tuple<seq<>, seq<>, seq<0>, seq<2>, seq<0, 1>>" in text
    assert "node3{static_cast<cutlass::half_t*>(p3) + offset3, {x3_m, _1{}, x3_l}};" in text
    assert "fused{node0, node1, node2, node3, node4};" in text


def test_cu_h17_arguments_follow_the_nodes() -> None:
    """CU-H17, CU-H19: nodes in order, each with its arguments; distances are arguments of
    the function, 0 and 1 are types; a pointer has its offset beside it."""
    made = made_of(_three)
    text = offered(made.problem)[0].rendered.text
    for k, kind in enumerate(
        (
            "AccFetch",
            "SrcFetch<ElementC>",
            "AuxLoad<Load2::Stages",
            "ColBroadcast<0, Tile, float, float, Stride<_1, _0, _0>>",
            "Compute<Each0",
            "AuxStore<Store5::Stages",
            "Compute<Each1",
        )
    ):
        assert f"using Node{k} = fusion::Sm90{kind}" in text, kind
    assert "seq<>, seq<>, seq<>, seq<>, seq<0, 1, 2>, seq<4>, seq<0, 1, 2, 3>>" in text
    assert "node2{static_cast<float const*>(p2) + offset2, float(0), {x2_m, _1{}, x2_l}};" in text
    assert "node3{static_cast<float const*>(p3) + offset3, float(0), {_1{}, _0{}, _0{}}};" in text
    assert "fused{node0, node1, node2, node3, node4, node5, node6};" in text
    assert str(M) not in text.partition("extern")[2] and f" {N}" not in text


def test_cu_h21_three_distances_at_most() -> None:
    """CU-H21: rows in two levels, as of heads beside each other, are four numbers: refused."""

    def levels(b: Builder, c: Expr) -> Stores:
        b.view("e", rand(2, 3 * N, M // 2).permute(0, 2, 1)[:, :, :N])
        high, low = ix.floordiv(b.m, M // 2), ix.mod(b.m, M // 2)
        where = ix.add(ix.mul(high, 3 * N * M // 2), low, ix.mul(b.n, M // 2))
        return {"y": (out(), cast(op("add", f32(c), f32(load("e", F16, where))), F16))}

    assert "at a fixed distance" in _refusal(levels)


def test_cu_h21_older_cards() -> None:
    from tilewright.target import Target

    made = problem("mm", whole(M, K, F16), whole(K, N, F16), target=Target("sm_80"))
    assert "sm_80" in refused(made.problem, arch="sm_80")


# ---- refusals


def _refusal(stores: Callable[[Builder, Expr], Stores], **given: Any) -> str:
    found = epilogue(made_of(stores, **given).problem)
    assert isinstance(found, str)
    return found


def test_cu_h22_refusals() -> None:
    """Each has its reason."""

    def of(value: Callable[[Builder, Expr], Expr], dtype: torch.dtype = F32) -> str:
        return _refusal(lambda b, c: {"y": (out(dtype), value(b, f32(c)))})

    assert of(lambda b, x: op("lgamma", x)) == "CUTLASS has no lgamma in an epilogue"
    assert "position" in of(lambda b, x: op("add", x, make("cast", F32, (b.m,), F32)))
    assert (
        of(
            lambda b, x: op(
                "add",
                x,
                make(
                    "cast", F32, (b.read("e", torch.zeros(M, N, dtype=torch.int64), b.m, b.n),), F32
                ),
            )
        )
        == "no torch.int64 is read in an epilogue"
    )
    assert (
        of(lambda b, x: cast(x, torch.int32), torch.int32) == "no result of torch.int32 is stored"
    )
    assert (
        of(lambda b, x: b.read("e", rand(M, N, dtype=F32), b.m, b.n))
        == "it does not use the product"
    )
    fp8 = _refusal(
        lambda b, c: {"y": (out(torch.float8_e4m3fn), cast(f32(c), torch.float8_e4m3fn))}
    )
    assert "float8_e4m3fn" in fp8


def test_cu_h22_aliases() -> None:
    """What it reads is not overwritten."""
    e = rand(M, N)

    def stores(b: Builder, c: Expr) -> Stores:
        return {"e": (e, cast(op("add", f32(c), f32(b.read("e", e, b.m, b.n))), F16))}

    assert _refusal(stores) == "it overwrites what it reads"


def test_cu_h22_switches() -> None:
    def stores(b: Builder, c: Expr) -> Stores:
        return {"y": (out(), cast(op("tanh", f32(c)), F16))}

    made = made_of(stores).problem
    assert offered(made)
    assert "cutlass_epilogue_fusion_enabled is off" in refused(
        made, cutlass_epilogue_fusion_enabled=False
    )
    assert all(c.operation.is_tma for c in offered(made))
    assert "can end the product" in refused(made, cutlass_op_denylist_regex="epi_tma")


def test_cu_h24_prologues_are_refused() -> None:
    made = problem(
        "mm",
        whole(M, K, F16),
        whole(K, N, F16),
        prologue={0: lambda b: cast(op("neg", f32(b.read("p", rand(M, K), b.m, b.k))), F16)},
    )
    assert refused(made.problem) == "an operand is computed where it is read"


# ---- in programs


def relu_add(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
    total = a @ b
    return total, torch.relu(total) + x


def two(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
    z0 = torch.relu(a @ b)
    z = z0 * x
    return z, z + z0


@pytest.mark.parametrize(("function", "count"), [(relu_add, 1), (two, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_cu_h23_one_launch(function: Callable[..., Any], count: int, dynamic: bool) -> None:
    """CU-H7, CU-H8, CU-H23, CU-E7: one kernel; both counters grow by the results that are fused."""
    a, b, x = torch.randn(64, 32).half(), torch.randn(32, 48).half(), torch.randn(64, 48).half()
    called, code = ran(function, a, b, x, dynamic=dynamic)
    assert len(called) == 1 and "triton_" not in code
    counters = metrics.counters["inductor"]
    assert counters["cuda_epilogue_fusion_counter"] == count
    assert counters["cutlass_epilogue_fusion_counter"] == count
    if dynamic:  # strides of what is read are arguments
        text = called[0].source.text
        assert "d_m" in text and not any(f" {n}" in text.partition("extern")[2] for n in (64, 48))


def test_cu_h10_off_by_default() -> None:
    a, b = torch.randn(256, 32).half(), torch.randn(256, 32).half().t()
    called, _ = ran(
        lambda a, b: torch.relu((a @ b) * 3.3 - 1.234), a, b, cutlass_epilogue_fusion_enabled=False
    )
    assert len(called) == 1 and not called[0].problem.epilogue
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == 0
    assert config.cuda.cutlass_epilogue_fusion_enabled is False


def test_cu_h9_a_layout_decided_late() -> None:
    b = torch.randn(128, 128).half()
    called, _ = ran(lambda b: torch.relu(torch.zeros_like(b) @ b.t()), b)
    assert len(called) == 1 and len(called[0].problem.epilogue) == 1
