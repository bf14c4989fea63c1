"""The CuTe DSL as it is installed: whether it can be used, which version, for which cards.

It is imported by processes that compile, and by nobody else: that takes a second, and a kernel that
is in the store needs none of it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import shutil
import sys

from tilewright import caches, config
from tilewright.target import Target

PACKAGE = "nvidia-cutlass-dsl"
HOST = "x86-64-v3"  # what host code is compiled for: every machine with a card that has TMA is one
# Names of architectures to the DSL: those with `a` have the instructions of one generation alone.
ARCHITECTURES = {
    "sm_80": "sm_80", "sm_89": "sm_89", "sm_90": "sm_90a", "sm_100": "sm_100a",
    "sm_103": "sm_103a", "sm_120": "sm_120a",
}  # fmt: skip


@functools.cache
def version() -> str:
    """Of the DSL; empty where it is not installed."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return found if importlib.util.find_spec("nvidia_cutlass_dsl") is not None else ""


caches.register(version.cache_clear)


def why_not() -> str:
    """Why nothing can be compiled here, and what to do; or an empty string."""
    if not version():
        return f"the CuTe DSL is not installed: pip install '{PACKAGE}>=4.8,<5'"
    if sys.platform != "linux":
        return "the CuTe DSL compiles on Linux alone"
    if shutil.which(config.cpp.cxx) is None:
        return f"kernels are linked by a C++ compiler, and there is no {config.cpp.cxx}"
    return ""


def architecture(target: Target) -> str:
    """What to compile for, or an empty string: the DSL has no such card. It is the target's word:
    no card is looked for."""
    return ARCHITECTURES.get(target.arch, "")
