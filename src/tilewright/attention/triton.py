"""Attention on cards by Triton templates: forward, with the keys of few queries shared out, and the
two kernels of its backward. Each is one text with several sizes of blocks, the best first: what
does not fit makes way for the next, and under `max_autotune` they are measured (`tune/kernels.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import torch

from tilewright.attention import heuristics
from tilewright.attention.heuristics import Blocks
from tilewright.attention.hooks import LOCAL, Hooks
from tilewright.attention.problem import AttentionProblem
from tilewright.attention.provider import Launch, Plan, register
from tilewright.codegen.triton.tile.render import imports
from tilewright.gemm.problem import takes_tf32
from tilewright.gemm.provider import Effort, Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import free_vars, walk
from tilewright.ir.program import Buffer
from tilewright.ir.show import number
from tilewright.runtime import store
from tilewright.runtime.triton_build import FUSED, Sample, TritonConfig, TritonSource

KERNELS = Path(__file__).parent / "kernels"
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))
FOLDS = frozenset(("reduce", "scan", "part", "rand", "randn", "randint"))
ROWS = 8  # of a program that brings parts together


@dataclass(frozen=True)
class Shape:
    """One kernel: its template, its blocks, and how it is laid over the problem."""

    template: str
    blocks: tuple[Blocks, ...]
    keys: bool = False
    flat: bool = False
    split: int = 1


@dataclass(frozen=True)
class TritonCandidate:
    problem: AttentionProblem
    shapes: tuple[Shape, ...]
    provider: str = "TRITON"

    @property
    def name(self) -> str:
        split = self.shapes[0].split
        kind = "backward" if self.problem.is_backward else "split" if split > 1 else "forward"
        return f"triton_attention_{kind}"

    @property
    def description(self) -> str:
        return "; ".join(f"{s.template} {s.blocks[0]}" for s in self.shapes)

    @property
    def estimate(self) -> float:
        return heuristics.estimate(self.problem)

    @property
    def key(self) -> str:
        return store.key("attention", _version(), self.problem.key, repr(self.shapes))

    def plan(self) -> Plan:
        return Plan(tuple(_Kernel(self.problem, s).launch() for s in self.shapes), self._local())

    def _local(self) -> tuple[Buffer, ...]:
        split = self.shapes[0].split
        if split == 1:
            return ()
        rows = ix.mul(ix.product(self.problem.sizes[:3]), split)
        device = self.problem.buffers[0].device
        sizes = {"part_lse": (rows,), "part_out": (rows, self.problem.widths[1])}
        return tuple(Buffer(name, LOCAL[name], device, size, ix.contiguous_strides(size))
                     for name, size in sizes.items())  # fmt: skip


class _Kernel:
    """The text of one kernel, and its launch."""

    def __init__(self, problem: AttentionProblem, shape: Shape) -> None:
        self.problem, self.shape = problem, shape
        d, dv = (_power(ix.likely(w)) for w in problem.widths)
        self.fixed = {"BLOCK_D": d, "BLOCK_DV": dv}
        if shape.split > 1:
            self.fixed["SPLIT"] = shape.split
        if shape.template == "combine":
            self.fixed = {"BLOCK_R": ROWS, "BLOCK_DV": dv, "SPLIT": shape.split}
        largest = {"BLOCK_M": max(b.m for b in shape.blocks),
                   "BLOCK_N": max(b.n for b in shape.blocks)}  # fmt: skip
        self.hooks = Hooks(problem, {**self.fixed, **largest}, shape.keys, shape.flat, shape.split)

    def launch(self) -> Launch:
        kernel = Kernel(self.name, self._source(),
                        tuple(argument for argument, _, _ in self.hooks.params),
                        self.hooks.checked)  # fmt: skip
        p = self.problem
        written = {"forward": p.writes, "combine": p.writes, "backward_kv": ("dk", "dv"),
                   "backward_q": ("dq", *p.node.added)}[self.shape.template]  # fmt: skip
        if self.shape.split > 1 and self.shape.template == "forward":
            written = ("part_out", "part_lse")
        return Launch(kernel, written)

    @property
    def name(self) -> str:
        return f"triton_tem_fused_attention_{self.shape.template}"

    @cached_property
    def text(self) -> str:
        hooks = self.hooks
        template = _environment().get_template(f"{self.shape.template}.jinja")
        tf32 = self.problem.dtype == torch.float32 and takes_tf32()
        made = template.render(
            hooks=hooks,
            head=lambda: "@head@",
            size=hooks.size,
            wide=".to(tl.int64)" if hooks.wide else "",
            precision='"tf32"' if tf32 else '"ieee"',
        )
        for e in self.problem.node.numbers:  # all of them: torch's operations would want them too
            hooks.number(e)
        lines = [line for raw in made.splitlines() for line in _filled(hooks, raw) if line.strip()]
        names = [name for _, name, _ in hooks.params]
        names += ["err"] if hooks.checked else []
        names += [f"{c}: tl.constexpr" for c in dict(self._config(self.shape.blocks[0]).constants)]
        head = [*imports(lines), "", "", "@triton.jit", f"def {self.name}({', '.join(names)}):"]
        at = lines.index("@head@")
        return "\n".join([*lines[:at], *head, *lines[at + 1 :]]) + "\n"

    def _config(self, b: Blocks) -> TritonConfig:
        found = dict(self.fixed)
        if self.shape.template != "combine":
            found |= {"BLOCK_M": b.m, "BLOCK_N": b.n}
        return TritonConfig(tuple(found.items()), b.warps, b.stages)

    def _grid(self) -> tuple[tuple[str, str], ...]:
        p, s = self.problem, self.shape
        b, h, m, n = p.sizes
        if s.template == "combine":
            return ((number(ix.product((b, h, m))), str(ROWS)),)
        length, block = (n, "BLOCK_N") if s.keys else (m, "BLOCK_M")
        heads = ix.floordiv(h, p.node.group) if s.keys or s.flat else h
        rest = ix.mul(b, heads, s.split)
        lists = self.hooks.lists
        if lists is None or s.flat:
            rows = ix.mul(length, p.node.group) if s.flat else length
            return ((number(rows), block), (number(rest), "1"))
        tiles = ix.floordiv(ix.add(length, lists.own - 1), lists.own)
        return ((str(lists.own), block), (number(ix.mul(rest, tiles)), "1"))

    def _source(self) -> TritonSource:
        p, text = self.problem, self.text
        params = self.hooks.params
        major, minor = p.target.capability
        checked = [("err", "*i64")] if self.hooks.checked else []
        return TritonSource(
            text,
            self.name,
            (*((name, kind) for _, name, kind in params), *checked),
            tuple(self._config(b) for b in self.shape.blocks),
            capability=10 * major + minor,
            shared_memory=p.target.shared_memory,
            aligned=frozenset(name for (kind, _), name, _ in params
                              if kind == "ptr"),
            grid=self._grid(),
            sample=(*(self._sample(of, kind) for (kind, of), _, _ in params),
                    *([(torch.int64, 1)] if self.hooks.checked else [])),
            sizes=tuple(sorted((s.arg.name, ix.likely(s)) for s in p.node.numbers)),
            device=next((b.device.index or 0 for b in p.buffers), 0),
            options=FUSED,
        )  # fmt: skip

    def _sample(self, name: str, kind: str) -> Any:
        if kind != "ptr":
            return next(s.arg.hint or 16 for s in self.problem.node.numbers if s.arg.name == name)
        if name in LOCAL:
            rows = ix.likely(ix.product(self.problem.sizes[:3])) * self.shape.split
            wide = ix.likely(self.problem.widths[1]) if name == "part_out" else 1
            return Sample(LOCAL[name], rows * wide)
        b = self.problem.memory[name]
        last = [(ix.likely(n) - 1) * ix.likely(s) for n, s in zip(b.size, b.stride, strict=True)]
        return Sample(b.dtype, max(1, 1 + sum(last)), self._high(name),
                      "add" if name in self.problem.node.added else "")  # fmt: skip

    def _high(self, name: str) -> int:
        """What integers of a table of blocks are below."""
        for lists in (self.problem.node.sparse, self.problem.node.turned):
            if lists is not None and name in {n.arg for e in lists.exprs for n in walk(e)
                                              if n.op == "load"}:  # fmt: skip
                return max(1, ix.likely(lists.j.src[0]))
        return 0


@register
class TritonProvider:
    name = "TRITON"

    def supports(self, problem: AttentionProblem) -> str:
        if not problem.target.is_gpu:
            return "Triton kernels run on cards"
        if problem.dtype not in FLOATS:
            return f"no template multiplies {problem.dtype}"
        if any(ix.value_of(w) is None for w in problem.widths):
            return "the elements of a query or a value are not known"
        if max(ix.likely(w) for w in problem.widths) > heuristics.WIDEST:
            return "queries or values are too wide for registers"
        if any(ix.value_of(n) == 0 for n in problem.sizes):
            return "there is nothing to compute"
        odd = next((n.op for n in walk(*problem.node.exprs) if n.op in FOLDS), "")
        return f"a {odd} in a score" if odd else ""

    def candidates(self, problem: AttentionProblem, effort: Effort) -> Sequence[TritonCandidate]:
        if self.supports(problem):
            return []
        if problem.is_backward:
            blocks = heuristics.row(heuristics.BACKWARD, problem)
            turned = tuple(heuristics.turned(b) for b in blocks)
            return [TritonCandidate(problem, (Shape("backward_kv", blocks, keys=True),
                                              Shape("backward_q", turned)))]  # fmt: skip
        split = heuristics.shares(problem)
        rows = problem.hints[2] * problem.node.group
        if rows <= heuristics.FEW_ROWS:
            flat = may_flatten(problem)
            blocks = heuristics.decoding(problem)
            shapes = [Shape("forward", blocks, flat=flat, split=split)]
            if split > 1 and not problem.node.maxima:
                shapes.append(Shape("combine", (Blocks(0, 0, 4, 1),), split=split))
            else:
                shapes = [Shape("forward", blocks, flat=flat)]
            return [TritonCandidate(problem, tuple(shapes))]
        return [TritonCandidate(problem, (Shape("forward", heuristics.row(heuristics.FORWARD,
                                                                          problem)),))]  # fmt: skip


def may_flatten(problem: AttentionProblem) -> bool:
    """Whether the heads of a key head can be side by side: lists of blocks are the same for them,
    and of one block of queries."""
    sparse, head = problem.node.sparse, problem.node.head
    if problem.node.group == 1:
        return False
    if sparse is None:
        return True
    rows = ix.value_of(problem.sizes[2])
    same = all(head not in free_vars(e) for e in sparse.exprs)
    return same and rows is not None and rows <= sparse.own


def _filled(hooks: Hooks, line: str) -> list[str]:
    found = re.fullmatch(r"( *)@(\d+)@", line)
    if found is None:
        return [line]
    return [found[1] + inner for inner in hooks.marked[int(found[2])]]


def _power(n: int) -> int:
    """The block that holds so many: a product takes no fewer than 16."""
    return max(16, 1 << (n - 1).bit_length())


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(undefined=jinja2.StrictUndefined,
                              loader=jinja2.FileSystemLoader(KERNELS))  # fmt: skip


@functools.cache
def _version() -> str:
    return store.key(*(f.read_bytes() for f in sorted(KERNELS.parent.rglob("*.*"))
                       if f.suffix in (".py", ".jinja")))  # fmt: skip
