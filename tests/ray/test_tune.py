"""Tuning on a Ray cluster of local workers, one of which is killed on the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import tilewright
from tilewright import config, monitor, tuning
from tilewright.testing import fresh_cache

ray = pytest.importorskip("ray", reason="pip install tilewright[ray]")
SHAPES = [(32, 16, 24), (48, 16, 24), (64, 32, 8), (16, 64, 40)]


def program(*args: torch.Tensor) -> list[torch.Tensor]:
    return [torch.relu(a @ b) for a, b in zip(args[::2], args[1::2], strict=True)]


def dies_once(question, settings):
    """The first worker that answers anything is killed in the middle of it."""
    flag = Path(os.environ["TILEWRIGHT_TEST_FLAG"])
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return answered(question, settings)
    os.kill(os.getpid(), signal.SIGKILL)


answered = tuning._answered


@pytest.mark.parametrize("killed", [False, True])
def test_no_result_is_lost(tmp_path, monkeypatch, killed):
    args = [torch.randn(*s) for m, k, n in SHAPES for s in ((m, k), (k, n))]
    options = {"max_autotune_gemm_backends": "ATEN,CPP"}
    env = {"TILEWRIGHT_TEST_FLAG": str(tmp_path / "died"),
           "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # fmt: skip
    if killed:
        monkeypatch.setattr(tuning, "_answered", dies_once)
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False,
             runtime_env={"env_vars": env})  # fmt: skip
    try:
        with fresh_cache():
            report = tilewright.tune(program, tuple(args), options=options, engine="ray")
            assert (report.questions, report.answered, report.lost) == (4, 4, ())
            assert (tmp_path / "died").exists() == killed
            monitor.counts.clear()
            compiled = torch.compile(program, backend="tilewright", options={
                **config.options_for_mode("max-autotune"), **options})  # fmt: skip
            for found, expected in zip(compiled(*args), program(*args), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert monitor.counts["tuning"] == 0
    finally:
        ray.shutdown()
