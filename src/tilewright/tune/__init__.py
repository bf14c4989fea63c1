"""Choosing by measuring: anything with candidates, a choice, and its record.

- `results.py`  what a trial, a time and a verdict are; the rule that decides
- `clock.py`    how long a run takes, on a card and on a CPU
- `child.py`    the process in which candidates are timed that may crash, when asked for; `pool.py`
                several of them, or one in the background; `spread.py` a first look on several cards
- `choices.py`  filters, the user's functions, the model's order and cut
- `race.py`     who is sampled how often
- `records.py`  what is remembered: rows in SQLite, a log of decisions
- `failures.py` why a candidate is rejected
- `display.py`  progress and tables, when asked for; `progress.py` what a terminal shows unasked
- `select.py`   `choose`, which brings them together
- `kernels.py`  the configuration of a loop kernel; `user_kernels.py` that of a user's kernel
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Called(types.ModuleType):
    """`tilewright.tune(...)` is a function of users; once this package is imported, which has the
    same name, it is this package that they call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("tilewright.tuning").tune(*args, **kwargs)


sys.modules[__name__].__class__ = _Called
