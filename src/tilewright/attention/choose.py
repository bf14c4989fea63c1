"""`choose`: who computes each call of attention of a program. Its kernels take the call's place."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright import metrics
from tilewright.attention import problem as problems
from tilewright.attention import providers
from tilewright.attention.problem import AttentionProblem
from tilewright.attention.provider import PROVIDERS, Candidate, Launch
from tilewright.gemm.choose import Decision, decided
from tilewright.gemm.problem import window
from tilewright.gemm.provider import Argument, Kernel
from tilewright.ir import index as ix
from tilewright.ir.attention import Attention
from tilewright.ir.program import Opaque, Program, View
from tilewright.runtime.cxx import CxxSource
from tilewright.runtime.triton_build import TritonSource
from tilewright.schedule.fusion.group import Group

log = logging.getLogger("tilewright.choose")
providers.load()


@dataclass(frozen=True)
class Implementation:
    """What an opaque call has for a target once its kernel is chosen."""

    problem: AttentionProblem
    kernel: Kernel
    names: tuple[tuple[str, str], ...]  # the kernel's buffers -> the program's
    writes: tuple[str, ...]  # in the kernel's names
    chosen: str  # who, and why, for a reader

    @property
    def __name__(self) -> str:
        return self.kernel.name

    @property
    def result(self) -> str:
        """One of the program's buffers it reads: on the device it runs on."""
        return dict(self.names)[self.problem.views[0].buffer]

    @property
    def resort(self) -> Resort:
        """What runs where the kernel cannot be had, called as it would be."""
        return Resort(self.problem, self.writes, tuple(name for _, name in self.kernel.arguments))

    @property
    def arguments(self) -> tuple[Argument, ...]:
        names = dict(self.names)
        return tuple((kind, names.get(name, name)) for kind, name in self.kernel.arguments)


@dataclass(frozen=True)
class Resort:
    """Torch's own operations in place of one kernel, where it cannot be built: they compute the
    whole call, and what that kernel writes is kept."""

    problem: AttentionProblem
    writes: tuple[str, ...]
    names: tuple[str, ...]  # of what it is called with

    @property
    def text(self) -> str:
        return f"# {self.problem}"

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        with torch.no_grad():
            found = self._joined(given) if "q" not in given else self._computed(given)
        if "part_out" in self.writes:
            self._first_part(given, found)
            return
        for view, result in zip(self.problem.results, found, strict=False):
            if view.buffer in self.writes:
                window(view, given).copy_(result)

    def _computed(self, given: dict[str, Any]) -> Sequence[torch.Tensor]:
        node = self.problem.node
        operands = [window(v, given) for v in self.problem.views]
        memory = [given.get(b.name) for b in node.buffers]
        if not set(node.added) <= set(self.writes):  # another kernel adds to it
            memory = [None if b.name in node.added else m
                      for b, m in zip(node.buffers, memory, strict=True)]  # fmt: skip
            node = replace(node, stores=())
        return node(*operands, *memory, *(given[e.arg.name] for e in node.numbers))

    def _joined(self, given: dict[str, Any]) -> Sequence[torch.Tensor]:
        """What programs that shared out keys have found."""
        out, lse = (window(v, given) for v in self.problem.results)
        sums = given["part_lse"].view(-1, *lse.shape)
        parts = given["part_out"].view(-1, *out.shape)
        top = sums.amax(0).nan_to_num(neginf=0.0)
        weights = torch.exp2(sums - top)
        total = weights.sum(0)
        found = (weights[..., None] * parts).sum(0) / total.clamp_min(1e-30)[..., None]
        return found, torch.where(total == 0, -math.inf, total.log2() + top)

    def _first_part(self, given: dict[str, Any], found: Sequence[torch.Tensor]) -> None:
        rows = found[1].numel()
        given["part_lse"].fill_(-math.inf)[:rows].copy_(found[1].reshape(-1))
        given["part_out"].zero_()[:rows].copy_(found[0].reshape(rows, -1))


def choose(program: Program, groups: Sequence[Group]) -> list[Group]:
    """The groups with the kernels of every call of attention in its place."""
    found: list[Group] = []
    for group in groups:
        call = group.call
        if call is not None and isinstance(call.target, Attention):
            found += _chosen(program, group, call)
        else:
            found.append(group)
    return found


def _chosen(program: Program, group: Group, call: Opaque) -> list[Group]:
    problem, names = problems.of_call(program, call)
    if any(ix.value_of(n) == 0 for v in problem.results for n in v.size):
        return [group]  # nothing is computed
    rejected: dict[str, str] = {}
    candidates: list[Candidate] = []
    for provider in PROVIDERS.values():
        reason = provider.supports(problem)
        if reason:
            rejected[provider.name] = reason
        else:
            candidates += provider.candidates(problem, "default")
    if not candidates:
        metrics.counters["attention"]["torch"] += 1
        why = "; ".join(f"{who}: {reason}" for who, reason in rejected.items())
        log.warning("torch's own operations compute %s: %s", problem, why)
        decided(Decision(str(problem), "torch's own operations", why))
        return [group]
    winner = min(candidates, key=lambda c: c.estimate)
    why = f"estimated: {winner.estimate:.3g} us"
    metrics.counters["attention"][winner.provider] += 1
    decided(Decision(str(problem), winner.name, why))
    return _replaced(program, group, call, _Choice(problem, names, winner, why))


@dataclass(frozen=True)
class _Choice:
    problem: AttentionProblem
    names: dict[str, str]
    winner: Candidate
    why: str


def _replaced(program: Program, group: Group, call: Opaque, choice: _Choice) -> list[Group]:
    """A group for each kernel; memory that only they use is the program's from here on."""
    plan = choice.winner.plan()
    names = dict(choice.names)
    for buffer in plan.local:
        names[buffer.name] = f"{call.name}_{buffer.name}"
        program.buffers[names[buffer.name]] = replace(buffer, name=names[buffer.name])
    return [_group(program, group, call, choice, launch, names, k)
            for k, launch in enumerate(plan.launches)]  # fmt: skip


def _group(program: Program, group: Group, call: Opaque, choice: _Choice, launch: Launch,
           names: dict[str, str], number: int) -> Group:  # fmt: skip
    kernel = launch.kernel
    memory = [names[name] for _, name in kernel.arguments if name in names]
    written = tuple(dict.fromkeys(names[n] for n in launch.writes))
    added = {names[n] for n in choice.problem.node.added}
    views = tuple(_whole(program, n) for n in memory if n not in written or n in added)
    target = Implementation(choice.problem, kernel, tuple(names.items()), launch.writes,
                            f"{choice.winner.name}, {choice.why}")  # fmt: skip
    ours = isinstance(kernel.source, CxxSource | TritonSource)
    made = Opaque(
        f"{call.name}_chosen{number}",
        target,
        views,
        {},
        (),
        written,
        call.origin,
        fills=tuple(n for n in written if n not in added),
        generated=ours,
    )
    return Group(call=made, refused=dict(group.refused))


def _whole(program: Program, name: str) -> View:
    b = program.buffers[name]
    return View(name, b.size, b.stride, ix.ZERO, b.dtype)
