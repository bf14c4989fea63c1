"""`python -m bench.host_time`: what a call of a small product costs the host.

Each product is called eagerly, in a function compiled by Dynamo alone (backend `eager`: its guards
and nothing else), in one compiled by us, and, with `--reference`, by TorchInductor. All take turns
in one run, and the least time of many short turns counts: others on the machine only ever make one
longer. On a card calls are not waited for, so that it is the host that is timed; on a CPU the
product itself is part of all columns alike. `program` is our program called without Dynamo.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tilewright import pipeline
from tilewright.runtime import native

Call = Callable[[], Any]
TURNS, CALLS = 60, 200


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: str) -> list[torch.Tensor]:
        return [torch.randn(s, device=device).to(self.dtype) for s in self.shapes]


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b)


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def _bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


def _two(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, w), v)


def cases(small: bool) -> list[Case]:
    """Ten shapes; `small` ones take a CPU next to nothing."""
    if small:
        return [
            Case("mm 4x8x4", _mm, ((4, 8), (8, 4)), torch.float32),
            Case("mm 16x16x16", _mm, ((16, 16), (16, 16)), torch.float32),
            Case("mm 1x64x32", _mm, ((1, 64), (64, 32)), torch.float32),
            Case("mm 7x13x5", _mm, ((7, 13), (13, 5)), torch.float32),
            Case("bmm 2x4x8x4", torch.bmm, ((2, 4, 8), (2, 8, 4)), torch.float32),
            Case("linear 8x16x8", _linear, ((8, 16), (8, 16)), torch.float32),
            Case("linear 1x32x32", _linear, ((1, 32), (32, 32)), torch.float32),
            Case("linear with bias 8x16x8", _bias, ((8, 16), (8, 16), (8,)), torch.float32),
            Case("linear of 3 dimensions", _linear, ((2, 4, 16), (8, 16)), torch.float32),
            Case("two linears 8x16x16", _two, ((8, 16), (16, 16), (16, 16)), torch.float32),
        ]
    return [
        Case("mm 128x6144x4096", _mm, ((128, 6144), (6144, 4096))),
        Case("mm 1000x1000x1000", _mm, ((1000, 1000), (1000, 1000))),
        Case("mm 64x64x65536", _mm, ((64, 65536), (65536, 64))),
        Case("mm 16x4096x4096", _mm, ((16, 4096), (4096, 4096))),
        Case("mm 256x256x256", _mm, ((256, 256), (256, 256))),
        Case("bmm 16x64x64x64", torch.bmm, ((16, 64, 64), (16, 64, 64))),
        Case("linear 1x4096x4096", _linear, ((1, 4096), (4096, 4096))),
        Case("linear with bias 32x1024x1024", _bias, ((32, 1024), (1024, 1024), (1024,))),
        Case("linear of 3 dimensions", _linear, ((2, 64, 1024), (1024, 1024))),
        Case("two linears 32x1024x1024", _two, ((32, 1024), (1024, 1024), (1024, 1024))),
    ]


def measured(calls: Sequence[Call], wait: Call, turns: int = TURNS) -> list[float]:
    """Microseconds of each, by turns."""
    best = [float("inf")] * len(calls)
    for _ in range(turns):
        for k, call in enumerate(calls):
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[k] = min(best[k], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def programs() -> tuple[list[Any], Call]:
    """What is loaded from here on, and how to stop looking."""
    found: list[Any] = []
    real = pipeline._loaded

    def loaded(*args: Any, **kwargs: Any) -> Any:
        found.append(real(*args, **kwargs))
        return found[-1]

    pipeline._loaded = loaded
    return found, lambda: setattr(pipeline, "_loaded", real)


def compiled(case: Case, args: Sequence[torch.Tensor], mode: str | None, backend: str) -> Call:
    torch._dynamo.reset()
    options: dict[str, Any] = {} if mode is None or backend == "eager" else {"mode": mode}
    function = torch.compile(case.function, backend=backend, dynamic=False, **options)
    for _ in range(3):
        function(*args)
    return lambda: function(*args)


def row(case: Case, device: str, mode: str | None, reference: bool) -> list[float]:
    args = case.inputs(device)
    found, stop = programs()
    try:
        ours = compiled(case, args, mode, "tilewright")
    finally:
        stop()
    program = found[-1]
    calls: list[Call] = [lambda: case.function(*args), compiled(case, args, mode, "eager"), ours,
                         lambda: program(list(args))]  # fmt: skip
    if reference:
        calls.append(compiled(case, args, mode, "inductor"))
    for call in calls:  # Dynamo was reset in between
        call()
    return measured(calls, torch.cuda.synchronize if device == "cuda" else lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", default=None, help="of torch.compile; none: the default")
    parser.add_argument("--reference", action="store_true", help="TorchInductor as well")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    native.module()  # built before anything is timed
    names = ["eager", "dynamo", "ours", "program", *["reference"] * options.reference]
    print("us per call".ljust(34), *(n.rjust(10) for n in names))
    with torch.no_grad():
        for case in cases(options.device == "cpu"):
            if options.only in case.name:
                times = row(case, options.device, options.mode, options.reference)
                print(case.name.ljust(34), *(f"{t:10.2f}" for t in times), flush=True)


if __name__ == "__main__":
    main()
