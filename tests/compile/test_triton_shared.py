"""Rows that several programs of a card walk together: each leaves what its part folds to, and waits
for the others. In the interpreter they take turns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.as_cuda import as_cuda
from tests.compile.cubin import build
from tests.compile.interp import check
from tilewright import config, metrics
from tilewright.testing import run_and_get_code

LONG = (1 << 17) + 77  # elements: enough for many programs, and no power of two

FOLDS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "prod": lambda x: torch.where(x > 4, 2.0, torch.where(x > 0, 1.0, -1.0)).prod(),
    "max": lambda x: x.amax(),
    "min": lambda x: x.amin(),
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(),
    "any": lambda x: (x > 4).any(),
    "all": lambda x: (x < 9).all(),
    "var": lambda x: x.var(),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0),
}


def compiled(fn: Callable[..., Any], *args: Tensor) -> tuple[Any, str]:
    """The results, and the text of all kernels."""
    metrics.reset()
    with as_cuda(), config.patch({"triton.cooperative_reductions": True}):
        found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), *args)
    return found, "\n".join(code)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", FOLDS)
def test_one_launch_folds_one_row(name: str) -> None:
    """RD-9: any fold of a huge row is one launch; the length is no power of two."""
    x = torch.randn(LONG)
    found, text = compiled(FOLDS[name], x)
    assert metrics.generated_kernel_count == 1
    assert text.count("tri.meet(") == 1
    wide = FOLDS[name](x.double())
    torch.testing.assert_close(found.double(), wide.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype: torch.dtype) -> None:
    """RD-9: what is left has the type it is folded in."""
    x = torch.randn(2, LONG).to(dtype)

    def f(x: Tensor) -> Any:
        return x.double().sum(1), x.amax(1), x.argmin(1), x.float().var(1), x.float().softmax(1)

    found, text = compiled(f, x)
    assert "tri.meet(" in text
    torch.testing.assert_close(found, f(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "programs"), [(5, 16), (11, 12)])
def test_few_rows_share_the_card(rows: int, programs: int) -> None:
    """RD-9: with several rows each has as many programs as there are processors for it, or fewer
    where these would have too little to do."""
    x = torch.randn(rows, LONG)
    found, text = compiled(lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), x)
    assert f"part = pid % {programs}\n" in text
    wide = x.double()
    expected = (wide - wide.mean(1, keepdim=True)) / wide.std(1, keepdim=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_programs_wait_only_where_a_fold_is_needed() -> None:
    """RD-10: eight softmaxes one after the other wait eight times."""
    x = torch.randn(LONG)

    def f(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.softmax(x, 0) * 1000
        return x

    found, text = compiled(f, x)
    assert metrics.generated_kernel_count == 1
    assert text.count("tri.meet(") == 8
    torch.testing.assert_close(found.double(), f(x.double()), rtol=1e-3, atol=1e-5)


def test_folds_that_need_nothing_of_each_other_wait_once() -> None:
    """RD-10: six of them, in one loop."""
    x = torch.randn(LONG)

    def f(x: Tensor) -> Any:
        return ((x > 3).any(), (x < 3).all(), (x > 9).any(), (x < 9).all(), (x == 0).any(),
                (x != 0).all())  # fmt: skip

    found, text = compiled(f, x)
    assert metrics.generated_kernel_count == 1
    assert text.count("tri.meet(") == 1
    assert found == f(x)


def test_rows_are_cut_unless_asked() -> None:
    metrics.reset()
    with as_cuda():
        torch.compile(lambda x: x.sum(), backend="tilewright")(torch.randn(LONG))
    assert metrics.generated_kernel_count == 2


# ---- softmax of rows that are cut

SOFTMAX: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "softmax": (lambda x: x.softmax(-1), 3),
    "log softmax": (lambda x: x.log_softmax(-1), 3),
    "scaled": (lambda x: (x * 3).softmax(-1), 3),
}


def _extremes() -> Tensor:
    """Some chunks are -inf altogether, and the largest values are so small that relative to zero
    their exponentials are nothing."""
    x = torch.randn(LONG) - 200
    x[: LONG // 2] = -torch.inf
    return x


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("name", SOFTMAX)
def test_a_cut_softmax_reads_its_row_twice(name: str, rows: int | None) -> None:
    """One kernel folds the largest value and the sum of exponentials of each chunk, one brings the
    chunks together, one writes the result: no exponential is stored."""
    fn, kernels = SOFTMAX[name]
    x = torch.randn(LONG) if rows is None else torch.randn(rows, LONG // 2)
    metrics.reset()
    with as_cuda():
        found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), x)
    assert metrics.generated_kernel_count == kernels
    made = re.findall(r"= empty_cuda\((\(.*?\)),", code[0])
    assert sum(str(x.shape[-1]) in size for size in made) == 1  # the result
    torch.testing.assert_close(found.double(), fn(x.double()), rtol=1e-4, atol=1e-6)


def test_chunks_of_a_softmax_may_be_empty_or_extreme() -> None:
    fn = torch.compile(lambda x: x.softmax(0), backend="tilewright")
    full, inf = torch.full((LONG,), -1e9), torch.randn(LONG)
    inf[77] = torch.inf
    with as_cuda():
        for x in (_extremes(), full, torch.full((LONG,), -torch.inf), inf):
            torch.testing.assert_close(fn(x), x.softmax(0), equal_nan=True, rtol=1e-4, atol=1e-9)


# ---- rows held or walked

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "var": lambda x: x.var(-1),
    "scaled": lambda x: x * x.sum(-1, True),
}


@pytest.mark.parametrize("name", FORMS)
def test_both_forms_of_a_reduction_are_candidates(name: str) -> None:
    """RD-11: one text holds rows or walks them, as the configuration says; the model's is first."""
    x = torch.randn(70, 1500)
    with config.patch(max_autotune_pointwise=True):
        (kernel,) = check(FORMS[name], x, rtol=1e-4, atol=1e-4)
        forms = [dict(c.constants)["HELD"] for c in kernel.configs]
        assert forms[0] == 1
        check(FORMS[name], x, config=forms.index(0), rtol=1e-4, atol=1e-4)
    assert build(kernel, config=forms.index(0)).spills == 0
    (plain,) = check(FORMS[name], x, rtol=1e-4, atol=1e-4)
    assert "HELD" not in plain.text


def test_a_row_that_is_walked_can_be_held() -> None:
    """RD-11: one too long to be held by default is offered held as well."""
    with config.patch(max_autotune=True):
        (kernel,) = check(lambda x: x.sum(-1), torch.randn(70, 12000), rtol=1e-4, atol=1e-2)
    forms = [dict(c.constants)["HELD"] for c in kernel.configs]
    assert forms[0] == 0
    assert 1 in forms
