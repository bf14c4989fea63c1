"""An order of groups that stays right while groups are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FARTHEST = 256  # groups looked at to decide whether two may be joined: a bound on effort


@dataclass(frozen=True)
class Gap:
    """What lies between two groups that may be joined, each part in order.

    `before` must run before the later of the two, `after` after the earlier.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]


class Order:
    """A topological order of groups under joining two at a time.

    Each group has a rank, and depends only on groups of lower rank. Joining two looks at what lies
    between them, and reorders only that.
    """

    def __init__(self, needs: Sequence[set[int]]) -> None:
        self.needs: list[set[int]] = [set(n) for n in needs]
        self.feeds: list[set[int]] = [set() for _ in needs]
        for k, before in enumerate(needs):
            for b in before:
                self.feeds[b].add(k)
        self.rank: list[int] = list(range(len(needs)))
        self.work = 0  # groups looked at so far

    def between(self, a: int, b: int) -> Gap | str:
        """What would move if the two became one step, or why they cannot."""
        rank = self.rank
        first, last = (a, b) if rank[a] < rank[b] else (b, a)
        after = self._reach(first, last, self.feeds, lambda k: rank[k] < rank[last])
        if isinstance(after, str):
            return after
        before = self._reach(last, first, self.needs, lambda k: rank[k] > rank[first])
        return before if isinstance(before, str) else Gap(before, after)

    def _reach(self, start: int, goal: int, step: list[set[int]],
               inside: Callable[[int], bool]) -> tuple[int, ...] | str:  # fmt: skip
        seen: set[int] = set()
        stack = [k for k in step[start] if k != goal and inside(k)]
        while stack:
            k = stack.pop()
            if k in seen:
                continue
            seen.add(k)
            self.work += 1
            if goal in step[k]:
                return "another kernel must run between them"
            if len(seen) > FARTHEST:
                return "they are too far apart"
            stack.extend(j for j in step[k] if j not in seen and inside(j))
        return tuple(sorted(seen, key=self.rank.__getitem__))

    def join(self, a: int, b: int, gap: Gap) -> None:
        """Make `b` a part of `a`."""
        moved = [*gap.before, a, *gap.after]
        places = sorted([self.rank[b], *(self.rank[k] for k in moved)])
        del places[len(gap.before)]  # one of the two now stands for both
        for k, place in zip(moved, places, strict=True):
            self.rank[k] = place
        for edges, back in ((self.needs, self.feeds), (self.feeds, self.needs)):
            for k in edges[b]:
                back[k].discard(b)
                if k != a:
                    back[k].add(a)
                    edges[a].add(k)
            edges[a].discard(b)
            edges[b] = set()
