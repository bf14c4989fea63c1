"""The generated pages on disk are what the code would generate now."""

from __future__ import annotations

import re

import pytest

from docs.generate import COUNTED, FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name):
    kept, made = (FOLDER / name).read_text(), PAGES[name]()
    if made_with(kept) != made_with(made):  # another torch has other operators
        kept, made = lists(kept), lists(made)
    assert kept == made, f"docs/{name} is old: run `make docs`"


def made_with(page: str) -> str:
    return (re.findall(r"with torch ([\d.]+)", page) or [""])[0]


def lists(page: str) -> dict[str, set[str]]:
    """The operators we have lowerings for, by their files."""
    return {
        file: set(names.split(", ")) for file, names in re.findall(r"\*\*`(.*)`\*\*: (.*)", page)
    }


@pytest.mark.parametrize("name", PAGES | COUNTED)
def test_the_index_names_the_page(name):
    assert f"({name})" in (FOLDER / "README.md").read_text()
