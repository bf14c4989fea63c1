"""Data that moves from one layout to another: every second element and the ones between are loaded
and stored at once, what is read in pieces is walked as it is read, and tiles suit what is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.as_cuda import as_cuda
from tests.compile.card import CARD, results
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import check
from tests.limits import limit
from tests.pretend import pretended
from tilewright.graph.simplify import simplify
from tilewright.ir.expr import loads, walk
from tilewright.ir.program import Nest
from tilewright.lower.graph import lower
from tilewright.testing import run_and_get_code

Fn = Callable[..., Any]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat((-high, low), -1) * sin).to(x.dtype).contiguous()


def turned_around(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim()))).contiguous()


def _bfloat16(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


CASES: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "rotation": (rotated, (_bfloat16(3, 5, 24), torch.randn(5, 12), torch.randn(5, 12))),
    "rotation of halves": (halves, (_bfloat16(2, 5, 3, 80), *torch.randn(2, 5, 80))),
    "average": (lambda x: F.avg_pool2d(x, 2), (_bfloat16(3, 5, 10, 12),)),
    "average of odd planes": (lambda x: F.avg_pool2d(x, 2), (_bfloat16(3, 5, 11, 13),)),
    "average of odd rows": (lambda x: F.avg_pool2d(x, 2), (_bfloat16(3, 2, 11, 12),)),
    "average of some planes": (
        lambda x: F.avg_pool2d(x[:, :4], 2), (_bfloat16(2, 6, 16, 32),)),
    "largest": (lambda x: F.max_pool2d(x, 3, 2, 1), (torch.randn(2, 3, 10, 14),)),
    "between pairs": (
        lambda x: x[:, 2::2] * x[:, 3::2] - x[:, 1:-1:2], (torch.randn(7, 38),)),
    "differences": (lambda x: x[:, ::2] - x[:, 1::2], (torch.randn(7, 38),)),
    "beside a constant": (
        lambda x: torch.stack((x, torch.ones_like(x)), -1) * 2, (torch.randn(7, 33),)),
    "turned": (
        lambda x, y: torch.stack((x.t() + y, x.t() - y), -1),
        (torch.randn(40, 33), _bfloat16(33, 40))),
    "an odd count": (lambda x, y: torch.stack((x, -y), -1), (_bfloat16(257, 257),) * 2),
    "turned around": (turned_around, (_bfloat16(14, 24, 9, 11),)),
    "turned short rows": (turned_around, (_bfloat16(300, 131),)),
    "turned into every second": (
        lambda x, y: y[:, ::2].copy_(x.t()), (torch.randn(40, 33), torch.randn(33, 80))),
    "interleaved planes": (lambda x: F.pixel_shuffle(x, 2) * 2, (_bfloat16(3, 8, 5, 7),)),
    "in the place of one": (
        lambda x: x.copy_(torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2)),
        (torch.randn(7, 34),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *(a.clone() for a in args))


@pytest.mark.parametrize("name", ["rotation", "rotation of halves", "average", "turned around"])
def test_values_of_sizes_that_are_not_known(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args, dynamic=True)


def test_a_window_is_loaded_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(lambda x: F.avg_pool2d(x, 2), _bfloat16(64, 64, 32, 32))
    assert build(kernel).widest("ld.global") == 16


def test_what_is_between_pairs_is_loaded_in_pairs() -> None:
    (kernel,) = kernels_of(CASES["between pairs"][0], torch.empty(4096, 512))
    assert kernel.text.count("tl.load") == kernel.text.count("tl.split") == 2


def test_a_rotation_of_pairs_moves_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(rotated, _bfloat16(64, 512, 64), *torch.randn(2, 512, 32))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert kernel.text.count("tl.store") == 1


def test_every_second_element_of_another_plane_moves_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(lambda x: F.pixel_shuffle(x, 2), _bfloat16(32, 16, 64, 64))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16


@pytest.mark.parametrize("size", [(257, 257), (3, 64, 32)])
def test_a_stack_of_columns_is_one_kernel(size: tuple[int, ...]) -> None:
    x, y = _bfloat16(*size), _bfloat16(*size)
    with as_cuda():
        found, code = run_and_get_code(
            torch.compile(lambda x, y: torch.stack((x, y * 2), -1), backend="tilewright"), x, y
        )
    torch.testing.assert_close(found, torch.stack((x, y * 2), -1))
    text = "\n".join(code)
    assert text.count("@triton.jit") == text.count("tl.join") == 1


@pytest.mark.parametrize(("size", "dim", "loops"), [
    ((100, 80), 1, 1), ((100, 8000), 1, 1), ((100, 80), 0, 1), ((1, 100, 80), 1, 1),
])  # fmt: skip
@pretended
def test_pieces_of_a_concatenation_are_one_loop(
    size: tuple[int, ...], dim: int, loops: int
) -> None:
    with FakeTensorMode():
        x = torch.empty(size, device="cuda")
        gm = make_fx(lambda x, y: [torch.cat((x, y * 2), dim)])(x, x.clone())
    simplify(gm)
    assert len(lower(gm, CARD).nodes) == loops


@pytest.mark.parametrize(("window", "columns"), [
    ((3, 2, 1), 7), ((2, 2, 1, 1, True), 7), ((3, 1, 1, 2), 7), ((3, 2, 1), 18), ((5, 2, 2), 18),
])  # fmt: skip
@pretended
def test_values_next_to_padding(window: tuple[Any, ...], columns: int) -> None:
    x = _bfloat16(2, 3, 9, columns)
    x.masked_fill_(torch.rand(x.shape) < 0.3, float("-inf"))
    x[1, :, 4, 0] = float("nan")

    def fn(x: Tensor) -> Any:
        return F.max_pool2d(x, *window, return_indices=True)

    found = [*results(fn, x), *results(lambda x: fn(x)[0], x)]
    for actual, expected in zip(found, (*fn(x), fn(x)[0]), strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("side", [15, 64])
@pretended
def test_padding_of_windows_has_no_mask(side: int) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, side, side, dtype=torch.bfloat16, device="cuda")
        gm = make_fx(lambda x: [F.max_pool2d(x, 3, 2, 1)])(x)
    simplify(gm)
    (nest,) = lower(gm, CARD).nodes
    assert isinstance(nest, Nest)
    assert all(len(n.src) == 1 for n in loads(*nest.exprs))


@pretended
def test_inputs_of_twice_as_many_outputs_are_found_by_integers() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 16, 16, device="cuda")
        gm = make_fx(lambda x: [F.interpolate(x, scale_factor=2, mode="bilinear")])(x)
    simplify(gm)
    (nest,) = lower(gm, CARD).nodes
    assert isinstance(nest, Nest)
    assert not any(e.op == "cast" for n in loads(*nest.exprs) for e in walk(n.src[0]))


@pretended
def test_gradients_of_twice_as_many_outputs_are_gathered_at_once() -> None:
    back = torch.ops.aten.upsample_bilinear2d_backward
    for align, passes in ((False, 1), (True, 2)):
        with FakeTensorMode():
            way = torch.empty(2, 3, 32, 32, dtype=torch.bfloat16, device="cuda")
            gm = make_fx(back)(way, (32, 32), (2, 3, 16, 16), align)
        simplify(gm)
        assert len(lower(gm, CARD).nodes) == passes


def test_no_sign_is_divided() -> None:
    (kernel,) = kernels_of(lambda x: torch.roll(x, 3, -1), _bfloat16(626, 7353))
    assert "mul.hi.s32" not in build(kernel).ptx


BLOCKS: dict[str, tuple[Fn, tuple[int, ...], dict[str, int]]] = {
    "elements apart": (
        lambda x: F.max_pool2d(x, 3, 2, 1), (64, 64, 31, 31), {"XBLOCK": 256}),
    "pieces of rows": (
        lambda x: halves(x, x[0, :, 0], x[1, :, 0]), (11, 301, 16, 80), {"XBLOCK": 512}),
    "tables of all heads": (
        lambda x: halves(x, x[0, :, 0], x[1, :, 0]), (11, 1024, 16, 64), {"XBLOCK": 512}),
    "tables of one head": (
        lambda x: halves(x, x[0, :, 0], x[1, :, 0]), (99, 1024, 1, 64), {"XBLOCK": 2048}),
    "a second tile for six columns": (
        lambda x: x.permute(0, 2, 1).contiguous(), (128, 134, 1909),
        {"YBLOCK": 64, "XBLOCK": 256}),
    "numbers of two widths": (lambda x: x.float(), (4096, 8192), {"XBLOCK": 1024}),
    "one width": (lambda x: x * 2, (4096, 8192), {"XBLOCK": 2048}),
    "two widths and a long function": (
        lambda x: F.gelu(x).float(), (4096, 8192), {"XBLOCK": 2048}),
    "long rows that are scaled": (
        lambda x: F.relu(x * x[:, :1]), (10560, 16384), {"YBLOCK": 1, "XBLOCK": 2048}),
    "short columns as one": (turned_around, (14, 1024, 96, 96), {"YBLOCK": 128, "XBLOCK": 128}),
    "those of odd rows": (turned_around, (14, 1024, 95, 95), {"YBLOCK": 238, "XBLOCK": 64}),
    "rows that begin anywhere": (
        lambda x: x.permute(0, 2, 1).contiguous(), (159, 363, 1024),
        {"ZBLOCK": 1, "YBLOCK": 104, "XBLOCK": 128}),
    "matrices between each other": (turned_around, (4929, 8, 893), {"YBLOCK": 112, "XBLOCK": 128}),
    "a few columns": (turned_around, (683464, 173), {"YBLOCK": 173, "XBLOCK": 128}),
    "rows that begin with sixteen bytes": (
        lambda x: x.permute(0, 2, 1).contiguous(), (159, 384, 1024),
        {"YBLOCK": 128, "XBLOCK": 128}),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str) -> None:
    fn, size, blocks = BLOCKS[name]
    (kernel,) = kernels_of(fn, torch.empty(size, dtype=torch.bfloat16))
    assert kernel.config.kwargs == blocks


@pytest.mark.parametrize(("head", "block"), [(96, 1024), (64, 2048)])
def test_blocks_of_rotations_of_pairs(head: int, block: int) -> None:
    (kernel,) = kernels_of(rotated, torch.empty(64, 512, head, dtype=torch.bfloat16),
                           *torch.empty(2, 512, head // 2))  # fmt: skip
    assert kernel.config.kwargs == {"XBLOCK": block}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [
    (517, 301), (260, 259), (304, 301), (14, 24, 17, 19), (257, 3, 67), (301, 2, 150), (305, 70),
])  # fmt: skip
def test_values_of_odd_rows_that_are_turned(
    dtype: torch.dtype, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "TRANSPOSED_BYTES", 0)
    check(turned_around, torch.randn(size).to(dtype))


@pytest.mark.parametrize("size", [(3, 47, 725), (95, 1001), (2, 351, 357), (2, 356, 360)])
def test_values_of_matrices_that_are_turned(
    size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "TRANSPOSED_BYTES", 0)
    (kernel,) = check(lambda x: x.transpose(-1, -2).contiguous(), torch.randn(size).bfloat16())
    assert "tri_moves" in kernel.text


@pytest.mark.parametrize(("size", "dtype"), [
    ((8191, 1501), torch.bfloat16), ((8191, 1501), torch.float32),
    ((14, 1024, 31, 31), torch.bfloat16), ((321, 132072), torch.bfloat16),
    ((43963, 2048), torch.bfloat16),
])  # fmt: skip
def test_odd_rows_are_turned_sixteen_bytes_at_once(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    (kernel,) = kernels_of(turned_around, torch.empty(size, dtype=dtype))
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16 and not made.spills


def test_tiles_of_short_rows_are_beside_each_other() -> None:
    (kernel,) = kernels_of(turned_around, torch.empty(400000, 136, dtype=torch.bfloat16))
    assert kernel.config.kwargs == {"YBLOCK": 64, "XBLOCK": 256}
    assert "ybase = (pid % yblocks) * YBLOCK" in kernel.text


def test_short_rows_are_read_one_after_the_other() -> None:
    (kernel,) = kernels_of(turned_around, torch.empty(1792, 512, 16, 16, dtype=torch.bfloat16))
    assert "tl.load(p0 + ((xbase*131072 + ybase)))" in kernel.text


@pytest.mark.parametrize(("fn", "places", "blocks"), [
    (lambda x, i: x[i], (4096,), {"YBLOCK": 2, "XBLOCK": 1024}),
    (lambda x, i: x.gather(1, i), (4096, 2311), {"XBLOCK": 4096}),
])  # fmt: skip
def test_blocks_of_what_is_looked_up(
    fn: Fn, places: tuple[int, ...], blocks: dict[str, int]
) -> None:
    (kernel,) = kernels_of(fn, torch.empty(4096, 2311, dtype=torch.bfloat16),
                           torch.zeros(places, dtype=torch.int64))  # fmt: skip
    assert kernel.config.kwargs == blocks


def test_no_load_waits_for_a_store() -> None:
    (kernel,) = kernels_of(halves, _bfloat16(2, 5, 3, 80), *torch.randn(2, 5, 80))
    assert kernel.text.count("tl.store") == 2
    assert kernel.text.rindex("tl.load") < kernel.text.index("tl.store")
