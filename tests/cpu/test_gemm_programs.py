"""Whole programs around products, with the kernels and allocations they become.

The same programs are run for both kinds of target: here by C++ templates on the CPU, and in
`tests/compile` by Triton templates.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs import compiled
from tilewright import metrics
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3 = torch.float8_e4m3fn


def r(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.25).to(dtype)


@dataclass(frozen=True)
class Program:
    """A program, how many kernels it is, and what its code has to show."""

    ids: str
    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]
    kernels: int
    allocations: int | None = None
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


REALISED = {"realize_reads_threshold": 1, "realize_opcount_threshold": 1}

PROGRAMS = [
    Program("MA-K2", lambda x, y: x.float() @ y, lambda: (r(63, 120, dtype=F16), r(120, 25)), 1, 1),
    Program("MA-K4", lambda x, y: x.to(BF16) @ y,
            lambda: (r(32, 32).to(E4M3), r(32, 32, dtype=BF16)), 1, 1),
    Program("MA-K5", lambda x, y: (x.to(BF16) + 1) @ y,
            lambda: (r(32, 32).to(E4M3), r(32, 32, dtype=BF16)), 2, 2),
    Program("MA-K6", lambda x, y: x.half() @ y, lambda: (r(64, 128), r(128, 64, dtype=F16)), 2, 2),
    Program("MA-K7", lambda x, y: ((x - 1.1) @ (y + 1.1)) * 1.1, lambda: (r(64, 120), r(120, 64)),
            1, 1),
    Program("MA-K8", lambda x, y, z: (x + y).float() @ z,
            lambda: (r(63, 120, dtype=F16), r(63, 120, dtype=F16), r(120, 50)), 1, 1),
    Program("MA-K9", halves, lambda: (r(128, 64),), 1, 1),
    Program("MA-K10", lambda x, y: ((((x * 2) - 1) / 2) @ (y * 4)) * 3,
            lambda: (r(63, 120), r(120, 50)), 1, 1, REALISED),
    Program("MA-K11", lambda x, y: (x.expand(1, y.shape[0]) + 1) @ y, lambda: (r(1, 1), r(63, 128)),
            1, dynamic=True),
    Program("MA-K13", lambda x, y: F.relu(x) @ y, lambda: (r(64, 127), r(127, 64)), 1, 1),
    Program("MA-K13 hypot", lambda x, y: torch.hypot(x, x) @ y, lambda: (r(64, 127), r(127, 64)),
            1, 1),
    Program("MA-K14", shared_operand, lambda: (r(64, 64),), 2, options=REALISED),
    Program("MA-K15", lambda x, y, z: (((x + 2) * 2) * y) @ z,
            lambda: (r(1, 64), r(64, 64), r(64, 32)), 2,
            options={**REALISED, "allow_buffer_reuse": False}),
    Program("MA-J6", lambda a, b: (a @ b).float() + 1.0,
            lambda: (r(64, 128, dtype=BF16), r(128, 64, dtype=BF16)), 1, 1),
    Program("MA-J14", two_products, lambda: (r(64, 16), r(64, 32)), 2),
    Program("MA-J14 relu", lambda x: F.relu(x @ x), lambda: (r(64, 64),), 1, 1),
    Program("MA-J15", both_cast, lambda: (r(64, 64, dtype=F16),), 1, 1),
    Program("MA-J16", chains, lambda: tuple(r(*s, dtype=BF16) for s in ((64, 128), (128, 64)) * 2),
            2),
    Program("MA-P10", cat_of_products, lambda: (r(4, 4), r(4, 4), r(4, 4)), 2, 1),
    Program("MA-P12", cat_with_product, lambda: (r(32, 32), r(32, 32)), 2, 1),
    Program("MA-P12 more", cat_and_more, lambda: (r(32, 32), r(32, 32)), 3),
]  # fmt: skip
"""With kernels as they are on a card; a C++ template may do with fewer."""


def most_fused(choices: list[ChoiceCaller]) -> list[ChoiceCaller]:
    """One choice, of those with the most in it: nothing is timed, so what is taken is known."""
    fused = [("prologue" in c.name) + ("epilogue" in c.name) for c in choices]
    return choices[fused.index(max(fused)) :][:1] if choices else []


@pytest.fixture(autouse=True)
def fused() -> Generator[None]:
    select.add_preprocessing_fn(most_fused)
    yield
    select.clear_preprocessing_fns()


def check(program: Program, backends: str) -> tuple[int, str]:
    torch.manual_seed(0)
    inputs = program.inputs()
    options = {"max_autotune": True, "max_autotune_gemm_backends": backends, **program.options}
    before = metrics.generated_kernel_count
    with fresh_cache():
        call = compiled(program.fn, options=options, dynamic=program.dynamic)
        result, code = run_and_get_code(call, *inputs)
    torch.testing.assert_close(result, program.fn(*inputs), rtol=0.05, atol=0.05)
    return metrics.generated_kernel_count - before, "\n".join(code)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.ids)
def test_kernels_of_a_program(program: Program) -> None:
    kernels, code = check(program, "CPP")
    assert kernels <= program.kernels, code
    assert "extern_" not in code
    if program.allocations is not None:
        assert code.count("empty_cpu(") - 1 <= program.allocations, code


def test_the_library_writes_into_its_slice() -> None:
    """MA-P11: the product is in its place, and what is beside it is one kernel."""
    kernels, code = check(next(p for p in PROGRAMS if p.ids == "MA-P12"), "ATEN")
    assert kernels == 1 and "out=" in code
    kernels, _ = check(next(p for p in PROGRAMS if p.ids == "MA-P12 more"), "ATEN")
    assert kernels <= 2


@pytest.mark.parametrize("swapped", [False, True])
def test_two_concatenations_of_one_product(swapped: bool) -> None:
    """MA-P11, MA-P12: both orders are right."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x @ x
        one, other = torch.cat([z, y.cos()]), torch.cat([y.sin(), z])
        return (other, one) if swapped else (one, other)

    for backends in ("ATEN", "CPP"):
        check(Program("", function, lambda: (r(32, 32), r(32, 32)), 9), backends)
