"""Compare a compiled function with eager, and check that none of it was left to ATen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright import metrics


def check(function: Callable[..., Any], *args: Any, dynamic: bool = False, grad: bool = False,
          exact: bool = True, fallbacks: Sequence[str] = ()) -> None:  # fmt: skip
    """Values (and with `grad` gradients) equal eager's; only `fallbacks` were called in ATen."""
    torch._dynamo.reset()
    metrics.fallback_ops.clear()
    given = [_leaf(a, grad) for a in args]
    expected = function(*given)
    actual = torch.compile(function, backend="tilewright", dynamic=dynamic)(*given)
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)
    if grad:
        torch.testing.assert_close(_gradients(actual, given), _gradients(expected, given))
    left = {name for name in metrics.fallback_ops if name not in fallbacks}
    assert not left, f"left to ATen: {left}"


def _leaf(value: Any, grad: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wanted = grad and value.is_floating_point()
    return value.detach().requires_grad_(wanted)


def _gradients(outputs: Any, inputs: list[Any]) -> tuple[torch.Tensor | None, ...]:
    """Of a sum in which every element has its own weight, so that none is mistaken for another."""
    total = torch.zeros(())
    for out in pytree.tree_leaves(outputs):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
            total = total + (out * weights).sum()
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return torch.autograd.grad(total, leaves, allow_unused=True)
