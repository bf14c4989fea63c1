"""Programs around products, with the kernels, allocations and releases they become.

The same ones run by C++ templates on the CPU, by Triton templates in its interpreter, and on a card
(which may lack pytest).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs import compiled
from tilewright import config, metrics
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune.choices import ChoiceCaller

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn


def r(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.25).to(dtype)


@dataclass(frozen=True)
class Program:
    """A program, and exactly how many kernels, allocations and releases it is. What is released
    counts the arguments too. `fused` are the templates of a card, by what is in them."""

    ids: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    kernels: int
    allocations: int | None = None
    frees: int | None = None
    fused: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dynamic: bool | None = None


def two_products(x: Tensor, y: Tensor) -> Tensor:
    return (x @ x.t()) * (y @ y.t())


def both_cast(x: Tensor) -> Tensor:
    y = x.float()
    return F.relu(y @ y)


def shared_operand(x: Tensor) -> Tensor:
    y = (x + 1) * 2
    return y @ (y - 2)


def chains(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    one = (a.float() + 1) @ (b.float() * 2)
    other = (c.float() - 0.5) @ (d.float() / 2)
    return torch.tanh(F.relu(one * other * 0.5 + 1))


def halves(x: Tensor) -> Tensor:
    return (x[:64] + 2) @ (x[64:] - 2)


def cat_with_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x @ x, y.cos()])


def cat_and_more(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = x @ x
    return torch.cat([z, y.cos()]), z + 1


def cat_of_products(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.cat([torch.addmm(a, b, c), torch.addmm(b, c, a)], 1)


def quantised(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def gathered(x: Tensor, at: Tensor, y: Tensor) -> Tensor:
    return x[at] @ y


THREE = {"max_epilogue_benchmarked_choices": 3}
REALISED = {"realize_reads_threshold": 1, "realize_opcount_threshold": 1}

PROGRAMS = [
    Program("MA-K2", lambda x, y: x.float() @ y, lambda: (r(63, 120, dtype=F16), r(120, 25)),
            1, 1, 2, ("_to_copy_mm",)),
    Program("MA-K2 even", lambda x, y: x.float() @ y, lambda: (r(64, 48, dtype=F16), r(48, 64)),
            1, 1, 2, ("_to_copy_mm",)),
    Program("MA-K3", gathered, lambda: (r(64, 48, dtype=F16), torch.randperm(64),
                                        r(48, 32, dtype=F16)), 2, 2, 4, ("mm",)),
    Program("MA-K4", lambda x, y: x.to(BF16) @ y,
            lambda: (r(32, 32).to(E4M3), r(32, 32, dtype=BF16)), 1, 1, 2, ("_to_copy_mm",)),
    Program("MA-K5", lambda x, y: (x.to(BF16) + 1) @ y,
            lambda: (r(32, 32).to(E4M3), r(32, 32, dtype=BF16)), 2, 2, 3, ("mm",)),
    Program("MA-K6", lambda x, y: x.half() @ y, lambda: (r(64, 128), r(128, 64, dtype=F16)),
            2, 2, 3, ("mm",)),
    Program("MA-K7", lambda x, y: ((x - 1.1) @ (y + 1.1)) * 1.1, lambda: (r(64, 120), r(120, 64)),
            1, 1, 2, ("add_mm_mul_sub",)),
    Program("MA-K8", lambda x, y, z: (x + y).float() @ z,
            lambda: (r(63, 120, dtype=F16), r(63, 120, dtype=F16), r(120, 50)),
            1, 1, 3, ("_to_copy_add_mm",)),
    Program("MA-K9", halves, lambda: (r(128, 64),), 1, 1, 1, ("add_mm_sub",)),
    Program("MA-K10", lambda x, y: ((((x * 2) - 1) / 2) @ (y * 4)) * 3,
            lambda: (r(63, 120), r(120, 50)), 1, 1, 2, ("div_mm_mul_sub",), REALISED),
    Program("MA-K11", lambda x, y: (x.expand(1, y.shape[0]) + 1) @ y, lambda: (r(1, 1), r(63, 128)),
            1, 1, 2, dynamic=True),
    Program("MA-K12", lambda x, y: x @ y, lambda: (r(20, 1), r(1, 1)), 1, 1, 2, dynamic=True),
    Program("MA-K13", lambda x, y: F.relu(x) @ y, lambda: (r(64, 127), r(127, 64)),
            1, 1, 2, ("mm_relu",)),
    Program("MA-K13 added", lambda x, y: (x + 1) @ y, lambda: (r(64, 127), r(127, 64)),
            1, 1, 2, ("add_mm",)),
    Program("MA-K13 hypot", lambda x, y: torch.hypot(x, x) @ y, lambda: (r(64, 127), r(127, 64)),
            1, 1, 2, ("hypot_mm",)),
    Program("MA-K14", shared_operand, lambda: (r(64, 64),), 1, 1, 1, ("add_mm_mul_sub",), REALISED),
    Program("MA-K15", lambda x, y, z: (((x + 2) * 2) * y) @ z,
            lambda: (r(1, 64), r(64, 64), r(64, 32)), 1, 1, 3, ("add_mm_mul",),
            {**REALISED, "allow_buffer_reuse": False}),
    Program("MA-J6", lambda a, b: (a @ b).float() + 1.0,
            lambda: (r(64, 128, dtype=BF16), r(128, 64, dtype=BF16)), 1, 1, 2,
            ("_to_copy_add_mm",)),
    Program("MA-J14", two_products, lambda: (r(128, 16), r(128, 32)), 2, 2, 3, ("mm", "mm_mul"),
            THREE),
    Program("MA-J14 relu", lambda x: F.relu(x @ x), lambda: (r(128, 128),), 1,
            fused=("mm_relu",), options=THREE),
    Program("MA-J15", both_cast, lambda: (r(128, 128, dtype=F16),), 1,
            fused=("_to_copy_mm_relu",), options=THREE),
    Program("MA-J16", chains, lambda: tuple(r(*s, dtype=BF16) for s in ((64, 128), (128, 64)) * 2),
            2, fused=("_to_copy_div_mm_sub", "_to_copy_add_mm_mul_relu_tanh")),
    Program("MA-K1 padded", lambda x, y: F.pad(x, (0, 3)) @ y, lambda: (r(30, 21), r(24, 40)),
            1, 1, 2, ("constant_pad_nd_mm",)),
    Program("one row", quantised, lambda: (r(1, 64, dtype=BF16), int8(48, 64), r(48, dtype=BF16)),
            1, 1, 3),
    Program("one column", quantised, lambda: (r(24, 64), int8(1, 64), r(24, 1)), 1, 1, 3),
    Program("one of a batch", lambda x, y, z: torch.baddbmm(z, x, y).sigmoid() * z,
            lambda: (r(1, 3, 40), r(1, 40, 24), r(1, 3, 24)), 1, 1, 3),
    Program("one element", lambda x, y: (x @ y).sin() + 1, lambda: (r(1, 40), r(40, 1)), 1, 1, 2),
    Program("a layer", lambda c, x, w: F.gelu(torch.addmm(c, x, w)),
            lambda: (r(40), r(32, 48), r(48, 40)), 1, 1, 3, ("addmm_gelu",)),
    Program("MA-P10", cat_of_products, lambda: (r(4, 4), r(4, 4), r(4, 4)), 2, 1, 3,
            ("addmm", "addmm")),
    Program("MA-P12", cat_with_product, lambda: (r(32, 32), r(32, 32)), 2, 1, 2, ("mm",)),
    Program("MA-P12 more", cat_and_more, lambda: (r(32, 32), r(32, 32)), 2, 2),
]  # fmt: skip
"""The same number of kernels by templates of either kind. Where one feeds both operands (MA-K14),
or has another shape than its reader (MA-K15), the specification has two: here the plan that
computes it while loading and the one that stores it are both offered, and the faster is taken. Rows
that are looked up (MA-K3, optional there) are stored first: a position out of range is reported by
the kernel that looks it up. With `z + 1` and a concatenation of the same product (MA-P12) it has
three: here one kernel stores both. A bare padding (MA-K1) is computed while it is loaded where its
elements have four bytes: it reads no more than it would store."""


def all_most_fused(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """Those with the most in them."""
    fused = [("prologue" in c.name) + ("epilogue" in c.name) for c in choices]
    return [c for c, n in zip(choices, fused, strict=True) if n == max(fused)]


def most_fused(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """One of them: nothing is timed, so what is taken is known."""
    return all_most_fused(choices)[:1]


def check(program: Program, backends: str, mode: str = "max-autotune-no-cudagraphs"
          ) -> tuple[int, str]:  # fmt: skip
    """In a mode of torch.compile's, which takes no options beside it."""
    torch.manual_seed(0)
    inputs = program.inputs()
    options = {"max_autotune_gemm_backends": backends, **program.options}
    before = metrics.generated_kernel_count
    with fresh_cache(), config.patch(options):
        call = compiled(program.fn, mode=mode, dynamic=program.dynamic)
        result, code = run_and_get_code(call, *inputs)
    torch.testing.assert_close(result, program.fn(*inputs), rtol=0.05, atol=0.05)
    return metrics.generated_kernel_count - before, "\n".join(code)


def least_fused(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    return [c for c in choices if "prologue" not in c.name and "epilogue" not in c.name][:1]


def host(code: str) -> str:
    """The program that calls the kernels, without their texts."""
    begin = code.index("def call(")
    return code[begin : code.index("return (", begin)]


def exactly(program: Program, kernels: int, code: str) -> None:
    """Kernels, allocations and releases are as many as they are said to be."""
    text = host(code)
    released = [
        name for line in re.findall(r"^ *del (.*)$", text, re.M) for name in line.split(",")
    ]
    found = (kernels, len(re.findall(r"= empty_(?:cpu|cuda)\(", text)), len(released))
    wanted = (program.kernels, program.allocations, program.frees)
    assert all(w in (None, f) for w, f in zip(wanted, found, strict=True)), (found, text)
