"""Groups that differ only in what their buffers are called, as those of a network's layers do: what
was found out and written for one of them holds for all."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import fields, replace
from typing import NamedTuple

from tilewright.codegen.triton import generate as triton
from tilewright.codegen.triton.launch import Summary, TritonKernel
from tilewright.ir.expr import Expr, buffers, walk
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.take_apart import Limits
from tilewright.target import Target

Key = tuple[Hashable, ...]
FACTS = tuple(f.name for f in fields(Group) if f.name not in
              ("members", "parts", "call", "local", "refused"))  # fmt: skip


class Likeness(NamedTuple):
    key: Key  # equal for groups that are alike
    names: tuple[str, ...]  # of the buffers, in the order in which the key has them


def likeness(program: Program, group: Group) -> Likeness:
    """All of a group that its kernel depends on, with numbers for its buffers."""
    key: list[Hashable] = [len(group.parts), *(getattr(group, fact) for fact in FACTS)]
    places: dict[str, int] = defaultdict(itertools.count().__next__)  # of the buffers
    rows: dict[Expr, Hashable] = {}  # the number of a node's row; what reads nothing is its own
    for part in group.kernels:
        key += [getattr(part, fact) for fact in FACTS]
        for nest in part.members:
            key += [nest.loops, nest.reduce]
            for node in walk(*nest.exprs):
                if node not in rows and not buffers(node):
                    rows[node] = node
                elif node not in rows:
                    rows[node] = len(rows)
                    arg = places[node.arg] if node.op == "load" else node.arg
                    key.append((node.op, node.dtype, arg, *(rows[s] for s in node.src)))
            key += [(places[s.buffer], s.mode, *(rows[e] for e in s.exprs)) for s in nest.stores]
        key.append(frozenset(places[name] for name in part.local if name in places))
    key += [replace(program.buffers[name], name="") for name in places]
    return Likeness(tuple(key), tuple(places))


def told_once(limits: Limits) -> Limits:
    """The same limits, asked once about groups that are alike and have none."""
    without: set[Key] = set()

    def told(program: Program, group: Group) -> str:
        key = likeness(program, group).key
        reason = "" if key in without else limits(program, group)
        if not reason:
            without.add(key)
        return reason

    return told


class Kernels:
    """The kernels of a program."""

    def __init__(self) -> None:
        self._made: dict[Key, tuple[TritonKernel, tuple[str, ...]]] = {}
        self.plans: dict[int, Summary] = {}  # by the number of a step

    def generate(self, program: Program, group: Group, target: Target, name: str,
                 wide: bool = False) -> TritonKernel:  # fmt: skip
        key, names = likeness(program, group)
        key = (target, name, wide, *key)
        if key not in self._made:
            self._made[key] = triton.generate(program, group, target, name, wide), names
        kernel, of = self._made[key]
        here = dict(zip(of, names, strict=True))
        params = tuple(replace(p, name=here.get(p.name, p.name)) for p in kernel.params)
        return replace(kernel, params=params)
