"""The cases of this folder under pytest."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases, gemm_cases, user_kernels

assert gemm_cases and user_kernels  # their cases are registered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("name", list(cases.CASES))
def test_case(name: str) -> None:
    cases.run(name)
