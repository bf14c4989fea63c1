"""Compile a small transformer and a convnet with tilewright, check them, and show the gain.

    python examples/demo.py [--backend NAME] [--mode NAME]

Runs on the GPU when there is one. Exits with 1 if a compiled result differs from eager's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tilewright import metrics
from tilewright.gemm.choose import Decision, decisions

ROUNDS = 9


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token embedding, two blocks, logits."""

    def __init__(self, vocab: int = 1000, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens)))


class ConvNet(nn.Sequential):
    """Convolutions with batch norm, ReLU and pooling, then a linear head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


@dataclass
class Outcome:
    """One row of the table, and what the compiler says about it."""

    model: str
    passes: str
    difference: str | None
    compile_seconds: float
    eager: float
    compiled: float
    native: int
    fallback: int
    kernels: int
    moved: int
    fallback_ops: Counter[str] = field(default_factory=Counter)
    decisions: list[Decision] = field(default_factory=list[Decision])


def step_of(model: nn.Module, run: Callable[..., Tensor], x: Tensor, train: bool) -> Any:
    """One step: `(outputs, gradients)`; no gradients in inference."""
    if not train:
        with torch.no_grad():
            return run(x), ()
    out = run(x)
    grads = torch.autograd.grad(out.square().mean(), list(model.parameters()))
    return out, grads


def difference(expected: Any, actual: Any) -> str | None:
    """None when outputs, gradients and buffers agree, else one line about the first that do not."""
    try:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return None


def median_times(calls: list[Callable[[], Any]]) -> list[float]:
    """Median seconds per call, the calls taking turns so that a slow moment falls on all."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, taken in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in samples]


def demonstrate(
    name: str, model: nn.Module, x: Tensor, train: bool, how: dict[str, str]
) -> Outcome:
    """Compile one pass of one model, compare it with eager, time both."""
    torch._dynamo.reset()
    metrics.reset()
    decisions.clear()
    eager = copy.deepcopy(model).train(train)
    ours = copy.deepcopy(model).train(train)
    compiled = torch.compile(ours, **how)
    expected = step_of(eager, eager, x, train), list(eager.buffers())
    start = time.perf_counter()
    actual = step_of(ours, compiled, x, train), list(ours.buffers())
    seconds = time.perf_counter() - start
    wrong = difference(expected, actual)
    eager_time, compiled_time = median_times(
        [
            lambda: step_of(eager, eager, x, train),
            lambda: step_of(ours, compiled, x, train),
        ]
    )
    return Outcome(
        model=name,
        passes="fwd+bwd" if train else "fwd",
        difference=wrong,
        compile_seconds=seconds,
        eager=eager_time,
        compiled=compiled_time,
        native=metrics.native_nodes,
        fallback=metrics.fallback_nodes,
        kernels=metrics.generated_kernel_count,
        moved=metrics.num_bytes_moved,
        fallback_ops=Counter(metrics.fallback_ops),
        decisions=list(decisions),
    )


def table_of(outcomes: list[Outcome], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for head in ("model", "pass", "same as eager"):
        table.add_column(head)
    for head in ("graph nodes", "kernels", "MB moved", "compile s", "eager ms", "compiled ms"):
        table.add_column(head, justify="right")
    table.add_column("speedup", justify="right")
    for o in outcomes:
        table.add_row(
            o.model,
            o.passes,
            "yes" if o.difference is None else "[red]NO[/red]",
            str(o.native + o.fallback),
            str(o.kernels),
            f"{o.moved / 1e6:.2f}",
            f"{o.compile_seconds:.2f}",
            f"{o.eager * 1e3:.2f}",
            f"{o.compiled * 1e3:.2f}",
            f"{o.eager / o.compiled:.2f}x",
        )
    return table


def explanation(outcome: Outcome) -> str:
    """What became of the graph's nodes, in one line."""
    calls = ", ".join(f"{op} x{n}" for op, n in outcome.fallback_ops.most_common(5))
    return (
        f"{outcome.model} {outcome.passes}: {outcome.native} nodes in {outcome.kernels} kernels of "
        f"ours, {outcome.fallback} library calls" + (f" ({calls})" if calls else "")
    )


def choices(outcome: Outcome) -> Iterator[str]:
    """Who computes each product, and why, in a line each."""
    for decision, count in Counter(outcome.decisions).items():
        times = f" x{count}" if count > 1 else ""
        yield f"  {decision.site}{times}: {decision.winner} ({decision.why})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="tilewright", help="any torch.compile backend")
    parser.add_argument("--mode", default="max-autotune", help="any mode of torch.compile")
    options = parser.parse_args()
    how = {"backend": options.backend, "mode": options.mode}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    cases = [
        ("transformer", Transformer().to(device), torch.randint(0, 1000, (4, 128), device=device)),
        ("convnet", ConvNet().to(device), torch.randn(8, 3, 64, 64, device=device)),
    ]
    outcomes = [
        demonstrate(name, model, x, train, how)
        for name, model, x in cases
        for train in (False, True)
    ]
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table_of(outcomes, f"torch.compile(**{how}) on {device}"))
    for outcome in outcomes:
        for text in (explanation(outcome), *choices(outcome)):
            console.print(text, highlight=False, soft_wrap=True)
    console.print(
        "Products are computed by whoever was fastest with what is fused to them, attention by "
        "whom a model finds fastest; library calls are named above. A second run takes it all "
        "from the cache.",
        soft_wrap=True,
    )
    for o in outcomes:
        if o.compiled > 1.02 * o.eager:
            console.print(f"{o.model} {o.passes} is slower than eager here: "
                          f"{100 * (o.compiled / o.eager - 1):.0f} % more time.")  # fmt: skip
    wrong = [o for o in outcomes if o.difference is not None]
    for o in wrong:
        console.print(f"[red]{o.model} {o.passes} differs from eager:[/red] {o.difference}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
