"""Imported by the fork server: what every worker needs and is slow to import."""

from __future__ import annotations

import importlib
import os

# The sweep runs on the CPU, and a process that has looked at a GPU cannot be forked.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tests.sweep.cases import operators

for name in ("torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"):
    importlib.import_module(name)
operators()
