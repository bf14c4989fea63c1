"""What a card's program computes, without a card: traced as on one, run in Triton's interpreter.

Some operators compute otherwise on a card than on the CPU (statistics of low-precision norms are
float32 there), and their shape functions say so. Here a function is traced on fake CUDA tensors, in
a process that believes in a card, and the program lowered from that runs on CPU memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tests.compile.interp import executable
from tilewright.graph import decompositions
from tilewright.graph.simplify import simplify
from tilewright.host import support
from tilewright.lower.graph import lower

CARD = frozenset({"cuda"})
Function = Callable[..., Any]


def results(function: Function, *args: Any) -> list[Tensor]:
    """What `function` of CPU tensors gives with the kernels of a card. To be called in a process
    that believes in one."""
    leaves, spec = pytree.tree_flatten(args)
    given = [v for v in leaves if isinstance(v, Tensor)]

    def flat(*tensors: Tensor) -> list[Any]:
        left = list(tensors)
        values = [left.pop(0) if isinstance(v, Tensor) else v for v in leaves]
        return [t for t in pytree.tree_leaves(function(*pytree.tree_unflatten(values, spec)))
                if isinstance(t, Tensor)]  # fmt: skip

    with FakeTensorMode(), decompositions.keep_whole(), enable_python_dispatcher():
        fakes = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cuda",
                                     requires_grad=t.requires_grad) for t in given]  # fmt: skip
        traced: Any = torch.func.functionalize(flat, remove="mutations")
        gm = make_fx(traced, decomposition_table=decompositions.table())(*fakes)
    simplify(gm)
    with mock.patch.object(support, "empty_cuda", support.empty_cpu), torch.no_grad():
        return list(executable(lower(gm, CARD))([t.detach() for t in given]))


def with_gradients(function: Function, wanted: Sequence[int]) -> Function:
    """The first result of the function, and the gradients of the arguments `wanted` along the last
    argument."""

    def joint(*given: Any) -> Any:
        *args, direction = given

        def of_wanted(*some: Tensor) -> Tensor:
            chosen = dict(zip(wanted, some, strict=True))
            out = function(*(chosen.get(k, a) for k, a in enumerate(args)))
            return next(t for t in pytree.tree_leaves(out) if isinstance(t, Tensor))

        found: Any = torch.func.vjp(of_wanted, *(args[k] for k in wanted))
        return found[0], found[1](direction)

    return joint
