"""The integer algebra: canonical forms, and random expressions against plain arithmetic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, sym, var

A = var("a", const(6))
B = var("b", const(4))
C = var("c", const(10))
N = sym("n", lower=2, upper=9)
M = sym("m", lower=1, upper=5)
I = var("i", N)  # noqa: E741
J = var("j", M)


def flat(*terms: tuple[Expr, int]) -> Expr:
    return ix.add(*(ix.mul(e, c) for e, c in terms))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (ix.add(A, 0), A),
        (ix.add(A, B), ix.add(B, A)),
        (ix.sub(A, A), ix.ZERO),
        (ix.mul(A, 0), ix.ZERO),
        (ix.mul(ix.add(A, 1), ix.sub(A, 1)), ix.sub(ix.mul(A, A), 1)),
        (ix.mul(N, ix.add(I, 1)), ix.add(ix.mul(I, N), N)),
        # quotients and remainders of indices inside their loops vanish
        (ix.floordiv(flat((A, 4), (B, 1)), 4), A),
        (ix.mod(flat((A, 4), (B, 1)), 4), B),
        (ix.floordiv(ix.add(ix.mul(I, M), J), M), I),
        (ix.mod(ix.add(ix.mul(I, M), J), M), J),
        (ix.floordiv(B, 4), ix.ZERO),
        (ix.mod(B, 4), B),
        (ix.floordiv(flat((A, 8), (B, 2)), 4), ix.add(ix.mul(A, 2), ix.floordiv(B, 2))),
        (ix.mod(flat((A, 8), (B, 2)), 4), ix.mul(ix.mod(B, 2), 2)),
        (ix.floordiv(ix.floordiv(C, 2), 3), ix.floordiv(C, 6)),
        (ix.mod(ix.mod(C, 6), 3), ix.mod(C, 3)),
        (ix.floordiv(const(-7), 2), const(-4)),
        (ix.mod(const(-7), 2), const(1)),
        (ix.mod(ix.mul(A, 4), 4), ix.ZERO),
        (ix.floordiv(A, 1), A),
        (ix.mod(A, 1), ix.ZERO),
        # a reshape there and back leaves no trace
        (ix.add(ix.mul(ix.floordiv(C, 3), 3), ix.mod(C, 3)), C),
        (ix.add(ix.mul(ix.floordiv(I, M), M), ix.mod(I, M)), I),
        (flat((ix.floordiv(C, 3), 6), (ix.mod(C, 3), 2), (A, 1)), flat((C, 2), (A, 1))),
        # extremes
        (ix.minimum(A, 10), A),
        (ix.maximum(A, 10), const(10)),
        (ix.maximum(N, 1), N),
        (ix.minimum(I, ix.sub(N, 1)), I),
        (ix.minimum(A, A), A),
        # sizes
        (ix.product((N, 2, N)), ix.mul(N, N, 2)),
        (ix.contiguous_strides((const(3), N, const(4)))[0], ix.mul(N, 4)),
        (ix.settled_strides((ix.ONE, N), (ix.ZERO, const(2)))[0], ix.mul(N, 2)),
        (ix.settled_strides((N, ix.ONE), (const(3), ix.ZERO))[1], ix.ONE),
    ],
)
def test_canonical(made: Expr, expected: Expr) -> None:
    assert made is expected


@pytest.mark.parametrize(
    "made",
    [
        ix.floordiv(C, 3),
        ix.mod(C, N),
        ix.floordiv(ix.add(A, B), 4),
        ix.minimum(A, B),
        ix.maximum(A, N),
        ix.add(ix.mul(ix.floordiv(C, 3), 3), ix.mod(C, 4)),
    ],
)
def test_kept(made: Expr) -> None:
    """What is not always equal to something simpler stays."""
    assert any(e.op in ("ifloordiv", "imod", "imin", "imax") for e in (made, *made.src))


def test_strides_of_an_index() -> None:
    e = ix.add(ix.mul(I, M), ix.mul(J, 3), ix.mul(A, B), 7)
    assert ix.coefficient(e, I) is M
    assert ix.coefficient(e, J) is const(3)
    assert ix.coefficient(e, A) is B
    assert ix.coefficient(e, C) is ix.ZERO
    assert ix.coefficient(ix.mul(A, A), A) is None
    assert ix.coefficient(ix.floordiv(C, 3), C) is None
    assert ix.without(e, [I, J, A]) is const(7)


@pytest.mark.parametrize(
    ("steps", "reach", "apart"),
    [
        ([(4, 6), (1, 4)], 0, True),
        ([(1, 4), (4, 6)], 0, True),
        ([(3, 6), (1, 4)], 0, False),
        ([(1, 5), (1, 5)], 0, False),
        ([(0, 5)], 0, False),
        ([(0, 1), (1, 5)], 0, True),
        ([(8, 5)], 7, True),
        ([(8, 5)], 8, False),
        ([(8, 2), (10, 2)], 3, False),  # 8 and 10 are only two apart
        ([(-4, 6), (1, 4)], 0, True),
        ([(M, N), (1, M)], 0, True),
        ([(N, M), (1, M)], 0, False),  # m may exceed n
        ([(ix.mul(N, M), 3), (M, N), (1, M)], 0, True),
    ],
)
def test_separate(steps: list[tuple[ix.IndexLike, ix.IndexLike]], reach: int, apart: bool) -> None:
    pairs = [(ix.as_index(s), ix.as_index(n)) for s, n in steps]
    assert ix.separate(pairs, const(reach)) is apart


# ---- random expressions

Point = dict[Expr, int]
Meaning = Callable[[Point], int]
LEAVES = (A, B, C, I, J, N, M)


def grow(rng: random.Random, depth: int) -> tuple[Expr, Meaning]:
    """A simplified expression, and what it means by Python's own arithmetic."""
    if depth == 0 or rng.random() < 0.15:
        if rng.random() < 0.25:
            k = rng.randint(-4, 12)
            return const(k), lambda point: k
        leaf = rng.choice(LEAVES)
        return leaf, lambda point: point[leaf]
    a, f = grow(rng, depth - 1)
    b, g = grow(rng, depth - 1)
    match rng.choice(("add", "add", "sub", "mul", "scale", "div", "mod", "divsym", "modsym",
                      "min", "max")):  # fmt: skip
        case "add":
            return ix.add(a, b), lambda p: f(p) + g(p)
        case "sub":
            return ix.sub(a, b), lambda p: f(p) - g(p)
        case "mul":
            return ix.mul(a, b), lambda p: f(p) * g(p)
        case "scale":
            c = rng.randint(-3, 8)
            return ix.mul(a, c), lambda p: f(p) * c
        case "div":
            c = rng.choice((1, 2, 3, 4, 6, 8))
            return ix.floordiv(a, c), lambda p: f(p) // c
        case "mod":
            c = rng.choice((1, 2, 3, 4, 6, 8))
            return ix.mod(a, c), lambda p: f(p) % c
        case "divsym":
            s = rng.choice((N, M))
            return ix.floordiv(a, s), lambda p: f(p) // p[s]
        case "modsym":
            s = rng.choice((N, M))
            return ix.mod(a, s), lambda p: f(p) % p[s]
        case "min":
            return ix.minimum(a, b), lambda p: min(f(p), g(p))
        case _:
            return ix.maximum(a, b), lambda p: max(f(p), g(p))


def evaluate(e: Expr, point: Point) -> int:
    if e.op == "const":
        return e.arg
    if e in point:
        return point[e]
    src = [evaluate(s, point) for s in e.src]
    match e.op:
        case "iadd":
            return sum(src)
        case "imul":
            total = 1
            for s in src:
                total *= s
            return total
        case "ifloordiv":
            return src[0] // src[1]
        case "imod":
            return src[0] % src[1]
        case "imin":
            return min(src)
        case "imax":
            return max(src)
        case op:
            raise AssertionError(op)


def points(rng: random.Random, count: int) -> Iterator[Point]:
    """The corners of the domain, and random points inside."""
    corners = itertools.product((2, 9), (1, 5), (0, 5), (0, 3), (0, 9), (0, 1), (0, 1))
    for n, m, a, b, c, i, j in corners:
        yield {N: n, M: m, A: a, B: b, C: c, I: i * (n - 1), J: j * (m - 1)}
    for _ in range(count):
        n, m = rng.randint(2, 9), rng.randint(1, 5)
        yield {N: n, M: m, A: rng.randrange(6), B: rng.randrange(4), C: rng.randrange(10),
               I: rng.randrange(n), J: rng.randrange(m)}  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_random_expressions_keep_their_value_and_bounds(seed: int) -> None:
    rng = random.Random(seed)
    e, meaning = grow(rng, 4)
    low, high = ix.bounds(e)
    nonneg = ix.known_nonneg(e)
    for point in points(rng, 60):
        value = evaluate(e, point)
        assert value == meaning(point), (e, point)
        assert low <= value <= high, (e, point)
        assert value >= 0 or not nonneg, (e, point)


@pytest.mark.parametrize("seed", range(100))
def test_known_le_is_true_everywhere(seed: int) -> None:
    rng = random.Random(1000 + seed)
    a, f = grow(rng, 3)
    b, g = grow(rng, 2)
    le, lt = ix.known_le(a, b), ix.known_lt(a, b)
    for point in points(rng, 40):
        assert f(point) <= g(point) or not le, (a, b, point)
        assert f(point) < g(point) or not lt, (a, b, point)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        (ix.add(ix.mul(I, M), J), ix.mul(N, M)),
        (I, N),
        (ix.add(ix.mul(A, 4), B), const(24)),
        (ix.floordiv(C, 3), const(4)),
        (ix.mod(C, N), N),
        (ix.sub(ix.sub(N, 1), I), N),
        (ix.add(ix.mul(ix.add(ix.mul(I, M), J), 4), B), ix.mul(N, M, 4)),
    ],
)
def test_known_lt_proves_what_lowering_needs(smaller: Expr, larger: Expr) -> None:
    assert ix.known_lt(smaller, larger)
    assert ix.known_nonneg(smaller)


@pytest.mark.parametrize("seed", range(60))
def test_substitution_keeps_the_value(seed: int) -> None:
    """Rebuilding over other sources simplifies again, and must mean the same."""
    from tilewright.ir.expr import substitute

    rng = random.Random(2000 + seed)
    e, meaning = grow(rng, 4)
    outer, inner = var("o", const(3)), var("k", const(2))
    replaced = substitute(e, {A: ix.add(ix.mul(outer, 2), inner)})
    for point in points(rng, 10):
        for o, k in itertools.product(range(3), range(2)):
            there = {**point, outer: o, inner: k}
            assert evaluate(replaced, there) == meaning({**point, A: 2 * o + k}), (e, replaced)
