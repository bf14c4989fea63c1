"""Whole programs around products on a card: Triton templates, in the interpreter."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest
from torch._dynamo.exc import BackendCompilerFailed

from tests.compile.as_cuda import as_cuda
from tests.cpu.test_gemm_programs import fused
from tests.gemm_programs import PROGRAMS, Program, check, exactly, host
from tilewright import config
from tilewright.tune import select

__all__ = ["fused"]

# The interpreter knows no eight-bit floats.
RUN = [p for p in PROGRAMS if "MA-K4" not in p.ids and "MA-K5" not in p.ids]


@pytest.fixture(autouse=True)
def cuda() -> Generator[None]:
    with as_cuda(), config.patch({"test_configs.max_mm_configs": 1}):
        yield


@pytest.mark.parametrize("program", RUN, ids=lambda p: p.ids)
def test_kernels_of_a_program(program: Program) -> None:
    """MA-A2."""
    kernels, code = check(program, "TRITON")
    exactly(program, kernels, code)
    named = re.findall(r"^ *triton_tem_fused_(\w+?)_\d+\(", host(code), re.M)
    assert not program.fused or sorted(named) == sorted(program.fused)
    assert "extern_" not in code
    # a sum over one k is no product at all: one loop multiplies (MA-K12)
    assert ("triton_tem_fused_" in code) == (program.ids != "MA-K12")


POOLED = ("MA-J14", "MA-J16", "MA-K7", "MA-K8", "MA-K10")


@pytest.mark.parametrize("program", [p for p in RUN if p.ids in POOLED], ids=lambda p: p.ids)
def test_kernels_are_the_same_whoever_compiles_them(program: Program) -> None:
    """One compiler at a time (MA-J14, MA-J16, MA-K7, MA-K8, MA-K10); elsewhere many."""
    with config.patch(compile_threads=1):
        kernels, code = check(program, "TRITON")
    exactly(program, kernels, code)


def test_a_choice_may_have_no_card_to_be_measured_on() -> None:
    """The library's product, as long as it is offered."""
    select.clear_preprocessing_fns()
    _, code = check(next(p for p in PROGRAMS if p.ids == "MA-J14 relu"), "ATEN,TRITON")
    assert "extern_aten_mm" in code and "triton_tem" not in code


def test_filters_leave_nothing() -> None:
    """MA-Q3, MA-O12."""
    select.clear_preprocessing_fns()
    with (
        config.patch({"test_configs.autotune_choice_name_regex": "nobody"}),
        pytest.raises(BackendCompilerFailed, match="NoValidChoicesError"),
    ):
        check(next(p for p in PROGRAMS if p.ids == "MA-J14 relu"), "ATEN,TRITON")
