"""Two ops of our own: a seed that a graph draws, and numbers that follow from a seed.

Forward and backward are separate programs. A mask drawn in one is drawn again in the other from
the same seed, four bytes in place of a tensor.
"""

from __future__ import annotations

import torch

from tilewright.ir import philox

_LIBRARY = torch.library.Library("tilewright", "DEF")
_LIBRARY.define("seed(int number, *, Device device) -> Tensor",
                tags=(torch.Tag.nondeterministic_seeded,))  # fmt: skip
_LIBRARY.define("uniform(Tensor seed, SymInt[] size) -> Tensor")


def _seed(number: int, *, device: torch.device) -> torch.Tensor:
    """`number` tells the draws of one graph apart, so that none is taken for another."""
    return torch.randint(0, 2**31 - 1, (), dtype=torch.int32, device=device)


def _uniform(seed: torch.Tensor, size: list[int]) -> torch.Tensor:
    """Float32 on [0, 1); element `i` in row-major order depends on the seed and `i` alone."""
    offsets = torch.arange(torch.Size(size).numel(), device=seed.device)
    return philox.rand(seed.long(), offsets, torch.float32).reshape(size)


def _fake_uniform(seed: torch.Tensor, size: list[int]) -> torch.Tensor:
    return seed.new_empty(size, dtype=torch.float32)


_LIBRARY.impl("seed", _seed, "BackendSelect")
_LIBRARY.impl("uniform", _uniform, "CompositeExplicitAutograd")
_LIBRARY.impl("uniform", _fake_uniform, "Meta")

seed = torch.ops.tilewright.seed.default
uniform = torch.ops.tilewright.uniform.default
