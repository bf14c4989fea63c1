"""Cases in several processes: most of their time goes into tracing and compiling. The first process
imports none of them: that takes as long as a case."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from unittest import SkipTest

CORES = len(os.sched_getaffinity(0))


def finished(wanted: list[str], jobs: int) -> Iterator[tuple[str, str, float]]:
    """The cases as they end, all where none is named; those that measure time come last, with
    nobody beside them."""
    if jobs == 1:
        yield from map(one, wanted or names()[0])
        return
    os.environ.setdefault("TILEWRIGHT_COMPILE_THREADS", str(max(2, CORES // jobs)))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        first, *_ = [pool.submit(names) for _ in range(jobs)]  # all of them begin to import
        known, alone = first.result()
        wanted = wanted or known
        # the last are the longest: they are begun first
        together = [name for name in reversed(wanted) if name not in alone]
        for done in as_completed([pool.submit(one, name) for name in together]):
            yield done.result()
        for name in wanted:
            if name in alone:
                yield pool.submit(one, name).result()


def names() -> tuple[list[str], set[str]]:
    """All cases, and those to run with nobody beside them."""
    from tests.gpu import (
        attention_cases,
        cases,
        gemm_cases,
        narrow_cases,
        spec_cases,
        template_cases,
        tuning_cases,
        user_kernels,
    )

    # their cases are registered
    assert attention_cases and gemm_cases and narrow_cases and template_cases
    assert spec_cases and tuning_cases and user_kernels
    return list(cases.CASES), cases.ALONE


def one(name: str) -> tuple[str, str, float]:
    """A case, what became of it, and seconds."""
    names()
    from tests.gpu import cases

    start = time.perf_counter()
    try:
        cases.run(name)
        said = "ok"
    except SkipTest as why:
        said = f"skipped: {why}"
    except Exception as error:
        traceback.print_exc()
        said = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return name, said, time.perf_counter() - start
