"""A template of the CuTe DSL that changes scores as attention does, by two subgraphs that capture
one tensor: what it computes, and that it compiles for a card that is not there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.cpu.test_cutedsl_templates import memory, window
from tests.cutedsl import run
from tests.products import HOPPER
from tilewright import config
from tilewright.gemm.cutedsl import CuteDSLTemplate, Layout, Subgraph, build, template
from tilewright.gemm.cutedsl.build import Request
from tilewright.gemm.cutedsl.kernel import placeholder
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.ir.build import op
from tilewright.ir.expr import load
from tilewright.target import Target
from tilewright.testing import fresh_cache

SCORES = r"""
{{gen_defines()}}
@cute.kernel
def {{kernel_name}}_kernel(x: cute.Tensor, out: cute.Tensor, extra: list):
    {{unpack_buffers("extra")}}
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < cute.size(out):
        m, n = i // out.shape[1], i % out.shape[1]
        score = x[m, n]
        near = n <= m
        {{modification(0, "shifted", score="score", at="n")}}
        {{modification(1, "scaled", mask="near", fill=-7.0, score="shifted", at="m")}}
        out[m, n] = scaled

@cute.jit
def {{kernel_name}}_jit(x: cute.Tensor, out: cute.Tensor, extra: list, stream):
    blocks = cute.ceil_div(cute.size(out), THREADS)
    {{kernel_name}}_kernel(x, out, extra).launch(
        grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

{{def_kernel("x")}}
    {{kernel_name}}_jit(from_dlpack(x), from_dlpack({{get_output()}}), {{get_tensor_buffers()}},
                        cuda.CUstream(stream))
    return {{get_output()}}
"""
ROWS, COLUMNS = 6, 9


@dataclass(frozen=True)
class Made:
    request: Request
    names: tuple[str, ...]  # of the tensors it is called with, in order


def scores(target: Target) -> Made:
    """(x + table[n]) * table[m] below the diagonal, and -7 above."""
    table = memory("table", COLUMNS)
    read = load("table", torch.float32, placeholder("at"))
    graphs = [Subgraph(op(name, placeholder("score"), read), buffers=(table,))
              for name in ("add", "mul")]  # fmt: skip
    choices: list[template.CuteDSLTemplateCaller] = []
    made = CuteDSLTemplate("scores", SCORES)
    reason = made.maybe_append_choice(choices, [window("x", ROWS, COLUMNS)],
                                      Layout(memory("c", ROWS, COLUMNS)), graphs,
                                      THREADS=32)  # fmt: skip
    del CuteDSLTemplate.all_templates["scores"]
    assert reason is None, reason
    return Made(choices[0].request(target), tuple(n for (_, n), _ in choices[0].rendered().params))


def given(device: str = "cpu") -> tuple[dict[str, Tensor], Tensor]:
    """The tensors by name, and what is expected in `c`."""
    found = {"x": torch.randn(ROWS, COLUMNS, device=device),
             "table": torch.randn(COLUMNS, device=device),
             "c": torch.zeros(ROWS, COLUMNS, device=device)}  # fmt: skip
    expected = (found["x"] + found["table"]) * found["table"][:ROWS, None]
    above = torch.ones(ROWS, COLUMNS, device=device).triu(1) > 0
    return found, expected.masked_fill(above, -7.0)


def test_cd_m4_m5_what_two_subgraphs_compute() -> None:
    made = scores(HOPPER)
    assert sorted(made.names) == ["c", "table", "x"]  # what both capture is passed once
    tensors, expected = given()
    run(CuteSource("scores", made.request, 0), *(tensors[n] for n in made.names))
    torch.testing.assert_close(tensors["c"], expected)


def test_cd_m4_two_subgraphs_compile() -> None:
    pytest.importorskip("nvidia_cutlass_dsl", reason="the CuTe DSL is not installed")
    with fresh_cache(), config.patch(compile_threads=1, max_autotune=True):
        assert build.load(scores(HOPPER).request).address
