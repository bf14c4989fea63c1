"""Memory traffic: the elements a program moves on the CPU, as upper bounds, by spec id."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.traffic import CASES, Case, count
from tilewright import metrics
from tilewright.testing import fresh_cache


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    found = count(case)
    assert found.elements <= case.limit
    assert found.moved <= (case.limit if case.honest is None else case.honest)


def test_the_documented_numbers(root: Path) -> None:
    """Nothing in the table is above the bounds the tests hold."""
    table = (root / "docs" / "traffic.md").read_text()
    rows = re.findall(r"^\| (\S.*?) \| [\d,]+ \| \S+ \| ([\d,]+) \| ([\d,]+) \|$", table, re.M)
    documented = {name: [int(n.replace(",", "")) for n in ours] for name, *ours in rows}
    limits = {case.name: case.limit for case in CASES}
    assert len(documented) > 100 and documented.keys() <= limits.keys(), "run `make docs`"
    assert all(max(ours) <= limits[name] for name, ours in documented.items()), "run `make docs`"


def test_counters_are_per_kernel_too() -> None:
    with fresh_cache():
        metrics.reset()
        torch.compile(lambda x: (x @ x).cos(), backend="tilewright")(torch.randn(10, 10))
    assert [n for _, n in metrics.nodes_num_elem] == [200, 200]
    assert metrics.generated_kernel_count == 1
