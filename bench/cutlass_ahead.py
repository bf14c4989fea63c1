"""`python -m bench.cutlass_ahead FILE`: the kernels that `bench.gpu_cutlass` asks for, built for
an H200 on a machine that has nvcc and no card, and packed: `bench.gpu_cutlass --kernels FILE` finds
them. `--list` only says which they are; `--most N` builds the first so many."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.pretend import cuda

cuda("sm_90")  # before torch is imported

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from bench.gpu_cutlass import build_all, every_case, sources  # noqa: E402
from tilewright import config, sharing  # noqa: E402
from tilewright.runtime import nvcc, store  # noqa: E402

HOURS = 12.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cutlass_ahead", description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--most", type=int)
    parser.add_argument("--only", default="", help="of cases with this in their names")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once; 0: a core each")
    given = parser.parse_args()
    cases = [case for case in every_case() if given.only in case.name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        wanted = sources(cases, lambda way, case: way(*case.inputs()))
    chosen = dict(list(wanted.items())[: given.most])
    there = sum(nvcc.is_built(key) for key in chosen)
    print(
        f"{len(wanted)} kernels of {len(cases)} cases; {len(chosen)} asked for, {there} are there"
    )
    if given.list:
        for key, source in chosen.items():
            print(key, source.name)
        return 0
    with config.patch(compile_threads=given.jobs):
        good, bad = build_all(chosen, time.monotonic() + 3600 * HOURS)
    print(f"{good} are there, {bad} were refused")
    if given.file is not None:
        for key in chosen:  # libraries are made of objects, and do not need them
            store.path(key, ".o").unlink(missing_ok=True)
        made = sharing.pack(given.file)
        kept = [name for name in made.files if name.endswith(".so")]
        print(f"{given.file}: {len(made.files)} files, {len(kept)} libraries")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
