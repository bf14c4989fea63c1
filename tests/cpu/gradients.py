"""The training twin of `against_eager.check`: values, then the gradients of every float input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.cpu.against_eager import compiled
from tilewright import metrics


def check_training(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None,
                   fallbacks: bool = False, **tolerance: float) -> None:  # fmt: skip
    """`fn` compiled gives eager's values and gradients, with every op lowered natively."""
    theirs, ours = (pytree.tree_map_only(torch.Tensor, _leaf, args) for _ in range(2))
    expected = _with_gradients(fn, theirs)
    metrics.reset()
    actual = _with_gradients(compiled(fn, dynamic), ours)
    if not fallbacks:
        assert not metrics.fallback_ops, dict(metrics.fallback_ops)
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(a, e, equal_nan=True, **tolerance,
                                   msg=lambda text, k=k: f"result {k}: {text}")  # fmt: skip


def _leaf(t: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).copy_(t)
    return copy.requires_grad_(t.is_floating_point())


def _with_gradients(fn: Callable[..., Any], args: Any) -> list[torch.Tensor]:
    results = pytree.tree_leaves(fn(*args))
    roots = [r for r in results if r.requires_grad]
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    inputs = [a for a in tensors if a.requires_grad]
    torch.manual_seed(1)
    seeds = [torch.randn_like(r) for r in roots]
    found = torch.autograd.grad(roots, inputs, seeds, allow_unused=True)
    return [*(r.detach() for r in results), *(g for g in found if g is not None)]
