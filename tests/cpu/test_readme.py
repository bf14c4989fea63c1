"""What the documents show works: Python blocks run, commands and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[object]:
    """The fenced blocks of a language in all documents, as pytest parameters."""
    return [
        pytest.param(code, id=f"{document.name}:{document.read_text()[:start].count(chr(10)) + 1}")
        for document in DOCUMENTS
        for found, code, start in (
            (m[1], m[2], m.start()) for m in _FENCE.finditer(document.read_text())
        )
        if found == language
    ]


def test_the_readme_has_an_example():
    readme = (ROOT / "README.md").read_text()
    assert any(m[1] == "python" for m in _FENCE.finditer(readme))


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # A block that promises output in comments (`print(x)  # 3`) must print exactly that.
    promised = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert done.stdout.splitlines()[: len(promised)] == promised


@pytest.mark.parametrize("code", blocks("sh"))
def test_commands_exist(code):
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for line in code.splitlines():
        if line.startswith("make "):
            assert line.split()[1] in targets, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if "://" not in link:
            assert (document.parent / link).exists(), link
