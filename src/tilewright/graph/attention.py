"""`scaled_dot_product_attention` kept whole, and what of block masks a graph need not compute.

Traced, it becomes whatever torch's own choice among its kernels is for fake tensors: with a mask
whose strides a kernel does not like the mathematical form, in float32, with all scores in memory.
Here calls that our kernels compute are `flex_attention`, whose backward is one operator too; a mask
is what its function of a position reads, so one that was computed from positions is never stored.
All else is as torch has it, after the mask was laid out as its kernels want it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright import config

aten = torch.ops.aten
Node = torch.fx.Node
WHOLE = aten.scaled_dot_product_attention.default

NO_BLOCKS = 1 << 30  # the size of blocks that torch gives a mask without any
BY_ROW, BY_COLUMN, OWN = 2, 6, -3  # where a block mask, as a tuple, has its tables and sizes
WIDEST = 256  # elements of a query
TYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))

Function = Callable[..., torch.Tensor]


Library = Callable[[Sequence[torch.Tensor], float, bool, float | None, bool], SDPBackend | None]


def _torchs(operands: Sequence[torch.Tensor], dropout: float, causal: bool, scale: float | None,
            grouped: bool) -> SDPBackend | None:  # fmt: skip
    return None


library: Library = _torchs
"""Which of torch's kernels is to compute a call (operands, dropout, causal, scale, grouped heads);
None: whichever torch takes. `attention/libraries.py` puts one here that measures."""


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, *, scale: float | None = None,
              enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
    """What is traced for the operator."""
    operands = (query, key, value)
    reason = _refused(operands, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason:
        mask = attn_mask
        if mask is not None and mask.device.type == "cuda" and _is_odd(mask):
            mask = mask.clone(memory_format=torch.contiguous_format)
        key_ = torch._C.DispatchKey.CompositeImplicitAutograd
        given = operands if mask is None else (*operands, mask)
        taken = library(given, dropout_p, is_causal, scale, enable_gqa)
        with contextlib.nullcontext() if taken is None else sdpa_kernel(taken):
            return WHOLE._op_dk(key_, query, key, value, mask, dropout_p, is_causal, scale=scale,
                                enable_gqa=enable_gqa)  # fmt: skip
    by = 1 / math.sqrt(query.size(-1)) if scale is None else float(scale)
    out = _flex(operands, attn_mask, is_causal, by)
    return _laid_out(out, attn_mask is not None and _is_odd(attn_mask))


def _laid_out(out: torch.Tensor, is_math: bool) -> torch.Tensor:
    """With the strides that eager's result has: users view it as they know it. The mathematical
    form gives it contiguous, kernels of cards with heads beside each other, those of CPUs like
    queries."""
    if is_math:
        return out.contiguous()
    if out.device.type == "cuda":
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out


def _refused(operands: tuple[torch.Tensor, ...], mask: torch.Tensor | None, dropout: float,
             causal: bool, grouped: bool) -> str:  # fmt: skip
    """Why torch's own kernels are to compute it, or an empty string."""
    query, key, value = operands
    if not config.attention:
        return "the option `attention` is off"
    device = query.device.type
    given = operands if mask is None else (*operands, mask)
    if any(t.is_nested or t.layout != torch.strided or _is_transformed(t) for t in given):
        return "operands that are not plain tensors"
    if dropout:
        return "weights are dropped"
    if mask is not None and mask is not query and mask.requires_grad:
        return "the mask has a gradient"
    if any(t.dim() != 4 for t in operands) or len({t.dtype for t in operands}) > 1:
        return "operands of other than four dimensions, or of several types"
    if query.dtype not in TYPES or any(t.device != query.device for t in operands):
        return "a type that no kernel of ours multiplies"
    if mask is not None and mask.dim() > 4:
        return "a mask of more than four dimensions"
    if mask is not None and mask.dtype not in (torch.bool, query.dtype, torch.float32):
        return "a mask of another type"
    known: list[Any] = [
        query.size(1),
        key.size(1),
        value.size(1),
        query.size(3),
        key.size(3),
        value.size(3),
    ]
    if not all(isinstance(n, int) and n > 0 for n in known) or max(known[3:]) > WIDEST:
        return "heads or widths that are not known, or too wide"
    if known[1] != known[2] or (known[0] != known[1] and not grouped) or known[0] % known[1]:
        return "heads that do not fit each other"
    if any(_is(n, 0) for t in operands for n in t.shape):
        return "there is nothing to compute"
    if any(t.size(0) is not query.size(0) and t.size(0) != query.size(0) for t in (key, value)):
        return "batches that do not fit each other"
    training = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    if device == "cpu":
        return "the library has the backward" if training else ""
    if device == "cuda":
        return "" if mask is not None else "the library computes it without a mask"
    return "a device without kernels of ours"


def _is_transformed(t: torch.Tensor) -> bool:
    """Whether it belongs to `torch.func`, whose transforms know torch's own operators."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return functorch.is_batchedtensor(t) or functorch.is_gradtrackingtensor(t)


def _is(n: Any, number: int) -> bool:
    """Whether a size is this number, whatever the values of symbols."""
    return isinstance(n, int) and n == number


def _is_odd(mask: torch.Tensor) -> bool:
    """Whether a mask has a layout with which torch falls back to the mathematical form."""
    if mask.device.type == "cpu":
        return mask.dim() not in (2, 4)
    return mask.dim() > 0 and mask.stride(-1) != 1


def written_out(query: torch.Tensor, turned: torch.Tensor, value: torch.Tensor, scale: float,
                added: torch.Tensor | None, mask: torch.Tensor | None, fill: Any
                ) -> torch.Tensor:  # fmt: skip
    """Attention that the user wrote out: scores are scaled, something is added, and where the mask
    holds they are replaced."""
    operands = (query, turned.transpose(-2, -1), value)
    masks = [m for m in (added, mask) if m is not None]
    if refused_apart(operands) or any(m.requires_grad for m in masks):
        scores = torch.matmul(query, turned) * scale
        scores = scores if added is None else scores + added
        scores = scores if mask is None else scores.masked_fill(mask, fill)
        return torch.matmul(torch.softmax(scores, -1, torch.float32).to(value.dtype), value)
    held = tuple(m.reshape([1] * (4 - m.dim()) + list(m.shape)) for m in masks)

    def changed(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, m: torch.Tensor,
                n: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:  # fmt: skip
        if added is not None:
            score = score + _element(rest[0], (b, h, m, n))
        if mask is not None:
            score = torch.where(_element(rest[-1], (b, h, m, n)), fill, score)
        return score

    def always(b: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(b, dtype=torch.bool)

    tables = _no_blocks(query, operands[1])
    out, lse, _ = flex_attention(*operands, changed, (*tables, always), scale, {}, held, ())
    out = out.contiguous()
    if masks and fill not in (None, -math.inf) and added is None:
        return out
    # a row of which nothing is left: not a number, as of a softmax of nothing but minus infinity
    return torch.where((lse == -math.inf)[..., None], math.nan, out) if masks else out


def refused_apart(operands: tuple[torch.Tensor, ...]) -> str:
    """Why attention that was written out is left as it is, or an empty string."""
    return _refused(operands, operands[0] if operands[0].is_cuda else None, 0.0, False, False)


def _element(held: torch.Tensor, place: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of a mask of four dimensions, some of them one for all positions."""
    sizes: list[Any] = list(held.shape)
    at = [torch.zeros_like(p) if _is(n, 1) else p for p, n in zip(place, sizes, strict=True)]
    return aten.index.Tensor(held, at)


def _flex(operands: tuple[torch.Tensor, ...], mask: torch.Tensor | None, causal: bool,
          scale: float) -> torch.Tensor:  # fmt: skip
    query, key, _ = operands
    buffers: tuple[torch.Tensor, ...] = ()
    if mask is not None:
        mask = mask.reshape([1] * (4 - mask.dim()) + list(mask.shape))
        buffers = (mask,)

    def plain(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return score

    def added(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, m: torch.Tensor,
              n: torch.Tensor, held: torch.Tensor) -> torch.Tensor:  # fmt: skip
        return score + _element(held, (b, h, m, n))

    def holds(b: torch.Tensor, h: torch.Tensor, m: torch.Tensor, n: torch.Tensor,
              *held: torch.Tensor) -> torch.Tensor:  # fmt: skip
        below = m >= n
        if not held:
            return below if causal else torch.ones_like(below)
        found = _element(held[0], (b, h, m, n))
        return found & below if causal else found

    boolean = mask is not None and mask.dtype == torch.bool
    score_mod = plain if mask is None or boolean else added
    tables = _no_blocks(query, key)
    call: Any = flex_attention
    out, _, _ = call(
        *operands, score_mod, (*tables, holds), scale, {},
        () if score_mod is plain else buffers, buffers if boolean else (),
    )  # fmt: skip
    return out


def _no_blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
    """A block mask with one block, as a tuple without its function."""
    one = torch.ones((1, 1, 1), dtype=torch.int32, device=query.device)
    first = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=query.device)
    between = [None] * (_length() + OWN - BY_COLUMN - 4)
    return (query.size(2), key.size(2), one, first, None, None, one, first, None, None, *between,
            NO_BLOCKS, NO_BLOCKS)  # fmt: skip


@functools.cache
def _length() -> int:
    """Of a block mask: torch's versions differ in what is between tables and sizes."""
    from torch.nn.attention.flex_attention import (
        BlockMask,
    )  # as slow to import as it is seldom used

    names = inspect.signature(BlockMask.__init__).parameters
    return 2 + sum("blocks" in n or "indices" in n or n.startswith("dq_") for n in names) + 3


# ---- graphs that have been traced


def known_int(value: Any) -> int | None:
    """A number of a graph, where it is the same at every call."""
    value = value.meta.get("val") if isinstance(value, Node) else value
    if isinstance(value, torch.SymInt):
        return int(value.node.expr) if not value.node.expr.free_symbols else None
    return value if isinstance(value, int) else None


def prune(graph: torch.fx.Graph) -> None:
    """Take from calls the tables of blocks that they do not read, so that nobody computes them."""
    changed = False
    for node in graph.nodes:
        at = PLACES.get(node.target) if node.op == "call_function" else None
        if at is None:
            continue
        mask: Any = node.args[at]
        dense = known_int(mask[OWN]) == known_int(mask[OWN + 1]) == NO_BLOCKS
        unread = range(BY_ROW if dense else BY_COLUMN, len(mask) + OWN)
        if node.target is flex_attention_backward and not dense:
            unread = range(0)
        kept = tuple(None if k in unread else m for k, m in enumerate(mask))
        if kept != tuple(mask):
            node.update_arg(at, kept)
            changed = True
    if changed:
        graph.eliminate_dead_code()


PLACES: dict[Any, int] = {flex_attention: 4, flex_attention_backward: 9}


def is_read_by(user: Node, node: Node) -> bool:
    """Whether a call of attention reads a value only at the positions of scores: it is computed
    there, and need not be in memory."""
    if user.target not in PLACES:
        return False
    return node not in _in_memory(user)


def _in_memory(user: Node) -> set[Any]:
    found: set[Any] = set()
    last = len(user.args) - 2  # what the functions of a score and of a position read
    map_arg(user.args[:last], found.add)
    return found


__all__ = ["BY_COLUMN", "BY_ROW", "NO_BLOCKS", "OWN", "WHOLE", "attention",
           "is_read_by", "known_int", "prune", "written_out"]  # fmt: skip
