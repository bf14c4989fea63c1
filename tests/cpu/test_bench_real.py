"""The suite of real models: a tiny one through it, and what it takes for a failure."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.real import side_by_side, tables
from bench.real.child import LEAST, Ear, error, is_wrong
from bench.real.side_by_side import STOPPED, Gate, Running
from bench.real.verdict import verdict
from bench.real.zoo import made, zoo

FIELDS = {
    "convolution net", "diffusion", "state space", "recommender", "graph", "speech", "recurrent",
    "decoder", "encoder", "mixture of experts", "vision transformer", "quantised",
}  # fmt: skip


def suite(*args: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.real", "--size", "tiny", "--device", "cpu",
               "--rounds", "3", "--threads", "1", "--out", str(out), *args]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})


@pytest.mark.slow  # three backends compile a model
def test_a_model_is_measured_once_and_a_second_run_goes_on_where_the_first_ended(
    tmp_path: Path,
) -> None:
    out, page = tmp_path / "real.jsonl", tmp_path / "page.md"
    first = suite("two_towers", "--work", "inference", out=out)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = first.stdout.splitlines()
    assert lines[1] == "1 of 1 measured, 0 left for the next run, 0 failures"
    assert lines[-1] == "cpu: does not hold: at least 12 models in default mode: 1 so far"
    (record,) = tables.read(out)
    assert set(record["backends"]) == {"eager", "inductor", "tilewright"}
    for row in record["backends"].values():
        assert len(row["rounds_ms"]) == 3 and row["error"] < 1e-5 and row["peak_mb"] > 0
    assert set(record["speed"]) == {"eager", "inductor"} and record["failures"] == []

    second = suite("two_towers", "--work", "inference", "--markdown", str(page), out=out)
    assert second.returncode == 0 and len(out.read_text().splitlines()) == 1
    assert "| two_towers | inference | default |" in page.read_text()

    nothing = suite("two_towers", "--work", "training", "--budget", "0", out=out)
    left = "0 of 1 measured, 1 left for the next run, 0 failures"
    assert nothing.stdout.splitlines() == [left, *lines[2:]]  # of all that the file has


def row(model: str, device: str, mode: str = "default", work: str = "inference",
        over: tuple[float, float] = (2.0, 1.2), *failures: str) -> tables.Record:  # fmt: skip
    seconds = {"eager": 0.0, "inductor": 9.0, "tilewright": 2.0}
    return {"model": model, "work": work, "mode": mode, "device": device, "size": "full",
            "speed": dict(zip(("eager", "inductor"), over, strict=True)),
            "failures": list(failures),
            "backends": {b: {"compile_s": s} for b, s in seconds.items()}}  # fmt: skip


def test_a_verdict_names_what_is_asked_and_the_rows_that_are_not_so() -> None:
    many = [row(f"m{k}", "cuda") for k in range(30)]
    tuned = [row(f"m{k}", "cuda", "max-autotune") for k in range(8)]
    more = [row("m0", "cuda", "reduce-overhead"), row("gpt2", "cuda", work="training")]
    good = verdict([*many, *tuned, *more])
    assert len(good) == 10 and all(line.startswith("cuda: holds: ") for line in good)

    for record in (*many, *tuned):
        record["backends"]["tilewright"]["compile_s"] = 4.5
    many[0]["speed"] = {"eager": 0.97, "inductor": 0.99}
    many[1]["speed"]["inductor"] = 1e-9
    many[2]["failures"] += ["wrong values: 1", "said: hello"]
    more[1]["speed"]["eager"] = 1.9
    bad = verdict([*many[:-2], *tuned[:-1], more[1]])
    assert not any(line.startswith("cuda: holds") for line in bad) and len(bad) == 10
    assert bad[2].endswith("eager by more than 2%: m0 inference default 0.97")
    assert bad[3].endswith("2%: m1 inference default 0.00")  # 0.99 is within 2 %
    assert bad[0].endswith("m2 inference default (wrong values: 1)")
    assert bad[1].endswith("m2 inference default (said: hello)")
    assert bad[6].endswith("and 23 more") and bad[9].endswith("gpt2 training default 1.90")


def test_a_verdict_of_a_cpu_asks_for_less() -> None:
    close = [row(f"m{k}", "cpu", over=(0.975, 0.975)) for k in range(12)]
    assert all(line.startswith("cpu: holds: ") for line in verdict(close))
    assert len(verdict(close)) == 5
    assert verdict([row("m", "cpu", over=(0.97, 1.0))])[2:] == [
        "cpu: does not hold: none slower than eager by more than 3%: m inference default 0.97",
        "cpu: holds: none slower than the reference by more than 3%",
        "cpu: does not hold: at least 12 models in default mode: 1 so far",
    ]


ALONE = """
import os, sys, time
from pathlib import Path
from bench.real.side_by_side import Gate
folder, other = Path(sys.argv[1]), Path(sys.argv[2])
def waits(path):
    while not path.exists():
        time.sleep(0.01)
(folder / "pid.draft").write_text(str(os.getpid()))
(folder / "pid.draft").rename(folder / "pid")
waits(other / "pid")
with Gate(folder).alone():
    process = Path("/proc", (other / "pid").read_text(), "stat")
    (folder / "state").write_text(process.read_text().rpartition(")")[2].split()[0])
waits(other / "state")
"""


def test_who_is_timed_is_alone(tmp_path: Path) -> None:
    """Each looks at the state the kernel gives for the other while it is timed: T is stopped."""
    other = {"one": "two", "two": "one"}

    def start(name: str) -> Running[str]:
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-c", ALONE, str(folder), str(tmp_path / other[name])]
        process = subprocess.Popen(command, start_new_session=True)
        return Running(name, folder, process, (folder / "said").open("w+b"), math.inf)

    ended = list(side_by_side.run(list(other), 2, start))
    assert [r.status for r in ended] == ["", ""]
    assert [(r.folder / "state").read_text() for r in ended] == ["T", "T"]
    for r in ended:
        assert float((r.folder / STOPPED).read_text()) == r.stopped > 0


def test_a_clock_leaves_out_the_seconds_in_which_its_process_was_stopped(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    for stopped in (0.0, 12.5):
        if stopped:
            (tmp_path / STOPPED).write_text(str(stopped))
        before, counted, after = time.perf_counter(), gate.clock(), time.perf_counter()
        assert before <= counted + stopped <= after


def test_a_recorded_failure_fails_the_run(tmp_path: Path) -> None:
    out = tmp_path / "real.jsonl"
    task = {"model": "nerf", "work": "inference", "mode": "default", "device": "cpu"}
    out.write_text(json.dumps({**task, "size": "tiny", "failures": ["wrong values: 1"]}) + '\n{"mo')
    found = suite("nerf", "--work", "inference", out=out)
    assert found.returncode == 1
    assert "failed: nerf inference default: wrong values: 1" in found.stdout


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    found = suite("resnet_of_mine", out=tmp_path / "real.jsonl")
    assert found.returncode == 2
    assert "no such model: resnet_of_mine (--list names them)" in found.stderr


@pytest.mark.parametrize("name", [m.name for m in zoo().values() if m.source == "torch.nn"])
def test_models_of_our_own_run_and_are_the_same_every_time(name: str) -> None:
    results: list[torch.Tensor] = []
    for _ in range(2):
        found = made(zoo()[name], "tiny", "cpu", torch.float32)
        with torch.no_grad():
            out = found.module.eval()(**found.inputs)
        results.append(out[0] if isinstance(out, tuple) else out)
    assert torch.equal(*results) and bool(torch.isfinite(results[0]).all())


def test_thirty_architectures_need_no_other_package() -> None:
    assert sum(m.source == "torch.nn" for m in zoo().values()) >= 30


def test_every_field_has_a_model() -> None:
    assert {m.field for m in zoo().values()} >= FIELDS


def test_errors_are_distances_from_the_exact_results() -> None:
    exact = {"outputs": [torch.tensor([1.0, -2.0, float("nan")]), torch.tensor([1e-9])]}
    near = {"outputs": [torch.tensor([1.0, -2.2, float("nan")]), torch.tensor([2e-9])]}
    assert error(near, exact) == pytest.approx(0.1)
    lost = {"outputs": [torch.tensor([1.0, float("nan"), float("nan")]), torch.tensor([1e-9])]}
    assert error(lost, exact) == float("inf")
    with pytest.raises(ValueError, match="1 outputs instead of 2"):
        error({"outputs": near["outputs"][:1]}, exact)
    assert is_wrong(float("nan"), 1.0, torch.float32)
    assert is_wrong(5 * LEAST[torch.float32], LEAST[torch.float32], torch.float32)
    assert not is_wrong(4 * LEAST[torch.float32], LEAST[torch.float32], torch.float32)


def test_what_one_says_alone_is_heard_from_every_process() -> None:
    ear = Ear()
    with ear.listening("reference"):
        print("took 12 s")
    with ear.listening("ours"):
        print("took 7 s")
        subprocess.run(
            [sys.executable, "-c", "import sys; sys.stderr.write('built\\n')"], check=True
        )
    assert ear.only("ours") == ["built"]
