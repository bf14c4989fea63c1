"""The user's own Triton kernels in a graph: which they are, and what they are made of.

Dynamo leaves a launch in the graph as a call that names its kernel by a number, which means nothing
in another process. `describe` makes of it a `UserKernel`: a text that stands alone (the function
with all it refers to), its parameters and configurations. Equal descriptions are the same kernel.
"""

from __future__ import annotations

import ast
import importlib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

WRAPPERS = frozenset((triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation))

# Modules a kernel may refer to: they are there wherever Triton is.
_SETTLED = ("triton", "math")


class Unmovable(Exception):
    """A kernel, or an argument of one, that only exists in this process; the message says why."""


@dataclass(frozen=True)
class Parameter:
    name: str
    constexpr: bool = False
    type: str = ""  # by annotation
    const: bool = False  # a pointer nothing is written through
    specialised: bool = True  # on being one
    aligned: bool = True  # specialised on being a multiple of 16


@dataclass(frozen=True)
class Setting:
    """A configuration: values of parameters, and options of the compiler."""

    constants: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Place:
    """Where the lines of a text from `first` on come from."""

    first: int
    file: str
    line: int


@dataclass(frozen=True)
class UserKernel:
    """`text` is empty for a kernel that cannot leave its process (`reason`); `live` is it then."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    settings: tuple[Setting, ...]
    keys: tuple[str, ...] = ()  # arguments for each value of which the fastest setting is found
    defaults: tuple[tuple[str, Any], ...] = ()
    places: tuple[Place, ...] = field(default=(), compare=False)
    live: Any = field(default=None, compare=False, repr=False)
    reason: str = ""

    @property
    def location(self) -> str:
        return f"{self.places[0].file}:{self.places[0].line}" if self.places else ""

    def origin(self, line: int) -> str:
        """The user's file and line of a line of the text."""
        before = [p for p in self.places if p.first <= line]
        found = max(before, key=lambda p: p.first, default=None)
        return "" if found is None else f"{found.file}:{found.line + line - found.first}"


@dataclass(frozen=True, eq=False)
class Launch:
    """What an opaque call of the program calls: a kernel with what is known of its arguments."""

    kernel: UserKernel
    constants: tuple[tuple[str, Any], ...]
    writes: tuple[str, ...]
    descriptors: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # argument -> block of a descriptor
    options: tuple[tuple[str, Any], ...] = ()  # of the compiler, given at the launch

    @property
    def __name__(self) -> str:
        return self.kernel.name

    def __str__(self) -> str:
        return self.kernel.name


def describe(number: int) -> UserKernel:
    """The kernel that Dynamo has given this number."""
    kernel: Any = kernel_side_table.get_kernel(number)
    settings: tuple[Setting, ...] = (Setting(),)
    keys: tuple[str, ...] = ()
    if hasattr(kernel, "configs"):
        settings = tuple(_setting(c) for c in kernel.configs)
        keys = tuple(kernel.keys)
    function = kernel
    while not hasattr(function, "params"):
        function = function.fn
    parameters = tuple(_parameter(p) for p in function.params)
    defaults = tuple((p.name, p.default) for p in function.params if p.has_default)
    made, reason = _Text(), ""
    try:
        made.add_entry(function)
        for _, value in (*defaults, *(c for s in settings for c in s.constants)):
            literal(value)
    except Unmovable as why:
        reason = str(why)
    text = "" if reason else made.text()
    places = made.places() if text else (Place(1, *_where(function)),)
    return UserKernel(function.__name__, text, parameters, settings, keys, defaults, places,
                      None if text else kernel, reason)  # fmt: skip


def rename(graph: torch.fx.Graph) -> None:
    """Call launches by their kernels' names."""
    for node in graph.nodes:
        if node.target in WRAPPERS:
            kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            while hasattr(kernel, "fn"):
                kernel = kernel.fn
            if not node.name.startswith(kernel.__name__):
                node._rename(kernel.__name__)


def constants_of(number: int) -> dict[str, Any]:
    """Arguments that are no graph values, by the number Dynamo has given them."""
    found: dict[str, Any] = kernel_side_table.get_constant_args(number)
    return {name: _unwrapped(value) for name, value in found.items()}


def block_of(descriptor: Any) -> tuple[int, ...]:
    """The block of a descriptor, from what Dynamo writes down of it."""
    kind, made_with = descriptor
    if kind != "stable":
        raise Unmovable(f"a descriptor of the {kind} kind")
    return tuple(made_with[0])


def identity(node: torch.fx.Node) -> str:
    """What of a launch is not its graph values, the same in every process."""
    number, constants = node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"]
    assert isinstance(number, int) and isinstance(constants, int)
    kernel = describe(number)
    if kernel.reason:
        raise Unmovable(kernel.reason)
    given = sorted((n, literal(v)) for n, v in constants_of(constants).items())
    defaults = [(n, literal(v)) for n, v in kernel.defaults]
    settings = [([(n, literal(v)) for n, v in s.constants], s.options) for s in kernel.settings]
    return repr((kernel.text, kernel.parameters, settings, kernel.keys, defaults, given))


def written(number: int, constants: int, given: Mapping[str, Any],
            descriptors: Mapping[str, Any]) -> list[str]:  # fmt: skip
    """The tensors among the arguments that a launch writes to; stands in for torch's own answer.

    It has the same parameters. Whatever cannot be found out is taken for written.
    """
    # Triton is imported here, by programs that use it, and by no others
    from tilewright.graph import ttir

    kernel = describe(number)
    found = ttir.accesses(kernel, kernel_side_table.get_kernel(number),
                          {**dict(kernel.defaults), **constants_of(constants), **given},
                          {name: block_of(made) for name, made in descriptors.items()})  # fmt: skip
    return [n for n, value in given.items() if isinstance(value, torch.Tensor)
            and n in found.writes]  # fmt: skip


# ---- parts of a description


def _setting(config: Any) -> Setting:
    names = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    options = ((n, getattr(config, n, None)) for n in names)
    return Setting(tuple((n, _unwrapped(v)) for n, v in config.kwargs.items()),
                   tuple((n, v) for n, v in options if v is not None))  # fmt: skip


def _parameter(p: Any) -> Parameter:
    return Parameter(p.name, bool(p.is_constexpr), str(p.annotation_type or ""), bool(p.is_const),
                     not p.do_not_specialize,
                     not (p.do_not_specialize or p.do_not_specialize_on_alignment))  # fmt: skip


def _unwrapped(value: Any) -> Any:
    """What a `tl.constexpr` holds."""
    return value.value if type(value).__name__ == "constexpr" else value


def literal(value: Any) -> str:
    """A constant as Python text."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return repr(value)
    if kind is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if kind in (tuple, list):
        inside = "".join(f"{literal(v)}, " for v in value)
        return f"({inside})" if kind is tuple else f"[{inside}]"
    if kind.__module__ == "triton.language.core" and kind.__name__ == "constexpr":
        return f"triton.language.constexpr({literal(value.value)})"
    if kind.__module__ == "triton.language.core" and kind.__name__ == "dtype":
        return f"triton.language.dtype({value.name!r})"
    raise Unmovable(f"a constant of type {kind.__name__}")


# ---- the text


class _Text:
    """A kernel and all it refers to as one module."""

    def __init__(self) -> None:
        self._bound: dict[str, Any] = {}
        self._imports = ["import triton", "import triton.language"]
        self._constants: list[str] = []
        self._functions: list[tuple[str, str, int]] = []  # (text, file, line)

    def add_entry(self, function: Any) -> None:
        self._bound[function.__name__] = function
        self._add(function)

    def text(self) -> str:
        head = ["from __future__ import annotations", *self._imports, *self._constants]
        return "\n".join(head) + "".join(f"\n\n\n{text}" for text, _, _ in self._functions) + "\n"

    def places(self) -> tuple[Place, ...]:
        """The kernel's own place, then those of what it calls."""
        line = 1 + len(self._imports) + len(self._constants)
        found: list[Place] = []
        for text, file, start in self._functions:
            found.append(Place(line + 4, file, start))  # two blank lines and the decorator
            line += 3 + text.count("\n")
        return tuple(found)

    def _add(self, function: Any) -> None:
        kind = type(function).__name__
        if kind != "JITFunction":
            raise Unmovable(f"{function.__name__} is a {kind}")
        source: str = function.src.rstrip()
        options = [f"{n}={v!r}" for n in ("noinline", "debug")
                   if isinstance(v := getattr(function, n, None), bool)]  # fmt: skip
        decorator = f"@triton.jit({', '.join(options)})" if options else "@triton.jit"
        self._functions.append((f"{decorator}\n{source}", *_where(function)))
        scope: Mapping[str, Any] = function.get_capture_scope()
        for name in _free_names(source):
            if name in scope:  # if it is nowhere, Triton says so best
                self._bind(name, scope[name], scope)

    def _bind(self, name: str, value: Any, scope: Mapping[str, Any]) -> None:
        if name in self._bound:
            if self._bound[name] is not value:
                raise Unmovable(f"two things are called {name}")
            return
        self._bound[name] = value
        module: str = getattr(value, "__module__", None) or ""
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _SETTLED:
                raise Unmovable(f"the module {value.__name__}")
            self._imports.append(f"import {value.__name__} as {name}")
        elif module.partition(".")[0] in _SETTLED and callable(value) and _is_found(module, value):
            self._imports.append(f"from {module} import {value.__name__} as {name}")
        elif hasattr(value, "params") and hasattr(value, "src"):
            if value.__name__ != name:
                raise Unmovable(f"{value.__name__} is called {name}")
            self._add(value)
        else:
            text = literal(value)
            if "constexpr" in str(scope.get("__annotations__", {}).get(name, "")):
                text = f"triton.language.constexpr({text})"
            self._constants.append(f"{name} = {text}")


def _is_found(module: str, value: Any) -> bool:
    home = importlib.import_module(module)
    return getattr(home, getattr(value, "__name__", ""), None) is value


def _where(function: Any) -> tuple[str, int]:
    """The file and line of a function's `def`."""
    code = function.fn.__code__
    decorators = function.raw_src
    skipped = next((k for k, line in enumerate(decorators) if line.lstrip().startswith("def ")), 0)
    return code.co_filename, function.starting_line_number + skipped


def _free_names(source: str) -> Iterator[str]:
    """The names a function refers to that are not its own, in order."""
    tree: Any = ast.parse(source).body[0]
    own = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    used: dict[str, None] = {}
    for part in (*tree.args.defaults, *filter(None, tree.args.kw_defaults), *tree.body):
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    used[node.id] = None
                else:
                    own.add(node.id)
    yield from (name for name in used if name not in own)
