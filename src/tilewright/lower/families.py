"""The op families, in the order a reader meets them. Importing one fills the op table."""

from __future__ import annotations

import importlib

FAMILIES = (
    "pointwise", "activations", "casts", "views", "join", "indexing", "scatter", "bags",
    "reductions", "softmax", "losses", "margins", "distances", "norms", "scans", "sorting",
    "factories", "random", "pooling", "resample", "grid_sample", "quantize", "products", "optim",
    "attention",
)  # fmt: skip


def load() -> None:
    for name in FAMILIES:
        importlib.import_module(f"tilewright.lower.{name}")
