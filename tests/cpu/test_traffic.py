"""Memory traffic: the elements a program moves on the CPU, as upper bounds, by spec id."""

from __future__ import annotations

import pytest
import torch

from tests.traffic import CASES, Case, count
from tilewright import metrics
from tilewright.testing import fresh_cache


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    assert count(case).elements <= case.limit


def test_counters_are_per_kernel_too() -> None:
    with fresh_cache():
        metrics.reset()
        torch.compile(lambda x: (x @ x).cos(), backend="tilewright")(torch.randn(10, 10))
    assert [n for _, n in metrics.nodes_num_elem] == [200, 200]
    assert metrics.generated_kernel_count == 1
