"""The launch of a user's Triton kernel as the host program makes it, and as the kernel is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.graph.ttir import TYPES, type_of
from tilewright.graph.user_kernels import Launch, Parameter, Setting, UserKernel
from tilewright.host.program import KernelCall, UserLaunch
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Opaque, Program, View
from tilewright.runtime.launch import KINDS
from tilewright.runtime.triton_build import TritonConfig, TritonSource
from tilewright.runtime.user_kernel import UserSource
from tilewright.target import Target

Made = tuple[KernelCall, Any] | None

_DEFAULTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1}  # Triton's


def user_kernel(program: Program, call: Opaque) -> tuple[KernelCall, UserSource]:
    """What runs a launch. Its name in the host program is left to the caller."""
    launch = call.target
    assert isinstance(launch, Launch)
    device = _device(program, call)
    given = {p.name: call.kwargs[p.name] for p in launch.kernel.parameters if p.name in call.kwargs}
    names = tuple(given)
    source = UserSource.of(launch, names, device)
    narrow: tuple[Expr, ...] = ()
    if device.type == "cuda" and launch.kernel.text and not launch.descriptors:
        source, narrow = _with_static(source, launch, given)
        names = source.names
    several = len(launch.kernel.settings) > 1
    keys = tuple(_key(launch, given, name) for name in launch.kernel.keys) if several else ()
    made = UserLaunch(tuple(call.args[0]), keys, tuple(given[n] for n in names))
    index = None if device.type == "cpu" else device.index or 0
    return KernelCall("", (), False, index, narrow, launch=made), source


def named(made: Sequence[Made]) -> list[Made]:
    """The same with names for user kernels: theirs and a number; equal ones have the same."""
    known: list[tuple[str, UserSource]] = []
    result: list[Made] = []
    for item in made:
        if item is not None and isinstance(item[1], UserSource):
            call, source = item
            name = next((n for n, s in known if s == source), None)
            if name is None:
                name = f"{source.kernel.name}_{len(known)}"
                known.append((name, source))
            item = replace(call, name=name), source
        result.append(item)
    return result


def _device(program: Program, call: Opaque) -> torch.device:
    """Where its tensors are; without any, the card."""
    devices = [program.buffers[b].device for b in sorted(call.reads)]
    return next((d for d in devices if d.type == "cuda"), None) or (
        devices[0] if devices else torch.device("cuda", 0)
    )


def _key(launch: Launch, given: dict[str, Any], name: str) -> Any:
    value = given.get(name, dict(launch.constants).get(name))
    return None if isinstance(value, View) else value


def _with_static(source: UserSource, launch: Launch, given: dict[str, Any]
                 ) -> tuple[UserSource, tuple[Expr, ...]]:  # fmt: skip
    """The kernel as one of ours, if its parameters are pointers and numbers.

    A number that is one is part of it, as Triton has it; it is not an argument then. An argument
    that is only known at run time may need more than 31 bits: `narrow` are those.
    """
    params: list[tuple[str, str]] = []
    aligned: set[str] = set()
    constants: dict[str, Any] = {}
    narrow: list[Expr] = []
    known = {**dict(launch.constants), **given}
    tuned = {name for s in launch.kernel.settings for name, _ in s.constants}
    for p in launch.kernel.parameters:
        value = known.get(p.name)
        if p.name in tuned:
            continue
        if p.constexpr or value is None or isinstance(value, str) or _is_one(p, value):
            constants[p.name] = value
            continue
        kind = p.type or _type(value)
        if kind.startswith("*k"):
            kind = f"*{kind[2:]}"
        if not kind.startswith("*") and kind not in KINDS:
            return source, ()
        params.append((p.name, kind))
        if p.aligned and _is_aligned(value):
            aligned.add(p.name)
        if kind == "i32" and not p.type and isinstance(value, Expr) and value.op != "const":
            narrow.append(value)
    static = _source(launch, source.device, params, constants, frozenset(aligned))
    if static is None:
        return source, ()
    wide = [(n, "i64" if any(given.get(n) is e for e in narrow) else t) for n, t in params]
    names = tuple(n for n, _ in params)
    passed = {n: v for n, v in known.items() if n in names}
    made = replace(source, names=names, static=static,
                   constants=tuple((n, v) for n, v in constants.items()),
                   wide=replace(static, params=tuple(wide)) if narrow else None)  # fmt: skip
    given.update(passed)
    return made, tuple(narrow)


def _source(launch: Launch, device: torch.device, params: list[tuple[str, str]],
            constants: dict[str, Any], aligned: frozenset[str]) -> TritonSource | None:  # fmt: skip
    target = Target.of(device)
    major, minor = target.capability
    kernel: UserKernel = launch.kernel
    options = dict(launch.options)
    fixed = {n: options.pop(n) for n in (*_DEFAULTS, "maxnreg") if n in options}
    configs = tuple(_config(s, constants, fixed) for s in kernel.settings)
    options.setdefault("enable_fp_fusion", True)  # Triton's default, which our own kernels change
    return TritonSource(
        kernel.text,
        kernel.name,
        tuple(params),
        configs,
        capability=10 * major + minor,
        shared_memory=target.shared_memory,
        aligned=aligned,
        device=device.index or 0,
        options=tuple(options.items()),
        order_of=tuple(p.name for p in kernel.parameters),
    )


def _config(setting: Setting, constants: dict[str, Any], fixed: dict[str, Any]) -> TritonConfig:
    options = {**_DEFAULTS, **fixed, **dict(setting.options)}
    return TritonConfig(tuple({**constants, **dict(setting.constants)}.items()),
                        options["num_warps"], options["num_stages"], options.get("maxnreg"),
                        options["num_ctas"])  # fmt: skip


def _is_one(p: Parameter, value: Any) -> bool:
    return p.specialised and _literal(value) == 1 and not p.type.startswith(("fp", "bf"))


def _literal(value: Any) -> int | None:
    """An integer that is known."""
    if isinstance(value, Expr) and value.op == "const":
        value = value.arg
    return value if type(value) is int else None


def _type(value: Any) -> str:
    match value:
        case View():
            return f"*{TYPES[value.dtype]}"
        case Expr() if value.op == "const":
            return type_of(value.arg)
        case Expr():
            kinds = {torch.bool: "i1", torch.float64: "fp32", torch.float32: "fp32"}
            likely = 0 if value.dtype in kinds else ix.likely(value)
            return kinds.get(value.dtype) or type_of(likely)
        case _:
            return type_of(value)


def _is_aligned(value: Any) -> bool:
    """Whether an argument is likely a multiple of 16; the launcher looks again."""
    if isinstance(value, View):
        return ix.likely(value.offset) * value.dtype.itemsize % 16 == 0
    if isinstance(value, Expr):
        return value.dtype == torch.int64 and ix.likely(value) % 16 == 0
    return type(value) is int and value % 16 == 0


__all__ = ["named", "user_kernel"]
