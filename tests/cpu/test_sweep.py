"""A fixed part of the operator sweep: a third of the operators, and a slice of everything else.

The cases run in two worker processes, so that a crash fails one test; the tests wait for them in
order. ``python -m tests.sweep --all`` runs all of it.
"""

from __future__ import annotations

import functools
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sweep import differences
from tests.sweep.__main__ import main
from tests.sweep.baseline import Baseline
from tests.sweep.cases import Group, groups
from tests.sweep.compare import Mismatch, Tolerance, compare
from tests.sweep.execute import PASS, Outcome
from tests.sweep.judge import FAILED, Verdict, judge
from tests.sweep.pool import Job, Pool
from tests.sweep.report import reproduce

BACKEND = os.environ.get("TILEWRIGHT_TEST_BACKEND", "tilewright")
# One group in this many of those that are not float32, static and as far as the operator goes.
SLICE = 64
KNOWN = differences.by_case(differences.load())


@functools.cache
def _jobs() -> dict[str, Job]:
    """Jobs by test name: each runs one sample."""
    found: dict[str, Job] = {}
    plain = {g.op: g for g in groups(dtypes=("float32",), modes=("static",))}
    for group in groups():
        if plain.get(group.op) == group:
            found[_name(group)] = Job(group, BACKEND, "small")
        elif group.fingerprint % SLICE == 0:
            found[f"{_name(group)}-{group.direction}"] = Job(group, BACKEND, "hashed")
    for case in KNOWN:
        found[f"listed-{case}"] = Job(case.group, BACKEND, "listed", samples=(case.sample,))
    return found


def _name(group: Group) -> str:
    return f"{group.op}-{group.dtype}-{group.mode}"


class Verdicts:
    """One verdict per job, pulled from the workers as tests ask for them.

    ``ahead`` are jobs to run before they are asked for; others run when they are.
    """

    def __init__(self, pool: Pool, baseline: Baseline, ahead: list[Job]) -> None:
        self._pool = pool
        self._baseline = baseline
        self._ahead = frozenset(ahead)
        self._stream = judge(pool, deque(ahead), baseline)
        self._ready: dict[Job, Verdict] = {}

    def of(self, job: Job) -> Verdict:
        if job not in self._ahead:
            (verdict,) = judge(self._pool, deque([job]), self._baseline)
            return verdict
        while job not in self._ready:
            verdict = next(self._stream)
            self._ready[verdict.job] = verdict
        return self._ready[job]


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Verdicts]:
    """Starts two workers on the jobs of the tests that were selected, and no others.

    A process of pytest-xdist has its share of the tests given to it one by one, so there each
    test starts its own job, on one worker.
    """
    shared = "PYTEST_XDIST_WORKER" in os.environ
    names = {item.name for item in request.session.items}
    chosen = [job for name, job in _jobs().items() if f"test_op[{name}]" in names]
    ahead = [] if shared else chosen
    baseline = Baseline(tmp_path_factory.mktemp("baseline") / "outcomes.jsonl")
    with Pool(1 if shared else 2, timeout=60.0) as pool:
        yield Verdicts(pool, baseline, ahead)


def _cases() -> list[Any]:
    """Two thirds of the operators' samples of float32 are left to `make test-all`, which runs
    every sample of every operator."""
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if job.pick == "small" and job.group.fingerprint % 3
        else name
        for name, job in _jobs().items()
    ]


@pytest.mark.parametrize("name", _cases())
def test_op(name: str, verdicts: Verdicts) -> None:
    verdict = verdicts.of(_jobs()[name])
    case, outcome = verdict.case, verdict.outcome
    if case is not None and case in KNOWN:
        assert verdict.name == FAILED, f"{case} is {verdict.name}: remove it from the list"
    else:
        assert verdict.name != FAILED, (
            f"{outcome.status} ({outcome.stage}): {outcome.text}\n{reproduce(verdict)}"
        )


def test_every_operator_has_a_case() -> None:
    float32 = {g.op for g in groups(dtypes=("float32",))}
    assert float32 <= {job.group.op for job in _jobs().values()}


def test_the_page_of_differences_is_up_to_date() -> None:
    assert differences.PAGE.read_text() == differences.render(differences.load()), (
        "run: python -m tests.sweep --write-docs"
    )


def test_listed_operators_exist() -> None:
    known = set(groups())
    assert [str(d.group) for d in differences.load() if d.group not in known] == []


# The sweep must be able to fail: each of these backends is wrong in one way.
BROKEN = {
    "wrong_value": "wrong value",
    "wrong_dtype": "wrong meta",
    "wrong_stride": "stride",
    "raises": "exception",
    "hangs": "timeout",
    "dies": "crash",
}


@pytest.fixture(scope="module")
def broken_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """Two samples of one operator on every broken backend: the second must be run as well."""
    group = Group("mul", "float32", "static", "forward")
    jobs = [Job(group, f"tests.sweep.broken:{name}", "listed", samples=(2, 3)) for name in BROKEN]
    baseline = Baseline(tmp_path_factory.mktemp("baseline") / "outcomes.jsonl")
    found: dict[str, list[Outcome]] = {name: [] for name in BROKEN}
    with Pool(2, timeout=8.0) as pool:
        for verdict in judge(pool, deque(jobs), baseline):
            assert verdict.baseline is not None
            assert verdict.baseline.status == PASS
            found[verdict.backend.split(":")[1]].append(verdict.outcome)
    return found


@pytest.mark.parametrize("name", list(BROKEN))
def test_sweep_finds(name: str, broken_outcomes: dict[str, list[Outcome]]) -> None:
    assert [o.status for o in broken_outcomes[name]] == [BROKEN[name]] * 2


def test_a_worse_result_than_eager_is_wrong_though_inexact() -> None:
    """bfloat16 may differ from eager only towards the float64 result."""
    exact = torch.linspace(1, 2, 64, dtype=torch.float64)
    eager = (exact * 1.01).to(torch.bfloat16)
    nearer = exact.to(torch.bfloat16)
    farther = (exact * 1.04).to(torch.bfloat16)

    def found(actual: torch.Tensor) -> Mismatch | None:
        return compare(actual, eager, Tolerance({}), values=True, exact=lambda: exact)

    assert found(nearer) is None
    wrong = found(farther)
    assert wrong is not None
    assert wrong.kind == "value"


def test_resumed_run_does_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "out" / "results.jsonl"
    command = ["--op", "^neg$", "--dtype", "float32", "--dtype", "int64", "--static"]
    command += [
        "--backend",
        "aot_eager",
        "--out",
        str(results.parent),
        "--cache",
        str(tmp_path / "b"),
    ]
    assert main(command) == 0
    first = results.read_text().splitlines()
    results.write_text("\n".join(first[:-1]) + "\n")
    assert main([*command, "--resume"]) == 0
    again = results.read_text().splitlines()
    assert [json.loads(line)["case"] for line in again] == [
        json.loads(line)["case"] for line in first
    ]
    assert f"{len(first)} cases" in capsys.readouterr().out
