"""`choose`: who computes each product of a program, and what is fused to it.

After grouping, every product call is a site. Its plans are measured as they would run, once for
each different site, and the winner takes the place of the call (and of the groups it is fused
with). Where nothing can be measured the library computes the product, as in eager.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright import caches, config, metrics
from tilewright.errors import BuildError, NoValidChoicesError
from tilewright.gemm import analysis, aten, fuse
from tilewright.gemm.analysis import Times
from tilewright.gemm.fuse import Fusion, Site
from tilewright.gemm.plan import (
    Assembly,
    Bench,
    Described,
    Memory,
    Part,
    Plan,
    extent,
    tolerance,
)
from tilewright.gemm.problem import GemmProblem, Operand, takes_tf32
from tilewright.gemm.provider import PROVIDERS, Argument, Candidate, Kernel, Source, unknown
from tilewright.gemm.providers import enabled
from tilewright.gemm.roofline import loop_time, roofline
from tilewright.ir import index as ix
from tilewright.ir.program import Opaque, Origin, Program, View
from tilewright.runtime import store
from tilewright.runtime.cxx import CxxSource
from tilewright.runtime.triton_build import TritonSource
from tilewright.schedule.group import Group
from tilewright.tune import select
from tilewright.tune.choices import effort

log = logging.getLogger("tilewright.choose")

LoopKernel = Callable[[Program, Group], tuple[Sequence[Argument], Source]]
MOST_UNFUSED = 8  # candidates for the product alone, beside fused ones, that are not the library's


@dataclass(frozen=True)
class Implementation:
    """What an opaque call has for a target once its kernel is chosen."""

    problem: GemmProblem
    kernel: Kernel
    names: tuple[tuple[str, str], ...]  # the kernel's buffers -> the program's
    chosen: str  # who, and why, for a reader

    @property
    def __name__(self) -> str:
        return self.kernel.name

    @property
    def result(self) -> str:
        """One of the program's buffers it writes."""
        return dict(self.names)[self.problem.writes[0]]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = dict(self.names)
        return tuple((kind, names.get(name, name)) for kind, name in self.kernel.arguments)


def choose(program: Program, groups: Sequence[Group], loop_kernel: LoopKernel) -> Chosen:
    """The groups with every product's winner in place."""
    found = Chosen(list(groups))
    if not (config.max_autotune or config.max_autotune_gemm):
        return found
    names = [g.call.name for g in found.groups if g.call is not None and fuse.is_product(g)]
    with select.budget(len(names)):
        if len(names) > 1:
            _prepare(program, found.groups, names, loop_kernel)
        for name in names:
            found = _chosen(program, found, name, loop_kernel)
    return found


@dataclass(frozen=True)
class Chosen:
    """Groups, and whether all was tried that was to be: or the budget was spent before."""

    groups: list[Group]
    complete: bool = True


def _prepare(program: Program, groups: list[Group], names: Sequence[str],
             loop_kernel: LoopKernel) -> None:  # fmt: skip
    """Let the candidates of all products be built at once: those of later ones while the earlier
    are measured. A product that changes with the choice for another is prepared in vain."""
    found = (_chooser(program, groups, name, loop_kernel) for name in names)
    each = {c.key: c for c in found if c is not None}  # equal products are chosen for once
    begun = [c for c in each.values() if c.begin()]
    for chooser in begun:
        chooser.prepare()


def _chosen(program: Program, so_far: Chosen, name: str, loop_kernel: LoopKernel) -> Chosen:
    chooser = _chooser(program, so_far.groups, name, loop_kernel)
    if chooser is None:
        return so_far
    return Chosen(chooser.chosen(), so_far.complete and chooser.complete)


def _chooser(program: Program, groups: list[Group], name: str,
             loop_kernel: LoopKernel) -> _Chooser | None:  # fmt: skip
    position = _position(groups, name)
    site = "it is part of another" if position is None else fuse.site(program, groups, position)
    if isinstance(site, str):
        log.debug("%s is not chosen for: %s", name, site)
        return None
    return _Chooser(program, groups, site, loop_kernel)


def _position(groups: Sequence[Group], name: str) -> int | None:
    places = (k for k, g in enumerate(groups) if g.call is not None and g.call.name == name)
    return next(places, None)


class _Chooser:
    def __init__(self, program: Program, groups: list[Group], site: Site,
                 loop_kernel: LoopKernel) -> None:  # fmt: skip
        self.program = program
        self.groups = groups
        self.site = site
        self.loop_kernel = loop_kernel
        self.device = program.buffers[site.bare.names[site.bare.problem.result.buffer]].device
        self.rejected: dict[str, str] = {}
        self.loop_times: dict[int, float] = {}
        self.complete = True

    def chosen(self) -> list[Group]:
        problem = self.site.bare.problem
        if any(n is ix.ZERO for n in problem.sizes[:3]):
            return self.groups  # nothing is computed; the library knows how
        winner, why = self._winner()
        metrics.counters["gemm"][winner.provider] += 1
        decisions.append(Decision(self._title(), str(winner), why))
        if isinstance(winner.candidate, aten.AtenCandidate):
            return self.groups  # it is called already
        return self._replaced(winner, why)

    def begin(self) -> bool:
        """Begin to build the loops that plans have in common; whether there is more to prepare.
        On a CPU there is not: compilers would disturb what is measured."""
        if self.device.type == "cpu" or not self._measurable() or self.key in _memo:
            return False
        for plan in self.plans:
            if not plan.compiles:
                plan.start()
        return bool(self.plans)

    def prepare(self) -> None:
        try:
            select.prepare(self._subject(self.plans), self.plans)
        finally:
            self._release()

    def _release(self) -> None:
        """Give up the memory that plans were timed on: the next ones find it where it was."""
        for plan in self.plans:
            plan.work.release()
        del self.plans

    # ---- deciding

    def _winner(self) -> tuple[_Winner, str]:
        known = _memo.get(self.key)
        if known is not None:
            for fusion, candidate in self._candidates():
                if (fusion.problem.key, candidate.name) == known[:2]:
                    return _Winner(fusion, candidate), known[2]
        if not self.plans:
            raise _nobody(self.site, self.rejected)
        try:
            plan, why = self._selected(self.plans)
        finally:
            self._release()
        if self.complete:
            _memo[self.key] = plan.fusion.problem.key, plan.candidate.name, why
        return _Winner(plan.fusion, plan.candidate), why

    def _selected(self, plans: Sequence[Plan]) -> tuple[Plan, str]:
        subject = self._subject(plans)
        if not self._measurable():
            first = select.unmeasured(subject, plans)
            return next(p for p in plans if p is first), "not measured: there is no card"
        timed = [p for p in plans if config.benchmark_epilogue_fusion or p.fusion.after is None]
        verdict = select.choose(subject, timed or plans)
        self.complete = verdict.complete
        winner = next(p for p in plans if p is verdict.winner)
        for fused, why in self._by_analysis(verdict, timed, plans):
            alone = replace(subject, key=store.key(subject.key, fused.key))
            try:
                select.choose(alone, [fused])
            except NoValidChoicesError as error:
                self.rejected[fused.name] = str(error)
            else:
                return fused, f"analysed: {why}"
        return winner, _told(verdict)

    def _subject(self, plans: Sequence[Plan]) -> select.Subject:
        problem = self.site.bare.problem
        return select.Subject(
            key=self.key,
            title=str(plans[0].fusion.problem if len(plans) == 1 else self._title()),
            device=self.device,
            sets=plans[0].work.bench.memory.count,
            facts={
                "op": problem.op,
                "sizes": problem.hints,
                "dtype": str(problem.dtype),
                "inputs": [_operand(o) for o in problem.operands],
            },
        )

    def _by_analysis(self, verdict: select.Verdict, timed: Sequence[Plan], plans: Sequence[Plan]
                     ) -> Iterator[tuple[Plan, str]]:  # fmt: skip
        """Plans with an epilogue that were not timed, and are to be taken by what is known of the
        same kernels without: only the fastest few are looked at."""
        times = {p: verdict.times[p.name].median_us for p in timed if p.name in verdict.times}
        twins = {_kind(p): p for p in times}
        pairs = [(fused, twins[_kind(fused)]) for fused in plans
                 if fused not in timed and _kind(fused) in twins]  # fmt: skip
        pairs.sort(key=lambda pair: times[pair[1]])
        for fused, twin in pairs[: config.max_epilogue_benchmarked_choices]:
            assert fused.fusion.after is not None
            epilogue = self.loop_times[fused.fusion.after]
            apart = Times(min(times.values()) - epilogue, times[twin] - epilogue, epilogue)
            extra = analysis.extra_reads(fused.fusion.problem)
            reason = analysis.not_worth_building(apart, extra) or _not_worth_running(
                twin, fused, apart
            )
            if reason:
                self.rejected[fused.name] = reason
                log.debug("%s is not fused: %s", fused.name, reason)
            else:
                yield fused, f"{twin.name} {times[twin]:.1f} us with its epilogue apart"

    def _title(self) -> str:
        most = self.site.fusions[0] if self.site.fusions else self.site.bare
        return str(most.problem)

    @functools.cached_property
    def key(self) -> str:
        problems = [f.problem.key for f in (self.site.bare, *self.site.fusions)]
        return store.key("site", *problems, repr(config.code_key()),
                         str(takes_tf32()))  # fmt: skip

    def _measurable(self) -> bool:
        return self.device.type == "cpu" or torch.cuda.is_available()

    # ---- plans

    def _candidates(self) -> list[tuple[Fusion, Candidate]]:
        """For the product alone and for every fusion of it, library first."""
        found: list[tuple[Fusion, Candidate]] = []
        for fusion in (self.site.bare, *self.site.fusions):
            for provider in enabled():
                reason = provider.supports(fusion.problem)
                if reason:
                    self.rejected[f"{provider.name} for {fusion.problem}"] = reason
                    continue
                found += [(fusion, c) for c in provider.candidates(fusion.problem, effort())]
        alone = [(f, c) for f, c in found if f is self.site.bare]
        fused = [(f, c) for f, c in found if f is not self.site.bare]
        library = [(f, c) for f, c in alone if c.provider in ("ATEN", "CUBLASLT")]
        others = [(f, c) for f, c in alone if c.provider not in ("ATEN", "CUBLASLT")]
        if fused:
            others = others[:MOST_UNFUSED]
        return [*library, *fused, *others]

    @functools.cached_property
    def plans(self) -> list[Plan]:
        found = self._candidates()
        if not found:
            return []
        around = self._around()
        bench = Bench(self._memory(around), tolerance(self.site.bare.problem.dtype))
        loops = {k: self._loop(self.groups[k]) for k in around}
        self.loop_times = {k: time for k, (_, time) in loops.items()}
        plans = [self._plan(fusion, candidate, bench, loops) for fusion, candidate in found]
        if plans[0].is_library:
            bench.library = plans[0].work
        else:
            library = aten.AtenCandidate(self.site.bare.problem)
            bench.library = self._plan(self.site.bare, library, bench, loops).work
        return plans

    def _plan(self, fusion: Fusion, candidate: Candidate, bench: Bench,
              loops: Mapping[int, tuple[Part, float]]) -> Plan:  # fmt: skip
        kernel = candidate.kernel()
        names = fusion.names
        arguments = tuple((kind, names.get(name, name)) for kind, name in kernel.arguments)
        inside = {*fusion.before, fusion.after}
        before = [loops[k] for k in loops if k < self.site.position and k not in inside]
        after = [loops[k] for k in loops if k > self.site.position and k not in inside]
        parts = (
            *(p for p, _ in before),
            Part(kernel.source, arguments, kernel),
            *(p for p, _ in after),
        )
        estimate = candidate.estimate + sum(t for _, t in (*before, *after))
        return Plan(candidate, fusion, Assembly(parts, bench), estimate)

    def _around(self) -> list[int]:
        """The groups that some fusion takes in; plans that do not fuse them run them too."""
        found = {k for f in self.site.fusions for k in (*f.before, f.after) if k is not None}
        return sorted(found)

    def _loop(self, group: Group) -> tuple[Part, float]:
        """A group that a fusion takes in, as it runs on its own."""
        if group.call is not None:
            return self._other_product(group)
        arguments, source = self.loop_kernel(self.program, group)
        memory = [self.program.buffers[b] for b in (group.reads | group.writes) - group.local]
        target = self.site.bare.problem.target
        return Part(source, tuple(arguments)), loop_time(memory, target)

    def _other_product(self, group: Group) -> tuple[Part, float]:
        found = fuse.site(self.program, self.groups, self.groups.index(group))
        assert isinstance(found, Site)
        candidate = aten.AtenCandidate(found.bare.problem)
        kernel, names = candidate.kernel(), found.bare.names
        arguments = tuple((kind, names.get(name, name)) for kind, name in kernel.arguments)
        return Part(kernel.source, arguments), candidate.estimate

    def _memory(self, around: Sequence[int]) -> Memory:
        call = self.site.call
        names = {*call.reads, *call.writes}
        written = set(call.writes)
        for k in around:
            group = self.groups[k]
            names |= (group.reads | group.writes) - group.local
            written |= group.writes - group.local
        # what a fused plan never writes cannot be compared; nor is it needed by anybody
        compared = [n for n in sorted(written) if all(
            n in {f.names[b] for b in f.problem.writes} or n in self._outside(f)
            for f in self.site.fusions)]  # fmt: skip
        symbols = {s.arg.name: ix.likely(s) for s in self.program.symbols.values()}
        views = [a for a in (*call.args, call.out) if isinstance(a, View)]
        extents = [(v.buffer, extent(v.size, v.stride, v.offset)) for v in views]
        buffers = tuple(self.program.buffers[n] for n in sorted(names))
        return Memory(Described(buffers, tuple(symbols.items()), tuple(compared),
                                tuple(sorted(extents)), roofline(self.site.bare.problem),
                                tuple(sorted(written))))  # fmt: skip

    def _outside(self, fusion: Fusion) -> set[str]:
        """What the groups that a fusion leaves out write."""
        inside = {*fusion.before, fusion.after}
        return {b for k in self._around() if k not in inside for b in self.groups[k].writes}

    # ---- the result

    def _replaced(self, winner: _Winner, why: str) -> list[Group]:
        fusion, candidate = winner.fusion, winner.candidate
        problem = fusion.problem
        call = self.site.call
        views = tuple(_whole(self.program, fusion.names[b]) for b in problem.reads)
        written = tuple(fusion.names[b] for b in problem.writes)
        gone = {*fusion.before, self.site.position}
        place = self.site.position if fusion.after is None else fusion.after
        taken = [self.groups[k] for k in sorted(gone | {place})]
        origin = _origin(taken)
        label = "_".join(dict.fromkeys(n.rstrip("_0123456789") for n in origin.nodes))
        kernel = candidate.kernel()
        target = Implementation(
            problem, kernel, tuple(fusion.names.items()), f"{candidate.name}, {why}"
        )
        ours = isinstance(kernel.source, CxxSource | TritonSource)
        made = Opaque(
            f"{call.name}_chosen",
            target,
            views,
            {},
            (),
            written,
            origin,
            fills=written,
            generated=ours,
        )
        log.debug("%s: %s", label, target.chosen)
        result = list(self.groups)
        result[place] = Group(call=made, refused=dict(self.site.refused))
        return [g for k, g in enumerate(result) if k == place or k not in gone]


def _told(verdict: select.Verdict) -> str:
    """How it was chosen, for a reader: its time, those of the fastest others, and why it is taken
    where one of them is faster."""
    alive = {name: t for name, t in verdict.times.items() if name not in verdict.rejected}
    own = verdict.winner.name
    others = sorted(alive.keys() - {own}, key=lambda name: alive[name].median_us)[:2]
    shown = [*([own] if own in alive else []), *others]
    times = ", ".join(f"{name} {alive[name].median_us:.3g} us" for name in shown)
    parts = [f"{verdict.source}: {times}" if times else verdict.source, verdict.why]
    return "; ".join(p for p in parts if p)


def _kind(plan: Plan) -> tuple[str, str, tuple[int, ...]]:
    """What a plan has in common with the same kernel without its epilogue."""
    return plan.provider, plan.description, plan.fusion.before


def _not_worth_running(twin: Plan, fused: Plan, times: Times) -> str:
    try:
        alone, together = twin.resources(), fused.resources()
    except BuildError as error:
        return f"did not build: {error}"
    if alone is None or together is None:  # no Triton kernels: nothing is known
        return ""
    return analysis.not_worth_running(alone, together, times)


@dataclass(frozen=True)
class _Winner:
    """A candidate and what it computes."""

    fusion: Fusion
    candidate: Candidate

    @property
    def provider(self) -> str:
        return self.candidate.provider

    def __str__(self) -> str:
        return f"{self.candidate.name} for {self.fusion.problem}"


@dataclass(frozen=True)
class Decision:
    """Who computes what, and why."""

    site: str
    winner: str
    why: str


decisions: deque[Decision] = deque(maxlen=1000)
"""The latest decisions of this process, for reports."""


def _origin(groups: Sequence[Group]) -> Origin:
    origins = [n.origin for g in groups for n in g.nodes]
    names = tuple(dict.fromkeys(n for o in origins for n in o.nodes))
    return Origin(names, next((o.location for o in origins if o.location), ""))


def _whole(program: Program, name: str) -> View:
    b = program.buffers[name]
    return View(name, b.size, b.stride, ix.ZERO, b.dtype)


def _operand(operand: Operand) -> str:
    """`bfloat16[16, 4096] by [4096, 1]`: what a record says of an operand."""
    size, stride = (
        [ix.likely(n) for n in part] for part in (operand.view.size, operand.view.stride)
    )
    return f"{str(operand.dtype).removeprefix('torch.')}{size} by {stride}"


def _nobody(site: Site, rejected: Mapping[str, str]) -> NoValidChoicesError:
    found = [f"{who}: {why}" for who, why in rejected.items()]
    found += [f"{name}: there is no such backend" for name in unknown()]
    known = ", ".join(sorted(PROVIDERS))
    return NoValidChoicesError(
        f"no choices to select for {site.bare.problem}: "
        + ("; ".join(found) or "no backend is enabled"),
        hint=f"add ATEN to config.max_autotune_gemm_backends; the backends are {known}",
    )


_memo: dict[str, tuple[str, str, str]] = {}  # site -> (problem, candidate, why)
caches.register(_memo.clear)
