"""Plans: one or more kernels that compute a product with all that surrounds it, ready to be tried.

A plan is either a fused candidate alone, or a candidate for the product and the loop kernels it was
not fused with. All plans of one site write the same results, so they compete on the time of the
whole, and each is checked against what the library's plan computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright import config
from tilewright.gemm import analysis
from tilewright.gemm.analysis import Resources
from tilewright.gemm.aten import AtenCall
from tilewright.gemm.fuse import Fusion
from tilewright.gemm.problem import takes_tf32
from tilewright.gemm.provider import Argument, Candidate, CompiledSource, Kernel, Source
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer
from tilewright.runtime import cxx, launch, store, triton_build
from tilewright.runtime.cxx import CxxSource
from tilewright.runtime.triton_build import Built, TritonSource
from tilewright.tune import child, clock
from tilewright.tune.memory import room

Run = Callable[[int, int], None]  # (raw stream, which set of buffers)
MOST_BYTES = 16 << 30  # of all sets of buffers together
MOST_PLACED = 2 << 30  # of those that are only there to lie elsewhere
LARGEST_SETS = 16

# How far results may be from the library's, relative to the largest and to their own size: a few
# roundings of the product's dtype, with sums taken in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 8e-3, torch.bfloat16: 4e-2,
              torch.float8_e4m3fn: 0.13, torch.float8_e5m2: 0.26}  # fmt: skip
_TF32 = 1e-2
# Part of the elements that may be infinite or not a number on one side alone, where such are among
# the results at all: a logarithm of what is zero but for rounding.
FEW = 1e-6
# Elements that are compared at once on a CPU: as many stay in a cache, on one thread (20 million
# in bfloat16 in 0.5 s, whole in 2.2 s; on 2 cores that others use, threads wait for each other).
CACHED = 1 << 15
# Bytes behind every buffer, and what is in them: who writes there would overwrite somebody else's.
MARGIN, _UNTOUCHED = 4096, 0xA5


@dataclass(frozen=True)
class Part:
    """A kernel of a plan, called with buffers and symbols of the program."""

    source: Source
    arguments: tuple[Argument, ...]
    kernel: Kernel | None = None  # of a product: it may want memory of its own

    def started(self) -> Future[Any] | None:
        match self.source:
            case TritonSource():
                return triton_build.submit(self.source)
            case CxxSource():
                return cxx.submit([self.source]).futures[0]
            case CompiledSource():
                return self.source.submit()
            case _:
                return None

    def bound(self, built: Any, memory: Memory) -> Run:
        """A launch over the sets of buffers."""
        own = self._own(memory)
        sets = [memory.arguments(self.arguments, k, own) for k in range(memory.count)]
        for given in sets:
            given += [own["flag"]] if self.kernel is not None and self.kernel.checked else []
        match self.source:
            case TritonSource():
                return _triton(self.source, built, sets, memory.sizes)
            case CxxSource():
                addresses = [[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in one]
                             for one in sets]  # fmt: skip
                return lambda _, which: built.function(*addresses[which])
            case AtenCall():
                calls = [self.source.bound(*given) for given in sets]
                return lambda _, which: calls[which]()
            case _:
                call = self.source
                return lambda _, which: call(*sets[which])

    def on(self, device: torch.device) -> Part:
        """The same part for memory on another card of the same kind."""
        there = getattr(self.source, "device", None)
        if not isinstance(there, int) or device.index in (None, there):
            return self
        source: Any = self.source  # a kernel that says by number where it will be launched
        return replace(self, source=replace(source, device=device.index))

    def _own(self, memory: Memory) -> dict[str, torch.Tensor]:
        if self.kernel is None:
            return {}
        count, zeros = (max(1, ix.evaluate(n, memory.sizes))
                        for n in (self.kernel.workspace, self.kernel.counters))  # fmt: skip
        return {
            "workspace": torch.empty(count, dtype=torch.float32, device=memory.device),
            "counters": torch.zeros(zeros, dtype=torch.int32, device=memory.device),
            "flag": torch.zeros(1, dtype=torch.int64, device=memory.device),
        }


def _triton(source: TritonSource, built: Built, sets: Sequence[Sequence[Any]],
            sizes: Mapping[str, int]) -> Run:  # fmt: skip
    kernel = launch.load(source, built, source.device)
    programs = eval(source.programs(built.config), {}, dict(sizes))
    return lambda stream, which: kernel(stream, programs, 1, 1, *sets[which])


@dataclass(frozen=True)
class Described:
    """The buffers of a site: what they are, how far they are read, values of symbols, and which of
    them are compared."""

    buffers: tuple[Buffer, ...]
    sizes: tuple[tuple[str, int], ...]
    written: tuple[str, ...]
    extents: tuple[tuple[str, int], ...] = ()  # elements that are read beyond a buffer's own
    estimate: float = math.inf  # microseconds that a run takes at best
    filled: tuple[str, ...] = ()  # what plans write, compared or not
    contents: tuple[tuple[str, tuple[int, ...]], ...] = ()  # integers, repeated to the end


class Beyond(Exception):
    """A run wrote where it must not: beyond a buffer's end, or to what it is to read."""


class Memory:
    """Buffers with plausible contents, in several sets that together exceed the cache. Where memory
    lies makes a difference of one or two percent to what mostly reads it (H200), another one to
    each candidate, and of a product with weights of 112 MB six percent from one allocation to the
    next: short runs go over twice as many sets as a sample has room for.

    What is written is in the same place in all sets, as it is in a program, whose allocator gives
    what was last freed. With results that rotate, 4096x4096x64 in bfloat16 is 2.9 % faster by
    another algorithm of the library than by its first, and 4.6 % slower where they do not (H200):
    the cache takes them, and what is stored past it gains nothing.
    """

    def __init__(self, described: Described) -> None:
        self.described = described
        self.sizes = dict(described.sizes)
        self.written = described.written
        extents = dict(described.extents)
        with ix.supposing(self.sizes):
            self._counts = {b.name: max(_elements(b), extents.get(b.name, 0))
                            for b in described.buffers}  # fmt: skip
        self.device = described.buffers[0].device
        self.size = sum(self._counts[b.name] * b.dtype.itemsize for b in described.buffers)
        read = [b for b in described.buffers if b.name not in described.filled]
        size = sum(self._counts[b.name] * b.dtype.itemsize for b in read)
        most = min(MOST_BYTES, room(self.device))
        self.count = max(1, min(LARGEST_SETS, most // max(1, self.size),
                                max(clock.sets_beyond_cache(size, self.device),
                                    self._places())))  # fmt: skip
        self._sets: list[dict[str, torch.Tensor]] = []
        self._read: dict[str, torch.Tensor] = {}  # sums of the first set's inputs, as they were

    def _places(self) -> int:
        if self.device.type == "cpu":
            return 1
        most = MOST_PLACED // max(1, self.size)
        return int(min(most, 2 * clock.SAMPLE / max(self.described.estimate, 1.0)))

    def release(self) -> None:
        self._sets, self._read = [], {}

    @property
    def sets(self) -> list[dict[str, torch.Tensor]]:
        if not self._sets:
            generator = torch.Generator(self.device).manual_seed(0)
            one: dict[str, torch.Tensor] = {}  # what all sets have in common
            for _ in range(self.count):
                self._sets.append(self._made(generator, one))
                one = {name: self._sets[0][name] for name in self.described.filled}
            self._read = self._sums()
        return self._sets

    def _made(self, generator: torch.Generator, one: Mapping[str, torch.Tensor]
              ) -> dict[str, torch.Tensor]:  # fmt: skip
        """A set of buffers, filled but for those that there are."""
        made = {b.name: one[b.name] if b.name in one
                else _filled(b, self._counts[b.name], generator)
                for b in self.described.buffers}  # fmt: skip
        for name, values in self.described.contents:
            held = made[name]
            again = -(-held.numel() // len(values))
            held[:] = torch.tensor(values).to(held).repeat(again)[: held.numel()]
        return made

    def _sums(self) -> dict[str, torch.Tensor]:
        """Of what is only read, in the first set."""
        return {name: _sum(held) for name, held in self._sets[0].items()
                if name not in self.described.filled and name not in self.written}  # fmt: skip

    def _changed(self) -> list[str]:
        """Inputs of the first set that somebody wrote to; they are again what they were."""
        sums = self._sums()
        changed = [name for name, known in self._read.items() if not torch.equal(sums[name], known)]
        if changed:
            fresh = self._made(torch.Generator(self.device).manual_seed(0), {})
            for name in changed:
                self._sets[0][name].copy_(fresh[name])
        return changed

    def arguments(self, names: Sequence[Argument], which: int,
                  own: Mapping[str, torch.Tensor]) -> list[Any]:  # fmt: skip
        known: dict[str, Any] = {**self.sizes, **own, **self.sets[which]}
        return [eval(name, {}, known) if kind == "address" else known[name] for kind, name in names]

    def results(self, run: Run) -> dict[str, torch.Tensor]:
        """What a run writes into the first set; the set is afterwards as before."""
        first = self.sets[0]
        self._changed()  # by who was timed before
        kept = {name: first[name].clone() for name in self.written}
        for name in self.written:
            _poison(first[name])
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # which need not be the current one
                run(torch.cuda.current_stream(self.device).cuda_stream, 0)
        else:
            run(0, 0)
        found = {name: first[name].clone() for name in self.written}
        for name, before in kept.items():
            first[name].copy_(before)
        margins = {name: _margin(held) for name, held in first.items()}
        if bool(torch.stack([(m != _UNTOUCHED).any() for m in margins.values()]).any()):
            beyond = [name for name, m in margins.items() if (m != _UNTOUCHED).any()]
            for name in beyond:
                margins[name][:] = _UNTOUCHED
            raise Beyond(f"it writes beyond the end of {', '.join(beyond)}")
        changed = self._changed()
        if changed:
            raise Beyond(f"it writes to its inputs {', '.join(changed)}")
        return found


def _elements(buffer: Buffer) -> int:
    return max(1, extent(buffer.size, buffer.stride))


def extent(size: Sequence[Expr], stride: Sequence[Expr], offset: Expr = ix.ZERO) -> int:
    """Likely elements up to the last of a window."""
    last = [(ix.likely(n) - 1) * ix.likely(s) for n, s in zip(size, stride, strict=True)]
    return ix.likely(offset) + 1 + sum(last)


def _filled(buffer: Buffer, count: int, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, which tell a wrong element from a right one; integers that are safe as
    indices. The user's random state is left alone. Behind them is what nobody may write to."""
    device = buffer.device
    size = count * buffer.dtype.itemsize
    whole = torch.empty(size + MARGIN, dtype=torch.uint8, device=device)
    whole[size:] = _UNTOUCHED
    held = whole[:size].view(buffer.dtype)
    if buffer.dtype == torch.int8:  # operands of products, and no indices
        return held.random_(-8, 8, generator=generator)
    if not buffer.dtype.is_floating_point:
        return held.zero_()
    return held.copy_(torch.randn(count, generator=generator, device=device))


def _margin(held: torch.Tensor) -> torch.Tensor:
    """What lies behind a buffer."""
    size = held.numel() * held.itemsize
    whole = torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())
    return whole[size:]


def _sum(held: torch.Tensor) -> torch.Tensor:
    """Another one if a buffer changes: of its words, each times its place in a piece."""
    words = held.view(torch.uint8)
    words = words[: words.numel() // 8 * 8].view(torch.int64)
    rest = held.view(torch.uint8)[words.numel() * 8 :].to(torch.int64)
    most = CACHED if held.device.type == "cpu" else 512 * CACHED
    places = torch.arange(1, min(most, max(8, words.numel())) + 1, device=held.device)
    total = (rest * places[: rest.numel()]).sum()
    for piece in words.split(most):
        total = 31 * total + (piece * places[: piece.numel()]).sum()
    return total


def _poison(memory: torch.Tensor) -> None:
    if memory.dtype != torch.bool:
        memory.fill_(float("nan") if memory.dtype.is_floating_point else 85)


@dataclass
class Assembly:
    """Kernels that run one after the other on the memory of a site."""

    parts: tuple[Part, ...]
    bench: Bench
    _waiting: list[Future[Any] | None] = field(default_factory=list["Future[Any] | None"])
    _runs: list[Run] = field(default_factory=list["Run"])

    def start(self) -> None:
        if not self._waiting:
            self._waiting = [part.started() for part in self.parts]

    def done(self, seconds: float) -> bool:
        """Whether all is built, after waiting so long at most."""
        self.start()
        return not wait([w for w in self._waiting if w is not None], seconds).not_done

    def wait(self) -> list[Any]:
        """What was built of each part."""
        self.start()
        return [None if w is None else w.result() for w in self._waiting]

    def finish(self) -> None:
        if not self._runs:
            self._runs = [part.bound(built, self.bench.memory)
                          for part, built in zip(self.parts, self.wait(), strict=True)]  # fmt: skip

    def run(self, stream: int, which: int) -> None:
        for run in self._runs:
            run(stream, which)

    def check(self) -> str:
        self.finish()
        return self.bench.compare(self.run)

    def release(self) -> None:
        """Give up what runs refer to; `finish` makes it anew."""
        self._runs = []
        self.bench.release()


@dataclass(eq=False)
class Plan:
    """One way to compute a site. It is a `tune.Trial`."""

    candidate: Candidate
    fusion: Fusion
    work: Assembly
    estimate: float

    @property
    def name(self) -> str:
        problem = self.fusion.problem
        fused = ["prologue"] * bool(self.fusion.before)
        fused += ["rows"] * problem.walks_rows + ["scaled"] * (problem.factor is not None)
        fused += ["epilogue"] * (self.fusion.after is not None)
        return "_".join([self.candidate.name, *fused])

    @property
    def provider(self) -> str:
        return self.candidate.provider

    @property
    def description(self) -> str:
        return self.candidate.description

    @property
    def is_library(self) -> bool:
        return self.provider == "ATEN"

    @property
    def compiles(self) -> bool:
        own = (part.source for part in self.work.parts if part.kernel is not None)
        kinds = (TritonSource, CxxSource, CompiledSource)
        return any(isinstance(source, kinds) for source in own)

    @property
    def is_foreign(self) -> bool:
        """Whether code of somebody else's runs, which may do anything to the process: of a
        provider that is not this package's, or of a compiler that is not."""
        made = getattr(self.candidate, "inner", self.candidate)
        offered = type(made).__module__.partition(".")[0] != "tilewright"
        return offered or any(isinstance(part.source, CompiledSource) for part in self.work.parts)

    @property
    def key(self) -> str:
        return store.key(self.candidate.key, *(_identity(p.source) for p in self.work.parts
                                               if p.kernel is None))  # fmt: skip

    def start(self) -> None:
        self.work.start()

    def wait(self, seconds: float) -> bool:
        return self.work.done(seconds)

    def finish(self) -> None:
        made = self.resources()
        if made is not None and self.fusion.after is not None:
            reason = analysis.spilled(made)
            if reason:
                raise RuntimeError(reason)
        elsewhere = config.autotune_in_subproc
        if not (self.is_foreign if elsewhere is None else elsewhere):
            self.work.finish()

    def resources(self) -> Resources | None:
        """Of the product's own kernel, once it is built; a Triton kernel's alone are known."""
        made = zip(self.work.parts, self.work.wait(), strict=True)
        found = [b for part, b in made if part.kernel is not None and isinstance(b, Built)]
        return analysis.resources(found[0]) if found else None

    def run(self, stream: int, which: int) -> None:
        self.work.run(stream, which)

    def check(self) -> str:
        return self.work.check()

    def remote(self) -> RemotePlan:
        bench = self.work.bench
        memory = bench.memory
        library = (self.work if bench.library is None else bench.library).parts
        site = store.key(repr(memory.described), *(_identity(p.source) for p in library))
        return RemotePlan(self.key, site, memory.device, memory.count, self.work.parts, library,
                          memory.described, bench.tolerance)  # fmt: skip


@dataclass(frozen=True)
class RemotePlan:
    """A plan as it is sent to the process that times it: memory is made there."""

    key: str
    site: str
    device: torch.device
    sets: int
    parts: tuple[Part, ...]
    library: tuple[Part, ...]
    memory: Described
    tolerance: float

    def open(self) -> Assembly:
        if _here.get("site") != self.site:
            bench = Bench(Memory(self.memory), self.tolerance)
            bench.memory.count = self.sets  # as many as who asked counts on
            bench.library = Assembly(self._there(self.library), bench)
            _here.update(site=self.site, bench=bench)
        made = Assembly(self._there(self.parts), _here["bench"])
        made.finish()
        return made

    def _there(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """For this card, which the process that times may know by another number."""
        return tuple(part.on(self.device) for part in parts)


_here: dict[str, Any] = {}  # in the process that times: the site's memory, which plans share
child.on_release.append(_here.clear)


def _identity(source: Source) -> str:
    match source:
        case TritonSource():
            return source.key(source.configs[0])
        case CxxSource():
            return store.key(source.text, source.name, repr(source.flags))
        case _:
            return repr(source)  # a library's call is more than its name: its factors, its views


class Bench:
    """The memory all plans of a site run on, and the library's results in it."""

    def __init__(self, memory: Memory, tolerance: float) -> None:
        self.memory = memory
        self.tolerance = tolerance
        self._expected: dict[str, torch.Tensor] | None = None
        self.library: Assembly | None = None

    def release(self) -> None:
        self.memory.release()
        self._expected = None
        if self.library is not None:
            self.library._runs = []

    def compare(self, run: Run) -> str:
        """Why the results differ from the library's, or an empty string."""
        if self._expected is None:
            if self.library is None:
                return ""
            self.library.finish()
            self._expected = self.memory.results(self.library.run)
        try:
            found = self.memory.results(run)
        except Beyond as why:
            return str(why)
        for name, expected in self._expected.items():
            reason = difference(found[name], expected, self.tolerance)
            if reason:
                return f"{name}: {reason}"
        return ""


def difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """Why one is not the other but for rounding. Infinities and not-a-number are equal to
    themselves, and have no part in the scale of the rest. Compared in parts: a result of 8.6 GB
    (65536 by 65536 of two bytes) is 34 GB of float64, and several of them do not fit a card."""
    if not expected.dtype.is_floating_point:
        wrong = int((found != expected).sum())
        return f"{wrong} elements differ" if wrong else ""
    count, odd, finite, squares = expected.numel(), 0, 0, 0.0
    for a, b in _pieces(found, expected):
        both = a.isfinite() & b.isfinite()
        odd += int(((a != b) & ~(a.isnan() & b.isnan()) & ~both).sum())
        finite += int(b.isfinite().sum())
        squares += float(torch.where(both, b, 0.0).square().sum())
    if odd > (0 if finite == count else FEW * count):
        return f"{odd} elements are infinite or not a number in one of the two alone"
    scale, wrong, most = math.sqrt(squares / max(1, finite)), 0, 0.0
    for a, b in _pieces(found, expected):
        both = a.isfinite() & b.isfinite()
        error = torch.where(both, a - b, 0.0).abs()
        wrong += int((error > tolerance * (scale + torch.where(both, b, 0.0).abs())).sum())
        most = max(most, float(error.max()))
    if not wrong:
        return ""
    return f"{wrong} of {count} elements are off, by up to {most:.3g} at a scale of {scale:.3g}"


def _pieces(found: torch.Tensor, expected: torch.Tensor
            ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Both in double precision, so much at a time as stays in a cache: whole, what is made of
    them took several times the memory of a large result."""
    piece = CACHED if expected.device.type == "cpu" else 512 * CACHED
    each = zip(found.reshape(-1).split(piece), expected.reshape(-1).split(piece), strict=True)
    for a, b in each:
        if a.numel():
            yield a.double(), b.double()


def tolerance(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and takes_tf32():
        return _TF32
    return _TOLERANCE.get(dtype, 0.0)  # integers are equal
