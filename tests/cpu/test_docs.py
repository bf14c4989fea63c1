"""The generated pages on disk are what the code would generate now."""

from __future__ import annotations

import re

import pytest
import torch

from docs.generate import COUNTED, FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name):
    kept, made = (FOLDER / name).read_text(), PAGES[name]()
    if made_with(kept) == made_with(made):
        assert kept == made, f"docs/{name} is old: run `make docs`"
    else:  # another torch has other operators
        assert not {op for op in native(kept) - native(made) if exists(op)}


def made_with(page: str) -> str:
    return (re.findall(r"with torch ([\d.]+)", page) or [""])[0]


def native(page: str) -> set[str]:
    """The operators we have lowerings for."""
    lists = re.findall(r"\*\*`.*`\*\*: (.*)", page)
    return {name for names in lists for name in names.split(", ")}


def exists(op: str) -> bool:
    return torch._C._dispatch_has_kernel(f"aten::{op.removesuffix('.default')}")


@pytest.mark.parametrize("name", PAGES | COUNTED)
def test_the_index_names_the_page(name):
    assert f"({name})" in (FOLDER / "README.md").read_text()
