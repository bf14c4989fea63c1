"""How big the package is: code lines per folder, the largest file, the longest functions."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
LONG_FUNCTION = 100


def code_lines(text: str) -> int:
    """Lines that hold code: blank lines, comments and docstrings do not count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Every function with its number of lines, decorators not counted."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def report(package: Path) -> list[str]:
    """The lines of the size report for a package folder."""
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long: list[str] = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text()
        name = file.relative_to(package).as_posix()
        folders[name.partition("/")[0] + "/" if "/" in name else "(top)"] += code_lines(text)
        files[name] = len(text.splitlines())
        long += [
            f"{name}:{function} ({lines})"
            for function, lines in functions(text)
            if lines > LONG_FUNCTION
        ]
    width = max(map(len, folders), default=0)
    rows = [f"{name:<{width}} {count:>6}" for name, count in folders.most_common()]
    largest, length = files.most_common(1)[0]
    return [
        *rows,
        f"{'total':<{width}} {folders.total():>6} code lines in {len(files)} files",
        f"largest file: {largest}, {length} lines",
        f"functions over {LONG_FUNCTION} lines: {', '.join(sorted(long)) or 'none'}",
    ]
