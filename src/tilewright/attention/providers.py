"""The providers, in the order of ties. Importing one registers it."""

from __future__ import annotations

import importlib

PROVIDERS = ("cpp", "triton")


def load() -> None:
    for name in (*PROVIDERS, "libraries"):  # which says who of torch's kernels computes the rest
        importlib.import_module(f"tilewright.attention.{name}")
