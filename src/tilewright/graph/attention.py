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
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
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

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Order = tuple[SDPBackend, ...]
Library = Callable[[Sequence[torch.Tensor], float, bool, float | None, bool], Order | None]


def _torchs(operands: Sequence[torch.Tensor], dropout: float, causal: bool, scale: float | None,
            grouped: bool) -> Order | None:  # fmt: skip
    return None


library: Library = _torchs
"""Which of torch's kernels are to compute a call (operands, dropout, causal, scale, grouped heads),
the first that can; None: whichever torch takes. `attention/libraries.py` puts one here that
measures."""


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
              is_causal: bool = False, *, scale: float | None = None,
              enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
    """What is traced for the operator."""
    operands = (query, key, value)
    if _is_foldable(operands, attn_mask, dropout_p):
        q, k, v = _folded(operands, enable_gqa)
        if torch.is_grad_enabled() and k.requires_grad:
            k.register_hook(_by_columns)
        found = attention(q, k, v, _mask_of(attn_mask, query, enable_gqa), dropout_p, is_causal,
                          scale=scale, enable_gqa=enable_gqa)  # fmt: skip
        return found.reshape(*query.shape[:-1], value.size(-1)).contiguous()  # as eager's
    is_odd = attn_mask is not None and _is_odd(attn_mask)
    if refused(operands, attn_mask, dropout_p, is_causal, enable_gqa):
        return _by_library(operands, attn_mask, dropout_p, is_causal, scale, enable_gqa, is_odd)
    by = 1 / math.sqrt(query.size(-1)) if scale is None else float(scale)
    is_odd |= query.device.type == "cpu" and query.size(-1) != value.size(-1)
    return _laid_out(_flex(operands, attn_mask, is_causal, by), query, is_odd)


def _by_library(operands: Operands, mask: torch.Tensor | None, dropout: float, causal: bool,
                scale: float | None, grouped: bool, is_odd: bool) -> torch.Tensor:  # fmt: skip
    """By the fastest of torch's own kernels. What makes torch fall back to the mathematical form
    is changed first."""
    device = operands[0].device.type
    is_odd = is_odd and config.attention and device in ("cpu", "cuda")
    is_odd = is_odd and mask is not None and not _is_transformed(mask)
    if mask is not None and is_odd:
        cuda = device == "cuda"
        mask = mask.clone(memory_format=torch.contiguous_format) if cuda else four(mask)
    key_ = torch._C.DispatchKey.CompositeImplicitAutograd
    given = operands if mask is None else (*operands, mask)
    taken = library(given, dropout, causal, scale, grouped)
    with contextlib.nullcontext() if taken is None else sdpa_kernel(list(taken), set_priority=True):
        found = WHOLE._op_dk(key_, *operands, mask, dropout, causal, scale=scale,
                             enable_gqa=grouped)  # fmt: skip
    return found.contiguous() if is_odd else found


def repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: int,
             attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
             is_causal: bool = False, scale: float | None = None) -> torch.Tensor:  # fmt: skip
    """The call with each key head and value repeated for the heads of its group: not copied where
    a kernel knows of groups."""
    operands = (query, key, value)
    half = query.dtype in (torch.bfloat16, torch.float16)
    knows = attn_mask is None and query.device.type == "cuda" and half
    if not knows and refused(operands, attn_mask, dropout_p, is_causal, True):
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        group = 1
    return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                     enable_gqa=group > 1)  # fmt: skip


def _is_foldable(operands: Operands, mask: torch.Tensor | None, dropout: float) -> bool:
    """Whether operands of other than four dimensions are better off with four: torch computes
    them in its mathematical form."""
    query = operands[0]
    given = operands if mask is None else (*operands, mask)
    if not config.attention or not all(is_plain(t) for t in given):
        return False
    dims = query.dim()
    if dims == 4 or dims < 2 or any(t.dim() != dims or not is_some(t) for t in operands):
        return False
    if dropout and query.device.type != "cuda":
        return False
    lead = [t.shape[: max(0, dims - 3)] for t in operands]
    return all(same == lead[0] for same in lead) and (mask is None or mask.dim() <= dims)


def _folded(operands: Operands, grouped: bool) -> tuple[torch.Tensor, ...]:
    if operands[0].dim() > 4:
        return tuple(t.reshape(-1, *t.shape[-3:]) for t in operands)
    if operands[0].dim() == 2:
        return tuple(t[None, None] for t in operands)
    return tuple(t.unsqueeze(0 if grouped else 1) for t in operands)


def _by_columns(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of keys with the strides that eager's mathematical form gives it."""
    return gradient.mT.contiguous().mT


def _mask_of(mask: torch.Tensor | None, query: torch.Tensor, grouped: bool) -> torch.Tensor | None:
    if mask is None or mask.dim() < 3:
        return mask
    if query.dim() == 3:
        return mask.unsqueeze(0 if grouped else 1)
    if mask.dim() == 3:
        return mask
    return mask.expand(*query.shape[:-3], *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])


def _laid_out(out: torch.Tensor, query: torch.Tensor, is_math: bool) -> torch.Tensor:
    """With the strides that eager's result has: users view it as they know it. The mathematical
    form gives it contiguous, kernels of cards with heads beside each other, those of CPUs like
    queries."""
    if is_math:
        return out.contiguous()
    if out.device.type == "cuda":
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    if any(_is(step, 0) and not _is(n, 1) for n, step in zip(query.shape, query.stride(),
                                                             strict=True)):  # fmt: skip
        alike = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
        order = sorted(range(4), key=lambda d: -alike.stride(d))
        out = out.permute(order).contiguous()
        return out.permute([order.index(d) for d in range(4)])
    return out


def refused(operands: Operands, mask: torch.Tensor | None, dropout: float, causal: bool,
            grouped: bool) -> str:  # fmt: skip
    """Why torch's own kernels are to compute it, or an empty string."""
    query, key, value = operands
    if not config.attention:
        return "the option `attention` is off"
    device = query.device.type
    given = operands if mask is None else (*operands, mask)
    if not all(is_plain(t) for t in given):
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
    sizes = [t.size(1) for t in operands] + [t.size(3) for t in operands]
    known = [known_int(n) or 0 for n in sizes]
    if min(known) <= 0 or max(known[3:]) > WIDEST:
        return "heads or widths that are not known, or too wide"
    if known[1] != known[2] or (known[0] != known[1] and not grouped) or known[0] % known[1]:
        return "heads that do not fit each other"
    if not all(is_some(t) for t in operands):
        return "there is nothing to compute"
    if any(t.size(0) is not query.size(0) and t.size(0) != query.size(0) for t in (key, value)):
        return "batches that do not fit each other"
    training = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    if device == "cpu":
        return "the library has the backward" if training else ""
    if device == "cuda":
        return "" if mask is not None else "the library computes it without a mask"
    return "a device without kernels of ours"


def is_plain(t: torch.Tensor) -> bool:
    return not t.is_nested and t.layout == torch.strided and not _is_transformed(t)


def is_some(t: torch.Tensor) -> bool:
    """Whether it has elements, as far as is known."""
    return not any(_is(n, 0) for n in t.shape)


def settle(operands: Sequence[torch.Tensor]) -> None:
    """Heads and widths that are symbols become numbers."""
    for t in operands:
        dims = {4: (1, 3), 3: (2,)}.get(t.dim(), ())
        for n in (t.size(d) for d in dims):
            if isinstance(n, torch.SymInt) and not free_unbacked_symbols(n):
                int(n)  # a guard


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


def four(mask: torch.Tensor) -> torch.Tensor:
    """A mask with the dimensions of scores."""
    return mask.reshape([1] * (4 - mask.dim()) + list(mask.shape))


def element(held: torch.Tensor, place: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Of a mask of four dimensions, some of them one for all positions."""
    sizes: list[Any] = list(held.shape)
    at = [torch.zeros_like(p) if _is(n, 1) else p for p, n in zip(place, sizes, strict=True)]
    return aten.index.Tensor(held, at)


def _flex(operands: Operands, mask: torch.Tensor | None, causal: bool,
          scale: float) -> torch.Tensor:  # fmt: skip
    query, key, _ = operands
    buffers: tuple[torch.Tensor, ...] = ()
    if mask is not None:
        buffers = (four(mask),)

    def plain(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return score

    def added(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, m: torch.Tensor,
              n: torch.Tensor, held: torch.Tensor) -> torch.Tensor:  # fmt: skip
        return score + element(held, (b, h, m, n))

    def holds(b: torch.Tensor, h: torch.Tensor, m: torch.Tensor, n: torch.Tensor,
              *held: torch.Tensor) -> torch.Tensor:  # fmt: skip
        below = m >= n
        if not held:
            return below if causal else torch.ones_like(below)
        found = element(held[0], (b, h, m, n))
        return found & below if causal else found

    boolean = mask is not None and mask.dtype == torch.bool
    score_mod = plain if mask is None or boolean else added
    tables = no_blocks(query, key)
    call: Any = flex_attention
    out, _, _ = call(
        *operands, score_mod, (*tables, holds), scale, {},
        () if score_mod is plain else buffers, buffers if boolean else (),
    )  # fmt: skip
    return out


def no_blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, ...]:
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


__all__ = ["BY_COLUMN", "BY_ROW", "NO_BLOCKS", "OWN", "TYPES", "WHOLE", "attention", "element",
           "four", "is_plain", "is_read_by", "is_some", "known_int", "no_blocks", "prune",
           "refused", "repeated", "settle"]  # fmt: skip
