"""The specified traffic at sizes, ranks and types that are not specified, known or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests import pretend
from tests.shapes import PATTERNS, Pattern, counted, counted_by_name


@dataclass(frozen=True)
class Variant:
    name: str
    dtype: torch.dtype
    sizes: dict[str, int]
    dynamic: bool = False

    def suits(self, pattern: Pattern, device: str) -> bool:
        known = pattern.known or (pattern.held and device == "cuda")
        return pattern.exists(self.dtype) and not (self.dynamic and known)


VARIANTS = (
    Variant("odd", torch.float32, {"A": 7, "B": 13, "C": 5}),
    Variant("bfloat16", torch.bfloat16, {"A": 33, "B": 66, "C": 18}),
    Variant("float64-dynamic", torch.float64, {"A": 48, "B": 31, "C": 9}, dynamic=True),
)


def cases(device: str, first: int) -> list[Any]:
    """Every pattern with every variant it exists in; all but one of them, in turn, are slow."""
    found: list[Any] = []
    for number, pattern in enumerate(PATTERNS, first):
        made = [v for v in VARIANTS if v.suits(pattern, device)]
        quick = made[number % len(made)]
        for variant in made:
            marks = () if variant is quick else pytest.mark.slow
            found.append(pytest.param(pattern, variant, marks=marks,
                                      id=f"{pattern.name}-{variant.name}"))  # fmt: skip
    return found


@pytest.mark.parametrize(("pattern", "variant"), cases("cpu", 0))
def test_on_the_cpu(pattern: Pattern, variant: Variant) -> None:
    found = counted(pattern, variant.dtype, variant.sizes, "cpu", variant.dynamic)
    assert found == pattern.bytes(variant.dtype, variant.sizes, "cpu", variant.dynamic)


@pytest.mark.parametrize(("pattern", "variant"), cases("cuda", 1))
def test_on_a_card(pattern: Pattern, variant: Variant) -> None:
    found = pretend.run(counted_by_name, pattern.name, variant.dtype, variant.sizes, "cuda",
                        variant.dynamic)  # fmt: skip
    assert found == pattern.bytes(variant.dtype, variant.sizes, "cuda", variant.dynamic)
