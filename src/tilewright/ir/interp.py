"""A torch interpreter of a `Program`, to bisect a wrong result.

It runs the same IR in three ways, each nearer to what the generated code does:

- `run(program, args)`: the nodes of the lowered program one after the other,
- `run_steps(program, steps, args)`: the groups of a schedule, with its memory plan,
- `run_steps(..., fused=True)`: each group point by point of its outer loops, in mixed order; a
  wrong fusion shows.

The first that differs from eager names the stage to blame; if none does, it is code generation.
Loop variables are `arange` tensors that broadcast against each other, so one nest is a handful of
torch calls. Memory that nothing has written holds NaN (integers: a number no index reaches), and an
access outside its buffer is an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch.utils._pytree import KeyEntry, key_get

from tilewright.errors import TilewrightError
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, substitute, syms, walk
from tilewright.ir.ops import REDUCTIONS, SCANS, TABLE
from tilewright.ir.program import Buffer, Handle, Nest, Node, Opaque, Output, Program, Store, View

Tensor = torch.Tensor
Fixed = dict[Expr, int]  # loops that have one value
_SCATTER = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}
_OPAQUE_INDEX = 2**40 + 7  # in fresh integer memory: no table is that long


class GroupLike(Protocol):
    """What is needed of a fusion group; `schedule.fusion.group.Group` is one."""

    members: tuple[Nest, ...]
    outer: tuple[Expr, ...]
    serial: tuple[Expr, ...]
    call: Opaque | None
    local: frozenset[str]

    @property
    def nodes(self) -> tuple[Node, ...]: ...

    @property
    def parts(self) -> Sequence[GroupLike]: ...


class StepLike(Protocol):
    """What is needed of a scheduled step; `schedule.memory.Step` is one."""

    allocate: list[str]
    reuse: list[tuple[str, str]]
    free: list[str]

    @property
    def group(self) -> GroupLike: ...


def run(program: Program, args: Sequence[Any],
        constants: Mapping[str, Any] | None = None) -> list[Any]:  # fmt: skip
    """The program's outputs for these arguments. `constants` are its graph attributes by name."""
    machine = _Machine(program, args, constants or {})
    for node in program.nodes:
        machine.make([b for b in node.writes if b in program.buffers])
        machine.node(node)
    return machine.outputs()


def run_steps(program: Program, steps: Sequence[StepLike], args: Sequence[Any],
              constants: Mapping[str, Any] | None = None, *,
              fused: bool = False) -> list[Any]:  # fmt: skip
    """The same through a schedule: its order of groups, its reuse of memory, its early frees.

    With `fused`, the members of a group run together at each point of its outer loops.
    """
    machine = _Machine(program, args, constants or {})
    for step in steps:
        group = step.group
        machine.make(step.allocate, again=True)
        for new, old in step.reuse:
            machine.tensors[new] = machine.tensors[old]
        machine.make(sorted(group.local), again=True)
        if fused and group.call is None:
            machine.fused(group)
        else:
            for node in group.nodes:
                machine.node(node)
        for name in (*step.free, *(old for _, old in step.reuse), *group.local):
            del machine.tensors[name]
    return machine.outputs()


def run_nodes(program: Program, nodes: Sequence[Node], args: Sequence[Any],
              local: Sequence[str]) -> None:  # fmt: skip
    """Nodes one after the other, into the tensors they are given; `local` buffers are made here."""
    machine = _Machine(program, args, {})
    device = next(t.device for t in machine.tensors.values())
    for name in local:
        b = program.buffers[name]
        layout = machine.sizes(b.size), machine.sizes(b.stride)
        machine.tensors[name] = torch.empty_strided(*layout, dtype=b.dtype, device=device)
    for node in nodes:
        machine.node(node)


class _Machine:
    """The memory of one run: tensors by buffer name, numbers by symbol name, other values."""

    def __init__(self, program: Program, args: Sequence[Any], constants: Mapping[str, Any]) -> None:
        self.program = program
        self.tensors: dict[str, Tensor] = {}
        self.numbers: dict[str, Any] = {}
        self.handles: dict[str, Any] = dict(constants)
        if len(args) != len(program.inputs):
            raise TilewrightError(f"the program takes {len(program.inputs)} arguments, "
                                  f"{len(args)} were given")  # fmt: skip
        for name, value in constants.items():
            if name in program.buffers:
                self.tensors[name] = value
        for name, value in zip(program.inputs, args, strict=True):
            (self.tensors if name in program.buffers else self.handles)[name] = value
        self._bind_sizes()

    # ---- numbers

    def _bind_sizes(self) -> None:
        """Symbols from the arguments: given as such, or read off a size or a stride."""
        known: list[tuple[Expr, Any]] = []
        for name in self.program.inputs:
            if name in self.program.symbols:
                known.append((self.program.symbols[name], self.handles[name]))
        for name, t in self.tensors.items():
            buffer = self.program.buffers[name]
            known += [*zip(buffer.size, t.size(), strict=True),
                      *zip(buffer.stride, t.stride(), strict=True)]  # fmt: skip
        for e, value in known:
            if e.op == "sym":
                self.numbers.setdefault(e.arg.name, value)
        for e, value in known:
            self._solve(e, value)

    def _solve(self, e: Expr, value: int) -> None:
        """A size such as `2*s0 + 1` gives `s0`, when nothing simpler did."""
        unknown = [s for s in syms(e) if s.arg.name not in self.numbers]
        slope = ix.coefficient(e, unknown[0]) if len(unknown) == 1 else None
        if slope is None or slope is ix.ZERO or unknown[0] in syms(slope):
            return
        rest = ix.sub(e, ix.mul(slope, unknown[0]))
        if unknown[0] not in syms(rest):
            self.numbers[unknown[0].arg.name] = (value - self.number(rest)) // self.number(slope)

    def number(self, e: Expr) -> Any:
        """An expression without variables as a Python number."""
        if e.op == "const":
            return e.arg
        if e.op == "sym":
            if e.arg.name not in self.numbers:
                raise TilewrightError(f"size {e.arg.name} is used before it is known")
            return self.numbers[e.arg.name]
        return _index_op(e.op, [self.number(s) for s in e.src])

    def sizes(self, es: Sequence[Expr]) -> tuple[int, ...]:
        return tuple(self.number(e) for e in es)

    # ---- memory

    def make(self, names: Sequence[str], again: bool = False) -> None:
        """Memory for these buffers (where they have none yet), with nothing sensible in it."""
        for name in names:
            buffer = self.program.buffers[name]
            if again or name not in self.tensors:
                t = torch.empty_strided(self.sizes(buffer.size), self.sizes(buffer.stride),
                                        dtype=buffer.dtype, device=buffer.device)  # fmt: skip
                self.tensors[name] = t
                _poison(self.flat(name))

    def flat(self, name: str) -> Tensor:
        """The buffer's memory by element number, its own first element at zero."""
        if name not in self.tensors:
            raise TilewrightError(f"{name} is used before it exists, or after it was freed")
        t = self.tensors[name]
        extent = 1 + sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))
        return torch.as_strided(t, (extent if t.numel() else 0,), (1,), t.storage_offset())

    def window(self, view: View) -> Tensor:
        t = self.tensors[view.buffer]
        return torch.as_strided(t, self.sizes(view.size), self.sizes(view.stride),
                                t.storage_offset() + self.number(view.offset))  # fmt: skip

    def outputs(self) -> list[Any]:
        return [self._output(o) for o in self.program.outputs]

    def _output(self, o: Output) -> Any:
        return None if o is None else self._argument(o)

    # ---- nodes

    def node(self, node: Node) -> None:
        if isinstance(node, Nest):
            self.nest(node, {})
        else:
            self.call(node)

    def fused(self, group: GroupLike) -> None:
        """All members at one point of the outer loops, then at another: any order must do. The
        serial loops run in order inside; what folds over them is stored after the last round."""
        for part in reversed(group.parts):  # they share a launch, not an order
            self.fused(part)
        scanned = {n.arg.axis for m in group.members for n in walk(*m.exprs) if n.op == "scan"}
        outer = [v for v in group.outer if v.arg not in scanned]  # a scan runs along its loop
        carried = [m for m in group.members if set(m.reduce) & set(group.serial)]
        points = list(self._points(outer, {}))
        random.Random(0).shuffle(points)
        for point in points:
            for name in group.local:  # what one point leaves there is not for the next
                _poison(self.flat(name))
            for inner in self._points(group.serial, point):
                for member in group.members:
                    if member not in carried:
                        self.nest(member, inner)
            for member in carried:
                self.nest(member, point)

    def _points(self, loops: Sequence[Expr], fixed: Mapping[Expr, int]) -> Iterator[Fixed]:
        """The values of the loops in order, added to those fixed already."""
        if not loops:
            yield dict(fixed)
            return
        for k in range(self.extent(loops[0], fixed)):
            yield from self._points(loops[1:], {**fixed, loops[0]: k})

    def extent(self, loop: Expr, fixed: Mapping[Expr, int]) -> int:
        """The rounds of a loop; those of one inside a chunk may depend on the chunk."""
        values = {v: ix.as_index(k) for v, k in fixed.items()}
        return max(self.number(substitute(loop.src[0], values)), 0)

    def nest(self, nest: Nest, fixed: Fixed) -> None:
        open_ended = {v for loop in (*nest.loops, *nest.reduce) for v in free_vars(loop.src[0])}
        uneven = [v for v in nest.loops if v in open_ended and v not in fixed]
        for point in self._points(uneven, fixed):
            self._even_nest(nest, point)

    def _even_nest(self, nest: Nest, fixed: Fixed) -> None:
        evaluation = _Evaluation(self, nest, fixed)
        if 0 in evaluation.extents[: evaluation.loops]:
            return
        writes = [(store, *evaluation.store(store)) for store in nest.stores]
        for store, index, value in writes:
            self._write(nest, store, index, value)

    def _write(self, nest: Nest, store: Store, index: Tensor, value: Tensor) -> None:
        memory = self.flat(store.buffer)
        _inside(nest, store.buffer, index, memory)
        if store.mode == "set":
            memory[index] = value
        elif memory.dtype == torch.bool:  # an addition is "or", a product is "and"
            wide = memory.to(torch.uint8)
            how = {"add": "amax", "mul": "amin"}.get(store.mode) or _SCATTER[store.mode]
            wide.scatter_reduce_(0, index, value.to(torch.uint8), how)
            memory.copy_(wide)
        else:
            memory.scatter_reduce_(0, index, value, _SCATTER[store.mode])

    # ---- opaque calls

    def call(self, call: Opaque) -> None:
        args = [self._argument(a) for a in call.args]
        kwargs = {k: self._argument(v) for k, v in call.kwargs.items()}
        if call.out is not None:
            kwargs["out"] = self.window(call.out)
        result = call.target(*args, **kwargs)
        for name, path in call.binds:
            keys = cast(tuple[KeyEntry, ...], path)
            self.numbers[name] = key_get(result, keys) if keys else result
        if call.single:
            self.handles[f"{call.name}_r0"] = result
        for k, name in enumerate(call.results):
            item = result if call.single else result[k]
            self.handles[f"{call.name}_r{k}"] = item
            if name is not None:
                self.tensors[name] = self._laid_out(item, self.program.buffers[name])

    def _laid_out(self, t: Tensor, buffer: Buffer) -> Tensor:
        stride = self.sizes(buffer.stride)
        if t.numel() == 0 or all(a == b or n == 1 for a, b, n in
                                 zip(t.stride(), stride, t.size(), strict=True)):  # fmt: skip
            return t
        return torch.empty_strided(t.size(), stride, dtype=t.dtype, device=t.device).copy_(t)

    def _argument(self, value: Any) -> Any:
        match value:
            case View():
                return self.window(value)
            case Expr():
                return self.number(value)
            case Handle():
                return self.handles[value.name]
            case slice():
                return slice(*(self._argument(x) for x in (value.start, value.stop, value.step)))
            case list() | tuple():
                items = cast(Sequence[Any], value)
                return type(value)(self._argument(x) for x in items)
            case dict():
                pairs = cast(dict[Any, Any], value)
                return {k: self._argument(v) for k, v in pairs.items()}
            case _:
                return value


class _Evaluation:
    """The expressions of one nest, each distinct one once.

    A value is a tensor with a dimension per loop, of one element where it does not vary. `fixed`
    variables have the one given value.
    """

    def __init__(self, machine: _Machine, nest: Nest, fixed: Mapping[Expr, int]) -> None:
        self.machine = machine
        self.name = nest
        free = [v for v in nest.loops if v not in fixed]
        self.axes = [*free, *nest.reduce]
        self.loops = len(free)
        self.extents = [machine.extent(v, fixed) for v in self.axes]
        self.done: dict[Expr, Any] = {}
        rank = len(self.axes)
        for k, v in enumerate(self.axes):
            shape = [-1 if j == k else 1 for j in range(rank)]
            self.done[v] = torch.arange(self.extents[k]).reshape(shape)
        for v, value in fixed.items():
            self.done[v] = torch.full([1] * rank, value)

    def value(self, root: Expr) -> Any:
        for node in walk(root):
            if node not in self.done:
                self.done[node] = self._compute(node)
        return self.done[root]

    def store(self, store: Store) -> tuple[Tensor, Tensor]:
        """The element numbers a store writes, in the order of the loops, and what it writes."""
        shape = [*self.extents[: self.loops], *[1] * (len(self.axes) - self.loops)]
        index = self.value(store.index).expand(shape).reshape(-1)
        value = self.value(store.value).expand(shape).reshape(-1)
        if store.mask is not None:
            kept = self.value(store.mask).expand(shape).reshape(-1)
            return index[kept], value[kept]
        return index, value

    def _compute(self, node: Expr) -> Any:
        src = [self.done[s] for s in node.src]
        match node.op:
            case "const":
                return torch.tensor(node.arg, dtype=node.dtype).reshape([1] * len(self.axes))
            case "sym":
                found = torch.tensor(self.machine.number(node), dtype=node.dtype)
                return found.reshape([1] * len(self.axes))
            case "load":
                return self._load(node, src)
            case "reduce":
                return self._reduce(node, src)
            case "scan":
                return self._scan(node, src)
            case "part":
                return src[0][node.arg].to(node.dtype)
            case "index":
                if not bool(((src[0] >= 0) & (src[0] < src[1])).all()):
                    raise IndexError(f"{self.name.name}: index out of range")
                return src[0]
            case op if op in TABLE:
                return _apply(node, src)
            case op:
                return _index_op(op, src)

    def _load(self, node: Expr, src: list[Tensor]) -> Tensor:
        memory, index = self.machine.flat(node.arg), src[0]
        if len(src) == 1:
            _inside(self.name, node.arg, index, memory)
            return memory[index]
        index, mask = torch.broadcast_tensors(index, src[1])
        _inside(self.name, node.arg, index[mask], memory)
        found = torch.zeros(index.shape, dtype=node.dtype)
        found[mask] = memory[index[mask]]
        return found

    def _reduce(self, node: Expr, src: list[Tensor]) -> Any:
        """All reduction loops folded at once: they become one dimension, the last."""
        values = torch.broadcast_tensors(*src)
        outer = list(values[0].shape[: self.loops])
        inner = self.extents[self.loops :]
        flat = [v.expand([*outer, *inner]).reshape([*outer, -1]) for v in values]
        kind = node.arg.kind
        if kind in ("argmin", "argmax"):
            # the smallest position of all that are extreme: they need not come in their order
            value, position = flat
            extreme = REDUCTIONS[kind.removeprefix("arg")].ref(value, -1).unsqueeze(-1)
            found = (value == extreme) | ((value != value) & (extreme != extreme))
            last = torch.iinfo(position.dtype).max
            result: Any = position.where(found, last).amin(-1)
        else:
            result = REDUCTIONS[kind].ref(*flat, -1)
        results = result if isinstance(result, tuple) else (result,)
        shaped = tuple(r.reshape([*outer, *[1] * len(inner)]) for r in results)
        return shaped if REDUCTIONS[kind].outputs > 1 else shaped[0].to(node.dtype)

    def _scan(self, node: Expr, src: list[Tensor]) -> Any:
        axis = next(k for k, v in enumerate(self.axes) if v.arg == node.arg.axis)
        values: list[Tensor] = []
        for v in torch.broadcast_tensors(*src):
            shape = list(v.shape)
            shape[axis] = self.extents[axis]
            values.append(v.expand(shape))
        result = SCANS[node.arg.kind].ref(*values, axis)
        return result if isinstance(result, tuple) else result.to(node.dtype)


def _apply(node: Expr, src: list[Tensor]) -> Tensor:
    """One row of the table. torch lacks arithmetic on wide unsigned types: int64's wraps alike."""
    extra = (node.dtype,) if TABLE[node.op].result == "arg" else ()
    try:
        return TABLE[node.op].ref(*src, *extra)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        result = TABLE[node.op].ref(*(s.to(torch.int64) for s in src), *extra)
        return result.to(node.dtype)


def _index_op(op: str, src: list[Any]) -> Any:
    total = src[0]
    for operand in src[1:]:
        match op:
            case "iadd":
                total = total + operand
            case "imul":
                total = total * operand
            case "ifloordiv":
                total = total // operand
            case "imod":
                total = total % operand
            case "imin" | "imax" if isinstance(total, Tensor):
                total = (torch.minimum if op == "imin" else torch.maximum)(total, operand)
            case "imin" | "imax":
                total = min(total, operand) if op == "imin" else max(total, operand)
            case _:
                raise TilewrightError(f"the interpreter does not know {op}")
    return total


def _inside(nest: Nest, buffer: str, index: Tensor, memory: Tensor) -> None:
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < memory.numel()):
        raise TilewrightError(
            f"{nest.name} touches {buffer} at {int(index.min())} to {int(index.max())}, outside "
            f"its {memory.numel()} elements"
        )


def _poison(memory: Tensor) -> None:
    if memory.dtype.is_floating_point:
        memory.fill_(float("nan"))
    elif memory.dtype != torch.bool:
        memory.fill_(min(_OPAQUE_INDEX, torch.iinfo(memory.dtype).max))
