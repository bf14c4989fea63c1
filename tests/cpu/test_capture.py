"""AOTAutograd runs once: a later process, or a later dynamo, starts from what it came to."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from tilewright import capture, config, metrics
from tilewright.host import artifact
from tilewright.testing import fresh_cache

Make = Callable[[], tuple[Any, ...]]


def traced_and_restored() -> tuple[int, int]:
    """How often AOTAutograd ran, and how often what it had made was taken up again."""
    return counters["aot_autograd"]["total"], metrics.counters["capture"]["hit"]


def reasons() -> list[str]:
    return [why for why in metrics.counters["capture"] if why.startswith("not kept")]


def start_again() -> None:
    torch._dynamo.reset()
    metrics.reset()
    counters.clear()


def everything(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Results, gradients and what became of the inputs."""
    outs = fn(*args)
    outs = list(outs) if isinstance(outs, (tuple, list)) else [outs]
    wrt = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    wanted = [o for o in outs if isinstance(o, Tensor) and o.requires_grad]
    grads = torch.autograd.grad(wanted, wrt, [o.detach().cos() for o in wanted]) if wanted else ()
    return [*outs, *grads, *args]


def check_twice(fn: Callable[..., Any], make: Make, **how: Any) -> None:
    """The second compilation traces nothing and computes the same, call after call."""
    with fresh_cache():
        for expected in ((1, 0), (0, 1)):
            start_again()
            compiled = torch.compile(fn, backend="tilewright", **how)
            for seed in (1, 2):
                torch.manual_seed(seed)
                wanted = everything(fn, make())
                torch.manual_seed(seed)
                torch.testing.assert_close(everything(compiled, make()), wanted)
            assert traced_and_restored() == expected, reasons()


def leaf(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def test_inference() -> None:
    check_twice(lambda x, y: (x.sin() * y, x.sum(0)), lambda: (torch.randn(5, 7), torch.randn(7)))


def block(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.gelu(F.linear(x, w, b))
    return F.layer_norm(y, (6,)), y.detach().sum()


def test_training() -> None:
    check_twice(block, lambda: (leaf(5, 4), leaf(6, 4), leaf(6)))


def test_outputs_that_are_views() -> None:
    def views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = x * 2
        return z, z.t(), y.view(-1), y, x[1:]

    check_twice(views, lambda: (leaf(3, 4), torch.randn(2, 6)))
    with fresh_cache():
        for _ in range(2):
            start_again()
            y = torch.randn(2, 6)
            out = torch.compile(views, backend="tilewright")(leaf(3, 4), y)
            assert out[2].data_ptr() == y.data_ptr() and out[3] is y
            assert out[1]._base is not None and out[1]._base.data_ptr() == out[0].data_ptr()
            out[0].sum().backward()  # a capture with gradients is kept once it has a backward
        assert metrics.counters["capture"]["hit"] == 1


def test_inputs_that_are_changed() -> None:
    def changes(x: Tensor, total: Tensor, w: Tensor) -> Tensor:
        total.add_(x.detach().sum(0))
        x.mul_(2)
        return (x * w).relu()

    check_twice(changes, lambda: (torch.randn(3, 4), torch.zeros(4), leaf(4)))


def test_running_statistics() -> None:
    def norm(x: Tensor, mean: Tensor, var: Tensor, w: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, w, training=True)

    check_twice(norm, lambda: (leaf(4, 3, 5), torch.zeros(3), torch.ones(3), leaf(3)))


def test_dropout_draws_anew_each_call() -> None:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    with fresh_cache():
        for _ in range(2):
            start_again()
            compiled = torch.compile(dropped, backend="tilewright")
            x = torch.ones(400)
            first, second = compiled(x), compiled(x)
            assert not torch.equal(first, second)
            torch.manual_seed(3)
            third = compiled(x)
            torch.manual_seed(3)
            torch.testing.assert_close(compiled(x), third)
        assert traced_and_restored() == (0, 1)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_symbolic_sizes(with_gradients: bool) -> None:
    def summed(x: Tensor, y: Tensor) -> Tensor:
        return (x.softmax(-1) * y).sum(0) / x.shape[0]

    with fresh_cache():
        for expected in ((1, 0), (0, 1)):
            start_again()
            compiled = torch.compile(summed, backend="tilewright", dynamic=True)
            for n in (5, 9, 14):
                x = torch.randn(n, 6, requires_grad=with_gradients)
                y = torch.randn(n, 6)
                torch.testing.assert_close(everything(compiled, (x, y)), everything(summed, (x, y)))
            assert traced_and_restored() == expected, reasons()


def test_guards_of_tracing_are_guarded_again() -> None:
    """Eager adds rows of equal length or spreads a row of one: which it is, is settled in the
    backward's trace, and the restored program must not be used for the other."""

    def spread(x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(-1)[: y.shape[0]] * y

    with fresh_cache():
        for _ in range(2):
            start_again()
            compiled = torch.compile(spread, backend="tilewright", dynamic=True)
            for n, m in ((6, 4), (6, 6), (8, 5), (3, 2)):
                x, y = torch.randn(n, 1, requires_grad=True), torch.randn(m)
                torch.testing.assert_close(everything(compiled, (x, y)), everything(spread, (x, y)))


def test_gradients_asked_for_or_not_are_two_captures() -> None:
    with fresh_cache():
        for args in ((leaf(3, 4),), (torch.randn(3, 4),)):
            start_again()
            torch.compile(torch.sin, backend="tilewright")(*args)
            assert traced_and_restored() == (1, 0)


def test_autocast_is_part_of_the_key() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with fresh_cache():
        for enabled in (False, True, True):
            start_again()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = torch.compile(product, backend="tilewright")(x, w)
                assert out.dtype == (torch.bfloat16 if enabled else torch.float32)
        assert traced_and_restored() == (0, 1)


@contextlib.contextmanager
def turned(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def test_what_tracing_asks_of_the_process_is_in_the_key() -> None:
    """Each setting alone, and none is left changed."""
    settings: Any = torch.utils.deterministic
    cuda = torch.backends.cuda
    fills = functools.partial(setattr, settings, "fill_uninitialized_memory")
    apart = [
        torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16), torch.backends.mkldnn.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
        turned(torch.set_default_dtype, torch.float64, torch.float32),
        turned(torch.use_deterministic_algorithms, True, False),
        turned(fills, not settings.fill_uninitialized_memory, settings.fill_uninitialized_memory),
        *(turned(f, False, True) for f in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp,
                                           cuda.enable_math_sdp, cuda.enable_cudnn_sdp)),
        functorch_config.patch(max_dist_from_bw=7),
    ]  # fmt: skip

    def name() -> str:
        return artifact.named("captured", "text", capture._surroundings())

    found = [name()]
    for setting in apart:
        with setting:
            found.append(name())
    assert len(set(found)) == 1 + len(apart)
    assert name() == found[0]


def test_functions_torch_made_by_one_maker_are_told_apart() -> None:
    with fresh_cache():
        for pool in (F.max_pool1d, F.max_pool2d):
            start_again()
            x = torch.randn(1, 2, 8, 8) if pool is F.max_pool2d else torch.randn(1, 2, 8)
            out = torch.compile(lambda x, pool=pool: pool(x, 2), backend="tilewright")(x)
            torch.testing.assert_close(out, pool(x, 2))
            assert traced_and_restored() == (1, 0)


@torch.compiler.allow_in_graph
def _of_the_user(x: Tensor) -> Tensor:
    return x + 1


def test_what_may_change_between_processes_is_not_kept() -> None:
    def by_name(x: Tensor) -> Tensor:
        return _of_the_user(x)

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with fresh_cache():
        for fn in (by_name, branches):
            for _ in range(2):
                start_again()
                x = torch.randn(3, 4)
                torch.testing.assert_close(torch.compile(fn, backend="tilewright")(x), fn(x))
                assert traced_and_restored() == (1, 0)
                assert len(reasons()) == 1


def test_inputs_that_share_changed_memory_are_captured_each_time() -> None:
    def changes(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    with fresh_cache():
        for _ in range(2):
            start_again()
            base = torch.randn(8)
            out = torch.compile(changes, backend="tilewright")(base[:6], base[2:])
            torch.testing.assert_close(out, base[2:] * 2)
            assert traced_and_restored() == (1, 0)
            assert len(reasons()) == 1


def test_the_option_that_keeps_graphs_covers_captures() -> None:
    with fresh_cache(), config.patch(fx_graph_cache=False):
        for _ in range(2):
            start_again()
            torch.compile(torch.sin, backend="tilewright")(torch.randn(4))
            assert traced_and_restored() == (1, 0)


def test_a_kept_graph_that_is_gone_is_captured_again() -> None:
    with fresh_cache() as folder:
        for expected in ((1, 0), (1, 0)):
            start_again()
            x = torch.randn(4)
            torch.testing.assert_close(torch.compile(torch.sin, backend="tilewright")(x), x.sin())
            assert traced_and_restored() == expected
            for file in folder.rglob("*.graph"):
                file.unlink()


@pytest.mark.parametrize("first_keeps", [False, True])
def test_a_restored_backward_may_run_twice(first_keeps: bool) -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        return ((x * w).exp().sin() * (x @ w.t()).sum()).cos()

    with fresh_cache():
        for keeps in (first_keeps, True):
            start_again()
            x, w = leaf(6, 5), leaf(6, 5)
            wanted = torch.autograd.grad(chain(x, w).sum(), (x, w))
            total = torch.compile(chain, backend="tilewright")(x, w).sum()
            for _ in range(2 if keeps else 1):
                got = torch.autograd.grad(total, (x, w), retain_graph=keeps)
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert traced_and_restored() == (0, 1)


def test_compiled_autograd_traces_through_a_restored_backward() -> None:
    w = leaf(6, 4)
    with fresh_cache():
        for _ in range(2):
            start_again()
            w.grad = None
            x = torch.randn(5, 4)
            with torch._dynamo.config.patch(compiled_autograd=True):
                step = torch.compile(lambda x: F.linear(x, w).relu().sum(), backend="tilewright")
                step(x).backward()
            assert w.grad is not None
            (wanted,) = torch.autograd.grad(F.linear(x, w).relu().sum(), w)
            torch.testing.assert_close(w.grad, wanted)


SCRIPT = """
import json, torch
from torch._dynamo.utils import counters
from tilewright import metrics
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
x = torch.randn(5, 8)
out = torch.compile(net, backend="tilewright")(x)
torch.nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 0, 1])).backward()
sums = [float(p.grad.double().abs().sum()) for p in net.parameters()]
print(json.dumps({"traced": counters["aot_autograd"]["total"], "sums": sums,
                  "restored": metrics.counters["capture"]["hit"], "bad": metrics.cache_misses}))
"""


def test_a_second_process_traces_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))

    def run() -> dict[str, Any]:
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run(), run()
    assert (first["traced"], first["restored"]) == (1, 0)
    assert (second["traced"], second["restored"], second["bad"]) == (0, 1, 0)
    assert first["sums"] == second["sums"]


def test_a_number_that_a_graph_was_made_for_is_guarded_each_time() -> None:
    """AOTAutograd puts 2 k into the graph as a constant and starts again: without its guard, which
    only tracing adds, the second start would be for every k."""
    with fresh_cache():
        for _ in range(2):
            start_again()
            compiled = torch.compile(lambda x, k: (x.sum() + k, k * 2), backend="tilewright")
            results = [compiled(torch.ones(2), k)[1] for k in (2.0, 0.5, 7.0)]
            assert results == [4.0, 1.0, 14.0]
            assert "not kept: a number that the graph was made for" in reasons()
