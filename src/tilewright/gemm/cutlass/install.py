"""Where CUTLASS is, which one it is, and for which architecture and toolkit it is asked.

The `nvidia-cutlass` wheel has both halves: the Python package that lists operations, and the
headers they are made of. A checkout (`config.cuda.cutlass_dir`) has them too. They always come from
one place: headers of one version and operations of another compile to nothing good.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import logging
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from tilewright import caches, config
from tilewright.runtime import nvcc

log = logging.getLogger("tilewright.cutlass")

HOW = "pip install 'tilewright[cuda]' (or nvidia-cutlass), or set config.cuda.cutlass_dir"
INCLUDES = ("include", "tools/library/include", "tools/library/src", "tools/util/include")
KEYED = (".py", ".h", ".hpp")
# An architecture stands for those after it, up to the next.
FAMILIES = (
    (70, 74, 70),
    (75, 79, 75),
    (80, 89, 80),
    (90, 99, 90),
    (100, 102, 100),
    (103, 103, 103),
)
OLDEST, NEWEST = 70, 103


@dataclass(frozen=True)
class Root:
    """One CUTLASS: its Python package and its headers."""

    python: Path  # the folder `cutlass_library` is in
    headers: Path  # the folder that holds `include`, `tools` and `examples`


def root() -> Root | None:
    """The checkout the options name, if it is one, or else the wheel."""
    return _root(config.cuda.cutlass_dir)


@functools.cache
def _root(named: str | None) -> Root | None:
    if named:
        folder = Path(named).expanduser()
        if (folder / "python" / "cutlass_library").is_dir() and (folder / "include").is_dir():
            return Root(folder / "python", folder)
        log.warning("cuda.cutlass_dir = %r is no checkout of CUTLASS: the wheel is used", named)
    package = _wheel()
    if package is None or not (package / "source" / "include").is_dir():
        return None
    return Root(package.parent, package / "source")


def _wheel() -> Path | None:
    """The installed package; not one of a checkout that was used before."""
    places = [p for p in sys.path if p not in _added]
    spec = importlib.machinery.PathFinder.find_spec("cutlass_library", places)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


_added: set[str] = set()  # to `sys.path`, of checkouts


def try_import_cutlass() -> bool:
    """Whether CUTLASS can be had; afterwards `cutlass_library` is importable, and from there."""
    return _imported(config.cuda.cutlass_dir)


@functools.cache
def _imported(named: str | None) -> bool:
    found = _root(named)
    if found is None:
        log.warning("CUTLASS is not there, and offers nothing: %s (cuda.cutlass_dir)", HOW)
        return False
    try:
        _package(found)
    except ImportError as error:
        log.warning("CUTLASS cannot be imported (%s), and offers nothing: %s", error, HOW)
        return False
    return True


def _package(found: Root) -> ModuleType:
    """`cutlass_library` of this root, in place of another's that is loaded already."""
    loaded = sys.modules.get("cutlass_library")
    place = getattr(loaded, "__file__", None)
    if place is None or Path(place).parent.parent.resolve() != found.python.resolve():
        for name in [n for n in sys.modules if n.partition(".")[0] == "cutlass_library"]:
            del sys.modules[name]
        where = str(found.python)
        if where in sys.path:
            sys.path.remove(where)
        elif found.python != found.headers.parent.parent:
            _added.add(where)
        sys.path.insert(0, where)
        importlib.invalidate_caches()
    return importlib.import_module("cutlass_library")


def module(name: str) -> ModuleType:
    """A module of `cutlass_library`."""
    found = root()
    assert found is not None
    _package(found)
    return importlib.import_module(f"cutlass_library.{name}")


def cutlass_key() -> bytes:
    """Of all its Python and header files: what is made with another CUTLASS is something else."""
    found = root()
    return b"" if found is None else _key(found)


@functools.cache
def _key(found: Root) -> bytes:
    digest = hashlib.sha256()
    package = found.python / "cutlass_library"
    places = [
        *_files(package, ""),
        *(_files(found.headers / "include", "include")),
        *_files(found.headers / "tools", "tools"),
    ]
    for name, file in sorted(dict(places).items()):
        data = file.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:40].encode()


def _files(folder: Path, name: str) -> list[tuple[str, Path]]:
    """Without the headers that a wheel's package has inside it: they are counted by themselves."""
    found = (f for f in folder.rglob("*") if f.suffix in KEYED and f.is_file())
    inside = folder / "source"
    return [(f"{name}/{f.relative_to(folder)}", f) for f in found if inside not in f.parents]


def include_paths() -> tuple[str, ...]:
    """Folders for nvcc, free of symbolic links: a link must not make another binary."""
    found = root()
    if found is None:
        return ()
    return tuple(str((found.headers / part).resolve()) for part in INCLUDES)


# ---- for which machine


def architecture(named: str | None = None) -> int:
    """90 for an H200: what the options name, or else the first card."""
    text = named or config.cuda.arch
    if text is None:
        major, minor = torch.cuda.get_device_capability(0)
        text = str(10 * major + minor)
    return normalized(text)


def normalized(text: str) -> int:
    """The architecture whose operations run on this one."""
    digits = re.sub(r"\D", "", text)
    if not digits:
        raise ValueError(f"{text!r} names no architecture: write 90, 90a or sm_90")
    number = int(digits)
    if number < OLDEST:
        raise NotImplementedError(f"CUTLASS has no operations for sm_{number}")
    if number > NEWEST:
        log.warning("sm_%d is newer than this list of architectures, and taken as it is", number)
        return number
    for first, last, family in FAMILIES:
        if first <= number <= last:
            return family
    return number


def version() -> str:
    """The toolkit's, as `13.0`: what the options name, torch's, or else nvcc's."""
    # torch types this as a string; a build without CUDA has none
    found = config.cuda.version or torch.version.cuda or nvcc.version() or "12.8"
    return ".".join(found.split(".")[:2])


for _memo in (_root, _imported, _key):
    caches.register(_memo.cache_clear)
