"""Warming up, and a seal after which nothing should be compiled, built or tuned."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import tilewright
from tilewright import config, monitor
from tilewright.errors import TilewrightError
from tilewright.testing import fresh_cache
from tilewright.tune import records


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum(1)


def test_a_sealed_process_says_what_it_compiles_and_why(caplog):
    with fresh_cache():
        served = torch.compile(model, backend="tilewright", mode="max-autotune", dynamic=False)
        x, w = torch.randn(8, 16), torch.randn(16, 24)
        warmth = tilewright.warm_up(served, (x, w), (torch.randn(4, 16), w))
        assert warmth.compilations == 2 and warmth.builds >= 2 and warmth.tunings == 2
        with tilewright.sealed() as seal:
            served(x, w)
            assert seal.counts == {}
            result = served(torch.randn(5, 16), w)
            assert result.shape == (5,)
        assert seal.counts["compilation"] == 1 and seal.counts["tuning"] == 1
        (event,) = [e for e in seal.events if e.kind == "compilation"]
        assert "test_serving.py" in event.cause and "size mismatch" in event.cause
        said = [r for r in caplog.records if r.name == "tilewright.monitor"]
        assert said and all(r.levelno == logging.WARNING for r in said)
        served(torch.randn(6, 16), w)
        assert seal.counts["compilation"] == 1, "the seal is broken"


def test_a_seal_may_be_an_error():
    with fresh_cache():
        served = torch.compile(model, backend="tilewright", dynamic=False)
        w = torch.randn(16, 24)
        tilewright.warm_up(served, (torch.randn(3, 16), w))
        seal = tilewright.sealed(error=True)
        try:
            before = monitor.counts["sealed.compilation"]
            served(torch.randn(3, 16), w)
            with pytest.raises(BackendCompilerFailed, match="after the process was sealed") as got:
                served(torch.randn(9, 16), w)
            assert isinstance(got.value.inner_exception, monitor.SealedError)
            assert "tilewright.warm_up" in str(got.value)
            assert monitor.counts["sealed.compilation"] == before + 1
        finally:
            seal.open()
        assert served(torch.randn(9, 16), w).shape == (9,)


def test_calls_are_tuples():
    with pytest.raises(TilewrightError, match="one tuple"):
        tilewright.warm_up(model, torch.randn(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TilewrightError, match="one tuple"):
        tilewright.tune(model)
    call = torch.randn(8, 16), torch.randn(16, 4)
    with pytest.raises(TilewrightError, match="no engine 'slurm'"):
        tilewright.tune(model, call, engine="slurm")  # type: ignore[arg-type]


def test_what_was_tuned_ahead_is_not_measured_again():
    """By processes of a pool: questions are data."""
    options = {"max_autotune_gemm_backends": "ATEN,CPP"}
    x, w = torch.randn(32, 16), torch.randn(16, 24)
    with fresh_cache():
        report = tilewright.tune(model, (x, w), mode="max-autotune", options=options)
        assert (report.questions, report.answered, report.lost) == (1, 1, ())
        assert len(records.exported()["choices"]) == 1
        monitor.counts.clear()
        wanted = config.options_for_mode("max-autotune")
        compiled = torch.compile(model, backend="tilewright",
                                 options={**wanted, **options})  # fmt: skip
        torch.testing.assert_close(compiled(x, w), model(x, w), rtol=1e-4, atol=1e-4)
        assert monitor.counts["tuning"] == 0 and monitor.counts["compilation"] == 1
