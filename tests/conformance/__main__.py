"""Command line: `python -m tests.conformance --help`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.conformance import cases, report
from tests.conformance.cases import OURS, REFERENCE, Result
from tests.conformance.judge import verdict


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    made.add_argument("--tree", type=Path, required=True, help="PyTorch's source tree")
    made.add_argument("--out", type=Path, required=True, help="folder of the results")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--sample", type=int, default=600, help="how many tests, of all files")
    made.add_argument("--least", type=int, default=10, help="of each file at least")
    made.add_argument("--file", action="append", choices=cases.FILES, help="these files alone")
    made.add_argument("--test", action="append", help="these tests alone, by their whole names")
    made.add_argument("--check", type=float, default=0.25, metavar="PART",
                      help="of those that pass with ours, run with the reference too")  # fmt: skip
    made.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="per test")
    made.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                      help="begin nothing after this long: the same command goes on")  # fmt: skip
    made.add_argument("--again", action="store_true", help="ours once more where it had failed")
    made.add_argument("--report", action="store_true", help="run nothing, print what is known")
    return made


class Worker:
    """A process that has imported a file of tests, with one backend."""

    def __init__(self, tree: Path, out: Path, file: str, backend: str) -> None:
        command = [sys.executable, "-m", "tests.conformance.worker", str(tree), file, backend]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TILEWRIGHT_CACHE_DIR": str((out / "cache").resolve()),
        }
        self._log = (out / f"{file}.{backend}.log").open("w")
        self.process = subprocess.Popen(command, env=environment, text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self._log)  # fmt: skip
        self.tests: list[str] = self._answer()

    def run(self, test: str, limit: float) -> Result:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([test, limit]) + "\n")
        return Result(**self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended: {self._log.name} says why")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()
        self._log.close()


class Run:
    """Results so far, each also a line of a file."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.until = time.monotonic() + asked.budget
        asked.out.mkdir(parents=True, exist_ok=True)
        self.path: Path = asked.out / "results.jsonl"
        self.names: Path = asked.out / "tests.json"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        results = [Result(**json.loads(line)) for line in lines]
        self.known = {(r.test, r.backend): r for r in results}  # a later one replaces an earlier
        self.tests: dict[str, list[str]] = (
            json.loads(self.names.read_text()) if self.names.exists() else {}
        )

    def count(self, files: Iterable[str]) -> None:
        for file in files:
            if file not in self.tests:
                with Worker(self.asked.tree, self.asked.out, file, REFERENCE) as worker:
                    self.tests[file] = worker.tests
                self.names.write_text(json.dumps(self.tests))

    def run(self, file: str, backend: str, tests: Iterable[str]) -> None:
        left = [test for test in tests if (test, backend) not in self.known]
        if not left or time.monotonic() > self.until:
            return
        with Worker(self.asked.tree, self.asked.out, file, backend) as worker:
            for test in left:
                if time.monotonic() > self.until:
                    return
                self._keep(worker.run(test, self.asked.timeout))

    def _keep(self, result: Result) -> None:
        self.known[result.test, result.backend] = result
        with self.path.open("a") as lines:
            lines.write(json.dumps(result.as_dict()) + "\n")
        if result.failed:
            said = result.error.splitlines()[0][:120] if result.error else ""
            print(f"{result.backend} {result.status}: {result.file}::{result.test}: {said}",
                  flush=True)  # fmt: skip

    def forget_failures(self) -> None:
        """Ours, where it failed: they are run once more."""
        self.known = {k: r for k, r in self.known.items() if r.backend != OURS or not r.failed}

    def drawn(self, numbers: Mapping[str, int]) -> dict[str, list[str]]:
        """The tests of each file, by how many are asked for."""
        if self.asked.test:
            wanted = set(self.asked.test)
            return {file: sorted(wanted & set(self.tests[file])) for file in numbers}
        seed = self.asked.seed
        return {f: cases.drawn(self.tests[f], f, seed, number) for f, number in numbers.items()}

    def both(self, drawn: Mapping[str, list[str]]) -> None:
        """Ours on all of them, and then the reference where that says something."""
        for file, tests in drawn.items():
            self.run(file, OURS, tests)
        for file, tests in drawn.items():
            self.run(file, REFERENCE, [test for test in tests if self._is_checked(file, test)])

    def _is_checked(self, file: str, test: str) -> bool:
        ours = self.known.get((test, OURS))
        if ours is None or ours.status in ("skipped", "expected failure"):
            return False
        if ours.failed:
            return not verdict(ours)
        return bool(ours.graphs) and cases.is_checked(file, test, self.asked.seed, self.asked.check)


def main() -> None:
    asked = parser().parse_args()
    run = Run(asked)
    files: list[str] = asked.file or list(cases.FILES)
    if not asked.report:
        run.count(files)
        if asked.again:
            run.forget_failures()
        sizes = {file: len(run.tests[file]) for file in files}
        run.both(run.drawn(cases.shares(sizes, asked.sample, asked.least)))
    sizes = {file: len(run.tests[file]) for file in files if file in run.tests}
    chosen = [r for r in run.known.values() if r.file in sizes]
    print("\n".join(report.table(report.parts(sizes, chosen))))


if __name__ == "__main__":
    main()
