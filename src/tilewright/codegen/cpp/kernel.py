"""`generate(program, group)`: the C++ kernel of one fusion group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from tilewright import config
from tilewright.codegen.cpp.emit import Writer, uses_flag
from tilewright.codegen.cpp.folds import (
    ARG_CHUNK,
    Accumulator,
    ArgAccumulator,
    ScanAccumulator,
    accumulators,
    scans_of,
)
from tilewright.codegen.cpp.pointwise import write_pointwise
from tilewright.codegen.cpp.scatter import scatters, write_scatter
from tilewright.codegen.cpp.serial import Carried, carried, carry, write_serial
from tilewright.codegen.cpp.slots import (
    is_column_reduction,
    is_full_reduction,
    write_column_reduction,
    write_full_reduction,
)
from tilewright.codegen.cpp.structure import Structure, folds_columns, structure
from tilewright.codegen.cpp.text import CTYPE, PRELUDE, memory_type
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, loads, substitute, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest, Program, Store, rewritten
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import all_loops, terms
from tilewright.schedule.nests.hints import hint, hint_product
from tilewright.schedule.nests.segments import Segment

LANES = (256, 128, 64, 32, 16)  # elements of a vectorised outer loop handled together, at best
COLUMNS = (64, 32, 16, 1)  # the same of a loop of a segment's own
SCRATCH = 1 << 17  # elements of scratch rows for all lanes that still live in a cache
CHUNK = 4096  # elements of a loop handled together: partial sums stay accurate, threads get work
LANE_CHUNK = 128  # the same where one lane adds up a chunk alone
FEWEST_TILES = 16  # of the widest kind; with fewer, some threads would have nothing to do
PARALLEL_WORK = 8192  # iterations below which starting threads costs more than it gains


@dataclass(frozen=True)
class Param:
    kind: Literal["ptr", "int", "float"]
    name: str  # a buffer, or a symbol
    start: int = 0  # the element of the buffer that is pointed to


@dataclass(frozen=True)
class CppKernel:
    text: str
    params: tuple[Param, ...]
    checked: bool  # may report bad indices or divisions
    name: str = "kernel"


@dataclass(frozen=True)
class Function:
    """One part of a kernel."""

    text: str
    params: tuple[Param, ...]
    types: tuple[str, ...]
    checked: bool
    headers: frozenset[str]


Step = tuple[Expr, Expr]  # the stride and the size of a loop
Block = tuple[list[Step], Expr]  # loops, ascending by stride, and where they start


@dataclass(frozen=True)
class Row:
    """Where a local buffer lives: a window of it from element `low` on, every `unit`-th element;
    or, where that would be mostly gaps, without them: `packed` says for every distance that
    accesses step over in the buffer which it is in the row."""

    name: str
    length: Expr
    low: Expr = ix.ZERO
    unit: Expr = ix.ONE
    packed: dict[Expr, Expr] | None = None


def generate(program: Program, group: Group) -> CppKernel:
    """One function per part of the group, and one that calls them all."""
    parts = [Kernel(program, part).function(k) for k, part in enumerate(group.kernels)]
    params = dict.fromkeys(p for part in parts for p in part.params)
    types = {p: t for part in parts for p, t in zip(part.params, part.types, strict=True)}
    names = {p: f"a{k}" for k, p in enumerate(params)}
    checked = any(part.checked for part in parts)
    head = [f"{types[p]} {names[p]}" for p in params] + ["int64_t* tw_err"] * checked
    headers = sorted({h for part in parts for h in part.headers})
    text = PRELUDE + "".join(f'#include "{h}"\n' for h in headers)
    text += "".join(part.text for part in parts)
    text += f'extern "C" void kernel({", ".join(head)}) {{\n'
    for k, part in enumerate(parts):
        args = [names[p] for p in part.params] + ["tw_err"] * part.checked
        text += f"    part{k}({', '.join(args)});\n"
    return CppKernel(text + "}\n", tuple(params), checked)


class Kernel:
    def __init__(self, program: Program, group: Group) -> None:
        self.buffers = program.buffers
        self.local = group.local
        self.shape: Structure = structure(group)
        self.members = [m for s in self.shape.segments for m in s.members]
        self.pointers: dict[str, str] = {}
        self.numbers: dict[Expr, str] = {}
        self.rows: dict[str, Row] = {}
        self.scalars: dict[str, str] = {}
        self.headers: set[str] = set()  # what the kernel includes beyond the prelude
        self.w = Writer(self._name, self._load)
        exprs = [e for m in self.members for e in m.exprs]
        self.flag = uses_flag(*exprs)
        self.starts = _starts(self.members)
        self.rewritten = rewritten(self.members)
        self.outer = (*self.shape.outer, *self.shape.serial)
        self.carried: dict[str, Carried] = carried(self)
        self._place_locals()
        self.lane = self.outer[-1] if self.shape.lanes else None
        # every lane has its own part of a row that is kept
        rows = bool(self.rows) and not self.shape.serial
        inner = any(s.inner for s in self.shape.segments)
        self.tiled = self.lane is not None and (rows or inner)
        self.lanes = self._lanes() if self.tiled else 0

    # ---- naming

    def _name(self, e: Expr) -> str:
        if e.op == "var":
            return str(e.arg)
        return self.numbers.setdefault(e, f"n{len(self.numbers)}")

    def _pointer(self, buffer: str) -> str:
        return self.pointers.setdefault(buffer, f"p{len(self.pointers)}")

    def _load(self, node: Expr, w: Writer) -> str:
        source = self._handed_over(node)
        if source is not None:
            text = w.value(source)
        else:
            text = self.element(node.arg, node.src[0])
            placed = node.arg in self.scalars or node.arg in self.rows
            if len(node.src) == 2 and not placed and not _in_step(node.src[0]):
                return self._masked(node, w, text)
            if node.dtype == torch.bool and not placed:
                text = f"({text} != 0)"
        if len(node.src) == 2:
            zero = f"{CTYPE[node.dtype]}{{}}"
            text = f"({w.value(node.src[1])} ? {text} : {zero})"
        return text

    def _masked(self, node: Expr, w: Writer, element: str) -> str:
        text = f"tw::masked({w.value(node.src[1])}, &{element})"
        return f"({text} != 0)" if node.dtype == torch.bool else text

    def _handed_over(self, node: Expr) -> Expr | None:
        """What was stored in an element of a local buffer that has no memory of its own."""
        if node.arg not in self.local or node.arg in self.scalars or node.arg in self.rows:
            return None
        return next(s.value for m in self.members for s in m.stores if s.buffer == node.arg)

    def element(self, buffer: str, index: Expr) -> str:
        if buffer in self.scalars:
            return self.scalars[buffer] + ("[lane]" if self.tiled else "")
        if buffer in self.rows:
            row = self.rows[buffer]
            return f"{row.name}[{self._row_index(row, index)}]"
        index = ix.sub(index, self.starts.get(buffer, 0))
        return f"{self._pointer(buffer)}[{self.w.index(index)}]"

    def _row_index(self, row: Row, index: Expr) -> str:
        inner = [v for v in free_vars(index) if v not in self.outer]
        total: Expr = ix.ZERO
        for v in inner:
            stride = ix.coefficient(index, v)
            assert stride is not None
            total = ix.add(total, ix.mul(v, stride if row.packed is None else row.packed[stride]))
        start = ix.sub(ix.without(index, tuple(free_vars(index))), row.low)
        total = ix.add(total, start if row.packed is None else row.packed[start])
        total = ix.floordiv(total, row.unit)
        text = self.w.index(total)
        return f"({text})*{self.lanes} + lane" if self.tiled else text

    # ---- the whole kernel

    def function(self, number: int) -> Function:
        """The whole group as a function of its own."""
        body = self.w
        if self.shape.serial:
            write_serial(self)
        elif is_full_reduction(self):
            write_full_reduction(self)
        elif is_column_reduction(self):
            write_column_reduction(self)
        elif any(scatters(m) for m in self.members):
            (nest,) = self.members
            write_scatter(self, nest)
        elif self.lane is not None and not self.tiled:
            write_pointwise(self, self.members)
        else:
            self._parallel()
        if self.flag:
            body.line("if (tw_bad) *tw_err |= tw_bad;")
        params = [Param("ptr", b, self.starts.get(b, 0)) for b in self.pointers]
        types = [f"{memory_type(self.buffers[b].dtype)}*" for b in self.pointers]
        for e in self.numbers:
            params.append(Param("float" if e.dtype == torch.float64 else "int", e.arg.name))
            types.append("double" if e.dtype == torch.float64 else "int64_t")
        names = (*self.pointers.values(), *self.numbers.values())
        head = [f"{t} {name}" for t, name in zip(types, names, strict=True)]
        if self.flag:
            head.append("int64_t* tw_err")
        lines = [f"static void part{number}({', '.join(head)}) {{"]
        if self.flag:
            lines.append("    int tw_bad = 0;")
        text = "\n".join([*lines, *self.w.lines, "}"]) + "\n"
        return Function(text, tuple(params), tuple(types), self.flag, frozenset(self.headers))

    def _place_locals(self) -> None:
        """A local buffer is a variable per outer point, or a row of scratch memory."""
        stores: dict[str, list[tuple[Store, Nest, Segment]]] = {}
        for segment in self.shape.segments:
            for m in segment.members:
                for store in m.stores:
                    if store.buffer in self.local:
                        stores.setdefault(store.buffer, []).append((store, m, segment))
        for buffer, found in stores.items():
            if not self._is_handed_over(buffer, found):
                self._place_local(buffer, [(store, m) for store, m, _ in found])

    def _is_handed_over(self, buffer: str, stores: Sequence[tuple[Store, Nest, Segment]]) -> bool:
        """Whether each element goes from statement to statement and needs no memory."""
        _, nest, segment = stores[0]
        readers = [s for s in self.shape.segments for m in s.members if buffer in m.reads]
        stable = not nest.reads & self.rewritten  # or computing it again would give another value
        return (len(stores) == 1 and not nest.reduce and stable
                and all(s is segment for s in readers))  # fmt: skip

    def _place_local(self, buffer: str, stores: Sequence[tuple[Store, Nest]]) -> None:
        name = f"l{len(self.scalars) + len(self.rows)}"
        indices = {store.index for store, _ in stores}
        if len(indices) == 1 and not free_vars(stores[0][0].index) - set(self.outer):
            self.scalars[buffer] = name
            return
        blocks = [self._block(store.index, nest) for store, nest in stores]
        read = [self._block(i, m) for m in self.members for i in m.indices.get(buffer, ())]
        self.rows[buffer] = _row(name, blocks, read)

    def _block(self, index: Expr, nest: Nest) -> Block:
        """What an access touches at one point of the outer loops."""
        found = terms(index, all_loops(nest))
        assert found is not None, f"{index} is not affine"
        steps = [(s, v.src[0]) for v, s in found[0].items() if v not in self.outer]
        return sorted(steps, key=lambda p: (hint_product([p[0]]), p[0].key)), found[1]

    # ---- parallel loops

    def _work(self) -> Expr:
        sizes = [ix.product(_whole(v.src[0]) for v in all_loops(m)) for m in self.members]
        return max(sizes, key=lambda s: hint_product([s]))

    def _lanes(self) -> int:
        """Wide tiles read whole cache lines one after the other; enough tiles keep threads busy.
        One tile would leave all to one thread: the least still is a cache line of floats."""
        assert self.lane is not None
        alone = self.threads() == "never"
        extent = hint(self.lane.src[0])
        rows = hint_product(v.src[0] for v in self.outer[:-1])
        longest = max(1, *(hint_product(v.src[0] for v in s.inner) for s in self.shape.segments))
        fits = SCRATCH // longest if any(self._keeps_row(m) for m in self.members) else LANES[0]
        for lanes in LANES:
            busy = lanes <= 64 or rows * (extent // lanes) >= FEWEST_TILES
            busy &= alone or rows * -(-extent // lanes) > 1
            if busy and lanes <= max(fits, 64) and extent > lanes // 2:
                return lanes
        return LANES[-1]

    def _keeps_row(self, nest: Nest) -> bool:
        return any(s.buffer in self.local and not free_vars(s.index) <= set(self.outer)
                   for s in nest.stores)  # fmt: skip

    def threads(self) -> str:
        """The clauses that keep small problems on one thread, or "never" for a single thread."""
        work = self._work()
        known = ix.value_of(work)
        if config.cpp.threads == 1 or (known is not None and known < PARALLEL_WORK):
            return "never"
        count = f" num_threads({config.cpp.threads})" if config.cpp.threads > 0 else ""
        if known is not None:
            return count
        return f"{count} if({self.w.index(work)} >= {PARALLEL_WORK})"

    def flag_clause(self) -> str:
        return " reduction(|:tw_bad)" if self.flag else ""

    def _parallel(self) -> None:
        threads = self.threads()
        parallel = threads != "never" and bool(self.outer)
        with ExitStack() as region:
            if parallel:
                self.w.line(f"#pragma omp parallel{threads}{self.flag_clause()}")
                region.enter_context(self.w.block(""))
            self.open_scratch()
            with ExitStack() as loops:
                self._outer_loops(loops, parallel)
                self.declare_scalars()
                for segment in self.shape.segments:
                    self.segment(segment)
            self.close_scratch()

    def open_scratch(self) -> None:
        for buffer, row in self.rows.items():
            ctype = CTYPE[self.buffers[buffer].dtype]
            length = self.w.index(row.length)
            size = f"sizeof({ctype})*({length})" + (f"*{self.lanes}" if self.tiled else "")
            self.w.line(f"{ctype}* const {row.name} = ({ctype}*)__builtin_malloc({size} + 64);")

    def close_scratch(self) -> None:
        for row in self.rows.values():
            self.w.line(f"__builtin_free({row.name});")

    def _outer_loops(self, stack: ExitStack, parallel: bool) -> None:
        heads = [self.for_loop(v) for v in self.outer if v is not self.lane]
        if self.lane is None:
            self.open_loops(stack, heads, parallel)
            return
        self.open_loops(stack, [*heads, self.tile_head()], parallel)
        self.tile_stop()

    def tile_head(self) -> str:
        assert self.lane is not None
        size = self.w.index(self.lane.src[0])
        return f"for (int64_t tile = 0; tile < {size}; tile += {self.lanes})"

    def tile_stop(self) -> None:
        """How many lanes the tile has; a literal where that is always all of them."""
        assert self.lane is not None
        size, step = self.w.index(self.lane.src[0]), self.lanes
        whole = (ix.value_of(self.lane.src[0]) or 1) % step == 0
        stop = str(step) if whole else f"{size} - tile < {step} ? {size} - tile : {step}"
        self.w.line(f"const int64_t stop = {stop};")

    def open_loops(self, stack: ExitStack, heads: Sequence[str], parallel: bool) -> None:
        """Nested loops, the points of all of them shared among the threads."""
        if parallel and heads:
            collapse = f" collapse({len(heads)})" if len(heads) > 1 else ""
            self.w.line(f"#pragma omp for{collapse} schedule(static) nowait")
        for head in heads:
            stack.enter_context(self.w.block(head))

    def for_loop(self, v: Expr) -> str:
        return f"for (int64_t {v.arg} = 0; {v.arg} < {self.w.index(v.src[0])}; ++{v.arg})"

    def lane_loop(self) -> ExitStack:
        """The vectorised loop over one tile of the last outer loop."""
        assert self.lane is not None
        stack = ExitStack()
        self.w.line(f"#pragma omp simd{self.flag_clause()}")
        stack.enter_context(self.w.block("for (int64_t lane = 0; lane < stop; ++lane)"))
        self.w.line(f"const int64_t {self.lane.arg} = tile + lane;")
        return stack

    def declare_scalars(self) -> None:
        for buffer, name in self.scalars.items():
            ctype = CTYPE[self.buffers[buffer].dtype]
            extent = f"[{self.lanes}]" if self.tiled else ""
            self.w.line(f"{'alignas(64) ' if extent else ''}{ctype} {name}{extent};")

    # ---- segments

    def segment(self, segment: Segment) -> None:
        w = self.w
        own = [m for m in segment.members if m.name not in self.carried]
        folds = accumulators(own, self.w.fresh)
        for m in segment.members:
            if m.name in self.carried and not self.carried[m.name].by_column:
                folds += self.carried[m.name].folds
        scans = scans_of(segment, self.w.fresh)
        with ExitStack() as stack:
            if scans:
                self._scan_segment(segment, scans)
                return
            if folds and not self.tiled and not self.carried and folds_columns(segment):
                self._column_segment(segment, folds)
                return
            for v in segment.loops if folds else segment.inner[:-1]:
                stack.enter_context(w.block(self.for_loop(v)))
            if folds:
                self._fold_segment(segment, folds)
            elif not segment.inner:
                with self.lane_loop() if self.tiled else ExitStack():
                    self.stores(segment.members)
            else:
                last = segment.inner[-1]
                if self.tiled:
                    stack.enter_context(w.block(self.for_loop(last)))
                    with self.lane_loop():
                        self.stores(segment.members)
                else:
                    if ix.bounds(last.src[0])[0] >= 1:
                        self.hoist(segment.members, last)
                    head = self.for_loop(last)  # it may compute what it needs first
                    w.line(f"#pragma omp simd{self.flag_clause()}")
                    with w.block(head):
                        self.stores(segment.members)

    def point(self, members: Sequence[Nest]) -> None:
        """All there is to do at one point of the loops of a kernel without inner loops."""
        self.members = list(members)
        self.declare_scalars()
        self.stores(members)

    def hoist(self, members: Sequence[Nest], loop: Expr) -> None:
        """Compute before a loop that runs at least once what is the same at all of its points."""
        written = {s.buffer for m in self.members for s in m.stores}
        self.w.hoist([e for m in members for e in m.exprs], loop, written)

    def stores(self, members: Sequence[Nest]) -> None:
        for m in members:
            if m.name in self.carried:
                carry(self, self.carried[m.name])
            else:
                self.write(m)

    def write(self, nest: Nest) -> None:
        for store in nest.stores:
            self._store(store)

    def _store(self, store: Store) -> None:
        if store.buffer in self.local and not any(store.buffer in m.reads for m in self.members):
            return  # nobody asks for it, as for the variance of a norm without running statistics
        w = self.w
        buffer = self.buffers[store.buffer]
        value = w.value(store.value)
        if store.value.dtype != buffer.dtype:
            value = f"tw::cast<{CTYPE[buffer.dtype]}>({value})"
        if store.buffer in self.rewritten:
            w.forget(store.buffer)
        for node in self._loads_of(store):
            w.know(node, value)  # later reads of this element in the same iteration
        placed = store.buffer in self.scalars or store.buffer in self.rows
        if store.buffer in self.local and not placed:
            return
        target = self.element(store.buffer, store.index)
        if buffer.dtype == torch.bool and not placed:
            value = f"uint8_t({value})"
        w.line(f"{target} = {value};")

    def _loads_of(self, store: Store) -> list[Expr]:
        return [n for m in self.members for n in loads(*m.exprs)
                if n.arg == store.buffer and n.src == (store.index,)]  # fmt: skip

    def _scan_segment(self, segment: Segment, scans: list[ScanAccumulator]) -> None:
        """One loop in order, carrying the accumulators."""
        w = self.w
        (axis,) = segment.loops
        for scan in scans:
            scan.declare(w, self.lanes if self.tiled else 0)
        with w.block(self.for_loop(axis)), self.lane_loop() if self.tiled else ExitStack():
            for scan in scans:
                scan.step(w, "[lane]" if self.tiled else "")
            self.stores(segment.members)

    # ---- folds

    def _fold_segment(self, segment: Segment, folds: list[Accumulator]) -> None:
        """Loops over the reduction, with the members that do not reduce inside the same loop."""
        w = self.w
        own = [fold for fold in folds if not fold.owner]
        for fold in own:
            fold.declare(w, self.lanes if self.tiled else 0)
        self.fold_loops(segment, folds)
        reducing = [m for m in segment.members if m.reduce and m.name not in self.carried]
        with self.lane_loop() if self.tiled else ExitStack():
            for fold in own:
                fold.finish(w, "[lane]" if self.tiled else "")
            self.stores(reducing)

    def _column_segment(self, segment: Segment, folds: list[Accumulator]) -> None:
        """Folds of columns at one point of the outer loops: the segment's last loop is vectorised,
        as if it were the last outer one, while the others of the group go along their own."""
        w, extent = self.w, hint(segment.loops[-1].src[0])
        self.lane, self.lanes = segment.loops[-1], next(n for n in COLUMNS if extent > n // 2)
        with ExitStack() as stack:
            for v in segment.loops[:-1]:
                stack.enter_context(w.block(self.for_loop(v)))
            stack.enter_context(w.block(self.tile_head()))
            self.tile_stop()
            for fold in folds:
                fold.declare(w, self.lanes)
            with ExitStack() as around:
                for v in segment.reduce[:-1]:
                    around.enter_context(w.block(self.for_loop(v)))
                last = segment.reduce[-1]
                self._lane_fold(last, folds, segment, "0", w.index(last.src[0]))
            with self.lane_loop():
                for fold in folds:
                    fold.finish(w, "[lane]")
                self.stores([m for m in segment.members if m.reduce])
        self.lane, self.lanes = None, 0

    def fold_loops(self, segment: Segment, folds: list[Accumulator],
                    bounds: tuple[str, str] | None = None) -> None:  # fmt: skip
        """The reduction loops; `bounds` restrict the outermost."""
        w = self.w
        with ExitStack() as stack:
            for k, v in enumerate(segment.reduce[:-1]):
                low, high = bounds if bounds and k == 0 else ("0", w.index(v.src[0]))
                stack.enter_context(
                    w.block(f"for (int64_t {v.arg} = {low}; {v.arg} < {high}; ++{v.arg})")
                )
            last = segment.reduce[-1]
            low, high = bounds if bounds and len(segment.reduce) == 1 else (
                "0", w.index(last.src[0]))  # fmt: skip
            if self.tiled:
                self._lane_fold(last, folds, segment, low, high)
            else:
                if bounds is None and ix.bounds(last.src[0])[0] >= 1:
                    self.hoist(segment.members, last)
                self._chunked_fold(last, folds, segment, low, high)

    def _fold_point(self, segment: Segment, folds: list[Accumulator],
                    step: Callable[[Accumulator], None]) -> None:  # fmt: skip
        """One point of a reduction's loop: members in order, each folding or storing."""
        waiting = {fold.node: fold for fold in folds if not fold.owner}
        for m in segment.members:
            kept = self.carried.get(m.name)
            if not m.reduce or (kept is not None and kept.by_column):
                self.stores([m])
                continue
            if kept is not None:
                for fold in folds:
                    if fold.owner == m.name:
                        step(fold)
                continue
            for node in walk(*m.exprs):
                if node in waiting:
                    step(waiting.pop(node))

    def _chunked_fold(self, v: Expr, folds: list[Accumulator], segment: Segment, low: str,
                      high: str) -> None:  # fmt: skip
        w = self.w
        # the place of an extreme is searched in the chunk that has it: short ones are found sooner
        size = ARG_CHUNK if any(isinstance(f, ArgAccumulator) for f in folds) else CHUNK
        with w.block(f"for (int64_t chunk = {low}; chunk < {high}; chunk += {size})"):
            w.line(f"const int64_t stop = {high} - chunk < {size} ? {high} : chunk + {size};")
            clauses = [fold.start_chunk(w) for fold in folds]
            if self._is_light(segment, folds):
                self._two_streams(v, folds, segment)
            else:
                w.line(f"#pragma omp simd{''.join(clauses)}{self.flag_clause()}")
                with w.block(f"for (int64_t {v.arg} = chunk; {v.arg} < stop; ++{v.arg})"):
                    self._fold_point(segment, folds, lambda fold: fold.step_chunk(w, v.arg))
            for fold in folds:
                fold.end_chunk(w, v.arg)

    def _is_light(self, segment: Segment, folds: list[Accumulator]) -> bool:
        """Whether an addition waits for the one before it longer than all else takes."""
        work = sum(TABLE[n.op].cost for f in folds for n in walk(f.value) if n.op in TABLE)
        return (work <= 8 and not self.flag and all(m.reduce for m in segment.members)
                and all(type(f) is Accumulator for f in folds))  # fmt: skip

    def _two_streams(self, v: Expr, folds: list[Accumulator], segment: Segment) -> None:
        """Both halves of a chunk at once, into accumulators of their own."""
        w = self.w

        def point() -> None:
            self._fold_point(segment, folds, lambda fold: fold.step_chunk(w, v.arg))

        w.line("const int64_t half = (stop - chunk) / 2;")
        second = [fold.second_stream() for fold in folds]
        clauses = [f.start_chunk(w) for f in second] + [f.clause() for f in folds]
        w.line(f"#pragma omp simd{''.join(clauses)}")
        with w.block("for (int64_t at = 0; at < half; ++at)"):
            with w.block(""):
                w.line(f"const int64_t {v.arg} = chunk + at;")
                point()
            with w.block(""):
                w.line(f"const int64_t {v.arg} = chunk + half + at;")
                self._fold_point(segment, second, lambda fold: fold.step_chunk(w, v.arg))
        with w.block(f"for (int64_t {v.arg} = chunk + 2*half; {v.arg} < stop; ++{v.arg})"):
            point()
        for fold, other in zip(folds, second, strict=True):
            fold.join(w, other)

    def _lane_fold(self, v: Expr, folds: list[Accumulator], segment: Segment, low: str,
                   high: str) -> None:  # fmt: skip
        w = self.w
        with w.block(f"for (int64_t chunk = {low}; chunk < {high}; chunk += {LANE_CHUNK})"):
            w.line(f"const int64_t last = {high} - chunk < {LANE_CHUNK} ? {high} : "
                   f"chunk + {LANE_CHUNK};")  # fmt: skip
            for fold in folds:
                fold.start_lanes(w, self.lanes)
            with w.block(f"for (int64_t {v.arg} = chunk; {v.arg} < last; ++{v.arg})"):
                for fold in folds:
                    fold.before_lanes(w)
                with self.lane_loop():
                    self._fold_point(segment, folds, lambda fold: fold.step_lane(w))
            for fold in folds:
                fold.end_lanes(w, self.lanes)


MOST_PEELED = 16  # iterations of a loop that g++ may write out


def _in_step(index: Expr) -> bool:
    """Whether a vector of these elements is contiguous: some loop that stays a loop walks them one
    by one. See `tw::masked` for the others."""
    walked = [v for v in free_vars(index) if ix.coefficient(index, v) is ix.ONE]
    lengths = [ix.value_of(v.src[0]) for v in walked]
    return not free_vars(index) or any(n is None or n > MOST_PEELED for n in lengths)


def _whole(size: Expr) -> Expr:
    """The size of a loop, or that of the first chunk of one that is shorter in the last."""
    return substitute(size, dict.fromkeys(free_vars(size), ix.ZERO))


def _row(name: str, blocks: Sequence[Block], read: Sequence[Block]) -> Row:
    """Memory for the blocks of elements that are stored, as the accesses `read` need them."""
    steps, low = blocks[0]
    length = ix.product(size for _, size in steps)
    unit = steps[0][0] if steps else ix.ONE
    if len(blocks) == 1:
        if _is_dense(steps):
            return Row(name, length, low, unit)
        packed = _packed(steps, low, read)
        if packed is not None:
            return Row(name, length, low, packed=packed)
    high = low
    for steps, start in blocks:
        end = ix.add(start, *(ix.mul(s, ix.sub(n, 1)) for s, n in steps))
        low, high = ix.minimum(low, start), ix.maximum(high, end)
    return Row(name, ix.add(ix.sub(high, low), 1), low)


def _is_dense(steps: Sequence[Step]) -> bool:
    return all(t is ix.mul(s, n) for (s, n), (t, _) in pairwise(steps))


def _packed(steps: Sequence[Step], low: Expr, read: Sequence[Block]) -> dict[Expr, Expr] | None:
    """The distances in a row without gaps for those that accesses step over in the buffer; None
    where one of them could be either of several, as where windows overlap."""
    if not ix.separate(steps):
        return None
    within: Expr = ix.ONE
    found = {ix.ZERO: ix.ZERO}
    literal: list[tuple[int, int, int]] = []
    for stride, size in steps:
        found[stride] = within
        literal.append((ix.value_of(stride) or 0, ix.value_of(size) or 0, ix.value_of(within) or 0))
        within = ix.mul(within, size)
    needed = {d for walked, start in read for d in (ix.sub(start, low), *(s for s, _ in walked))}
    for distance in needed - found.keys():
        known = ix.value_of(distance)
        if known is None or not all(all(numbers) for numbers in literal):
            return None
        places = _places(known, literal)
        if len(places) != 1:
            return None
        found[distance] = const(places.pop())
    return found


def _places(distance: int, steps: Sequence[tuple[int, int, int]]) -> set[int]:
    """Where elements that far apart can be: `steps` are strides, sizes and strides in the row."""
    if not steps:
        return set() if distance else {0}
    stride, size, within = steps[-1]
    return {
        turns * within + rest
        for turns in (distance // stride, -(-distance // stride))
        if abs(turns) < size
        for rest in _places(distance - turns * stride, steps[:-1])
    }


def _starts(members: Sequence[Nest]) -> dict[str, int]:
    """The first element of each buffer, as far as literals tell. The kernel is given its address:
    kernels that differ in nothing else are one."""
    found: dict[str, list[int]] = {}
    for m in members:
        for buffer, indices in m.indices.items():
            found.setdefault(buffer, []).extend(ix.poly(i).get((), 0) for i in indices)
    return {b: min(literals) for b, literals in found.items() if min(literals) > 0}


__all__ = ["CppKernel", "Kernel", "Param", "generate"]
