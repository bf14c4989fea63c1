"""A kernel, and what the last of its programs does with what all of them made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.codegen.triton.blocks import Config
from tilewright.codegen.triton.facts import imports
from tilewright.codegen.triton.kernel import Kernel
from tilewright.codegen.triton.made import Param, TritonKernel
from tilewright.codegen.triton.parts import COUNTERS
from tilewright.codegen.triton.shape import shape_of
from tilewright.errors import CodegenError
from tilewright.ir.program import Program
from tilewright.schedule.group import Group
from tilewright.target import Target

JIT = "@triton.jit"


def followed(program: Program, first: TritonKernel, then: Group, target: Target, wide: bool
             ) -> TritonKernel:  # fmt: skip
    """`then` has one result, and so one program."""
    shape = shape_of(program, then)
    if isinstance(shape, str):
        raise CodegenError(f"no Triton kernel for this group: {shape}")
    last = Kernel(program, then, shape, target, wide)
    last.early, last.first = False, "pid"
    last.body()
    params, given = _joined(first, last.params())
    checked = first.checked or last.checked
    own, its = _names(first.params, first.checked), _names(last.params(), last.checked)
    body = first.text.partition(JIT)[2].strip().splitlines()[1:]
    lines = [
        *_function("part", own, first.config, body),
        *_function("last", ["pid", *its], last.configs[0], last.w.lines),
        *_function(first.name, _names(params, checked), first.config, [
            _call("part", own, [(b, b) for b, _ in first.config.constants]),
            "    tl.debug_barrier()",
            f"    if tri.part({COUNTERS} + {first.counters}, tl.num_programs(0)) == 0:",
            "        return",
            _call("last", ["tl.program_id(0) * 0", *given, *its[len(given) :]],
                  last.configs[0].constants),
        ]),
    ]  # fmt: skip
    return replace(
        first,
        text="\n".join([*imports(lines), *lines]) + "\n",
        params=params,
        checked=checked,
        assume=tuple(dict.fromkeys((*first.assume, *(last.assume or ())))),
        joins=first.joins and last.joins,
        counters=first.counters + 1,
        in_turn=first.in_turn or not first.counters,
    )


def _names(params: Sequence[Param], checked: bool) -> list[str]:
    return [*(p.argument for p in params), *(["err"] if checked else [])]


def _function(name: str, names: Sequence[str], config: Config, lines: Sequence[str]) -> list[str]:
    head = [*names, *(f"{b}: tl.constexpr" for b, _ in config.constants)]
    return ["", "", JIT, f"def {name}({', '.join(head)}):", *lines]


def _call(name: str, given: Sequence[str], constants: Sequence[tuple[str, object]]) -> str:
    return f"    {name}({', '.join([*given, *(f'{b}={value}' for b, value in constants)])})"


def _joined(first: TritonKernel, others: Sequence[Param]) -> tuple[tuple[Param, ...], list[str]]:
    """The parameters of both, and what those of the other are called among them."""
    found = {p.name: p for p in first.params}
    for p in others:
        found.setdefault(p.name, replace(p, argument=f"last_{p.argument}"))
    if COUNTERS not in found:
        found[COUNTERS] = Param("ptr", COUNTERS, "*i32", COUNTERS, 16)
    return tuple(found.values()), [found[p.name].argument for p in others]
