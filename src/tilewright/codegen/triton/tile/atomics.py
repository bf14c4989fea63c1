"""Stores that combine with what is there, atomically, or that a mask holds back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewright.codegen.triton.tile.lower import NOWHERE, Support
from tilewright.ir.program import Store

if TYPE_CHECKING:
    from tilewright.codegen.triton.tile.kernel import Kernel

_NATIVE = {
    "add": {torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint32,
            torch.uint64},
    "min": {torch.int32, torch.int64, torch.uint32, torch.uint64},
    "max": {torch.int32, torch.int64, torch.uint32, torch.uint64},
}  # fmt: skip
"""What the hardware combines in one instruction, with torch's meaning: its float extremes do not
keep a NaN."""


def write_scatter(k: Kernel, store: Store, points: Support) -> None:
    """The store of a nest that has these `points`: each of them counts, also where it is to the
    same place and of the same value as others are."""
    w = k.w
    value = k.value(store)
    mask = [] if store.mask is None else [w.operand(store.mask)]
    place, support = k.place(store, NOWHERE if store.mode == "set" else points)
    w.barriers.before_store(store.buffer, None)
    where = w.mask(support, *mask)
    if store.mode == "set":
        w.line(f"tl.store({place}, {value}{', ' + where if where else ''})")
        return
    dtype = k.buffers[store.buffer].dtype
    native = dtype in _NATIVE.get(store.mode, set()) or (
        store.mode == "add" and dtype == torch.bfloat16 and k.target.capability >= (9, 0)
    )
    if native:
        masked = f", mask={where}" if where else ""
        w.line(f'tl.atomic_{store.mode}({place}, {value}{masked}, sem="relaxed")')
        return
    _exchange(k, store, value, where or "True", support)


def _exchange(k: Kernel, store: Store, value: str, where: str, support: Support) -> None:
    """Read, combine and exchange until nobody came between."""
    w = k.w
    dtype = k.buffers[store.buffer].dtype
    tile = w.shape(support)
    index = w.spread(w.index(store.index), w.support(store.index), support)
    place = w.let(f"tl.broadcast_to({index}, {tile})")
    held = w.let(f"tl.broadcast_to({where}, {tile})" if where != "True"
                 else f"tl.full({tile}, 1, tl.int1)")  # fmt: skip
    given = w.let(f"tl.broadcast_to({value}, {tile})")
    kind = "bytes" if dtype.itemsize == 1 else "words"
    logic = "_bool" if dtype == torch.bool else ""
    # H200: 8388608 floats to 262144 places 372 us by exchanging
    by = "tri.exchange" if dtype != torch.float32 or store.mode == "mul" else "tri_maths.extreme"
    w.line(f"{by}_{kind}({k.pointer(store.buffer)}, {place}, {given}, {held}, "
           f"\"{store.mode}{logic}\")")  # fmt: skip
