"""The compiler on one screen: the named stages in order. No stage calls the next."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx

from tilewright import dump, metrics
from tilewright.codegen.cpp.kernel import CppKernel, generate
from tilewright.errors import stage
from tilewright.graph.boundary import EVERYTHING, Boundary, return_arguments
from tilewright.graph.simplify import simplify
from tilewright.host import artifact
from tilewright.host.artifact import Artifact
from tilewright.host.program import HostProgram, KernelCall, assemble
from tilewright.ir.program import Program
from tilewright.ir.verify import verify
from tilewright.lower.graph import lower
from tilewright.runtime.cxx import CxxSource, submit
from tilewright.schedule.group import Group
from tilewright.schedule.plan import Schedule, schedule

Compiled = Callable[[list[Any]], Any]

# Devices we write kernels for; and those whose programs can be decided (and counted) as well.
GENERATED = frozenset({"cpu"})
COUNTED = frozenset({"cpu", "cuda"})


@dataclass(frozen=True)
class Origin:
    """Where a compiled program came from: enough to have it again without its graph."""

    artifact: str | None  # its name in the store, where it is kept
    constants: Mapping[str, Any]
    locations: Mapping[str, str]  # node -> the user's file and line


def compile_graph(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> Compiled:
    """A functional ATen graph with fake values on its nodes, as a callable program."""
    start = time.perf_counter()
    name = artifact.key(gm, boundary)
    found = artifact.find(name) if name is not None else None
    cached = found is not None
    if found is None:
        metrics.cache_misses += 1
        before = metrics.snapshot()
        found = build(gm, boundary)
        found.counted = metrics.delta(before)
        if name is not None:
            artifact.keep(name, found)
    origin = Origin(name, found.constants(gm), artifact.locations(gm))
    return _loaded(found, origin, cached, start)


def load_graph(origin: Origin) -> Compiled | None:
    """The program that was compiled before, if it is still kept."""
    start = time.perf_counter()
    found = artifact.find(origin.artifact) if origin.artifact is not None else None
    return None if found is None else _loaded(found, origin, cached=True, start=start)


def _loaded(found: Artifact, origin: Origin, cached: bool, start: float) -> Compiled:
    if cached:
        metrics.cache_hits += 1
        metrics.apply(found.counted)
    with stage("build"):
        compiled = found.load(origin.constants, origin.locations)
    compiled.origin = origin  # type: ignore[attr-defined]
    dump.code(found.host.located(origin.locations), found.kernels)
    seconds = time.perf_counter() - start
    metrics.compile_seconds += seconds
    dump.summary(found.counted, seconds, cached)
    return compiled


def build(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> Artifact:
    """Every stage, from a graph to sources under construction."""
    plan = decide(gm, boundary, GENERATED)
    with stage("generate"):
        kernels = [_generate(plan.program, step.group) for step in plan.steps]
    calls = _calls(plan, kernels)
    sources = {call.name: CxxSource(kernel.text, kernel.name, _kinds(kernel))
               for call, kernel in zip(calls, kernels, strict=True)
               if call is not None and kernel is not None}  # fmt: skip
    submit(list(sources.values()))  # the compiler runs while the host program is written

    with stage("assemble"):
        host: HostProgram = assemble(plan.program, plan.steps, calls)
    return Artifact(host, sources)


def decide(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING,
           devices: frozenset[str] = COUNTED) -> Schedule:  # fmt: skip
    """The stages that decide what will run, without writing it: all traffic is known after them.

    The graph is simplified in place.
    """
    dump.stage("graph", gm)

    with stage("graph"):
        return_arguments(gm, boundary)
        simplify(gm)
    dump.stage("simplified", gm)

    with stage("lower"):
        program: Program = lower(gm, devices)
        verify(program)
    dump.stage("lowered", program)

    with stage("schedule"):
        plan: Schedule = schedule(program)
    dump.stage("scheduled", plan)
    return plan


def _generate(program: Program, group: Group) -> CppKernel | None:
    return generate(program, group) if group.call is None else None


def _kinds(kernel: CppKernel) -> tuple[Any, ...]:
    return (*(p.kind for p in kernel.params), *(("ptr",) if kernel.checked else ()))


def _calls(plan: Schedule, kernels: list[CppKernel | None]) -> list[KernelCall | None]:
    """What the host program calls each kernel, and with which arguments."""
    calls: list[KernelCall | None] = []
    for k, (step, kernel) in enumerate(zip(plan.steps, kernels, strict=True)):
        if kernel is None:
            calls.append(None)
            continue
        nodes = dict.fromkeys(n for m in step.group.members for n in m.origin.nodes)
        ops = "_".join(dict.fromkeys(re.sub(r"_\d+$", "", n) for n in nodes))[:60].strip("_")
        args = tuple((p.kind, p.name) for p in kernel.params)
        calls.append(KernelCall(f"cpp_fused_{ops}_{k}", args, kernel.checked))
    return calls
