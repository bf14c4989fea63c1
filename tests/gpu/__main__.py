"""`python -m tests.gpu [NAME ...]`: the cases without pytest, which a bare GPU machine may lack, in
several processes."""

from __future__ import annotations

import argparse
import sys
import time

from tests.gpu.jobs import CORES, finished

JOBS = 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=max(1, min(JOBS, CORES // 4)))
    parser.add_argument("--seconds", type=float, default=500, help="no case begins after these")
    options = parser.parse_args()
    began = time.perf_counter()
    ended, skipped, failed = 0, 0, list[str]()
    for name, said, seconds in finished(options.names, options.jobs, options.seconds):
        ended += 1
        skipped += said.startswith("skipped")
        failed += [f"{name}: {said}"] if said.startswith("FAILED") else []
        print(f"{name}: {said} ({seconds:.1f} s)", flush=True)
    print("\n".join(failed))
    print(f"{ended - skipped - len(failed)} of {ended} cases passed, {skipped} were skipped, in "
          f"{time.perf_counter() - began:.0f} s, {options.jobs} at a time")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
