"""`python -m tests.fuzz --programs 5000`: compare many random programs with eager."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from tempfile import TemporaryFile

import torch

from tests.compile.as_cuda import as_cuda
from tests.fuzz import generate as anything
from tests.fuzz import products
from tests.fuzz.check import blame, difference
from tests.fuzz.forced import forced
from tests.fuzz.generate import Program
from tests.fuzz.shrink import shrink
from tilewright import config

CARD = "card"
DEVICES = f"cpu, cuda, or {CARD}: kernels of a card in Triton's interpreter"
FORCED = "with max-autotune, a candidate drawn for each product: every template has its turn"
SHARE = 40  # programs of one process
GRACE = 60.0  # seconds that a process may take longer than it was told to
BEGINS = "begins: seed"
SUMMARY = re.compile(r"(\d+) programs, (\d+) differ from eager")


def report(program: Program, found: str, attempts: int = 60) -> str:
    """A failure as a person wants it: the seed, a short program, and the stage to blame."""
    seed = program.seed
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
    parser.add_argument("--device", default="cpu", help=DEVICES)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--products", action="store_true", help="programs around matrix products")
    parser.add_argument("--forced", action="store_true", help=FORCED)
    parser.add_argument("--no-shrink", action="store_true", help="print failures as generated")
    parser.add_argument("--tell", action="store_true", help="name each seed as it begins")
    parser.add_argument("--keep-going", type=int, default=5, help="failures after which to stop")
    options = parser.parse_args()
    start = time.perf_counter()
    config.verify_ir = True  # a program that is not sound is an error, not a warning
    torch.set_num_threads(2 if options.jobs == 1 else 1)
    if options.jobs > 1:
        done = shared(options)
    elif options.device == CARD:
        with as_cuda():
            done = alone(options)
    else:
        torch.set_default_device(options.device)
        done = alone(options)
    print(f"{done.programs} programs, {done.failures} differ from eager,"
          f" {done.lost} processes lost, {time.perf_counter() - start:.0f} s")  # fmt: skip
    return 1 if done.failures or done.lost else 0


@dataclass
class Done:
    programs: int = 0
    failures: int = 0
    lost: int = 0  # processes that ended before their programs did, or never


def alone(options: argparse.Namespace) -> Done:
    done, start = Done(), time.perf_counter()
    for seed in range(options.seed, options.seed + options.programs):
        if options.tell:
            print(BEGINS, seed, file=sys.stderr, flush=True)
        program = products.generate(seed) if options.products else anything.generate(seed)
        turn = forced(seed, options.device) if options.forced else contextlib.nullcontext("")
        with turn as name:
            found = difference(program)
            done.programs += 1
            if found:
                done.failures += 1
                print(f"seed {seed} {name}: {found}\n{describe(program)}", flush=True)
                print("" if options.no_shrink else report(program, found), "=" * 80, flush=True)
        if done.failures >= options.keep_going or time.perf_counter() - start > options.seconds:
            break
    return done


def shared(options: argparse.Namespace) -> Done:
    """The same by several processes, each with some of the programs: one that crashes takes few
    others with it."""
    done, start = Done(), time.perf_counter()
    last = options.seed + options.programs

    def run(first: int) -> None:
        left = options.seconds - (time.perf_counter() - start)
        if left <= 0 or done.failures >= options.keep_going:
            return
        count = min(SHARE, last - first)
        command = [sys.executable, "-m", "tests.fuzz", "--programs", count, "--seed", first,
                   "--seconds", left, "--device", options.device, "--keep-going", count, "--tell",
                   *["--no-shrink"][: options.no_shrink], *["--products"][: options.products],
                   *["--forced"][: options.forced]]  # fmt: skip
        code, output, errors = ended([str(c) for c in command], left + GRACE)
        *failures, summary = output.strip().split("\n") or [""]
        counts = re.match(SUMMARY, summary)
        if counts:
            if failures:
                print("\n".join(failures), flush=True)
            done.programs += int(counts[1])
            done.failures += int(counts[2])
            return
        done.lost += 1
        begun = re.findall(rf"{BEGINS} (\d+)", errors) or ["none"]
        why = "did not end" if code is None else f"exit {code}"
        print(f"{output}seeds {first} to {first + count - 1}: {why}, at seed {begun[-1]}\n"
              f"{errors[-1500:]}", flush=True)  # fmt: skip

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, range(options.seed, last, SHARE)))
    return done


def ended(command: Sequence[str], seconds: float) -> tuple[int | None, str, str]:
    """How a command ended and what it wrote. One that takes longer is killed with all it started;
    whatever survives that is not waited for: output goes to files, which nobody has to close."""
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        code = None
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read()


if __name__ == "__main__":
    sys.exit(main())
