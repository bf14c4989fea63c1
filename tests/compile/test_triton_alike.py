"""Groups that differ only in what their buffers are called have one kernel."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.codegen.triton import generate as triton
from tilewright.codegen.triton.dedup import Kernels, told_once
from tilewright.graph import decompositions
from tilewright.lower.graph import lower
from tilewright.schedule.plan import Schedule, schedule
from tilewright.target import Target

CARD = Target("sm_90")


def _planned(function: Callable[..., object], *sizes: tuple[int, ...]) -> Schedule:
    with FakeTensorMode(), torch.no_grad():
        args = [torch.empty(size) for size in sizes]
        gm = make_fx(function, decomposition_table=decompositions.table())(*args)
    return schedule(lower(gm))


def _written(plan: Schedule) -> tuple[int, int]:
    """How many kernels were written, of how many. Each is what it would be alone."""
    groups = [step.group for step in plan.steps if step.group.call is None]
    alone = [triton.generate(plan.program, group, CARD, "name") for group in groups]
    known = Kernels()
    with mock.patch.object(triton, "generate", wraps=triton.generate) as generate:
        assert [known.generate(plan.program, group, CARD, "name") for group in groups] == alone
    return generate.call_count, len(groups)


def _layers(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
    for w in weights:
        x = x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ w)
    return (x,)


def test_layers_are_written_once() -> None:
    """As many texts for twelve layers as for six; the first and the last are others."""
    few, many = (_written(_planned(_layers, (5, 12), *n * [(12, 12)])) for n in (6, 12))
    assert few == (5, 7) and many == (5, 13)


def test_what_is_laid_out_otherwise_is_not_alike() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x @ x, -1), torch.softmax((y @ y).t(), -1)

    assert _written(_planned(both, (12, 12), (12, 12))) == (2, 2)


def test_limits_are_asked_about_once() -> None:
    plan = _planned(_layers, (5, 12), *12 * [(12, 12)])
    groups = [step.group for step in plan.steps]
    for reason, asked in (("", 5), ("as a test wants it", 13)):
        limits = mock.Mock(return_value=reason)
        told = told_once(limits)
        for group in groups:
            if group.call is None:
                assert told(plan.program, group) == reason
        assert limits.call_count == asked
