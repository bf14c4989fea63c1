"""`python -m bench.gpu_block`: a transformer block on a card, in inference and in training.

Four sequences of 2048 tokens, 2048 wide, bfloat16. Eager, tilewright and, when asked for, the
reference compile with autotuning from empty caches and run in one process. Times are of the device,
by replays of CUDA graphs in turns; seconds are those of the first call: capture, tuning, compiling,
running, and not of importing the compilers. With `--kernels` the time of each kernel is listed.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.gpu import Block
from bench.gpu_memory import Recorded, in_turns, kernel_times
from tilewright.gemm.choose import decisions

TOKENS, WIDTH, HEADS = (4, 2048), 2048, 16
MODE = "max-autotune-no-cudagraphs"

Call = Callable[[tuple[Any, ...]], Any]


def inference(block: Callable[[Tensor], Tensor], args: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return block(args[0])


def training(parameters: list[Tensor], block: Callable[[Tensor], Tensor],
             args: tuple[Any, ...]) -> Any:  # fmt: skip
    x, gradient = args
    return torch.autograd.grad(block(x), [x, *parameters], gradient)


def compared(name: str, block: Block, backends: list[str], kernels: bool) -> list[str]:
    """A table row, and the kernels of each backend if they are wanted."""
    x = torch.randn(*TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    args = (x.requires_grad_(name == "training"), torch.randn_like(x))
    run = inference
    if name == "training":
        run = functools.partial(training, list(block.parameters()))
    recorded: dict[str, Recorded] = {}
    seconds: dict[str, float] = {}
    listed: list[str] = []
    for backend in backends:
        if backend != "eager":
            torch._dynamo.lookup_backend(backend)
        start = time.perf_counter()
        fn = block if backend == "eager" else torch.compile(block, backend=backend, mode=MODE)
        call: Call = functools.partial(run, fn)
        call(args)
        torch.cuda.synchronize()
        seconds[backend] = time.perf_counter() - start
        recorded[backend] = Recorded(call, [args])
        if kernels:
            times = sorted(kernel_times(lambda c=call: c(args)), key=lambda kv: -kv[1])
            listed += [f"    {backend}: {us:8.1f} us  {kernel}" for kernel, us in times[:24]]
    us = in_turns(recorded)
    cells = [f"{us[b]:.0f}" for b in backends]
    cells += [f"{us[b] / us['tilewright']:.2f}" for b in backends if b != "tilewright"]
    cells += [f"{seconds[b]:.1f}" for b in backends if b != "eager"]
    return [f"| {name} | {' | '.join(cells)} |", *listed]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_block", description=__doc__)
    parser.add_argument("--reference", action="store_true", help="measure the reference too")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each")
    parser.add_argument("--only", choices=("inference", "training"))
    options = parser.parse_args()
    backends = ["eager", *(["inductor"] if options.reference else []), "tilewright"]
    torch.manual_seed(0)
    block = Block(WIDTH, HEADS).cuda().bfloat16()
    columns = ["block", *(f"{b} us" for b in backends), *(f"x {b}" for b in backends[:-1]),
               *(f"{b} s" for b in backends[1:])]  # fmt: skip
    print(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n", flush=True)
    for name in (options.only,) if options.only else ("inference", "training"):
        before = len(decisions)
        print(*compared(name, block, backends, options.kernels), sep="\n", flush=True)
        for made in list(decisions)[before:] if options.kernels else ():
            print(f"    chosen: {made.winner} ({made.why})"[:160])


if __name__ == "__main__":
    main()
