"""What `bench.gpu_cutlass` draws, and what it makes of its figures."""

from __future__ import annotations

import torch

from bench import gpu_cutedsl, gpu_cutlass
from bench.cutlass_cases import BESIDE, BINARY, UNARY, drawn, groups, products
from bench.measure import leaves
from bench.rows import Found


def test_random_epilogues_are_of_everything():
    found = [drawn(seed) for seed in range(200)]
    assert found[:5] == [drawn(seed) for seed in range(5)]
    assert {name for made in found for name, _, _ in made.steps} == {*UNARY, *BINARY}
    assert {made.odd for made in found} == {"", *BESIDE}
    assert {len(made.results) for made in found} == {1, 2, 3}
    assert {how for made in found for how, _ in made.beside} == {
        "whole", "turned", "apart", "row", "column", "number"}  # fmt: skip
    for made in found[:60]:
        torch.manual_seed(made.seed)
        results = leaves(made(*made.inputs(6, 8, 4, "cpu")))
        assert len(results) == len(made.results) + made.keeps
        assert all(t.shape == (6, 8) and t.isfinite().all() for t in results)


def test_products_are_of_four_kinds_and_groups_too():
    kinds = [case.kind for case in products()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "bf16": 12, "fp16": 12, "fp8": 12, "int8": 12}  # fmt: skip
    assert len({case.kind for case in groups()}) == 4


def _row(part: str, kind: str, **times: float) -> Found:
    return {"part": part, "row": kind, "kind": kind, "times": times}


def test_the_verdict_names_what_is_missed():
    found: list[Found] = [
        _row("alone", "bf16", cuBLAS=98.0, CUTLASS=100.0),
        _row("alone", "bf16", cuBLAS=101.0, CUTLASS=100.0),
        _row("alone", "fp8", cuBLAS=90.0, CUTLASS=100.0),
        {"part": "cost", "row": "lists", "cost": {"list": 31.0}},
        {"part": "cost", "row": "shapes", "cost": {"first seconds": 46.0, "second runs": 0.0}},
        *({"part": "random", "row": "r", "random": kind} for kind in ("fused", "fused", "apart")),
        {"part": "random", "row": "seed 3", "failed": "is off"},
        *({"part": "among", "row": str(k), "left_out": True} for k in range(7)),
    ]
    said = gpu_cutlass.verdict(found)
    starts = {line.partition(": ")[0]: line for line in said}
    assert "0.995" in starts["met  alone, bf16"] and "1 of 2 won" in starts["met  alone, bf16"]
    assert "0.900" in starts["MISS alone, fp8"] and "MISS alone, all" in starts
    assert "31.0" in starts["met  cost, list"] and "46.0" in starts["MISS cost, first seconds"]
    assert "not measured" in starts["MISS cost, process runs"]
    assert starts["MISS random epilogues"].endswith("2 fused, 1 apart, 1 wrong")
    assert said[-2:] == ["     failed: random, seed 3: is off",
                         "     left out for want of time: 7 of among"]  # fmt: skip


def test_a_list_of_candidates_is_milliseconds():
    """At most 50 ms after the first, on a machine that others use: the fastest of them."""
    took = gpu_cutlass.list_milliseconds(6)
    assert min(took[1:]) < gpu_cutlass.LIST_MS


def test_the_verdict_on_the_dsl():
    found: list[Found] = [
        *({"part": "fused", "row": str(k), "x": 1.2 if k < 7 else 0.9} for k in range(12)),
        *({"part": "products", "row": str(k), "x": 0.98} for k in range(12)),
        *({"part": "load", "row": "k", "first": first, "second": 1.5} for first in (2.5, 3.5)),
        {"part": "template", "row": "t", "timed": 3, "relu fused": 1},
        {"part": "grouped", "row": "8 groups", "over ATen": 1.1},
        {"part": "grouped", "row": "9 groups", "left_out": True},
    ]
    said = {line.partition(": ")[0]: line for line in gpu_cutedsl.verdict(found)}
    assert "7 of 12 won" in said["MISS fused"] and "0.980" in said["met  products"]
    assert "3.50" in said["MISS first"] and "met  second" in said and "met  template" in said
    assert "1.100" in said["met  over ATen"]
    assert not any("over a loop" in name for name in said)
