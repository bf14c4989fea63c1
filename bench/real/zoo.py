"""What a model of the suite is, and the list of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SIZES = ("tiny", "small", "full")  # for tests, for two cores, for a card
Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Made:
    """A module with random weights, and what it is called with."""

    module: nn.Module
    inputs: Inputs


@dataclass(frozen=True)
class Model:
    """One architecture; `make` is given one of SIZES."""

    name: str
    field: str
    source: str
    make: Callable[[str], Made]
    trains: bool = True


def of_size(size: str, tiny: Any, small: Any, full: Any) -> Any:
    return {"tiny": tiny, "small": small, "full": full}[size]


def tokens(vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def made(model: Model, size: str, device: str, dtype: torch.dtype) -> Made:
    """The model with the same weights and inputs every time, without dropout."""
    torch.manual_seed(0)
    found = model.make(size)
    without_dropout(found.module)
    inputs = {k: v.to(device, dtype if v.is_floating_point() else v.dtype)
              for k, v in found.inputs.items()}  # fmt: skip
    return Made(found.module.to(device, dtype), inputs)


def without_dropout(module: nn.Module) -> None:
    """Drawn masks differ between compilers by design: values could not be compared."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            chance = "drop" in name and isinstance(value, float)
            if chance or (name == "p" and isinstance(part, nn.modules.dropout._DropoutNd)):
                setattr(part, name, 0.0)
        if (settings := getattr(part, "config", None)) is not None:
            for name, value in list(vars(settings).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(settings, name, 0.0)


@functools.cache
def zoo() -> dict[str, Model]:
    """All models by name: of transformers, of torchvision where it is installed, and our own."""
    from bench.real import layered, pictures, published, written

    models = [*published.models(), *pictures.models(), *written.models(), *layered.models()]
    return {m.name: m for m in models}
