"""Corner cases of CUTLASS's kernels: empty products, odd layouts, other devices, caches, and how
much is rendered."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.compile.cutlass import BF16, F16, F32, ON, by_torch, col, offered, ran, refused
from tests.products import Builder, problem
from tilewright import caches, config, metrics
from tilewright.errors import NoValidChoicesError
from tilewright.gemm import choose as choosing
from tilewright.gemm.cutlass import arrange, bind, filter, install, operations, provider
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.words import (
    CUDATemplateBuffer,
    CUTLASSGemmTemplate,
    FixedLayout,
)
from tilewright.ir.build import cast
from tilewright.ir.expr import Expr
from tilewright.runtime import nvcc
from tilewright.runtime.nvcc import Loaded, NvccSource
from tilewright.target import Target
from tilewright.testing import fresh_cache


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    choosing._memo.clear()
    provider._rendered.clear()
    filter._filtered.clear()
    yield
    provider._rendered.clear()


def rand(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


# ---- layouts that change


def _template(a_stride: tuple[int, int], out_stride: tuple[int, int] = (128, 1)
              ) -> CUTLASSGemmTemplate:  # fmt: skip
    nodes = [
        CUDATemplateBuffer("x", FixedLayout("cuda", F16, (128, 128), a_stride)),
        CUDATemplateBuffer("w", FixedLayout("cuda", F16, (128, 128), (1, 128))),
    ]
    return CUTLASSGemmTemplate(nodes, FixedLayout("cuda", F16, (128, 128), out_stride))


def test_cu_j4_a_layout_that_changed_since(caplog: pytest.LogCaptureFixture) -> None:
    """CU-J4: the operation is made for the layouts there are now, with one warning."""
    with config.patch(ON), caplog.at_level("WARNING", "tilewright.cutlass"):
        op = next(o for o in _template((128, 1)).gen_ops() if o.is_tma)
        assert _template((128, 1)).render(op) and not caplog.records
        text = _template((1, 128), (1, 128)).render(op)
    assert len(caplog.records) == 1 and "layouts have changed" in caplog.records[0].message
    assert "using LayoutA = cutlass::layout::ColumnMajor;" in text
    assert "using LayoutD = cutlass::layout::ColumnMajor;" in text
    with config.patch(ON), pytest.raises(NotImplementedError, match="do not begin"):
        _template((129, 1)).render(op)


# ---- nothing, or what no kernel can read


@pytest.mark.parametrize("sizes", [(0, 64, 32), (64, 0, 32), (64, 32, 0)])
def test_cu_j5_empty_products(sizes: tuple[int, int, int]) -> None:
    """CU-J5: not offered, and right: zeros, the bias scaled, an empty tensor."""
    m, n, k = sizes
    a, b, bias = rand(m, k), rand(k, n), rand(m, n)
    assert refused(problem("mm", a, b).problem)
    for backends in ("ATEN,CUTLASS", "ATEN,TRITON,CUTLASS"):
        called, _ = ran(torch.mm, a, b, max_autotune_gemm_backends=backends)
        assert not called
        called, _ = ran(
            lambda x, a, b: torch.addmm(x, a, b, beta=0.5), bias, a, b,
            max_autotune_gemm_backends=backends,
        )  # fmt: skip
        assert not called


@pytest.mark.parametrize("sizes", [(0, 64, 32), (64, 0, 32), (64, 32, 0)])
def test_cu_j5_a_size_that_becomes_zero(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CU-J5: a product of any size is offered for, and a call with nothing to do is torch's."""
    monkeypatch.setattr(CutlassSource, "_run", lambda *args: pytest.fail("a kernel is called"))
    made = problem("addmm", rand(128, 32), rand(32, 64), bias=rand(128, 64), beta=0.5,
                   dynamic=(128, 32, 64))  # fmt: skip
    kernel = offered(made.problem)[0].kernel()
    assert isinstance(kernel.source, CutlassSource)
    m, n, k = sizes
    given = {"x0": rand(m, k), "x1": rand(k, n), "bias": rand(m, n), "c": torch.ones(m, n).half()}
    numbers = {"s0": m, "s1": k, "s2": n}
    kernel.source(*(given[x] if kind == "ptr" else numbers[x] for kind, x in kernel.arguments))
    right = torch.addmm(given["bias"], given["x0"], given["x1"], beta=0.5)
    torch.testing.assert_close(given["c"], right)


ODD: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "contiguous in neither direction": ((128, 64), (2, 256), "in neither direction"),
    "an odd K": ((128, 63), (63, 1), "layouts and alignments"),
    "an odd N": ((128, 64), (64, 1), "layouts and alignments"),
}


@pytest.mark.parametrize("name", ODD)
def test_cu_j6_what_no_kernel_can_read(name: str) -> None:
    """CU-J6: no candidate; right with others, and an error that says so without."""
    size, stride, reason = ODD[name]
    a = torch.empty_strided(size, stride, dtype=F16).copy_(rand(*size))
    b = rand(size[1], 97 if name == "an odd N" else 96)
    assert reason in refused(problem("mm", a, b).problem)
    called, _ = ran(torch.mm, a, b, max_autotune_gemm_backends="ATEN,TRITON,CUTLASS")
    assert not called
    with pytest.raises(Exception, match=NoValidChoicesError.__name__) as caught:
        ran(torch.mm, a, b)
    assert reason in str(caught.value) and "add ATEN" in str(caught.value)


# ---- devices and streams


class Card:
    """Memory of a card that is not there."""

    def __init__(self, at: int, device: str) -> None:
        self.at, self.device = at, torch.device(device)

    def data_ptr(self) -> int:
        return self.at


def test_cu_j7_the_stream_and_the_processors_of_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CU-J7: of the device the tensors are on, which is made the current one if it is not."""
    calls: list[tuple[Any, ...]] = []
    current: list[int] = [0]
    made: list[tuple[Any, ...]] = []

    def run(*args: Any) -> int:
        if args[-3] is not None:
            ctypes.c_size_t.from_address(args[-3]).value = 64
        else:
            calls.append((*args, current[-1]))
        return 0

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Card:
        made.append((size, dtype, device))
        return Card(4096, str(device))

    monkeypatch.setattr(CutlassSource, "_run", staticmethod(run))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda d: 70 + d, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(bind, "torch", SimpleNamespace(
        empty=empty, uint8=torch.uint8, _C=torch._C, cuda=SimpleNamespace(device=on)))  # fmt: skip
    for device, sms in (("cuda:1", 114), ("cuda:0", 132)):
        target = Target("sm_90", sms=sms)
        found = problem("mm", torch.empty(256, 128, dtype=F16), col(512, 128), target=target)
        source = offered(found.problem)[0].kernel().source
        assert isinstance(source, CutlassSource)
        source(*(Card(16 * k, device) for k in range(1, 4)))
        values = dict(zip([*(n for n, _, _ in offered(found.problem)[0].rendered.numbers)],
                          calls[-1][3:-4], strict=True))  # fmt: skip
        assert values["sms"] == sms
        number = int(device[-1])
        assert calls[-1][-3:] == (4096, 70 + number, number) and current == [0]
        assert made[-1] == (64, torch.uint8, torch.device(device))


def test_cu_d10_the_workspace_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-D10: it is there while the kernel is launched, and no longer."""
    seen: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty

    def noted(*args: Any, **more: Any) -> torch.Tensor:
        seen.append(weakref.ref(found := empty(*args, **more)))
        return found

    def run(*args: Any) -> int:
        if args[-3] is not None:
            ctypes.c_size_t.from_address(args[-3]).value = 1000
        else:
            space = seen[-1]()
            assert space is not None and args[-2] == space.data_ptr() and space.numel() == 1000
        return 0

    monkeypatch.setattr(CutlassSource, "_run", staticmethod(run))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    made = problem("mm", torch.zeros(256, 128, dtype=F16), torch.zeros(512, 128).half().t())
    kernel = offered(made.problem)[0].kernel()
    assert isinstance(kernel.source, CutlassSource)
    monkeypatch.setattr(torch, "empty", noted)
    for count in (1, 2):
        kernel.source(*(made.tensors[name] for _, name in kernel.arguments))
        assert len(seen) == count and seen[-1]() is None


# ---- caches


def test_cu_j8_caches_are_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-J8: operations, what fits a problem, sources, kernels, and where things are."""
    monkeypatch.setattr(nvcc, "loaded", lambda source, key: Loaded(source.name, None, None))  # type: ignore[arg-type]

    def used() -> dict[str, int]:
        return {
            "operations": operations._operations.cache_info().currsize,
            "fitting": len(filter._filtered),
            "sources": len(provider._rendered),
            "kernels": len(nvcc._workshop._kernels),
            "root": install._root.cache_info().currsize,
            "key": install._key.cache_info().currsize,
            "nvcc": nvcc._find.cache_info().currsize,
            "version": nvcc._version.cache_info().currsize,
        }

    for empty in (caches.clear, _fresh):
        with config.patch(ON):
            source = offered(problem("mm", rand(128, 64), rand(64, 128)).problem)[0].source
            nvcc.submit(source).result()
            missing = [name for name, count in used().items() if not count]
            assert not missing or (missing == ["version"] and not nvcc.find())
        empty()
        assert not any(used().values()), used()


def _fresh() -> None:
    with fresh_cache():
        pass


# ---- how much is rendered, and built


def test_cu_f2_a_product_again_and_again_is_rendered_once() -> None:
    """CU-F2: two sources for two operations, however often the product is computed; the winner's
    is not rendered again."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            a = a @ b / 32
        return a

    called, _ = ran(
        f, rand(64, 64, dtype=BF16), rand(64, 64, dtype=BF16).t(),
        cutlass_max_profiling_configs=2, cutlass_epilogue_fusion_enabled=False,
    )  # fmt: skip
    assert len(called) == 10 and len({s.key for s in called}) == 1
    assert metrics.counters["cutlass"]["rendered"] == 2


def test_cu_f3_two_sizes_are_two_requests_of_the_same_texts() -> None:
    called, _ = ran(
        lambda a, b, c, d: (a @ b, c @ d),
        rand(128, 64), rand(32, 64).t(), rand(256, 128), rand(64, 128).t(),
        cutlass_max_profiling_configs=2,
    )  # fmt: skip
    assert metrics.counters["cutlass"]["rendered"] == 4
    assert len(called) == 2 and len({s.key for s in called}) == 1


def test_cu_f4_e6_sizes_that_are_known_beside_others() -> None:
    """CU-F4, CU-E6: inputs of any size and constants in one program; both right, at two sizes."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", rand(64, 256))
            self.register_buffer("b", rand(128, 256).t())

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return a @ b, self.a @ self.b

    metrics.reset()
    model = Model()
    with by_torch() as called:
        f = torch.compile(model, backend="tilewright", dynamic=True, options={
            **ON, "fx_graph_cache": False, "cuda.cutlass_max_profiling_configs": 2})  # fmt: skip
        for m, n, k in ((128, 32, 64), (256, 64, 128)):
            a, b = rand(m, k), rand(n, k).t()
            torch.testing.assert_close(f(a, b), model(a, b), rtol=2e-2, atol=2e-2)
    assert len(called) == 4
    assert metrics.counters["cutlass"]["rendered"] == 4


def test_cu_f12_a_build_that_fails_or_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-F12: it fails for itself; the others are done meanwhile."""
    import threading

    ends = threading.Event()

    def slow(source: NvccSource, key: str) -> Loaded:
        if source.name == "bad":
            raise nvcc.CUDACompileError("refused", command=("nvcc",), stderr="no")
        if source.name == "slow":
            ends.wait(60)
        return Loaded(source.name, None, None)  # type: ignore[arg-type]

    monkeypatch.setattr(nvcc, "loaded", slow)
    nvcc._workshop.clear()
    try:
        with config.patch(compile_threads=2):
            found = {n: contextvars.copy_context().run(nvcc.submit, NvccSource(n, n, (), 90))
                     for n in ("slow", "bad", "good")}  # fmt: skip
            assert found["good"].result(60).name == "good"
            assert isinstance(found["bad"].exception(60), nvcc.CUDACompileError)
            assert not found["slow"].done()
    finally:
        ends.set()
        nvcc._workshop.clear()


# ---- what decides about a problem's operations


def test_cu_b1_c21_where_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-B1: AMD's cards."""
    made = problem("mm", rand(128, 64), rand(64, 128)).problem
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert refused(made) == "CUTLASS computes on NVIDIA cards"


def test_cu_b26_the_result_and_the_card_count() -> None:
    """CU-B26: what fits a column-major result, or another card, is asked for by itself."""
    a, b = torch.empty(128, 64, dtype=F16), torch.empty(64, 128, dtype=F16)
    found = [arrange.arranged(problem("mm", a, b, out=out).problem)
             for out in (torch.empty(128, 128, dtype=F16), col(128, 128))]  # fmt: skip
    with config.patch(ON):
        keys = {filter._key(p, arch, version) for p in found for arch in (90, 100)  # type: ignore[arg-type]
                for version in ("12.8", "13.0")}  # fmt: skip
        assert len(keys) == 8
        names = [[o.name for o in filter.fitting(p, 90, "13.0")] for p in found]  # type: ignore[arg-type]
    assert all("_ttt_" in n for n in names[0]) and all("_ttn_" in n for n in names[1])
    assert metrics.counters["cutlass"]["filtered"] >= 2


def test_cu_b14_one_reason_after_the_other() -> None:
    """CU-B14: kind, dtypes, alignment, sizes known at a call, descriptors, fewer bits: an operation
    that breaks two of the rules is refused by the first of them."""
    found = arrange.arranged(problem("mm", torch.empty(128, 62, dtype=F16),
                                     torch.empty(62, 128, dtype=F16),
                                     dynamic=(128, 62)).problem)  # fmt: skip
    assert not isinstance(found, str)
    every = operations.operations(90, "13.0")["f16", "f16", "f32"]
    streams = next(o for o in every if o.is_stream_k and not o.is_tma and o.d == "f16")
    from dataclasses import replace

    told = [
        (replace(streams, kind="sparse", d="f32"), "of another kind"),
        (replace(streams, d="f32"), "it stores another dtype"),
        (streams, "rows of an operand do not begin where it can load"),
        (replace(streams, aligned=(2, 2, 8, 256)),
         "rows of the result do not begin where it can store"),
        (replace(streams, aligned=(2, 2, 8, 8)),
         "its workspace depends on sizes known only at run time"),
    ]  # fmt: skip
    with config.patch({**ON, "cuda.cutlass_tma_only": True}):
        assert [filter.adapted(op, found) for op, _ in told] == [why for _, why in told]
        plain = next(o for o in every if "cpasync" in o.name and o.aligned[:2] == (2, 2)
                     and o.d == "f16")  # fmt: skip
        assert "cutlass_tma_only" in str(filter.adapted(plain, found))


# ---- what follows a product


def _stores(value: Callable[[Builder, Expr], Expr], shape: tuple[int, ...]) -> Any:
    return lambda b, c: {"y": (torch.empty(shape, dtype=F16), cast(value(b, c), F16))}


def test_cu_h22_reductions_and_other_sizes_are_apart() -> None:
    """CU-H22: they are computed, after the product, by kernels of their own."""
    a, b = rand(64, 32), rand(32, 48)
    functions: tuple[Callable[..., Any], ...] = (
        lambda a, b: (a @ b).sum(1),
        lambda a, b: (a @ b)[:32] + torch.ones(32, 48, dtype=F16),
        lambda a, b: torch.cat([a @ b, a @ b], 1),
    )
    for function in functions:
        called, _ = ran(function, a, b)
        assert called and not called[0].problem.epilogue
    assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == 0


def test_cu_h4_the_same_apart() -> None:
    """CU-H4: without fusion, then with it, close to each other."""

    def f(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b) * x + o

    given = rand(64, 32), rand(32, 48), rand(64, 48), torch.ones(64, 48, dtype=F32)
    for fused in (False, True):
        called, code = ran(f, *given, cutlass_epilogue_fusion_enabled=fused)
        assert len(called) == 1 and ("triton_" in code) != fused
        assert metrics.counters["inductor"]["cuda_epilogue_fusion_counter"] == int(fused)


def test_cu_h24_nothing_shares_its_launch() -> None:
    """CU-H24: two products of one kind are two launches, and neither takes in what computes its
    operands."""
    a, b = rand(64, 32), rand(32, 48)
    called, code = ran(lambda a, b, c: ((a * 2) @ b, (c * 3) @ b), a, b, rand(64, 32))
    assert len(called) == 2 and "triton_" in code
    counted = metrics.counters["inductor"]
    assert counted["cutlass_horizontal_fusion_counter"] == 0


def test_cu_d1_d2_every_size_of_stream_k() -> None:
    """CU-D1, CU-D2: one text for all, as sizes are arguments."""
    texts: set[str] = set()
    sizes = ((128, 16, 128), (1024, 256, 1024), (16384, 1024, 16384), (16384, 1408, 16384),
             (18432, 6144, 3072), (9216, 6144, 3072), (4608, 6144, 3072))  # fmt: skip
    with torch._subclasses.FakeTensorMode():
        for m, k, n in sizes:
            a, b = torch.empty(m, k, dtype=F16), torch.empty(n, k, dtype=F16).t()
            with config.patch(ON):
                template = CUTLASSGemmTemplate(
                    [CUDATemplateBuffer(x, FixedLayout("cuda", F16, t.shape, t.stride()))
                     for x, t in (("x", a), ("w", b))],
                    FixedLayout("cuda", F16, (m, n))
                )  # fmt: skip
                with config.patch({"cuda.cutlass_op_allowlist_regex": "128x256x64.*stream_k",
                                   "cuda.cutlass_max_profiling_configs": 1}):  # fmt: skip
                    (op,) = template.gen_ops()
                    texts.add(template.render(op))
    assert len(texts) == 1
