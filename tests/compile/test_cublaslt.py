"""cuBLASLt as a provider, against a stand-in that multiplies on memory of the host."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.compile import fake_cublaslt
from tests.compile.fake_cublaslt import Fake
from tests.problems import Case, case, fused, linear, numbers, whole
from tilewright import config
from tilewright.gemm import cublaslt as provider
from tilewright.gemm.cublaslt import CublasLt, LtCandidate, LtSource
from tilewright.gemm.problem import GemmProblem, loops, plain, takes_tf32
from tilewright.gemm.provider import PROVIDERS, Effort
from tilewright.ir import build
from tilewright.ir.expr import Expr, load, sym
from tilewright.lower import formula as f
from tilewright.lower.activations import gelu
from tilewright.runtime import cublaslt as lt
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code

LT = CublasLt()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fresh_cache(), fake_cublaslt.fake_cublaslt() as made:
        yield made


def only(problem: GemmProblem) -> LtCandidate:
    assert LT.supports(problem) == ""
    return LT.candidates(problem, "quick")[0]


def check(made: Case, out: torch.Tensor, expected: torch.Tensor, first: bool = False) -> None:
    """Every algorithm writes the expected numbers there, and nothing elsewhere."""
    assert LT.supports(made.problem) == ""
    found = LT.candidates(made.problem, "default")
    assert len(found) == 3
    for candidate in found[:1] if first else found:
        memory = made.run(candidate)
        inside = out.as_strided(out.shape, out.stride(), out.storage_offset())
        torch.testing.assert_close(inside.double(), expected.double(), atol=1e-5, rtol=1e-5)
        outside = torch.ones_like(memory, dtype=torch.bool)
        outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
        assert memory[outside].isnan().all() or not memory.is_floating_point()


# ---- ways a matrix lies in memory


def laid(kind: str, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    match kind:
        case "row":
            return torch.randn(rows, cols).to(dtype)
        case "col":
            return torch.randn(cols, rows).to(dtype).t()
        case "row window":
            return torch.randn(rows + 2, cols + 8).to(dtype)[1:-1, 4:-4]
        case "col window":
            return torch.randn(cols + 2, rows + 5).to(dtype)[1:-1, 3:-2].t()
    raise AssertionError(kind)


KINDS = ("row", "col", "row window", "col window")


@pytest.mark.parametrize("out_kind", KINDS)
@pytest.mark.parametrize("size", [(5, 7, 3), (1, 6, 4), (6, 1, 4), (4, 6, 1), (1, 1, 1)])
def test_every_layout(fake: Fake, size: tuple[int, int, int], out_kind: str) -> None:
    m, n, k = size
    for left, right in itertools.product(KINDS, KINDS):
        a, b, out = laid(left, m, k), laid(right, k, n), laid(out_kind, m, n)
        check(case("mm", a, b, out), out, a.double() @ b.double(), first=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes(fake: Fake, dtype: torch.dtype) -> None:
    a, b, out = (laid("row", *s, dtype) for s in ((4, 6), (6, 5), (4, 5)))
    check(case("mm", a, b, out), out, (a.double() @ b.double()).to(dtype))


def test_wider_result(fake: Fake) -> None:
    a, b, out = (
        laid("row", 4, 6, torch.bfloat16),
        laid("col", 6, 5, torch.bfloat16),
        laid("row", 4, 5),
    )
    check(case("mm", a, b, out), out, a.double() @ b.double())


def test_int8(fake: Fake) -> None:
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((4, 16), (16, 5)))
    out = torch.zeros(4, 5, dtype=torch.int32)
    made = case("mm", a, b, out)
    made.run(only(made.problem))
    assert torch.equal(out, a.int() @ b.int())


@pytest.mark.parametrize("forms", list(itertools.product(range(3), range(3))))
def test_batches(fake: Fake, forms: tuple[int, int]) -> None:
    def batch(form: int, rows: int, cols: int) -> torch.Tensor:
        made = (torch.randn(3, rows, cols), torch.randn(rows, 3, cols).transpose(0, 1),
                torch.randn(cols, rows).t().expand(3, rows, cols))  # fmt: skip
        return made[form]

    a, b = batch(forms[0], 5, 4), batch(forms[1], 4, 6)
    out = torch.empty(3, 6, 5).transpose(1, 2)
    check(case("bmm", a, b, out), out, a.double() @ b.double())


# ---- what is added


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 1.0), (2.0, -0.25), (3.0, 0.0)])
@pytest.mark.parametrize("kind", ["row", "row window"])
def test_added_matrix(fake: Fake, kind: str, alpha: float, beta: float) -> None:
    a, b, out, bias = (laid(kind, *s) for s in ((4, 6), (6, 5), (4, 5), (4, 5)))
    expected = alpha * (a.double() @ b.double()) + beta * bias.double()
    check(case("addmm", a, b, out, bias, alpha, beta), out, expected)


@pytest.mark.parametrize("size", [(4, 5), (1, 5), (4, 1)])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_row_is_the_bias_of_the_library(fake: Fake, size: tuple[int, int], alpha: float) -> None:
    m, n = size
    a, b, out, bias = (
        laid("row", m, 6),
        laid("col", 6, n),
        laid("row", m, n),
        torch.randn(n + 4)[4:],
    )
    check(case("addmm", a, b, out, bias, alpha), out,
          alpha * (a.double() @ b.double()) + bias.double())  # fmt: skip
    assert fake.desc(lt.DESC_EPILOGUE) == lt.EPILOGUE_BIAS


def test_column_is_the_bias_of_a_transposed_result(fake: Fake) -> None:
    a, b, out, bias = laid("row", 4, 6), laid("row", 6, 5), laid("col", 4, 5), torch.randn(4, 1)
    check(case("addmm", a, b, out, bias), out, a.double() @ b.double() + bias.double())


def test_bias_moves_between_calls(fake: Fake) -> None:
    a, b, out, bias = laid("row", 4, 6), laid("row", 6, 5), laid("row", 4, 5), torch.randn(5)
    made = case("addmm", a, b, out, bias)
    source = only(made.problem).kernel().source
    for _ in range(3):
        other = torch.randn(5)
        source(whole(out), whole(a), whole(b), other)
        torch.testing.assert_close(out, torch.addmm(other, a, b))


@pytest.mark.parametrize("shape", [(3, 5, 6), (1, 5, 6), (3, 1, 6), (1, 1, 6)])
def test_baddbmm(fake: Fake, shape: tuple[int, int, int]) -> None:
    a, b, out, bias = (
        torch.randn(3, 5, 4),
        torch.randn(3, 4, 6),
        torch.empty(3, 5, 6),
        torch.randn(shape),
    )
    check(case("baddbmm", a, b, out, bias), out, a.double() @ b.double() + bias.double())


# ---- what is applied


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


APPLIED: dict[str, tuple[Callable[[Expr], Expr], Callable[[torch.Tensor], torch.Tensor], int]] = {
    "relu": (lambda x: f.maximum(0, x), torch.relu, lt.EPILOGUE_RELU),
    "relu, zero last": (lambda x: f.maximum(x, 0), torch.relu, lt.EPILOGUE_RELU),
    "gelu": (lambda x: gelu(x, "tanh"), _tanh_gelu, lt.EPILOGUE_GELU),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", APPLIED)
def test_activations(fake: Fake, name: str, with_bias: bool, dtype: torch.dtype) -> None:
    formula, eager, code = APPLIED[name]
    a, b, c, out = (laid("row", *s, dtype) for s in ((4, 6), (6, 5), (4, 5), (4, 5)))
    bias = torch.randn(5).to(dtype) if with_bias else None
    made = case("addmm" if with_bias else "mm", a, b, c, bias)
    made = fused(made, lambda x: build.cast(formula(build.cast(x, torch.float32)), dtype), out)
    total = a.double() @ b.double() + (0 if bias is None else bias.double())
    check(made, out, eager(total).to(dtype))
    assert fake.desc(lt.DESC_EPILOGUE) == code | (lt.EPILOGUE_BIAS if with_bias else 0)


def test_sum_in_the_epilogue(fake: Fake) -> None:
    """relu(addmm(row) + matrix), the sum rounded in between as eager does."""
    dtype = torch.bfloat16
    a, b, c, out, more = (laid("row", *s, dtype) for s in ((4, 6), (6, 5), (4, 5), (4, 5), (4, 5)))
    bias = torch.randn(5).to(dtype)
    base = case("addmm", a, b, c, bias)
    wide, narrow = torch.float32, dtype

    def value(x: Expr) -> Expr:
        other = build.cast(load("x", narrow, linear(base.problem, more)), wide)
        total = build.cast(f.add(other, build.cast(x, wide)), narrow)
        return build.cast(f.maximum(0, build.cast(total, wide)), narrow)

    expected = (a.double() @ b.double() + bias.double() + more.double()).relu().to(dtype)
    check(fused(base, value, out, x=more), out, expected)


def test_added_in_place(fake: Fake) -> None:
    a, b, c, y = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5), (4, 5)))
    base = case("mm", a, b, c)
    made = fused(base, lambda x: f.add(load("y", x.dtype, linear(base.problem, y)), x), y)
    expected = torch.addmm(y, a, b)
    made.run(only(made.problem))
    torch.testing.assert_close(y, expected)


def test_stored_transposed(fake: Fake) -> None:
    a, b, c, out = laid("row", 4, 6), laid("row", 6, 5), laid("row", 4, 5), laid("col", 4, 5)
    check(
        fused(case("mm", a, b, c), lambda x: f.maximum(0, x), out),
        out,
        (a.double() @ b.double()).relu(),
    )


# ---- reasons


def test_reasons(fake: Fake) -> None:
    a, b, c, out = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5), (4, 5)))
    base = case("mm", a, b, c)
    p = base.problem

    def said(problem: GemmProblem) -> str:
        assert not LT.candidates(problem, "max")
        return LT.supports(problem)

    def of(value: Callable[[Expr], Expr]) -> str:
        return said(fused(base, value, out).problem)

    assert "neither direction" in said(case("mm", torch.randn(4, 12)[:, ::2], b, c).problem)
    assert "neither direction" in said(case("mm", a.expand(4, 6)[:1].expand(4, 6), b, c).problem)
    assert "is empty" in said(case("mm", torch.empty(4, 0), torch.empty(0, 5), c).problem)
    assert "known only at run time" in said(replace(p, m=loops(*[sym("s0")] * 4)[1]))
    assert "of two products" in said(replace(p, op="mm_plus_mm"))
    assert "no product of" in said(case("mm", a.double(), b.double(), c).problem)
    assert "cannot apply" in of(f.tanh)
    assert "cannot apply" in of(lambda x: f.mul(x, 2.0))
    assert "cannot apply" in of(lambda x: f.add(x, x))
    assert "cannot apply" in of(gelu)  # by erf, which the library has not
    assert "cannot apply" in of(lambda x: f.add(f.maximum(0, x), 1.0))
    assert "not stored" in of(lambda x: build.cast(x, torch.float64))
    assert "several results" in said(replace(fused(base, f.tanh, out).problem, keeps=True))
    row = torch.randn(5)
    assert "cannot add" in said(case("addmm", a, b, c, row, beta=0.5).problem)
    assert "cannot add" in said(case("addmm", a, b, c, torch.randn(4, 1)).problem)
    assert "another dtype" in said(case("addmm", a, b, c, row.double()).problem)
    assert "on NVIDIA cards" in LT.supports(replace(p, target=Target("x86_64")))
    with config.patch({"triton.autotune_cublasLt": False}):
        assert LT.supports(p) == "triton.autotune_cublasLt is off"


def test_large_strides_are_refused(fake: Fake) -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    p = case("mm", a, b, c).problem
    view = replace(p.operands[0].view, stride=numbers((2**31, 1)))
    assert "too large" in LT.supports(replace(p, operands=(plain(view, (p.m, p.k)), p.operands[1])))


def test_nothing_offered(fake: Fake) -> None:
    fake.offer(0)
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    assert "no algorithm" in LT.supports(case("mm", a, b, c).problem)


def test_no_library() -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    p = case("mm", a, b, c).problem
    with fresh_cache():
        assert "has not loaded" in LT.supports(p)
        other = fake_cublaslt.build("-DcublasLtMatmul=renamed")
        with (
            pytest.raises(AssertionError, match=r"cannot be used: .*cublasLtMatmul"),
            lt.use(other),
        ):
            pass


# ---- facts of the call


def test_heuristics_are_told_what_is_promised(fake: Fake) -> None:
    a, b, out = torch.randn(4, 10)[:, 1:9], torch.randn(8, 6), torch.empty(4, 6)
    only(case("mm", a, b, out).problem)
    # computed transposed: the library's first operand is our second
    assert [fake.preference(k) for k in lt.PREFER_ALIGNMENT] == [16, 4, 16, 16]
    assert fake.preference(lt.PREFER_WORKSPACE) == lt.WORKSPACE
    assert fake.preference(lt.PREFER_REDUCTION) == lt.REDUCTION_ANY


def test_settings_are_part_of_the_key(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    half = [laid("row", *s, torch.bfloat16) for s in ((4, 6), (6, 5), (4, 5))]
    full = [laid("row", *s) for s in ((4, 6), (6, 5), (4, 5))]
    before = [only(case("mm", *t).problem) for t in (half, full)]
    monkeypatch.setattr(provider, "takes_tf32", lambda: True)
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        after = [only(case("mm", *t).problem) for t in (half, full)]
    finally:
        settings.allow_bf16_reduced_precision_reduction = True
    assert all(x.key != y.key for x, y in zip(before, after, strict=True))
    assert after[0].source.call.reduction == lt.REDUCTION_COMPUTE_TYPE
    assert after[1].source.call.compute == lt.COMPUTE_32F_FAST_TF32


def test_tf32_follows_torch() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert takes_tf32()
        torch.set_float32_matmul_precision("highest")
        assert not takes_tf32()
    finally:
        torch.set_float32_matmul_precision(before)


def test_candidates(fake: Fake) -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    found = LT.candidates(case("mm", a, b, c).problem, "max")
    assert [x.name for x in found] == [f"cublaslt_mm_{k}" for k in range(3)]
    assert len({x.key for x in found}) == 3
    estimates = [x.estimate for x in found]
    assert estimates == sorted(estimates) and estimates[0] > 0
    assert found[1].description.startswith("ALGO=41, CLUSTER=8, INNER=7, OPTION=5, REDUCTION=3")
    assert found[0].kernel().name == "extern_kernels.cublaslt_mm"
    assert [n for _, n in found[0].kernel().arguments] == ["c", "a", "b"]


def test_variants(fake: Fake) -> None:
    """What the heuristics do not say is tried too, where the library says that it can run."""
    fake.splits(8)
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    made = case("mm", a, b, c)
    found = LT.candidates(made.problem, "max")
    splits = [dict(x.source.algorithm.config)["SPLIT_K"] for x in found]
    # of the first two algorithms, then of the third: 8 is settable, but cannot run; 16 is not
    assert splits == [0, 0, 0, 2, 2, 4, 4, 3, 3, 1, 1, 2, 4, 3, 1]
    assert len({x.key for x in found}) == len(found)
    assert len(LT.candidates(made.problem, "none")) == 8
    for candidate in found:
        made.run(candidate)
        torch.testing.assert_close(c, a @ b)


def test_one_buffer_for_both_operands(fake: Fake) -> None:
    x, out = torch.randn(4, 6), torch.empty(4, 4)
    made = case("mm", x, x.t(), out)
    p = made.problem
    right = plain(replace(p.operands[1].view, buffer="a"), (p.k, p.n))
    made = Case(replace(p, operands=(p.operands[0], right)), made.tensors)
    assert [n for _, n in only(made.problem).kernel().arguments] == ["c", "a"]
    check(made, out, x.double() @ x.double().t())


def test_memory_beside_the_operands(fake: Fake) -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    made = case("mm", a, b, c)
    seen: list[tuple[int, int]] = []
    for candidate in LT.candidates(made.problem, "max"):
        made.run(candidate)
        seen.append((fake.workspace(), fake.workspace_size()))
    assert seen[0] == (0, 0)
    assert seen[1][0] == seen[2][0] != 0  # one for all calls of a stream
    assert (seen[1][1], seen[2][1]) == (1024, 4096)


def test_what_needs_too_much_memory_is_not_offered(fake: Fake) -> None:
    fake.offer(4)
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    assert len(LT.candidates(case("mm", a, b, c).problem, "max")) == 3


def test_less_aligned_memory_is_multiplied_by_torch(fake: Fake) -> None:
    a, b, c, bias = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5), (1, 5)))
    made = case("addmm", a, b, c, bias[0], 2.0)
    made = fused(made, lambda x: f.maximum(0, x), torch.empty(4, 5))
    source = only(made.problem).kernel().source
    for shifted in range(4):
        given = [whole(c), whole(a), whole(b), whole(bias)]
        given[0] = torch.empty(20)
        odd = torch.empty(given[shifted].numel() + 1)[1:]
        given[shifted] = odd.copy_(given[shifted])
        before = fake.multiplied()
        source(*given)
        assert fake.multiplied() == before
        expected = torch.relu(2 * (a @ b) + bias)
        torch.testing.assert_close(given[0].view(4, 5), expected)


def test_pickled_it_asks_for_nothing(fake: Fake) -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    made = case("mm", a, b, c)
    candidate = LT.candidates(made.problem, "max")[2]
    made.run(candidate)
    asked = fake.asked()
    again = pickle.loads(pickle.dumps(candidate.kernel().source))
    assert isinstance(again, LtSource) and again == candidate.source
    c.fill_(float("nan"))
    again(whole(c), whole(a), whole(b))
    torch.testing.assert_close(c, a @ b)
    lt._known.clear()  # as in a new process: the answer is in the store
    assert LT.candidates(made.problem, "max")[2] == candidate
    assert fake.asked() == asked


def test_algorithms_of_another_version_are_not_run(fake: Fake) -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    source = only(case("mm", a, b, c).problem).source
    unknown = replace(source.algorithm, data=bytes(64))
    for wrong in (replace(source.algorithm, version=1), unknown):
        before = fake.multiplied()
        replace(source, algorithm=wrong)(whole(c), whole(a), whole(b))
        torch.testing.assert_close(c, a @ b)
        assert fake.multiplied() == before


def test_failures_are_raised(fake: Fake) -> None:
    a, b, c = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5)))
    source = only(case("mm", a, b, c).problem).source
    source(whole(c), whole(a), whole(b))
    fake.fail(13)
    with pytest.raises(
        RuntimeError, match=r"cublasLtMatmul gave 13 for extern_kernels\.cublaslt_mm"
    ):
        source(whole(c), whole(a), whole(b))
    with pytest.raises(TypeError, match="takes 3 tensors"):
        source(whole(c))
    with pytest.raises(AttributeError, match="data_ptr"):
        source(whole(c), whole(a), 5)


def test_nothing_of_the_library_is_left_behind(fake: Fake) -> None:
    a, b, c, bias = (laid("row", *s) for s in ((4, 6), (6, 5), (4, 5), (1, 5)))
    before = fake.alive()
    made = case("addmm", a, b, c, bias[0])
    for candidate in LT.candidates(made.problem, "max"):
        made.run(candidate)
        assert fake.alive() > before
        del candidate
    assert fake.alive() == before


# ---- in whole programs


class OnHost:
    """The provider, told that memory of the host is a card's."""

    name = "LT"

    def supports(self, problem: GemmProblem) -> str:
        return LT.supports(replace(problem, target=Target("sm_90")))

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[LtCandidate]:
        return LT.candidates(replace(problem, target=Target("sm_90")), effort)


PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "mm": (lambda x, w, b, y: x[0] @ w.t(), "cublaslt_mm"),
    "linear": (lambda x, w, b, y: F.linear(x, w, b), "cublaslt_addmm"),
    "relu": (lambda x, w, b, y: F.relu(F.linear(x, w, b)), "cublaslt_addmm_relu"),
    "gelu": (lambda x, w, b, y: F.gelu(F.linear(x, w, b), approximate="tanh"),
             "cublaslt_addmm_gelu"),
    "residual": (lambda x, w, b, y: F.linear(x, w, b) + y, "cublaslt_addmm_add"),
    "sum and relu": (lambda x, w, b, y: F.relu(x @ w.t() + b), "cublaslt_mm_add_relu"),
    "into a view": (lambda x, w, b, y: torch.cat([F.relu(x[0] @ w.t()), y[0]], 1), "cublaslt_mm"),
    "bmm": (lambda x, w, b, y: torch.bmm(y, x), "cublaslt_bmm"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(fake: Fake, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, wanted = PROGRAMS[name]
    monkeypatch.setitem(PROVIDERS, "LT", OnHost())
    sizes = ((3, 8, 16), (8, 16), (8,), (3, 8, 8))
    x, w, b, y = (torch.randn(s).bfloat16() for s in sizes)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "LT", "autotune_effort": "none"}
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="tilewright", options=options)
    found, code = run_and_get_code(compiled, x, w, b, y)
    assert wanted in "\n".join(code)
    torch.testing.assert_close(found, function(x, w, b, y), atol=5e-2, rtol=5e-2)
    asked, multiplied = fake.asked(), fake.multiplied()
    torch._dynamo.reset()  # and again from what is kept: nothing is asked
    again = torch.compile(function, backend="tilewright", options=options)(x, w, b, y)
    assert torch.equal(again, found)
    assert fake.asked() == asked and fake.multiplied() == multiplied + 1


def test_constants_are_those_of_the_header() -> None:
    text = fake_cublaslt.header()
    if text is None:
        pytest.skip("no cublasLt.h on this machine; python -m tests.gpu.gemm_cublaslt compares too")
    assert fake_cublaslt.disagreements(text) == []
