"""tilewright: a compiler backend for PyTorch, used as `torch.compile(f, backend="tilewright")`.

The public door: `config`, `metrics`, `explain` and `__version__`. Importing the package imports
neither torch nor Triton; torch itself loads `tilewright.backend`, through the package's entry
point, when a program first compiles with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright import config, metrics

if TYPE_CHECKING:
    from tilewright.explanation import Explanation

__version__ = "0.1.0"
__all__ = ["__version__", "config", "explain", "metrics"]


def explain(function: Callable[..., Any], *, mode: str | None = None,
            options: dict[str, Any] | None = None) -> Callable[..., Explanation]:  # fmt: skip
    """`explain(f)(*args)` compiles `f` for these arguments and tells what became of it.

    The result lists, for each captured graph, forward and backward, the kernels and library calls
    with the bytes they move and the least they could, and for each pair that shares memory and is
    not one kernel the reason; `str()` of it is a report. `f` runs once, eagerly; gradients are
    computed and dropped.
    """
    from tilewright.explanation import explain as made  # torch is imported only when needed

    return made(function, mode=mode, options=options)
