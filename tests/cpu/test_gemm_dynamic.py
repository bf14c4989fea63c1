"""Products of a size that is known only at run time: kernels for ranges of it, the library where it
wins, one compilation. Candidates pretend their times, so who is best where is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.test_gemm_choose import Toy, ToyCandidate
from tests.cpu.test_gemm_choose import register as register
from tests.products import problem
from tests.programs import compiled, counting
from tilewright import config
from tilewright.gemm import dynamic
from tilewright.gemm.choose import decisions
from tilewright.gemm.problem import GemmProblem
from tilewright.gemm.provider import Effort, Kernel
from tilewright.ir import index as ix
from tilewright.ir.expr import sym
from tilewright.testing import fresh_cache, run_and_get_code
from tilewright.tune import select

Speed = Callable[[int], float]  # seconds by the number of rows
ran: list[tuple[str, int]] = []


@dataclass(frozen=True)
class SizedToy(Toy):
    label: str = ""

    def __call__(self, *args: Any) -> None:
        given = dict(zip(self.names, args, strict=True))
        sizes = {n: v for n, v in given.items() if isinstance(v, int)}
        with ix.supposing(sizes):
            rows = self.problem.hints[1]
            ran.append((self.label, rows))
            tensors = {n: v for n, v in given.items() if n not in sizes}
            made = Toy(self.problem, tuple(tensors), 0.0, 0.0)
            if rows:
                made(*tensors.values())


@dataclass(frozen=True)
class SizedCandidate(ToyCandidate):
    speed: Speed = float

    def kernel(self) -> Kernel:
        p = self.problem
        names = tuple(dict.fromkeys((*p.reads, *p.writes)))
        numbers = tuple(s.arg.name for s in p.symbols)
        source = SizedToy(p, (*names, *numbers), 0.0, 0.0, self.name)
        given = [*(("ptr", n) for n in names), *(("int", n) for n in numbers)]
        return Kernel(self.name, source, tuple(given))


@dataclass
class SizedProvider:
    """Toys by their names, each with its speed; those of `fused` take in all there is."""

    alone: dict[str, Speed]
    fused: dict[str, Speed]
    name: str = "TOY"

    def supports(self, problem: GemmProblem) -> str:
        return ""

    def candidates(self, problem: GemmProblem, effort: Effort) -> Sequence[SizedCandidate]:
        made = self.alone if problem.is_bare else self.fused
        return [SizedCandidate(problem, 0.0, name=name, estimate=3.0, speed=speed)
                for name, speed in made.items()]  # fmt: skip


library: list[Speed] = []  # how fast ATen is; it takes part if the options name it


def pretended(selector: Any, tuning: Any, choices: Sequence[Any]) -> dict[Any, float]:
    """Milliseconds of plans, by the rows that are supposed; a loop beside a kernel takes one."""
    found: dict[Any, float] = {}
    for choice in choices:
        made = getattr(choice.trial.candidate, "inner", choice.trial.candidate)
        speed = made.speed if isinstance(made, SizedCandidate) else library[0]
        rows = choice.trial.fusion.problem.hints[1]
        found[choice] = 1000 * speed(rows) + len(choice.trial.work.parts) - 1
    return found


@pytest.fixture(autouse=True)
def _pretends(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.setattr(dynamic, "LARGEST", 128)
    monkeypatch.setattr(select.AlgorithmSelectorCache, "autotune", pretended)
    monkeypatch.setattr(select.AlgorithmSelectorCache, "lookup",
                        lambda self, tuning, choices, measure: measure(choices))  # fmt: skip


TUNED = {"max_autotune": True, "max_autotune_gemm_backends": "toy", "autotune_in_subproc": False}


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b)) * 2


def few(rows: int) -> float:
    return 0.01 if rows <= 16 else 0.1


def many(rows: int) -> float:
    return 0.05


def rows_of(n: int) -> Tensor:
    """Rows, as many as may change."""
    x = torch.randn(n, 5)
    if n > 1:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def run_at(rows: Sequence[int], function: Callable[..., Any], weights: Sequence[Tensor],
           first: int = 64) -> tuple[str, dict[int, list[str]]]:  # fmt: skip
    """The text of the program, and who ran for so many rows. One compilation, and right values."""
    with fresh_cache(), config.patch(**TUNED):
        call, counter = counting(function)
        _, code = run_and_get_code(call, rows_of(first), *weights)
        found: dict[int, list[str]] = {}
        for n in rows:
            x = rows_of(n)
            ran.clear()
            torch.testing.assert_close(call(x, *weights), function(x, *weights), rtol=1e-4,
                                       atol=1e-4)  # fmt: skip
            found[n] = [name for name, at in ran if at == n]
    assert counter.frame_count == 1
    return "\n".join(code), found


def test_each_size_has_its_fastest(register: Callable[[Any], None]) -> None:
    """A kernel that takes in what follows, and one that does not: the loop runs for its sizes."""
    register(SizedProvider({"many": many}, {"few": few}))
    code, found = run_at([2, 7, 16, 17, 31, 128, 500], layer, (torch.randn(7, 5), torch.randn(7)))
    assert found == {2: ["few"], 7: ["few"], 16: ["few"], 17: ["many"], 31: ["many"],
                     128: ["many"], 500: ["many"]}  # fmt: skip
    (loop,) = [line for line in code.splitlines() if line.strip().startswith("cpp_fused")]
    assert loop.endswith("if 17 <= s77 else None"), loop
    told = [d.why for d in list(decisions)[-2:]]
    assert "of 0 to 16;" in told[0] and "of 17 and more;" in told[1]


def test_ranges_that_lose_little_are_one(register: Callable[[Any], None]) -> None:
    register(SizedProvider({}, {"one": lambda m: 1.0, "two": lambda m: 0.99 if m < 20 else 1.01}))
    code, found = run_at([3, 100], layer, (torch.randn(7, 5), torch.randn(7)))
    assert len({who for names in found.values() for who in names}) == 1
    assert " else None" not in code


def test_what_is_stored_too_is_stored_by_all(register: Callable[[Any], None]) -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, y.relu() * 2

    register(SizedProvider({"many": many}, {"few": lambda m: few(m)}))
    _, found = run_at([2, 90], both, (torch.randn(5, 7),))
    assert found == {2: ["few"], 90: ["many"]}


def test_an_argument_that_is_written_is_written_once(register: Callable[[Any], None]) -> None:
    def grow(x: Tensor, w: Tensor, state: Tensor) -> Tensor:
        state.add_((x @ w).sum(0))
        y = x @ w
        x.mul_(y[:, :5].relu() + 1)
        return y

    def checked(x: Tensor, w: Tensor, state: Tensor) -> Tensor:
        return grow(x, w, state)

    register(SizedProvider({"many": many}, {"few": few}))
    w = torch.randn(5, 5)
    with fresh_cache(), config.patch(**TUNED):
        call = compiled(checked)
        for n in (64, 3, 16, 17, 100):
            x, state = rows_of(n), torch.randn(5)
            mine, theirs = x.clone(), state.clone()
            expected = grow(mine, w, theirs)
            torch.testing.assert_close(call(x, w, state), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(x, mine, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(state, theirs, rtol=1e-4, atol=1e-4)


def test_the_library_between(
    register: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays from where it wins up to the next size at which another was seen to be faster."""
    register(SizedProvider({"many": many}, {"few": few}))
    monkeypatch.setitem(TUNED, "max_autotune_gemm_backends", "ATEN,TOY")
    weights = torch.randn(7, 5), torch.randn(7)
    library[:] = [lambda m: 0.001 if 8 <= m <= 32 else 1.0]
    code, found = run_at([4, 7, 8, 32, 48, 49, 64], layer, weights)
    assert found == {4: ["few"], 7: [], 8: [], 32: [], 48: [], 49: ["many"], 64: ["many"]}
    (call,) = re.findall(r"extern_aten_addmm_out\(.*out=buf0\) if (.*) else None", code)
    assert call == "5 <= s77 <= 48"
    library[:] = [lambda m: 1.0]
    torch._dynamo.reset()
    _, found = run_at([8, 32], layer, weights)
    assert found == {8: ["few"], 32: ["many"]}


def test_no_rows_and_one(register: Callable[[Any], None]) -> None:
    """A size without a lower bound, in one program with all others."""
    register(SizedProvider({"many": many}, {"few": few}))
    w, b = torch.randn(7, 5), torch.randn(7)

    def free(x: Tensor) -> Tensor:
        return layer(x, w, b)

    with fresh_cache(), config.patch(**TUNED):
        call, counter = counting(free)
        for n in (64, 1, 0, 2, 300):
            x = torch.randn(n, 5)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            torch.testing.assert_close(call(x), free(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_two_sizes_in_one_product(register: Callable[[Any], None]) -> None:
    """Rows of several dimensions are one size."""

    def batched(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).relu()

    register(SizedProvider({"many": many}, {"few": few}))
    w = torch.randn(7, 5)
    with fresh_cache(), config.patch(**TUNED):
        call, counter = counting(batched)
        for shape in ((4, 16), (2, 3), (2, 8), (3, 6), (9, 50)):
            x = torch.randn(*shape, 5)
            torch._dynamo.mark_dynamic(x, (0, 1))
            ran.clear()
            torch.testing.assert_close(call(x, w), batched(x, w), rtol=1e-4, atol=1e-4)
            rows = shape[0] * shape[1]
            assert ran[-1] == ("few" if rows <= 16 else "many", rows)
    assert counter.frame_count == 1


def test_gradients_have_ranges_of_their_own(register: Callable[[Any], None]) -> None:
    """Rows are what a weight's gradient sums over."""
    register(SizedProvider({"alone": few, "wide": many}, {"few": few}))
    w = torch.randn(7, 5, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return (x @ w.t()).relu()

    with fresh_cache(), config.patch(**TUNED):
        call, counter = counting(f)
        for n in (64, 3, 40):
            x = rows_of(n)
            (mine,) = torch.autograd.grad(call(x).square().sum(), w)
            (theirs,) = torch.autograd.grad(f(x).square().sum(), w)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


# ---- who computes which size


def test_six_kernels_at_most() -> None:
    """Then joining may lose more, and the library is never lost for it."""
    times = [{f"k{k}": 1.0 if k == at else 1.5 for k in range(20)} | {"library": 1.4}
             for at in range(20)]  # fmt: skip
    found = dynamic.assigned(times, "library")
    assert len(set(found)) <= dynamic.MOST_KERNELS
    assert all(t[who] <= 1.01 * t["library"] for t, who in zip(times, found, strict=True))


def test_sizes_with_no_kernel_in_common_have_one_each() -> None:
    """However much may be lost: the search for fewer once went on for ever."""
    times = [{f"k{at}": 1.0} for at in range(14)]
    assert dynamic.assigned(times, "library") == [f"k{at}" for at in range(14)]


def test_nobody_is_slower_than_the_library() -> None:
    times = [{"ours": 1.0, "library": 1.2}, {"ours": 1.0, "library": 0.985},
             {"ours": 1.0, "library": 1.2}]  # fmt: skip
    assert dynamic.assigned(times, "library") == ["ours", "library", "ours"]
    times[1]["library"] = 0.995
    assert dynamic.assigned(times, "library") == ["ours"] * 3


def test_few_changes_go_before_the_last_percent() -> None:
    times = [{"a": 1.0, "b": 1.01}, {"a": 1.015, "b": 1.0}, {"a": 2.0, "b": 1.0}]
    assert dynamic.assigned(times, "library") == ["b", "b", "b"]
    times[0]["b"] = 1.03
    assert dynamic.assigned(times, "library") == ["a", "b", "b"]


def test_ranges_cover_every_size_once() -> None:
    found = dynamic.ranges([2, 8, 16, 64], ["a", "library", "a", "b"], "library")
    assert found == {"a": ((0, 2), (16, 16)), "library": ((3, 15),), "b": ((17, None),)}


@pytest.mark.parametrize(("size", "values"), [
    (sym("s0", lower=2, hint=5), (2, 7, 100)),
    (ix.mul(sym("s0", lower=2, hint=5), 8), (16, 56, 800)),
    (ix.mul(sym("s0", lower=2, hint=5), sym("s1", lower=2, hint=300)), (4, 64, 100)),
    (ix.add(sym("s0", lower=1, hint=9), 3), (4, 9, 100)),
])  # fmt: skip
def test_symbols_for_a_size(size: Any, values: tuple[int, ...]) -> None:
    by = dynamic.Driver(size, 1, None)
    assert tuple(ix.evaluate(size, by.at(v)) for v in values) == values


def test_one_size_decides() -> None:
    rows = problem("mm", torch.empty(32, 48), torch.empty(48, 16), dynamic=(32,)).problem
    assert dynamic.driver(rows) == dynamic.Driver(rows.sizes[1], 1, None)
    both = problem("mm", torch.empty(32, 48), torch.empty(48, 16), dynamic=(32, 16)).problem
    assert dynamic.driver(both) is None
    known = problem("mm", torch.empty(32, 48), torch.empty(48, 16)).problem
    assert dynamic.driver(known) is None
