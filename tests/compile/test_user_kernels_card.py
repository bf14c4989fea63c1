"""Triton kernels of users in programs for a card that is not there: they are compiled for it, and
run in Triton's interpreter or reach a driver that only remembers."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests import kernels as user
from tests.compile.as_cuda import as_cuda, as_fake_cuda
from tilewright import config, metrics
from tilewright.graph.user_kernels import Launch
from tilewright.host import cudagraphs
from tilewright.ir.program import Opaque, Origin
from tilewright.runtime import triton_build
from tilewright.testing import run_and_get_code
from tilewright.tune import user_kernels as tune


@pytest.fixture(autouse=True)
def _seen() -> Generator[None]:
    with user.seen():
        yield


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="tilewright", fullgraph=True, **options)


def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    user.add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=16)
    return out


def test_launched_like_our_own() -> None:
    x, y = torch.randn(33), torch.randn(33)
    with as_fake_cuda() as driver:
        _, codes = run_and_get_code(compiled(add), x, y)
    (launch,) = driver.launches
    assert (launch.name, launch.grid, launch.block, launch.stream) == (
        "add_kernel",
        (3, 1, 1),
        128,
        7,
    )
    assert launch.words[:2] == (x.data_ptr(), y.data_ptr())
    assert launch.words[3] & 0xFFFFFFFF == 33
    assert "add_kernel_0(stream0, 3, 1, 1, arg0, arg1, buf0, 33)" in codes[0]


IN_A_PROCESS = """
import json, torch
from tests import kernels as user
from tests.compile.as_cuda import as_cuda
from tests.compile.test_user_kernels_card import add, compiled
from tilewright import config, metrics

x, y = torch.arange(33.0), torch.full((33,), 2.0)
with user.seen(), as_cuda(), config.patch(fx_graph_cache=True):
    result = compiled(lambda x, y: add(x, y) * y)(x, y)
assert torch.equal(result, (x + y) * y)
print(json.dumps([metrics.cache_hits, metrics.kernels_compiled, metrics.kernels_found,
                  metrics.counters["capture"]["hit"]]))
"""


def test_a_second_process_has_it_from_the_cache(in_a_process: Callable[[str], Any]) -> None:
    """The user's kernel and ours beside it: found, launched and right, and nothing is compiled."""
    assert in_a_process(IN_A_PROCESS) == [0, 2, 0, 0]
    assert in_a_process(IN_A_PROCESS) == [1, 0, 2, 1]


# UT-7
def test_ut_7_a_number_of_any_size() -> None:
    """One binary serves all sizes, and large ones have one with wider numbers."""
    with as_cuda():
        run = compiled(add, dynamic=True)
        for n in (33, 48, 5):
            x, y = torch.randn(n), torch.randn(n)
            result, codes = run_and_get_code(run, x, y) if n == 33 else (run(x, y), [])
            torch.testing.assert_close(result, x + y)
            assert n != 33 or "< 2147483648 else add_kernel_0_wide)(stream0" in codes[0]


# UT-6
def test_ut_6_what_is_one_or_a_multiple_of_16_is_part_of_the_kernel() -> None:
    @triton.jit(do_not_specialize=["kept"])
    def kernel(x, out, n, step, kept, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out + at * step, tl.load(x + at * step, at < n) + kept, at < n)

    def run(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        kernel[(1,)](x, out, 32, 1, 1, BLOCK=32, num_warps=2)
        return out

    orders: list[dict[str, Any]] = []
    compile_ = triton_build._Pool.compile

    def watch(self: Any, key: str, order: dict[str, Any], future: Any) -> None:
        orders.append(order)
        compile_(self, key, order, future)

    x = torch.randn(32)
    with as_cuda(), mock.patch.object(triton_build._Pool, "compile", watch):
        torch.testing.assert_close(compiled(run)(x), x + 1)
    (order,) = [o for o in orders if o["name"] == "kernel"]
    assert order["signature"] == {"x": "*fp32", "out": "*fp32", "n": "i32", "kept": "i32",
                                  "step": "constexpr", "BLOCK": "constexpr"}  # fmt: skip
    assert order["constants"] == {"step": 1, "BLOCK": 32}
    assert set(order["attributes"]) == {(0,), (1,), (2,)}
    assert order["options"]["num_warps"] == 2


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((8, 1), (16, 2), (32, 4))],
                 key=["n"], reset_to_zero=["out"])  # fmt: skip
@triton.jit
def tuned_add(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(out + at, at < n) + tl.load(x + at, at < n), at < n)


# UT-5
def test_ut_5_settings_are_measured_once_for_each_key() -> None:
    """On copies: what the program holds is as if nothing had been tried."""
    tried: list[list[str]] = []

    def internal(subject: Any, trials: Any) -> Any:
        tried.append([t.description for t in trials])
        for trial in trials:
            trial.run(7, 0)
        return mock.Mock(winner=trials[1], source="measured")

    def run(x: Tensor, out: Tensor) -> Tensor:
        n = x.numel()
        tuned_add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
        return out

    with as_cuda(), mock.patch.object(tune, "internal", internal):
        program = compiled(run, dynamic=True)
        for n in (40, 40, 70):
            x, out = torch.randn(n), torch.randn(n)
            torch.testing.assert_close(program(x, out.clone()), x + out)
    assert len(tried) == 2 and len(tried[0]) == 3
    assert metrics.counters["tune"]["user kernels measured"] == 2


def test_errors_are_the_users_own() -> None:
    def run(x: Tensor) -> Tensor:
        user.broken_kernel[(1,)](x, 16)
        return x

    with as_cuda(), pytest.raises(Exception, match="does not compile your kernel broken") as error:
        compiled(run)(torch.randn(16))
    text = str(error.value)
    line = user.broken_kernel.starting_line_number + 4
    assert f"tests/kernels.py:{line}" in text and "undefined_name" in text


def test_one_setting_of_several_may_fail() -> None:
    @triton.autotune([triton.Config({"BLOCK": b}) for b in (12, 16)], key=[])
    @triton.jit
    def kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # 12 is not a power of two
        tl.store(out + at, tl.load(x + at, at < n) * 2, at < n)

    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(20, meta["BLOCK"]),)](x, out, 20)
        return out

    x = torch.randn(20)
    with as_cuda():
        torch.testing.assert_close(compiled(run)(x), x * 2)


def test_memory_of_its_own_is_tritons_affair() -> None:
    """UT-8: a descriptor made on the card needs memory that Triton's launcher brings."""

    @triton.jit
    def kernel(x, out, n):
        source = tl.make_tensor_descriptor(x, [n, n], [n, 1], [16, 16])
        target = tl.make_tensor_descriptor(out, [n, n], [n, 1], [16, 16])
        target.store([0, 0], source.load([0, 0]))

    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, 32)
        return out

    launched: list[str] = []

    def by_triton(source: Any, setting: Any) -> Any:
        return lambda *args: launched.append(source.kernel.name)

    with as_cuda(), mock.patch.object(tune, "by_triton", by_triton):
        compiled(run)(torch.randn(32, 32))
    assert launched == ["kernel"]
    assert metrics.counters["user_kernels"]["launched by Triton"] == 1


def test_recorded_in_cuda_graphs() -> None:
    target = Launch(mock.Mock(), (), ())
    call = Opaque("call", target, (), {}, (), (), Origin(()))
    assert cudagraphs._why_not([torch.device("cuda", 0)], [call]) == ""
    with as_fake_cuda() as driver, config.patch({"triton.cudagraphs": False}):
        compiled(lambda x, y: add(add(x, y), y))(torch.randn(20), torch.randn(20))
    assert [launch.name for launch in driver.launches] == ["add_kernel"] * 2


def test_training_with_a_kernel_of_ones_own() -> None:
    with as_cuda():
        x = torch.randn(9, requires_grad=True)
        compiled(lambda x: user.TwoSin.apply(x) * 2)(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.sin().sigmoid() * x).detach())
