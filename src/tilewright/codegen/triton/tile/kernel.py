"""The Triton kernel of one fusion group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property

import torch

from tilewright import config, rules
from tilewright.codegen.triton.analysis import index_width, precision, shared_functions
from tilewright.codegen.triton.analysis.operations import scatters
from tilewright.codegen.triton.analysis.rounding import kept_narrow, skips_a_rounding
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.configs import configs
from tilewright.codegen.triton.plan.grid_order import rows_first
from tilewright.codegen.triton.plan.tiling import Axis, Shape, accumulates
from tilewright.codegen.triton.strategies.chunked import Chunked
from tilewright.codegen.triton.strategies.misaligned_columns import MisalignedColumns
from tilewright.codegen.triton.strategies.misaligned_rows import begin_evenly
from tilewright.codegen.triton.strategies.misaligned_scans import MisalignedScans
from tilewright.codegen.triton.strategies.packed_rows import Packed
from tilewright.codegen.triton.strategies.prefetched_rows import Prefetch
from tilewright.codegen.triton.strategies.preloaded_scan import PreloadedScan
from tilewright.codegen.triton.strategies.scan import BlockScan
from tilewright.codegen.triton.strategies.small_matrices import SmallMatrices
from tilewright.codegen.triton.tile.address import address, may_repeat
from tilewright.codegen.triton.tile.atomics import write_scatter
from tilewright.codegen.triton.tile.broadcast import common, load_pieces
from tilewright.codegen.triton.tile.grid_sync import COUNTERS, Exchange, end, meet
from tilewright.codegen.triton.tile.interleaved import Interleaved
from tilewright.codegen.triton.tile.lower import NOWHERE, RANDOM, Load, Numerics, Support, Writer
from tilewright.codegen.triton.tile.online_softmax import OnlineReduction, Pair, joined, passes
from tilewright.codegen.triton.tile.ops import FP8_LARGEST, TYPE, cast
from tilewright.codegen.triton.tile.paired import lean_of
from tilewright.codegen.triton.tile.predication import row_conditions, some_rows
from tilewright.codegen.triton.tile.prefetch import early_loads, first
from tilewright.codegen.triton.tile.reduce import (
    Reduction,
    Scan,
    ThreadLanes,
    Welford,
    reduce_whole,
    reductions_of,
    scans_of,
)
from tilewright.codegen.triton.tile.render import Arguments, imports, params_of
from tilewright.codegen.triton.tile.weighted_sums import Weighted
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, load, loads, substitute, syms, walk
from tilewright.ir.program import Nest, Program, Store, rewritten
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.segments import Segment
from tilewright.target import Target

BAD_INDEX = 1
IN_ORDER = ("argmin", "argmax", "welford")  # folds that count rounds


class Kernel:
    accesses = Interleaved  # how neighbours in memory are loaded and stored

    def __init__(self, program: Program, group: Group, shape: Shape, target: Target,
                 wide: bool, among: tuple[Config, ...] = ()) -> None:  # fmt: skip
        """`among` are the configurations it may run in, if there are others than its own."""
        self.buffers = program.buffers
        self.local = group.local
        self.configs = among or configs(program, shape, target)
        self.shape = shape = shape.flat()
        self.target = target
        early = config.triton.enable_pdl and target.capability >= (9, 0)
        # whether of the programs of a row the last one goes on alone, and none waits for another
        self.last_finishes = shape.ticketed and not shape.reread and not shape.prefetched_scan
        self.early = early and (self.last_finishes or not shape.row_programs)
        self.arguments = Arguments()
        self.checked = False
        self.assume: list[Expr] | None = None
        index_type = "tl.int64" if wide or not self._is_narrow() else "tl.int32"
        self.w = Writer(shape.axes, shape.rank, index_type, self._name, self.load, self._check)
        self._ends = {a: found for a in shape.axes if (found := shape.ends(a))}
        walk_by = PreloadedScan if shape.preloaded else BlockScan
        self.walk = walk_by(self, shape.inner[0]) if shape.prefetched_scan else None
        self.peeled = self.walk or lean_of(self)
        self.packed = Packed.of(self)
        self.chunked = Chunked(self, shape.inner[0]) if shape.chunk else None
        scans = shape.scans
        looped = MisalignedScans if scans else MisalignedColumns
        staged = SmallMatrices if shape.persistent else looped
        self.staged = staged(self) if shape.staged else None
        self.prefetch = Prefetch(self, shape.inner[0]) if shape.prefetched else None
        self.interleaved = self.accesses(self)
        self.w.masked = {a for a in shape.axes if a in self._ends or not self._is_full(a)}
        self.w.ends |= {a: self.w.support(*found) for a, found in self._ends.items()}
        exprs = [e for m in shape.members for e in m.exprs]
        results = [s.value for s in shape.stores if s.buffer not in self.local]
        made = {s.buffer: s.value for s in shape.stores}
        coarse = shared_functions.divisions(exprs, results, made) | precision.coarse(
            exprs, results, made)  # fmt: skip
        card = target.capability
        pairs = [a for a in shape.axes if all(c.kwargs[a.block] >= 16 for c in self.configs)]
        self.w.numerics = Numerics(
            rounds_pairs=frozenset(pairs if card >= (8, 0) else ()),
            narrow=kept_narrow(exprs, made) if card >= (9, 0) else frozenset(),
            fp8=FP8_LARGEST if card >= (8, 9) and precision.may_convert(shape) else (),
            made=made,
            coarse=coarse,
            joint=shared_functions.functions(exprs, results, made, coarse),
            shares=shared_functions.shares(exprs, made),
            valued=index_width.valued(exprs, shape.stores),
        )
        self.joins = not skips_a_rounding(exprs, made) and precision.joins(
            exprs, {e.dtype for e in results} - {torch.float32} | self._along)  # fmt: skip
        self.w.computes(seldom=row_conditions(shape, self.w))
        if not shape.persistent:
            largest = {a: max(c.kwargs[a.block] for c in self.configs) for a in shape.inner}
            self.w.blocks.rounds = {a: (f"{a.name}offset", size) for a, size in largest.items()
                                    if a.start is None}  # fmt: skip
        self.rewritten = rewritten(shape.members)
        self.online: dict[Expr, OnlineReduction] = {}
        self._joined = {} if shape.persistent else joined(shape, self.local)
        self._passes = passes(shape, self.local)
        self._at: Segment | None = None  # the loop at hand
        self.accumulated: dict[str, list[Reduction]] = {}  # of members that reduce serial loops
        self.exchange = Exchange()
        self.repeated: Axis | None = None  # the last row of which stands for those beyond it
        self._forwards: dict[Axis, bool] = {}  # which way the last loop over an axis ran
        self.back = group.back
        self.first = self._way("tl.program_id(0)", "tl.num_programs(0)")  # which program this is

    # ---- facts

    def _is_narrow(self) -> bool:
        """Whether 32-bit indices do; what depends on unbounded sizes is assumed and reported."""
        touched = {b for m in self.shape.members for b in m.reads | m.writes}
        self.assume = index_width.narrow(
            [e for m in self.shape.members for e in m.exprs],
            [a.extent for a in self.shape.axes],
            [self.buffers[b] for b in sorted(touched)],
            2 * max(b for c in self.configs for _, b in c.blocks),
        )
        return self.assume is not None

    def _is_full(self, axis: Axis) -> bool:
        """Whether every block of every configuration is inside the axis."""
        size = axis.size if axis.start is None else None
        if size and self.shape.ticketed and axis in self.shape.inner:
            count = self.shape.row_programs
            size = size // count if size % (rules.SHARED_ROW_PIECE.limit * count) == 0 else None
        return bool(size) and all(size % c.kwargs[axis.block] == 0 for c in self.configs)

    @property
    def _along(self) -> set[torch.dtype]:
        """The types of results that are no reductions: the order of sums shows in a reduction
        anyway."""
        found: set[torch.dtype] = set()
        for segment, axis in self.shape.segments:
            folded = bool(self.shape.inner) and axis is None
            found |= {self.buffers[b].dtype for m in segment.members
                      if not (folded or m.reduce or accumulates(m, self.shape.serial))
                      for b in m.writes if b not in self.local}  # fmt: skip
        return found

    @property
    def _takes_turns(self) -> bool:
        return self.shape.ticketed and not self.last_finishes

    @property
    def work(self) -> int:
        """Likely points of all its axes."""
        return math.prod(a.likely for a in self.shape.axes)

    @cached_property
    def _draws(self) -> bool:
        return any(e.op in RANDOM for e in self.shape.nodes)

    def _is_narrowest(self, axis: Axis) -> bool:
        """Whether some configuration has blocks too short for a counter of random numbers."""
        return any(c.kwargs[axis.block] < 4 for c in self.configs)

    def _piece(self, axis: Axis) -> int:
        """The largest block of a parallel axis, if it is a part of what some place is divided by:
        the quotient is one number for a program then, and what it finds there is one load."""
        if axis.start is not None or self.packed is not None or self.shape.staged:
            return 0
        largest = max(c.kwargs[axis.block] for c in self.configs)
        cut = (n for n in self.shape.nodes if n.op == "ifloordiv" and n.src[0] is axis.var)
        return largest if any((ix.value_of(n.src[1]) or 1) % largest == 0 for n in cut) else 0

    # ---- naming

    def _name(self, e: Expr) -> str:
        if e.op == "var":
            return str(e.arg)
        return self.arguments.number(e)

    def pointer(self, buffer: str) -> str:
        return self.arguments.pointer(buffer)

    def _check(self, bad: str, node: Expr) -> None:
        """Report a bad position, wherever the tile is inside its axes."""
        self.checked = True
        mask = self.w.mask(self.w.covered(self.w.support(node)), bad)
        self.w.line(f"tri.report(err, {mask}, {BAD_INDEX})")

    def outside(self) -> Writer:
        """For lines around this kernel, where nothing it computes is known."""
        return Writer([], 1, self.w.index_type, self._name, self.load, self._check)

    # ---- the whole kernel

    def generate(self, name: str) -> TritonKernel:
        self.body()
        return self.whole(name, self.w.lines)

    def either(self, walked: Kernel, name: str) -> TritonKernel:
        """This kernel, which holds rows, and one that walks them, as one text: a configuration says
        which it is."""
        walked.arguments = self.arguments
        self.body()
        walked.body()
        self.checked = self.checked or walked.checked
        lines = ["    if HELD:", *("    " + line for line in self.w.lines),
                 "    else:", *("    " + line for line in walked.w.lines)]  # fmt: skip
        return self.whole(name, lines)

    def body(self) -> None:
        self._programs()
        if self.shape.serial:
            self._serial()
        else:
            self._segments()
        if self.exchange.meetings:
            end(self)

    def whole(self, name: str, lines: Sequence[str]) -> TritonKernel:
        full = f"triton_{self.shape.family}_fused_{name}".rstrip("_")
        params = params_of(self)
        names = [p.argument for p in params]
        head = [*names, *(["err"] if self.checked else []),
                *(f"{b}: tl.constexpr" for b, _ in self.configs[0].constants)]  # fmt: skip
        text = "\n".join([*imports(lines), "", "", "@triton.jit",
                          f"def {full}({', '.join(head)}):", *lines]) + "\n"  # fmt: skip
        grid = [(ix.add(a.extent, a.slack), a.block) for a in self.shape.parallel]
        if self.staged is not None:
            grid = self.staged.grid
        if self.shape.row_programs:
            grid.append((ix.as_index(self.shape.row_programs), "1"))
        rows = self.shape.parallel[0].size or 0
        return TritonKernel(text, full, params, tuple(grid), self.configs[0], self.configs,
                            self.checked, tuple(self.assume or ()), self.early, self.joins,
                            2 * self.exchange.cells * rows * self.shape.row_programs,
                            rows + self._takes_turns if self.exchange.meetings else 0,
                            self.shape.ticketed)  # fmt: skip

    def _programs(self) -> None:
        """Which block of each axis is this program's: the last parallel axis runs fastest, or the
        first."""
        w = self.w
        first = self.first
        if self._takes_turns:
            rows = self.shape.parallel[0].size or 0
            total = rows * self.shape.row_programs
            first = self._way(f"tri.ticket({COUNTERS} + {rows}, {total})", str(total))
        w.begin(first, self.early)
        if self.shape.row_programs:
            w.line(f"part = pid % {self.shape.row_programs}")
            w.line(f"pid = pid // {self.shape.row_programs}")
            w.line("spot = pid")
            if self.chunked is not None:
                self.chunked.place()
        if self.staged is not None:
            self.staged.columns()
        axes = () if self.staged is not None else self.shape.parallel
        order = -1 if rows_first(self.buffers, self.shape, self.target) else 1
        for k, axis in reversed(list(enumerate(axes[::order]))):
            rows = "" if self.packed is None else self.packed.rounded
            w.line(f"{axis.name}numel = {w.index(axis.extent)}{rows}")
            at = "pid"
            if k:
                lanes = f"{axis.name}numel + {axis.slack}" if axis.slack else f"{axis.name}numel"
                w.line(f"{axis.name}blocks = ({lanes} + {axis.block} - 1) // {axis.block}")
                at = f"(pid % {axis.name}blocks)"
            first = f"{at} * {axis.block}"
            draws, piece = self._draws and not self._is_narrowest(axis), self._piece(axis)
            if draws or piece:
                w.line(f"{axis.name}first = {first}")
                first = f"{axis.name}first"
            if draws:
                w.blocks.starts[axis] = first
            if piece:
                w.blocks.programs[axis] = first, piece
            w.line(f"{axis.name}base = {first} + {self.lanes(axis)}")
            self.interleaved.begin(axis, at)
            if axis.start is not None:
                w.line(f"{axis.name}block = {at}")
            if k:
                w.line(f"pid = pid // {axis.name}blocks")
            if axis.start is None:
                self._enter(axis, f"{axis.name}base")
        for axis in self.shape.inner:
            w.line(f"{axis.name}numel = {w.index(axis.extent)}")
            w.line(f"{axis.name}base = {self.lanes(axis)}")
            if self._draws and not self._is_narrowest(axis):
                w.blocks.starts[axis] = "0" if self.shape.persistent else f"{axis.name}offset"
            if self.shape.persistent and axis.start is None and self.chunked is None:
                self._enter(axis, f"{axis.name}base")
            elif not self.shape.persistent and self.walk is None:
                self._span(axis)
        for form in (self.peeled, self.packed, self.chunked, self.staged):
            if form is not None:
                form.begin()

    def _way(self, number: str, count: str) -> str:
        return f"({count} - 1 - {number})" if self.back else number

    def _span(self, axis: Axis) -> None:
        """From where to where this program walks a row: all of it, or whole blocks; in turn, as
        much as the others."""
        w, a, count = self.w, axis.name, self.shape.row_programs
        if not count:
            w.line(f"{a}first, {a}last = 0, {a}numel")
            if (limit := self.shape.limit(axis)) is not None:
                w.line(f"{a}limit = tl.minimum({a}numel, {w.index(limit)})")
                w.line(f"{a}last = tl.reduce({a}limit, None, tri.maximum)")
            return
        step = str(rules.SHARED_ROW_PIECE.limit) if self.shape.ticketed else axis.block
        each = f"({a}numel + {count} * {step} - 1) // ({count} * {step}) * {step}"
        w.line(f"{a}first = part * ({each})")
        w.line(f"{a}last = tl.minimum({a}first + {each}, {a}numel)")

    def lanes(self, axis: Axis, count: str = "") -> str:
        where = ", ".join(":" if d == axis.dim else "None" for d in range(self.shape.rank))
        lanes = f"tl.arange(0, {count or axis.block})"
        return lanes + (f"[{where}]" if self.shape.rank > 1 else "")

    def _enter(self, axis: Axis, place: str) -> None:
        """The points of a block of an axis."""
        if axis.loops:
            self.w.know(axis.var, place)
        if axis in self.w.masked:
            sooner = [f"(({self.w.index(e)}) < 0)" for e in self._ends.get(axis, ())]
            partly = self.shape.ticketed and axis in self.shape.inner
            end = f"{axis.name}last" if partly else f"{axis.name}numel"
            inside = " & ".join([f"({place} < {end})", *sooner])
            self.w.line(f"{axis.name}mask = {inside}")

    # ---- segments

    def _segments(self) -> None:
        online = self._joined
        if self.prefetch is not None:
            self.prefetch.begin()
        for node in self.w.numerics.seldom:  # none of them waits for another
            self.w.operand(node.src[0])
        for node in () if self.last_finishes else early_loads(self.shape, self.local):
            self.w.operand(node)
        lean = self.peeled if self.peeled and self.peeled.axis in self.shape.parallel else None
        if lean and not lean.slid_rows:
            lean.tile()
        for k, (segment, axis) in enumerate(self.shape.segments):
            if axis is not None and self.chunked is not None:
                self.chunked.segment(k, segment)
            elif axis is None or self.shape.persistent:
                self._straight(segment, axis)
            elif k in online:
                for pair in online[k].pairs:
                    self.online[pair.total].finish(pair.total)
                self.stores([m for m in segment.members if m.reduce])
            else:
                pairs = [p for j in online.values() if j.first == k for p in j.pairs]
                self._looped(segment, axis, pairs)
        if lean and lean.slid_rows:  # after what is found where it was read: that takes longest
            lean.tile()

    def _serial(self) -> None:
        """The segments again and again, with accumulators around them."""
        w = self.w
        waiting = [m for m in self.shape.members if accumulates(m, self.shape.serial)]
        axes = {m.name: axis for s, axis in self.shape.segments for m in s.members}
        for m in waiting:
            axis = axes[m.name] if m.name in self.shape.total else None
            self.accumulated[m.name] = list(reductions_of([m], axis, w).values())
            for fold in self.accumulated[m.name]:
                fold.begin()
        self._before()
        with ExitStack() as loops:
            for k, v in enumerate(self.shape.serial):
                last = k == len(self.shape.serial) - 1
                rounds = self.loop(f"0, {self._rounds(v)}") if last else (
                    f"range(0, {self._rounds(v)})")  # fmt: skip
                loops.enter_context(w.block(f"for s{k}offset in {rounds}"))
                w.know(v, w.let(f"tl.full([1, 1], 0, {w.index_type}) + s{k}offset", "s_"))
            self._begin_round()
            self._segments()
        for m in waiting:
            w.folds_keep_rows(m.name not in self.shape.total)
            for fold in self.accumulated[m.name]:
                fold.end()
            self.stores([m])

    def _before(self) -> None:
        """Rows that are the same in all rounds of the serial loops, as a layer's weights, are
        loaded before them."""
        for node in self._first_loads():
            if not any(n in self.shape.serial for n in walk(node)):
                self.w.operand(node)

    def _begin_round(self) -> None:
        """All of a row is in flight before its first reduction, what it has one number of first."""
        for node in sorted(self._first_loads(), key=lambda e: len(self.w.support(e.src[0]))):
            self.w.operand(node)

    def _first_loads(self) -> list[Expr]:
        return first(self.shape, loads(*(e for m in self.shape.members for e in m.exprs)))

    def _rounds(self, v: Expr) -> str:
        """How often a serial loop runs: a scalar, also where it depends on the program."""
        w = self.w
        x = self.shape.parallel[0]
        size = substitute(v.src[0], x.places())
        if not w.support(size):
            return w.index(size)
        return f"tl.reduce({w.value(size)}, None, tri.maximum)"  # of the one row of a block

    def _straight(self, segment: Segment, axis: Axis | None) -> None:
        """A segment at once: no loops, or loops that fit in one block."""
        w = self.w
        reducing = [m for m in segment.members if m.reduce]
        folds = {} if axis is None else reductions_of(reducing, axis, w)
        self._have_ends(axis, folds)
        whole = self.peeled is None or self.peeled.axis is not axis
        back = self.shape.reverse_scan
        scans = [] if axis is None else scans_of(segment.members, axis, w, back, whole)
        for m in segment.members:
            if m.name in self.accumulated:
                for fold in self.accumulated[m.name]:
                    fold.step()
                continue
            for node in walk(*m.exprs):
                if node in folds:
                    reduce_whole(node, folds)
            for scan in scans:
                if scan.node not in set(walk(*m.exprs)):
                    continue
                if self.peeled is not None and self.peeled.axis is axis:
                    scan.with_ends(self.peeled.ends)
                else:
                    scan.step(carried=False)
            if some := some_rows(m, self.shape, w):
                with w.block(f"if {some}"):
                    self.stores([m])
                continue
            if self.packed is None or not self.packed.stores(m):
                self.stores([m])
            if self.peeled is not None and self.peeled.axis is axis and not m.reduce:
                self.peeled.store_ends([m])

    def _have_ends(self, axis: Axis | None, folds: Mapping[Expr, Reduction]) -> None:
        if self.peeled is None or self.peeled.axis is not axis:
            return
        for fold in folds.values():
            fold.ends = self.peeled.ends

    def _looped(self, segment: Segment, axis: Axis, pairs: Sequence[Pair | Weighted]) -> None:
        w = self.w
        self._at = segment
        folds = reductions_of(segment.members, axis, w)
        for node, fold in folds.items():
            if isinstance(fold, Welford) and fold.counted:
                fold.together = self._together(node, axis)
        for pair in pairs:
            if isinstance(fold := folds[pair.largest], OnlineReduction):
                self.online[pair.total] = fold
                fold.join(pair)
            else:
                folds[pair.largest] = self.pair(pair, fold, axis)
        for node, fold in folds.items():
            if pairs and type(fold) is Reduction and not self.shape.across:
                fold.beside = self._together(node, axis)
        self._have_ends(axis, folds)
        scans = scans_of(segment.members, axis, w, self.shape.reverse_scan)
        for item in (*folds.values(), *scans):
            item.begin()
        self._hoist(segment, axis)
        self.w.barriers.before_loop(segment.members)
        if self.walk is not None and self.shape.row_programs:
            self.walk.meet(*scans)
        if self.staged is not None:
            self.staged.walk(lambda: self._steps(segment, folds, scans))
            self.staged.end(list(folds.values()))
        elif self.peeled is not None and self.peeled.axis is axis:
            self.peeled.walk(self._is_back(segment, axis), lambda: self._steps(
                segment, folds, scans))  # fmt: skip
            self.peeled.store_ends(segment.members)
        else:
            back = self._is_back(segment, axis)
            place = self._round(axis, back)
            w.blocks.rounds[axis] = place, w.blocks.rounds[axis][1]
            if axis in w.blocks.starts:
                w.blocks.starts[axis] = place
            everywhere, index = w.masked, f"{place} + {axis.name}base"
            if axis in everywhere and not pairs and may_repeat(self.shape, segment, axis):
                self.repeated = axis
                index = f"tl.minimum({index}, {axis.name}last - 1)"
            moments = any(isinstance(fold, Welford) for fold in folds.values())
            for loop, masked in self._bounds(axis, back, self.shape.across and not moments):
                w.masked = everywhere if masked else everywhere - {axis}
                with w.block(f"for {axis.name}offset in {loop}"):
                    if self.prefetch is not None and not masked:
                        self.prefetch.enter()
                    w.line(f"{axis.name}index = {index}")
                    self._enter(axis, f"{axis.name}index")
                    self._steps(segment, folds, scans)
            w.masked, self.repeated = everywhere, None
        self._at = None
        if self.shape.row_programs and folds:
            meet(self, list(folds.values()))
        else:
            for fold in folds.values():
                fold.end()
        self.stores([m for m in segment.members if m.reduce])

    def _steps(self, segment: Segment, folds: Mapping[Expr, Reduction], scans: Sequence[Scan]
               ) -> None:  # fmt: skip
        """One round of a loop."""
        waiting = dict(folds)
        for m in segment.members:
            for node in walk(*m.exprs):
                if node in waiting:
                    waiting.pop(node).step()
            for scan in scans:
                if scan.node in set(walk(*m.exprs)):
                    scan.step(carried=True)
            if not m.reduce:
                self.stores([m])

    def pair(self, pair: Pair | Weighted, largest: Reduction, axis: Axis) -> OnlineReduction:
        """What folds a pair in place of its largest value: of as many neighbours as a thread loads
        at once, for others it would have to be told."""
        wide = all(n.dtype.itemsize == 4 and n.arg not in self.local for n in loads(pair.largest)
                   if axis.var in free_vars(n.src[0]))  # fmt: skip
        apart = self._apart(pair.largest, axis)
        side = apart or (rules.SOFTMAX_SIDE.limit // 2 if wide else rules.SOFTMAX_SIDE.limit)
        self.online[pair.total] = fold = OnlineReduction(pair, largest, self.w, side, bool(apart))
        return fold

    def _together(self, node: Expr, axis: Axis) -> ThreadLanes:
        """Where memory runs across, a block has sixteen rows of pairs."""
        if self.shape.across:
            rows = min(rules.WELFORD_LANES.limit, *(c.kwargs[axis.block] for c in self.configs))
            return ThreadLanes((f"{axis.block} // {rows}", str(rows)), 0)
        wide = max((n.dtype.itemsize for n in loads(node)), default=4)
        side = rules.SOFTMAX_SIDE.limit if self._apart(node, axis) else max(1, 16 // wide)
        rest, own = f"{axis.block} // {side}", str(side)
        apart = self._apart(node, axis)
        return ThreadLanes((own, rest), 0) if apart else ThreadLanes((rest, own), 1)

    def _apart(self, fold: Expr, axis: Axis) -> int:
        """A thread has neighbours of a row where they are loaded together, sixteen bytes at
        once; of a row that is misaligned it has every so many-th element. Lengths that are not
        known are taken to be as even as they were (H200: losses of 10000 rows of 16384 bfloat16
        of any length 1413 us otherwise)."""
        if self.shape.across:
            return rules.SOFTMAX_ROWS.limit
        for n in loads(fold):
            if axis.var not in free_vars(n.src[0]) or (
                self.peeled is not None and (self.peeled.steps(n.src[0]) or self.peeled.slides(n))
            ):  # fmt: skip
                continue
            first = substitute(n.src[0], {axis.var: ix.ZERO})
            known = ix.mod(ix.mul(first, n.dtype.itemsize), 16) is ix.ZERO
            if not known and not (syms(first) and begin_evenly(first, 16)):
                return rules.SOFTMAX_SIDE.limit
        return 0

    def _round(self, axis: Axis, back: bool) -> str:
        """Where a block of a loop begins. Every other loop over a row runs back, where the order
        does not matter: what the one before it read last is still in cache."""
        a = axis.name
        if not back:
            return f"{a}offset"
        blocks = f"({a}last - {a}first + {axis.block} - 1) // {axis.block}"
        self.w.line(f"{a}end = {a}first + ({blocks} - 1) * {axis.block}")
        return f"({a}first + {a}end - {a}offset)"

    def _bounds(self, axis: Axis, back: bool, whole: bool) -> list[tuple[str, bool]]:
        """The loops over a row, and whether their blocks may go beyond its end. Of rows in memory
        all blocks but the last have a loop without masks (H200: training's cross entropy of 32000
        bfloat16 131 us, 148 us with them everywhere; var of columns of 30849 bfloat16, 6144 of
        them, 92 us, 118 us), if there is not to be one for the `whole`."""
        a, block = axis.name, axis.block
        masked = axis in self.w.masked and axis is not self.repeated
        apart = self.shape.row_programs and not self.shape.ticketed
        sooner = axis in self._ends and (back or self.shape.limit(axis) is None)
        if not masked or sooner or apart or whole:
            return [(self.loop(f"{a}first, {a}last, {block}"), masked)]
        length = f"({a}last - {a}first)"
        if axis in self._ends:
            length = f"tl.maximum(tl.reduce({a}limit, None, tri.minimum), 0)"
        if not back:
            self.w.line(f"{a}full = {a}first + {length} // {block} * {block}")
            rest = f"{a}full, {a}last, {block}"
            return [(self.loop(f"{a}first, {a}full, {block}"), False),
                    (f"range({rest})" if self.shape.across else self.loop(rest), True)]  # fmt: skip
        rest = f"({length} % {block} + {block} - 1) // {block} * {block}"
        self.w.line(f"{a}rest = {a}first + {rest}")
        return [(self.loop(f"{a}first, {a}rest, {block}"), True),
                (self.loop(f"{a}rest, {a}last, {block}"), False)]  # fmt: skip

    def _is_back(self, segment: Segment, axis: Axis) -> bool:
        """Whether the next loop over an axis runs back. Of columns that programs walk side by side
        the first one does too, where what the kernel before it read last is still in cache."""
        if self.shape.reverse_scan:
            return True
        forwards = self._forwards.get(axis, self.back and self.shape.across)
        ordered = any(n.op == "scan" or (n.op == "reduce" and n.arg.kind in IN_ORDER)
                      for m in segment.members for n in walk(*m.exprs))  # fmt: skip
        self._forwards[axis] = not forwards or ordered
        return not self._forwards[axis]

    def loop(self, bounds: str) -> str:
        if self.shape.unrolled:
            return f"tl.static_range(0, {self.shape.inner[0].size})"
        stages = ", num_stages=STAGES"
        return f"tl.range({bounds}{stages})" if self.shape.pipelined else f"range({bounds})"

    def _hoist(self, segment: Segment, axis: Axis) -> None:
        """Load before a loop what is the same in all its rounds."""
        for node in loads(*(e for m in segment.members for e in m.exprs)):
            fixed = axis.var not in free_vars(node)
            if fixed and node.arg not in self.local and node.arg not in self.rewritten:
                self.w.operand(node)

    # ---- memory

    def load(self, node: Expr) -> str | Load:
        w = self.w
        if node.arg in self.local:  # a row made in an earlier loop is computed again
            if len(node.src) > 1:
                text = w.operand(load(node.arg, node.dtype, node.src[0]))
                return f"tl.where({w.operand(node.src[1])}, {text}, 0)"
            maker = self.maker(node)
            return cast(w.operand(maker.value), maker.value.dtype, node.dtype)
        if both := self.interleaved.load(node):
            return both
        if self.packed is not None and (rows := self.packed.load(node)):
            return rows
        if self.peeled is not None and (rows := self.peeled.alike(node)):
            return rows
        support = w.covered(w.support(*node.src))
        axis = common(self, node, support)
        one = len(node.src) == 1 and node.src[0].is_const
        covered = all(c.covers(a.block for a in support) for c in self.configs)
        spread = w.covered(w.support(node.src[0])) != support  # by its mask, over what has one
        # not as tiles are stored
        alone = one or axis is not None or self._one_per_row(support) or not covered or spread
        self.w.barriers.before_load(node.arg, None if alone else node.src[0])
        if axis is not None:
            return load_pieces(self, node, axis)
        if one:  # loaded once, not once for each element
            text = f"tl.load({self.pointer(node.arg)} + {w.index(node.src[0])})"
            return f"tl.full({w.shape(NOWHERE)}, {text}, {TYPE[node.dtype]})"
        place = w.spread(w.index(node.src[0]), w.support(node.src[0]), support)
        conditions = [w.operand(s) for s in node.src[1:]]
        mask = w.mask(support, *conditions) if conditions or not w.wraps(node.src[0]) else ""
        policy = self._policy(node, support)
        if self._one_per_row(support):
            block = next((a.block for a in support), "1")
            if conditions and support and not support & w.masked:  # perhaps the same of all rows
                mask = f"tl.broadcast_to({mask}, {w.shape(support)})"
            masked = f", tl.reshape({mask}, [{block}]), other=0" if mask else ""
            place = f"tl.reshape({place}, [{block}])"
            return f"tl.load({self.pointer(node.arg)} + {place}{masked}{policy})[:, None]"
        if self.peeled is not None:
            if slid := self.peeled.slid(node, self.pointer(node.arg), mask):
                return slid
            place = self.peeled.place(node.src[0]) or place
        if self.walk is not None and self.walk.may_be_whole(mask):
            return self.walk.load(f"{self.pointer(node.arg)} + ({place})", node.src[0])
        return Load(address(self, node.arg, node.src[0], place), mask, policy)

    def _one_per_row(self, support: Support) -> bool:
        """Whether a load has one value for each row of a tile. As a column beside wide rows every
        thread would load it for each of its elements (Triton 3.6); a load of its own does not. In
        loops that run ahead a column is fetched ahead."""
        fetched = self.shape.pipelined or self.shape.rank != 2
        return not fetched and all(a.dim == 0 for a in support)

    def _policy(self, node: Expr, support: Support) -> str:
        """Rows read again by a later loop are asked to stay in cache until the last one has read
        them (H200: log softmax of 50257 bfloat16 542 us, 588 us if they stay for longer)."""
        if self.shape.persistent or self._at is None or not self._walks(support):
            return ""
        readers = [s for s in self._passes if node.arg in self._behind(s)]
        if len(readers) < 2:
            return ""
        done = self._at is readers[-1] and self.shape.parallel[0] in support
        return f', eviction_policy="evict_{"first" if done else "last"}"'

    def _walks(self, support: Support) -> bool:
        return any(a in support for a in self.shape.inner)

    def _behind(self, segment: Segment) -> set[str]:
        """The buffers a loop reads, also for rows it computes again."""
        found: set[str] = set()
        waiting = [m.reads for m in segment.members]
        while waiting:
            new = waiting.pop() - found
            found |= new
            waiting += [m.reads for m in self.shape.members if m.writes & new & self.local]
        return found

    def maker(self, node: Expr) -> Store:
        return next(s for s in self.shape.stores if s.buffer == node.arg and s.index is node.src[0])

    def stores(self, members: Sequence[Nest]) -> None:
        for m in members:
            for store in m.stores:
                if scatters(m):
                    write_scatter(self, store, self._walked(m))
                else:
                    self._store(store)

    def value(self, store: Store) -> str:
        """What is stored, in the buffer's type."""
        dtype = self.buffers[store.buffer].dtype
        return cast(self.w.operand(store.value), store.value.dtype, dtype)

    def _walked(self, nest: Nest) -> Support:
        """The part of the tile that the points of a nest are."""
        return frozenset(a for a in self.shape.axes if any(v in a.loops for v in nest.loops))

    def place(self, store: Store, points: Support = NOWHERE) -> tuple[str, Support]:
        """The addresses a store goes to, and the part of the tile they are over: all that changes
        where it goes or what it is, and the points given."""
        w = self.w
        have = w.support(store.index)
        want = w.covered(points | w.support(*store.exprs))
        text = w.spread(w.index(store.index), have, want)
        text = (self.peeled.place(store.index) if self.peeled is not None else "") or text
        return address(self, store.buffer, store.index, text), have | want

    def _store(self, store: Store) -> None:
        w = self.w
        value = self.value(store)
        if value != w.known(store.value):
            value = w.let(value)
        if store.buffer in self.rewritten:
            w.forget(store.buffer)
        known = self._loads_of(store)
        have, want = w.support(store.value), w.support(store.index)
        read = value
        if known and not want <= have:  # what reduces it counts its elements
            read = w.let(f"tl.broadcast_to({value}, {w.shape(want | have)})")
        for node in known:
            w.know(node, read)
        if store.buffer in self.local or self.interleaved.store(store, value):
            return
        if self.staged is not None and self.staged.stores(store, value):
            return
        self.w.barriers.before_store(store.buffer, store.index)
        place, support = self.place(store)
        mask = w.mask(support)
        # rows that are to be read again shall stay in cache, not those that are written
        again = self._at is not None and self.shape.reread and self._walks(support)
        policy = ', eviction_policy="evict_first"' if again else ""
        text = f"tl.store({place}, {value}{', ' + mask if mask else ''}{policy})"
        if self.walk is not None and self.walk.may_be_whole(mask):
            self.walk.store(place, value, store.index)
            return
        if self.shape.row_programs and store.buffer in self.rewritten and not self._walks(support):
            self.exchange.waiting.append(text)
        else:
            w.line(text)

    def _loads_of(self, store: Store) -> list[Expr]:
        """Whole ones: from them come those of a local buffer that have a mask."""
        return [load(n.arg, n.dtype, n.src[0]) for n in self.shape.loads
                if n.arg == store.buffer and n.src[0] is store.index
                and (len(n.src) == 1 or n.arg in self.local)]  # fmt: skip
