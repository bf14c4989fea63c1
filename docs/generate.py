"""Writes the pages of this folder that are made from the code: `make docs`.

`tests/cpu/test_docs.py` fails when a page on disk differs from what this would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tilewright import config
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


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "ops.md": ops_page,
}


def main() -> None:
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
