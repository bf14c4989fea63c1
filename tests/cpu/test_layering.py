"""Imports go one way through the pipeline, and nothing is taken from torch's own compiler."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "tilewright"
# In pipeline order. A unit imports from itself and from units in earlier layers; only the first
# layer, which is not a stage, may import among its own.
LAYERS: list[set[str]] = [
    {
        "errors",
        "known_options",
        "options",
        "caches",
        "config",
        "rules",
        "target",
        "metrics",
        "monitor",
        "undisturbed",
    },
    {"ir"},
    {"graph"},
    {"lower"},
    {"schedule"},
    {"runtime"},
    {"tune"},
    {"codegen"},
    {"gemm"},
    {"attention"},
    {"host"},
    {"report"},
    {"dump"},  # writes any stage out for a reader
    {"pipeline"},
    {"sharing"},
    {"capture"},
    {"saved"},
    {"backend"},
    {"tuning"},
    {"explanation", "cli", "testing"},
    {"__main__"},
]
RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}


def unit_of(module: str) -> str:
    """`tilewright.lower.views` belongs to `lower`."""
    return module.split(".")[1]


def module_name(file: Path, package: Path) -> str:
    parts = [PACKAGE, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports, with the line: nested and type-checking imports too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = file.parent.relative_to(package).parts
                above = [PACKAGE, *folder][: len(folder) + 2 - node.level]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(package: Path) -> list[str]:
    """Imports that point from left to right, and files that belong to no layer."""
    found: list[str] = []
    for file in sorted(package.rglob("*.py")):
        module = module_name(file, package)
        if module == PACKAGE:
            continue  # the public door, whose eager imports test_import_time.py watches
        name = file.relative_to(package).as_posix()
        unit = unit_of(module)
        if unit not in RANK:
            found.append(f"{name}: add {unit!r} to the layers in test_layering.py")
            continue
        for line, imported in imports(file, package):
            if imported != PACKAGE and not imported.startswith(PACKAGE + "."):
                continue
            if imported == PACKAGE or unit_of(imported) not in RANK:
                found.append(f"{name}:{line}: {imported} is the public door; import the module")
                continue
            other = unit_of(imported)
            sibling = other == unit or RANK[other] == RANK[unit] == 0
            if not sibling and RANK[other] >= RANK[unit]:
                found.append(f"{name}:{line}: {unit} may not import {other}")
    return found


def uses_inductor(text: str) -> list[int]:
    """Lines that reach into torch._inductor: imports, attributes, and generated-code strings."""
    tree = ast.parse(text)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    lines: list[int] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                hit = any("torch._inductor" in alias.name for alias in names)
            case ast.ImportFrom(module=str() as base, names=names):
                hit = any("torch._inductor" in f"{base}.{alias.name}" for alias in names)
            case ast.Attribute(attr="_inductor"):
                hit = True
            case ast.Constant(value=str() as value):
                hit = "torch._inductor" in value and id(node) not in docstrings
            case _:
                hit = False
        if hit:
            lines.append(node.lineno)
    return lines


def test_imports_only_go_one_way(root):
    assert violations(root / "src" / PACKAGE) == []


def test_nothing_comes_from_inductor(root):
    package = root / "src" / PACKAGE
    hits = {
        file.relative_to(package).as_posix(): lines
        for file in package.rglob("*.py")
        if (lines := uses_inductor(file.read_text()))
    }
    assert hits == {}


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("ir/expr.py", "from tilewright.lower import table", "ir may not import lower"),
        ("ir/expr.py", "from tilewright import schedule", "ir may not import schedule"),
        ("ir/expr.py", "from ..codegen.cpp import text", "ir may not import codegen"),
        ("ir/sub/deep.py", "from ...host import x", "ir may not import host"),
        ("lower/a.py", "def f():\n    import tilewright.pipeline", "lower may not import pipeline"),
        ("host/a.py", "from tilewright import __version__", "public door"),
        ("extra/a.py", "", "add 'extra' to the layers"),
        ("config.py", "from tilewright.ir import expr", "config may not import ir"),
    ],
)
def test_the_check_finds_wrong_imports(tmp_path, file, text, complaint):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("lower/a.py", "from tilewright.ir import expr\nfrom . import b\nfrom ..config import cpp"),
        ("config.py", "from tilewright.errors import TilewrightError"),
        ("pipeline.py", "from tilewright.host import program"),
        ("backend.py", "from tilewright import config, pipeline\nimport torch"),
    ],
)
def test_the_check_accepts_right_imports(tmp_path, file, text):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._inductor.config",
        "from torch._inductor import ir",
        "from torch import _inductor",
        "def f():\n    return torch._inductor.ir",
        "CODE = 'from torch._inductor.runtime import x'",
    ],
)
def test_the_check_finds_inductor(text):
    assert uses_inductor(text)
    assert not uses_inductor('"""Unlike torch._inductor, this file says why."""\nimport torch')
