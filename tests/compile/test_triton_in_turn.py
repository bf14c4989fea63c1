"""Long rows that are walked twice, by several programs each, row after row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from bench import cubin
from tests.compile.as_cuda import CARD, _lower, as_cuda, as_fake_cuda
from tests.compile.cubin import build
from tilewright import config
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.target import Target
from tilewright.testing import limited, run_and_get_code

SMALL = "sm_86"  # a card of 72 processors with a cache of 6 MiB
ROWS = 73


def batch_norm(x: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, training=True))


def walked(x: Tensor) -> Tensor:
    """What is not held, for it would be computed several times."""
    return batch_norm(torch.erf(x))


def for_card(fn: Callable[..., Any], *args: Tensor, arch: str = "sm_90") -> list[TritonKernel]:
    with mock.patch.object(cubin, "lower", _lower), config.patch({"cuda.arch": arch}):
        return cubin.kernels_of(fn, *args, target=arch)


# ---- programs in turn

WALKED: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "pieces": (batch_norm, torch.randn(3, ROWS, 3710).bfloat16()),
    "odd rows": (lambda x: torch.softmax(x, -1), torch.randn(ROWS, 5503)),
}


@pytest.mark.parametrize("name", WALKED)
def test_programs_of_a_row_walk_it_together(name: str) -> None:
    """If they are called twice, it is with the same counters: the first call leaves them zero."""
    fn, x = WALKED[name]
    with limited("CACHED_ROW", 1 << 12), as_cuda(SMALL):
        compiled = torch.compile(fn, backend="tilewright")
        found, code = run_and_get_code(compiled, x)
        again = compiled(x) if name == "odd rows" else found
    text = "\n".join(code)
    assert f"pid = tri.ticket(counters + {ROWS}, {2 * ROWS})\n    part = pid % 2\n" in text
    assert text.count("tri.meet(") == text.count("tri.gone(") == 1  # none waits for its stores
    rough = 2e-2 if x.dtype == torch.bfloat16 else 1e-5
    assert_close(found.double(), fn(x.double()), rtol=rough, atol=rough)
    assert torch.equal(found, again)


def test_programs_of_a_row_read_what_was_there_before_one_of_them_changes_it() -> None:
    """Running statistics, and gradients that take the place of what the forward had saved."""
    rows, length = 3, 5000
    module = torch.nn.BatchNorm1d(rows)
    with torch.no_grad():
        for number in (module.weight, module.bias, module.running_mean, module.running_var):
            assert number is not None
            number.uniform_(0.5, 2)
    wanted = copy.deepcopy(module).double()
    x = torch.randn(3, rows, length, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    with (limited("LARGE_WORK", 1 << 12), limited("SHARED_ROW_PART", 1 << 12), as_cuda(SMALL),
          config.patch({"triton.cooperative_reductions": True})):  # fmt: skip
        result, code = run_and_get_code(torch.compile(module, backend="tilewright"), x)
        texts = [*code, *run_and_get_code(lambda: result.backward(x.detach()))[1]]
    other = wanted(exact)
    other.backward(exact.detach())
    assert all("tri.meet(" in text for text in texts)
    assert "last = tri.part(counters + spot, " in texts[0]
    for name, buffer in module.named_buffers():
        assert_close(buffer, wanted.get_buffer(name).to(buffer.dtype))
    for name, parameter in module.named_parameters():
        gradient = wanted.get_parameter(name).grad
        assert parameter.grad is not None
        assert gradient is not None
        assert_close(parameter.grad, gradient.float(), rtol=1e-4, atol=1e-2)
    assert x.grad is not None
    assert exact.grad is not None
    assert_close(x.grad, exact.grad.float())


def test_the_last_program_of_a_row_changes_its_running_statistics() -> None:
    def fn(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True)

    x = torch.empty(64, 256, 56, 56, dtype=torch.bfloat16)
    with as_fake_cuda():
        compiled = torch.compile(fn, backend="tilewright")
        _, (text,) = run_and_get_code(compiled, x, torch.zeros(256), torch.ones(256))
    assert "pid = tri.ticket(" in text
    _, end = text.split("    if last:")
    assert end.count("        tl.store(") == 2


def test_parts_of_a_row_are_alike() -> None:
    """Of 200704 elements eight programs have 25088 each, not whole blocks of them."""
    (kernel,) = for_card(walked, torch.empty(64, 256, 56, 56, dtype=torch.bfloat16))
    assert kernel.ticketed
    assert kernel.counters == 256 + 1
    assert kernel.programs({}) == 8 * 256
    assert "rfirst = part * ((rnumel + 8 * 64 - 1) // (8 * 64) * 64)" in kernel.text
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
    assert made.spills == 0


ALONE: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "rows that stay in cache": (lambda x: torch.softmax(x, -1), (512, 65536)),
    "rows that are read once": (lambda x: x.float().sum(-1), (512, 1 << 18)),
    "very few rows": (lambda x: torch.softmax(x, -1), (8, 1 << 22)),
    "rows beyond all programs": (lambda x: torch.softmax(x, -1), (256, 1 << 22)),
    "columns": (lambda x: torch.softmax(x, 0), (1 << 18, 2048)),
}


@pytest.mark.parametrize("name", ALONE)
def test_other_rows_have_a_program_of_their_own(name: str) -> None:
    fn, shape = ALONE[name]
    kernels = for_card(fn, torch.empty(shape, dtype=torch.bfloat16))
    assert kernels
    for kernel in kernels:
        assert not kernel.ticketed and not kernel.counters


def test_fewer_rows_than_processors_are_shared_by_all_of_these() -> None:
    for shape, programs in (((256, 64, 112, 112), 1024), ((256, 32, 112, 112), 512)):
        (kernel,) = for_card(walked, torch.empty(shape, dtype=torch.bfloat16))
        assert kernel.ticketed and kernel.programs({}) == programs


def test_few_long_rows_are_read_twice_if_the_cache_keeps_a_part() -> None:
    """Shorter ones, and more of them, are held by programs that meet."""
    *folds, last = for_card(batch_norm, torch.empty(8, 64, 65536, dtype=torch.bfloat16))
    assert folds and not any(kernel.counters for kernel in (*folds, last))
    assert folds[0].programs({}) >= 256 and "tl.program_id" in last.text
    for shape in ((4, 64, 50176), (64, 256, 3136)):
        (kernel,) = for_card(batch_norm, torch.empty(shape, dtype=torch.bfloat16))
        assert kernel.ticketed and "tri.meet(" in kernel.text


def test_rows_of_two_buffers_have_a_program_of_their_own() -> None:
    x = torch.empty(256, 1 << 18, dtype=torch.bfloat16)
    (one,) = for_card(lambda x, y: torch.softmax(x.sin(), -1), x, x)
    (two,) = for_card(lambda x, y: torch.softmax(x.sin() * y, -1), x, torch.empty_like(x))
    assert one.ticketed and not two.ticketed and not two.counters


def test_more_of_the_cache_takes_fewer_programs() -> None:
    with config.patch({"cuda.arch": "sm_90"}):
        plain = Target.of(CARD)
    large = Target("sm_90", l2=60 << 20)
    x = torch.empty(64, 256, 56, 56, dtype=torch.bfloat16)
    with mock.patch.object(Target, "of", return_value=large):
        (kernel,) = for_card(walked, x)
    assert plain.l2 < large.l2
    assert kernel.programs({}) == 4 * 256


# ---- rows that are folded once, in parts


def _loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), torch.arange(len(x)), reduction="none")


FOLDED: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "losses of odd rows": (_loss, torch.randn(3, 3001).bfloat16()),
    "losses of floats": (_loss, torch.randn(3, 3001)),
    "nothing but -inf": (lambda x: torch.logsumexp(x, -1), torch.full((3, 3000), -torch.inf)),
    "what is stored beside": (lambda x: (x.sin(), torch.logsumexp(x, -1)), torch.randn(3, 3001)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_the_last_program_of_a_row_goes_on_alone(name: str) -> None:
    """None waits for another, so that they take no turns; counters are zero after a call."""
    fn, x = FOLDED[name]
    with (limited("RESIDENT_ROW", 2048), limited("RESIDENT_ONE_PASS", 512),
          limited("SPLIT_PART", 512), as_cuda()):  # fmt: skip
        compiled = torch.compile(fn, backend="tilewright")
        found, code = run_and_get_code(compiled, x)
        again = compiled(x)
    text = "\n".join(code)
    assert "    if tri.part(counters + spot, 5) == 0:\n        return\n" in text
    assert "tri.meet(" not in text and "tri.ticket(" not in text
    assert_close(found, fn(x), rtol=1e-3, atol=1e-3)
    assert_close(found, again, rtol=0, atol=0)
