"""`assemble`: the Python program that runs one graph, and how it is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright.errors import TilewrightError
from tilewright.host import support
from tilewright.host.text import argument, number, numbers, target_path, view
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, syms
from tilewright.ir.program import Buffer, Handle, Opaque, Program, View
from tilewright.schedule.group import Group
from tilewright.schedule.memory import Step

Kernel = Callable[..., None]
_SITE = re.compile(r"@(\w+)@")


@dataclass(frozen=True)
class KernelCall:
    """What the host program needs to know of a generated kernel."""

    name: str  # as shown: cpp_fused_...
    args: tuple[tuple[str, str], ...]  # (kind, buffer or symbol)
    checked: bool


@dataclass
class HostProgram:
    """Text plus the objects it refers to by name; with those and its kernels it runs.

    `@node@` in the text stands for the source location of that node, which is filled in when the
    program is loaded or shown.
    """

    text: str
    constants: dict[str, Any] = field(default_factory=dict[str, Any])
    attributes: dict[str, str] = field(default_factory=dict[str, str])  # name -> path in the graph

    def located(self, locations: Mapping[str, str]) -> str:
        return _SITE.sub(lambda m: locations.get(m[1], ""), self.text)

    def load(self, kernels: Mapping[str, Kernel], attributes: Mapping[str, Any],
             locations: Mapping[str, str]) -> Callable[[list[Any]], Any]:  # fmt: skip
        namespace: dict[str, Any] = {**self.constants, **kernels, **attributes}
        exec(compile(self.located(locations), "<tilewright host program>", "exec"), namespace)
        call = namespace["call"]
        call._boxed_call = True
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

    def assemble(self, steps: Sequence[Step], kernels: Sequence[KernelCall | None]) -> HostProgram:
        self._inputs()
        for step, kernel in zip(steps, kernels, strict=True):
            self._allocate(step)
            if kernel is not None:
                self._kernel(kernel, step.group)
            else:
                assert step.group.call is not None
                self._call(step.group.call)
            self._free(step)
        outputs = "".join(self._output(o) + ", " for o in self.program.outputs)
        self.lines.append(f"return ({outputs})")
        text = [
            f"from tilewright.host.support import {', '.join(support.__all__)}",
            *self.head,
            "flag = Flag()",
            "",
            "",
            "def call(args):",
            *("    " + line for line in self.lines),
        ]
        return HostProgram("\n".join(text) + "\n", self.constants, dict(self.program.constants))

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
        for name, text in self.program.derived.items():
            names = set(re.findall(r"\b[a-z]+\d+\b", text))
            if name not in self._bound and names <= self._bound:
                self._bind(name, text)

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

    # ---- memory

    def _allocate(self, step: Step) -> None:
        for name in step.allocate:
            b = self.buffers[name]
            layout = f"{numbers(b.size)}, {numbers(b.stride)}, {b.dtype}"
            if b.device.type == "cpu":
                self.lines.append(f"{name} = empty_cpu({layout})")
            else:
                self.lines.append(f"{name} = empty({layout}, {str(b.device)!r})")
        for new, old in step.reuse:
            self.lines.append(f"{new} = {old}  # memory used again")

    def _free(self, step: Step) -> None:
        gone = [*step.free, *(old for _, old in step.reuse)]
        if gone:
            self.lines.append("del " + ", ".join(gone))

    # ---- calls

    def _kernel(self, kernel: KernelCall, group: Group) -> None:
        args = [f"{name}.data_ptr()" if kind == "ptr" else name for kind, name in kernel.args]
        if kernel.checked:
            args.append("flag.address")
        places = {m.origin.location: m.origin.nodes[-1] for m in group.members if m.origin.location}
        origins = dict.fromkeys(n for m in group.members for n in m.origin.nodes)
        sites = "".join(f"  @{node}@" for node in places.values())
        self.lines.append(f"# {', '.join(origins)}{sites}")
        self.lines.append(f"{kernel.name}({', '.join(args)})")
        if kernel.checked:
            site = next(iter(places.values()), "none")
            self.lines.append(f"flag.check({kernel.name!r}, '@{site}@')")

    def _call(self, call: Opaque) -> None:
        args = [self._argument(a) for a in call.args]
        args += [f"{k}={self._argument(v)}" for k, v in call.kwargs.items()]
        result = f"{call.name}_r0" if call.single else call.name
        if call.origin.location:
            self.lines.append(f"# {call.origin.nodes[-1]}  @{call.origin.nodes[-1]}@")
        self.lines.append(f"{result} = {self._target(call.target)}({', '.join(args)})")
        for name, path in call.binds:
            text = f"key_get({result}, {self._constant(tuple(path))})" if path else result
            self._bound.add(name)
            self.lines.append(f"{name} = {text}")
        self._derive()
        for k, buffer in enumerate(call.results):
            item = result if call.single else f"{result}[{k}]"
            if buffer is not None:
                b = self.buffers[buffer]
                self.lines.append(f"{buffer} = laid_out({item}, {numbers(b.size)}, "
                                  f"{numbers(b.stride)})")  # fmt: skip
            elif not call.single:
                self.lines.append(f"{call.name}_r{k} = {item}")
        if call.results and any(call.results):
            self.lines.append(f"del {result}")

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
                plain = re.sub(r"\W", "_", path.removeprefix("torch.ops.").rpartition(":")[2])
                name = f"extern_{plain}"
                self._targets[target] = name
                self.head.append(f"{name} = resolve({path!r})")
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


__all__ = ["HostProgram", "Kernel", "KernelCall", "assemble"]
