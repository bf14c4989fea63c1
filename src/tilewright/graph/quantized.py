"""Quantising and dequantising as what they are: multiplications, rounding, casts.

The operators are defined in Python, by torch or by whoever quantised the program, and are there
once their module is imported. Each is traced through its own definition. Those whose parameters are
tensors read them as numbers, which a trace cannot: they are written out here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "quantized_decomposed"
DEFINED = torch._C.DispatchKey.CompositeExplicitAutograd

THROUGH = (
    "quantize_per_tensor.default", "dequantize_per_tensor.default",
    "quantize_per_channel.default", "dequantize_per_channel.default",
    "quantize_per_token.default", "dequantize_per_token.default",
    "quantize_per_channel_group.default", "dequantize_per_channel_group.default",
    "choose_qparams_per_token.default", "choose_qparams_per_token_asymmetric.default",
)  # fmt: skip


def apart() -> dict[Any, Callable[..., Any]]:
    """The operators that are defined by now, each with what to trace for it."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in THROUGH:
        if (op := _overload(name)) is not None:
            found[op] = _through(op)
    for name, traced in _OF_TENSORS.items():
        if (op := _overload(name)) is not None:
            found[op] = traced
    return found


def _overload(name: str) -> Any:
    if not torch._C._dispatch_has_kernel(f"{NAMESPACE}::{name.removesuffix('.default')}"):
        return None
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload)


def _through(op: Any) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), DEFINED):
            return NotImplemented
        return op._op_dk(DEFINED, *args, **kwargs)

    return traced


def _quantize(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, low: Any, high: Any,
              dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    inverse = (1.0 / _number(scale).to(torch.float64)).to(torch.float32)
    steps = torch.round(x.to(torch.float32) * inverse) + _number(zero_point).to(torch.float32)
    if isinstance(low, torch.Tensor):
        low, high = (_number(n).to(torch.float32) for n in (low, high))
    return torch.clamp(steps, low, high).to(dtype)


def _dequantize(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, low: Any,
                high: Any, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None
                ) -> torch.Tensor:  # fmt: skip
    """A number beside a tensor of low precision is a float32 for eager; a result is rounded."""
    made = out_dtype or torch.float32
    work = torch.promote_types(made, torch.float32)
    steps = (x.to(made).to(work) - _number(zero_point).to(work)).to(made)
    return (steps.to(work) * _number(scale).to(work)).to(made)


def _number(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(())


_OF_TENSORS: dict[str, Callable[..., Any]] = {
    f"{name}.{overload}": traced
    for name, traced in (("quantize_per_tensor", _quantize),
                         ("dequantize_per_tensor", _dequantize))
    for overload in ("tensor", "tensor2")
}  # fmt: skip
