"""Imported by the fork server: what every worker needs and is slow to import."""

from __future__ import annotations

import importlib
import os

# A process that has looked at a GPU cannot be forked: this one never does.
if os.environ.get("TILEWRIGHT_SWEEP_DEVICE", "cpu") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from tests.sweep.cases import operators

for name in ("torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"):
    importlib.import_module(name)
operators()
