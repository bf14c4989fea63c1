"""The inputs of a case: generated from a fixed seed, cloned before every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.sweep.cases import DEVICE, DTYPES, Group, operators

SEED = 1234
# A sample is "small" when it has something to compute on and compiles and runs at once.
SMALL = range(2, 5000)
# PyTorch promises no order of equal elements here, so that no sample has any.
NO_ORDER_OF_EQUALS = ("topk",)


@dataclass
class Sample:
    """Arguments of one call, and what of its result is differentiable."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: Callable[[Any], Any]


def seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def generate(group: Group) -> list[Sample]:
    seed()
    op = operators()[group.op]
    backward = group.direction == "backward"
    made = op.sample_inputs(DEVICE, DTYPES[group.dtype], requires_grad=backward)
    samples = [Sample((s.input, *s.args), dict(s.kwargs), s.output_process_fn_grad) for s in made]
    if group.op in NO_ORDER_OF_EQUALS:
        for sample in samples:
            _make_unequal(sample.args[0])
    return samples


def _make_unequal(t: torch.Tensor) -> None:
    numbers = torch.randperm(t.numel()) - t.numel() // 2
    t.detach().copy_(numbers.view(t.shape))
    assert t.unique().numel() == t.numel()


def elements(sample: Sample) -> int:
    leaves = tree_leaves((sample.args, sample.kwargs))
    return sum(t.numel() for t in leaves if isinstance(t, torch.Tensor))


def smallest_useful(samples: list[Sample]) -> int:
    """Number of the first small sample; the first of all where none is small."""
    return next((i for i, s in enumerate(samples) if elements(s) in SMALL), 0)


def clone(sample: Sample) -> Sample:
    """A deep copy with the same strides, offsets and sharing of storage between arguments."""
    storages: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in tensors:
            tensors[id(value)] = _clone_tensor(value, storages)
        return tensors[id(value)]

    args, kwargs = tree_map(copy, (sample.args, sample.kwargs))
    return Sample(args, kwargs, sample.differentiable)


def _clone_tensor(value: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    source = value.detach()
    if source.layout != torch.strided or source.is_quantized or source.is_conj():
        return source.clone().requires_grad_(value.requires_grad)
    storage = source.untyped_storage()
    copied = storages.setdefault(storage._cdata, storage.clone())
    fresh = torch.empty(0, dtype=source.dtype, device=source.device).set_(
        copied, source.storage_offset(), source.size(), source.stride()
    )
    return fresh.requires_grad_(value.requires_grad)


def to_float64(sample: Sample) -> Sample:
    """The same call in float64, to tell which of two inexact results is the better one."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().to(torch.float64).requires_grad_(value.requires_grad)
        return value

    args, kwargs = tree_map(widen, (sample.args, sample.kwargs))
    return Sample(args, kwargs, sample.differentiable)
