"""What must hold on a card, as plain functions: each compares with eager on fresh random inputs.

Their twins without a card are in `tests/compile`: the same programs in Triton's interpreter, the
same host code with a driver that only remembers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.ours import ours
from tilewright import config, metrics
from tilewright.runtime import launch

CASES: dict[str, Callable[[], None]] = {}
ALONE: set[str] = set()  # those that others beside them would make fail
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def case(check: Callable[[], None]) -> Callable[[], None]:
    CASES[check.__name__] = check
    return check


def alone(check: Callable[[], None]) -> Callable[[], None]:
    """A case that says how long something takes."""
    ALONE.add(check.__name__)
    return case(check)


def run(name: str) -> None:
    torch._dynamo.reset()
    metrics.reset()
    torch.manual_seed(0)
    with ours():
        CASES[name]()
    torch.cuda.synchronize()


def copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value.detach()).requires_grad_(value.requires_grad)


def check(fn: Callable[..., Any], *args: Any, calls: int = 1, tolerance: Any = None,
          native: bool = True, **options: Any) -> None:  # fmt: skip
    """Outputs, arguments afterwards and gradients equal eager's, at every call."""
    compiled = torch.compile(fn, backend="tilewright", **options)
    for _ in range(calls):
        results: list[Any] = []
        for call in (fn, compiled):
            mine = tree_map(copy, args)
            output = call(*mine)
            outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            wanted = [t for t in tree_leaves(mine) if isinstance(t, Tensor) and t.requires_grad]
            grads = None
            if outputs and wanted:
                ones = [torch.ones_like(t) for t in outputs]
                grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
            results.append((output, [a for a in mine if isinstance(a, Tensor)], grads))
        same(results[1], results[0], tolerance)
    if native:
        assert metrics.generated_kernel_count > 0, "no kernel of ours ran"


def same(actual: Any, expected: Any, tolerance: Any = None) -> None:
    for a, e in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(e, Tensor):
            assert a.device == e.device
            torch.testing.assert_close(a, e, equal_nan=True, check_stride=True, **tolerance or {})
        else:
            assert a == e


def cuda(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(grad)


# ---- kernels


@case
def pointwise_is_exact_in_every_type() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return x * 2 + y, x - y * 0.5, torch.where(x > y, x, -y), x.relu(), (x * y).abs().sqrt()

    for dtype in (*FLOATS, torch.float64):
        torch._dynamo.reset()
        check(f, cuda(33, 100, dtype=dtype), cuda(100, dtype=dtype),
              tolerance={"rtol": 0, "atol": 0})  # fmt: skip


@case
def divisors_in_common() -> None:
    """As by a division, but for the last bit of what is nearly too small for a number."""
    special = (0.0, -0.0, 1.0, 3.0, -7.0, 1e-45, 1e-39, 1e-30, 3e38, float("inf"), float("nan"))
    above = torch.cat([torch.tensor(special, device="cuda"), cuda(5000)])
    rows = above.expand(5011, -1).contiguous()
    check(lambda x, row: x / row, rows, above[:, None], tolerance={"rtol": 1.2e-7, "atol": 2e-45})


@case
def short_rows_of_odd_lengths() -> None:
    def f(x: Tensor) -> Any:
        return torch.softmax(x, -1), x.float().sum(-1), x.argmax(-1), F.layer_norm(x, x.shape[-1:])

    for rows, length in ((131075, 33), (131075, 71), (70001, 127), (30003, 249), (9001, 1001)):
        for dtype in (torch.bfloat16, torch.float16):
            torch._dynamo.reset()
            check(f, cuda(rows, length, dtype=dtype))


@case
def integers_and_booleans() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        return x + y, x * y, x // 3, x % 5, x & y, x > y, (x > 0).sum(), x.sum(), x.max()

    for dtype in (torch.int64, torch.int32, torch.uint8):
        torch._dynamo.reset()
        check(f, *(torch.randint(0, 100, (70, 33), device="cuda").to(dtype) for _ in range(2)))


@case
def functions() -> None:
    def f(x: Tensor) -> Any:
        return x.exp(), x.sin(), x.tanh(), torch.sigmoid(x), F.gelu(x), F.silu(x), x.erf(), \
            x.abs().log1p(), torch.rsqrt(x.abs() + 1), x.abs().pow(1.7)  # fmt: skip

    check(f, cuda(1000))
    check(f, cuda(1000, dtype=torch.bfloat16))


@case
def reductions() -> None:
    def f(x: Tensor) -> Any:
        return x.sum(-1), x.amax(0), x.mean(), x.var(-1), x.argmax(-1), x.prod(0), x.argmin(0), \
            x.any(1), x.sum()  # fmt: skip

    for shape in ((257, 1000), (4, 70000), (70000, 3), (1, 1)):
        torch._dynamo.reset()
        check(f, cuda(*shape) * 0.01 + 1, tolerance={"rtol": 1e-4, "atol": 1e-4})


@case
def programs_share_a_huge_row() -> None:
    """RD-9, RD-10: in one launch, again and again, recorded too."""
    options = {"triton.cooperative_reductions": True}
    # all in one program, whose kernels are compiled at the same time
    rows = [cuda(3 * 10**6 + 1, dtype=dtype) for dtype in (*FLOATS, torch.float64)]
    check(lambda *rows: [torch.softmax(x.float(), 0) for x in rows], *rows, calls=3,
          options=options)  # fmt: skip
    assert metrics.generated_kernel_count == len(rows)

    def f(*rows: Tensor) -> Any:
        return [(x.float().var(), x.argmax(), x.amin(), (x > 3).any()) for x in rows]

    fn = torch.compile(f, backend="tilewright", options=options)
    for _ in range(3):
        for x, (variance, *exact) in zip(rows, fn(*rows), strict=True):
            torch.testing.assert_close(variance, x.float().var(), rtol=1e-4, atol=1e-4)
            same(exact, [x.argmax(), x.amin(), (x > 3).any()], {"rtol": 0, "atol": 0})
    check(lambda x: torch.softmax(x, 1), cuda(4, 1 << 21), calls=3,
          options={**options, "triton.cudagraphs": True})  # fmt: skip


@case
def rows_are_held_or_walked_as_measured() -> None:
    """RD-11: both forms of a reduction are measured, and the faster one is kept."""
    x = cuda(4096, 6000)
    check(lambda x: torch.softmax(x, 1), x, options={"max_autotune_pointwise": True})
    known = metrics.counters["tune"]
    assert known["kernels measured"] + known["choices found"] == 1


@case
def softmaxes_and_norms_train() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return torch.softmax(F.layer_norm(x, x.shape[-1:], w, b), -1).square().sum(0)

    for dtype, size in ((torch.float32, 300), (torch.bfloat16, 4096), (torch.float32, 40000)):
        torch._dynamo.reset()
        loose = {"rtol": 1e-3, "atol": 1e-4}
        if dtype != torch.float32:
            loose = {"rtol": 2e-2, "atol": 2e-2}
        check(f, cuda(65, size, dtype=dtype, grad=True), cuda(size, dtype=dtype, grad=True),
              cuda(size, dtype=dtype, grad=True), tolerance=loose)  # fmt: skip


@case
def cross_entropy_trains() -> None:
    def f(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t)

    check(f, cuda(64, 5001, grad=True), torch.randint(0, 5001, (64,), device="cuda"))


@case
def batch_norm_in_inference_says_what_it_used() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        return torch._native_batch_norm_legit(x, w, b, mean, var, False, 0.1, 1e-5)

    check(f, cuda(3, 5, 4), cuda(5), cuda(5), cuda(5), cuda(5).abs())


@case
def layouts() -> None:
    def f(x: Tensor) -> Any:
        return (x.permute(2, 0, 1).contiguous(), x.transpose(0, 1) + 1, x.flip(0),
                F.pad(x, (1, 2)), torch.cat([x, x * 2], 1), x[:, ::2] * 3,
                x.reshape(-1)[5:50].clone())  # fmt: skip

    check(f, cuda(37, 50, 64))
    check(f, cuda(64, 50, 37).permute(2, 1, 0))


@case
def gathers_and_scatters() -> None:
    def f(x: Tensor, i: Tensor, y: Tensor) -> Any:
        return (x[i], x.index_select(0, i), torch.zeros_like(x).index_add(0, i, y),
                x.gather(0, i[:, None].expand(-1, x.shape[1])), F.embedding(i, x),
                x.index_put((i,), y, accumulate=True))  # fmt: skip

    i = torch.randint(0, 40, (90,), device="cuda")
    check(f, cuda(40, 30), i, cuda(90, 30), tolerance={"rtol": 1e-4, "atol": 1e-4})


@case
def scans() -> None:
    check(lambda x: (x.cumsum(-1), x.cumsum(0)), cuda(70, 1000),
          tolerance={"rtol": 1e-3, "atol": 1e-3})  # fmt: skip


@case
def rows_in_order() -> None:
    """Equal elements keep their order; the first few may be any of equal ones."""

    def f(x: Tensor) -> Any:
        values, places = x.topk(3)
        return x.sort(dim=-1, stable=True), x.sort(dim=-1, stable=True, descending=True), values, (
            x.gather(-1, places))  # fmt: skip

    for dtype in FLOATS:
        for length in (64, 333, 512):
            check(f, (cuda(301, length) * 4).round().to(dtype))


@case
def complex_numbers_between_pairs() -> None:
    def f(x: Tensor, by: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(numbers * by).flatten(-2).to(x.dtype)

    angle = cuda(33, 1, 64)
    check(f, cuda(3, 33, 5, 128, dtype=torch.bfloat16, grad=True),
          torch.polar(torch.ones_like(angle), angle))  # fmt: skip


@case
def rows_added_to_rows() -> None:
    """So many that they are gathered instead."""

    def f(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
        return x.index_add(0, index, y)

    index = torch.cat([torch.randperm(16384, device="cuda") for _ in range(2)])
    check(f, cuda(16384, 2048), index, cuda(32768, 2048))


@case
def batchnorm_and_convolution_train() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).cuda()
    _trains(model, cuda(4, 3, 20, 20))


@case
def batchnorm_of_rows_that_programs_share_trains() -> None:
    """All of them read the running statistics, one of them changes these: again and again."""
    for _ in range(3):
        _trains(nn.BatchNorm2d(256).cuda(), cuda(32, 256, 64, 64))


def _trains(model: nn.Module, x: Tensor) -> None:
    """Results, gradients and buffers after a step, compiled and not."""
    compiled = torch.compile(model, backend="tilewright")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    results: list[Any] = []
    for call in (model, compiled):
        model.load_state_dict(state)
        model.zero_grad()
        out = call(x)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters()),
                        *(b.clone() for b in model.buffers())])  # fmt: skip
    same(results[1], results[0], {"rtol": 1e-3, "atol": 1e-3})


# ---- the host side


@case
def dynamic_sizes_compile_once() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x * 2 + y, -1).sum(0)

    compiled = torch.compile(f, backend="tilewright", dynamic=True)
    for rows, columns in ((4, 8), (5, 33), (1000, 3), (64, 4096), (2, 100000)):
        x, y = cuda(rows, columns), cuda(columns)
        same(compiled(x, y), f(x, y), {"rtol": 1e-4, "atol": 1e-5})
    assert metrics.cache_misses + metrics.cache_hits == 1


@case
def arguments_are_written_to() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y).add_(1)
        return x.sum(0)

    check(f, cuda(70, 90), cuda(70, 90), tolerance={"rtol": 1e-4, "atol": 1e-4})


@case
def views_that_start_inside_a_tensor() -> None:
    def f(x: Tensor) -> Tensor:
        return x * 2 + 1

    compiled = torch.compile(f, backend="tilewright", dynamic=False)
    x = cuda(4097)
    for view in (x[:4096], x[1:], x[:4096]):
        same(compiled(view), f(view))


@case
def numbers_in_cpu_tensors() -> None:
    def f(x: Tensor, by: Tensor, k: Tensor) -> Tensor:
        return x * by + k

    check(f, cuda(100), torch.tensor(2.5), torch.tensor(3))
    check(f, cuda(100), torch.tensor(-1.5, dtype=torch.float64), torch.tensor(2**40))


@case
def two_devices_in_one_graph() -> None:
    def f(x: Tensor, y: Tensor) -> Any:
        z = y.sin() + 1
        return x * 2 + z.to("cuda"), z.sum(), x.cpu() + z

    check(f, cuda(50), torch.randn(50))


@case
def empty_tensors() -> None:
    check(lambda x: (x.exp() + 1, x.sum(0)), cuda(0, 7), native=False)


@case
def products_of_few_rows_train() -> None:
    """An expert that got no token, one, or a few: libraries refuse a row with the wrong stride."""

    def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down

    weights = [cuda(96, 64, grad=True) for _ in range(3)]
    for tokens in (0, 1, 2, 17):
        check(expert, cuda(tokens, 64, grad=True), *weights, native=False, dynamic=False,
              tolerance={"rtol": 1e-4, "atol": 1e-4})  # fmt: skip


@case
def kernels_that_do_not_fit() -> None:
    """The driver refuses to load one that asks for too much shared memory, and to launch one with
    too many threads: each runs with less, also where a row has to be whole."""
    load = launch.load
    for wrong in ({"shared": 1 << 20}, {"num_warps": 64}):
        refused: list[str] = []

        def greedy(source: Any, built: Any, device: int, wrong: Any = wrong,
                   refused: list[str] = refused) -> Any:  # fmt: skip
            if source.name in refused:
                return load(source, built, device)
            refused.append(source.name)
            binary = replace(built.binary, key=f"{built.binary.key} {wrong}", **wrong)
            return load(source, replace(built, binary=binary), device)

        metrics.reset()
        torch._dynamo.reset()
        with mock.patch.object(launch, "load", greedy), config.patch(fx_graph_cache=False):
            check(lambda x: torch.softmax(x * 2, -1), cuda(300, 7000))
            check(lambda x: x.exp() + 1, cuda(300, 700))
        made = metrics.counters["triton"]["kernels made smaller at their launch"]
        assert made == len(refused) > 1, (made, refused)


@case
def more_than_two_billion_elements() -> None:
    x = torch.ones(2**31 + 17, dtype=torch.int8, device="cuda")
    x[-1] = 5
    y = torch.compile(lambda x: x * 2 + 1, backend="tilewright")(x)
    assert int(y[-1]) == 11 and int(y[0]) == 3 and bool((y[2**31 - 3 : 2**31 + 10] == 3).all())


@case
def columns_beyond_32_bits() -> None:
    x = torch.empty(2**21 + 3, 1025, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)
    compiled = torch.compile(lambda x: x.sum(0), backend="tilewright")
    same(compiled(x), x.sum(0), {"rtol": 2e-2, "atol": 4.0})


@case
def places_beyond_32_bits() -> None:
    x = torch.zeros(2**31 + 77, dtype=torch.int8, device="cuda")
    x[-5:] = 3
    compiled = torch.compile(lambda x: x.argmax(), backend="tilewright")
    assert int(compiled(x)) == 2**31 + 72


@case
def streams() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.exp() + 1).sum(-1)

    compiled = torch.compile(f, backend="tilewright")
    x = cuda(2000, 2000)
    compiled(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        z = compiled(y)
    side.synchronize()
    same(z, f(x * 2))


@case
def threads() -> None:
    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x

    compiled = torch.compile(f, backend="tilewright")
    x = cuda(100)
    compiled(x)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            compiled(x)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed, failed


@case
def random_numbers() -> None:
    def f(x: Tensor) -> Any:
        return F.dropout(x, 0.25), torch.rand_like(x), torch.randn_like(x)

    compiled = torch.compile(f, backend="tilewright")
    x = torch.ones(1 << 20, device="cuda")
    torch.manual_seed(3)
    first = compiled(x)
    second = compiled(x)
    torch.manual_seed(3)
    again = compiled(x)
    same(again, first)
    assert not torch.equal(first[1], second[1])
    dropped, uniform, normal = first
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.01
    assert abs(float(uniform.mean()) - 0.5) < 0.01 and float(uniform.max()) < 1
    assert abs(float(normal.std()) - 1) < 0.01 and abs(float(normal.mean())) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([uniform, normal]))[0, 1])) < 0.01


# ---- CUDA graphs


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8)).cuda()


@case
def replayed_inference() -> None:
    model = _mlp()
    compiled = torch.compile(model, backend="tilewright", mode="reduce-overhead")
    with torch.no_grad():
        held = []
        for _ in range(8):
            x = cuda(32, 64)
            held.append((compiled(x), model(x)))
        for got, want in held:
            same(got, want, {"rtol": 1e-4, "atol": 1e-4})
    assert metrics.counters["cudagraphs"]["recorded"] >= 1, metrics.counters["cudagraphs"]


@case
def replayed_training() -> None:
    model = _mlp()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    data = [(cuda(32, 64), cuda(32, 8)) for _ in range(12)]
    losses: list[list[Tensor]] = []
    for call in (model, torch.compile(model, backend="tilewright", mode="reduce-overhead")):
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        mine: list[Tensor] = []
        for x, y in data:
            optimizer.zero_grad(set_to_none=True)
            loss = F.mse_loss(call(x), y)
            loss.backward()
            optimizer.step()
            mine.append(loss.detach())
        losses.append(mine)
    same(losses[1], losses[0], {"rtol": 1e-4, "atol": 1e-4})
    assert metrics.counters["cudagraphs"]["recorded"] >= 2, metrics.counters["cudagraphs"]


@case
def replayed_random_numbers_differ() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="tilewright",
                             mode="reduce-overhead")  # fmt: skip
    x = torch.ones(1000, device="cuda")
    seen = [compiled(x).clone() for _ in range(5)]
    assert all(not torch.equal(a, b) for k, a in enumerate(seen) for b in seen[:k])
    torch.manual_seed(5)
    a = compiled(x).clone()
    torch.manual_seed(5)
    assert torch.equal(compiled(x), a)


@case
def replayed_mutation() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * 2

    check(f, cuda(50, 60), cuda(50, 60), calls=5, mode="reduce-overhead")


@case
def replayed_dynamic_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    compiled = torch.compile(f, backend="tilewright", mode="reduce-overhead", dynamic=True)
    for _ in range(4):
        for rows in (3, 5, 9):
            x = cuda(rows, 100)
            same(compiled(x), f(x))
    assert metrics.counters["cudagraphs"]["recorded"] == 3, metrics.counters["cudagraphs"]


@case
def replayed_results_are_not_worked_in() -> None:
    w = cuda(1024, 1024) / 32

    def steps(x: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).sum(-1)

    def result(x: Tensor) -> Tensor:
        return x * 2 + 1

    works, gives = (torch.compile(f, backend="tilewright", mode="reduce-overhead")
                    for f in (steps, result))  # fmt: skip
    x = cuda(1024, 1024)
    for f in (works, gives):
        for _ in range(3):
            f(x)
    held = gives(x)
    works(x)
    same(held, result(x))


@case
def replayed_in_streams_at_once() -> None:
    w = cuda(512, 512) / 22

    def f(x: Tensor) -> Tensor:
        return (F.gelu(x @ w) @ w).softmax(-1)

    compiled = torch.compile(f, backend="tilewright", mode="reduce-overhead")
    streams = [torch.cuda.Stream() for _ in range(3)]
    given = [cuda(512, 512) for _ in streams]
    want = [f(x) for x in given]
    torch.cuda.synchronize()
    for _ in range(20):
        got: list[Tensor] = []
        for stream, x in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                got.append(compiled(x))
        torch.cuda.synchronize()
        same(got, want, {"rtol": 1e-3, "atol": 1e-3})


@case
def not_recorded_with_a_reason() -> None:
    check(lambda x: x * x.sum().item(), cuda(20), calls=3, mode="reduce-overhead",
          tolerance={"rtol": 1e-4, "atol": 1e-4})  # fmt: skip


# ---- tuning, models


@case
def measured_configurations_are_kept() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x + y, -1)

    x, y = cuda(512, 2000), cuda(512, 2000)
    check(f, x, y, options={"max_autotune_pointwise": True})
    assert metrics.counters["tune"]["kernels measured"] >= 1
    torch._dynamo.reset()
    metrics.reset()
    check(f, x, y, options={"max_autotune_pointwise": True, "fx_graph_cache": False})
    assert metrics.counters["tune"]["kernels measured"] == 0
    assert metrics.counters["tune"]["choices found"] >= 1


@case
def a_transformer_block_trains() -> None:
    from bench.gpu import Block

    model = Block(64, 4).cuda()
    compiled = torch.compile(model, backend="tilewright")
    x = cuda(2, 40, 64)
    results: list[Any] = []
    for call in (model, compiled):
        model.zero_grad()
        out = call(x)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
    same(results[1], results[0], {"rtol": 1e-3, "atol": 1e-4})


@case
def an_optimizer_step() -> None:
    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.addcdiv_(m, v.sqrt() + 1e-8, value=-1e-3)

    p, g, m = cuda(1000, 70), cuda(1000, 70), cuda(1000, 70)
    check(step, p, g, m, cuda(1000, 70).abs())
