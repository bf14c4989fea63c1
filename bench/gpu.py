"""`python -m bench.gpu`: everything that is measured on a card, in one call, with a short table.

Sections: `numbers` (programs against eager), `calls` (host time per call), `memory` (memory-bound
programs, see `bench.gpu_memory`), `compile` (a 12-layer GPT, forward and backward, cold and warm).
Each has a part of the time; what does not fit is named. Only torch and this repository are needed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import gpu_memory
from bench.gpu_memory import BACKENDS, compile_ahead

Lines = list[str]
Key = tuple[int, str]  # (steps of a chain, backend)


class Clock:
    """What is left of a section's time."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    def over(self) -> bool:
        return time.perf_counter() > self.end


def memory(clock: Clock, raw: dict[str, Any]) -> Lines:
    compile_ahead(8)
    return gpu_memory.memory(clock.end, raw)


# ---- host time per call


AT_ONCE = 4  # calls between two waits for the device: more would measure its queue
ROUNDS = 150


def host_times(calls: dict[Key, Callable[[], Any]], rounds: int = ROUNDS) -> dict[Key, float]:
    """Median microseconds of calls from Python, the device never waited for inside. They take
    turns: a machine's speed drifts by a half within seconds, and is to be the same for all."""
    for call in calls.values():
        for _ in range(100):
            call()
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            torch.cuda.synchronize()
            call()
            start = time.perf_counter()
            for _ in range(AT_ONCE):
                call()
            times[key].append((time.perf_counter() - start) / AT_ONCE * 1e6)
    torch.cuda.synchronize()
    return {key: statistics.median(found) for key, found in times.items()}


UNFUSED = {"max_fusion_size": 1, "realize_opcount_threshold": 0, "realize_reads_threshold": 0}


def _chain(steps: int) -> Callable[[Tensor], Tensor]:
    """As many kernels, with `UNFUSED`: each needs the largest of a row or column of the last.
    Every one has code of its own, to which Dynamo attaches what it compiles."""

    def f(x: Tensor) -> Tensor:
        for k in range(steps // 2):
            x = x - x.amax(k % 2, keepdim=True)
        return x * 2 + 1 if steps % 2 else x

    def one(x: Tensor) -> Tensor:
        return torch.relu(x)

    made = f if steps > 1 else one
    return FunctionType(made.__code__.replace(), made.__globals__, closure=made.__closure__)


STEPS = (1, 11, 100)
COLUMNS = ("eager", "tilewright", "replayed", "nothing", "inductor")  # the reference last: slowest


def _compiled_call(steps: int, backend: str) -> Callable[[], Any]:
    fn, x = _chain(steps), torch.randn(64, 64, device="cuda")
    call = _with_mode(fn, backend)
    if backend != "nothing":
        torch.testing.assert_close(call(x), _chain(steps)(x))
    return functools.partial(call, x)


def calls(clock: Clock, raw: dict[str, Any]) -> Lines:
    """The reference runs last and in a process of its own, for as long as there is time: it takes
    minutes to compile a hundred kernels."""
    from tilewright import metrics

    lines = ["| graph | kernels | eager us | tilewright | with CUDA graphs | nothing | reference |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    print(*lines, sep="\n", flush=True)
    found: dict[int, dict[str, float]] = {steps: {} for steps in STEPS}
    made: dict[Key, Callable[[], Any]] = {}
    torch._dynamo.reset()
    with torch.no_grad():
        for steps, backend in itertools.product(STEPS, COLUMNS[:-1]):
            metrics.reset()
            made[steps, backend] = _compiled_call(steps, backend)
            if backend == "tilewright":
                found[steps]["kernels"] = metrics.generated_kernel_count
        for (steps, backend), took in host_times(made).items():
            found[steps][backend] = took
    print(*(_call_row(steps, times) for steps, times in found.items()), sep="\n", flush=True)
    command = [sys.executable, "-m", "bench.gpu", "--worker", "calls"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reference:
        timer = threading.Timer(max(1.0, clock.end - time.perf_counter()), reference.kill)
        timer.start()
        assert reference.stdout is not None
        for line in reference.stdout:
            steps, took = json.loads(line)
            found[steps]["inductor"] = took
        timer.cancel()
    raw.update({f"{steps} steps": times for steps, times in found.items()})
    lines += [_call_row(steps, times) for steps, times in found.items()]
    few, many = found[STEPS[0]], found[STEPS[-1]]
    if many["kernels"] > few["kernels"]:
        each = (many["tilewright"] - few["tilewright"]) / (many["kernels"] - few["kernels"])
        lines.append(f"per further kernel: {each:.2f} us")
    return lines


def _call_row(steps: int, times: dict[str, float]) -> str:
    shown = " | ".join(f"{times.get(b, math.nan):.1f}" for b in COLUMNS)
    return f"| {steps} steps | {times['kernels']:.0f} | {shown} |"


def calls_worker() -> None:
    """In a process of its own: the reference's microseconds, a line for each graph."""
    with torch.no_grad():
        for steps in STEPS:
            took = host_times({(steps, "inductor"): _compiled_call(steps, "inductor")})
            print(json.dumps([steps, took[steps, "inductor"]]), flush=True)


def _with_mode(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    if backend == "eager":
        return fn
    if backend == "nothing":  # what Dynamo itself takes
        return torch.compile(fn, backend=lambda gm, inputs: lambda *args: args)
    if backend == "replayed":
        options = {**UNFUSED, "triton.cudagraphs": True}
        return torch.compile(fn, backend="tilewright", options=options)
    return torch.compile(fn, backend=backend, options=UNFUSED)


# ---- compile time


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.first(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50304) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, 12) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def compile_worker(backend: str) -> None:
    """In a process of its own: seconds of the first training step, and what was compiled."""
    torch.manual_seed(0)
    model = GPT().cuda().to(torch.bfloat16)
    ids = torch.randint(0, 50304, (4, 512), device="cuda")
    call = model if backend == "eager" else torch.compile(model, backend=backend)
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = call(ids, ids)
    loss.backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start

    def step() -> None:
        call(ids, ids).backward()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    from tilewright import metrics

    print(json.dumps({
        "seconds": seconds, "step_ms": (time.perf_counter() - start) * 100, "loss": float(loss),
        "compiled": metrics.kernels_compiled, "found": metrics.kernels_found,
        "kernels": metrics.generated_kernel_count, "hits": metrics.cache_hits,
        "misses": metrics.cache_misses, "fallbacks": metrics.fallback_ops.most_common(8),
        "tilewright_seconds": metrics.compile_seconds,
    }))  # fmt: skip


def compile_times(clock: Clock, raw: dict[str, Any]) -> Lines:
    lines = ["| 12-layer GPT, training | cold s | warm s | kernels compiled | ms per step | loss |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for backend in reversed(BACKENDS):
        with tempfile.TemporaryDirectory() as folder:
            cold = _in_process(backend, folder, clock)
            warm = _in_process(backend, folder, clock) if backend == "tilewright" else cold
        raw[backend] = cold, warm
        if "error" in cold or "error" in warm:
            lines.append(f"| {backend} | {cold.get('error') or warm.get('error')} | | | | |")
            continue
        again = f"{warm['seconds']:.1f}" if warm is not cold else ""
        lines.append(f"| {backend} | {cold['seconds']:.1f} | {again} | "
                     f"{cold['compiled']}, then {warm['compiled']} | {warm['step_ms']:.1f} | "
                     f"{warm['loss']:.4f} |")  # fmt: skip
        print(lines[-1], cold.get("fallbacks"), flush=True)
    return lines


def _in_process(backend: str, folder: str, clock: Clock) -> dict[str, Any]:
    if clock.over():
        return {"error": "out of time"}
    names = ("TORCHINDUCTOR_CACHE_DIR", "TILEWRIGHT_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {**os.environ, **{name: f"{folder}/{name}" for name in names}}
    done = subprocess.run([sys.executable, "-m", "bench.gpu", "--worker", backend],
                          env=environment, capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode != 0:
        print(done.stderr[-3000:], flush=True)
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- numbers


def numbers(clock: Clock, raw: dict[str, Any]) -> Lines:
    """The tests for a card, in a process of their own."""
    limit = max(10.0, clock.end - time.perf_counter())
    command = [sys.executable, "-u", "-m", "tests.gpu"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=limit, check=False)  # fmt: skip
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = f"{(late.stdout or b'').decode()}\nout of time"
    raw["output"] = text
    lines = [line for line in text.splitlines() if ": FAILED" in line]
    return [*lines[: len(lines) // 2 or None], text.strip().splitlines()[-1]]


SECTIONS: dict[str, tuple[Callable[[Clock, dict[str, Any]], Lines], float]] = {
    "numbers": (numbers, 150),
    "calls": (calls, 60),
    "compile": (compile_times, 130),
    "memory": (memory, 200),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma list, in order")
    parser.add_argument("--scale", type=float, default=1.0, help="of every section's time")
    parser.add_argument("--out", type=Path, help="folder for report.md and report.json")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == "calls":
        calls_worker()
        return
    if options.worker:
        compile_worker(options.worker)
        return
    import triton

    head = (f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
            f"triton {triton.__version__}, {time.strftime('%Y-%m-%d')}")  # fmt: skip
    lines, raw = [head], {"machine": head}
    for name in options.sections.split(","):
        section, seconds = SECTIONS[name]
        raw[name] = {}
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        try:
            made = section(Clock(seconds * options.scale), raw[name])
        except Exception as error:
            traceback.print_exc()
            made = [f"{name} failed: {type(error).__name__}: {error}"]
        lines += ["", f"## {name} ({time.perf_counter() - start:.0f} s)", "", *made]
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "report.md").write_text("\n".join(lines) + "\n")
            (options.out / "report.json").write_text(json.dumps(raw, indent=1, default=str))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
