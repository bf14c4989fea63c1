"""Kernels that need nothing of each other as one launch: its programs are divided among them.

Each is a function, with its own blocks, held rows or walked ones; those that differ in nothing
but the buffers they are given are one function, called with those of the kernel whose program
this is: code that each had for itself would be read anew by every SM, and a program's first
instructions come from memory. Kernels whose blocks are chosen from the same list share the
choice, so that they are tuned together; those with most work come first, in the text as in
tuning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.triton.launch import Param, TritonKernel
from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.codegen.triton.tile.kernel import Kernel
from tilewright.codegen.triton.tile.lower import Writer
from tilewright.codegen.triton.tile.render import imports, params_of
from tilewright.ir.expr import Expr
from tilewright.ir.program import Program
from tilewright.schedule.fusion.group import Group

Grid = tuple[tuple[Expr, str], ...]
MOST_CONFIGS = 12


def combined(program: Program, parts: Sequence[tuple[Group, Shape]], own: Sequence[Kernel],
             name: str, wide: bool) -> TritonKernel:  # fmt: skip
    """The kernels of `parts`, that would be `own` alone, as one launch."""
    target = own[0].target
    warps = max(k.configs[0].num_warps for k in own)

    def of(wide: bool) -> list[Kernel]:
        return [Kernel(program, group, shape, target, wide, _by_all(k.configs, warps))
                for k, (group, shape) in zip(own, parts, strict=True)]  # fmt: skip

    made = of(wide)
    if len({k.w.index_type for k in made}) > 1:  # all count alike, or numbers have two types
        made = of(True)
    made.sort(key=lambda k: -k.work)
    first = made[0]
    early, programs = all(k.early for k in made), first.first
    valued = frozenset(e for k in made for e in k.w.numerics.valued)
    for k in made:
        k.arguments = first.arguments
        k.w.computes(valued=valued)
        k.early, k.first = False, "pid"
        k.body()
    first.checked = any(k.checked for k in made)
    return _Launch(made, early, programs).kernel(f"triton_combo_fused_{name}".rstrip("_"))


@dataclass(frozen=True)
class _Part:
    """A function of the text, and the kernels that are calls of it, by number."""

    lines: Sequence[str]
    choice: int  # of blocks
    used: tuple[str, ...]  # its arguments, called as the first kernel calls them
    kernels: list[int]
    given: list[tuple[str, ...]]  # the arguments of each


class _Launch:
    def __init__(self, made: Sequence[Kernel], early: bool, first: str) -> None:
        self.made = made
        self.early = early
        self.first = first  # which program this is, of all
        lists = list(dict.fromkeys(k.configs for k in made))
        self.choice = [lists.index(k.configs) for k in made]  # of blocks, by kernel
        self.configs = tuple(_configs(lists))

    def kernel(self, name: str) -> TritonKernel:
        first = self.made[0]
        params = params_of(first)
        names = [*(p.argument for p in params), *(["err"] if first.checked else [])]
        parts = self._parts(params, names)
        lines = [line for k, part in enumerate(parts) for line in self._part(k, part)]
        head = [*names, *(f"{b}: tl.constexpr" for b, _ in self.configs[0].constants)]
        lines += ["@triton.jit", f"def {name}({', '.join(head)}):", *self._entry(parts)]
        text = "\n".join([*imports(lines), "", "", *lines]) + "\n"
        grid, *beside = (self._grid(k) for part in parts for k in part.kernels)
        assume = tuple(dict.fromkeys(e for k in self.made for e in k.assume or ()))
        return TritonKernel(text, name, params, grid, self.configs[0], self.configs,
                            first.checked, assume, self.early, beside=tuple(beside))  # fmt: skip

    def _parts(self, params: Sequence[Param], names: Sequence[str]) -> list[_Part]:
        found: dict[tuple[Hashable, ...], _Part] = {}
        kinds = {p.argument: (p.type, p.multiple) for p in params if p.kind == "ptr"}
        for k, kernel in enumerate(self.made):
            own = [n for n in dict.fromkeys(_words(kernel.w.lines)) if n in kinds]
            key = (_renamed(kernel.w.lines, own), self.choice[k], self._grid(k),
                   *(kinds[n] for n in own))  # fmt: skip
            part = found.get(key)
            if part is None:
                words = set(_words(kernel.w.lines))
                used = tuple(n for n in names if n in words)
                found[key] = _Part(kernel.w.lines, self.choice[k], used, [k], [used])
                continue
            firsts = [n for n in dict.fromkeys(_words(part.lines)) if n in kinds]
            here = dict(zip(firsts, own, strict=True))
            part.kernels.append(k)
            part.given.append(tuple(here.get(n, n) for n in part.used))
        return list(found.values())

    def _part(self, k: int, part: _Part) -> list[str]:
        blocks = self.made[part.kernels[0]].configs[0].constants
        head = ", ".join(["pid", *part.used, *(f"{b}: tl.constexpr" for b, _ in blocks)])
        return ["@triton.jit", f"def part{k}({head}):", *part.lines, "", ""]

    def _entry(self, parts: Sequence[_Part]) -> list[str]:
        """Each has the programs from where the one before ends."""
        w = self.made[0].outside()
        w.begin(self.first, self.early)
        for k, part in enumerate(parts):
            first = part.kernels[0]
            blocks = [f"(({w.index(extent)} + {b} - 1) // {b})" for extent, b in self._grid(first)]
            w.line(f"count = {' * '.join(blocks)}")
            many = len(part.kernels)
            constants = [f"{b}={b}{part.choice}" for b, _ in self.made[first].configs[0].constants]
            with w.block(f"if (pid >= 0) & (pid < {'count' if many == 1 else f'{many} * count'})"):
                here, given = "pid", part.used
                if many > 1:
                    w.line("which = pid // count")
                    here, given = "pid % count", _given(w, part)
                w.line(f"part{k}({', '.join([here, *given, *constants])})")
            w.line("pid -= count" if many == 1 else f"pid -= {many} * count")
        return w.lines

    def _grid(self, k: int) -> Grid:
        return tuple((a.extent, f"{a.block}{self.choice[k]}") for a in self.made[k].shape.parallel)


def _given(w: Writer, part: _Part) -> list[str]:
    """The names of what a part is called with, once those of the kernel at hand are found: by
    halves, for of some hundred kernels each program looks at a few."""
    apart = [i for i in range(len(part.used)) if len({g[i] for g in part.given}) > 1]
    names = [f"own{i}" if i in apart else n for i, n in enumerate(part.used)]

    def choose(low: int, high: int) -> None:
        if high - low == 1:
            w.line(f"{', '.join(names[i] for i in apart)} = "
                   f"{', '.join(part.given[low][i] for i in apart)}")  # fmt: skip
            return
        middle = (low + high) // 2
        with w.block(f"if which < {middle}"):
            choose(low, middle)
        with w.block("else"):
            choose(middle, high)

    if apart:
        choose(0, len(part.given))
    return names


def _words(lines: Sequence[str]) -> list[str]:
    return re.findall(r"\w+", "\n".join(lines))


def _renamed(lines: Sequence[str], names: Sequence[str]) -> str:
    """Lines with numbers for names, by their order."""
    place = {n: f"own{k}" for k, n in enumerate(names)}
    return re.sub(r"\w+", lambda found: place.get(found[0], found[0]), "\n".join(lines))


def _configs(lists: Sequence[Sequence[Config]]) -> list[Config]:
    """The first choices, then each list's others beside the first choices of the rest."""
    firsts = [choices[0] for choices in lists]
    found = [_joined(firsts)]
    for k, choices in enumerate(lists):
        found += [_joined([*firsts[:k], other, *firsts[k + 1 :]]) for other in choices[1:]]
    return list(dict.fromkeys(found))[:MOST_CONFIGS]


def _joined(chosen: Sequence[Config]) -> Config:
    """Constants are numbered by list. As many threads as the largest needs: too few spill."""
    blocks = tuple((f"{b}{k}", size) for k, c in enumerate(chosen) for b, size in c.constants)
    return Config(blocks, max(c.num_warps for c in chosen), max(c.num_stages for c in chosen))


def _by_all(own: Sequence[Config], warps: int) -> tuple[Config, ...]:
    """Configurations of one of the kernels by as many threads as all have: the text depends on
    it, as where several threads have an element. What reduces nothing has longer blocks then, so
    that a thread has as much under way as it was to have (H200: AdamW of 45 parameters, some of
    them one short row, 650 us by half of it). Blocks have an element for every thread: of a row
    of fewer that is reduced each thread would load all."""
    found: list[Config] = []
    for c in (c for c in own if c.num_warps <= warps):
        times = warps // c.num_warps if len(c.constants) == 1 else 1
        *rest, (last, size) = ((b, times * n) for b, n in c.blocks)
        least = 32 * warps // math.prod(n for _, n in rest)
        size = max(size, least) if rest else size
        found.append(replace(c, blocks=(*rest, (last, size)), num_warps=warps))
    return tuple(dict.fromkeys(found))
