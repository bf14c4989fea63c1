"""The generated pages on disk are what the code would generate now."""

from __future__ import annotations

import pytest

from docs.generate import COUNTED, FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name):
    assert (FOLDER / name).read_text() == PAGES[name](), f"docs/{name} is old: run `make docs`"


@pytest.mark.parametrize("name", PAGES | COUNTED)
def test_the_index_names_the_page(name):
    assert f"({name})" in (FOLDER / "README.md").read_text()
