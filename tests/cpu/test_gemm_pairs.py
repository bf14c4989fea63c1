"""Products of bfloat16 by pairs and tiles (AVX-512 BF16 and AMX), on machines that have neither.

The same text is compiled twice: for the instructions, which shows that they are there, and without
them, where the header computes what they would, so that values are compared everywhere. On a
machine that has them the kernels run as they are.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cpu.gemm_problems import Made, close, exact, product
from tests.cpu.test_gemm_cpp import in_layout
from tilewright import target
from tilewright.gemm.cpp import CppCandidate, CppProvider, configurations
from tilewright.gemm.cpp_source import Config, Unit
from tilewright.gemm.provider import Kernel
from tilewright.runtime import cxx
from tilewright.runtime.cxx import CxxSource
from tilewright.target import Target

BF16 = torch.bfloat16
UNITS: tuple[Unit, ...] = ("amx_bf16", "avx512_bf16")
SAPPHIRE = Target("x86_64", isa="avx512", units=("amx_bf16", "avx512_bf16"), l2=2 << 20)
HOST = Target.host()


def on(made: Made, machine: Target = SAPPHIRE) -> Made:
    return replace(made, problem=replace(made.problem, target=machine))


def paired(made: Made, unit: Unit, **more: int | str) -> CppCandidate:
    found = [c for c in configurations(made.problem) if c.unit == unit]
    assert found, f"no configuration multiplies this by {unit}"
    return CppCandidate(made.problem, replace(found[0], **more), 0, -1)  # pyright: ignore[reportArgumentType]


def source(kernel: Kernel) -> CxxSource:
    assert isinstance(kernel.source, CxxSource)
    return kernel.source


def run(made: Made, candidate: CppCandidate) -> None:
    """As it is where this machine has the unit, or else without it."""
    kernel = candidate.kernel()
    if candidate.config.unit not in HOST.units:
        kernel = replace(kernel, source=replace(source(kernel), flags=HOST.cxx_flags))
    made.call(kernel)


def computed(left: Tensor, right: Tensor, unit: Unit, **more: int | str) -> Tensor:
    out = torch.full((left.shape[0], right.shape[1]), float("nan"), dtype=BF16)
    made = on(product(left, right, out))
    run(made, paired(made, unit, **more))
    return out


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("m", "n", "k", "layout"), [
    (37, 53, 29, "nt"), (70, 301, 411, "nn"), (70, 301, 411, "tn"), (33, 65, 64, "ts"),
    (1, 32, 1, "nt"),
])  # fmt: skip
def test_odd_sizes_in_every_layout(unit: Unit, m: int, n: int, k: int, layout: str) -> None:
    left, right = in_layout(m, k, layout[0], BF16), in_layout(k, n, layout[1], BF16)
    close(computed(left, right, unit), exact(left, right), k)


@pytest.mark.parametrize(("unit", "rows"), [("amx_bf16", 32), ("avx512_bf16", 14)])
@pytest.mark.parametrize("q", ["m", "n"])
def test_several_blocks_of_everything(unit: Unit, rows: int, q: str) -> None:
    """Sums that leave the registers between blocks of k, and come back."""
    left, right = in_layout(150, 203, "n", BF16), in_layout(203, 170, "t", BF16)
    found = computed(left, right, unit, q=q, kc=64, pc=2 * rows, qc=64)
    close(found, exact(left, right), 203)


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_not_finite_stays_where_it_is(unit: Unit) -> None:
    """Zeros that fill up rows and steps of k meet nothing but zeros."""
    left, right = in_layout(35, 41, "n", BF16), in_layout(41, 33, "t", BF16)
    left[3, 40], right[40, 7] = float("inf"), float("nan")
    found = computed(left, right, unit)
    expected = left.float() @ right.float()
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("unit", UNITS)
def test_bias_epilogue_and_batches(unit: Unit) -> None:
    left, right = (torch.randn(5, 40, 65).to(BF16), torch.randn(5, 65, 50).to(BF16))
    out, bias = torch.empty(5, 40, 50, dtype=BF16), torch.randn(5, 1, 50).to(BF16)
    made = on(product(left, right, out, bias=bias))
    run(made, paired(made, unit))
    close(out, exact(left, right) + bias, 65)


@pytest.mark.parametrize("unit", UNITS)
def test_sizes_that_are_symbols(unit: Unit) -> None:
    made = on(product(in_layout(3, 40, "n", BF16), in_layout(40, 50, "t", BF16),
                      torch.empty(3, 50, dtype=BF16), dynamic=True))  # fmt: skip
    candidate = paired(made, unit)
    for m, n, k in ((3, 50, 40), (45, 77, 33), (20, 9, 700), (20, 9, 0)):
        left, right = in_layout(m, k, "n", BF16), in_layout(k, n, "t", BF16)
        out = torch.full((m, n), float("nan"), dtype=BF16)
        now = on(product(left, right, out, dynamic=True))
        now.numbers = {**dict.fromkeys(made.numbers, 1), **now.numbers}
        run(now, replace(candidate))
        close(out, exact(left, right), max(k, 1))


# ---- the instructions


def disassembled(candidate: CppCandidate, folder: Path) -> str:
    made = source(candidate.kernel())
    text, compiled = folder / "kernel.cpp", folder / "kernel.o"
    text.write_text(made.text)
    assert made.flags is not None
    command = ["g++", *(f for f in cxx.FLAGS if f != "-shared"), f"-I{cxx.INCLUDE}", *made.flags]
    subprocess.run([*command, "-c", str(text), "-o", str(compiled)], check=True)
    return subprocess.run(["objdump", "-d", str(compiled)], check=True, capture_output=True,
                          text=True).stdout  # fmt: skip


@pytest.mark.parametrize(("unit", "names"), [
    ("amx_bf16", ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease", "syscall")),
    ("avx512_bf16", ("vdpbf16ps",)),
])  # fmt: skip
def test_the_instructions_are_used(unit: Unit, names: tuple[str, ...], tmp_path: Path) -> None:
    made = on(product(in_layout(64, 64, "n", BF16), in_layout(64, 64, "t", BF16),
                      torch.empty(64, 64, dtype=BF16)))  # fmt: skip
    code = disassembled(paired(made, unit), tmp_path)
    assert all(name in code for name in names)
    assert "zmm30" in code or unit == "amx_bf16"  # sums fill the registers
    assert "rsp" not in "".join(line for line in code.splitlines() if "vdpbf16ps" in line)


def test_tiles_come_first_by_the_model_and_only_for_bfloat16() -> None:
    def best(dtype: torch.dtype, machine: Target) -> Config:
        made = on(product(in_layout(256, 512, "n", dtype), in_layout(512, 384, "t", dtype),
                          torch.empty(256, 384, dtype=dtype)), machine)  # fmt: skip
        return CppProvider().candidates(made.problem, "default")[0].config

    assert best(BF16, SAPPHIRE).unit == "amx_bf16"
    assert best(BF16, replace(SAPPHIRE, units=("avx512_bf16",))).unit == "avx512_bf16"
    assert best(BF16, replace(SAPPHIRE, units=())).unit == ""
    assert best(torch.float32, SAPPHIRE).unit == best(torch.float16, SAPPHIRE).unit == ""


def test_what_linux_refuses_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512f"})
    for granted, units in ((True, UNITS), (False, UNITS[1:])):
        monkeypatch.setattr(target, "_may_use_tiles", lambda granted=granted: granted)
        assert target._units(flags) == units
    assert target._units(frozenset({"amx_tile", "avx512f"})) == ()
    with pytest.raises(target.TilewrightError, match="avx512"):
        Target("x86_64", isa="avx2", units=("amx_bf16",))
