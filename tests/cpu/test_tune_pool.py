"""Pools of processes that time: crashes, hangs, cards, inactivity; and parents that are killed."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.cpu import tuning_jobs
from tests.cpu.tuning_jobs import TestBenchmarkRequest as Request
from tilewright import config, metrics
from tilewright.testing import fresh_cache
from tilewright.tune import child, pool, select, spread
from tilewright.tune.pool import AsyncAutotuner, AutotuneProcessPool, TuningProcessPool


@dataclass(frozen=True, eq=False)
class Choice:
    bmreq: Request


@pytest.fixture(scope="module")
def one():
    made = TuningProcessPool()
    yield made
    made.shutdown()


def test_ma_m10_m11_a_crash_or_a_hang_costs_the_choice(one, caplog):
    """CU-G12 too."""
    crashes, good = Choice(Request(crash=True)), Choice(Request(3.14))
    assert one.benchmark([crashes]) == {crashes: math.inf}
    assert one.benchmark([good]) == {good: 3.14}
    with config.patch(max_autotune_subproc_result_timeout_seconds=1.0):
        hangs = Choice(Request(sleep=120))
        assert one.benchmark([hangs]) == {hangs: math.inf}
    assert any("more than 1 s" in r.getMessage() for r in caplog.records)
    assert one.benchmark([good]) == {good: 3.14}


def test_ma_m2_an_exception_costs_the_choice_and_not_the_process(one):
    good = Choice(Request(2.0))
    assert one.benchmark([good])[good] == 2.0
    before = one._all[0].pid
    raises = Choice(Request(exc=ValueError("no")))
    assert one.benchmark([raises, good]) == {raises: math.inf, good: 2.0}
    assert one._all[0].pid == before


def test_ma_m2_a_choice_that_raises_is_the_end_of_a_process_of_its_own(tmp_path):
    """One that nobody made for many: it says so with its exit code, and who began it goes on."""
    for how, code in (("", 0), ("fails on None", 1)):
        sent = tuning_jobs.Looked("a", 3.0, str(tmp_path / "said"), how)
        alone = multiprocessing.get_context("spawn").Process(target=child.whole, args=(sent, 3))
        alone.start()
        alone.join(60)
        assert alone.exitcode == code
    assert (tmp_path / "said").read_text() == "None a\n" * 2


class Process:
    """What a process of the pool says, and what is done to it."""

    def __init__(self, error: Exception) -> None:
        self.error, self.restarts = error, 0

    def put(self, job: Any) -> None: ...

    def get(self, timeout: float) -> float:
        raise self.error

    def restart(self) -> None:
        self.restarts += 1

    def kill(self) -> None: ...


@pytest.mark.parametrize(
    ("said", "restarts"),
    [("CUDA error: cudaErrorIllegalAddress", 1), ("cudaErrorLaunchFailure", 1),
     ("an illegal memory access was encountered", 1), ("device-side assert triggered", 1),
     ("an illegal instruction was encountered", 1), ("hardware stack error", 1),
     ("the launch timed out and was terminated", 1), ("invalid program counter", 1),
     ("invalid argument", 0), ("out of memory", 0)],
)  # fmt: skip
def test_cu_g6_g7_ma_m13_what_harms_a_card_restarts_its_process(said, restarts):
    made = TuningProcessPool()
    process = Process(RuntimeError(said))
    made.processes.get()
    made.processes.put(process)  # type: ignore[arg-type]
    assert made.target(Choice(Request())) == math.inf
    assert process.restarts == restarts
    assert made.processes.qsize() == 1, "it is back in the queue"
    made.shutdown()


def machine(monkeypatch: pytest.MonkeyPatch, kinds: str, named: str | None) -> None:
    """One with cards of these kinds, a letter each, of which a program is to see those named."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(pool, "kind", lambda card: kinds[card])
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)


def test_ma_m9_which_cards_are_timed_on(monkeypatch):
    machine(monkeypatch, "aaaa", None)
    assert TuningProcessPool.get_device_list() == [None]
    with config.patch(autotune_multi_device=True):
        assert TuningProcessPool.get_device_list() == [0, 1, 2, 3]
        machine(monkeypatch, "aa", "2,3")
        assert TuningProcessPool.get_device_list() == [2, 3]
        machine(monkeypatch, "aa", " 1, GPU-7f,")
        assert TuningProcessPool.get_device_list() == [1, "GPU-7f"]
        machine(monkeypatch, "a", "2,3")
        with pytest.raises(ValueError, match="more cards than the 1 there are"):
            TuningProcessPool.get_device_list()


def test_ma_m9_cards_of_one_kind_alone_are_timed_on(monkeypatch):
    """Of a machine with several kinds those that are like the card of the program."""
    with config.patch(autotune_multi_device=True):
        machine(monkeypatch, "abba", None)
        assert TuningProcessPool.get_device_list() == [0, 3]
        assert TuningProcessPool.get_device_list(2) == [1, 2]
        machine(monkeypatch, "abb", "5,GPU-1,GPU-2")
        assert TuningProcessPool.get_device_list(1) == ["GPU-1", "GPU-2"]
        assert spread.several(torch.device("cuda", 2)) == ["GPU-1", "GPU-2"]
        assert spread.several(torch.device("cuda", 0)) == [], "it is alone"
        assert spread.several(torch.device("cpu")) == []
    assert spread.several(torch.device("cuda", 2)) == [], "nobody asks for several"


@pytest.mark.parametrize("named", [None, "1,2", "0"])
@pytest.mark.parametrize("many", [False, True])
def test_ma_m9_each_process_sees_its_card_alone(monkeypatch, named, many):
    """And without several, whatever the program itself sees."""
    machine(monkeypatch, "aa", named)
    with config.patch(autotune_multi_device=many):
        made = TuningProcessPool()
    try:
        expected = (named or "0,1").split(",") if many else [named]
        assert [d if d is None else str(d) for d in made.devices] == (expected if many else [None])
        for process, device in zip(made._all, expected, strict=True):
            process.put(tuning_jobs.visible)
            assert process.get() == device
    finally:
        made.shutdown()


def test_ma_m12_several_cards_each_with_its_own_process(monkeypatch):
    """CU-G12 too."""
    machine(monkeypatch, "aa", "1,2")
    with config.patch(autotune_multi_device=True):
        made = TuningProcessPool()
    assert made.devices == [1, 2]
    first, second = Choice(Request(3.14)), Choice(Request(2.718))
    assert made.benchmark([first, second]) == {first: 3.14, second: 2.718}
    seen = sorted(made.run([tuning_jobs.visible] * 6, 60))
    assert set(seen) <= {"1", "2"}
    for process, device in zip(made._all, made.devices, strict=True):
        process.put(Request(1.0, device=device).benchmark)
        assert process.get() == 1.0
    made.shutdown()


def test_ma_m15_m16_it_ends_when_nobody_asks(monkeypatch):
    monkeypatch.setattr(pool, "AUTOTUNE_POOL_INACTIVITY_TIMEOUT", 0.5)
    made = AutotuneProcessPool()
    made.warm_up().result(timeout=60)
    assert made.submit(tuning_jobs.answer).result(timeout=60) == 42
    assert made.is_alive and not AutotuneProcessPool._shutdown_for_inactivity
    deadline = time.monotonic() + 20
    while made._pool is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert made._pool is None and made._timer is None and not made.is_alive
    assert AutotuneProcessPool._shutdown_for_inactivity
    with config.patch(pipeline_max_autotune_gemm=True):
        assert not pool.use_pipelined_autotuning()
        assert made.submit(tuning_jobs.answer).result(timeout=60) == 42
        assert pool.use_pipelined_autotuning()
    made.shutdown()


# The library and one kernel of ours: each is built by a compiler.
FEW: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP",
                       "test_configs.max_mm_configs": 1}  # fmt: skip


def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a @ b)


def test_ma_m14_m17_m18_m19_products_are_timed_in_the_background(monkeypatch):
    """Equal problems once; after the process has ended, in this one; a failure there costs the
    candidate."""
    AsyncAutotuner.clear()
    AutotuneProcessPool._shutdown_for_inactivity = False
    options = {**FEW, "pipeline_max_autotune_gemm": True}
    a, b, c = torch.randn(48, 32), torch.randn(32, 64), torch.randn(64, 40)
    with fresh_cache():
        metrics.reset()
        compiled = torch.compile(lambda a, b, c: (f(a, b), f(a * 1, b), f(b, c)),
                                 backend="tilewright", options=options)  # fmt: skip
        for found, expected in zip(compiled(a, b, c), (f(a, b), f(a, b), f(b, c)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        begun = len(AsyncAutotuner.choice_hash_to_future)
        assert begun >= 4, "two problems, each with the library and others"
        assert metrics.counters["inductor"]["benchmarking.Benchmarker.benchmark_cpu"] == 0
        torch._dynamo.reset()
        compiled(a, b, c)
        assert len(AsyncAutotuner.choice_hash_to_future) == begun
    AsyncAutotuner.clear()
    monkeypatch.setattr(child, "whole", tuning_jobs.fail)
    with fresh_cache():
        done = torch.compile(f, backend="tilewright", options={
            **options, "max_autotune_gemm_backends": "ATEN"})(a, b)  # fmt: skip
        torch.testing.assert_close(done, f(a, b))
    AutotuneProcessPool.get_instance().shutdown()
    AutotuneProcessPool._shutdown_for_inactivity = True
    AsyncAutotuner.clear()
    with fresh_cache():
        assert not pool.use_pipelined_autotuning()
        done = torch.compile(f, backend="tilewright", options=options)(b, c)
        torch.testing.assert_close(done, f(b, c), rtol=1e-4, atol=1e-4)
    assert AsyncAutotuner.choice_hash_to_future == {}
    AutotuneProcessPool._shutdown_for_inactivity = False


def test_ma_m1_cu_g13_what_is_sent_holds_no_tensor():
    """And the overhead of asking is not that of making inputs again."""
    seen: list[bytes] = []
    with fresh_cache(), config.patch(FEW):
        choose = select.AlgorithmSelectorCache.__call__

        def spy(self, subject, trials):
            seen.extend(pickle.dumps(t.remote()) for t in trials)
            return choose(self, subject, trials)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select.AlgorithmSelectorCache, "__call__", spy)
            x = torch.randn(300, 200)
            torch.compile(f, backend="tilewright")(x, x.T.contiguous())
    assert len(seen) >= 2
    assert all(len(data) < x.numel() for data in seen)
    assert all(b"_rebuild_tensor" not in data and b"storage" not in data for data in seen)


def two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return a @ b + c @ d


def test_ma_m1_the_librarys_sum_of_two_products_in_another_process(monkeypatch):
    """Four buffers of six numbers: what is sent pickles, is timed and compared there, and the
    process ends as processes should."""
    found: list[Any] = []
    choose = select.AlgorithmSelectorCache.__call__

    def spy(self, subject, trials):
        found.extend(t for t in trials if t.is_library)
        return choose(self, subject, trials)

    monkeypatch.setattr(select.AlgorithmSelectorCache, "__call__", spy)
    given = [torch.randn(2, 3), torch.randn(3, 2), torch.randn(2, 3), torch.randn(3, 2)]
    with fresh_cache():
        done = torch.compile(two, backend="tilewright", options=FEW)(*given)
        torch.testing.assert_close(done, two(*given))
        plan = next(t for t in found if all(f"{s}" in repr(t.remote()) for s in "ab"))
        memory = plan.remote().memory
        sizes = {tuple(int(e.arg) for e in b.size) for b in memory.buffers}
        assert sizes == {(2, 3), (3, 2), (2, 2)}, sizes
        process = child.TuningProcess()
        process.put(functools.partial(child.whole, pickle.loads(pickle.dumps(plan.remote())), 3))
        samples, wrong = process.get(120)
        assert wrong == "" and len(samples) == 3 and all(0 < us < 1e6 for us in samples)
    assert process._process is not None and process._process.stdin is not None
    process._process.stdin.close()
    assert process._process.wait(60) == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_ma_m3_a_product_of_what_is_computed_first(dynamic):
    """Timed in the other process: sizes that vary, and a producer that may be fused."""
    a, b = torch.randn(100, 10), torch.randn(10, 100)
    options = {**FEW, "autotune_in_subproc": True}
    asked: list[Any] = []
    ask = child.asked
    with fresh_cache(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "asked", lambda *given: asked.append(given[0]) or ask(*given))
        compiled = torch.compile(lambda a, b: torch.sin(a) @ b, backend="tilewright",
                                 dynamic=dynamic, options=options)  # fmt: skip
        for rows in (100, 60) if dynamic else (100,):
            expected = torch.sin(a[:rows]) @ b
            torch.testing.assert_close(compiled(a[:rows], b), expected, rtol=1e-4, atol=1e-4)
    assert {job.func for job in asked} >= {child.sample, child.check}


def test_ma_m14_two_problems_of_two_choices_are_four_timings():
    """The library and one kernel each; equal problems are timed once."""
    AsyncAutotuner.clear()
    AutotuneProcessPool._shutdown_for_inactivity = False
    a, b, c = torch.randn(128, 64), torch.randn(64, 256), torch.randn(256, 128)
    options = {**FEW, "max_autotune_gemm": True, "pipeline_max_autotune_gemm": True}

    def three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a @ b, a.clone() @ b, c @ a

    with fresh_cache():
        compiled = torch.compile(three, backend="tilewright", options=options)
        for found, expected in zip(compiled(a, b, c), three(a, b, c), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(AsyncAutotuner.choice_hash_to_future) == 4
    AutotuneProcessPool.get_instance().shutdown()
    AsyncAutotuner.clear()


ORPHAN = """
import os, signal, sys, time
from tests.cpu import tuning_jobs
from tilewright.tune.child import TuningProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of the background
process = TuningProcess()
process.put(tuning_jobs.process)
print(process.get(), flush=True)
process.put(tuning_jobs.sleep)
time.sleep(0.2)
os.kill(os.getpid(), int(sys.argv[1]))
time.sleep(60)
"""


@pytest.mark.parametrize("number", [9, 2])
def test_ma_m13_a_parent_that_is_killed_leaves_no_process(number):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(ORPHAN), str(number)],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env=env)  # fmt: skip
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    parent.wait(timeout=60)
    deadline = time.monotonic() + 60  # it may still import torch
    while time.monotonic() < deadline and _runs(process):
        time.sleep(0.05)
    assert not _runs(process)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
