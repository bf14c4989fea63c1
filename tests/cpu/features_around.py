"""Programs of `features.py` that need more than a function and its arguments: processes, modules,
custom operators, what is set around a compiled function."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)


def compiled(f: Any, **how: Any) -> Any:
    return torch.compile(f, backend="tilewright", **how)


def same(f: Callable[..., Any], *args: Any) -> None:
    torch.testing.assert_close(compiled(f)(*args), f(*args), rtol=1e-4, atol=1e-4)


def same_gradient(f: Callable[..., Any], x: Tensor) -> None:
    found, wanted = (torch.autograd.grad(g(x).sum(), x)[0] for g in (compiled(f), f))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# ---- several processes


@contextlib.contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp() -> None:
    layer, values = nn.Linear(4, 4), torch.randn(3, 4)
    layer(values).sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    with group():
        nn.parallel.DistributedDataParallel(compiled(layer))(values).sum().backward()
    torch.testing.assert_close(layer.weight.grad, wanted)


def fsdp() -> None:
    layer, values = nn.Linear(4, 4), torch.randn(3, 4)
    wanted = layer(values).detach()
    with group():
        model = nn.Sequential(compiled(layer))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        found = model(values)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()


def dtensor() -> None:
    values = torch.randn(4, 4)
    with group():
        parts = distribute_tensor(values, init_device_mesh("cpu", (1,)), [Shard(0)])
        found = compiled(lambda d: (d.sin() * 2).sum(0))(parts)
        torch.testing.assert_close(found.full_tensor(), (values.sin() * 2).sum(0))


def collectives() -> None:
    with group():
        same(lambda x: all_reduce(x.sin(), "sum", dist.group.WORLD) + 1, torch.randn(4))


# ---- programs made elsewhere


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin()


def exported() -> None:
    values = torch.randn(3, 4)
    same(torch.export.export(Scaled(), (values,)).module(), values)


def ahead_of_time() -> None:
    values = torch.randn(3, 4)
    program = torch.export.export(Scaled(), (values,))
    with pytest.raises(Exception, match="aot_compile"):
        compiled(program.module(), options={"aot_inductor.output_path": "x"})(values)


def precompiled() -> None:
    """Since torch 2.15, and a prototype."""
    precompile = getattr(torch.compiler, "precompile", None)
    assert (precompile is None) == (torch.__version__ < "2.15")
    if precompile is not None:
        with tempfile.TemporaryDirectory() as folder, pytest.raises(Exception, match="backend"):
            precompile.capture(torch.sin, artifact_path=f"{folder}/a", cache_path=f"{folder}/b",
                               backend="tilewright")  # fmt: skip


def quantised() -> None:
    ops, byte = torch.ops.quantized_decomposed, (-128, 127, torch.int8)

    def f(x: Tensor) -> Tensor:
        return ops.dequantize_per_tensor(ops.quantize_per_tensor(x.relu(), 0.1, 3, *byte),
                                         0.1, 3, *byte)  # fmt: skip

    same(f, torch.randn(6, 8))


def of_numpy() -> None:
    values = np.ones(3, dtype=np.float32)
    found = compiled(lambda a: np.sin(a) * 2)(values)
    assert isinstance(found, np.ndarray) and np.allclose(found, np.sin(values) * 2)


def subclasses() -> None:
    values = TwoTensor(torch.randn(3), torch.randn(3))
    found = compiled(lambda x: x.sin() + 1)(values)
    torch.testing.assert_close([found.a, found.b], [values.a.sin() + 1, values.b.sin() + 1])


# ---- functions that Dynamo takes as they are


def custom_op_with_gradient() -> None:
    @torch.library.custom_op("tilewright_features::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, g: g * 2)
    same_gradient(lambda x: twice(x).sin(), torch.randn(3, requires_grad=True))


def allowed() -> None:
    @torch.compiler.allow_in_graph
    def inner(x: Tensor) -> Tensor:
        return x.sin() + 1

    same(lambda x: inner(x) * 2, torch.randn(3))


def not_strict() -> None:
    @torch._dynamo.nonstrict_trace
    def inner(x: Tensor) -> Tensor:
        return x.sin()

    same(lambda x: inner(x) + 1, torch.randn(3))


# ---- gradients and transforms


def transforms() -> None:
    x = torch.randn(4)
    same(lambda x: torch.func.jvp(torch.sin, (x,), (x,)), x)
    same(torch.func.jacrev(lambda y: y.sin() * y), x)
    same(torch.func.hessian(lambda y: (y.sin() * y).sum()), x)
    same(torch.func.vmap(torch.func.grad(torch.sin)), x)


def functional_call() -> None:
    layer = Scaled()
    given = {"weight": torch.randn(4)}
    same(lambda p, x: torch.func.functional_call(layer, p, (x,)), given, torch.randn(3, 4))


def compiled_autograd() -> None:
    layer, values = Scaled(), torch.randn(3, 4)
    layer(values).sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    how = torch.compile(backend="tilewright")
    with torch._dynamo.compiled_autograd._enable(how):
        layer(values).sum().backward()
    torch.testing.assert_close(layer.weight.grad, wanted)


def kept_by_choice() -> None:
    values, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    keeps = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    same_gradient(lambda x: checkpoint(lambda y: (y @ weight).sin().exp(), x, use_reentrant=False,
                                       context_fn=keeps), values)  # fmt: skip


def kept_elsewhere() -> None:
    with torch.autograd.graph.save_on_cpu():
        same_gradient(lambda x: x.sin().exp(), torch.randn(4, requires_grad=True))


def gradient_inside() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sin().square().sum(), x)[0]

    same(f, torch.randn(4, requires_grad=True))


def clipped() -> None:
    layer = Scaled()
    layer(torch.randn(3, 4)).sum().backward()
    compiled(lambda: nn.utils.clip_grad_norm_(layer.parameters(), 0.1))()
    assert layer.weight.grad is not None and layer.weight.grad.norm() <= 0.1001


# ---- attention, modules


def flexible() -> None:
    same(lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j)),
         torch.randn(1, 2, 16, 8))  # fmt: skip


def copied() -> None:
    module, values = compiled(Scaled()), torch.randn(3, 4)
    torch.testing.assert_close(copy.deepcopy(module)(values), module(values))


def inference_mode() -> None:
    with torch.inference_mode():
        same(Scaled(), torch.randn(3, 4))


# ---- sizes, stances, errors


def unbacked() -> None:
    values = torch.randn(5, 3)
    torch._dynamo.decorators.mark_unbacked(values, 0)
    same(lambda x: (x * 2).sum(0), values)


def recompiles_are_errors() -> None:
    f = compiled(torch.sin, dynamic=False)
    f(torch.randn(3))
    with torch.compiler.set_stance("fail_on_recompile"):
        f(torch.randn(3))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            f(torch.randn(4))


def recordings() -> None:
    values = torch.randn(3)
    torch.compiler.cudagraph_mark_step_begin()
    found = compiled(torch.sin, mode="reduce-overhead")(values)
    torch.testing.assert_close(found, values.sin())


def the_users_line() -> None:
    def broken(x: Tensor) -> Tensor:
        return torch.mm(x, x)

    line = inspect.getsourcelines(broken)[1] + 1
    with pytest.raises(Exception, match=f"{__file__}.*{line}"):
        compiled(broken)(torch.randn(3, 4))
