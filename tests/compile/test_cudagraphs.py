"""Recording and replaying programs, on a card that is the CPU: replaying runs the program again,
with the very arguments it was recorded with, into the very results."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from tests.compile.as_cuda import as_cuda
from tilewright import config, metrics
from tilewright.host import cudagraphs, support
from tilewright.host.cudagraphs import Facts, Graph, Recording, Replayed
from tilewright.runtime import native
from tilewright.testing import run_and_get_code

Call = Callable[[list[Any]], Any]


class FakeCard:
    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.copied = 0
        self.fails = ""
        self.busy = False
        self.current = 1
        self.native = False  # replays by the extension module, through functions of its kind
        self.quickly = 0
        self._graphs: list[Callable[[int], None]] = []
        self._driver = (_Start(self._start), _Capturing(self._capturing), _Copy(self._copy))

    def stream(self) -> int:
        return self.current

    def recording(self) -> bool:
        return self.busy

    def pointers(self, args: list[Any]) -> tuple[int, ...]:
        return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args)

    def copy(self, to: int, start: int, size: int, stream: int) -> None:
        ctypes.memmove(to, start, size)
        self.copied += size

    def _start(self, graph: int, stream: int) -> int:
        self.quickly += 1
        self._graphs[graph - 1](stream)
        return 0

    def _capturing(self, stream: int, found: Any) -> int:
        found[0] = int(self.busy)
        return 0

    def _copy(self, to: int, start: int, size: int, stream: int) -> int:
        self.copy(to, start, size, stream)
        return 0

    def quick(self, graph: Graph, stream: int, recording: Recording, cells: Any) -> Any:
        if not self.native:
            return None
        addresses = tuple(ctypes.cast(f, ctypes.c_void_p).value for f in self._driver)
        make = functools.partial(native.module().Replay, addresses)
        of_stream = (lambda device: self.current, 0, stream)
        return cudagraphs.quick_replay(make, graph.handle, of_stream, recording, cells)

    def record(self, call: Call, args: list[Any]) -> tuple[Graph, Any]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.recorded += 1
        given = list(args)
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
        results = [torch.full_like(r, 99) if not _is_one_of(r, given) else r
                   for r in call(list(given))]  # fmt: skip

        for a, b in zip(given, before, strict=True):  # recording runs nothing
            if isinstance(a, torch.Tensor):
                a.copy_(b)

        def replay(stream: int) -> None:
            self.replayed += 1
            for kept, made in zip(results, call(list(given)), strict=True):
                kept.copy_(made)

        self._graphs.append(replay)
        return Graph(replay, len(self._graphs)), tuple(results)


def _is_one_of(result: torch.Tensor, args: list[Any]) -> bool:
    mine = result.untyped_storage().data_ptr()
    return any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == mine for a in args)


_Start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t)
_Capturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int))
_Copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t,
                         ctypes.c_size_t)  # fmt: skip


@pytest.fixture(params=["python", "extension"])
def card(request: pytest.FixtureRequest) -> FakeCard:
    metrics.reset()
    card = FakeCard()
    card.native = request.param == "extension"
    return card


def linear(args: list[Any]) -> Any:
    weight, x = args
    args.clear()
    return (x @ weight, x + 1)


def replayed(card: FakeCard, call: Call = linear, **known: Any) -> Replayed:
    return Replayed(call, Facts(0, known.pop("mutated", ()), **known), card)


def check(program: Replayed, weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    expected = linear([weight, x])
    args = [weight, x]
    results = program(args)
    assert args == []
    torch.testing.assert_close(results, expected)
    return results


def test_the_second_call_is_recorded_and_the_third_only_replayed(card: FakeCard):
    program, weight = replayed(card), torch.randn(4, 4)
    for _ in range(5):
        check(program, weight, torch.randn(3, 4))
    assert card.recorded == 1 and card.replayed == 4
    assert card.quickly == (3 if card.native else 0)


def test_what_does_not_move_is_not_copied(card: FakeCard):
    program, weight, keep = replayed(card), torch.randn(4, 4), []
    for _ in range(4):
        keep.append(torch.randn(3, 4))
        check(program, weight, keep[-1])
    assert card.copied == 4 * (3 * 4) * 4  # once when recording, and three replays
    weight += 1  # in place, as an optimiser does
    check(program, weight, keep[-1])
    assert card.recorded == 1


def test_a_parameter_that_moves_is_recorded_again_and_then_copied(card: FakeCard):
    program, x, keep = replayed(card), torch.randn(3, 4), []
    for _ in range(3):
        check(program, x.t() @ x, x)
        keep.append(torch.empty(4, 4))
    for _ in range(6):
        keep.append(torch.randn(4, 4))
        check(program, keep[-1], x)
    assert card.recorded == 1
    keep.append(torch.randn(4, 4))
    check(program, keep[-1], x)
    assert card.recorded == 1


def test_results_that_are_held_are_not_overwritten(card: FakeCard):
    program, weight = replayed(card), torch.randn(256, 256)
    held = []
    for _ in range(8):
        x = torch.randn(256, 256)
        held.append((check(program, weight, x), linear([weight, x])))
        for results, expected in held:
            torch.testing.assert_close(results, expected)
    assert card.recorded == cudagraphs.MOST_TURNS
    held.clear()
    gc.collect()
    before = card.replayed
    check(program, weight, torch.randn(256, 256))
    assert card.replayed == before + 1


def test_a_view_of_a_result_holds_it(card: FakeCard):
    program, weight = replayed(card), torch.randn(256, 256)
    for _ in range(2):
        check(program, weight, torch.randn(256, 256))
    part = check(program, weight, torch.randn(256, 256))[0][3]
    before = part.clone()
    check(program, weight, torch.randn(256, 256))
    torch.testing.assert_close(part, before)


def test_small_results_that_are_held_are_copied_out(card: FakeCard):
    program, weight, held = replayed(card), torch.randn(4, 4), []
    for _ in range(8):
        x = torch.randn(3, 4)
        held.append((check(program, weight, x), linear([weight, x])))
    for results, expected in held:
        torch.testing.assert_close(results, expected)
    assert card.recorded == 2 and card.replayed == 7


def test_every_size_has_a_recording_up_to_a_limit(card: FakeCard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cudagraphs, "MOST_SIZES", 3)
    program, weight = replayed(card, dynamic=True), torch.randn(4, 4)
    for _ in range(3):
        for n in (3, 5, 7, 9, 11):
            check(program, weight, torch.randn(n, 4))
    assert card.recorded == 3
    assert metrics.counters["cudagraphs"]["more sizes than are recorded"] == 2 * 3


def test_numbers_are_part_of_a_recording(card: FakeCard):
    def scale(args: list[Any]) -> Any:
        x, by = args
        args.clear()
        return (x * by,)

    program = replayed(card, scale, numbers=(1,))
    for by in (2, 3, 2, 3, 2, 3):
        x = torch.randn(5)
        torch.testing.assert_close(program([x, by])[0], x * by)
    assert card.recorded == 2


def test_arguments_that_are_written_to_come_back(card: FakeCard):
    def bump(args: list[Any]) -> Any:
        x, y = args
        args.clear()
        x += y
        return (x * 2,)

    program, keep = replayed(card, bump, mutated=(0,)), []
    for _ in range(5):
        x, y = torch.randn(6), torch.randn(6)
        keep += [x, y]
        expected = x + y
        (result,) = program([x, y])
        torch.testing.assert_close(x, expected)
        torch.testing.assert_close(result, 2 * expected)
    assert card.recorded == 2  # the second copies its result out, which `result` still is


def test_a_result_that_is_an_argument_is_the_caller_s(card: FakeCard):
    def both(args: list[Any]) -> Any:
        x, y = args
        args.clear()
        return (x, y[1:], x + y)

    program, keep = replayed(card, both), []
    for _ in range(4):
        x, y = torch.randn(6), torch.randn(6)
        keep += [x, y]
        first, second, third = program([x, y])
        assert first.data_ptr() == x.data_ptr() and second.data_ptr() == y.data_ptr() + 4
        torch.testing.assert_close((first, second, third), (x, y[1:], x + y))
    assert card.replayed == 3


def test_arguments_with_any_strides_are_copied(card: FakeCard):
    program, weight, keep = replayed(card), torch.randn(4, 4), []
    for _ in range(4):
        keep.append(torch.randn(4, 6).t()[::2])
        check(program, weight, keep[-1])
    assert card.recorded == 1
    program, keep = replayed(card), []
    for _ in range(4):
        keep.append(torch.randn(4, 1).expand(4, 4).t()[:3])
        check(program, weight, keep[-1])


def test_what_cannot_be_recorded_runs_plainly(card: FakeCard):
    card.fails = "operation not permitted when stream is capturing"
    program, weight = replayed(card), torch.randn(4, 4)
    for _ in range(4):
        check(program, weight, torch.randn(3, 4))
    assert card.replayed == 0 and "not permitted" in program.stopped
    assert any("not permitted" in reason for reason in metrics.counters["cudagraphs"])


def test_inside_another_recording_it_runs_plainly(card: FakeCard):
    program, weight = replayed(card), torch.randn(4, 4)
    card.busy = True
    for _ in range(3):
        check(program, weight, torch.randn(3, 4))
    assert card.recorded == 0


def test_streams_do_not_share_recordings(card: FakeCard):
    program, weight = replayed(card), torch.randn(4, 4)
    for stream in (1, 2, 1, 2, 1, 2):
        card.current = stream
        check(program, weight, torch.randn(3, 4))
    assert card.recorded == 2


class _Graph:
    """A capture that fails where it is told to."""

    fails = ""
    ended = 0

    def capture_begin(self, pool: Any, mode: str) -> None:
        if self.fails == "begin":
            raise RuntimeError("it cannot begin")

    def capture_end(self) -> None:
        _Graph.ended += 1
        if self.fails == "end":
            raise RuntimeError("it cannot end")


class _Generator:
    def __init__(self) -> None:
        self.state: Any = "capturing"

    def clone_state(self) -> Any:
        return "clean"

    def graphsafe_set_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("fails", ["begin", "run", "end"])
def test_a_capture_that_fails_leaves_nothing_behind(fails: str, monkeypatch: pytest.MonkeyPatch):
    generator = _Generator()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(_Graph, "fails", fails)
    monkeypatch.setattr(_Graph, "ended", 0)

    def run() -> int:
        if fails == "run":
            raise RuntimeError("an operation cannot be recorded")
        return 1

    with pytest.raises(RuntimeError):
        cudagraphs._captured(run, "pool", 0)
    assert _Graph.ended == (2 if fails == "end" else 1) and generator.state == "clean"


def test_threads_do_not_take_each_other_s_results(card: FakeCard):
    def slow(args: list[Any]) -> Any:
        results = linear(args)
        time.sleep(0.01)  # others may go on
        return results

    program, weight = replayed(card, slow), torch.randn(4, 4)
    for _ in range(3):
        check(program, weight, torch.randn(3, 4))
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(check, program, weight, torch.randn(3, 4)) for _ in range(12)]
        for call in calls:
            call.result()


def test_recordings_work_in_the_same_memory_which_outlives_them(card: FakeCard):
    worked_in: list[int] = []

    def working(count: int) -> Call:
        def call(args: list[Any]) -> Any:
            (x,) = args
            args.clear()
            memory = support.scratch_cuda((count,), (1,), torch.uint8)
            worked_in.append(memory.data_ptr())
            memory.fill_(7)
            return (x + 1,)

        return call

    with mock.patch.object(support, "empty_cuda", support.empty_cpu):
        programs = [replayed(card, working(n)) for n in (3000, 2000, 9000)]
        for program in programs:
            for _ in range(3):
                x = torch.randn(10)
                torch.testing.assert_close(program([x]), (x + 1,))
    first, second, third = (p.sizes[1].recordings[0].scratch for p in programs)
    assert first is not None and third is not None
    assert first is second is not third
    assert {first.data_ptr(), third.data_ptr()} < {*worked_in}


@pytest.mark.parametrize("space", ["DEFAULT", "EXHAUSTIVE"])
def test_ma_b4_a_template_is_recorded(space: str) -> None:
    """By `mode="max-autotune"`: halves in a batch with a bias, smaller than the specification's."""
    card, bias = FakeCard(), torch.randn(2, 1, 48).half()
    weight = torch.randn(2, 32, 48).half() / 8
    inputs = [torch.randn(2, 20, 32).half() for _ in range(5)]  # all at once: each has its place
    asked = {"max_autotune_gemm_backends": "TRITON", "max_autotune_gemm_search_space": space,
             "test_configs.max_mm_configs": 1}  # fmt: skip
    with (
        as_cuda(),
        mock.patch.object(cudagraphs, "Cuda", mock.Mock(return_value=card)),
        config.patch(asked),
    ):
        call = torch.compile(lambda x: torch.baddbmm(bias, x, weight), backend="tilewright",
                             mode="max-autotune")  # fmt: skip
        _, code = run_and_get_code(call, inputs[0])
        for x in inputs[1:]:
            torch.testing.assert_close(call(x), torch.baddbmm(bias, x, weight), rtol=2e-3,
                                       atol=2e-3)  # fmt: skip
    assert "triton_tem_fused_baddbmm" in "\n".join(code)
    assert (card.recorded, card.replayed) == (1, 4)


def test_what_kernels_count_with_is_of_one_stream(monkeypatch: pytest.MonkeyPatch):
    counters = support.Counters(0)
    monkeypatch.setattr(counters, "_device", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plain = [counters.get(stream, 9).data_ptr() for stream in (1, 2)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorded: list[int] = []
    for stream in (1, 2, 1):
        with support.turn.recorded(stream, None):
            recorded.append(counters.get(33, 8).data_ptr())
    others = counters.get(33, 8)
    assert len({*plain, *recorded, others.data_ptr()}) == 5 and recorded[0] == recorded[2]


def test_bad_data_of_a_replay_is_an_error_of_the_next(card: FakeCard):
    with mock.patch.object(support, "pinned", lambda n: torch.zeros(n, dtype=torch.int64)):
        flag = support.DeviceFlag({"gather": "model.py:7"})

    def call(args: list[Any]) -> Any:
        return linear(args)

    call.flags = (flag,)  # type: ignore[attr-defined]
    program, weight, x = replayed(card, call), torch.randn(4, 4), torch.randn(3, 4)
    for _ in range(3):
        program([weight, x])
    flag.seen[0] = 1
    with pytest.raises(IndexError, match="out of range"):
        program([weight, x])
    program([weight, x])
    assert card.recorded == 1 and card.replayed == 3
