"""`TILEWRIGHT_DEBUG`: shows every stage. 1 prints generated host code, 2 adds kernels, 3 and above
the text of each stage; with `debug_dir` set, each goes to a numbered file instead."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch.fx

from tilewright import config, metrics
from tilewright.ir.show import show
from tilewright.runtime.cxx import CxxSource

_numbers = itertools.count()


def stage(name: str, value: Any) -> None:
    if config.debug < 3:
        return
    is_graph = isinstance(value, torch.fx.GraphModule)
    _write(name, value.print_readable(False) if is_graph else show(value))


def code(host: str, kernels: Mapping[str, CxxSource]) -> None:
    if config.debug < 1 and not metrics.on_code:
        return
    parts = [host, *(f"// {name}\n{source.text}" for name, source in kernels.items())]
    for listener in metrics.on_code:
        listener("\n".join(parts))
    if config.debug >= 1:
        _write("host", host)
    if config.debug >= 2:
        _write("kernels", "\n".join(parts[1:]))


def _write(name: str, text: str) -> None:
    number = next(_numbers)
    if not config.debug_dir:
        print(f"---- {number:02d} {name}\n{text}", file=sys.stderr)
        return
    os.makedirs(config.debug_dir, exist_ok=True)
    with open(os.path.join(config.debug_dir, f"{number:04d}_{name}.txt"), "w") as file:
        file.write(text)
