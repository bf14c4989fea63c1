"""One model, one backend, one process: `python -m bench.worker MODEL BACKEND` prints JSON.

Prints the seconds of the first training step under torch.compile, with nothing left out: dynamo,
lazy imports and builds are what a user waits for. Caches are where the environment puts them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

import torch

from bench.measure import compile_with
from bench.models import build
from bench.suites import FIRST_EVER, model_step, training_step


def main(name: str, backend: str) -> None:
    if name == FIRST_EVER:
        x = torch.ones(64, requires_grad=True)
        step, args, wrt = compile_with(add_one, backend), (x,), [x]
    else:
        case = build(name)
        step, args = model_step(case, case.module, backend), case.inputs
        wrt = list(case.module.parameters())
    start, busy = time.perf_counter(), cpu_seconds()
    training_step(step, args, wrt)
    seconds, busy = time.perf_counter() - start, cpu_seconds() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"first_call": seconds, "cpu": busy, "peak_mb": peak}))


def cpu_seconds() -> float:
    """Processor time of this process and of the compilers it has run: stable under load."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def add_one(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() + 1).sum()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
