"""Launching through the driver, with a driver that only remembers."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compile.fake_driver import FakeDriver, fake_driver
from tilewright.runtime import launch, native, triton_build
from tilewright.runtime.triton_build import Binary, Built, TritonConfig, TritonSource

BINARY = Binary("key", b"\x7fELF...", "add", 2048, 4, 1, False, False, 0, 26, 0, (8, 8, 4, 8, 4))
SOURCE = TritonSource(
    "text", "add",
    (("a", "*fp32"), ("b", "*bf16"), ("n", "i32"), ("m", "i64"), ("s", "fp32")),
    (TritonConfig(),), capability=90, shared_memory=227 * 1024,
)  # fmt: skip


def load(device: int = 0, source: TritonSource = SOURCE, **changes: Any) -> launch.Launcher:
    return launch.load(source, Built(replace(BINARY, **changes), TritonConfig()), device)


@pytest.fixture(params=["extension", "ctypes"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    if request.param == "ctypes":
        monkeypatch.setattr(launch, "_extension", lambda: None)
    else:
        assert launch._extension() is not None, "the extension module must build here"
    with fake_driver() as made:
        yield made


def test_arguments_arrive_as_the_kernel_declares_them(driver: FakeDriver):
    kernel = load()
    x = torch.empty(3)
    kernel(77, 5, 6, 7, x, 4096, -3, 2**40, 1.5)
    (done,) = driver.launches
    assert (done.name, done.grid, done.block, done.shared) == ("add", (5, 6, 7), 128, 2048)
    assert done.stream == 77
    assert done.words[:2] == (x.data_ptr(), 4096)
    assert done.words[2] & 0xFFFFFFFF == 2**32 - 3
    assert done.words[3] == 2**40
    assert struct.unpack("<f", struct.pack("<Q", done.words[4])[:4]) == (1.5,)
    assert done.words[5] == done.words[6] == 0  # what Triton adds for itself


def test_an_empty_grid_launches_nothing(driver: FakeDriver):
    load()(0, 0, 1, 1, 0, 0, 0, 0, 0.0)
    assert driver.launches == []


def test_a_thread_without_a_context_gets_one(driver: FakeDriver):
    kernel = load()
    before = driver.contexts_set
    driver.fail_next(201)
    kernel(0, 1, 1, 1, 0, 0, 0, 0, 0.0)
    assert len(driver.launches) == 1 and driver.contexts_set == before + 1


def test_an_error_of_the_driver_is_an_error(driver: FakeDriver):
    kernel = load()
    driver.fail_next(700)
    with pytest.raises(RuntimeError, match=r"700 .*add"):
        kernel(0, 1, 1, 1, 0, 0, 0, 0, 0.0)


def test_wrong_arguments_are_refused(driver: FakeDriver):
    kernel = load()
    with pytest.raises(TypeError):
        kernel(0, 1, 1, 1, 0)
    with pytest.raises((TypeError, AttributeError)):
        kernel(0, 1, 1, 1, "x", 0, 0, 0, 0.0)


def test_an_argument_that_is_not_aligned_goes_to_a_build_for_the_others(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
):
    asked: list[TritonSource] = []

    def build(source: TritonSource) -> Built:
        asked.append(source)
        name = f"general{len(source.aligned)}"
        return Built(replace(BINARY, key=name, name=name), source.configs[0])

    monkeypatch.setattr(triton_build, "build", build)
    kernel = load(source=replace(SOURCE, aligned=frozenset({"a", "m"})))
    kernel(0, 1, 1, 1, 4096, 8, 3, 32, 0.0)
    assert [d.name for d in driver.launches] == ["add"] and not asked
    kernel(0, 1, 1, 1, 4096 + 4, 8, 3, 32, 0.0)
    kernel(0, 1, 1, 1, 4096, 8, 3, 33, 0.0)
    kernel(0, 1, 1, 1, 4096 + 4, 8, 3, 32, 0.0)
    names = ["add", "general1", "general0", "general1"]
    assert [d.name for d in driver.launches] == names
    assert [source.aligned for source in asked] == [frozenset({"m"}), frozenset()]
    assert driver.launches[2].words[3] == 33


def test_a_module_is_loaded_once_per_device(driver: FakeDriver):
    before = driver.loads
    first, second = load(), load()
    assert first is second and driver.loads == before + 1
    assert load(1) is not first and driver.loads == before + 2


def test_much_shared_memory_is_asked_for(driver: FakeDriver):
    load(key="big", shared=100_000)
    assert driver.shared_asked == 100_000


def test_clusters_and_cooperative_grids_are_attributes():
    with fake_driver() as driver:
        load(key="special", num_ctas=2, cooperative=True)(0, 3, 1, 1, 0, 0, 0, 0, 0.0)
        (done,) = driver.launches
        assert done.attributes == 2 and done.grid == (6, 1, 1)


def test_a_launch_is_one_call_of_the_extension_and_makes_nothing():
    """No function of Python's runs for it (`python -m bench` has the microseconds)."""
    seen: list[str] = []

    def noted(frame: Any, event: str, what: Any) -> None:
        seen.append(event)

    with fake_driver() as driver:
        kernel = load()
        x, y = torch.empty(3), torch.empty(3)
        kernel(0, 1, 1, 1, x, y, 1, 2, 3.0)
        before = len(driver.launches)
        sys.setprofile(noted)
        try:
            for _ in range(50):
                kernel(0, 1, 1, 1, x, y, 1, 2, 3.0)
        finally:
            sys.setprofile(None)
        assert len(driver.launches) == before + 50
    assert "call" not in seen
    assert seen.count("c_call") <= 50 + 1  # and the one that ends this


def test_graphs_are_started_by_the_driver() -> None:
    with fake_driver():
        start = launch.graph_starter()
        assert start is not None
        assert start(12, 7) == 0
        assert start(13, 7) == 700


def test_functions_of_the_host_take_tensors_addresses_and_integers() -> None:
    seen: list[tuple[int, ...]] = []
    three = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(lambda *args: seen.append(args))
    address = ctypes.cast(three, ctypes.c_void_p).value
    function = native.module().Function("three", address, 3)
    x, w = torch.empty(3), torch.nn.Parameter(torch.empty(3))
    function(x, -5, True)
    function(w, x.data_ptr() + 4, 2**62)
    assert seen == [(x.data_ptr(), -5, 1), (w.data_ptr(), x.data_ptr() + 4, 2**62)]
    with pytest.raises(TypeError, match="three takes 3 arguments"):
        function(x)
    with pytest.raises(AttributeError, match="data_ptr"):
        function(x, "y", 1)


@pytest.mark.parametrize("count", [0, 1, 7, 20, native.MOST])
def test_functions_of_the_host_take_many_arguments(count: int) -> None:
    seen: list[int] = []
    made = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(lambda *args: seen.extend(args))
    native.module().Function("many", ctypes.cast(made, ctypes.c_void_p).value, count)(*range(count))
    assert seen == list(range(count))


def test_too_many_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        native.module().Function("many", 1, native.MOST + 1)


def test_an_entry_gives_its_arguments_as_a_list() -> None:
    entry = native.module().Entry(lambda args: (args, type(args)))
    assert entry(1, "b") == ([1, "b"], list)
    assert entry() == ([], list)
    with pytest.raises(TypeError, match="no keywords"):
        entry(a=1)
    with pytest.raises(ZeroDivisionError):
        native.module().Entry(lambda args: 1 // 0)()


def test_an_entry_switches_around_its_program() -> None:
    state: list[Any] = ["on"]

    def switch(value: Any) -> Any:
        state.append(value)
        return state[-2]

    def program(args: list[Any]) -> Any:
        assert state[-1] is None
        return 1 // args[0]

    entry = native.module().Entry(program, switch)
    assert entry(1) == 1 and state == ["on", None, "on"]
    with pytest.raises(ZeroDivisionError):
        entry(0)
    assert state == ["on", None, "on", None, "on"]
    with pytest.raises(KeyError):
        native.module().Entry(program, {}.__getitem__)(1)
