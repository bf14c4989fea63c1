"""Each rule of `graph/simplify.py` as a pair: the calls before, the calls after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.graph.simplify import NAMED_RULES, simplify

aten = torch.ops.aten
fma = torch._inductor.inductor_prims.fma


def traced(fn: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*args)


def calls(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in gm.graph.nodes if n.op == "call_function"]


def after(fn: Callable[..., Any], *args: torch.Tensor) -> list[str]:
    """The calls left after simplification; checks that the values are still the same."""
    gm = traced(fn, *args)
    expected = gm(*[a.clone() for a in args])
    simplify(gm)
    got = gm(*[a.clone() for a in args])
    torch.testing.assert_close(got, expected, equal_nan=True)
    return calls(gm)


def rand(*size: int) -> torch.Tensor:
    return torch.randn(size)


INTS = torch.arange(6).reshape(2, 3)

# rule name -> (function of aten calls, arguments, calls before, calls after)
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[str], list[str]]] = {
    "identity view": (
        lambda x: aten.exp(aten.view(aten.exp(x), [2, 3])),
        (rand(2, 3),),
        ["exp.default", "view.default", "exp.default"],
        ["exp.default", "exp.default"],
    ),
    "alias": (
        lambda x: aten.exp(aten.detach(aten.exp(x))),
        (rand(2, 3),),
        ["exp.default", "detach.default", "exp.default"],
        ["exp.default", "exp.default"],
    ),
    "identity permute": (
        lambda x: aten.exp(aten.permute(x, [0, -2, 2])),
        (rand(2, 3, 4),),
        ["permute.default", "exp.default"],
        ["exp.default"],
    ),
    "identity slice": (
        lambda x: aten.exp(aten.slice(x, 1, 0, 9223372036854775807)),
        (rand(2, 3),),
        ["slice.Tensor", "exp.default"],
        ["exp.default"],
    ),
    "identity copy": (
        lambda x: aten.exp(aten.clone(aten._to_copy(x, dtype=torch.float32))),
        (rand(2, 3),),
        ["_to_copy.default", "clone.default", "exp.default"],
        ["exp.default"],
    ),
    "whole slice_scatter": (
        lambda x, y: aten.exp(aten.slice_scatter(x, y, 0, 0, 2)),
        (rand(2, 3), rand(2, 3)),
        ["slice_scatter.default", "exp.default"],
        ["exp.default"],
    ),
    "single cat": (
        lambda x: aten.exp(aten.cat([x], 1)),
        (rand(2, 3),),
        ["cat.default", "exp.default"],
        ["exp.default"],
    ),
    "rounding an integer": (
        lambda x: aten.neg(aten.round(aten.floor(x))),
        (INTS,),
        ["floor.default", "round.default", "neg.default"],
        ["neg.default"],
    ),
    "add zero": (
        lambda x: aten.neg(aten.sub(aten.add(x, 0), 0)),
        (INTS,),
        ["add.Tensor", "sub.Tensor", "neg.default"],
        ["neg.default"],
    ),
    "times one": (
        lambda x: aten.exp(aten.div(aten.mul(x, 1), 1.0)),
        (rand(2, 3),),
        ["mul.Tensor", "div.Tensor", "exp.default"],
        ["exp.default"],
    ),
    "first power": (
        lambda x: aten.exp(aten.pow(x, 1)),
        (rand(2, 3),),
        ["pow.Tensor_Scalar", "exp.default"],
        ["exp.default"],
    ),
    "view of view": (
        lambda x: aten.exp(aten.view(aten.view(x, [6]), [3, 2])),
        (rand(2, 3),),
        ["view.default", "view.default", "exp.default"],
        ["view.default", "exp.default"],
    ),
    "permute of permute": (
        lambda x: aten.exp(aten.transpose(aten.permute(x, [2, 0, 1]), 0, 1)),
        (rand(2, 3, 4),),
        ["permute.default", "transpose.int", "exp.default"],
        ["permute.default", "exp.default"],
    ),
    "conversion of conversion": (
        lambda x: aten.neg(
            aten._to_copy(aten._to_copy(x, dtype=torch.float32), dtype=torch.float64)
        ),
        (rand(2, 3).bfloat16(),),
        ["_to_copy.default", "_to_copy.default", "neg.default"],
        ["_to_copy.default", "neg.default"],
    ),
    "bias into addmm": (
        lambda a, b, c: aten.view(aten.add(aten.view(aten.mm(a, b), [2, 2, 5]), c), [20]),
        (rand(4, 3), rand(3, 5), rand(5)),
        ["mm.default", "view.default", "add.Tensor", "view.default"],
        ["addmm.default", "view.default"],
    ),
    "sum of sums": (
        lambda x: aten.mean(aten.mul(aten.sum(aten.exp(x), [-1]), -0.5)),
        (rand(5, 7, 3),),
        ["exp.default", "sum.dim_IntList", "mul.Tensor", "mean.default"],
        ["exp.default", "sum.default", "mul.Tensor", "div.Tensor"],
    ),
    "complex as pairs": (
        lambda x: aten.view_as_real(aten.neg(aten.view_as_complex(x))),
        (rand(3, 2),),
        ["view_as_complex.default", "neg.default", "view_as_real.default"],
        ["neg.default"],
    ),
    "multiply-add": (
        lambda a, b, c: fma(fma(a, b, c), 0.5, c),
        (rand(3), rand(3), rand(3)),
        ["prims.fma.default", "prims.fma.default"],
        ["addcmul.default", "add.Tensor"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    fn, args, want_before, want_after = CASES[name]
    assert calls(traced(fn, *args)) == want_before
    assert after(fn, *args) == want_after


def test_every_rule_has_a_case() -> None:
    assert [name for name, _, _ in NAMED_RULES] == list(CASES)


# ---- what the rules must leave alone


@pytest.mark.parametrize(
    ("fn", "args", "kept"),
    [
        # -0.0 + 0 is 0.0
        (lambda x: aten.exp(aten.add(x, 0)), (rand(3),), "add.Tensor"),
        # bfloat16 cannot hold every float32
        (
            lambda x: aten.neg(
                aten._to_copy(aten._to_copy(x, dtype=torch.bfloat16), dtype=torch.float32)
            ),
            (rand(3),),
            "_to_copy.default",
        ),
        (lambda x: aten.exp(aten.clone(x.t(), memory_format=torch.contiguous_format)),
         (rand(2, 3),), "clone.default"),
        (lambda x: aten.exp(aten.slice(x, 0, 0, 4, 2)), (rand(4),), "slice.Tensor"),
        # the sum is part of the loop of what follows
        (lambda a, b, c: aten.relu(aten.add(aten.mm(a, b), c)),
         (rand(4, 3), rand(3, 5), rand(5)), "mm.default"),
        # not one value per column
        (lambda a, b, c: aten.view(aten.add(aten.mm(a, b), c), [20]),
         (rand(4, 3), rand(3, 5), rand(4, 1)), "mm.default"),
    ],
)  # fmt: skip
def test_kept(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], kept: str) -> None:
    before = calls(traced(fn, *args))
    assert after(fn, *args) == before
    assert kept in before


# ---- results, effects


def test_a_result_is_not_made_an_alias_of_an_input() -> None:
    assert after(lambda x: aten.clone(x), rand(3)) == ["clone.default"]


def test_two_results_stay_two() -> None:
    assert after(lambda x: (aten.exp(x), aten.exp(x)), rand(3)) == ["exp.default", "exp.default"]
    assert after(lambda x: (aten.exp(x), aten.clone(aten.exp(x))), rand(3)) == [
        "exp.default",
        "clone.default",
    ]


def test_a_returned_copy_of_an_intermediate_goes() -> None:
    assert after(lambda x: aten.clone(aten.exp(x)), rand(3)) == ["exp.default"]


def test_common_subexpressions() -> None:
    assert after(lambda x: aten.add(aten.exp(x), aten.exp(x)), rand(3)) == [
        "exp.default",
        "add.Tensor",
    ]


def test_literals_are_told_apart() -> None:
    found = after(lambda x: aten.add(aten.mul(x, 0.0), aten.mul(x, -0.0)), rand(3))
    assert found == ["mul.Tensor", "mul.Tensor", "add.Tensor"]


def test_random_calls_are_all_kept() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        aten.rand_like(x)
        return aten.add(aten.rand_like(x), aten.rand_like(x))

    gm = traced(fn, rand(3))
    simplify(gm)
    assert calls(gm) == ["rand_like.default"] * 3 + ["add.Tensor"]


def test_dead_code_goes_and_writes_stay() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        aten.exp(aten.neg(x))
        aten.copy_(y, x)
        return aten.sin(x)

    assert after(fn, rand(3), rand(3)) == ["copy_.default", "sin.default"]


def test_nothing_moves_across_a_write() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = aten.exp(x)
        kept = aten.clone(x)
        aten.copy_(x, y)
        return aten.add(aten.add(before, aten.exp(x)), kept)

    found = after(fn, rand(3), rand(3))
    assert found.count("exp.default") == 2
    assert found.count("clone.default") == 1


def test_symbolic_sizes() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return aten.exp(aten.view(aten.expand(x, list(x.size())), list(x.size())))

    gm = make_fx(fn, tracing_mode="symbolic")(rand(5, 7))
    simplify(gm)
    assert calls(gm) == ["exp.default"]


def _sum(count: int, *sides: torch.Tensor) -> torch.Tensor:
    pairs = [aten.mm(aten.t(a), b) for a, b in zip(sides[:count], sides[count:], strict=True)]
    total = pairs[0]
    for product in pairs[1:]:
        total = aten.add(total, product)
    return total


def test_a_sum_of_products_is_one_product_of_what_is_side_by_side() -> None:
    sides = [rand(3, 40) for _ in range(4)] + [rand(3, 24) for _ in range(4)]
    assert after(lambda *s: _sum(4, *s), *sides) == [
        "cat.default", "t.default", "cat.default", "mm.default",
    ]  # fmt: skip


def test_products_with_an_operand_in_common_are_one() -> None:
    """As the gradient of `x @ x.T`; where the sum of what they do not share is not the larger."""

    def gram(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        turned = aten.transpose(aten.bmm(aten.transpose(x, 1, 2), g), 1, 2)
        return aten.add(aten.bmm(g, x), turned)

    def same_left(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return aten.add(aten.mm(a, b), aten.mm(a, c))

    joined = ["transpose.int", "add.Tensor", "bmm.default"]
    assert after(gram, rand(3, 5, 5), rand(3, 5, 24)) == joined
    assert (
        after(gram, rand(3, 5, 5).bfloat16(), rand(3, 5, 24).bfloat16()).count("bmm.default") == 2
    )
    assert after(same_left, rand(8, 6), rand(6, 7), rand(6, 7)) == ["add.Tensor", "mm.default"]
    assert after(same_left, rand(2, 90), rand(90, 50), rand(90, 50)).count("mm.default") == 2


def test_other_summands_stay_summands() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, *sides: torch.Tensor) -> torch.Tensor:
        return aten.tanh(aten.add(aten.add(x, _sum(3, *sides)), y))

    sides = [rand(3, 40) for _ in range(3)] + [rand(3, 24) for _ in range(3)]
    left = after(fn, rand(40, 24), rand(40, 24), *sides)
    assert (left.count("mm.default"), left.count("add.Tensor")) == (1, 2)


@pytest.mark.parametrize("size", [(30, 8, 8), (3, 40, 24)])
def test_products_that_stay(size: tuple[int, int, int]) -> None:
    """Operands larger than the products, or low precision, where eager rounds each of them."""
    k, m, n = size
    dtype = torch.float32 if k == 30 else torch.bfloat16
    sides = [rand(k, m).to(dtype) for _ in range(3)] + [rand(k, n).to(dtype) for _ in range(3)]
    assert after(lambda *s: _sum(3, *s), *sides).count("mm.default") == 3


def test_a_product_that_is_used_twice_stays() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        one = aten.mm(a, b)
        return aten.add(one, aten.mm(c, d)), aten.exp(one)

    assert after(fn, rand(40, 3), rand(3, 24), rand(40, 3), rand(3, 24)).count("mm.default") == 2


@pytest.mark.parametrize("outer", [aten.sum, aten.mean])
@pytest.mark.parametrize("inner", [aten.sum, aten.mean])
def test_what_is_folded_twice_is_folded_once(outer: Any, inner: Any) -> None:
    kept = after(lambda x: outer(inner(aten.exp(x), [0, 2])), rand(5, 7, 3))
    assert "sum.dim_IntList" not in kept and "mean.dim" not in kept


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: aten.mean(aten.exp(aten.sum(x, [-1]))),  # not a number's multiple
        lambda x: aten.mean(aten.sum(aten._softmax(x, -1, False), [-1])),  # rows are folded for it
        lambda x: (s := aten.sum(x, [-1]), aten.mean(s)),  # wanted
        lambda x: aten.mean(aten.sum(aten._to_copy(x, dtype=torch.bfloat16), [-1])),  # rounded
    ],
)
def test_sums_that_stay(fn: Callable[..., Any]) -> None:
    assert "sum.dim_IntList" in after(fn, rand(6, 9))
