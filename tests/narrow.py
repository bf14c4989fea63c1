"""Scaled products and layers of packed weights, with what they are in float64. A card may lack
pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

E4, BF16 = torch.float8_e4m3fn, torch.bfloat16
K, N, GROUP = 256, 256, 64  # of layers

# ---- scaled products

KINDS = ("tensor/tensor", "row/row", "1x128/128x128", "1x128/1x128", "128x128/1x128")


def eight(rows: int, columns: int, dtype: torch.dtype = E4) -> Tensor:
    return torch.randn(rows, columns).to(dtype)


def operands(m: int, n: int, k: int, left: torch.dtype = E4, right: torch.dtype = E4
             ) -> tuple[Tensor, Tensor]:  # fmt: skip
    return eight(m, k, left), eight(n, k, right).t()


def scales(kind: str, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """As `_scaled_mm` takes them, for an operand on each side."""
    blocks = -(-k // 128)

    def one(name: str, size: int) -> Tensor:
        rows = {"tensor": 1, "row": size, "1x128": size, "128x128": -(-size // 128)}[name]
        columns = blocks if "x" in name else 1
        return (torch.rand(columns, rows) + 0.5).t()  # along the rows, as the library wants blocks

    left, _, right = kind.partition("/")
    if kind == "tensor/tensor":
        return torch.rand(()) + 0.5, torch.rand(()) + 0.5
    return one(left, m), one(right, n).t()


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """A scale for each element of an operand."""
    for dim, size in enumerate((rows, columns)):
        if scale.dim() == 2 and 1 < scale.shape[dim] < size:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
        elif scale.dim() == 2 and scale.shape[dim] == 1:
            scale = scale.expand(*(size if d == dim else -1 for d in range(2)))
    return scale.double().expand(rows, columns)


def expected(a: Tensor, b: Tensor, given: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    left = a.double() * spread(given[0], *a.shape)
    total = left @ (b.double() * spread(given[1], *b.shape))
    return total if bias is None else total + bias.double()


# ---- layers


def r(*size: int) -> Tensor:
    return torch.randn(size).to(BF16)


def grouped(w: Tensor, s: Tensor, z: Tensor | None = None) -> Tensor:
    """Rows of weights, of which groups have a scale and a zero point."""
    apart = w.unflatten(1, (s.shape[1], -1))
    return ((apart if z is None else apart - z[..., None]) * s[..., None]).flatten(1)


def by_rows(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * s[:, None])


def after(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * s


def in_groups(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, grouped(w.to(x.dtype), s))


def between(x: Tensor, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Neighbours along k in a byte."""
    apart = torch.stack([w & 15, w >> 4], -1).flatten(1)
    return F.linear(x, grouped(apart.to(x.dtype), s, z))


def shifted(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    shifts = torch.tensor([4, 0], dtype=torch.uint8, device=w.device)
    apart = ((w[:, :, None] >> shifts) & 15).flatten(1)
    return F.linear(x, grouped(apart.to(x.dtype) - 8, s))


def behind(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """The first and the second half of the rows."""
    return F.linear(x, grouped(torch.cat([w & 15, w >> 4]).to(x.dtype) - 8, s))


def behind_along_k(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, grouped(torch.cat([w & 15, w >> 4], 1).to(x.dtype) - 8, s))


def columns(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Neighbours along n in a byte."""
    apart = torch.stack([w & 15, w >> 4], -1).flatten(1).to(x.dtype) - 8
    return x @ (apart.unflatten(0, (s.shape[0], -1)) * s[:, None]).flatten(0, 1)


def words(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Eight along k in an int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=w.device)
    apart = ((w[:, None, :] >> shifts[None, :, None]) & 15).flatten(0, 1).to(x.dtype) - 8
    return x @ (apart.unflatten(0, (s.shape[0], -1)) * s[:, None]).flatten(0, 1)


def bytes_(*size: int) -> Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8)


def int8(*size: int) -> Tensor:
    return torch.randint(-128, 128, size, dtype=torch.int8)


GROUPS = K // GROUP
LAYERS: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "rows": (by_rows, lambda: (int8(N, K), r(N))),
    "after": (after, lambda: (int8(N, K), r(N))),
    "groups": (in_groups, lambda: (int8(N, K), r(N, GROUPS))),
    "between": (between, lambda: (bytes_(N, K // 2), r(N, GROUPS), r(N, GROUPS))),
    "shifted": (shifted, lambda: (bytes_(N, K // 2), r(N, GROUPS))),
    "behind": (behind, lambda: (bytes_(N // 2, K), r(N, GROUPS))),
    "behind along k": (behind_along_k, lambda: (bytes_(N, K // 2), r(N, GROUPS))),
    "columns": (columns, lambda: (bytes_(K, N // 2), r(GROUPS, N))),
    "words": (words, lambda: (torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32),
                              r(GROUPS, N))),
}  # fmt: skip


def tiled(q: Tensor, inner: int) -> Tensor:
    """Numbers of four bits [n, k] as `_convert_weight_to_int4pack` lays them out on a card: eight
    in a word, of two tiles of 8 by 16, those with an even k in its lower half."""
    n, k = q.shape
    apart = q.view(n // 8, 8, k // (16 * inner), inner // 2, 2, 2, 4, 2)  # (.., j, t, h, c, b)
    t, h, b = (torch.arange(2).view(shape) for shape in ((2, 1, 1, 1), (2, 1, 1), (2,)))
    words = (apart << 4 * (4 * b + 2 * t + h)).sum((4, 5, 7))  # n, n, k, j, c
    words = words - ((words >> 31) << 32)
    return words.permute(0, 2, 1, 4, 3).reshape(n // 8, -1, 32, inner // 2).to(torch.int32)


def micro(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eight-bit numbers, 32 of a row to a scale of eight bits; scales lie in tiles of 128 by 4."""
    rows, columns = x.shape
    groups = x.float().unflatten(1, (columns // 32, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True))) - 8
    q = (groups / torch.exp2(exponent)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    scale = (exponent.squeeze(-1) + 127).clamp(0, 254).to(torch.uint8)
    tiles = scale.reshape(rows // 128, 4, 32, columns // 128, 4).permute(0, 3, 2, 1, 4)
    return q, tiles.contiguous().view(torch.float8_e8m0fnu).flatten()
