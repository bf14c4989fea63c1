"""`assemble`: the Python program that runs one graph, and how it is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.errors import TilewrightError
from tilewright.gemm.provider import Argument
from tilewright.host import support
from tilewright.host.profiled import asking
from tilewright.host.text import argument, number, numbers, target_path, view
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, syms
from tilewright.ir.program import Buffer, Handle, Opaque, Program, View
from tilewright.schedule.fusion.group import Group, When
from tilewright.schedule.memory import Step, alike

Kernel = Callable[..., None]
_SITE = re.compile(r"@(\w+)@")
_GRID = re.compile(r"@grid (\w+)@")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
DIRECT: dict[Any, str] = {
    getattr(getattr(torch.ops.aten, op), overload): f"torch:{op}"
    for op in _PRODUCTS for overload in ("default", "out")
}  # fmt: skip
"""Operators that torch binds as functions of their own: a call of these takes 0.9 us, of the
operator's object 1.3 (a product of 4x8x4 on a Xeon; into memory that is given 0.8 and 1.5)."""


@dataclass(frozen=True)
class KernelCall:
    """What the host program needs to know of a generated kernel."""

    name: str  # as shown: cpp_fused_..., triton_poi_fused_...
    args: tuple[Argument, ...]  # (kind, buffer or symbol; the text of an "address")
    checked: bool
    device: int | None = None  # of a CUDA kernel
    narrow: tuple[Expr, ...] = ()  # at most 2**31 - 1, or `{name}_wide` is to be called
    plain: bool = False  # a Python function of tensors and numbers
    workspace: Expr = ix.ZERO  # float32 elements it is given as `workspace`
    counters: Expr = ix.ZERO  # int32 elements, zero before and after, it is given as `counters`
    launch: UserLaunch | None = None  # of a user's kernel, in place of `args`


@dataclass(frozen=True)
class UserLaunch:
    """What a user's kernel is called with: a grid for each setting, the values of its keys if there
    are several, and its arguments."""

    grids: tuple[tuple[Any, Any, Any], ...]
    keys: tuple[Any, ...]
    given: tuple[Any, ...]


@dataclass
class HostProgram:
    """Text plus the objects it refers to by name; with those and its kernels it runs.

    `@node@` in the text stands for the source location of that node, which is filled in when the
    program is loaded or shown; `@grid kernel@` for a kernel's number of programs, which is known
    when its configuration is. `device` is the CUDA device that is current while it runs. A `pure`
    program calls nothing that torch could differentiate.
    """

    text: str
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    attributes: dict[str, str] = field(default_factory=dict[str, str])  # name -> path in the graph
    device: int | None = None
    pure: bool = False
    bodies: tuple[str, ...] = ()  # attributes that are graphs, and are compiled too

    def filled(self, locations: Mapping[str, str], grids: Mapping[str, str]) -> str:
        text = _SITE.sub(lambda m: locations.get(m[1], ""), self.text)
        return _GRID.sub(lambda m: grids[m[1]], text)

    def load(self, kernels: Mapping[str, Kernel], attributes: Mapping[str, Any],
             locations: Mapping[str, str], grids: Mapping[str, str] | None = None
             ) -> Callable[[list[Any]], Any]:  # fmt: skip
        namespace: dict[str, Any] = {**self.constants, **kernels, **attributes}
        text = asking(self.filled(locations, grids or {}), namespace, kernels)
        exec(compile(text, "<tilewright host program>", "exec"), namespace)
        call: Any = namespace["call"]
        flags = tuple(v for v in namespace.values() if isinstance(v, support.DeviceFlag))
        if self.device is not None and (self.device != 0 or torch.cuda.device_count() > 1):
            call = support.on_device(call, self.device)
        call._boxed_call = True
        call.pure = self.pure
        call.names = namespace  # where the text finds its kernels
        call.flags = flags  # for replays, which do not run the text
        return call


def assemble(program: Program, steps: Sequence[Step],
             kernels: Sequence[KernelCall | None]) -> HostProgram:  # fmt: skip
    """`kernels[i]` is the kernel of step `i`, None where the step is an opaque call."""
    return _Assembly(program).assemble(steps, kernels)


class _Assembly:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: dict[str, Buffer] = program.buffers
        self.lines: list[str] = []
        self.head: list[str] = []
        self.constants: dict[str, Any] = {}
        self._targets: dict[Any, str] = {}
        self._bound: set[str] = set()
        self._device: int | None = None
        self._pure = True
        self._only = ""  # the sizes for which the calls being written are made
        self._counted: set[int] = set()  # devices whose kernels count
        self._checked: dict[int, dict[str, str]] = {}  # device -> its checked kernels, their sites

    def assemble(self, steps: Sequence[Step], kernels: Sequence[KernelCall | None]) -> HostProgram:
        self._inputs()
        self._devices(steps, kernels)
        for step, kernel in zip(steps, kernels, strict=True):
            self._allocate(step)
            self._only = "" if step.group.when is None else _condition(step.group.when)
            if kernel is not None:
                self._kernel(kernel, step.group)
            else:
                assert step.group.call is not None
                self._call(step.group.call)
            self._free(step)
        outputs = "".join(self._output(o) + ", " for o in self.program.outputs)
        self.lines += [f"flag{device}.check_now()" for device in self._checked]
        self.lines.append(f"return ({outputs})")
        text = [
            f"from tilewright.host.support import {', '.join(support.__all__)}",
            *self.head,
            *self._flags(),
            "",
            "",
            "def call(args):",
            *("    " + line for line in self.lines),
        ]
        return HostProgram("\n".join(text) + "\n", self.constants, dict(self.program.constants),
                           self._device, self._pure,
                           tuple(sorted(self.program.bodies)))  # fmt: skip

    # ---- inputs and symbols

    def _inputs(self) -> None:
        names = self.program.inputs
        if names:
            self.lines.append("".join(f"{n}, " for n in names).strip() + " = args")
        self.lines.append("args.clear()")
        known: list[tuple[Expr, str]] = []
        for name in names:
            if name in self.program.symbols:
                known.append((self.program.symbols[name], name))
        for name in names:
            buffer = self.buffers.get(name)
            if buffer is None:
                continue
            known += [(e, f"{name}.size({k})") for k, e in enumerate(buffer.size)]
            known += [(e, f"{name}.stride({k})") for k, e in enumerate(buffer.stride)]
        for e, text in known:
            if e.op == "sym" and e.arg.name != text:
                self._bind(e.arg.name, text)
            elif e.op == "sym":
                self._bound.add(e.arg.name)
        for e, text in known:
            self._solve(e, text)
        self._derive()

    def _bind(self, name: str, text: str) -> None:
        if name not in self._bound:
            self._bound.add(name)
            self.lines.append(f"{name} = {text}")

    def _derive(self) -> None:
        """Compute the sizes that have become computable."""
        for name, found in self.program.derived.items():
            if name not in self._bound and found.symbols <= self._bound:
                self._bind(name, found.text)

    def _solve(self, e: Expr, text: str) -> None:
        """A size such as `2*s0 + 1` gives `s0`, when nothing simpler did."""
        unknown = [s for s in syms(e) if s.arg.name not in self._bound]
        if len(unknown) != 1:
            return
        (s,) = unknown
        slope = ix.coefficient(e, s)
        if slope is None or slope is ix.ZERO or s in syms(slope):
            return
        rest = ix.sub(e, ix.mul(slope, s))
        if s not in syms(rest):
            self._bind(s.arg.name, f"({text} - {number(rest)}) // {number(slope)}")

    # ---- devices

    def _devices(self, steps: Sequence[Step], kernels: Sequence[KernelCall | None]) -> None:
        """The program runs with its first CUDA device as the current one."""
        used = dict.fromkeys(k.device for k in kernels if k is not None and k.device is not None)
        made = (self.buffers[b].device for step in steps for b in step.allocate)
        used |= dict.fromkeys(d.index or 0 for d in made if d.type == "cuda")
        self._device = next(iter(used), None)
        checked = [k for k in kernels if k is not None and k.checked and k.device is not None]
        for device in dict.fromkeys(k.device for k in checked):
            assert device is not None
            self._checked[device] = {}
            self.lines.append(f"flag{device}.check()")
        launched = dict.fromkeys(k.device for k in kernels if k is not None)
        self.lines += [f"stream{d} = raw_stream({d})" for d in launched if d is not None]

    def _flags(self) -> list[str]:
        return ["flag = Flag()",
                *(f"flag{device} = DeviceFlag({sites!r})"
                  for device, sites in self._checked.items()),
                *(f"counters{d} = Counters({d})" for d in sorted(self._counted))]  # fmt: skip

    # ---- memory

    def _allocate(self, step: Step) -> None:
        for name in step.allocate:
            b = self.buffers[name]
            self._empty(name, f"{numbers(b.size)}, {numbers(b.stride)}, {b.dtype}", b.device)
        for pool in step.pools:
            self._empty(pool.name, f"({number(pool.size)},), (1,), torch.uint8", pool.device,
                        "scratch")  # fmt: skip
        for slot in step.carve:
            self.lines.append(f"{slot.buffer} = {self._again(slot.buffer, slot.pool, slot.start)}")
        for new, old in step.reuse:
            self.lines.append(f"{new} = {self._again(new, old)}  # memory used again")

    def _empty(self, name: str, layout: str, device: torch.device, kind: str = "empty") -> None:
        if device.type == "cpu":
            self.lines.append(f"{name} = empty_cpu({layout})")
        elif device.type == "cuda" and (device.index or 0) == self._device:
            self.lines.append(f"{name} = {kind}_cuda({layout})")
        else:
            self.lines.append(f"{name} = empty({layout}, {str(device)!r})")

    def _again(self, new: str, old: str, start: Expr = ix.ZERO) -> str:
        """The memory of a dead buffer, or of a pool from `start` on, laid out as another."""
        made, given = self.buffers[new], self.buffers.get(old)
        if given is not None and alike(made, given):
            return old
        layout = f"{numbers(made.size)}, {numbers(made.stride)}"
        if given is not None and made.dtype == given.dtype:
            return f"window({old}, {layout}, 0)"
        return f"recast({old}, {layout}, {made.dtype}, {number(start)})"

    def _free(self, step: Step) -> None:
        gone = [*step.free, *(old for _, old in step.reuse)]
        if gone:
            self.lines.append("del " + ", ".join(gone))

    # ---- calls

    def _kernel(self, kernel: KernelCall, group: Group) -> None:
        places = {m.origin.location: m.origin.nodes[-1] for m in group.nodes if m.origin.location}
        origins = dict.fromkeys(n for m in group.nodes for n in m.origin.nodes)
        sites = "".join(f"  @{node}@" for node in places.values())
        self.lines.append(f"# {', '.join(origins)}{sites}")
        site = next(iter(places.values()), "none")
        if kernel.launch is not None:
            self._pure = False
            self._user_kernel(kernel, kernel.launch)
            return
        if kernel.device is not None:
            self._launch(kernel, kernel.device, site)
            return
        args = [name for _, name in kernel.args]
        self._pure &= not kernel.plain
        if kernel.checked:
            args.append("flag.address")
        self.lines.append(self._guarded(f"{kernel.name}({', '.join(args)})"))
        if kernel.checked:
            self.lines.append(f"flag.check({kernel.name!r}, '@{site}@')")

    def _launch(self, kernel: KernelCall, device: int, site: str) -> None:
        """Put a CUDA kernel on the current stream of its device."""
        if kernel.workspace is not ix.ZERO:
            n = number(kernel.workspace)
            made = self._guarded(f"empty_cuda(({n},), (1,), torch.float32)")
            self._on_device(device, f"workspace = {made}")
        if kernel.counters is not ix.ZERO:
            n = number(kernel.counters)
            self._counted.add(device)
            made = self._guarded(f"counters{device}.get(stream{device}, {n})")
            self.lines.append(f"zeroed = {made}")
        args = [f"stream{device}", f"@grid {kernel.name}@", "1", "1"]
        args += ["zeroed" if name == "counters" else name for _, name in kernel.args]
        if kernel.checked:
            self._checked[device][kernel.name] = f"@{site}@"
            args.append(f"flag{device}.addresses[{len(self._checked[device]) - 1}]")
        self._on_device(device, self._guarded(f"{_narrow(kernel)}({', '.join(args)})"))
        if kernel.workspace is not ix.ZERO:
            self.lines.append("del workspace")

    def _user_kernel(self, kernel: KernelCall, launch: UserLaunch) -> None:
        grids = [", ".join(self._argument(n) for n in grid) for grid in launch.grids]
        args = ["0" if kernel.device is None else f"stream{kernel.device}", grids[0]]
        if len(grids) > 1:
            args[1] = f"lambda: ({', '.join(f'({grid})' for grid in grids)})"
            args.append(self._argument(launch.keys))
        args += [self._argument(value) for value in launch.given]
        self._on_device(kernel.device, f"{_narrow(kernel)}({', '.join(args)})")

    def _guarded(self, call: str) -> str:
        return f"{call} if {self._only} else None" if self._only else call

    def _on_device(self, device: int | None, line: str) -> None:
        if device is None or device == self._device:
            self.lines.append(line)
            return
        self.lines += [f"before = exchange_device({device})", line, "exchange_device(before)"]

    def _call(self, call: Opaque) -> None:
        self._pure = False
        args = [self._argument(a) for a in call.args]
        args += [f"{k}={self._argument(v)}" for k, v in call.kwargs.items()]
        if call.out is not None:
            args.append(f"out={self._argument(call.out)}")
        result = f"{call.name}_r0" if call.single else call.name
        if call.origin.location:
            self.lines.append(f"# {call.origin.nodes[-1]}  @{call.origin.nodes[-1]}@")
        made = f"{self._target(call.target)}({', '.join(args)})"
        if self._is_laid_out(call):
            self.lines.append(f"{call.results[0]} = {made}")
            return
        if call.out is not None and not call.results:
            self.lines.append(self._guarded(made))
            return
        self.lines.append(f"{result} = {made}")
        for name, path in call.binds:
            text = f"key_get({result}, {self._constant(tuple(path))})" if path else result
            self._bound.add(name)
            self.lines.append(f"{name} = {text}")
        self._derive()
        for k, buffer in enumerate(call.results):
            item = result if call.single else f"{result}[{k}]"
            if buffer is not None:
                b = self.buffers[buffer]
                if call.data_sized:
                    self.lines.append(
                        f"sized({item}, {numbers(b.size)}, '@{call.origin.nodes[-1]}@')"
                    )
                self.lines.append(f"{buffer} = laid_out({item}, {numbers(b.size)}, "
                                  f"{numbers(b.stride)})")  # fmt: skip
            elif not call.single:
                self.lines.append(f"{call.name}_r{k} = {item}")
        if call.results and any(call.results):
            self.lines.append(f"del {result}")

    def _is_laid_out(self, call: Opaque) -> bool:
        """Whether the only result is as the program was compiled for, whatever comes in: the
        library's products are made row by row."""
        if call.target not in DIRECT or call.binds or len(call.results) != 1:
            return False
        name = call.results[0]
        if name is None or not call.single:
            return False
        b = self.buffers[name]
        return b.stride == ix.contiguous_strides(b.size)

    def _argument(self, value: Any) -> str:
        return argument(value, self.buffers, self._constant)

    def _constant(self, value: Any) -> str:
        name = f"object{len(self.constants)}"
        self.constants[name] = value
        return name

    def _target(self, target: Any) -> str:
        if target not in self._targets:
            path = target_path(target)
            if path is None:
                self._targets[target] = self._constant(target)
            else:
                found = DIRECT.get(target, path)
                plain = re.sub(r"\W", "_", path.removeprefix("torch.ops.").rpartition(":")[2])
                name = f"extern_{plain}"
                self._targets[target] = name
                self.head.append(f"{name} = resolve({found!r})")
        return self._targets[target]

    # ---- outputs

    def _output(self, output: View | Expr | Handle | None) -> str:
        match output:
            case View():
                return view(output, self.buffers[output.buffer])
            case Expr():
                missing = [s.arg.name for s in syms(output) if s.arg.name not in self._bound]
                if missing:
                    raise TilewrightError(f"size {missing[0]} is returned but never known")
                return number(output)
            case Handle():
                return output.name
            case None:
                return "None"


def _condition(when: When) -> str:
    """Whether a group runs, as Python text."""
    size = number(when.size)
    ends = (f"{low} <= {size}" if high is None else f"{low} <= {size} <= {high}" if low else
            f"{size} <= {high}" for low, high in when.ranges)  # fmt: skip
    return " or ".join(ends)


def _narrow(kernel: KernelCall) -> str:
    """What is called: the kernel, or for large numbers its wide form."""
    if not kernel.narrow:
        return kernel.name
    small = " and ".join(f"{number(e)} < 2147483648" for e in kernel.narrow)
    return f"({kernel.name} if {small} else {kernel.name}_wide)"


__all__ = ["HostProgram", "Kernel", "KernelCall", "UserLaunch", "assemble"]
