"""`Target`: complete without a device, and honest about the one that is there."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from tilewright import config, target
from tilewright.errors import InvalidOptionError, TilewrightError
from tilewright.target import Target

KIB = 1024


def test_gpu_tables():
    a100, h100, b200 = Target("sm_80"), Target("sm_90"), Target("sm_100")
    assert (a100.sms, h100.sms, b200.sms) == (108, 132, 148)
    assert a100.shared_memory == 163 * KIB
    assert h100.shared_memory == b200.shared_memory == 227 * KIB
    assert a100.l2 < h100.l2 < b200.l2
    assert torch.float8_e4m3fn not in a100.dtypes
    assert torch.float8_e4m3fn in h100.dtypes
    assert torch.float4_e2m1fn_x2 in b200.dtypes - h100.dtypes
    assert (a100.capability, b200.capability) == ((8, 0), (10, 0))


def test_sizes_given_win_over_the_table():
    card = Target("sm_90", sms=114)
    assert card.sms == 114
    assert card.shared_memory == Target("sm_90").shared_memory


def test_feature_suffix_names_the_same_card():
    assert Target("sm_90a").sms == Target("sm_90").sms
    assert Target("sm_90a").capability == (9, 0)


def test_target_is_a_value():
    assert Target("sm_90") == Target("sm_90")
    assert len({Target("sm_90"), Target("sm_90"), Target("sm_80")}) == 2
    with pytest.raises(AttributeError):
        Target("sm_90").sms = 1  # type: ignore[misc]


def test_keys_tell_targets_apart():
    all_targets = [
        Target("sm_80"),
        Target("sm_90"),
        Target("sm_90", sms=1),
        Target("x86_64"),
        Target("x86_64", "avx512"),
        Target("x86_64", "avx2", cores=4),
        Target("aarch64"),
    ]
    assert len({t.key for t in all_targets}) == len(all_targets)
    assert Target("sm_90").key == Target("sm_90").key


@pytest.mark.parametrize(
    ("isa", "vector_bytes", "floats"), [("avx512", 64, 16), ("avx2", 32, 8), ("scalar", 0, 1)]
)
def test_cpu_vectors(isa, vector_bytes, floats):
    cpu = Target("x86_64", isa)
    assert cpu.vector_bytes == vector_bytes
    assert cpu.lanes(torch.float32) == floats
    assert cpu.lanes(torch.float64) == max(1, floats // 2)
    assert not cpu.is_gpu


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm_90", Target("sm_90")),
        ("x86_64-avx512", Target("x86_64", "avx512")),
        ("x86_64", Target("x86_64", "avx2")),
        ("aarch64", Target("aarch64", "scalar")),
        ("host", Target.host()),
    ],
)
def test_parse(text, expected):
    assert Target.parse(text) == expected


@pytest.mark.parametrize("text", ["sm_20", "riscv", "x86_64-neon", "", "sm_"])
def test_unknown_targets_list_the_known_ones(text):
    with pytest.raises(TilewrightError, match=r"known targets: .*sm_90"):
        Target.parse(text)


def test_arm_has_no_avx():
    with pytest.raises(TilewrightError, match="aarch64 has no avx2"):
        Target("aarch64", "avx2")


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("fpu avx avx2 fma f16c", "avx2"),
        ("fpu avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("fpu avx avx2 fma f16c avx512f", "avx2"),  # the first AVX-512 parts lack the short forms
        ("fpu avx2", "scalar"),
        ("fpu sse2", "scalar"),
    ],
)
def test_isa_from_cpuinfo(flags, isa):
    cpuinfo = f"processor : 0\nflags\t\t: {flags}\nbugs : none\n"
    assert target._widest_isa(target._cpu_flags(cpuinfo)) == isa


def test_host_agrees_with_torch():
    host = Target.host()
    assert host.arch == platform.machine()
    assert host.cores >= 1
    assert host.l1 >= 8 * KIB
    assert host.l2 > host.l1
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("AVX2", "AVX512"):
        assert host.isa in ("avx2", "avx512")
    assert Target.of("cpu") == host


@pytest.mark.parametrize("isa", ["avx512", "avx2", "scalar"])
def test_the_compiler_takes_the_flags(isa):
    cpu = Target("x86_64", isa)
    macros = subprocess.run(
        [config.cpp.cxx, *cpu.cxx_flags, "-dM", "-E", "-x", "c++", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ("__AVX512VL__" in macros) == (isa == "avx512")
    assert ("__FMA__" in macros) == (isa != "scalar")


def test_simdlen_narrows_the_host():
    with config.patch({"cpp.simdlen": 1}):
        assert Target.host().isa == "scalar"
        assert Target.host().cores == len(target.os.sched_getaffinity(0))


def test_simdlen_wider_than_the_host_is_refused(monkeypatch):
    monkeypatch.setattr(target, "_detect_host", lambda: Target("x86_64", "avx2"))
    with config.patch({"cpp.simdlen": 256}):
        assert Target.host().isa == "avx2"
    with (
        config.patch({"cpp.simdlen": 512}),
        pytest.raises(InvalidOptionError, match="needs avx512, and this CPU has avx2"),
    ):
        Target.host()


def test_cuda_arch_option_stands_in_for_a_card():
    with config.patch({"cuda.arch": "sm_100"}):
        assert Target.of("cuda") == Target("sm_100")


class Card:
    """The facts torch tells about a card."""

    name = "a card"
    multi_processor_count = 114
    shared_memory_per_block_optin = 227 * KIB
    shared_memory_per_multiprocessor = 228 * KIB
    L2_cache_size = 50 * KIB * KIB
    max_threads_per_multi_processor = 2048

    def __init__(self, major: int, minor: int) -> None:
        self.major, self.minor = major, minor


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90"), ((8, 7), "sm_86"), ((10, 3), "sm_100")]
)
def test_a_card_is_asked_once_and_newer_ones_use_the_nearest_table(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card(*capability))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    target._detect_card.cache_clear()
    try:
        card = Target.of("cuda")
        assert (card.arch, card.sms) == (arch, 114)
        assert Target.of("cuda:3") == card
    finally:
        target._detect_card.cache_clear()


def test_old_cards_and_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card(7, 0))
    target._detect_card.cache_clear()
    with pytest.raises(TilewrightError, match="sm_70; tilewright needs sm_80"):
        Target.of("cuda:0")
    with pytest.raises(TilewrightError, match="'meta'"):
        Target.of("meta")


def test_the_key_is_the_same_in_every_process():
    script = "from tilewright.target import Target; print(Target.host().key, Target('sm_90').key)"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(texts) == 1
    assert Target("sm_90").key != Target("sm_80").key


def test_rates_are_those_of_the_architecture_whatever_the_card():
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
        rates = Target(arch).rates
        assert rates == Target(arch + "a", sms=1).rates
        assert rates.double <= rates.single < rates.matrix
    assert (
        Target("sm_86").rates.memory < Target("sm_90").rates.memory < Target("sm_100").rates.memory
    )
