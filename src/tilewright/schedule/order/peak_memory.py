"""The order of groups that keeps the least memory alive.

Three orders are tried beside the program's own: the group that adds least to what is alive first,
breadth first, and depth first. The one with the lowest estimated peak is taken, the program's own
where none is lower. Then single groups are moved across the peak as long as that lowers it. Every
order respects the dependences, and so the order of effects.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tilewright import config
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.nests.dependences import dependences
from tilewright.schedule.nests.hints import hint_bytes

Order = list[int]

MOST_MOVES = 8  # of groups across the peak
FARTHEST = 12  # from it
LARGE = 16  # part of all that is alive, that several groups are moved for


def orders(program: Program, groups: list[Group]) -> list[list[Group]]:
    """The groups in the order with the lowest estimated peak; and, where that is another, in the
    one that is best if results take the memory of operands that die. Only a plan can tell if they
    may."""
    if not config.reorder_for_peak_memory or len(groups) < 3:
        return [groups]
    facts = Facts(program, groups)
    best = list(range(len(groups)))
    least = facts.peak(best)
    for attempt in ORDERS.values():
        order = attempt(facts)
        found = facts.peak(order)
        if found < least:
            best, least = order, found
    found = _eased(facts, best)
    facts.in_place = config.inplace_buffers and config.allow_buffer_reuse
    other = _eased(facts, best)
    return [[groups[k] for k in order] for order in ([found] if other == found else [found, other])]


class Facts:
    """Which group needs which, and what each makes and uses, in bytes."""

    def __init__(self, program: Program, groups: Sequence[Group]) -> None:
        self.needs = _group_dependences(program, groups)
        self.is_loops = [g.call is None for g in groups]
        self.in_place = False  # whether results are taken to lie where operands die
        self.feeds: list[list[int]] = [[] for _ in groups]
        for k, needs in enumerate(self.needs):
            for n in sorted(needs):
                self.feeds[n].append(k)
        visible = program.visible
        self.size = {b.name: hint_bytes(b) for b in program.buffers.values()
                     if b.kind == "temporary" or b.name in program.donated}  # fmt: skip
        self.touches = [sorted(b for b in (g.reads | g.writes) - g.local if b in self.size)
                        for g in groups]  # fmt: skip
        self.given = program.donated
        self.mortal = {b for b in self.size if b not in visible}
        self.users: dict[str, list[int]] = {}
        for k, touched in enumerate(self.touches):
            for b in touched:
                self.users.setdefault(b, []).append(k)

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes alive at once, each buffer from its first group to its last."""
        return max(self.profile(order), default=0)

    def profile(self, order: Sequence[int]) -> list[int]:
        """The bytes alive while each group runs."""
        left = {b: len(users) for b, users in self.users.items()}
        exists = set(self.given)
        alive = sum(self.size[b] for b in exists if b in self.size)
        found: list[int] = []
        for k in order:
            made = [b for b in self.touches[k] if b not in exists]
            exists.update(made)
            alive += sum(self.size[b] for b in made)
            found.append(alive - self._taken_over(k, made, left))
            for b in self.touches[k]:
                left[b] -= 1
                if not left[b] and b in self.mortal:
                    alive -= self.size[b]
        return found

    def makes(self, groups: set[int]) -> int:
        """The bytes of what some groups make."""
        made = {b for k in groups for b in self.touches[k] if self.users[b][0] in groups}
        return sum(self.size[b] for b in made)

    def _taken_over(self, k: int, made: Sequence[str], left: Mapping[str, int]) -> int:
        """Bytes of what a kernel makes that may be where operands are that die in it."""
        if not self.in_place or not self.is_loops[k]:
            return 0
        dying = Counter(self.size[b] for b in self.touches[k]
                        if left[b] == 1 and b in self.mortal and b not in made)  # fmt: skip
        both = dying & Counter(self.size[b] for b in made)
        return sum(size * count for size, count in both.items())


def _group_dependences(program: Program, groups: Sequence[Group]) -> list[set[int]]:
    nodes = [(node, k) for k, group in enumerate(groups) for node in group.nodes]
    found: list[set[int]] = [set() for _ in groups]
    waits = dependences(program, [n for n, _ in nodes])
    for (_, k), before in zip(nodes, waits, strict=True):
        found[k] |= {nodes[b][1] for b in before} - {k}
    return found


# ---- around the peak


def _eased(facts: Facts, order: Order) -> Order:
    """The order with groups moved across its peak while that makes it lower."""
    profile = facts.profile(order)
    for _ in range(MOST_MOVES):
        top = max(profile)
        moved = next(((new, found) for new in _across(facts, order, profile.index(top), top)
                      if max(found := facts.profile(new)) < top), None)  # fmt: skip
        if moved is None:
            break
        order, profile = moved
    return order


def _across(facts: Facts, order: Order, top: int, most: int) -> Iterator[Order]:
    """Orders in which one group more runs after the peak of `most` bytes, or one more before it. A
    large result waits, as long as it can, with what is there for it alone."""
    place = {k: i for i, k in enumerate(order)}
    low = max(0, top - FARTHEST)
    for i in range(top - 1, low - 1, -1):
        feeds = facts.feeds[order[i]]
        if not all(place[f] > top for f in feeds):
            continue
        late = _with_its_own(facts, order[low : i + 1])
        if len(late) == 1 or LARGE * facts.makes(late) < most:
            yield [*order[:i], *order[i + 1 : top + 1], order[i], *order[top + 1 :]]
            continue
        soon = [k for k in order[low:top] if k not in late]
        moved = [k for k in order[low:top] if k in late]
        needed = min([place[f] for f in feeds], default=len(order))
        for to in dict.fromkeys((needed, top + 1)):
            yield [*order[:low], *soon, *order[top:to], *moved, *order[to:]]
    for i in range(top + 1, min(top + FARTHEST, len(order))):
        if all(place[n] < top for n in facts.needs[order[i]]):
            yield [*order[:top], order[i], *order[top:i], *order[i + 1 :]]


def _with_its_own(facts: Facts, run: Sequence[int]) -> set[int]:
    """The last of these groups, and those before it that nothing else needs."""
    found = {run[-1]}
    for k in reversed(run[:-1]):
        if 0 < len(facts.feeds[k]) <= len(found) and found.issuperset(facts.feeds[k]):
            found.add(k)
    return found


# ---- the orders


def least_peak_first(facts: Facts) -> Order:
    """Of the groups that could run, the one after which least is alive."""
    left = {b: len(users) for b, users in facts.users.items()}
    exists = set(facts.given)

    def grows(k: int) -> int:
        made = sum(facts.size[b] for b in facts.touches[k] if b not in exists)
        freed = sum(facts.size[b] for b in facts.touches[k] if left[b] == 1 and b in facts.mortal)
        return made - freed

    def done(k: int) -> set[int]:
        """Note that `k` has run; the groups whose answer that changes."""
        changed: set[int] = set()
        for b in facts.touches[k]:
            left[b] -= 1
            if b not in exists or left[b] == 1:
                changed.update(facts.users[b])
            exists.add(b)
        return changed

    return _by_priority(facts, grows, done)


def _by_priority(facts: Facts, price: Callable[[int], int],
                 done: Callable[[int], set[int]]) -> Order:  # fmt: skip
    waits = [len(n) for n in facts.needs]
    ready = {k for k, n in enumerate(waits) if not n}
    heap = [(price(k), k) for k in ready]
    heapq.heapify(heap)
    current = {k: p for p, k in heap}
    order: Order = []
    while heap:
        p, k = heapq.heappop(heap)
        if k not in ready or current[k] != p:
            continue  # its price has changed since
        ready.discard(k)
        order.append(k)
        fresh = done(k) & ready
        for f in facts.feeds[k]:
            waits[f] -= 1
            if not waits[f]:
                ready.add(f)
                fresh.add(f)
        for f in fresh:
            current[f] = price(f)
            heapq.heappush(heap, (current[f], f))
    return order


def breadth_first(facts: Facts) -> Order:
    """By distance from the arguments."""
    level = [0] * len(facts.needs)
    for k, needs in enumerate(facts.needs):
        level[k] = max((level[n] + 1 for n in needs), default=0)
    return sorted(range(len(level)), key=lambda k: (level[k], k))


def depth_first(facts: Facts) -> Order:
    """Each result with all it needs before the next."""
    order: Order = []
    seen: set[int] = set()
    for end in (k for k, feeds in enumerate(facts.feeds) if not feeds):
        stack = [(end, False)]
        while stack:
            k, ready = stack.pop()
            if ready:
                order.append(k)
            elif k not in seen:
                seen.add(k)
                stack.append((k, True))
                stack.extend((n, False) for n in sorted(facts.needs[k], reverse=True))
    return order


ORDERS: dict[str, Callable[[Facts], Order]] = {
    "least peak first": least_peak_first,
    "breadth first": breadth_first,
    "depth first": depth_first,
}
