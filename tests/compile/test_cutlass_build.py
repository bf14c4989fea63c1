"""Sources of CUTLASS kernels, what nvcc makes of them, and calls of it.

One kernel with a visitor is compiled here for sm_90a (half a minute), and a plain one by
`make test-all`, which compiles those of `tests/cutlass` too.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compile.cutlass import BF16, F16, F32, ON, col, offered, ran, refused
from tests.products import Builder, Made, arguments, problem
from tilewright import config, metrics, sharing
from tilewright.errors import BuildError, TilewrightError
from tilewright.gemm.cutlass import install, provider
from tilewright.gemm.cutlass.bind import CutlassSource
from tilewright.gemm.cutlass.provider import CutlassCandidate
from tilewright.gemm.cutlass.words import (
    CUDACodeCache,
    CUDACompileError,
    CUDACompileSourceCapturingContext,
    cuda_standalone_runner_compile_command,
)
from tilewright.gemm.provider import CompiledSource
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, const
from tilewright.runtime import nvcc, store
from tilewright.runtime.nvcc import Loaded, NvccSource
from tilewright.testing import fresh_cache

EMPTY = 'extern "C" __attribute__((visibility("default"))) int kernel() { return %d; }\n'
needs_nvcc = pytest.mark.skipif(not nvcc.find(), reason="no nvcc: install the CUDA toolkit")


@pytest.fixture
def fresh() -> Iterator[Path]:
    with fresh_cache() as folder, config.patch(ON):
        yield folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands nvcc was run with; nothing is compiled: the output is a file that says so."""
    found: list[list[str]] = []

    def run(command: list[str], *, timeout: float, text: str = "") -> Any:
        found.append(list(command))
        Path(command[command.index("-o") + 1]).write_text("made")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(nvcc.compilers, "run", run)
    return found


def mm(m: int = 256, k: int = 128, n: int = 512, dtype: torch.dtype = F16) -> Made:
    return problem("mm", torch.empty(m, k, dtype=dtype), col(n, k, dtype))


def first(made: Made, **options: Any) -> CutlassCandidate:
    return offered(made.problem, **options)[0]


# ---- the text


def test_cu_e4_no_size_is_in_the_text() -> None:
    """CU-E4, CU-E3: problems that differ only in sizes have one source, with or without a
    visitor."""

    def stores(b: Builder, c: Expr) -> Any:
        shape = tuple(e.arg for e in b.sizes[1:3])
        x = cast(b.read("e", torch.empty(shape, dtype=F16), b.m, b.n), F32)
        row = cast(b.read("r", torch.empty(1, shape[1], dtype=F16), b.m, b.n), F32)
        value = op("max", op("add", op("mul", cast(c, F32), x), row), const(0.0, F32))
        return {"y": (torch.empty(shape, dtype=F16), cast(value, F16))}

    sizes = ((256, 128, 512), (1024, 64, 768))
    for fused in (None, stores):
        found = [
            first(
                problem(
                    "mm",
                    torch.empty(m, k, dtype=F16),
                    col(n, k),
                    epilogue=fused,
                    keeps=fused is None,
                ),
                cutlass_op_allowlist_regex="128x128x64_2x1x1.*pingpong_epi_tma",
            )
            for m, k, n in sizes
        ]
        assert found[0].rendered.text == found[1].rendered.text
        assert found[0].binary == found[1].binary and found[0].key != found[1].key
        source = found[0].kernel().source
        assert isinstance(source, CutlassSource) and isinstance(source, CompiledSource)


def test_cu_e4_arguments() -> None:
    """Sizes, distances, offsets, the order of tiles; then workspace and stream."""
    made = first(mm())
    names = [name for name, _, _ in made.rendered.numbers]
    assert names[:4] == ["M", "N", "K", "B"]
    assert {"lda", "ldb", "ldd", "offset0", "offset1", "offset2", "swizzle", "sms"} <= set(names)
    values = dict(zip(names, made.kernel().source._worked_out(()).values, strict=True))  # type: ignore[union-attr]
    assert [values[n] for n in ("M", "N", "K", "B", "lda", "ldb", "ldd")] == [
        256,
        512,
        128,
        1,
        128,
        128,
        512,
    ]
    assert values["sms"] == made.problem.target.sms and values["swizzle"] == made.swizzle
    text = made.rendered.text
    assert "size_t* workspace_size, void* workspace, cudaStream_t stream" in text


def test_cu_f5_equal_requests_are_rendered_once() -> None:
    provider._rendered.clear()
    for _ in range(3):
        _ = first(mm()).rendered
    assert metrics.counters["cutlass"]["rendered"] == 1
    with config.patch({"cuda.enable_caching_codegen": False}):
        _ = first(mm()).rendered
    assert metrics.counters["cutlass"]["rendered"] == 2


def test_cu_f5_what_the_text_depends_on_is_rendered_anew_and_sizes_are_not() -> None:
    """Layouts and dtypes of operands and result, who is added, what is fused. Another size is
    another request of the same text."""
    provider._rendered.clear()
    metrics.reset()
    a, b, row = torch.empty(256, 128, dtype=F16), col(512, 128), torch.empty(512, dtype=F16)

    def stores(b: Builder, c: Expr) -> Any:
        return {"y": (torch.empty(256, 512, dtype=F16), cast(op("tanh", cast(c, F32)), F16))}

    different = [
        mm(), mm(dtype=BF16), problem("mm", col(256, 128), b),
        problem("mm", a, torch.empty(128, 512, dtype=F16)),
        problem("mm", a, b, out=torch.empty(512, 256, dtype=F16).t()),
        problem("addmm", a, b, bias=row), problem("addmm", a, b, bias=row[:1].expand(256, 1)),
        problem("mm", a, b, epilogue=stores, keeps=False)
    ]  # fmt: skip
    only = "128x128x64_2x1x1.*pingpong_epi_tma"
    for count, made in enumerate(different, 1):
        _ = first(made, cutlass_op_allowlist_regex=only).rendered
        assert metrics.counters["cutlass"]["rendered"] == count, count
    again = problem("addmm", a, b, bias=torch.ones(512, dtype=F16))
    _ = first(again, cutlass_op_allowlist_regex=only).rendered
    assert metrics.counters["cutlass"]["rendered"] == len(different)
    sizes = [first(made, cutlass_op_allowlist_regex=only).rendered.text
             for made in (mm(), mm(512, 64, 1024))]  # fmt: skip
    assert sizes[0] == sizes[1]


def test_cu_f16_names() -> None:
    made = first(mm())
    assert made.rendered.name == f"cutlass_{made.rendered.name[-8:]}"
    int(made.rendered.name[-8:], 16)
    assert f"int {made.rendered.name}(" in made.rendered.text

    def stores(b: Builder, c: Expr) -> Any:
        value = op("tanh", op("add", cast(c, F32), const(1.0, F32)))
        return {"y": (torch.empty(256, 512, dtype=F16), cast(value, F16))}

    fused = first(
        problem("mm", torch.empty(256, 128, dtype=F16), col(512, 128), epilogue=stores, keeps=False)
    )
    assert fused.rendered.name.startswith("cutlass_add_tanh_")


def test_cu_f14_no_header_that_is_not_there() -> None:
    text = first(mm()).rendered.text
    assert "curand" not in text and "tensor_fill" not in text and "util/" not in text


# ---- the command


def test_cu_f6_the_command() -> None:
    with config.patch({"cuda.compile_opt_level": "-O2"}):
        plain = nvcc.command(["x.cu"], "x.so", "so", 90, ("/inc",))
    for word in (
        "-t=0",
        "-DCUTLASS_ENABLE_TENSOR_CORE_MMA=1",
        "-w",
        "-O2",
        "-std=c++17",
        "-DCUTLASS_ENABLE_SM90_EXTENDED_MMA_SHAPES",
        "--expt-relaxed-constexpr",
        "-DNDEBUG",
        "-fPIC",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-I/inc",
        "-shared",
        "-gencode=arch=compute_90a,code=[sm_90a,compute_90a]",
    ):
        assert word in plain, word
    assert not {"-g", "-lineinfo", "--use_fast_math", "--keep"} & set(plain)
    switches = {
        "cuda.enable_debug_info": "-lineinfo",
        "cuda.use_fast_math": "--use_fast_math",
        "cuda.enable_ptxas_info": "--ptxas-options=-v",
    }
    for name, word in switches.items():
        with config.patch({name: True}):
            assert word in nvcc.flags(90)
    with config.patch({"cuda.enable_cuda_lto": True}):
        assert "-gencode=arch=compute_90a,code=[sm_90a,compute_90a,lto_90a]" in nvcc.flags(90)
    assert [nvcc.suffixed(n) for n in (80, 90, 100, 103, 120)] == [
        "80",
        "90a",
        "100a",
        "103a",
        "120a",
    ]
    assert "-DGENERATE_STANDALONE_RUNNER=1" in cuda_command("k.cu", "k")


def cuda_command(source: str, output: str) -> str:
    with config.patch({"cuda.arch": "sm_90"}):
        return cuda_standalone_runner_compile_command(source, output)


# ---- building


@needs_nvcc
def test_cu_f7_object_and_library(fresh: Path) -> None:
    """CU-F7, CU-F9: one key, one source; the library is linked from the object; really built."""
    text = EMPTY % 41
    made, key, path = CUDACodeCache.compile(text, "o")
    assert metrics.counters["cutlass"]["nvcc_runs"] == 1
    library, same, where = CUDACodeCache.compile(text, "so")
    assert (key, path) == (same, where) and made.endswith(".o") and library.endswith(".so")
    assert metrics.counters["cutlass"]["nvcc_runs"] == 1
    assert "nvcc" in Path(path).read_text().splitlines()[-1]
    loaded, _, _ = CUDACodeCache.load(text, "so")
    assert loaded() == 41
    with pytest.raises(NotImplementedError, match="no 'ptx'"):
        CUDACodeCache.compile(text, "ptx")
    with pytest.raises(RuntimeError, match="shared libraries"):
        CUDACodeCache.load(text, "o")


def test_cu_f8_a_refusal_is_remembered(
    fresh: Path, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, timeout: float, text: str = "") -> Any:
        runs.append(list(command))
        return subprocess.CompletedProcess(command, 1, "", "error: no such thing")

    monkeypatch.setattr(nvcc.compilers, "run", run)
    for _ in range(2):
        with pytest.raises(CUDACompileError) as caught:
            CUDACodeCache.compile("bad", "so")
        assert "no such thing" in str(caught.value) and "nvcc" in str(caught.value)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), CUDACompileError)
    assert len(runs) == 1
    assert list(fresh.rglob("*.error"))


def test_cu_f9_what_is_there_is_not_built(fresh: Path, runs: list[list[str]]) -> None:
    source = NvccSource(EMPTY % 1, "kernel", (), 90)
    with ThreadPoolExecutor(4) as pool:
        each = [contextvars.copy_context() for _ in range(8)]
        paths = list(pool.map(lambda c: c.run(nvcc.build, source, "so"), each))
    assert len(set(paths)) == 1 and len(runs) == 2  # the object, and the library
    assert nvcc.build(source, "so") == paths[0] and len(runs) == 2
    keys = {
        source.key,
        replace(source, made_with="another").key,
        replace(source, arch=100).key,
        replace(source, text=EMPTY % 2).key,
    }
    for options in (
        {"cuda.compile_opt_level": "-O3"},
        {"cuda.cutlass_hash_with_compile_cmd": True},
    ):
        with config.patch(options):
            keys.add(source.key)
    assert len(keys) == 6


FAKE = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;; esac
echo run >> {log}
while [ "$1" != -o ]; do shift; done
{made}
"""


def _nvcc(folder: Path, log: Path, made: str) -> str:
    """A compiler that writes down that it ran."""
    file = folder / "bin" / "nvcc"
    file.parent.mkdir(parents=True)
    file.write_text(FAKE.format(log=log, made=made))
    file.chmod(0o755)
    return str(file)


def test_cu_f9_another_place_of_the_compiler_is_no_other_binary(
    fresh: Path, tmp_path: Path
) -> None:
    """CU-F9: a machine whose nvcc is elsewhere, or that has none, finds what another built."""
    log = tmp_path / "log"
    places = [_nvcc(tmp_path / name, log, "echo made > $2") for name in "ab"]
    source = first(mm()).source
    for place in (*places, "/nowhere/nvcc"):
        with config.patch({"cuda.cuda_cxx": place}), pytest.MonkeyPatch.context() as patch:
            if place == "/nowhere/nvcc":
                patch.setattr(nvcc, "find", lambda: "")
            assert nvcc.is_built(source.key) == (place != places[0])
            nvcc.build(source)
    assert log.read_text().split() == ["run", "run"]  # an object, and a library of it


def test_built_elsewhere_is_offered_where_there_is_no_nvcc(
    fresh: Path, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another machine built, and nothing else; a pack carries it."""
    every = offered(mm().problem, cutlass_max_profiling_configs=3)
    two = sorted({c.binary for c in every})[:2]
    for candidate in every:
        if candidate.binary in two:
            nvcc.build(candidate.source)
    pack = fresh.parent / "kernels.pack"
    made = sharing.pack(pack)
    texts = {nvcc.source_path(key) for key in two}
    assert not any(n.endswith((".cu", ".lock")) for n in made.files)
    assert all(text.exists() for text in texts)  # they are for people, and not damaged artefacts
    with fresh_cache(), config.patch(ON):
        monkeypatch.setattr(nvcc, "find", lambda: "")
        assert "there is no nvcc" in refused(mm().problem)
        sharing.add(sharing.read(pack))
        found = offered(mm().problem, cutlass_max_profiling_configs=3)
    assert {c.binary for c in found} == set(two) and len(found) == 8


PROCESS = """
import sys
from tilewright import config, metrics
from tilewright.runtime import nvcc
from tilewright.runtime.nvcc import NvccSource
with config.patch({"cuda.cuda_cxx": sys.argv[1]}):
    try:
        nvcc.build(NvccSource("text", "kernel", (), 90))
    except nvcc.CUDACompileError as error:
        assert "no such thing" in str(error)
print(metrics.counters["cutlass"]["nvcc_runs"])
"""


@pytest.mark.parametrize("made", ["echo made > $2", "echo no such thing; exit 1"])
def test_cu_f8_f9_the_next_process_runs_no_compiler(made: str, tmp_path: Path) -> None:
    """CU-F8, CU-F9: what was built is there, and what was refused is refused again."""
    log = tmp_path / "log"
    compiler = _nvcc(tmp_path, log, made)
    given = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    said: list[str] = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROCESS, compiler], env=given, text=True,
                              capture_output=True, check=True)  # fmt: skip
        said.append(done.stdout.split()[-1])
    assert said == ["1", "0"]
    assert len(log.read_text().split()) == (2 if "made" in made else 1)


def test_a_second_size_of_the_same_kernel_runs_no_compiler(
    fresh: Path, runs: list[list[str]]
) -> None:
    """With an epilogue or without: sizes are arguments."""

    def stores(b: Builder, c: Expr) -> Any:
        shape = tuple(e.arg for e in b.sizes[1:3])
        return {"y": (torch.empty(shape, dtype=F16), cast(op("tanh", cast(c, F32)), F16))}

    for fused in (None, stores):
        counts: list[int] = []
        for m, k, n in ((256, 128, 512), (1024, 64, 768), (64, 4096, 256)):
            made = problem("mm", torch.empty(m, k, dtype=F16), col(n, k), epilogue=fused,
                           keeps=fused is None)  # fmt: skip
            nvcc.build(first(made, cutlass_op_allowlist_regex="pingpong_epi_tma").source)
            counts.append(metrics.counters["cutlass"]["nvcc_runs"])
        assert counts[0] == counts[1] == counts[2] == (1 if fused is None else 2)


def test_cu_f10_several_at_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-F10, CU-F12: futures, each source once, as many at a time as the options say."""
    began: list[str] = []
    import threading

    most, now, lock = 0, 0, threading.Lock()
    two = threading.Barrier(2)  # the first two are under way at once

    def slow(source: NvccSource, key: str) -> Loaded:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
            began.append(key)
        if len(began) <= 2:
            two.wait(60)
        with lock:
            now -= 1
        return Loaded(source.name, None, Path())

    monkeypatch.setattr(nvcc, "loaded", slow)
    nvcc._workshop.clear()
    with config.patch(compile_threads=2):
        sources = [NvccSource(EMPTY % k, "kernel", (), 90) for k in range(5)]
        futures = [nvcc.submit(s) for s in (*sources, *sources)]
        assert {f.result().name for f in futures} == {"kernel"}
    assert len(began) == 5 and most == 2
    nvcc._workshop.clear()


def test_cu_f12_orders_of_tiles_are_built_once() -> None:
    found = offered(mm().problem, cutlass_max_profiling_configs=2)
    assert len(found) == 8 and len({c.kernel().source.key for c in found}) == 2  # type: ignore[union-attr]


def test_cu_f13_sources_are_captured(fresh: Path, runs: list[list[str]]) -> None:
    candidate = first(mm())
    with CUDACompileSourceCapturingContext() as captured:
        nvcc.build(candidate.source, "so")
    assert captured.sources == [candidate.rendered.text]


def test_cu_f13_a_program_around_a_kernel() -> None:
    """CU-F13: with the sizes and the order of tiles of one choice; only where it is asked for."""
    made = mm()
    with config.patch({"cuda.generate_test_runner": True}):
        candidate = first(made, cutlass_max_profiling_configs=1)
        text = candidate.source.text
        other = offered(made.problem, cutlass_max_profiling_configs=1)[1].source.text
    assert "int main()" in text and "#ifdef GENERATE_STANDALONE_RUNNER" in text
    assert f"{{{256 * 128 * 2}, {512 * 128 * 2}, {256 * 512 * 2}}}" in text
    assert "(p[0], p[1], p[2], 256, 512, 128, 1," in text
    assert text != other  # in another order of tiles
    assert "int main()" not in first(made, cutlass_max_profiling_configs=1).source.text


# ---- two kernels of CUTLASS's


def _checked(candidate: CutlassCandidate) -> Loaded:
    """Compiled for sm_90a, loaded, asked for its workspace; it needs no driver to be loaded."""
    with config.patch(ON):
        path = nvcc.build(candidate.source, "so")
        loaded = nvcc.load(path, candidate.source.name, candidate.source.args)
    said = subprocess.run(
        ["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert not [line for line in said.splitlines() if line.split()[-1].startswith("cu")]
    source = candidate.kernel().source
    assert isinstance(source, CutlassSource)
    size = ctypes.c_size_t(99)
    values = source._worked_out(()).values
    assert loaded(*[None] * len(source.addresses), *values, ctypes.addressof(size), None, None) == 0
    assert size.value == 0
    return loaded


@pytest.mark.slow
@needs_nvcc
def test_cu_f14_a_plain_product_compiles() -> None:
    """CU-F14, CU-D10: as the next one is, without a visitor."""
    _checked(first(mm(), cutlass_op_allowlist_regex="64x256x64_2x1x1.*pingpong_epi_nosmem"))


@needs_nvcc
def test_cu_h19_a_visitor_compiles() -> None:
    """CU-H17, CU-H19: F = accumulator + C + aux; E = relu(F) + bias; D = E + F, also with a row and
    a number; results are stored through descriptors. CU-F14, CU-D10: without curand and libcuda,
    and it tells how much memory it wants."""

    def stores(b: Builder, c: Expr) -> Any:
        shape = (256, 512)
        x, aux = (
            cast(b.read(name, torch.empty(shape, dtype=F16), b.m, b.n), F32)
            for name in ("C", "aux")
        )
        bias = b.read("bias", torch.empty(256, 1), b.m, b.n)
        row = cast(b.read("row", torch.empty(1, 512, dtype=BF16), b.m, b.n), F32)
        f = op("add", op("add", cast(c, F32), x), aux)
        e = op("add", op("max", f, const(0.0, F32)), op("mul", row, bias))
        d = op("erf", op("add", e, f))
        return {"D": (torch.empty(shape, dtype=F16), cast(d, F16)), "F": (torch.empty(shape), f)}

    made = problem(
        "mm", torch.empty(256, 128, dtype=F16), col(512, 128), epilogue=stores, keeps=False
    )
    _checked(first(made, cutlass_op_allowlist_regex="64x256x64_2x1x1.*pingpong_epi_tma"))


# ---- calls, with a stand-in for the kernel


class Stand:
    """In place of a kernel: remembers what it is called with."""

    def __init__(self, workspace: int = 0, status: int = 0) -> None:
        self.workspace, self.status = workspace, status
        self.calls: list[tuple[Any, ...]] = []
        self.asked = 0

    def __call__(self, *args: Any) -> int:
        if args[-3] is not None:
            ctypes.c_size_t.from_address(args[-3]).value = self.workspace
            self.asked += 1
            assert args[0] is None
            return 0
        self.calls.append(args)
        return self.status


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    monkeypatch.setattr(CutlassSource, "_run", made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # of a host
    return made


def call(candidate: CutlassCandidate, made: Made) -> None:
    kernel = candidate.kernel()
    kernel.source(*arguments(made, kernel))  # type: ignore[operator]


def test_cu_d10_workspace(stand: Stand) -> None:
    """CU-D10: asked for once for a set of sizes; none is a null pointer; else memory is given; on
    the current stream."""
    made = problem("mm", torch.zeros(256, 128, dtype=F16), torch.zeros(512, 128, dtype=F16).t())
    candidate = first(made)
    source = candidate.kernel().source
    assert isinstance(source, CutlassSource)
    given = arguments(made, candidate.kernel())
    source(*given)
    source(*given)
    assert stand.asked == 1 and len(stand.calls) == 2
    assert stand.calls[0][-3:] == (None, None, 77)
    assert stand.calls[0][:3] == tuple(
        made.tensors[b].data_ptr() for b in candidate.rendered.buffers
    )
    stand.workspace = 1000
    other = first(made).kernel().source
    assert isinstance(other, CutlassSource)
    other(*given)
    assert stand.calls[-1][-2] is not None


def test_cu_d10_a_failure_is_an_error(stand: Stand) -> None:
    stand.status = 5
    made = problem("mm", torch.zeros(256, 128, dtype=F16), torch.zeros(128, 512, dtype=F16))
    with pytest.raises(TilewrightError, match="not supported") as caught:
        call(first(made), made)
    assert "cutlass_op_denylist_regex" in str(caught.value)


def test_cu_j1_the_same_tensor_twice(stand: Stand) -> None:
    """CU-J1: one pointer for both operands."""
    called, _ = ran(lambda a: a @ a.t(), torch.randn(128, 128).half())
    assert called[0].source.text.count("void* p") == 2
    assert len(called[0].addresses) == 2


def test_cu_j2_an_offset_is_an_argument() -> None:
    a = torch.randn(129, 128).half()
    called, _ = ran(lambda a: a[1:] @ a[1:].t(), a)
    values = called[0]._worked_out(()).values
    assert values.count(128) >= 4  # sizes, distances and both offsets
    text = called[0].source.text
    assert "offset0" in text and "offset1" in text


def test_cu_e5_sizes_that_break_an_assumption(stand: Stand) -> None:
    """CU-E5, CU-E1: one kernel for many sizes; a size that is no multiple of what it moves, or
    none at all, is torch's."""
    sizes = (128, 64, 256)

    def made_of(m: int, k: int, n: int) -> tuple[Made, list[Any]]:
        made = problem("mm", torch.randn(m, k).half(), torch.randn(k, n).half(), dynamic=(m, k, n))
        return made, [*made.tensors.values(), *made.values.values()]

    candidate = offered(made_of(*sizes)[0].problem)[0]
    kernel = candidate.kernel()
    source = kernel.source
    assert isinstance(source, CutlassSource)
    for m, k, n, ours in (
        (128, 64, 256, True),
        (1024, 256, 512, True),
        (100, 36, 256, False),
        (128, 64, 250, False),
        (0, 64, 256, False),
    ):
        before = len(stand.calls)
        a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
        c = torch.empty(m, n).half()
        tensors = {"x0": a, "x1": b, "c": c}
        numbers = {"s0": m, "s1": k, "s2": n}
        source(
            *(tensors[name] if kind == "ptr" else numbers[name] for kind, name in kernel.arguments)
        )
        assert (len(stand.calls) > before) == ours, (m, k, n)
        if ours:
            values = dict(
                zip(
                    [x for x, _, _ in candidate.rendered.numbers],
                    stand.calls[-1][3:-3],
                    strict=True,
                )
            )
            assert (values["M"], values["N"], values["K"]) == (m, n, k)
            assert (values["lda"], values["ldb"], values["ldd"]) == (k, n, n)
        else:
            torch.testing.assert_close(c, a @ b)


def test_an_address_anywhere_is_torchs(stand: Stand) -> None:
    base = torch.randn(128 * 64 + 1).half()
    made = problem("mm", torch.zeros(128, 64).half(), torch.randn(64, 256).half())
    kernel = first(made).kernel()
    assert isinstance(kernel.source, CutlassSource)
    given = {"x0": base[1:], "x1": made.tensors["x1"], "c": made.tensors["c"]}
    given = {
        name: t.reshape(tuple(e.arg for e in made.problem.memory[name].size))
        for name, t in given.items()
    }
    kernel.source(*(given[name] for _, name in kernel.arguments))
    assert not stand.calls
    torch.testing.assert_close(given["c"], given["x0"] @ given["x1"])


def test_it_runs_where_there_is_no_nvcc(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled kernel finds its binary by its key alone; without a binary torch computes."""
    made = problem("mm", torch.randn(128, 64).half(), torch.randn(64, 256).half())
    candidate = first(made)
    kernel = candidate.kernel()
    assert isinstance(kernel.source, CutlassSource)
    data = pickle.dumps(kernel.source)
    path = store.path(kernel.source.key, ".so")
    monkeypatch.setattr(nvcc, "find", lambda: "")
    monkeypatch.setattr(install, "root", lambda: None)
    back: CutlassSource = pickle.loads(data)
    given = arguments(made, kernel)
    laid = [
        t.reshape(tuple(e.arg for e in made.problem.memory[name].size))
        for t, (_, name) in zip(given, kernel.arguments, strict=True)
    ]
    back(*laid)
    index = [name for _, name in kernel.arguments].index("c")
    torch.testing.assert_close(
        laid[index], made.tensors["x0"].view(128, 64) @ made.tensors["x1"].view(64, 256)
    )
    assert not path.exists()
    with pytest.raises(BuildError, match="there is no nvcc"):
        nvcc.build(kernel.source.source, "so", kernel.source.key)


def test_cu_e3_two_products_share_a_kernel() -> None:
    """CU-E3: of one program, that differ in a size."""
    a, b, c = (
        torch.randn(128, 16).half(),
        torch.randn(128, 16).half().t(),
        torch.randn(512, 16).half().t(),
    )
    for dynamic in (False, True):
        called, code = ran(
            lambda a, b, c: (a @ b, a @ c),
            a,
            b,
            c,
            dynamic=dynamic,
            cutlass_max_profiling_configs=1,
            cutlass_op_allowlist_regex="128x128.*tma",
        )
        assert len(called) == 2 and called[0].key == called[1].key
        assert code.count(called[0].source.name) >= 2


def test_cu_e1_one_program_for_many_sizes() -> None:
    from tests.compile.cutlass import by_torch

    with by_torch() as called:
        f = torch.compile(
            lambda a, b: a @ b,
            backend="tilewright",
            dynamic=True,
            options={**ON, "fx_graph_cache": False},
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for m, n, k in ((128, 128, 16), (1024, 1024, 256)):
                a, b = torch.randn(m, k).half(), torch.randn(k, n).half()
                torch.testing.assert_close(f(a, b), a @ b, rtol=2e-2, atol=2e-2)
    assert len({id(s.source) for s in called}) == 1
