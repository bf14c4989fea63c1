"""The products and groups that `bench.gpu_gemm --random` draws."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import gemm_cases, gpu_products
from bench.gemm_cases import BACKWARD, GROUP_KINDS, KINDS, drawn, drawn_groups
from bench.measure import leaves
from bench.rows import Found


def test_draws_are_the_same_for_a_seed_and_of_every_kind() -> None:
    names = [c.name for c in drawn(3 * len(KINDS), 5)]
    assert names == [c.name for c in drawn(3 * len(KINDS), 5)]
    assert names != [c.name for c in drawn(3 * len(KINDS), 6)]
    assert len(set(names)) == len(names)
    assert [n.startswith("bmm") for n in names] == 3 * [k == "batched" for k in KINDS]
    assert {n.split()[2] for n in names} >= {"bfloat16", "float16"}


def test_groups_of_every_kind_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory."""
    monkeypatch.setattr(gemm_cases, "DEVICE", "cpu")
    cases = drawn_groups(len(GROUP_KINDS), 5)
    assert {c.name.rpartition(" ")[0] for c in cases} == set(GROUP_KINDS)
    assert [c.name for c in cases] == [c.name for c in drawn_groups(len(GROUP_KINDS), 5)]
    with FakeTensorMode():
        for case in [*cases, *BACKWARD]:
            assert all(t.numel() for t in leaves(case.fn(*case.inputs()))), case.name


def _speed(part: str, row: str, x: float, **more: object) -> Found:
    return {"part": part, "row": row, "x": {"eager": x, "tilewright": 1.0}, **more}


def test_the_verdict_has_a_line_for_each_criterion() -> None:
    few = {"kind": "int4 weights", "rows": 16, "x bytes": 1.3}
    right = {"tilewright error": 1e-3, "eager error": 1e-3, "tilewright s": 1.5}
    found = [
        _speed("dynamic", "7 rows", 0.99, static=1),
        *(_speed("singles", str(k), 1.2, **right) for k in range(9)),
        _speed("singles", "slow", 0.97, **right),
        _speed("narrow", "int4 16", 2.0, **few, **{**right, "tilewright error": 3e-3}),
        _speed("fused", "mlp", 1.5),
        _speed("gates", "gate", 1.8),
        _speed("convolutions", "ResNet", 0.99, fused=False),
        _speed("convolutions", "ResNet relu", 1.3, fused=True),
        {"part": "fuzzed", "row": "mm", "wrong": []},
        {"part": "grouped", "row": "8", "failed": "took longer than 60 s"},
    ]
    said = [line.partition(" (")[0].partition(", worst")[0]
            for line in gpu_products.verdict(found)[2:]]  # fmt: skip
    assert said == [
        "met  dynamic: 0.990 of eager's speed",
        "MISS shapes, 1 of them of few bits",
        "met  fp8, int8 and int4 alone: 2.000 over eager",
        "MISS weights of few bits, 1 to 16 rows: at most 1.30 of the bytes' time",
        "met  fused groups, forward and backward",
        "met  gates: 1.800 over eager",
        "MISS convolutions alone: 0.990 over eager",
        "met  convolutions with what follows: 1.300 over eager",
        "met  tuning, cold: 1.50 s a shape, of 11",
        "MISS as near to float64 as is allowed: 11 rows and 1 templates: int4 16",
        "     failed: grouped, 8: took longer than 60 s",
    ]
