"""The pitch of rows: strides with slack, so that rows start where a processor loads best."""

from __future__ import annotations

import torch

from tilewright import config
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.lower.tensor import Size


def pitched(size: Size, stride: Size, dtype: torch.dtype) -> Size:
    """The strides with rows longer than the threshold, where that is known, starting at multiples
    of the alignment, and what is outside them scaled along. What has gaps, repeats or its channels
    last stays as it is."""
    order = sorted(range(len(size)), key=lambda k: (ix.likely(stride[k]), k != len(size) - 1))
    if not order or stride[order[0]] is not ix.ONE or _channels_last(size, order):
        return stride
    align = max(config.padding_alignment_bytes // dtype.itemsize, 1)
    found: dict[int, Expr] = {}
    dense = within = ix.ONE
    rows = 0  # dimensions so far that have more than one element
    for k in order:
        if size[k] is ix.ONE:
            found[k] = stride[k]
            continue
        if stride[k] is not dense:
            return stride
        step = ix.value_of(within)
        if rows == 1 and step is not None and step > config.padding_stride_threshold:
            within = ix.as_index(-(-step // align) * align)
        rows += 1
        found[k] = within
        dense, within = ix.mul(dense, size[k]), ix.mul(within, size[k])
    return tuple(found[k] for k in range(len(size)))


def _channels_last(size: Size, order: list[int]) -> bool:
    return len(size) > 3 and order[0] == 1
