"""Nothing that does not fit a card is an error of the user's: something smaller takes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda, as_fake_cuda
from tests.compile.fake_driver import fake_driver
from tests.compile.test_launch import load
from tests.compile.test_triton_build import ADD, BIG
from tests.ours import torch_may_take_over
from tilewright import metrics
from tilewright.host import kernels
from tilewright.runtime import launch, triton_build
from tilewright.runtime.driver import Driver
from tilewright.runtime.triton_build import (
    TritonConfig,
    TritonSource,
    build,
    lesser,
    smaller,
)

TURN = TritonSource(BIG, "turn", (("a", "*fp32"), ("out", "*fp32")),
                    (TritonConfig((("X", 64),)),), capability=90, shared_memory=8 * 1024,
                    grid=(("64", "X"),), shrinks=True)  # fmt: skip

SPILLS = """
import triton
import triton.language as tl


@triton.jit
def outer(a, out, X: tl.constexpr):
    i = tl.arange(0, X)
    x = tl.load(a + i)
    product = x[:, None] * x[None, :]
    total = product
    for k in tl.static_range(3):
        total = total * product + tl.sum(total, 0)[None, :] - tl.max(product, 1)[:, None]
    tl.store(out + i[:, None] * X + i[None, :], total)
"""


# ---- when it is compiled


@pytest.mark.parametrize("capability", [80, 90])
def test_too_much_shared_memory(capability: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is told who did not ask: it is the compiler's own business, and counted."""
    with caplog.at_level("DEBUG", "tilewright.build"):
        built = build(replace(TURN, capability=capability))
    (said,) = [r for r in caplog.records if "smaller blocks than planned" in r.getMessage()]
    assert said.levelname == "DEBUG"
    assert metrics.counters["triton"]["kernels built with smaller blocks"] == 1
    assert built.binary.shared <= 8 * 1024
    assert dict(built.config.constants)["X"] < 64
    assert TURN.programs(built.config) != TURN.programs(TURN.configs[0])


def test_registers_that_spill() -> None:
    source = replace(TURN, text=SPILLS, name="outer", shared_memory=227 * 1024, shrinks=False,
                     configs=(TritonConfig((("X", 128),), num_warps=1),
                              TritonConfig((("X", 32),), num_warps=4)))  # fmt: skip
    worst = triton_build.compile_all(source)[0]
    assert worst.binary.stack > triton_build.SPILLED, "this one has to spill"
    assert build(source).config == source.configs[1]
    alone = replace(source, configs=source.configs[:1])
    assert build(alone).binary.stack > 0, "it runs, if there is nothing else"


def test_registers_that_are_held_back() -> None:
    """Where that spills at all, they are not."""
    few, all_ = (TritonConfig((("X", 32),), num_warps=1, maxnreg=most) for most in (48, None))
    source = replace(TURN, text=SPILLS, name="outer", shared_memory=227 * 1024, shrinks=False,
                     configs=(few, all_))  # fmt: skip
    first, second = (b.binary for b in triton_build.compile_all(source))
    assert first.registers <= 48 < second.registers
    assert first.stack > second.stack == 0
    assert build(source).config == all_
    roomy = replace(source, configs=(replace(few, maxnreg=160), all_))
    assert build(roomy).config == roomy.configs[0]


def test_blocks_larger_than_triton_takes() -> None:
    huge = TritonConfig((("X", 2**21),))
    assert build(replace(ADD, configs=(huge, ADD.configs[0]))).config == ADD.configs[0]


def test_smaller_ones_halve_the_largest_block_of_the_grid() -> None:
    source = replace(TURN, grid=(("n", "X"), ("m", "Y")))
    chosen = TritonConfig((("X", 4), ("Y", 8), ("R", 512)))
    seen: list[tuple[int, ...]] = []
    while (found := smaller(source, chosen)) is not None:
        chosen = found
        seen.append(tuple(v for _, v in chosen.constants))
    assert seen == [(4, 4, 512), (2, 4, 512), (2, 2, 512), (1, 2, 512), (1, 1, 512)]
    assert smaller(replace(source, shrinks=False), TritonConfig((("X", 4),))) is None


def test_less_of_a_row_that_has_to_be_whole() -> None:
    """Of the listed ones those that ask for less, then fewer threads."""
    held, walked = (TritonConfig((("X", 1), ("R", r), ("HELD", h)), w)
                    for r, h, w in ((4096, 1, 8), (1024, 0, 4)))  # fmt: skip
    larger = replace(held, num_warps=16)
    source = replace(TURN, grid=(("n", "X"),), configs=(held, larger, walked))
    found = list(lesser(source, held))
    assert found == [walked, *(replace(held, num_warps=w) for w in (4, 2, 1))]


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "norm of columns": lambda x: x / x.square().sum(0).sqrt(),
    "scan": lambda x: torch.cumsum(x, -1),
    "turned": lambda x: x.t() + x.t().exp(),
    "rows and columns": lambda x: (x.sum(1), x.sum(0)),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shared", [1024, 0])
def test_programs_on_a_card_with_little_shared_memory(name: str, shared: int) -> None:
    """RD-8: what folds rows and columns at once, too."""

    def poor(*args: Any) -> TritonSource:
        return replace(made(*args), shared_memory=shared)

    made = kernels._source
    x = torch.randn(70, 300)
    with mock.patch.object(kernels, "_source", poor), as_cuda(), torch_may_take_over():
        actual = torch.compile(PROGRAMS[name], backend="tilewright")(x)
    torch.testing.assert_close(actual, PROGRAMS[name](x), rtol=1e-5, atol=1e-5)


# ---- when it is loaded and launched


def scaled(x: Tensor) -> Tensor:
    return x * 2 + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("code", [1, 701])
def test_a_launch_that_is_refused(code: int, dynamic: bool) -> None:
    """The next smaller kernel is launched, over a larger grid; later calls too."""
    x = torch.randn(4096)
    with as_fake_cuda() as driver:
        call = torch.compile(scaled, backend="tilewright", dynamic=dynamic)
        call(x)
        (first,) = driver.launches
        for _ in range(2):
            driver.clear()
            driver.fail_next(code)
            call(x)
            (second,) = driver.launches
            assert second.name == first.name and second.grid[0] == 2 * first.grid[0]
    assert metrics.counters["triton"]["kernels made smaller at their launch"] == 1


def test_torch_takes_over_where_no_kernel_is_small_enough() -> None:
    x = torch.randn(4096)
    with as_fake_cuda() as driver:
        call = torch.compile(scaled, backend="tilewright")
        call(x)
        with mock.patch.object(triton_build, "lesser", return_value=iter(())), \
                torch_may_take_over():  # fmt: skip
            driver.fail_next(701)
            actual = call(x)
    torch.testing.assert_close(actual, scaled(x))
    assert metrics.counters["triton"]["kernels that fit in no size"] == 1


def test_another_error_is_an_error() -> None:
    x = torch.randn(4096)
    with as_fake_cuda() as driver:
        call = torch.compile(scaled, backend="tilewright")
        call(x)
        driver.fail_next(700)
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            call(x)


def test_a_kernel_the_driver_does_not_load() -> None:
    real, refused = Driver.load, []

    def picky(self: Driver, cubin: bytes, name: str, *rest: Any) -> Any:
        if name not in refused:
            refused.append(name)
            raise RuntimeError("CUDA error: invalid argument (cuFuncSetAttribute gave 1)")
        return real(self, cubin, name, *rest)

    with as_fake_cuda() as driver, mock.patch.object(Driver, "load", picky):
        torch.compile(scaled, backend="tilewright")(torch.randn(4096))
        assert len(driver.launches) == 1
    assert metrics.counters["triton"]["kernels made smaller at their launch"] == 1


def test_rows_that_have_to_be_whole_run_with_less() -> None:
    x = torch.randn(300, 700)
    with as_fake_cuda() as driver:
        call = torch.compile(lambda x: torch.softmax(x, -1), backend="tilewright")
        call(x)
        driver.clear()
        driver.fail_next(701)
        call(x)
        (second,) = driver.launches
    assert metrics.counters["triton"]["kernels made smaller at their launch"] == 1
    assert second.grid[0] > 0


@pytest.mark.parametrize("grid", [(2**31, 1, 1), (1, 65536, 1), (1, 1, 65536), (2**32, 1, 1)])
@pytest.mark.parametrize("native", [True, False])
def test_ck_6_grids_beyond_the_limit(grid: tuple[int, ...], native: bool,
                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A number of programs is never cut to 32 bits: the call goes elsewhere, or is refused."""
    if not native:
        monkeypatch.setattr(launch, "_extension", lambda: None)
    args = (0, 0, 0, 0, 0.0)
    with fake_driver() as driver:
        kernel: Any = load(key=f"grid {grid} {native}")
        with pytest.raises(RuntimeError, match="CUDA error 1 when launching add") as info:
            kernel(7, *grid, *args)
        assert launch.is_refusal(info.value)
        seen: list[tuple[Any, ...]] = []
        launch.keep_running(kernel, lambda *given: seen.append(given))
        kernel(7, *grid, *args)
        assert seen == [(7, *grid, *args)] and driver.launches == []
        kernel(7, 2**31 - 1, 65535, 65535, *args)
        assert driver.launches[0].grid == (2**31 - 1, 65535, 65535)
