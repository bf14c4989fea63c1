"""tilewright: a compiler backend for PyTorch, used as `torch.compile(f, backend="tilewright")`.

The public door: `config`, `metrics`, `monitor`, `explain`, `tune`, `warm_up`, `sealed`,
`list_options`, `list_mode_options` and `__version__`.
Importing the package imports neither torch nor Triton; torch itself loads `tilewright.backend`,
through the package's entry point, when a program first compiles with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright import config, metrics, monitor

if TYPE_CHECKING:
    from tilewright.explanation import Explanation
    from tilewright.tuning import Engine, Report, Warmth

__version__ = "0.1.0"
__all__ = ["__version__", "config", "explain", "list_mode_options", "list_options", "metrics",
           "monitor", "sealed", "tune", "warm_up"]  # fmt: skip


def list_options() -> list[str]:
    """The names that `options=` of torch.compile takes, and `config.patch`."""
    return [option.name for option in config.declared()]


def list_mode_options(mode: str | None = None) -> dict[str, Any]:
    """The options a `mode=` of torch.compile stands for; those of every mode if none is named."""
    if mode is not None:
        return dict(config.options_for_mode(mode))
    return {name: dict(config.options_for_mode(name)) for name in config.MODES}


def tune(function: Callable[..., Any], *calls: tuple[Any, ...], mode: str = "max-autotune",
         options: dict[str, Any] | None = None, engine: Engine = "local",
         workers: int | None = None) -> Report:  # fmt: skip
    """Measure all products of `function(*call)` for each of `calls` ahead of time, by a process for
    each card or, with `engine="ray"`, by the workers of a Ray cluster; compiling it with the same
    mode and options afterwards measures nothing."""
    from tilewright import tuning

    return tuning.tune(function, *calls, mode=mode, options=options, engine=engine, workers=workers)


def warm_up(function: Callable[..., Any], *calls: tuple[Any, ...], repeat: int = 2) -> Warmth:
    """Call a compiled function with each of `calls` until nothing is left to compile or to tune."""
    from tilewright import tuning

    return tuning.warm_up(function, *calls, repeat=repeat)


def sealed(*, error: bool = False) -> monitor.Sealed:
    """From now on, or for a `with` block, whatever is compiled, built or tuned is a warning, or an
    error, that names its cause; `counts` of what this returns counts them."""
    return monitor.Sealed(error)


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
