"""Products with a size that is known only at run time: measured at several sizes, each range of
which has its own kernel.

Powers of two are tuned, each as a problem of its own. Whoever wins one of them then meets the other
winners and the library at every power of two, in between and at the size the graph was traced with;
ranges are joined where that loses less than two percent. Nothing is compiled when sizes change: the
host program compares numbers. A size that is measured says what those below it cost, down to the
next: the blocks a kernel computes are as many. Between a size where the library wins and another
the library stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tilewright import config
from tilewright.errors import NoValidChoicesError
from tilewright.gemm.fuse import Fusion, Site
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Candidate, Kernel
from tilewright.gemm.roofline import buffer_bytes, roofline
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, syms
from tilewright.ir.show import number
from tilewright.tune.memory import room

MOST_KERNELS = 6  # of one product
LOSS = 0.02  # of the time, for which ranges are joined
DOUBT = 0.01  # by so much the library may seem faster than who is taken in its place
LARGEST = 16384  # what is tuned; larger ones are cut into as many blocks as fill any card
TUNED = (1, 4)  # and powers of two from 16 on: below, a kernel's block is hardly ever full
LONGEST = 20_000.0  # microseconds of a product: of longer ones more rows are only more of the same
PART = 4  # of the memory there is, that the operands of the largest may take


@dataclass(frozen=True)
class Driver:
    """The one size that is not known, and between what it is."""

    size: Expr  # a symbol, or an expression of several
    low: int
    high: int | None

    def at(self, value: int) -> dict[str, int]:
        """Sizes of the symbols of which this size is about so large."""
        found = {s.arg.name: max(1, s.arg.lower or 0) for s in syms(self.size)}
        last = max(syms(self.size), key=lambda s: (s.arg.hint or 64, s.arg.name)).arg.name
        low, high = found[last], value
        while low < high:  # the largest of which it is not larger
            middle = (low + high + 1) // 2
            fits = ix.evaluate(self.size, {**found, last: middle}) <= value
            low, high = (middle, high) if fits else (low, middle - 1)
        return {**found, last: low}

    @property
    def hint(self) -> int:
        return ix.likely(self.size)


def driver(problem: GemmProblem) -> Driver | None:
    """The size that decides, if it is a single one."""
    unknown = {e for e in problem.sizes if ix.value_of(e) is None}
    symbols = syms(*unknown)
    if len(symbols) == 1:
        (size,) = symbols
    elif len(unknown) == 1:
        (size,) = unknown
    else:
        return None
    low, high = ix.bounds(size)
    most = None if high == float("inf") else int(high)
    found = Driver(size, max(1, int(low) if low > 0 else 1), most)
    return None if most is not None and most <= found.low else found


@dataclass(frozen=True)
class Point:
    """A size that is measured."""

    value: int
    symbols: tuple[tuple[str, int], ...]  # and their values


def points(problem: GemmProblem, by: Driver) -> tuple[list[Point], list[Point]]:
    """Those that are tuned, and those at which the winners meet."""
    tuned, met = list[Point](), list[Point]()
    for value, is_tuned in _values(by):
        symbols = by.at(value)
        with ix.supposing(symbols):
            size = sum(map(buffer_bytes, problem.buffers))
            too_much = PART * size > room(problem.buffers[0].device)
            beyond = too_much or roofline(problem) > LONGEST
        if beyond and (met or tuned):
            break
        point = Point(ix.evaluate(by.size, symbols), tuple(symbols.items()))
        met += [] if met and met[-1].value >= point.value else [point]
        tuned += [point] if is_tuned and (not tuned or tuned[-1].value < point.value) else []
    return tuned, met


def _values(by: Driver) -> Iterator[tuple[int, bool]]:
    """Rising; whether each is tuned."""
    most = max(LARGEST, by.hint)
    most = most if by.high is None else min(most, by.high)
    powers = [1 << k for k in range(most.bit_length()) if by.low <= 1 << k <= most]
    between = [3 * p // 2 + 1 for p in powers if p >= 8 and 3 * p // 2 + 1 < most]
    ends = [by.low, *([by.high] if by.high is not None and by.high <= LARGEST else [])]
    tuned = {p for p in powers if p in TUNED or p >= 16} | {*ends}
    hint = [by.hint] if by.low <= by.hint <= most else []
    return ((v, v in tuned) for v in sorted({*powers, *between, *ends, *hint}))


# ---- the choice


@dataclass(frozen=True)
class Finalist:
    """A candidate that won somewhere, offered everywhere under a name of its own."""

    inner: Candidate
    name: str
    made_at: tuple[tuple[str, int], ...]  # the sizes that it was offered for
    estimate: float = 0.0  # none: it is to be measured

    @property
    def provider(self) -> str:
        return self.inner.provider

    @property
    def description(self) -> str:
        return self.inner.description

    @property
    def key(self) -> str:
        return self.inner.key

    def kernel(self) -> Kernel:
        with ix.supposing(dict(self.made_at)):
            return self.inner.kernel()


Offer = tuple[Fusion, Finalist]
Ranges = tuple[tuple[int, int | None], ...]


class Chooser(Protocol):
    """Of one site, for the sizes that are supposed at the moment."""

    site: Site
    complete: bool

    def found(self) -> tuple[Fusion, Candidate, str]: ...
    def timed(self) -> dict[str, float]: ...


@dataclass(frozen=True)
class Part:
    """Who computes a product of some sizes, and why."""

    fusion: Fusion
    candidate: Finalist
    ranges: Ranges
    why: str


@dataclass
class Question:
    """One product of many sizes. `chooser` gives what decides for the sizes supposed, of offers if
    there are any; `library` is what the others are compared with, where it takes part."""

    by: Driver
    problem: GemmProblem
    chooser: Callable[[Sequence[Offer]], Chooser | None]
    library: Candidate | None
    complete: bool = True

    def parts(self) -> list[Part]:
        tuned, met = points(self.problem, self.by)
        offers = self._winners(tuned)
        times = {p: self._meeting(p, offers) for p in met} if len(offers) > 1 else {}
        known = [p for p in met if times.get(p)]
        if not known:
            return [Part(*offers[0], ((0, None),), "it is the fastest at every size")]
        who = assigned([times[p] for p in known], _LIBRARY)
        parts = ranges([p.value for p in known], who, _LIBRARY)
        by_name = {offer[1].name: offer for offer in offers}
        return [Part(*by_name[name], where, self._told(name, where, known, times))
                for name, where in parts.items()]  # fmt: skip

    def _winners(self, tuned: Sequence[Point]) -> list[Offer]:
        """Of all sizes that are tuned, each once."""
        found: dict[tuple[str, str], Offer] = {}
        if self.library is not None:
            chooser = self.chooser(())
            assert chooser is not None
            bare = chooser.site.bare
            found[bare.problem.key, self.library.key] = bare, Finalist(self.library, _LIBRARY, ())
        for point in tuned:
            with ix.supposing(dict(point.symbols)):
                chooser = self.chooser(())
                if chooser is None:
                    continue
                fusion, candidate, _ = chooser.found()
                self.complete &= chooser.complete
                name = f"{candidate.name}_at_{point.value}"
                made = Finalist(candidate, name, point.symbols)
                found.setdefault((fusion.problem.key, candidate.key), (fusion, made))
        return list(found.values())

    def _meeting(self, point: Point, offers: Sequence[Offer]) -> dict[str, float]:
        """Microseconds of each at a size; nothing where nobody could be measured."""
        with ix.supposing(dict(point.symbols)), config.patch(autotune_effort="max"):
            chooser = self.chooser(offers)
            if chooser is None:
                return {}
            try:
                found = chooser.timed()
            except NoValidChoicesError:
                return {}
            self.complete &= chooser.complete
        return found

    def _told(self, name: str, where: Ranges, known: Sequence[Point],
              times: Mapping[Point, Mapping[str, float]]) -> str:  # fmt: skip
        size = number(self.by.size)
        spans = [f"{low} to {high}" if high is not None else f"{low} and more"
                 for low, high in where]  # fmt: skip
        held = (p for p in known for low, high in where
                if low <= p.value and (high is None or p.value <= high))  # fmt: skip
        mine = next(held)
        found = times[mine]
        shown = [f"{who} {found[who]:.3g} us" for who in sorted(found, key=lambda w: found[w])[:3]]
        return f"for {size} of {', '.join(spans)}; at {mine.value}: {', '.join(shown)}"


_LIBRARY = "library"


def union(site: Site, offers: Sequence[Offer]) -> Site:
    """The site with what any of these takes in."""
    fusions = {f.problem.key: f for f, _ in offers if f.problem.key != site.bare.problem.key}
    return replace(site, fusions=tuple(fusions.values())) if offers else site


Times = Mapping[str, float]  # microseconds of each that was measured at a size


def assigned(times: Sequence[Times], library: str) -> list[str]:
    """Who computes each size, so that changes are few. Nobody is taken who is slower than the
    library; where more than `MOST_KERNELS` would be needed, joining may lose more, up to any loss:
    sizes that have no kernel in common keep one each."""
    loss = LOSS
    while True:
        found = _fewest(times, library, loss)
        few = len(set(found)) <= MOST_KERNELS and len(list(runs(found))) <= 2 * MOST_KERNELS
        if few or math.isinf(loss):
            return found
        loss = 2 * loss if loss < 1 else math.inf


def _fewest(times: Sequence[Times], library: str, loss: float) -> list[str]:
    """With the fewest changes, and of these the least time lost."""
    best: dict[str, tuple[tuple[int, float], list[str]]] = {}
    for found in times:
        least = min(found.values())
        limit = (1 + DOUBT) * found.get(library, math.inf)
        made: dict[str, tuple[tuple[int, float], list[str]]] = {}
        for who, time in found.items():
            if time > (1 + loss) * least or (time > limit and who != library):
                continue
            ways = [((changes + (before != who), lost), path)
                    for before, ((changes, lost), path) in best.items()]  # fmt: skip
            (changes, lost), path = min(ways, key=lambda way: way[0], default=((0, 0.0), []))
            made[who] = (changes, lost + time / least - 1), [*path, who]
        best = made
    return min(best.values(), key=lambda found: found[0])[1]


def runs(found: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Of each that stays the same, the last place and who it is."""
    for k, who in enumerate(found):
        if k + 1 == len(found) or found[k + 1] != who:
            yield k, who


def ranges(values: Sequence[int], found: Sequence[str], library: str) -> dict[str, Ranges]:
    """Whose each size is, of all there are."""
    made: dict[str, list[tuple[int, int | None]]] = {}
    start = 0
    for last, who in runs(found):
        end: int | None = None
        if last + 1 < len(values):
            end = values[last + 1] - 1 if who == library else values[last]
        made.setdefault(who, []).append((start, end))
        start = 0 if end is None else end + 1
    return {who: tuple(parts) for who, parts in made.items()}
