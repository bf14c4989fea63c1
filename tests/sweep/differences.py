"""The checked-in list of known differences, and the page of the documentation made from it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sweep.cases import DIRECTIONS, DTYPES, MODES, Case, Group

LIST = Path(__file__).with_name("differences.toml")
PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
_HEAD = """# Differences from eager

<!-- Generated from tests/sweep/differences.toml by: python -m tests.sweep --write-docs -->

PyTorch ships sample inputs for its own operators (`op_db`). Each sample is run for float32,
bfloat16, int64 and bool, with static and dynamic shapes, forward and backward, eagerly and
compiled. The rule is: a sample that passes with `backend="aot_eager"` passes with
`backend="tilewright"`. This page lists every known exception to it.

Random operators are compared with `fallback_random`, which draws eager's random numbers.
A part of the sweep runs with `make test`, all of it with `make test-all`.
"""


@dataclass(frozen=True)
class Difference:
    group: Group
    samples: tuple[int, ...]
    reason: str


def load(path: Path = LIST) -> list[Difference]:
    entries = tomllib.loads(path.read_text()).get("difference", [])
    return [_parse(entry, path) for entry in entries]


def by_case(differences: list[Difference]) -> dict[Case, str]:
    """Reason by case; a case listed twice is an error in the list."""
    found: dict[Case, str] = {}
    for difference in differences:
        for sample in difference.samples:
            case = Case(difference.group, sample)
            if case in found:
                raise ValueError(f"{LIST.name} lists {case} twice: merge the entries")
            found[case] = difference.reason
    return found


def render(differences: list[Difference]) -> str:
    if not differences:
        return f"{_HEAD}\nThere are none.\n"
    rows = [
        f"| `{d.group.op}` | {d.group.dtype} | {d.group.mode} | {d.group.direction} "
        f"| {', '.join(map(str, d.samples))} | {d.reason} |"
        for d in sorted(differences, key=lambda d: d.group)
    ]
    head = "| operator | dtype | shapes | direction | samples | reason |\n|---|---|---|---|---|---|"
    return f"{_HEAD}\n{head}\n" + "\n".join(rows) + "\n"


def _parse(entry: dict[str, Any], path: Path) -> Difference:
    allowed = {"dtype": tuple(DTYPES), "mode": MODES, "direction": DIRECTIONS}
    fields = {"op", "samples", "reason", *allowed}
    if set(entry) != fields:
        raise ValueError(f"{path.name}: {entry} must have exactly {sorted(fields)}")
    for key, values in allowed.items():
        if entry[key] not in values:
            raise ValueError(f"{path.name}: {key} of {entry} must be one of {values}")
    if not entry["reason"].strip() or not entry["samples"]:
        raise ValueError(f"{path.name}: {entry} needs a reason and at least one sample")
    group = Group(entry["op"], entry["dtype"], entry["mode"], entry["direction"])
    return Difference(group, tuple(entry["samples"]), entry["reason"])
