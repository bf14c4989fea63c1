"""Memory traffic: elements (four-byte units) a program moves, as upper bounds, by spec id.

The counters are compile-time facts, so nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import metrics
from tilewright.testing import fresh_cache

cat, softmax = torch.cat, torch.softmax


def f32(*size: int) -> Tensor:
    return torch.randn(*size)


def i32(*size: int) -> Tensor:
    return torch.randint(0, 10, size, dtype=torch.int32)


def elements(function: Callable[..., Any], *inputs: Tensor, train: bool = False) -> int:
    """Compile (forward, and backward of the sum of means) and count."""
    with fresh_cache():
        metrics.reset()
        if train:
            inputs = tuple(x.requires_grad_() for x in inputs)
        out = torch.compile(function, backend="tilewright", dynamic=False)(*inputs)
        if train:
            sum(item.mean() for item in out).backward()  # type: ignore[union-attr]
        return metrics.num_bytes_accessed // 4


def scaled_by_row_sums(a: Tensor) -> Tensor:
    for _ in range(3):
        a = a * a.sum(1, keepdim=True)
    return a


def add_into_both(a: Tensor, b: Tensor, c: Tensor) -> None:
    a0 = a + c
    b0 = b + a0
    b.copy_(b0)
    a.copy_(a0)


def shared_mask(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    mask = torch.tril(torch.ones(32, 32))
    return a + mask, b + mask, c + mask


def layer_norm(a: Tensor) -> Tensor:
    with torch.no_grad():
        return F.layer_norm(a, (10,), WEIGHT, BIAS)


def squares(a: Tensor, b: Tensor) -> Tensor:
    return ((a - b) ** 2).sum(-1).amax(1)


WEIGHT, BIAS = f32(10), f32(10)

INFERENCE: list[tuple[str, int, Callable[..., Any], tuple[Tensor, ...]]] = [
    ("pf_01a", 20, lambda x: x.cos(), (f32(10),)),
    ("pf_01b", 30, lambda x, y: x + y, (f32(10), f32(10))),
    ("pf_01c", 210, lambda x, y: x + y, (f32(10, 10), f32(10))),
    ("pf_01d", 20, lambda x: x + x, (f32(10),)),
    ("pf_01e", 200, lambda x: x + x.t(), (f32(10, 10),)),
    ("pf_01f", 50, lambda a, b, c: (a.cos(), b.sin() + c.sin()), (f32(10), f32(10), f32(10))),
    ("pf_02a", 110, lambda x: x.sum(1), (f32(10, 10),)),
    ("pf_02b", 110, lambda x: x.sum(0), (f32(10, 10),)),
    ("pf_03a", 200, lambda x: x @ x, (f32(10, 10),)),
    ("pf_03b", 300, lambda a, b: a @ b, (f32(10, 10), f32(10, 10))),
    ("pf_03c", 600, lambda x: (x.cos() @ x.cos()).cos(), (f32(10, 10),)),
    ("pf_03d", 600, lambda x: x.cos() @ x.sin(), (f32(10, 10),)),
    ("pf_04a", 40, lambda a, b: cat([a.sin(), b.sin()]), (f32(10), f32(10))),
    ("pf_04b", 40, lambda a, b: cat([a, b]), (f32(10), f32(10))),
    ("pf_04c", 40, lambda a, b: cat([a.cos(), b]), (f32(10), f32(10))),
    ("pf_04f", 600, lambda *x: cat([t + k for k, t in enumerate(x)]) + 10, (f32(10, 10),) * 3),
    ("pf_04h", 2600, lambda a, b: cat([a.sum(0), b.sum(0)]) + 10, (f32(10, 10, 10),) * 2),
    ("pf_05a", 400, lambda a, b: cat([softmax(a, 1), softmax(b, 1)]), (f32(10, 10), f32(10, 10))),
    ("pf_05c", 600, lambda a, b: cat([a.cos(), b @ b]).cos(), (f32(10, 10), f32(10, 10))),
    ("pf_05d", 800, lambda a, b: cat([a @ a, b @ b]).cos(), (f32(10, 10), f32(10, 10))),
    ("pf_05e", 400, lambda a, b: cat([a, b]).cos(), (f32(10, 10), f32(10, 10))),
    ("pf_05f", 400, lambda a, b: cat([a, b.cos()]), (f32(10, 10), f32(10, 10))),
    ("pf_05g", 680, lambda a, b: F.pad(cat([a @ a, b]), (2, 2), value=0.5), (f32(10, 10),) * 2),
    ("pf_06", 6400, lambda *x: cat([F.gelu(t) for t in x]) + 10, (f32(10, 10),) * 16),
    ("pf_07", 9600, lambda *x: cat([F.relu(t) for t in x]) + 10, (f32(10, 10),) * 16),
    ("pf_09", 30, lambda a, i: a[i], (f32(10), i32(10))),
    ("pf_10", 6144, shared_mask, (f32(32, 32), f32(32, 32), f32(32, 32))),
    ("pf_11", 210, lambda a: (a.sum(1), a.cos()), (f32(10, 10),)),
    ("pf_12", 120, lambda a: (a.sum(1), a.amax(1)), (f32(10, 10),)),
    ("pf_13", 120, lambda a, b: b.cos() + a.sum(1), (f32(10, 10), f32(10))),
    ("pf_14", 120, lambda a, b: b.cos() + a.sum(0), (f32(10, 10), f32(10))),
    ("pf_15", 210, lambda a, b: a.sum(1, keepdim=True) * b.cos(), (f32(10, 10), f32(10))),
    ("pf_16", 110, lambda a: a.cos().sum(1).cos(), (f32(10, 10),)),
    ("pf_17", 200, scaled_by_row_sums, (f32(10, 10),)),
    ("pf_18", 200, lambda a: softmax(a, 1), (f32(10, 10),)),
    ("pf_19", 220, layer_norm, (f32(10, 10),)),
    ("pf_20", 200, lambda a: softmax(softmax(a, 1), 1), (f32(10, 10),)),
    (
        "pf_21",
        300,
        lambda g, o: torch.ops.aten._softmax_backward_data(g, o, 1, torch.float32),
        (f32(10, 10), f32(10, 10)),
    ),
    ("pf_22", 90, squares, (f32(10, 1, 4), f32(1, 10, 4))),
    ("pf_23", 10, lambda: (torch.ones(10) + torch.ones(10, 10)).sum(-1), ()),
    ("pf_24", 320, lambda a, i: a[i].cos(), (f32(10, 10), i32(20))),
    ("pf_25", 140, lambda a, i: a[i].cos().sum(1), (f32(10, 10), i32(20))),
    ("pf_26", 500, add_into_both, (f32(10, 10), f32(10, 10), f32(10, 10))),
    ("pf_34a", 1331, lambda x, w: x * w + 1, (f32(2, 3, 10, 11), f32(11))),
    ("pf_34b", 1342, lambda x, v, w: x * v + x * w, (f32(2, 3, 10, 11), f32(11), f32(11))),
    ("pf_35a", 300, lambda a, b: a + b.t(), (f32(10, 10), f32(10, 10))),
    ("pf_35b", 300, lambda a, b: a.t() + b, (f32(10, 10), f32(10, 10))),
    (
        "pf_36",
        4000,
        lambda a, b, c: a + b.permute(1, 2, 0) + c.permute(2, 0, 1),
        (f32(10, 10, 10), f32(10, 10, 10), f32(10, 10, 10)),
    ),
    ("pf_69", 210, lambda a: (a.sum(0), a.cos()), (f32(10, 10),)),
    ("pf_69_large", 2098176, lambda a: (a.sum(0), a.cos()), (f32(1024, 1024),)),
    ("pf_70", 200, lambda a: softmax(a, 0), (f32(10, 10),)),
    ("pf_70_large", 2097152, lambda a: softmax(a, 0), (f32(1024, 1024),)),
    ("pf_72", 170, squares, (f32(10, 1, 8), f32(1, 10, 8))),
]

TRAINING: list[tuple[str, int, Callable[..., Any], tuple[Tensor, ...]]] = [
    ("pf_37", 50, lambda x: (x.cos().cos().cos(),), (f32(10),)),
    ("pf_38", 90, lambda *x: (sum(x).cos().cos(),), (f32(10), f32(10), f32(10), f32(10))),
    ("pf_39", 450, lambda x: ((x < 0) * x,), (f32(100),)),
]


@pytest.mark.parametrize(
    ("most", "function", "inputs"),
    [pytest.param(*case[1:], id=case[0]) for case in INFERENCE],
)
def test_inference(most: int, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    # the same tensor passed twice would be read once
    own = tuple(x.clone() for x in inputs)
    assert elements(function, *own) <= most


@pytest.mark.parametrize(
    ("most", "function", "inputs"),
    [pytest.param(*case[1:], id=case[0]) for case in TRAINING],
)
def test_training(most: int, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    assert elements(function, *(x.clone() for x in inputs), train=True) <= most


def test_counters_are_per_kernel_too() -> None:
    with fresh_cache():
        metrics.reset()
        torch.compile(lambda x: (x @ x).cos(), backend="tilewright")(f32(10, 10))
    assert [n for _, n in metrics.nodes_num_elem] == [200, 200]
    assert metrics.generated_kernel_count == 1
