"""The random rows of `ops.TABLE` in torch: Philox4x32-10, the numbers generated kernels draw."""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor
_LOW = 0xFFFFFFFF


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 by 32 bit product; in halves, since int64 has a sign."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = (low >> 16) + high
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)


def words(seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The first two words at this place of the stream of this seed."""
    seed, offset = torch.broadcast_tensors(seed, offset)
    zero = torch.zeros_like(offset)
    a, b, c, d = offset & _LOW, (offset >> 32) & _LOW, zero, zero
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high_a, low_a = _product(a, 0xD2511F53)
        high_c, low_c = _product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return a, b


def rand(seed: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform on [0, 1): 24 random bits, 53 in float64."""
    a, b = words(seed, offset)
    if dtype == torch.float64:
        return ((a >> 5).double() * 2.0**26 + (b >> 6).double()) * 2.0**-53
    return ((a >> 8).float() * 2.0**-24).to(dtype)


def randn(seed: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal, by Box and Muller."""
    a, b = words(seed, offset)
    radius = ((a >> 1).double() * 2.0**-31 + 2.0**-32).float()
    angle = (b >> 8).float() * (2 * math.pi * 2.0**-24)
    return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)).to(dtype)


def randint(seed: Tensor, offset: Tensor, low: Tensor, high: Tensor,
            dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Uniform in [low, high), whose distance must fit in 31 bits here."""
    a, b = words(seed, offset)
    span = high - low
    if bool((span >= 2**31).any()):
        raise NotImplementedError("randint over 2**31 numbers or more")
    return (low + ((b * span + ((a * span) >> 32)) >> 32)).to(dtype)
