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
# and one of each family that may have none among those
NAMED = frozenset({
    "argmax/int64/static/forward", "cat/float32/dynamic/backward", "cdist/float32/static/backward",
    "cummax/float32/static/forward", "cumsum/bfloat16/dynamic/backward",
    "gather/float32/dynamic/backward", "index_select/float32/static/backward",
    "nn.functional.embedding/bfloat16/static/backward",
    "nn.functional.embedding_bag/float32/static/forward",
    "nn.functional.grid_sample/float32/static/forward",
    "nn.functional.interpolate.bilinear/float32/dynamic/backward",
    "nn.functional.multi_margin_loss/float32/static/backward",
    "nn.functional.pad.reflect/float32/static/backward", "softmax/bfloat16/dynamic/backward",
    "tril/int64/dynamic/forward", "var_mean/float32/dynamic/backward",
})  # fmt: skip


@functools.cache
def _chosen() -> dict[str, Group]:
    found = {str(g): g for g in groups()
             if g.fingerprint // 3 % SLICE == 0 or str(g) in NAMED}  # fmt: skip
    assert found.keys() >= NAMED, f"no such groups: {sorted(NAMED - found.keys())}"
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, timeout=300.0) as made:
        yield made


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", list(_chosen()))
def test_group(name: str, pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> None:
    baseline = Baseline(tmp_path_factory.mktemp("baseline") / "outcomes.jsonl")
    job = Job(_chosen()[name], BACKEND, "small")
    for verdict in judge(pool, deque([job]), baseline):
        outcome = verdict.outcome
        assert verdict.name != FAILED, (
            f"{outcome.status} ({outcome.stage}): {outcome.text}\n{reproduce(verdict)}"
        )
