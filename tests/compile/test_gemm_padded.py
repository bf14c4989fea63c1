"""Products of padded copies: the copying kernel in the interpreter, and compiled for a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compile.as_cuda import as_cuda
from tests.problems import case
from tests.products import problem
from tests.programs import compiled
from tilewright import config, metrics
from tilewright.gemm import padded, triton
from tilewright.gemm.padded import PaddedCall
from tilewright.gemm.problem import GemmProblem
from tilewright.runtime import triton_worker
from tilewright.runtime.interpret import Interpreted
from tilewright.runtime.triton_build import TritonSource
from tilewright.target import Target
from tilewright.testing import fresh_cache
from tilewright.tune import select
from tilewright.tune.choices import ChoiceCaller


def through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies are made by the kernel in the interpreter; how many each launch makes."""
    launches: list[int] = []

    def copy(self: PaddedCall, pairs: Any, into: bool) -> None:
        source = padded.copier(len(pairs), pairs[0][0].element_size(), into, 90, 1 << 17)
        kernel = Interpreted(source.text, source.name, source.types,
                             dict(source.configs[0].constants))  # fmt: skip
        given: list[Any] = []
        for one, other in pairs:
            numbers, blocks = padded._numbers(one, other)
            given += [one.data_ptr(), other.data_ptr(), *numbers, blocks]
            side = f"{'target' if into else 'source'}_step"
            step = dict(zip(padded._NUMBERS, numbers, strict=False))[side]
            assert step * one.element_size() % padded.ALIGNED == 0
        kernel(sum(given[10::11]), *given)
        launches.append(len(pairs))

    monkeypatch.setattr(PaddedCall, "_copy", copy)
    return launches


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_pd_7_odd_rows_by_padded_copies(monkeypatch: pytest.MonkeyPatch, layout: str,
                                        batch: tuple[int, ...]) -> None:  # fmt: skip
    launches = through_the_kernel(monkeypatch)
    m, n, k = 19, 1037 if layout == "nn" else 35, 21
    a = torch.randn(*batch, m, k) if layout[0] == "n" else torch.randn(*batch, k, m).mT
    b = torch.randn(*batch, k, n) if layout[1] == "n" else torch.randn(*batch, n, k).mT
    a, b = a.half(), b.half()
    out = torch.full((*batch, m, n), float("nan"), dtype=torch.float16)
    made = case("bmm" if batch else "mm", a, b, out)
    kernel = padded.PaddedCandidate(made.problem).kernel()
    assert isinstance(kernel.source, PaddedCall)
    memory = {made.problem.operands[0].view.buffer: a, made.problem.operands[1].view.buffer: b,
              made.problem.result.buffer: out}  # fmt: skip
    kernel.source(*(memory[name] for _, name in kernel.arguments))
    expected = a.double() @ b.double()
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.01)
    assert launches == [2, 1]


def test_what_is_aligned_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = through_the_kernel(monkeypatch)
    a, b = torch.randn(16, 21).half(), torch.randn(32, 21).half().t()
    out = torch.empty(16, 32, dtype=torch.float16)
    call = padded.PaddedCandidate(case("mm", a, b, out).problem).kernel().source
    assert isinstance(call, PaddedCall)
    memory = {"a": a, "b": b, "c": out}
    call(*(memory[name] for name in call.names))
    torch.testing.assert_close(out, a @ b, atol=0.02, rtol=0.01)
    assert launches == [2], "the library writes the result where it belongs"


@pytest.mark.parametrize("bias", [(35,), (19, 35), (1, 35)])
@pytest.mark.parametrize("left", ["rows", "columns"])
def test_what_is_added_is_padded_too(monkeypatch: pytest.MonkeyPatch, bias: tuple[int, ...],
                                     left: str) -> None:  # fmt: skip
    through_the_kernel(monkeypatch)
    a = torch.randn(19, 21) if left == "rows" else torch.randn(21, 19).mT
    b, c = torch.randn(21, 35), torch.randn(bias)
    made = problem("addmm", a.half(), b.half(), bias=c.half(), alpha=0.5, beta=2.0)
    kernel = padded.PaddedCandidate(made.problem).kernel()
    kernel.source(*(made.tensors[name] for _, name in kernel.arguments))
    expected = torch.addmm(c.half().float(), a.half().float(), b.half().float(), alpha=0.5, beta=2)
    torch.testing.assert_close(made.tensors["c"].view(19, 35).float(), expected, atol=0.02,
                               rtol=0.01)  # fmt: skip


def test_a_column_that_is_added_is_left_to_the_library() -> None:
    a, b, c = (torch.randn(shape).half() for shape in ((19, 21), (21, 35), (19, 1)))
    assert not padded.is_misaligned(problem("addmm", a, b, bias=c).problem)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_batch_with_something_added(monkeypatch: pytest.MonkeyPatch, beta: float) -> None:
    through_the_kernel(monkeypatch)
    a, b, c = torch.randn(2, 5, 21), torch.randn(2, 21, 35), torch.randn(2, 1, 35)
    made = problem("baddbmm", a.half(), b.half(), bias=c.half(), alpha=2.0, beta=beta)
    kernel = padded.PaddedCandidate(made.problem).kernel()
    kernel.source(*(made.tensors[name] for _, name in kernel.arguments))
    expected = torch.baddbmm(c.half().float(), a.half().float(), b.half().float(), alpha=2,
                             beta=beta)  # fmt: skip
    torch.testing.assert_close(made.tensors["c"].view(2, 5, 35).float(), expected, atol=0.04,
                               rtol=0.01)  # fmt: skip


def test_constants_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = through_the_kernel(monkeypatch)
    for k in range(3):
        a, weight = torch.randn(16, 24).half(), torch.randn(24, 35).half()
        made = problem("mm", a, weight)
        source: Any = padded.PaddedCandidate(made.problem, constant=("x1",)).kernel().source
        launches.clear()
        for _ in range(2):
            given = {**made.tensors, "x0": torch.randn(16, 24).half()}
            source(*(given[name] for name in source.names))
            found = given["c"].view(16, 35)
            torch.testing.assert_close(found, given["x0"] @ weight, atol=0.02, rtol=0.01)
        assert launches == [1, 1, 1], (k, "the weights once, and each result")


# ---- the model


def meta(op: Any, a: tuple[int, int], b: tuple[int, int], layout: str = "nn",
         dtype: torch.dtype = torch.bfloat16, arch: str = "sm_90") -> GemmProblem:  # fmt: skip
    with torch.device("meta"):
        left = (
            torch.empty(a, dtype=dtype)
            if layout[0] == "n"
            else torch.empty(a[::-1], dtype=dtype).mT
        )
        right = (
            torch.empty(b, dtype=dtype)
            if layout[1] == "n"
            else torch.empty(b[::-1], dtype=dtype).mT
        )
        return problem(op, left, right, target=Target(arch)).problem


VOCABULARY = {
    "logits": meta("mm", (8192, 768), (768, 50257), "nt"),
    "gradient of what is multiplied": meta("mm", (8192, 50257), (50257, 768)),
    "gradient of the weights": meta("mm", (50257, 8192), (8192, 768), "tn"),
    "its transpose": meta("mm", (768, 8192), (8192, 50257), "tn"),
}


@pytest.mark.parametrize("name", VOCABULARY)
def test_products_with_a_vocabulary_of_50257_are_padded(name: str) -> None:
    """Without measuring too, forward and backward: their rows are twice as fast and more."""
    found = padded.preferred(VOCABULARY[name])
    assert found is not None and found.name == "padded_mm"
    assert 2 * found.estimate < padded.unaligned(VOCABULARY[name])
    assert padded.offered(VOCABULARY[name]) == [padded.PaddedCandidate(VOCABULARY[name])]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (meta("mm", (8192, 768), (768, 50304), "nt"), "all rows are aligned"),
        (meta("mm", (1, 768), (768, 50257), "nt"), "memory is the limit"),
        (meta("mm", (16, 4095), (4095, 4096)), "memory is the limit"),
        (meta("mm", (100, 101), (101, 102)), "it is too small"),
        (meta("mm", (8192, 768), (768, 50257), "nt", torch.float32), "no matrix units are used"),
    ],
)
def test_products_that_are_left_alone(made: GemmProblem, why: str) -> None:
    assert padded.preferred(made) is None, why


def test_options_of_padding() -> None:
    """MA-A9, MA-K16: `force_shape_pad` asks no model, `shape_padding` switches all off."""
    slow = meta("mm", (16, 4095), (4095, 4096))
    with config.patch({"force_shape_pad": True}):
        assert padded.preferred(slow) is not None
        assert padded.preferred(meta("mm", (8192, 768), (768, 50304))) is None
    with config.patch({"shape_padding": False, "force_shape_pad": True}):
        assert padded.preferred(slow) is None and padded.offered(slow) == []


def test_a_constant_costs_no_copy() -> None:
    made = VOCABULARY["logits"]
    free = padded.PaddedCandidate(made, constant=("x1",)).estimate
    assert padded.PaddedCandidate(made).estimate - free > 2 * 768 * 50257 * 2 / 4e6


# ---- whole programs


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_head_with_an_odd_vocabulary(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """In default mode forward and both gradients are padded, and nothing is fused away; what two
    products of a graph read is copied once: the logits' gradient. The weights are, in each."""
    monkeypatch.setattr(padded, "WORTH", 1)
    monkeypatch.setattr(padded, "GAIN", 0.0)
    copied: list[int] = []
    made = PaddedCall._copy

    def copy(self: PaddedCall, pairs: Any, into: bool) -> None:
        copied.extend([len(pairs)] * into)
        made(self, pairs, into)

    monkeypatch.setattr(PaddedCall, "_copy", copy)

    def head(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w).float(), targets)

    with as_cuda(), fresh_cache():
        call = compiled(head, dynamic=dynamic)
        for rows in (24, 40) if dynamic else (24,):
            x, w = torch.randn(rows, 16).bfloat16(), torch.randn(37, 16).bfloat16()
            targets = torch.randint(0, 37, (rows,))
            mine, theirs = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
            found, expected = call(*mine, targets), head(*theirs, targets)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
            found.backward()
            expected.backward()
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=2e-2)
            assert sum(copied) == 3 and not padded._left
            copied.clear()
    assert metrics.counters["gemm"]["padded_mm by the model"] == 3


@pytest.mark.parametrize("size", [509, pytest.param(50257, marks=pytest.mark.slow)])
def test_ma_a9_a_vocabulary_on_a_small_card(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """No template is offered: what is chosen among are libraries' calls; fewer
    and shorter rows than the specification's."""
    monkeypatch.setattr(triton, "FEWEST_SMS", 1000)
    seen: list[ChoiceCaller] = []
    select.add_preprocessing_fn(lambda choices: seen.extend(choices) or choices)
    x, targets = torch.randn(4, 16).bfloat16(), torch.randint(0, size, (4,))
    w, b = torch.randn(size, 16).bfloat16() / 4, torch.randn(size).bfloat16()

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w, b).float(), targets)

    try:
        with as_cuda(), fresh_cache():
            call = compiled(loss, options={"max_autotune": True, "force_shape_pad": True})
            mine, theirs = ([t.clone().requires_grad_() for t in (x, w, b)] for _ in range(2))
            found, expected = call(*mine), loss(*theirs)
            found.backward()
            expected.backward()
    finally:
        select.clear_preprocessing_fns()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-2)
    assert len(seen) >= 3 and {c.provider for c in seen} == {"ATEN"}


def ptx(source: TritonSource) -> str:
    return triton_worker.build(source.order(source.configs[0]))["ptx"]


def test_padded_rows_are_stored_and_loaded_sixteen_bytes_at_once() -> None:
    assert "st.global.v4.b32" in ptx(padded.copier(2, 2, True, 90, 1 << 17))
    assert "ld.global.v4.b32" in ptx(padded.copier(1, 2, False, 90, 1 << 17))
