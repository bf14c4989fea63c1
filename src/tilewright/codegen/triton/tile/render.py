"""The head of a kernel's text: what it imports, and its parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tilewright.codegen.triton.analysis.roles import meeting, positions
from tilewright.codegen.triton.launch import Param
from tilewright.codegen.triton.strategies.misaligned_rows import moved_singly
from tilewright.codegen.triton.tile.grid_sync import COUNTERS, WORKSPACE
from tilewright.codegen.triton.tile.ops import SIGNATURE
from tilewright.ir.expr import Expr
from tilewright.runtime import HELPERS

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel


@dataclass(frozen=True)
class Arguments:
    """The names of what a kernel takes, in the order in which its text came to need them."""

    pointers: dict[str, str] = field(default_factory=dict[str, str])  # of buffers
    numbers: dict[Expr, str] = field(default_factory=dict[Expr, str])

    def pointer(self, buffer: str) -> str:
        return self.pointers.setdefault(buffer, f"p{len(self.pointers)}")

    def number(self, e: Expr) -> str:
        return self.numbers.setdefault(e, f"n{len(self.numbers)}")


def imports(lines: Sequence[str]) -> list[str]:
    body = "\n".join(lines)
    helpers = [name for name in HELPERS if re.search(rf"\b{name}\.", body)]
    found = ["import triton", "import triton.language as tl"]
    if "libdevice." in body:
        found.append("from triton.language.extra import libdevice")
    if helpers:
        found.append(f"from tilewright.runtime import {', '.join(helpers)}")
    return found


def params_of(kernel: Kernel) -> tuple[Param, ...]:
    """What a kernel takes: buffers, numbers, and what programs exchange partial results in."""
    found: list[Param] = []
    shape = kernel.shape
    high, meets = positions(shape.members), meeting(shape.members, kernel.buffers)
    single = moved_singly(shape) if shape.misaligned and kernel.peeled is None else ()
    for buffer, name in kernel.arguments.pointers.items():
        dtype = kernel.buffers[buffer].dtype
        found.append(Param("ptr", buffer, SIGNATURE[dtype], name, 1 if buffer in single else 16,
                           high=high.get(buffer, 0), meets=meets.get(buffer, "")))  # fmt: skip
    for e, name in kernel.arguments.numbers.items():
        if e.dtype == torch.float64:
            found.append(Param("float", e.arg.name, "fp64", name))
            continue
        narrow = kernel.w.index_type == "tl.int32" and e not in kernel.w.numerics.valued
        kind = "i32" if narrow else "i64"
        found.append(Param("int", e.arg.name, kind, name, hint=e.arg.hint))
    if kernel.exchange.meetings:
        found += [Param("ptr", WORKSPACE, "*fp32", WORKSPACE, 16),
                  Param("ptr", COUNTERS, "*i32", COUNTERS, 16)]  # fmt: skip
    return tuple(found)
