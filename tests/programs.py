"""What the tests of whole programs share: compile, compare with eager, count compilations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves, tree_map

BACKEND = os.environ.get("TILEWRIGHT_TEST_BACKEND", "tilewright")
# Only tilewright has options of its own; another backend draws eager's numbers anyway.
EAGER_RANDOM: dict[str, Any] | None = {"fallback_random": True} if BACKEND == "tilewright" else None


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    # Falling back to eager after too many recompilations would look like a pass.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    options.setdefault("fullgraph", True)
    return torch.compile(function, backend=BACKEND, **options)


def counting(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Any]:
    """A compiled function and the counter of its compilations."""
    counter = CompileCounterWithBackend(BACKEND)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def copy(value: Any) -> Any:
    """A copy with the same strides and gradient requirement."""
    if not isinstance(value, Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if 0 in value.stride() and value.numel():
        base = value.detach()[tuple(slice(0, 1) if s == 0 else slice(None) for s in value.stride())]
        fresh = base.clone().expand(value.shape)
    else:
        fresh.copy_(value.detach())
    return fresh.requires_grad_(value.requires_grad)


def same(actual: Any, expected: Any, **options: Any) -> None:
    """Equal structure, dtype, shape, strides and values, NaN equal to NaN."""
    got, want = tree_leaves(actual), tree_leaves(expected)
    assert len(got) == len(want)
    for a, e in zip(got, want, strict=True):
        assert type(a) is type(e)
        if not isinstance(e, Tensor):
            assert a == e
            continue
        torch.testing.assert_close(
            a, e, equal_nan=True, check_stride=e.layout == torch.strided, **options
        )


def check(
    function: Callable[..., Any],
    *inputs: Any,
    tolerance: dict[str, float] | None = None,
    **options: Any,
) -> Any:
    """Run eagerly and compiled on equal inputs: outputs, inputs afterwards and gradients agree."""
    results: list[Any] = []
    for call in (function, compiled(function, **options)):
        mine = tree_map(copy, inputs)
        output = call(*mine)
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [t for t in tree_leaves(mine) if isinstance(t, Tensor)]
        wanted = [t for t in leaves if t.requires_grad]
        gradients = None
        if outputs and wanted:
            torch.manual_seed(7)
            directions = [torch.randn_like(t) for t in outputs]
            gradients = torch.autograd.grad(outputs, wanted, directions, allow_unused=True)
        results.append((output, [t.detach() for t in leaves], gradients))
    same(results[1], results[0], **(tolerance or {}))
    return results[1][0]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions: an effort that does not depend on the machine or on what else it does."""
    calls = 0

    def seen(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
