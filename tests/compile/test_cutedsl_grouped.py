"""Grouped products in the CuTe DSL: when they are offered, what is compiled, how it is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.compile.as_cuda import as_cuda
from tests.compile.test_cutedsl_compile import fake, launched, ptx
from tests.cutedsl import running
from tests.products import HOPPER
from tilewright import config, metrics
from tilewright.gemm.cutedsl import build, call, grouped, quack
from tilewright.gemm.cutedsl.build import Number, Pointer
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.cutedsl.template import Layout
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, sym
from tilewright.ir.program import Buffer, Opaque, Origin, Program, View
from tilewright.runtime import driver
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code

pytest.importorskip("quack", reason="quack is not installed")
__all__ = ["fake"]
bf16 = torch.bfloat16
ON = {"max_autotune": True, "max_autotune_gemm_backends": "CUTEDSL", "compile_threads": 1}
CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def options() -> Generator[None]:
    with fresh_cache(), config.patch(ON):
        yield


def view(name: str, size: tuple[Any, ...], stride: tuple[int, ...] | None = None, offset: int = 0,
         dtype: torch.dtype = bf16) -> View:  # fmt: skip
    sizes: tuple[Expr, ...] = tuple(n if isinstance(n, Expr) else const(n) for n in size)
    steps = ix.contiguous_strides(sizes) if stride is None else tuple(map(const, stride))
    return View(name, sizes, steps, const(offset), dtype)


def asked(groups: int = 4, rows: Any = 512, n: int = 128, k: int = 64, **changed: View
          ) -> tuple[list[View], Layout]:  # fmt: skip
    found = {"a": view("a", (rows, k)), "b": view("b", (groups, k, n)),
             "offs": view("offs", (groups,), dtype=torch.int32), **changed}  # fmt: skip
    out = view("out", (rows, n))
    layout = Layout(Buffer("out", changed.get("out", out).dtype, CARD, out.size, out.stride))
    return [found["a"], found["b"], found["offs"]], layout


def offered(views: list[View], layout: Layout, **numbers: Any) -> list[grouped.GroupedCaller]:
    found: list[Any] = []
    grouped.choices(found, views, layout, **numbers)
    return found


@pytest.mark.parametrize(("groups", "k", "n"), [(2, 64, 128), (8, 128, 256)])
def test_cd_l1_a_hopper_kernel_compiles(groups: int, k: int, n: int) -> None:
    (made,) = offered(*asked(groups, 1024, n, k))
    request = made.request(HOPPER)
    build.submit(request).result()
    text = ptx(request)
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text


@pytest.mark.parametrize("chosen", [0, 1], ids=lambda k: str(grouped.BLACKWELL[k]))
def test_cd_l1_a_blackwell_kernel_compiles(chosen: int) -> None:
    """CD-L1, CD-L4: with tiles of its own, one block's or a pair's."""
    with config.patch({"cuda.arch": "sm_100", "cutedsl_enable_autotuning": True}):
        every = offered(*asked(8, 1024, 256, 128))
        assert tuple(c.config for c in every) == grouped.BLACKWELL
        request = every[chosen].request(Target("sm_100"))
        assert request.architecture == "sm_100a" and "tcgen05" in ptx(request)


A_LAYOUTS = {
    "contiguous": view("a", (1024, 64)),
    "offset": view("a", (1024, 64), offset=128),
    "pitch": view("a", (1024, 64), stride=(72, 1)),
    "view": view("a", (1024, 64)),
}
B_LAYOUTS = {
    "contiguous": view("b", (8, 64, 128)),
    "expanded": view("b", (8, 64, 128), (0, 128, 1)),
}


@pytest.mark.parametrize("b", list(B_LAYOUTS))
@pytest.mark.parametrize("a", ["offset", "pitch"])
def test_cd_l2_layouts_are_taken_as_they_are(a: str, b: str) -> None:
    (made,) = offered(*asked(8, 1024, 128, 64, a=A_LAYOUTS[a], b=B_LAYOUTS[b]))
    text = made.rendered().text
    assert ("p_a + 128" in text) == (a == "offset") and ("Int64(72)" in text) == (a == "pitch")
    assert ("stride=(0, 1, cute.assume(cutlass.Int64(128)" in text) == (b == "expanded")
    build.compiled(made.request(HOPPER))


REASONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an older card": ({"cuda.arch": "sm_80"}, {}, "Hopper's and Blackwell's"),
    "not asked for": ({"max_autotune": False}, {}, "nothing is measured"),
    "another backend": ({"max_autotune_gemm_backends": "ATEN"}, {}, "not in max_autotune_gemm"),
    "a bias": ({}, {"bias": 1}, "it has bias"),
    "rank": ({}, {"b": view("b", (64, 128))}, "not rows of one matrix"),
    "float16": ({}, {"a": view("a", (512, 64), dtype=torch.float16)}, "only bfloat16"),
    "offsets of 64 bits": ({}, {"offs": view("offs", (4,), dtype=torch.int64)}, "only bfloat16"),
    "rows": ({}, {"a": view("a", (512, 64), stride=(65, 1))}, "multiples of 16 bytes"),
    "start": ({}, {"a": view("a", (512, 64), offset=3)}, "multiples of 16 bytes"),
    "groups": ({}, {"offs": view("offs", (2000,), dtype=torch.int32)}, "number of groups"),
    "a dynamic width": ({}, {"b": view("b", (4, 64, sym("s1", hint=128)), (8192, 128, 1))},
                        "other than the number of rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REASONS))
def test_cd_l3_when_nothing_is_offered(name: str) -> None:
    options, changed, said = REASONS[name]
    numbers = {n: v for n, v in changed.items() if not isinstance(v, View)}
    views, layout = asked(**{n: v for n, v in changed.items() if isinstance(v, View)})
    with config.patch(options):
        assert said in grouped.limits(views, layout, **numbers)
        assert offered(views, layout, **numbers) == []


def test_cd_l3_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "version", lambda: "")
    assert "quack is not installed" in grouped.limits(*asked())


def test_cd_l4_configurations() -> None:
    views, layout = asked()
    assert [c.config for c in offered(views, layout)] == [quack.Config(128, 256, 2, 1, False)]
    with config.patch(cutedsl_enable_autotuning=True):
        assert len(offered(views, layout)) == len(grouped.DEFAULTS) == 8
        with config.patch(max_autotune_gemm_search_space="exhaustive"):
            every = offered(views, layout)
    assert len(every) == len(grouped.EXHAUSTIVE) == len({c.hash_key() for c in every}) >= 39
    assert all("cutlass.Float32, cutlass.BFloat16" in c.rendered().text for c in every[:3])


@pytest.mark.parametrize(("rows", "groups"), [(1024, 8), (1000, 7), (100, 30), (16, 1)])
def test_cd_l5_offsets_while_it_is_timed(rows: int, groups: int) -> None:
    found = grouped.offsets(rows, groups)
    assert len(found) == groups and found[-1] == rows and list(found) == sorted(found)
    assert all(e % 8 == 0 for e in found[:-1]) and found == grouped.offsets(rows, groups)
    sizes = [b - a for a, b in zip((0, *found), found, strict=False)]
    assert max(sizes) <= rows / groups + 16


def test_cd_l6_neither_offsets_nor_rows_are_another_kernel(fake: Path) -> None:
    rows = sym("s0", lower=0, hint=512)
    (made,) = offered(*asked(4, rows))
    request = made.request(HOPPER)
    assert request.arguments == (*(Pointer(bf16),) * 2, Pointer(torch.int32), Pointer(bf16),
                                 Number(), Pointer(torch.int32))  # fmt: skip
    before = metrics.counters["inductor"]["cutedsl_kernel_cache_miss"]
    with driver.use(str(fake)) as used:
        loaded = build.load(request)
        loaded.ready(0)
        memory = [torch.zeros(1 << 16, dtype=d) for d in (bf16, bf16, torch.int32, bf16)]
        for total, ends in (
            (512, (128, 256, 384, 512)),
            (512, (0, 0, 500, 512)),
            (77, (1, 2, 3, 77)),
        ):
            memory[2][:4] = torch.tensor(ends)
            addresses = [m.data_ptr() for m in memory]
            loaded.function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int32, ctypes.c_void_p,
                                                               ctypes.c_void_p]  # fmt: skip
            assert loaded.function(*addresses, total, memory[0].data_ptr(), None) == 0
        found = launched(used.library)[-6:]
    assert [tuple(f.block) for f in found[::2]] == [(32, 1, 1)] * 3
    assert {tuple(f.cluster) for f in found[1::2]} == {(2, 1, 1)}
    assert metrics.counters["inductor"]["cutedsl_kernel_cache_miss"] == before + 1


def reference(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    starts = [0, *ends.tolist()]
    parts = [a[s:e] @ b[g] for g, (s, e) in enumerate(pairwise(starts))]
    return torch.cat(parts)


def program(backends: str) -> tuple[str, list[tuple[Any, ...]]]:
    """A program for a card, on CPU tensors; its kernel is called with what is kept here."""
    seen: list[tuple[Any, ...]] = []

    def run(self: CuteSource, *args: Any) -> None:
        seen.append(args)
        a, b, ends, out = args[:4]
        out.copy_(reference(a, b, ends))

    def f(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._grouped_mm(a, b, ends)

    ends = torch.tensor([16, 16, 40], dtype=torch.int32)  # CD-L7: the second is empty
    a, b = torch.randn(40, 64).to(bf16), torch.randn(3, 64, 32).to(bf16)
    with (
        config.patch(max_autotune_gemm_backends=backends), as_cuda(), running(),
        mock.patch.object(CuteSource, "__call__", run),
        mock.patch.object(build, "make", lambda request: request.key),
    ):  # fmt: skip
        compiled = torch.compile(f, backend="tilewright")
        got, codes = run_and_get_code(compiled, a, b, ends)
    torch.testing.assert_close(got, reference(a, b, ends), rtol=2e-2, atol=2e-2)
    return codes[0], seen


def test_cd_l1_l7_it_is_in_the_program() -> None:
    code, seen = program("CUTEDSL")
    assert "cutedsl_grouped_mm" in code and len(seen) == 1 and len(seen[0]) == 4


def test_the_operator_is_a_choice_too() -> None:
    """Without a card to time on, the library's: called as if nobody had asked."""
    code, seen = program("ATEN,CUTEDSL")
    assert seen == [] and "extern_aten__grouped_mm" in code and ".copy_" not in code


def test_cd_l5_timed_memory_has_offsets() -> None:
    views, layout = asked(4, 512)
    args = tuple((n, False, call.Nth(k)) for k, n in enumerate(("self", "mat2", "offs")))
    target = call.TemplateCall(
        "aten._grouped_mm.default", args, tuple(offered(views, layout)), True
    )
    buffers = {v.buffer: Buffer(v.buffer, v.dtype, CARD, v.size, v.stride)
               for v in (*views, layout.view)}  # fmt: skip
    node = Opaque("c", target, tuple(views), {}, (), (), Origin(()), out=layout.view)
    with mock.patch.object(call.Target, "of", return_value=HOPPER):
        problem = target.problem(Program(buffers=buffers), node)
    assert not isinstance(problem, str)
    assert problem.contents == {"offs": (128, 256, 384, 512)}
