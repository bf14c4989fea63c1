"""Kernels that need nothing of each other as one launch: its programs are divided among them.

Each is a function of its own, with its own blocks, held rows or walked ones. Kernels whose blocks
are chosen from the same list share the choice, so that they are tuned together; those with most
work come first, in the text as in tuning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tilewright.codegen.triton.blocks import Config
from tilewright.codegen.triton.facts import imports
from tilewright.codegen.triton.kernel import Kernel
from tilewright.codegen.triton.made import TritonKernel
from tilewright.codegen.triton.shape import Shape
from tilewright.ir.expr import Expr
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target

Grid = tuple[tuple[Expr, str], ...]
MOST_CONFIGS = 12


def combined(program: Program, parts: Sequence[tuple[Group, Shape]], target: Target, name: str,
             wide: bool) -> TritonKernel:  # fmt: skip
    own = [Kernel(program, group, shape, target, wide) for group, shape in parts]
    warps = max(k.configs[0].num_warps for k in own)

    def of(wide: bool) -> list[Kernel]:
        return [Kernel(program, group, shape, target, wide, _by_all(k.configs, warps))
                for k, (group, shape) in zip(own, parts, strict=True)]  # fmt: skip

    made = of(wide)
    if len({k.w.index_type for k in made}) > 1:  # all count alike, or numbers have two types
        made = of(True)
    made.sort(key=lambda k: -k.work)
    first = made[0]
    early = all(k.early for k in made)
    valued = frozenset(e for k in made for e in k.w.valued)
    for k in made:
        k.pointers, k.numbers, k.w.valued = first.pointers, first.numbers, valued
        k.early, k.first = False, "pid"
        k.body()
    first.checked = any(k.checked for k in made)
    return _Launch(made, early).kernel(f"triton_combo_fused_{name}".rstrip("_"))


class _Launch:
    def __init__(self, made: Sequence[Kernel], early: bool) -> None:
        self.made = made
        self.early = early
        lists = list(dict.fromkeys(k.configs for k in made))
        self.choice = [lists.index(k.configs) for k in made]  # of blocks, by kernel
        self.configs = tuple(_configs(lists))

    def kernel(self, name: str) -> TritonKernel:
        first = self.made[0]
        params = first.params()
        names = [*(p.argument for p in params), *(["err"] if first.checked else [])]
        used = [[n for n in names if n in _words(k.w.lines)] for k in self.made]
        lines = [line for k in range(len(self.made)) for line in self._part(k, used[k])]
        head = [*names, *(f"{b}: tl.constexpr" for b, _ in self.configs[0].constants)]
        lines += ["@triton.jit", f"def {name}({', '.join(head)}):", *self._entry(used)]
        text = "\n".join([*imports(lines), "", "", *lines]) + "\n"
        grid, *beside = (self._grid(k) for k in range(len(self.made)))
        assume = tuple(dict.fromkeys(e for k in self.made for e in k.assume or ()))
        return TritonKernel(text, name, params, grid, self.configs[0], self.configs,
                            first.checked, assume, self.early, beside=tuple(beside))  # fmt: skip

    def _part(self, k: int, used: Sequence[str]) -> list[str]:
        constants = [f"{b}: tl.constexpr" for b, _ in self.made[k].configs[0].constants]
        head = f"def part{k}({', '.join(['pid', *used, *constants])}):"
        return ["@triton.jit", head, *self.made[k].w.lines, "", ""]

    def _entry(self, used: Sequence[Sequence[str]]) -> list[str]:
        """Each kernel has the programs from where the one before ends."""
        w = self.made[0].outside()
        w.begin("tl.program_id(0)", self.early)
        for k, kernel in enumerate(self.made):
            blocks = [f"(({w.index(extent)} + {b} - 1) // {b})" for extent, b in self._grid(k)]
            w.line(f"count = {' * '.join(blocks)}")
            constants = [f"{b}={b}{self.choice[k]}" for b, _ in kernel.configs[0].constants]
            with w.block("if (pid >= 0) & (pid < count)"):
                w.line(f"part{k}({', '.join(['pid', *used[k], *constants])})")
            w.line("pid -= count")
        return w.lines

    def _grid(self, k: int) -> Grid:
        return tuple((a.extent, f"{a.block}{self.choice[k]}") for a in self.made[k].shape.parallel)


def _words(lines: Sequence[str]) -> set[str]:
    return set(re.findall(r"\w+", "\n".join(lines)))


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
    """Configurations of one of the kernels by as many threads as all have: the text depends on it,
    as where several threads have an element. What folds nothing has longer blocks then, so that a
    thread has as much under way as it was to have (H200: AdamW of 45 parameters, some of them one
    short row, 650 us by half of it)."""
    found: list[Config] = []
    for c in (c for c in own if c.num_warps <= warps):
        times = warps // c.num_warps if len(c.constants) == 1 else 1
        found.append(replace(c, blocks=tuple((b, times * n) for b, n in c.blocks), num_warps=warps))
    return tuple(dict.fromkeys(found))
