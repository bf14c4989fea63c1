"""Kernels compiled for cards that are not there: the width of their accesses, what spills."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_fake_cuda
from tests.compile.cubin import build, kernels_of
from tests.cpu import test_ir_ops as rows
from tests.fuzz.build import Build
from tilewright.codegen.triton.generate import generate
from tilewright.ir.build import op
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Store
from tilewright.runtime.triton_build import SPILLED
from tilewright.schedule.plan import schedule
from tilewright.target import Target
from tilewright.testing import run_and_get_code


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


WIDE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "pointwise": (lambda x: F.gelu(x) * 2, (512, 1024)),
    "broadcast": (lambda x: x * x[0], (512, 1024)),
    "softmax": (lambda x: torch.softmax(x, -1), (512, 4096)),
    "layer norm": (lambda x: F.layer_norm(x, (4096,)), (512, 4096)),
    "masked rows": (lambda x: torch.softmax(x, -1), (512, 1008)),
    "transposed": (lambda x: x.t().contiguous(), (1024, 1024)),
    "halves": (lambda x: F.silu(x[:, :512]) * x[:, 512:], (512, 1024)),
    "long rows": (lambda x: x - x.amax(-1, keepdim=True), (64, 65536)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WIDE)
def test_accesses_have_sixteen_bytes(name: str, dtype: torch.dtype) -> None:
    fn, shape = WIDE[name]
    for kernel in kernels_of(fn, _empty(*shape, dtype=dtype)):
        made = build(kernel)
        assert made.widest("ld.global") == 16, kernel.text
        if "tl.store" in kernel.text and kernel.name.split("_")[1] != "red":
            assert made.widest("st.global") == 16, kernel.text
        assert made.spills <= SPILLED


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["pointwise", "softmax", "transposed", "long rows"])
def test_every_architecture(name: str, target: str) -> None:
    fn, shape = WIDE[name]
    for kernel in kernels_of(fn, _empty(*shape), target=target):
        assert build(kernel, target).widest("ld.global") == 16


COMPILED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "columns": (lambda x: (x.sum(0), x.argmax(0)), (_empty(4096, 512),)),
    "few columns": (lambda x: torch.softmax(x, 0), (_empty(512, 512),)),
    "welford": (lambda x: torch.var_mean(x, -1), (_empty(64, 65536),)),
    "logic": (lambda x: (x.any(1), x.all(1)), (_empty(64, 512, dtype=torch.bool),)),
    "scans": (lambda x: (x.cumsum(1), x.cummax(1), x.logcumsumexp(1)),
              (_empty(64, 512, dtype=torch.float32),)),
    "long scan": (lambda x: x.cummax(1), (_empty(8, 40000, dtype=torch.float32),)),
    "gather": (lambda x, i: x[i], (_empty(99, 64), _empty(32, dtype=torch.int64))),
    "fp8": (lambda x: x.to(torch.float8_e4m3fn).to(torch.float32), (_empty(64, 64),)),
    "random": (lambda x: torch.rand_like(x) + x, (_empty(64, 64),)),
    "int64": (lambda x: (x // 7, x % 5, torch.gcd(x, x + 1), x**3),
              (_empty(99, dtype=torch.int64),)),
    "float64": (lambda x: torch.softmax(x, -1), (_empty(64, 128, dtype=torch.float64),)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name: str) -> None:
    fn, args = COMPILED[name]
    for kernel in kernels_of(fn, *args):
        assert build(kernel).spills <= SPILLED


SCATTERED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
             torch.int16, torch.uint8)  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("mode", ["sum", "prod", "amax"])
def test_atomics_of_every_type(mode: str, target: str) -> None:
    for dtype in SCATTERED:
        x, i = _empty(64, 8, dtype=dtype), _empty(32, 8, dtype=torch.int64)
        for kernel in kernels_of(lambda x, i: x.scatter_reduce(0, i, x[:32], mode), x, i,
                                 target=target):  # fmt: skip
            assert build(kernel, target).ptx


ROWS = sorted(set(TABLE) - set(rows.SPECIAL))
AT_ONCE = 12  # rows of one test: those of a type read the same, and are one kernel


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("names", [ROWS[k : k + AT_ONCE] for k in range(0, len(ROWS), AT_ONCE)],
                         ids=lambda names: f"{names[0]} to {names[-1]}")  # fmt: skip
def test_every_row_compiles(names: list[str]) -> None:
    """The interpreter takes text that the compiler does not."""
    b = Build()
    (i,) = b.loops(64)
    results: list[str] = []
    most = max(TABLE[name].arity for name in names)
    given: dict[torch.dtype, list[str]] = {}
    for name in names:
        for dtype in rows._types(name):
            inputs = given.setdefault(dtype, [b.input(64, dtype=dtype) for _ in range(most)])
            made = op(name, *(b.at(x, i) for x in inputs[: TABLE[name].arity]))
            results.append(b.buffer((64,), made.dtype))
            b.nest([i], Store(results[-1], i, made))
    program = b.returns(*results)
    for step in schedule(program).steps:
        assert build(generate(program, step.group, Target("sm_90")), config=-1).ptx


def test_wide_indices_when_sizes_need_them() -> None:
    small, large = (kernels_of(lambda x: x + 1, torch.empty(1, dtype=torch.int8).expand(n))[0]
                    for n in (1 << 20, 1 << 32))  # fmt: skip
    assert ".to(tl.int64)" not in small.text
    assert "tl.program_id(0).to(tl.int64)" in large.text
    assert not small.assume and not large.assume


def test_rows_that_are_far_apart_are_wide_where_they_are_walked() -> None:
    with as_fake_cuda():
        x = torch.zeros((1 << 21) + 3, 1025, dtype=torch.bfloat16)  # of which nothing is touched
        compiled = torch.compile(lambda x: x.sum(0), backend="tilewright", dynamic=False)
        _, code = run_and_get_code(compiled, x)
    (place,) = re.findall(r"load\(p0 \+ (.*rindex.*)\*65600", code[-1])
    assert place.endswith("(rindex).to(tl.int64)")


def test_places_found_in_parts_are_wide_when_sizes_need_it() -> None:
    for size, wide in ((1 << 30, False), ((1 << 31) + 77, True)):
        with as_fake_cuda():
            x = torch.zeros(size, dtype=torch.int8)  # of which nothing is touched
            compiled = torch.compile(lambda x: x.argmax(), backend="tilewright", dynamic=False)
            _, code = run_and_get_code(compiled, x)
        last = code[-1].split("def triton_")[-1]
        assert ("having(" in last, "2147483647)" not in last) == (True, wide)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_loops_that_run_ahead_have_a_configuration_that_fits(target: str) -> None:
    """Twenty buffers under way at once are more shared memory than a card has."""
    args = [_empty(4096, 8192, dtype=torch.float32) for _ in range(20)]
    kernel = kernels_of(lambda *xs: sum(xs[1:], xs[0]).sum(0), *args, target=target)[0]
    assert "num_stages=STAGES" in kernel.text
    room = Target(target).shared_memory
    assert build(kernel, target).shared > room
    others = (build(kernel, target, k) for k in range(1, len(kernel.configs)))
    assert any(made.shared <= room and made.spills <= SPILLED for made in others)


def test_loops_do_not_run_ahead_of_their_own_stores() -> None:
    def two_passes(x: Tensor) -> Any:
        y = x * 2
        return y, y - y.amax(0, keepdim=True)

    for kernel in kernels_of(two_passes, _empty(8192, 512, dtype=torch.float32)):
        stored = set(re.findall(r"tl\.store\((p\d+)", kernel.text))
        loaded = set(re.findall(r"tl\.load\((p\d+)", kernel.text))
        assert not (stored & loaded) or "STAGES" not in kernel.text


def test_a_warp_has_rows_that_leave_much_of_a_block_empty() -> None:
    """It has nothing to do there, and shares nothing with others."""
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), _empty(160704, 648))
    made = build(kernel, config=1)
    assert kernel.config.num_warps == 1 and not made.spills and not made.shared
    (kernel,) = kernels_of(lambda x: torch.softmax(x, -1), _empty(160704, 1000))
    assert kernel.config.num_warps > 1


def test_few_warps_have_longer_rows_that_leave_some_of_a_block_empty() -> None:
    """Layer norm of 5120 bfloat16 by eight warps, of 4096 too, which is all of its block."""
    given = [(_empty(9000, n), _empty(n)) for n in (3072, 4096, 5120, 8192)]
    kernels = [kernels_of(lambda x, w: F.layer_norm(x, w.shape, w), *args)[0] for args in given]
    kernels += kernels_of(lambda x: torch.softmax(x, -1), _empty(9000, 6144))
    assert [k.config.num_warps for k in kernels] == [4, 8, 8, 8, 8]


def test_fewer_warps_walk_rows_again_where_much_is_computed() -> None:
    def differ(x: Tensor, y: Tensor) -> Tensor:
        log, other = (torch.log_softmax(t.float(), -1) for t in (x, y))
        return (other.exp() * (other - log).abs()).sum(-1)

    kernel, *_ = kernels_of(differ, _empty(4096, 32000), _empty(4096, 32000))
    one, *_ = kernels_of(lambda x: torch.log_softmax(x, -1), _empty(4096, 64000))
    assert (kernel.config.num_warps, one.config.num_warps) == (16, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_variances_of_columns_are_many_loads_of_few_threads(dtype: torch.dtype) -> None:
    """H200: what joins threads in the end takes as long as what each of them does, so each does
    much: a pair of accumulators for sixteen rows, and all of its loads under way."""
    (kernel,) = kernels_of(lambda x: x.var(1), _empty(1024, 256, 512, dtype=dtype))
    made = build(kernel)
    assert kernel.config.num_warps <= 4
    assert made.widest("ld.global") == 16
    assert len(re.findall(r"ld\.global\S*v4\.b32", made.ptx)) >= 8
    assert made.spills == 0 and made.shared <= 8192


def test_variances_of_rows_in_pieces_stay_in_their_threads() -> None:
    """H200: a group of channels that lie beside each other 301 us, 23 us if what a thread loads is
    what it joins."""
    x = torch.empty(4, 64, 64, 512, dtype=torch.bfloat16).permute(0, 3, 1, 2)
    kernel = kernels_of(lambda x: torch.var_mean(x.reshape(4, 32, -1), -1), x)[0]
    made = build(kernel)
    assert "tri.several_more(" in kernel.text
    assert made.widest("ld.global") == 16 and made.shared <= 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_channels_stay_in_their_threads(dtype: torch.dtype) -> None:
    """H200: rows of 65536 are walked in large blocks, and what neighbours have in common goes
    through no shared memory."""
    x, w = _empty(16, 512, 64, 64, dtype=dtype), _empty(512, dtype=dtype)
    (kernel,) = kernels_of(lambda x, w: F.silu(F.group_norm(x, 32, w, w)), x, w)
    made = build(kernel)
    assert kernel.config.kwargs["RBLOCK"] == 16384
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.shared <= 1024 and made.spills == 0
