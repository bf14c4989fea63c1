"""Which ids tests carry, and what is said of them."""

from __future__ import annotations

from tests import behaviours

TEXT = '''
"""A module about MA-A1 carries nothing."""
# nor does MA-A2, in a comment
CASES = [Program("MA-K2 even", 1), Case(f"PF-10 {x}"), "a text in which MA-A3 is mentioned"]

def helper():
    """MA-A4: not a test."""

def test_ma_o1_o2_savers(): ...

def test_pf_06_and_more():
    # MA-A5
    """MA-L7 to MA-L9, RD-4."""

@case
def on_a_card():
    """MA-B3."""

def many() -> Iterator[tuple[str, Callable[[], None]]]:
    """MA-B4, each a case."""

def names() -> Iterator[str]:
    """MA-B5: no case."""
'''


def test_names_docstrings_and_cases_carry_ids_and_nothing_else_does() -> None:
    assert behaviours.carried(TEXT) == {
        "MA-K2", "PF-10", "MA-O1", "MA-O2", "PF-06", "MA-L7", "MA-L8", "MA-L9", "RD-4", "MA-B3",
        "MA-B4",
    }  # fmt: skip


def test_the_specification_is_whole() -> None:
    """Every group with its count, and a text for each id."""
    found = {group.prefix: len(group.behaviours) for group in behaviours.groups()}
    kinds: dict[str, int] = {}
    for prefix, count in found.items():
        kind = prefix.partition("-")[0]
        kinds[kind] = kinds.get(kind, 0) + count
    assert kinds["MA"] == 198 and kinds["CU"] + kinds["CD"] == 192 and kinds["PF"] == 72
    assert sum(kinds.values()) == 198 + 192 + 72 + 120
    assert all(b.text for group in behaviours.groups() for b in group.behaviours)


def test_what_is_said_is_of_behaviours_that_are() -> None:
    names = {b.name for group in behaviours.groups() for b in group.behaviours}
    known, tested = behaviours.judged(), behaviours.coverage()
    assert known.part.keys() | known.difference.keys() <= names
    assert not known.part.keys() & known.difference.keys()
    assert all(tested[name].places for name in known.part), "what has no test is not shown in part"
