"""Imported by the fork server: what every worker needs and is slow to import."""

from __future__ import annotations

import importlib

from tests.sweep.cases import operators

for name in ("torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"):
    importlib.import_module(name)
operators()
