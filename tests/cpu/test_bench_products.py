"""The products and groups that `bench.gpu_gemm --random` draws."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import gemm_cases
from bench.gemm_cases import GROUP_KINDS, KINDS, drawn, drawn_groups
from bench.measure import leaves


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
        for case in cases:
            assert all(t.numel() for t in leaves(case.fn(*case.inputs()))), case.name
