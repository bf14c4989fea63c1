"""cuBLASLt, the library torch has already loaded: which algorithms it offers, and calling one.

Through ctypes where a program is compiled, through a small extension module where it runs. `Call`
is a product in the library's own terms (column-major matrices); `algorithms` asks the library's
heuristics, best first; `load` makes one C call of a `Call` and an `Algorithm`. An algorithm is 64
bytes that mean the same to every process with the same version of the library.

`use(path)` names another library in place of it, with which all of this can be tested on memory of
the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from tilewright import caches, metrics
from tilewright.runtime import extension, store
from tilewright.runtime.driver import driver

WORKSPACE = 32 << 20  # bytes an algorithm may use beside its operands; torch's own limit on Hopper

# From cublasLt.h and library_types.h; a test compares them with the headers where there are any.
CUDA_TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.int8: 3,
              torch.int32: 10, torch.bfloat16: 14}  # fmt: skip
COMPUTE_32F, COMPUTE_32F_FAST_TF32, COMPUTE_64F, COMPUTE_32I = 68, 77, 70, 72
EPILOGUE_DEFAULT, EPILOGUE_RELU, EPILOGUE_BIAS, EPILOGUE_GELU = 1, 2, 4, 32
REDUCTION_COMPUTE_TYPE, REDUCTION_ANY = 2, 7
DESC_TRANSA, DESC_TRANSB, DESC_EPILOGUE, DESC_BIAS, DESC_BIAS_STEP = 3, 4, 7, 8, 10
LAYOUT_BATCH, LAYOUT_STEP = 5, 6
PREFER_WORKSPACE, PREFER_REDUCTION, PREFER_ALIGNMENT = 1, 3, (5, 6, 7, 8)  # of a, b, c, d
CONFIG = {"ALGO": 0, "TILE": 1, "SPLIT_K": 2, "REDUCTION": 3, "SWIZZLE": 4, "OPTION": 5,
           "STAGES": 6, "INNER": 7, "CLUSTER": 8}  # fmt: skip
# What the heuristics may not have thought of: clusters are ids (2x1, 1x2, 2x2, 4x1, 1x4, 1x1), and
# partial sums are kept and added in the type they were taken in.
_CHANGES: tuple[dict[str, int], ...] = (
    {"SPLIT_K": 2, "REDUCTION": REDUCTION_COMPUTE_TYPE}, {"CLUSTER": 3}, {"CLUSTER": 5},
    {"SPLIT_K": 4, "REDUCTION": REDUCTION_COMPUTE_TYPE}, {"SWIZZLE": 1}, {"CLUSTER": 6},
    {"SPLIT_K": 8, "REDUCTION": REDUCTION_COMPUTE_TYPE}, {"CLUSTER": 4}, {"CLUSTER": 8},
    {"SPLIT_K": 3, "REDUCTION": REDUCTION_COMPUTE_TYPE}, {"CLUSTER": 2},
    {"SPLIT_K": 16, "REDUCTION": REDUCTION_COMPUTE_TYPE},
    {"SPLIT_K": 6, "REDUCTION": REDUCTION_COMPUTE_TYPE}, {"SPLIT_K": 1, "REDUCTION": 0},
)  # fmt: skip
_SHORT = ("INNER", "CLUSTER")  # two bytes; the others have four

_SIGNATURES: dict[str, str] = {  # p pointer, i int, u 64 bits; all return a status
    "cublasLtCreate": "p", "cublasLtMatmulDescCreate": "pii", "cublasLtMatmulDescDestroy": "p",
    "cublasLtMatmulDescSetAttribute": "pipu", "cublasLtMatrixLayoutCreate": "piuuu",
    "cublasLtMatrixLayoutDestroy": "p", "cublasLtMatrixLayoutSetAttribute": "pipu",
    "cublasLtMatmulPreferenceCreate": "p", "cublasLtMatmulPreferenceDestroy": "p",
    "cublasLtMatmulPreferenceSetAttribute": "pipu",
    "cublasLtMatmulAlgoGetHeuristic": "pppppppipp", "cublasLtMatmulAlgoCheck": "pppppppp",
    "cublasLtMatmulAlgoConfigGetAttribute": "pipup",
    "cublasLtMatmulAlgoConfigSetAttribute": "pipu", "cublasLtMatmul": "pppppppppppppPup",
}  # fmt: skip
_CTYPES: dict[str, Any] = {"p": ctypes.c_void_p, "P": ctypes.c_void_p, "i": ctypes.c_int,
                           "u": ctypes.c_uint64}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Column-major matrices: `step` elements from one to the next."""

    kind: int
    rows: int
    cols: int
    ld: int
    batch: int = 1
    step: int = 0


@dataclass(frozen=True)
class Pointer:
    """Where a matrix begins: bytes into an argument, and the alignment that is promised there."""

    argument: int
    offset: int
    alignment: int


@dataclass(frozen=True)
class Call:
    """`d = epilogue(alpha * op(a) op(b) + beta * c)`: all of it but the algorithm."""

    a: Layout
    b: Layout
    c: Layout
    d: Layout
    transposed: tuple[bool, bool]
    compute: int
    scale: int  # type of alpha and beta
    alpha: float
    beta: float
    epilogue: int
    reduction: int  # schemes allowed where K is split
    pointers: tuple[Pointer, Pointer, Pointer, Pointer]  # a, b, c, d
    bias: Pointer | None = None
    bias_step: int = 0

    @property
    def arguments(self) -> int:
        return 1 + max(p.argument for p in (*self.pointers, *([self.bias] if self.bias else [])))


@dataclass(frozen=True)
class Algorithm:
    data: bytes
    workspace: int
    version: int  # of the library that can read `data`
    config: tuple[tuple[str, int], ...]  # what is known of it, for people


class _Result(ctypes.Structure):
    _fields_ = [("algorithm", ctypes.c_char * 64), ("workspace", ctypes.c_size_t),
                ("state", ctypes.c_int), ("waves", ctypes.c_float),
                ("reserved", ctypes.c_int * 4)]  # fmt: skip


class Library:
    """The library's functions, and its handles: one for each device, for as long as we live."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        for name, kinds in _SIGNATURES.items():
            function = getattr(self.library, name)  # AttributeError: another library than we know
            function.argtypes = [_CTYPES[kind] for kind in kinds]
            function.restype = ctypes.c_int
        self.library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version: int = self.library.cublasLtGetVersion()
        self._handles: dict[int | None, int] = {}

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.library, name)(*args)
        if code:
            raise LtError(name, code)

    def address(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0

    def make(self, name: str, *args: Any) -> int:
        """An object of the library's."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *args)
        return made.value or 0

    def handle(self, card: int | None) -> int:
        if card not in self._handles:
            with _on(card):
                self._handles[card] = self.make("cublasLtCreate")
        return self._handles[card]


class LtError(RuntimeError):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} gave {code}")
        self.code = code


# ---- finding the library

_path: str | None = None  # None: what torch has loaded


def library() -> Library | str:
    """The library, or why there is none."""
    return _open(_path or _loaded_by_torch())


@functools.cache
def _open(path: str) -> Library | str:
    if not path:
        return "torch has not loaded cuBLASLt"
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        return f"cuBLASLt cannot be used: {error}"


@functools.cache
def _loaded_by_torch() -> str:
    """The file torch's own products come from: another copy would load its kernels again."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    files = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return next((f for f in files if os.path.basename(f).startswith("libcublasLt.so")), "")


@contextlib.contextmanager
def use(path: str) -> Generator[Library]:
    """Another library in place of torch's, for tests."""
    global _path
    before, _path = _path, path
    caches.clear()
    try:
        found = library()
        assert isinstance(found, Library), found
        yield found
    finally:
        _path = before
        caches.clear()


@functools.cache
def _extension() -> Any:
    return extension.load(Path(__file__).parent / "cublaslt.cpp")


def why_not() -> str:
    """Why products cannot be computed by this library here, or an empty string."""
    found = library()
    if isinstance(found, str):
        return found
    return "" if _extension() is not None else "the extension module cannot be built"


@contextlib.contextmanager
def _on(card: int | None) -> Generator[None]:
    if card is None:
        yield
        return
    with driver().current(card):
        yield


def _card(device: torch.device) -> int | None:
    """Its number; None for memory of the host."""
    if device.type != "cuda":
        return None
    # torch types this index as int, but it is None for a plain "cuda": the current card.
    index = cast("int | None", device.index)
    return torch.cuda.current_device() if index is None else index


# ---- descriptors


class _Descriptors:
    """A call in the library's own objects, which live as long as this does."""

    def __init__(self, lib: Library, call: Call) -> None:
        self._lib = lib
        self._drop: list[tuple[Any, int]] = []
        self.desc = self._make("MatmulDesc", call.compute, call.scale)
        for attribute, flag in zip((DESC_TRANSA, DESC_TRANSB), call.transposed, strict=True):
            self._set("MatmulDesc", self.desc, attribute, "i", int(flag))
        self._set("MatmulDesc", self.desc, DESC_EPILOGUE, "I", call.epilogue)
        if call.bias is not None:
            # The heuristics read the promised alignment off this address, and nothing else.
            self._set("MatmulDesc", self.desc, DESC_BIAS, "Q", call.bias.alignment)
            if call.bias_step:
                self._set("MatmulDesc", self.desc, DESC_BIAS_STEP, "q", call.bias_step)
        self.layouts = [self._layout(x) for x in (call.a, call.b, call.c, call.d)]

    def _layout(self, x: Layout) -> int:
        made = self._make("MatrixLayout", x.kind, x.rows, x.cols, x.ld)
        if x.batch > 1:
            self._set("MatrixLayout", made, LAYOUT_BATCH, "i", x.batch)
            self._set("MatrixLayout", made, LAYOUT_STEP, "q", x.step)
        return made

    def preference(self, call: Call) -> int:
        made = self._make("MatmulPreference")
        self._set("MatmulPreference", made, PREFER_WORKSPACE, "Q", WORKSPACE)
        self._set("MatmulPreference", made, PREFER_REDUCTION, "I", call.reduction)
        for attribute, pointer in zip(PREFER_ALIGNMENT, call.pointers, strict=True):
            self._set("MatmulPreference", made, attribute, "I", pointer.alignment)
        return made

    def _make(self, kind: str, *args: int) -> int:
        made = self._lib.make(f"cublasLt{kind}Create", *args)
        self._drop.append((getattr(self._lib.library, f"cublasLt{kind}Destroy"), made))
        return made

    def _set(self, kind: str, of: int, attribute: int, form: str, value: int) -> None:
        data = struct.pack(form, value)
        self._lib.call(f"cublasLt{kind}SetAttribute", of, attribute, data, len(data))

    def __del__(self) -> None:
        for destroy, made in self._drop:
            destroy(made)


# ---- asking for algorithms


def algorithms(call: Call, count: int, device: torch.device, card: str) -> tuple[Algorithm, ...]:
    """Those the heuristics offer for a card of this description, best first, then variants of them:
    `count` at most. They are kept in the store: the next process does not ask."""
    lib = library()
    if isinstance(lib, str):
        return ()
    name = store.key("cublaslt", repr(call), str(count), str(lib.version), card)
    if name not in _known:
        path = store.path(name, ".lt")
        kept = store.get(path)
        found = tuple(_ask(lib, call, count, device)) if kept is None else pickle.loads(kept)
        if kept is None:
            store.keep(path, pickle.dumps(found))
        _known[name] = found
    return _known[name]


_known: dict[str, tuple[Algorithm, ...]] = {}
caches.register(_known.clear)


def _ask(lib: Library, call: Call, count: int, device: torch.device) -> list[Algorithm]:
    metrics.counters["cublaslt"]["heuristics"] += 1
    number = _card(device)
    made = _Descriptors(lib, call)
    with _on(number):
        handle = lib.handle(number)
        found = _offered(lib, made, call, count, handle)
        for data in _variants(lib, list(found)):
            if len(found) >= count:
                break
            workspace = _checked(lib, made, data, handle) if data not in found else None
            if workspace is not None:
                found[data] = workspace
    return [Algorithm(data, workspace, lib.version, _config(lib, data))
            for data, workspace in found.items()]  # fmt: skip


def _offered(lib: Library, made: _Descriptors, call: Call, count: int,
             handle: int) -> dict[bytes, int]:  # fmt: skip
    """What the heuristics give, with the workspace each needs. They give 8 at most (13.1)."""
    results, returned = (_Result * count)(), ctypes.c_int()
    code = lib.library.cublasLtMatmulAlgoGetHeuristic(
        handle, made.desc, *made.layouts, made.preference(call), count, ctypes.byref(results),
        ctypes.byref(returned))  # fmt: skip
    if code:  # not a product it can do
        return {}
    good = [r for r in results[: returned.value] if r.state == 0 and r.workspace <= WORKSPACE]
    return {ctypes.string_at(ctypes.addressof(r), 64): r.workspace for r in good}


def _variants(lib: Library, offered: Sequence[bytes]) -> Iterator[bytes]:
    """The algorithms with one thing about them changed, the changes of the best two first. Not all
    of them can run."""
    pairs = (offered[k : k + 2] for k in range(0, len(offered), 2))
    for pair in pairs:
        for change in _CHANGES:
            for data in pair:
                made = ctypes.create_string_buffer(data, 64)
                if all(_changed(lib, made, name, value) for name, value in change.items()):
                    yield made.raw


def _changed(lib: Library, algorithm: Any, name: str, value: int) -> bool:
    packed = struct.pack("H" if name in _SHORT else "I", value)
    return not lib.library.cublasLtMatmulAlgoConfigSetAttribute(
        algorithm, CONFIG[name], packed, len(packed))  # fmt: skip


def _checked(lib: Library, made: _Descriptors, data: bytes, handle: int) -> int | None:
    """The workspace an algorithm needs; None where it cannot run."""
    result = _Result()
    code = lib.library.cublasLtMatmulAlgoCheck(handle, made.desc, *made.layouts, data,
                                               ctypes.byref(result))  # fmt: skip
    return result.workspace if code == 0 and result.workspace <= WORKSPACE else None


def _config(lib: Library, data: bytes) -> tuple[tuple[str, int], ...]:
    found: list[tuple[str, int]] = []
    for name, attribute in sorted(CONFIG.items()):
        size = 2 if name in _SHORT else 4
        value, written = ctypes.c_uint32(0), ctypes.c_uint64(0)
        code = lib.library.cublasLtMatmulAlgoConfigGetAttribute(
            data, attribute, ctypes.byref(value), size, ctypes.byref(written))  # fmt: skip
        if code == 0:
            found.append((name, value.value))
    return tuple(found)


# ---- calling


def load(name: str, call: Call, algorithm: Algorithm, device: torch.device,
         otherwise: Callable[..., None]) -> Callable[..., None]:  # fmt: skip
    """A callable over tensors, on torch's current stream. `otherwise` computes the same from any
    memory: it is called where a pointer is not aligned as promised, and always where this library
    cannot run the algorithm."""
    lib, module = library(), _extension()
    if isinstance(lib, str) or module is None or lib.version != algorithm.version:
        return _instead("no library that knows the algorithm", otherwise)
    card = _card(device)
    try:
        handle, made = lib.handle(card), _Descriptors(lib, call)
        with _on(card):
            runs = _checked(lib, made, algorithm.data, handle) is not None
    except LtError as error:
        return _instead(str(error), otherwise)
    if not runs:
        return _instead("no card that can run the algorithm", otherwise)
    words = struct.pack("15Q", lib.address("cublasLtMatmul"),
                        lib.address("cublasLtMatmulDescSetAttribute"), *_context(card), handle,
                        made.desc, *made.layouts, algorithm.workspace, call.arguments)  # fmt: skip
    stream = None if card is None else torch._C._cuda_getCurrentRawStream
    scales = _scale(call.scale, call.alpha) + _scale(call.scale, call.beta)
    space = functools.partial(_space, device, card, algorithm.workspace)
    return module.Matmul(name, otherwise, stream, card, space, made, words, algorithm.data, scales,
                         _packed(call))  # fmt: skip


def _instead(reason: str, otherwise: Callable[..., None]) -> Callable[..., None]:
    metrics.counters["cublaslt"][reason] += 1
    return otherwise


def _context(card: int | None) -> tuple[int, int, int, int, int]:
    """The driver's functions a call needs, and the context it runs in."""
    if card is None:
        return 0, 0, 0, 0, 0
    made = driver()
    names = ("cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamIsCapturing")
    get, push, pop, capturing = (made.address(name) for name in names)
    return get, push, pop, capturing, made.context(card)


def _scale(kind: int, value: float) -> bytes:
    if kind == CUDA_TYPES[torch.float64]:
        return struct.pack("d", value)
    number = struct.pack("i", int(value)) if kind == CUDA_TYPES[torch.int32] else None
    return (number or struct.pack("f", value)).ljust(8, b"\0")


def _packed(call: Call) -> bytes:
    none = Pointer(-1, 0, 1)
    every = (*call.pointers, call.bias or none)
    return b"".join(struct.pack("3q", p.argument, p.offset, p.alignment) for p in every)


def _space(device: torch.device, card: int | None, size: int, stream: int,
           fresh: bool) -> torch.Tensor:  # fmt: skip
    """Memory for algorithms to write to: that of the stream, or new memory."""
    if fresh:
        return torch.empty(size, dtype=torch.uint8, device=device)
    found = _spaces.get((card, stream))
    if found is None:
        found = _spaces[card, stream] = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    return found


_spaces: dict[tuple[int | None, int], torch.Tensor] = {}
caches.register(_spaces.clear)
