"""How much memory there is to tune in."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that times starts without
    import torch

PART = 0.5  # of what is free: the program has values of its own to come


def free(device: torch.device) -> int:
    """Bytes that could be allocated now: what the driver has and torch's allocator holds unused, or
    what Linux says is available, within the limits of this process's control group."""
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            return torch.cuda.mem_get_info(device)[0] + held
        return 0
    return min(_available(), _of_group())


def room(device: torch.device) -> int:
    """Bytes that measuring may take."""
    return int(PART * free(device))


def _available() -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return int(found[1]) << 10
    return 1 << 62


def _of_group(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What the control group leaves, in either of Linux's two kinds of them."""
    first = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"
    for most, used in (("memory.max", "memory.current"), first):
        with contextlib.suppress(OSError, ValueError):
            return max(0, int((folder / most).read_text()) - int((folder / used).read_text()))
    return 1 << 62


def is_short(error: BaseException) -> bool:
    """Whether an error says that there is not enough of it."""
    return isinstance(error, MemoryError) or "out of memory" in str(error).lower() or (
        "can't allocate memory" in str(error).lower())  # fmt: skip
