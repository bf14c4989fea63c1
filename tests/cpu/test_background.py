"""The process that times in the background, with another in its place: when its time without
requests begins, and what is left of a product when everything fails there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import pool
from tilewright.tune.pool import AsyncAutotuner, AutotuneProcessPool
from tilewright.tune.select import NoValidChoicesError


class Process:
    """A process that is started when `begin` is set, and fails with `error` if there is one."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.begin = threading.Event()
        self.is_alive = True
        self.asked = 0

    def packed(self, job: Any) -> bytes:
        return b""

    def send(self, packed: bytes) -> None:
        self.asked += 1

    def get(self, seconds: float) -> None:
        if self.error is not None:
            raise self.error
        assert self.begin.wait(seconds)

    def restart(self) -> None: ...

    def kill(self) -> None:
        self.is_alive = False


class Timer:
    """One that does not run by itself."""

    made: list[Timer]

    def __init__(self, seconds: float, ends: Callable[[], None]) -> None:
        self.seconds, self.ends, self.daemon = seconds, ends, False
        self.is_on = False
        self.made.append(self)

    def start(self) -> None:
        self.is_on = True

    def cancel(self) -> None:
        self.is_on = False


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Those that are made in place of real ones."""
    made: list[Process] = []

    def process() -> Process:
        made.append(Process())
        return made[-1]

    monkeypatch.setattr(pool, "TuningProcess", process)
    monkeypatch.setattr(AutotuneProcessPool, "_instance", None)
    monkeypatch.setattr(AutotuneProcessPool, "_shutdown_for_inactivity", False)
    monkeypatch.setattr(AsyncAutotuner, "choice_hash_to_future", {})
    return made


def test_ma_m16_its_time_begins_when_it_has_started(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MA-M16: nothing but its start was waited for."""
    monkeypatch.setattr(pool.threading, "Timer", Timer)
    Timer.made = []
    made = AutotuneProcessPool()
    started = made.warm_up()
    (process,) = processes
    assert not started.done() and not Timer.made, "it has not begun to wait"
    process.begin.set()
    started.result(60)
    (timer,) = Timer.made
    assert timer.is_on and timer.daemon and timer.seconds == 600 and made.is_alive
    timer.ends()
    assert not process.is_alive and not made.is_alive
    assert AutotuneProcessPool._shutdown_for_inactivity


@pytest.mark.parametrize("error", [NoValidChoicesError("none is left"), RuntimeError("no")])
@pytest.mark.parametrize("more", [0, 1])
def test_ma_m18_a_product_of_which_nothing_was_timed(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch, more: int, error: Exception
) -> None:
    """MA-M18: it is the library's, whatever it is fused with."""
    monkeypatch.setattr(Process, "error", error)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return a @ b + more if more else a @ b

    a, b = torch.randn(64, 32).bfloat16(), torch.randn(32, 64).bfloat16()
    options = {"max_autotune": True, "pipeline_max_autotune_gemm": True,
               "max_autotune_gemm_backends": "ATEN,CPP"}  # fmt: skip
    with fresh_cache():
        call = torch.compile(function, backend="tilewright", options=options)
        found, (code,) = run_and_get_code(call, a, b)
    torch.testing.assert_close(found, function(a, b), rtol=2e-2, atol=2e-2)
    assert sum(p.asked for p in processes) >= 2  # both were tried
    assert "cpp_fused_mm" not in code and "extern_aten_mm" in code
