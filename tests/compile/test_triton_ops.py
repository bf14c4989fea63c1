"""Every row of the operation table, every reduction and every scan: Triton that gives torch's
result, in the interpreter. The programs are those of the C++ test."""

from __future__ import annotations

import pytest

from tests.compile import interp
from tests.cpu import test_ir_ops as rows
from tilewright.codegen.triton.tile.ops import COMBINE, OPS, RUNNING
from tilewright.ir.ops import REDUCTIONS, SCANS, TABLE


@pytest.fixture(autouse=True)
def _in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "executable", interp.executable)


def test_every_row_has_text() -> None:
    assert set(OPS) == set(TABLE)
    assert set(COMBINE) == set(REDUCTIONS)
    assert set(RUNNING) == set(SCANS)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", sorted(set(TABLE) - set(rows.SPECIAL)))
def test_row(name: str) -> None:
    rows.test_row(name)


def test_where_and_index() -> None:
    rows.test_where_and_index()


def test_casts_between_all_types() -> None:
    rows.test_casts_between_all_types()


def test_bitcast() -> None:
    rows.test_bitcast()


def test_random_rows_match_their_reference() -> None:
    rows.test_random_rows_match_their_reference()


@pytest.mark.parametrize("layout", rows.LAYOUTS)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reduction(kind: str, layout: str) -> None:
    rows.test_reduction(kind, layout)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("kind", SCANS)
def test_scan(kind: str, along: int) -> None:
    rows.test_scan(kind, along)
