"""What the CuTe DSL makes of our text, for sm_90a and without a card: that it compiles, what is in
it, that it is compiled once for all processes, and how it is launched."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cpu.test_cutedsl_templates import dtypes, memory
from tests.cutedsl import evaluate, of
from tests.products import HOPPER, Builder, Made, problem
from tilewright import config, metrics
from tilewright.errors import BuildError
from tilewright.gemm.cutedsl import CuteDSLTemplate, Layout, build, quack, toolchain, vocabulary
from tilewright.gemm.cutedsl.build import Number, Pointer, Request
from tilewright.gemm.cutedsl.epilogue import Epilogue, translated
from tilewright.gemm.cutedsl.provider import CuteDSLProvider
from tilewright.gemm.cutedsl.resort import Resort
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.cutedsl.types import TYPE
from tilewright.gemm.problem import definition
from tilewright.ir import build as b
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr, const, make, sym
from tilewright.ir.ops import TABLE
from tilewright.ir.program import View
from tilewright.runtime import driver, store
from tilewright.target import Target
from tilewright.testing import fresh_cache
from tilewright.tune import child
from tilewright.tune.failures import Crashed

pytest.importorskip("nvidia_cutlass_dsl", reason="the CuTe DSL is not installed")
HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "cutedsl.md"
bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def cache() -> Generator[Path]:
    with fresh_cache() as folder, config.patch(compile_threads=1, max_autotune=True):
        yield folder


@pytest.fixture(scope="module", autouse=True)
def once() -> Generator[None]:
    """What the DSL makes of a request is the same every time: tests of the store, of launches and
    of processes share it."""
    kept: dict[str, Any] = {}
    compiles = build.traced

    def traced(request: Request) -> Any:
        if request.key not in kept:
            kept[request.key] = compiles(request)
        return kept[request.key]

    with mock.patch.object(build, "traced", traced):
        yield


@pytest.fixture(scope="module")
def documented() -> Generator[CuteDSLTemplate]:
    source = DOCS.read_text().split('r"""\n')[1].split('""")')[0]
    made = CuteDSLTemplate("documented", source)
    yield made
    del CuteDSLTemplate.all_templates["documented"]


def request_of(made: CuteDSLTemplate, target: Target = HOPPER, threads: int = 128,
               rows: Expr | None = None) -> Request:  # fmt: skip
    size = (rows or const(32), const(64))
    view = View("a", size, ix.contiguous_strides(size), ix.ZERO, f32)
    choices: list[Any] = []
    out = replace(memory("c", 1), size=size, stride=ix.contiguous_strides(size))
    reason = made.maybe_append_choice(choices, [view, replace(view, buffer="b")], Layout(out),
                                      THREADS=threads)  # fmt: skip
    assert reason is None
    return choices[0].request(target)


def counted() -> tuple[int, int]:
    found = metrics.counters["inductor"]
    return found["cutedsl_kernel_cache_hit"], found["cutedsl_kernel_cache_miss"]


# ---- it compiles


def _everything() -> Request:
    """One kernel with every operation there is text for, in every type it is for."""
    lines: list[str] = []
    kinds = sorted({d for name in vocabulary.OPS for d in dtypes(name)}, key=str)
    for name in vocabulary.OPS:
        if name in ("cast", "bitcast"):
            continue
        row = TABLE[name]
        for dtype in dtypes(name):
            operands = [torch.bool if name == "where" and k == 0 else dtype
                        for k in range(row.arity)]  # fmt: skip
            node = make(name, torch.bool if row.result == "bool" else dtype,
                        tuple(sym(f"v{k}", d) for k, d in enumerate(operands)))  # fmt: skip
            names = [f"{TYPE[d].lower()}{k % 2}" for k, d in enumerate(operands)]
            made = vocabulary.text(node, *names)
            out = torch.uint8 if node.dtype == torch.bool else node.dtype
            lines.append(f"out_{TYPE[out].lower()}[i] = tw.to({made}, cutlass.{TYPE[out]})")
    for to in (torch.float16, bf16, torch.int8, torch.int16, torch.uint8, torch.int64):
        text = vocabulary.cast("float640", torch.float64, to)
        lines.append(f"out_uint8[i] = tw.to(tw.to({text}, cutlass.Int32), cutlass.Uint8)")
    fp8 = vocabulary.cast("float320", f32, torch.float8_e4m3fn)
    back = vocabulary.cast(fp8, torch.float8_e4m3fn, f32)
    lines.append(f"out_float32[i] = {back}")
    stored = [d for d in kinds if d != torch.bool]
    reads = [
        f"{TYPE[d].lower()}{k} = in_{TYPE[d].lower()}[i + {k}]" for d in stored for k in (0, 1)
    ]
    reads += [f"boolean{k} = (uint8{k} != 0)" for k in (0, 1)]
    params = ", ".join(f"{way}_{TYPE[d].lower()}: cute.Tensor" for d in stored
                       for way in ("in", "out"))  # fmt: skip
    pointers = ", ".join(f"p{k}: cute.Pointer" for k in range(2 * len(stored)))
    tensors = ", ".join(f"cute.make_tensor(p{k}, cute.make_layout((1024,), stride=(1,)))"
                        for k in range(2 * len(stored)))  # fmt: skip
    text = "\n".join(
        [
            "import cutlass",
            "import cutlass.cute as cute",
            "import cuda.bindings.driver as cuda",
            "from tilewright.gemm.cutedsl import device as tw",
            "@cute.kernel",
            f"def kernel({params}):",
            "    i = cute.arch.thread_idx()[0]",
            *(f"    {line}" for line in (*reads, *lines)),
            "@cute.jit",
            f"def all({pointers}, stream: cuda.CUstream):",
            f"    kernel({tensors}).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)",
        ]
    )
    arguments = tuple(Pointer(d) for d in stored for _ in range(2))
    return Request(text, "all", arguments, "sm_90a")


def test_cd_k14_every_operation_compiles() -> None:
    assert len(build.compiled(_everything())) > 10_000


@pytest.mark.parametrize(("arch", "said"), [("sm_90", "sm_90a"), ("sm_100", "sm_100a")])
def test_cd_m12_the_target_says_what_to_compile_for(
    arch: str, said: str, documented: CuteDSLTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*args: Any) -> None:
        raise AssertionError("a device is asked for")

    for name in ("is_available", "get_device_capability", "current_device", "device_count"):
        monkeypatch.setattr(torch.cuda, name, asked)
    made = request_of(documented, Target(arch))
    assert made.architecture == said
    assert ptx(made).count(f".target {said}") == 1


def ptx(request: Request) -> str:
    folder = Path(os.environ.get("TMPDIR", "/tmp"), f"cutedsl_ptx_{os.getpid()}")
    folder.mkdir(exist_ok=True)
    made = build.traced(replace(request, options=f"--keep-ptx --dump-dir {folder}"))
    return made.artifacts.PTX


def test_cd_m9_sizes_of_the_call_are_arguments(documented: CuteDSLTemplate) -> None:
    made = request_of(documented, rows=sym("s0", lower=1, hint=32))
    assert made.arguments == (Pointer(f32), Pointer(f32), Pointer(f32), Number("Int32"))
    build.compiled(made)


def test_cd_m3_a_launch_of_several_calls_compiles(fake: Path) -> None:
    from tests.compile.test_cutedsl_programs import BESIDE

    made = CuteDSLTemplate("beside_compiled", BESIDE, beside=True)
    try:
        choices: list[Any] = []
        views = [View(n, (const(6), const(11)), (const(11), const(1)), ix.ZERO, f32) for n in "ab"]
        reason = made.maybe_append_choice(choices, views, Layout(memory("c", 6, 11)), THREADS=32)
        assert reason is None
        request = replace(choices[0], instances=3).request(HOPPER)
        assert len(request.arguments) == 9
        with driver.use(str(fake)) as used:
            given = [torch.zeros(128) for _ in range(9)]
            CuteSource("several", request, 0)(*given)
            assert tuple(launched(used.library)[-1].grid) == (3, 1, 3)
    finally:
        del CuteDSLTemplate.all_templates["beside_compiled"]


def test_errors_of_the_compiler_are_ours() -> None:
    text = ("import cutlass\nimport cutlass.cute as cute\n@cute.jit\n"
            "def f(p: cute.Pointer, stream):\n    cute.nothing_of_the_kind(p)\n")  # fmt: skip
    with pytest.raises(BuildError, match=r"the CuTe DSL does not compile f: .*nothing_of_the_kind"):
        build.submit(Request(text, "f", (Pointer(f32),), "sm_90a")).result()


# ---- once


def test_cd_m7_the_same_kernel_is_compiled_once(documented: CuteDSLTemplate) -> None:
    made = request_of(documented)
    hits, misses = counted()
    build.submit(made).result()
    build.submit(made).result()
    assert counted() == (hits, misses + 1)
    build._under_way.clear()  # as another process would be
    build.submit(made).result()
    assert counted() == (hits + 1, misses + 1)


def test_cd_m7_whatever_a_kernel_depends_on_is_in_its_key(
    documented: CuteDSLTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request_of(documented)
    others = [
        replace(made, text=made.text + "\n"), replace(made, entry="other"),
        replace(made, arguments=(Pointer(f32, 4), *made.arguments[1:])),
        replace(made, arguments=(Pointer(bf16), *made.arguments[1:])),
        replace(made, architecture="sm_100a"), replace(made, options="--opt-level 2"),
        request_of(documented, threads=256),
    ]  # fmt: skip
    keys = {made.key, *(o.key for o in others)}
    assert len(keys) == len(others) + 1
    assert replace(made, version="4.9.0").key not in keys
    monkeypatch.setattr(build, "_support", lambda: "another shim")
    assert replace(made, options="").key not in keys


def _spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "changed":
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("how", ["cut", "changed", "empty"])
def test_cd_m7_a_damaged_library_is_made_again(how: str, documented: CuteDSLTemplate) -> None:
    made = request_of(documented)
    build.submit(made).result()
    whole = made.path.read_bytes()
    _spoil(made.path, how)
    build._under_way.clear()
    hits, misses = counted()
    build.submit(made).result()
    assert counted() == (hits, misses + 1) and store.is_good(made.path)
    assert len(made.path.read_bytes()) == len(whole)


def test_cd_m7_another_version_of_the_dsl_is_made_again(documented: CuteDSLTemplate) -> None:
    made = request_of(documented)
    build.submit(made).result()
    data = made.path.read_bytes()
    newer = replace(made, version="9.9.9")
    newer.path.parent.mkdir(exist_ok=True)
    newer.path.write_bytes(data)  # under the name of what another version makes
    assert store.is_good(made.path)
    assert not store.is_good(newer.path) and not newer.path.exists()


WITHOUT = """
import importlib.metadata, pickle, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl", "quack", "cuda"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
found = importlib.metadata.version
def version(name):
    if "cutlass" in name or "quack" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.version = version
import torch
from tilewright import config, metrics
from tilewright.gemm.cutedsl import toolchain
from tilewright.runtime import driver
source, other = pickle.loads(bytes.fromhex({sources!r}))
assert toolchain.why_not().startswith("the CuTe DSL is not installed")
with config.patch(cache_dir={folder!r}), driver.use({fake!r}) as used:
    source(*(torch.zeros(4096) for _ in range(3)))
    print(used.library.fake_launches(), metrics.counters["inductor"]["cutedsl_kernel_cache_miss"])
    try:
        other(*(torch.zeros(4096) for _ in range(3)))
    except Exception as error:
        print(type(error).__name__, "pip install" in str(error))
"""


def test_cd_m10_a_compiled_kernel_runs_where_there_is_no_dsl(
    documented: CuteDSLTemplate, cache: Path, fake: Path
) -> None:
    """With what was kept, and nothing else; what was not says what to install."""
    made = CuteSource("added", request_of(documented), 0)
    made.submit().result()
    other = replace(made, request=request_of(documented, threads=96))
    code = WITHOUT.format(
        sources=pickle.dumps((made, other)).hex(), folder=str(cache), fake=str(fake)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == ["1 0", "BuildError True"]


SECOND = """
import pickle, sys, time
from tilewright import config, metrics
from tilewright.gemm.cutedsl import build
request = pickle.loads(bytes.fromhex({request!r}))
with config.patch(cache_dir={folder!r}):
    start = time.process_time()  # of this process alone: others may use the machine
    build.submit(request).result()
    build.load(request)
    took = time.process_time() - start
found = metrics.counters["inductor"]
print(found["cutedsl_kernel_cache_hit"], found["cutedsl_kernel_cache_miss"], took,
      "cutlass" in sys.modules)
"""


def test_cd_m7_another_process_neither_traces_nor_compiles(documented: CuteDSLTemplate,
                                                           cache: Path) -> None:  # fmt: skip
    made = request_of(documented)
    build.submit(made).result()
    code = SECOND.format(request=pickle.dumps(made).hex(), folder=str(cache))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hits, misses, took, imported = done.stdout.split()
    assert (hits, misses, imported) == ("1", "0", "False")
    assert float(took) < 0.05  # a millisecond on a quiet machine


def test_cd_m7_writers_do_not_disturb_each_other(documented: CuteDSLTemplate) -> None:
    made = request_of(documented)
    data = build.traced(made)
    write = build.linked(made, data.dump_to_object(build.PREFIX), data.function_name)
    threads = [threading.Thread(target=store.put_atomic, args=(made.path, write)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert store.is_good(made.path)
    assert [p.name for p in made.path.parent.iterdir()] == [made.path.name]


def test_cd_m8_without_caches_nothing_is_left(documented: CuteDSLTemplate, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()

    def files() -> set[Path]:  # of this process's own store, but the store's own two
        own = (".key", ".swept")
        return {p for p in store.root().rglob("*") if p.is_file() and p.name not in own}

    with config.patch(force_disable_caches=True):
        before = files()
        loaded = build.load(request_of(documented))
        assert loaded.address
        assert files() == before
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_cd_k19_compiled_beside_other_work(documented: CuteDSLTemplate) -> None:
    with config.patch(compile_threads=2):
        try:
            made = [request_of(documented, threads=n) for n in (64, 192)]
            found = [build.submit(r) for r in made]
            assert [f.result() for f in found] == [r.key for r in made]
        finally:
            build._workers.end()


# ---- launches


class _Launch(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint), ("cluster", ctypes.c_uint * 3),
                ("stream", ctypes.c_uint64), ("first", ctypes.c_uint64)]  # fmt: skip


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "libfake_cute.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-w", str(HERE / "fake_cute_driver.cpp"), "-o",
                    str(path)], check=True)  # fmt: skip
    return path


def launched(library: Any) -> list[_Launch]:
    library.fake_launch.restype = ctypes.POINTER(_Launch)
    return [library.fake_launch(k)[0] for k in range(library.fake_launches())]


def test_cd_k19_m9_a_launch_has_the_grid_of_its_sizes(documented: CuteDSLTemplate, fake: Path
                                                      ) -> None:  # fmt: skip
    made = request_of(documented, rows=sym("s0", lower=1, hint=32))
    seen: list[tuple[Any, ...]] = []
    with driver.use(str(fake)) as used:
        source = CuteSource("added", made, 0, lambda *args: seen.append(args))
        x, y, out = (torch.zeros(4096) for _ in range(3))
        for rows in (32, 33, 7):
            source(x, y, out, rows)
        found = launched(used.library)[-3:]
        assert [tuple(f.grid) for f in found] == [(16, 1, 1), (17, 1, 1), (4, 1, 1)]
        assert {tuple(f.block) for f in found} == {(128, 1, 1)}
        assert {f.first for f in found} == {x.data_ptr()} and {f.stream for f in found} == {0}
        source._run.run(x, y, out, 8, stream=77)  # type: ignore[attr-defined]
        assert launched(used.library)[-1].stream == 77
        used.library.fake_fail(700)
        with pytest.raises(RuntimeError, match=r"an error of the fake driver .added gave 700."):
            source(x, y, out, 8)
        count = used.library.fake_launches()
        source(x[1:], y, out, 8)  # not at a multiple of 16 bytes
        assert used.library.fake_launches() == count and seen[0][3] == 8
        with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
            replace(source, otherwise=None)(x[1:], y, out, 8)


def test_names_of_the_driver_stay_its_own(documented: CuteDSLTemplate, fake: Path) -> None:
    """A library opened for everyone has its names found before others' own: two drivers with a
    `std::vector<Launch>` each, of other sizes, spoilt the heap."""
    with driver.use(str(fake)) as used:
        x, y, out = (torch.zeros(4096) for _ in range(3))
        before = used.library.fake_launches()
        CuteSource("added", request_of(documented), 0)(x, y, out)
        assert used.library.fake_launches() == before + 1
    assert not hasattr(ctypes.CDLL(None), "fake_launches")


def _abort(source: CuteSource) -> None:
    os.abort()


def _text(source: CuteSource) -> str:
    return source.request.key


def test_cd_m11_a_kernel_is_sent_to_the_process_that_times(documented: CuteDSLTemplate) -> None:
    source = CuteSource("added", request_of(documented), 0)
    assert pickle.loads(pickle.dumps(source)) == source
    with pytest.raises(Crashed, match="brought its own process down"):
        child.asked(partial(_abort, source))
    assert child.asked(partial(_text, source)) == source.request.key


# ---- products


def rows(count: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.randn(count).to(dtype)


def _float(e: Expr) -> Expr:
    return b.op("cast", e, arg=f32)


def bias_gelu(builder: Builder, c: Expr) -> dict[str, tuple[torch.Tensor, Expr]]:
    x = b.op("add", _float(c), _float(builder.read("v1", rows(256), builder.n)))
    half = b.op("mul", x, const(0.5, f32))
    erf = b.op("erf", b.op("mul", x, const(0.7071067811865476, f32)))
    y = b.op("mul", half, b.op("add", erf, const(1.0, f32)))
    return {"y": (torch.empty(320, 256, dtype=bf16), b.op("cast", y, arg=bf16))}


def residual_two(builder: Builder, c: Expr) -> dict[str, tuple[torch.Tensor, Expr]]:
    res = builder.read("r1", torch.randn(320, 256).to(bf16), builder.m, builder.n)
    scale = builder.read("s1", torch.randn(320, 1), builder.m, builder.n)
    x = b.op("add", b.op("mul", _float(c), scale), _float(res))
    y = b.op("max", x, const(0.0, f32))
    return {"y": (torch.empty(320, 256, dtype=bf16), b.op("cast", y, arg=bf16)),
            "z": (torch.empty(256, 320).t(), x)}  # fmt: skip


def matrices(*sizes: int, dtype: torch.dtype = bf16) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, m, n, k = sizes
    return torch.randn(*batch, m, k).to(dtype), torch.randn(*batch, k, n).to(dtype)


PRODUCTS: dict[str, Made] = {
    "mm": problem("mm", *matrices(320, 256, 128)),
    "mm of a transposed operand, dynamic": problem(
        "mm", torch.randn(320, 128).to(bf16), torch.randn(256, 128).to(bf16).t(), dynamic=[320]),
    "addmm in float16": problem("addmm", *matrices(320, 256, 128, dtype=torch.float16),
                                bias=rows(256, torch.float16), alpha=2.0, beta=0.5),
    "bmm": problem("bmm", *matrices(3, 320, 256, 128)),
    "bmm of any sizes": problem("bmm", *matrices(3, 320, 256, 128), dynamic=[320, 256, 128]),
    "a number of sixteen bits": problem("addmm", *matrices(320, 256, 128), bias=rows(1)[0]),
    "eight bits": problem("mm", torch.randn(320, 128).to(torch.float8_e4m3fn),
                          torch.randn(256, 128).to(torch.float8_e4m3fn).t(), dtype=bf16),
    "bias and gelu": problem("mm", *matrices(320, 256, 128), epilogue=bias_gelu, keeps=False),
    "residual, scale, two results": problem("mm", *matrices(320, 256, 128), epilogue=residual_two),
}  # fmt: skip


def chosen(made: Made, config_: quack.Config) -> quack.QuackCandidate:
    return quack.QuackCandidate(made.problem, config_, "cutedsl_quack_0", 1.0)


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_products_are_offered_and_compile(name: str) -> None:
    made = PRODUCTS[name]
    assert CuteDSLProvider().supports(made.problem) == ""
    first, *_ = CuteDSLProvider().candidates(made.problem, "default")
    kernel = first.kernel()
    assert isinstance(kernel.source, CuteSource)
    text = ptx(kernel.source.request)
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text and "setmaxnreg" in text


@pytest.mark.parametrize("chosen_", [quack.BLACKWELL[0], quack.BLACKWELL[3]], ids=str)
def test_blackwell_kernels_compile(chosen_: quack.Config) -> None:
    """Where the library's kernel gives elements in pairs."""
    made = problem("mm", *matrices(320, 256, 128), epilogue=residual_two, target=Target("sm_100"))
    assert CuteDSLProvider().supports(made.problem) == ""
    request, _ = quack.request(made.problem, chosen_)
    assert request.architecture == "sm_100a" and "tcgen05" in ptx(request)


@pytest.mark.parametrize("pingpong", [True, False], ids=["ping-pong", "cooperative"])
def test_neighbours_share_what_they_load(pingpong: bool, fake: Path) -> None:
    made = problem("mm", *matrices(512, 512, 256))
    alone, shared = (chosen(made, quack.Config(128, 128, n, 1, pingpong)) for n in (1, 2))
    assert "multicast" not in ptx(alone.kernel().source.request)  # type: ignore[union-attr]
    kernel = shared.kernel()
    assert isinstance(kernel.source, CuteSource)
    assert "multicast::cluster" in ptx(kernel.source.request)
    with driver.use(str(fake)) as used:
        kernel.source(*(made.tensors[name] for _, name in kernel.arguments))
        found = launched(used.library)[-1]
        assert tuple(found.cluster) == (2, 1, 1) and found.block[0] == 384
        assert found.grid[0] * found.grid[1] * found.grid[2] == 16  # as many blocks as tiles
        assert found.shared > 100_000


def laid(made: Made, name: str, **values: int) -> torch.Tensor:
    """Memory as the program has it: with a buffer's sizes."""
    known = made.problem.memory[name]
    size, stride = ([ix.evaluate(e, {**made.values, **values}) for e in part]
                    for part in (known.size, known.stride))  # fmt: skip
    return made.tensors[name].as_strided(size, stride)


def emulated(made: Made, found: Epilogue) -> dict[str, torch.Tensor]:
    """What a kernel that calls the function for each element leaves in memory."""
    p = made.problem
    left, right = (
        made.tensors[o.view.buffer]
        .as_strided(
            [ix.evaluate(e, made.values) for e in o.view.size],
            [ix.evaluate(e, made.values) for e in o.view.stride],
        )
        .float()
        for o in p.operands
    )
    total = left @ right
    names = ", ".join(("acc", *(o.name for o in found.operands)))
    results = ", ".join(found.values)
    lines = [
        f"def f({names}):",
        *(f"    {line}" for line in found.lines),
        f"    return ({results},)",
    ]
    function = evaluate("\n".join(lines))["f"]
    out = {r.view.buffer: made.tensors[r.view.buffer].clone() for r in found.results}

    def place(view: View, at: tuple[int, ...]) -> int:
        steps = [ix.evaluate(e, made.values) for e in view.stride]
        return ix.evaluate(view.offset, made.values) + sum(
            a * s for a, s in zip(at, steps, strict=True))  # fmt: skip

    points = torch.stack([torch.randint(n, (60,)) for n in total.shape], 1).tolist()
    for at in map(tuple, points):
        beside = [
            of(made.tensors[o.view.buffer][place(o.view, at)].float()) for o in found.operands
        ]
        values = function(of(total[at]), *beside)
        for result, value in zip(found.results, values, strict=True):
            out[result.view.buffer][place(result.view, at)] = value.t
    return {**out, "": torch.tensor(points)}


@pytest.mark.parametrize("name", [n for n in PRODUCTS if n != "eight bits"])
def test_an_epilogue_means_what_eager_computes(name: str) -> None:
    """By the function's own text, element by element, where it stands in memory."""
    made = PRODUCTS[name]
    found = translated(made.problem)
    assert isinstance(found, Epilogue)
    got = emulated(made, found)
    points = got.pop("")
    spare = Resort.of(made.problem, definition(made.problem))
    spare(*(laid(made, n) if n in made.tensors else made.values[n] for n in spare.names))
    for result in found.results:
        expected, value = made.tensors[result.view.buffer], got[result.view.buffer]
        steps = torch.tensor([ix.evaluate(e, made.values) for e in result.view.stride])
        at = (points * steps).sum(1)
        torch.testing.assert_close(value[at].float(), expected[at].float(), rtol=2e-2, atol=5e-2)


def position(builder: Builder, c: Expr) -> dict[str, tuple[torch.Tensor, Expr]]:
    value = b.op("add", _float(c), b.op("cast", builder.n, arg=f32))
    return {"y": (torch.empty(320, 256), value)}


def special(builder: Builder, c: Expr) -> dict[str, tuple[torch.Tensor, Expr]]:
    return {"y": (torch.empty(320, 256), b.op("lgamma", _float(c)))}


def doubled(builder: Builder) -> Expr:
    x = builder.read("w", torch.randn(320, 128), builder.m, builder.k)
    return b.op("cast", x, arg=bf16)


REASONS: dict[str, tuple[Made, str]] = {
    "rows that begin anywhere": (problem("mm", *matrices(320, 256, 129)), "multiples of 16 bytes"),
    "one size is a symbol that is none": (
        problem("mm", *matrices(320, 250, 128), dynamic=[250]), "multiples of 16 bytes"),
    "float32": (problem("mm", *matrices(320, 256, 128, dtype=f32)), "no tensor core multiplies"),
    "positions": (problem("mm", *matrices(320, 256, 128), epilogue=position), "with positions"),
    "special": (problem("mm", *matrices(320, 256, 128), epilogue=special), "lgamma: the CuTe DSL"),
    "prologue": (problem("mm", *matrices(320, 256, 128), prologue={0: doubled}),
                 "the card fetches it by itself"),
    "small": (problem("mm", *matrices(320, 8, 128)), "less than 16"),
    "another card": (problem("mm", *matrices(320, 256, 128), target=Target("sm_80")),
                     "Hopper's and Blackwell's"),
    "steps": (problem("mm", torch.randn(320, 256).to(bf16)[:, ::2], torch.randn(128, 256).to(bf16)),
              "contiguous in neither direction"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REASONS))
def test_what_cannot_be_computed_has_a_reason(name: str) -> None:
    made, said = REASONS[name]
    assert said in CuteDSLProvider().supports(made.problem)
    assert CuteDSLProvider().candidates(made.problem, "max") == []


def test_a_dynamic_stride_is_looked_at_before_a_launch(fake: Path) -> None:
    made = problem("mm", *matrices(320, 256, 128), dynamic=[256])
    (first, *_) = CuteDSLProvider().candidates(made.problem, "none")
    kernel = first.kernel()
    assert isinstance(kernel.source, CuteSource) and kernel.source.otherwise is not None
    names = [n for _, n in kernel.arguments]
    assert kernel.source.multiples == ((names.index("s0"), 8),)
    given: list[Any] = [made.tensors.get(n, 256) for n in names]
    with driver.use(str(fake)) as used:
        kernel.source(*given)
        assert used.library.fake_launches() > 0
        count = used.library.fake_launches()
        # four too few for a row of whole pieces: torch computes
        kernel.source(*(laid(made, n, s0=252) if n in made.tensors else 252 for n in names))
        assert used.library.fake_launches() == count
    a, right = made.tensors["x0"][: 320 * 128].view(320, 128), made.tensors["x1"]
    expected = a @ right[: 128 * 252].view(128, 252)
    torch.testing.assert_close(made.tensors["c"][: 320 * 252].view(320, 252), expected)


def test_missing_packages_are_reasons_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PRODUCTS["mm"]
    monkeypatch.setattr(quack, "version", lambda: "")
    assert CuteDSLProvider().supports(made.problem) == (
        "quack is not installed: pip install 'quack-kernels>=0.6.5,<0.7'")  # fmt: skip
    monkeypatch.setattr(toolchain, "version", lambda: "")
    assert CuteDSLProvider().supports(made.problem) == (
        "the CuTe DSL is not installed: pip install 'nvidia-cutlass-dsl>=4.8,<5'")  # fmt: skip
    monkeypatch.setattr(quack, "version", lambda: "0.9.0")
    assert "0.9.0 is not one we know how to call" in quack.why_not()


def test_the_model_orders_candidates() -> None:
    """Large tiles for large products, small ones where large would leave the card idle."""
    large = quack.candidates(problem("mm", *(torch.empty(8192, 8192, dtype=bf16),) * 2).problem)
    small = quack.candidates(problem("mm", torch.empty(256, 4096, dtype=bf16),
                                     torch.empty(4096, 256, dtype=bf16)).problem)  # fmt: skip
    assert large[0].config.m * large[0].config.n >= 128 * 192
    assert small[0].config.m * small[0].config.n <= 64 * 128
    assert [c.estimate for c in large] == sorted(c.estimate for c in large)
    assert len({c.key for c in small}) == len(small)


def test_texts_are_the_same_in_every_process() -> None:
    code = textwrap.dedent("""
        from tests.compile.test_cutedsl_compile import PRODUCTS, chosen, quack
        made = PRODUCTS["bias and gelu"]
        print(chosen(made, quack.CONFIGS[0]).key)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == chosen(PRODUCTS["bias and gelu"], quack.CONFIGS[0]).key
