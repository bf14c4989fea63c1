"""Memory traffic: the elements a program moves on the CPU, exactly, by spec id."""

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
    assert (found.elements, found.moved) == case.expected("cpu")
    assert case.kernels in (None, found.kernels)
    assert sum(found.nodes) == pytest.approx(found.elements, abs=len(found.nodes))


def rows(text: str) -> dict[str, list[int]]:
    """The numbers of ours in a table of the page, by case."""
    found = re.findall(r"^\| (\S.*?) \| [\d,]+ \| \S+ \| ([\d,]+) \| ([\d,]+) \|$", text, re.M)
    return {name: [int(n.replace(",", "")) for n in ours] for name, *ours in found}


def test_the_documented_numbers(root: Path) -> None:
    """The tables say what the tests hold."""
    counted, moved = map(rows, (root / "docs" / "traffic.md").read_text().split("## What really"))
    both = {c.name: [c.expected(device) for device in ("cpu", "cuda")] for c in CASES}
    assert counted == {name: [n for n, _ in pair] for name, pair in both.items()}, "run `make docs`"
    fewer = {c.name for c in CASES if c.moved is not None}
    assert moved == {name: [n for _, n in both[name]] for name in fewer}, "run `make docs`"


ABOVE = {
    "layer norm": "a card keeps sums of columns in 512 parts: fewer keep it busy for less time",
    "RMS norm": "the same",
    "sums of rows and of columns": "the same",
}
"""Cases in which a card of ours moves more than the reference's, and why."""


def test_the_reference_is_met() -> None:
    for case in CASES:
        on_cpu, on_card = (case.expected(device)[0] for device in ("cpu", "cuda"))
        assert on_cpu <= case.reference
        assert (on_card > case.reference) == (case.name in ABOVE)


AT_THE_FLOOR = {"PF-04h", "PF-05b", "PF-05g", "PF-06", "PF-07", "PF-31", "PF-32", "PF-33", "PF-40",
                "PF-41", "PF-42", "PF-69", "PF-70", "PF-70 at 1024x1024", "PF-70 at 4096x4096",
                "PF-72", "PF-72 of 16", "PF-72 of 64", "dropout"}  # fmt: skip


def test_what_reaches_the_floor() -> None:
    """Of the cases in which less could move than the reference moves, on both kinds of target."""
    reached = {c.name for c in CASES if c.floor is not None
               and max(c.expected(device)[0] for device in ("cpu", "cuda")) <= c.floor}  # fmt: skip
    assert reached == AT_THE_FLOOR


def test_the_counter_is_not_what_it_compares_with() -> None:
    """By hand: two kernels and a product, of which one reads an operand twice and one a slice."""
    case = Case("by hand", 0, lambda x, y: ((x + x.t()) @ y[:8]).sum(0) * 2, "f32[8,8] f32[16,8]")
    found = count(case)
    assert found.nodes == (64 + 64, 64 + 128 + 64, 64 + 8)
    assert (found.elements, found.moved, found.kernels) == (456, 392, 2)


def test_counters_are_per_kernel_too() -> None:
    with fresh_cache():
        metrics.reset()
        torch.compile(lambda x: (x @ x).cos(), backend="tilewright")(torch.randn(10, 10))
    assert [n for _, n in metrics.nodes_num_elem] == [200, 200]
    assert metrics.generated_kernel_count == 1
