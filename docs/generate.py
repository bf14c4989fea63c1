"""Writes the pages of this folder that are made from the code: `make docs`.

`tests/cpu/test_docs.py` fails when a page on disk differs from what this would write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.ao.quantization.fx._decomposed  # defines the operators of quantised programs

from tests import behaviours, traffic
from tilewright import config, known_options
from tilewright.graph import decompositions
from tilewright.lower import graph
from tilewright.lower.families import FAMILIES
from tilewright.lower.table import LOWERINGS

FOLDER = Path(__file__).parent

_CONFIG = """\
# Options

Made by `make docs` from `src/tilewright/config.py`: change that file, not this one.

Read an option as an attribute of `tilewright.config`, set it the same way, or for a while with
`config.patch(...)`, as a context manager or a decorator. `torch.compile(..., options={...})`
takes the same names. The environment variable is read when the process starts. An option marked
"in cache key" shapes generated code: changing it never reuses what was compiled without it.

"""


def config_page() -> str:
    """The reference of all options."""
    return _CONFIG + config.table()


_OPS = """\
# Operators

Made by `make docs` from the op table, with torch {version}: change `src/tilewright/lower`, not
this page. An op is *native* when we generate loops for it, *decomposed* when it is traced as
simpler ops, and a *fallback* when ATen computes it as it is. A native op still falls back for
operands we do not generate loops for: complex, quantised and sparse tensors, and the cases its
lowering names.

"""


_OPTIONS = """\
# Options of the reference

Made by `make docs` from `src/tilewright/known_options.py`: change that file, not this one.

Options of `torch._inductor.config` (torch 2.11 to 2.15) that are no options of ours
([config.md](config.md) has those). One that has no effect may be set, and the log says why;
one that is refused is an error that says what to use.

"""


def options_page() -> str:
    """What becomes of the reference's options."""
    ours = {spec.name for spec in config.declared()}
    lines: list[str] = []
    for title, table, groups in (
        ("No effect", known_options.ACCEPTED, known_options.ACCEPTED_GROUPS),
        ("Refused", known_options.REFUSED, known_options.REFUSED_GROUPS),
    ):
        lines += [f"## {title}", "", "| options | why |", "|---|---|"]
        for why, names in table.items():
            shown = ", ".join(f"`{name}`" for name in names.split() if name not in ours)
            lines.append(f"| {shown} | {why} |")
        lines += [f"| `{prefix}*` | {why} |" for prefix, why in groups.items()]
        lines.append("")
    return _OPTIONS + "\n".join(lines).rstrip() + "\n"


def ops_page() -> str:
    """Which operators are native, decomposed, and left to ATen."""
    graph.families.load()
    native: dict[str, set[str]] = {}
    for op, function in LOWERINGS.items():
        family = function.__module__.rpartition(".")[2]
        native.setdefault(family, set()).add(str(op).removeprefix("aten."))
    done = set(LOWERINGS) | set(decompositions.table())
    decomposed = {str(op).removeprefix("aten.") for op in decompositions.table()} - {
        name for names in native.values() for name in names
    }
    left = {str(op).removeprefix("aten.") for op in _functional_ops() if op not in done}
    lines = [_OPS.format(version=torch.__version__.partition("+")[0])]
    lines.append(f"## Native ({sum(len(names) for names in native.values())} overloads)\n")
    for family in FAMILIES:
        if family in native:
            lines.append(f"**`{family}.py`**: {', '.join(sorted(native[family]))}\n")
    for title, names in (("Decomposed", decomposed), ("Fallback", left)):
        lines.append(f"## {title} ({len(names)} overloads)\n\n{', '.join(sorted(names))}\n")
    return "\n".join(lines)


def _functional_ops() -> Iterator[torch._ops.OpOverload]:
    """The ATen overloads that can reach us: those that mutate or write to `out=` are rewritten
    before, and composites are traced as what they are made of."""
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        )
        tensors = any("Tensor" in str(a.type) for a in op._schema.arguments)
        if not op._schema.is_mutable and not composite and tensors:
            yield op


_TRAFFIC = """\
# Memory traffic

Made by `make docs` from the programs in `tests/traffic.py`; `tests/cpu/test_traffic.py` and
`tests/compile/test_traffic_gpu.py` hold every number of ours exactly. Counts are four-byte
elements under the compatible contract (`metrics.num_bytes_accessed`). *Reference* is what the
specification measured or asks for, *floor* the least any compiler could move with opaque library
calls ("=": none lower is known); *ours* is counted for the CPU and, with fake tensors, for an sm_90
that is not there.

| case | reference | floor | ours, CPU | ours, sm_90 |
|---|---|---|---|---|
"""


_MOVED = """
## What really moves

The contract charges what is written in place twice. Here `metrics.num_bytes_moved` is counted: what
is only written is not read, and what is overwritten unread is not initialised: the least a device
has to move, in all cases but PF-30.

| case | reference | least | ours, CPU | ours, sm_90 |
|---|---|---|---|---|
"""


def traffic_page() -> str:
    """Reference, floor and ours for every specified program, as the tests hold them."""
    rows: list[str] = []
    moved: list[str] = []
    for case in sorted(traffic.CASES, key=lambda case: (not case.name.startswith("PF"), case.name)):
        counts = [case.expected(device) for device in ("cpu", "cuda")]
        cpu, card = (f"{elements:,}" for elements, _ in counts)
        floor = "=" if case.floor is None else f"{case.floor:,}"
        rows.append(f"| {case.name} | {case.reference:,} | {floor} | {cpu} | {card} |\n")
        if case.moved is not None:
            cpu, card = (f"{honest:,}" for _, honest in counts)
            moved.append(f"| {case.name} | {case.reference:,} | = | {cpu} | {card} |\n")
    return _TRAFFIC + "".join(rows) + _MOVED + "".join(moved)


_COVERAGE = """\
# Coverage

Made by `make docs` from [the specification](spec/README.md) and the ids that tests carry in their
names, docstrings and cases (`tests/behaviours.py`): a mention in a comment counts for nothing.
*shown* is a behaviour with tests of which nothing is known to be missing; *in part* says what they
leave out, *difference* what is otherwise here and why (`tests/behaviours.toml`); *not shown* has no
test. Tests in `cpu` and `compile` run everywhere, those in `gpu` on a card.

| group | about | behaviours | shown | in part | difference | not shown | with a case for a card |
|---|---|---|---|---|---|---|---|
"""


def coverage_page() -> str:
    """Every specified behaviour with its tests, and how much of it they show."""
    found, known = behaviours.coverage(), behaviours.judged()
    summary: list[str] = []
    lines: list[str] = []
    for group in behaviours.groups():
        states = {b.name: behaviours.state(b.name, found[b.name], known) for b in group.behaviours}
        kinds = [text.partition(":")[0] for text in states.values()]
        counts = [kinds.count(kind) for kind in ("shown", "in part", "difference", "not shown")]
        carded = sum(bool(found[b.name].gpu) for b in group.behaviours)
        numbers = " | ".join(map(str, (len(kinds), *counts, carded)))
        summary.append(f"| {group.prefix} | {group.about} | {numbers} |\n")
        lines.append(f"\n## {group.prefix}: {group.about}\n\n")
        lines.append("| behaviour | where it can be shown | state | tests |\n|---|---|---|---|\n")
        for b in group.behaviours:
            link = f"[{b.name}](spec/{group.page}.md)"
            places = ", ".join(found[b.name].places)
            lines.append(f"| {link} | {', '.join(b.where)} | {states[b.name]} | {places} |\n")
    return _COVERAGE + "".join(summary) + "".join(lines)


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "options.md": options_page,
    "ops.md": ops_page,
}
# Pages that take a while to make: their tests check the numbers instead of making them anew.
COUNTED: dict[str, Callable[[], str]] = {
    "traffic.md": traffic_page,
    "coverage.md": coverage_page,
}


def main(names: list[str]) -> None:
    """All pages, or those named: `python -m docs.generate config.md ops.md`."""
    for name, make in (PAGES | COUNTED).items():
        if names and name not in names:
            continue
        (FOLDER / name).write_text(make())
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main(sys.argv[1:])
