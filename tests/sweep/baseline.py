"""Outcomes of the baseline backend, remembered outside the repository.

Whether a case passes with the baseline depends on torch alone, so it is asked once per version,
and only for cases that fail on the backend under test.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from tests.sweep.cases import DEVICE, Case
from tests.sweep.execute import Outcome

# Raise when the way cases are generated, run or compared changes their outcomes.
_REVISION = 2


def default_path() -> Path:
    chosen = os.environ.get("TILEWRIGHT_SWEEP_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else home / "tilewright-sweep"
    return folder / f"baseline-{DEVICE}-{torch.__version__}-{_REVISION}.jsonl"


class Baseline:
    """A dictionary of outcomes by case, appended to a file as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                case = record.pop("case")
                self._known[case] = Outcome(**record)

    def get(self, case: Case) -> Outcome | None:
        return self._known.get(str(case))

    def put(self, case: Case, outcome: Outcome) -> None:
        self._known[str(case)] = outcome
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"case": str(case), **outcome.as_dict()}) + "\n")
