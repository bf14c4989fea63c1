"""NVIDIA's model of products ranks CUTLASS's tiles where it is installed; ours does elsewhere."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.compile.cutlass import ON
from tests.compile.test_cutlass_filter import mm
from tilewright import config
from tilewright.gemm.cutlass import arrange, filter, nvidia_model
from tilewright.target import Target

HOPPER = Target("sm_90")
SOURCE = Path(__file__).with_name("fake_matmul_heuristics.cpp")
TILE, CLUSTER = (64, 256, 64), (2, 1, 1)


def built(folder: Path, minor: int = 1) -> Path:
    made = folder / f"lib{minor}.so"
    command = ["g++", "-shared", "-fPIC", "-w", f"-DMINOR={minor}", str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


@pytest.fixture(autouse=True)
def forgotten() -> Generator[None]:
    nvidia_model.path.cache_clear()
    yield
    nvidia_model.path.cache_clear()
    nvidia_model._model.cache_clear()


def order(m: int = 4096, n: int = 4096, k: int = 4096) -> list[filter.Ranked]:
    found = arrange.arranged(mm(m, n, k).problem)
    assert not isinstance(found, str)
    with config.patch(ON):
        return filter.ranked(found, 90, HOPPER)


def test_what_it_is_asked_and_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = built(tmp_path)
    monkeypatch.setattr(nvidia_model, "path", lambda: None)
    ours = order()
    monkeypatch.setattr(nvidia_model, "path", lambda: made)
    found = nvidia_model.microseconds(
        HOPPER, (3, 512, 1024, 2048), ("e4m3", "e5m2", "bf16"), (64, 256, 128), CLUSTER
    )
    assert found == pytest.approx(1.0)
    model = nvidia_model._model(made, nvidia_model.CARDS["sm_90"])
    assert model is not None
    model.library.fake_precision.restype = ctypes.c_char_p
    model.library.fake_seen.restype = ctypes.POINTER(ctypes.c_uint32)
    assert model.library.fake_precision() == b"QRTST"
    stages = nvidia_model.SHARED // (320 * 128)
    seen = list(model.library.fake_seen()[:13])
    assert seen == [512, 1024, 2048, 3, 2, 64, 256, 128, 32, stages, 2, 1, 9003]

    theirs = order()
    liked = [r for r in theirs if r.operation.tile[:2] == (64, 256)]
    first = next(r for r in theirs if not r.operation.is_stream_k)
    assert first in liked and theirs != ours
    assert {r.operation.name for r in theirs} == {r.operation.name for r in ours}
    assert {r.operation.name: r.estimate for r in theirs} == {
        r.operation.name: r.estimate for r in ours
    }
    ordered = filter.ordered(ours, HOPPER)
    for tile in {r.operation.tile for r in ours}:  # of one tile, as our model has it
        for shared in (False, True):
            times = [r.estimate for r in ordered
                     if (r.operation.tile, r.operation.is_stream_k) == (tile, shared)]  # fmt: skip
            assert times == sorted(times)


def test_another_version_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    made = built(tmp_path, minor=2)
    monkeypatch.setattr(nvidia_model, "path", lambda: made)
    given = HOPPER, (1, 512, 512, 512), ("bf16", "bf16", "bf16"), TILE, CLUSTER
    with caplog.at_level("WARNING"):
        assert nvidia_model.microseconds(*given) is None
        assert nvidia_model.microseconds(*given) is None
    assert len([r for r in caplog.records if "0.2.0 is not one we know" in r.message]) == 1


def test_where_it_is_absent_or_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, halves = (1, 512, 512, 512), ("bf16", "bf16", "bf16")
    monkeypatch.setattr(nvidia_model, "MODULE", "no_such_module")
    assert nvidia_model.path() is None
    assert nvidia_model.microseconds(HOPPER, sizes, halves, TILE, CLUSTER) is None
    monkeypatch.setattr(nvidia_model, "path", lambda: pytest.fail("it is not asked"))
    monkeypatch.setattr(nvidia_model, "CARDS", {})
    monkeypatch.setattr(nvidia_model, "path", lambda: Path("no/such/library.so"))
    assert nvidia_model.microseconds(HOPPER, sizes, halves, TILE, CLUSTER) is None


REAL = """
from tilewright.gemm.cutlass import nvidia_model
from tilewright.target import Target

def of(size, tile):
    kinds = ("bf16", "bf16", "bf16")
    return nvidia_model.microseconds(Target("sm_90"), (1, *size), kinds, tile, (2, 1, 1))

large, wide, narrow = (4096, 4096, 4096), (128, 256, 64), (64, 64, 64)
assert 120 < of(large, wide) < 300, of(large, wide)
assert of(large, wide) < of(large, narrow)
assert of((128, 512, 4096), narrow) < of((128, 512, 4096), wide)
print("asked")
"""


@pytest.mark.slow
def test_the_library_itself() -> None:
    """In a process of its own, which has to end well."""
    pytest.importorskip("nvMatmulHeuristics", reason="nvidia-matmul-heuristics is not installed")
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr
