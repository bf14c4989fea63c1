"""Generated Triton kernels on CPU tensors, in Triton's interpreter: for tests and for looking.

Four things of the interpreter are replaced while a kernel runs: folds and scans, which it does
element by element in Python, rounding to bfloat16, which it does not carry into the exponent,
products of bfloat16, of which it multiplies the bits, and the description of a shape, which it
makes anew for every value (a tenth of its time).
"""

# The interpreter has no types, and its parts have no public names.
# pyright: reportAttributeAccessIssue=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import linecache
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tilewright.runtime import HELPERS


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `triton.jit`: the function itself."""
    return fn


def nothing() -> None:
    """In place of what only matters to a card."""


class _Turns:
    """Programs that wait for each other: each runs in a thread, one of them at a time."""

    def __init__(self, programs: int, run: Callable[[int], None]) -> None:
        self._run = run
        self._turn = 0
        self._live = list(range(programs))
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def all(self) -> None:
        threads = [threading.Thread(target=self._one, args=(k,)) for k in self._live]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self._error is not None:
            raise self._error

    def _one(self, k: int) -> None:
        _here.turns = self
        _here.program = k
        try:
            self._wait(k)
            self._run(k)
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._live.remove(k)
                self._next(k)

    def _next(self, k: int) -> None:
        self._turn = next((j for j in self._live if j > k), min(self._live, default=-1))
        self._changed.notify_all()

    def _wait(self, k: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == k)
        if self._error is not None:
            raise RuntimeError("another program failed")
        interpreter.interpreter_builder.set_grid_idx(k, 0, 0)

    def give(self, k: int) -> None:
        """Let the others run, and go on when it is this one's turn again."""
        with self._changed:
            self._next(k)
        self._wait(k)


_here = threading.local()


def meet(counter: Any, until: int) -> None:
    """In place of a wait for other programs: they run."""
    cell = ctypes.c_int32.from_address(int(counter.handle.data.item()))
    cell.value += 1
    while cell.value < int(until):
        _here.turns.give(_here.program)


def in_order(x: Any) -> Any:
    """In place of a network that compares and exchanges."""
    return _tensor(np.sort(x.handle.data, 1), x.dtype)


def rounded(x: Any) -> Any:
    """In place of an instruction that rounds two floats to bfloat16 at once."""
    return x.to(tl.bfloat16).to(tl.float32)


def nearest(x: Any) -> Any:
    """In place of an instruction that rounds and converts."""
    limits, floats = np.iinfo(np.int32), np.nan_to_num(np.rint(x.handle.data.astype(np.float64)))
    return _tensor(np.clip(floats, limits.min, limits.max).astype(np.int32), tl.int32)


def mark(after: Any) -> Any:
    return after


def anew(x: Any, mark: Any) -> Any:
    """In place of what a compiler may not know to be the same."""
    return x


def product(a: Any, by: int) -> tuple[Any, Any]:
    """Both halves of what one instruction gives on a card."""
    return a * by, tl.umulhi(a, by)


class _Maths:
    """`libdevice` by torch's functions of the same meaning."""

    _NAMES: Mapping[str, Callable[..., torch.Tensor]] = {
        "nearbyint": torch.round, "pow": torch.pow, "fmod": torch.fmod, "fast_dividef": torch.div,
        "fast_logf": torch.log,
    }  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., Any]:
        ref = self._NAMES.get(name) or getattr(torch, name)

        def call(*args: Any) -> Any:
            data = np.broadcast_arrays(*(a.handle.data for a in args))
            result = ref(*(torch.from_numpy(np.ascontiguousarray(d)) for d in data)).numpy()
            return _tensor(result, args[0].dtype)

        return call


libdevice = _Maths()


def _tensor(data: Any, dtype: Any) -> Any:
    kind = tl.block_type(dtype, list(data.shape)) if data.shape else dtype
    return tl.core.tensor(interpreter.TensorHandle(data, dtype), kind)


@functools.cache
def helpers(name: str) -> ModuleType:
    """A module of device functions as plain Python."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"{__package__}.{name}_interpreted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- folds and scans over whole arrays


def _halves(parts: Sequence[Any], axis: int, fn: Callable[..., Any]) -> list[Any]:
    """Tensors folded along an axis in pairs, as the hardware does; their extent is a power of 2."""
    arrays = [p.handle.data for p in parts]
    dtypes = [p.dtype for p in parts]
    while arrays[0].shape[axis] > 1:
        middle = arrays[0].shape[axis] // 2
        low, high = (
            [
                _tensor(np.take(a, range(*ends), axis), d)
                for a, d in zip(arrays, dtypes, strict=True)
            ]
            for ends in ((0, middle), (middle, 2 * middle))
        )
        made = fn(*low, *high)
        made = made if isinstance(made, tuple) else (made,)
        arrays = [np.broadcast_to(m.handle.data, low[0].handle.data.shape) for m in made]
    return arrays


def _reduce(input: Any, axis: int | None, combine_fn: Any, keep_dims: bool = False,
            **_: Any) -> Any:  # fmt: skip
    parts = list(input) if isinstance(input, (tuple, list)) else [input]
    fn = getattr(combine_fn, "fn", combine_fn)
    shape = parts[0].handle.data.shape
    if axis is None:
        parts = [_tensor(p.handle.data.reshape(-1), p.dtype) for p in parts]
    along = 0 if axis is None else int(axis)
    folded = _halves(parts, along, fn)
    results: list[Any] = []
    for array, p in zip(folded, parts, strict=True):
        if axis is None:
            value = array.reshape([1] * len(shape)) if keep_dims else array.reshape(-1)
            kind = tl.block_type(p.dtype, list(value.shape)) if keep_dims else p.dtype
            results.append(tl.core.tensor(interpreter.TensorHandle(value, p.dtype), kind))
        else:
            results.append(_tensor(array if keep_dims else array.squeeze(along), p.dtype))
    return tuple(results) if isinstance(input, (tuple, list)) else results[0]


def _scan(input: Any, axis: int, combine_fn: Any, reverse: bool = False, **_: Any) -> Any:
    parts = list(input) if isinstance(input, (tuple, list)) else [input]
    fn = getattr(combine_fn, "fn", combine_fn)
    order = slice(None, None, -1) if reverse else slice(None)
    arrays = [np.moveaxis(p.handle.data, axis, 0)[order].copy() for p in parts]
    dtypes = [p.dtype for p in parts]
    step = 1
    while step < arrays[0].shape[0]:
        before = [_tensor(np.roll(a, step, 0), d) for a, d in zip(arrays, dtypes, strict=True)]
        after = [_tensor(a.copy(), d) for a, d in zip(arrays, dtypes, strict=True)]
        made = fn(*before, *after)
        made = made if isinstance(made, tuple) else (made,)
        for array, m in zip(arrays, made, strict=True):
            array[step:] = m.handle.data[step:]
        step *= 2
    results = [_tensor(np.ascontiguousarray(np.moveaxis(a[order], 0, axis)), d)
               for a, d in zip(arrays, dtypes, strict=True)]  # fmt: skip
    return tuple(results) if isinstance(input, (tuple, list)) else results[0]


def _to_bfloat16(src: Any) -> Any:
    u = src.data.view(np.uint32)
    rounded = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    bits = np.where(np.isnan(src.data), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return interpreter.TensorHandle(bits, tl.bfloat16)


def _from_bfloat16(a: Any) -> Any:
    """What a product takes: the interpreter would multiply the bits."""
    if a.dtype.scalar != tl.bfloat16:
        return a
    return interpreter.TensorHandle((a.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


_describe_type, _describe_value = tl.block_type.__init__, tl.core.tensor.__init__
_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _type_once(self: Any, element_ty: Any, shape: list[Any]) -> None:
    """In place of `block_type.__init__`."""
    sizes = [s.value if isinstance(s, tl.constexpr) else s for s in shape]
    key = (str(element_ty), *sizes)
    if key not in _types:
        _describe_type(self, element_ty, shape)
        _types[key] = dict(vars(self))
    vars(self).update(_types[key])


def _value_once(self: Any, handle: Any, type: Any) -> None:
    """In place of `tensor.__init__`."""
    sizes = type.shape if type.is_block() else ()
    if sizes not in _shapes:
        _describe_value(self, handle, type)
        _shapes[sizes] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[sizes]


@contextlib.contextmanager
def repaired() -> Generator[None]:
    builder = interpreter.InterpreterBuilder
    folds, cast, dot = interpreter._patch_reduce_scan, builder.cast_impl, builder.create_dot

    def patch(scope: Any) -> None:
        for module in (tl, tl.core):
            scope.set_attr(module, "reduce", _reduce)
            scope.set_attr(module, "associative_scan", _scan)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32:
            return _to_bfloat16(src)
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar.is_int():
            return _to_bfloat16(cast(self, src, tl.float32))
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _from_bfloat16(a), _from_bfloat16(b), *rest)

    interpreter._patch_reduce_scan = patch
    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    tl.block_type.__init__, tl.core.tensor.__init__ = _type_once, _value_once
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        interpreter._patch_reduce_scan = folds
        builder.cast_impl, builder.create_dot = cast, dot
        tl.block_type.__init__, tl.core.tensor.__init__ = _describe_type, _describe_value


# ---- kernels of users


@functools.cache
def _standard() -> tuple[tuple[Any, str, Any, Any], ...]:
    """The functions of Triton's language that are themselves kernels' code: where each is, its
    name, itself, and as the interpreter calls it."""
    owners = (tl, tl.standard, tl.math, tl.random, tl.core.tensor)
    made: dict[int, Any] = {}
    found: list[tuple[Any, str, Any, Any]] = []
    for owner in owners:
        for name, value in vars(owner).items():
            if isinstance(value, JITFunction):
                one = made.setdefault(id(value), interpreter.InterpretedFunction(value.fn))
                called = one if owner is not tl.core.tensor else functools.partialmethod(one)
                found.append((owner, name, value, called))
    return tuple(found)


def users(namespace: dict[str, Any]) -> None:
    """Make what a kernel's text has imported by name the interpreter's as well."""
    for module in HELPERS:
        if getattr(namespace.get(module), "__name__", "") == f"tilewright.runtime.{module}":
            namespace[module] = helpers(module)
    if isinstance(namespace.get("libdevice"), ModuleType):
        namespace["libdevice"] = libdevice
    for name, value in list(namespace.items()):
        module = importlib.import_module(getattr(value, "__module__", None) or "builtins")
        if isinstance(value, JITFunction):
            namespace[name] = interpreter.InterpretedFunction(value.fn)
        elif callable(value) and module.__name__.startswith("triton.language"):
            namespace[name] = _by_name(module, getattr(value, "__name__", name), value)


def _by_name(module: ModuleType, name: str, value: Any) -> Any:
    """A function of the language, looked up when it is called: by then the interpreter has put its
    own in its place."""
    if getattr(module, name, None) is not value or isinstance(value, type):
        return value
    return lambda *args, **kwargs: getattr(module, name)(*args, **kwargs)


def function(fn: Callable[..., Any]) -> Any:
    """A kernel as the interpreter runs it."""
    return interpreter.InterpretedFunction(fn)


@functools.cache
def import_all() -> None:
    """Triton imports a part of itself when it first looks at an argument, and that part does not
    take the language of the interpreter for its own; nor must our own helpers for a card."""
    for name in ("triton.experimental.gluon", *(f"{__package__}.{name}" for name in HELPERS)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


@contextlib.contextmanager
def interpreting() -> Generator[None]:
    """While a user's kernel runs in the interpreter, so does the language it is written in."""
    import_all()
    with _as_before(tl, tl.core, tl.standard, tl.math, tl.core.tensor):
        for owner, name, _, called in _standard():
            setattr(owner, name, called)
        with repaired():
            yield


@contextlib.contextmanager
def _as_before(*owners: Any) -> Generator[None]:
    """The interpreter puts its functions into modules of the language, and does not take all of
    them back: of those that the language's own functions call, none."""
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, old in before:
            for name, value in list(vars(owner).items()):
                if name in old and old[name] is not value:
                    setattr(owner, name, old[name])


class Interpreted:
    """A kernel's text, callable with a number of programs, addresses and numbers.

    `types` are its parameters' types as Triton names them; `blocks` its constexpr arguments.
    """

    def __init__(self, text: str, name: str, types: Sequence[str], blocks: Mapping[str, int]
                 ) -> None:  # fmt: skip
        file = f"<tilewright {name}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {"__name__": file}
        exec(compile(text, file, "exec"), namespace)
        kernel = namespace[name]
        self._fn = interpreter.FunctionRewriter(getattr(kernel, "fn", kernel)).rewrite_ast()
        for other, value in list(namespace.items()):  # what the kernel calls
            if other != name and isinstance(value, JITFunction):
                namespace[other] = interpreter.FunctionRewriter(value.fn).rewrite_ast()
        self._waits = "tri.meet(" in text
        self._types = [tl.str_to_ty(t, None) for t in types]
        self._blocks = {name: tl.constexpr(size) for name, size in blocks.items()}
        for module in HELPERS:
            if module in namespace:
                namespace[module] = helpers(module)
        namespace["libdevice"] = libdevice

    def __call__(self, programs: int, *args: int | float) -> None:
        given = [_argument(a, t) for a, t in zip(args, self._types, strict=True)]
        builder = interpreter.interpreter_builder
        with repaired():
            scope = interpreter._patch_lang(self._fn)
            # triton before 3.7 counts on numpy taking an array of one element for a number
            scope.set_attr(tl.core.tensor, "__index__", lambda t: int(t.handle.data.item()))
            scope.set_attr(tl.core.tensor, "__bool__", _truth)
            try:
                builder.set_grid_dim(programs, 1, 1)
                if self._waits:
                    _Turns(programs, lambda _: self._fn(*given, **self._blocks)).all()
                    return
                for k in range(programs):
                    builder.set_grid_idx(k, 0, 0)
                    self._fn(*given, **self._blocks)
            finally:
                scope.restore()


def _truth(t: Any) -> bool:
    return bool(t.handle.data.item()) if t.handle.data.size == 1 else True


def _argument(value: int | float, kind: Any) -> Any:
    if kind.is_ptr():
        data = np.array([value], dtype=np.uint64)
    elif kind.is_floating():
        data = np.array([value], dtype=np.float64 if kind == tl.float64 else np.float32)
    else:
        data = np.array([value], dtype=np.int64 if kind == tl.int64 else np.int32)
    return tl.tensor(interpreter.TensorHandle(data, kind), kind)


__all__ = [
    "Interpreted",
    "function",
    "helpers",
    "interpreting",
    "libdevice",
    "meet",
    "nothing",
    "plain",
    "product",
    "repaired",
    "users",
]
