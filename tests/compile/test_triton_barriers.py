"""Threads of a program that touch each other's memory wait for each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.compile.as_cuda import as_fake_cuda
from tilewright.testing import run_and_get_code

BARRIER = "tl.debug_barrier()"


def code(fn: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    with as_fake_cuda():
        compiled = torch.compile(fn, backend="tilewright", fullgraph=True, **options)
        return "\n".join(run_and_get_code(compiled, *args)[1])


def kernel_with(text: str, part: str) -> str:
    kernels = re.split(r"^@triton\.jit$", text, flags=re.MULTILINE)
    return next(k for k in kernels if part in k)


def test_a_barrier_inside_a_loop_that_may_not_run_is_none_for_what_follows() -> None:
    """Rows are stored whole and read again in parts of 13 columns: a loop of whole blocks of these
    runs no round, so the barrier is before it."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.sigmoid(x)
        return rows, torch.cat([p * k for k, p in enumerate(rows.split(13, 1))], 1)

    kernel = kernel_with(code(fn, torch.empty(130, 130).half(), dynamic=True), "for r1offset")
    stored = [m.start() for m in re.finditer(r"tl\.store\(p1 ", kernel)]
    read = [m.start() for m in re.finditer(r"tl\.load\(p1 ", kernel)]
    barrier = kernel.index("\n    " + BARRIER)
    assert stored
    assert read
    assert max(stored) < barrier < kernel.index("for r1offset") < min(read)


def test_what_is_read_as_part_of_a_tile_is_read_before_it_changes() -> None:
    """A column changes in place, which a tile beside it has loaded in another layout."""

    def fn(x: Tensor) -> Tensor:
        copied = x.clone()
        x.select(1, 0).add_(1)
        return copied

    kernel = kernel_with(code(fn, torch.empty(31, 8)), "tl.store")
    assert kernel.index("tl.load") < kernel.index(BARRIER) < kernel.rindex("tl.store")


def test_what_several_threads_load_is_stored_after_all_of_them_did() -> None:
    """A tile of fewer elements than the program has threads: several load one, one stores it."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        result = torch.softmax(x, -1) * y.sum(-1, keepdim=True)
        y.add_(1)
        return result

    kernel = kernel_with(code(fn, torch.empty(64, 4096), torch.empty(64, 16)), "R1BLOCK")
    (load,) = re.finditer(r"tl\.load\((p\d) \+ \(\(xbase\*16", kernel)
    store = kernel.index(f"tl.store({load[1]} ")
    assert load.end() < kernel.index(BARRIER, load.end()) < store


def test_parts_that_lie_apart_do_not_wait() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cat((torch.softmax(x, -1), x + 1), 1)

    text = code(fn, torch.empty(64, 1024))
    assert text.count("tl.store(") == 2
    assert BARRIER not in text


def test_places_that_are_stored_are_not_read_back() -> None:
    """One for each row is stored by one thread; a mask of columns would spread the load over all,
    some of which would read it before it is there."""

    def fn(x: Tensor, i: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        j = ((i * 5 // 3) % 97 * 4 // 7) % 50
        return j, torch.cat((x[j] * 2, z), -1).softmax(-1)

    i = torch.zeros(4096, dtype=torch.int64)
    kernel = kernel_with(code(fn, torch.empty(100, 64), i, torch.empty(4096, 64)), "tl.reduce")
    (store,) = re.finditer(r"tl\.store\((p\d) \+ \(xbase\)", kernel)
    assert f"tl.load({store[1]} " not in kernel
