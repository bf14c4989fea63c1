"""Operators that are computed by templates: how a user says so, and what is chosen between.

    @cutedsl.lowering(torch.ops.aten.add.Tensor)
    def add(choices, input_nodes, layout):
        for threads in (128, 256, 512):
            template.maybe_append_choice(choices, input_nodes, layout, THREADS=threads)

A call is then a site like a product's: what follows and what makes its inputs can be fused to it,
choices are timed and compared with the operator itself, and the winner is in the program.
"""

from __future__ import annotations

import functools
import inspect
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Node as FxNode

from tilewright import config
from tilewright.gemm.cutedsl import toolchain
from tilewright.gemm.cutedsl.kernel import Fused
from tilewright.gemm.cutedsl.resort import Resort
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.cutedsl.template import CuteDSLTemplate, CuteDSLTemplateCaller, Layout
from tilewright.gemm.cutedsl.writer import limits
from tilewright.gemm.problem import GemmProblem, plain
from tilewright.gemm.provider import Argument, Candidate, Effort, Kernel
from tilewright.gemm.roofline import roofline
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, load, var
from tilewright.ir.program import Buffer, Nest, Node, Opaque, Origin, Program, Store, View
from tilewright.lower.context import Lowering
from tilewright.lower.opaque import as_argument
from tilewright.lower.table import OVERRIDES
from tilewright.lower.wrappers import FUNCTIONS
from tilewright.runtime import store
from tilewright.target import Target

log = logging.getLogger("tilewright.choose")
Choose = Callable[..., None]  # (choices, input_nodes, layout, **numbers)


# ---- for users


class lowering:
    """`op` is computed by choices that the function appends, from here on: on cards, where there
    are any. `forget` undoes it; as a context manager it does so by itself."""

    def __init__(self, op: OpOverload) -> None:
        self.op = op

    def __call__(self, choose: Choose) -> Choose:
        if self.op in OVERRIDES:
            raise ValueError(f"{self.op} is computed by templates already: forget it first")
        FUNCTIONS[self.op] = functools.partial(lowered, choose)
        OVERRIDES[self.op] = _digest(choose)
        return choose

    def forget(self) -> None:
        FUNCTIONS.pop(self.op, None)
        OVERRIDES.pop(self.op, None)

    def __enter__(self) -> lowering:
        return self

    def __exit__(self, *error: object) -> None:
        self.forget()


def _digest(choose: Choose) -> str:
    """Of what decides which programs are made: all templates there are, and the function."""
    code = getattr(choose, "__code__", None)
    told = "" if code is None else f"{code.co_code.hex()} {code.co_consts} {code.co_names}"
    return store.key(told, *(t.digest for t in CuteDSLTemplate.all_templates.values()))


def lowered(choose: Choose, ctx: Lowering, node: FxNode, also_operator: bool = False) -> Any:
    """The call as a node that poses a problem of its own, or as if nobody had taken it over."""
    nodes, buffers = len(ctx.program.nodes), set(ctx.program.buffers)
    env = {n: ctx.env[n] for n in node.all_input_nodes}
    found = _posed(choose, ctx, node, also_operator)
    if isinstance(found, str):
        log.debug("%s is not computed by templates: %s", node, found)
        del ctx.program.nodes[nodes:]
        for name in ctx.program.buffers.keys() - buffers:
            del ctx.program.buffers[name]
        ctx.env.update(env)
        return NotImplemented
    return found


def _posed(choose: Choose, ctx: Lowering, node: FxNode, also_operator: bool) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not on_card(value):
        return "templates compute one tensor, on a card"
    if toolchain.why_not():
        return toolchain.why_not()
    views: list[View] = []
    args: list[tuple[str, bool, Any]] = []
    numbers: dict[str, Any] = {}
    schema = cast(OpOverload, node.target)._schema.arguments
    for argument, given in _given(node, schema):
        found = as_argument(ctx, given, any_layout=True) if isinstance(given, FxNode) else given
        if isinstance(found, View):
            args.append((argument.name, argument.kwarg_only, Nth(len(views))))
            views.append(found)
            continue
        if found != argument.default_value:
            numbers[argument.name] = found
        args.append((argument.name, argument.kwarg_only, found))
    try:
        inspect.signature(choose).bind([], views, None, **numbers)
    except TypeError as why:
        return f"the function that offers choices does not take it: {why}"
    size, stride = ctx.sizes.tuple(value.size()), ctx.sizes.tuple(value.stride())
    made = ctx.buffer(size, value.dtype, value.device, stride)
    choices: list[CuteDSLTemplateCaller] = []
    choose(choices, views, Layout(made), **numbers)
    if not choices or any(n is ix.ZERO for n in size):
        return "no template offers a choice"
    mutated = tuple(dict.fromkeys(b for c in choices for b in c.mutated))
    out = View(made.name, made.size, made.stride, ix.ZERO, made.dtype)
    target = TemplateCall(str(node.target), tuple(args), tuple(choices), also_operator)
    ctx.program.nodes.append(Opaque(ctx.fresh("call"), target, tuple(views), {}, (), mutated,
                                    ctx.origin(), out=out))  # fmt: skip
    return ctx.stored(made)


def on_card(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"


def _given(node: FxNode, schema: Sequence[Any]) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for k, argument in enumerate(schema):
        if k < len(node.args):
            found.append((argument, node.args[k]))
        elif argument.name in node.kwargs:
            found.append((argument, node.kwargs[argument.name]))
    return found


@dataclass(frozen=True)
class Nth:
    """In place of a tensor among arguments: which of them."""

    place: int


# ---- the call


@dataclass(eq=False)
class TemplateCall:
    """What the call's node has for a target. Called, it is the operator itself: the reference its
    choices are compared with, and what runs where none can be had."""

    path: str
    args: tuple[tuple[str, bool, Any], ...]  # name, by keyword alone, value
    choices: tuple[CuteDSLTemplateCaller, ...] = ()
    also_operator: bool = False  # the operator is itself a choice

    @property
    def op(self) -> Any:
        return operator.attrgetter(self.path)(torch.ops)

    def plain(self, call: Opaque) -> Opaque:
        """The operator called as if no template were there."""
        views = [v for v in call.args if isinstance(v, View)]
        given = [(name, by_name, views[v.place] if isinstance(v, Nth) else v)
                 for name, by_name, v in self.args]  # fmt: skip
        assert call.out is not None
        return replace(call, target=self.op, out=None, results=(call.out.buffer,),
                       args=tuple(v for _, by_name, v in given if not by_name),
                       kwargs={name: v for name, by_name, v in given if by_name})  # fmt: skip

    def __call__(self, *tensors: torch.Tensor, out: torch.Tensor) -> None:
        op = self.op
        given = [(name, by_name, tensors[v.place] if isinstance(v, Nth) else v)
                 for name, by_name, v in self.args]  # fmt: skip
        out.copy_(op(*(v for _, by_name, v in given if not by_name),
                     **{name: v for name, by_name, v in given if by_name}))  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return TemplateCall, (self.path, self.args)

    def problem(self, program: Program, call: Opaque) -> GemmProblem | str:
        """What is to be computed, in the program's names."""
        out = call.out
        if out is None or not self.choices:
            return "no template offers a choice"
        views = [v for v in call.args if isinstance(v, View)]
        positions = tuple(_variables(f"i{k}_", v.size) for k, v in enumerate(views))
        place = _variables("d", out.size)
        used = {v.buffer for v in views} | {out.buffer}
        rows, columns = ix.product(out.size[:-1]), out.size[-1] if out.size else ix.ONE
        return TemplateProblem(
            cast(Any, self.path), var("batch", ix.ONE), var("m", rows), var("n", columns),
            var("k", ix.ONE),
            tuple(plain(v, at) for v, at in zip(views, positions, strict=True)), out,
            tuple(program.buffers[name] for name in sorted(used)),
            Target.of(program.buffers[out.buffer].device), call=self, at=positions, where=place,
            mutated=tuple(k for k, v in enumerate(views) if v.buffer in call.mutates),
        )  # fmt: skip


def _variables(prefix: str, sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    return tuple(ix.ZERO if n is ix.ONE else var(f"{prefix}{k}", n) for k, n in enumerate(sizes))


@dataclass(frozen=True)
class TemplateProblem(GemmProblem):
    """A call that templates compute, with what is fused to it. Its own loops are those of the
    result; `m`, `n` and `k` are there for what asks how large it is."""

    call: TemplateCall = field(default_factory=lambda: TemplateCall("", ()), compare=False)
    at: tuple[tuple[Expr, ...], ...] = ()
    where: tuple[Expr, ...] = ()
    mutated: tuple[int, ...] = ()

    @property
    def place(self) -> tuple[Expr, ...]:
        return self.where

    @property
    def positions(self) -> tuple[tuple[Expr, ...], ...]:
        return self.at

    @property
    def product(self) -> Expr:
        index = ix.linearize(self.where, self.result.stride, self.result.offset)
        return load(self.result.buffer, self.dtype, index)

    @property
    def out_dtype(self) -> torch.dtype | None:
        return self.dtype  # it is no product that another could be added to

    @property
    def reads_again(self) -> bool:
        return not all(c.template.reads_once for c in self.call.choices)

    @property
    def providers(self) -> tuple[Any, ...]:
        return (PROVIDER,)

    @property
    def library(self) -> Any:
        return Operator(self)

    @property
    def contents(self) -> dict[str, tuple[int, ...]]:
        made = getattr(self.call.choices[0], "contents", None)
        found: dict[int, tuple[int, ...]] = {} if made is None else made()
        return {self.operands[k].view.buffer: values for k, values in found.items()}

    @cached_property
    def writes(self) -> tuple[str, ...]:
        own = (self.result.buffer,) if self.keeps else ()
        others = [self.operands[k].view.buffer for k in self.mutated]
        return tuple(dict.fromkeys((*own, *(s.buffer for s in self.epilogue), *others)))

    def describe(self) -> str:
        told = [self.choice(c, Fused()).hash_key() for c in self.call.choices]
        return "\n".join([super().describe(), str(self.call.args), *told])

    def choice(self, choice: CuteDSLTemplateCaller, fused: Fused) -> CuteDSLTemplateCaller:
        """A choice in the problem's own names."""
        out = self.result
        device = self.memory[out.buffer].device
        layout = Layout(Buffer(out.buffer, out.dtype, device, out.size, out.stride))
        return choice.with_fused(fused, [o.view for o in self.operands], layout, choice.name)

    def nodes(self) -> tuple[Node, ...]:
        """The same as nodes of the IR."""
        made: list[Node] = []
        for k, operand in enumerate(self.operands):
            if not operand.is_plain:
                index = ix.linearize(self.at[k], operand.view.stride, operand.view.offset)
                stored = Store(operand.view.buffer, index, operand.value)
                made.append(Nest(f"operand{k}", _loops(self.at[k]), (), (stored,), Origin(())))
        views = tuple(o.view for o in self.operands)
        made.append(Opaque("call", self.call, views, {}, (), (), Origin(()), out=self.result))
        if self.epilogue:
            made.append(Nest("epilogue", _loops(self.where), (), self.epilogue, Origin(())))
        return tuple(made)

    def __str__(self) -> str:
        size = "x".join(str(ix.likely(n)) for n in self.result.size)
        fused = " + prologue" if any(not o.is_plain for o in self.operands) else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {size} {kind}{fused}{' + epilogue' if self.epilogue else ''}"


def _loops(place: Sequence[Expr]) -> tuple[Expr, ...]:
    return tuple(v for v in place if v.op == "var")


# ---- candidates


@dataclass(frozen=True)
class Operator:
    """The operator itself: what choices are compared with."""

    problem: TemplateProblem
    provider: str = "ATEN"
    description: str = ""

    @property
    def name(self) -> str:
        return self.problem.call.path

    @property
    def estimate(self) -> float:
        return roofline(self.problem)

    @property
    def key(self) -> str:
        return store.key("operator", self.problem.key, torch.__version__)

    def kernel(self) -> Kernel:
        made = Resort.of(self.problem, self.problem.nodes())
        arguments: tuple[Argument, ...] = tuple(
            ("ptr" if n in self.problem.memory else "int", n) for n in made.names)  # fmt: skip
        return Kernel(f"extern_kernels.{self.name}", made, arguments)


@dataclass(frozen=True)
class TemplateCandidate:
    """A choice of the user's, for a problem with all that is fused to it."""

    problem: TemplateProblem
    choice: CuteDSLTemplateCaller
    estimate: float
    provider: str = "CUTEDSL"

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def description(self) -> str:
        return self.choice.description

    @property
    def key(self) -> str:
        return store.key("cutedsl", self.problem.key, self.made.hash_key())

    @cached_property
    def made(self) -> CuteDSLTemplateCaller:
        p = self.problem
        values = {k: o.value for k, o in enumerate(p.operands) if not o.is_plain}
        fused = Fused(values, p.at, p.where, p.product, p.epilogue, p.keeps, p.memory)
        return p.choice(self.choice, fused)

    def apart(self, other: TemplateCandidate) -> str:
        """Why two calls are not one launch, or an empty string."""
        template = self.choice.template
        if not getattr(template, "beside", False):
            return f"the template {template.name} does not run beside itself"
        if template is not other.choice.template or self.choice.params != other.choice.params:
            return "they are not calls of one template with the same parameters"
        return "" if self.problem.key == other.problem.key else "their problems differ"

    def together(self, count: int) -> Kernel:
        """One launch of so many calls with this problem: each has its number behind the names of
        its buffers."""
        made = replace(self.made, instances=count)
        arguments: tuple[Argument, ...] = tuple(a for a, _ in made.rendered().params)
        device = self.problem.memory[self.problem.result.buffer].device.index or 0
        alone = self.kernel()
        assert isinstance(alone.source, CuteSource)
        otherwise = alone.source.otherwise
        apart = None if otherwise is None else Apart(otherwise, _shares(arguments, alone, count))
        source = CuteSource(self.name, made.request(self.problem.target), device, apart)
        return Kernel(f"{alone.name}_x{count}", source, arguments)

    def kernel(self) -> Kernel:
        p, made = self.problem, self.made
        params = [argument for argument, _ in made.rendered().params]
        arguments: tuple[Argument, ...] = tuple(a for a in params if a[0] != "scratch")
        scratch = sum(int(size) for kind, size in params if kind == "scratch")
        device = p.memory[p.result.buffer].device.index or 0
        otherwise = Resort.of(p, p.nodes()).over([name for _, name in arguments])
        label = self.problem.call.path.split(".")[-2] if "." in p.call.path else p.call.path
        fused = "_fused" if p.epilogue or any(not o.is_plain for o in p.operands) else ""
        source = CuteSource(self.name, made.request(p.target), device, otherwise, scratch=scratch)
        return Kernel(f"cutedsl_{made.template.name}{fused}_{label}", source, arguments)


@dataclass(frozen=True)
class Apart:
    """Several calls one after the other, each with its share of the arguments of one launch."""

    call: Callable[..., Any]
    shares: tuple[tuple[int, ...], ...]

    def __call__(self, *args: Any) -> None:
        for share in self.shares:
            self.call(*(args[k] for k in share))


def _shares(
    arguments: Sequence[Argument], alone: Kernel, count: int
) -> tuple[tuple[int, ...], ...]:
    names = [name for _, name in arguments]
    return tuple(tuple(names.index(f"{n}__{k}" if kind == "ptr" else n)
                       for kind, n in alone.arguments) for k in range(count))  # fmt: skip


class _Provider:
    """Of the choices that a call brings along."""

    name = "CUTEDSL"

    def supports(self, problem: GemmProblem) -> str:
        assert isinstance(problem, TemplateProblem)
        if not toolchain.architecture(problem.target):
            return f"the CuTe DSL compiles for no {problem.target.arch}"
        choices = problem.call.choices
        withheld = next((c.withheld for c in choices if c.withheld), "")
        if withheld and not problem.is_bare:
            return withheld
        if problem.epilogue:
            if not all(c.hooked[0] for c in choices):
                return "the template has no store hook"
            if any(s.mode != "set" for s in problem.epilogue):
                return "the epilogue adds to memory"
        for k, operand in enumerate(problem.operands):
            if not operand.is_plain and not all(k in c.hooked[1] for c in choices):
                return f"the template has no load hook for its input {k}"
        exprs = [o.value for o in problem.operands if not o.is_plain]
        return limits([*exprs, *(e for s in problem.epilogue for e in s.exprs)])

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Candidate]:
        assert isinstance(problem, TemplateProblem)
        if self.supports(problem):
            return []
        best = roofline(problem)
        also = problem.call.also_operator and problem.is_bare and _asked("ATEN")
        return [*([Operator(problem)] if also else []),
                *(TemplateCandidate(problem, c, best * (1 + k / 100))
                  for k, c in enumerate(problem.call.choices))]  # fmt: skip


def _asked(name: str) -> bool:
    return name in {b.strip().upper() for b in config.max_autotune_gemm_backends.split(",")}


PROVIDER = _Provider()

__all__ = ["Nth", "TemplateCall", "TemplateProblem", "lowering"]
