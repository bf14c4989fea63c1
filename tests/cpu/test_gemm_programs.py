"""Whole programs around products, with the kernels, allocations and releases they become.

The same programs are run for both kinds of target: here by C++ templates on the CPU, and in
`tests/compile` by Triton templates.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.gemm_programs import PROGRAMS, Program, check, exactly, least_fused, most_fused, r
from tilewright.tune import select


@pytest.fixture(autouse=True)
def fused() -> Generator[None]:
    select.add_preprocessing_fn(most_fused)
    yield
    select.clear_preprocessing_fns()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.ids)
def test_kernels_of_a_program(program: Program) -> None:
    """MA-A2: in one of the modes here, in the other as Triton templates."""
    kernels, code = check(program, "CPP", "max-autotune")
    exactly(program, kernels, code)
    assert "extern_" not in code


@pytest.mark.parametrize("ids", ["MA-K14", "MA-K15"])
def test_ma_k14_k15_what_is_not_fused_is_two_kernels(ids: str) -> None:
    """The plan the specification wants is offered, and right."""
    select.clear_preprocessing_fns()
    select.add_preprocessing_fn(least_fused)
    program = next(p for p in PROGRAMS if p.ids == ids)
    kernels, code = check(program, "CPP")
    assert kernels == 2 and "extern_" not in code
    assert code.count("= empty_cpu(") == (3 if ids == "MA-K14" else 2)


def test_the_library_writes_into_its_slice() -> None:
    """MA-P11: the product is in its place, and what is beside it is one kernel."""
    kernels, code = check(next(p for p in PROGRAMS if p.ids == "MA-P12"), "ATEN")
    assert kernels == 1 and "out=" in code
    kernels, _ = check(next(p for p in PROGRAMS if p.ids == "MA-P12 more"), "ATEN")
    assert kernels == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_two_concatenations_of_one_product(swapped: bool) -> None:
    """MA-P11, MA-P12: both orders are right."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = x @ x
        one, other = torch.cat([z, y.cos()]), torch.cat([y.sin(), z])
        return (other, one) if swapped else (one, other)

    for backends in ("ATEN", "CPP"):
        check(Program("", function, lambda: (r(32, 32), r(32, 32)), 9), backends)


@pytest.mark.parametrize("backends", ["ATEN,CPP", "CPP"])
def test_only_libraries_when_asked(backends: str) -> None:
    """MA-J2, MA-P11: `test_configs.force_extern_kernel_in_multi_template`; without a library in
    the list there is nothing to force."""
    option = {"test_configs.force_extern_kernel_in_multi_template": True}
    program = replace(next(p for p in PROGRAMS if p.ids == "MA-J14 relu"), options=option)
    kernels, code = check(program, backends)
    assert kernels == 1 and ("extern_aten_mm" in code) == (backends != "CPP")
