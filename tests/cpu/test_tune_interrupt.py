"""Ctrl-C while tuning: no process stays, what was measured is kept, the next run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpu.fake_trials import Fake, FakeClock, FakeTime, aten, subject, use
from tests.cpu.interrupted import COUNT
from tilewright import config
from tilewright.testing import fresh_cache
from tilewright.tune import select

HERE = Path(__file__).parents[2]
COMPILER = """
import sys, time
from tilewright.runtime import triton_build
from tilewright.runtime.triton_build import TritonConfig, TritonSource
body = "\\n".join(f"    x = x * {k}.5 + tl.exp(x)" for k in range(400))
text = ("import triton\\nimport triton.language as tl\\n\\n\\n@triton.jit\\n"
        "def kernel(p):\\n    x = tl.load(p)\\n" + body + "\\n    tl.store(p, x)\\n")
source = TritonSource(text, "kernel", (("p", "*fp32"),), (TritonConfig(),), 90, 1 << 17)
wait = triton_build.submit(source)
time.sleep(float(sys.argv[1]))
print("building", flush=True)
wait.result()
time.sleep(60)
"""


def _listen() -> None:
    """Whoever runs the tests in the background may have interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A process, and all that it starts, known by a mark in their environment."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.mark = f"TILEWRIGHT_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        path = os.pathsep.join((str(HERE / "src"), str(HERE)))
        env = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(folder), "PYTHONPATH": path, name: value}
        self.process = subprocess.Popen([sys.executable, *command], env=env, text=True, cwd=HERE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, preexec_fn=_listen)  # fmt: skip

    def until(self, said: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == said:
                return
        raise AssertionError(self.process.communicate()[1])

    def interrupt(self, group: bool) -> str:
        """As the keyboard does (all of the foreground), or to the process alone. What it says."""
        (os.killpg if group else os.kill)(self.process.pid, signal.SIGINT)
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode != 0
        return errors

    def left(self) -> list[str]:
        """Processes that are still there, after a moment in which they may end."""
        end = time.monotonic() + 20
        while (found := list(self._alive())) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _alive(self) -> Iterator[str]:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if marked and state != "Z":
                    yield (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, IndexError):
                continue


def program(folder: Path, *more: str) -> Run:
    return Run(folder, "-m", "tests.cpu.interrupted", *more)


def timed(folder: Path) -> int:
    run = program(folder)
    said, errors = run.process.communicate()
    assert run.process.returncode == 0, errors
    return int(said.split()[-1])


def test_interrupted_while_timing(tmp_path: Path) -> None:
    run = program(tmp_path, "slow_9")
    run.until("at slow_9")
    said = run.interrupt(group=True)
    last = said.splitlines()[-1]
    assert last.startswith("KeyboardInterrupt: while mm 33x24x20 float32 was tuned:")
    assert last.endswith("what was measured is kept, and the next run goes on from there")
    assert "select.py" not in said, "nobody wants to read the whole way there"
    assert run.left() == []
    again = timed(tmp_path)
    assert 0 < again <= COUNT - 6, "what was measured is not measured again, but for who may win"
    assert timed(tmp_path) == 0


def test_interrupted_while_building(tmp_path: Path) -> None:
    run = program(tmp_path, "building")
    run.until("building")
    assert "KeyboardInterrupt" in run.interrupt(group=False)
    assert run.left() == []
    assert not list(tmp_path.rglob("*.tmp")), "nor half a file"


@pytest.mark.parametrize("seconds", ["0", "3"])
def test_interrupted_while_triton_compiles(tmp_path: Path, seconds: str) -> None:
    """Its compiling processes are of a session of their own; they end with who asked."""
    run = Run(tmp_path, "-c", COMPILER, seconds)
    run.until("building")
    run.interrupt(group=True)
    assert run.left() == []


# ---- the budget


def slow_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> FakeTime:
    """Every sample takes so long, by a clock on the wall that nobody waits for."""
    clock, wall = use(monkeypatch, FakeClock()), FakeTime(monkeypatch)
    clock.on_sample = lambda trial: wall.advance(seconds)
    return wall


@pytest.mark.parametrize("budget", [0.0, 0.3])
def test_a_budget_is_kept_up_to_one_candidate(
    monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    """Forty candidates of which each would take a tenth of a second: the budget and one of them
    are spent, and what is taken is not slower than the library."""
    sample = 0.05
    wall = slow_clock(monkeypatch, sample)
    trials = [aten(100.0), *(Fake(f"t{k}", 150.0 - k) for k in range(40))]
    with fresh_cache(), config.patch(autotune_budget_seconds=budget, autotune_effort="max"):
        verdict = select.choose(subject("budget"), trials)
    assert wall.now <= budget + 2 * sample + 1e-9, "all of them take four seconds"
    assert wall.now >= min(budget, sample), "and it is used"
    assert verdict.winner is trials[0], "nobody was seen to be faster"
    assert not verdict.complete


def test_a_budget_is_shared_by_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = slow_clock(monkeypatch, 0.02)
    with fresh_cache(), config.patch(autotune_budget_seconds=0.5, autotune_effort="max"):
        with select.budget(5):
            for k in range(5):
                trials = [
                    aten(100.0),
                    Fake("best", 50.0),
                    *(Fake(f"t{j}", 99.0) for j in range(30)),
                ]
                found = select.choose(subject(f"shared {k}"), trials).winner
                assert found.name in ("mm", "best")
        assert 0.4 <= wall.now <= 0.5 + 5 * 0.06, "all of them take six seconds"
