"""The three suites: memory-bound programs, models, and compile time cold and warm."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measure import (
    EAGER,
    Result,
    clone,
    compile_with,
    difference,
    interleave,
    leaves,
)
from bench.models import MODELS, Case, build
from bench.programs import PROGRAMS, Program

Row = dict[str, Result]
Table = dict[str, Row]
QUICK_MODELS = ("gpt", "resnet")
# A trivial program compiled first in an empty cache: what a compiler spends once per machine
# (headers, probes of the instruction set) is shown in this row and charged to no model.
FIRST_EVER = "first ever"


@dataclass(frozen=True)
class Options:
    """What to run, and how long to measure."""

    backends: tuple[str, ...]
    only: re.Pattern[str]
    quick: bool
    rounds: int
    sample_seconds: float
    progress: Callable[[str], None]  # what is being done now
    finished: Callable[[str, Row], None]  # a row as soon as it is there


# --------------------------------------------------------------------------- one measured thing


def measured_row(
    name: str, make: Callable[[str], tuple[Callable[[], Any], Callable[[], Any]]], options: Options
) -> Row:
    """Compile, check against eager, then time side by side.

    `make(backend)` gives the call that is timed and a probe: everything it computes or changes
    in one fresh run, which must equal eager's.
    """
    torch._dynamo.reset()
    row: Row = {}
    calls: dict[str, Callable[[], Any]] = {}
    expected = make(EAGER)[1]()
    for backend in options.backends:
        options.progress(f"{name}: {backend}")
        row[backend] = result = Result()
        try:
            call, probe = make(backend)
            start = time.perf_counter()
            actual = probe()
            result.compile_seconds = time.perf_counter() - start
            result.error = difference(expected, actual)
            calls[backend] = call
        except Exception as error:
            result.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    options.progress(f"{name}: timing")
    sound = {b: call for b, call in calls.items() if row[b].error is None}
    for backend, timing in interleave(sound, options.rounds, options.sample_seconds).items():
        row[backend].timing = timing
    return row


def training_step(fn: Callable[..., Any], args: tuple[Any, ...], wrt: Sequence[Tensor]) -> Any:
    """Forward and backward with ones as the incoming gradient."""
    out = leaves(fn(*args))
    grads = torch.autograd.grad(out, wrt, [torch.ones_like(o) for o in out])
    return out, grads


# --------------------------------------------------------------------------- memory


def memory_suite(options: Options) -> Table:
    table: Table = {}
    for program in PROGRAMS:
        if options.only.search(program.name) and (program.quick or not options.quick):
            torch.manual_seed(0)
            inputs = program.inputs()
            table[program.name] = measured_row(
                program.name,
                lambda backend, p=program, args=inputs: program_calls(p, args, backend),
                options,
            )
            options.finished(program.name, table[program.name])
    return table


def program_calls(
    program: Program, inputs: tuple[Any, ...], backend: str
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    fn = compile_with(program.fn, backend)
    timed = clone(inputs)

    def run(args: tuple[Any, ...]) -> Any:
        if program.backward:
            return training_step(fn, args, [a for a in leaves(args) if a.requires_grad])
        return fn(*args)

    def probe() -> Any:
        args = clone(inputs)
        return run(args), args

    return lambda: run(timed), probe


# --------------------------------------------------------------------------- models


def models_suite(options: Options) -> Table:
    """Every model twice: inference without gradients, and a training step."""
    table: Table = {}
    for name in selected_models(options):
        case = build(name)
        for pass_ in ("inference", "training"):
            label = f"{name} {pass_}"
            table[label] = measured_row(
                label,
                lambda backend, c=case, p=pass_: model_calls(c, backend, train=p == "training"),
                options,
            )
            options.finished(label, table[label])
    return table


def selected_models(options: Options) -> list[str]:
    wanted = QUICK_MODELS if options.quick else tuple(MODELS)
    return [name for name in wanted if options.only.search(name)]


def model_calls(
    case: Case, backend: str, train: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    module = copy.deepcopy(case.module).train(train)
    step = model_step(case, module, backend)
    params = list(module.parameters())

    def training() -> Any:
        return training_step(step, case.inputs, params)

    def inference() -> Any:
        with torch.no_grad():
            return step(*case.inputs)

    call = training if train else inference

    def probe() -> Any:
        # Buffers are part of the answer: a training step moves the running statistics.
        return call(), [b.detach().clone() for b in module.buffers()]

    return call, probe


def model_step(case: Case, module: torch.nn.Module, backend: str) -> Callable[..., Tensor]:
    """Model and loss in one compiled function."""
    loss = case.loss

    def step(*inputs: Tensor) -> Tensor:
        return loss(module(*inputs))

    return compile_with(step, backend)


# --------------------------------------------------------------------------- compile


def compile_suite(options: Options) -> Table:
    """First-call seconds of a training step, per model and backend, each in a new process.

    The cold process finds its model in no cache; the warm one finds everything the cold one
    left. Each includes what a user waits for: dynamo, lazy imports, the compiler, its builds.
    """
    table: Table = {}
    for name in [FIRST_EVER, *selected_models(options)]:
        table[name] = {}
        for backend in options.backends:
            if backend != EAGER:
                table[name][backend] = cold_and_warm(name, backend, options)
        options.finished(name, table[name])
    return table


def cold_and_warm(name: str, backend: str, options: Options) -> Result:
    result = Result()
    for state in ("cold", "warm"):
        options.progress(f"{name}: {backend}, {state} start")
        answer = first_call(name, backend)
        if "error" in answer:
            result.error = answer["error"]
            return result
        result.extra[state] = answer["first_call"]
        result.extra[f"{state}_cpu"] = answer["cpu"]
        result.extra["peak_mb"] = answer["peak_mb"]
    result.compile_seconds = result.extra["cold"]
    return result


def first_call(name: str, backend: str) -> dict[str, Any]:
    """Run the worker in a new process; `{"error": ...}` when it fails."""
    command = [sys.executable, "-m", "bench.worker", name, backend]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": search_path(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return {"error": f"exit {done.returncode}: {lines[-1][:200]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def search_path(root: Path) -> str:
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(root), inherited] if inherited else [str(root)])
