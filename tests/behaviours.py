"""The specified behaviours by id, and the tests that carry them.

What an id means is in `docs/spec`. A test carries an id in its own name, in its docstring, or in a
text that begins with it and stands for a case (`Program("MA-K2", ...)`): comments carry nothing.
`behaviours.toml` says what tests leave out of a behaviour, and what is different here and why.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
SPEC = TESTS.parent / "docs" / "spec"

KIND = r"(?:MA-|CU-|CD-|PF-|MP-|RI-|LO-|RD-|OS-|CK-|PD-|GB-|F8-|UT-|BM-|CG-|AO-)"
ID = re.compile(rf"\b({KIND}[A-Z]?\d+)(?![\d])")
RANGE = re.compile(rf"\b({KIND}[A-Z]?)(\d+) to (?:{KIND}[A-Z]?)?(\d+)\b")
CASE = re.compile(rf"({KIND}[A-Z]?\d+)[a-z]?(?:$|\W.*)", re.S)
NAMED = re.compile(r"test_(ma|cu|cd|pf|mp|ri|lo|rd|os|ck|pd|gb|f8|ut|bm|cg|ao)_([a-z0-9_]+)$")
SHARED = {  # cases in a module of their own, and the tests that run them
    "traffic.py": (("cpu", "test_traffic"), ("compile", "test_traffic_gpu")),
    "gemm_programs.py": (("cpu", "test_gemm_programs"), ("compile", "test_gemm_programs_triton")),
}
FOLDERS = ("cpu", "compile", "gpu")


@dataclass(frozen=True)
class Behaviour:
    name: str
    where: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Group:
    """The behaviours of one heading of the specification."""

    prefix: str  # `MA-A`, `RD`
    about: str
    page: str
    behaviours: tuple[Behaviour, ...]


@dataclass
class Coverage:
    """Where an id is tested: file names by folder."""

    cpu: set[str] = field(default_factory=set[str])
    compile: set[str] = field(default_factory=set[str])
    gpu: set[str] = field(default_factory=set[str])

    @property
    def places(self) -> list[str]:
        return [f"{f}/{name}" for f in FOLDERS for name in sorted(getattr(self, f))]


@dataclass(frozen=True)
class Judged:
    """What is known of behaviours beside their tests."""

    part: dict[str, str]  # what is missing
    difference: dict[str, str]  # what is otherwise here, and why


def groups() -> list[Group]:
    """The specification, in order."""
    found: list[Group] = []
    for page in ("max_autotune", "cutlass_cutedsl", "traffic"):
        text = (SPEC / f"{page}.md").read_text()
        for head, body in re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", text, re.M):
            rows = re.findall(rf"^\| ({KIND}[A-Z]?\d+) \| ([^|]*) \| (.*) \|$", body, re.M)
            if rows:
                prefix, _, about = head.partition(": ")
                each = tuple(Behaviour(n, tuple(w.split(", ")), t) for n, w, t in rows)
                found.append(Group(prefix, about, page, each))
    return found


def judged() -> Judged:
    return Judged(**tomllib.loads((TESTS / "behaviours.toml").read_text()))


def coverage() -> dict[str, Coverage]:
    """For every id, the test files that carry it."""
    found = {b.name: Coverage() for group in groups() for b in group.behaviours}
    for folder in FOLDERS:
        for file in sorted((TESTS / folder).rglob("*.py")):
            for name in carried(file.read_text()) & found.keys():
                getattr(found[name], folder).add(file.stem)
    for shared, by in SHARED.items():
        for name in carried((TESTS / shared).read_text()) & found.keys():
            for folder, file in by:
                getattr(found[name], folder).add(file)
    return found


def carried(text: str) -> set[str]:
    """The ids that the tests and the cases of a module carry."""
    found: set[str] = set()
    module = ast.parse(text)
    prose = {id(node.body[0].value) for node in ast.walk(module)
             if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
             and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and _is_test(node):
            found |= named(node.name) | mentioned(ast.get_docstring(node) or "")
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
        ):
            case = CASE.fullmatch(node.value)
            found |= mentioned(node.value) if case and len(node.value) < 60 else set()
    for node in ast.walk(module):  # names that are made: f"PF-10 {...}"
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            found |= mentioned(str(node.values[0].value))
    return found


CASES = "Iterator[tuple[str, Callable[[], None]]]"  # what gives a card's cases with their names


def _is_test(node: ast.FunctionDef) -> bool:
    """A test of pytest's, or a case of a card, or several."""
    marks = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
    several = node.returns is not None and ast.unparse(node.returns) == CASES
    return node.name.startswith("test_") or bool(marks & {"case", "alone"}) or several


def named(name: str) -> set[str]:
    """The ids in the name of a test: `test_ma_o1_o2_savers`, `test_rd_4_rows`."""
    match = NAMED.match(name)
    if match is None:
        return set()
    found: set[str] = set()
    group = ""
    for word in match[2].split("_"):
        parts = re.fullmatch(r"([a-z]?)(\d+)[a-z]?", word)
        if parts is None:
            break
        group = parts[1] or group
        number = parts[2] if match[1] == "pf" else parts[2].lstrip("0")
        found.add(f"{match[1]}-{group}{number}".upper())
    return found


def mentioned(text: str) -> set[str]:
    """The ids in a text; `MA-L7 to MA-L12` are six."""
    found = {re.sub(r"^(PF-)(\d)$", r"\g<1>0\2", name) for name in ID.findall(text)}
    for prefix, first, last in RANGE.findall(text):
        found |= {f"{prefix}{k:0{len(first)}d}" for k in range(int(first), int(last) + 1)}
    return found


def state(name: str, tested: Coverage, known: Judged) -> str:
    """`shown`, or what is missing, or what is different."""
    if name in known.difference:
        return f"difference: {known.difference[name]}"
    if not tested.places:
        return "not shown"
    return f"in part: {known.part[name]}" if name in known.part else "shown"
