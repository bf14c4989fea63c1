"""`choose`: who computes each product of a program, and what is fused to it.

After grouping, every product call is a site. Its plans are measured as they would run, once for
each different site, and the winner takes the place of the call (and of the groups it is fused
with). Where nothing can be measured the library computes the product, as in eager.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright import caches, config, metrics
from tilewright.errors import BuildError, NoValidChoicesError
from tilewright.gemm import activated, analysis, aten, dynamic, fuse, padded
from tilewright.gemm.analysis import Times
from tilewright.gemm.fuse import Fusion, Site
from tilewright.gemm.heuristics import available_sms
from tilewright.gemm.place import Winner, joined, put, put_ranges
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
from tilewright.gemm.provider import (
    FUSION_COUNTERS,
    PROVIDERS,
    Argument,
    Candidate,
    Provider,
    Source,
    unknown,
)
from tilewright.gemm.providers import enabled
from tilewright.gemm.roofline import loop_time, roofline
from tilewright.ir import index as ix
from tilewright.ir.expr import syms
from tilewright.ir.program import Program, View
from tilewright.ir.show import number
from tilewright.runtime import store
from tilewright.runtime.limit import within
from tilewright.schedule.fusion.group import Group
from tilewright.tune import progress, select
from tilewright.tune.choices import effort, is_filtered
from tilewright.tune.results import ADVANTAGE

log = logging.getLogger("tilewright.choose")

LoopKernel = Callable[[Program, Group], tuple[Sequence[Argument], Source]]
PATIENCE = 60.0  # seconds for a provider that is not this package's to say what it has
MOST_OFFERED = 10_000
MOST_BESIDE = 8  # calls that share a launch
MOST_UNFUSED = 8  # candidates for the product alone, beside fused ones, that are not the library's


def choose(program: Program, groups: Sequence[Group], loop_kernel: LoopKernel) -> Chosen:
    """The groups with every product's winner in place."""
    found = Chosen(list(groups))
    asked = config.max_autotune or config.max_autotune_gemm
    if not asked:
        found = Chosen(modelled(program, found.groups))
    names = [g.call.name for g in found.groups if g.call is not None
             and (fuse.is_posed(g)
                  or (asked and (fuse.is_product(g) or fuse.is_of_its_own(g))))
             ]  # fmt: skip
    if not names:
        return found
    with select.budget(len(names)), progress.shown(len(names)):
        if len(names) > 1:
            _prepare(program, found.groups, names, loop_kernel)
        for name in names:
            found = _chosen(program, found, name, loop_kernel)
    return replace(found, groups=_side_by_side(found.groups))


def _side_by_side(groups: list[Group]) -> list[Group]:
    """Calls whose winners can share a launch, at the place of the first of them."""
    left, found = list(groups), list[Group]()
    while left:
        group = left.pop(0)
        mine = [group]
        for k, other in enumerate(list(left)):
            why = _apart(mine, other, left[:k])
            if why:
                log.debug("no launch for both: %s", why)
            else:
                mine.append(other)
        left = [g for g in left if all(g is not m for m in mine)]
        found.append(group if len(mine) == 1 else joined(mine))
    return found


def modelled(program: Program, groups: list[Group]) -> list[Group]:
    """Without measuring, products of a card are the library's: of padded copies, or with what
    follows them in the same call, where a model finds that faster."""
    for name in [g.call.name for g in groups if g.call is not None and fuse.is_product(g)]:
        position = _position(groups, name)
        assert position is not None
        found = _by_model(program, groups, position)
        if found is not None:
            winner, why = found
            metrics.counters["gemm"][f"{winner.candidate.name} by the model"] += 1
            decided(Decision(str(winner.fusion.problem), str(winner), why))
            groups = put(program, groups, position, winner, why)
    return groups


def _by_model(program: Program, groups: Sequence[Group], position: int
              ) -> tuple[Winner, str] | None:  # fmt: skip
    call = groups[position].call
    assert call is not None
    alone = fuse.alone(program, call)
    if isinstance(alone, str) or not alone.problem.target.is_gpu:
        return None
    constant = {mine for mine, name in alone.names.items()
                if program.buffers[name].kind == "constant"}  # fmt: skip
    copied = padded.preferred(alone.problem, frozenset(constant))
    if copied is not None:
        return Winner(alone, copied), (
            f"by the model: {copied.estimate:.3g} us of padded copies, "
            f"{padded.unaligned(alone.problem):.3g} us as it is"
        )
    fusion = fuse.followed(program, groups, position, activated.OPS)
    made = None if fusion is None else activated.preferred(fusion.problem)
    if fusion is None or made is None:
        return None
    return Winner(fusion, made), f"by the model: {made.saved:.3g} us saved"


def _apart(mine: Sequence[Group], other: Group, between: Sequence[Group]) -> str:
    """Why a call does not join those before it, or an empty string."""
    calls = [g.call.target if g.call is not None else None for g in (mine[0], other)]
    first, second = (getattr(t, "candidate", None) for t in calls)
    if mine[0].when is not None or other.when is not None:
        return "one of them runs for some sizes alone"
    if first is None or not hasattr(first, "together") or type(first) is not type(second):
        return "they are not calls of one kind"
    reason = first.apart(second)
    if reason:
        return reason
    for g in (*mine, *(g for g in between if all(g is not m for m in mine))):
        if other.reads & g.writes or other.writes & (g.reads | g.writes):
            return "one needs what the other, or a group between them, makes"
    return "" if len(mine) < MOST_BESIDE else f"{MOST_BESIDE} share a launch already"


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
    known = (c for c in found if c is not None and c.driver is None)
    each = {c.key: c for c in known}  # equal products are chosen for once
    begun = [c for c in each.values() if c.begin()]
    for chooser in begun:
        chooser.prepare()


def _chosen(program: Program, so_far: Chosen, name: str, loop_kernel: LoopKernel) -> Chosen:
    chooser = _chooser(program, so_far.groups, name, loop_kernel)
    if chooser is None:
        return so_far
    by = chooser.driver
    if by is None:
        return Chosen(chooser.chosen(), so_far.complete and chooser.complete)
    question = dynamic.Question(
        by,
        chooser.site.bare.problem,
        lambda offers: _chooser(program, so_far.groups, name, loop_kernel, offers),
        chooser.library,
    )
    found = chooser.of_sizes(question)
    return Chosen(found, so_far.complete and question.complete)


def _chooser(program: Program, groups: list[Group], name: str,
             loop_kernel: LoopKernel, offers: Sequence[dynamic.Offer] = ()
             ) -> _Chooser | None:  # fmt: skip
    position = _position(groups, name)
    site = "it is part of another" if position is None else fuse.site(program, groups, position)
    if isinstance(site, str):
        log.debug("%s is not chosen for: %s", name, site)
        return None
    return _Chooser(program, groups, dynamic.union(site, offers), loop_kernel, offers)


def _position(groups: Sequence[Group], name: str) -> int | None:
    places = (k for k, g in enumerate(groups) if g.call is not None and g.call.name == name
              and g.when is None)  # fmt: skip
    return next(places, None)


class _Chooser:
    def __init__(self, program: Program, groups: list[Group], site: Site,
                 loop_kernel: LoopKernel, offers: Sequence[dynamic.Offer] = ()
                 ) -> None:  # fmt: skip
        self.program = program
        self.groups = groups
        self.site = site
        self.offers = offers  # instead of what providers have
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
        for counter in FUSION_COUNTERS.get(winner.provider, ()):
            metrics.counters["inductor"][counter] += len(winner.fusion.problem.epilogue)
        decided(Decision(self._title(), str(winner), why))
        if isinstance(winner.candidate, aten.AtenCandidate):
            return self.groups  # it is called already
        if winner.candidate == problem.library:
            return self._called()
        return self._replaced(winner, why)

    # ---- sizes that are not known

    @property
    def driver(self) -> dynamic.Driver | None:
        """The size that kernels are measured for many values of, if there is one."""
        problem = self.site.bare.problem
        timed = not config.deterministic and effort() != "none" and self._measurable()
        plain = problem.operator is None and not problem.providers
        return dynamic.driver(problem) if timed and plain else None

    @property
    def library(self) -> Candidate | None:
        found = (c for f, c in self._candidates() if c.provider == "ATEN" and f is self.site.bare)
        return next(found, None)

    def found(self) -> tuple[Fusion, Candidate, str]:
        winner, why = self._winner()
        return winner.fusion, winner.candidate, why

    def timed(self) -> dict[str, float]:
        """Microseconds of each offer that is right, by its name."""
        try:
            names = {p.name: p.candidate.name for p in self.plans}
            with self._apart():
                verdict = select.choose(self._subject(self.plans), self.plans)
        finally:
            self._release()
        self.complete = verdict.complete
        found = {names[plan]: t.median_us for plan, t in verdict.times.items()
                 if plan not in verdict.rejected}  # fmt: skip
        winner = names[verdict.winner.name]
        # a choice that another process made comes without times
        return found if winner in found else {winner: 1.0}

    def of_sizes(self, question: dynamic.Question) -> list[Group]:
        """The groups with a kernel for each range of sizes."""
        key = store.key("sizes", self.key, number(question.by.size), str(question.by.hint))
        parts = self._own(_sized.get(key, [])) or question.parts()
        if question.complete:
            _sized[key] = parts
        for part in parts:
            metrics.counters["gemm"][part.candidate.provider] += 1
            title = f"{part.candidate.inner.name} for {part.fusion.problem}"
            decided(Decision(self._title(), title, part.why))
        if all(isinstance(p.candidate.inner, aten.AtenCandidate) for p in parts):
            return self.groups  # it is called already
        return put_ranges(self.program, self.groups, self.site, question.by.size, parts)

    def _own(self, parts: Sequence[dynamic.Part]) -> list[dynamic.Part]:
        """What was chosen for an equal product, here; nothing where neighbours differ."""
        mine: dict[str, Fusion] = {}
        for part in parts:
            with ix.supposing(dict(part.candidate.made_at) or None):
                site = fuse.site(self.program, self.groups, self.site.position)
            fusions = () if isinstance(site, str) else (site.bare, *site.fusions)
            mine |= {f.problem.key: f for f in fusions}
        if any(p.fusion.problem.key not in mine for p in parts):
            return []
        return [replace(p, fusion=mine[p.fusion.problem.key]) for p in parts]

    def _called(self) -> list[Group]:
        """The operator itself, in place of a call that templates could have computed."""
        call = self.site.call
        if not hasattr(call.target, "plain"):
            return self.groups  # it is called already
        plain = replace(self.groups[self.site.position], call=call.target.plain(call))
        return [plain if k == self.site.position else g for k, g in enumerate(self.groups)]

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
            with self._apart():
                select.prepare(self._subject(self.plans), self.plans)
        finally:
            self._release()

    def _apart(self) -> contextlib.AbstractContextManager[None]:
        """All are timed in a process of their own, if a foreign kernel is among them: one that
        writes where it must not would take the user's program with it."""
        if self.device.type == "cuda" and any(plan.is_foreign for plan in self.plans):
            return config.patch(autotune_in_subproc=True)
        return contextlib.nullcontext()

    def _release(self) -> None:
        """Give up the memory that plans were timed on: the next ones find it where it was."""
        for plan in self.plans:
            plan.work.release()
        del self.plans

    # ---- deciding

    def _winner(self) -> tuple[Winner, str]:
        known = _memo.get(self.key)
        if known is not None:
            for fusion, candidate in self._candidates():
                if (fusion.problem.key, candidate.name) == known[:2]:
                    return Winner(fusion, candidate), known[2]
        if not self.plans:
            raise _nobody(self.site, self.rejected)
        try:
            with self._apart():
                plan, why = self._selected(self.plans)
        finally:
            self._release()
        if self.complete:
            _memo[self.key] = plan.fusion.problem.key, plan.candidate.name, why
        return Winner(plan.fusion, plan.candidate), why

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
            size=plans[0].work.bench.memory.size,
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
        sms = available_sms(self.site.bare.problem.target)
        sizes = [repr(sorted(ix.supposed().items()))] if ix.supposed() else []
        return store.key("site", *problems, repr(config.code_key()), str(takes_tf32()), str(sms),
                         *sizes)  # fmt: skip

    def _measurable(self) -> bool:
        return self.device.type == "cpu" or torch.cuda.is_available()

    # ---- plans

    def _candidates(self) -> list[tuple[Fusion, Candidate]]:
        """For the product alone and for every fusion of it, library first."""
        if self.offers:
            return list(self.offers)
        found: list[tuple[Fusion, Candidate]] = []
        for fusion in (self.site.bare, *self.site.fusions):
            for provider in fusion.problem.providers or enabled():
                try:
                    ask = functools.partial(self._offers, provider, fusion.problem)
                    own = type(provider).__module__.partition(".")[0] == "tilewright"
                    reason, offered = ask() if own else within(PATIENCE, ask, "it offers nothing")
                except (Exception, SystemExit) as error:  # anybody's: it costs what they offer
                    reason, offered = f"it raised {type(error).__name__}: {error}", []
                    log.warning("%s offers nothing for %s: %s", provider.name, fusion.problem,
                                reason, exc_info=True)  # fmt: skip
                if reason:
                    self.rejected[f"{provider.name} for {fusion.problem}"] = reason
                found += [(fusion, c) for c in offered]
        alone = [(f, c) for f, c in found if f is self.site.bare]
        fused = [(f, c) for f, c in found if f is not self.site.bare]
        library = [(f, c) for f, c in alone if c.provider in ("ATEN", "CUBLASLT")]
        others = [(f, c) for f, c in alone if c.provider not in ("ATEN", "CUBLASLT")]
        if library and config.test_configs.force_extern_kernel_in_multi_template:
            return library
        if fused and not is_filtered():
            few = sorted(others, key=lambda found: found[1].estimate)[:MOST_UNFUSED]
            others = [found for found in others if any(found is kept for kept in few)]
        return [*library, *fused, *others]

    def _offers(self, provider: Provider, problem: GemmProblem) -> tuple[str, list[Candidate]]:
        """Why a provider has nothing, or what it has; who offers without end is not heard out."""
        reason = provider.supports(problem)
        if reason:
            return reason, []
        offered = provider.candidates(problem, effort())
        return "", self._whole(itertools.islice(offered, MOST_OFFERED))

    def _whole(self, offered: Iterable[Candidate]) -> list[Candidate]:
        """Those that say what they are ordered by."""
        found: list[Candidate] = []
        for candidate in offered:
            try:
                _ = candidate.provider, candidate.estimate < 0
                found.append(candidate)
            except (Exception, SystemExit) as error:
                self.rejected[f"a candidate {type(candidate).__name__}"] = repr(error)
        return found

    @functools.cached_property
    def plans(self) -> list[Plan]:
        found = self._candidates()
        if not found:
            return []
        around = self._around()
        bench = Bench(self._memory(around), tolerance(self.site.bare.problem.dtype))
        loops = {k: self._loop(self.groups[k]) for k in around}
        self.loop_times = {k: time for k, (_, time) in loops.items()}
        made = (self._made(fusion, candidate, bench, loops) for fusion, candidate in found)
        plans = [plan for plan in made if plan is not None]
        if not plans:
            return []
        if plans[0].is_library:
            bench.library = plans[0].work
        else:
            problem = self.site.bare.problem
            library = problem.library or aten.AtenCandidate(problem)
            bench.library = self._plan(self.site.bare, library, bench, loops).work
        return plans

    def _made(self, fusion: Fusion, candidate: Candidate, bench: Bench,
              loops: Mapping[int, tuple[Part, float]]) -> Plan | None:  # fmt: skip
        """The plan of a candidate, unless it raises: then it is rejected."""
        try:
            plan = self._plan(fusion, candidate, bench, loops)
            _ = plan.key, plan.name, plan.description
            return plan
        except (Exception, SystemExit) as error:
            self.rejected[f"a candidate of {candidate.provider}"] = repr(error)
            log.warning("a candidate of %s is rejected: %r", candidate.provider, error)
            return None

    def _plan(self, fusion: Fusion, candidate: Candidate, bench: Bench,
              loops: Mapping[int, tuple[Part, float]]) -> Plan:  # fmt: skip
        own = type(candidate).__module__.partition(".")[0] == "tilewright"
        make = candidate.kernel
        kernel = make() if own else within(PATIENCE, make, "it makes no kernel")
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
        with ix.supposing(None):  # a loop has one kernel for all sizes
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
        # an argument of a backward graph may be a number computed of symbols
        sizes = (e for n in names for b in (self.program.buffers[n],) for e in (*b.size, *b.stride))
        symbols = {s.arg.name: ix.likely(s) for s in syms(*self.program.symbols.values(), *sizes)}
        views = [a for a in (*call.args, call.out) if isinstance(a, View)]
        extents = [(v.buffer, extent(v.size, v.stride, v.offset)) for v in views]
        buffers = tuple(self.program.buffers[n] for n in sorted(names))
        return Memory(Described(buffers, tuple(sorted(symbols.items())), tuple(compared),
                                tuple(sorted(extents)), roofline(self.site.bare.problem),
                                tuple(sorted(written)), self._contents()))  # fmt: skip

    def _contents(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        names = self.site.bare.names
        return tuple((names[b], values) for b, values in self.site.bare.problem.contents.items())

    def _outside(self, fusion: Fusion) -> set[str]:
        """What the groups that a fusion leaves out write."""
        inside = {*fusion.before, fusion.after}
        return {b for k in self._around() if k not in inside for b in self.groups[k].writes}

    # ---- the result

    def _replaced(self, winner: Winner, why: str) -> list[Group]:
        return put(self.program, self.groups, self.site.position, winner, why, self.site.refused)


def _told(verdict: select.Verdict) -> str:
    """How it was chosen, for a reader: its time, those of the fastest others, and why it is taken
    where one of them is faster."""
    alive = {name: t for name, t in verdict.times.items() if name not in verdict.rejected}
    own = verdict.winner.name
    others = sorted(alive.keys() - {own}, key=lambda name: alive[name].median_us)[:2]
    shown = [*([own] if own in alive else []), *others]
    times = ", ".join(f"{name} {alive[name].median_us:.3g} us" for name in shown)
    parts = [f"{verdict.source}: {times}" if times else verdict.source, verdict.why]
    if not verdict.why and own in alive and others and (
        alive[others[0]].median_us < alive[own].median_us):  # fmt: skip
        parts.append(f"within {100 * ADVANTAGE:.2g} % they are equals, of which the first is taken")
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
class Decision:
    """Who computes what, and why."""

    site: str
    winner: str
    why: str


decisions: deque[Decision] = deque(maxlen=1000)
"""The latest decisions of this process, for reports."""
_all = itertools.count()
_number = next(_all)


def decided(decision: Decision) -> None:
    """It was decided, now or by the process that a program is kept from."""
    global _number
    decisions.append(decision)
    _number = next(_all)


def mark() -> int:
    """Where decisions are now, for `since`."""
    return _number


def since(mark: int) -> tuple[Decision, ...]:
    """What was decided after that."""
    return tuple(decisions)[len(decisions) - min(_number - mark, len(decisions)) :]


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
_sized: dict[str, list[dynamic.Part]] = {}  # site -> who computes which sizes
caches.register(_memo.clear)
caches.register(_sized.clear)
