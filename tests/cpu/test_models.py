"""Whole models: the values and gradients of eager, and nearly every node lowered natively."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.models import MODELS, Case, build
from tilewright import metrics
from tilewright.testing import fresh_cache

# Ops whose work belongs to a library: matrix products, convolution, sorting, and attention.
LIBRARY_OPS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "linear",
        "linear_backward",
        "_int_mm",
        "_scaled_mm",
        "convolution",
        "convolution_backward",
        "sort",
        "topk",
    ]
)
ATTENTION_PREFIX = "_scaled_dot_product_"
NATIVE_SHARE = 0.98
# Symbolic sizes make tracing slow: one transformer and one convnet stand for the rest.
DYNAMIC = ("gpt", pytest.param("resnet", marks=pytest.mark.slow))


@dataclass(frozen=True)
class Step:
    """Everything a training step computes or changes."""

    output: Tensor
    loss: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def train(case: Case, backend: str | None, dynamic: bool | None = None) -> Step:
    module = copy.deepcopy(case.module)
    forward = module if backend is None else torch.compile(module, backend=backend, dynamic=dynamic)
    output = forward(*case.inputs)
    loss = case.loss(output)
    loss.backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Step(output.detach(), loss.detach(), grads, dict(module.named_buffers()))


def same_step(actual: Step, expected: Step) -> None:
    assert actual.grads.keys() == expected.grads.keys()
    for part in ("output", "loss", "grads", "buffers"):
        torch.testing.assert_close(
            getattr(actual, part),
            getattr(expected, part),
            rtol=1e-3,
            atol=1e-5,
            msg=lambda text, part=part: f"{part}: {text}",
        )


def is_library(op: str) -> bool:
    """Whether a library owns `op`, written `aten.addmm.default` or `aten::addmm`."""
    name = op.replace("::", ".").removeprefix("aten.").split(".")[0]
    return name in LIBRARY_OPS or name.startswith(ATTENTION_PREFIX)


def share_of(native: int, fallbacks: Counter[str]) -> float:
    """Natively lowered nodes over all that no library owns."""
    other = sum(n for op, n in fallbacks.items() if not is_library(op))
    return native / (native + other)


@pytest.fixture(autouse=True)
def clean() -> None:
    torch._dynamo.reset()
    metrics.reset()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", MODELS)
def test_training_step_equals_eager_and_is_native(name: str) -> None:
    case = build(name, "tiny")
    expected = train(case, None)
    with fresh_cache():
        actual = train(case, "tilewright")
    same_step(actual, expected)
    assert metrics.generated_kernel_count > 0
    other = {op: n for op, n in metrics.fallback_ops.items() if not is_library(op)}
    share = share_of(metrics.native_nodes, metrics.fallback_ops)
    assert share >= NATIVE_SHARE, f"{share:.1%} native; left to ATen: {other}"


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_eager(name: str) -> None:
    case = build(name, "tiny")
    module = case.module.eval()
    compiled = torch.compile(module, backend="tilewright")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(*case.inputs), module(*case.inputs), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_training_step_equals_eager(name: str) -> None:
    case = build(name, "tiny")
    same_step(train(case, "tilewright", dynamic=True), train(case, None))


def test_the_share_counts_only_what_no_library_owns() -> None:
    fallbacks = Counter(
        {
            "aten.addmm.default": 30,
            "aten::convolution_backward": 10,
            "aten._scaled_dot_product_flash_attention_for_cpu.default": 5,
            "aten.sort.stable": 5,
        }
    )
    assert share_of(97, fallbacks) == 1.0
    fallbacks["aten.native_layer_norm.default"] = 3
    assert share_of(97, fallbacks) == pytest.approx(0.97)
