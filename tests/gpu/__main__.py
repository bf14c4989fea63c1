"""`python -m tests.gpu [NAME ...]`: the cases without pytest, which a bare GPU machine may lack."""

from __future__ import annotations

import sys
import time
import traceback

from tests.gpu import cases, gemm_cases, user_kernels

assert gemm_cases and user_kernels  # their cases are registered


def main() -> int:
    wanted = sys.argv[1:] or list(cases.CASES)
    failed: list[str] = []
    for name in wanted:
        start = time.perf_counter()
        try:
            cases.run(name)
            said = "ok"
        except Exception as error:
            traceback.print_exc()
            said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            failed.append(f"{name}: {said}")
        print(f"{name}: {said} ({time.perf_counter() - start:.1f} s)", flush=True)
    print("\n".join(failed))
    print(f"{len(wanted) - len(failed)} of {len(wanted)} cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
