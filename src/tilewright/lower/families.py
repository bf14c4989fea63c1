"""Imports every op family, which fills the op table."""

from __future__ import annotations

from tilewright.lower import (
    activations,
    casts,
    factories,
    indexing,
    join,
    losses,
    norms,
    optim,
    pointwise,
    pooling,
    products,
    random,
    reductions,
    resample,
    scans,
    scatter,
    softmax,
    views,
)

LOADED = (
    pointwise, activations, casts, views, join, indexing, scatter, reductions, softmax, losses, norms,
    scans, factories, random, pooling, resample, products, optim,
)  # fmt: skip
