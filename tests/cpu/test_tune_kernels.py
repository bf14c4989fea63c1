"""Which configurations of a loop kernel are tried beyond those its model lists."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from tests.compile.cubin import kernels_of
from tilewright.runtime.triton_build import Sample, TritonConfig, TritonSource
from tilewright.tune import clock, kernels


def source(*configs: TritonConfig) -> TritonSource:
    return TritonSource("", "kernel", (), configs, capability=90, shared_memory=1 << 16,
                        grid=(("3072", "XBLOCK"),))  # fmt: skip


def test_a_block_never_exceeds_what_the_kernel_was_written_for() -> None:
    """An axis that all listed blocks divide has no mask."""
    listed = [TritonConfig((("XBLOCK", x), ("RBLOCK", 2048))) for x in (512, 1024)]
    found = list(kernels._neighbours(source(*listed), listed[1]))
    blocks = {dict(c.constants)["XBLOCK"] for c in found}
    assert blocks == {512, 1024}
    smallest = replace(listed[0], constants=(("XBLOCK", 1), ("RBLOCK", 2048)))
    found = list(kernels._neighbours(source(*listed), smallest))
    assert {dict(c.constants)["XBLOCK"] for c in found} == {1, 2}


def test_a_row_that_is_held_whole_stays_whole() -> None:
    listed = [TritonConfig((("XBLOCK", x), ("RBLOCK", 2048))) for x in (1, 2)]
    found = list(kernels._neighbours(source(*listed), listed[0]))
    assert {dict(c.constants)["RBLOCK"] for c in found} == {2048}
    looped = [TritonConfig((("XBLOCK", 1), ("RBLOCK", r))) for r in (512, 2048)]
    found = list(kernels._neighbours(source(*looped), looped[1]))
    assert {dict(c.constants)["RBLOCK"] for c in found} == {1024, 2048}


ROWS = TritonSource("", "scatter", (), (), capability=90, shared_memory=1 << 16, sample=(
    Sample(torch.bfloat16, 64, meets="add"), Sample(torch.int64, 4096, high=64),
    Sample(torch.float32, 4096), 3))  # fmt: skip


class _OnHost(kernels._Bench):
    """The same on this machine."""

    def __init__(self, source: TritonSource) -> None:
        super().__init__(source)
        self.device = torch.device("cpu")
        self.count = 1

    def results(self, run: Any) -> list[torch.Tensor]:
        with (
            mock.patch.object(torch.cuda, "device"),
            mock.patch.object(torch.cuda, "current_stream"),
        ):
            return super().results(run)


def _scattering(bench: _OnHost, order: Any, lost: int = 0) -> Any:
    """Adds values into rows one after the other, rounding each sum."""

    def run(stream: int, which: int) -> None:
        into, places, values, _ = bench.sets[which]
        for k in order(range(4096))[lost:]:
            into[places[k]] += values[k]

    return run


def test_sums_of_rounded_numbers_may_come_in_any_order() -> None:
    """What runs before have added does not count, nor does the order; what is missing does."""
    bench = _OnHost(ROWS)
    bench.expected = bench.results(_scattering(bench, list))
    _scattering(bench, list)(0, 0)  # as a run that is timed
    assert not bench.difference(_scattering(bench, lambda r: list(reversed(r))))
    assert "off" in bench.difference(_scattering(bench, list, lost=2048))


def test_the_last_of_stores_that_meet_is_any_of_them() -> None:
    sample = (Sample(torch.float32, 8, meets="set"), Sample(torch.float32, 8))
    bench = _OnHost(replace(ROWS, sample=sample))

    def fill(value: float) -> Any:
        return lambda stream, which: bench.sets[which][0].fill_(value)

    bench.expected = bench.results(fill(1))
    assert not bench.difference(fill(2))
    beside = bench.difference(lambda stream, which: bench.sets[which][1].fill_(9))
    assert beside == "8 of 8 elements are off", "what does not meet is compared all the same"


def test_positions_are_spread_over_all_places() -> None:
    found = clock.filled(torch.int64, 1000, torch.device("cpu"), 300)
    assert sorted(found.bincount().tolist()) == [3] * 200 + [4] * 100
    assert not bool((found[1:] > found[:-1]).all())
    assert not clock.filled(torch.int64, 10, torch.device("cpu")).any()


@pytest.mark.parametrize(("accumulate", "dtype", "meets"), [
    (True, torch.float32, "add"), (True, torch.int64, ""), (False, torch.int64, "set"),
])  # fmt: skip
def test_which_results_depend_on_an_order(accumulate: bool, dtype: torch.dtype, meets: str) -> None:
    x, i, y = torch.zeros(40, 64, dtype=dtype), torch.arange(9), torch.zeros(9, 64, dtype=dtype)
    made = kernels_of(lambda x, i, y: x.index_put((i,), y, accumulate=accumulate), x, i, y)
    params = [p for kernel in made for p in kernel.params]
    assert {p.meets for p in params if p.meets} == ({meets} if meets else set())
    assert {p.high for p in params if p.type == "*i64"} >= {40}


def test_one_wrong_element_of_a_kernel_is_found() -> None:
    for wrong, said in ((1.01, "1 of 4096 elements are off"), (float("nan"), "other places")):
        found = torch.ones(4096)
        found[77] = wrong
        assert said in kernels.difference(found, torch.ones(4096))
    expected = torch.ones(4096)
    expected[0] = 4096.0  # which hides no error of the others: the scale is the mean, of 2
    assert kernels.difference(torch.where(expected == 1, 1.01, expected), expected)
    places = torch.arange(9)
    assert kernels.difference(places.clone(), places) == ""
    for wrong in (2, 4):
        found = torch.where(places == 3, wrong, places)
        assert kernels.difference(found, places) == "1 of 9 elements differ"


def test_every_other_configuration_is_compared_with_the_models() -> None:
    """Also one that differs in blocks alone, or in stages."""
    bench = _OnHost(replace(ROWS, sample=(Sample(torch.float32, 8), Sample(torch.float32, 8))))
    model = TritonConfig((("XBLOCK", 64),), 4)
    bench.reference = cast(Any, SimpleNamespace(config=model))
    bench.expected = bench.results(lambda stream, which: bench.sets[0][0].fill_(1.0))
    for other in (replace(model, constants=(("XBLOCK", 32),)), replace(model, num_stages=5)):
        trial = kernels._Configured(bench, other)
        vars(trial)["built"] = SimpleNamespace(config=other)
        for value, said in ((1.0, ""), (2.0, "8 of 8 elements are off")):
            vars(trial)["_run"] = lambda stream, which, v=value: bench.sets[0][0].fill_(v)
            assert trial.check() == said
