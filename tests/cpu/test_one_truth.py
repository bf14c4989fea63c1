"""A program from the cache tells the same of itself as one that was compiled just now."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tilewright import config, dump, metrics
from tilewright.gemm.choose import decisions
from tilewright.testing import fresh_cache


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) + 1


def told(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[Any, ...]:
    torch._dynamo.reset()
    metrics.reset()
    decisions.clear()
    x, w = torch.randn(24, 40), torch.randn(40, 56)
    with config.patch(options):
        torch.compile(layer, backend="tilewright", mode="max-autotune")(x, w)
    shown = re.sub(r"[\d.e-]+ s\b", "", capsys.readouterr().err)
    counts = metrics.native_nodes, metrics.fallback_nodes, dict(metrics.fallback_ops)
    return list(decisions), counts, shown


def test_decisions_and_groups_are_part_of_a_cached_program(capsys: pytest.CaptureFixture[str]):
    with fresh_cache():
        made, again = told(capsys, debug=2), told(capsys, debug=2)
    assert len(made[0]) == 1 and made[0] == again[0]
    assert made[1] == again[1]
    (site,) = {d.site for d in made[0]}
    assert site == "mm 24x56x40 float32 + epilogue"
    groups = made[2][made[2].index("graph: ") : made[2].index("tilewright: ")]
    assert groups.strip() in again[2]
    assert again[2].count(", from the cache") == 2  # the decision, and the line of the graph


def test_products_are_counted_for_those_who_compute_them(capsys: pytest.CaptureFixture[str]):
    with fresh_cache():
        own = told(capsys, max_autotune_gemm_backends="CPP")[1]
        library = told(capsys, max_autotune_gemm_backends="ATEN")[1]
    assert own == (3, 0, {})
    assert library == (2, 1, {"aten.mm.default": 1})


def test_sources_are_written_with_their_endings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with fresh_cache():
        shown = told(capsys, debug=4, debug_dir=str(tmp_path), max_autotune_gemm_backends="ATEN")[2]
    assert f"written to {tmp_path}" in shown
    names = sorted(re.sub(r"^\d+_", "", p.name) for p in tmp_path.iterdir())
    assert names == ["cpp_fused_relu_add_1.cpp", "graph.py", "host.py", "lowered.txt",
                     "scheduled.txt", "simplified.py"]  # fmt: skip


def test_explain_does_not_call_a_kernel_a_library():
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax((x @ w).cos(), -1)

    x, w = torch.randn(24, 40), torch.randn(40, 56)
    with config.patch(max_autotune_gemm_backends="CPP"):
        text = str(tilewright.explain(f, mode="max-autotune")(x, w))
    assert "0 library calls" in text
    assert "a library call" not in text


def test_a_custom_op_that_writes_is_counted():
    @torch.library.custom_op("tilewright_tests::doubled_", mutates_args=("x",))
    def doubled_(x: torch.Tensor) -> None:
        x.mul_(2)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        doubled_(y)
        return y.sin()

    torch._dynamo.reset()
    metrics.reset()
    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(f, backend="tilewright")(x), f(x))
    assert dict(metrics.fallback_ops) == {"tilewright_tests.doubled_.default": 1}


LOGS = ("perf_hints", "fusion", "autotuning", "output_code", "kernel_code")


def logged(program: Callable[..., Any], *args: Any, **how: Any) -> dict[str, str]:
    """What `TORCH_LOGS` shows of compiling a program, by the name it is asked for with."""
    torch._dynamo.reset()
    found: dict[str, list[str]] = {name: [] for name in LOGS}

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found[record.name.rpartition(".__")[2]].append(record.getMessage())

    handler, loggers = Kept(), [dump._LOGS[name] for name in LOGS]
    try:
        for log in loggers:
            log.addHandler(handler)
            log.setLevel(logging.DEBUG)
        torch.compile(program, backend="tilewright", **how)(*args)
    finally:
        for log in loggers:
            log.removeHandler(handler)
            log.setLevel(logging.NOTSET)
    return {name: "\n".join(lines) for name, lines in found.items()}


def test_torchs_own_logs_show_what_was_decided_cached_or_not():
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.qr(x @ w)[1]
        return y.sin()

    args = torch.randn(24, 24), torch.randn(24, 24)
    with fresh_cache():
        made, again = logged(program, *args), logged(program, *args)
        tuned = logged(layer, *args, mode="max-autotune")
    assert made == again
    line = program.__code__.co_firstlineno + 1
    where = f"{Path(__file__)}:{line}"
    call = "is a library's call, and nothing is fused with it"
    assert made["perf_hints"].splitlines() == [
        f'mm ({where}) {call}: mode="max-autotune" has others measured',
        f"linalg_qr ({where}) {call}",
    ]
    assert made["fusion"].startswith("graph: 1 kernel, 2 library calls") and not made["autotuning"]
    assert "def call(args):" in made["output_code"] and made["kernel_code"] in made["output_code"]
    assert made["kernel_code"].startswith("// cpp_fused_sin_")
    assert tuned["perf_hints"] == ""
    assert tuned["autotuning"].startswith("mm 24x24x24 float32 + epilogue: ")
