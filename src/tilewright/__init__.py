"""tilewright: a compiler backend for PyTorch, used as `torch.compile(f, backend="tilewright")`.

The public door: `config`, `metrics` and `__version__`. Importing the package imports neither
torch nor Triton; torch itself loads `tilewright.backend`, through the package's entry point,
when a program first compiles with it.
"""

from __future__ import annotations

from tilewright import config, metrics

__version__ = "0.1.0"
__all__ = ["__version__", "config", "metrics"]
