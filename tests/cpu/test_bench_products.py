"""The products that `bench.gpu_gemm --random` draws."""

from __future__ import annotations

from bench.gpu_gemm import KINDS, drawn


def test_draws_are_the_same_for_a_seed_and_of_every_kind() -> None:
    names = [c.name for c in drawn(3 * len(KINDS), 5)]
    assert names == [c.name for c in drawn(3 * len(KINDS), 5)]
    assert names != [c.name for c in drawn(3 * len(KINDS), 6)]
    assert len(set(names)) == len(names)
    assert [n.startswith("bmm") for n in names] == 3 * [k == "batched" for k in KINDS]
    assert {n.split()[2] for n in names} >= {"bfloat16", "float16"}
