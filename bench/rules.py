"""`python -m bench.rules`: the timed rules of the compiler, and what their evidence still says.

    python -m bench.rules [NAMES]            # what is preferred when, and which programs show it
    python -m bench.rules --check [NAMES]    # without a card: does each rule decide its programs
    python -m bench.rules --replay [NAMES]   # on a card: times them without the rule and with it

A program of evidence is an expression of `torch` and `torch.nn.functional`; `f32(2, 3)` and its
like are its inputs, and `places(5, 9)` are five integers below nine. NAMES are what names of rules
begin with.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.pretend import cuda

if "--replay" not in sys.argv:
    cuda("sm_90")  # before torch is imported

import torch
import torch.nn.functional as functional

from bench.gpu_memory import OURS, measured
from bench.gpu_programs import GpuProgram, integers, randn
from bench.kernels import copy_bandwidth
from tilewright import config, rules
from tilewright.rules import Rule, Timing
from tilewright.testing import limited

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
INPUTS = (*FLOATS, "i8", "places")
NAMESPACE = {**vars(torch), **vars(functional)}


def named(begin: Sequence[str] = ()) -> dict[str, Rule]:
    """The rules whose names begin so, all if nothing is said."""
    every = {name: rule for name, rule in vars(rules).items() if isinstance(rule, Rule)}
    return {n: rule for n, rule in every.items() if not begin or n.startswith(tuple(begin))}


# ---- programs


class _Inputs(ast.NodeTransformer):
    """Takes the inputs out of an expression."""

    def __init__(self) -> None:
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id in INPUTS:
            self.found.append((node.func.id, tuple(ast.literal_eval(a) for a in node.args)))
            return ast.Name(f"t{len(self.found) - 1}", ast.Load())
        self.generic_visit(node)
        return node


def _input(kind: str, sizes: tuple[int, ...]) -> torch.Tensor:
    if kind == "places":
        return integers(sizes[1], sizes[0])
    if kind == "i8":
        return integers(127, *sizes).to(torch.int8)
    return randn(*sizes, dtype=FLOATS[kind])


def program(timing: Timing) -> GpuProgram:
    """What was timed, with its inputs."""
    taken = _Inputs()
    body = ast.unparse(taken.visit(ast.parse(timing.program, mode="eval")))
    arguments = ", ".join(f"t{k}" for k in range(len(taken.found)))
    fn: Callable[..., Any] = eval(f"lambda {arguments}: {body}", dict(NAMESPACE))
    return GpuProgram(timing.program, fn, lambda: tuple(_input(*one) for one in taken.found))


# ---- without a card, and with one


def decides(name: str, timing: Timing) -> bool:
    """Whether the kernels of a program on the card it was timed on are others without the rule."""
    from bench.gate import kept  # believes in a card

    limit = getattr(rules, name).without(timing)
    assert limit is not None, f"{name}: the limit of the time before is not known"
    with_rule = kept(program(timing), ("sm_90",))
    with limited(name, limit):
        return kept(program(timing), ("sm_90",)) != with_rule


def timed(name: str, timing: Timing, bandwidth: float) -> tuple[float | str, float | str]:
    """Microseconds without the rule and with it, on this card."""
    found: list[float | str] = []
    rule = getattr(rules, name)
    for limit in (rule.without(timing), rule.limit):
        with limited(name, limit), config.patch({"force_disable_caches": True}):
            found.append(measured(program(timing), [OURS], bandwidth)[OURS])
    return found[0], found[1]


def shown(name: str, rule: Rule) -> Iterator[str]:
    yield f"{name}: {rule}"
    for t in rule.evidence:
        where = f"{t.on.card}, {t.on.versions}, {t.on.date}"
        yield f"    {t.program}: {t.before:g} -> {t.after:g} us ({where})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="what names of rules begin with; all")
    parser.add_argument("--check", action="store_true", help="whether rules decide their programs")
    parser.add_argument("--replay", action="store_true", help="time them on this card")
    options = parser.parse_args()
    found = named(options.names) or parser.error("no rule has a name that begins so")
    bandwidth = copy_bandwidth() if options.replay else 0.0
    stale = 0
    for name, rule in found.items():
        print("\n".join(shown(name, rule)), flush=True)
        for t in rule.evidence:
            if options.check and not decides(name, t):
                stale += 1
                print(f"    STALE: the kernels of {t.program} are the same without it", flush=True)
            elif options.replay:
                before, after = timed(name, t, bandwidth)
                print(f"    now {before} -> {after} us: {t.program}", flush=True)
    proven = sum(bool(rule.evidence) for rule in found.values())
    print(f"{len(found)} rules, {proven} of them with programs; {stale} are stale")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
