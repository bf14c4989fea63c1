"""Programs of `features.py` that need more than a function and its arguments: processes, modules,
custom operators, what is set around a compiled function."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
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

from tilewright import metrics


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


# ---- forward mode, transforms and hooks


def tangent(f: Callable[[Tensor], Tensor], x: Tensor, t: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent
    assert found is not None
    return found


def forward_mode_inside() -> None:
    same(lambda x, t: tangent(torch.sin, x, t), torch.randn(3), torch.randn(3))


def forward_mode_around() -> None:
    x, t = torch.randn(3), torch.randn(3)
    f = compiled(lambda x: x.sin() * 2)
    f(x)  # compiled without tangents
    torch.testing.assert_close(tangent(f, x, t), x.cos() * 2 * t)
    torch.testing.assert_close(f(x), x.sin() * 2)
    assert metrics.counters["capture"]["left to eager: within forward_ad.dual_level"] == 1


def transformed_from_outside() -> None:
    x = torch.randn(3, 4)
    f = compiled(lambda x: x.sin().sum())
    torch.testing.assert_close(torch.func.grad(f)(x), x.cos())
    torch.testing.assert_close(torch.vmap(f)(x), x.sin().sum(1))


def hooked_tensors() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda g: g * 3)
        return y

    same_gradient(f, torch.randn(4, requires_grad=True))


def scaled_gradients() -> None:
    def trained(wrap: Callable[[Any], Any]) -> Tensor:
        layer = nn.Linear(4, 4)
        nn.init.ones_(layer.weight)
        optimizer, scaler = torch.optim.SGD(layer.parameters(), 0.1), torch.amp.GradScaler("cpu")
        loss = wrap(lambda x: layer(x).square().mean() - layer.bias.sum())
        scaler.scale(loss(torch.ones(2, 4))).backward()
        scaler.step(optimizer)
        scaler.update()
        return layer.weight.detach()

    torch.manual_seed(0)
    wanted = trained(lambda f: f)
    torch.manual_seed(0)
    torch.testing.assert_close(trained(compiled), wanted)


# ---- programs


@dataclasses.dataclass
class Record:
    values: Tensor
    factor: int


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


def records() -> None:
    def f(given: Record) -> tuple[Pair, Record]:
        scaled = given.values * given.factor
        return Pair(scaled.sin(), [scaled.cos()]), Record(scaled, given.factor + 1)

    given = Record(torch.randn(3), 2)
    (pair, made), (other, wanted) = compiled(f)(given), f(given)
    assert type(pair) is Pair and made.factor == 3
    torch.testing.assert_close((pair, made.values), (other, wanted.values))


def shared_memory() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    memory, again = torch.zeros(6), torch.zeros(6)
    torch.testing.assert_close(compiled(f)(memory[:4], memory[2:]), f(again[:4], again[2:]))
    torch.testing.assert_close(memory, again)


def other_memory() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.set_(y)  # pyright: ignore[reportArgumentType]  # its stub knows storages only
        return x + 1

    x, y = torch.zeros(3), torch.ones(3)
    torch.testing.assert_close(compiled(f)(x, y), torch.full((3,), 2.0))
    assert x.data_ptr() == y.data_ptr()


def unsigned() -> None:
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        torch._dynamo.reset()
        x = torch.tensor([0, 1, 40000, 65535]).to(dtype)
        found = compiled(lambda x: (x.long() * 2, (x.long() + 1).to(x.dtype), x.float()))(x)
        torch.testing.assert_close(found[0], x.long() * 2)
        torch.testing.assert_close(found[1].long(), (x.long() + 1).to(dtype).long())
        torch.testing.assert_close(found[2], x.float())


def compiled_within() -> None:
    inner = compiled(lambda x: x.sin() + 1)
    same(lambda x: inner(x) * 2, torch.randn(3))


def recurrent() -> None:
    layer, x = nn.LSTM(4, 8, batch_first=True), torch.randn(2, 5, 4)
    torch.testing.assert_close(compiled(layer)(x), layer(x))
