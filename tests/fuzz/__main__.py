"""`python -m tests.fuzz --programs 5000`: compare many random programs with eager."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.fuzz.check import blame, difference
from tests.fuzz.generate import Program, generate
from tests.fuzz.shrink import shrink


def report(seed: int, found: str, attempts: int = 60) -> str:
    """A failure as a person wants it: the seed, a short program, and the stage to blame."""
    program = generate(seed)
    kind = _kind(found)
    small = shrink(program, lambda p: _kind(difference(p)) == kind, attempts)
    lines = [f"seed {seed}: {found}", "", describe(small), difference(small)[:1500], ""]
    return "\n".join([*lines, f"first wrong stage: {blame(small)}"])


def describe(program: Program) -> str:
    inputs = "\n".join(f"# a{k} = {i}" for k, i in enumerate(program.inputs))
    return f"{inputs}\n# sizes {program.sizes} dynamic {program.dynamic}\n{program.source()}"


def _kind(found: str) -> str:
    """Failures that are the same for the shrinker: an error of one type, or other values."""
    head = found.split("\n")[0]
    return head.split("raised ")[1].split(":")[0] if "raised " in head else bool(found) * "values"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="how many programs to run")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as generated")
    parser.add_argument("--keep-going", type=int, default=5, help="failures after which to stop")
    options = parser.parse_args()
    failures, start, seed = 0, time.perf_counter(), options.seed
    for seed in range(options.seed, options.seed + options.programs):
        found = difference(generate(seed))
        if found:
            failures += 1
            text = f"seed {seed}: {found}\n{describe(generate(seed))}"
            print(text if options.no_shrink else report(seed, found), "=" * 80, flush=True)
        if failures >= options.keep_going or time.perf_counter() - start > options.seconds:
            break
    count, took = seed - options.seed + 1, time.perf_counter() - start
    print(f"{count} programs, {failures} differ from eager, {took:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
