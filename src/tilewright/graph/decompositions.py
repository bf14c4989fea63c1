"""The decompositions we choose: an op here is traced as simpler ATen ops.

An op with a lowering of its own is not listed: a lowering sees eager's exact semantics (what is
computed in float32, what is rounded), traces fewer nodes and compiles faster. Sections follow the
op families of `lower/`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tilewright.graph import attention, narrow, quantized

aten = torch.ops.aten

POINTWISE: list[Any] = [
    aten.ldexp, aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.mvlgamma,
    aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor,
    aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor,
]  # fmt: skip
VIEWS: list[Any] = [aten.block_diag]
INDEXING: list[Any] = []
REDUCTIONS: list[Any] = []
NORMS: list[Any] = []
POOLING: list[Any] = []
OPTIMIZERS: list[Any] = []
OTHERS: list[Any] = [
    aten._euclidean_dist, aten.addr, aten.isin,
]  # fmt: skip


def _statistics_in_float32(op: Any) -> Callable[..., Any]:
    """A norm of low-precision input with float32 parameters has float32 statistics on the CPU.

    The op's shape function says they have the input's type, so the norm is traced over the input
    converted to float32, and its result converted back.
    """

    def traced(x: torch.Tensor, *args: Any) -> Any:
        parameters = [t.dtype for t in args if isinstance(t, torch.Tensor)]
        if x.device.type != "cpu" or x.dtype.itemsize != 2 or torch.float32 not in parameters:
            return NotImplemented  # traced as itself
        out, *statistics = op(x.to(torch.float32), *args)
        return out.to(x.dtype), *statistics

    return traced


def _layer_norm_backward_in_float32(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    """The same for its backward, whose shape function gives the parameters' gradients that type."""
    parameters = [t.dtype for t in args if isinstance(t, torch.Tensor)]
    if x.device.type != "cpu" or x.dtype.itemsize != 2 or torch.float32 not in parameters:
        return NotImplemented
    wide = (grad.to(torch.float32), x.to(torch.float32))
    gradient, *others = aten.native_layer_norm_backward.default(*wide, *args)
    return None if gradient is None else gradient.to(x.dtype), *others


def _loss_of_one_sample(op: Any, reduction_at: int) -> Callable[..., Any]:
    """The unreduced loss of one sample is a number; its shape function says a vector of one.

    Summed, it is the same number.
    """

    def traced(x: torch.Tensor, target: torch.Tensor, *args: Any) -> Any:
        vector = 1 if op is aten.multilabel_margin_loss_forward.default else 0
        given = len(args) > reduction_at and args[reduction_at] == 0
        if not given or target.dim() > vector:
            return NotImplemented
        return op(x, target, *args[:reduction_at], 2)

    return traced


def _cropped(x: torch.Tensor, pad: list[Any], value: Any = 0) -> Any:
    """Padding that only takes away is a copy of a slice in eager, laid out like its input. The
    shape function for symbolic sizes says contiguous: so the sign of the sizes is made a fact."""
    if not all(_is_crop(p) for p in pad):
        return NotImplemented
    for k in range(len(pad) // 2):
        dim = x.dim() - 1 - k
        x = x.narrow(dim, -pad[2 * k], x.size(dim) + pad[2 * k] + pad[2 * k + 1])
    return x.clone()


def _norm_along(x: torch.Tensor, ord: Any = 2, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A dimension of one counted from the end is kept by the shape function (torch 2.11, 2.12)."""
    if not x.dim() or not isinstance(dim, (list, tuple)) or all(d >= 0 for d in dim):
        return NotImplemented
    counted = [d % x.dim() for d in dim]
    return aten.linalg_vector_norm.default(x, ord, counted, *args, **kwargs)


def _into_repeated(op: Any) -> Callable[..., Any]:
    """What is scattered into has an element for each place. The shape functions of torch 2.11 lay
    the result out like an expanded input, whose elements share one; eager never does."""

    def traced(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        strides: tuple[Any, ...] = x.stride()
        known = [(s, n) for s, n in zip(strides, x.shape, strict=True) if isinstance(s, int)]
        if not any(s == 0 and n != 1 for s, n in known):
            return NotImplemented
        return op(x.clone(memory_format=torch.contiguous_format), *args, **kwargs)

    return traced


def _addmv_of_nothing(x: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, *,
                      beta: Any = 1, alpha: Any = 1) -> Any:  # fmt: skip
    """What is added to a product without rows keeps its one element in eager; the shape function
    says that nothing is left of it."""
    rows: Any = matrix.size(0)
    if not isinstance(rows, int) or rows != 0 or beta == 0:
        return NotImplemented
    return x * beta


def _is_crop(pad: Any) -> bool:
    return not free_unbacked_symbols(pad) and bool(pad <= 0)


OWN: dict[Any, Callable[..., Any]] = {
    **narrow.OWN,
    aten.addmv.default: _addmv_of_nothing,
    aten.constant_pad_nd.default: _cropped,
    aten.linalg_vector_norm.default: _norm_along,
    aten.multi_margin_loss.default: _loss_of_one_sample(aten.multi_margin_loss.default, 3),
    aten.multilabel_margin_loss_forward.default: _loss_of_one_sample(
        aten.multilabel_margin_loss_forward.default, 0
    ),
    aten.native_layer_norm_backward.default: _layer_norm_backward_in_float32,
    **{
        op: _into_repeated(op)
        for op in (
            aten.select_scatter.default,
            aten.slice_scatter.default,
            aten.diagonal_scatter.default,
        )
    },
    **{
        op: _statistics_in_float32(op)
        for op in (
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
        )
    },
}
"""Decompositions that torch does not have."""


def table() -> dict[Any, Callable[..., Any]]:
    return _table() | quantized.apart()


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    sections = (POINTWISE, VIEWS, INDEXING, REDUCTIONS, NORMS, POOLING, OPTIMIZERS, OTHERS)
    wanted = [target for section in sections for target in section]
    return dict(get_decompositions(wanted)) | OWN


# ---- ops that torch itself takes apart while it traces

WHOLE: list[Any] = [
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
    aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d,
    aten.upsample_bicubic2d, aten.multi_margin_loss, aten.multilabel_margin_loss_forward,
]  # fmt: skip


def _like_input(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@functools.cache
def _shape_functions() -> torch.library.Library:
    """The backwards of the margin losses get the shape functions that torch lacks."""
    made = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("multi_margin_loss_backward", "multilabel_margin_loss_backward"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            made.impl(name, _like_input)
    return made


def _whole_if_static(op: Any, apart: Callable[..., Any]) -> Callable[..., Any]:
    """The overload that takes scale factors, in terms of `op`, which takes sizes. Its shape
    function knows literal sizes only, and none of zero: with others the op is taken apart."""

    def interpolate(x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
        *corners, factors = rest
        if 0 in x.shape or not all(isinstance(n, int) for n in (*x.shape, *(size or ()))):
            return apart(x, size, *rest)
        if size is not None:
            return op(x, size, *corners)
        size = [int(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
        return op(x, size, *corners, *factors)

    return interpolate


def _cumprod_backward(
    grad: torch.Tensor, x: torch.Tensor, dim: int, y: torch.Tensor
) -> torch.Tensor:
    """The gradient of running products: `sum(grad[k:] * y[k:]) / x[k]`; at the first zero of a row,
    which divides nothing, the same of products without it, and zero behind it. torch 2.11 traces
    one scan for each place of a row (H200: 65536 rows of 65 all told 1802 us). Sums of products of
    sixteen bits that nearly cancel would be a third off."""
    if x.is_complex() or x.dim() == 0 or x.numel() == 0:
        op = aten.cumprod_backward.default
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, grad, x, dim, y)
    if x.dtype in (torch.float16, torch.bfloat16):
        wide = x.float()
        return _cumprod_backward(grad.float(), wide, dim, wide.cumprod(dim)).to(x.dtype)
    before = torch.cat(
        (torch.ones_like(x.narrow(dim, 0, 1)), y.narrow(dim, 0, x.size(dim) - 1)), dim
    )
    zero = x == 0
    first = zero & (before != 0)
    others = torch.where(first, 1, x).cumprod(dim)
    at_first = torch.where(y == 0, grad * others, 0).sum(dim, keepdim=True)
    sums = (grad * y).flip(dim).cumsum(dim).flip(dim)
    return torch.where(zero, torch.where(first, at_first, 0), sums / torch.where(zero, 1, x))


APART: dict[Any, Callable[..., Any]] = {
    aten.cumprod_backward.default: _cumprod_backward,
    attention.WHOLE: attention.attention,
}
"""Composite ops that we take apart otherwise than torch does."""


@contextlib.contextmanager
def keep_whole() -> Generator[None]:
    """Trace interpolation and margin losses as one op each, with their own backwards.

    torch registers Python kernels that rewrite them as dozens of index ops whose backward adds with
    atomics; a lowering of the whole op is one loop, and gathers. They are back in place afterwards.
    """
    overloads = [getattr(packet, name) for packet in WHOLE for name in ("default", "vec")
                 if name in packet.overloads()]  # fmt: skip
    _shape_functions()
    overloads += APART
    saved = [dict(op.py_kernels) for op in overloads]
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    try:
        for op in overloads:
            apart: Any = None
            for key in (torch._C.DispatchKey.Autograd, composite):
                apart = op.py_kernels.pop(key, None)
            if op._overloadname == "vec" and apart is not None:
                op.py_kernels[composite] = _whole_if_static(op.overloadpacket.default, apart)
            if op in APART:
                op.py_kernels[composite] = APART[op]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in zip(overloads, saved, strict=True):
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
