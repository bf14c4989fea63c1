"""The cases of a sweep that run at every change."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.fewer import Case, covering

CASES: list[Case] = [
    {"type": t, "mode": m, "dynamic": d} for t, m, d in product(range(4), range(3), range(2))
]


@pytest.mark.parametrize(("strength", "count"), [(1, 4), (2, 12), (3, 24)])
def test_every_combination_of_so_many_values_is_kept(strength: int, count: int) -> None:
    def found(case: Case) -> set[object]:
        return set(combinations(sorted(case.items()), strength))

    kept = covering(CASES, strength)
    assert len(kept) == count
    assert set().union(*(found(CASES[k]) for k in kept)) == set().union(*map(found, CASES))


def test_values_alternate() -> None:
    pairs: list[Case] = [{"name": n, "dynamic": d} for n in range(6) for d in range(2)]
    kept = [pairs[k] for k in sorted(covering(pairs, 1))]
    assert [case["name"] for case in kept] == list(range(6))
    assert sum(case["dynamic"] for case in kept) == 3


def test_a_list_is_kept_in_turn(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from tests import fewer\nimport pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n    fewer.mark_slow(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.in_turn(2)\n"
        "@pytest.mark.parametrize('k', range(5))\n"
        "def test_list(k):\n    pass\n"
        "@pytest.mark.covering(1)\n"
        "@pytest.mark.parametrize('a', 'xyz')\n"
        "@pytest.mark.parametrize('b', 'uv')\n"
        "def test_pairs(a, b):\n    pass\n"
    )
    pytester.runpytest("-p", "no:cacheprovider", "-m", "not slow").assert_outcomes(
        passed=6, deselected=5
    )
    pytester.runpytest("-p", "no:cacheprovider", "-m", "slow").assert_outcomes(
        passed=5, deselected=6
    )
