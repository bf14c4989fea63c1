"""Launches of the user's own Triton kernels.

The graph shows one as a function: `triton_kernel_wrapper_functional` runs the kernel on copies of
what it writes to, and gives the copies by their parameters' names. Here it is the launch itself, on
the original memory where `own` allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx.node import map_arg

from tilewright.errors import LoweringError, at_node
from tilewright.graph import ttir
from tilewright.graph.overwrites import Blocks
from tilewright.graph.user_kernels import Launch, block_of, constants_of, describe
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import View
from tilewright.lower.context import Lowering, as_view, is_plain
from tilewright.lower.opaque import as_argument, plain
from tilewright.lower.tensor import Tensor
from tilewright.lower.wrappers import own

Node = torch.fx.Node


def launched(ctx: Lowering, node: Node) -> dict[str, Tensor]:
    given: dict[str, Any] = dict(node.kwargs["kwargs"])  # type: ignore[arg-type]
    wanted: Any = node.kwargs["tensors_to_clone"]
    for value in given.values():
        fake = value.meta.get("val") if isinstance(value, Node) else None
        if isinstance(fake, torch.Tensor) and not is_plain(fake):
            raise LoweringError(f"a Triton kernel is given a tensor of {fake.dtype}, {fake.layout}",
                                site=at_node(node))  # fmt: skip
    target, found = _target(node, given)
    owned: dict[str, Tensor] = {}
    for name in wanted:
        others = [n for n in node.all_input_nodes if n is not given[name]]
        owned[name] = own(ctx, given[name], others)
    arguments = {name: _argument(ctx, owned.get(name, value)) for name, value in given.items()}
    grid = plain(map_arg(node.kwargs["grid"], lambda n: ctx.env[n]))
    buffers = {n: a.buffer for n, a in arguments.items() if isinstance(a, View)}
    mutates = tuple(dict.fromkeys(buffers[n] for n in owned))
    read = {buffers[n] for n in found.reads if n in buffers}
    read |= {b for n, b in buffers.items() if n not in owned}
    fills = tuple(b for b in mutates if b not in read)
    known = {**dict(target.constants), **arguments}
    covers = tuple(buffers[n] for n, blocks in found.blocks.items() if n in owned
                   and buffers[n] in fills and _covers(ctx, blocks, known, n, grid))  # fmt: skip
    ctx.launch(target, (grid,), arguments, mutates, fills, covers)
    return owned


def _covers(ctx: Lowering, blocks: Blocks, arguments: dict[str, Any], name: str,
            grid: Sequence[Any]) -> bool:  # fmt: skip
    """Whether a launch leaves nothing of what an argument's buffer held."""
    view: View = arguments[name]
    buffer = ctx.program.buffers[view.buffer]
    whole = (view.size, view.stride, view.offset) == (buffer.size, buffer.stride, ix.ZERO)
    end = arguments.get(blocks.end) if isinstance(blocks.end, str) else blocks.end
    if not whole or not buffer.is_dense or view.dtype != buffer.dtype or len(grid) != 1:
        return False
    if blocks.end is not None and not (
        isinstance(end, (int, Expr)) and ix.known_le(buffer.numel, end)
    ):
        return False
    programs = 1 if blocks.axis is None else _along(grid[0], blocks.axis)
    if ix.known_le(buffer.numel, ix.mul(programs, blocks.block)):
        return True
    # rounded up: known of the numerator
    return (isinstance(programs, Expr) and programs.op == "ifloordiv"
            and programs.src[1] is ix.as_index(blocks.block)
            and ix.known_le(ix.add(buffer.numel, blocks.block - 1), programs.src[0]))  # fmt: skip


def _along(grid: Sequence[Any], axis: int) -> Any:
    return grid[axis] if axis < len(grid) else 1


def _target(node: Node, given: dict[str, Any]) -> tuple[Launch, ttir.Accesses]:
    number: Any = node.kwargs["kernel_idx"]
    index: Any = node.kwargs["constant_args_idx"]
    metadata: Any = node.kwargs["tma_descriptor_metadata"]
    kernel, constants = describe(number), constants_of(index)
    blocks = {name: block_of(made) for name, made in metadata.items()}
    fakes = {n: v.meta["val"] if isinstance(v, Node) else v for n, v in given.items()}
    found = ttir.accesses(kernel, kernel_side_table.get_kernel(number),
                          {**dict(kernel.defaults), **constants, **fakes}, blocks)  # fmt: skip
    names = {p.name for p in kernel.parameters}
    inside = {**dict(kernel.defaults), **{n: v for n, v in constants.items() if n in names}}
    known = tuple((n, v) for n, v in inside.items() if n not in given)
    options = tuple((n, v) for n, v in constants.items() if n not in names)
    writes: Any = node.kwargs["tensors_to_clone"]
    return Launch(kernel, known, tuple(writes), tuple(blocks.items()), options), found


def _argument(ctx: Lowering, value: Any) -> View | Expr | Any:
    if isinstance(value, Tensor):
        found = as_view(value)
        assert found is not None
        return found
    return as_argument(ctx, value) if isinstance(value, Node) else plain(value)
