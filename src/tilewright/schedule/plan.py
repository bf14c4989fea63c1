"""`schedule(program)`: dead code out, loops normalised, nests grouped, memory planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import config, metrics
from tilewright.ir.program import Nest, Node, Program
from tilewright.schedule.fusion.group import Group, searched
from tilewright.schedule.fusion.take_apart import Limits, taken_apart
from tilewright.schedule.launch.direction import alternate
from tilewright.schedule.memory import Step, peak, plan
from tilewright.schedule.nests.transform import split_divisions
from tilewright.schedule.order.defer import deferred
from tilewright.schedule.order.peak_memory import orders
from tilewright.schedule.pool import pooled
from tilewright.schedule.rewrite.improve import improved
from tilewright.schedule.rewrite.merge_scatters import merge_scatters
from tilewright.schedule.rewrite.rematerialise import recomputed, written_out
from tilewright.schedule.rewrite.scan_epilogue import stored_by_scans
from tilewright.schedule.rewrite.sums import split_sums
from tilewright.schedule.split.apply import cut_groups
from tilewright.schedule.traffic import Traffic, traffic


@dataclass
class Grouping:
    program: Program
    groups: list[Group]
    complete: bool = True  # nothing was left undecided for want of time


@dataclass
class Schedule:
    program: Program
    steps: list[Step]
    bytes: list[Traffic]  # of each step
    complete: bool = True  # as of the groups


def schedule(program: Program, limits: Limits | None = None) -> Schedule:
    return planned(arranged(program, limits), limits=limits)


def arranged(program: Program, limits: Limits | None = None) -> Grouping:
    """The program's nodes in groups, in order. `limits` says which groups its kernels' language
    cannot express; those are taken apart."""
    live = _live(program)
    program = replace(program, buffers=dict(program.buffers))
    nodes = written_out(program, [split_divisions(node) if isinstance(node, Nest) else node
                                  for node in merge_scatters(program, live)])  # fmt: skip
    nodes = improved(program, split_sums(program, stored_by_scans(program, nodes)))
    search = searched(program, nodes)
    for _ in range(2):  # what reads two such values takes one at a time
        again = recomputed(program, search)
        if again is None:
            break
        search = searched(program, again)
    groups = search.groups()
    program, groups = cut_groups(program, groups)
    groups = _with_local(program, groups)
    if limits is not None:
        groups = _with_local(program, taken_apart(program, groups, limits))
    return Grouping(program, groups)


def planned(grouping: Grouping, after: bool = False, limits: Limits | None = None) -> Schedule:
    """Memory for groups that are final, in the order that needs least of it, and the bytes they
    move. `after` says that arguments are likely in cache, as after a forward pass. What `limits`
    refuses is not done to save memory either."""
    program = grouping.program
    ready = deferred(program, grouping.groups, limits)
    plans = [(groups, plan(program, groups, limits)) for groups in orders(program, ready)]
    groups, steps = min(plans, key=lambda p: peak(program, p[1]))
    directed = alternate(program, [step.group for step in steps], after)
    steps = [replace(step, group=group) for step, group in zip(steps, directed, strict=True)]
    bytes_ = _count(program, groups)
    if config.memory_planning or config.triton.cudagraphs:  # recordings have pools in common
        pooled(program, steps)
    return Schedule(program, steps, bytes_, grouping.complete)


def _live(program: Program) -> list[Node]:
    """Nodes something visible depends on, in order, with the stores that something reads: the
    places of a running maximum are often of no use. An opaque call is kept: it may have effects.
    What was in a buffer before a call covers it is needed by none."""
    needed = program.visible
    needed |= {b.name for b in program.buffers.values() if b.kind == "input"}
    live: list[Node] = []
    for node in reversed(program.nodes):
        if isinstance(node, Nest):
            stores = tuple(s for s in node.stores if s.buffer in needed or s.buffer in node.reads)
            if not node.writes & needed:
                continue
            node = node if len(stores) == len(node.stores) else replace(node, stores=stores)
        live.append(node)
        covered = () if isinstance(node, Nest) else node.covers
        needed.difference_update(covered)
        needed |= node.reads.difference(covered)
    return live[::-1]


def _with_local(program: Program, groups: Sequence[Group]) -> list[Group]:
    """Buffers written and read by one group alone never reach memory."""
    visible = program.visible
    users: dict[str, set[int]] = {}
    for k, group in enumerate(groups):
        for b in group.reads | group.writes:
            users.setdefault(b, set()).add(k)

    def marked(part: Group, k: int) -> Group:
        return replace(part, local=frozenset(
            b for b in part.writes
            if users[b] == {k} and b not in visible
            and program.buffers[b].kind == "temporary" and len(part.members) > 1))  # fmt: skip

    def whole(group: Group, k: int) -> Group:
        parts = tuple(marked(part, k) for part in group.parts)
        if not parts:
            return marked(group, k)
        return replace(group, parts=parts, local=frozenset().union(*(p.local for p in parts)))

    return [whole(group, k) for k, group in enumerate(groups)]


def _count(program: Program, groups: list[Group]) -> list[Traffic]:
    found = traffic(program, groups)
    for group, bytes_ in zip(groups, found, strict=True):
        if group.when is not None and not group.when.is_likely:
            continue
        metrics.generated_kernel_count += group.is_kernel
        metrics.num_bytes_accessed += bytes_.accessed
        metrics.num_bytes_moved += bytes_.moved
        metrics.nodes_num_elem.append((group.nodes[0].name, bytes_.accessed // 4))
    return found
