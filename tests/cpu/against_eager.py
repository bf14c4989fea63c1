"""One way to test a lowering: compile, compare with eager, and see that ATen was not asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright import metrics


def compiled(fn: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="tilewright", dynamic=dynamic, fullgraph=True)


def check(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, bits: bool = False,
          fallbacks: bool = False, **tolerance: float) -> None:  # fmt: skip
    """`fn` compiled gives what `fn` gives: values, types, sizes and strides, and changed inputs.

    With `bits` also the sign of every zero. Unless `fallbacks`, every op must be lowered natively.
    """
    ours, theirs = (pytree.tree_map_only(torch.Tensor, _copy, args) for _ in range(2))
    expected = fn(*theirs)
    metrics.reset()
    actual = compiled(fn, dynamic)(*ours)
    if not fallbacks:
        assert not metrics.fallback_ops, dict(metrics.fallback_ops)
    pairs = zip(pytree.tree_leaves((actual, ours)), pytree.tree_leaves((expected, theirs)),
                strict=True)  # fmt: skip
    for k, (a, e) in enumerate(pairs):
        if not isinstance(e, torch.Tensor):
            assert a == e
            continue
        torch.testing.assert_close(a, e, equal_nan=True, check_stride=True, **tolerance,
                                   msg=lambda text, k=k: f"result {k}: {text}")  # fmt: skip
        if bits:
            same = torch.signbit(a) == torch.signbit(e)
            assert bool((same | a.isnan()).all()), f"result {k} differs in a sign of zero"


def _copy(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    made = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).copy_(t.detach())
    return made.requires_grad_(t.requires_grad)
