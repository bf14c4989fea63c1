"""Weights of four bits in tiles of a matrix unit: whole programs in Triton's interpreter, and what
the kernels are compiled to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.test_gemm_compile import compiled
from tests.gemm_programs import host, most_fused
from tests.narrow import BF16, r, tiled
from tilewright import config
from tilewright.gemm import fuse
from tilewright.gemm.fuse import Fusion
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.hooks import advance
from tilewright.gemm.plan import Described, Memory
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.tiled_weights import TiledProblem
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.ir import index as ix
from tilewright.ir.expr import const, substitute, sym, var
from tilewright.ir.program import Buffer, Opaque, Origin, Program, View
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

packed = torch.ops.aten._weight_int4pack_mm


@pytest.fixture(autouse=True)
def _fused() -> Iterator[None]:
    select.add_preprocessing_fn(most_fused)
    with config.patch({"max_autotune": True, "cuda.arch": "sm_90"}):
        yield
    select.clear_preprocessing_fns()


def layer(x: Tensor, w: Tensor, group: int, s: Tensor) -> Tensor:
    return torch.relu(packed(x, w, group, s)) + 1


def given(x: Tensor, n: int, inner: int, group: int) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of the operator, and its result in float64."""
    k = x.shape[1]
    q = torch.randint(0, 16, (n, k))
    s = torch.stack([r(k // group, n), r(k // group, n)], -1)
    wide = s.double().repeat_interleave(group, 0)
    weight = ((q.t() - 8) * wide[..., 0] + wide[..., 1]).to(BF16).double()
    return (x, tiled(q, inner), group, s), x.double() @ weight


def run(function: Callable[..., Tensor], *args: Any, backends: str = "TRITON", name: str = ""
        ) -> tuple[Tensor, str, list[str]]:  # fmt: skip
    """The result, the program, and what it calls."""
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": backends}
    more = {"test_configs.autotune_choice_name_regex": name} if name else {}
    with as_cuda(), config.patch({"test_configs.max_mm_configs": 1, **more}), fresh_cache():
        call = torch.compile(function, backend="tilewright", dynamic=False, options=options)
        found, code = run_and_get_code(call, *args)
    text = "\n".join(code)
    return found, text, re.findall(r"^ *(triton_\w+|extern_\w+)\(", host(text), re.M)


@pytest.mark.parametrize(("m", "n", "k", "inner", "group", "name"), [
    (1, 32, 256, 8, 128, "mv"), (5, 24, 384, 4, 64, "mv"), (17, 40, 384, 8, 128, "mm_\\d"),
    (3, 16, 256, 8, 32, "mm_\\d"), (16, 8, 160, 2, 32, "mm_\\d"), (33, 72, 512, 2, 256, "split_k"),
])  # fmt: skip
def test_the_operator_and_what_follows_are_a_kernel(m: int, n: int, k: int, inner: int, group: int,
                                                    name: str) -> None:  # fmt: skip
    """Of any piece and group, rows, columns and templates; as near to float64 as one rounding."""
    args, exact = given(r(m, k) / k**0.5, n, inner, group)
    found, code, called = run(layer, *args, name=name)
    assert len(called) == 1 and called[0].startswith("triton_tem_fused_"), called
    wanted = exact.to(BF16).relu() + 1
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2**-7, atol=2**-7)
    assert code.count("tl.load(p_b ") == 1, "words are loaded once"


def test_what_makes_x_is_computed_where_it_is_read() -> None:
    """At the places along k that words have; and a result that is a window is stored as it lies."""

    def function(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return packed(x.to(BF16), w, 64, s).t()

    x = torch.randint(-8, 9, (3, 128), dtype=torch.int8)
    (_, w, _, s), exact = given(x, 16, 4, 64)
    found, _, called = run(function, x, w, s)
    assert len(called) == 1, called
    torch.testing.assert_close(found.double(), exact.t(), rtol=2**-7, atol=2**-7)


# ---- problems


def view(name: str, size: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> View:
    sizes = tuple(map(const, size))
    return View(name, sizes, ix.contiguous_strides(list(sizes)), const(offset), dtype)


def posed(m: int, n: int, k: int, inner: int, of: int, device: str = "cuda",
          **changed: Any) -> Fusion | str:  # fmt: skip
    """The problem of a call, its views as they are with these changed."""
    x, c = view("x", (m, k), BF16), view("y", (m, n), BF16)
    w = view("w", (n // 8, k // (16 * inner), 32, inner // 2), torch.int32, 8)
    s = view("s", (k // of, n, 2), BF16, 4)
    made = {"x": x, "w": w, "group": of, "s": s} | changed
    buffers = {v.buffer: Buffer(v.buffer, v.dtype, torch.device(device, 0), (const(1 << 24),),
                                (ix.ONE,), "temporary") for v in (x, w, s, c)}  # fmt: skip
    call = Opaque("call", packed.default, tuple(made.values()), {}, (), ("y",), Origin(()), out=c)
    return fuse.alone(Program(buffers), call)


def test_the_library_is_called_as_the_program_does() -> None:
    """Its arguments are made of the problem, whose names are its own."""
    found = posed(16, 64, 512, 8, 128)
    assert isinstance(found, Fusion) and isinstance(found.problem, TiledProblem)
    names = {name: mine for mine, name in found.names.items()}
    x, w, group, s = found.problem.given
    assert x == view(names["x"], (16, 512), BF16) and group == 128
    assert w == view(names["w"], (8, 4, 32, 4), torch.int32, 8)
    assert s == view(names["s"], (4, 64, 2), BF16, 4)
    with config.patch({"max_autotune_gemm_backends": "ATEN,TRITON"}):
        first, *others = (c for p in found.problem.providers
                          for c in p.candidates(found.problem, "quick"))  # fmt: skip
    assert first == found.problem.library and first.name == "_weight_int4pack_mm"
    assert {c.provider for c in others} == {"TRITON"}
    assert len(set(found.problem.contents[names["w"]])) > 1000


def test_why_it_is_the_librarys() -> None:
    size = sym("s0", lower=1, hint=16)
    rows = replace(view("x", (16, 256), BF16), size=(size, const(256)))
    turned = replace(view("x", (16, 256), BF16), stride=(const(512), ix.ONE))
    for changed, why in (
        ({"x": rows}, "known only at run time"), ({"x": turned}, "not contiguous"),
        ({"x": view("x", (16, 256), torch.float16)}, "no kernels for torch.float16"),
        ({"group": 48}, "groups of 48"), ({"device": "cpu"}, "only NVIDIA's cards"),
        ({"s": view("s", (2, 32, 2), BF16)}, "do not fit each other"),
    ):  # fmt: skip
        given: dict[str, Any] = changed
        found = posed(16, 64, 256, 4, 128, **given)
        assert isinstance(found, str) and why in found, (changed, found)


@pytest.mark.parametrize(("m", "template", "c"), [
    (1, "mv", GemmConfig(1, 32, 128, 3, 4)), (16, "mm", GemmConfig(16, 64, 128, 4, 4)),
])  # fmt: skip
def test_words_are_copied_sixteen_bytes_at_once(m: int, template: str, c: GemmConfig) -> None:
    """And `x` by pairs, on the matrix units past the registers; a scale is loaded for a column."""
    found = posed(m, 4096, 4096, 8, 128)
    assert isinstance(found, Fusion)
    chosen = TritonTemplate.all_templates[template]
    made = compiled(TritonCandidate(found.problem, chosen, c, template, 0.0))
    assert "cp.async.cg.shared.global" in made["ptx"] and made["facts"].stack == 0
    assert len(re.findall(r"ld\.global", made["ptx"])) <= 4
    if template == "mm":
        assert "cp.async.ca.shared.global" in made["ptx"]


def test_blocks_have_whole_pieces() -> None:
    """Of k, or words would not be loaded as they lie."""
    for m in (1, 16, 64):
        found = posed(m, 512, 512, 8, 128)
        assert isinstance(found, Fusion)
        offered = TritonProvider().candidates(found.problem, "max")
        blocks = {c.config.block_k for c in offered if isinstance(c, TritonCandidate)}
        assert blocks == {128}, blocks


def test_what_weights_hold_while_they_are_timed() -> None:
    """All of them are numbers that were drawn: with zeros a wrong order would be right."""
    w = Buffer("w", torch.int32, torch.device("cpu"), (const(10),), (ix.ONE,), "input")
    (held, *_) = Memory(Described((w,), (), (), contents=(("w", (3, -4, 5)),))).sets
    assert held["w"].tolist() == [3, -4, 5, 3, -4, 5, 3, -4, 5, 3]


def test_how_far_a_block_is() -> None:
    """What an index is at the first k of a block, and what it is in the first block, add up."""
    k, n = var("k", const(1024)), var("n", const(8))
    regular = ix.add(ix.mul(ix.floordiv(k, 32), 7), ix.mod(k, 32), ix.mul(n, 3),
                     ix.mul(ix.mod(ix.floordiv(k, 4), 8), 5))  # fmt: skip
    far = advance(regular, k, 64)
    assert far is not None
    for at in range(0, 1024, 37):
        first = at // 64 * 64
        whole, ahead, rest = (substitute(e, {k: const(v), n: const(2)}) for e, v in
                              ((regular, at), (far, first), (regular, at - first)))  # fmt: skip
        assert whole is ix.add(ahead, rest)
    odd = (ix.floordiv(k, 48), ix.floordiv(ix.add(k, 1), 2), ix.mul(k, ix.mod(k, 2)))
    assert [advance(e, k, 64) for e in odd] == [None] * 3
