"""Kernels that reduce and need nothing of each other share launches, as those do that reduce
nothing (`Search.combine`): these are known once what leaves a card idle is cut into chunks.

Of each of many gradients, say, the chunks' sums are one kernel, what reduces them another. They
take less time than starting them one after the other, and each leaves most of a card idle at its
end (H200: 41 launches for the norm of 45 gradients and what is scaled by it, 207 us; 198 us in
eager mode).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tilewright import config, rules
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars
from tilewright.ir.program import Nest, Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import is_alone
from tilewright.schedule.nests.dependences import dependences
from tilewright.schedule.nests.hints import hint_bytes

Kind = tuple[Hashable, ...]


def share_launches(program: Program, groups: Sequence[Group]) -> list[Group]:
    """The groups in an order that respects their dependences, those that are many of a kind as
    parts of one: each runs as early as what it needs allows it to."""
    kinds = [_kind(program, group) for group in groups]
    if (
        sum(len(g.kernels) for g, kind in zip(groups, kinds, strict=True) if kind)
        < rules.MANY_REDUCTIONS.limit
    ):
        return list(groups)
    needs = _needs(program, groups)
    many = {k for at in _launches(groups, kinds, needs) for k in at
            if sum(len(groups[g].kernels) for g in at) >= rules.MANY_REDUCTIONS.limit}  # fmt: skip
    kept = [kind if k in many else None for k, kind in enumerate(kinds)]
    return [_as_one([groups[k] for k in at]) for at in _launches(groups, kept, needs)]


def _as_one(groups: Sequence[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    return Group(parts=tuple(part for group in groups for part in group.kernels))


def _needs(program: Program, groups: Sequence[Group]) -> list[set[int]]:
    """For each group those it must not run before, but for what these must not either."""
    home = [k for k, group in enumerate(groups) for _ in group.nodes]
    found: list[set[int]] = [set() for _ in groups]
    for k, waits in zip(home, dependences(program, [n for g in groups for n in g.nodes]),
                        strict=True):  # fmt: skip
        found[k] |= {home[n] for n in waits} - {k}
    return found


def _launches(groups: Sequence[Group], kinds: Sequence[Kind | None], needs: Sequence[set[int]]
              ) -> list[list[int]]:  # fmt: skip
    """The groups of each launch, by number: those of a kind with others of it, all else alone."""
    found: list[list[int]] = []
    place: list[int] = []  # of each group, among the launches
    for k, kind in enumerate(kinds):
        first = max((place[n] + 1 for n in needs[k]), default=0)
        open_ = (at for at in range(first, len(found)) if kind == kinds[found[at][0]]
                 and _fits([groups[g] for g in (*found[at], k)]))  # fmt: skip
        at = len(found) if kind is None else next(open_, len(found))
        if at == len(found):
            found.append([])
        found[at].append(k)
        place.append(at)
    return found


def _fits(groups: Sequence[Group]) -> bool:
    touched = {b for g in groups for b in g.reads | g.writes}
    return (sum(len(g.kernels) for g in groups) <= rules.REDUCTIONS_TOGETHER.limit
            and len(touched) <= config.combo_kernel_max_num_args)  # fmt: skip


def _kind(program: Program, group: Group) -> Kind | None:
    """Equal for kernels of a card that may share a launch: whether each is one program alone (those
    hold a row, and others beside them would have as many registers). None: this one never does."""
    if config.combo_kernels_pointwise_only or group.call is not None:
        return None
    for part in group.kernels:
        if part.serial or part.row_programs or any(is_alone(m) for m in part.members):
            return None
        if not any(m.reduce for m in part.members) or not all(map(_is_along, part.members)):
            return None
        if not _moves_little(program, part):
            return None
    alone = {not part.outer for part in group.kernels}
    device = program.buffers[min(group.writes)].device
    return (device, *alone) if device.type == "cuda" and len(alone) == 1 else None


def _is_along(nest: Nest) -> bool:
    """Whether what it reduces lies along memory."""
    rows = nest.reduce[-1:]
    return all(ix.coefficient(i, v) is ix.ONE for indices in nest.loaded.values()
               for i in indices for v in rows if v in free_vars(i))  # fmt: skip


def _moves_little(program: Program, group: Group) -> bool:
    """Whether a kernel is short enough to share a launch, and when it runs is nothing to the memory
    of others: all that is large is an argument or a result."""
    visible = program.visible
    touched = [program.buffers[b] for b in group.reads | group.writes]
    large = (b for b in touched if b.kind == "temporary" and b.name not in visible)
    return (sum(hint_bytes(b) for b in touched) <= rules.REDUCTION_BYTES.limit
            and all(hint_bytes(b) <= rules.REDUCTION_TEMPORARY.limit for b in large))  # fmt: skip
