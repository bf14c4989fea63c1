"""What code is generated for: the frozen `Target`, and the only questions asked of a device.

Everything that depends on the machine reads a `Target`, so the whole compiler can be driven for
a card that is not there: `Target("sm_90")` is complete without one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal, cast

import torch

from tilewright import config
from tilewright.errors import InvalidOptionError, TilewrightError

Isa = Literal["avx512", "avx2", "scalar", ""]
KIB, MIB = 1024, 1024 * 1024

# The same on every card: bytes of a thread's widest access, of what memory is fetched by at least,
# and of a line of its caches; elements of two bytes of one access.
ACCESS, SECTOR, LINE = 16, 32, 128
PIECE = ACCESS // 2
REGISTERS = 1 << 16  # of an SM
KINDS = frozenset({"cpu", "cuda"})  # of devices that kernels are written for
# Microseconds of a launch that nothing hides, and, about, until memory answers where it is busy.
LAUNCH, LATENCY = 2.0, 0.8

_VECTOR_BYTES: dict[Isa, int] = {"avx512": 64, "avx2": 32, "scalar": 0, "": 0}
_ISA_OF_SIMDLEN: dict[int, Isa] = {512: "avx512", 256: "avx2", 1: "scalar"}
# What /proc/cpuinfo must list before code for an instruction set may run. F16C and FMA came with
# the first AVX2 cores; AVX-512 is taken only with the byte, word and 256-bit forms.
_NEEDS: dict[Isa, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
_CXX_FLAGS: dict[Isa, tuple[str, ...]] = {
    # left to itself, the compiler keeps to half of the wide registers
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c",
               "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}  # fmt: skip

# Instructions that multiply pairs of bfloat16 and add to float32, the best first: what cpuinfo must
# list, and the compiler's flags.
_UNITS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx_bf16": (frozenset({"amx_tile", "amx_bf16"}), ("-mamx-tile", "-mamx-bf16")),
    "avx512_bf16": (frozenset({"avx512_bf16"}), ("-mavx512bf16",)),
}
_ARCH_PRCTL, _REQUEST, _TILES = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)

_CPU_DTYPES = frozenset({torch.float32, torch.float64})
_SM80_DTYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8}
)
_SM89_DTYPES = _SM80_DTYPES | {torch.float8_e4m3fn, torch.float8_e5m2}
# Block-scaled formats: eight-bit power-of-two scales, and pairs of four-bit floats.
_SM100_DTYPES = _SM89_DTYPES | {torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}


@dataclass(frozen=True)
class Rates:
    """What a card sustains. Of sm_90 `matrix`, `memory` and `cache` were fitted to the times of 432
    products on an H200 (its largest copies reach 4.27 terabytes a second). The others are the
    vendor's peaks, less the part that an H200 does not reach of its own."""

    memory: float  # bytes a microsecond
    cache: float  # bytes a microsecond from the second-level cache into one SM
    matrix: float  # operations a microsecond of the matrix units on two-byte floats
    single: float  # the same on float32 that is not rounded to tf32
    double: float  # on float64


@dataclass(frozen=True)
class _Gpu:
    """The facts of an architecture, with the sizes of its usual card."""

    sms: int
    shared_memory: int  # most one block may ask for, in bytes
    shared_memory_per_sm: int
    l2: int
    threads_per_sm: int
    dtypes: frozenset[torch.dtype]
    rates: Rates


_GPUS = {
    # A100
    "sm_80": _Gpu(108, 163 * KIB, 164 * KIB, 40 * MIB, 2048, _SM80_DTYPES,
                  Rates(1.6e6, 60_000, 2.5e8, 1.5e7, 1.5e7)),
    # A10
    "sm_86": _Gpu(72, 99 * KIB, 100 * KIB, 6 * MIB, 1536, _SM80_DTYPES,
                  Rates(0.5e6, 45_000, 6.5e7, 2.4e7, 3.7e5)),
    # L40
    "sm_89": _Gpu(142, 99 * KIB, 100 * KIB, 96 * MIB, 1536, _SM89_DTYPES,
                  Rates(0.8e6, 55_000, 1.4e8, 7e7, 1.1e6)),
    # H100 and H200 SXM
    "sm_90": _Gpu(132, 227 * KIB, 228 * KIB, 50 * MIB, 2048, _SM89_DTYPES,
                  Rates(4.1e6, 74_500, 6.4e8, 5e7, 5e7)),
    # B200
    "sm_100": _Gpu(148, 227 * KIB, 228 * KIB, 126 * MIB, 2048, _SM100_DTYPES,
                   Rates(7e6, 74_500, 1.45e9, 7e7, 3.5e7)),
    # RTX PRO 6000 Blackwell
    "sm_120": _Gpu(188, 99 * KIB, 100 * KIB, 128 * MIB, 1536, _SM100_DTYPES,
                   Rates(1.6e6, 55_000, 3.2e8, 9.4e7, 1.5e6)),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A processor to generate code for. What is left out is filled in from the tables.

    `Target("sm_90")` is a whole H100; `Target("sm_90", sms=114)` one with fewer SMs;
    `Target("x86_64", isa="avx512")` a CPU that need not be this one.
    """

    arch: str
    isa: Isa = ""  # CPU: the vector instruction set
    cores: int = 0  # CPU: cores this process may use
    l1: int = 0  # CPU: first-level data cache of a core, bytes
    l2: int = 0  # bytes; of a core on a CPU, of the whole card on a GPU
    sms: int = 0  # GPU: streaming multiprocessors
    shared_memory: int = 0  # GPU: most one block may ask for, bytes
    shared_memory_per_sm: int = 0
    threads_per_sm: int = 0
    units: tuple[str, ...] = ()  # CPU: with AVX-512, those of `amx_bf16` and `avx512_bf16` it has
    dtypes: frozenset[torch.dtype] = frozenset()  # what its multiply-add units take

    def __post_init__(self) -> None:
        if self.arch.startswith("sm_"):
            self._fill_gpu()
        elif self.arch in ("x86_64", "aarch64"):
            self._fill_cpu()
        else:
            raise _unknown(self.arch)

    def _fill_gpu(self) -> None:
        gpu = _GPUS.get(_family(self.arch))
        if gpu is None:
            raise _unknown(self.arch)
        for field in fields(gpu):
            if field.name != "rates":  # of an architecture, whatever card it is
                self._default(field.name, getattr(gpu, field.name))

    def _fill_cpu(self) -> None:
        if self.isa and self.arch != "x86_64" and self.isa != "scalar":
            raise TilewrightError(
                f"{self.arch} has no {self.isa}", hint="leave isa out, or use 'scalar'"
            )
        self._default("isa", "avx2" if self.arch == "x86_64" else "scalar")
        if self.isa not in _VECTOR_BYTES:
            raise TilewrightError(
                f"unknown instruction set {self.isa!r}", hint="use avx512, avx2 or scalar"
            )
        self._default("cores", 1)
        self._default("l1", 32 * KIB)
        self._default("l2", 1 * MIB)
        unknown = [u for u in self.units if u not in _UNITS or self.isa != "avx512"]
        if unknown:
            raise TilewrightError(
                f"{self.arch}-{self.isa} has no {unknown[0]}",
                hint=f"with avx512 there are {', '.join(_UNITS)}",
            )
        self._default("dtypes", _CPU_DTYPES | ({torch.bfloat16} if self.units else set()))

    def _default(self, name: str, value: object) -> None:
        if not getattr(self, name):
            object.__setattr__(self, name, value)

    @classmethod
    def host(cls) -> Target:
        """This machine's CPU, narrowed by `config.cpp.simdlen` where that is set."""
        found = _detect_host()
        if config.cpp.simdlen is None:
            return found
        isa = _ISA_OF_SIMDLEN[config.cpp.simdlen]
        if _VECTOR_BYTES[isa] > found.vector_bytes:
            raise InvalidOptionError(
                f"cpp.simdlen={config.cpp.simdlen} needs {isa}, and this CPU has {found.isa}",
                hint="leave cpp.simdlen at None for the widest set this CPU has",
            )
        units = found.units if isa == found.isa else ()
        return cls(found.arch, isa, found.cores, found.l1, found.l2, units=units)

    @classmethod
    def of(cls, device: torch.device | str) -> Target:
        """The target behind a torch device: the host for a CPU, the card for CUDA."""
        device = torch.device(device)
        if device.type == "cpu":
            return cls.host()
        if device.type != "cuda":
            raise TilewrightError(
                f"tilewright generates no code for {device.type!r} devices",
                hint="move the program to cpu or cuda",
            )
        if config.cuda.arch is not None:
            return cls(config.cuda.arch)
        # torch types this index as int, but it is None for a plain "cuda": the current card.
        index = cast("int | None", device.index)
        return _detect_card(torch.cuda.current_device() if index is None else index)

    @classmethod
    def parse(cls, text: str) -> Target:
        """A target from its name: `host`, `sm_90`, `x86_64`, `x86_64-avx512`, `aarch64`."""
        if text == "host":
            return cls.host()
        arch, _, name = text.partition("-")
        if name not in _VECTOR_BYTES:
            raise _unknown(text)
        return cls(arch, name)

    @property
    def is_gpu(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> tuple[int, int]:
        """A GPU's compute capability: (9, 0) for sm_90; (0, 0) for a CPU."""
        if not self.is_gpu:
            return (0, 0)
        return divmod(int(_family(self.arch).removeprefix("sm_")), 10)

    @property
    def rates(self) -> Rates:
        """What a GPU sustains."""
        return _GPUS[_family(self.arch)].rates

    @property
    def vector_bytes(self) -> int:
        """Bytes of a CPU vector register; 0 when the code is to be scalar."""
        return _VECTOR_BYTES[self.isa]

    def lanes(self, dtype: torch.dtype) -> int:
        """Elements of `dtype` in a vector register; at least one."""
        return max(1, self.vector_bytes // dtype.itemsize)

    @property
    def cxx_flags(self) -> tuple[str, ...]:
        """Compiler flags that allow the instruction set, and nothing beyond it."""
        return _CXX_FLAGS.get(self.isa, ())

    def flags_for(self, unit: str) -> tuple[str, ...]:
        """The flags of a kernel that multiplies by one of the units."""
        return (*self.cxx_flags, *_UNITS[unit][1])

    @property
    def key(self) -> str:
        """All facts as text, for cache keys; equal on machines of the same kind."""
        values = astuple(self)[:-1]
        return "/".join([*(str(value) for value in values), *sorted(map(str, self.dtypes))])

    def __str__(self) -> str:
        return self.arch if self.is_gpu else f"{self.arch}-{self.isa}"


def _family(arch: str) -> str:
    """`sm_90a` and `sm_100f` name feature sets of the same card as the plain number."""
    return re.sub(r"[af]$", "", arch)


def _unknown(text: str) -> TilewrightError:
    known = ", ".join(["host", "x86_64", "x86_64-avx512", "aarch64", *_GPUS])
    return TilewrightError(f"unknown target {text!r}", hint=f"known targets: {known}")


def _widest_isa(cpu_flags: Iterable[str]) -> Isa:
    have = frozenset(cpu_flags)
    for isa, needed in _NEEDS.items():  # widest first
        if needed <= have:
            return isa
    return "scalar"


def _cpu_flags(cpuinfo: str) -> frozenset[str]:
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _cache_bytes(level: int) -> int:
    """The size of core 0's data cache at a level; 0 when the kernel does not tell."""
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            if int((folder / "level").read_text()) == level:
                size = (folder / "size").read_text().strip()
                return int(size.removesuffix("K")) * KIB
        except (OSError, ValueError):
            continue
    return 0


@functools.cache
def _detect_host() -> Target:
    arch = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    isa: Isa = "scalar"
    units: tuple[str, ...] = ()
    if arch == "x86_64":
        try:
            flags = _cpu_flags(Path("/proc/cpuinfo").read_text())
            isa = _widest_isa(flags)
            units = _units(flags) if isa == "avx512" else ()
        except OSError:
            isa = _isa_from_torch()
    return Target(
        arch,
        isa,
        cores=len(os.sched_getaffinity(0)),
        l1=_cache_bytes(1),
        l2=_cache_bytes(2),
        units=units,
    )


def _units(cpu_flags: frozenset[str]) -> tuple[str, ...]:
    """Those of a CPU, without AMX where Linux does not give its registers to this process."""
    found = [name for name, (needed, _) in _UNITS.items() if needed <= cpu_flags]
    return tuple(name for name in found if name != "amx_bf16" or _may_use_tiles())


def _may_use_tiles() -> bool:
    """A process has to ask before it uses AMX's registers; it may ask again. What is refused, by a
    kernel before 5.16 or by a sandbox, is done without."""
    try:
        return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILES) == 0
    except (OSError, AttributeError):
        return False


def _isa_from_torch() -> Isa:
    names: dict[str, Isa] = {"AVX512": "avx512", "AVX2": "avx2"}
    return names.get(torch.backends.cpu.get_cpu_capability(), "scalar")


@functools.cache
def _detect_card(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    known = sorted(_GPUS, key=lambda arch: int(arch.removeprefix("sm_")))
    number = properties.major * 10 + properties.minor
    # A card newer than the table is treated as the nearest older one, with its own sizes.
    older = [arch for arch in known if int(arch.removeprefix("sm_")) <= number]
    if not older:
        raise TilewrightError(
            f"{properties.name} is sm_{number}; tilewright needs {known[0]} or later",
            hint="run this program on the CPU, or on a newer card",
        )
    return Target(
        older[-1],
        sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        shared_memory_per_sm=properties.shared_memory_per_multiprocessor,
        l2=properties.L2_cache_size,
        threads_per_sm=properties.max_threads_per_multi_processor,
    )
