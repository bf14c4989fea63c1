"""The compiler on one screen: the named stages in order. No stage calls the next."""

from __future__ import annotations

import copy
import logging
import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx

from tilewright import config, dump, metrics, report
from tilewright.attention import choose as attention
from tilewright.codegen.cpp import kernel as cpp
from tilewright.codegen.triton import generate as triton
from tilewright.codegen.triton.dedup import Kernels, told_once
from tilewright.codegen.triton.launch import Summary
from tilewright.codegen.triton.user_epilogue import with_epilogues
from tilewright.errors import CodegenError, ScheduleError, TilewrightError, VerifyError, stage
from tilewright.gemm import choose as choices
from tilewright.gemm import provider
from tilewright.gemm.choose import choose
from tilewright.gemm.place import Implementation, handed_on
from tilewright.gemm.provider import Argument
from tilewright.graph.attention import prune
from tilewright.graph.batch import batch
from tilewright.graph.boundary import EVERYTHING, Boundary, return_arguments
from tilewright.graph.distinct import store_distinct
from tilewright.graph.freeze import parted
from tilewright.graph.gradients import one_by_one
from tilewright.graph.layout import channels_last, eager_strides
from tilewright.graph.passes import run as run_passes
from tilewright.graph.picked import compared
from tilewright.graph.points import as_products
from tilewright.graph.simplify import simplify
from tilewright.graph.user_kernels import Launch
from tilewright.host import artifact, body, cudagraphs, kernels, user_kernels
from tilewright.host.artifact import Artifact, Source
from tilewright.host.frozen import Frozen
from tilewright.host.program import HostProgram, KernelCall, assemble
from tilewright.host.verify import fault
from tilewright.ir.program import Program
from tilewright.ir.verify import verify
from tilewright.lower.graph import lower
from tilewright.runtime.user_kernel import UserSource
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.take_apart import Limits
from tilewright.schedule.plan import Grouping, Schedule, arranged, planned
from tilewright.schedule.traffic import traffic
from tilewright.target import KINDS, Target

log = logging.getLogger("tilewright.generate")

Compiled = Callable[[list[Any]], Any]

FAULTS = (TilewrightError, VerifyError, ScheduleError, CodegenError)
"""What a fault of ours raises, these classes themselves: others derived from them are meant for the
user."""


@dataclass(frozen=True)
class Origin:
    """Where a compiled program came from: enough to have it again without its graph."""

    artifact: str | None  # its name in the store, where it is kept
    constants: Mapping[str, Any]
    locations: Mapping[str, str]  # node -> the user's file and line


def compile_graph(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> Compiled:
    """A functional ATen graph with fake values on its nodes, as a callable program."""
    start = time.perf_counter()
    dump.graph(gm)
    name = artifact.key(gm, boundary)
    found = artifact.find(name) if name is not None else None
    cached = found is not None
    if found is None:
        metrics.cache_misses += 1
        if name is not None and (why := artifact.difference(name)):
            metrics.counters["graph_cache"][f"missed: {why}"] += 1
            log.info("a graph that was compiled before is not found: %s", why)
        before, mark = metrics.snapshot(), choices.mark()
        found = build(gm, boundary)
        found.counted = metrics.delta(before)
        found.decisions = choices.since(mark)
        if name is not None and found.complete:
            artifact.keep(name, found)
    constants = found.constants(gm)
    constants |= {body: _body(constants[body]) for body in found.host.bodies}
    origin = Origin(name, constants, artifact.locations(gm))
    return _loaded(found, origin, cached, start)


def compile_frozen(gm: torch.fx.GraphModule, static: Sequence[int],
                   compile_one: Callable[[torch.fx.GraphModule, Boundary], Compiled]
                   ) -> Compiled:  # fmt: skip
    """A graph of inference whose arguments `static` are weights: what is computed of them alone is
    not computed again while they stay the same (`config.freezing`)."""
    with stage("graph"):
        return_arguments(gm, EVERYTHING)
        eager_strides(gm.graph)
        simplify(gm)
        if config.layout_optimization:
            channels_last(gm.graph)
        found = parted(gm, static)
    if found is None:
        return compile_one(gm, EVERYTHING)
    once, rest = (compile_one(part, EVERYTHING) for part in (found.once, found.rest))
    metrics.counters["freezing"]["graphs parted"] += 1
    return Frozen(once, rest, found.weights, found.kept)


def _body(gm: torch.fx.GraphModule) -> Any:
    """A graph that an operator of the program calls, compiled once for all who refer to it; as it
    is where that cannot be, with the reason in `metrics.counters["control"]`."""
    name = artifact.key(gm)
    found = _bodies.get(name) if name is not None else getattr(gm, "_compiled_body", None)
    if found is not None:
        metrics.counters["control"]["bodies shared"] += 1
        return found
    graph, single = body.as_tuple(gm)
    try:
        made = body.Body(compile_graph(graph), single, body.layouts(graph))
    except Exception as why:  # eager runs any body
        metrics.counters["control"][f"a body left to eager: {type(why).__name__}: {why}"] += 1
        log.warning("a body of control flow is left to eager: %s: %s", type(why).__name__, why)
        return gm
    metrics.counters["control"]["bodies compiled"] += 1
    if name is not None:
        _bodies[name] = made
    else:
        gm._compiled_body = made  # type: ignore[assignment]
    return made


_bodies: weakref.WeakValueDictionary[str, body.Body] = weakref.WeakValueDictionary()


def load_graph(origin: Origin) -> Compiled | None:
    """The program that was compiled before, if it is still kept."""
    start = time.perf_counter()
    found = artifact.find(origin.artifact) if origin.artifact is not None else None
    return None if found is None else _loaded(found, origin, cached=True, start=start)


def load_artifact(found: Artifact, origin: Origin) -> Compiled:
    """The program of an artefact that somebody kept elsewhere."""
    return _loaded(found, origin, cached=True, start=time.perf_counter())


def _loaded(found: Artifact, origin: Origin, cached: bool, start: float) -> Compiled:
    if cached:
        metrics.cache_hits += 1
        metrics.apply(found.counted)
        for decision in found.decisions:
            choices.decided(decision)
        dump.decided_before(found.groups, found.decisions)
    dump.reasons(found.groups, found.hints, found.decisions)
    with stage("build"):
        compiled = found.load(origin.constants, origin.locations)
    compiled.origin, compiled.artifact = origin, found  # type: ignore[attr-defined]
    dump.code(found.text(origin.locations), found.kernels)
    seconds = time.perf_counter() - start
    metrics.compile_seconds += seconds
    dump.summary(found.counted, seconds, cached)
    return compiled


def build(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING) -> Artifact:
    """Every stage, from a graph to sources under construction.

    A program that turns out not to be sound is a fault of ours, and costs speed alone: its products
    are the library's, and if that does not help either, the graph is run node by node.
    """
    limits = told_once(_cannot)
    groups = grouped(gm, boundary, limits=limits)
    faults: list[TilewrightError] = []
    for chooses in (True, False):
        try:
            found = write(finished(groups, boundary, limits, chooses))
            break
        except FAULTS as why:
            if config.verify_ir or type(why) not in FAULTS:
                raise
            faults.append(why)
    else:
        found = artifact.node_by_node(gm)
    if faults:
        found.complete = False  # not kept: what mends the fault mends the program
        _report(faults)
    return found


def _report(faults: Sequence[TilewrightError]) -> None:
    """Once, what was wrong and what is done instead."""
    metrics.counters["host"][f"not sound: {faults[0].message}"] += 1
    instead = "the library computes its products" if len(faults) == 1 else "torch runs its graph"
    log.warning(
        "a program is not sound, so %s: %s. This is a fault of tilewright, not of your program, "
        "whose results are right; please report it with what TILEWRIGHT_VERIFY_IR=1 raises",
        instead,
        faults[0].message,
    )


def write(plan: Schedule) -> Artifact:
    """The stages that write what was decided."""
    with stage("generate"):
        groups, alike = [step.group for step in plan.steps], Kernels()
        made = [_begun(_generate(plan.program, group, k, alike)) for k, group in enumerate(groups)]
        made = user_kernels.named(made)
    sources = {call.name: source for call, source in filter(None, made)}
    found = Artifact(HostProgram(""), sources, kernels.spares(plan.program, groups, made))
    found.complete = plan.complete
    told = report.graph("graph", plan, alike.plans)
    found.groups, found.hints = str(told), told.hints

    with stage("assemble"):
        calls = [None if m is None else m[0] for m in made]
        found.host = assemble(plan.program, plan.steps, calls)
        reason = fault(plan.program, plan.steps, calls, found.text({}), found.names)
        if reason:
            raise VerifyError(reason)
        if config.triton.cudagraphs:
            found.replay = cudagraphs.facts(plan.program, plan.steps)
    return found


def decide(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING,
           devices: frozenset[str] = KINDS) -> Schedule:  # fmt: skip
    """The stages that decide what will run, without writing it: all traffic is known after them.

    The graph is simplified in place.
    """
    limits = told_once(_cannot)
    return finished(grouped(gm, boundary, devices, limits), boundary, limits)


def grouped(gm: torch.fx.GraphModule, boundary: Boundary = EVERYTHING,
            devices: frozenset[str] = KINDS, limits: Limits | None = None
            ) -> Grouping:  # fmt: skip
    """The stages before products are chosen for. The graph is simplified in place."""
    dump.stage("graph", gm)
    alone = boundary.role == "inference"

    with stage("graph"):
        if alone:  # there is no joint graph
            run_passes("joint_custom_pre_pass", config.joint_custom_pre_pass, gm)
            run_passes("joint_custom_post_pass", config.joint_custom_post_pass, gm)
        run_passes("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass, gm, alone)
        return_arguments(gm, boundary)
        prune(gm.graph)
        eager_strides(gm.graph)
        simplify(gm)
        tuned = config.max_autotune or config.max_autotune_gemm
        if config.conv_1x1_as_mm or tuned:
            as_products(gm, channels_last=not config.conv_1x1_as_mm)
        batch(gm, lambda found: _bytes_of(found, boundary, devices))
        if alone and config.layout_optimization:
            channels_last(gm.graph)
        if alone:  # a joint graph's are stored before it is parted
            store_distinct(gm.graph)
        if boundary.role == "backward":
            one_by_one(gm.graph)
            compared(gm.graph)
        run_passes("post_grad_custom_post_pass", config.post_grad_custom_post_pass, gm, alone)
    dump.stage("simplified", gm)

    with stage("lower"):
        pads = config.pad_outputs and alone
        program: Program = lower(gm, devices, boundary.donated, pads)
        verify(program)
        if config.epilogue_fusion_user_defined_triton_kernel:
            program = with_epilogues(program)
    dump.stage("lowered", program)

    with stage("schedule"):
        return arranged(program, limits)


def finished(groups: Grouping, boundary: Boundary, limits: Limits | None,
             chooses: bool = True) -> Schedule:  # fmt: skip
    """The stages after grouping. Unless it `chooses`, products are the library's."""
    with stage("choose"):
        if chooses:
            chosen = choose(groups.program, groups.groups, _loop_kernel)
            groups = Grouping(groups.program, chosen.groups, chosen.complete)
        picked = attention.choose(groups.program, groups.groups)
        groups = Grouping(groups.program, picked, groups.complete)

    with stage("schedule"):
        plan: Schedule = planned(groups, boundary.role == "backward", limits)
        for step, group in zip(plan.steps, handed_on([s.group for s in plan.steps]), strict=True):
            step.group = group
    dump.stage("scheduled", plan)
    return plan


def _bytes_of(gm: torch.fx.GraphModule, boundary: Boundary, devices: frozenset[str]) -> int:
    """What a graph would move as it is, before products are chosen."""
    with metrics.unchanged():
        looked_at = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        program = lower(looked_at, devices, boundary.donated)
        groups = arranged(program, told_once(_cannot))
        return sum(found.accessed for found in traffic(groups.program, groups.groups))


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
            case Implementation() | attention.Implementation() as chosen:
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
    if kernel.plan is not None:
        alike.plans[k] = kernel.plan
    return kernels.triton(program, kernel, wide, f"{kernel.name}_{k}", device)


def kernel_plans(plan: Schedule) -> dict[int, Summary]:
    """How the loop kernels of cards will be written, by the number of their step."""
    found: dict[int, Summary] = {}
    for k, step in enumerate(plan.steps):
        group = step.group
        device = plan.program.buffers[min(group.writes)].device if group.call is None else None
        if device is None or device.type == "cpu":
            continue
        try:
            target = Target.of(device)
            written = triton.planned(plan.program, group, target)
            found[k] = written.predicted(target, plan.bytes[k].moved)
        except Exception as why:  # as `_generate` has it
            log.warning("torch's own operations run %s: %s", group.nodes[0].name, why)
    return found


def _cannot(program: Program, group: Group) -> str:
    """Why the group's device cannot run it as one kernel."""
    device = program.buffers[min(group.writes)].device
    return "" if device.type == "cpu" else triton.limits(program, group, Target.of(device))


def _loop_kernel(program: Program, group: Group) -> tuple[Sequence[Argument], provider.Source]:
    """The kernel of a group of loops, for plans that run it beside a product."""
    made = _generate(program, group, 0, Kernels())
    assert made is not None and not isinstance(made[1], UserSource)
    return made[0].args, made[1]
