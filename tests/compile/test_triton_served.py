"""Kernels of what servers of models do between their products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.card import results
from tests.compile.cubin import build
from tests.compile.interp import check
from tests.compile.test_triton_rounding import for_card
from tests.compile.test_triton_stencils import kernels
from tests.pretend import pretended


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    wide = mask.unsqueeze(-1).expand(hidden.size()).float()
    return F.normalize((hidden * wide).sum(1) / wide.sum(1).clamp(min=1e-9), dim=1)


def test_folds_of_the_same_rows_that_meet_later_are_one_walk() -> None:
    """The weights' own sum beside that of what they weigh, for the quotient of both."""
    hidden, mask = torch.randn(3, 21, 40), torch.randint(0, 2, (3, 21))
    check(pooled, hidden, mask, rtol=1e-5, atol=1e-6)
    fold, _ = for_card(pooled, torch.empty(256, 384, 768).half(), torch.zeros(256, 384).long())
    assert fold.text.count("tl.range") == 1 and fold.text.count("tl.load") == 2


def combined(parts: Tensor, logs: Tensor) -> Tensor:
    weights = (logs - logs.amax(0)).exp()
    return (parts * weights[..., None]).sum(0) / weights.sum(0)[..., None]


def test_columns_with_weights_of_their_pieces_are_loaded_at_once() -> None:
    check(combined, torch.randn(5, 7, 24), torch.randn(5, 7), rtol=1e-5, atol=1e-6)
    *_, last = for_card(combined, torch.empty(16, 131072, 128), torch.empty(16, 131072))
    assert build(last).widest("ld.global") == 16


def mixed(x: Tensor, last: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    before = torch.cat((last[:, None], x[:, :-1]), 1)
    return x + (before - x) * mix, x[:, -1].clone()


def test_rows_that_are_not_folded_are_not_walked_for_the_last() -> None:
    check(mixed, torch.randn(2, 5, 9), torch.randn(2, 9), torch.randn(9))
    x = torch.empty(16, 2047, 2048)
    assert not any(k.text.count("for ") for k in for_card(mixed, x, x[:, 0], x[0, 0]))


def rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = q[..., :8].float(), q[..., 8:]
    a, b = turned[..., ::2], turned[..., 1::2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((turned.to(q.dtype), kept), -1)


@pretended
def test_pairs_of_a_part_of_a_row_are_one() -> None:
    """Both halves of a pair are loaded once, whether it is turned or kept."""
    sizes = (2, 5, 3, 20), (5, 1, 4), (5, 1, 4)
    given = [torch.randn(size).half() for size in sizes]
    (found,) = results(rotated, *given)
    torch.testing.assert_close(found, rotated(*given))
    (kernel,) = kernels(rotated, *sizes, dtype=torch.float16)
    assert kernel.text.count("tl.load") == 3


def penalised(logits: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    return logits.float() - penalty[:, None] * counts


def test_odd_rows_of_different_types_are_one() -> None:
    """Their elements are loaded sixteen bytes at once, or less than all of them would be."""
    check(penalised, torch.randn(3, 501).half(), torch.randint(0, 3, (3, 501)), torch.rand(3))
    x = torch.empty(1024, 50257)
    (kernel,) = for_card(penalised, x.bfloat16(), x.int(), x[:, 0])
    assert build(kernel).widest("st.global") == 16


def test_bytes_are_read_as_floats_by_an_instruction() -> None:
    x = torch.randn(33, 40)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        check(lambda x: x.float() * 2, x.to(dtype))
        (kernel,) = for_card(lambda x: x.float() * 2, torch.empty(4096, 4096).to(dtype))
        assert ".e4m3x2" in (ptx := build(kernel).ptx) or ".e5m2x2" in ptx


def test_short_rows_with_wide_weights_are_many_of_a_program() -> None:
    rows, query = torch.zeros(524288, 384, dtype=torch.int8), torch.empty(384)
    (kernel,) = for_card(lambda x, y: (x.float() * y).sum(-1), rows, query)
    assert dict(kernel.config.blocks)["XBLOCK"] == 16


def embedded(ids: Tensor, kinds: Tensor, table: Tensor, others: Tensor) -> Tensor:
    return F.layer_norm(table[ids] + others[kinds], table.shape[-1:])


def test_several_rows_that_are_looked_up_are_in_tiles_of_a_warp() -> None:
    ids = torch.randint(0, 2, (70, 512))
    few = ids[:3, :5].clone()
    check(embedded, few, few, torch.randn(9, 40), torch.randn(2, 40), rtol=1e-5, atol=1e-5)
    tables = [torch.empty(n, 768).bfloat16() for n in (9, 2)]
    (kernel,) = for_card(embedded, ids, ids.clone(), *tables)
    assert dict(kernel.config.blocks) == {"XBLOCK": 1, "RBLOCK": 256}
