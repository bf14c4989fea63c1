"""The expression node: equal means identical, through substitution, printing and pickling."""

from __future__ import annotations

import gc
import math
import pickle
import subprocess
import sys

import pytest
import torch

from tilewright.ir import build
from tilewright.ir import expr as ir
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, free_vars, load, substitute, sym, var, walk
from tilewright.ir.show import brief, read_expr, show_expr

F32 = torch.float32
I = var("i", const(8))  # noqa: E741
J = var("j", const(5))
S = sym("s0", lower=2, upper=1000, hint=16)


def _samples() -> list[Expr]:
    x = load("x", F32, ix.add(ix.mul(I, 5), J))
    masked = load("x", F32, I, build.op("lt", I, S))
    welford = build.reduce("welford", x)
    best = build.scan("max", I, x, I)
    return [
        const(3), const(-1), const(True, torch.bool), const(1.5, F32), const(-0.0, F32),
        const(math.nan, F32), const(math.inf, torch.float64), const(-math.inf, F32),
        const(2**63 - 1), const(255, torch.uint8), I, S, x, masked,
        build.op("add", x, build.op("exp", x)), build.cast(x, torch.bfloat16),
        build.op("bitcast", x, arg=torch.int32), build.where(build.op("gt", x, x), x, masked),
        build.part(welford, 1), build.part(best, 1, torch.int64), build.reduce("argmax", x, J),
        ix.floordiv(ix.add(I, S), 3), ix.mod(I, S), ix.minimum(I, S), ix.maximum(J, S),
        build.op("index", load("at", torch.int64, I), S), build.op("rand", S, I, arg=F32),
        sym("f", torch.float64),
    ]  # fmt: skip


SAMPLES = _samples()


def test_equal_is_identical() -> None:
    for a, b in zip(SAMPLES, _samples(), strict=True):
        assert a is b


def test_different_is_different() -> None:
    assert len(set(SAMPLES)) == len(SAMPLES)
    assert len({e.key for e in SAMPLES}) == len(SAMPLES)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (const(0.0, F32), const(-0.0, F32)),
        (const(1), const(1, torch.int32)),
        (const(1), const(True, torch.bool)),
        (const(1, torch.float64), const(1)),
        (const(1.0, F32), const(1.0, torch.float64)),
        (var("i", const(8)), var("i", const(9))),
        (load("x", F32, I), load("y", F32, I)),
        (load("x", F32, I), load("x", F32, I, build.TRUE)),
        (build.reduce("sum", I), build.reduce("prod", I)),
        (sym("s0"), sym("s0", lower=2)),
    ],
)
def test_told_apart(a: Expr, b: Expr) -> None:
    assert a is not b
    assert a.key != b.key


def test_a_nan_equals_itself() -> None:
    assert const(math.nan, F32) is const(float("nan"), F32)
    assert math.copysign(1, const(-0.0, F32).arg) == -1
    assert math.copysign(1, const(0.0, F32).arg) == 1


@pytest.mark.parametrize("e", SAMPLES, ids=lambda e: e.op)
def test_text_evaluates_back(e: Expr) -> None:
    assert read_expr(show_expr(e)) is e
    assert read_expr(repr(e)) is e
    assert brief(e)


@pytest.mark.parametrize("e", SAMPLES, ids=lambda e: e.op)
def test_pickling_gives_the_same_object(e: Expr) -> None:
    assert pickle.loads(pickle.dumps(e)) is e


def test_keys_are_the_same_in_every_process() -> None:
    """Generated text is ordered by them, and the text names the artefact on disk."""
    program = (
        "import sys; from tilewright.ir.show import read_expr\n"
        "for line in sys.stdin: print(read_expr(line).key)"
    )
    text = "\n".join(show_expr(e) for e in SAMPLES)
    done = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [e.key for e in SAMPLES]


def test_unused_nodes_are_collected() -> None:
    gc.collect()
    before = len(ir._interned)
    made = [const(k, torch.int16) for k in range(20_000, 20_500)]
    assert len(ir._interned) >= before + 500
    del made
    gc.collect()
    assert len(ir._interned) < before + 50


def test_substitution_is_simultaneous() -> None:
    a, b = var("a", const(10)), var("b", const(10))
    e = build.op("sub", load("x", F32, a), load("x", F32, b))
    swapped = substitute(e, {a: b, b: a})
    assert swapped is build.op("sub", load("x", F32, b), load("x", F32, a))


def test_substitution_simplifies_again() -> None:
    e = ix.add(ix.mul(ix.floordiv(I, 4), 4), J)
    high = var("h", const(2))
    assert substitute(e, {I: ix.mul(high, 4)}) is ix.add(ix.mul(high, 4), J)
    masked = build.where(build.op("lt", I, const(4)), load("x", F32, I), const(0.0, F32))
    short = var("k", const(4))
    assert substitute(masked, {I: short}) is load("x", F32, short)


def test_substitution_leaves_the_rest_alone() -> None:
    e = load("x", F32, J)
    assert substitute(e, {I: J}) is e
    assert substitute(e, {}) is e


def test_substitution_of_a_whole_load() -> None:
    x = load("x", F32, I)
    e = build.op("add", build.op("exp", x), x)
    one = const(1.0, F32)
    assert substitute(e, {x: one}) is build.op("add", build.op("exp", one), one)


def test_a_variable_does_not_depend_on_its_own_size() -> None:
    inner = var("n", ix.add(S, 1))
    assert free_vars(ix.add(inner, I)) == {inner, I}


def test_walk_gives_sources_first_and_each_once() -> None:
    x = load("x", F32, I)
    e = build.op("mul", build.op("add", x, x), x)
    seen = list(walk(e))
    assert len(seen) == len(set(seen))
    for node in seen:
        assert all(seen.index(s) < seen.index(node) for s in node.src)


def test_long_chains_do_not_overflow_the_stack() -> None:
    e = load("x", F32, I)
    for _ in range(5000):
        e = build.op("sin", e)
    assert sum(1 for _ in walk(e)) >= 5000
    assert substitute(e, {I: J}).op == "sin"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (build.op("mul", load("x", F32, I), const(1.0, F32)), load("x", F32, I)),
        (build.op("div", load("x", F32, I), const(-8.0, F32)),
         build.op("mul", load("x", F32, I), const(-0.125, F32))),
        (build.op("add", load("n", torch.int64, I), const(0)), load("n", torch.int64, I)),
        (build.op("add", const(2.0, F32), const(0.5, F32)), const(2.5, F32)),
        (build.op("add", const(127, torch.int8), const(1, torch.int8)), const(-128, torch.int8)),
        (build.op("mul", const(-1.0, F32), const(0.0, F32)), const(-0.0, F32)),
        (build.where(build.TRUE, I, J), I),
        (build.where(build.op("lt", I, S), J, J), J),
        (build.both(build.TRUE, build.op("lt", I, S)), build.op("lt", I, S)),
        (build.op("lt", I, const(8)), build.TRUE),
        (build.op("lt", I, const(0)), build.FALSE),
        (build.op("index", I, const(8)), I),
        (build.cast(build.cast(load("h", torch.float16, I), F32), torch.float16),
         load("h", torch.float16, I)),
    ],
)  # fmt: skip
def test_simplified(made: Expr, expected: Expr) -> None:
    assert made is expected


def test_not_simplified_where_a_value_would_change() -> None:
    x = load("x", F32, I)
    assert build.op("add", x, const(0.0, F32)).op == "add"  # -0.0 + 0.0 is 0.0
    assert build.op("mul", x, const(0.0, F32)).op == "mul"  # inf * 0 is NaN
    assert build.op("div", x, const(3.0, F32)).op == "div"
    assert build.op("div", x, const(2.0**-20, F32)).op == "div"  # more than a half can be
    assert build.op("sub", x, x).op == "sub"
    assert build.cast(build.cast(x, torch.bfloat16), F32).op == "cast"  # it rounds
    assert build.op("floordiv", const(1), const(0)).op == "floordiv"  # an error when it runs


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_of_eight_bit_floats(narrow: torch.dtype) -> None:
    e = build.cast(build.cast(load("x", narrow, I), torch.float32), torch.bfloat16)
    assert e.dtype == torch.bfloat16
