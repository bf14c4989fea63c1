"""Every test runs with its own cache, full IR checks, and options as it found them."""

from __future__ import annotations

import collections
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Options are read from the environment when tilewright is imported, and child processes (xdist
# workers, scripts under test) inherit it: so this comes before any import of tilewright.
_OWN_CACHE = None
if "TILEWRIGHT_CACHE_DIR" not in os.environ:
    _OWN_CACHE = os.environ["TILEWRIGHT_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilewright_tests_")
os.environ.setdefault("TILEWRIGHT_VERIFY_IR", "1")

from bench.dynamo import without_statistics  # noqa: E402
from tests import fewer, sizes  # noqa: E402
from tests.ours import ours  # noqa: E402
from tilewright import config, metrics  # noqa: E402

ROOT = Path(__file__).parent.parent

# What a compilation makes is mostly kept, or freed by counts: the collector's frequent looks at all
# of it are a tenth of a run (lowering's tests: 66 s of processor time with Python's limits, 59 so).
gc.set_threshold(100_000, 50, 100)


def pytest_sessionfinish() -> None:
    if pretend := sys.modules.get("tests.pretend"):
        pretend.stop()


def pytest_unconfigure() -> None:
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    fewer.mark_slow(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules are not looked at again by what collects


SLOWEST = 30  # files, whose seconds a run ends with


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > SLOWEST:
        terminalreporter.section(f"seconds of {sum(seconds.values()):.0f} by file")
        for name, spent in seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{spent:7.1f} {name}")
    terminalreporter.section("size of src/tilewright")
    for line in sizes.report(ROOT / "src" / "tilewright"):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Counters at zero, nothing compiled, torch seeded; and no option left changed."""
    metrics.reset()
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        # pytest listens to loggers that do not propagate, and this one's listeners are given the
        # text of every graph of every compilation.
        logging.getLogger("torch.__trace").propagate = True
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
            without_statistics()
    before = config.snapshot()
    with ours():
        yield
    after = config.snapshot()
    changed = {name: value for name, value in after.items() if value != before[name]}
    for name, value in before.items():
        _set(name, value)
    assert not changed, f"the test left options changed: {changed}"


def _set(name: str, value: object) -> None:
    group, _, leaf = name.rpartition(".")
    setattr(getattr(config, group) if group else config, leaf, value)


@pytest.fixture
def in_a_process(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """Runs a script in a process of its own, on a cache of this test's; gives what it prints last,
    which is JSON."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))

    def run(script: str) -> Any:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                              check=False, cwd=root)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def root() -> Path:
    """The root of the repository."""
    return ROOT
