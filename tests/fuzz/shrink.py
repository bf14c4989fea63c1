"""Make a failing program small: fewer outputs, then lines turned into inputs or dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.fuzz.generate import Input, Program

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, attempts: int = 200) -> Program:
    """A smaller program for which `fails` still holds; every step keeps the rest as it is."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            attempts -= 1
            if attempts < 0:
                return program
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        half = len(program.outputs) // 2
        yield _swept(replace(program, outputs=program.outputs[:half]))
        yield _swept(replace(program, outputs=program.outputs[half:]))
        for k in range(len(program.outputs)):
            yield _swept(replace(program, outputs=program.outputs[:k] + program.outputs[k + 1 :]))
    for k in reversed(range(len(program.lines))):
        found = _without(program, k)
        if found is not None:
            yield found
    if len(program.sizes) > 1:
        for sizes in program.sizes:
            yield replace(program, sizes=(sizes,))
    if any(i.layout != "plain" for i in program.inputs):
        for k, i in enumerate(program.inputs):
            if i.layout != "plain":
                plain = (*program.inputs[:k], replace(i, layout="plain"), *program.inputs[k + 1 :])
                yield replace(program, inputs=plain)
    if any(i.grad for i in program.inputs):
        yield replace(program, inputs=tuple(replace(i, grad=False) for i in program.inputs))


def _without(program: Program, k: int) -> Program | None:
    """Line `k` gone: its users take its first operand, or a new input of the same kind."""
    number = len(program.inputs) + k
    users = any(number in line.operands for line in program.lines) or number in program.outputs
    if not users:
        return _renumbered(program, number, None, None)
    values = [v for v in (_values(program, sizes) for sizes in program.sizes) if v is not None]
    if len(values) != len(program.sizes) or len({v[number].dim() for v in values}) > 1:
        return None
    first = program.lines[k].operands[0]
    if all(v[first].shape == v[number].shape and v[first].dtype == v[number].dtype for v in values):
        return _renumbered(program, number, first, None)
    if len(program.sizes) > 1:
        return None  # the new input's size has no name
    t = values[0][number]
    largest = int(t.max()) + 1 if t.dtype == torch.int64 and t.numel() and int(t.min()) >= 0 else 0
    return _renumbered(program, number, None, Input(tuple(t.shape), t.dtype, highest=largest))


def _values(program: Program, sizes: dict[str, int]) -> list[Tensor] | None:
    values = program.arguments(sizes)
    scope = {"torch": torch, "F": torch.nn.functional, "x": values}
    for line in program.lines:
        found = None
        with contextlib.suppress(Exception):
            found = eval(line.render({k: f"x[{k}]" for k in line.operands}), scope)
        if not isinstance(found, Tensor):
            return None
        values.append(found)
    return values


def _renumbered(program: Program, gone: int, stand_in: int | None, extra: Input | None) -> Program:
    """Value `gone` removed, or replaced by another value or by an additional last input."""
    count = len(program.inputs)

    def number(k: int) -> int:
        if k == gone:
            if extra is not None:
                return count
            assert stand_in is not None
            k = stand_in
        k -= k > gone
        return k + (extra is not None and k >= count)

    lines = tuple(replace(line, operands=tuple(number(k) for k in line.operands))
                  for j, line in enumerate(program.lines, start=count) if j != gone)  # fmt: skip
    exact = list(program.exact)
    del exact[gone]
    if extra is not None:
        exact.insert(count, True)
    return replace(
        program, inputs=program.inputs if extra is None else (*program.inputs, extra), lines=lines,
        outputs=tuple(number(k) for k in program.outputs), exact=tuple(exact),
    )  # fmt: skip


def _swept(program: Program) -> Program:
    """Lines nothing needs are removed; a line that mutates is needed."""
    count = len(program.inputs)
    for k in reversed(range(len(program.lines))):
        number = count + k
        users = any(number in line.operands for line in program.lines) or number in program.outputs
        if not users and "_(" not in program.lines[k].text:
            program = _renumbered(program, number, None, None)
    return program
