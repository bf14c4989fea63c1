"""A gate as one product of the CuTe DSL's library: columns of two matrices that take turns."""

from __future__ import annotations

import ctypes
import pickle
import re
import struct
import subprocess
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.test_cutedsl_compile import laid, ptx
from tests.cutedsl import evaluate, of
from tests.ours import torch_may_take_over
from tests.products import Builder, Made, problem
from tilewright import config
from tilewright.gemm.cutedsl import build, gated, quack
from tilewright.gemm.cutedsl.epilogue import Epilogue, translated
from tilewright.gemm.cutedsl.provider import CuteDSLProvider
from tilewright.gemm.cutedsl.resort import Resort
from tilewright.gemm.cutedsl.source import FAR, CuteSource
from tilewright.gemm.problem import definition
from tilewright.ir import build as b
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.runtime import driver
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code

pytest.importorskip("nvidia_cutlass_dsl", reason="the CuTe DSL is not installed")
HERE = Path(__file__).parent
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
M, N, K = 320, 256, 128
ROWS: dict[str, Any] = {"dtype": bf16}


@pytest.fixture(scope="module", autouse=True)
def cache() -> Generator[Path]:
    """One for all: what a test compiles the next finds."""
    with fresh_cache() as folder, config.patch(compile_threads=1, max_autotune=True):
        yield folder


def _float(e: Expr) -> Expr:
    return b.op("cast", e, arg=f32)


def _silu(c: Expr) -> Expr:
    x = _float(c)
    return b.op("cast", b.op("mul", x, b.op("sigmoid", x)), arg=c.dtype)


Results = dict[str, tuple[Tensor, Expr]]


def swiglu(builder: Builder, c: Expr) -> Results:
    return {"y": (torch.empty(M, N, dtype=c.dtype), b.op("mul", _silu(c), builder.other))}


def kept(builder: Builder, c: Expr) -> Results:
    return {**swiglu(builder, c), "h": (torch.empty(M, N, dtype=c.dtype), builder.other)}


def scaled(builder: Builder, c: Expr) -> Results:
    scale = builder.read("s1", torch.rand(M, 1) + 0.5, builder.m, builder.n)
    y = b.op("mul", b.op("mul", _float(c), scale), _float(builder.other))
    return {"y": (torch.empty(M, N, dtype=c.dtype), b.op("cast", y, arg=c.dtype))}


def weights(dtype: torch.dtype = bf16) -> tuple[Tensor, Tensor]:
    return torch.randn(N, K).to(dtype).t(), torch.randn(N, K).to(dtype).t()


def pair(first: Tensor, second: Tensor, **options: Any) -> Made:
    x = torch.randn(M, K).to(first.dtype)
    options = {"epilogue": swiglu, "keeps": False, **options}
    return problem("mm_pair", x, first, x, second, **options)


BOTH = torch.randn(2 * N, K).to(bf16)
PAIRS: dict[str, Made] = {
    "apart": pair(*weights()),
    "of one matrix": pair(BOTH[:N].t(), BOTH[N:].t()),
    "of one matrix, the second first": pair(BOTH[N:].t(), BOTH[:N].t()),
    "both kept": pair(*weights(), epilogue=kept, keeps=True),
    "a column, float16, any rows": pair(*weights(f16), epilogue=scaled, dynamic=[M]),
}  # fmt: skip


def candidate(name: str, chosen: quack.Config | None = None) -> gated.GatedCandidate:
    p = PAIRS[name].problem
    return gated.GatedCandidate(p, chosen or gated.configurations(p.target)[0], name, 1.0)


def source(name: str) -> CuteSource:
    made = candidate(name).kernel().source
    assert isinstance(made, CuteSource)
    return made


# ---- compiled


@pytest.mark.parametrize("name", ["apart", "both kept"])
def test_a_gate_compiles(name: str) -> None:
    assert CuteDSLProvider().supports(PAIRS[name].problem) == ""
    first, *_ = CuteDSLProvider().candidates(PAIRS[name].problem, "default")
    made = first.kernel().source
    assert isinstance(first, gated.GatedCandidate) and isinstance(made, CuteSource)
    text = ptx(made.request)
    assert "wgmma.mma_async" in text
    # x is two dimensions, both matrices are three, and each result is stored on its own
    for loads, dims in ((1, 2), (1, 3)):
        assert len(re.findall(rf"cp.async.bulk.tensor.{dims}d.shared", text)) == loads
    stores = len(re.findall(r"cp.async.bulk.tensor.2d.global", text))
    assert stores and stores % len(PAIRS[name].problem.writes) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both kept", "a column, float16, any rows"])
@pytest.mark.parametrize("chosen", gated.configurations(Target("sm_90")), ids=str)
def test_every_configuration_compiles(name: str, chosen: quack.Config) -> None:
    made = candidate(name, chosen).kernel().source
    assert isinstance(made, CuteSource)
    build.compiled(made.request)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", gated.configurations(Target("sm_100")), ids=str)
def test_blackwell_kernels_compile(chosen: quack.Config) -> None:
    p = replace(PAIRS["both kept"].problem, target=Target("sm_100"))
    assert gated.limits(p) == ""
    request, _ = gated.GatedCandidate(p, chosen, "gate", 1.0).requested()
    assert "tcgen05" in ptx(request)


# ---- what it computes


def function(found: str) -> Callable[..., dict[str, Any]]:
    """The text of the function a kernel calls."""
    text = found[found.index("def epilogue(") : found.index("MOD = ")]
    return evaluate(text)["epilogue"]


@pytest.mark.parametrize("swapped", [False, True], ids=["in order", "swapped"])
@pytest.mark.parametrize("name", list(PAIRS))
def test_it_means_what_eager_computes(name: str, swapped: bool) -> None:
    """By the function's own text, of neighbours as the kernel would give them: columns as they
    follow each other in memory."""
    made = PAIRS[name]
    p, found = made.problem, translated(made.problem)
    assert isinstance(found, Epilogue)
    known = gated.ahead(p)
    assert (known is None) == ("one matrix" not in name)
    one, two = (laid(made, v.buffer).flatten().as_strided(
        [ix.evaluate(e, made.values) for e in v.size],
        [ix.evaluate(e, made.values) for e in v.stride], ix.evaluate(v.offset, made.values))
        for v in gated.rights(p))  # fmt: skip
    behind = swapped if known is None else known < 0
    order = (two, one) if behind else (one, two)
    x = made.tensors["x0"].view(M, K).float()
    lanes = [x @ w.float() for w in order]
    call = function(source(name).text)
    spare = Resort.of(p, definition(p))
    spare(*(laid(made, n) if n in made.tensors else made.values[n] for n in spare.names))
    for m, n in torch.stack([torch.randint(M, (40,)), torch.randint(N, (40,))], 1).tolist():
        beside = [of(made.tensors[o.view.buffer][m].float()) for o in found.operands]
        flag = [of(torch.tensor(int(swapped), dtype=torch.int32))] if known is None else []
        values = call(tuple(of(lane[m, n]) for lane in lanes), *beside, *flag)
        assert set(values) == {r.name for r in found.results}
        for r in found.results:
            want = made.tensors[r.view.buffer].view(M, N)[m, n].float()
            torch.testing.assert_close(values[r.name].t, want, rtol=2e-2, atol=5e-2)


# ---- launched


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "libfake_cute.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-w", str(HERE / "fake_cute_driver.cpp"), "-o",
                    str(path)], check=True)  # fmt: skip
    return path


@dataclass(frozen=True)
class Descriptor:
    """Of a tensor, as the card reads it: strides are pieces of 16 bytes, their highest bits beside
    each other."""

    address: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, data: bytes, dims: int) -> Descriptor:
        (address,), w = struct.unpack("<Q", data[:8]), struct.unpack("<16I", data[:64])
        high = [w[7] >> (4 * k) & 15 for k in range(dims - 1)]
        strides = tuple(16 * (w[3 + k] | high[k] << 32) for k in range(dims - 1))
        return cls(address, strides, tuple(1 + w[8 + k] for k in range(dims)))


FIRST = 0x7000000000  # an address of the card's, which nobody reads here


@pytest.mark.parametrize("apart", [2 * N * K, -2 * N * K, 1 << 38])
def test_one_descriptor_reaches_both_matrices(apart: int, fake: Path) -> None:
    made = source("apart")
    with driver.use(str(fake)) as used:
        used.library.fake_kept.restype = ctypes.POINTER(ctypes.c_ubyte)
        used.library.fake_keep(4)
        made(FIRST, FIRST, FIRST + apart, FIRST)
        found, swapped = (bytes(used.library.fake_kept(k)[:128]) for k in (2, 3))
        used.library.fake_keep(0)
    assert Descriptor.of(found, 3) == Descriptor(
        min(FIRST, FIRST + apart), (abs(apart), 2 * K), (K, 2, N))  # fmt: skip
    assert struct.unpack("<I", swapped[:4]) == (apart < 0,)


@pytest.mark.parametrize("name", ["of one matrix", "of one matrix, the second first"])
def test_of_one_matrix_nothing_is_asked_at_a_call(name: str, fake: Path) -> None:
    made = source(name)
    assert made.near is None and "swapped" not in made.text
    assert ("other, acc = pair" in made.text) == ("second first" in name)
    with driver.use(str(fake)) as used:
        used.library.fake_kept.restype = ctypes.POINTER(ctypes.c_ubyte)
        used.library.fake_keep(3)
        made(FIRST, FIRST, FIRST)
        found = Descriptor.of(bytes(used.library.fake_kept(2)[:128]), 3)
        used.library.fake_keep(0)
    assert found == Descriptor(FIRST, (2 * N * K, 2 * K), (K, 2, N))


def test_matrices_too_far_from_each_other_are_torchs(fake: Path) -> None:
    seen: list[tuple[Any, ...]] = []
    bare = replace(source("apart"), otherwise=None)
    assert pickle.loads(pickle.dumps(bare)).near == (1, 2)
    made = replace(bare, otherwise=lambda *args: seen.append(args))
    with driver.use(str(fake)) as used:
        count = used.library.fake_launches()
        made(FIRST, FIRST, FIRST + FAR, FIRST)
        assert used.library.fake_launches() == count and len(seen) == 1
        with pytest.raises(RuntimeError, match="near each other"):
            bare(FIRST, FIRST + FAR, FIRST, FIRST)


# ---- in programs


def gate(x: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
    return F.silu(x @ w1.t()) * (x @ w3.t())


PROGRAM: dict[str, Any] = {
    "max_autotune": True, "max_autotune_gemm_backends": "CUTEDSL",
    "test_configs.autotune_choice_name_regex": "cutedsl_quack_.*",
}  # fmt: skip


def _without_card(request: build.Request) -> build.Loaded:
    raise RuntimeError("there is no card")


def test_in_a_program_it_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: the backward of the gate is two results of one product."""
    monkeypatch.setattr(build, "make", lambda request: request.key)  # it is compiled above
    monkeypatch.setattr(build, "load", _without_card)  # torch computes what a kernel would
    given = [torch.randn(s).to(bf16).requires_grad_() for s in ((64, 128), (96, 128), (96, 128))]
    last = torch.randn(128, 96).to(bf16)

    def block(x: Tensor, w1: Tensor, w3: Tensor) -> Tensor:
        return gate(x, w1, w3) @ last.t()

    compiled = torch.compile(block, backend="tilewright", fullgraph=True)

    def step(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        found = function(*given)
        return found, *torch.autograd.grad(found.float().square().sum(), given)

    with as_cuda(), torch_may_take_over(), config.patch(**PROGRAM):
        mine, (forward, backward) = run_and_get_code(step, compiled)
    for a, e in zip(mine, step(block), strict=True):
        torch.testing.assert_close(a, e, rtol=5e-2, atol=0.02 * e.abs().max().item())
    assert "cutedsl_quack_fused_mm_pair_0(" in forward and "triton_" not in forward
    assert "cutedsl_quack_fused_mm_0(" in backward and "triton_" not in backward
    assert backward.count('return {"D": ') == 5 and backward.count('"o1": ') == 1


REASONS: dict[str, tuple[Callable[[], Made], str]] = {
    "columns of their own": (
        lambda: pair(torch.randn(K, N).to(bf16), torch.randn(K, N).to(bf16)), "contiguous along k"),
    "other strides": (lambda: pair(weights()[0], torch.randn(N, 2 * K).to(bf16)[:, :K].t()),
                      "other strides"),
    "a row": (lambda: pair(*weights(), epilogue=with_row), "rows and tiles"),
    "a tile": (lambda: pair(*weights(), epilogue=with_tile), "rows and tiles"),
    "float32 results": (lambda: pair(*weights(), epilogue=wide), "sixteen bits"),
    "columns of results": (lambda: pair(*weights(), epilogue=turned), "rows of sixteen bits"),
    "float32": (lambda: pair(*weights(f32)), "no tensor core"),
    "few columns": (lambda: pair(torch.randn(8, K).to(bf16).t(), torch.randn(8, K).to(bf16).t(),
                                 epilogue=None, keeps=True), "less than 16"),
}  # fmt: skip


def with_row(builder: Builder, c: Expr) -> Results:
    row = builder.read("r1", torch.randn(N).to(c.dtype), builder.n)
    return {"y": (torch.empty(M, N, dtype=bf16), b.op("mul", b.op("add", c, row), builder.other))}


def with_tile(builder: Builder, c: Expr) -> Results:
    tile = builder.read("t1", torch.randn(M, N).to(c.dtype), builder.m, builder.n)
    return {"y": (torch.empty(M, N, dtype=bf16), b.op("mul", b.op("add", c, tile), builder.other))}


def wide(builder: Builder, c: Expr) -> Results:
    return {"y": (torch.empty(M, N), b.op("mul", _float(c), _float(builder.other)))}


def turned(builder: Builder, c: Expr) -> Results:
    return {"y": (torch.empty(N, M, dtype=bf16).t(), b.op("mul", c, builder.other))}


@pytest.mark.parametrize("name", list(REASONS))
def test_what_is_no_gate_of_it_has_a_reason(name: str) -> None:
    make, said = REASONS[name]
    p = make().problem
    assert said in gated.limits(p)
    assert CuteDSLProvider().supports(p) == gated.limits(p)
    assert CuteDSLProvider().candidates(p, "max") == []


def test_the_model_counts_both_products() -> None:
    x, w = (torch.empty(4096, 4096, dtype=bf16) for _ in range(2))
    one = problem("mm", x, w.t())
    two = problem("mm_pair", x, w[:2048].t(), x, w[2048:].t())
    assert quack.shape(two.problem) == quack.shape(one.problem)
    alike = [c.config for c in quack.candidates(one.problem) if c.config.n % gated.TURN == 0]
    assert [c.config for c in gated.candidates(two.problem)] == alike
