"""Pieces of rows that move as they are: rolled, padded, cut out, or put side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compile.cubin import build, kernels_of


def test_pieces_of_several_rows_move_sixteen_bytes_at_once() -> None:
    (kernel,) = kernels_of(
        lambda x: F.pad(x, (0, 0, 8, 8)), torch.empty(9, 24, 1747, dtype=torch.bfloat16)
    )
    made = build(kernel)
    assert made.widest("ld.global") == made.widest("st.global") == 16
