"""Components of a point beside each other: a tile of them is stored as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check

Fn = Callable[..., Any]


def spread(count: int) -> Fn:
    """So many results of each point, no two of them made alike."""

    def fn(x: Tensor) -> Tensor:
        return torch.stack([x * (k + 1) if k % 2 else x.exp() - k for k in range(count)], -1)

    return fn


def rotations(axis: Tensor) -> Tensor:
    angle = axis.norm(dim=-1, keepdim=True).clamp(min=1e-8)
    x, y, z = (axis / angle).unbind(-1)
    c, s = angle[..., 0].cos(), angle[..., 0].sin()
    rows = (x * x + c, x * y - s * z, x * z + s * y, x * y + s * z, y * y + c, y * z - s * x,
            x * z - s * y, y * z + s * x, z * z + c)  # fmt: skip
    return torch.stack(rows, -1).view(*axis.shape[:-1], 3, 3)


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two vectors of different types, and a number of each point."""
    return (torch.stack((x + y, x > y, x * 3), -1),
            torch.stack((x > y, x < y, x == y, y > 1, x > 1), -1), x * y)  # fmt: skip


CASES: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "three": (spread(3), (torch.randn(1000),)),
    "three of sixteen bits": (spread(3), (torch.randn(300).bfloat16(),)),
    "five": (spread(5), (torch.randn(40, 7),)),
    "eight": (spread(8), (torch.randn(256),)),
    "sixteen": (spread(16), (torch.randn(130),)),
    "rotations": (rotations, (torch.randn(5, 100, 3),)),
    "several": (several, (torch.randn(777), torch.randn(777))),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args)
    assert any("tl.join(" in k.text for k in kernels_of(fn, *args))


def test_lines_are_written_whole() -> None:
    """Lanes of a warp are neighbours in memory: one mask says which of them are components."""
    (kernel,) = kernels_of(rotations, torch.empty(1 << 16, 3))
    assert kernel.text.count("tl.store(") == 1
    made = build(kernel)
    assert made.shared == 16 * 4 * dict(kernel.config.blocks)["XBLOCK"]


def test_four_floats_are_one_access() -> None:
    (kernel,) = kernels_of(spread(4), torch.empty(1 << 16))
    made = build(kernel)
    assert made.widest("st.global") == 16 and not made.shared


def test_parts_of_a_vector_are_stored_as_they_are() -> None:
    """Of five places three, or ones that another kernel fills."""

    def some(x: Tensor, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 1], out[:, 2], out[:, 3] = x, x * 2, x * 3
        return out

    assert not any("tl.join(" in k.text
                   for k in kernels_of(some, torch.empty(4096), torch.empty(4096, 5)))  # fmt: skip
