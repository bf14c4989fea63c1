"""Products by the Triton provider: numbers through the interpreter, structure by compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.products import Made, interpret, problem, programs
from tilewright import config, metrics
from tilewright.gemm.heuristics import GemmConfig
from tilewright.gemm.provider import Kernel
from tilewright.gemm.templates import TritonTemplate
from tilewright.gemm.triton import TritonCandidate, TritonProvider
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target

PROVIDER = TritonProvider()
SMALL = GemmConfig(16, 32, 16, 2, 4, group_m=2)
SPLIT = replace(SMALL, split_k=3)
ROW = GemmConfig(4, 16, 32, 2, 4)


@pytest.fixture(autouse=True)
def _tuning() -> Iterator[None]:
    with config.patch({"max_autotune": True, "triton.enable_persistent_tma_matmul": True}):
        yield


def kernel_of(made: Made, template: str = "mm", c: GemmConfig = SMALL) -> Kernel:
    chosen = TritonTemplate.all_templates[template]
    assert chosen.limits(made.problem) == ""
    return TritonCandidate(made.problem, chosen, c, template, 0.0).kernel()


def ran(made: Made, template: str = "mm", c: GemmConfig = SMALL, wide: bool = False) -> list[Any]:
    return interpret(made, kernel_of(made, template, c), wide)


def close(made: Made, expected: torch.Tensor, name: str = "c", tolerance: float = 1e-2) -> None:
    actual = made.tensors[name].view(expected.shape)
    torch.testing.assert_close(actual.double(), expected, atol=tolerance * 5, rtol=tolerance)


def product(*given: torch.Tensor) -> torch.Tensor:
    return torch.matmul(given[0].double(), given[1].double())


# ---- plain products


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_odd_sizes_and_transposed_operands(dtype: torch.dtype, layout: str) -> None:
    a = torch.randn(33, 50) if layout[0] == "n" else torch.randn(50, 33).t()
    b = torch.randn(50, 41) if layout[1] == "n" else torch.randn(41, 50).t()
    a, b = a.to(dtype), b.to(dtype)
    made = problem("mm", a, b)
    ran(made)
    close(made, product(a, b), tolerance=2e-2 if dtype == torch.bfloat16 else 1e-2)


@pytest.mark.parametrize(
    ("template", "c"), [("mm_split_k", SPLIT), ("mm_persistent", SMALL), ("mv", ROW),
                        ("mv", replace(ROW, split_k=2))]
)  # fmt: skip
def test_every_template_gives_the_same_product(template: str, c: GemmConfig) -> None:
    rows = 3 if template == "mv" else 37
    a, b = torch.randn(rows, 100), torch.randn(100, 40)
    made = problem("mm", a, b)
    given = ran(made, template, c)
    close(made, product(a, b), tolerance=1e-4)
    counters = [g for g in given if isinstance(g, torch.Tensor) and g.dtype == torch.int32]
    assert all((c == 0).all() for c in counters)  # ready for the next launch
    assert bool(counters) == (c.split_k > 1)


def test_one_persistent_program_per_sm() -> None:
    a, b = torch.randn(256, 32), torch.randn(32, 256)
    made = problem("mm", a, b)
    small = replace(made.problem.target, sms=3)
    made = replace(made, problem=replace(made.problem, target=small))
    kernel = kernel_of(made, "mm_persistent", GemmConfig(32, 32, 32, 2, 4))
    assert eval(kernel.source.programs(kernel.source.configs[0])) == 3
    interpret(made, kernel)
    close(made, product(a, b), tolerance=1e-4)


@pytest.mark.parametrize(("size", "k"), [*((n, 1) for n in range(90, 100)), (93, 16), (93, 90)])
def test_k_of_one(size: int, k: int) -> None:
    """MA-B9, MA-I5."""
    a, b = torch.randn(size, k), torch.randn(k, size)
    made = problem("mm", a, b)
    found = PROVIDER.candidates(made.problem, "max")
    assert found
    interpret(made, found[0].kernel())
    close(made, product(a, b), tolerance=1e-4)


def test_padded_strides_offsets_and_a_strided_result() -> None:
    """MA-P7: what is read is the window, not its buffer."""
    store = torch.randn(60, 70)
    a, b = store[3:40, 5:55], torch.randn(50, 90)[:, 10:75:2]
    out = torch.zeros(80, 40).t()[:37, 20:53]
    made = problem("mm", a, b, out=out)
    ran(made)
    torch.testing.assert_close(out.double(), product(a, b), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bias", [(41,), (33, 1), (33, 41), (1, 1)])
def test_addmm(bias: tuple[int, ...]) -> None:
    a, b, c = torch.randn(33, 50), torch.randn(50, 41), torch.randn(bias)
    made = problem("addmm", a, b, bias=c, alpha=0.5, beta=-2.0)
    ran(made)
    close(made, torch.addmm(c.double().expand(33, 41), a.double(), b.double(), beta=-2, alpha=0.5))


def test_addmm_does_not_read_a_bias_that_counts_nothing() -> None:
    a, b = torch.randn(33, 50), torch.randn(50, 41)
    made = problem("addmm", a, b, bias=torch.full((41,), torch.nan), beta=0.0)
    kernel = kernel_of(made)
    assert ("ptr", "bias") not in kernel.arguments
    interpret(made, kernel)
    close(made, product(a, b))


def test_baddbmm() -> None:
    """MA-B4, MA-B14: batches follow each other in the grid."""
    a, b, c = torch.randn(3, 20, 30), torch.randn(3, 30, 40), torch.randn(3, 1, 40)
    made = problem("baddbmm", a, b, bias=c)
    ran(made, "bmm")
    close(made, torch.baddbmm(c.double(), a.double(), b.double()))


def test_ma_b14_a_batch_beyond_the_second_dimension_of_a_grid() -> None:
    """Programs are counted along the first dimension of a grid alone, which takes 2**31 of them:
    nothing has to be divided where a batch is larger than 65 535, and none are left over."""
    batch = 65_536 + 3
    a, b = (torch.empty(batch, n, k, device="meta") for n, k in ((20, 8), (8, 40)))
    made = problem("bmm", a, b)
    kernel = kernel_of(made, "bmm", SMALL)
    source = kernel.source
    assert isinstance(source, TritonSource)
    assert programs(made, source) == batch * 2 * 2  # blocks of 16 by 32 in 20 by 40
    text = source.text
    assert "program_id(0)" in text and "program_id(1)" not in text and "program_id(2)" not in text


@pytest.mark.parametrize("sizes", [(7, 20, 8, 40), (3, 1, 5, 1)])
def test_ma_b14_every_batch_is_computed(sizes: tuple[int, int, int, int]) -> None:
    batch, m, k, n = sizes
    a, b = torch.randn(batch, m, k), torch.randn(batch, k, n)
    made = problem("bmm", a, b)
    made.tensors["c"].fill_(torch.nan)
    ran(made, "bmm")
    close(made, torch.bmm(a.double(), b.double()), tolerance=1e-4)


def test_bmm_into_a_wider_type() -> None:
    """MA-B6."""
    a, b = torch.randn(2, 3, 4).half(), torch.randn(2, 4, 5).half()
    made = problem("bmm", a, b, dtype=torch.float32)
    kernel = PROVIDER.candidates(made.problem, "quick")[0].kernel()
    assert kernel.name == "triton_tem_fused_bmm"
    interpret(made, kernel)
    assert made.tensors["c"].dtype == torch.float32
    close(made, product(a, b), tolerance=1e-3)


@pytest.mark.parametrize("op", ["bmm", "baddbmm"])
def test_no_template_for_one_matrix_read_as_many(op: Any) -> None:
    """MA-B7, MA-B8, MA-P9."""
    a = torch.randn(1, 32, 64).expand(4, 32, 64)
    b = torch.randn(4, 64, 16)
    bias = torch.randn(4, 32, 16) if op == "baddbmm" else None
    made = problem(op, a, b, bias=bias)
    assert "same for the whole batch" in PROVIDER.supports(made.problem)
    assert not PROVIDER.candidates(made.problem, "max")


def test_mm_plus_mm() -> None:
    """MA-C1."""
    a, b, c, d = (torch.randn(33, 50), torch.randn(50, 40), torch.randn(50, 33).t(),
                  torch.randn(50, 40))  # fmt: skip
    made = problem("mm_plus_mm", a, b, c, d)
    ran(made, "mm_plus_mm")
    close(made, product(a, b) + product(c, d), tolerance=1e-4)


def test_int8_products_are_summed_as_integers() -> None:
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((20, 40), (40, 33)))
    made = problem("mm", a, b, dtype=torch.int32)
    chosen = PROVIDER.candidates(made.problem, "max")
    assert min(c.config.block_k for c in chosen) >= 32  # MA-B13
    interpret(made, chosen[0].kernel())
    expected = a.int() @ b.int()
    assert torch.equal(made.tensors["c"].view(20, 33), expected)


# ---- tensor descriptors


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    ("template", "c"), [("mm_tma", SMALL), ("mm_tma", SPLIT), ("mm_persistent_tma", SMALL)]
)
def test_operands_fetched_through_descriptors(layout: str, template: str, c: GemmConfig) -> None:
    """MA-D1, MA-D3: strides come from the tensors; what is outside them is zero."""
    a = torch.randn(40, 96).half()[:, :72] if layout[0] == "n" else torch.randn(72, 40).half().t()
    b = torch.randn(72, 48).half() if layout[1] == "n" else torch.randn(48, 80).half()[:, :72].t()
    made = problem("mm", a, b)
    kernel = kernel_of(made, template, c)
    text = kernel.source.text
    assert text.count("tl.make_tensor_descriptor(") == 2 and "tl.load(p_x" not in text
    assert kernel.source.scratched and kernel.arguments[-1] == ("ptr", "workspace")
    interpret(made, kernel)
    close(made, product(a, b))
    plain = kernel.source.unaligned  # takes calls whose memory starts anywhere
    assert plain is not None and "descriptor" not in plain.text
    assert plain.types == kernel.source.types and plain.grid == kernel.source.grid


def test_descriptors_need_aligned_rows() -> None:
    """MA-D4, MA-D7, MA-D10."""
    template = TritonTemplate.all_templates["mm_tma"]
    odd = problem("mm", torch.randn(21, 11).half(), torch.randn(11, 31).half())
    assert "16 bytes" in template.limits(odd.problem)
    even = problem("mm", torch.randn(21, 16).half(), torch.randn(16, 32).half())
    assert template.limits(even.problem) == ""
    with config.patch({"triton.enable_persistent_tma_matmul": False}):
        assert "is off" in template.limits(even.problem)
    older = replace(even.problem, target=Target("sm_89"))
    assert "Hopper" in template.limits(older)
    dynamic = problem("mm", torch.randn(21, 16).half(), torch.randn(16, 32).half(), dynamic=(21,))
    assert template.limits(dynamic.problem) == ""  # there may be any number of rows


WINDOWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "as it is": (lambda x: x[:32, :64], ""),
    "turned": (lambda x: x[:64, :32].t(), ""),
    "begins at 16 bytes": (lambda x: x[:32, 8:72], ""),
    "begins anywhere": (lambda x: x[:32, 3:67], "16 bytes"),
    "rows apart by 100": (lambda x: x.view(-1)[:3200].view(32, 100)[:, :64], "16 bytes"),
    "every second element": (lambda x: x[:32, :128:2], "no contiguous dimension"),
    "rows repeated": (lambda x: x[:1, :64].expand(32, 64), "repeats its rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_ma_d10_what_an_operand_has_to_be_for_descriptors(name: str) -> None:
    """Either operand: one dimension is contiguous, all else steps by multiples of 16 bytes."""
    window, why = WINDOWS[name]
    template = TritonTemplate.all_templates["mm_tma"]
    for dtype in (torch.float16, torch.bfloat16):
        whole, plain = torch.zeros(64, 256).to(dtype), torch.zeros(64, 64).to(dtype)
        x = window(whole)
        for pair in ((x, plain), (plain[:, :32], x)):
            found = template.limits(problem("mm", *pair).problem)
            assert (found == "") if why == "" else (why in found), found


def test_descriptors_are_offered_where_the_library_is_slow() -> None:
    """A vocabulary of odd size: the result's rows start anywhere, those of the operands do not."""
    hidden, weights = torch.randn(2048, 768).bfloat16(), torch.randn(1001, 768).bfloat16().t()
    odd = problem("mm", hidden, weights)
    even = problem("mm", hidden, weights[:, :1000])
    with config.patch({"triton.enable_persistent_tma_matmul": False}):
        names = [[c.name for c in PROVIDER.candidates(made.problem, "default")]
                 for made in (odd, even)]  # fmt: skip
    assert any("persistent_tma" in n for n in names[0])
    assert not any("tma" in n for n in names[1])


# ---- sizes known when it runs


def test_dynamic_sizes_are_numbers_of_one_kernel() -> None:
    sizes = (35, 41, 53)
    texts: set[str] = set()
    for m, n, k in (sizes, (7, 100, 16)):
        a, b = torch.randn(m, k), torch.randn(k, n)
        made = problem("mm", a, b, dynamic=(m, n, k))
        kernel = kernel_of(made)
        texts.add(kernel.source.text)
        assert [kind for kind, _ in kernel.arguments].count("int") == 3
        interpret(made, kernel)
        close(made, product(a, b), tolerance=1e-4)
    assert len(texts) == 1


@pytest.mark.parametrize("template", ["mm", "mm_split_k", "mm_persistent"])
def test_dynamic_sizes_may_need_wide_indices(template: str) -> None:
    """MA-D14 to MA-D16: the same kernel over 64-bit positions, for calls that need them."""
    a, b = torch.randn(35, 53), torch.randn(53, 41)
    made = problem("mm", a, b, dynamic=(35, 41, 53))
    kernel = kernel_of(made, template, SPLIT if template == "mm_split_k" else SMALL)
    assert kernel.assume and kernel.source.wide is not None
    assert all(kind == "i64" for kind in kernel.source.wide.types if not kind.startswith("*"))
    interpret(made, kernel, wide=True)
    close(made, product(a, b), tolerance=1e-4)


def test_large_buffers_have_wide_indices_at_once() -> None:
    """MA-D14, MA-D15."""
    a = torch.empty(1280, 65536, dtype=torch.float16, device="meta")
    b = torch.empty(65536, 65536, dtype=torch.float16, device="meta")
    kernel = kernel_of(problem("mm", a, b))
    assert not kernel.assume and "tl.int64" in kernel.source.text


def test_ma_d16_a_result_of_more_elements_than_32_bits_count() -> None:
    """Positions are wide; nothing multiplies rows by columns to see whether there is anything."""
    made = problem("mm", *(torch.empty(s, dtype=torch.float16, device="meta")
                           for s in ((65536, 32), (32, 65536))))  # fmt: skip
    kernel = kernel_of(made, c=GemmConfig(128, 128, 32, 3, 8))
    assert not kernel.assume and "tl.int64" in kernel.source.text
    assert "M * N" not in kernel.source.text and "return" not in kernel.source.text
    source = kernel.source
    assert isinstance(source, TritonSource) and programs(made, source) == 512 * 512


@pytest.mark.parametrize("sizes", [(0, 10, 100), (30, 0, 100), (30, 10, 0)])
def test_empty_products(sizes: tuple[int, int, int]) -> None:
    """MA-I1, MA-I2, MA-I3 where a size turns out to be zero."""
    m, k, n = sizes
    a, b = torch.randn(m, k), torch.randn(k, n)
    made = problem("mm", a, b, dynamic=(m, n, k))
    made.tensors["c"].fill_(torch.nan)
    kernel = kernel_of(made)
    interpret(made, kernel)
    close(made, torch.zeros(m, n, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [(0, 24, 40), (20, 0, 40), (20, 24, 0)])
def test_ma_i1_empty_sums_of_products(sizes: tuple[int, int, int]) -> None:
    """Where a size turns out to be zero: nothing is written, or zeros are."""
    m, k, n = sizes
    a, b, c, d = (torch.randn(s) for s in ((m, k), (k, n)) * 2)
    made = problem("mm_plus_mm", a, b, c, d, dynamic=(m, n, k))
    made.tensors["c"].fill_(torch.nan)
    ran(made, "mm_plus_mm")
    close(made, torch.zeros(m, n, dtype=torch.float64))


def test_nothing_is_offered_for_a_result_known_to_be_empty() -> None:
    """MA-I4."""
    for op in ("mm", "mm_plus_mm", "addmm"):
        given = [torch.randn(0, 10), torch.randn(10, 100)] * (1 + (op == "mm_plus_mm"))
        bias = torch.randn(100) if op == "addmm" else None
        made = problem(op, *given, bias=bias)
        assert PROVIDER.supports(made.problem) == "the result is empty"


# ---- names, keys, and rendering once


def test_names_and_descriptions() -> None:
    """MA-O12, MA-O13."""
    made = problem("mm", torch.randn(64, 64), torch.randn(64, 64))
    found = PROVIDER.candidates(made.problem, "max")
    assert len({c.name for c in found}) == len(found) == len({c.key for c in found})
    assert all(c.name.startswith(f"triton_{c.template.name}_") for c in found)
    pairs = found[0].description.split(", ")
    assert [p.split("=")[0] for p in pairs][-2:] == ["num_stages", "num_warps"]
    assert pairs[:-2] == sorted(pairs[:-2])
    assert found[0].kernel("mm_relu").name == "triton_tem_fused_mm_relu"


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float16, "tl.float32"), (torch.bfloat16, "tl.float32"), (torch.int8, "tl.int32")],
)
def test_ma_b13_what_sums_are_kept_in(dtype: torch.dtype, kind: str) -> None:
    a, b = (torch.zeros(64, 64).to(dtype) for _ in range(2))
    made = problem("mm", a, b, dtype=torch.int32 if dtype == torch.int8 else None)
    for c in PROVIDER.candidates(made.problem, "quick"):
        assert isinstance(c, TritonCandidate) and f"ACC_TYPE={kind}" in c.description
        assert f"acc = tl.full((BLOCK_M, BLOCK_N), 0, {kind})" in c.kernel().source.text


@pytest.mark.parametrize("k", [15, 16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_even_k_is_proven(k: int, dynamic: bool) -> None:
    """MA-B10."""
    a, b = torch.randn(21, k).half(), torch.randn(k, 31).half()
    made = problem("mm", a, b, dynamic=(k,) if dynamic else ())
    even = k == 16 and not dynamic
    for c in PROVIDER.candidates(made.problem, "max"):
        assert f"EVEN_K={even and c.config.block_k == 16}" in c.description
        assert ("kbmask" in c.kernel().source.text) != (f"EVEN_K={True}" in c.description)


def test_a_request_is_rendered_once() -> None:
    """MA-L7: two equal products, four configurations."""
    from tilewright import caches

    caches.clear()
    metrics.reset()
    with config.patch({"test_configs.max_mm_configs": 4}):
        for _ in range(2):
            made = problem("mm", torch.randn(10, 22), torch.randn(22, 30))
            for c in PROVIDER.candidates(made.problem, "max"):
                if c.template.name == "mm":
                    c.kernel()
    counters = metrics.counters["inductor"]
    assert counters["generated_module_cache_miss"] == 4
    assert counters["generated_module_cache_hit"] == 4
