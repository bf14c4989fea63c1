"""Kernels are built in other processes, once, and a configuration that does not fit is left."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright import metrics, testing
from tilewright.errors import BuildError
from tilewright.runtime import triton_build, triton_worker
from tilewright.runtime.triton_build import TritonConfig, TritonSource, build, compile_all

TEXT = """
import triton
import triton.language as tl


@triton.jit
def add(a, b, out, n, scale, X: tl.constexpr):
    i = tl.program_id(0) * X + tl.arange(0, X)
    inside = i < n
    tl.store(out + i, tl.load(a + i, inside) + scale * tl.load(b + i, inside), inside)
"""

ADD = TritonSource(
    TEXT,
    "add",
    (("a", "*fp32"), ("b", "*fp32"), ("out", "*fp32"), ("n", "i64"), ("scale", "fp32")),
    (TritonConfig((("X", 512),), num_warps=4),),
    capability=90,
    shared_memory=227 * 1024,
    aligned=frozenset({"a", "b", "out"}),
)

# Keeps a tile in shared memory by transposing it: 16 KiB for 64 x 64 floats.
BIG = """
import triton
import triton.language as tl


@triton.jit
def turn(a, out, X: tl.constexpr):
    i = tl.arange(0, X)
    tile = tl.load(a + i[:, None] * X + i[None, :])
    tl.store(out + i[:, None] * X + i[None, :], tl.trans(tile))
"""


@pytest.fixture(autouse=True)
def _fresh():
    with testing.fresh_cache():
        metrics.reset()
        yield


def test_a_kernel_is_compiled_for_a_card_that_is_not_there():
    binary = build(ADD).binary
    assert binary.cubin[:4] == b"\x7fELF"
    assert binary.num_warps == 4 and binary.stack == 0
    assert 0 < binary.registers < 64
    assert binary.parameters[:5] == (8, 8, 8, 8, 4)
    assert metrics.kernels_compiled == 1


def test_nothing_is_compiled_twice():
    first, second = triton_build.submit(ADD), triton_build.submit(ADD)
    assert first.result().binary == second.result().binary
    assert metrics.kernels_compiled == 1
    triton_build._workshop.clear()  # as a later process would find it
    assert build(ADD).binary == first.result().binary
    assert (metrics.kernels_compiled, metrics.kernels_found) == (1, 1)


def test_the_key_covers_what_the_binary_depends_on():
    chosen = ADD.configs[0]
    keys = {
        ADD.key(chosen),
        ADD.key(replace(chosen, num_warps=8)),
        ADD.key(replace(chosen, constants=(("X", 256),))),
        replace(ADD, capability=80).key(chosen),
        replace(ADD, aligned=frozenset()).key(chosen),
        replace(ADD, text=TEXT + "\n").key(chosen),
        replace(ADD, options=()).key(chosen),
    }
    assert len(keys) == 7


def test_the_key_covers_the_compiler_and_our_helpers(monkeypatch: pytest.MonkeyPatch):
    chosen = ADD.configs[0]
    helped = replace(ADD, text=TEXT + "\nfrom tilewright.runtime import triton_helpers\n")
    first = ADD.key(chosen), helped.key(chosen)
    with monkeypatch.context() as other:
        other.setattr(triton_build, "_helpers", lambda: "other helpers")
        assert ADD.key(chosen) == first[0] and helped.key(chosen) != first[1]
    with monkeypatch.context() as other:
        other.setattr(triton_build, "_compiler", lambda: "another triton")
        assert ADD.key(chosen) != first[0] and helped.key(chosen) != first[1]


def test_alignment_reaches_the_binary():
    aligned = build(ADD).binary
    loose = build(replace(ADD, aligned=frozenset())).binary
    assert aligned.cubin != loose.cubin


def test_short_integers_are_added_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """ptxas loses a constant that is added to a pair of which one half is used."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x, more = "tl.load(a + i, inside)", "tl.full([X], 1, tl.int16)"
    text = TEXT.replace(f"{x} + scale * tl.load(b + i, inside)",
                        f"tl.where(i % 16 == 0, {x} + {more}, {x}) % 7")  # fmt: skip
    params = (("a", "*i16"), ("b", "*i16"), ("out", "*i16"), *ADD.params[3:])
    short = replace(ADD, text=text, params=params)
    ptx = triton_worker.build(short.order(TritonConfig((("X", 256),), num_warps=1)))["ptx"]
    assert "add.s16 " in ptx and "add.s16x2" not in ptx


def test_a_configuration_that_does_not_fit_makes_way():
    big = TritonSource(BIG, "turn", (("a", "*fp32"), ("out", "*fp32")),
                       (TritonConfig((("X", 64),)), TritonConfig((("X", 16),))),
                       capability=90, shared_memory=8 * 1024)  # fmt: skip
    built = build(big)
    assert dict(built.config.constants) == {"X": 16}
    assert built.binary.shared <= 8 * 1024
    assert [b.config for b in compile_all(big)] == [big.configs[1]]
    with pytest.raises(BuildError, match="fits"):
        build(replace(big, shared_memory=16))


def test_a_bad_kernel_costs_only_itself():
    bad = replace(ADD, text=TEXT.replace("tl.load(a", "tl.lod(a"))
    wrong, right = triton_build.submit(bad), triton_build.submit(ADD)
    with pytest.raises(BuildError, match="did not compile the kernel add") as info:
        wrong.result()
    assert "lod" in info.value.stderr
    assert right.result().binary.cubin


def test_a_compiler_that_dies_is_told_apart_from_one_that_refuses():
    dies = replace(ADD, text="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n" + TEXT)
    with pytest.raises(BuildError, match="ended with -11"):
        build(dies)
    assert build(ADD).binary.cubin


def test_a_compiler_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_build, "_TIMEOUT", 0.5)
    hangs = replace(ADD, text="import time\ntime.sleep(60)\n" + TEXT)
    with pytest.raises(BuildError, match="ended with -9"):
        build(hangs)


def test_the_compiling_process_is_started_again():
    build(ADD)
    pool = triton_build._workshop.pool()
    pool._process.kill()
    pool._process.wait()
    assert build(replace(ADD, capability=80)).binary.cubin
    assert triton_build._workshop.pool() is not pool


def test_the_compiling_process_does_not_import_torch():
    code = f"""
import runpy, sys
sys.argv = ["worker", "1"]
runpy.run_path({str(triton_build.WORKER)!r}, run_name="__main__")
assert "triton" in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-P", "-c", code], input=b"", check=True, timeout=120)
