"""Working in place: what is mutated, what is copied, and what results share memory with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import custom_op

from tests.programs import check, compiled, copy, fresh_compiler, same
from tilewright import metrics
from tilewright.testing import fresh_cache, run_and_get_code

__all__ = ["fresh_compiler"]

aten = torch.ops.aten


def test_view_of_a_mutated_argument_keeps_its_place_in_the_storage() -> None:
    def function(x: Tensor) -> Tensor:
        x[1:].copy_(x[1:] * 2)
        return x.reshape(x.shape[0], 2, x.shape[1] // 2).select(-1, 0)

    base = torch.randn(9, 8)
    eager, mine = base.clone()[3:], base.clone()[3:]
    want, got = function(eager), compiled(function, dynamic=True)(mine)
    assert torch.equal(got, want)
    assert got.storage_offset() == want.storage_offset() == 24
    assert got.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()


def test_argument_mutated_through_a_view_and_returned_whole() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x[:, 0].add_(1)
        return x, x.t()

    check(function, torch.randn(4, 5))
    check(function, torch.randn(4, 5), dynamic=True)


# ---- turning functional ops back in place (RI)


@custom_op("tilewright_inplace::sin", mutates_args={"out"})
def sin_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.sin())


@custom_op("tilewright_inplace::sincos", mutates_args={"first", "second"})
def sincos_into(x: Tensor, first: Tensor, second: Tensor) -> None:
    first.copy_(x.sin())
    second.copy_(x.cos())


@custom_op("tilewright_inplace::step", mutates_args={"k", "v"})
def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k.add_(1)
    v.add_(1)
    return q + 1


@step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@custom_op("tilewright_inplace::add_one_to_all", mutates_args={"tensors"})
def add_one_to_all(tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        t.add_(1)


sin_in_order = custom_op("tilewright_inplace::sin_in_order", sin_into._init_fn,
                         mutates_args={"out"})  # fmt: skip
sincos_in_order = custom_op("tilewright_inplace::sincos_in_order", sincos_into._init_fn,
                            mutates_args={"first", "second"})  # fmt: skip
add_one_in_order = custom_op("tilewright_inplace::add_one_in_order", add_one_to_all._init_fn,
                             mutates_args={"tensors"})  # fmt: skip
for op in (sin_in_order, sincos_in_order, add_one_in_order):
    _register_effectful_op(op._opoverload, _EffectType.ORDERED)


class Ran:
    """What one compilation did: elements moved, allocations in the host program, copies missed."""

    def __init__(self, function: Callable[..., Any], *inputs: Any, **options: Any) -> None:
        metrics.reset()
        with fresh_cache():
            call = torch.compile(function, backend="tilewright", fullgraph=True, **options)
            want = function(*(theirs := [copy(x) for x in inputs]))
            got, code = run_and_get_code(call, *(mine := [copy(x) for x in inputs]))
        same((got, mine), (want, theirs))
        self.text = code[0]
        self.elements = metrics.num_bytes_accessed // 4
        self.moved = metrics.num_bytes_moved // 4
        self.allocations = len(re.findall(r"= empty\w*\(", self.text))
        self.missed = metrics.counters["inplace"]["missed"]
        self.missed_bytes = metrics.counters["inplace"]["missed_bytes"]


INDEX = torch.tensor([1, 3])


def test_ri_1_what_is_still_observable_is_copied() -> None:
    """RI-1"""

    def live(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ x
        return a, aten.index_put(a, (i,), a.new_ones(()))

    def view_of_live(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ x
        return a[0], aten.index_put(a.view(-1), (i,), a.new_ones(()))

    def argument(x: Tensor, i: Tensor) -> Tensor:
        return aten.index_put(x, (i,), x.new_ones(()))

    # of a view of what is seen elsewhere the smaller part is copied, which is not counted as missed
    for function, bytes_ in ((live, 100), (view_of_live, 0), (argument, 100)):
        ran = Ran(function, torch.randn(5, 5), INDEX)
        assert (ran.missed, ran.missed_bytes, ran.allocations) == (int(bytes_ > 0), bytes_, 1)


def test_ri_2_a_dying_value_and_an_argument_with_copy_back_are_changed_in_place() -> None:
    """RI-2"""

    def inner(x: Tensor, i: Tensor) -> Tensor:
        return aten.index_put(x @ x, (i,), x.new_ones(()))

    def back(x: Tensor, i: Tensor) -> None:
        x.copy_(aten.index_put(x, (i,), x.new_ones(())))

    ran = Ran(inner, torch.randn(5, 5), INDEX)
    assert (ran.missed, ran.allocations) == (0, 0)
    ran = Ran(back, torch.randn(5, 5), INDEX)
    assert (ran.missed, ran.allocations, ran.moved) == (0, 0, 4 + 10)


def test_ri_3_missed_opportunities_are_counted() -> None:
    """RI-3"""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ x
        b = a.clone()
        sin_into(x[0], b[0])
        return a, b

    def keeps(x: Tensor, out: Tensor) -> Tensor:
        kept = out.view(3).clone()
        sin_into(x, out)
        return kept

    ran = Ran(keeps, torch.randn(3), torch.randn(3))
    assert (ran.missed, ran.allocations) == (0, 1)  # the result itself
    ran = Ran(function, torch.randn(3, 3))
    assert (ran.missed, ran.missed_bytes) == (1, 36)


def test_ri_4_other_views_block_only_if_they_are_read_later() -> None:
    """RI-4"""

    def unread(x: Tensor) -> Tensor:
        base = x @ x
        view = base[0]
        sin_into(view + 1, base[1])
        return base

    def read_before(x: Tensor) -> Tensor:
        first = x[0].cos()
        sin_into(first, x[1])
        return x

    def read_later(x: Tensor) -> tuple[Tensor, Tensor]:
        base = x @ x
        kept = base.clone()
        sin_into(base[0], base[1])
        return kept, base

    assert Ran(unread, torch.randn(3, 3)).missed == 0
    ran = Ran(read_before, torch.randn(3, 3))
    assert (ran.missed, ran.allocations) == (0, 1)
    assert Ran(read_later, torch.randn(3, 3)).missed == 1


def test_ri_5_many_mutations_never_clone() -> None:
    """RI-5"""

    def chain(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for _ in range(4):
            sin_into(x, out)
            sin_into(out, out)
        return out

    def several(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.empty_like(x), torch.zeros_like(x)
        sincos_into(x, a, b)
        sincos_into(b, b, a)
        return a, b

    assert (Ran(chain, torch.randn(3)).missed, Ran(chain, torch.randn(3)).allocations) == (0, 1)
    assert (Ran(several, torch.randn(3)).missed, Ran(several, torch.randn(3)).allocations) == (0, 2)


class SinAndBack(torch.autograd.Function):
    """Both passes write into new memory, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, other = torch.empty_like(x), torch.empty_like(x)
        sincos_into(x, out, other)
        sin_into(out, out)
        ctx.save_for_backward(other)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (other,) = ctx.saved_tensors
        first, second = torch.empty_like(g), torch.empty_like(g)
        sincos_into(other, first, second)
        sincos_into(first, second, first)
        return g * first + second


def test_ri_5_with_gradients() -> None:
    given = [torch.randn(6, requires_grad=True) for _ in range(2)]
    found: list[Tensor] = []
    metrics.reset()
    for call, x in zip((SinAndBack.apply, compiled(SinAndBack.apply)), given, strict=True):
        x.data = given[0].data
        call(x).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])
    assert metrics.counters["inplace"]["missed"] == 0


def test_ri_6_a_list_of_views_of_one_base() -> None:
    """RI-6"""

    def function(x: Tensor) -> Tensor:
        base = x @ x
        add_one_to_all([base[0], base[1:]])
        return base

    ran = Ran(function, torch.randn(3, 3))
    assert (ran.missed, ran.allocations) == (0, 0)


def test_ri_8_ops_with_an_order_of_effects() -> None:
    """RI-8: one written argument, several, a list; and views of views that are copied back."""

    def single(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        sin_in_order(x, out)
        return out + 1

    def several(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.empty_like(x), torch.empty_like(x)
        sincos_in_order(x, a, b)
        return a, b

    def listed(x: Tensor) -> Tensor:
        base = x @ x
        add_one_in_order([base[0], base[1:]])
        return base

    def views(x: Tensor) -> Tensor:
        x.view(-1)[2:].view(2, -1).t()[1:].mul_(2)
        return x

    for function, allocations in ((single, 1), (several, 2), (listed, 0)):
        ran = Ran(function, torch.randn(4, 4))
        assert (ran.missed, ran.allocations) == (0, allocations), function
    Ran(views, torch.randn(4, 4))


# ---- numbers (PF)


def test_pf_57_two_mutated_arguments() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = torch.empty_like(x), torch.empty_like(x)
        sincos_into(x, a, b)
        return x.clone(), a, b

    ran = Ran(function, torch.randn(3))
    assert (ran.elements, ran.moved, ran.missed) == (21, 15, 0)


def test_pf_59_a_chain_of_calls_on_an_argument() -> None:
    def function(x: Tensor, out: Tensor) -> Tensor:
        sin_into(x, out)
        sin_into(out, out)
        sin_into(out, out)
        return out

    ran = Ran(function, torch.randn(3), torch.randn(3))
    assert (ran.elements, ran.allocations) == (21, 0)


def test_pf_60_a_chain_of_calls_on_new_memory() -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        sin_into(x, out)
        sin_into(out, out)
        sin_into(out, out)
        return out

    ran = Ran(function, torch.randn(3))
    assert (ran.elements, ran.allocations) == (21, 1)


# ---- windows of arguments


def test_windows_of_an_argument_are_written_alone() -> None:
    def rows(x: Tensor, y: Tensor) -> None:
        x[1:3] = y

    def steps(x: Tensor) -> Tensor:
        x[1::2] *= 2
        return x

    def diagonal(x: Tensor) -> None:
        x.diagonal(1).add_(3)

    def reversed_rows(x: Tensor) -> Tensor:
        x[1:] = x[:-1] * 2
        return x

    assert Ran(rows, torch.randn(8, 8), torch.randn(2, 8)).moved == 32
    assert Ran(steps, torch.randn(8, 8)).moved == 64
    assert Ran(diagonal, torch.randn(8, 8)).moved == 14
    Ran(reversed_rows, torch.randn(8, 8))
    Ran(rows, torch.randn(8, 8).t(), torch.randn(2, 8), dynamic=True)
    Ran(steps, torch.randn(9, 3), dynamic=True)


def test_what_still_needs_the_old_contents_gets_them() -> None:
    def function(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        small, large = x[0] * 3, x.t() + 1
        x[i] = 0
        return small, large @ x

    def swapped(x: Tensor) -> None:
        first = x[0].clone()
        x[0] = x[1]
        x[1] = first

    Ran(function, torch.randn(5, 5), INDEX)
    Ran(swapped, torch.randn(4, 4))
    Ran(swapped, torch.randn(4, 4), dynamic=True)


def test_an_index_read_from_the_target_itself() -> None:
    def function(x: Tensor) -> Tensor:
        return x.copy_(aten.index_put(x, (x[:2],), x[2:4] + 1))

    Ran(function, torch.tensor([3, 1, 4, 0, 5, 2]))


def test_a_repeated_value_returned_twice() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = x.sum().expand(3)
        return v.amax(0), v.reshape(-1), v

    check(function, torch.randn(5))


def test_pf_61_the_sum_is_written_over_what_a_call_returned() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = step(q, k, v)
        return total + step(q, k, v)

    ran = Ran(function, torch.randn(3), torch.randn(3), torch.randn(3))
    assert (ran.elements, ran.allocations, ran.missed) == (45, 0, 0)
    assert "memory used again" in ran.text
