"""`python -m tests.conformance.worker TREE FILE BACKEND`: a process that has imported one file of
tests, and forks for each of them. Requests and answers are lines of JSON."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tests.conformance.cases import OURS, Result


class Outcome(unittest.TestResult):
    """What became of one test, with where it failed."""

    def __init__(self, tree: Path) -> None:
        super().__init__()
        self.tree = tree
        self.facts: dict[str, str] = {"status": "passed"}

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.facts = {"status": "skipped", "error": reason}

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.facts = {"status": "expected failure"}

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._note(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(err)

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note(err)

    def _note(self, err: Any) -> None:
        kind, value, trace = err
        frames = traceback.extract_tb(trace)
        near = [f for f in frames if Path(f.filename).is_relative_to(self.tree / "test")]
        self.facts = {
            "status": "failed",
            "error": f"{kind.__name__}: {value}"[:1500],
            "place": _statement(near[-1]) if near else "",
            "trace": "".join(traceback.format_exception(kind, value, trace))[-6000:],
        }


def _statement(frame: traceback.FrameSummary) -> str:
    lines = Path(frame.filename).read_text().splitlines()
    first = frame.lineno or 1
    last: int = getattr(frame, "end_lineno", None) or first
    text = " ".join(line.strip() for line in lines[first - 1 : last])
    return f"{Path(frame.filename).name}:{first}: {text}"[:500]


def _tests(suite: Any) -> Iterator[unittest.TestCase]:
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from _tests(part)
        else:
            yield part


def main() -> None:
    tree, file, backend = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what tests print is not an answer
    sys.argv = [str(tree / f"test/inductor/{file}.py")]  # torch's helpers read the command line
    sys.path[:0] = [str(tree / "test/inductor"), str(tree / "test")]
    from tests.conformance import redirect

    if backend == OURS:
        redirect.to_tilewright()
    else:
        redirect.count_graphs()
    module = importlib.import_module(file)
    found = _tests(unittest.defaultTestLoader.loadTestsFromModule(module))
    tests = {test.id(): test for test in found}
    answers.write(json.dumps(sorted(tests)) + "\n")
    for line in sys.stdin:
        name, limit = json.loads(line)
        result = _apart(tree, file, backend, tests[name], limit)
        answers.write(json.dumps(result.as_dict()) + "\n")


def _apart(tree: Path, file: str, backend: str, test: unittest.TestCase, limit: float) -> Result:
    """Run a test in a fork of this process."""
    reader, writer = os.pipe()
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(tree, test, writer, said)
        os.close(writer)
        told = _read(reader, begun + limit)
        late = told is None and time.monotonic() >= begun + limit
        _end(pid)
        status = os.waitpid(pid, 0)[1]
        said.seek(0)
        last_words = said.read()[-3000:]
    facts: dict[str, Any] = json.loads(told) if told else {}
    if not facts and late:
        facts = {"status": "out of time", "trace": last_words}
    elif not facts:
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        name = signal.Signals(signalled).name if signalled else f"exit {os.WEXITSTATUS(status)}"
        facts = {"status": "crashed", "error": name, "trace": last_words}
    return Result(file, test.id(), backend, seconds=round(time.monotonic() - begun, 2), **facts)


def _child(tree: Path, test: unittest.TestCase, writer: int, said: TextIO) -> None:
    from tests.conformance import redirect

    os.setsid()
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    faulthandler.enable(said)
    outcome = Outcome(tree)
    try:
        unittest.TestSuite([test]).run(outcome)
    except BaseException:  # a test may end its process
        outcome.facts = {"status": "crashed", "trace": traceback.format_exc()[-3000:]}
    facts = {**outcome.facts, "graphs": redirect.graphs_seen}
    os.write(writer, json.dumps(facts).encode())
    os._exit(0)


def _read(reader: int, until: float) -> str | None:
    """What the child says before it ends; none if it ended, or time did, without a word."""
    parts: list[bytes] = []
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while (left := until - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
            if not (part := pipe.read(1 << 16)):
                break
            parts.append(part)
    return b"".join(parts).decode() or None


def _end(pid: int) -> None:
    """Ends a child's whole group: what it had started ends too."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
