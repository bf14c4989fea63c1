"""What losses and metrics are made of: short rows, rows of pairs, signs, places of maxima."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build
from tests.compile.interp import check
from tests.compile.test_triton_in_turn import for_card
from tilewright.testing import run_and_get_code


def noised(x: Tensor, noise: Tensor, alphas: Tensor, steps: Tensor) -> Tensor:
    a = alphas[steps][:, None]
    return a.sqrt() * x + (1 - a).sqrt() * noise


def test_what_is_not_looked_up_is_loaded_before_what_is() -> None:
    steps = torch.zeros(256, dtype=torch.int64)
    x = torch.empty(256, 65536)
    (kernel,) = for_card(noised, x, torch.empty_like(x), torch.empty(1000), steps)
    places, _ = kernel.text.split("tri.report(")
    assert places.count("tl.load(") == 3


def test_long_rows_of_two_buffers_are_in_cache_by_many_programs() -> None:
    def power(re: Tensor, im: Tensor) -> Tensor:
        db = (re * re + im * im).log10()
        return torch.maximum(db, db.amax((-2, -1), keepdim=True) - 80)

    x = torch.empty(64, 201, 3000)
    (kernel,) = for_card(power, x, torch.empty_like(x))
    assert "part = pid % 64" in kernel.text


def test_rows_of_neighbours_are_folded_each_by_itself() -> None:
    first, *_ = for_card(lambda x: (x[..., 1:] - x[..., :-1]).abs().mean(),
                         torch.empty(32, 3, 512, 512))  # fmt: skip
    assert "% (511)" not in first.text


def test_short_rows_are_no_sparse_tiles() -> None:
    signs, scale = torch.empty(65536, 80, dtype=torch.int8), torch.empty(65536, 1)
    (kernel,) = for_card(lambda x, y: x * y, signs, scale)
    (wide,) = for_card(lambda x, y: x * y, torch.empty(65536, 128, dtype=torch.int8), scale)
    assert "YBLOCK" not in kernel.text and "YBLOCK" in wide.text


def test_rows_of_a_warp() -> None:
    def apart(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
        both = (x.float() * scale, y.float())
        return ((both[0] * both[1]).sum(-1, keepdim=True) * both[0] - both[1]).bfloat16()

    x = torch.empty(65536, 512, dtype=torch.bfloat16)
    (kernel,) = for_card(apart, x, torch.empty_like(x), torch.empty(65536, 1))
    assert (kernel.config.kwargs["XBLOCK"], kernel.config.num_warps) == (2, 1)
    (kernel,) = for_card(lambda x: x.argmax(-1), torch.empty(65536, 1000, dtype=torch.bfloat16))
    assert (kernel.config.kwargs["XBLOCK"], kernel.config.num_warps) == (4, 2)


def test_a_maximum_is_found_with_its_place() -> None:
    x = torch.randn(33, 80, generator=torch.Generator().manual_seed(7))
    x[3, 5] = x[3, 7] = 9
    with as_cuda():
        found, (code,) = run_and_get_code(
            torch.compile(lambda x: F.softsign(x).max(-1), backend="tilewright"), x
        )
    assert code.count("tl.reduce(") == 2
    assert_close(tuple(found), tuple(F.softsign(x).max(-1)))


def test_a_mean_and_deviations_have_one_sum() -> None:
    def normed(x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-6).sqrt()

    x = torch.randn(33, 81, generator=torch.Generator().manual_seed(7)) + 9
    with as_cuda():
        found, (code,) = run_and_get_code(torch.compile(normed, backend="tilewright"), x)
    assert code.count("tl.reduce(") == 2
    assert_close(found, normed(x), rtol=1e-4, atol=1e-4)


def contrasted(s: Tensor, labels: Tensor) -> Tensor:
    own = torch.eye(s.shape[0], dtype=torch.bool, device=s.device)
    same = (labels[:, None] == labels[None]) & ~own
    logs = s - s.exp().masked_fill(own, 0).sum(1, keepdim=True).log()
    return (logs * same).sum(1) / same.sum(1).clamp(min=1)


def test_labels_compared_with_themselves_are_of_one_axis() -> None:
    """Rows and labels are folded over the same places, though labels are read at rows first."""
    torch.manual_seed(0)
    check(contrasted, torch.randn(48, 48), torch.randint(5, (48,)))
    (kernel,) = for_card(contrasted, torch.empty(4096, 4096), torch.zeros(4096, dtype=torch.int64))
    assert "R1BLOCK" not in kernel.text and kernel.text.count("tl.load(") == 3


def test_labels_of_all_rows_are_loaded_where_they_are_compared() -> None:
    """Until then they would take registers: two programs of many threads fit a processor."""

    def loss(s: Tensor, labels: Tensor) -> Tensor:
        s = s.float()
        return contrasted(s - s.amax(1, keepdim=True), labels)

    torch.manual_seed(0)
    check(loss, torch.randn(48, 48), torch.randint(5, (48,)))
    labels = torch.zeros(8192, dtype=torch.int64)
    (kernel,) = for_card(loss, torch.empty(8192, 8192, dtype=torch.bfloat16), labels)
    before, _ = kernel.text.split("tl.reduce(", 1)
    assert before.count("tl.load(") == 1 and "xbase*8192" in before
    assert (kernel.configs[0].num_warps, kernel.configs[0].registers) == (16, 64)
    assert build(kernel).spills == 0


def test_a_row_is_under_way_while_nothing_of_it_is_folded() -> None:
    def shared_out(g: Tensor, labels: Tensor) -> Tensor:
        same = labels[:, None] == labels[None]
        return g.exp() * same / same.sum(1, keepdim=True)

    torch.manual_seed(0)
    check(shared_out, torch.randn(48, 48), torch.randint(5, (48,)))
    (kernel,) = for_card(shared_out, torch.empty(8192, 8192), torch.zeros(8192, dtype=torch.int64))
    before, behind = kernel.text.split("tl.reduce(")
    assert "xbase*8192 + rbase" in before.split("tl.load(")[1] and "tl.load(" not in behind
