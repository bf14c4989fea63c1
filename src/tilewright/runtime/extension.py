"""Extension modules of ours: small C++ files that Python calls without the cost of ctypes.

They are built once per machine and Python, with no headers but Python's own.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from tilewright import config, metrics
from tilewright.runtime import compilers, store

FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-w")


def is_built(source: Path) -> bool:
    return _path(source).exists()


def _path(source: Path) -> Path:
    tag = sysconfig.get_config_var("SOABI") or ""
    return store.path(store.key(source.read_bytes(), tag, *FLAGS), f".{source.stem}.so")


def load(source: Path) -> Any:
    """The module `tw_<name>` of the file `<name>.cpp`; None where it cannot be built, which the
    counters of that name explain."""
    include = sysconfig.get_path("include")
    compiler = shutil.which(config.cpp.cxx)
    if compiler is None or not (Path(include) / "Python.h").exists():
        metrics.counters[source.stem]["no C++ compiler or no Python headers"] += 1
        return None
    path = _path(source)
    if not path.exists():
        command = [compiler, *FLAGS, f"-I{include}", "-x", "c++", str(source), "-o"]
        try:
            store.put_atomic(path, lambda draft: compilers.run(
                [*command, str(draft)], timeout=600).check_returncode())  # fmt: skip
        except (subprocess.SubprocessError, OSError, compilers.Ended):
            metrics.counters[source.stem]["the extension could not be built"] += 1
            return None
    name = f"tw_{source.stem}"
    loader = ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
