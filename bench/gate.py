"""`python -m bench.gate`: whether a change of the compiler changed any kernel it writes.

    python -m bench.gate keep FILE       # before the change: every kernel of every benchmark list
    python -m bench.gate compare FILE    # after it: what differs; exits with 1 if anything does

A program is traced once, for a card that is not there, and scheduled and written for each of
`ARCHS`; programs of `bench.programs` are written in C++. Nothing is built or run. Kept of a kernel
are its text, its parameters, grid, all configurations and what else a launcher needs, and the same
of its variant with 64-bit indices. `--quick` takes every eighth program of a list, `--lists` some
of them, and `--diff N` shows the first N differences as texts.
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.pretend import cuda

cuda("sm_90")  # before torch is imported

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from bench.drawn_programs import drawn  # noqa: E402
from bench.gpu_memory import LISTS, PROGRAMS, run_program  # noqa: E402
from bench.gpu_programs import GpuProgram  # noqa: E402
from bench.programs import PROGRAMS as CPU_PROGRAMS  # noqa: E402
from tilewright import backend, config, pipeline  # noqa: E402
from tilewright.codegen.cpp import kernel as cpp  # noqa: E402
from tilewright.codegen.triton.generate import generate  # noqa: E402
from tilewright.codegen.triton.launch import TritonKernel  # noqa: E402
from tilewright.graph.boundary import Boundary  # noqa: E402
from tilewright.schedule.memory import Step  # noqa: E402
from tilewright.schedule.plan import Schedule  # noqa: E402
from tilewright.target import Target  # noqa: E402

ARCHS = ("sm_90", "sm_80", "sm_100")
SEEDS = (1, 2)
DRAWN = 40  # programs of a seed
EVERY = 8  # program of a list, if it is to be quick
NOT_TRACED = "not traced"  # a program that calls what no machine without a card has
Facts = dict[str, Any]
Kept = dict[str, Facts]  # by list, program, card, role and number


def lists() -> dict[str, Sequence[GpuProgram]]:
    found: dict[str, Sequence[GpuProgram]] = {"list": PROGRAMS}
    found |= {name: programs for name, (programs, _) in LISTS.items()}
    found |= {f"seed {seed}": drawn(DRAWN, seed) for seed in SEEDS}
    cpu = [GpuProgram(p.name, p.fn, p.inputs, p.backward) for p in CPU_PROGRAMS]
    return found | {"cpu": cpu}


# ---- what is kept of a kernel


def facts_of(kernel: TritonKernel) -> Facts:
    """All of a kernel, under names of this file's: those of the compiler's may change."""
    return {
        "text": kernel.text,
        "name": kernel.name,
        "params": [str((p.kind, p.name, p.type, p.argument, p.multiple, p.hint, p.high, p.meets))
                   for p in kernel.params],
        "grid": [str([(str(e), b) for e, b in g]) for g in (kernel.grid, *kernel.beside)],
        "configs": [str((c.constants, c.num_warps, c.num_stages, c.registers))
                    for c in (kernel.config, *kernel.configs)],
        "launch": str((kernel.checked, [str(e) for e in kernel.assume], kernel.early, kernel.joins,
                       kernel.workspace, kernel.counters, kernel.ticketed)),
    }  # fmt: skip


def kept_of(plan: Schedule, step: Step, k: int) -> Iterator[tuple[str, Facts]]:
    group = step.group
    if group.call is not None:
        said = re.sub(r" at 0x[0-9a-f]+", "", str(group.call.target))
        yield f"{k}", {"text": said[:200], "reads": sorted(group.reads)}
        return
    device = plan.program.buffers[min(group.writes)].device
    if device.type == "cpu":
        made = cpp.generate(plan.program, group)
        yield f"{k}", {"text": made.text, "params": [str(p) for p in made.params]}
        return
    target = Target.of(device)
    kernel = generate(plan.program, group, target, str(k))
    yield f"{k}", facts_of(kernel)
    if kernel.assume:
        yield f"{k} wide", facts_of(generate(plan.program, group, target, str(k), wide=True))


def kept(program: GpuProgram, archs: Sequence[str]) -> Kept:
    """The kernels of a program on every card."""
    found: Kept = {}

    def one(arch: str, gm: torch.fx.GraphModule, boundary: Boundary) -> None:
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        with config.patch({"cuda.arch": arch}):
            plan = pipeline.decide(torch.fx.GraphModule(gm, graph), boundary)
            for k, step in enumerate(plan.steps):
                for name, facts in kept_of(plan, step, k):
                    found[f"{arch} {boundary.role} {name}"] = facts

    def look(gm: torch.fx.GraphModule, boundary: Boundary) -> Callable[..., Any]:
        for arch in archs:
            one(arch, gm, boundary)

        def run(args: list[Any]) -> Any:
            given = tuple(args)
            args.clear()
            return gm(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return backend._capture(look, gm, inputs, None, None)

    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        run_program(program, torch.compile(program.fn, backend=compiler), program.inputs())
    return found


def chosen(names: Sequence[str], quick: bool) -> Iterator[tuple[str, GpuProgram]]:
    for name, programs in lists().items():
        if not names or name in names:
            yield from ((name, p) for p in programs[:: EVERY if quick else 1])


def dump(names: Sequence[str], quick: bool, part: int, parts: int) -> Kept:
    found: Kept = {}
    for k, (name, program) in enumerate(chosen(names, quick)):
        if k % parts != part:
            continue
        print(f"{name}: {program.name}", file=sys.stderr, flush=True)
        try:
            made = kept(program, ARCHS[:1] if name == "cpu" else ARCHS)
        except Exception as why:  # the others are still worth comparing; it is told below
            made = {NOT_TRACED: {"text": f"{type(why).__name__}: {str(why).splitlines()[0]}"}}
        found |= {f"{name}: {program.name}: {at}": facts for at, facts in made.items()}
    return found


def dump_in_parts(options: argparse.Namespace) -> Kept:
    """The same by several processes."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{k}.gz" for k in range(options.jobs)]
        command = [sys.executable, "-m", "bench.gate", "keep"]
        given = ["--quick"] * options.quick + ["--lists", *options.lists] * bool(options.lists)
        running = [subprocess.Popen([*command, str(file), "--part", str(k), str(options.jobs),
                                     *given]) for k, file in enumerate(files)]  # fmt: skip
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit("a process of the gate has failed")
        return {name: facts for file in files for name, facts in read(file).items()}


# ---- files and differences


def write(file: Path, found: Kept) -> None:
    file.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))


def read(file: Path) -> Kept:
    return json.loads(gzip.decompress(file.read_bytes()))


def digest(found: Kept) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def told(found: Kept) -> None:
    for name, facts in found.items():
        if name.endswith(NOT_TRACED):
            print(f"{name}: {facts['text'][:160]}")


def difference(name: str, before: Facts, after: Facts) -> str:
    lines = [f"### {name}"]
    for fact in sorted(before.keys() | after.keys()):
        old, new = before.get(fact, ""), after.get(fact, "")
        if old != new:
            texts = [(t if isinstance(t, str) else "\n".join(t)).splitlines() for t in (old, new)]
            lines += difflib.unified_diff(*texts, f"{fact} before", f"{fact} after", lineterm="")
    return "\n".join(lines)


def compare(before: Kept, after: Kept, shown: int) -> int:
    """How many kernels differ, of the programs that are in both."""
    programs = {name.rsplit(": ", 1)[0] for name in after}
    before = {n: facts for n, facts in before.items() if n.rsplit(": ", 1)[0] in programs}
    names = [n for n in sorted(before.keys() | after.keys()) if before.get(n) != after.get(n)]
    for name in names[:shown]:
        print(difference(name, before.get(name, {}), after.get(name, {})))
    for name in names[shown : shown + 40]:
        print(f"differs: {name}")
    print(f"{len(names)} of {len(after)} kernels of {len(programs)} programs differ "
          f"(before {digest(before)}, after {digest(after)})")  # fmt: skip
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["keep", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"every {EVERY}th program")
    parser.add_argument("--lists", nargs="*", default=[], help="names of lists; all")
    parser.add_argument("--diff", type=int, default=3, help="differences shown as texts")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.lists) - lists().keys():
        parser.error(f"no list {min(unknown)!r}; there are {', '.join(lists())}")
    if options.jobs > 1:
        found = dump_in_parts(options)
    else:
        found = dump(options.lists, options.quick, *options.part)
    told(found)
    if options.what == "keep":
        write(options.file, found)
        print(f"{len(found)} kernels, {digest(found)}")
    else:
        sys.exit(bool(compare(read(options.file), found, options.diff)))


if __name__ == "__main__":
    main()
