"""The specified behaviours by id, and the tests that carry them.

A test carries an id by naming it: in its own name or parameters, in its docstring or in a comment
beside it. What no test carries is here with the reason, or it is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
ID = re.compile(r"\b((?:MA-[A-Q]|MP-|RI-|LO-|RD-|OS-|CK-|PD-|GB-|UT-|CG-)\d+)\b")

NAMED = re.compile(r"def test_((?:ma|mp|ri|lo|rd|os|ck|pd|gb|ut|cg)_[a-z0-9_]+)")

GROUPS: dict[str, tuple[str, int]] = {
    "MA-A": ("modes and options", 13),
    "MA-B": ("choices for products", 14),
    "MA-C": ("sums of two products", 4),
    "MA-I": ("empty and degenerate products", 5),
    "MA-J": ("epilogues", 19),
    "MA-K": ("prologues", 17),
    "MA-L": ("building ahead, and what is rendered once", 15),
    "MA-O": ("hooks, heuristics, filters", 13),
    "MA-P": ("layouts and concatenations", 13),
    "MA-Q": ("failures", 6),
    "MP-": ("memory planning", 10),
    "RI-": ("work in place", 8),
    "LO-": ("loop order and tiling", 15),
    "RD-": ("reductions", 11),
    "OS-": ("online softmax", 6),
    "CK-": ("shared launches", 10),
    "PD-": ("padding", 7),
    "GB-": ("group and batch fusion", 5),
    "UT-": ("users' Triton kernels", 10),
    "CG-": ("products on the CPU", 10),
}
"""Prefix of the ids, what they are about, how many there are."""

DOES_NOT_APPLY: dict[str, str] = {
    "MP-2": "host programs are Python: a tensor carved out of a pool keeps the pool alive itself",
    "MP-3": "programs are not packaged ahead of time; the size of a pool is computed at each call",
}
"""Behaviours that no test carries, and why: not built, or not of a structure like ours."""


@dataclass
class Coverage:
    """Where an id is tested: file names by folder."""

    cpu: set[str] = field(default_factory=set[str])
    compile: set[str] = field(default_factory=set[str])
    gpu: set[str] = field(default_factory=set[str])

    @property
    def places(self) -> list[str]:
        found = {"cpu": self.cpu, "compile": self.compile, "gpu": self.gpu}
        return [f"{folder}/{name}" for folder, names in found.items() for name in sorted(names)]


def ids() -> list[str]:
    return [f"{prefix}{k}" for prefix, (_, count) in GROUPS.items() for k in range(1, count + 1)]


def carried(text: str) -> set[str]:
    """The ids in a file, as they are written and as names of tests: `test_ma_o1_o2_savers`."""
    found = set(ID.findall(text))
    for name in NAMED.findall(text):
        prefix, *words = name.split("_")
        for word in words:
            if not re.fullmatch(r"[a-q]?\d+", word):
                break
            found.add(f"{prefix}-{word.lstrip('0')}".upper())
    return found


def coverage() -> dict[str, Coverage]:
    """For every id, the test files that carry it."""
    found = {name: Coverage() for name in ids()}
    for folder in ("cpu", "compile", "gpu"):
        for file in sorted((TESTS / folder).rglob("*.py")):
            for name in carried(file.read_text()) & found.keys():
                getattr(found[name], folder).add(file.stem)
    shared = (TESTS / "traffic.py").read_text()  # its cases run for both kinds of target
    for name in set(ID.findall(shared)) & found.keys():
        found[name].cpu.add("test_traffic")
        found[name].compile.add("test_traffic_gpu")
    return found
