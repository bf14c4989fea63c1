"""What of torch.compile works here, and how: each feature is a small program.

`docs/features.md` is made from this list (`python -m tests.cpu.features`); `test_features.py` runs
every program, compares it with eager, and checks how it was computed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch.utils.checkpoint import checkpoint

from tests.cpu import features_around as around
from tilewright import metrics

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
NATIVE, ATEN, EAGER, REFUSED = "natively", "through ATen", "in eager", "refused"


@dataclass(frozen=True)
class Feature:
    """`program` is compiled and compared with eager on `args`; one without `args` checks itself."""

    name: str
    how: str
    program: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]] | None = None
    options: Callable[[], dict[str, Any]] = dict
    note: str = ""


def x(*size: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*size or (6, 8)),)


def two(a: tuple[int, ...] = (6, 8), b: tuple[int, ...] = (6, 8)) -> Any:
    return lambda: (torch.randn(*a), torch.randn(*b))


def grad(*size: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*size or (6, 8), requires_grad=True),)


def compiled(f: Any, **how: Any) -> Any:
    return torch.compile(f, backend="tilewright", **how)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@torch.compiler.nested_compile_region
def region(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


def break_in_the_middle(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def closure(n: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x * n + n


def written(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def sliced(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:3] = 0
    return y


def many(x: Tensor) -> dict[str, Any]:
    return {"a": x + 1, "b": [x.sum(), (x, 3)]}


def hooks() -> None:
    layer = nn.Linear(4, 4)
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    compiled(layer)(torch.randn(2, 4))
    assert seen == [1]


def module_state() -> None:
    norm = nn.BatchNorm1d(4)
    twin = copy.deepcopy(norm)
    values = torch.randn(8, 4)
    torch.testing.assert_close(compiled(norm)(values), twin(values))
    torch.testing.assert_close(norm.running_var, twin.running_var)


def state_dicts() -> None:
    layer = nn.Linear(4, 4)
    assert list(compiled(layer).state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


def in_place_compile() -> None:
    layer, values = Layer(), torch.randn(2, 4)
    wanted = layer(values)
    layer.compile(backend="tilewright")
    torch.testing.assert_close(layer(values), wanted)


def optimizer_step() -> None:
    layers = [nn.Linear(4, 4) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    values = torch.randn(3, 4)
    for layer, wrap in zip(layers, (compiled, lambda f: f), strict=True):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        step = wrap(lambda optimizer=optimizer: optimizer.step())
        layer(values).square().sum().backward()
        step()
    torch.testing.assert_close(layers[0].weight, layers[1].weight)


def dynamic_by_itself() -> None:
    f = compiled(lambda x: (x * 2).sum(0))
    for n in (3, 5, 9):
        values = torch.randn(n, 4)
        torch.testing.assert_close(f(values), (values * 2).sum(0))


def marked_dynamic() -> None:
    values = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(values, 0)
    torch.testing.assert_close(compiled(torch.sin)(values), values.sin())


def data_dependent_size() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        f = compiled(lambda x: x.nonzero() * 2, fullgraph=True)
        for values in (torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1])):
            assert torch.equal(f(values), values.nonzero() * 2)


def number_from_tensor() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f = compiled(lambda x: torch.ones(4) * x.sum().item(), fullgraph=True)
        torch.testing.assert_close(f(torch.ones(3)), torch.full((4,), 3.0))


def saved_and_loaded() -> None:
    values = torch.randn(3, 4)
    with torch._dynamo.config.patch(enable_aot_compile=True):  # as it is since torch 2.12
        program = compiled(lambda x: x.sin() + 1, fullgraph=True).aot_compile(((values,), {}))
    data = type(program).serialize(program).serialized_data
    again = torch.compiler.load_compiled_function(io.BytesIO(data))
    torch.testing.assert_close(again(values), values.sin() + 1)


def stances() -> None:
    with torch.compiler.set_stance("force_eager"):
        compiled(torch.sin)(torch.randn(3))


def disabled_part() -> None:
    inner = torch.compiler.disable(lambda x: x * 3)
    found = compiled(lambda x: inner(x) + 1)(torch.ones(3))
    torch.testing.assert_close(found, torch.full((3,), 4.0))


def custom_op() -> None:
    @torch.library.custom_op("tilewright_features::plus_one", mutates_args=())
    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    plus_one.register_fake(torch.empty_like)
    values = torch.randn(3)
    torch.testing.assert_close(compiled(lambda x: plus_one(x) * 2)(values), (values + 1) * 2)


def jagged() -> None:
    values = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)],
                                        layout=torch.jagged)  # fmt: skip
    found = compiled(lambda x: x.sin() * 2)(values)
    torch.testing.assert_close(found.values(), values.values().sin() * 2)


def double_backward() -> None:
    values = torch.randn(3, requires_grad=True)
    out = compiled(lambda x: x.sin().sum())(values)
    (first,) = torch.autograd.grad(out, values, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(first.sum(), values)


def unknown_option() -> None:
    with pytest.raises(Exception, match="aot_compile"):
        compiled(torch.sin, options={"cpp_wrapper": True})(torch.randn(3))


def frozen_weights() -> None:
    weight, values = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    f = compiled(lambda x: x + weight.exp().sum(0), options={"freezing": True})
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(f(values), values + weight.exp().sum(0))
            weight.mul_(2)
    assert metrics.counters["freezing"]["graphs parted"] == 1


def passes_over_graphs() -> None:
    def cosine(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default

    values = torch.randn(5)
    found = compiled(torch.sin, options={"post_grad_custom_pre_pass": cosine})(values)
    torch.testing.assert_close(found, values.cos())


def carried_caches() -> None:
    compiled(lambda x: x.sin() * 3 + 1)(torch.randn(4))
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    assert torch.compiler.load_cache_artifacts(saved[0]) is not None


def sparse_operand() -> None:
    values = torch.randn(3, 3)
    sparse = values.relu().to_sparse()
    torch.testing.assert_close(compiled(lambda s: (s @ values) + 1)(sparse), sparse @ values + 1)


def eagers_numbers() -> None:
    values = torch.randn(6, 8)
    torch.manual_seed(3)
    wanted = F.dropout(values, 0.5)
    torch.manual_seed(3)
    found = compiled(lambda x: F.dropout(x, 0.5), options={"fallback_random": True})(values)
    assert torch.equal(found, wanted)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        factor = x.sin()
    return x * factor


def cast(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.mm(a, b)


def threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    f, values = compiled(lambda x: x.cos() + 1), torch.randn(5)
    f(values)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(f, [values] * 4):
            torch.testing.assert_close(found, values.cos() + 1)


def profiled() -> None:
    f, values = compiled(lambda x: x.cos() + 1), torch.randn(5)
    f(values)
    with torch.profiler.profile() as profile:
        f(values)
    assert any(event.name.startswith("cpp_fused_cos_add") for event in profile.events())


FEATURES: dict[str, list[Feature]] = {
    "Programs": [
        Feature("functions, closures over numbers", NATIVE, closure(3), x()),
        Feature("containers as results", NATIVE, many, x()),
        Feature("named tuples and dataclasses", NATIVE, around.records),
        Feature("compiled functions within compiled ones", NATIVE, around.compiled_within),
        Feature("keyword and default arguments", NATIVE, lambda x, scale=2: x * scale, x()),
        Feature("`fullgraph=True`", NATIVE,
                lambda x: x.sin() + 1, x(), lambda: {"fullgraph": True}),
        Feature("graph breaks", NATIVE, break_in_the_middle, x()),
        Feature("arguments that are written to", NATIVE, written, x()),
        Feature("arguments that share memory", NATIVE, around.shared_memory),
        Feature("`Tensor.set_`", NATIVE, around.other_memory),
        Feature("slices that are written to", NATIVE, sliced, x()),
        Feature("views as results", NATIVE, lambda x: x.t()[1:], x()),
        Feature("tensors without elements", NATIVE, lambda x: x.sin().sum(0), x(0, 3)),
        Feature("strides of any kind", NATIVE, lambda a, b: a.t() + b[:, ::2], two((4, 6), (6, 8))),
        Feature("mixed dtypes", NATIVE, lambda x: x.half() + x.double().sum(), x()),
        Feature("bfloat16", NATIVE, lambda x: (x.bfloat16() * 3).relu(), x()),
        Feature("float8", NATIVE, lambda x: x.to(torch.float8_e4m3fn).float() * 2, x()),
        Feature("`uint16`, `uint32`, `uint64`", NATIVE, around.unsigned),
        Feature("complex numbers", ATEN,
                lambda x: torch.view_as_real(torch.complex(x, x) * 1j), x()),
        Feature("random numbers", NATIVE, lambda x: torch.rand_like(x) * 0, x()),
        Feature("random numbers, eager's with `fallback_random`", ATEN, eagers_numbers),
        Feature("NumPy", NATIVE, around.of_numpy),
        Feature("tensor subclasses", NATIVE, around.subclasses),
        Feature("`torch.export`'s programs", NATIVE, around.exported),
        Feature("quantised programs of pt2e", NATIVE, around.quantised),
    ],
    "Operators": [
        Feature("pointwise, fused", NATIVE, lambda a, b: F.gelu(a) * b.sigmoid() + 1, two()),
        Feature("reductions, softmax, norms", NATIVE,
                lambda x: F.layer_norm(x.softmax(-1), (8,)), x()),
        Feature("scans", NATIVE, lambda x: x.cumsum(-1) + 1, x()),
        Feature("sorting", ATEN, lambda x: x.sort(-1).values, x(),
                note="natively on a card"),
        Feature("gather and scatter", NATIVE,
                lambda x: x.scatter_add(0, torch.zeros(2, 8, dtype=torch.int64), x[:2]), x()),
        Feature("embedding", NATIVE, lambda x: F.embedding(torch.tensor([1, 0, 3]), x), x()),
        Feature("pooling and interpolation", NATIVE,
                lambda x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2), x(1, 2, 8, 8)),
        Feature("matrix products", ATEN, lambda a, b: torch.relu(a @ b), two((6, 8), (8, 5)),
                note="by whoever is fastest with `mode=\"max-autotune\"`"),
        Feature("matrix products, measured", NATIVE, lambda a, b: torch.relu(a @ b),
                two((24, 40), (40, 56)),
                lambda: {"options": {
                    "max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}}),
        Feature("convolutions", ATEN, lambda x, w: F.conv2d(x, w).relu(),
                two((1, 2, 8, 8), (3, 2, 3, 3))),
        Feature("attention", NATIVE,
                lambda q: F.scaled_dot_product_attention(q, q, q), x(1, 2, 8, 4)),
        Feature("linear algebra", ATEN, lambda x: torch.linalg.det(x), x(4, 4)),
        Feature("Fourier transforms", ATEN, lambda x: torch.fft.rfft(x).abs(), x(8)),
        Feature("custom operators", ATEN, custom_op),
        Feature("custom operators with gradients", ATEN, around.custom_op_with_gradient),
        Feature("`flex_attention`", NATIVE, around.flexible),
        Feature("sparse tensors", EAGER, sparse_operand),
        Feature("jagged nested tensors", NATIVE, jagged),
    ],
    "Control flow and regions": [
        Feature("`torch.cond`", NATIVE,
                lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)), x()),
        Feature("`while_loop`", NATIVE,
                lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2),
                                     (torch.tensor(0), x)), x()),
        Feature("`scan`", NATIVE,
                lambda x: scan(lambda c, x: (c + x, c * x), torch.zeros(8), x), x()),
        Feature("`associative_scan`", NATIVE,
                lambda x: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"), x()),
        Feature("`map`", NATIVE, lambda x: mapped(lambda r: r.sin() + 1, x), x()),
        Feature("`nested_compile_region`", NATIVE, lambda x: region(region(x)), x()),
        Feature("the same with gradients", NATIVE, lambda x: region(region(x)), grad()),
        Feature("`torch.compiler.disable`", NATIVE, disabled_part),
        Feature("`torch.compiler.set_stance`", NATIVE, stances),
        Feature("`set_stance(\"fail_on_recompile\")`", NATIVE, around.recompiles_are_errors),
        Feature("`torch.compiler.allow_in_graph`", NATIVE, around.allowed),
        Feature("`nonstrict_trace`", NATIVE, around.not_strict),
    ],
    "Gradients": [
        Feature("forward and backward", NATIVE, lambda x: (x.sin() * x).softmax(-1), grad()),
        Feature("`autograd.Function`", NATIVE, Doubled.apply, grad()),
        Feature("activation checkpointing", NATIVE,
                lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False), grad()),
        Feature("`no_grad` inside", NATIVE, without_gradient, grad()),
        Feature("`torch.func.grad`", NATIVE,
                lambda x: torch.func.grad(lambda y: y.sin().sum())(x), x()),
        Feature("`torch.func.vmap`", NATIVE,
                lambda x: torch.func.vmap(lambda r: r.cumsum(0))(x), x()),
        Feature("gradients of gradients", REFUSED,
                double_backward, note="by AOTAutograd, for every backend"),
        Feature("optimisers", NATIVE, optimizer_step),
        Feature("clipping of gradients", NATIVE, around.clipped),
        Feature("`torch.func`: jvp, jacrev, hessian", NATIVE, around.transforms),
        Feature("forward-mode AD inside", NATIVE, around.forward_mode_inside),
        Feature("forward-mode AD around a compiled function", EAGER, around.forward_mode_around,
                note="the log says so: kernels carry no tangents"),
        Feature("`grad` and `vmap` of a compiled function", EAGER,
                around.transformed_from_outside),
        Feature("`torch.func.functional_call`", NATIVE, around.functional_call),
        Feature("`torch.autograd.grad` inside", NATIVE, around.gradient_inside),
        Feature("compiled autograd", NATIVE, around.compiled_autograd),
        Feature("selective checkpointing", ATEN, around.kept_by_choice,
                note="the products of it"),
        Feature("hooks on tensors", NATIVE, around.hooked_tensors),
        Feature("`GradScaler`", ATEN, around.scaled_gradients, note="the products"),
        Feature("hooks on saved tensors", NATIVE, around.kept_elsewhere),
    ],
    "Sizes": [
        Feature("`dynamic=True`", NATIVE,
                lambda x: (x * 2).sum(0), x(5, 4), lambda: {"dynamic": True}),
        Feature("sizes that change", NATIVE, dynamic_by_itself),
        Feature("`mark_dynamic`", NATIVE, marked_dynamic),
        Feature("`mark_unbacked`", ATEN, around.unbacked, note="the check of the size"),
        Feature("sizes that are data", ATEN, data_dependent_size),
        Feature("numbers read from tensors", NATIVE, number_from_tensor),
    ],
    "Modules": [
        Feature("modules", ATEN, lambda x: nn.functional.linear(x, x), x()),
        Feature("`Module.compile()`", ATEN, in_place_compile),
        Feature("buffers that are updated", NATIVE, module_state),
        Feature("hooks", ATEN, hooks),
        Feature("`state_dict` of a compiled module", NATIVE, state_dicts),
        Feature("`nn.LSTM`, `nn.GRU`", EAGER, around.recurrent),
        Feature("autocast", ATEN, cast, two((6, 8), (8, 5))),
        Feature("`inference_mode`", NATIVE, around.inference_mode),
        Feature("copies of compiled modules", NATIVE, around.copied),
    ],
    "Several processes": [
        Feature("DDP of a compiled module", ATEN, around.ddp, note="its products"),
        Feature("FSDP2 (`fully_shard`) of compiled modules", ATEN, around.fsdp,
                note="their products"),
        Feature("DTensor", NATIVE, around.dtensor),
        Feature("functional collectives", ATEN, around.collectives),
    ],
    "Around it": [
        Feature("`mode=\"max-autotune\"`", NATIVE, lambda x: x.sin() + 1, x(),
                lambda: {"mode": "max-autotune"}),
        Feature("`mode=\"reduce-overhead\"`", NATIVE, around.recordings,
                note="CUDA graphs on a card, nothing on a CPU"),
        Feature("`aot_compile`, saved and loaded", NATIVE, saved_and_loaded),
        Feature("options of the reference's C++ programs", REFUSED, unknown_option,
                note="`aot_compile` saves programs for Python"),
        Feature("AOTInductor's packages", REFUSED, around.ahead_of_time,
                note="the same"),
        Feature("`torch.compiler.precompile`", REFUSED, around.precompiled,
                note="by torch, for every backend but its own"),
        Feature("errors with the user's line", NATIVE, around.the_users_line),
        Feature("`freezing`", NATIVE, frozen_weights,
                note="what is made of weights alone is made once, until they change"),
        Feature("passes of your own over the graph", NATIVE, passes_over_graphs,
                note="before gradients, joint, after; [options](config.md)"),
        Feature("`save_cache_artifacts`", NATIVE, carried_caches),
        Feature("calls from several threads", NATIVE, threads),
        Feature("`torch.profiler`", NATIVE, profiled, note="kernels have their names"),
    ],
}  # fmt: skip


def page() -> str:
    lines = ["# Features of torch.compile", "",
             ("Made by `python -m tests.cpu.features`; `tests/cpu/test_features.py` runs each line "
             "on a CPU and compares it with eager."), "",
             ("*Natively*: every operator of the program in it is a loop or a kernel of ours. "
             "*Through ATen*: works, and what the line names is computed by ATen. "
             "*In eager*: Dynamo leaves it alone, or the line says why. "
             "*Refused*: an error that says why.")]  # fmt: skip
    for section, features in FEATURES.items():
        lines += ["", f"## {section}", "", "| feature | works | |", "|---|---|---|"]
        lines += [f"| {f.name} | {f.how} | {f.note} |" for f in features]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
