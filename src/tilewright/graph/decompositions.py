"""The decompositions we choose: an op here is traced as simpler ATen ops.

An op with a lowering of its own is not listed: a lowering sees eager's exact semantics (what is
computed in float32, what is rounded), traces fewer nodes and compiles faster. Sections follow the
op families of `lower/`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten

POINTWISE: list[Any] = [
    aten.ldexp, aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.mvlgamma,
    aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor,
    aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor,
    aten.tril_indices, aten.triu_indices,
]  # fmt: skip
VIEWS: list[Any] = []
INDEXING: list[Any] = []
REDUCTIONS: list[Any] = []
NORMS: list[Any] = []
POOLING: list[Any] = []
OPTIMIZERS: list[Any] = []
OTHERS: list[Any] = [
    aten._euclidean_dist, aten.addr, aten.isin, aten.linalg_cross, aten.renorm,
]  # fmt: skip


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    sections = (POINTWISE, VIEWS, INDEXING, REDUCTIONS, NORMS, POOLING, OPTIMIZERS, OTHERS)
    wanted = [target for section in sections for target in section]
    return dict(get_decompositions(wanted))
