"""What can be fused to a product: the loop kernels that make its operands and that use its result.

Everything here is a pure question with an answer or a reason. A `Site` is a product call among the
groups of a program; a `Fusion` is one way to compute it together with neighbouring groups, as a
canonical `GemmProblem` and the names of the program's buffers behind the problem's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from tilewright import config
from tilewright.gemm import (
    convolution,
    grouped,
    narrow,
    parts,
    rows,
    sparse,
    tiled_weights,
    weights,
)
from tilewright.gemm.problem import NARROW, GemmProblem, Op, Operand, loops, plain
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, load, loads, rewrite, substitute, walk
from tilewright.ir.ops import INDEX_OPS
from tilewright.ir.program import Buffer, Opaque, Program, Store, View
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.fusion.legality import is_alone
from tilewright.schedule.nests.hints import hint_product
from tilewright.target import KINDS, Target

aten = torch.ops.aten

OPS: dict[Any, Op] = {
    aten.mm.default: "mm", aten.mm.out: "mm", aten.addmm.default: "addmm",
    aten.addmm.out: "addmm", aten.bmm.default: "bmm", aten.bmm.out: "bmm",
    aten.baddbmm.default: "baddbmm", aten.baddbmm.out: "baddbmm", aten.mm.dtype: "mm",
    aten.addmm.dtype: "addmm", aten.bmm.dtype: "bmm", aten.baddbmm.dtype: "baddbmm",
    aten._int_mm.default: "_int_mm", aten._int_mm.out: "_int_mm",
    aten._scaled_mm.default: "_scaled_mm", aten._scaled_mm.out: "_scaled_mm",
}  # fmt: skip
OF_THEIR_OWN = (convolution, grouped, sparse, weights, tiled_weights)  # their arguments, too
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
MORE_READ = 1.1  # times the bytes of an operand that its prologue may read instead
UNPACKED = 0.75  # of these, where it unpacks what is in memory: arithmetic is not too much then,
LEAST_UNPACKED = 1 << 16  # for an operand of so many elements at least,
MOST_ROWS = (
    512  # and so many rows (or columns) of the other operand, which say how often it is done
)
BESIDE = 32  # times as many elements has an operand beside which another is next to nothing
MOVES = frozenset(("cast", "load", "const", "sym", "var", *INDEX_OPS))

Values = dict[int, Expr]  # by the operand's place


@dataclass(frozen=True)
class Fusion:
    """A product with the groups it takes in, by their positions."""

    problem: GemmProblem
    names: Mapping[str, str]  # the problem's buffers -> the program's
    before: tuple[int, ...] = ()  # groups that became prologues
    after: int | None = None  # the group that became the epilogue


@dataclass(frozen=True)
class Norm:
    """Groups that normalise rows of the left operand, as what is multiplied and, where they are
    scaled last, what a row of the product is multiplied by."""

    positions: tuple[int, ...]  # the one that makes the operand is the last
    value: Expr
    factor: Expr | None = None

    def of(self, problem: GemmProblem) -> GemmProblem:
        """The product with them."""
        operands = tuple(o if k % 2 else Operand(o.view, self.value, is_plain=False)
                         for k, o in enumerate(problem.operands))  # fmt: skip
        return replace(problem, operands=operands, factor=self.factor)


@dataclass(frozen=True)
class Site:
    """A product call at `position` among the groups, alone and with what can be fused to it."""

    position: int
    call: Opaque
    bare: Fusion
    fusions: tuple[Fusion, ...]  # most fused first; none of them is the bare one
    refused: Mapping[str, str]  # what was not fused, and why


class Posed(Protocol):
    """What a call has for a target where it says itself what is to be computed."""

    def problem(self, program: Program, call: Opaque) -> GemmProblem | str: ...


def is_product(group: Group) -> bool:
    return (group.call is not None and isinstance(group.call.target, OpOverload)
            and group.call.target in OPS)  # fmt: skip


def is_of_its_own(group: Group) -> bool:
    """Whether the call is of an operator whose problem is posed by a module of its own."""
    return group.call is not None and any(m.is_tuned(group.call) for m in OF_THEIR_OWN)


def is_posed(group: Group) -> bool:
    return group.call is not None and hasattr(group.call.target, "problem") and (
        not hasattr(group.call.target, "kernel"))  # fmt: skip


def site(program: Program, groups: Sequence[Group], position: int) -> Site | str:
    """The product at this position with its neighbours, or why only the library can compute it."""
    call = groups[position].call
    assert call is not None
    found = _parsed(program, call)
    if isinstance(found, str):
        return found
    finder = _Finder(program, groups, position, call, found)
    return finder.site()


def alone(program: Program, call: Opaque) -> Fusion | str:
    """The product without looking at its neighbours."""
    found = _parsed(program, call)
    return found if isinstance(found, str) else Fusion(*_canonical(found, program.buffers))


def followed(program: Program, groups: Sequence[Group], position: int, ops: frozenset[str]
             ) -> Fusion | None:  # fmt: skip
    """The product with what uses its result, where that has one of these operations."""
    call = groups[position].call
    assert call is not None
    user = next((g for g in groups[position + 1 :] if call.writes & (g.reads | g.writes)), None)
    if user is None or not any(m.ops & ops for m in user.members) or not config.epilogue_fusion:
        return None
    found = _parsed(program, call)
    if isinstance(found, str):
        return None
    finder = _Finder(program, groups, position, call, found)
    return finder.with_epilogue()


# ---- the product alone


def _parsed(program: Program, call: Opaque) -> GemmProblem | str:
    """The bare problem, still in the program's names."""
    devices = {program.buffers[name].device.type for name in call.writes}
    if devices - KINDS:
        return f"no kernels are written for {', '.join(sorted(devices - KINDS))}"
    for module in OF_THEIR_OWN:
        if module.is_tuned(call):
            return module.parsed(program, call, _result(program, call))
    if call.target not in OPS:
        return call.target.problem(program, call)
    op = OPS[call.target]
    if op in NARROW:
        return narrow.parsed(program, call, op, _result(program, call))
    tensors = [a for a in call.args if isinstance(a, View)]
    scale = {"alpha": 1.0, "beta": 1.0, **call.kwargs}
    scale.pop("out_dtype", None)  # the result has it
    others = [a for a in call.args if not isinstance(a, View | torch.dtype)]
    if len(tensors) != (3 if op in ("addmm", "baddbmm") else 2) or others:
        return "its arguments are not all tensors in memory"
    if set(scale) != {"alpha", "beta"} or any(isinstance(v, Expr) for v in scale.values()):
        return "it is scaled by a number known only at run time"
    left, right = tensors[-2:]
    result = _result(program, call)
    added = {t.dtype for t in tensors[:-2]} - {result.dtype}
    kinds = {left.dtype, right.dtype} | added
    if (kinds | {result.dtype}) - DTYPES or len(kinds) != 1:
        return f"no kernels for {', '.join(sorted(str(t.dtype) for t in (*tensors, result)))}"
    batched = len(left.size) == 3
    batch = left.size[0] if batched else ix.ONE
    b, m, n, k = loops(batch, left.size[-2], right.size[-1], left.size[-1])
    lead = (b,) if batched else ()
    bias = None
    if len(tensors) == 3:
        expanded = _expanded(tensors[0], result.size)
        bias = plain(expanded, (*lead, m, n))
    used = {t.buffer for t in tensors} | {result.buffer}
    return GemmProblem(
        op, b, m, n, k,
        (plain(left, (*lead, m, k)), plain(right, (*lead, k, n))),
        result,
        tuple(program.buffers[name] for name in sorted(used)),
        Target.of(program.buffers[result.buffer].device),
        bias, float(scale["alpha"]), float(scale["beta"]),
    )  # fmt: skip


def _result(program: Program, call: Opaque) -> View:
    if call.out is not None:
        return call.out
    (name,) = call.results
    assert name is not None
    b = program.buffers[name]
    return View(name, b.size, b.stride, ix.ZERO, b.dtype)


def _expanded(view: View, size: tuple[Expr, ...]) -> View:
    """The window spread over a larger shape, as broadcasting does."""
    missing = len(size) - len(view.size)
    own = [ix.ZERO if have is ix.ONE and want is not ix.ONE else stride
           for have, stride, want in zip(view.size, view.stride, size[missing:],
                                         strict=True)]  # fmt: skip
    return replace(view, size=size, stride=(*[ix.ZERO] * missing, *own))


# ---- its neighbours


class _Finder:
    def __init__(self, program: Program, groups: Sequence[Group], position: int, call: Opaque,
                 problem: GemmProblem) -> None:  # fmt: skip
        self.program = program
        self.groups = groups
        self.position = position
        self.call = call
        self.problem = problem
        self.visible = program.visible
        self.refused: dict[str, str] = {}

    def site(self) -> Site:
        after = self._epilogue() if config.epilogue_fusion else None
        until = self.position if after is None else after[0]  # where all of it runs
        fused = config.prologue_fusion
        norms = self._norms(self.problem, (self.position,), until) if fused else []
        before = self._prologues(norms, until) if fused else []
        fusions: list[Fusion] = []
        for norm in norms:
            ways = [after, None] if after is not None else [None]
            fusions += [self._fusion(way, before, norm=norm) for way in ways]
        for with_after, with_before in every((True, False), (True, False)):
            if (with_after and after is None) or (with_before and not before):
                continue
            if with_after or with_before:
                fusions.append(self._fusion(after if with_after else None,
                                            before if with_before else []))  # fmt: skip
        fusions = [*self._pairs(after), *self._sums_of_products(after), *fusions]
        bare = _canonical(self.problem, self.program.buffers)
        return Site(self.position, self.call, Fusion(*bare), tuple(fusions), dict(self.refused))

    def with_epilogue(self) -> Fusion | None:
        after = self._epilogue()
        return None if after is None else self._fusion(after, [])

    def _fusion(self, after: tuple[int, list[Store]] | None,
                before: Sequence[tuple[int, Values]],
                both: tuple[int, GemmProblem] | None = None,
                norm: Norm | None = None) -> Fusion:  # fmt: skip
        taken = tuple(k for k, _ in before) + (() if both is None else (both[0],))
        taken += () if norm is None else norm.positions
        problem = self.problem if both is None else both[1]
        values = {k: value for _, made in before for k, value in made.items()}
        if values:
            operands = tuple(Operand(o.view, values[k], is_plain=False) if k in values else o
                             for k, o in enumerate(problem.operands))  # fmt: skip
            problem = replace(problem, operands=operands)
        problem = problem if norm is None else norm.of(problem)
        if after is not None:
            problem = replace(problem, epilogue=tuple(after[1]), keeps=self._is_kept(after[0]))
        found, names = _canonical(problem, self.program.buffers)
        return Fusion(found, names, taken, after[0] if after is not None else None)

    # ---- epilogue

    def _epilogue(self) -> tuple[int, list[Store]] | None:
        """The group after the product that uses its result point by point, as stores over m, n."""
        result = self.problem.result.buffer
        after = [k for k in range(self.position + 1, len(self.groups))
                 if result in self.groups[k].reads | self.groups[k].writes]  # fmt: skip
        if not after:
            return None
        group = self.groups[after[0]]
        found = self._stores(group, after[0])
        if isinstance(found, str):
            self.refused[group.nodes[0].name] = found
            return None
        return after[0], found

    def _stores(self, group: Group, position: int) -> list[Store] | str:
        problem = self.problem
        reason = _not_pointwise(group) or self._cannot_wait(position)
        if reason:
            return reason
        if group.writes & (self.call.reads | self.call.writes):
            return "it overwrites what the product uses"
        index = {n.src for m in group.members for n in loads(*m.exprs)
                 if n.arg == problem.result.buffer}  # fmt: skip
        if len(index) != 1:
            return "it reads the product in several ways"
        ((at, *masks),) = index
        if masks:
            return "it reads parts of the product"
        where = parts.solved(at, group.members[0].loops, problem.result, problem.place)
        if where is None:
            return "its loops are not those of the product"
        inlined = _inlined(group, group.writes - group.local)
        if isinstance(inlined, str):
            return inlined
        made = [Store(s.buffer, substitute(s.index, where), substitute(s.value, where))
                for s in inlined]  # fmt: skip
        return [replace(s, value=self._of_product(s.value, substitute(at, where))) for s in made]

    def _of_product(self, value: Expr, at: Expr) -> Expr:
        """The value with the product, which it loads at `at`, spelled as the problem spells it: an
        axis of one element is in the problem's index, and not in that of a loop nest."""
        mine = self.problem.product
        return substitute(value, {load(mine.arg, mine.dtype, at): mine})

    def _cannot_wait(self, position: int) -> str:
        """Why the product cannot be computed as late as there."""
        return self._disturbed(self.call.reads | self.call.writes, self.position, position)

    def _disturbed(self, used: frozenset[str], start: int, end: int) -> str:
        """Whether anything between two groups writes what a third uses."""
        for group in self.groups[start + 1 : end]:
            if group.writes & used:
                return "what it reads is overwritten in between"
        return ""

    def _is_kept(self, epilogue: int) -> bool:
        """Whether the product itself is needed in memory, fused or not."""
        return self._kept_by_others({epilogue})

    # ---- two products

    def _sums_of_products(self, after: tuple[int, list[Store]] | None) -> list[Fusion]:
        """This product and another that is added to it, as one problem."""
        p = self.problem
        if p.out_dtype is not None:
            return []
        if p.bias is not None and p.op == "addmm" and (p.alpha, p.beta) == (1.0, 1.0):
            both = self._with(self._maker(p.bias, (self.position,)), p.bias.view)
            ways = [after, None] if after is not None else [None]
            return [] if both is None else [self._fusion(way, [], both) for way in ways]
        if p.op == "mm" and after is not None and not self._is_kept(after[0]):
            return self._sum_in(after)
        return []

    def _sum_in(self, after: tuple[int, list[Store]]) -> list[Fusion]:
        """The same where the sum is the first thing the epilogue computes."""
        mine = self.problem.product
        sums = {n for s in after[1] for n in walk(s.value) if n.op == "add" and mine in n.src}
        if len(sums) != 1 or self.problem.dtype not in (torch.float32, torch.float64):
            return []  # low-precision eager rounds both products before it adds them
        (total,) = sums
        other = total.src[total.src[0] is mine]
        if other.op != "load" or other is not load(other.arg, other.dtype, self._nest_index):
            return []
        stores = [replace(s, value=substitute(s.value, {total: const(0, total.dtype)}))
                  for s in after[1]]  # fmt: skip
        left = {n.arg for s in stores for n in loads(*s.exprs)}
        if left & {mine.arg, other.arg}:
            return []
        place = self._maker_of(other.arg, (after[0],))
        both = self._with(place, replace(self.problem.result, buffer=other.arg))
        if both is None:
            return []
        summed = [replace(s, value=substitute(s.value, {total: mine})) for s in after[1]]
        return [self._fusion((after[0], summed), [], both)]

    def _pairs(self, after: tuple[int, list[Store]] | None) -> list[Fusion]:
        """This product and another of the same left operand, where what follows takes an element
        of each: a gate. A product that is needed in memory too is stored by the same kernel."""
        p = self.problem
        if after is None or p.op != "mm" or not p.target.is_gpu or p.out_dtype is not None:
            return []
        for name in sorted({n.arg for s in after[1] for n in loads(*s.exprs)}):
            gated = self._gated(name, after[0])
            if gated is None:
                continue
            there = _Finder(self.program, self.groups, *gated)
            first, last = sorted((self, there), key=lambda f: f.position)
            a, b = first.problem, last.problem
            alike = a.sizes == b.sizes and a.operands[0] == b.operands[0]
            if not alike or a.result != replace(b.result, buffer=a.result.buffer):
                continue
            both = replace(a, op="mm_pair", operands=(*a.operands, *b.operands), second=b.result)
            stores = self._of_both(after[1], both)
            if stores is None:
                continue
            if last._kept_by_others({first.position, after[0]}):
                stores.append(Store(b.result.buffer, both.other.src[0], both.other))
            both = replace(both, epilogue=tuple(stores),
                           keeps=first._kept_by_others({last.position, after[0]}))  # fmt: skip
            norms = (self._norms(both, (first.position, last.position), after[0])
                     if config.prologue_fusion else [])  # fmt: skip
            ways = [norm.of(both) for norm in norms]
            taken = [norm.positions for norm in norms]
            return [Fusion(*_canonical(way, self.program.buffers), (there.position, *more),
                           after[0]) for way, more in zip([*ways, both], [*taken, ()],
                                                          strict=True)]  # fmt: skip
        return []

    def _gated(self, name: str, after: int) -> tuple[int, Opaque, GemmProblem] | None:
        """The product that makes a buffer, where it can be computed as late as what follows."""
        users = [k for k, g in enumerate(self.groups) if name in g.reads | g.writes]
        maker, call = users[0], self.groups[users[0]].call
        if call is None or maker == self.position or OPS.get(call.target) != "mm":
            return None
        if any(k < after for k in users[1:]) or any(self.groups[k].when for k in users):
            return None
        found = _parsed(self.program, call)
        if isinstance(found, str) or self._disturbed(call.reads | call.writes, maker, after):
            return None
        return maker, call, found

    def _kept_by_others(self, inside: set[int]) -> bool:
        result = self.problem.result.buffer
        others = (g for k, g in enumerate(self.groups) if k not in {self.position, *inside})
        return (result in self.visible or self.program.buffers[result].kind != "temporary"
                or any(result in g.reads | g.writes for g in others))  # fmt: skip

    def _of_both(self, stores: Sequence[Store], both: GemmProblem) -> list[Store] | None:
        """With the elements of both products as the problem spells them; None where others than
        those at the position are read."""
        single = {v: ix.ZERO for v in both.place if v.src[0] is ix.ONE}
        spelt = {substitute(e, single): e for e in (both.product, both.other)}
        own = {e.arg for e in spelt.values()}
        made = [replace(s, value=substitute(s.value, spelt)) for s in stores]
        read = {n for s in made for n in loads(*s.exprs) if n.arg in own}
        return made if read <= set(spelt.values()) else None

    @property
    def _nest_index(self) -> Expr:
        """Where an element of the product is, as loop nests spell it."""
        single = {v: ix.ZERO for v in self.problem.place if v.src[0] is ix.ONE}
        return substitute(self.problem.product.src[0], single)

    def _with(self, maker: int | None, result: View) -> tuple[int, GemmProblem] | None:
        """The product at `maker` and this one, if the first makes just this view."""
        p = self.problem
        first = None if maker is None else self.groups[maker].call
        if maker is None or first is None or OPS.get(first.target) != "mm":
            return None
        found = _parsed(self.program, first)
        if isinstance(found, str) or found.sizes != p.sizes or found.result != result:
            return None
        if self._disturbed(first.reads, maker, self.position):
            return None
        operands = (*found.operands, *p.operands)
        return maker, replace(p, op="mm_plus_mm", operands=operands, bias=None)

    # ---- prologues

    def _norms(self, problem: GemmProblem, readers: tuple[int, ...], until: int) -> list[Norm]:
        """The groups that make the left operand of the product at these positions, where they
        reduce rows: the ways to compute them where they are read, `until` which nothing that they
        read may change."""
        left = problem.operands[0]
        others = [*problem.operands[1::2], *([] if problem.bias is None else [problem.bias])]
        maker = self._maker(left, readers)
        if maker is None or not problem.target.is_gpu or problem.is_batched:
            return []
        if any(o.view.buffer == left.view.buffer for o in others):
            return []
        positions = (*self._reducing(maker), maker)
        taken = [self.groups[k] for k in positions]
        if not any(m.reduce for g in taken for m in g.members):
            return []
        reads = frozenset(b for g in taken for b in g.reads - g.local)
        disturbed = self._disturbed(reads, positions[0], until)
        value = disturbed or rows.value(taken, problem)
        apart = value if isinstance(value, str) else rows.factored(problem, value)
        found = [] if isinstance(apart, str) else [Norm(positions, *apart)]
        if not isinstance(value, str) and problem.hints[1] <= rows.MOST_WALKED:
            found.append(Norm(positions, value))
        if not found:
            self.refused[taken[-1].nodes[0].name] = str(apart)
        return found

    def _reducing(self, maker: int) -> tuple[int, ...]:
        """The groups that make nothing but numbers of rows which this one alone needs."""
        found: set[int] = set()
        for name in self.groups[maker].reads - self.groups[maker].local:
            first = self._maker_of(name, (maker,))
            if first is None or self.groups[first].call is not None:
                continue
            made = self.groups[first].writes - self.groups[first].local
            sizes = [hint_product(self.program.buffers[b].size) for b in made]
            alone = all(self._maker_of(b, (maker,)) == first for b in made)
            if alone and max(sizes) <= self.problem.hints[1]:
                found.add(first)
        return tuple(sorted(found))

    def _prologues(self, norms: Sequence[Norm], until: int) -> list[tuple[int, Values]]:
        """Groups that make nothing but operands of this product, with the value of each."""
        others = {k for norm in norms for k in norm.positions}
        makers: dict[int, list[int]] = {}
        for k, operand in enumerate(self.problem.operands):
            if not operand.is_plain:
                continue  # it is not read as it lies
            maker = self._maker(operand, (self.position,))
            if maker is not None and maker not in others and self.groups[maker].call is None:
                makers.setdefault(maker, []).append(k)
        found: list[tuple[int, Values]] = []
        for position, operands in makers.items():
            values = self._operand_values(position, operands, until)
            if isinstance(values, str):
                self.refused.setdefault(self.groups[position].nodes[0].name, values)
            else:
                found.append((position, values))
        return found

    def _maker(self, operand: Operand, readers: tuple[int, ...]) -> int | None:
        return self._maker_of(operand.view.buffer, readers)

    def _maker_of(self, name: str, readers: tuple[int, ...]) -> int | None:
        """The one group that writes a buffer which only these read."""
        users = [k for k, g in enumerate(self.groups) if name in g.reads | g.writes]
        if any(self.groups[k].when is not None for k in users):
            return None
        if (tuple(users[1:]) != readers or name in self.visible
                or self.program.buffers[name].kind != "temporary"):  # fmt: skip
            return None
        return users[0]

    def _operand_values(self, position: int, operands: Sequence[int], until: int
                        ) -> Values | str:  # fmt: skip
        group = self.groups[position]
        names = [self.problem.operands[k].view.buffer for k in operands]
        made = group.writes - group.local
        reason = _not_pointwise(group)
        if reason:
            return reason
        if made != set(names):
            return "it makes more than this operand"
        if len(names) != len(set(names)) and any(m.ops - MOVES for m in group.members):
            return "it would be computed for both operands"
        reason = self._disturbed(frozenset(group.reads), position, until)
        if reason:
            return reason
        inlined = _inlined(group, made, in_parts=True)
        if isinstance(inlined, str):
            return inlined
        return self._placed(group, operands, inlined)

    def _placed(self, group: Group, operands: Sequence[int], stores: Sequence[Store]
                ) -> Values | str:  # fmt: skip
        """Each operand's value at its own position in the product."""
        values: Values = {}
        for k in operands:
            operand, place = self.problem.operands[k], self.problem.positions[k]
            mine = [s for s in stores if s.buffer == operand.view.buffer]
            value = parts.value(mine, group.members[0].loops, operand.view, place)
            if value is None:
                return "its loops are not those of the operand"
            reason = _unwanted(self.program, self.problem, k, value)
            if reason:
                return reason
            values[k] = value
        return values


def _not_pointwise(group: Group) -> str:
    if group.when is not None:
        return "it runs for some sizes alone"
    if group.call is not None:
        return "it is a library call"
    if group.parts or group.serial:
        return "it is not a single loop nest"
    first = frozenset(group.members[0].loops)
    for m in group.members:
        if m.reduce or m.ops & {"reduce", "scan"}:
            return "it reduces"
        if is_alone(m):
            return is_alone(m)
        if frozenset(m.loops) != first:
            return "its parts have different loops"
        if "index" in m.ops:
            return "it checks indices"
    return ""


def _unwanted(program: Program, problem: GemmProblem, k: int, value: Expr) -> str:
    """Why computing an operand where it is read is no gain."""
    operand, again = problem.operands[k], problem.reads_again
    read = list(loads(value))
    if not read:
        return "it is a constant"
    reads = sum(min(hint_product(program.buffers[n.arg].size),
                    hint_product(v.src[0] for v in free_vars(n.src[0]))) * n.dtype.itemsize
                for n in read)  # fmt: skip
    elements = hint_product(operand.view.size)
    size = elements * operand.dtype.itemsize
    if not again or _is_small(problem, k, elements):
        return ""
    if reads > MORE_READ * size:
        return "it reads more bytes than the operand has"
    arithmetic = {n.op for n in walk(value)} - MOVES
    if operand.dtype.itemsize > 2 or not arithmetic:
        return ""
    rows = problem.hints[2 if k % 2 == 0 else 1]
    worth = problem.target.is_gpu and elements >= LEAST_UNPACKED and rows <= MOST_ROWS
    if worth and reads <= UNPACKED * size:
        return ""
    return "its arithmetic would be done again for every tile"


def _is_small(problem: GemmProblem, k: int, elements: int) -> bool:
    """Whether an operand is quantised that is next to nothing beside the other one: whoever needs
    it finds it in the cache, and a launch is saved."""
    other = hint_product(problem.operands[k ^ 1].view.size)
    return problem.op == "_scaled_mm" and elements * BESIDE <= other


# ---- indices and values


def _inlined(group: Group, kept: set[str], in_parts: bool = False) -> list[Store] | str:
    """The group's stores of `kept`, in terms of what is in memory before it runs."""
    made: dict[str, tuple[Expr, Expr]] = {}
    found: list[Store] = []
    touched: dict[str, set[Expr]] = {}
    for m in group.members:
        for s in m.stores:
            for node in loads(*s.exprs):
                if node.arg not in made:
                    touched.setdefault(node.arg, set()).add(node.src[0])
        stores = [_inline(s, made) for s in m.stores]
        if any(isinstance(s, str) for s in stores):
            return next(s for s in stores if isinstance(s, str))
        for s in stores:
            assert isinstance(s, Store)
            made[s.buffer] = s.index, s.value
            if s.buffer in kept:
                found.append(s)
    if any(touched.get(s.buffer, {s.index}) != {s.index} for s in found):
        return "it overwrites what other points of it read"
    if len({s.buffer for s in found}) != len(found) and not in_parts:
        return "it writes a buffer in parts"
    return found


def _inline(store: Store, made: Mapping[str, tuple[Expr, Expr]]) -> Store | str:
    bad = False

    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        nonlocal bad
        if node.op != "load" or node.arg not in made:
            return None
        index, value = made[node.arg]
        bad |= index is not src[0] or len(src) > 1
        return value

    value = rewrite(store.value, rule)
    return "it reads other points of what it computes" if bad else replace(store, value=value)


# ---- canonical names


def _canonical(problem: GemmProblem, known: Mapping[str, Buffer]
               ) -> tuple[GemmProblem, dict[str, str]]:  # fmt: skip
    """The problem in names of its own, and those names' buffers in the program."""
    names: dict[str, str] = {}  # the program's -> the problem's
    for mine, operand in zip(("a", "b", "a2", "b2"), problem.operands, strict=False):
        names.setdefault(operand.view.buffer, mine)
    if problem.bias is not None:
        names.setdefault(problem.bias.view.buffer, "bias")
    for mine, operand in zip(("scale_a", "scale_b"), problem.scales, strict=False):
        names.setdefault(operand.view.buffer, mine)
    if problem.ends is not None:
        names.setdefault(problem.ends.view.buffer, "ends")
    names.setdefault(problem.result.buffer, "c")
    if problem.second is not None:
        names.setdefault(problem.second.buffer, "c2")
    values = [o.value for o in problem.operands]
    values += [] if problem.factor is None else [problem.factor]
    for node in loads(*values, *(e for s in problem.epilogue for e in s.exprs)):
        names.setdefault(node.arg, f"x{len(names)}")
    for s in problem.epilogue:
        names.setdefault(s.buffer, f"y{len(names)}")
    found = _renamed(problem, names)
    theirs = {mine: name for name, mine in names.items()}
    buffers = [replace(known[theirs[mine]], name=mine, kind="temporary") for mine in sorted(theirs)]
    return replace(found, buffers=tuple(buffers)), theirs


def _renamed(problem: GemmProblem, names: Mapping[str, str]) -> GemmProblem:
    def rule(node: Expr, src: tuple[Expr, ...]) -> Expr | None:
        if node.op != "load":
            return None
        return load(names[node.arg], node.dtype, src[0], *src[1:])

    def view(v: View) -> View:
        return replace(v, buffer=names[v.buffer])

    def operand(o: Operand) -> Operand:
        return replace(o, view=view(o.view), value=rewrite(o.value, rule))

    return replace(
        problem,
        operands=tuple(operand(o) for o in problem.operands),
        bias=None if problem.bias is None else operand(problem.bias),
        scales=tuple(operand(o) for o in problem.scales),
        second=None if problem.second is None else view(problem.second),
        ends=None if problem.ends is None else operand(problem.ends),
        factor=None if problem.factor is None else rewrite(problem.factor, rule),
        result=view(problem.result),
        epilogue=tuple(Store(names[s.buffer], rewrite(s.index, rule), rewrite(s.value, rule),
                             s.mode, s.mask) for s in problem.epilogue),
    )  # fmt: skip
