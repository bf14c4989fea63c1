"""Timing: on a CPU, and on a card that is not there."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewright.tune import clock

CPU = torch.device("cpu")


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_run_takes_at_least_what_it_computes():
    found = clock.of(CPU).bench(lambda stream, which: busy(2e-4), 1)
    assert min(found.sample() for _ in range(3)) >= 190.0


def test_short_runs_are_measured_in_batches():
    calls: list[int] = []
    found = clock.of(CPU).bench(lambda stream, which: calls.append(which), 3)
    before = len(calls)
    found.sample()
    assert len(calls) - before >= 30 and len(calls) % 3 == 0
    assert calls[:6] == [0, 1, 2, 0, 1, 2]


def test_the_sets_take_turns_between_samples_of_long_runs(monkeypatch):
    calls: list[int] = []

    def run(stream: int, which: int) -> None:
        assert stream == 0
        calls.append(which)
        busy(5e-4)

    monkeypatch.setattr(clock, "ALONE", 1)
    monkeypatch.setattr(clock, "delays", lambda: 0)
    found = clock.of(CPU).bench(run, 4)
    calls.clear()
    for _ in range(8):
        found.sample()
    assert calls == [k % 4 for k in range(8) for _ in range(2)], "each led by one of its own"


def test_a_batch_that_was_disturbed_is_taken_again(monkeypatch):
    """Where others have the core, our threads wait for it."""
    now, waited, delays = [0], [0], list[int]()  # of runs to come; each batch is led by a run

    def run(stream: int, which: int) -> None:
        late = 1000 * (delays.pop(0) if delays else 0)
        now[0] += 1_000_000 + late
        waited[0] += late

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    monkeypatch.setattr(clock, "delays", lambda: waited[0])
    found = clock.of(CPU).bench(run, 1)
    delays += [0, 4000, 0, 700, 0, 0, 0, 20, 0, 10, 0, 900]
    assert found.sample() == 1010.0, "the one in the middle"
    assert delays == [0, 900], "three were hardly disturbed"
    assert found.waited == 10.0
    delays[:] = [0, 5000] * 2
    assert found.sample() == 6000.0
    assert found.waited == 5000.0 and not delays
    delays[:] = [0, 2000] * 20
    found.sample(), found.sample()
    delays[:] = [0, 2000] * 20
    assert found.sample() == 3000.0
    assert len(delays) == 38, "it does not try for ever"


def test_how_long_threads_wait_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The sum of what Linux says of each thread, in the second of three numbers; 0 where it says
    nothing."""
    for thread, waited in (("11", 2000), ("12", 30), ("13", 500_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"987654321 {waited} 17\n")
    threads = sorted(os.listdir(tmp_path))
    linux = SimpleNamespace(
        getpid=os.getpid, close=os.close, pread=os.pread, O_RDONLY=os.O_RDONLY,
        listdir=lambda folder: threads,
        open=lambda path, flags: os.open(path.replace("/proc/self/task", str(tmp_path)), flags),
    )  # fmt: skip
    monkeypatch.setattr(clock, "os", linux)
    found = clock._Delays()
    assert found() == 2000 + 30 + 500_000
    threads.append("14")  # which has just ended
    assert found() == 2000 + 30 + 500_000
    found.close()
    monkeypatch.setattr(linux, "listdir", lambda folder: os.listdir(tmp_path / "nowhere"))
    assert found() == 0


def test_what_a_run_raises_is_raised():
    def run(stream: int, which: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        clock.of(CPU).bench(run, 1)


def test_ma_b11_sample_buffers_leave_the_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn):
        assert clock.filled(dtype, 100, CPU).dtype == dtype
    assert torch.equal(torch.rand(4), expected)


def test_sets_exceed_the_cache_within_reason():
    assert clock.sets_beyond_cache(1 << 40, CPU) == 1
    assert clock.sets_beyond_cache(16, CPU) == 8


# ---- a card that is not there


class FakeCuda:
    """As much of torch.cuda as the clock uses: time passes only while kernels run on the card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0  # microseconds on the card
        self.recording: list[float] | None = None
        self.graphs: list[list[float]] = []
        self.can_record = True
        self.current = 0
        for name in ("Stream", "Event", "CUDAGraph", "device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("current_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def launch(self, microseconds: float) -> None:
        if self.recording is None:
            self.now += microseconds + 10.0  # the card waits for the host
        elif self.can_record:
            self.recording.append(microseconds)
        else:
            raise RuntimeError("operation not permitted when stream is capturing")

    def Stream(self):
        return SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None,
                               synchronize=lambda: self._advance(100.0))  # fmt: skip

    def _advance(self, microseconds: float) -> None:
        self.now += microseconds

    def Event(self, enable_timing: bool):
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) / 1000
        return event

    def CUDAGraph(self):
        launches: list[float] = []

        def begin(capture_error_mode: str) -> None:
            self.recording = launches

        def end() -> None:
            self.recording = None
            self.graphs.append(launches)

        return SimpleNamespace(capture_begin=begin, capture_end=end,
                               replay=lambda: self._advance(sum(launches) + 3.0))  # fmt: skip

    @contextlib.contextmanager
    def device(self, device: torch.device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def stream(self, stream: object):
        return contextlib.nullcontext()

    def current_stream(self):
        return self.Stream()

    def synchronize(self, device: object) -> None: ...


@pytest.mark.parametrize("microseconds", [2.0, 20.0, 3000.0])
@pytest.mark.parametrize("sets", [1, 3])
def test_a_graph_of_many_launches_is_timed(monkeypatch, microseconds, sets):
    card, seen = FakeCuda(monkeypatch), []

    def run(stream: int, which: int) -> None:
        assert stream == 7
        seen.append(which)
        card.launch(microseconds)

    found = clock.of(torch.device("cuda", 0)).bench(run, sets)
    assert found.sample() == pytest.approx(microseconds, rel=0.02)
    launches = card.graphs[-1]
    assert len(launches) % sets == 0 and len(launches) <= clock.MOST_LAUNCHES
    assert sum(launches) >= 0.6 * clock.SAMPLE
    assert set(seen) == set(range(sets))


def test_a_sample_is_led_by_as_much_work_of_its_own(monkeypatch):
    """So neither what starting it costs nor who ran before is in it; long runs need no lead."""
    card = FakeCuda(monkeypatch)
    for microseconds, replays in ((20.0, 2), (9000.0, 1)):
        run = lambda stream, which, us=microseconds: card.launch(us)  # noqa: E731
        found = clock.of(torch.device("cuda", 0)).bench(run, 1)
        found.sample()  # the card is warm now
        before = card.now
        found.sample()
        of_one = sum(card.graphs[-1]) + 3.0
        assert card.now - before == pytest.approx(replays * of_one)


def test_samples_are_levelled(monkeypatch):
    card = FakeCuda(monkeypatch)
    found = clock.of(torch.device("cuda", 0)).bench(lambda stream, which: card.launch(20.0), 2)
    found.level(10.0)
    assert len(card.graphs[-1]) == clock._whole(clock.SAMPLE / 10, 2, 200)
    assert found.sample() == pytest.approx(20.0, rel=0.02)


def test_ma_b12_everything_happens_on_the_device_of_the_product(monkeypatch):
    """Which is not the current one."""
    card = FakeCuda(monkeypatch)

    def run(stream: int, which: int) -> None:
        assert card.current == 1
        card.launch(50.0)

    found = clock.of(torch.device("cuda", 1)).bench(run, 2)
    assert found.sample() == pytest.approx(50.0, rel=0.02)
    assert card.current == 0


def test_what_cannot_be_recorded_is_launched_one_by_one(monkeypatch):
    card = FakeCuda(monkeypatch)
    card.can_record = False
    found = clock.of(torch.device("cuda", 0)).bench(lambda stream, which: card.launch(90.0), 1)
    assert found.sample() == pytest.approx(100.0)


def test_a_card_that_fails_is_told_apart_from_a_candidate_that_fails(monkeypatch):
    card = FakeCuda(monkeypatch)
    found = clock.of(torch.device("cuda", 0))
    assert found.broken() == ""

    def synchronize(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore words")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert found.broken() == "CUDA error: an illegal memory access was encountered"
    card.can_record = False
    with pytest.raises(RuntimeError, match="capturing"):
        found.bench(lambda stream, which: card.launch(1.0), 1)
