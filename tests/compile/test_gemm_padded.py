"""Products of padded copies: the copying kernel in the interpreter, and compiled for a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.problems import case
from tilewright.gemm import padded
from tilewright.gemm.padded import PaddedCall
from tilewright.runtime import triton_worker
from tilewright.runtime.interpret import Interpreted
from tilewright.runtime.triton_build import TritonSource


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


def ptx(source: TritonSource) -> str:
    return triton_worker.build(source.order(source.configs[0]))["ptx"]


def test_padded_rows_are_stored_and_loaded_sixteen_bytes_at_once() -> None:
    assert "st.global.v4.b32" in ptx(padded.copier(2, 2, True, 90, 1 << 17))
    assert "ld.global.v4.b32" in ptx(padded.copier(1, 2, False, 90, 1 << 17))
