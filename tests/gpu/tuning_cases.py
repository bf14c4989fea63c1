"""How products are timed and shared on a card: in other processes, in the background, with what
fails there. Their twins without a card are `tests/cpu/test_tune_pool.py`, `test_tune_select.py` and
`test_sharing.py`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import SkipTest, mock

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.cpu import tuning_jobs
from tests.cpu.tuning_jobs import TestBenchmarkRequest as Request
from tests.gpu.cases import case, check, cuda
from tests.gpu.gemm_cases import BF16, code, measured, rounded
from tilewright import caches, config
from tilewright.gemm.templates import TritonTemplate
from tilewright.runtime import remote
from tilewright.testing import fresh_cache
from tilewright.tune import child, kernels, pool, select, spread
from tilewright.tune.pool import AsyncAutotuner, AutotuneProcessPool, TuningProcessPool

BOTH = {"max_autotune_gemm_backends": "ATEN,TRITON"}
BEHIND: dict[str, Any] = {**BOTH, "pipeline_max_autotune_gemm": True,
                          "test_configs.max_mm_configs": 1}  # fmt: skip


@contextmanager
def background() -> Iterator[None]:
    """A process that times in the background, begun anew and ended."""
    AsyncAutotuner.clear()
    AutotuneProcessPool._shutdown_for_inactivity = False
    try:
        yield
    finally:
        AutotuneProcessPool.get_instance().shutdown()
        AutotuneProcessPool._shutdown_for_inactivity = False
        AsyncAutotuner.clear()


def begun(function: Any, *args: Tensor) -> int:
    """Timings in the background that a program asks for which no other has asked for before."""
    before = len(AsyncAutotuner.choice_hash_to_future)
    torch._dynamo.reset()  # other sizes of a function that is known would be dynamic ones
    code(function, *args, tolerance=rounded(BF16, 128), **BEHIND)
    return len(AsyncAutotuner.choice_hash_to_future) - before


@case
def a_small_sum_of_products_is_timed_by_a_process() -> None:
    """MA-M1: the library's own call among others."""
    a, b, c, d = cuda(2, 3), cuda(3, 2), cuda(2, 3), cuda(3, 2)
    with fresh_cache():
        measured(lambda a, b, c, d: a @ b + c @ d, a, b, c, d, autotune_in_subproc=True)


@case
def what_a_process_is_asked_may_fail() -> None:
    """The candidate is lost, and the process goes on."""
    made = TuningProcessPool()
    try:
        good, bad = Choice(Request(2.0)), Choice(Request(exc=ValueError("no")))
        assert made.benchmark([bad, good]) == {bad: math.inf, good: 2.0}
    finally:
        made.shutdown()


@case
def a_trap_on_the_card_costs_the_process_it_is_in() -> None:
    """What a candidate does in another process leaves this one's card as it was."""
    held = torch.ones(1000, device="cuda")
    before = child.asked(tuning_jobs.process)
    died: list[Exception] = []
    try:
        child.asked(tuning_jobs.trap)
    except RuntimeError as error:
        died.append(error)
    assert died and child.harms(died[0]), died
    assert child.asked(tuning_jobs.process) != before, "it was started again"
    assert (held + 1).sum().item() == 2000
    a, b = cuda(64, 32), cuda(32, 48)
    with fresh_cache():
        measured(lambda a, b: a @ b, a, b, autotune_in_subproc=True)


class Choice:
    def __init__(self, bmreq: Request) -> None:
        self.bmreq = bmreq


@case
def each_card_has_its_own_process() -> None:
    """MA-M9, MA-M12."""
    if torch.cuda.device_count() < 2:
        raise SkipTest("there is one card, and this is about several")
    with config.patch(autotune_multi_device=True):
        made = TuningProcessPool()
    try:
        assert made.devices == list(range(torch.cuda.device_count()))
        assert set(made.run([tuning_jobs.visible] * 8, 60)) <= {str(d) for d in made.devices}
    finally:
        made.shutdown()


@case
def several_processes_look_at_candidates() -> None:
    """MA-C2: of one card, where there is no other; who wins is timed by this process. They give up
    the memory they had."""
    named = os.environ.get(pool.VISIBLE, "0").split(",")[0].strip()
    with config.patch(autotune_multi_device=True):
        cards = spread.several(torch.device("cuda", 0)) or [named, named]
    looked: list[Any] = []
    submit = TuningProcessPool.submit

    def seen(self: TuningProcessPool, job: Any, *more: Any) -> Any:
        looked.append(submit(self, job, *more))
        return looked[-1]

    a, b = cuda(512, 256, dtype=BF16), cuda(256, 384, dtype=BF16)
    several = mock.patch.object(spread, "several", return_value=cards)
    with fresh_cache(), several, mock.patch.object(TuningProcessPool, "submit", seen):
        measured(lambda a, b: torch.relu(a @ b), a, b, autotune_multi_device=True, **BOTH)
        assert looked and all(f.exception() is None for f in looked), looked
        with spread._kept.pool(cards) as made:
            assert set(made.run([tuning_jobs.held] * 2, 60)) == {("", 0)}


@case
def a_product_of_the_second_card_is_looked_at_on_both() -> None:
    """MA-B12, MA-C2: each process knows its card as the first."""
    if torch.cuda.device_count() < 2:
        raise SkipTest("there is one card, and this is about the second")
    a, b = (cuda(512, 512, dtype=BF16).to("cuda:1") for _ in range(2))
    with fresh_cache():
        measured(torch.mm, a, b, autotune_multi_device=True, **BOTH)


@case
def equal_problems_are_timed_once_in_the_background() -> None:
    """MA-M14."""
    a, b, c = cuda(128, 64, dtype=BF16), cuda(64, 256, dtype=BF16), cuda(256, 128, dtype=BF16)
    d = cuda(128, 64, dtype=BF16)

    def three(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a @ b, (a + 1) @ b, c @ d

    with background():
        first, second = begun(torch.mm, a, b), begun(torch.mm, c, d)
        assert first >= 2 and second >= 2, "the library and a template, each"
    with background():
        assert begun(lambda a, b, c, d: (a @ b, d @ b, c @ d), a, b, c, d) == first + second
        assert begun(torch.mm, a, b) == 0
    with background():
        check(three, a, b, c, d, options={**BEHIND, "max_autotune": True},
              tolerance=rounded(BF16, 128))  # fmt: skip


@case
def the_process_in_the_background_ends_when_nobody_asks() -> None:
    """MA-M15 to MA-M17: and products are timed here from then on."""
    a, b = cuda(64, 32, dtype=BF16), cuda(32, 64, dtype=BF16)
    with mock.patch.object(pool, "AUTOTUNE_POOL_INACTIVITY_TIMEOUT", 2.0), background():
        made = AutotuneProcessPool.get_instance()
        made.warm_up().result(timeout=120)
        with config.patch(pipeline_max_autotune_gemm=True):
            assert pool.use_pipelined_autotuning()
            assert begun(torch.mm, a, b) >= 2
            deadline = time.monotonic() + 60
            while made.is_alive and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not made.is_alive and AutotuneProcessPool._shutdown_for_inactivity
            assert not pool.use_pipelined_autotuning()
            AsyncAutotuner.clear()
            assert begun(torch.mm, cuda(128, 64, dtype=BF16), cuda(64, 128, dtype=BF16)) == 0


@case
def templates_that_fail_in_the_background_are_not_used() -> None:
    """MA-M18, MA-Q6: whatever a product is fused with, the library computes it."""
    a, b = cuda(64, 32, dtype=BF16), cuda(32, 64, dtype=BF16)
    for function in (torch.mm, lambda a, b: a @ b + 1):
        with background(), mock.patch.object(child, "whole", tuning_jobs.fail):
            text = code(function, a, b, tolerance=rounded(BF16, 32), **BEHIND)
            assert "triton_tem_" not in text


@case
def a_key_that_says_too_little_is_found_out() -> None:
    """MA-L6, MA-Q6: an error, not another product's code."""

    def two(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y) @ y.t()

    said = ""
    with (mock.patch.object(TritonTemplate, "key", lambda self, *_, **__: self.name),
          mock.patch.object(TritonTemplate, "test_cache", True)):  # fmt: skip
        try:
            code(two, cuda(10, 22), cuda(22, 30), max_autotune_gemm_backends="TRITON")
        except BackendCompilerFailed as error:
            said = str(error)
    assert "code cache results in wrong output" in said, said


@case
def what_was_measured_is_shared_through_a_server() -> None:
    """MA-N1: four times in fresh caches and once under a tag."""
    kept: dict[str, bytes] = {}

    class Server:
        def get(self, key: str) -> bytes | None:
            return kept.get(key)

        def set(self, key: str, value: bytes) -> None:
            kept[key] = value

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.sin(a) @ b

    a, b = cuda(100, 10), cuda(10, 100)
    options = {"compile_threads": 1, "prologue_fusion": False, "autotune_local_cache": False}
    remote.use(Server())
    try:
        for tag in ("", "", "", "", "test"):
            torch._dynamo.reset()
            caches.clear()
            code(product, a, b, cache_key_tag=tag, **options)
        stats = replace(remote.stats)
    finally:
        remote.use(None)
    assert stats.puts == stats.misses > 0, stats  # what is not there is measured and put
    assert 2 * stats.hits == 3 * stats.misses, stats


@case
def infinite_times_leave_no_choice() -> None:
    """MA-Q2."""
    lookup = select.AlgorithmSelectorCache.lookup

    def infinite(self: Any, *args: Any) -> dict[Any, float]:
        return dict.fromkeys(lookup(self, *args), math.inf)

    a, b = torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16, device="cuda")
    for together in (False, True):
        said = ""
        with mock.patch.object(select.AlgorithmSelectorCache, "lookup", infinite):
            try:
                code(torch.mm, a, b, max_autotune_gemm_backends="TRITON",
                     benchmark_epilogue_fusion=together)  # fmt: skip
            except BackendCompilerFailed as error:
                said = str(error)
        assert "NoValidChoicesError" in said, said


@case
def kernels_that_share_a_launch_are_tuned_with_it() -> None:
    """CK-8: four short ones of the same choices as one, after the long one."""

    def five(*x: Tensor) -> list[Tensor]:
        return [(t * 2 + k).sin() for k, t in enumerate(x)]

    seen: list[list[int]] = []
    turns = kernels.turns

    def noted(source: Any) -> Any:
        found = turns(source)
        seen.append([len(changes) for changes in found])
        return found

    inputs = [cuda(n) for n in (3000, 3000, 700000, 3000, 3000)]
    with mock.patch.object(kernels, "turns", noted), fresh_cache():
        check(five, *inputs, options={"combo_kernels": True, "max_autotune": True})
    assert any(len(turn) == 2 for turn in seen), seen


@case
def gradients_of_parameters_keep_their_shape() -> None:
    """RD-8: of one row; and the number of rows is a sum of sizes that vary."""

    def scaled(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        z = torch.cat([x, y])
        return z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-5) * weight

    for rows in (130, 57):
        given = cuda(rows, 512, grad=True), cuda(33, 512, grad=True), cuda(1, 512, grad=True)
        check(scaled, *given, dynamic=True, tolerance={"rtol": 1e-4, "atol": 1e-4})
