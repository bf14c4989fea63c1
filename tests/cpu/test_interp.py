"""The interpreter agrees with eager on every stage, and notices what is wrong with a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.build import Build, executable
from tests.fuzz.stages import Capture, capture, first_wrong
from tilewright.errors import TilewrightError, VerifyError
from tilewright.ir import build, interp
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, load, make, sym, var
from tilewright.ir.program import Nest, Store
from tilewright.ir.verify import verify, verify_nest
from tilewright.schedule.memory import Step
from tilewright.schedule.plan import schedule

F32 = torch.float32


def alike(got: Any, want: Any) -> bool:
    for a, b in zip(got, want, strict=True):
        if isinstance(b, Tensor):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True):
                return False
        elif a != b:
            return False
    return True


def _scatter(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    base = torch.zeros(5)
    return (base.scatter_add(0, i, x), base.scatter_reduce(0, i, x, "amax"),
            base.scatter_reduce(0, i, x, "prod"), x[i % 3])  # fmt: skip


def _mutation(x: Tensor, y: Tensor) -> Tensor:
    before = x.sum(-1)
    x.add_(y)
    y[1:].mul_(2)
    return before + x.sum(-1)


def _opaque(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    values, places = torch.topk(torch.mm(x, y.t()), 2)
    return values.relu(), places, torch.linalg.norm(x)


def _complex(x: Tensor, y: Tensor) -> Tensor:
    z = torch.view_as_complex(torch.stack((x, y), -1))
    return torch.view_as_real(z * z).sum(-1)


def _folds(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x.argmax(-1), x.var(), x.amin(0), (x > 0).any(-1), (y > 0).all(), x.argmin(0),
            x.prod(-1), y.std(0))  # fmt: skip


def _scans(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    best, places = torch.cummax(x, 0)
    return x.cumsum(-1), best, places, torch.logcumsumexp(y, -1), y.cumprod(0)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "softmax": (lambda x: F.softmax(x, -1), (torch.randn(6, 33),)),
    "layer norm": (lambda x: F.layer_norm(x, (16,)), (torch.randn(4, 16),)),
    "folds": (_folds, (torch.randn(6, 9), torch.randn(6, 9))),
    "scans": (_scans, (torch.randn(6, 9), torch.randn(6, 9))),
    "scatter": (_scatter, (torch.randn(12), torch.arange(12) % 5)),
    "mutation": (_mutation, (torch.randn(6, 5), torch.randn(6, 5))),
    "cat and pad": (lambda x, y: F.pad(torch.cat((x, y.t())), (1, 2)), (torch.randn(3, 4),
                                                                     torch.randn(4, 5))),
    "opaque calls": (_opaque, (torch.randn(6, 5), torch.randn(7, 5))),
    "complex numbers": (_complex, (torch.randn(6, 5), torch.randn(6, 5))),
    "low precision": (lambda x: (x * 3).exp() + x, (torch.randn(40, dtype=torch.bfloat16),)),
    "integers": (lambda x: (x // 3) % 5 ^ (x << 1), (torch.arange(-20, 20),)),
    "nothing at all": (lambda x: (x + 1, x.sum(0)), (torch.randn(0, 3),)),
    "embedding": (lambda w, i: F.embedding(i, w).mean(1), (torch.randn(9, 4),
                                                           torch.randint(0, 9, (3, 5)))),
}  # fmt: skip


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_stage_agrees_with_eager(name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]
    found = capture(function, *inputs, generate=True, dynamic=dynamic)
    assert found.calls
    assert first_wrong(found, alike) == ""


def test_backward_graphs_too() -> None:
    found = Capture()
    weight = torch.randn(8, 5, requires_grad=True)
    compiled = torch.compile(lambda x, w: F.gelu(F.linear(x, w)).sum(), backend=found)
    compiled(torch.randn(3, 5), weight).backward()
    assert len(found.calls) == 2
    assert first_wrong(found, alike) == ""


def test_random_numbers_are_those_of_the_kernels() -> None:
    def noise(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 2, 900)

    (graph,) = capture(noise, torch.empty(400), generate=True).graphs
    results: list[Any] = []
    for stage in ("lowered", "generated"):
        torch.manual_seed(3)
        results.append(graph.run(stage, [torch.empty(400)]))
    assert alike(results[0], results[1])
    assert results[0][0].unique().numel() > 390


# ---- what it is for: a wrong program is caught


def _doubling() -> Build:
    b = Build()
    x, y = b.input(8), b.buffer((8,))
    (i,) = b.loops(8)
    b.nest([i], Store(y, b.index(y, i), build.op("add", b.at(x, i), b.at(x, i))))
    b.returns(y)
    return b


def test_runs_a_program_written_by_hand() -> None:
    x = torch.randn(8)
    program = _doubling().program
    assert torch.equal(interp.run(program, [x])[0], 2 * x)
    assert torch.equal(executable(program)([x.clone()])[0], 2 * x)


def test_an_access_outside_its_buffer_is_an_error() -> None:
    b = Build()
    x, y = b.input(8), b.buffer((8,))
    (i,) = b.loops(8)
    b.nest([i], Store(y, i, load(x, F32, ix.add(i, 1))))
    with pytest.raises(TilewrightError, match="touches arg0 at 1 to 8, outside its 8"):
        interp.run(b.returns(y), [torch.randn(8)])


def test_a_masked_access_outside_is_fine() -> None:
    b = Build()
    x, y = b.input(8), b.buffer((8,))
    (i,) = b.loops(8)
    inside = build.op("lt", ix.add(i, 1), const(8))
    b.nest([i], Store(y, i, load(x, F32, ix.add(i, 1), inside)))
    program = b.returns(y)
    verify(program)
    given = torch.arange(8.0)
    want = torch.cat((given[1:], torch.zeros(1)))
    assert torch.equal(interp.run(program, [given])[0], want)
    assert torch.equal(executable(program)([given])[0], want)


def test_memory_nobody_wrote_shows() -> None:
    b = Build()
    x, y = b.input(4), b.buffer((8,))
    (i,) = b.loops(4)
    b.nest([i], Store(y, ix.mul(i, 2), b.at(x, i)))
    result = interp.run(b.returns(y), [torch.ones(4)])[0]
    assert result.isnan().tolist() == [False, True] * 4


def test_a_bad_gathered_index_is_an_error() -> None:
    b = Build()
    x, at, y = b.input(8), b.input(3, dtype=torch.int64), b.buffer((3,))
    (i,) = b.loops(3)
    place = build.op("index", b.at(at, i), const(8))
    b.nest([i], Store(y, i, load(x, F32, place)))
    program = b.returns(y)
    assert interp.run(program, [torch.arange(8.0), torch.tensor([7, 0, 3])])[0].tolist() == [
        7,
        0,
        3,
    ]
    with pytest.raises(IndexError):
        interp.run(program, [torch.arange(8.0), torch.tensor([8, 0, 3])])


def test_a_wrong_fusion_shows_only_when_fused() -> None:
    """Members that need each other's other points: right one after the other, wrong together."""
    b = Build()
    x, y, z = b.input(8), b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    b.nest([i], Store(y, i, build.op("exp", b.at(x, i))))
    b.nest([i], Store(z, i, b.at(y, ix.sub(7, i))))
    program = b.returns(z)
    (first, second) = [s.group for s in schedule(program).steps]
    both = replace(first, members=(*first.members, *second.members))
    steps = [Step(both, allocate=[y, z], free=[y])]
    given = torch.randn(8)
    want = given.exp().flip(0)
    assert torch.equal(interp.run_steps(program, steps, [given])[0], want)
    assert not torch.equal(interp.run_steps(program, steps, [given], fused=True)[0], want)


def test_using_freed_memory_is_an_error() -> None:
    program = _doubling().program
    (step,) = schedule(program).steps
    step.free = ["buf1"]
    with pytest.raises((TilewrightError, KeyError), match="buf1"):
        interp.run_steps(program, [step], [torch.randn(8)])


def test_sizes_are_found_from_the_arguments() -> None:
    n = sym("n", lower=2)
    b = Build()
    x, y = b.input(ix.add(ix.mul(n, 2), 1)), b.buffer((n,))
    (i,) = b.loops(n)
    b.nest([i], Store(y, i, b.at(x, ix.add(ix.mul(i, 2), 1))))
    program = b.returns(y)
    given = torch.arange(9.0)
    assert interp.run(program, [given])[0].tolist() == [1, 3, 5, 7]
    assert executable(program)([given])[0].tolist() == [1, 3, 5, 7]


# ---- the verifier


def _nest(*stores: Store, loops: tuple[Expr, ...] = (), reduce: tuple[Expr, ...] = ()) -> Nest:
    b = _doubling()
    return b.nest(loops or b.loops(8), *stores, reduce=reduce)


I8, R4 = var("i0", const(8)), var("r", const(4))
X = load("arg0", F32, I8)
ONE = const(1.0, F32)


@pytest.mark.parametrize(
    ("nest", "message"),
    [
        (_nest(Store("buf1", I8, const(1))), "stores torch.int64 into buf1"),
        (_nest(Store("buf9", I8, X)), "buf9, which is not a buffer"),
        (_nest(Store("buf1", I8, load("arg9", F32, I8))), "arg9, which is not a buffer"),
        (_nest(Store("buf1", I8, load("arg0", F32, R4))), "r is not one of its loops"),
        (_nest(Store("buf1", I8, load("arg0", F32, ix.add(I8, R4))), reduce=(R4,)),
         "r is a reduction loop, and is used outside"),
        (_nest(Store("buf1", I8, build.reduce("sum", X))), "without reduction loops"),
        (_nest(Store("buf1", I8, build.reduce("sum", build.reduce("sum", X))), reduce=(R4,)),
         "a reduction inside a reduction"),
        (_nest(Store("buf1", I8, build.reduce("argmax", X)), reduce=(R4,)), "folds 2 values"),
        (_nest(Store("buf1", I8, build.scan("sum", R4, X))), "scans along r"),
        (_nest(Store("buf1", I8, make("part", F32, (X,), 0))), "a part of load"),
        (_nest(Store("buf1", I8, make("add", F32, (X, const(1.0, torch.float64))))),
         "add over different types"),
        (_nest(Store("buf1", I8, make("add", F32, (X,)))), "add takes 2 operands"),
        (_nest(Store("buf1", I8, build.cast(make("add", torch.int32, (X, X)), F32))),
         "add gives torch.float32, the node says torch.int32"),
        (_nest(Store("buf1", I8, build.cast(make("sin", torch.int64, (I8,)), F32))), "sin of"),
        (_nest(Store("buf1", I8, make("where", F32, (X, X, X)))), r"where\(torch.float32"),
        (_nest(Store("buf1", I8, make("nonsense", F32, (X,)))), "unknown operation nonsense"),
        (_nest(Store("buf1", I8, load("arg0", F32, ix.add(I8, 1)))), "outside its 8 elements"),
        (_nest(Store("buf1", ix.sub(I8, 1), X)), "outside its 8 elements"),
        (_nest(Store("buf1", const(0), X)), "every iteration of i0 stores to the same element"),
        (_nest(Store("buf1", I8, X), Store("arg0", I8, load("buf1", F32, I8))),
         "which an earlier store of the same nest writes"),
        (_nest(Store("buf1", I8, X), loops=(I8, I8)), "the same loop twice"),
    ],
)  # fmt: skip
def test_rejected(nest: Nest, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify_nest(_doubling().program, nest)


def test_reading_before_writing_is_rejected() -> None:
    b = Build()
    x, y, z = b.input(8), b.buffer((8,)), b.buffer((8,))
    (i,) = b.loops(8)
    b.nest([i], Store(z, i, b.at(y, i)))
    b.nest([i], Store(y, i, b.at(x, i)))
    with pytest.raises(VerifyError, match="before anything writes it"):
        verify(b.returns(z))
    b.program.nodes.clear()
    with pytest.raises(VerifyError, match="never written"):
        verify(b.program)
