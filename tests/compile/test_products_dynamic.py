"""Products of sizes and places that are known when they are called, on a card that is not there."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.cutlass import offered
from tests.gemm_programs import host
from tests.products import problem
from tests.programs import compiled
from tilewright.ir import index as ix
from tilewright.testing import run_and_get_code

TRITON = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON",
          "test_configs.max_mm_configs": 1}  # fmt: skip


def test_ma_j17_one_compilation_for_two_sizes() -> None:
    """MA-J17: a transposed input, a bias and what multiplies, of as many rows as there are."""
    w, bias = torch.randn(3, 4).half(), torch.randn(3).half()

    def function(x: Tensor, mul: Tensor) -> Tensor:
        return F.relu(x.t() @ w.t() + bias) * mul

    with as_cuda():
        call = compiled(function, dynamic=True, options=TRITON)
        for rows in (5, 8):
            x, mul = torch.randn(4, rows).half(), torch.randn(rows, 3).half()
            with torch._dynamo.config.patch(error_on_recompile=rows == 8):
                torch.testing.assert_close(call(x, mul), function(x, mul), rtol=5e-3, atol=5e-3)


def test_ma_d15_an_offset_beyond_32_bits() -> None:
    """MA-D15: the last eighth of as many rows as there are: its kernel over 64-bit positions is
    taken where the rows before it are 2**31 elements."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return x[x.shape[0] // 8 * 7 :] @ w

    x, w = torch.randn(64, 10000).bfloat16(), torch.randn(10000, 32).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    with as_cuda():
        found, (code,) = run_and_get_code(compiled(function, options=TRITON), x, w)
    torch.testing.assert_close(found, function(x, w), rtol=2e-2, atol=2e-1)  # near 100
    name = "triton_tem_fused_mm_0"
    chosen = re.search(rf"\({name} if (.* (s\d+)\b.*) else {name}_wide\)\(", host(code))
    assert chosen is not None
    wide = [rows for rows in (2048, 214748, 214749, 262144)
            if not eval(chosen[1], {chosen[2]: rows})]  # fmt: skip
    assert wide == [214749, 262144]  # of 10000 elements


@pytest.mark.parametrize(("offset", "aligned"), [(128, 8), (4, 4), (2, 2)])
def test_cu_j2_where_operands_begin(offset: int, aligned: int) -> None:
    """CU-J2: an offset is an argument, and operations load as much at once as it is a multiple
    of."""
    a = torch.empty(129 * 128, dtype=torch.float16)[offset:][: 128 * 128].view(128, 128)
    found = offered(problem("mm", a, a.t()).problem)
    numbers = {name: ix.value_of(value) for name, _, value in found[0].rendered.numbers
               if name.startswith("offset")}  # fmt: skip
    assert (numbers["offset0"], numbers["offset1"]) == (offset, offset)
    assert {c.operation.aligned[:2] for c in found} == {(aligned, aligned)}
