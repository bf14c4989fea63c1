"""What is fused to a product, in whose terms, and why other things are not (MA-K1, MA-J19)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.build import Build
from tests.fuzz.stages import capture
from tilewright import config
from tilewright.gemm import fuse, parts
from tilewright.gemm.fuse import Site
from tilewright.gemm.problem import GemmProblem
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, free_vars, loads, substitute
from tilewright.ir.program import Buffer, Store, View
from tilewright.schedule.fusion.group import Group
from tilewright.schedule.plan import arranged
from tilewright.target import Target

BF16, F16 = torch.bfloat16, torch.float16


def sites(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[Site | str]:
    (graph,) = capture(function, *inputs, **options).graphs
    found = arranged(graph.program)
    return [fuse.site(found.program, found.groups, k) for k, g in enumerate(found.groups)
            if fuse.is_product(g)]  # fmt: skip


def site(function: Callable[..., Any], *inputs: Any, **options: Any) -> Site:
    (found,) = sites(function, *inputs, **options)
    assert isinstance(found, Site), found
    return found


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def most(found: Site) -> GemmProblem:
    return found.fusions[0].problem


# ---- a problem says all there is to compute


def evaluated(problem: GemmProblem, memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """The problem by its own definition, point by point, in float64."""
    sizes = [ix.likely(n) for n in problem.sizes]
    batch, m, n, k = torch.meshgrid(*(torch.arange(s) for s in sizes), indexing="ij")
    at = {problem.batch: batch, problem.m: m, problem.n: n, problem.k: k}
    terms = [value(o.value, at, memory) for o in problem.operands]
    total = problem.alpha * (terms[0] * terms[1]).sum(-1)
    if problem.op == "mm_plus_mm":
        total = total + (terms[2] * terms[3]).sum(-1)
    flat = {v: index[..., 0] for v, index in at.items()}
    if problem.bias is not None:
        total = total + problem.beta * value(problem.bias.value, flat, memory)
    c = total.to(problem.dtype).double()
    found: dict[str, Tensor] = {}
    for s in problem.epilogue:
        made = value(s.value, flat, memory, {problem.product: c})
        out = torch.zeros(memory[s.buffer].numel(), dtype=torch.float64)
        out[index_of(s.index, flat).reshape(-1)] = made.expand_as(c).reshape(-1)
        found[s.buffer] = out
    return found


def index_of(e: Expr, at: dict[Expr, Tensor]) -> Tensor:
    return torch.as_tensor(value(e, at, {}))


def value(e: Expr, at: dict[Expr, Tensor], memory: dict[str, Tensor],
          known: dict[Expr, Tensor] | None = None) -> Any:  # fmt: skip
    known = known or {}
    if e in known:
        return known[e]
    if e.op in ("var", "const", "sym"):
        return at[e] if e.op == "var" else torch.tensor(ix.likely(e) if e.op == "sym" else e.arg)
    if e.op == "load":
        return memory[e.arg][index_of(e.src[0], at)].double()
    src = [value(s, at, memory, known) for s in e.src]
    match e.op:
        case "iadd":
            return sum(src)
        case "imul":
            return torch.stack(torch.broadcast_tensors(*map(torch.as_tensor, src))).prod(0)
        case "ifloordiv":
            return torch.div(src[0], src[1], rounding_mode="floor")
        case "imod":
            return torch.remainder(src[0], src[1])
        case "max":
            return torch.maximum(*map(torch.as_tensor, src))
        case "cast":
            return src[0].to(e.dtype).double() if e.dtype.is_floating_point else src[0]
        case "add" | "sub" | "mul" | "div":
            return getattr(torch, e.op)(*src)
        case "log":
            return torch.log(src[0])
        case op:
            raise AssertionError(op)


def filled(buffer: Buffer) -> Tensor:
    last = sum((ix.likely(n) - 1) * ix.likely(s)
               for n, s in zip(buffer.size, buffer.stride, strict=True))  # fmt: skip
    return torch.randn(1 + last).to(buffer.dtype)


def heads(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b)).reshape(4, 10, 8, 16).transpose(1, 2).contiguous()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "bias and relu": (lambda x, w, b: F.relu(F.linear(x, w, b)), (r(5, 7), r(9, 7), r(9))),
    "into heads": (heads, (r(4, 10, 12), r(128, 12), r(128))),
    "prologues": (lambda x, y: ((x - 1.5) @ (y + 1.5)) * 1.5, (r(6, 5), r(5, 7))),
    "batches": (lambda x, y: F.relu(x @ y.transpose(1, 2) / 3), (r(3, 5, 7), r(3, 9, 7))),
    "a residual": (lambda x, w, y: x @ w + y * 2, (r(6, 5), r(5, 8), r(6, 8))),
    "a column": (lambda x, w, y: F.relu(x @ w) * y, (r(6, 5), r(5, 8), r(6, 1))),
    "transposed": (lambda x, w: F.relu(x @ w).t().contiguous(), (r(6, 5), r(5, 8))),
    "three dimensions": (lambda x, w: F.relu(x @ w) + 1, (r(2, 3, 5), r(5, 8))),
    "a gather": (lambda x, w: F.relu(x[:, ::2] @ w), (r(6, 10), r(5, 8))),
    "halves": (lambda x, w: F.relu(x @ w) * 3, (r(6, 5, dtype=BF16), r(5, 8, dtype=BF16))),
}


# the number of heads divides no size that is not known
SIZES = [(name, dynamic) for name in PROGRAMS for dynamic in (False, True)
         if (name, dynamic) != ("into heads", True)]  # fmt: skip


@pytest.mark.parametrize(("name", "dynamic"), SIZES)
def test_a_problem_is_the_program(name: str, dynamic: bool) -> None:
    """What the fused problem says, evaluated point by point, is what eager computes."""
    function, inputs = PROGRAMS[name]
    found = site(function, *inputs, dynamic=dynamic)
    fusion = found.fusions[0]
    arguments = {f"arg{k}": t for k, t in enumerate(inputs)}
    memory = {}
    tensors = list(arguments.values())
    for b in fusion.problem.buffers:
        like = [t for t in tensors if tuple(t.shape) == tuple(ix.likely(n) for n in b.size)]
        data = like[0].as_strided((like[0].untyped_storage().nbytes() // like[0].itemsize,), (1,),
                                  0) if like and fusion.names[b.name].startswith("arg") \
            else filled(b)  # fmt: skip
        memory[b.name] = data.clone()
    (got,) = evaluated(fusion.problem, memory).values()
    expected = function(*inputs)
    tolerance = 1e-5 if expected.dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.reshape(-1), expected.double().reshape(-1), rtol=tolerance,
                               atol=tolerance)  # fmt: skip


def test_equal_sites_are_one_problem() -> None:
    def twice(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.relu(F.relu(x @ v) @ w)

    first, second = sites(twice, r(6, 8), r(8, 8), r(8, 8))
    assert isinstance(first, Site) and isinstance(second, Site)
    same = next(f.problem for f in second.fusions if not f.before)
    assert most(first) == same and most(first).key == same.key
    assert most(first).key != site(lambda x, v: F.relu(x @ v), r(7, 8), r(8, 8)).bare.problem.key


def test_all_of_a_problem_is_in_its_key() -> None:
    """What is added may lie otherwise, be scaled otherwise, or not be stored; cards differ."""
    base = site(torch.addmm, r(6, 8), r(6, 5), r(5, 8)).bare.problem
    assert base.bias is not None
    row = replace(base.bias, view=replace(base.bias.view, stride=(ix.ZERO, ix.ONE)))
    scaled = replace(base, scales=(base.bias,))
    others = [
        replace(base, alpha=2.0), replace(base, beta=2.0), replace(base, keeps=False),
        replace(base, bias=row), replace(base, target=Target("sm_90")), scaled,
        replace(scaled, fast=True), replace(base, target=Target("sm_100")),
        replace(base, bias=None), replace(base, result=replace(base.result, offset=ix.ONE)),
    ]  # fmt: skip
    fused = most(site(lambda x, w: (x @ w).sin(), r(6, 5), r(5, 8)))
    (store,) = fused.epilogue
    apart = replace(store, value=build.op("neg", store.value)), replace(store, mode="add")
    others += [fused, *(replace(fused, epilogue=(s,)) for s in apart)]
    assert len({p.key for p in (base, *others)}) == 1 + len(others)
    assert replace(base).key == base.key


# ---- what is fused, and what is not


def test_the_product_is_kept_where_it_is_needed() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, F.gelu(y)

    found = site(both, r(6, 5), r(5, 8))
    assert most(found).keeps and len(most(found).writes) == 2
    alone = site(lambda x, w: F.gelu(x @ w), r(6, 5), r(5, 8))
    assert not most(alone).keeps and len(most(alone).writes) == 1

    def read_later(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y @ (F.gelu(y) @ x)

    first, *_ = sites(read_later, r(8, 8), r(8, 8))
    assert isinstance(first, Site)
    assert most(first).epilogue and most(first).keeps, "another product reads it"


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        pytest.param(lambda x, w: F.layer_norm(x @ w, (8,)), (r(6, 5), r(5, 8)), "it reduces",
                     id="a norm"),
        pytest.param(lambda x, w: (x.to(F16) @ w, 0)[0], (r(64, 128), r(128, 32, dtype=F16)),
                     "more bytes", id="MA-K6"),
        pytest.param(lambda x, w: (x.to(F16) + 1) @ w,
                     (r(8, 8).to(torch.float8_e4m3fn), r(8, 4, dtype=F16)), "arithmetic",
                     id="MA-K5"),
        pytest.param(lambda x: (x + 1) @ (x + 1), (r(8, 8),), "for both operands", id="MA-K14"),
        pytest.param(lambda x, i, w: x[i] @ w, (r(8, 8), torch.arange(8), r(8, 4)),
                     "checks indices", id="checked"),
    ],
)  # fmt: skip
def test_what_is_not_fused_has_a_reason(function: Callable[..., Any], inputs: tuple[Tensor, ...],
                                        reason: str) -> None:  # fmt: skip
    found = site(function, *inputs)
    assert not found.fusions
    assert any(reason in why for why in found.refused.values()), found.refused


def test_a_value_with_another_reader_is_no_prologue() -> None:
    """MA-K1: exactly one use."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y @ w

    assert not site(function, r(6, 5), r(5, 8)).fusions


def test_a_kernel_that_makes_something_else_too_is_no_prologue() -> None:
    found = site(lambda x, w: ((x * 2) @ w, x + 1), r(6, 5), r(5, 8))
    assert not found.fusions
    assert "it makes more than this operand" in found.refused.values()


def test_casts_are_prologues() -> None:
    """MA-K2, MA-K4, MA-K8."""
    found = site(lambda x, w: x.float() @ w, r(63, 120, dtype=F16), r(120, 25))
    assert not most(found).operands[0].is_plain and most(found).operands[1].is_plain
    low = site(lambda x, w: x.to(BF16) @ w, r(12, 8).to(torch.float8_e4m3fn), r(8, 4, dtype=BF16))
    assert not most(low).operands[0].is_plain
    two = site(lambda x, y, w: (x + y).float() @ w, r(6, 5, dtype=F16), r(6, 5, dtype=F16), r(5, 8))
    assert {n.arg for n in loads(most(two).operands[0].value)} == {"x3", "x4"}


def test_fusions_are_offered_from_the_largest() -> None:
    found = site(lambda x, y: ((x - 1.1) @ (y + 1.1)) * 1.1, r(64, 12), r(12, 6))
    assert [(len(f.before), f.after is not None) for f in found.fusions] == [
        (2, True), (0, True), (2, False)]  # fmt: skip
    with config.patch(prologue_fusion=False):
        found = site(lambda x, y: ((x - 1.1) @ (y + 1.1)) * 1.1, r(64, 12), r(12, 6))
        assert [(len(f.before), f.after is not None) for f in found.fusions] == [(0, True)]
    with config.patch(epilogue_fusion=False, prologue_fusion=False):
        found = site(lambda x, y: ((x - 1.1) @ (y + 1.1)) * 1.1, r(64, 12), r(12, 6))
        assert not found.fusions


def test_ma_j19_all_fusions_of_a_product_are_offered_at_once_and_each_once() -> None:
    """Those with the epilogue come before those with prologues alone; no pair is asked twice."""
    found = site(lambda x, y: ((x - 1.1) @ (y + 1.1)) * 1.1, r(64, 12), r(12, 6))
    keys = [f.problem.key for f in (found.bare, *found.fusions)]
    assert len(keys) == len(set(keys)) == 4
    after = [f.after is not None for f in found.fusions]
    assert after == sorted(after, reverse=True)


def test_ma_j19_a_nest_of_two_products_is_offered_to_both_in_turn() -> None:
    """In the order of the program: once the first has taken it the second finds none."""

    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return ((a @ b) * (c @ d)).relu()

    both = sites(function, *(r(8, 8) for _ in range(4)))
    after = [[f.after for f in s.fusions] for s in both if isinstance(s, Site)]
    assert after == [[2], [2]]


def test_ma_j19_a_product_takes_one_epilogue() -> None:
    """The next that uses it; what comes later finds the product in memory."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return torch.linalg.inv(y.sin()) + y

    found = site(function, r(8, 5), r(5, 8))
    assert len(found.fusions) == 1 and most(found).keeps
    (store,) = most(found).epilogue
    assert store.value.op == "sin"


def test_a_sum_of_products_is_one() -> None:
    """MA-C1, MA-C4: of equal shapes, and with what follows."""

    def function(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.relu(x @ v + y @ w)

    last = sites(function, r(6, 5), r(5, 8), r(6, 5), r(5, 8))[-1]
    assert isinstance(last, Site)
    assert [f.problem.op for f in last.fusions] == ["mm_plus_mm", "mm"]
    assert len(most(last).operands) == 4 and most(last).epilogue and most(last).bias is None
    other = sites(function, r(6, 5), r(5, 8), r(6, 7), r(7, 8))[-1]
    assert isinstance(other, Site) and {f.problem.op for f in other.fusions} == {"mm"}
    plain = sites(lambda x, v, y, w: x @ v + y @ w, r(6, 5), r(5, 8), r(6, 5), r(5, 8))[-1]
    assert isinstance(plain, Site) and [f.problem.op for f in plain.fusions] == ["mm_plus_mm"]


def test_what_overwrites_an_operand_stays_apart() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        x.copy_(y.relu())
        return x * 2

    found = site(function, r(8, 8), r(8, 8))
    assert not found.fusions
    assert list(found.refused.values()) == ["it overwrites what the product uses"]


def test_what_an_operand_is_made_from_may_not_change_before_the_product() -> None:
    b = Build()
    x, w = b.input(8, 8), b.input(8, 8)
    y, out = b.buffer((8, 8)), b.buffer((8, 8))
    i, j = b.loops(8, 8)
    value, place = b.at(x, i, j), b.index(x, i, j)
    made = b.nest([i, j], Store(y, place, build.op("add", value, value)))
    changed = b.nest([i, j], Store(x, place, build.op("neg", value)))
    call = b.call(torch.ops.aten.mm.default, (b.view(y), b.view(w)), out)
    program = b.returns(out)
    groups = [Group((made,), made.loops), Group((changed,), changed.loops), Group(call=call)]
    found = fuse.site(program, [groups[0], groups[2]], 1)
    assert isinstance(found, Site) and [f.before for f in found.fusions] == [(0,)]
    found = fuse.site(program, groups, 2)
    assert isinstance(found, Site) and not found.fusions
    assert found.refused == {made.name: "what it reads is overwritten in between"}


def test_what_reads_other_points_of_what_it_overwrites_stays_apart() -> None:
    """Row by row that is one kernel; tiles of a product have parts of rows."""

    def function(x: Tensor, w: Tensor, z: Tensor) -> None:
        z.copy_(x @ w + z.flip(1))

    found = site(function, r(8, 8), r(8, 8), r(8, 8))
    assert not found.fusions
    assert "it overwrites what other points of it read" in found.refused.values()


def test_an_index_that_walks_part_of_the_product_is_not_solved() -> None:
    problem = site(lambda x, w: x @ w, r(6, 5), r(5, 8)).bare.problem
    view = View("c", problem.result.size, problem.result.stride, ix.ZERO, torch.float32)
    m, n = problem.place
    whole = ix.linearize((m, n), view.stride)
    found = parts.solved(whole, (m, n), view, problem.place)
    assert found == {m: m, n: n}
    assert parts.solved(ix.mul(m, 8), (m,), view, problem.place) is None
    flat = substitute(whole, {})
    assert free_vars(flat) == {m, n}
