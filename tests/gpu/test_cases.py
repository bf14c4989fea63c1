"""The cases of this folder under pytest."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cases, jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("name", jobs.names()[0])
def test_case(name: str) -> None:
    cases.run(name)
