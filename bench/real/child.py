"""One model, one kind of work, one mode, in a process of its own: a record of all three.

`python -m bench.real.child` is given a task as JSON and a folder, where it writes its record; what
it prints is heard by its parent, in case it does not end well.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from bench.measure import EAGER, REFERENCE, keep_freed_memory, machine
from bench.peak import peak_bytes
from bench.real.side_by_side import Gate
from bench.real.zoo import Made, made, zoo

OURS = "tilewright"
BACKENDS = (EAGER, REFERENCE, OURS)

# A result may be this many times as far from the exact one as eager's is, or this far in any case:
# sums are taken in another order. A wrong index or operator is off by far more.
FACTOR = 4.0
LEAST = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
EXACT = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}
NEGLIGIBLE = 1e-4  # of the largest number of all results of a kind: smaller ones are rounding


@dataclass(frozen=True)
class Task:
    """What is run, and how it is timed."""

    model: str
    work: str  # inference or training
    mode: str
    device: str
    size: str
    rounds: int = 15
    seconds: float = 20.0  # for the rounds of one task
    allocator: str = "reuse"
    clock: str = "wall"  # or processor, which other programs on the machine do not disturb

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.work, self.mode, self.device, self.size

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


Step = Callable[[], list[Tensor]]


class Runner:
    """A model under one backend."""

    def __init__(self, made: Made, backend: str, task: Task) -> None:
        self.training = task.work == "training"
        self._inputs = made.inputs
        self._module = copy.deepcopy(made.module).train(self.training)
        mode = None if task.mode == "default" else task.mode
        self._call: Any = self._module
        if backend != EAGER:
            self._call = torch.compile(self._module, backend=backend, mode=mode)

    def step(self) -> list[Tensor]:
        """One call, with gradients in training; they are gone afterwards."""
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.training):
            outputs = _floats(self._call(**self._inputs))
        if self.training:
            _loss(outputs).backward()
            outputs += [p.grad for p in self._module.parameters() if p.grad is not None]
            for p in self._module.parameters():
                p.grad = None
        return outputs

    def results(self) -> dict[str, list[Tensor]]:
        """Outputs, gradients and buffers by kind, as they are after the first call."""
        with torch.set_grad_enabled(self.training):
            outputs = _floats(self._call(**self._inputs))
        found = {"outputs": [t.detach().clone() for t in outputs]}
        if self.training:
            _loss(outputs).backward()
            gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
            found["gradients"] = [g.clone() for g in gradients]
            for p in self._module.parameters():
                p.grad = None
        found["buffers"] = [b.clone() for b in self._module.buffers() if b.is_floating_point()]
        return found


def _floats(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def _loss(outputs: list[Tensor]) -> Tensor:
    terms = [t.float().square().mean() for t in outputs if t.requires_grad]
    return torch.stack(terms).sum()


# ---- values


def exact_results(found: Made, task: Task) -> dict[str, list[Tensor]]:
    """What wider numbers give, in eager."""
    dtype = EXACT[task.dtype]
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.inputs.items()}
    wide: nn.Module = copy.deepcopy(found.module).to(dtype)
    plain = Task(task.model, task.work, "default", task.device, task.size)
    return Runner(Made(wide, inputs), EAGER, plain).results()


def error(actual: dict[str, list[Tensor]], exact: dict[str, list[Tensor]]) -> float:
    """The largest distance from the exact results, beside the largest number of each tensor."""
    worst = 0.0
    for kind, wanted in exact.items():
        if len(wanted) != len(actual[kind]):
            raise ValueError(f"{len(actual[kind])} {kind} instead of {len(wanted)}")
        scales = [_largest(t) for t in wanted]
        least = NEGLIGIBLE * max(scales, default=0.0)
        for got, right, scale in zip(actual[kind], wanted, scales, strict=True):
            if got.shape != right.shape:
                raise ValueError(f"{kind} of {tuple(got.shape)} instead of {tuple(right.shape)}")
            same = torch.isnan(got) & torch.isnan(right) | (got == right)
            apart = (got.double() - right.double()).abs().masked_fill(same, 0.0)
            distance = _largest(apart) if bool(torch.isfinite(apart).all()) else float("inf")
            worst = max(worst, distance / max(scale, least, 1e-30))
    return worst


def _largest(t: Tensor) -> float:
    if t.numel() == 0:
        return 0.0
    return float(t.detach().abs().nan_to_num(posinf=0.0).max())


def is_wrong(ours: float, eager: float, dtype: torch.dtype) -> bool:
    return not ours <= max(FACTOR * eager, LEAST[dtype])


# ---- what is said on the terminal


class Ear:
    """Hears every line that this process, or one it starts, writes to the terminal."""

    def __init__(self) -> None:
        self.said: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def listening(self, who: str) -> Generator[None]:
        sys.stdout.flush()
        sys.stderr.flush()
        before = os.dup(1), os.dup(2)
        with tempfile.TemporaryFile("w+b") as heard:
            os.dup2(heard.fileno(), 1)
            os.dup2(heard.fileno(), 2)
            try:
                yield
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for fd, old in enumerate(before, start=1):
                    os.dup2(old, fd)
                    os.close(old)
                heard.seek(0)
                lines = heard.read().decode(errors="replace").splitlines()
                self.said.setdefault(who, []).extend(line for line in lines if line.strip())

    def only(self, who: str) -> list[str]:
        """What one of them said and nobody else did, numbers aside."""
        others = {_without_numbers(s) for w, lines in self.said.items() if w != who for s in lines}
        return [s for s in self.said.get(who, []) if _without_numbers(s) not in others]


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+", "0", line)


# ---- times and memory


def timed(steps: dict[str, Step], task: Task) -> dict[str, list[float]]:
    """Seconds of every round, the backends in turn; a slow moment falls on all of them."""
    names = list(steps)
    taken: dict[str, list[float]] = {name: [] for name in names}
    clock = time.perf_counter if task.clock == "wall" else time.process_time
    end = time.perf_counter() + task.seconds
    for round_ in range(task.rounds):
        if round_ >= 3 and time.perf_counter() > end:
            break
        shift = round_ % len(names)
        for name in names[shift:] + names[:shift]:
            start = clock()
            steps[name]()
            _settled(task.device)
            taken[name].append(clock() - start)
    return taken


def host_seconds(step: Step, task: Task) -> float:
    """Until a call returns, with the card idle before it."""
    samples: list[float] = []
    for _ in range(task.rounds):
        _settled(task.device)
        start = time.perf_counter()
        step()
        samples.append(time.perf_counter() - start)
    _settled(task.device)
    return statistics.median(samples)


def device_seconds(step: Step, task: Task, calls: int = 5) -> float:
    """Of all kernels and copies of a call, on the card."""
    step()
    _settled(task.device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            step()
        _settled(task.device)
    events: Any = found.events()
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.self_device_time_total for e in kernels) / calls * 1e-6


def peak(step: Step, task: Task) -> int:
    """The most bytes alive at once beyond those before the call."""
    gc.collect()
    if task.device == "cpu":
        return peak_bytes(step)
    step()
    _settled(task.device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    _settled(task.device)
    return torch.cuda.max_memory_allocated() - before


def _settled(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# ---- one task


def warmed_up(task: Task) -> None:
    """Imports, and what is built once for a machine, are no part of a model's compilation."""
    x = torch.randn(64, 64, device=task.device, requires_grad=True)
    for backend in (REFERENCE, OURS):
        torch._dynamo.reset()
        torch.compile(lambda x: (x @ x).sin().sum(), backend=backend)(x).backward()
    torch._dynamo.reset()


def record(task: Task, gate: Gate) -> dict[str, Any]:
    """Everything about one task; `failures` says what is not as it has to be."""
    model = zoo()[task.model]
    ear, failures = Ear(), list[str]()
    torch._dynamo.config.recompile_limit = 64
    found = made(model, task.size, task.device, task.dtype)
    exact = exact_results(found, task)
    rows: dict[str, dict[str, Any]] = {name: {} for name in BACKENDS}
    with ear.listening("warming up"):
        warmed_up(task)
    order = [REFERENCE, OURS] if zlib.crc32(task.model.encode()) % 2 else [OURS, REFERENCE]
    runners: dict[str, Runner] = {}
    for name in (EAGER, *order):
        try:
            with ear.listening(name):
                runners[name] = _first_call(found, name, task, exact, rows[name], gate)
        except Exception as why:
            rows[name]["failure"] = f"{type(why).__name__}: {' '.join(str(why).split())[:300]}"
    del exact
    if is_wrong(rows[OURS].get("error", 0.0), rows[EAGER].get("error", 0.0), task.dtype):
        failures.append(
            f"wrong values: {rows[OURS]['error']:.1e}, eager {rows[EAGER]['error']:.1e}"
        )
    failures += [f"{name}: {rows[name]['failure']}" for name in (EAGER, OURS)
                 if "failure" in rows[name]]  # fmt: skip
    ready = {name: runners[name].step for name in BACKENDS if name in runners}
    with gate.alone():
        _measure(ready, rows, ear, task)
    said = ear.only(OURS)
    failures += [f"said: {line[:200]}" for line in said[:5]]
    return {
        **asdict(task), "field": model.field, "source": model.source, "dtype": str(task.dtype),
        "parameters": sum(p.numel() for p in found.module.parameters()),
        "backends": rows, "speed": _speeds(rows), "failures": failures,
        "machine": {k: v for k, v in machine().items() if k != "command"},
    }  # fmt: skip


def _first_call(found: Made, name: str, task: Task, exact: dict[str, list[Tensor]],
                row: dict[str, Any], gate: Gate) -> Runner:  # fmt: skip
    runner = Runner(found, name, task)
    start = gate.clock()
    results = runner.results()
    _settled(task.device)
    if name != EAGER:
        row["compile_s"] = gate.clock() - start
    row["error"] = error(results, exact)
    runner.step()  # lazily made state; programs that are recorded are so at their second call
    runner.step()
    return runner


def _measure(steps: dict[str, Step], rows: dict[str, dict[str, Any]], ear: Ear,
             task: Task) -> None:  # fmt: skip
    """Times and memory; what is said meanwhile is ours, if it is not said by the others too."""
    with ear.listening(OURS):
        for name, samples in timed(steps, task).items():
            rows[name]["rounds_ms"] = [1e3 * s for s in samples]
            rows[name]["wall_ms"] = 1e3 * statistics.median(samples)
            rows[name]["least_ms"] = 1e3 * min(samples)
    # torch's profiler announces itself
    with ear.listening("profiler"):
        for name, step in steps.items():
            rows[name]["peak_mb"] = peak(step, task) / 1e6
            if task.device != "cpu":
                rows[name]["host_ms"] = 1e3 * host_seconds(step, task)
                rows[name]["device_ms"] = 1e3 * device_seconds(step, task)


def _speeds(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ours over the others': the median over rounds of the ratio of neighbours in a round."""
    mine = rows[OURS].get("rounds_ms")
    return {
        name: statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
        for name in (EAGER, REFERENCE)
        if mine and (theirs := rows[name].get("rounds_ms"))
    }


def main() -> None:
    task, folder = Task(**json.loads(sys.argv[1])), Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    if task.allocator == "reuse":
        keep_freed_memory()
    found = record(task, Gate(folder))
    (folder / "record.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
