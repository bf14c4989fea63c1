"""What a scan stores that others would make of its results, and scans that run back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.compile.as_cuda import as_cuda
from tilewright.testing import run_and_get_code


def of_later(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    value, place = y.flip(0).cummax(0)
    return x.flip(-1).cumsum(-1).flip(-1), value.flip(0), place.flip(0)


def exclusive(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    total = (0.5 * x).cumsum(-1)
    several = y.cumsum(-1)
    return (total - x) * (total > 1), several.roll(1, -1), several * 2


def test_a_scan_stores_what_is_made_of_it() -> None:
    x, y = torch.randn(5, 72), torch.randn(37, 41)
    for fn, launches, back in ((of_later, 2, 2), (exclusive, 3, 0)):
        with as_cuda():
            found, code = run_and_get_code(torch.compile(fn, backend="tilewright"), x, y)
        assert_close(found, fn(x, y))
        text = "\n".join(code)
        assert (text.count("(stream0, "), text.count("reverse=True")) == (launches, back)
