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


def words(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of a counter of the stream of this seed."""
    seed, counter = torch.broadcast_tensors(seed, counter)
    zero = torch.zeros_like(counter)
    a, b, c, d = counter & _LOW, (counter >> 32) & _LOW, zero, zero
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high_a, low_a = _product(a, 0xD2511F53)
        high_c, low_c = _product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return a, b, c, d


def _word(seed: Tensor, place: Tensor) -> Tensor:
    """One of the four of a counter."""
    a, b, c, d = words(seed, place >> 2)
    odd = (place & 1) == 1
    return torch.where((place & 2) == 2, torch.where(odd, d, c), torch.where(odd, b, a))


def _pair(seed: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """One of the two pairs of a counter."""
    a, b, c, d = words(seed, place >> 1)
    odd = (place & 1) == 1
    return torch.where(odd, c, a), torch.where(odd, d, b)


def rand(seed: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Uniform on [0, 1): 24 random bits, 53 in float64."""
    if dtype == torch.float64:
        a, b = _pair(seed, place)
        return ((a >> 5).double() * 2.0**26 + (b >> 6).double()) * 2.0**-53
    return ((_word(seed, place) >> 8).float() * 2.0**-24).to(dtype)


def randn(seed: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal, by Box and Muller: two of them are a quarter turn apart."""
    a, b = _pair(seed, place >> 1)
    radius = ((a >> 1).double() * 2.0**-31 + 2.0**-32).float()
    angle = (b >> 8).float() * (2 * math.pi * 2.0**-24) - (place & 1).float() * (math.pi / 2)
    return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)).to(dtype)


def randint(seed: Tensor, place: Tensor, low: Tensor, high: Tensor,
            dtype: torch.dtype) -> Tensor:  # fmt: skip
    """Uniform in [low, high), whose distance must fit in 31 bits here."""
    a, b = _pair(seed, place)
    span = high - low
    if bool((span >= 2**31).any()):
        raise NotImplementedError("randint over 2**31 numbers or more")
    return (low + ((b * span + ((a * span) >> 32)) >> 32)).to(dtype)
