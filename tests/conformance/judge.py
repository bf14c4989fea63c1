"""What a failure is: ours, or of what only the reference has.

A test that fails with ours and passes with the reference is ours, unless the statement that failed
asks for something of the reference's own: then the reference is not asked. Which statements do is
said here, by what they read; tests that no such rule finds are named in `named.toml`, each with its
reason.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path

from tests.conformance.cases import Result

RULES = {
    "the text of its kernels": r"FileCheck|\bcodes?\b|source_code|\bkernels\b|run_and_get",
    "its counts of kernels and bytes": r"metrics\.|[kK]ernelCount|num_kernels",
    "the text of its graphs": r"graph_inductor|post_grad_graphs|assertExpectedInline",
    "a card": r"cuda|GPU_TYPE",
    "its counts of patterns it matched": r"counters\[|counters\.",
    "its messages and types of errors": r"InductorError|LoweringException|torch\._inductor\.exc",
    "its programs for use without Python": r"aoti|aot_inductor|AOTI|aot_compile",
}


@functools.cache
def named() -> dict[str, str]:
    """How a test's method begins -> the reason; the rest of its name is the device and the like."""
    text = (Path(__file__).parent / "named.toml").read_text()
    return {test: why for why, tests in tomllib.loads(text).items() for test in tests}


def verdict(result: Result) -> str:
    """Why a failure with ours says nothing about us; empty: it is ours if the reference passes."""
    method = result.test.rpartition(".")[2]
    known = next((why for test, why in named().items() if method.startswith(test)), "")
    if known or result.status != "failed":
        return known
    statement = result.place.partition(": ")[2]
    return next((why for why, pattern in RULES.items() if re.search(pattern, statement)), "")
