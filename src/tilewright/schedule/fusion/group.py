"""Fusion groups, and the search for the grouping that moves the fewest bytes.

Every node starts as a group of its own. Of all pairs of groups that touch a common buffer, the one
whose joining saves the most bytes is joined first, if it is legal; what a pair saves is weighed
anew when either has grown. Each pair is tried a bounded number of times and each buffer links a
bounded number of neighbours, so the effort grows with the number of nodes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tilewright import config, rules
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Nest, Node, Opaque, Program
from tilewright.schedule.fusion.cost import Footprint, Prices, Touch, footprint
from tilewright.schedule.fusion.legality import Fit, Misfit, align, is_alone
from tilewright.schedule.fusion.row_column import fit_in_order
from tilewright.schedule.fusion.suitability import combo_kind, rows_of, unsuited
from tilewright.schedule.nests.access import all_loops
from tilewright.schedule.nests.dependences import dependences
from tilewright.schedule.nests.hints import hint_product
from tilewright.schedule.nests.segments import segments_of
from tilewright.schedule.order.topological import Gap, Order
from tilewright.schedule.split.policy import cooperating_programs, starved, wasteful
from tilewright.target import Target

NEIGHBOURS = 6  # users of a buffer that each user is weighed with, on either side
MOST_TRIES = 3  # of one pair of groups
MOST_OPEN = 4  # launches that a group is tried with


@dataclass(frozen=True)
class When:
    """Where a group runs: a size is in one of these ranges, ends included. None is no end."""

    size: Expr
    ranges: tuple[tuple[int, int | None], ...]

    @property
    def is_likely(self) -> bool:
        size = ix.likely(self.size)
        return any(low <= size and (high is None or size <= high) for low, high in self.ranges)


@dataclass(frozen=True)
class Group:
    """Nests that become one kernel, or one opaque call.

    `outer` are the loops all members share; `local` the buffers that never leave the kernel.
    `parts`, instead of members, are groups that need nothing of each other and share a launch.
    `serial` are loops all members share too, run one after the other inside `outer`: a member
    that reduces over a serial loop stores after its last iteration. `row_programs` is the number of
    programs that share each row, on a card, and wait for each other's partial results; if
    `ticketed`, they are more than run at once and begin one row after the other. On a card one that
    runs `back` begins with its last block. Of groups that compute the same, each for some sizes
    (`when`), one runs; everything else takes all of them to run, one after the other.
    """

    members: tuple[Nest, ...] = ()
    outer: tuple[Expr, ...] = ()
    serial: tuple[Expr, ...] = ()
    call: Opaque | None = None
    parts: tuple[Group, ...] = ()
    row_programs: int = 0
    ticketed: bool = False
    back: bool = False
    when: When | None = None
    local: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """By the name of another's first nest, why the two are not one."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        if self.parts:
            return tuple(node for part in self.parts for node in part.nodes)
        return self.members if self.call is None else (self.call,)

    @property
    def is_kernel(self) -> bool:
        """Whether it is code of ours that runs, not a library's."""
        return self.call is None or self.call.generated

    @property
    def kernels(self) -> tuple[Group, ...]:
        """The parts that share a launch, or the group itself."""
        return self.parts or (self,)

    @property
    def reads(self) -> set[str]:
        return {b for node in self.nodes for b in node.reads}

    @property
    def writes(self) -> set[str]:
        return {b for node in self.nodes for b in node.writes}


def searched(program: Program, nodes: Sequence[Node]) -> Search:
    """The best grouping found of these nodes."""
    search = Search(program, nodes)
    search.run()
    return search


class Search:
    """Groups by number; a joined group keeps the number of one of its two parts.

    `total` counts the users of each buffer where there are others than `nodes`.
    """

    def __init__(self, program: Program, nodes: Sequence[Node],
                 total: Counter[str] | None = None) -> None:  # fmt: skip
        self.nodes = nodes
        self.position = {node.name: k for k, node in enumerate(nodes)}
        self.order = Order(dependences(program, nodes))
        self.shape: dict[int, Fit] = {k: Fit((n,), n.loops) for k, n in enumerate(nodes)
                                      if isinstance(n, Nest) and not is_alone(n)}  # fmt: skip
        self.touch: list[Footprint] = [footprint(n, k, program.buffers)
                                       for k, n in enumerate(nodes)]  # fmt: skip
        visible = program.visible
        if total is None:
            total = Counter(b for touch in self.touch for b in touch)
        self.prices = Prices(program.buffers, visible, total)
        calls = [n for n in nodes if isinstance(n, Opaque)]
        self.made = {b for n in calls for b in n.results if b} - visible
        self.of_calls = self.made | {b for n in calls for b in n.reads} - visible
        self.device = [_device(program, node) for node in nodes]
        self.targets: dict[torch.device, Target] = {}
        self.parts: dict[int, list[int]] = {k: [k] for k in range(len(nodes))}
        self.near: dict[int, set[int]] = {k: set() for k in self.shape}
        self.version = [0] * len(nodes)
        self.tries: Counter[tuple[int, int]] = Counter()
        self.refused: dict[tuple[int, int], str] = {}
        self.heap: list[tuple[int, int, int, int, int, int]] = []
        self.launch: dict[int, list[int]] = {}  # a group -> all that share its launch

    # ---- pairs

    def run(self) -> None:
        self._link()
        for a in sorted(self.near):
            for b in sorted(self.near[a]):
                if a < b:
                    self._weigh(a, b)
        while self.heap:
            _, _, a, b, version_a, version_b = heapq.heappop(self.heap)
            if (version_a, version_b) == (self.version[a], self.version[b]):
                self._try(a, b)

    def _link(self) -> None:
        """Users of a common buffer are neighbours: each with the next few, all with the writer."""
        users: dict[str, list[int]] = {}
        for k in self.shape:
            for b in self.touch[k]:
                users.setdefault(b, []).append(k)
        for b, ks in users.items():
            writers = [k for k in ks if self.touch[k][b].writes][:NEIGHBOURS]
            for i, k in enumerate(ks):
                for other in (*ks[i + 1 : i + 1 + NEIGHBOURS], *writers):
                    if other != k:
                        self.near[k].add(other)
                        self.near[other].add(k)

    def _weigh(self, a: int, b: int) -> None:
        if self.tries[_pair(a, b)] >= MOST_TRIES or self.device[a] != self.device[b]:
            return
        saved = self.prices.saving(self.touch[a], self.touch[b])
        if saved > 0:
            a, b = _pair(a, b)
            apart = abs(self.order.rank[a] - self.order.rank[b])
            entry = (-saved, apart, a, b, self.version[a], self.version[b])
            heapq.heappush(self.heap, entry)

    def _try(self, a: int, b: int) -> None:
        if a not in self.shape or b not in self.shape:
            return
        self.tries[a, b] += 1
        gap = self.order.between(a, b)
        found = Misfit(gap) if isinstance(gap, str) else self._fit(a, b)
        if isinstance(found, Misfit) or isinstance(gap, str):
            assert isinstance(found, Misfit)
            self.refused[a, b] = found.reason
        else:
            self._join(a, b, found, gap)

    def _fit(self, a: int, b: int) -> Fit | Misfit:
        """The two groups as one kernel, or why not."""
        left, right = self.shape[a], self.shape[b]
        if len(left.members) < len(right.members):
            left, right = right, left  # the smaller is brought into the loops of the larger
        if len(left.members) + len(right.members) > config.max_fusion_size:
            return Misfit("the group is full")
        most = config.realize_acc_reads_size_threshold
        if most is not None:
            joined = self.prices.join(self.touch[a], self.touch[b])
            if self.prices.read_of_others(joined) > most:
                return Misfit("one kernel may not read as many bytes of what others made")
        fit = align(left, right, self.position)
        if isinstance(fit, Fit):
            reason = (self._share_too_little(a, b, fit) or self._makes_a_part(a, b, fit)
                      or unsuited(fit, self._target(a)))  # fmt: skip
            if len(fit.outer) < max(len(left.outer), len(right.outer)):
                reason = reason or self._gives_up_rows(a, b, fit)
            fit = Misfit(reason) if reason else fit
        if isinstance(fit, Fit) and _keeps_loops(fit, left, right):
            return fit
        ordered = self._in_order(a, b, fit)
        if isinstance(ordered, Fit) or isinstance(fit, Fit):
            return ordered if isinstance(ordered, Fit) else fit
        return Misfit(f"{fit.reason}; in order: {ordered.reason}")

    def _in_order(self, a: int, b: int, plain: Fit | Misfit) -> Fit | Misfit:
        """The two with the loops that some members reduce run one after the other."""
        if isinstance(plain, Fit) and len(segments_of(plain.members, plain.outer)) == 1:
            return Misfit("they run in one loop")
        fit = fit_in_order(self.shape[a], self.shape[b], self.position)
        if isinstance(fit, Misfit):
            return fit
        saved = self.prices.saving(self.touch[a], self.touch[b])
        reason = self._share_too_little(a, b, fit) or wasteful(fit, saved, self._target(a))
        return Misfit(reason) if reason else fit

    def _share_too_little(self, a: int, b: int, fit: Fit) -> str:
        """Kernels over different loops gain nothing from a small common operand, nor, with large
        products to read, from a small value that one makes for the other: they keep the products
        alive at the same time."""
        fed = b in self.order.feeds[a] or a in self.order.feeds[b]
        if fed and not (self._products(a, b) and self._products(b, a)):
            return ""
        if all(len(m.loops) + len(m.reduce) == len(fit.outer) for m in fit.members):
            return ""
        saved = self.prices.saving(self.touch[a], self.touch[b])
        least = min(self.prices.bytes(self.touch[a]), self.prices.bytes(self.touch[b]))
        return "they have too little in common" if saved * rules.SHARED_PART.limit < least else ""

    def _makes_a_part(self, a: int, b: int, fit: Fit) -> str:
        """What one program of a card needs of many kernels is made by these side by side, and what
        it makes for many is used by them so: it would do one after the other what it makes or uses
        itself, and others wait."""
        if fit.outer or not self._target(a).is_gpu:
            return ""
        if any(self._is_one_of_many(name, touch, self.touch[b].get(name))
               for name, touch in self.touch[a].items()):  # fmt: skip
            return "many others make what it needs beside this one"
        if any(self._is_for_many(name, *pair, fit)
               for name in self.touch[a] for pair in ((a, b), (b, a))):  # fmt: skip
            return "many others use what it makes beside this one"
        return ""

    def _is_for_many(self, buffer: str, maker: int, user: int, fit: Fit) -> bool:
        """Whether a group reads what another writes, and many more do. Not where it is reduced
        of the row that it is used for."""
        one, other = self.touch[maker].get(buffer), self.touch[user].get(buffer)
        if one is None or other is None or not one.writes or not other.reads:
            return False
        scalar = not any(all_loops(m) for m in self.shape[maker].members)
        return ((scalar or len(rows_of(fit)) > 1)
                and self.prices.total[buffer] - one.users - other.users >= rules.MANY_ALIKE.limit
                )  # fmt: skip

    def _is_one_of_many(self, buffer: str, one: Touch, other: Touch | None) -> bool:
        """Whether one of two groups writes a small part of what the other reads of a buffer."""
        if other is None:
            return False
        pairs, many = ((one, other), (other, one)), rules.MANY_ALIKE.limit
        return any(w.writes and many * sum(w.writes.values()) < sum(r.reads.values())
                   for w, r in pairs)  # fmt: skip

    def _gives_up_rows(self, a: int, b: int, fit: Fit) -> str:
        """A large kernel of a card is not to have fewer programs for a small value that another
        makes of it, as the gradient of a scale for each channel is; one that reduces nothing not
        to walk its rows for it (H200: tokens mixed with those before them, and the last one
        kept, 164 us, 134 us apart)."""
        saved = self.prices.saving(self.touch[a], self.touch[b])
        most = max(self.prices.bytes(self.touch[a]), self.prices.bytes(self.touch[b]))
        if (
            not self._target(a).is_gpu
            or most < rules.SHARED_LAUNCH_BYTES.limit
            or saved * rules.SHARED_PART.limit >= most
        ):
            return ""
        folds = any(m.reduce for m in fit.members)
        if folds and hint_product(v.src[0] for v in fit.outer) >= 8 * self._target(a).sms:
            return ""
        return "fewer programs would run for a small value in common"

    def _products(self, a: int, b: int) -> bool:
        """Whether a group reads a result of a library call that only it needs, not `b`."""
        return any(name in self.made and name not in self.touch[b]
                   and touch.users + 1 == self.prices.total[name]
                   for name, touch in self.touch[a].items())  # fmt: skip

    def _target(self, k: int) -> Target:
        device = self.device[k]
        if device not in self.targets:
            self.targets[device] = Target.of(device)
        return self.targets[device]

    def _join(self, a: int, b: int, fit: Fit, gap: Gap) -> None:
        if len(self.near[a]) < len(self.near[b]):
            a, b = b, a
        self.order.join(a, b, gap)
        self.shape[a] = fit
        del self.shape[b]
        self.touch[a] = self.prices.join(self.touch[a], self.touch[b])
        self.touch[b] = {}
        self.parts[a] += self.parts.pop(b)
        self.version[a] += 1
        self.version[b] += 1
        for other in self.near.pop(b):
            if other != a:
                self.near[other].discard(b)
                self.near[other].add(a)
                self.near[a].add(other)
        self.near[a].discard(b)
        for other in sorted(self.near[a]):
            self._weigh(a, other)

    # ---- lines of memory

    def fill_in_turns(self) -> None:
        """On a card, what fills a buffer in turns, a few bytes each, as the columns of a stack do,
        is one kernel: else each would write part of every line of memory."""
        for buffer, ks in self._writers().items():
            a = ks[0]
            for k in ks[1:]:
                gap = self.order.between(a, k)
                fit = self._in_turns(buffer, a, k) if self._target(a).is_gpu else None
                if fit is None or isinstance(gap, str):
                    a = k
                    continue
                self._join(a, k, fit, gap)
                a = a if a in self.shape else k

    def _in_turns(self, buffer: str, a: int, k: int) -> Fit | None:
        if a not in self.shape or k not in self.shape or self.device[a] != self.device[k]:
            return None
        fit = align(self.shape[a], self.shape[k], self.position)
        if isinstance(fit, Misfit) or len(fit.members) > config.max_fusion_size:
            return None
        if any(m.reduce or len(m.loops) != len(fit.outer) for m in fit.members):
            return None
        places = [s.index for m in fit.members for s in m.stores if s.buffer == buffer]
        apart = [ix.value_of(ix.sub(one, other)) for one, other in itertools.pairwise(places)]
        near = all(
            n is not None and abs(n) * self.prices.item[buffer] <= rules.INTERLEAVED_BYTES.limit
            for n in apart
        )
        return None if not near or unsuited(fit, self._target(a)) else fit

    def _writers(self) -> dict[str, list[int]]:
        """The groups that write each buffer, in their order."""
        found: dict[str, list[int]] = {}
        for k in sorted(self.shape, key=self.order.rank.__getitem__):
            for b, touch in self.touch[k].items():
                if touch.writes:
                    found.setdefault(b, []).append(k)
        return found

    # ---- launches

    def combine(self) -> None:
        """Let groups that need nothing of each other share a launch: those that fill parts of
        one buffer (on a card if they are many: a launch takes as long as a small kernel), and
        all that are alike where `combo_kernels` asks for it, where they are many that take
        arguments to results, as an optimizer's step of each parameter, or where they are short
        and reduce nothing: each launch takes 1.3 us of a card beside what its kernel does (H200:
        AdamW of 10 small parameters, 27 us by six launches)."""
        ranked = [k for k in sorted(self.shape, key=self.order.rank.__getitem__)
                  if not self.shape[k].serial]  # fmt: skip
        for ks in self._writers().values():
            ks = [k for k in ks if not self.shape[k].serial]
            if not ks:
                continue
            if config.combo_kernels or not self._target(ks[0]).is_gpu:
                self._share_launches(
                    [k for k in ks if self._may_share(k, rules.SHARED_LAUNCH_BYTES.limit)], 1 << 30
                )
            elif len(ks) > rules.PIECES_APART.limit:
                small = [k for k in ks if self._may_share(k, rules.SMALL_PIECE.limit)]
                self._share_launches(small, rules.PIECES_TOGETHER.limit)
        kinds: dict[tuple[torch.device, bool, int, bool], list[int]] = {}
        most = rules.SHARED_LAUNCH_BYTES.limit if config.combo_kernels else rules.ALIKE_BYTES.limit
        for k in (k for k in ranked if self._may_share(k, most)):
            kind = combo_kind(self.shape[k])
            # kernels of one program hold a row: beside them others would have as many registers
            alone = not config.combo_kernels and not self.shape[k].outer
            if kind is not None and k not in self.launch:
                kinds.setdefault((self.device[k], *kind, alone), []).append(k)
        for (device, folds, walks, _), ks in kinds.items():
            if config.combo_kernels:
                self._share_launches(ks, config.combo_kernel_max_num_nodes)
            elif device.type == "cuda" and walks == 1:
                many = [k for k in ks if self._keeps_little(k, rules.ALIKE_TEMPORARY.limit)]
                if len(many) >= rules.MANY_ALIKE.limit:
                    self._share_launches(many, rules.ALIKE_TOGETHER.limit)
                elif not folds:
                    few = [k for k in ks if self._is_short(k)]
                    self._share_launches(few, rules.MANY_ALIKE.limit)

    def _is_short(self, k: int) -> bool:
        """Whether a kernel may share a launch with few others. What a call needs of it, or gives
        it, may become part of that."""
        touch = self.touch[k]
        return (self._keeps_little(k, rules.FEW_ALIKE_TEMPORARY.limit)
                and self.prices.bytes(touch) <= rules.FEW_ALIKE_BYTES.limit
                and touch.keys().isdisjoint(self.of_calls))  # fmt: skip

    def _keeps_little(self, k: int, most: int) -> bool:
        """Whether all that is large of what a kernel touches is an argument or a result, as of an
        optimizer's: when it runs is nothing to the memory of others."""
        return all(b in self.prices.keep or self.prices.of(b, touch) <= most
                   for b, touch in self.touch[k].items())  # fmt: skip

    def _may_share(self, k: int, most: int) -> bool:
        """On a card a launch is shared by kernels that move little, and are not to be cut into
        chunks."""
        target, fit = self._target(k), self.shape[k]
        if not target.is_gpu:
            return True
        return (self.prices.bytes(self.touch[k]) <= most
                and cooperating_programs(fit, target) < 2 and not starved(fit, target))  # fmt: skip

    def _share_launches(self, ks: Sequence[int], most: int) -> None:
        open_: list[int] = []
        for k in ks:
            if k in self.launch:
                continue
            into = next((a for a in open_[-MOST_OPEN:] if self._launch_with(a, k, most)), None)
            if into is None:
                open_.append(k)

    def _launch_with(self, a: int, k: int, most: int) -> bool:
        together = [*self.launch.get(a, [a]), k]
        buffers = {b for g in together for b in self.touch[g]}
        if len(together) > most or len(buffers) > config.combo_kernel_max_num_args:
            return False
        if k in self.order.feeds[a] or k in self.order.needs[a]:
            return False
        gap = self.order.between(a, k)
        if isinstance(gap, str):
            return False
        self.order.join(a, k, gap)
        for g in together:
            self.launch[g] = together
        return True

    # ---- the result

    def bytes(self) -> int:
        return sum(self.prices.bytes(self.touch[k]) for k in self.parts)

    def is_apart(self, name: str, others: Collection[str]) -> bool:
        """Whether a node has joined none but `others`."""
        k = self.position.get(name)
        parts = next((p for p in self.parts.values() if k in p), ())
        return bool(parts) and all(self.nodes[p].name in others for p in parts)

    def groups(self) -> list[Group]:
        """The groups in an order that respects their dependences."""
        self.fill_in_turns()
        self.combine()
        made: dict[int, Group] = {}
        for k in self.parts:
            node = self.nodes[k]
            fit = self.shape.get(k)
            if fit is not None:
                made[k] = Group(fit.members, fit.outer, fit.serial)
            else:
                made[k] = (Group((node,), node.loops) if isinstance(node, Nest)
                           else Group(call=node))  # fmt: skip
        home = {part: k for k, parts in self.parts.items() for part in parts}
        for k, together in self.launch.items():
            if k == together[0]:
                made[k] = Group(parts=tuple(made[g] for g in together))
            else:
                home.update(dict.fromkeys(self.parts[k], together[0]))
        made = {k: g for k, g in made.items() if self.launch.get(k, [k])[0] == k}
        refused: dict[int, dict[str, str]] = {}
        for (a, b), reason in self.refused.items():
            if home[a] != home[b]:
                refused.setdefault(home[a], {})[made[home[b]].nodes[0].name] = reason
        made |= {k: replace(made[k], refused=reasons) for k, reasons in refused.items()}
        return [made[k] for k in sorted(made, key=self.order.rank.__getitem__)]


def _keeps_loops(fit: Fit, left: Fit, right: Fit) -> bool:
    """Whether the two have as many loops in common as the one that has fewer of them."""
    return bool(fit.outer) and len(fit.outer) >= min(len(left.outer), len(right.outer))


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _device(program: Program, node: Node) -> torch.device:
    """Where a node runs: where what it writes is."""
    found: Iterable[str] = (b for b in sorted(node.writes) if b in program.buffers)
    name = next(iter(found), None)
    return torch.device("cpu") if name is None else program.buffers[name].device
