"""The timed rules: each says what it prefers, its programs exist, and decide what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.pretend import pretended, run
from tilewright import rules
from tilewright.rules import Rule
from tilewright.testing import limited

SOURCES = Path(rules.__file__).parent
MOST_THRESHOLDS = 60  # outside the rules: budgets of the compiler's own effort, and layouts


def _decides(name: str, place: int) -> bool:
    from bench.rules import decides  # believes in a card when it is imported

    return decides(name, getattr(rules, name).evidence[place])


@pretended
def test_every_program_of_evidence_exists_and_its_rule_can_be_left_out() -> None:
    from bench.rules import named, program

    found = named()
    assert len(found) > 100
    for name, rule in found.items():
        assert rule.when and rule.prefer, name
        for timing in rule.evidence:
            assert rule.without(timing) not in (None, rule.limit), name
            assert program(timing).fn.__code__.co_argcount > 0, timing.program


@pytest.mark.parametrize(("name", "place"), [("PRELOADED_MISALIGNED", 0), ("CHUNKED_ROW", 1)])
def test_a_program_has_another_kernel_without_its_rule(name: str, place: int) -> None:
    assert run(_decides, name, place)


def test_a_rule_holds_again_after_another_limit_did() -> None:
    before = rules.CHUNKED_ROW
    with limited("CHUNKED_ROW", 5):
        assert Rule("most", 5, before.when, before.prefer, before.evidence) == rules.CHUNKED_ROW
    assert rules.CHUNKED_ROW is before


def test_few_thresholds_have_names_outside_the_rules() -> None:
    found = [f"{file.name}: {ast.unparse(statement)}"
             for folder in ("codegen/triton", "schedule")
             for file in (SOURCES / folder).rglob("*.py")
             for statement in ast.parse(file.read_text()).body
             if isinstance(statement, ast.Assign) and _is_number(statement.value)]  # fmt: skip
    assert len(found) <= MOST_THRESHOLDS, found


def _is_number(value: ast.expr) -> bool:
    nodes = list(ast.walk(value))
    numbers = any(isinstance(n, ast.Constant) and isinstance(n.value, int | float) for n in nodes)
    return numbers and not any(isinstance(n, ast.Dict | ast.JoinedStr) for n in nodes)
