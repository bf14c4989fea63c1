"""Norms that the product behind them computes: whole programs in Triton's interpreter, and what the
kernels are compiled to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compile.as_cuda import CARD, as_cuda
from tests.compile.test_gemm_compile import compiled
from tests.gemm_programs import host
from tests.products import HOPPER
from tilewright import config
from tilewright.codegen.triton.generate import limits
from tilewright.gemm import fuse
from tilewright.gemm.fuse import Site
from tilewright.gemm.heuristics import GemmConfig, estimate
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate
from tilewright.graph import decompositions
from tilewright.graph.simplify import simplify
from tilewright.host.spare import Spare
from tilewright.lower.graph import lower
from tilewright.schedule.plan import schedule
from tilewright.testing import fresh_cache, run_and_get_code

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    torch.manual_seed(0)
    with config.patch({"max_autotune": True}):
        yield


def llama(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """As transformers has it, through float32 and back."""
    wide = x.to(F32) if x.dtype != torch.float64 else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(g * wide.to(x.dtype), w)


def rms(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, x.shape[-1:], g), w).relu()


def unit(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """Without a weight, with a bias, divided by the root."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    root = (wide.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6).sqrt()
    return F.linear((wide / root).to(x.dtype), w, g[: w.shape[0]])


def layer(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], g, g.flip(0)), w)


def softmax(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(torch.softmax(x * 3, -1), w)


def given(m: int, n: int, k: int, dtype: torch.dtype, lead: tuple[int, ...] = ()
          ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x, g, w = torch.randn(*lead, m, k) * 2, torch.rand(k) + 0.5, torch.randn(n, k) / k**0.5
    return x.to(dtype), g.to(dtype), w.to(dtype)


def run(function: Function, *args: Any, name: str) -> tuple[Tensor, str, list[str]]:
    """The result of the plan so named, the program, and what it calls."""
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    more = {"test_configs.max_mm_configs": 1, "test_configs.autotune_choice_name_regex": name}
    with as_cuda(), config.patch(more), fresh_cache():
        call = torch.compile(function, backend="tilewright", dynamic=False, options=options)
        found, code = run_and_get_code(call, *args)
    text = "\n".join(code)
    return found, text, re.findall(r"^ *(triton_\w+|extern_\w+)\(", host(text), re.M)


def error(found: Tensor, function: Function, args: tuple[Tensor, ...]) -> float:
    return (found.double() - function(*(a.double() for a in args))).abs().max().item()


CASES = [
    (llama, BF16, 3, 33, 160, "mv_\\d+_prologue_scaled"),
    (rms, BF16, 17, 40, 1000, "split_k_\\d+_prologue_scaled_epilogue"),
    (layer, BF16, 17, 40, 200, "triton_mm_\\d+_prologue_rows"),
    (layer, BF16, 2, 40, 4100, "mv_\\d+_prologue_rows"),
]
MORE = [
    (llama, BF16, 5, 33, 160, "triton_mm_\\d+_prologue_scaled"),
    (rms, F32, 1, 24, 500, "mv_\\d+_prologue_scaled_epilogue"),
    (unit, BF16, 7, 16, 96, "triton_mm_\\d+_prologue_scaled"),
    (llama, F16, 5, 33, 160, "triton_mm_\\d+_prologue_rows"),
    (layer, F32, 9, 24, 700, "split_k_\\d+_prologue_rows"),
    (softmax, BF16, 4, 16, 130, "triton_mm_\\d+_prologue_rows"),
]


@pytest.mark.parametrize(("function", "dtype", "m", "n", "k", "name"), [
    *CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])  # fmt: skip
def test_a_norm_and_what_it_is_multiplied_by_are_a_kernel(
    function: Function, dtype: torch.dtype, m: int, n: int, k: int, name: str
) -> None:
    """As near to float64 as eager is, in every template, at sizes that blocks do not fit."""
    args = given(m, n, k, dtype)
    found, _, called = run(function, *args, name=name)
    assert len(called) == 1 and called[0].startswith("triton_tem_fused_"), called
    allowed = error(function(*args), function, args)
    assert error(found, function, args) <= 1.5 * allowed + 1e-5


def test_a_gate_reads_the_rows_themselves() -> None:
    """Both products of one read of what is normalised."""
    x, g, w = given(5, 24, 136, BF16)

    def function(x: Tensor, g: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], g)
        return F.silu(F.linear(y, w)) * F.linear(y, v)

    args = x, g, w, w.flip(0).contiguous()
    found, code, called = run(function, *args, name="mm_pair_\\d+_prologue_scaled")
    assert len(called) == 1 and code.count("tl.load(") == 4, called
    assert error(found, function, args) <= 1.5 * error(function(*args), function, args)


# ---- what there is to choose from


def sites(function: Callable[..., Any], *args: Tensor) -> list[Site]:
    """Of its products, on a card; nothing is built. What is written in place stays so."""

    def flat(*given: Tensor) -> list[Tensor]:
        made = function(*given)
        return [made] if isinstance(made, Tensor) else list(made)

    gm = make_fx(flat, decomposition_table=decompositions.table())(*args)
    simplify(gm)
    program = lower(gm)
    program.buffers = {name: replace(b, device=CARD) for name, b in program.buffers.items()}
    with config.patch({"cuda.arch": "sm_90"}):
        plan = schedule(program, lambda program, group: limits(program, group, HOPPER))
        groups = [step.group for step in plan.steps]
        found = [fuse.site(plan.program, groups, k) for k, g in enumerate(groups)
                 if fuse.is_product(g)]  # fmt: skip
    assert found
    return [s for s in found if isinstance(s, Site)]


def ways(function: Callable[..., Any], *args: Tensor) -> tuple[list[str], str]:
    """How rows are normalised by its first product, and what was refused."""
    site, *_ = sites(function, *args)
    found = {"scaled" if f.problem.factor is not None else "rows" for f in site.fusions
             if f.problem.factor is not None or f.problem.walks_rows}  # fmt: skip
    return sorted(found), " ".join(site.refused.values())


def test_which_norms_a_product_computes() -> None:
    """And the reasons of those it does not."""
    x, g, w = given(8, 16, 64, BF16)
    assert ways(llama, x, g, w) == (["rows", "scaled"], "")
    assert ways(layer, x, g, w) == (["rows"], "")
    found, why = ways(llama, x.repeat(20, 1), g, w)  # too many to be walked first
    assert (found, why) == (["scaled"], "")
    found, why = ways(layer, x.repeat(20, 1), g, w)
    assert not found and "no products with a number of their row" in why
    found, why = ways(llama, x.repeat(80, 1), g, w)
    assert not found and "rows are many" in why
    found, why = ways(llama, *(t.to(F16) for t in (x.repeat(20, 1), g, w)))
    assert not found and "may be too large" in why
    assert ways(lambda x, g, w: F.linear(x.cumsum(-1), w), x, g, w)[0] == []
    assert ways(lambda x, g, w: F.linear(torch.softmax(x, 0), w), x, g, w)[0] == []

    def kept(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x, -1)
        return F.linear(y, w), y

    def twice(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.softmax(x, -1)
        return F.linear(y, w), F.linear(y, w + 1)

    def by_itself(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        return y @ y.t()

    for function in (kept, twice, by_itself):
        assert ways(function, x, g, w)[0] == []


def test_rows_of_several_dimensions() -> None:
    x, g, w = given(4, 16, 64, BF16, (3,))
    site, *_ = sites(llama, x, g, w)
    problems = [f.problem for f in site.fusions]
    assert problems and all(p.hints == (1, 12, 16, 64) for p in problems)


@pytest.mark.parametrize("function", [llama, unit, layer, softmax])
def test_the_last_resort_computes_the_same(function: Function) -> None:
    """Of every way: what is reduced is a node of its own."""
    x, g, w = given(6, 16, 96, F32)
    site, *_ = sites(function, x, g, w)
    expected, problems = function(x, g, w), [f.problem for f in site.fusions]
    assert any(p.walks_rows for p in problems)
    for problem in problems:
        resort, out = Spare.product(problem), torch.full((6, 16), torch.nan)
        sizes = {name: b.size for name, b in problem.memory.items()}
        held = {n: (w if n == "b" else g if len(sizes[n]) == 1 else x) for n in problem.reads}
        held |= dict.fromkeys(problem.writes, out)
        resort(*(held[name] for name in resort.names))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("function", "m", "template", "c"), [
    (llama, 1, "mv", GemmConfig(1, 16, 256, 3, 4)),
    (llama, 16, "mm", GemmConfig(16, 64, 128, 4, 4)),
    (layer, 16, "mm", GemmConfig(16, 64, 128, 4, 4)),
    (llama, 256, "mm", GemmConfig(64, 128, 64, 4, 4)),
])  # fmt: skip
def test_nothing_spills(function: Function, m: int, template: str, c: GemmConfig) -> None:
    """Compiled for a card: weights are copied past the registers, and what is summed of rows is in
    them beside the product."""
    x, w = torch.empty(m, 4096, dtype=BF16), torch.empty(4096, 4096, dtype=BF16)
    site, *_ = sites(function, x, w[0], w)
    chosen = TritonTemplate.all_templates[template]
    for fusion in site.fusions:
        assert chosen.limits(fusion.problem) == ""
        made = compiled(TritonCandidate(fusion.problem, chosen, c, template, 0.0))
        assert made["facts"].stack == 0
        assert "cp.async.cg.shared.global" in made["ptx"]
        assert ("mma" in made["ptx"]) == (template == "mm")


def test_walking_rows_has_its_time() -> None:
    """By the model: what they take from the cache, in each program. Scaled last they take little
    more than as they are: they are copied past the registers, too."""
    c = GemmConfig(16, 64, 128, 4, 4)
    site, *_ = sites(llama, *given(64, 512, 4096, BF16))
    scaled, walked = (next(f.problem for f in site.fusions if f.problem.walks_rows == first)
                      for first in (False, True))  # fmt: skip
    apart = [estimate(p, c) for p in (scaled.bare, scaled, walked)]
    assert apart[0] <= apart[1] < min(1.5 * apart[0], apart[2] - 1)
