"""Imported by the fork server: what every worker needs and is slow to import."""

from __future__ import annotations

import importlib
import os

# A process that has looked at a GPU cannot be forked, and torch's table of operators looks.
ON_CARD = os.environ.get("TILEWRIGHT_SWEEP_DEVICE", "cpu") == "cuda"
if not ON_CARD:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

from tests.sweep.cases import operators  # noqa: E402

for name in ("torch._dynamo", "torch._dynamo.backends.debugging", "torch._functorch.aot_autograd"):
    importlib.import_module(name)
if not ON_CARD:
    operators()
