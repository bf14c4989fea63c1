"""A slice of the operator sweep with the kernels of a card, in Triton's interpreter."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator

import pytest

from tests.sweep.baseline import Baseline
from tests.sweep.cases import Group, groups
from tests.sweep.judge import FAILED, judge
from tests.sweep.pool import Job, Pool
from tests.sweep.report import reproduce

BACKEND = "tests.compile.interp:backend"
SLICE = 151  # one group in this many


@functools.cache
def _chosen() -> dict[str, Group]:
    return {str(g): g for g in groups() if g.fingerprint // 3 % SLICE == 0}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, timeout=300.0) as made:
        yield made


@pytest.mark.parametrize("name", list(_chosen()))
def test_group(name: str, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> None:
    baseline = Baseline(tmp_path_factory.mktemp("baseline") / "outcomes.jsonl")
    job = Job(_chosen()[name], BACKEND, "small")
    for verdict in judge(pool, deque([job]), baseline):
        outcome = verdict.outcome
        assert verdict.name != FAILED, (
            f"{outcome.status} ({outcome.stage}): {outcome.text}\n{reproduce(verdict)}"
        )
