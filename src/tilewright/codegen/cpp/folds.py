"""Accumulators of reductions and scans, in each of the forms a loop can need.

A fold is written in one of three ways: over chunks of a vectorised loop (a partial result per
chunk, so float32 sums stay accurate), over lanes (the vectorised loop is an outer one and each
lane folds its own), and over slots (a full reduction split among threads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tilewright.codegen.cpp.emit import Writer
from tilewright.codegen.cpp.text import CTYPE, combine, neutral
from tilewright.ir.build import part
from tilewright.ir.expr import Expr, walk
from tilewright.ir.ops import CALL, TABLE
from tilewright.ir.program import Nest
from tilewright.schedule.nests.segments import Segment

_CLAUSE = {"sum": "+", "prod": "*", "any": "|", "all": "&", "xor": "^", "max": "tw_max",
           "min": "tw_min"}  # fmt: skip


ARG_CHUNK = 512  # elements of a loop in which the place of an extreme is searched together

Lanes = int | str
"""Accumulators side by side: a few on the stack, or (given as text) any number on the heap."""


class Accumulator:
    """A fold with one plain value: sum, product, extremes, any, all."""

    def __init__(self, node: Expr, name: str) -> None:
        self.node = node
        self.name = name
        self.part = f"{name}_part"
        self.kind: str = node.arg.kind
        self.value = node.src[0]
        self.dtype = self.value.dtype
        self.ctype = "int" if self.kind in ("any", "all", "xor") else CTYPE[self.dtype]
        # chunks of a float sum are added up in double: the error stays that of one chunk
        wide = self.kind == "sum" and self.dtype == torch.float32
        self.total = "double" if wide else self.ctype
        self.owner = ""  # the nest that keeps it over serial loops

    def _neutral(self) -> str:
        return neutral(self.kind, self.dtype)

    def _combine(self, a: str, b: str) -> str:
        return combine(self.kind, a, b)

    def declare(self, w: Writer, lanes: Lanes) -> None:
        _declare(w, self.total, self.name, f"{self.total}({self._neutral()})", lanes)

    def finish(self, w: Writer, suffix: str) -> None:
        result = w.fresh()
        ctype = CTYPE[self.node.dtype]
        w.line(f"const {ctype} {result} = {ctype}({self.name}{suffix});")
        w.know(self.node, result)

    # over chunks

    def start_chunk(self, w: Writer) -> str:
        w.line(f"{self.ctype} {self.part} = {self._neutral()};")
        return self.clause()

    def clause(self) -> str:
        return f" reduction({_CLAUSE[self.kind]}:{self.part})"

    def second_stream(self) -> Accumulator:
        other = Accumulator(self.node, f"{self.name}_b")
        other.owner = self.owner
        return other

    def join(self, w: Writer, other: Accumulator) -> None:
        w.line(f"{self.part} = {self._combine(self.part, other.part)};")

    def step_chunk(self, w: Writer, loop: str) -> None:
        w.line(f"{self.part} = {self._combine(self.part, w.value(self.value))};")

    def end_chunk(self, w: Writer, loop: str) -> None:
        w.line(f"{self.name} = {self._combine(self.name, f'{self.total}({self.part})')};")

    # over lanes

    def start_lanes(self, w: Writer, lanes: Lanes) -> None:
        _declare(w, self.ctype, self.part, self._neutral(), lanes)

    def lane_parts(self) -> list[str]:
        """The arrays that `start_lanes` made."""
        return [self.part]

    def before_lanes(self, w: Writer) -> None:
        pass

    def step_lane(self, w: Writer) -> None:
        value = self._combine(f"{self.part}[lane]", w.value(self.value))
        w.line(f"{self.part}[lane] = {value};")

    def end_lanes(self, w: Writer, lanes: Lanes) -> None:
        value = self._combine(f"{self.name}[k]", f"{self.total}({self.part}[k])")
        w.line(f"for (int64_t k = 0; k < {lanes}; ++k) {self.name}[k] = {value};")

    # over slots

    def declare_slots(self, w: Writer, slots: int) -> None:
        w.line(f"{self.total} {self.name}_slots[{slots}];")

    def save_slot(self, w: Writer) -> None:
        w.line(f"{self.name}_slots[slot] = {self.name};")

    def combine_slots(self, w: Writer, slots: int) -> None:
        self.declare(w, 0)
        value = self._combine(self.name, f"{self.name}_slots[k]")
        w.line(f"for (int64_t k = 0; k < {slots}; ++k) {self.name} = {value};")

    # over slots of lanes

    def lane_states(self) -> list[tuple[str, str]]:
        """The arrays with a value per lane that make up a partial result, and their types."""
        return [(self.name, self.total)]

    def declare_lane_slots(self, w: Writer, slots: int) -> None:
        pass

    def save_lane_slot(self, w: Writer) -> None:
        pass

    def combine_lanes(self, w: Writer, slot: Callable[[str], str]) -> None:
        """Lane by lane with the partial result of one slot; `slot(array)` is its element `k`."""
        value = self._combine(f"{self.name}[k]", slot(self.name))
        w.line(f"for (int64_t k = 0; k < stop; ++k) {self.name}[k] = {value};")


class ArgAccumulator(Accumulator):
    """The position of an extreme: each chunk's extreme is found vectorised, then located."""

    def __init__(self, node: Expr, name: str) -> None:
        super().__init__(node, name)
        self.position = node.src[1]
        self.at = f"{name}_at"
        self.extreme = self.kind.removeprefix("arg")
        self.total = self.ctype = CTYPE[self.dtype]
        # a function computed for a vector need not give what it gives for one element
        calls = any(n.op in TABLE and TABLE[n.op].cost >= CALL for n in walk(self.value))
        self.kept = f"{name}_kept" if calls else ""  # the chunk's values

    def declare(self, w: Writer, lanes: Lanes) -> None:
        _declare(w, self.ctype, self.name, self._neutral(), lanes)
        _declare(w, "int64_t", self.at, "INT64_MAX", lanes)

    def finish(self, w: Writer, suffix: str) -> None:
        w.know(self.node, f"{self.at}{suffix}")

    def start_chunk(self, w: Writer) -> str:
        w.line(f"{self.ctype} {self.part} = {self._neutral()};")
        if self.kept:
            w.line(f"alignas(64) {self.ctype} {self.kept}[{ARG_CHUNK}];")
        return f" reduction(tw_{self.extreme}:{self.part})"

    def step_chunk(self, w: Writer, loop: str) -> None:
        value = w.value(self.value)
        if self.kept:
            w.line(f"{self.kept}[{loop} - chunk] = {value};")
        w.line(f"{self.part} = tw::{self.extreme}({self.part}, {value});")

    def end_chunk(self, w: Writer, loop: str) -> None:
        p, name, at = self.part, self.name, self.at
        takes = f"tw::{self.kind}_takes"
        with (w.block(f"if ({takes}({p}, INT64_C(0), {name}, {at}))"),
              w.block(f"for (int64_t {loop} = chunk; {loop} < stop; ++{loop})")):  # fmt: skip
            value = f"{self.kept}[{loop} - chunk]" if self.kept else w.value(self.value)
            with w.block(f"if ({value} == {p} || ({value} != {value} && {p} != {p}))"):
                position = w.value(self.position)
                with w.block(f"if ({takes}({p}, {position}, {name}, {at}))"):
                    w.line(f"{name} = {p}; {at} = {position};")
                w.line("break;")

    def start_lanes(self, w: Writer, lanes: Lanes) -> None:
        pass

    def lane_parts(self) -> list[str]:
        return []

    def step_lane(self, w: Writer) -> None:
        value, position = w.value(self.value), w.value(self.position)
        take = w.fresh()
        name, at = f"{self.name}[lane]", f"{self.at}[lane]"
        w.line(f"const bool {take} = tw::{self.kind}_takes({value}, {position}, {name}, {at});")
        w.line(f"{name} = {take} ? {value} : {name};")
        w.line(f"{at} = {take} ? {position} : {at};")

    def end_lanes(self, w: Writer, lanes: Lanes) -> None:
        pass

    def declare_slots(self, w: Writer, slots: int) -> None:
        w.line(f"{self.ctype} {self.name}_slots[{slots}];")
        w.line(f"int64_t {self.at}_slots[{slots}];")

    def save_slot(self, w: Writer) -> None:
        w.line(f"{self.name}_slots[slot] = {self.name}; {self.at}_slots[slot] = {self.at};")

    def combine_slots(self, w: Writer, slots: int) -> None:
        self.declare(w, 0)
        name, at = self.name, self.at
        with w.block(f"for (int64_t k = 0; k < {slots}; ++k)"):
            take = f"tw::{self.kind}_takes({name}_slots[k], {at}_slots[k], {name}, {at})"
            w.line(f"if ({take}) {{ {name} = {name}_slots[k]; {at} = {at}_slots[k]; }}")

    def lane_states(self) -> list[tuple[str, str]]:
        return [(self.name, self.ctype), (self.at, "int64_t")]

    def combine_lanes(self, w: Writer, slot: Callable[[str], str]) -> None:
        name, at = f"{self.name}[k]", f"{self.at}[k]"
        value, position = slot(self.name), slot(self.at)
        with w.block("for (int64_t k = 0; k < stop; ++k)"):
            w.line(f"const bool take = tw::{self.kind}_takes({value}, {position}, {name}, {at});")
            w.line(f"{name} = take ? {value} : {name}; {at} = take ? {position} : {at};")


class WelfordAccumulator(Accumulator):
    """Mean and squared deviations: two passes over each chunk (which is in cache), then merged."""

    def __init__(self, node: Expr, name: str) -> None:
        super().__init__(node, name)
        self.ctype = CTYPE[self.dtype]
        self.mean, self.m2, self.count = f"{name}_mean", f"{name}_m2", f"{name}_count"

    def declare(self, w: Writer, lanes: Lanes) -> None:
        _declare(w, "double", self.mean, "0", lanes)
        _declare(w, "double", self.m2, "0", lanes)
        w.line(f"double {self.count} = 0;")

    def finish(self, w: Writer, suffix: str) -> None:
        for k, source in enumerate((self.mean, self.m2)):
            result = w.fresh()
            w.line(f"const {self.ctype} {result} = {self.ctype}({source}{suffix});")
            w.know(part(self.node, k), result)

    def start_chunk(self, w: Writer) -> str:
        w.line(f"{self.ctype} {self.part} = 0;")
        return f" reduction(+:{self.part})"

    def step_chunk(self, w: Writer, loop: str) -> None:
        w.line(f"{self.part} += {w.value(self.value)};")

    def end_chunk(self, w: Writer, loop: str) -> None:
        with w.block(""):
            w.line(f"const {self.ctype} centre = {self.part} / {self.ctype}(stop - chunk);")
            w.line(f"{self.ctype} spread = 0, skew = 0;")
            w.line("#pragma omp simd reduction(+:spread, skew)")
            with w.block(f"for (int64_t {loop} = chunk; {loop} < stop; ++{loop})"):
                w.line("int tw_bad = 0;")
                w.line(f"const {self.ctype} away = {w.value(self.value)} - centre;")
                w.line("spread += away * away; skew += away;")
            # `skew` is what rounding of `centre` left over: take it out of both results
            w.line("const double more = double(stop - chunk);")
            w.line("const double exact = double(centre) + double(skew) / more;")
            w.line("const double around = double(spread) - double(skew) * double(skew) / more;")
            self._merge(w, "exact", "around", "more")

    def _merge(self, w: Writer, mean: str, m2: str, count: str) -> None:
        n = w.fresh("n_")
        w.line(f"const double {n} = {self.count} + {count};")
        with w.block(f"if ({n} > 0)"):
            w.line(f"const double apart = {mean} - {self.mean};")
            w.line(f"{self.mean} += apart * ({count} / {n});")
            w.line(f"{self.m2} += {m2} + apart * apart * {self.count} * ({count} / {n});")
            w.line(f"{self.count} = {n};")

    # lanes: sums of distances from the chunk's first value, which is near the mean as a rule

    def start_lanes(self, w: Writer, lanes: Lanes) -> None:
        for name in self.lane_parts():
            _declare(w, self.ctype, name, "0", lanes)
        w.line(f"int64_t {self.part}_count = 0;")

    def lane_parts(self) -> list[str]:
        return [f"{self.part}_from", f"{self.part}_sum", f"{self.part}_squares"]

    def before_lanes(self, w: Writer) -> None:
        w.line(f"const bool {self.part}_first = {self.part}_count++ == 0;")

    def step_lane(self, w: Writer) -> None:
        value, away, p = w.value(self.value), w.fresh(), self.part
        w.line(f"{p}_from[lane] = {p}_first ? {value} : {p}_from[lane];")
        w.line(f"const {self.ctype} {away} = {value} - {p}_from[lane];")
        w.line(f"{p}_sum[lane] += {away};")
        w.line(f"{p}_squares[lane] += {away} * {away};")

    def end_lanes(self, w: Writer, lanes: Lanes) -> None:
        p = self.part
        with w.block(""):
            w.line(f"const double more = double({p}_count), all = {self.count} + more;")
            with w.block(f"for (int64_t k = 0; k < {lanes}; ++k)"):
                w.line(f"const double shift = double({p}_sum[k]) / more;")
                # a running mean that has met an infinity is lost: eager says NaN, and so do we
                w.line("const double lost = shift - shift;")
                w.line(f"const double apart = {p}_from[k] + shift - {self.mean}[k] + lost;")
                w.line(f"{self.m2}[k] += double({p}_squares[k]) - shift * shift * more + "
                       f"apart * apart * {self.count} * (more / all);")  # fmt: skip
                w.line(f"{self.mean}[k] += apart * (more / all);")
            w.line(f"{self.count} = all;")

    def declare_slots(self, w: Writer, slots: int) -> None:
        for name in (self.mean, self.m2, self.count):
            w.line(f"double {name}_slots[{slots}];")

    def save_slot(self, w: Writer) -> None:
        for name in (self.mean, self.m2, self.count):
            w.line(f"{name}_slots[slot] = {name};")

    def combine_slots(self, w: Writer, slots: int) -> None:
        self.declare(w, 0)
        with w.block(f"for (int64_t k = 0; k < {slots}; ++k)"):
            self._merge(w, f"{self.mean}_slots[k]", f"{self.m2}_slots[k]", f"{self.count}_slots[k]")

    def lane_states(self) -> list[tuple[str, str]]:
        return [(self.mean, "double"), (self.m2, "double")]

    def declare_lane_slots(self, w: Writer, slots: int) -> None:
        w.line(f"double {self.count}_slots[{slots}];")

    def save_lane_slot(self, w: Writer) -> None:
        w.line(f"{self.count}_slots[slot] = {self.count};  // the same from every tile")

    def combine_lanes(self, w: Writer, slot: Callable[[str], str]) -> None:
        total, share = w.fresh("n_"), w.fresh("n_")
        more = f"{self.count}_slots[slot]"
        w.line(f"const double {total} = {self.count} + {more};")
        w.line(f"const double {share} = {total} > 0 ? {more} / {total} : 0;")
        with w.block("for (int64_t k = 0; k < stop; ++k)"):
            w.line(f"const double apart = {slot(self.mean)} - {self.mean}[k];")
            w.line(f"{self.m2}[k] += {slot(self.m2)} + apart * apart * {self.count} * {share};")
            w.line(f"{self.mean}[k] += apart * {share};")
        w.line(f"{self.count} = {total};")


class ScanAccumulator:
    """A running fold: updated in the loop, and read there."""

    def __init__(self, node: Expr, name: str) -> None:
        self.node = node
        self.name = name
        self.kind: str = node.arg.kind
        self.dtype = node.src[0].dtype
        self.ctype = CTYPE[self.dtype]
        # running float32 sums are kept in double, or thousands of roundings would add up
        wide = self.kind in ("sum", "prod") and self.dtype == torch.float32
        self.total = "double" if wide else self.ctype

    def declare(self, w: Writer, lanes: Lanes) -> None:
        start = {"logsumexp": "-__builtin_inff()"}.get(self.kind) or neutral(self.kind, self.dtype)
        _declare(w, self.total, self.name, start, lanes)
        if self.kind in ("min", "max"):
            _declare(w, "int64_t", f"{self.name}_at", "0", lanes)

    def step(self, w: Writer, suffix: str) -> None:
        name, value = f"{self.name}{suffix}", w.value(self.node.src[0])
        result = w.fresh()
        if self.kind in ("min", "max"):
            at, position = f"{self.name}_at{suffix}", w.value(self.node.src[1])
            sign = ">=" if self.kind == "max" else "<="
            take = w.fresh()
            w.line(f"const bool {take} = {value} {sign} {name} || {value} != {value};")
            w.line(f"{name} = {take} ? {value} : {name}; {at} = {take} ? {position} : {at};")
            w.line(f"const {self.ctype} {result} = {name};")
            w.line(f"const int64_t {result}_at = {at};")
            w.know(part(self.node, 0), result)
            w.know(part(self.node, 1, torch.int64), f"{result}_at")
            return
        if self.kind == "logsumexp":
            w.line(f"{name} = tw::logaddexp({name}, {value});")
        else:
            w.line(f"{name} = {combine(self.kind, name, f'{self.total}({value})')};")
        w.line(f"const {self.ctype} {result} = {self.ctype}({name});")
        w.know(self.node, result)


def _declare(w: Writer, ctype: str, name: str, start: str, lanes: Lanes) -> None:
    if not lanes:
        w.line(f"{ctype} {name} = {start};")
        return
    if isinstance(lanes, str):
        size = f"sizeof({ctype})*({lanes}) + 64"
        w.line(f"{ctype}* const {name} = ({ctype}*)__builtin_malloc({size});")
    else:
        w.line(f"alignas(64) {ctype} {name}[{lanes}];")
    w.line(f"for (int64_t k = 0; k < {lanes}; ++k) {name}[k] = {start};")


def accumulators(nests: Sequence[Nest], fresh: Callable[[str], str]) -> list[Accumulator]:
    """One accumulator per distinct `reduce` node of the nests."""
    found = [n for m in nests for n in walk(*m.exprs) if n.op == "reduce"]
    return [_accumulator(node, fresh("acc")) for node in dict.fromkeys(found)]


def scans_of(segment: Segment, fresh: Callable[[str], str]) -> list[ScanAccumulator]:
    found = [n for m in segment.members for n in walk(*m.exprs) if n.op == "scan"]
    return [ScanAccumulator(node, fresh("acc")) for node in dict.fromkeys(found)]


def _accumulator(node: Expr, name: str) -> Accumulator:
    kinds = {"welford": WelfordAccumulator, "argmax": ArgAccumulator, "argmin": ArgAccumulator}
    return kinds.get(node.arg.kind, Accumulator)(node, name)
