"""A digest of a graph: equal for graphs that compile to the same program, in any process.

Everything lowering can see is in it: operators, arguments, and of each value its type, layout,
device, symbolic sizes with their ranges, and which values share memory. Source locations are not:
moving a function down a file does not compile it again.

`digest` is of the ATen graphs AOTAutograd makes, `digest_captured` of the graph Dynamo gives it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from tilewright.graph import user_kernels


class Undigestible(Exception):
    """The graph refers to something whose identity cannot be told across processes."""


def digest(gm: torch.fx.GraphModule) -> str:
    h = hashlib.sha256()
    for line in _lines(gm, _Scope()):
        h.update(line.encode())
        h.update(b"\n")
    return h.hexdigest()


def digest_captured(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The digest of a graph of Dynamo's with the inputs it is compiled for."""
    h, scope = hashlib.sha256(), _Scope()
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise Undigestible("inputs that are not the graph's own")
    for node, given in zip(placeholders, inputs, strict=True):
        h.update(f"{_value(node.meta.get('example_value'), scope)} {_given(given)}\n".encode())
    for line in _captured_lines(gm, scope):
        h.update(f"{line}\n".encode())
    return h.hexdigest()


class _Scope:
    """Numbers for storages, in order of appearance, and the symbols met."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.symbols: dict[Any, Any] = {}


def _lines(gm: torch.fx.GraphModule, scope: _Scope) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            yield f"{node.name} = {_attribute(gm, str(node.target), scope)}"
            continue
        args = _arguments(node)
        meta = _value(node.meta.get("val"), scope)
        new = node.meta.get("unbacked_bindings")
        yield f"{node.name} = {node.op} {_target(node)} {args} : {meta} {new or ''}"
    yield from _symbols(scope)


def _symbols(scope: _Scope) -> Iterator[str]:
    for symbol, env in sorted(scope.symbols.items(), key=lambda item: str(item[0])):
        known = getattr(env, "backed_var_to_val", None)
        hint = known.get(symbol) if known is not None else None
        yield f"{symbol} in {env.var_to_range.get(symbol)} near {hint}"


def _target(node: torch.fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return node.op
    target = node.target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    module = getattr(target, "__module__", None)
    if name is None or module is None or "<" in name:
        raise Undigestible(f"{target} has no name to find it by")
    return f"{module}.{name}"


def _arguments(node: torch.fx.Node) -> str:
    if node.target not in user_kernels.WRAPPERS:
        return _argument((node.args, node.kwargs))
    given = {k: v for k, v in node.kwargs.items() if not k.endswith("_idx")}
    try:
        return f"{user_kernels.identity(node)} {_argument(given)}"
    except user_kernels.Unmovable as why:
        raise Undigestible(f"a user's kernel with {why}") from why


def _argument(value: Any) -> str:
    match value:
        case torch.fx.Node():
            return f"%{value.name}"
        case tuple() | list():
            return "(" + ",".join(_argument(v) for v in value) + ")"
        case dict():
            return "{" + ",".join(f"{k}:{_argument(v)}" for k, v in value.items()) + "}"
        case slice():
            return f"slice{_argument((value.start, value.stop, value.step))}"
        case float():
            return value.hex()
        case None | bool() | int() | str():
            return repr(value)
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return str(value)
        case torch._ops.OpOverload():
            return str(value)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return str(value.node.expr)
        case _:
            raise Undigestible(f"an argument of type {type(value).__name__}")


def _value(value: Any, scope: _Scope) -> str:
    match value:
        case torch.Tensor():
            return _tensor(value, scope)
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            expr = value.node.expr
            for symbol in expr.free_symbols:
                scope.symbols[symbol] = value.node.shape_env
            return f"{type(value).__name__}({expr})"
        case tuple() | list():
            return "(" + ",".join(_value(v, scope) for v in value) + ")"
        case dict():
            return "{" + ",".join(f"{k}:{_value(v, scope)}" for k, v in value.items()) + "}"
        case None | bool() | int() | float() | str():
            return repr(value)
        case _:
            raise Undigestible(f"a value of type {type(value).__name__}")


def _tensor(t: torch.Tensor, scope: _Scope) -> str:
    if t.layout != torch.strided or t.is_quantized:
        raise Undigestible(f"a tensor of layout {t.layout}")
    storage = t.untyped_storage()._cdata
    number = scope.storages.setdefault(storage, len(scope.storages))
    numbers = [_value(n, scope) for n in (*t.size(), *t.stride(), t.storage_offset())]
    bits = f"{int(t.is_conj())}{int(t.is_neg())}"
    return f"{t.dtype} {t.device} {t.dim()} {' '.join(numbers)} @{number} {bits}"


def _attribute(gm: torch.fx.GraphModule, path: str, scope: _Scope) -> str:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, torch.fx.GraphModule):
        return "\n".join(_lines(value, scope))
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        layout = f"{value.dtype} {tuple(value.size())} {value.stride()} {value.device}"
        return f"{layout} {hashlib.sha256(data).hexdigest()}"
    raise Undigestible(f"an attribute of type {type(value).__name__}")


# ---- the graph Dynamo captured

# Functions whose meaning is settled by the versions of torch and Python, which are in every key.
_SETTLED = ("_operator", "builtins", "math", "torch")


def _captured_lines(gm: torch.fx.GraphModule, scope: _Scope) -> Iterator[str]:
    for node in gm.graph.nodes:
        match node.op:
            case "placeholder":
                yield f"{node.name} = placeholder"
                continue
            case "get_attr":
                value = functools.reduce(getattr, str(node.target).split("."), gm)
                if not isinstance(value, torch.Tensor):
                    raise Undigestible(f"an attribute of type {type(value).__name__}")
                target = f"constant {_attribute(gm, str(node.target), scope)}"
            case "call_function":
                kernel = node.target in user_kernels.WRAPPERS
                target = str(node.target) if kernel else _settled(node.target)
            case "call_method" | "output":
                target = str(node.target)
            case _:
                raise Undigestible(f"a node that is a {node.op}")
        yield f"{node.name} = {node.op} {target} {_arguments(node)}"
    yield from _symbols(scope)


@functools.lru_cache(maxsize=4096)
def _settled(target: Any) -> str:
    """A name under which the same function is found in every process with the same torch."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    module: str = getattr(target, "__module__", None) or ""
    if module.partition(".")[0] not in _SETTLED or isinstance(
        target, torch._ops.HigherOrderOperator
    ):
        raise Undigestible(f"a call of {target}")
    home = vars(sys.modules.get(module, torch))
    for name in (getattr(target, "__name__", ""), *home):
        if home.get(name) is target:
            return f"{module}.{name}"
    raise Undigestible(f"{target} has no name to find it by")


def _given(value: Any) -> str:
    """What AOTAutograd asks a real input beyond its layout."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor):
        raise Undigestible(f"an input of type {type(value).__name__}")
    return f"{type(value).__name__} {value.requires_grad} {value.is_leaf} {value.is_inference()}"
