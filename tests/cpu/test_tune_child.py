"""Candidates that crash or hang in a process of their own."""

from __future__ import annotations

import functools
import os
import resource
import select as select_
import signal
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu import tuning_jobs
from tests.cpu.test_gemm_choose import (
    ToyCandidate,
    ToyProvider,
    check,
    inputs,
    layer,
    register,
    toy,
)
from tests.cpu.tuning_jobs import crash, sleep
from tilewright import config
from tilewright.gemm import choose
from tilewright.gemm.provider import Kernel
from tilewright.tune import child, clock, select
from tilewright.tune.child import TuningProcess
from tilewright.tune.failures import Crashed, explained

__all__ = ["register"]


@pytest.fixture(scope="module")
def process() -> Generator[TuningProcess]:
    made = TuningProcess()
    yield made
    made.kill()


def test_ma_m5_m6_m7_m8_it_survives_what_it_is_given(process: TuningProcess) -> None:
    """CU-G12: a job that hangs, raises or crashes; and being killed before there is any."""
    process.kill()
    process.put(tuning_jobs.number)
    assert process.get() == 3.14
    first = process.pid
    process.put(tuning_jobs.fail)
    with pytest.raises(RuntimeError, match="it went wrong"):
        process.get()
    assert process.pid == first, "an exception is no reason to start again"
    process.put(tuning_jobs.sleep)
    with pytest.raises(TimeoutError):
        process.get(timeout=0.2)
    assert first is not None and not os.path.exists(f"/proc/{first}")
    process.put(tuning_jobs.crash)
    with pytest.raises(EOFError, match="signal 11"):
        process.get()
    process.put(tuning_jobs.leave)
    with pytest.raises(EOFError, match="exit code 3"):
        process.get()
    process.put(tuning_jobs.number)
    assert process.get() == 3.14


def test_one_that_closes_its_end_or_says_what_nobody_can_read(
    process: TuningProcess, monkeypatch: Any
) -> None:
    monkeypatch.setattr(child, "LAST", 0.3)
    process.put(tuning_jobs.close)
    with pytest.raises(EOFError, match="closed its connection"):
        process.get(30)
    process.put(functools.partial(bytes, 1 << 20))
    monkeypatch.setattr(child, "LONGEST", 1000)
    with pytest.raises(ValueError, match="answers with 1048"):
        process.get(30)
    process.put(tuning_jobs.wander)
    assert process.get(30) is None
    process.put(tuning_jobs.folder)
    assert process.get(30) == os.getcwd()
    process.put(tuning_jobs.odd)
    pid = process.pid
    with pytest.raises(RuntimeError, match="Odd: mine"):
        process.get(30)
    assert process.pid == pid


def test_a_process_that_is_stopped(process: TuningProcess, monkeypatch: Any) -> None:
    """It neither reads what it is sent nor answers."""
    monkeypatch.setattr(child, "TAKES", 0.3)
    process.put(tuning_jobs.process)
    os.kill(process.get(30), signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="does not read"):
        process.put(functools.partial(tuning_jobs.length, "x" * (1 << 20)))
    monkeypatch.undo()
    process.put(functools.partial(tuning_jobs.length, "x" * (1 << 20)))
    assert process.get(30) == 1 << 20


def test_who_asks_may_have_been_stopped_meanwhile(process: TuningProcess) -> None:
    """With Ctrl-Z, say: an answer that is there is taken, whatever the clock says by now."""
    process.put(tuning_jobs.number)
    assert process.get(30) == 3.14
    process.put(tuning_jobs.number)
    assert process._process is not None and process._process.stdout is not None
    assert child._ready(process._process.stdout.fileno(), select_.POLLIN, time.monotonic() + 30)
    assert process.get(-1.0) == 3.14


def test_it_outlives_the_thread_that_first_asked() -> None:
    """Linux ends a process with the thread that began it, where it is to end with its parent."""
    found: list[int] = []
    process = TuningProcess()

    def ask() -> None:
        process.put(tuning_jobs.process)
        found.append(process.get(60))

    try:
        first = threading.Thread(target=ask)
        first.start()
        first.join()
        process.put(functools.partial(time.sleep, 0.2))
        process.get(30)
        ask()
        assert found[0] == found[1]
    finally:
        process.kill()


def test_what_the_main_file_defines_is_to_be_in_a_module(process: TuningProcess) -> None:
    """Of a script or a notebook: the reason says what to do, and the process goes on."""
    with pytest.raises(LookupError, match="define it in a module") as raised:
        child.answered(process, tuning_jobs.of_main())
    assert "autotune_in_subproc" in str(raised.value) and "'mine'" in str(raised.value)
    assert explained(raised.value)[1] is False
    assert child.answered(process, tuning_jobs.number) == 3.14


def test_paths_of_the_users_program_may_be_of_any_type(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere"), 3])
    process = TuningProcess()
    process.put(tuning_jobs.number)
    assert process.get(60) == 3.14
    process.kill()


def test_what_is_around_it_is_not_taken_for_an_answer(tmp_path: Path, monkeypatch: Any) -> None:
    """A machine whose start files print, a program with more files open than `select` can number,
    and a job that reads what is not for it. Where memory runs out it is ended before its parent."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome to this machine', flush=True)")
    monkeypatch.syspath_prepend(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    process = TuningProcess()
    try:
        process.put(tuning_jobs.around)
        assert process.get(60) == ("", "1000\n")
        process.put(tuning_jobs.number)
        assert process.get(60) == 3.14
    finally:
        process.kill()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python", "", "a\0b"])
def test_without_a_process_nothing_is_held_against_a_candidate(
    python: str, monkeypatch: Any
) -> None:
    """A program that Python is embedded in has no interpreter to start."""
    child._process.kill()
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(child.NotStarted, match="cannot be started") as raised:
        child.asked(tuning_jobs.number)
    assert explained(raised.value) == (f"NotStarted: {raised.value}", False)


def test_an_interrupt_leaves_no_answer_to_be_taken_for_another(process: TuningProcess) -> None:
    process.put(tuning_jobs.number)
    assert process.get() == 3.14
    process.put(tuning_jobs.sleep)
    # whoever runs the tests in the background may have interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.get()
    timer.join()
    signal.signal(signal.SIGINT, before)
    process.put(tuning_jobs.process)
    assert process.get() == process.pid


def test_ma_m9_m13_options_and_devices(process: TuningProcess) -> None:
    with config.patch(max_fusion_size=7):
        process.put(tuning_jobs.option)
        assert process.get() == 7
    process.put(tuning_jobs.option)
    assert process.get() == config.max_fusion_size != 7
    one = TuningProcess(device=1)
    one.put(tuning_jobs.visible)
    assert one.get() == "1"
    one.kill()


def test_an_option_that_a_job_sets_is_its_own(process: TuningProcess) -> None:
    for number in (7, 7, 9):
        with config.patch(max_fusion_size=number):
            assert child.answered(process, tuning_jobs.option) == number
            child.answered(process, tuning_jobs.set_option)
            assert child.answered(process, tuning_jobs.option) == number


def test_libraries_compute_there_as_they_do_here(process: TuningProcess) -> None:
    """What a candidate leaves behind is not what the next one has either."""
    threads, precise = torch.get_num_threads(), torch.get_float32_matmul_precision()
    child.answered(process, tuning_jobs.imports)
    cudnn = torch.backends.cudnn  # torch's own tests, once imported, have its settings only so
    try:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(2)
        with cudnn.flags(enabled=cudnn.enabled, benchmark=True):
            for _ in range(2):
                assert child.answered(process, tuning_jobs.settings) == ["bf16", True, 2, True]
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precise)


def test_to_ask_for_a_sample_takes_less_than_half_of_one(tmp_path: Path, monkeypatch: Any) -> None:
    """What is known there is asked for by name, and the options are set once. A process that was
    started again is told all once more."""
    asked: list[Any] = []
    ask = child.asked
    monkeypatch.setattr(child, "asked", lambda job, *more: asked.append(job) or ask(job, *more))
    sampler = child.Sampler(tuning_jobs.Looked("a", 3.0, str(tmp_path / "said")))
    took: list[float] = []
    for _ in range(100):
        began = time.perf_counter()
        assert sampler.sample() == 3.0
        took.append(time.perf_counter() - began)
    assert 1e6 * sorted(took)[len(took) // 10] < 0.5 * clock.ALONE * clock.BATCH
    assert [job.func for job in asked] == [child.sample] + 99 * [child.again]
    child._process.kill()
    assert sampler.sample() == 3.0
    assert [job.func for job in asked[100:]] == [child.again, child.sample]


def test_ma_m10_m11_a_crash_or_a_hang_is_a_rejection(monkeypatch: Any) -> None:
    with pytest.raises(Crashed, match="signal 11"):
        child.asked(tuning_jobs.crash)
    assert child.asked(tuning_jobs.number) == 3.14
    before = child.asked(tuning_jobs.process)
    with (
        config.patch(max_autotune_subproc_result_timeout_seconds=0.2),
        pytest.raises(Crashed, match=r"more than 0.2 s"),
    ):
        child.asked(tuning_jobs.sleep)
    after = child.asked(tuning_jobs.process)
    assert after != before
    with pytest.raises(RuntimeError, match="illegal memory access"):
        child.asked(tuning_jobs.harm)
    assert child.asked(tuning_jobs.process) != after, "the card is not usable for it any more"


# ---- whole programs


@dataclass(frozen=True)
class Faulty:
    """A product that does something else."""

    how: str

    @property
    def text(self) -> str:
        return self.how

    def __call__(self, *args: Any) -> None:
        {"crash": crash, "hang": sleep}[self.how]()


@dataclass(frozen=True)
class FaultyCandidate(ToyCandidate):
    how: str = "crash"
    provider: str = "TOY"
    estimate: float = 1.0

    def kernel(self) -> Kernel:
        return replace(super().kernel(), source=Faulty(self.how))


SUBPROC = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "ATEN,TOY",
    "autotune_in_subproc": True,
    "autotune_budget_seconds": 300.0,  # on a busy machine a process takes long to start
}


def faulty(how: str) -> FaultyCandidate:
    return FaultyCandidate(toy().problem, 0.0, how=how, name=f"toy_{how}")


@pytest.mark.parametrize("how", ["crash", "hang"])
def test_a_faulty_candidate_costs_itself_alone(register: Any, how: str) -> None:
    """MA-M10, MA-M11: the user's process lives, the library computes the product."""
    register(ToyProvider(None, faulty(how)))
    reasons: list[str] = []
    select.add_feedback_saver(lambda *told: reasons.extend(c.reason for c in told[3]))
    try:
        seconds = 3.0 if how == "hang" else 60.0
        options = {**SUBPROC, "max_autotune_subproc_result_timeout_seconds": seconds}
        code = check(layer, inputs(), options=options)
    finally:
        select.clear_feedback_savers()
    assert "addmm" in code and "toy" not in code
    expected = {"crash": "signal 11", "hang": "more than 3 s"}[how]
    assert any(expected in reason for reason in reasons), reasons


def test_a_good_candidate_wins_there(register: Any) -> None:
    """MA-M1, MA-M13: its inputs are made there from descriptions, and its result is verified."""
    register(ToyProvider(toy(), None))
    options = {**SUBPROC, "max_autotune_gemm_backends": "TOY"}
    assert "toy_fused" in check(layer, inputs(), options=options)
    register(ToyProvider(toy(wrong=0.5), toy()))
    torch._dynamo.reset()
    code = check(layer, inputs(), options=options)
    assert "cpp_fused" in code, "the fused one is wrong, so the other must be taken"


def two(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return a @ b + c @ d


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("subproc", [False, True])
def test_ma_c2_sums_of_two_products_are_tuned_anywhere(subproc: bool, many: bool) -> None:
    """MA-M3, MA-M4 too: C++ kernels are timed in the other process as well."""
    args = (torch.randn(33, 8), torch.randn(8, 24), torch.randn(33, 8), torch.randn(8, 24))
    choose.decisions.clear()
    options = {"max_autotune": True, "autotune_in_subproc": subproc, "autotune_multi_device": many,
               "test_configs.max_mm_configs": 1}  # fmt: skip
    check(two, args, options=options)
    assert choose.decisions and "measured" in choose.decisions[-1].why
