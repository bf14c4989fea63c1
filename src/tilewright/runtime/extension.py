"""Extension modules of ours: small C++ files that Python calls without the cost of ctypes.

They are built once per machine and Python, with no headers but Python's own.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from tilewright import config, metrics
from tilewright.errors import TilewrightError
from tilewright.runtime import compilers, store

FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-w")


def is_built(source: Path) -> bool:
    return store.is_good(_path(source))


def _path(source: Path) -> Path:
    tag = sysconfig.get_config_var("SOABI") or ""
    return store.path(store.key(source.read_bytes(), tag, *FLAGS), f".{source.stem}.so")


def load(source: Path) -> Any:
    """The module `tw_<name>` of the file `<name>.cpp`; None where it cannot be built, which the
    counters of that name explain."""
    path = _path(source)
    for attempt in (1, 2):
        if not store.is_good(path):
            built = _built(source, path)
            if built is None:
                return None
            path = built
        try:
            return _loaded(f"tw_{source.stem}", path)
        except ImportError:  # of another machine, for all that its name says
            if attempt == 2:
                metrics.counters[source.stem]["the extension could not be loaded"] += 1
                return None
            path.unlink(missing_ok=True)
    return None


def _built(source: Path, path: Path) -> Path | None:
    include = sysconfig.get_path("include")
    compiler = shutil.which(config.cpp.cxx)
    if compiler is None or not (Path(include) / "Python.h").exists():
        metrics.counters[source.stem]["no C++ compiler or no Python headers"] += 1
        return None
    command = [compiler, *FLAGS, f"-I{include}", "-x", "c++", str(source), "-o"]
    try:
        # not in the store's folder, which may be emptied in the many seconds this takes
        with tempfile.TemporaryDirectory(prefix="tilewright_extension_") as folder:
            made = Path(folder, path.name)
            run = compilers.run([*command, str(made)], timeout=600, folder=Path(folder))
            run.check_returncode()
            return store.put_atomic(path, made.read_bytes())
    except (subprocess.SubprocessError, OSError, compilers.Ended, TilewrightError):
        metrics.counters[source.stem]["the extension could not be built"] += 1
        return None


def _loaded(name: str, path: Path) -> Any:
    with store.loadable(path) as library:
        loader = ExtensionFileLoader(name, library)
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    return module
