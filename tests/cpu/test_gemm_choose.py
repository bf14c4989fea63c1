"""Who computes a product: plans compete as a whole, the library is never lost, wrong ones never
win. The candidates here are Python functions, so what is chosen is known."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from tests.cpu.test_gemm_fuse import PROGRAMS, evaluated, filled, site
from tests.problems import case
from tests.programs import compiled
from tilewright import config, metrics
from tilewright.errors import NoValidChoicesError
from tilewright.gemm import aten, padded, plan, provider, providers
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Effort, Kernel
from tilewright.host.spare import Spare
from tilewright.ir import index as ix
from tilewright.ir.program import Buffer, Store
from tilewright.runtime import cxx, store
from tilewright.runtime.cxx import CxxSource
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import clock

calls: list[str] = []
waited: list[float] = []  # seconds that toys pretend to take


@pytest.fixture(autouse=True)
def _toys_pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on when a toy waits: by seconds, so that no other work on the machine counts
    as much."""
    waited.clear()

    def now() -> int:
        return time.perf_counter_ns() + int(sum(waited) * 1e9)

    pretended = SimpleNamespace(perf_counter=time.perf_counter, perf_counter_ns=now,
                                process_time_ns=now)  # fmt: skip
    monkeypatch.setattr(clock, "time", pretended)


def _extent(t: Tensor) -> int:
    """Elements up to its last, which lie in its memory; behind them is other memory."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


@dataclass(frozen=True)
class Toy:
    """A product by its definition, after waiting a while."""

    problem: GemmProblem
    names: tuple[str, ...]
    seconds: float
    wrong: float

    @property
    def text(self) -> str:
        return "toy"

    def __call__(self, *args: Any) -> None:
        calls.append(str(self.problem))
        if self.seconds < 0:
            raise RuntimeError("cannot wait")
        waited.append(self.seconds)
        given = dict(zip(self.names, args, strict=True))
        flat = {n: t.as_strided((_extent(t),), (1,), 0) for n, t in given.items()}
        problem = self.problem
        if problem.keeps:
            own = Store(problem.result.buffer, problem.product.src[0], problem.product)
            problem = replace(problem, epilogue=(own, *problem.epilogue))
        for name, found in evaluated(problem, flat).items():
            flat[name][: found.numel()].copy_(found + self.wrong)


@dataclass(frozen=True)
class ToyCandidate:
    problem: GemmProblem
    seconds: float
    wrong: float = 0.0
    provider: str = "TOY"
    description: str = "SPEED=1"
    name: str = "toy_0"
    estimate: float = 100.0

    @property
    def key(self) -> str:
        return store.key(self.problem.key, self.name)

    def kernel(self) -> Kernel:
        names = tuple(dict.fromkeys((*self.problem.reads, *self.problem.writes)))
        source = Toy(self.problem, names, self.seconds, self.wrong)
        return Kernel("toy_fused", source, tuple(("ptr", n) for n in names))


@dataclass
class ToyProvider:
    """Fast only where it fuses, or only where it does not."""

    fused: ToyCandidate | None
    alone: ToyCandidate | None
    name: str = "TOY"
    only: str = ""  # the one op it has

    def supports(self, problem: GemmProblem) -> str:
        if self.only and problem.op != self.only:
            return "not for this op"
        found = self.alone if problem.is_bare else self.fused
        return "" if found is not None else "not for this toy"

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[ToyCandidate]:
        found = self.alone if problem.is_bare else self.fused
        return [] if found is None else [replace(found, problem=problem)]


@dataclass
class Held:
    """The library for single products, so slow that a toy beats it."""

    library: provider.Provider
    name: str = "ATEN"

    def supports(self, problem: GemmProblem) -> str:
        return self.library.supports(problem)

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[Any]:
        return [replace(toy(9.0), problem=problem, provider="ATEN", name=problem.op)]


NOTHING: Any = None


def toy(seconds: float = 0.0, wrong: float = 0.0) -> ToyCandidate:
    return ToyCandidate(NOTHING, seconds, wrong)


@pytest.fixture
def register() -> Generator[Callable[[ToyProvider], None]]:
    before = dict(provider.PROVIDERS)
    calls.clear()

    def add(made: ToyProvider) -> None:
        provider.PROVIDERS[made.name] = made

    yield add
    provider.PROVIDERS.clear()
    provider.PROVIDERS.update(before)


# Toys are not of the package, so they would be timed in a process of their own.
TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "toy", "autotune_in_subproc": False}


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b)) * 2


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(6, 5), torch.randn(7, 5), torch.randn(7)


def run(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, str]:
    with fresh_cache():
        result, code = run_and_get_code(compiled(function, **options), *args)
    return result, "\n".join(code)


def check(function: Callable[..., Any], args: tuple[Tensor, ...], **options: Any) -> str:
    result, code = run(function, *args, **options)
    torch.testing.assert_close(result, function(*args), rtol=1e-4, atol=1e-4)
    return code


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_fused_candidate_replaces_call_and_loops(
    register: Callable[[ToyProvider], None], dynamic: bool
) -> None:
    register(ToyProvider(toy(), None))
    code = check(layer, inputs(), options=TUNED, dynamic=dynamic)
    assert "toy_fused_0(" in code and "extern_" not in code
    assert "cpp_fused" not in code


def test_without_autotuning_nobody_is_asked(register: Callable[[ToyProvider], None]) -> None:
    """MA-A5: ATen is there when nothing is to be tuned, whatever the list says."""
    register(ToyProvider(toy(), toy()))
    code = check(layer, inputs(), options={"max_autotune_gemm_backends": "toy"})
    assert "toy" not in code and not calls


def test_an_unfused_candidate_leaves_the_loops(register: Callable[[ToyProvider], None]) -> None:
    register(ToyProvider(None, toy()))
    code = check(layer, inputs(), options=TUNED)
    assert "toy_fused" in code and "cpp_fused" in code


def test_fused_and_unfused_compete_on_the_whole(register: Callable[[ToyProvider], None]) -> None:
    """MA-J5, MA-J6, MA-J7, MA-J18, BM-7: whoever takes less with all that has to be done."""
    register(ToyProvider(toy(seconds=9.0), toy()))
    code = check(layer, inputs(), options=TUNED)
    assert "cpp_fused" in code, "the fused one is slower than both kernels together"
    register(ToyProvider(toy(), toy(seconds=9.0)))
    code = check(layer, inputs(), options=TUNED)
    assert "cpp_fused" not in code


def test_the_library_wins_against_what_is_slower(register: Callable[[ToyProvider], None]) -> None:
    register(ToyProvider(toy(seconds=9.0), toy(seconds=9.0)))
    code = check(layer, inputs(), options={**TUNED, "max_autotune_gemm_backends": "ATEN,TOY"})
    assert "addmm" in code and "toy" not in code


def test_a_wrong_candidate_never_wins(register: Callable[[ToyProvider], None]) -> None:
    register(ToyProvider(toy(wrong=0.5), toy()))
    code = check(layer, inputs(), options=TUNED)
    assert "cpp_fused" in code, "the fused one is wrong, so the other must be taken"
    register(ToyProvider(toy(wrong=0.5), toy(wrong=0.5)))
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="NoValidChoicesError"):
        run(layer, *inputs(), options=TUNED)


class Beyond(Toy):
    """The right result, and some bytes behind it."""

    def __call__(self, *args: Any) -> None:
        super().__call__(*args)
        ctypes.memset(args[-1].data_ptr() + args[-1].nbytes, 0, 16)


class BeyondCandidate(ToyCandidate):
    def kernel(self) -> Kernel:
        made = super().kernel()
        toy = made.source
        return replace(made, source=Beyond(toy.problem, toy.names, toy.seconds, toy.wrong))


def test_what_writes_beyond_its_memory_never_wins(
    register: Callable[[ToyProvider], None],
) -> None:
    register(ToyProvider(BeyondCandidate(NOTHING, 0.0, name="beyond"), None))
    with pytest.raises(BackendCompilerFailed, match="it writes beyond the end of buf"):
        run(layer, *inputs(), options=TUNED)


def test_all_providers_take_part() -> None:
    assert {p.name for p in providers.enabled()} == {"ATEN", "CUBLASLT", "TRITON", "CPP"}


def test_a_fused_candidate_that_fails_leaves_the_others(
    register: Callable[[ToyProvider], None],
) -> None:
    """MA-J12, MA-Q6: a failure costs the candidate alone."""
    register(ToyProvider(toy(seconds=-1.0), toy()))  # no time can be waited for
    code = check(layer, inputs(), options=TUNED)
    assert "cpp_fused" in code
    assert "toy_fused" in code


def test_no_valid_choices(register: Callable[[ToyProvider], None]) -> None:
    """MA-Q1: no backend at all."""
    options = {"max_autotune": True, "max_autotune_gemm_backends": ""}
    with pytest.raises(BackendCompilerFailed) as caught:
        run(lambda x, y: x @ y, torch.zeros(2, 2), torch.zeros(2, 2), options=options)
    assert "NoValidChoicesError" in str(caught.value)
    assert isinstance(caught.value.inner_exception, NoValidChoicesError)
    assert "ATEN" in str(caught.value) and "max_autotune_gemm_backends" in str(caught.value)


def test_a_misspelt_backend_is_named(register: Callable[[ToyProvider], None]) -> None:
    """MA-Q1: with the backends there are; beside one that exists an unknown name is no error."""
    options = {"max_autotune": True, "max_autotune_gemm_backends": "TRITTON"}
    with pytest.raises(BackendCompilerFailed) as caught:
        run(lambda x, y: x @ y, torch.zeros(2, 2), torch.zeros(2, 2), options=options)
    text = str(caught.value)
    assert "TRITTON: there is no such backend" in text
    named = text.split("the backends are ")[1].split("\n")[0].split(", ")
    assert {"ATEN", "CPP", "CUBLASLT", "TRITON"} <= set(named) and named == sorted(named)
    torch._dynamo.reset()
    options = {"max_autotune": True, "max_autotune_gemm_backends": "cutlass, ATEN"}
    check(lambda x, y: x @ y, (torch.randn(3, 4), torch.randn(4, 5)), options=options)


@pytest.mark.parametrize("candidate", [aten.AtenCandidate, padded.PaddedCandidate])
def test_memory_that_does_not_start_at_its_storage(candidate: Any) -> None:
    x, y = torch.randn(3, 13, 21), torch.randn(2, 21, 11)
    problem = site(torch.mm, x[2], y[1]).bare.problem
    kernel = candidate(problem).kernel()
    out = torch.full((2, 13, 11), 7.0)
    memory = {"a": x[2], "b": y[1], "c": out[1]}
    assert not isinstance(kernel.source, CxxSource | TritonSource)
    kernel.source(*(memory[name] for _, name in kernel.arguments))
    torch.testing.assert_close(out[1], x[2] @ y[1])
    assert bool((out[0] == 7).all())


KINDS: dict[str, Callable[[GemmProblem], Any]] = {
    "ATen": aten.AtenCandidate,
    "padded": padded.PaddedCandidate,
    "C++": lambda p: provider.PROVIDERS["CPP"].candidates(p, "quick")[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_ma_p13_a_result_may_lie_in_a_concatenation(kind: str) -> None:
    """Whoever computes it: rows are stored apart, and nothing beside them is touched."""
    whole = torch.full((9, 30), 7.0)
    made = case("mm", torch.randn(4, 5), torch.randn(5, 8), whole[3:7, 10:18])
    problem = replace(made.problem, target=Target.of("cpu"))
    kernel = KINDS[kind](problem).kernel()
    given = [made.tensors[name] for _, name in kernel.arguments]
    if isinstance(kernel.source, CxxSource):
        cxx.build([kernel.source])[0](*(t.data_ptr() for t in given))
    else:
        kernel.source(*given)
    a, b = (made.tensors[name] for name in ("a", "b"))
    torch.testing.assert_close(whole[3:7, 10:18], a.view(4, 5) @ b.view(5, 8))
    whole[3:7, 10:18] = 7.0
    assert bool((whole == 7.0).all())


def test_ma_p13_what_has_no_form_with_a_result_is_copied() -> None:
    """An op that only returns is put into a concatenation by a kernel."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([torch.linalg.inv(x), y.cos()])

    _, code = run(function, torch.randn(4, 4), torch.randn(4, 4))
    assert "cpp_fused" in code and "out=" not in code


def test_results_are_compared_with_what_is_not_finite() -> None:
    """Not-a-number equals itself; an infinity hides no error elsewhere."""
    inf, nan = float("inf"), float("nan")
    expected = torch.tensor([1.0, 2.0, inf, -inf, nan, 3.0])
    assert plan.difference(expected.clone(), expected, 1e-4) == ""
    for at, wrong in ((0, 1.5), (2, -inf), (2, 1e30), (4, 0.0), (5, nan)):
        found = expected.clone()
        found[at] = wrong
        assert plan.difference(found, expected, 1e-4), (at, wrong)
    many = torch.randn(1 << 21).log()  # half of them are of negative numbers
    found = many.clone()
    found[int((~many.isnan()).nonzero()[0])] = nan
    assert plan.difference(found, many, 1e-4) == "", "zero but for rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64,
                                   torch.float8_e4m3fn, torch.float8_e5m2])  # fmt: skip
def test_results_may_differ_by_roundings_and_by_no_more(dtype: torch.dtype) -> None:
    """One element that is off by a little more than allowed is found, and one by a little less is
    not: the scale is that of all of them."""
    allowed = plan.tolerance(dtype)
    most = {torch.float32: 2e-4, torch.float64: 1e-9}.get(dtype, 64 * torch.finfo(dtype).eps)
    assert torch.finfo(dtype).eps <= allowed <= most
    expected = torch.ones(1000, dtype=torch.float64)
    for times, is_wrong in ((1.9, False), (2.1, True)):  # of the scale and the element, both 1
        found = expected.clone()
        found[17] += times * allowed
        assert bool(plan.difference(found, expected, allowed)) == is_wrong


def test_one_element_that_is_no_number_is_found_among_millions() -> None:
    """Few may be so where the library's are, and none where they are not."""
    expected = torch.ones(1 << 22)
    assert plan.FEW * expected.numel() > 4
    for wrong in (float("nan"), float("inf")):
        found = expected.clone()
        found[1234] = wrong
        assert plan.difference(found, expected, 1e-3).startswith("1 elements are infinite or not")


def test_one_large_element_hides_no_error_of_others() -> None:
    expected = torch.randn(1000)
    expected[0] = 1000.0  # the scale of all is about 30
    found = expected.clone()
    found[5] += 0.1
    assert plan.difference(found, expected, 2e-4).startswith("1 of 1000 elements are off")


def test_every_result_is_compared_and_has_to_be_written() -> None:
    made = Buffer("a", torch.float32, torch.device("cpu"), (ix.as_index(8),), (ix.ONE,))
    buffers = made, replace(made, name="b")
    memory = plan.Memory(plan.Described(buffers, (), ("a", "b"), filled=("a", "b")))
    bench = plan.Bench(memory, 1e-3)
    first = memory.sets[0]

    def run(*names: str) -> Any:
        def fill(stream: int, which: int) -> None:
            for name in names:
                first[name].fill_(1.0)

        return fill

    bench._expected = memory.results(run("a", "b"))
    assert bench.compare(run("a", "b")) == ""
    run("a", "b")(0, 0)  # what an earlier run has left there does not count
    assert bench.compare(run("a")).startswith("b: ")
    assert bench.compare(run("b")).startswith("a: ")


def test_what_is_written_behind_any_buffer_is_found_and_mended() -> None:
    """Also behind what is only read; a run after it is not taken for it."""
    x = Buffer("x", torch.float32, torch.device("cpu"), (ix.as_index(8),), (ix.ONE,))
    out = replace(x, name="out", dtype=torch.int32)
    memory = plan.Memory(plan.Described((x, out), (), ("out",), filled=("out",)))
    bench = plan.Bench(memory, 1e-3)
    first = memory.sets[0]

    def run(*behind: str, writes: bool = True) -> Any:
        def body(stream: int, which: int) -> None:
            first["out"].fill_(0) if writes else None
            for name in behind:
                ctypes.memset(first[name].data_ptr() + first[name].nbytes, 0, 1)

        return body

    bench._expected = memory.results(run())
    for behind in (("x",), ("out",), ("x", "out")):
        assert bench.compare(run(*behind)) == f"it writes beyond the end of {', '.join(behind)}"
        assert bench.compare(run()) == ""
    assert bench.compare(run(writes=False)) == "out: 8 elements differ"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_who_writes_to_what_it_reads_is_found_and_costs_nobody_else(dtype: torch.dtype) -> None:
    """By whatever it puts there: what was there before, in another order; and not a number, which
    any result of it would be equal to."""
    x = Buffer("x", dtype, torch.device("cpu"), (ix.as_index(1001),), (ix.ONE,))
    y = replace(x, name="y", dtype=torch.int64)
    out = replace(x, name="out", dtype=torch.float32)
    described = plan.Described((x, y, out), (), ("out",), filled=("out",),
                               contents=(("y", (3, 1, 2)),))  # fmt: skip
    bench = plan.Bench(plan.Memory(described), 1e-3)
    first = bench.memory.sets[0]
    before = first["x"].clone()

    def run(harm: Callable[[], object]) -> Any:
        def body(stream: int, which: int) -> None:
            first["out"].copy_(first["x"] + first["y"])
            harm()

        return body

    def turned() -> None:
        first["y"].copy_(first["y"].flip(0))

    good = run(lambda: None)
    bench._expected = bench.memory.results(good)
    assert bench.compare(run(turned)) == "it writes to its inputs y"
    for bad in (lambda: first["x"][-1:].copy_(first["x"][-1:] == 0), lambda: first["x"].fill_(1)):
        assert bench.compare(run(bad)) == "it writes to its inputs x"
        assert bench.compare(good) == ""
    run(lambda: first["x"].fill_(float("nan") if dtype.is_floating_point else 1))(0, 0)  # timed
    assert bench.compare(good) == ""
    assert torch.equal(first["x"], before) and first["y"][:4].tolist() == [3, 1, 2, 3]


def test_integers_are_compared_exactly() -> None:
    expected = torch.arange(100, dtype=torch.int32)
    assert plan.difference(expected.clone(), expected, 0.5) == ""
    found = expected.clone()
    found[3] += 1
    assert plan.difference(found, expected, 0.5) == "1 elements differ"


def test_an_epilogue_may_make_nan(register: Callable[[ToyProvider], None]) -> None:
    register(ToyProvider(toy(), None))
    args = (torch.randn(6, 5), torch.randn(5, 7))
    result, code = run(lambda x, w: (x @ w).log(), *args, options=TUNED)
    assert result.isnan().any() and "toy_fused" in code
    torch.testing.assert_close(result, (args[0] @ args[1]).log(), equal_nan=True)


def test_the_same_product_is_tuned_once(register: Callable[[ToyProvider], None]) -> None:
    register(ToyProvider(toy(), toy()))

    def deep(x: Tensor, *weights: Tensor) -> Tensor:
        for w in weights:
            x = F.relu(x @ w)
        return x

    args = (torch.randn(4, 4), *(torch.randn(4, 4) for _ in range(3)))
    before = metrics.counters["inductor"]["select_algorithm_autotune"]
    options = {**TUNED, "prologue_fusion": False}
    code = check(deep, args, options=options)
    assert code.count("toy_fused") == 6
    assert metrics.counters["inductor"]["select_algorithm_autotune"] - before == 1


def test_a_spent_budget_is_gone_on_with(register: Callable[[ToyProvider], None]) -> None:
    """What was decided in haste is not kept: the next process goes on from what was measured."""
    quick = replace(toy(), estimate=1.0)
    register(ToyProvider(quick, quick))
    options = {**TUNED, "max_autotune_gemm_backends": "ATEN,TOY", "autotune_budget_seconds": 0.0}
    with fresh_cache():
        args = inputs()
        torch.testing.assert_close(compiled(layer, options=options)(*args), layer(*args))
        misses = metrics.cache_misses
        torch._dynamo.reset()
        compiled(layer, options=options)(*args)
        assert metrics.cache_misses == misses + 1


@pytest.mark.parametrize("batch", [(), (3,)])
def test_padded_operands_give_the_same_product(batch: tuple[int, ...]) -> None:
    """PD-7: rows of odd lengths, and a transposed operand."""
    x, y = torch.randn(*batch, 13, 21), torch.randn(*batch, 11, 21)
    problem = site(lambda x, y: x @ y.transpose(-1, -2), x, y).bare.problem
    kernel = padded.PaddedCandidate(problem).kernel()
    out = torch.empty(*batch, 13, 11)
    memory = {"a": x, "b": y, "c": out}
    assert not isinstance(kernel.source, CxxSource | TritonSource)
    kernel.source(*(memory[name] for _, name in kernel.arguments))
    torch.testing.assert_close(out, x @ y.transpose(-1, -2))


def test_padding_is_offered_where_rows_start_anywhere() -> None:
    """PD-7, MA-K16: for a card, for large products, and not against the option."""
    problem = site(
        lambda x, y: x @ y, torch.empty(2049, 2047), torch.empty(2047, 2051)
    ).bare.problem
    card = replace(problem, target=Target("sm_90"))
    names = [c.name for c in aten.Aten().candidates(card, "default")]
    assert names == ["mm", "padded_mm"]
    assert len(aten.Aten().candidates(problem, "default")) == 1
    with config.patch(shape_padding=False):
        assert len(aten.Aten().candidates(card, "default")) == 1


def test_what_is_needed_elsewhere_is_stored_too(register: Callable[[ToyProvider], None]) -> None:
    register(ToyProvider(toy(), None))

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, F.relu(y)

    code = check(both, (torch.randn(6, 5), torch.randn(5, 7)), options=TUNED)
    assert "cpp_fused" not in code


def test_two_products_into_one_sum(register: Callable[[ToyProvider], None]) -> None:
    """MA-C1."""
    register(ToyProvider(toy(), None, only="mm_plus_mm"))

    def function(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.relu(x @ v + y @ w)

    args = (torch.randn(6, 5), torch.randn(5, 8), torch.randn(6, 5), torch.randn(5, 8))
    provider.PROVIDERS["ATEN"] = Held(provider.PROVIDERS["ATEN"])
    code = check(function, args, options={**TUNED, "max_autotune_gemm_backends": "ATEN,TOY"})
    assert "toy_fused_" in code and "extern_" not in code and "cpp_fused" not in code


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_last_resort_computes_the_same(name: str) -> None:
    """A chosen kernel that cannot be built elsewhere is replaced by the library and loops."""
    function, args = PROGRAMS[name]
    for fusion in site(function, *args).fusions:
        resort = Spare.product(fusion.problem)
        memory = {b.name: filled(b) for b in fusion.problem.buffers}
        shaped = {b.name: _shaped(memory[b.name], b) for b in fusion.problem.buffers}
        resort(*(shaped[n] for n in resort.names))
        for written, expected in evaluated(fusion.problem, memory).items():
            found = memory[written].double()
            torch.testing.assert_close(found, expected, rtol=4e-2, atol=4e-2)


def _shaped(flat: Tensor, buffer: Buffer) -> Tensor:
    size, stride = ([ix.likely(n) for n in part] for part in (buffer.size, buffer.stride))
    return flat.as_strided(size, stride)


@pytest.mark.parametrize(("shape", "backends"), [
    ((0, 5, 7), "ATEN,TOY"), ((0, 5, 7), "TOY"), ((6, 5, 0), "ATEN,TOY"), ((6, 5, 0), "TOY"),
    ((6, 0, 7), "ATEN,TOY")])  # fmt: skip
def test_empty_products(
    register: Callable[[ToyProvider], None], shape: tuple[int, int, int], backends: str
) -> None:
    """MA-I2, MA-I3, MA-I4: nothing to compute, nothing to choose, and nothing is timed, whoever is
    asked for."""
    register(ToyProvider(toy(), toy()))
    m, k, n = shape
    args = (torch.randn(m, k), torch.randn(n, k), torch.randn(n))
    check(layer, args, options={**TUNED, "max_autotune_gemm_backends": backends})
    timed = metrics.counters["inductor"]["benchmarking.Benchmarker.benchmark_cpu"]
    assert not calls and timed == (k == 0)  # of zeros too: the library alone


class Dividing(ToyCandidate):
    def kernel(self) -> Kernel:
        raise ZeroDivisionError(f"{1} // {0}")


def test_ma_i4_a_rendering_that_divides_by_zero_is_no_choice(
    register: Callable[[ToyProvider], None],
) -> None:
    register(ToyProvider(Dividing(NOTHING, 0.0), toy()))
    assert "cpp_fused" in check(layer, inputs(), options=TUNED)
    register(ToyProvider(Dividing(NOTHING, 0.0), None))
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"ZeroDivisionError\('1 // 0'\)"):
        run(layer, *inputs(), options=TUNED)


def test_tuning_leaves_the_users_random_numbers_alone(
    register: Callable[[ToyProvider], None],
) -> None:
    """MA-B11."""
    register(ToyProvider(toy(), toy()))

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(x @ w, 0.1)

    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    torch.manual_seed(5)
    function(x, w).sum().backward()
    expected, x.grad = x.grad, None
    options = {"max_autotune_gemm": True, "fallback_random": True,
               "max_autotune_gemm_backends": "ATEN,TOY"}  # fmt: skip
    with fresh_cache():
        call = compiled(function, options=options)
        torch.manual_seed(5)
        call(x, w).sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


def test_results_are_in_one_place_and_operands_in_many() -> None:
    """As in a program, where an allocator gives what was last freed."""
    sizes = (ix.const(64), ix.const(32)), (ix.const(32), ix.ONE)
    x, out = (Buffer(name, torch.float32, torch.device("cpu"), *sizes) for name in ("x", "out"))
    memory = plan.Memory(plan.Described((x, out), (), ("out",), filled=("out",)))
    places = {name: {s[name].data_ptr() for s in memory.sets} for name in ("x", "out")}
    assert memory.count > 1
    assert len(places["x"]) == memory.count and len(places["out"]) == 1
