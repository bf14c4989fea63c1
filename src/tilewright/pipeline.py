"""The compiler on one screen: the named stages in order. No stage calls the next."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from tilewright import config, dump, metrics
from tilewright.codegen.cpp import kernel as cpp
from tilewright.codegen.triton import generate as triton
from tilewright.codegen.triton.alike import Kernels, told_once
from tilewright.codegen.triton.epilogue import with_epilogues
from tilewright.errors import stage
from tilewright.gemm import provider
from tilewright.gemm.choose import Implementation, choose
from tilewright.gemm.provider import Argument
from tilewright.graph.batch import batch
from tilewright.graph.boundary import EVERYTHING, Boundary, return_arguments
from tilewright.graph.distinct import store_distinct
from tilewright.graph.gradients import one_by_one
from tilewright.graph.layout import channels_last, eager_strides
from tilewright.graph.picked import compared
from tilewright.graph.simplify import simplify
from tilewright.graph.user_kernels import Launch
from tilewright.host import artifact, cudagraphs, kernels, user_kernels
from tilewright.host.artifact import Artifact, Source
from tilewright.host.program import HostProgram, KernelCall, assemble
from tilewright.ir.program import Program
from tilewright.ir.verify import verify
from tilewright.lower.graph import lower
from tilewright.runtime.user_kernel import UserSource
from tilewright.schedule.group import Group
from tilewright.schedule.plan import Grouping, Schedule, arranged, planned
from tilewright.target import Target

log = logging.getLogger("tilewright.generate")

Compiled = Callable[[list[Any]], Any]

GENERATED = frozenset({"cpu", "cuda"})  # devices we write kernels for


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
        if name is not None and found.complete:
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
    dump.code(found.text(origin.locations), found.kernels)
    seconds = time.perf_counter() - start
    metrics.compile_seconds += seconds
    dump.summary(found.counted, seconds, cached)
    return compiled


def build(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> Artifact:
    """Every stage, from a graph to sources under construction."""
    return write(decide(gm, boundary))


def write(plan: Schedule) -> Artifact:
    """The stages that write what was decided."""
    with stage("generate"):
        groups, alike = [step.group for step in plan.steps], Kernels()
        made = [_begun(_generate(plan.program, group, k, alike)) for k, group in enumerate(groups)]
        made = user_kernels.named(made)
    sources = {call.name: source for call, source in filter(None, made)}
    found = Artifact(HostProgram(""), sources, kernels.spares(plan.program, groups, made))
    found.complete = plan.complete

    with stage("assemble"):
        calls = [None if m is None else m[0] for m in made]
        found.host = assemble(plan.program, plan.steps, calls)
        if config.triton.cudagraphs:
            found.replay = cudagraphs.facts(plan.program, plan.steps)
    return found


def decide(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING,
           devices: frozenset[str] = GENERATED) -> Schedule:  # fmt: skip
    """The stages that decide what will run, without writing it: all traffic is known after them.

    The graph is simplified in place.
    """
    dump.stage("graph", gm)

    with stage("graph"):
        return_arguments(gm, boundary)
        eager_strides(gm.graph)
        simplify(gm)
        batch(gm)
        if boundary.role == "inference" and config.layout_optimization:
            channels_last(gm.graph)
        if boundary.role == "inference":  # a joint graph's are stored before it is parted
            store_distinct(gm.graph)
        if boundary.role == "backward":
            one_by_one(gm.graph)
            compared(gm.graph)
    dump.stage("simplified", gm)

    with stage("lower"):
        pads = config.pad_outputs and boundary.role == "inference"
        program: Program = lower(gm, devices, boundary.donated, pads)
        verify(program)
        if config.epilogue_fusion_user_defined_triton_kernel:
            program = with_epilogues(program)
    dump.stage("lowered", program)

    with stage("schedule"):
        limits = told_once(_cannot)
        groups: Grouping = arranged(program, limits)

    with stage("choose"):
        chosen = choose(groups.program, groups.groups, _loop_kernel)
        groups = Grouping(groups.program, chosen.groups, chosen.complete)

    with stage("schedule"):
        plan: Schedule = planned(groups, boundary.role == "backward", limits)
    dump.stage("scheduled", plan)
    return plan


def _begun(made: tuple[KernelCall, Source] | None) -> tuple[KernelCall, Source] | None:
    """Its compiler runs while the next kernels, and then the host program, are written."""
    if made is not None:
        artifact.begin(made[1])
    return made


def _generate(program: Program, group: Group, k: int, alike: Kernels
              ) -> tuple[KernelCall, Source] | None:  # fmt: skip
    """The kernel of a group, for the device its buffers are on; None for a call of others' code."""
    if group.call is not None:
        match group.call.target:
            case Launch():
                return user_kernels.user_kernel(program, group.call)
            case Implementation() as chosen:
                return kernels.chosen(program, chosen, k)
            case _:
                return None
    nodes = dict.fromkeys(n for m in group.nodes for n in m.origin.nodes)
    ops = "_".join(dict.fromkeys(re.sub(r"_\d+$", "", n) for n in nodes))[:60].strip("_")
    device = program.buffers[min(group.writes)].device
    if device.type == "cpu":
        return kernels.cpp(program, cpp.generate(program, group), f"cpp_fused_{ops}_{k}")
    target = Target.of(device)
    try:
        kernel = alike.generate(program, group, target, ops)
        wide = alike.generate(program, group, target, ops, wide=True) if kernel.assume else None
    except Exception as why:  # a fault of ours costs speed, never the user's program
        metrics.counters["triton"][f"no kernel: {type(why).__name__}: {why}"] += 1
        log.warning("torch's own operations run %s: %s: %s", ops, type(why).__name__, why)
        return kernels.spare(program, group, f"torch_{ops}_{k}")
    return kernels.triton(program, kernel, wide, f"{kernel.name}_{k}", device)


def _cannot(program: Program, group: Group) -> str:
    """Why the group's device cannot run it as one kernel."""
    device = program.buffers[min(group.writes)].device
    return "" if device.type == "cpu" else triton.limits(program, group, Target.of(device))


def _loop_kernel(program: Program, group: Group) -> tuple[Sequence[Argument], provider.Source]:
    """The kernel of a group of loops, for plans that run it beside a product."""
    made = _generate(program, group, 0, Kernels())
    assert made is not None and not isinstance(made[1], UserSource)
    return made[0].args, made[1]
