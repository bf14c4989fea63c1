"""The operations CUTLASS lists: how many, their names, and that they are kept."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tilewright import caches, config, metrics
from tilewright.gemm.cutlass import operations as listing
from tilewright.gemm.cutlass.operations import Operation, _gen_ops_cached, flattened
from tilewright.gemm.cutlass.serialization import get_cutlass_operation_serializer
from tilewright.testing import fresh_cache


@pytest.fixture(scope="module")
def hopper() -> list[Any]:
    """CUTLASS's own objects for sm_90."""
    return list(flattened(_gen_ops_cached("90", "13.0")))


@pytest.fixture
def fresh() -> Iterator[Path]:
    with fresh_cache() as folder:
        yield folder


@pytest.mark.parametrize(
    ("arch", "version", "count"),
    [
        ("90", "12.4", 21268),
        ("90", "12.8.1", 21268),
        ("100", "12.4", 3680),
        ("80", "13.0", 5596),
        ("75", "13.0", 1452),
    ],
)
def test_cu_b5_how_many(arch: str, version: str, count: int) -> None:
    """CU-B5; CU-B6: names are unique."""
    found = list(flattened(_gen_ops_cached(arch, version)))
    assert len(found) == count
    assert len({op.configuration_name() for op in found}) == count


@pytest.mark.slow
def test_cu_b5_b7_blackwell() -> None:
    """CU-B5, CU-B7: since 12.8; sm_103 has the set of sm_100."""
    names: list[set[str]] = []
    for arch in ("100", "103"):
        found = list(flattened(_gen_ops_cached(arch, "12.8")))
        names.append({op.configuration_name() for op in found})
        assert len(found) == 127808 == len(names[-1])
        del found
        caches.clear()
    assert names[0] == names[1]


def test_cu_b5_memoised(hopper: list[Any]) -> None:
    """CU-B5, CU-A9: for an architecture and the first two numbers of a version."""
    assert _gen_ops_cached("90", "13.0") is _gen_ops_cached("90a", "13.0.1")


def test_cu_b7_what_there_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("ERROR"):
        assert _gen_ops_cached(None, "13.0") == {}
        assert _gen_ops_cached("90", None) == {}
    assert len(caplog.records) == 2
    with pytest.raises(NotImplementedError, match="sm_119"):
        _gen_ops_cached("119", "13.0")


def test_cu_b8_older_kernels_are_listed_for_hopper_too() -> None:
    found = listing.operations(90, "13.0")
    mixed = found["f16", "s8", "f32"]
    assert {op.arch for op in mixed} == {80} and len(mixed) == 32
    assert any(op.kind == "sparse" for op in found["f16", "f16", "f32"])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, enum.Enum):
        return a is b
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dict__"):
        mine, theirs = (
            {k: v for k, v in vars(x).items() if k != "_procedural_name"} for x in (a, b)
        )
        return (
            type(a) is type(b)
            and mine.keys() == theirs.keys()
            and all(_same(v, theirs[k]) for k, v in mine.items())
        )
    return a == b


def test_cu_b9_back_from_json(hopper: list[Any]) -> None:
    """All kinds, and every seventh operation; `make test-all` has all of them."""
    _back(hopper, 7)


@pytest.mark.slow
def test_cu_b9_all_back_from_json(hopper: list[Any]) -> None:
    _back(hopper, 1)


def _back(hopper: list[Any], every: int) -> None:
    serializer = get_cutlass_operation_serializer()
    assert serializer is not None
    kinds: dict[str, int] = {}
    for op in hopper:
        kinds[op.gemm_kind.name] = kinds.get(op.gemm_kind.name, 0) + 1
        if kinds[op.gemm_kind.name] % every:
            continue
        text = serializer.serialize(op)
        assert isinstance(json.loads(text), dict)
        back = serializer.deserialize(text)
        assert _same(op, back) and back.configuration_name() == op.configuration_name()
    assert len(kinds) == 6


def test_cu_b10_other_objects_are_rejected(hopper: list[Any]) -> None:
    serializer = get_cutlass_operation_serializer()
    assert serializer is not None
    with pytest.raises(AssertionError, match="GemmOperation"):
        serializer.serialize(hopper[0].tile_description)


def test_names_are_those_of_cutlass() -> None:
    """Rows have CUTLASS's own `configuration_name()`, whatever their kind."""
    names = listing._Names()
    every = [
        op
        for op in flattened(listing._generated("90", "13.0", "0", (80,)))
        if names.can_be_ours(op)
    ]
    assert len(every) == 5838
    assert [names.row(op).name for op in every] == [op.configuration_name() for op in every]


def test_cu_b11_kept_for_the_next_process(fresh: Path) -> None:
    first = listing.operations(90, "13.0")
    (file,) = fresh.glob("configs_*.json")
    assert len(file.stem) == len("configs_") + 8
    listed = metrics.counters["cutlass"]["listed"]
    listing._operations.cache_clear()
    listing._generated.cache_clear()
    assert listing.operations(90, "13.0") == first
    assert metrics.counters["cutlass"]["listed"] == listed


def test_cu_b11_an_unreadable_file_is_made_again(
    fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = listing.operations(90, "13.0")
    (file,) = fresh.glob("configs_*.json")
    for damage in ("{", "[[1, 2]]"):
        file.write_text(damage)
        listing._operations.cache_clear()
        with caplog.at_level("WARNING"):
            found = listing.operations(90, "13.0")
        assert {k: sorted(op.name for op in v) for k, v in found.items()} == {
            k: sorted(op.name for op in v) for k, v in first.items()
        }
        assert "made again" in caplog.text


def test_cu_b11_not_where_caches_are_off(fresh: Path) -> None:
    with config.patch(force_disable_caches=True):
        assert listing.operations(90, "13.0")
    assert not list(fresh.glob("configs_*.json"))


@pytest.mark.parametrize(("level", "count"), [("1", 7500), ("111", 17348), ("x", 21268)])
def test_cu_b12_levels(level: str, count: int) -> None:
    """CU-B12: what is no number means CUTLASS's own default."""
    with config.patch({"cuda.cutlass_instantiation_level": level}):
        assert len(list(flattened(_gen_ops_cached("90", "13.0")))) == count


@pytest.mark.slow
@pytest.mark.parametrize(("level", "count"), [("131", 22124), ("500", 37354), ("1111", 48148)])
def test_cu_b12_higher_levels(level: str, count: int) -> None:
    test_cu_b12_levels(level, count)


def test_cu_b12_millions_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with config.patch({"cuda.cutlass_instantiation_level": "3333"}), caplog.at_level("WARNING"):
        assert listing._level() == "3333"
    assert "millions" in caplog.text


def test_cu_b13_what_no_problem_needs(hopper: list[Any]) -> None:
    every = [op for ops in listing.operations(90, "13.0").values() for op in ops]
    assert {op.opcode for op in every} == {"tensorop"}
    assert {op.accumulator for op in every} <= {"f32", "s32"}
    assert {e for op in every for e in (op.a, op.b)} == {"f16", "bf16", "e4m3", "e5m2", "s8"}
    assert {op.layouts[:2] for op in every if op.kind != "sparse"} == {"tn"}
    assert len([op for op in every if op.is_3x]) == 5194


def test_rows_are_frozen() -> None:
    """CU-B16: what is listed cannot be changed by a problem."""
    row = next(iter(listing.operations(90, "13.0").values()))[0]
    assert isinstance(row, Operation)
    with pytest.raises(AttributeError):
        row.layouts = "nnn"  # type: ignore[misc]


def test_cleared_with_the_caches() -> None:
    listing.operations(90, "13.0")
    caches.clear()
    assert listing._operations.cache_info().currsize == 0
