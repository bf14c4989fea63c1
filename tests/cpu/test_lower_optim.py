"""Foreach ops and optimiser steps against eager, all of it native."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import metrics
from tilewright.lower.optim import COMPOUND, UNARY
from tilewright.lower.table import LOWERINGS

optim = torch.optim


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(s, generator=generator).to(dtype) for s in ((4, 5), (6,), ())]


def check(fn: Callable[..., Any], *args: Any) -> None:
    """Results and what is left in the arguments are eager's, and nothing was left to ATen."""
    torch._dynamo.reset()
    metrics.reset()
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    got, want = torch.compile(fn, backend="tilewright")(*ours), fn(*theirs)
    torch.testing.assert_close((got, ours), (want, theirs), equal_nan=True)
    assert not metrics.fallback_ops, metrics.fallback_ops
    assert metrics.native_nodes


def test_unary() -> None:
    def fn(x: list[torch.Tensor]) -> list[Any]:
        return [getattr(torch.ops.aten, f"_foreach_{name}")(x) for name in UNARY]

    check(fn, tensors())


def test_every_base_op_has_a_lowering() -> None:
    bases = {base for overloads in COMPOUND.values() for base in overloads.values()}
    assert not bases - LOWERINGS.keys()


def test_binary() -> None:
    def fn(x: list[torch.Tensor], y: list[torch.Tensor]) -> list[Any]:
        scalars = [2.0, 3.0, 0.5]
        return [
            torch._foreach_add(x, y, alpha=2), torch._foreach_sub(x, 2), torch._foreach_mul(x, y),
            torch._foreach_div(x, scalars), torch._foreach_mul(x, torch.tensor(3.0)),
            torch._foreach_maximum(x, y), torch._foreach_clamp_max(x, 0.5),
            torch._foreach_minimum(x, scalars), torch._foreach_pow(x, y),
            torch._foreach_pow(x, 3), torch._foreach_pow(2.0, x),
        ]  # fmt: skip

    check(fn, tensors(), tensors(seed=1))


def test_compound() -> None:
    def fn(x: list[torch.Tensor], y: list[torch.Tensor], z: list[torch.Tensor]) -> list[Any]:
        scalars = [2.0, 3.0, 0.5]
        return [
            torch._foreach_addcmul(x, y, z, 0.5), torch._foreach_addcdiv(x, y, z, scalars),
            torch._foreach_lerp(x, y, z), torch._foreach_lerp(x, y, 0.3),
            torch._foreach_norm(x), torch._foreach_norm(x, 1), torch._foreach_max(x),
        ]  # fmt: skip

    check(fn, tensors(), tensors(seed=1), tensors(seed=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_other_types(dtype: torch.dtype) -> None:
    def fn(x: list[torch.Tensor], y: list[torch.Tensor]) -> list[Any]:
        return [torch._foreach_add(x, y), torch._foreach_mul(x, 2.5), torch._foreach_neg(x)]

    check(fn, tensors(dtype), tensors(dtype, seed=1))


def test_in_place() -> None:
    def fn(x: list[torch.Tensor], y: list[torch.Tensor]) -> None:
        torch._foreach_mul_(x, 0.9)
        torch._foreach_add_(x, y)
        torch._foreach_zero_(y)

    check(fn, tensors(), tensors(seed=1))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [torch._fused_adam_, torch._fused_adamw_])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_fused_adam(step: Callable[..., Any], found_inf: float | None, dtype: torch.dtype) -> None:
    def fn(scaling: dict[str, torch.Tensor], *lists: list[torch.Tensor]) -> None:
        step(*lists, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=True,
             maximize=True, **scaling)  # fmt: skip

    scaling = {} if found_inf is None else {
        "grad_scale": torch.tensor(2.0), "found_inf": torch.tensor(found_inf)}  # fmt: skip
    counts = [torch.tensor(float(k + 3)) for k in range(3)]
    check(fn, scaling, *(tensors(dtype, seed) for seed in range(5)), counts)


CLASSES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.RMSprop, {"centered": True}),
    (optim.NAdam, {}),
]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize(("kind", "options"), CLASSES, ids=lambda v: getattr(v, "__name__", None))
def test_optimizers(kind: type[optim.Optimizer], options: dict[str, Any], foreach: bool) -> None:
    def train(compiled: bool) -> list[torch.Tensor]:
        params = tensors()[:2]
        optimizer = kind(params, foreach=foreach, **options)
        run = torch.compile(optimizer.step, backend="tilewright") if compiled else optimizer.step
        for seed in range(3):
            for p, g in zip(params, tensors(seed=seed), strict=False):
                p.grad = g - 0.5
            run()
        return params

    torch._dynamo.reset()
    metrics.reset()
    torch.testing.assert_close(train(compiled=True), train(compiled=False))
    assert metrics.native_nodes
    assert not metrics.fallback_ops, metrics.fallback_ops
