"""NVIDIA's own model of how long a tile takes, where `nvidia-matmul-heuristics` is installed.

It needs no card: one is named. The library's C functions are called, for its Python module brings
the process down at its end (0.1.0.27: a fault where its handle is destroyed).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from pathlib import Path
from typing import Any

from tilewright import caches
from tilewright.target import Target

log = logging.getLogger("tilewright.cutlass")

MODULE = "nvMatmulHeuristics"
LIBRARY = "nvidia/nvMatmulHeuristics/lib/libnvMatmulHeuristics.so.0"
VERSION = (0, 1, 0)  # whose structures are those below
CARDS = {"sm_90": 9003}  # as the library counts them: H200 SXM
CUTLASS3, ROW_BY_COLUMN = 4, 2  # whose kernels, and of which layout: others take as long
EIGHTS = {"e4m3", "e5m2", "s8"}
LETTERS = {"f16": "H", "bf16": "T", "f32": "S", "e4m3": "Q", "e5m2": "R", "s8": "B", "s32": "I"}
SHARED = 227 * 1024  # bytes of shared memory that stages of a tile fill


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("m", "n", "k", "batch")),
        ("layout", ctypes.c_uint8),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint16 * 3) for name in ("tile", "warp", "instruction")),
        ("parts_of_k", ctypes.c_uint16),
        *((name, ctypes.c_uint8) for name in ("stages", "swizzle", "order")),
        ("cluster", ctypes.c_uint8 * 2),
    )


@functools.cache
def path() -> Path | None:
    """The library, if it is installed."""
    found = importlib.util.find_spec(MODULE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        library = Path(folder).parent / LIBRARY
        if library.exists():
            return library
    return None


caches.register(path.cache_clear)


class _Model:
    """The library with its handle, and a card: made once, and kept to the end of the process."""

    def __init__(self, library: Path, card: int) -> None:
        self.library = ctypes.CDLL(str(library))
        words = ("Major", "Minor", "Patch")
        version = tuple(getattr(self.library, f"{MODULE}GetVersion{w}")() for w in words)
        if version != VERSION:
            raise OSError(f"{MODULE} {'.'.join(map(str, version))} is not one we know how to call")
        self.handle, self.card = ctypes.c_void_p(), ctypes.c_void_p()
        self._made("Create", ctypes.byref(self.handle))
        self._made("HardwareDescriptorCreate", ctypes.byref(self.card))
        self._made("HardwareDescriptorSetPredefinedGpu", self.card, card)
        self.runtime: Any = getattr(self.library, f"{MODULE}EstimateRuntime")
        self.runtime.restype = ctypes.c_double

    def _made(self, what: str, *args: Any) -> None:
        if getattr(self.library, MODULE + what)(*args) != 1:
            raise OSError(f"{MODULE}{what} does not succeed")

    def seconds(self, precision: str, problem: _Problem, kernel: _Kernel) -> float:
        given = (precision.encode(), CUTLASS3, ctypes.byref(problem), ctypes.byref(kernel))
        return self.runtime(self.handle, *given, self.card)


@functools.cache
def _model(library: Path, card: int) -> _Model | None:
    try:
        return _Model(library, card)
    except (OSError, AttributeError) as why:
        log.warning("NVIDIA's model of products is not used: %s", why)
        return None


def microseconds(target: Target, sizes: tuple[int, int, int, int], dtypes: tuple[str, str, str],
                 tile: tuple[int, ...], cluster: tuple[int, ...]) -> float | None:  # fmt: skip
    """Of a product of these sizes (batch, m, n, k), of two operands and a result of these dtypes,
    by tiles (m, n, k) and clusters; none where the model is absent or does not know."""
    library, card = path(), CARDS.get(target.arch)
    if library is None or card is None or not set(dtypes) <= LETTERS.keys():
        return None
    model = _model(library, card)
    if model is None:
        return None
    batch, m, n, k = sizes
    a, b, d = (LETTERS[name] for name in dtypes)
    wide = 1 if dtypes[0] in EIGHTS else 2  # bytes of an element
    rows, columns, depth = tile
    stages = min(255, SHARED // max(1, (rows + columns) * depth * wide))
    kernel = _Kernel((rows, columns, depth), (64, columns, depth), (64, 8, 32 // wide), 1, stages,
                     1, 0, tuple(cluster[:2]))  # fmt: skip
    sums = "I" if d == "I" else "S"
    problem = _Problem(m, n, k, batch, ROW_BY_COLUMN)
    found = model.seconds(f"{a}{b}{d}{sums}{d}", problem, kernel)
    return 1e6 * found if found > 0 else None
