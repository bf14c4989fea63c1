"""Groups with serial loops: rows run one after the other, and what folds over them accumulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build as build_cubin
from tests.compile.interp import TARGET, runner
from tests.compile.test_triton_in_turn import for_card
from tests.fuzz.build import Build
from tests.limits import limit
from tilewright.codegen.triton.generate import generate
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.program import Store
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import Fit
from tilewright.schedule.split.policy import chunks
from tilewright.target import Target
from tilewright.testing import run_and_get_code

CHUNKS, ROWS, COLUMNS = 3, 4, 70


@pytest.mark.parametrize("kind", ["sum", "max", "welford", "argmax"])
def test_rows_and_columns_of_one_pass(kind: str) -> None:
    """Each row is normalised by its sum, stored, and folded into its chunk's columns."""
    b = Build()
    c, r, j = b.loops(CHUNKS, ROWS, COLUMNS)
    x = b.input(CHUNKS, ROWS, COLUMNS)
    total = b.buffer((CHUNKS, ROWS))
    scaled = b.buffer((CHUNKS, ROWS, COLUMNS))
    columns = b.buffer((CHUNKS, COLUMNS), torch.int64 if kind == "argmax" else torch.float32)
    everything = b.buffer((CHUNKS,))
    row = b.nest([c, r], Store(total, b.index(total, c, r), build.reduce("sum", b.at(x, c, r, j))),
                 reduce=[j])  # fmt: skip
    value = build.op("mul", b.at(x, c, r, j), b.at(total, c, r))
    point = b.nest([c, r, j], Store(scaled, b.index(scaled, c, r, j), value))
    made = b.at(scaled, c, r, j)
    fold = {"welford": lambda: build.part(build.reduce("welford", made), 1),
            "argmax": lambda: build.reduce("argmax", made, r, dtype=torch.int64),
            }.get(kind, lambda: build.reduce(kind, made))()  # fmt: skip
    column = b.nest([c, j], Store(columns, b.index(columns, c, j), fold), reduce=[r])
    both = b.nest([c], Store(everything, c, build.reduce("sum", made)), reduce=[r, j])
    program = b.returns(total, scaled, columns, everything)
    group = Group((row, point, column, both), (c,), (r,))
    kernel = generate(program, group, TARGET)
    assert kernel.text.count("tl.load") == 1 and "for s0offset" in kernel.text

    given = torch.randn(CHUNKS, ROWS, COLUMNS)
    tensors = {"arg0": given, total: torch.empty(CHUNKS, ROWS),
               scaled: torch.empty(CHUNKS, ROWS, COLUMNS),
               columns: torch.empty(CHUNKS, COLUMNS, dtype=program.buffers[columns].dtype),
               everything: torch.empty(CHUNKS)}  # fmt: skip
    runner(kernel)(*(tensors[p.name].data_ptr() for p in kernel.params))
    want = given * given.sum(2, keepdim=True)
    folded = {"sum": want.sum(1), "max": want.amax(1), "argmax": want.argmax(1),
              "welford": want.var(1, correction=0) * ROWS}[kind]  # fmt: skip
    torch.testing.assert_close(tensors[total], given.sum(2))
    torch.testing.assert_close(tensors[scaled], want)
    torch.testing.assert_close(tensors[columns], folded, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(tensors[everything], want.sum((1, 2)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "length", "programs"),
                         [(16384, 4096, 256), (222534, 389, 3072), (4096, 389, 256),
                          (40000, 2700, 512), (40000, 2696, 256), (24660, 2049, 512),
                          (761461, 161, 4096), (600000, 128, 4096),
                          (512, 512, 64), (512, 256, 64), (64, 512, 8)])  # fmt: skip
def test_more_programs_walk_short_rows(rows: int, length: int, programs: int) -> None:
    """Each has a row or a few under way, and of short ones that is little, and of odd ones none
    ahead. Where rows are few, what programs leave would be more, but each still has few to wait
    for."""
    b = Build()
    r, j = b.loops(rows, length)
    x, total, columns = b.input(rows, length), b.buffer((rows,)), b.buffer((length,))
    row = b.nest([r], Store(total, r, build.reduce("sum", b.at(x, r, j))), reduce=[j])
    scaled = build.op("mul", b.at(x, r, j), b.at(total, r))
    column = b.nest([j], Store(columns, j, build.reduce("sum", scaled)), reduce=[r])
    assert chunks(Fit((row, column), (), (r,)), Target("sm_90")) == programs


def test_short_rows_of_several_groups_have_programs_as_rows_without() -> None:
    b = Build()
    r, k, j = b.loops(16384, 8, 512)
    x, total, columns = b.input(16384, 8, 512), b.buffer((16384, 8)), b.buffer((8, 512))
    row = b.nest(
        [r, k],
        Store(
            total,
            ix.linearize([r, k], ix.contiguous_strides([16384, 8])),
            build.reduce("sum", b.at(x, r, k, j)),
        ),
        reduce=[j],
    )
    scaled = build.op("mul", b.at(x, r, k, j), b.at(total, r, k))
    column = b.nest(
        [k, j],
        Store(
            columns,
            ix.linearize([k, j], ix.contiguous_strides([8, 512])),
            build.reduce("sum", scaled),
        ),
        reduce=[r],
    )
    assert chunks(Fit((row, column), (k,), (r,)), Target("sm_90")) == 256


# ---- short rows, dealt out to chunks


def filled(x: Tensor, fill: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    empty = torch.isnan(x)
    return torch.where(empty, fill, x), empty.sum(0), empty.any(1)


def centred(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = (x - x.mean(1, keepdim=True)) * weight
    return y, y.square().sum(0)


@pytest.mark.parametrize(("fn", "columns"), [(filled, 40), (centred, 24)])
def test_a_tile_of_short_rows_is_of_neighbouring_chunks(
    fn: Callable[[Tensor, Tensor], Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, "TILED_PROGRAMS", 1)
    limit(monkeypatch, "CYCLIC_ROWS", 3)
    gen = torch.Generator().manual_seed(0)
    x, row = torch.randn(3 * 1056, columns, generator=gen), torch.randn(columns, generator=gen)
    x[::7, 3] = float("nan") if fn is filled else 0.0
    with as_cuda("sm_90"):
        found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), x, row)
    assert any("for s0offset" in text and f"xbase*{columns} + s_" in text for text in code)
    assert_close(found, fn(x, row), equal_nan=True, rtol=1e-5, atol=1e-4)


def test_which_short_rows_are_dealt_out() -> None:
    """Not longer ones, those that begin anywhere, and as many as no number of chunks has all of."""

    def tiled(*size: int) -> bool:
        first, *_ = for_card(filled, torch.empty(size), torch.empty(size[1]))
        return "for s0offset" in first.text and first.config.kwargs["XBLOCK"] == 8

    assert tiled(1 << 20, 40) and tiled(1000000, 64)
    assert not any(map(tiled, *zip((1 << 20, 128), (1 << 20, 41), (1000003, 40), strict=True)))
    (softmax, *_) = for_card(lambda x: torch.softmax(x, 0), torch.empty(1 << 26))
    assert "rbase*" not in softmax.text
    first, *_ = for_card(filled, torch.empty(1 << 20, 40), torch.empty(40))
    made = build_cubin(first)
    assert not made.spills and made.widest("st.global") == 16 and "cp.async" in made.ptx
