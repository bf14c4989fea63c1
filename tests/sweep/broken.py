"""Backends that are wrong in one way each, to see that the sweep notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

Compiled = Callable[..., list[Any]]


def wrong_value(module: torch.fx.GraphModule, inputs: Any) -> Compiled:
    return lambda *args: [t + 1 for t in module(*args)]


def wrong_dtype(module: torch.fx.GraphModule, inputs: Any) -> Compiled:
    return lambda *args: [t.double() for t in module(*args)]


def wrong_stride(module: torch.fx.GraphModule, inputs: Any) -> Compiled:
    """Every other element of a buffer twice as large."""
    return lambda *args: [torch.stack([t, t], dim=-1)[..., 0] for t in module(*args)]


def raises(module: torch.fx.GraphModule, inputs: Any) -> Compiled:
    raise ValueError("there is no such kernel")


def hangs(module: torch.fx.GraphModule, inputs: Any) -> Compiled:
    time.sleep(600)
    raise AssertionError("the sweep did not stop a case that hangs")


def dies(module: torch.fx.GraphModule, inputs: Any) -> Compiled:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("a process outlived SIGSEGV")
