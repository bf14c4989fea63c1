"""The percentage, and what it is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.conformance.cases import OURS, REFERENCE, Result
from tests.conformance.judge import verdict


@dataclass
class Part:
    """Of one file, or of all."""

    exist: int = 0
    drawn: int = 0
    not_run: int = 0  # skipped, or expected to fail, with ours
    nothing_compiled: int = 0  # passed with ours without giving it a graph
    passed: int = 0
    checked: int = 0  # of those that passed with ours, run with the reference too
    checked_passed: int = 0
    also_theirs: int = 0  # fail with both
    inner: Counter[str] = field(default_factory=Counter)  # of what only the reference has
    ours: list[Result] = field(default_factory=list)

    def add(self, other: Part) -> None:
        for name in ("exist", "drawn", "not_run", "nothing_compiled", "passed", "checked",
                     "checked_passed", "also_theirs"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.inner.update(other.inner)
        self.ours += other.ours

    @property
    def rate(self) -> float:
        """Of the tests that pass with the reference, the part that passes with ours. Those that
        fail with ours count where the reference does not fail them; of those that pass, a part
        drawn at random was run with it."""
        share = self.checked_passed / self.checked if self.checked else 1.0
        both = self.passed * share
        return both / (both + len(self.ours)) if both + len(self.ours) else 1.0


def parts(sizes: Mapping[str, int], results: Iterable[Result]) -> dict[str, Part]:
    found = {(r.test, r.backend): r for r in results}
    made = {file: Part(exist=number) for file, number in sizes.items()}
    for (test, backend), ours in found.items():
        if backend == OURS:
            _count(made[ours.file], ours, found.get((test, REFERENCE)))
    return made


def _count(part: Part, ours: Result, reference: Result | None) -> None:
    part.drawn += 1
    if ours.status in ("skipped", "expected failure"):
        part.not_run += 1
    elif not ours.failed:
        if not ours.graphs:
            part.nothing_compiled += 1
            return
        part.passed += 1
        if reference is not None:
            part.checked += 1
            part.checked_passed += reference.status == "passed"
    elif reason := verdict(ours):
        part.inner[reason] += 1
    elif reference is not None and reference.failed:
        part.also_theirs += 1
    else:
        part.ours.append(ours)


def table(of: Mapping[str, Part]) -> Iterator[str]:
    yield ("| file | tests | drawn | skipped | nothing compiled | passed | of these run with the "
           "reference: passed | failed with both | of the reference's own | failed |")  # fmt: skip
    yield "|---|" + "---:|" * 9
    whole = Part()
    for file, part in of.items():
        whole.add(part)
        yield _row(file, part)
    yield _row("all", whole)
    yield ""
    yield f"{100 * whole.rate:.2f} % of the tests that pass with the reference pass with ours."
    for why, number in whole.inner.most_common():
        yield f"- of the reference's own: {why}: {number}"
    for result in whole.ours:
        yield f"- failed: {result.file}::{result.test}: {result.status} {result.error[:150]!r}"


def _row(name: str, part: Part) -> str:
    cells = (part.exist, part.drawn, part.not_run, part.nothing_compiled, part.passed,
             f"{part.checked_passed} of {part.checked}", part.also_theirs,
             sum(part.inner.values()), len(part.ours))  # fmt: skip
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"
