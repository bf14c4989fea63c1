"""A stand-in for the CuTe DSL on plain Python: rendered kernels run thread after thread on tensors.

It has what templates of simple kernels and all generated expressions call: scalar types over torch
scalars (which round and wrap as the card's do), tensors over memory, launches, `cute.math`. The
functions of `device.py` run unchanged on it. `running()` lets programs use it in place of a card.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import sys
import types
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from tilewright.gemm.cutedsl import call, source
from tilewright.gemm.cutedsl.build import Number, Pointer
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.cutedsl.types import TYPE, memory


class Numeric:
    """A scalar of one type."""

    dtype: ClassVar[torch.dtype]
    width: ClassVar[int]
    signed: ClassVar[bool]

    def __init__(self, value: Any) -> None:
        held = value.t if isinstance(value, Numeric) else torch.tensor(value)
        self.t = held.to(self.dtype)

    def to(self, kind: type[Numeric]) -> Numeric:
        return kind(self)

    def bitcast(self, kind: type[Numeric]) -> Numeric:
        return kind(of(self.t.view(kind.dtype)))

    def __bool__(self) -> bool:
        return bool(self.t)

    def __index__(self) -> int:
        assert not self.dtype.is_floating_point, "a float is no index"
        return int(self.t)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.t.item()})"

    def _with(self, other: Any, apply: Callable[[Any, Any], Any], turned: bool = False) -> Numeric:
        b = other.t if isinstance(other, Numeric) else type(self)(other).t
        kind = torch.promote_types(self.t.dtype, b.dtype)
        pair = (b.to(kind), self.t.to(kind)) if turned else (self.t.to(kind), b.to(kind))
        return of(apply(*pair))

    def __neg__(self) -> Numeric:
        return of(-self.t)

    def __invert__(self) -> Numeric:
        return of(~self.t)


def _infix(name: str, apply: Callable[[Any, Any], Any]) -> None:
    setattr(Numeric, f"__{name}__", lambda self, other: self._with(other, apply))
    setattr(Numeric, f"__r{name}__", lambda self, other: self._with(other, apply, turned=True))


def _floor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="floor") if int(b) else torch.full_like(a, -1)


def _rest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmod(a, b) if a.is_floating_point() or int(b) else a


for _name, _apply in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul),
                      ("truediv", operator.truediv), ("floordiv", _floor), ("mod", _rest),
                      ("and", operator.and_), ("or", operator.or_), ("xor", operator.xor),
                      ("lshift", operator.lshift), ("rshift", operator.rshift)):  # fmt: skip
    _infix(_name, _apply)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _infix(_name, getattr(operator, _name))


def _kind(name: str, dtype: torch.dtype) -> type[Numeric]:
    bits = 1 if dtype == torch.bool else 8 * dtype.itemsize
    signed = dtype.is_signed and dtype != torch.bool
    return type(name, (Numeric,), {"dtype": dtype, "width": bits, "signed": signed})


KINDS = {dtype: _kind(name, dtype) for dtype, name in TYPE.items()}


def of(value: torch.Tensor) -> Numeric:
    made = KINDS[value.dtype].__new__(KINDS[value.dtype])
    made.t = value
    return made


class Memory:
    """A pointer: flat memory, and a place in it."""

    def __init__(self, base: torch.Tensor | None, start: int = 0) -> None:
        self.base, self.start = base, start

    def __add__(self, more: Any) -> Memory:
        return Memory(self.base, self.start + int(more))

    def toint(self) -> Numeric:
        """An address: where it is found again."""
        _addresses.append(self)
        return KINDS[torch.int64](len(_addresses))


_addresses: list[Memory] = []


def _pointer(kind: Any, at: Any, space: Any, assumed_align: int = 16) -> Memory:
    return _addresses[int(at) - 1] if int(at) else Memory(None)


class Tensor:
    def __init__(self, start: Memory, layout: tuple[Any, Any]) -> None:
        self.memory = self.iterator = start
        self.layout = self.shape, self.stride = layout
        self.element_type = None

    def _place(self, at: Any) -> int:
        place = at if isinstance(at, tuple) else (at,)
        steps = self.stride if len(place) == len(self.stride) else (1,)
        return self.memory.start + sum(int(a) * int(s) for a, s in zip(place, steps, strict=True))

    def __getitem__(self, at: Any) -> Numeric:
        where = self._place(at)
        assert self.memory.base is not None, "memory that was fused away is read"
        if not 0 <= where < self.memory.base.numel():
            raise IndexError(f"element {where} of {self.memory.base.numel()} is read")
        return of(self.memory.base[where].clone())

    def __setitem__(self, at: Any, value: Any) -> None:
        where = self._place(at)
        assert self.memory.base is not None, "memory that was fused away is written"
        if not 0 <= where < self.memory.base.numel():
            raise IndexError(f"element {where} of {self.memory.base.numel()} is written")
        self.memory.base[where] = value.t if isinstance(value, Numeric) else value


class _Grid:
    """Where the thread that runs is."""

    block: tuple[int, int, int] = (0, 0, 0)
    thread: tuple[int, int, int] = (0, 0, 0)
    blocks: tuple[int, int, int] = (1, 1, 1)
    threads: tuple[int, int, int] = (1, 1, 1)
    launches: ClassVar[list[tuple[int, ...]]] = []


def _kernel(function: Callable[..., None]) -> Callable[..., Any]:
    def given(*args: Any) -> Any:
        def launch(grid: Sequence[Any], block: Sequence[Any], stream: Any = None) -> None:
            _Grid.blocks = tuple(int(n) for n in grid)  # type: ignore[assignment]
            _Grid.threads = tuple(int(n) for n in block)  # type: ignore[assignment]
            _Grid.launches.append((*_Grid.blocks, *_Grid.threads))
            for b in itertools.product(*map(range, _Grid.blocks)):
                for t in itertools.product(*map(range, _Grid.threads)):
                    _Grid.block, _Grid.thread = b, t  # type: ignore[assignment]
                    function(*args)

        return types.SimpleNamespace(launch=launch)

    return given


def _indices(name: str) -> Callable[[], tuple[Numeric, ...]]:
    return lambda: tuple(KINDS[torch.int32](n) for n in getattr(_Grid, name))


def _function(name: str) -> Callable[..., Numeric]:
    found = {"absf": torch.abs, "rem": torch.fmod, "roundeven": torch.round}.get(name)
    apply = found or getattr(torch, name)
    return lambda *args: of(apply(*(a.t for a in args)))


class TensorSSA:
    """There are none here."""


def _ceil_div(a: Any, b: Any) -> int:
    return -(-int(a) // int(b))


def modules() -> dict[str, types.ModuleType]:
    """Everything that generated text imports."""
    made = {name: types.ModuleType(name) for name in (
        "cutlass", "cutlass.cute", "cutlass.cute.runtime", "cutlass._mlir",
        "cutlass._mlir.dialects", "cutlass._mlir.dialects.math", "cuda", "cuda.bindings",
        "cuda.bindings.driver")}  # fmt: skip
    cutlass, cute = made["cutlass"], made["cutlass.cute"]
    for dtype, name in TYPE.items():
        setattr(cutlass, name, KINDS[dtype])
    cutlass.__dict__.update(
        Constexpr=int, const_expr=lambda x: x, cute=cute,
        select_=lambda c, a, b: a if c else b, min=min, max=max,
    )  # fmt: skip
    names = ("absf", "rem", "roundeven", "floor", "ceil", "trunc", "exp", "exp2", "expm1", "log",
             "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
             "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "atan2", "copysign", "pow", "sqrt",
             "rsqrt")  # fmt: skip
    cute.__dict__.update(
        kernel=_kernel, jit=lambda f: f, Tensor=Tensor, Pointer=Memory, TensorSSA=TensorSSA,
        make_tensor=Tensor, make_layout=lambda shape, stride: (shape, stride),
        make_ptr=_pointer, assume=lambda x, divby: x,
        size=lambda t: math.prod(int(n) for n in t.shape), ceil_div=_ceil_div,
        as_numeric=lambda x: x if isinstance(x, Numeric) else KINDS[torch.float32](x),
        math=types.SimpleNamespace(**{n: _function(n) for n in names}),
        AddressSpace=types.SimpleNamespace(gmem=0),
        arch=types.SimpleNamespace(thread_idx=_indices("thread"), block_idx=_indices("block"),
                                   block_dim=_indices("threads"), grid_dim=_indices("blocks")),
    )  # fmt: skip
    made["cutlass.cute.runtime"].__dict__["from_dlpack"] = lambda x: x
    made["cutlass._mlir.dialects"].__dict__["math"] = made["cutlass._mlir.dialects.math"]
    made["cuda.bindings"].__dict__["driver"] = made["cuda.bindings.driver"]
    made["cuda.bindings.driver"].__dict__["CUstream"] = int
    return made


@contextlib.contextmanager
def standing_in() -> Generator[None]:
    """The stand-in under the DSL's names, and `device.py` upon it."""
    with mock.patch.dict(sys.modules, modules()):
        helper = types.ModuleType(device_name)
        helper.__file__ = str(DEVICE)
        exec(compile(DEVICE.read_text(), str(DEVICE), "exec"), helper.__dict__)
        package = sys.modules["tilewright.gemm.cutedsl"]
        before = package.__dict__.get("device")
        package.__dict__["device"] = helper
        try:
            with mock.patch.dict(sys.modules, {device_name: helper}):
                yield
        finally:
            del package.__dict__["device"]
            if before is not None:
                package.__dict__["device"] = before


device_name = "tilewright.gemm.cutedsl.device"
DEVICE = Path(str(source.__file__)).parent / "device.py"


def evaluate(text: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run generated text; the names it leaves behind."""
    with standing_in():
        made: dict[str, Any] = dict(names or {})
        head = ("import cutlass\nimport cutlass.cute as cute\n"
                "from tilewright.gemm.cutedsl import device as tw\n")  # fmt: skip
        exec(compile(head + text, "<generated>", "exec"), made)
        return made


def run(self: CuteSource, *args: Any) -> None:
    """In place of a launch."""
    given: list[Any] = []
    for value, kind in zip(args, self.request.arguments, strict=True):
        if isinstance(kind, Number):
            given.append(KINDS[torch.int32 if kind.kind == "Int32" else torch.int64](value))
            continue
        assert isinstance(kind, Pointer) and isinstance(value, torch.Tensor)
        assert memory(value.dtype) == memory(kind.dtype)
        held = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
        base = value.as_strided((held,), (1,))
        given.append(Memory(base.view(torch.uint8) if value.dtype == torch.bool else base))
    with standing_in():
        made: dict[str, Any] = {}
        exec(compile(self.request.text, f"<{self.name}>", "exec"), made)
        made[self.request.entry](*given, 7)


@contextlib.contextmanager
def running() -> Generator[list[tuple[int, ...]]]:
    """Kernels of programs run in the stand-in; yields the grids and blocks they are launched on."""
    _Grid.launches.clear()
    with (
        mock.patch.object(CuteSource, "__call__", run),
        mock.patch.object(call, "on_card", return_value=True),
    ):
        yield _Grid.launches


__all__ = ["KINDS", "Numeric", "evaluate", "of", "running", "standing_in"]
