"""Which arguments a Triton kernel overwrites whole, found in the text of its first IR.

Only the commonest form is known: every program stores a block of consecutive elements, all of them
or those below a number. What such a kernel is launched on need not be initialised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Atom = tuple[str, int]  # a program's number along an axis, a lane of so many, an argument
Linear = dict[Atom, int]
ONE: Atom = ("one", 0)


@dataclass(frozen=True)
class Blocks:
    """Program `p` along `axis` writes `block` elements from `p * block` on, those below `end` (an
    argument's name, a number) where there is one. Without an axis all programs write the first."""

    axis: int | None
    block: int
    end: str | int | None


def overwritten(text: str, names: Sequence[str]) -> dict[str, Blocks]:
    """By argument. `names` are the arguments the function is called with, in order."""
    header = re.search(r"tt\.func public @.*", text)
    if header is None or "^bb" in text or text.count("tt.func") != 1:
        return {}  # a program may end before it stores
    arguments = re.findall(r"(%[\w.]+): ", header.group())
    if len(arguments) != len(names):
        return {}
    scan = _Scan(dict(zip(arguments, names, strict=True)))
    depth = 0
    for line in text[header.end() :].splitlines():
        if depth == 0:
            scan.read(line)
        depth += line.count("{") - line.count("}")
    return scan.found


@dataclass(frozen=True)
class _Below:
    """Where a value is less than another."""

    value: Linear
    end: Linear


class _Scan:
    """Values of the function that are the same sum wherever they are used, line by line."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self.names = list(arguments.values())
        self.linear: dict[str, Linear] = {v: {("argument", k): 1}
                                          for k, v in enumerate(arguments)}  # fmt: skip
        self.masks: dict[str, _Below] = {}
        self.places: dict[str, tuple[str, Linear]] = {}  # pointers: argument, elements from it
        self.pointers = dict(arguments)
        self.found: dict[str, Blocks] = {}

    def read(self, line: str) -> None:
        made = re.match(r"\s*(?:(%[\w.]+) = )?([\w.]+)(.*)", line)
        if made is None:
            return
        result, op, rest = made.groups()
        operands = re.findall(r"%[\w.]+", rest)
        if op == "tt.store":
            self._store(operands)
        elif op == "tt.addptr":
            base, step = self.pointers.get(operands[0]), self.linear.get(operands[1])
            if base is not None and step is not None:
                self.places[result] = base, step
        elif op == "arith.cmpi":
            a, b = (self.linear.get(v) for v in operands)
            if rest.split(",")[0].strip() in ("slt", "ult") and a is not None and b is not None:
                self.masks[result] = _Below(a, b)
        elif op in ("tt.splat", "arith.extsi") and operands[0] in self.pointers:
            self.pointers[result] = self.pointers[operands[0]]
            self.linear[result] = self.linear.get(operands[0], {})
        else:
            value = self._value(op, rest, [self.linear.get(v) for v in operands])
            if value is not None:
                self.linear[result] = value

    def _value(self, op: str, rest: str, operands: list[Linear | None]) -> Linear | None:
        match op, operands:
            case "tt.get_program_id", _:
                return {("program", "xyz".index(rest.split()[0])): 1}
            case "tt.make_range", _:
                end, start = (re.search(rf"{n} = (\d+)", rest) for n in ("end", "start"))
                if end is None or start is None or int(start.group(1)):
                    return None
                return {("lane", int(end.group(1))): 1}
            case "arith.constant", _:
                number = re.match(r"\s*(?:dense<)?(-?\d+)>? :", rest)
                return None if number is None else {ONE: int(number.group(1))}
            case (("tt.splat" | "arith.extsi"), [value]):
                return value
            case "arith.addi", [dict(a), dict(b)]:
                return {k: a.get(k, 0) + b.get(k, 0) for k in {**a, **b}}
            case "arith.muli", [dict(a), dict(b)] if a.keys() == {ONE} or b.keys() == {ONE}:
                factor, other = (a, b) if a.keys() == {ONE} else (b, a)
                return {k: v * factor[ONE] for k, v in other.items()}
            case _:
                return None

    def _store(self, operands: Sequence[str]) -> None:
        place = self.places.get(operands[0])
        mask = self.masks.get(operands[2]) if len(operands) > 2 else None
        if place is None or (len(operands) > 2 and mask is None):
            return
        argument, step = place
        end: str | int | None = None
        if mask is not None:
            if mask.value != step or len(mask.end) != 1:
                return
            ((kind, k), count), *_ = mask.end.items()
            if kind == "argument" and count == 1:
                end = self.names[k]
            elif kind == "one":
                end = count
            else:
                return
        blocks = _blocks(step, end)
        if blocks is not None:
            self.found[argument] = blocks


def _blocks(step: Linear, end: str | int | None) -> Blocks | None:
    """A program's block, each of its elements once."""
    left = {k: v for k, v in step.items() if v}
    lanes = [k for k in left if k[0] == "lane"]
    if len(lanes) != 1 or left.pop(lanes[0]) != 1:
        return None
    block = lanes[0][1]
    if not left:
        return Blocks(None, block, end)
    ((kind, axis), count), *others = left.items()
    return Blocks(axis, block, end) if kind == "program" and count == block and not others else None
