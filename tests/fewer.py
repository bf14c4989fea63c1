"""Which cases of a sweep run at every change; the others are slow, and `make test-all` runs them.

`@pytest.mark.covering(n)` is for combinations of parameters: cases are kept until every
combination of values that `n` of the parameters have in some case is in one of them. With 1 every
value of every parameter is tried, with 2 every pair of values. `@pytest.mark.in_turn(n)` is for
lists: every n-th case is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, int]  # which value each parameter has


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that are not kept."""
    sweeps: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("slow") is None:
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        kept = set(range(len(cases)))
        if (mark := cases[0].get_closest_marker("covering")) is not None:
            kept = covering([_values(case) for case in cases], *mark.args)
        elif (mark := cases[0].get_closest_marker("in_turn")) is not None:
            kept = set(range(0, len(cases), *mark.args))
        for k, case in enumerate(cases):
            if k not in kept:
                case.add_marker(pytest.mark.slow)


def _values(case: Any) -> Case:
    """Combinations share the objects that they are made of."""
    return {name: id(value) for name, value in case.callspec.params.items()}


def covering(cases: Sequence[Case], strength: int) -> set[int]:
    """Places of cases that have every combination of values that so many parameters have in any.
    Of those that add as many, the one whose values were kept least: they alternate."""
    parts = [set(combinations(sorted(case.items()), strength)) for case in cases]
    missing = set[Any]().union(*parts)
    kept: set[int] = set()
    used = Counter[Any]()
    while missing:
        merits = {k: (len(parts[k] & missing), -sum(used[v] for v in case.items()), -k)
                  for k, case in enumerate(cases)}  # fmt: skip
        best = max(merits, key=merits.__getitem__)
        kept.add(best)
        used.update(cases[best].items())
        missing -= parts[best]
    return kept
