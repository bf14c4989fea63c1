"""Products by C++ kernels: every way to walk them, against float64."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.gemm_problems import Made, close, exact, product
from tilewright import config
from tilewright.gemm.cpp import CppCandidate, CppProvider, configurations
from tilewright.gemm.cpp_source import Config
from tilewright.gemm.problem import Operand
from tilewright.gemm.provider import PROVIDERS
from tilewright.ir import index as ix
from tilewright.ir.build import cast, op
from tilewright.ir.expr import Expr, const, load, substitute
from tilewright.runtime import cxx
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code

F32 = torch.float32


def first(made: Made) -> CppCandidate:
    provider = CppProvider()
    assert provider.supports(made.problem) == ""
    found = provider.candidates(made.problem, "none")[0]
    assert isinstance(found, CppCandidate)
    return found


def of_way(made: Made, way: str) -> CppCandidate:
    found = [c for c in configurations(made.problem) if c.way == way]
    assert found, f"no configuration walks this product by {way}"
    return CppCandidate(made.problem, found[0], 0, -1)


def in_layout(rows: int, columns: int, layout: str, dtype: torch.dtype = F32) -> Tensor:
    """A matrix in memory: `n` by rows, `t` by columns, `s` every other element of wider rows."""
    match layout:
        case "n":
            return torch.randn(rows, columns, dtype=dtype)
        case "t":
            return torch.randn(columns, rows, dtype=dtype).t()
        case _:
            return torch.randn(rows + 1, 2 * columns + 3, dtype=dtype)[1:, 3::2]


def relu(x: Expr) -> Expr:
    return op("max", x, const(0.0, x.dtype))


# ---- sizes and layouts


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("m", "n", "k", "layout"), [
    (37, 53, 29, "nn"), (37, 53, 29, "nt"), (70, 301, 411, "nn"), (70, 301, 411, "nt"),
    (70, 301, 411, "tn"), (70, 301, 411, "tt"), (70, 301, 411, "ss"),
])  # fmt: skip
def test_odd_sizes_in_every_layout(m: int, n: int, k: int, layout: str) -> None:
    left, right = in_layout(m, k, layout[0]), in_layout(k, n, layout[1])
    out = torch.full((m, n), float("nan"))
    made = product(left, right, out)
    made.call(first(made).kernel())
    close(out, exact(left, right), k)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("q", "rows", "vecs", "kc", "pc", "qc", "pack_p"), [
    ("m", 6, 2, 64, 12, 32, False), ("n", 6, 2, 64, 12, 32, True), ("n", 4, 3, 200, 96, 48, False),
    ("m", 12, 1, 96, 24, 8, True), ("n", 1, 1, 8, 1, 8, False),
])  # fmt: skip
def test_blocks_of_any_size(q: str, rows: int, vecs: int, kc: int, pc: int, qc: int,
                            pack_p: bool) -> None:  # fmt: skip
    left, right = in_layout(75, 150, "n"), in_layout(150, 83, "t")
    out = torch.full((75, 83), float("nan"))
    made = product(left, right, out)
    way = Config("packed", "m" if q == "m" else "n", rows, vecs, kc, pc, qc, pack_p, True)
    made.call(CppCandidate(made.problem, way, 0, -1).kernel())
    close(out, exact(left, right), 150)


@pytest.mark.parametrize("m", [1, 3, 7])
@pytest.mark.parametrize(("way", "layout"), [("dot", "t"), ("stream", "n")])
def test_few_rows(m: int, way: str, layout: str) -> None:
    left, right = in_layout(m, 203, "n"), in_layout(203, 131, layout)
    out = torch.full((m, 131), float("nan"))
    made = product(left, right, out, bias=torch.randn(131))
    made.call(of_way(made, way).kernel())
    close(out, exact(left, right) + made.tensors["d"], 203)


@pytest.mark.parametrize(("way", "layout"), [("dot", "n"), ("stream", "t")])
def test_few_columns(way: str, layout: str) -> None:
    left, right = in_layout(131, 203, layout), in_layout(203, 2, "t")
    out = torch.full((131, 2), float("nan"))
    made = product(left, right, out)
    made.call(of_way(made, way).kernel())
    close(out, exact(left, right), 203)


@pytest.mark.parametrize("way", ["packed", "dot", "stream"])
def test_more_rows_than_foreseen(way: str) -> None:
    """Sizes are symbols; the kernel was chosen for three rows."""
    left = in_layout(3, 40, "n")
    right = in_layout(40, 50, "n" if way == "stream" else "t")
    made = product(left, right, torch.empty(3, 50), dynamic=True)
    kernel = of_way(made, way).kernel()
    for m, n, k in ((3, 50, 40), (1, 1, 1), (45, 77, 33), (20, 9, 700)):
        left = in_layout(m, k, "n")
        right = in_layout(k, n, "n" if way == "stream" else "t")
        out = torch.full((m, n), float("nan"))
        now = product(left, right, out, dynamic=True)
        assert now.numbers.keys() <= made.numbers.keys() or min(m, n, k) == 1
        now.numbers = {**dict.fromkeys(made.numbers, 1), **now.numbers}
        built = cxx.build([kernel.source])[0]  # pyright: ignore[reportArgumentType]
        built(*now.arguments(kernel))
        close(out, exact(left, right), k)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 4), (5, 0, 4), (5, 7, 0), (0, 0, 0)])
def test_nothing_to_do(m: int, n: int, k: int) -> None:
    out = torch.full((m, n), float("nan"))
    bias, right = torch.randn(n), torch.randn(n, k).t()
    made = product(torch.randn(m, k), right, out, bias=bias, dynamic=True)
    for way in ("packed", "dot"):
        out.fill_(float("nan"))
        made.call(of_way(made, way).kernel())
        torch.testing.assert_close(out, made.tensors["d"].expand(m, n).clone())


def test_dynamic_sizes_without_k() -> None:
    out = torch.full((6, 9), float("nan"))
    made = product(torch.randn(6, 0), torch.randn(0, 9), out, dynamic=True)
    made.call(first(made).kernel())
    assert not out.any()


# ---- bias, batches, types


@pytest.mark.parametrize(("alpha", "beta", "shape"), [
    (1.0, 1.0, (40, 1)), (0.5, -2.0, (21,)), (0.5, -2.0, (40, 21)), (2.0, 0.0, (1, 21)),
])  # fmt: skip
def test_bias(alpha: float, beta: float, shape: tuple[int, ...]) -> None:
    left, right, bias = torch.randn(40, 33), torch.randn(33, 21), torch.randn(shape)
    if beta == 0:
        bias.fill_(float("nan"))  # is not read
    out = torch.empty(40, 21)
    made = product(left, right, out, bias=bias, alpha=alpha, beta=beta)
    made.call(first(made).kernel())
    expected = alpha * exact(left, right) + (beta * bias if beta else 0)
    close(out, expected, 33)


@pytest.mark.parametrize(("batch", "m", "n", "k"), [
    (1, 19, 23, 31), (2, 19, 23, 31), (17, 19, 23, 31), (17, 2, 40, 65),
])  # fmt: skip
def test_batches(batch: int, m: int, n: int, k: int) -> None:
    left, right = torch.randn(batch, m, k), torch.randn(batch, n, k).transpose(1, 2)
    out, bias = torch.empty(batch, m, n), torch.randn(batch, 1, n)
    made = product(left, right, out, bias=bias)
    made.call(first(made).kernel())
    close(out, exact(left, right) + bias, k)


def test_batches_of_heads() -> None:
    """The strides of attention: heads between positions."""
    q, k = (torch.randn(2, 33, 4, 16).transpose(1, 2).flatten(0, 0) for _ in range(2))
    left, right = q[1], k[1].transpose(1, 2)
    out = torch.empty(4, 33, 33)
    made = product(left, right, out)
    made.call(first(made).kernel())
    close(out, exact(left, right), 16)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("dtype", "m", "layout"), [
    (torch.bfloat16, 1, "t"), (torch.bfloat16, 3, "n"), (torch.bfloat16, 50, "t"),
    (torch.bfloat16, 50, "n"), (torch.float16, 1, "t"), (torch.float16, 3, "n"),
    (torch.float16, 50, "t"), (torch.float64, 3, "t"), (torch.float64, 50, "n"),
])  # fmt: skip
def test_types(dtype: torch.dtype, m: int, layout: str) -> None:
    left, right = in_layout(m, 90, "n", dtype), in_layout(90, 70, layout, dtype)
    out = torch.empty(m, 70, dtype=dtype)
    made = product(left, right, out, bias=torch.randn(70, dtype=dtype))
    made.call(first(made).kernel())
    close(out, exact(left, right) + made.tensors["d"], 90)


def test_integers_wrap() -> None:
    left = torch.randint(-100, 100, (20, 50), dtype=torch.int8)
    right = torch.randint(-100, 100, (50, 30), dtype=torch.int8)
    out, wide = torch.empty(20, 30, dtype=torch.int8), torch.empty(20, 30, dtype=torch.int32)
    for result in (out, wide):
        made = product(left, right, result)
        made.call(first(made).kernel())
    expected = left.long() @ right.long()
    assert torch.equal(wide, expected.int())
    assert torch.equal(out, expected.to(torch.int8))


def test_two_products_in_one() -> None:
    a, b, e, f = torch.randn(30, 40), torch.randn(40, 50), torch.randn(30, 40), torch.randn(40, 50)
    out = torch.empty(30, 50)
    made = product(a, b, out, second=(e, f))
    made.call(first(made).kernel())
    close(out, exact(a, b) + exact(e, f), 80)
    few = product(a[:2], b, out[:2], second=(e[:2], f))
    for way in ("packed", "stream"):
        out.zero_()
        few.call(of_way(few, way).kernel())
        close(out[:2], exact(a[:2], b) + exact(e[:2], f), 80)


# ---- epilogues and prologues


@pytest.mark.parametrize(("way", "m", "dtype"), [
    ("packed", 61, F32), ("packed", 5, torch.bfloat16), ("dot", 4, F32),
    ("stream", 4, torch.bfloat16),
])  # fmt: skip
def test_epilogue(way: str, m: int, dtype: torch.dtype) -> None:
    """gelu, a residual of its own strides, two results, the product kept too."""
    right = in_layout(96, 47, "n" if way == "stream" else "t", dtype)
    left, bias = in_layout(m, 96, "n", dtype), torch.randn(47, dtype=dtype)
    residual, c = in_layout(m, 47, "t", dtype), torch.empty(m, 47, dtype=dtype)
    made = product(left, right, c, bias=bias)
    y, mask = torch.empty(m, 47, dtype=dtype), torch.empty(m, 47, dtype=torch.bool)
    x = cast(made.problem.product, F32)
    erf = op("erf", op("mul", x, const(0.5**0.5, F32)))
    gelu = op("mul", op("mul", x, const(0.5, F32)), op("add", const(1.0, F32), erf))
    other = cast(made.at("x0", residual, *residual.stride()), F32)
    made.finish([("y", y, cast(op("add", gelu, other), dtype)),
                 ("z", mask, op("gt", x, const(0.0, F32)))], keeps=True)  # fmt: skip
    made.call(of_way(made, way).kernel())
    close(c, exact(left, right) + bias, 96)
    assert torch.equal(mask, c > 0)
    torch.testing.assert_close(y.float(), (F.gelu(c.float()) + residual).to(dtype).float(),
                               rtol=1e-2 if dtype != F32 else 1e-5, atol=1e-5)  # fmt: skip


def test_epilogue_into_columns() -> None:
    """The result is wanted transposed: rows are finished along m."""
    left, right = torch.randn(45, 60), torch.randn(60, 38)
    made = product(left, right, torch.empty(45, 38))
    y = torch.empty(38, 45).t()
    made.finish([("y", y, relu(made.problem.product))])
    found = {c.q: c for c in configurations(made.problem) if c.way == "packed"}
    assert len(found) == 2
    for c in found.values():
        y.fill_(float("nan"))
        made.call(CppCandidate(made.problem, c, 0, -1).kernel())
        close(y, exact(left, right).relu(), 60)


def test_epilogue_into_part_of_a_buffer() -> None:
    left, right, wide = torch.randn(20, 30), torch.randn(30, 24), torch.zeros(20, 50)
    made = product(left, right, torch.empty(20, 24))
    made.finish([("y", wide[:, 10:34], relu(made.problem.product))])
    made.call(first(made).kernel())
    close(wide[:, 10:34], exact(left, right).relu(), 30)
    assert not wide[:, :10].any() and not wide[:, 34:].any()


def test_epilogue_of_one_row() -> None:
    """Its indices may leave out the loop over rows."""
    left, right = torch.randn(1, 30), torch.randn(24, 30).t()
    made = product(left, right, torch.empty(1, 24))
    p, y = made.problem, torch.empty(1, 24)
    made.finish([("y", y, relu(load("c", F32, p.n)))])
    index = substitute(made.problem.epilogue[0].index, {p.m: ix.ZERO})
    made.problem = replace(made.problem, epilogue=(replace(made.problem.epilogue[0], index=index),))
    made.call(first(made).kernel())
    close(y, exact(left, right).relu(), 30)


def test_epilogue_reads_its_own_results() -> None:
    left, right = torch.randn(20, 30), torch.randn(30, 24)
    made = product(left, right, torch.empty(20, 24))
    y, z = torch.empty(20, 24), torch.empty(20, 24)
    again = load("y", F32, made.at("y", y, 24, 1).src[0])
    made.finish([("y", y, relu(made.problem.product)), ("z", z, op("exp", again))])
    made.call(first(made).kernel())
    close(z, exact(left, right).relu().exp(), 30)


def _with_weights(m: int, along: str) -> tuple[Made, Tensor]:
    """A product with int8 weights and a scale per column."""
    left, weight = torch.randn(m, 120), torch.randint(-128, 127, (66, 120), dtype=torch.int8)
    stored = weight if along == "k" else weight.t().contiguous()
    right = stored.t() if along == "k" else stored
    made = product(left, right.float(), torch.empty(m, 66))
    p, scale = made.problem, torch.rand(66)
    made.tensors |= {"b": stored, "s": scale}
    strides = (1, 120) if along == "k" else (66, 1)
    element = load("b", torch.int8, ix.linearize((p.k, p.n), strides, ix.ZERO))
    held = op("mul", cast(element, F32), load("s", F32, p.n))
    operand = Operand(p.operands[1].view, held, is_plain=False)
    changed = tuple(
        replace(b, dtype=made.tensors[b.name].dtype) if b.name == "b" else b for b in p.buffers
    )
    one = Made(p, {}, {})
    one.at("s", scale, 0, 1)
    extra = next(b for b in one.problem.buffers if b.name == "s")
    made.problem = replace(p, operands=(p.operands[0], operand), buffers=(*changed, extra))
    return made, right.double() * scale


@pytest.mark.parametrize(("m", "way", "along"), [
    (2, "dot", "k"), (2, "stream", "n"), (40, "packed", "k"), (40, "packed", "n"),
])  # fmt: skip
def test_prologue_of_small_weights(m: int, way: str, along: str) -> None:
    made, right = _with_weights(m, along)
    made.call(of_way(made, way).kernel())
    close(made.tensors["c"], made.tensors["a"].double() @ right, 120)


@pytest.mark.parametrize("q", ["m", "n"])
def test_prologue_on_either_side(q: str) -> None:
    """relu(a).t() @ b: rows that are turned around while they are computed."""
    left, right = torch.randn(50, 44).t(), torch.randn(50, 61)
    made = product(left, right, torch.empty(44, 61))
    p = made.problem
    operand = replace(p.operands[0], value=relu(p.operands[0].value), is_plain=False)
    made.problem = replace(p, operands=(operand, p.operands[1]))
    way = Config("packed", "m" if q == "m" else "n", 6, 2, 24, 18, 32, True, True)
    made.call(CppCandidate(made.problem, way, 0, -1).kernel())
    close(made.tensors["c"], exact(left.relu(), right), 50)


# ---- the whole compiler


@pytest.mark.parametrize("rows", [1, 24])
def test_a_layer_is_one_kernel(rows: int) -> None:
    """A linear layer with its activation, where nobody else may offer anything."""
    layer = torch.nn.Sequential(torch.nn.Linear(40, 56), torch.nn.GELU())
    x = torch.randn(rows, 40)
    options: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "CPP",
               "test_configs.max_mm_configs": 1}  # fmt: skip
    torch._dynamo.reset()
    with torch.no_grad(), fresh_cache():
        compiled = torch.compile(layer, backend="tilewright", options=options)
        actual, code = run_and_get_code(compiled, x)
        torch.testing.assert_close(actual, layer(x))
    assert sum(text.count('extern "C"') for text in code) == 1
    assert "tw::gemm::run" in "".join(code)


# ---- threads, instruction sets, names


def test_the_depth_that_caches_hold_is_tried_first() -> None:
    """As measured on the machine that the model is of: one block of k where that is near enough,
    and else blocks whose panels the first-level cache holds."""
    target = Target("x86_64", isa="avx2")

    def depth(m: int, n: int, k: int) -> int:
        made = product(in_layout(m, k, "n"), in_layout(k, n, "t"), torch.empty(m, n))
        problem = replace(made.problem, target=target)
        found = CppProvider().candidates(problem, "none")[0]
        assert isinstance(found, CppCandidate)
        return found.config.kc

    assert depth(512, 1000, 128) == 128 and depth(512, 1152, 288) == 288
    assert depth(512, 288, 1152) == 232 and depth(512, 256, 1024) == 256
    assert depth(1024, 3072, 768) == 768


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("way", "m", "n", "k", "layout"), [
    ("packed", 151, 173, 301, "t"), ("packed", 13, 700, 3500, "t"), ("packed", 151, 380, 301, "n"),
    ("dot", 5, 2003, 301, "t"), ("stream", 5, 2003, 301, "n"),
])  # fmt: skip
def test_threads_that_do_not_divide_the_tiles(way: str, m: int, n: int, k: int,
                                              layout: str) -> None:  # fmt: skip
    """Three, five and seven of them. The second product has its columns packed in several goes; of
    the third, three threads have columns of their own."""
    left, right = in_layout(m, k, "n"), in_layout(k, n, layout)
    made = product(left, right, torch.empty(m, n), bias=torch.randn(n))
    for threads in (3, 5, 7):
        made.tensors["c"].fill_(float("nan"))
        chosen = replace(of_way(made, way), threads=threads)
        made.call(chosen.kernel())
        close(made.tensors["c"], exact(left, right) + made.tensors["d"], k)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads: int) -> None:
    left, right = torch.randn(150, 500), torch.randn(320, 500).t()
    out, again = torch.empty(150, 320), torch.empty(150, 320)
    with config.patch({"cpp.threads": threads}):
        made = product(left, right, out)
        kernel = first(made).kernel()
        assert f"THREADS = {threads};" in kernel.source.text
        made.call(kernel)
        close(out, exact(left, right), 500)
        made.tensors["c"] = again
        made.call(kernel)
    assert torch.equal(out, again)


@pytest.mark.parametrize(("way", "m"), [("packed", 33), ("dot", 3), ("stream", 3)])
def test_scalar_code(way: str, m: int) -> None:
    with config.patch({"cpp.simdlen": 1}):
        left, right = torch.randn(m, 51), in_layout(51, 40, "n" if way == "stream" else "t")
        made = product(left, right, torch.empty(m, 40))
        made.call(of_way(made, way).kernel())
    close(made.tensors["c"], exact(left, right), 51)


@pytest.mark.parametrize(("way", "m"), [("packed", 64), ("dot", 3), ("stream", 3)])
def test_wide_registers_compile(way: str, m: int) -> None:
    """For a CPU that need not be this one; the sums of a tile stay in registers."""
    right = in_layout(128, 96, "n" if way == "stream" else "t")
    made = product(torch.randn(m, 128), right, torch.empty(m, 96))
    made.problem = replace(made.problem, target=Target("x86_64", isa="avx512"))
    source = of_way(made, way).kernel().source
    assert isinstance(source, cxx.CxxSource) and "LANES = 16;" in source.text
    try:
        cxx.build([source])
    except OSError:
        pytest.fail("it was not built")


def test_scratch_memory_is_shared_and_safe() -> None:
    """Kernels keep one block of memory between them; threads that meet have blocks of their own."""
    from concurrent.futures import ThreadPoolExecutor

    cases: list[tuple[Made, CppCandidate]] = []
    for m in (33, 80):
        made = product(torch.randn(m, 70), torch.randn(90, 70).t(), torch.empty(m, 90))
        cases.append((made, of_way(made, "packed")))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: cases[i % 2][0].call(cases[i % 2][1].kernel()), range(40)))
    for made, _ in cases:
        close(made.tensors["c"], exact(made.tensors["a"], made.tensors["b"]), 70)


def test_candidates() -> None:
    made = product(torch.randn(256, 768), torch.randn(3072, 768).t(), torch.empty(256, 3072),
                   bias=torch.randn(3072))  # fmt: skip
    made.finish([("y", torch.empty(256, 3072), op("tanh", made.problem.product))])
    found = PROVIDERS["CPP"].candidates(made.problem, "max")
    assert len({c.name for c in found}) == len({c.key for c in found}) == len(found) > 4
    assert all(re.fullmatch(r"cpp_addmm_\d+", c.name) for c in found)
    assert [c.estimate for c in found] == sorted(c.estimate for c in found)
    assert found[0].kernel().name == "cpp_fused_addmm_tanh"
    assert len(PROVIDERS["CPP"].candidates(made.problem, "quick")) == 2
    with config.patch({"test_configs.max_mm_configs": 1}):  # MA-A10
        assert len(PROVIDERS["CPP"].candidates(made.problem, "max")) == 1
    for c in found:
        pairs = [p.split("=") for p in c.description.split(", ")]
        assert pairs == sorted(pairs) and all(len(p) == 2 for p in pairs)


def test_what_is_refused_has_a_reason() -> None:
    supports = CppProvider().supports
    left, right = torch.randn(8, 9), torch.randn(9, 10)
    made = product(left, right, torch.empty(8, 10))
    p = made.problem
    nothing = product(torch.randn(0, 9), right, torch.empty(0, 10)).problem
    assert "nothing" in supports(nothing), "MA-I4"
    assert "CPU" in supports(replace(p, target=Target("sm_90")))
    shifted = load("c", F32, ix.add(p.product.src[0], 1))
    made.finish([("y", torch.empty(8, 10), shifted)], keeps=True)
    assert "other elements" in supports(made.problem)
    made = product(left, right, torch.empty(8, 10))
    index = op("index", load("x", torch.int64, made.problem.n), const(4))
    made.finish([("y", torch.empty(8, 10), cast(index, F32))])
    assert "checked" in supports(made.problem)
    store = replace(made.problem.epilogue[0], value=made.problem.product, buffer="a")
    assert "operand a" in supports(replace(made.problem, epilogue=(store,)))
