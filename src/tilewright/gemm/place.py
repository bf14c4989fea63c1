"""What was chosen for a product, in its place among the groups of a program."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import metrics
from tilewright.gemm import aten, dynamic
from tilewright.gemm.fuse import Fusion, Site
from tilewright.gemm.padded import PaddedCall
from tilewright.gemm.problem import GemmProblem, into
from tilewright.gemm.provider import FUSION_COUNTERS, Argument, Candidate, Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Opaque, Origin, Program, View
from tilewright.runtime.cxx import CxxSource
from tilewright.runtime.triton_build import TritonSource
from tilewright.schedule.fusion.group import Group, When

log = logging.getLogger("tilewright.choose")

MOST_NAMED = 60  # letters of the name of a kernel that say what is fused


@dataclass(frozen=True)
class Implementation:
    """What an opaque call has for a target once its kernel is chosen."""

    problem: GemmProblem
    kernel: Kernel
    names: tuple[tuple[str, str], ...]  # the kernel's buffers -> the program's
    chosen: str  # who, and why, for a reader
    candidate: Any = None

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


@dataclass(frozen=True)
class Winner:
    """A candidate and what it computes."""

    fusion: Fusion
    candidate: Candidate

    @property
    def provider(self) -> str:
        return self.candidate.provider

    def __str__(self) -> str:
        return f"{self.candidate.name} for {self.fusion.problem}"


def put(program: Program, groups: Sequence[Group], position: int, winner: Winner, why: str,
         refused: Mapping[str, str] | None = None) -> list[Group]:  # fmt: skip
    """The groups with the winner in place of the product at `position` and of what it takes in."""
    fusion = winner.fusion
    gone = {*fusion.before, position}
    place = position if fusion.after is None else fusion.after
    made = implemented(program, groups, position, winner, why)
    _count([groups[k] for k in sorted(gone | {place})], made.generated, winner.provider)
    result = list(groups)
    result[place] = Group(call=made, refused=dict(refused or {}))
    return [g for k, g in enumerate(result) if k == place or k not in gone]


def implemented(program: Program, groups: Sequence[Group], position: int, winner: Winner, why: str
                ) -> Opaque:  # fmt: skip
    """The call of the winner's kernel."""
    fusion, candidate = winner.fusion, winner.candidate
    call = groups[position].call
    assert call is not None
    problem = fusion.problem
    views = tuple(_whole(program, fusion.names[b]) for b in problem.reads)
    written = tuple(fusion.names[b] for b in problem.writes)
    gone = {*fusion.before, position}
    place = position if fusion.after is None else fusion.after
    taken = [groups[k] for k in sorted(gone | {place})]
    origin = origin_of(taken)
    label = "_".join(sorted({re.sub(r"_\d+$", "", n) for n in origin.nodes}))[:MOST_NAMED]
    kernel = candidate.kernel()
    if isinstance(kernel.source, TritonSource):
        # the function in its text is named by the product: equal kernels are built once,
        # whatever their programs call what is fused
        kernel = replace(kernel, name=f"triton_tem_fused_{label}")
    target = Implementation(
        problem, kernel, tuple(fusion.names.items()), f"{candidate.name}, {why}", candidate
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
    who = candidate.provider.lower()
    counters = metrics.counters["inductor"]
    if candidate.provider not in FUSION_COUNTERS:  # which count stores
        counters[f"{who}_epilogue_fusion_counter"] += fusion.after is not None
    counters[f"{who}_prologue_fusion_counter"] += len(fusion.before)
    log.debug("%s: %s", label, target.chosen)
    return made


def joined(groups: Sequence[Group]) -> Group:
    """One call in place of several."""
    calls = [g.call for g in groups if g.call is not None]
    made = [c.target for c in calls]
    first: Implementation = made[0]
    each = ((f"{b}__{k}", name) for k, m in enumerate(made) for b, name in m.names)
    who = first.candidate.provider.lower()
    metrics.counters["inductor"][f"{who}_horizontal_fusion_counter"] += 1
    target = replace(
        first,
        kernel=first.candidate.together(len(made)),
        names=(*first.names, *each),
        chosen=f"{first.chosen}; {len(made)} in one launch",
    )
    views = tuple(dict.fromkeys(v for c in calls for v in c.args))
    written = tuple(dict.fromkeys(b for c in calls for b in c.mutates))
    call = replace(calls[0], target=target, args=views, mutates=written, fills=written,
                   origin=origin_of(groups))  # fmt: skip
    return replace(groups[0], call=call)


def handed_on(groups: Sequence[Group]) -> list[Group]:
    """The groups in their final order, where an operand that several products pad is copied by the
    first of them: both gradients of a product read that of its result (of the five copies of
    GPT-2's training, 1.4 of 17 ms on an H200, two were of it)."""
    found, made = list(groups), dict[Any, tuple[int, str]]()
    for k, group in enumerate(groups):
        for operand, name in _padded_operands(group).items():
            if operand in made:
                first, before = made[operand]
                found[first] = _told(found[first], leaves=before)
                found[k] = _told(found[k], finds=name)
            made[operand] = k, name
        made = {o: at for o, at in made.items() if o[0] not in group.writes}
    return found


def _padded_operands(group: Group) -> dict[Any, str]:
    """What a call of ours copies at every run: where it lies -> the call's name of it."""
    target = None if group.call is None or group.when is not None else group.call.target
    source = target.kernel.source if isinstance(target, Implementation) else None
    if not isinstance(target, Implementation) or not isinstance(source, PaddedCall):
        return {}
    names, found = dict(target.names), dict[Any, str]()
    for view in source.views[:2]:
        if view.buffer in source.constant:
            continue
        order = list(range(len(view.size)))
        if view.stride[-1] is not ix.ONE:  # contiguous down its columns: copied as its transpose
            order[-2:] = reversed(order[-2:])
        layout = tuple((view.size[d], view.stride[d]) for d in order)
        found.setdefault((names.get(view.buffer, view.buffer), view.offset, layout), view.buffer)
    return found


def _told(group: Group, leaves: str = "", finds: str = "") -> Group:
    assert group.call is not None
    made: Implementation = group.call.target
    source = made.kernel.source
    assert isinstance(source, PaddedCall)
    source = replace(
        source,
        leaves=tuple(sorted({*source.leaves, *([leaves] if leaves else [])})),
        finds=tuple(sorted({*source.finds, *([finds] if finds else [])})),
    )
    target = replace(made, kernel=replace(made.kernel, source=source))
    return replace(group, call=replace(group.call, target=target))


def _count(taken: Sequence[Group], ours: bool, provider: str) -> None:
    """Products that were counted as ATen's are another's: a kernel's, or another library's."""
    for group in taken:
        target = None if group.call is None else group.call.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        name = f"{target.overloadpacket}.default"
        if not metrics.fallback_ops[name]:
            continue
        metrics.fallback_ops[name] -= 1
        if not metrics.fallback_ops[name]:
            del metrics.fallback_ops[name]
        if ours:
            metrics.fallback_nodes -= 1
            metrics.native_nodes += 1
        else:
            metrics.fallback_ops[f"{provider.lower()}.{target.overloadpacket.__name__}"] += 1


def origin_of(groups: Sequence[Group]) -> Origin:
    origins = [n.origin for g in groups for n in g.nodes]
    names = tuple(dict.fromkeys(n for o in origins for n in o.nodes))
    return Origin(names, next((o.location for o in origins if o.location), ""))


def _whole(program: Program, name: str) -> View:
    b = program.buffers[name]
    return View(name, b.size, b.stride, ix.ZERO, b.dtype)


# ---- sizes that are not known


def put_ranges(program: Program, groups: Sequence[Group], site: Site, size: Expr,
               parts: Sequence[dynamic.Part]) -> list[Group]:  # fmt: skip
    """The groups with each part's kernel for its sizes; what some take in and others do not runs
    for those of the others. To all else it looks as if all of them ran, one after the other."""
    taken = [{*p.fusion.before, p.fusion.after} - {None} for p in parts]
    made = [_of_range(program, groups, site, size, part) for part in parts]
    _count([groups[site.position]], *_whose(parts))
    found: list[Group] = []
    for k, group in enumerate(groups):
        others = [r for p, t in zip(parts, taken, strict=True) if k not in t for r in p.ranges]
        if k == site.position:
            found += [m for m, p in zip(made, parts, strict=True) if p.fusion.after is None]
        elif len(others) == sum(len(p.ranges) for p in parts):
            found.append(group)
        else:
            found += [m for m, p in zip(made, parts, strict=True) if p.fusion.after == k]
            found += [replace(group, when=_when(size, others))] if others else []
    return found


def _whose(parts: Sequence[dynamic.Part]) -> tuple[bool, str]:
    """Whether any of these is a kernel of ours, and who is the first that is not eager's."""
    others = [p.candidate for p in parts if not isinstance(p.candidate.inner, aten.AtenCandidate)]
    ours = any(isinstance(c.kernel().source, CxxSource | TritonSource) for c in others)
    return ours, others[0].provider


def _when(size: Expr, ranges: Sequence[tuple[int, int | None]]) -> When | None:
    """These ranges, those that meet as one; None if they are all there is."""
    found: list[tuple[int, int | None]] = []
    for low, high in sorted(ranges, key=lambda r: r[0]):
        last = found[-1][1] if found else None
        if last is not None and last + 1 == low:
            found[-1] = found[-1][0], high
        else:
            found.append((low, high))
    return None if found == [(0, None)] else When(size, tuple(found))


def _of_range(program: Program, groups: Sequence[Group], site: Site, size: Expr,
              part: dynamic.Part) -> Group:  # fmt: skip
    when = _when(size, part.ranges)
    if isinstance(part.candidate.inner, aten.AtenCandidate):
        group = groups[site.position]
        return replace(group, call=_into_memory(program, site.call), when=when)
    winner = Winner(part.fusion, part.candidate)
    made = implemented(program, groups, site.position, winner, part.why)
    return Group(call=made, refused=dict(site.refused), when=when)


def _into_memory(program: Program, call: Opaque) -> Opaque:
    """The library's call, which writes where others of other sizes write too."""
    if call.out is not None:
        return call
    (name,) = call.results
    assert name is not None
    out = _whole(program, name)
    dtype = next((a for a in call.args if isinstance(a, torch.dtype)), None)
    target = into(call.target.overloadpacket.__name__, dtype)
    return replace(call, target=target, results=(), out=out)
