"""Integer algebra for sizes, strides and indices.

An index is kept as a polynomial with integer coefficients over atoms: loop variables, size symbols,
quotients, remainders, and any integer value (a gathered index). Every constructor returns the
canonical form, so two indices are equal exactly when they are the same object.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from tilewright.ir.expr import INDEX, REBUILD, Expr, const, free_vars, make, substitute, syms
from tilewright.ir.ops import INDEX_OPS

Monomial = tuple[Expr, ...]
Poly = dict[Monomial, int]
Bounds = tuple[float, float]  # ints, or infinities where nothing is known

ZERO, ONE = const(0), const(1)
MOST_TERMS = 20  # of a sum whose sign is looked for: a proof about more takes seconds
IndexLike = Expr | int


@functools.lru_cache(1 << 12)
def literal(value: int) -> Expr:
    return const(value)


def as_index(value: IndexLike) -> Expr:
    return value if isinstance(value, Expr) else literal(value)


def value_of(e: Expr) -> int | None:
    """The integer, if `e` is a literal."""
    return e.arg if e.op == "const" else None


# ---- polynomials


def poly(e: Expr) -> Poly:
    return e.memo("poly", _poly)


def _poly(e: Expr) -> Poly:
    if e.op == "const":
        return {(): e.arg} if e.arg else {}
    if e.op == "iadd":
        return {m: c for term in e.src for m, c in _poly(term).items()}
    if e.op == "imul":
        return {tuple(s for s in e.src if s.op != "const"):
                math.prod(s.arg for s in e.src if s.op == "const")}  # fmt: skip
    return {(e,): 1}


def _order(atom: Expr) -> tuple[int, str]:
    if atom.op == "var":
        return 0, atom.arg
    return (1, atom.arg.name) if atom.op == "sym" else (2, atom.key)


def _monomial(atoms: Iterable[Expr]) -> Monomial:
    return tuple(sorted(atoms, key=_order))


def from_poly(p: Poly) -> Expr:
    """The canonical expression: terms sorted, the literal last."""
    p = _join_divmod({m: c for m, c in p.items() if c})
    terms: list[Expr] = []
    for monomial in sorted((m for m in p if m), key=lambda m: [_order(a) for a in m]):
        coefficient = p[monomial]
        factors = monomial if coefficient == 1 else (*monomial, literal(coefficient))
        terms.append(factors[0] if len(factors) == 1 else make("imul", INDEX, factors))
    if () in p:
        terms.append(literal(p[()]))
    if not terms:
        return ZERO
    return terms[0] if len(terms) == 1 else make("iadd", INDEX, tuple(terms))


def _join_divmod(p: Poly) -> Poly:
    """`k*c*(x//c) + k*(x%c)` is `k*x`: reshaping there and back leaves no trace."""
    for monomial in [m for m in p if any(a.op == "imod" for a in m)]:
        for atom in monomial:
            if atom.op != "imod" or monomial not in p:
                continue
            x = atom.src[0]
            rest = list(monomial)
            rest.remove(atom)
            whole: Expr = atom.memo("whole", _whole)
            target = poly(mul(whole, *rest) if rest else whole)
            k = p[monomial]
            if not target or any(p.get(m, 0) != k * v for m, v in target.items()):
                continue
            for m in target:
                del p[m]
            del p[monomial]
            for m, v in poly(mul(x, *rest)).items():
                p[m] = p.get(m, 0) + k * v
            return _join_divmod({m: v for m, v in p.items() if v})
    return p


def _whole(remainder: Expr) -> Expr:
    """What a remainder is left of: `c*(x//c)` of `x%c`."""
    x, c = remainder.src
    return mul(floordiv(x, c), c)


def add(*terms: IndexLike) -> Expr:
    total: Poly = {}
    for term in terms:
        for m, c in poly(as_index(term)).items():
            total[m] = total.get(m, 0) + c
    return from_poly(total)


def mul(*factors: IndexLike) -> Expr:
    total: Poly = {(): 1}
    for factor in factors:
        p = poly(as_index(factor))
        if not p.keys() - {()}:
            total = _scaled(total, p.get((), 0))
            continue
        if total.keys() == {()}:
            total = _scaled(p, total[()])
            continue
        product: Poly = {}
        for m1, c1 in total.items():
            for m2, c2 in p.items():
                m = _monomial((*m1, *m2))
                product[m] = product.get(m, 0) + c1 * c2
        total = product
    return from_poly(total)


def _scaled(p: Poly, by: int) -> Poly:
    return {m: c * by for m, c in p.items()} if by else {}


def neg(a: IndexLike) -> Expr:
    return from_poly(_scaled(poly(as_index(a)), -1))


def sub(a: IndexLike, b: IndexLike) -> Expr:
    return from_poly(_difference(a, b))


def _difference(a: IndexLike, b: IndexLike) -> Poly:
    total = dict(poly(as_index(a)))
    for m, c in poly(as_index(b)).items():
        total[m] = total.get(m, 0) - c
    return total


def product(sizes: Iterable[IndexLike]) -> Expr:
    return mul(1, *sizes)


# ---- quotient and remainder (floored, as Python's)


def _split(a: Poly, divisor: Poly) -> tuple[Poly, Poly]:
    """`a = quotient * divisor + rest`, taking the terms that a one-term divisor divides."""
    if len(divisor) != 1:
        return ({(): 1}, {}) if a == divisor else ({}, a)
    ((atoms, c),) = divisor.items()
    quotient: Poly = {}
    rest: Poly = {}
    for monomial, coefficient in a.items():
        remaining = list(monomial)
        for atom in atoms:
            if atom not in remaining:
                break
            remaining.remove(atom)
        else:
            if coefficient % c == 0:
                quotient[tuple(remaining)] = coefficient // c
                continue
            if not atoms and not monomial:  # a literal over a literal: keep the remainder small
                quotient[()], rest[()] = divmod(coefficient, c)
                continue
        rest[monomial] = coefficient
    return quotient, rest


def floordiv(a: IndexLike, b: IndexLike) -> Expr:
    a, b = as_index(a), as_index(b)
    if b is ONE or a is ZERO:
        return a
    if a.op == "const" and b.op == "const" and b.arg:
        return const(a.arg // b.arg)
    quotient, rest_poly = _split(poly(a), poly(b))
    rest = from_poly(rest_poly)
    if _within(rest, b):
        return from_poly(quotient)
    return add(from_poly(quotient), _reduced_div(rest, b))


def _reduced_div(rest: Expr, b: Expr) -> Expr:
    divisor = value_of(b)
    if divisor is not None and divisor > 0:
        p = poly(rest)
        g = math.gcd(divisor, *(c for m, c in p.items() if m))
        if g > 1:
            smaller = from_poly({m: c // g for m, c in p.items()})
            return floordiv(smaller, divisor // g)
        if rest.op == "ifloordiv" and (value_of(rest.src[1]) or 0) > 0:
            return floordiv(rest.src[0], mul(rest.src[1], b))
    return make("ifloordiv", INDEX, (rest, b))


def mod(a: IndexLike, b: IndexLike) -> Expr:
    a, b = as_index(a), as_index(b)
    if b is ONE or a is ZERO:
        return ZERO
    if a.op == "const" and b.op == "const" and b.arg:
        return const(a.arg % b.arg)
    rest = from_poly(_split(poly(a), poly(b))[1])
    if _within(rest, b):
        return rest
    divisor = value_of(b)
    if divisor is not None and divisor > 0:
        p = poly(rest)
        g = math.gcd(divisor, *p.values())
        if g > 1:
            return mul(mod(from_poly({m: c // g for m, c in p.items()}), divisor // g), g)
        if rest.op == "imod" and (value_of(rest.src[1]) or 1) % divisor == 0:
            return mod(rest.src[0], b)
    return make("imod", INDEX, (rest, b))


def minimum(a: IndexLike, b: IndexLike) -> Expr:
    a, b = as_index(a), as_index(b)
    if known_le(a, b):
        return a
    return b if known_le(b, a) else make("imin", INDEX, (a, b))


def maximum(a: IndexLike, b: IndexLike) -> Expr:
    a, b = as_index(a), as_index(b)
    if known_le(a, b):
        return b
    return a if known_le(b, a) else make("imax", INDEX, (a, b))


# ---- bounds


def bounds(e: Expr) -> Bounds:
    """What values `e` can take, from the ranges of its variables and symbols."""
    return e.memo("bounds", _bounds)


def _bounds(e: Expr) -> Bounds:
    match e.op:
        case "const":
            return e.arg, e.arg
        case "var":
            return 0, max(bounds(e.src[0])[1] - 1, 0)
        case "sym":
            lower, upper = e.arg.lower, e.arg.upper
            return -math.inf if lower is None else lower, math.inf if upper is None else upper
        case "iadd":
            parts = [bounds(s) for s in e.src]
            return sum(p[0] for p in parts), sum(p[1] for p in parts)
        case "imul":
            result: Bounds = (1, 1)
            for s in e.src:
                result = _product_bounds(result, bounds(s))
            return result
        case "ifloordiv":
            return _div_bounds(bounds(e.src[0]), bounds(e.src[1]))
        case "imod":
            divisor = bounds(e.src[1])
            return (0, divisor[1] - 1) if divisor[0] > 0 else (-math.inf, math.inf)
        case "imin":
            (l1, h1), (l2, h2) = bounds(e.src[0]), bounds(e.src[1])
            return min(l1, l2), min(h1, h2)
        case "imax":
            (l1, h1), (l2, h2) = bounds(e.src[0]), bounds(e.src[1])
            return max(l1, l2), max(h1, h2)
        case "index":  # a checked index is inside its table
            return 0, max(bounds(e.src[1])[1] - 1, 0)
        case _:
            return -math.inf, math.inf


def _times(a: float, b: float) -> float:
    return 0 if a == 0 or b == 0 else a * b


def _product_bounds(a: Bounds, b: Bounds) -> Bounds:
    corners = [_times(x, y) for x in a for y in b]
    return min(corners), max(corners)


def _div_bounds(a: Bounds, b: Bounds) -> Bounds:
    if b[0] <= 0:
        return -math.inf, math.inf
    corners = [x if math.isinf(x) else (0 if math.isinf(y) and x >= 0 else
               -1 if math.isinf(y) else x // y) for x in a for y in b]  # fmt: skip
    return min(corners), max(corners)


def known_nonneg(e: Expr) -> bool:
    """Whether `e >= 0` everywhere; what has a known range is put at its worst."""
    return _known_nonneg(e)


@functools.lru_cache(1 << 16)  # not a memo of the node: most of these are made for one question
def _known_nonneg(e: Expr) -> bool:
    if bounds(e)[0] >= 0:
        return True
    p = poly(e)
    if _is_plain(p) or len(p) > MOST_TERMS:
        return False
    # One atom after the other, without going back: symbols last, as the ends of variables are
    # made of them. Trying every order would find little more and take exponential time.
    atoms = {a for m in p for a in m}
    for atom in sorted(atoms, key=lambda a: (a.op == "sym", _order(a))):
        low, high = _ends(atom)
        if (low is None and high is None) or any(m.count(atom) > 1 for m in p):
            continue
        if any(atom not in m and any(atom in free_vars(a) for a in m) for m in p):
            continue
        slope = from_poly({tuple(a for a in m if a is not atom): c for m, c in p.items()
                           if atom in m})  # fmt: skip
        rest = from_poly({m: c for m, c in p.items() if atom not in m})
        for end, sign in ((low, slope), (high, neg(slope))):
            if end is not None and known_nonneg(sign):
                return known_nonneg(add(rest, mul(slope, end)))
    return False


def _ends(atom: Expr) -> tuple[Expr | None, Expr | None]:
    """The least and the greatest value, as expressions; None where unknown."""
    match atom.op:
        case "var":
            return ZERO, sub(atom.src[0], 1)
        case "sym":
            low, high = atom.arg.lower, atom.arg.upper
            return None if low is None else const(low), None if high is None else const(high)
        case "imod" if bounds(atom.src[1])[0] > 0:
            return ZERO, sub(atom.src[1], 1)
        case "index":
            return ZERO, sub(atom.src[1], 1)
        case "ifloordiv" if bounds(atom.src[1])[0] >= 1 and bounds(atom.src[0])[0] >= 0:
            return ZERO, atom.src[0]
        case _:
            return None, None


def _is_plain(p: Poly) -> bool:
    """Whether no two factors meet and every end is a literal: then bounds say all there is."""
    for m in p:
        if len(m) > 1:
            return False
        for atom in m:
            if atom.op == "sym" or (atom.op in ("var", "imod", "index")
                                    and atom.src[-1].op != "const"):  # fmt: skip
                return False
    return True


def known_le(a: IndexLike, b: IndexLike) -> bool:
    return _nonneg(_difference(b, a))


def known_lt(a: IndexLike, b: IndexLike) -> bool:
    distance = _difference(b, a)
    distance[()] = distance.get((), 0) - 1
    return _nonneg(distance)


def _nonneg(p: Poly) -> bool:
    """`known_nonneg` of a polynomial, which mostly is told without making an expression of it."""
    if _is_plain(p):
        low: float = 0
        for m, c in p.items():
            if not m or not c:
                low += c
                continue
            ends = bounds(m[0])
            low += _times(c, ends[0] if c > 0 else ends[1])
        if low >= 0 or not any(a.op == "imod" for m in p for a in m):
            return low >= 0
    return known_nonneg(from_poly(p))


def _within(rest: Expr, b: Expr) -> bool:
    return known_nonneg(rest) and known_lt(rest, b)


_supposed: ContextVar[Mapping[str, int] | None] = ContextVar("supposed sizes", default=None)


@contextmanager
def supposing(sizes: Mapping[str, int] | None) -> Generator[None]:
    """Inside, symbols of these names are likely to have these values; with None, their own."""
    token = _supposed.set(sizes)
    try:
        yield
    finally:
        _supposed.reset(token)


def supposed() -> Mapping[str, int]:
    """What `supposing` says at this moment."""
    return _supposed.get() or {}


def likely(e: Expr) -> int:
    """A typical value: symbols count as the sizes the graph was traced with, or as 64, unless
    something else is supposed."""
    if e.op == "const":
        return e.arg
    parts = [likely(s) for s in e.src] if e.op in INDEX_OPS else []
    match e.op:
        case "sym":
            own = 64 if e.arg.hint is None else e.arg.hint
            return supposed().get(e.arg.name, own)
        case "var":  # in the size of a loop inside it: that of the first round
            return 0
        case "iadd":
            return sum(parts)
        case "imul":
            return math.prod(parts)
        case "ifloordiv" if parts[1]:
            return parts[0] // parts[1]
        case "imod" if parts[1]:
            return parts[0] % parts[1]
        case "imin":
            return min(parts)
        case "imax":
            return max(parts)
        case _:
            return 64


def evaluate(e: Expr, sizes: Mapping[str, int]) -> int:
    """The value of an index without loops, given those of its symbols."""
    value = value_of(substitute(e, {s: const(sizes[s.arg.name]) for s in syms(e)}))
    assert value is not None, e
    return value


# ---- reading an index as an access


def coefficient(e: Expr, v: Expr) -> Expr | None:
    """The stride of `e` along variable `v`: an expression without `v`, or None if not affine."""
    slope: Poly = {}
    for m, c in poly(e).items():
        if v in m:
            rest = list(m)
            rest.remove(v)
            if any(v in free_vars(a) for a in rest):
                return None
            slope[tuple(rest)] = c
        elif any(v in free_vars(a) for a in m):
            return None
    return from_poly(slope)


def without(e: Expr, vs: Sequence[Expr]) -> Expr:
    """The terms of `e` in which none of the variables occur."""
    drop = set(vs)
    return from_poly({m: c for m, c in poly(e).items() if not any(free_vars(a) & drop for a in m)})


def separate(steps: Sequence[tuple[Expr, Expr]], reach: Expr = ZERO) -> bool:
    """Whether `sum(stride * k)` over all `k < size` gives numbers more than `reach` apart.

    `steps` are pairs (stride, size). True when, smallest first, every stride passes what the ones
    before it reach together; False when that is not known.
    """
    left = [(s if known_nonneg(s) else neg(s), n) for s, n in steps if n is not ONE]
    while left:
        least = next((step for step in left if all(known_le(step[0], s) for s, _ in left)), None)
        if least is None or not known_lt(reach, least[0]):
            return False
        left.remove(least)
        reach = add(reach, mul(least[0], sub(least[1], 1)))
    return True


def linearize(indices: Sequence[IndexLike], strides: Sequence[IndexLike],
              offset: IndexLike = 0) -> Expr:  # fmt: skip
    return add(offset, *(mul(i, s) for i, s in zip(indices, strides, strict=True)))


def contiguous_strides(sizes: Sequence[IndexLike]) -> tuple[Expr, ...]:
    strides: list[Expr] = []
    step: Expr = ONE
    for size in reversed(sizes):
        strides.append(step)
        step = mul(step, maximum(size, 1))
    return tuple(reversed(strides))


def settled_strides(sizes: Sequence[Expr], strides: Sequence[Expr]) -> tuple[Expr, ...]:
    """The strides, where those of dimensions of one element, which are free, are what dense layouts
    have: libraries refuse rows that seem to overlap."""
    found: list[Expr] = []
    dense: Expr = ONE
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        found.append(dense if size is ONE else stride)
        dense = mul(found[-1], size)
    return tuple(reversed(found))


_CONSTRUCTORS: dict[str, Callable[..., Expr]] = {
    "iadd": add, "imul": mul, "ifloordiv": floordiv, "imod": mod, "imin": minimum, "imax": maximum,
}  # fmt: skip


@functools.lru_cache(1 << 14)  # the layers of a network, and the nests of one, have many in common
def _rebuilt(op: str, src: tuple[Expr, ...]) -> Expr:
    return _CONSTRUCTORS[op](*src)


REBUILD.update(dict.fromkeys(_CONSTRUCTORS, lambda node, src: _rebuilt(node.op, src)))
