"""The specified traffic at sizes, ranks and types that are not specified, known or not."""

from __future__ import annotations

import pytest
import torch

from tests import pretend
from tests.shapes import PATTERNS, Pattern, counted, counted_by_name

VARIANTS = [
    pytest.param(torch.float32, {"A": 7, "B": 13, "C": 5}, False, id="odd"),
    pytest.param(torch.bfloat16, {"A": 33, "B": 66, "C": 18}, False, id="bfloat16"),
    pytest.param(torch.float64, {"A": 48, "B": 31, "C": 9}, True, id="float64-dynamic"),
]


@pytest.mark.parametrize(("dtype", "sizes", "dynamic"), VARIANTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_on_the_cpu(pattern: Pattern, dtype: torch.dtype, sizes: dict[str, int],
                    dynamic: bool) -> None:  # fmt: skip
    if pattern.exists(dtype) and not (dynamic and pattern.known):
        found = counted(pattern, dtype, sizes, "cpu", dynamic)
        assert found <= pattern.bound(dtype, sizes, dynamic)


@pytest.mark.parametrize(("dtype", "sizes", "dynamic"), VARIANTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_on_a_card(pattern: Pattern, dtype: torch.dtype, sizes: dict[str, int],
                   dynamic: bool) -> None:  # fmt: skip
    if pattern.exists(dtype) and not (dynamic and (pattern.known or pattern.held)):
        found = pretend.run(counted_by_name, pattern.name, dtype, sizes, "cuda", dynamic)
        assert found <= pattern.bound(dtype, sizes, dynamic)
