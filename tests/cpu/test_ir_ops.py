"""Every row of the operation table, every reduction and every scan: C++ that gives torch's result.

One kernel per row computes all its types and operands, so that the whole file builds quickly.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.fuzz.build import Build, executable
from tilewright.codegen.cpp.text import OPS
from tilewright.ir import build, interp
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const
from tilewright.ir.ops import INDEX_OPS, REDUCTIONS, SCANS, TABLE
from tilewright.ir.program import Store

FLOATS = (torch.float32, torch.float64)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LOGIC = ("bit_and", "bit_or", "bit_xor", "bit_not")
COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
SPECIAL = ("cast", "bitcast", "index", "where", "rand", "randn", "randint")
SHIFTS = ("shl", "shr")
ON_CARDS = ("sort",)  # tests/compile/test_triton_sorting.py
POINTS = 210


def test_every_row_has_text() -> None:
    assert set(OPS) == set(TABLE)


def test_index_operations_are_apart_from_the_table() -> None:
    assert not set(INDEX_OPS) & set(TABLE)


def _types(name: str) -> tuple[torch.dtype, ...]:
    if TABLE[name].floats_only:
        return FLOATS
    if name in LOGIC:
        return (torch.bool, *INTS)
    if name in SHIFTS:
        return (torch.int64, torch.int32)
    if name in ("floordiv", "truncdiv", "mod", "fmod", "pow", "neg", "abs", "sign", "signbit"):
        return (*FLOATS, *INTS)
    return (*FLOATS, *INTS, torch.bool) if name in COMPARE else (*FLOATS, *INTS)


def _operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Random values in and around the domain, then every pair of the awkward ones."""
    generator = torch.Generator().manual_seed(5)
    arity = TABLE[name].arity
    if dtype == torch.bool:
        return [torch.randint(0, 2, (POINTS,), generator=generator).bool() for _ in range(arity)]
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -20
        values = [torch.randint(low, 21, (POINTS,), generator=generator).to(dtype)
                  for _ in range(arity)]  # fmt: skip
        if name in ("floordiv", "truncdiv", "mod", "fmod", *SHIFTS, "pow"):
            values[1] = values[1].abs() % 6 + 1
        return values
    if "polynomial" in name:  # of a degree
        x = torch.rand(POINTS, generator=generator, dtype=torch.float64) * 4 - 2
        return [x.to(dtype), (torch.arange(POINTS) % 8).to(dtype)]
    special = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, math.inf, -math.inf, math.nan]
    positive = name in ("igamma", "igammac", "zeta")
    pairs = list(itertools.product(special, repeat=arity)) if not positive else []
    made: list[Tensor] = []
    for k in range(arity):
        spread = torch.randn(POINTS - len(pairs), generator=generator, dtype=torch.float64) * 3
        if positive:
            spread = spread.abs() + (1.5 if name == "zeta" and k == 0 else 0.25)
        ends = torch.tensor([p[k] for p in pairs], dtype=torch.float64)
        made.append(torch.cat((spread, ends)).to(dtype))
    return made


def _tolerance(name: str, dtype: torch.dtype) -> tuple[float, float]:
    if not dtype.is_floating_point or TABLE[name].cost < 4:
        return 0.0, 0.0
    if TABLE[name].cost >= 60:  # torch's own Bessel and Airy functions are off by 3e-6 in float64
        return 2e-4, 2e-5
    return (1e-10, 1e-10) if dtype == torch.float64 else (2e-5, 2e-6)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", sorted(set(TABLE) - set(SPECIAL)))
def test_row(name: str) -> None:
    row = TABLE[name]
    b, inputs, expected = Build(), list[Tensor](), list[tuple[Tensor, torch.dtype]]()
    (i,) = b.loops(POINTS)
    results: list[str] = []
    for dtype in _types(name):
        values = _operands(name, dtype)
        try:
            want = row.ref(*values)
        except RuntimeError:
            continue  # torch has no such operation on this type, so nothing lowers to it
        sources = [b.at(b.input(POINTS, dtype=dtype), i) for _ in values]
        made = build.op(name, *sources)
        assert made.dtype == want.dtype, f"{name} of {dtype}"
        out = b.buffer((POINTS,), made.dtype)
        b.nest([i], Store(out, i, made))
        results.append(out)
        inputs += values
        expected.append((want, dtype))
    assert expected, f"no type of {name} was tried"
    got = executable(b.returns(*results))([v.clone() for v in inputs])
    for actual, (want, dtype) in zip(got, expected, strict=True):
        relative, absolute = _tolerance(name, dtype)
        torch.testing.assert_close(
            actual, want, rtol=relative, atol=absolute, equal_nan=True,
            msg=lambda text, dtype=dtype: f"{name} of {dtype}: {text}",
        )  # fmt: skip
        if name in ("neg", "abs", "copysign", "round", "trunc", "mul", "min", "max", "sqrt"):
            zeros = (want == 0) & want.isfinite()
            assert torch.equal(actual.signbit()[zeros], want.signbit()[zeros]), f"{name}: -0.0"


def test_where_and_index() -> None:
    b = Build()
    c, x, y = b.input(64, dtype=torch.bool), b.input(64), b.input(64)
    at = b.input(64, dtype=torch.int64)
    picked, gathered = b.buffer((64,)), b.buffer((64,))
    (i,) = b.loops(64)
    b.nest([i], Store(picked, i, build.where(b.at(c, i), b.at(x, i), b.at(y, i))))
    place = build.op("index", b.at(at, i), const(64))
    b.nest([i], Store(gathered, i, b.at(x, place)))
    call = executable(b.returns(picked, gathered))
    given = [torch.rand(64) > 0.5, torch.randn(64), torch.randn(64), torch.randint(0, 64, (64,))]
    got = call([t.clone() for t in given])
    assert torch.equal(got[0], torch.where(given[0], given[1], given[2]))
    assert torch.equal(got[1], given[1][given[3]])
    for bad in (64, -1, 2**40):
        wrong = given[3].clone()
        wrong[17] = bad
        with pytest.raises(IndexError, match="out of range"):
            call([given[0], given[1], given[2], wrong])


def test_casts_between_all_types() -> None:
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
             torch.int16, torch.int8, torch.uint8, torch.bool)  # fmt: skip
    source = torch.tensor([0, 1, 2, 3, 100, 7, 50, 127], dtype=torch.float64)
    fine = torch.tensor([0.1, 1.7, 2.5, 3.25, 99.99, 1e-3, 12.3, 64.5], dtype=torch.float64)
    b, inputs, wanted = Build(), list[Tensor](), list[Tensor]()
    (i,) = b.loops(8)
    results: list[str] = []
    for start in types:
        given = (fine if start.is_floating_point else source).to(start)
        x = b.input(8, dtype=start)
        inputs.append(given)
        for to in types:
            out = b.buffer((8,), to)
            b.nest([i], Store(out, i, build.cast(b.at(x, i), to)))
            results.append(out)
            wanted.append(given.to(to))
    got = executable(b.returns(*results))([t.clone() for t in inputs])
    for actual, want in zip(got, wanted, strict=True):
        assert torch.equal(actual, want)


def test_bitcast() -> None:
    b = Build()
    x = b.input(32)
    out = b.buffer((32,), torch.int32)
    (i,) = b.loops(32)
    b.nest([i], Store(out, i, build.op("bitcast", b.at(x, i), arg=torch.int32)))
    given = torch.randn(32)
    assert torch.equal(executable(b.returns(out))([given])[0], given.view(torch.int32))


def test_random_rows_match_their_reference() -> None:
    b = Build()
    seed = b.input(1, dtype=torch.int64)
    (i,) = b.loops(300)
    start = b.at(seed, 0)
    results: list[str] = []
    for name, dtype in (("rand", torch.float32), ("rand", torch.float64), ("randn", torch.float32)):
        out = b.buffer((300,), dtype)
        b.nest([i], Store(out, i, build.op(name, start, i, arg=dtype)))
        results.append(out)
    out = b.buffer((300,), torch.int64)
    b.nest([i], Store(out, i, build.op("randint", start, i, const(-3), const(1000),
                                       arg=torch.int64)))  # fmt: skip
    program = b.returns(*results, out)
    for number in (0, 12345, 2**62 + 99):
        given = torch.tensor([number])
        got, want = executable(program)([given]), interp.run(program, [given])
        for a, w in zip(got, want, strict=True):
            torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-6)
        assert got[3].min() >= -3 and got[3].max() < 1000


# ---- folds


def _fold_input(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if kind in ("any", "all", "xor"):
        chance = {"any": 0.01, "all": 0.99, "xor": 0.5}[kind]
        return torch.rand(shape, generator=generator) < chance
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x.sign() * (1 + x.abs() / 100) if kind == "prod" else x).to(dtype)


def _fold_types(kind: str) -> tuple[torch.dtype, ...]:
    if kind in ("any", "all", "xor"):
        return (torch.bool,)
    return FLOATS if kind in ("welford", "logsumexp") else (*FLOATS, torch.int64)


# rows of a matrix, its columns, and everything at once: each is another form of loop
LAYOUTS = {"inner": (20, 75), "outer": (75, 40), "all": (130, 90), "long": (1, 9001)}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reduction(kind: str, layout: str) -> None:
    shape = LAYOUTS[layout]
    b, inputs, results = Build(), list[Tensor](), list[str]()
    i, j = b.loops(*shape)
    kept, folded = {"inner": ((i,), (j,)), "outer": ((j,), (i,)), "all": ((), (i, j)),
                    "long": ((), (j,))}[layout]  # fmt: skip
    for dtype in _fold_types(kind):
        given = _fold_input(kind, dtype, shape)
        if dtype.is_floating_point and kind in ("min", "max", "argmin", "argmax"):
            given[shape[0] // 2, 3] = math.nan
        inputs.append(given)
        x = b.input(*shape, dtype=given.dtype)
        position = ix.add(ix.mul(i, shape[1]), j) if layout == "all" else folded[0]
        value = b.at(x, i if shape[0] > 1 else 0, j)
        results += _fold_stores(b, kind, value, position, kept, folded, layout)
    program = b.returns(*results)
    got = executable(program)([t.clone() for t in inputs])
    for actual, want in zip(got, interp.run(program, inputs), strict=True):
        tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}.get(want.dtype, 0.0)
        scale = max(1.0, want.double().abs().nan_to_num(0).max().item())
        torch.testing.assert_close(actual, want, rtol=tolerance, atol=tolerance * scale,
                                   equal_nan=True)  # fmt: skip


def _fold_stores(b: Build, kind: str, value: Expr, position: Expr, kept: tuple[Expr, ...],
                 folded: tuple[Expr, ...], layout: str) -> list[str]:  # fmt: skip
    fold = REDUCTIONS[kind]
    if fold.inputs == 2:
        made = [build.reduce(kind, value, position, dtype=torch.int64)]
    else:
        node = build.reduce(kind, value)
        made = [node] if fold.outputs == 1 else [build.part(node, k) for k in range(fold.outputs)]
    shape = tuple(v.src[0] for v in kept)
    buffers = [b.buffer(shape, e.dtype) for e in made]
    b.nest(kept, *(Store(out, kept[0] if kept else const(0), e)
                   for out, e in zip(buffers, made, strict=True)), reduce=folded)  # fmt: skip
    return buffers


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("kind", [k for k in SCANS if k not in ON_CARDS])
def test_scan(kind: str, along: int) -> None:
    b, inputs, results = Build(), list[Tensor](), list[str]()
    loops = b.loops(12, 40)
    for dtype in _fold_types(kind):
        given = _fold_input(kind, dtype, (12, 40))
        if dtype.is_floating_point and kind in ("min", "max"):
            given[5, 7] = math.nan
        inputs.append(given)
        value = b.at(b.input(12, 40, dtype=dtype), *loops)
        if SCANS[kind].inputs == 2:
            node = build.scan(kind, loops[along], value, loops[along])
            made = [build.part(node, 0), build.part(node, 1, torch.int64)]
        else:
            made = [build.scan(kind, loops[along], value)]
        buffers = [b.buffer((12, 40), e.dtype) for e in made]
        b.nest(loops, *(Store(out, b.index(out, *loops), e)
                        for out, e in zip(buffers, made, strict=True)))  # fmt: skip
        results += buffers
    program = b.returns(*results)
    got = executable(program)([t.clone() for t in inputs])
    for actual, want in zip(got, interp.run(program, inputs), strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-4, equal_nan=True)
