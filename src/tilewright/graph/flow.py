"""Minimum cuts of flow networks (Dinic's algorithm), with integer capacities."""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 80


class Network:
    """Vertices are numbers from `vertex()`; edges are kept in pairs, an edge and its residual."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = []  # vertex -> the numbers of its edges
        self._to: list[int] = []
        self._capacity: list[int] = []
        self.source = self.vertex()
        self.sink = self.vertex()

    def vertex(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, tail: int, head: int, capacity: int) -> None:
        if capacity <= 0:
            return
        for start, end, amount in ((tail, head, capacity), (head, tail, 0)):
            self._edges[start].append(len(self._to))
            self._to.append(end)
            self._capacity.append(amount)

    def cut(self) -> list[bool]:
        """For each vertex, whether it is on the source's side of a cheapest cut: of those, the cut
        nearest the source."""
        while True:
            levels = self._levels()
            if levels[self.sink] < 0:
                return [level >= 0 for level in levels]
            self._saturate(levels)

    def _levels(self) -> list[int]:
        """Distances from the source along edges that can carry more; -1 out of reach."""
        edges, to, capacity = self._edges, self._to, self._capacity
        levels = [-1] * len(edges)
        levels[self.source] = 0
        queue = deque([self.source])
        while queue:
            vertex = queue.popleft()
            for e in edges[vertex]:
                if capacity[e] and levels[to[e]] < 0:
                    levels[to[e]] = levels[vertex] + 1
                    queue.append(to[e])
        return levels

    def _saturate(self, levels: list[int]) -> None:
        """Push flow along shortest paths until each has a full edge."""
        edges, to, capacity, sink = self._edges, self._to, self._capacity, self.sink
        following = [0] * len(edges)  # vertex -> how many of its edges are done with
        path: list[int] = []
        vertex = self.source
        while True:
            if vertex == sink:
                amount = min(capacity[e] for e in path)
                first_full = len(path)
                for k in range(len(path) - 1, -1, -1):
                    e = path[k]
                    capacity[e] -= amount
                    capacity[e ^ 1] += amount
                    if not capacity[e]:
                        first_full = k
                vertex = to[path[first_full] ^ 1]
                del path[first_full:]
            elif following[vertex] < len(edges[vertex]):
                e = edges[vertex][following[vertex]]
                if capacity[e] and levels[to[e]] == levels[vertex] + 1:
                    path.append(e)
                    vertex = to[e]
                else:
                    following[vertex] += 1
            elif path:
                vertex = to[path.pop() ^ 1]
                following[vertex] += 1
            else:
                return
