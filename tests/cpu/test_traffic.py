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


def rows(text: str) -> dict[str, list[int]]:
    """The numbers of ours in a table of the page, by case."""
    found = re.findall(r"^\| (\S.*?) \| [\d,]+ \| \S+ \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    return {name: [int(n.replace(",", "")) for n in ours] for name, *ours in found}


def test_the_documented_numbers(root: Path) -> None:
    """Nothing in the table is above the bounds the tests hold."""
    table, _ = (root / "docs" / "traffic.md").read_text().split("## What really moves")
    documented = rows(table)
    limits = {case.name: case.limit for case in CASES}
    assert len(documented) > 100 and documented.keys() <= limits.keys(), "run `make docs`"
    assert all(max(ours) <= limits[name] for name, ours in documented.items()), "run `make docs`"


AT_THE_FLOOR = {"PF-05b", "PF-05g", "PF-06", "PF-07", "PF-32", "PF-33", "PF-41", "PF-42", "PF-69",
                "PF-70", "PF-72"}  # fmt: skip


def test_what_reaches_the_floor(root: Path) -> None:
    """Of the cases in which less could move than the reference moves, on both kinds of target."""
    counted, moved = map(rows, (root / "docs" / "traffic.md").read_text().split("## What really"))
    reached = {c.name for c in CASES if c.floor is not None and max(counted[c.name]) <= c.floor}
    reached |= {c.name for c in CASES if c.honest is not None and c.honest < c.most
                and max(moved[c.name]) <= c.honest}  # fmt: skip
    assert reached >= AT_THE_FLOOR
    assert len(reached) >= 30


def test_counters_are_per_kernel_too() -> None:
    with fresh_cache():
        metrics.reset()
        torch.compile(lambda x: (x @ x).cos(), backend="tilewright")(torch.randn(10, 10))
    assert [n for _, n in metrics.nodes_num_elem] == [200, 200]
    assert metrics.generated_kernel_count == 1
