"""docs/features.md holds: each feature's program is right, and computed as the page says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.cpu.features import ATEN, FEATURES, NATIVE, PAGE, Feature, page
from tilewright import metrics

ALL = [feature for features in FEATURES.values() for feature in features]


def gradients(found: Any, args: tuple[Any, ...]) -> list[Any]:
    wanted = [
        t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return list(torch.autograd.grad(sum(t.sum() for t in wanted), leaves)) if wanted else []


@pytest.mark.parametrize("feature", ALL, ids=[f.name for f in ALL])
def test_feature(feature: Feature):
    torch._dynamo.reset()
    metrics.reset()
    if feature.args is None:
        feature.program()
    else:
        args = feature.args()
        again = copy.deepcopy(args)
        f = torch.compile(feature.program, backend="tilewright", **feature.options())
        found, wanted = f(*again), feature.program(*args)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(again, args)
        torch.testing.assert_close(gradients(found, again), gradients(wanted, args))
    if feature.how == NATIVE:
        assert not metrics.fallback_ops
    elif feature.how == ATEN:
        assert metrics.fallback_ops


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run `python -m tests.cpu.features`"
    assert len(ALL) >= 60
