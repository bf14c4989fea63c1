"""Folds that the last program of a kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build
from tests.compile.test_triton_in_turn import for_card
from tilewright.schedule import last
from tilewright.testing import run_and_get_code

LAST = "last(tl.program_id(0) * 0, "


def normal(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(7))


def clipped(x: Tensor) -> Tensor:
    return x * (1.0 / (torch.linalg.vector_norm(x) + 1e-6)).clamp(max=1.0)


def smoothed(x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(x, t, label_smoothing=0.1)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "loss": (smoothed, (normal(13, 901), torch.arange(13) * 69)),
    "sum and its mean": (lambda x: (x.sum(-1), x.sum(-1).exp().mean()), (normal(37, 611) / 9,)),
    "what all then read": (clipped, (normal(301, 777),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_program_folds_what_all_made(name: str) -> None:
    fn, args = CASES[name]
    with as_cuda():
        compiled = torch.compile(fn, backend="tilewright")
        found, code = run_and_get_code(compiled, *args)
        again = compiled(*args)  # the counter is zero again
    assert_close(found, fn(*args), rtol=1e-4, atol=1e-4)
    assert_close(again, found, rtol=0, atol=0)
    assert sum(text.count(LAST) for text in code) == 1


def test_it_waits_for_the_stores_of_the_others() -> None:
    (kernel,) = for_card(lambda x: x.float().square().sum(), normal(2048, 4096).bfloat16())
    made = build(kernel)
    assert kernel.counters == 1 and kernel.in_turn  # nobody waits: any number may run at once
    store, told = (made.ptx.rindex("st.global", 0, end) for end in (made.ptx.index("atom"), None))
    assert "bar.sync" in made.ptx[store : made.ptx.index("atom")]
    assert "acq_rel" in made.ptx[store:told]


def test_the_last_program_of_the_last_row_goes_on() -> None:
    (kernel,) = for_card(lambda x: torch.logsumexp(x, -1).mean(), normal(151, 100277))
    assert kernel.counters == 152 and "tri.part(counters + 151, tl.num_programs(0))" in kernel.text
    assert build(kernel).ptx.count("acq_rel") == 2


def test_many_short_programs_do_not_ask_who_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last, "LONGEST", 0)
    kernels = for_card(lambda x: x.sum(-1).exp().mean(), normal(1000, 700))
    assert len(kernels) == 2 and not any("def last" in k.text for k in kernels)
