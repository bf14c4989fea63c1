"""The configuration of a loop kernel: the model's first, or with autotuning the fastest measured.

Configurations are trials like any other: built in parallel, timed by the same clock, compared with
what the model's configuration computes, and remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from string import ascii_uppercase
from typing import Any

import torch

from tilewright import config, metrics
from tilewright.errors import NoValidChoicesError
from tilewright.runtime import launch, store, triton_build
from tilewright.runtime.triton_build import Built, Sample, TritonConfig, TritonSource
from tilewright.tune import clock, records
from tilewright.tune.clock import Run
from tilewright.tune.records import Choice
from tilewright.tune.results import Subject
from tilewright.tune.select import internal

MOST_STEPS = 16  # configurations coordinate descent may try
MOST_BYTES = 8 << 30  # of sample buffers; a larger kernel keeps the model's choice
ROUGHLY = 0.25  # how far sums of rounded numbers may be apart in another order


@dataclass(frozen=True)
class Waiting:
    """A kernel under way: built for sure, to be measured if asked."""

    built: Future[Built]
    measured: bool


def submit(source: TritonSource) -> Waiting:
    """Start building. With autotuning every configuration is built, unless the winner is known."""
    if not _wanted(source):
        return Waiting(triton_build.submit(source), False)
    known = _known(source)
    if known is not None:
        return Waiting(
            triton_build.submit(replace(source, configs=(known, *source.configs))), False
        )
    triton_build.start_all(source)
    return Waiting(triton_build.submit(source), True)


def chosen(source: TritonSource, waiting: Waiting) -> Built:
    """Wait, and measure where that was asked for."""
    first = waiting.built.result()
    return measured(source, first) if waiting.measured else first


def _wanted(source: TritonSource) -> bool:
    asked = config.max_autotune or config.max_autotune_pointwise
    able = torch.cuda.is_available() and not config.deterministic
    return asked and able and len(source.configs) > 1


def measured(source: TritonSource, first: Built) -> Built:
    """The fastest configuration on the card; ties go to the model's choice."""
    bench = _Bench(source)
    if bench.size > MOST_BYTES:
        metrics.counters["tune"]["too large to measure"] += 1
        return first
    bench.reference = first
    subject = _subject(source, bench)
    best = _Configured(bench, first.config)
    if config.coordinate_descent_tuning:  # mostly from the model's choice: be ready for that
        for neighbour in _neighbours(source, first.config):
            _Configured(bench, neighbour).start()
    try:
        for choices in turns(source):
            others = [c for c in (change(best.config) for change in choices) if c != best.config]
            best = _raced(subject, [best, *(_Configured(bench, c) for c in dict.fromkeys(others))])
        if config.coordinate_descent_tuning:
            best = _descended(subject, bench, best)
    except NoValidChoicesError:
        return first
    metrics.counters["tune"]["kernels measured"] += 1
    records.choose(subject, _manner(), Choice(best.key, best.description))
    records.share(subject)  # with the choice: others build that alone
    return best.built


Change = Callable[[TritonConfig], TritonConfig]


def turns(source: TritonSource) -> list[list[Change]]:
    """What is tried at once. All configurations; but of kernels that share a launch one's blocks
    after the other's, those with most work first, each beside the best of those before."""
    first, *others = source.configs
    if not source.beside:
        return [[lambda _, c=c: c for c in others]]
    found: dict[str, list[Change]] = {}
    which = ""
    for c in others:
        changed = {n: v for (n, v), old in zip(c.constants, first.constants, strict=True)
                   if (n, v) != old}  # fmt: skip
        which = next((n.lstrip(ascii_uppercase) for n in changed), which)
        found.setdefault(which, []).append(partial(_changed, constants=changed, like=c))
    return list(found.values())


def _changed(at: TritonConfig, constants: dict[str, Any], like: TritonConfig) -> TritonConfig:
    return replace(at, constants=tuple((n, constants.get(n, v)) for n, v in at.constants),
                   num_warps=like.num_warps)  # fmt: skip


def _raced(subject: Subject, trials: Sequence[_Configured]) -> _Configured:
    verdict = internal(subject, trials)
    return next(t for t in trials if t is verdict.winner)


class _Bench:
    """Sample arguments of a kernel, in several sets, and what the model's configuration makes of
    the first of them."""

    reference: Built

    def __init__(self, source: TritonSource) -> None:
        self.source = source
        self.device = torch.device("cuda", source.device)
        self.size = sum(s[0].itemsize * s[1] for s in source.sample if isinstance(s, tuple))

    @cached_property
    def count(self) -> int:
        return clock.sets_beyond_cache(self.size, self.device)

    @cached_property
    def sets(self) -> list[list[Any]]:
        return [[self._argument(s) for s in self.source.sample] for _ in range(self.count)]

    def _argument(self, sample: Any) -> Any:
        if isinstance(sample, tuple):
            dtype, count, high, _ = Sample(*sample)
            return clock.filled(dtype, count, self.device, high)
        return sample

    @cached_property
    def memory(self) -> list[tuple[Sample, torch.Tensor]]:
        """The buffers of the first set."""
        pairs = zip(self.source.sample, self.sets[0], strict=True)
        return [(Sample(*s), a) for s, a in pairs if isinstance(a, torch.Tensor)]

    def run(self, built: Built) -> Run:
        kernel = launch.load(self.source, built, self.source.device)
        programs = eval(self.source.programs(built.config), {}, dict(self.source.sizes))

        def run(stream: int, which: int) -> None:
            kernel(stream, programs, 1, 1, *self.sets[which])

        return run

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        return self.results(self.run(self.reference))

    def results(self, run: Run) -> list[torch.Tensor]:
        """All memory after one run, whatever runs before have left there."""
        for sample, a in self.memory:
            a.copy_(self._argument(sample))
        with torch.cuda.device(self.device):
            run(torch.cuda.current_stream().cuda_stream, 0)
        return [a.clone() for _, a in self.memory]

    def difference(self, run: Run) -> str:
        """Why a run does not compute what the reference does."""
        found = zip(self.memory, self.results(run), self.expected, strict=True)
        for (sample, _), a, b in found:
            if sample.meets == "set":
                continue  # which of the stores that meet is last is anybody's guess
            why = difference(a, b, ROUGHLY) if sample.meets else difference(a, b)
            if why:
                return why
        return ""


class _Configured:
    """A loop kernel in one configuration, as a trial. There is no estimate: configurations are
    listed best first."""

    provider = "LOOP"
    is_library = False
    compiles = True
    estimate = 0.0

    def __init__(self, bench: _Bench, chosen: TritonConfig) -> None:
        self.config = chosen
        self.description = _described(chosen)
        self.name = f"{bench.source.name}({self.description})"
        self.key = bench.source.key(chosen)
        self._bench = bench
        self._source = replace(bench.source, configs=(chosen,))

    def start(self) -> None:
        _ = self._building

    def wait(self, seconds: float) -> bool:
        return not wait([self._building], seconds).not_done

    @cached_property
    def _building(self) -> Future[Built]:
        return triton_build.submit(self._source)

    @cached_property
    def built(self) -> Built:
        return self._building.result()

    @cached_property
    def _run(self) -> Run:
        return self._bench.run(self.built)

    def finish(self) -> None:
        _ = self._run

    def run(self, stream: int, which: int) -> None:
        self._run(stream, which)

    def check(self) -> str:
        if self.built == self._bench.reference:
            return ""
        return self._bench.difference(self._run)


def difference(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-3) -> str:
    """Why two results of one kernel are not the same up to the order of sums, or further apart than
    the `least` that counts."""
    if not expected.dtype.is_floating_point:
        wrong = int((found != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else ""
    a, b = found.double(), expected.double()
    if bool((a.isnan() != b.isnan()).any()):
        return "not-a-number in other places"
    a, b = a.nan_to_num(), b.nan_to_num()
    scale = b.abs().mean() + b.abs()
    few = max(least, 8 * torch.finfo(expected.dtype).eps)
    wrong = int(((a - b).abs() > few * scale).sum())
    return f"{wrong} of {b.numel()} elements are off" if wrong else ""


# ---- coordinate descent


def _descended(subject: Subject, bench: _Bench, best: _Configured) -> _Configured:
    """Change one number at a time by a factor of two for as long as that is faster."""
    tried = {*bench.source.configs, best.config}
    most = MOST_STEPS + len(bench.source.configs)
    while len(tried) < most:
        fresh = [c for c in _neighbours(bench.source, best.config) if c not in tried]
        tried.update(fresh)
        if not fresh:
            break
        found = _raced(subject, [best, *(_Configured(bench, c) for c in fresh)])
        if found is best:
            break
        best = found
    return best


def _neighbours(source: TritonSource, at: TritonConfig) -> Iterator[TritonConfig]:
    """One number larger or smaller by a factor of two. A block larger than all that the kernel was
    written for may not divide an axis that it does not mask; a smaller one of a loop inside the
    kernel may not cover a row that is held as a whole."""
    parallel = source.blocks
    either = "HELD" in dict(at.constants)  # rows held or walked: blocks of one are not the other's
    for k, (name, value) in enumerate(at.constants):
        if either and name not in parallel:
            continue
        known = [dict(c.constants)[name] for c in source.configs]
        least = 1 if name in parallel else min(known)
        for scaled in (value * 2, value // 2):
            if least <= scaled <= max(known):
                yield replace(at, constants=(*at.constants[:k], (name, scaled),
                                             *at.constants[k + 1 :]))  # fmt: skip
    for warps in (at.num_warps * 2, at.num_warps // 2):
        if 1 <= warps <= 32:
            yield replace(at, num_warps=warps)


# ---- the record


def _subject(source: TritonSource, bench: _Bench | None = None) -> Subject:
    key = store.key(*(source.key(c) for c in source.configs), repr(source.sizes),
                    repr(source.sample))  # fmt: skip
    sets = 1 if bench is None else bench.count
    return Subject(key, source.name, torch.device("cuda", source.device), sets,
                   {"sizes": dict(source.sizes)})  # fmt: skip


def _manner() -> str:
    return "descent" if config.coordinate_descent_tuning else "listed"


def _known(source: TritonSource) -> TritonConfig | None:
    subject = _subject(source)
    found = records.chosen(subject, _manner()) if config.autotune_local_cache else None
    if found is None and records.had_from_others(subject):
        found = records.chosen(subject, _manner())
    if found is None:
        return None
    metrics.counters["tune"]["choices found"] += 1
    return _parsed(found.description)


def _described(chosen: TritonConfig) -> str:
    numbers = {**dict(chosen.constants), **chosen.options()}
    return ", ".join(f"{name}={value}" for name, value in numbers.items())


def _parsed(description: str) -> TritonConfig:
    numbers = {name: int(value) for name, _, value in
               (part.partition("=") for part in description.split(", "))}  # fmt: skip
    warps, stages = numbers.pop("num_warps"), numbers.pop("num_stages")
    registers = numbers.pop("maxnreg", None)
    return TritonConfig(tuple(numbers.items()), warps, stages, registers)
