"""A kernel, and what the last of its programs does with what all of them made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.codegen.triton.blocks import Config, power
from tilewright.codegen.triton.configs import configs
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
BARRIER = "    tl.debug_barrier()"


def followed(program: Program, first: TritonKernel, others: Sequence[Group], target: Target,
             wide: bool) -> TritonKernel:  # fmt: skip
    """The others are small: each is one program's."""
    warps = max(c.num_warps for c in first.configs)
    made = [_alone(program, group, target, wide, warps) for group in others]
    params = _joined(first, made)
    name_of = {p.name: p.argument for p in params}
    checked = first.checked or any(k.checked for k in made)
    own = _names(first.params, first.checked)
    body = first.text.partition(JIT)[2].strip().split("\n")[1:]
    lines = _function("part", own, first.config, body)
    calls = [_call("part", own, [(b, b) for b, _ in first.config.constants]), BARRIER,
             f"    if tri.part({COUNTERS} + {first.counters}, tl.num_programs(0)) == 0:",
             "        return"]  # fmt: skip
    for k, kernel in enumerate(made):
        name, config, its = f"last{k}", kernel.configs[0], kernel.params()
        lines += _function(name, ["pid", *_names(its, kernel.checked)], config, kernel.w.lines)
        given = [name_of[p.name] for p in its] + (["err"] if kernel.checked else [])
        calls += [BARRIER] * (k > 0)
        calls.append(_call(name, ["tl.program_id(0) * 0", *given], config.constants))
    lines += _function(first.name, _names(params, checked), first.config, calls)
    return replace(
        first,
        text="\n".join([*imports(lines), *lines]) + "\n",
        params=params,
        checked=checked,
        assume=tuple(dict.fromkeys(e for found in (first.assume, *(k.assume or () for k in made))
                                   for e in found)),
        joins=first.joins and all(k.joins for k in made),
        counters=first.counters + 1,
        in_turn=first.in_turn or not first.counters,
    )  # fmt: skip


def _alone(program: Program, group: Group, target: Target, wide: bool, warps: int) -> Kernel:
    """The kernel of a group, all of it in one block of each axis, by so many warps."""
    shape = shape_of(program, group)
    if isinstance(shape, str):
        raise CodegenError(f"no Triton kernel for this group: {shape}")
    chosen = configs(program, shape, target)[0]
    whole = {a.block: power(a.size or 1) for a in shape.parallel}
    blocks = tuple((b, whole.get(b, size)) for b, size in chosen.blocks)
    chosen = replace(chosen, blocks=blocks, num_warps=warps)
    made = Kernel(program, group, shape, target, wide, (chosen,))
    made.early, made.first = False, "pid"
    made.body()
    return made


def _names(params: Sequence[Param], checked: bool) -> list[str]:
    return [*(p.argument for p in params), *(["err"] if checked else [])]


def _function(name: str, names: Sequence[str], config: Config, lines: Sequence[str]) -> list[str]:
    head = [*names, *(f"{b}: tl.constexpr" for b, _ in config.constants)]
    return ["", "", JIT, f"def {name}({', '.join(head)}):", *lines]


def _call(name: str, given: Sequence[str], constants: Sequence[tuple[str, object]]) -> str:
    return f"    {name}({', '.join([*given, *(f'{b}={value}' for b, value in constants)])})"


def _joined(first: TritonKernel, others: Sequence[Kernel]) -> tuple[Param, ...]:
    """The parameters of all, each once."""
    found = {p.name: p for p in first.params}
    for k, kernel in enumerate(others):
        for p in kernel.params():
            found.setdefault(p.name, replace(p, argument=f"last{k}_{p.argument}"))
    found.setdefault(COUNTERS, Param("ptr", COUNTERS, "*i32", COUNTERS, 16))
    return tuple(found.values())
