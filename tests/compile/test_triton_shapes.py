"""Every form of kernel in Triton's interpreter against eager: tiles, rows, columns, scans,
scatters, gathers, dynamic sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build, kernels_of
from tests.compile.interp import Interpreter, check
from tests.traffic import rotary, rotary_in_turns, rotary_whole
from tilewright.testing import limited, run_and_get_code

Make = Callable[[], tuple[Any, ...]]


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _families(kernels: list[Any]) -> list[str]:
    return [k.name.split("_")[1] for k in kernels]


# ---- the order of rows


def test_products_of_all_rows_are_stored_one_after_the_other() -> None:
    def crossed(x: Tensor) -> Tensor:
        return (x[:, :, None] * x[:, None]).sum(-1)

    (kernel,) = check(crossed, _normal(50, 6, 16), rtol=1e-4, atol=1e-4)
    assert re.search(r"tl\.store\(p1 \+ \(xbase\)", kernel.text)
    (kernel,) = kernels_of(crossed, torch.empty(16384, 26, 16))
    assert kernel.config.kwargs["XBLOCK"] == 256


def test_places_that_planes_have_in_common_are_loaded_once_for_several() -> None:
    def shares(x: Tensor, table: Tensor, places: Tensor) -> Tensor:
        return (x.float() + table[places].permute(2, 0, 1)).softmax(-1).to(x.dtype)

    x, places = _normal(2, 4, 8, 64, dtype=torch.bfloat16), torch.randint(-3, 3, (8, 64))
    (kernel,) = check(shares, x, _normal(3, 4), places)
    (plane,) = re.findall(r"tl\.load\(p0 \+ \(\(rbase \+ (t\d+)", kernel.text)
    assert re.search(rf"{plane} = \(tl\.full\(\[1, 1\], 0, tl\.int32\) \+ xfirst\)", kernel.text)


def test_neighbours_of_points_are_looked_up_once_for_all_channels() -> None:
    def nearest(x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        found = x[:, places]
        most = found.amax(2, keepdim=True)
        return most, found == most

    check(nearest, _normal(2, 9, 32), torch.randint(0, 9, (9, 4)))
    (kernel,) = kernels_of(
        nearest, torch.empty(16, 4096, 64), torch.zeros(4096, 16, dtype=torch.int64)
    )
    assert kernel.config.kwargs["XBLOCK"] == 64


# ---- every second element


@pytest.mark.parametrize("size", [(2, 3, 8, 32), (3, 2, 6, 10)])
def test_images_are_taken_apart_in_pairs(size: tuple[int, ...]) -> None:
    check(lambda x: F.pixel_unshuffle(x, 2), _normal(*size, dtype=torch.bfloat16))
    check(lambda x: F.pixel_unshuffle(x, 2).relu() + 1, _normal(*size))
    (kernel,) = kernels_of(lambda x: F.pixel_unshuffle(x, 2), _normal(4, 8, 64, 64).bfloat16())
    made = build(kernel)
    assert made.widest("ld.global") == 16 and made.widest("st.global") >= 8


# ---- rows that are looked up


def products_of_pairs(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (x[:, i] * x[:, j]).sum(-1)


def test_pairs_of_the_rows_of_a_matrix_are_next_to_each_other() -> None:
    """They are in the cache then."""
    i, j = torch.triu_indices(7, 7, 1)
    (kernel,) = check(products_of_pairs, _normal(50, 7, 33), i, j, rtol=1e-4, atol=1e-4)
    assert "% (21)" in kernel.text and "% (50)" not in kernel.text


@pytest.mark.parametrize("length", [128, 40])
def test_pairs_of_rows_are_folded_in_tiles_and_looked_up_once(length: int) -> None:
    i, j = torch.triu_indices(7, 7, 1)
    with limited("SHORT_ROWS_ELEMENTS", 1):
        (kernel,) = check(products_of_pairs, _normal(50, 7, length), i, j, rtol=1e-4, atol=1e-4)
    assert kernel.text.count("tri.report(") == 2 and "rindex = 32 + rbase" in kernel.text


# ---- pointwise

POINTWISE: dict[str, tuple[Callable[..., Any], Make]] = {
    "broadcast": (lambda x, y: torch.relu(x) * y + 1.5, lambda: (_normal(7, 41), _normal(41))),
    "scalar": (lambda x, y: x * y.sum(), lambda: (_normal(5, 9), _normal(3))),
    "transposed": (lambda x, y: x.t() + y, lambda: (_normal(33, 50), _normal(50, 33))),
    "two transposed": (
        lambda x, y: (x.permute(2, 1, 0) + y.permute(1, 0, 2)).contiguous(),
        lambda: (_normal(12, 10, 18), _normal(10, 18, 12)),
    ),
    "channels last": (
        lambda x: x.permute(0, 2, 3, 1).contiguous() * 2, lambda: (_normal(2, 9, 8, 10),)),
    "cat and pad": (
        lambda x, y: F.pad(torch.cat((x, y), 1), (1, 2)), lambda: (_normal(3, 5), _normal(3, 8))),
    "strided": (lambda x: x[1::3, ::2] - 1, lambda: (_normal(13, 20),)),
    "flip": (lambda x: x.flip(1) + 1, lambda: (_normal(6, 20),)),
    "arange": (lambda x: x + torch.arange(12) * 0.5, lambda: (_normal(5, 12),)),
    "index as number": (
        lambda x: torch.where(torch.arange(12) < 5, x, torch.arange(12).float()),
        lambda: (_normal(5, 12),),
    ),
    "several results": (lambda x: (x.exp(), x.sin() > 0, x.t() * 2), lambda: (_normal(6, 9),)),
    "half": (lambda x: (x * 3 + 1).relu(), lambda: (_normal(99, dtype=torch.float16),)),
    "bfloat16": (lambda x, y: F.gelu(x) * y, lambda: (
        _normal(99, dtype=torch.bfloat16), _normal(99, dtype=torch.bfloat16))),
    "integers": (
        lambda x: (x // 3, x % 5, x * x, x << 2), lambda: (torch.randint(-99, 99, (77,)),)),
    "bytes": (lambda x: (x + x, x * 7), lambda: (torch.randint(0, 255, (77,)).byte(),)),
    "bool": (lambda x, y: (x & y, x ^ y, ~x, x.float()), lambda: (
        _normal(40) > 0, _normal(40) > 0)),
    "empty": (lambda x: x + 1, lambda: (_normal(0, 4),)),
    "zero-dimensional": (lambda x: x * 2 + 1, lambda: (_normal(),)),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    fn, make = POINTWISE[name]
    check(fn, *make())


def test_tiles_follow_the_layouts() -> None:
    (kernel,) = check(lambda x, y: x.t() + y, _normal(33, 50), _normal(50, 33))
    assert [block for block, _ in kernel.config.blocks] == ["YBLOCK", "XBLOCK"]
    (kernel,) = check(lambda x, y: x + y, _normal(33, 50), _normal(33, 50))
    assert [block for block, _ in kernel.config.blocks] == ["XBLOCK"]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
)
def test_eight_bit_floats_round_as_in_eager(dtype: torch.dtype) -> None:
    numbers = torch.cat(
        (_normal(200) * 40, _normal(60) / 900, torch.tensor([0.0, -0.0, 448.0, 1e9]))
    )
    (out,) = (check(lambda x: x.to(dtype).view(torch.uint8).float(), numbers),)
    assert out
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    check(lambda x: x.to(torch.float32), every)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_card_rounds_to_eight_bits_itself(dtype: torch.dtype) -> None:
    """By an instruction for two numbers; what it makes of large ones matters if there are any."""
    x = torch.empty(4096, 512)
    (kernel,) = kernels_of(lambda x: x.clamp(-448, 448).to(dtype), x)
    assert "True)" in kernel.text and "cvt.rn.satfinite" in build(kernel).ptx
    (kernel,) = kernels_of(lambda x: x.clamp(-448, 1e6).to(dtype), x)
    assert "False)" in kernel.text and "cvt.rn.satfinite" in build(kernel).ptx
    (kernel,) = kernels_of(lambda x: x.to(dtype), x, target="sm_80")
    assert "cvt.rn.satfinite" not in build(kernel, "sm_80").ptx


# ---- rows and columns

ROWS: dict[str, tuple[Callable[..., Any], Make]] = {
    "softmax": (lambda x: torch.softmax(x, -1), lambda: (_normal(5, 130),)),
    "softmax of columns": (lambda x: torch.softmax(x, 0), lambda: (_normal(130, 7),)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (96,), w, b),
        lambda: (_normal(6, 96), _normal(96), _normal(96)),
    ),
    "layer norm in bfloat16": (
        lambda x, w, b: F.layer_norm(x, (96,), w, b),
        lambda: tuple(t.bfloat16() for t in (_normal(6, 96), _normal(96), _normal(96))),
    ),
    "residual": (
        lambda x, r: (x + r, F.rms_norm(x + r, (64,))), lambda: (_normal(6, 64), _normal(6, 64))),
    "group norm": (lambda x: F.group_norm(x, 3), lambda: (_normal(2, 12, 5, 4),)),
    "several sums": (lambda x: (x.sum(1), x.amax(1), x.argmin(1)), lambda: (_normal(9, 77),)),
    "columns": (lambda x: (x.sum(0), x.amax(0)), lambda: (_normal(90, 33),)),
    "long columns": (lambda x: x.sum(0), lambda: (_normal(700, 33),)),
    "middle": (lambda x: x.mean(1), lambda: (_normal(4, 50, 9),)),
    "outer and inner": (lambda x: torch.var_mean(x, (0, 2)), lambda: (_normal(6, 5, 40),)),
    "everything": (lambda x: x.sum(), lambda: (_normal(30, 41),)),
    "logic": (
        lambda x: (x.any(1), x.all(1), x.sum(1)), lambda: (_normal(9, 40) > 0,)),
    "nan": (lambda x: (x.amax(1), x.argmax(1), x.amin(1)),
            lambda: (torch.where(_normal(9, 40) > 1, torch.nan, _normal(9, 40)),)),
    "prologue and epilogue": (
        lambda x, y: (x * y).sum(1, keepdim=True).sqrt() + y, lambda: (
            _normal(9, 40).abs(), _normal(9, 40).abs())),
    "integers": (lambda x: (x.sum(1), x.amax(1), x.prod(1)), lambda: (
        torch.randint(-3, 3, (5, 20)),)),
    "cross entropy": (lambda x, t: F.cross_entropy(x, t), lambda: (
        _normal(7, 50), torch.randint(0, 50, (7,)))),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str) -> None:
    fn, make = ROWS[name]
    check(fn, *make())


@pytest.mark.parametrize(
    "fn", [lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, x.shape[1:]),
           lambda x: (x.argmax(1), x.var(1), x.any(1)), lambda x: x - x.amax(1, keepdim=True)]
)  # fmt: skip
def test_rows_too_long_for_registers(fn: Callable[..., Any]) -> None:
    made = check(fn, _normal(17, 33001), rtol=1e-5, atol=1e-5)
    assert "red" in _families(made)


def test_a_row_of_registers_is_read_once() -> None:
    (kernel,) = check(lambda x: torch.softmax(x, -1), _normal(5, 128))
    assert kernel.name.startswith("triton_per_fused")
    assert kernel.text.count("tl.load") == 1
    assert "mask" not in kernel.text  # every row is exactly one block


# ---- scans

SCANS: dict[str, Callable[..., Any]] = {
    "sum": lambda x: x.cumsum(-1),
    "along columns": lambda x: x.cumsum(0),
    "product": lambda x: x.cumprod(-1),
    "largest": lambda x: x.cummax(-1),
    "smallest": lambda x: x.cummin(-1),
    "exponentials": lambda x: x.logcumsumexp(-1),
}


@pytest.mark.parametrize("name", SCANS)
def test_scan(name: str) -> None:
    check(SCANS[name], _normal(6, 90), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sum", "largest", "exponentials"])
def test_long_scan_carries(name: str) -> None:
    made = check(SCANS[name], _normal(3, 17000) / 8, rtol=1e-3, atol=1e-3)
    assert _families(made) == ["red"]


# ---- gathers and scatters


def test_gather() -> None:
    at = torch.randint(0, 9, (5, 3))
    check(lambda x, i: x[i] * 2, _normal(9, 4), at)
    check(lambda x, i: x.gather(0, i), _normal(9, 4), torch.randint(0, 9, (5, 4)))
    check(lambda x, i: F.embedding(i, x), _normal(9, 4), at)


@pytest.mark.parametrize("width", [64, 100, 2048])
@pytest.mark.parametrize("config", range(3))
def test_rows_are_looked_up_once(width: int, config: int) -> None:
    (kernel,) = check(lambda x, i: F.embedding(i, x) * 2, _normal(9, width),
                      torch.randint(0, 9, (5, 3)), config=config)  # fmt: skip
    position = next(line for line in kernel.text.splitlines() if "tl.load" in line)
    assert "ybase" in position and "xbase" not in position


def test_short_rows_are_looked_up_by_element() -> None:
    (kernel,) = check(lambda x, i: x[i], _normal(9, 4), torch.randint(0, 9, (5, 3)))
    assert "YBLOCK" not in kernel.text


@pytest.mark.parametrize("bad", [100, 9, -10])
def test_bad_index_is_reported(bad: int) -> None:
    torch._dynamo.reset()
    fn = torch.compile(lambda x, i: x[i], backend=Interpreter())
    assert fn(_normal(9), torch.tensor([0, -9, 8])).shape == (3,)
    with pytest.raises(IndexError, match="out of range"):
        fn(_normal(9), torch.tensor([0, bad, 1]))


SCATTERS: dict[str, Callable[..., Any]] = {
    "add": lambda x, i, v: x.scatter_add(0, i, v),
    "put": lambda x, i, v: x.index_put((i[:, 0],), v, accumulate=True),
    "largest": lambda x, i, v: x.scatter_reduce(0, i, v, "amax"),
    "smallest": lambda x, i, v: x.scatter_reduce(0, i, v, "amin"),
    "product": lambda x, i, v: x.scatter_reduce(0, i, v, "prod"),
    "set": lambda x, i, v: x.scatter(0, i[:1], v[:1]),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64,
                                   torch.int8])  # fmt: skip
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(name: str, dtype: torch.dtype) -> None:
    whole = not dtype.is_floating_point
    x, v = (torch.randint(-2, 3, s).to(dtype) if whole else _normal(*s).to(dtype)
            for s in ((6, 5), (8, 5)))  # fmt: skip
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}
    check(SCATTERS[name], x, torch.randint(0, 6, (8, 5)), v, **tolerance)


def test_masked_put() -> None:
    check(lambda x, m: x.masked_fill(m, 3.0), _normal(7, 9), _normal(7, 9) > 0)
    check(lambda x, m, v: torch.where(m, v, x), _normal(7, 9), _normal(7, 9) > 0, _normal(9))


# ---- sizes


@pytest.mark.parametrize(
    "fn", [lambda x, y: x.t() * y, lambda x, y: torch.softmax(x, -1), lambda x, y: x.sum(0),
           lambda x, y: F.layer_norm(x, x.shape[-1:]), lambda x, y: torch.cat((x, y.t()), 1),
           lambda x, y: x.cumsum(1), lambda x, y: x.reshape(-1).mean(),
           lambda x, y: F.local_response_norm(x[None], 2)]
)  # fmt: skip
def test_dynamic_sizes(fn: Callable[..., Any]) -> None:
    made = check(fn, _normal(19, 70), _normal(70, 19), dynamic=True)
    assert any(p.kind == "int" for k in made for p in k.params)


def test_parts_that_share_a_launch_on_the_cpu() -> None:
    made = check(lambda x, y: torch.hstack((x, y)), _normal(5, 3), _normal(5, 4))
    assert all("tl.store" in k.text for k in made)


@pytest.mark.parametrize("fn", [torch.rand_like, torch.randn_like, lambda x: F.dropout(x, 0.4)])
def test_random_numbers_are_those_of_the_other_kernels(fn: Callable[..., Any]) -> None:
    drawn: list[Tensor] = []
    for backend in (Interpreter(), "tilewright"):
        torch._dynamo.reset()
        torch.manual_seed(5)
        drawn.append(torch.compile(fn, backend=backend)(_normal(40, 7).fill_(2.0)))
    torch.testing.assert_close(*drawn)
    assert drawn[0].unique().numel() > 1


@pytest.mark.parametrize("config", range(1, 5))
def test_other_configurations(config: int) -> None:
    check(lambda x: torch.softmax(x, -1), _normal(5, 130), config=config)
    check(lambda x: x.t() * 2, _normal(33, 65), config=config)
    check(lambda x: x.sum(0), _normal(300, 65), config=config)


@pytest.mark.parametrize(("fn", "sizes", "each"), [
    (lambda x, y: x + y, (1 << 22,) * 2, 8),
    (lambda x, y, z: (x + y * z, x - y * z), (1 << 22,) * 3, 4),
    (lambda x, y: (x[:, None] * y).sin(), (8192, 256), 8),
])  # fmt: skip
def test_threads_have_few_of_many_floats_and_of_long_functions(
    fn: Callable[..., Any], sizes: tuple[int, ...], each: int
) -> None:
    (kernel,) = kernels_of(fn, *(torch.empty(size) for size in sizes))
    block = math.prod(size for _, size in kernel.config.blocks)
    assert block == each * 32 * kernel.config.num_warps


def test_rows_of_dear_functions_and_of_much_that_is_empty_have_few_threads() -> None:
    x = torch.empty(8192, 1024, dtype=torch.bfloat16)
    for fn, warps in (
        (lambda x: torch.softmax(x, -1), 4),
        (lambda x: torch.softmax(x.float().tanh(), -1).to(x.dtype), 2),
    ):
        (kernel,) = kernels_of(fn, x)
        assert kernel.config.num_warps == warps
    x = torch.empty(8192, 1152, dtype=torch.bfloat16)
    (kernel,) = kernels_of(lambda x: F.layer_norm(x, (1152,)), x)
    assert kernel.config.num_warps == 1


def test_few_threads_meet_often() -> None:
    x = torch.empty(16384, 4096, dtype=torch.bfloat16)
    (kernel,) = kernels_of(lambda x: (x.amax(-1), x.amin(-1)), x)
    assert kernel.config.num_warps == 8
    for rows, warps in ((16384, 4), (132, 8)):
        (kernel,) = kernels_of(lambda x: (x.amax(-1), x.amin(-1), (x > 1).sum(-1)), x[:rows])
        assert kernel.config.num_warps == warps


def test_all_rows_that_are_folded_are_under_way_before_the_first_is() -> None:
    (kernel,) = check(lambda x, y: (x.amax(-1) + y.amax(-1), x.sum(-1)), _normal(9, 77),
                      _normal(9, 77))  # fmt: skip
    assert kernel.text.rindex("tl.load(") < kernel.text.index("tl.reduce(")


@pytest.mark.parametrize(
    ("fn", "loops"),
    [(lambda x: torch.softmax(x, -1), 4), (lambda x: torch.logsumexp(x, -1), 2),
     (lambda x: F.log_softmax(x, -1), 4),
     (lambda x: F.cross_entropy(x, torch.arange(17) * 1000, reduction="none"), 2)]
)  # fmt: skip
def test_long_softmax_folds_in_one_pass(fn: Callable[..., Any], loops: int) -> None:
    """OS-4: also where the first or the last blocks of a row are all minus infinity."""
    x = _normal(17, 33001) * 9
    x[7, :20000], x[8, 10000:] = -torch.inf, -torch.inf
    x[1, 7], x[2, 9], x[3, 5], x[4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x[5], x[6] = -1e9, torch.finfo(torch.float32).min  # all masked: each has the same share
    (kernel,) = check(fn, x, rtol=1e-5, atol=1e-5)
    assert "tri.online" in kernel.text
    # the second writes what has the row's size; each has a loop without masks
    assert kernel.text.count("for roffset") == loops


@pytest.mark.parametrize("config", range(3))
@pytest.mark.parametrize(("fn", "loops"), [(lambda x: torch.softmax(x, 0), 2),
                                           (lambda x: torch.logsumexp(x, 0), 1)])  # fmt: skip
def test_long_softmax_of_columns_too(fn: Callable[..., Any], loops: int, config: int) -> None:
    x = _normal(2201, 33) * 9
    x[7, 1], x[9, 2], x[5, 3], x[:, 4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    (kernel,) = check(fn, x, config=config, rtol=1e-5, atol=1e-5)
    assert "tri.online" in kernel.text
    assert kernel.text.count("for roffset") == loops


# ---- operations that need not be exact


@pytest.mark.parametrize("fn", [torch.erf, F.gelu, torch.sigmoid,
                                F.silu, torch.exp, torch.tanh])  # fmt: skip
def test_coarse_functions_differ_in_no_visible_bit(fn: Callable[..., Any]) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    x = torch.cat((torch.linspace(-90, 90, 500), torch.logspace(-20, 0, 200), torch.randn(500),
                   special)).bfloat16()  # fmt: skip
    torch._dynamo.reset()
    backend = Interpreter()
    made = torch.compile(fn, backend=backend)(x)
    torch.testing.assert_close(made, fn(x.double()).bfloat16(), equal_nan=True, rtol=2**-7,
                               atol=1e-37 if fn in (torch.erf, torch.tanh) else 1e-6)  # fmt: skip
    text = backend.kernels[0].text
    assert "tri.fast_" in text or "tri.erf_beside_one" in text


# ---- parts that have their operands in common


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


@pytest.mark.parametrize(("fn", "width"), [(_rotated, 8), (_turned, 16)])
def test_halves_of_a_rotary_embedding_read_each_element_once(fn: Callable[..., Any],
                                                             width: int) -> None:  # fmt: skip
    """A concatenation whose parts read the same: one kernel over one part, with a store for each
    and no masks."""
    (kernel,) = check(fn, _normal(2, 3, 12, 16), _normal(12, width), _normal(12, width))
    assert kernel.text.count("tl.store") == 2
    assert kernel.text.count(" >= (8)") == kernel.text.count(" < (8)") == 0


def test_the_gradient_at_labels_is_not_summed_over_all_classes() -> None:
    x, t = _normal(40, 301), torch.randint(0, 301, (40,))
    t[3] = -100
    made: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = x.to(dtype).requires_grad_()
        torch._dynamo.reset()
        backend = Interpreter()
        loss = torch.compile(lambda x, t: F.cross_entropy(x, t), backend=backend)(leaf, t)
        (found,) = torch.autograd.grad(loss, leaf)
        wide = x.to(dtype).double().requires_grad_()
        (expected,) = torch.autograd.grad(F.cross_entropy(wide, t), wide)
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1e-4)
        made.append(backend.kernels[-1].text)
    assert not any("tl.reduce" in text for text in made)


@pytest.mark.parametrize("form", [rotary, rotary_whole, rotary_in_turns])
@pytest.mark.parametrize("width", [12, 64])
def test_lo_13_norm_then_rope_is_one_kernel(form: Callable[..., Tensor], width: int) -> None:
    half = width if form is rotary_whole else width // 2
    tables = torch.randn(2, 7, half)
    kernels = check(form, torch.randn(2, 3, 7, width), torch.randn(width), *tables.unbind(),
                    rtol=1e-5, atol=1e-5)  # fmt: skip
    assert len(kernels) == 1


def _code(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, list[str]]:
    with as_cuda():
        found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), *args)
    return found, "\n".join(code).split("@triton.jit")[1:]


LITTLE_LONGER: dict[str, Callable[..., Any]] = {
    "sum": lambda x: x.float().sum(-1),
    "moments": lambda x: torch.std_mean(x.float(), -1),
    "where": lambda x: x.argmax(-1),
}


@pytest.mark.parametrize("name", LITTLE_LONGER)
def test_rows_little_longer_than_a_power_of_two_are_two_tiles(name: str) -> None:
    fn = LITTLE_LONGER[name]
    for x in (_normal(9, 136, dtype=torch.bfloat16), _normal(5, 148)):
        (kernel,) = check(fn, x)
        assert "redge" in kernel.text and kernel.config.kwargs["RBLOCK"] == 128
    for length in (128, 120, 168):
        (kernel,) = kernels_of(fn, torch.empty(9, length))
        assert "redge" not in kernel.text


def test_a_long_row_that_is_turned_is_stored_by_a_kernel_of_its_own() -> None:
    """Walking it, a kernel would store it element by element; one of tiles turns it."""

    def f(x: Tensor) -> Tensor:
        return (x - x.mean((1, 2), keepdim=True)).transpose(1, 2).contiguous()

    x = torch.randn(20, 300, 64)
    found, kernels = _code(f, x)
    torch.testing.assert_close(found, f(x))
    assert any("YBLOCK" in text and "tl.store" in text for text in kernels)
    assert not any("for roffset" in text and "YBLOCK" in text for text in kernels)
    plain, walked = _code(lambda x: x - x.mean((1, 2), keepdim=True), x)
    torch.testing.assert_close(plain, x - x.mean((1, 2), keepdim=True))
    assert len(walked) == 1


@pytest.mark.parametrize("side", [32, 25])
def test_what_pieces_of_a_row_have_in_common_is_loaded_once_for_each(side: int) -> None:
    """The scale of a channel, once for all neighbours of a thread; where blocks of the loop lie
    inside channels, once for each."""
    x, w = torch.randn(20, 32, side, side), torch.randn(32)
    found, (text,) = _code(lambda x, w: F.group_norm(x, 1, w), x, w)
    torch.testing.assert_close(found, F.group_norm(x, 1, w), rtol=1e-4, atol=1e-5)
    assert ("tri.each(" in text) == (side == 32)
    x, w = torch.empty(600, 64, side, side), torch.empty(64)  # enough rows for short blocks
    (kernel,) = kernels_of(lambda x, w: F.group_norm(x, 1, w), x, w)
    assert ("(rfirst + rend - roffset)) // (1024)" in kernel.text) == (side == 32)


def test_remainders_follow_the_lanes_inside_a_piece() -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return x - (x * v[:, None] * w).amax((1, 2), keepdim=True)

    x, v, w = torch.randn(20, 20, 2048), torch.randn(20), torch.randn(2048)
    found, (text,) = _code(f, x, v, w)
    torch.testing.assert_close(found, f(x, v, w))
    assert "% (2048)" in text and "% (2048) + rbase" not in text  # in blocks of several pieces
    (kernel,) = kernels_of(f, torch.empty(600, 20, 2048), v, w)
    assert "% (2048) + rbase" in kernel.text


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((3, 256, 48), 1), ((2, 1000, 40), 1), ((1100, 33), 0), ((2, 40000), 1), ((2, 40007), 1),
     ((2, 32768), 1)],
)  # fmt: skip
@pytest.mark.parametrize("outlier", [100.0, -3000.0])
def test_variances_far_from_zero(shape: tuple[int, ...], dim: int, outlier: float) -> None:
    """RD-6: several values of a thread are joined with its mean and deviations at once; what they
    have in common does not drown how they differ, and an outlier among them does no harm."""
    x = torch.randn(shape) + 100
    x.select(dim, 0).fill_(outlier)

    def moments(x: Tensor) -> Any:
        return torch.var_mean(x, dim)

    backend = Interpreter()
    torch._dynamo.reset()
    found = torch.compile(moments, backend=backend, dynamic=False)(x)
    assert all("tri.several_" in k.text for k in backend.kernels if "_red_" in k.name)
    torch.testing.assert_close(
        [f.double() for f in found], list(torch.var_mean(x.double(), dim)), rtol=2e-5, atol=0
    )


@pytest.mark.parametrize(("dtype", "side"), [(torch.bfloat16, 8), (torch.float32, 4)])
@pytest.mark.parametrize("shape", [(2, 4, 96), (9, 32, 2048), (9, 32, 1096)])
def test_a_channel_s_scale_is_loaded_once_for_neighbours(
    shape: tuple[int, ...], dtype: torch.dtype, side: int
) -> None:
    """Rows that are held and rows that are walked, with ends and without: what a thread's
    neighbours have in common is one load."""
    x, w, b = (_normal(*s, dtype=dtype) for s in (shape, shape[1:2], shape[1:2]))
    kernels = check(lambda x, w, b: F.silu(F.group_norm(x, 2, w, b)), x, w, b,
                    rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)  # fmt: skip
    text = "\n".join(k.text for k in kernels)
    assert 0 < text.count("tri.each(") == len(re.findall(rf"tri\.each\(\w+, {side}\)", text))
    assert "tri.fast_sigmoid(" in text or dtype == torch.float32


@pytest.mark.parametrize("width", [100, 1024])
def test_what_is_dear_to_compute_of_a_column_is_computed_once(width: int) -> None:
    args = _normal(37, width), _normal(width).abs()
    (kernel,) = check(lambda x, v: F.relu(x) / (v + 1).sqrt(), *args)
    assert "tl.load(p0 + (xbase)" in kernel.text and "ybase" in kernel.text
    (kernel,) = check(lambda x, v: F.relu(x) * v, *args)
    assert "ybase" not in kernel.text


def test_programs_of_rows_that_are_only_folded_are_not_too_short() -> None:
    """Of rows that leave much of a block empty too: few programs start in a microsecond."""
    x = torch.empty(193778, 360, dtype=torch.float16)
    (folded,) = kernels_of(lambda x: x.float().sum(-1), x)
    (stored,) = kernels_of(lambda x: torch.softmax(x, -1), x)
    assert [k.configs[0].kwargs["XBLOCK"] for k in (folded, stored)] == [4, 2]
