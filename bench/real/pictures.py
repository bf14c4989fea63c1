"""Architectures of torchvision, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from bench.real.zoo import Made, Model, of_size

NAMES = (
    "resnet50", "mobilenet_v3_large", "efficientnet_b0", "vgg16_bn", "densenet121",
    "shufflenet_v2_x1_0", "regnet_y_800mf", "convnext_tiny", "swin_v2_t", "vit_b_16", "googlenet",
    "mnasnet1_0",
)  # fmt: skip


def models() -> list[Model]:
    if importlib.util.find_spec("torchvision") is None:
        return []
    return [Model(f"torchvision_{n}", "convolution net", "torchvision", _maker(n)) for n in NAMES]


def _maker(name: str) -> Callable[[str], Made]:
    def make(size: str) -> Made:
        from torchvision import models as published

        more = {"aux_logits": False} if name == "googlenet" else {}
        module = getattr(published, name)(weights=None, num_classes=100, **more)
        batch, side = of_size(size, (2, 64), (4, 96), (64, 224))
        if name == "vit_b_16":
            side = 224  # its positions are learnt for one size
        return Made(module, {"x": torch.randn(batch, 3, side, side)})

    return make
