"""`python -m bench.show LIST [names]`: the kernels of memory-bound programs for a card that is not
there, and with `--build` what they need of it. Lists are those of `bench.gpu_memory`; its own is
`list`."""

from __future__ import annotations

import argparse

from bench.pretend import cuda

cuda("sm_90")  # before torch is imported

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from bench.cubin import build  # noqa: E402
from bench.gpu_memory import LISTS, NO_NAME, PROGRAMS, named, run_program  # noqa: E402
from bench.gpu_programs import GpuProgram  # noqa: E402
from tilewright.backend import count_schedules  # noqa: E402
from tilewright.codegen.triton.generate import generate  # noqa: E402
from tilewright.schedule.plan import Schedule  # noqa: E402
from tilewright.target import Target  # noqa: E402


def show(role: str, plan: Schedule, text: bool, built: bool) -> None:
    for k, step in enumerate(plan.steps):
        if step.group.call is not None:
            print(f"-- {role} {k}: {step.group.call!r}"[:160])
            continue
        kernel = generate(plan.program, step.group, Target("sm_90"), str(k))
        print(f"-- {role} {k}: {kernel.name}, {kernel.configs[0]}")
        if text:
            print(kernel.text)
        if built:
            made = build(kernel)
            print(f"-- shared memory {made.shared}, stack {made.spills}, bytes of a load "
                  f"{made.widest('ld.global')}, of a store {made.widest('st.global')}")  # fmt: skip


def compiled(program: GpuProgram, text: bool, built: bool) -> None:
    torch._dynamo.reset()
    print(f"## {program.name}", flush=True)
    backend = count_schedules(lambda role, plan: show(role, plan, text, built))
    with FakeTensorMode(allow_non_fake_inputs=True):
        run_program(program, torch.compile(program.fn, backend=backend), program.inputs())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.show", description=__doc__)
    parser.add_argument("list", choices=["list", *LISTS])
    parser.add_argument("names", nargs="*", help="what names of programs begin with; all")
    parser.add_argument("--quiet", action="store_true", help="no texts")
    parser.add_argument("--build", action="store_true", help="compile the kernels")
    options = parser.parse_args()
    programs = PROGRAMS if options.list == "list" else LISTS[options.list][0]
    for program in named(programs, options.names) or parser.error(NO_NAME):
        compiled(program, not options.quiet, options.build)


if __name__ == "__main__":
    main()
