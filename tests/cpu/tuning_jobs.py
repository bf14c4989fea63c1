"""What another process is asked to do; it imports this."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tilewright import config


def number() -> float:
    return 3.14


def sleep() -> None:
    time.sleep(120)


def fail(*_: object) -> None:
    raise RuntimeError("it went wrong")


def leave() -> None:
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def close() -> None:
    """What it is heard by is closed, and it goes on."""
    os.closerange(0, 100)
    time.sleep(120)


def around() -> tuple[str, str]:
    """What there is to read, and how readily Linux ends it."""
    return sys.stdin.read(), Path("/proc/self/oom_score_adj").read_text()


def wander() -> None:
    """To another folder; and a process made like this one answers as well."""
    os.chdir("/proc")
    os.fork()


def folder() -> str:
    return os.getcwd()


class Odd(Exception):
    """One that cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("mine")


def odd() -> None:
    raise Odd(1, 2)


def length(text: str) -> int:
    return len(text)


def harm() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def trap() -> None:
    """What makes a card unusable for the process."""
    import torch

    torch.zeros(3, device="cuda")[torch.tensor([1 << 20], device="cuda")].sum().item()


def process() -> int:
    return os.getpid()


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def option() -> int:
    return config.max_fusion_size


def settings() -> list[Any]:
    """Of torch's, on which a library's call depends; and they are left as something else."""
    import torch

    of = torch.backends
    found = [of.mkldnn.matmul.fp32_precision, of.cudnn.benchmark, torch.get_num_threads(),
             torch.are_deterministic_algorithms_enabled()]  # fmt: skip
    of.mkldnn.matmul.fp32_precision, of.cudnn.benchmark = "ieee", False
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    return found


def set_option() -> None:
    config.max_fusion_size = 5


class TestBenchmarkRequest:
    """A benchmark that sleeps, raises, ends the process or gives its result; it may insist on the
    card it sees."""

    __test__ = False

    def __init__(self, result: float = 0.0, device: int | None = None, sleep: float | None = None,
                 exc: Exception | None = None, crash: bool = False) -> None:  # fmt: skip
        self.result, self.device, self.sleep, self.exc, self.crash = (
            result, device, sleep, exc, crash)  # fmt: skip

    def benchmark(self) -> float:
        if self.device is not None:
            assert os.environ["CUDA_VISIBLE_DEVICES"] == str(self.device)
        if self.sleep is not None:
            time.sleep(self.sleep)
        if self.exc is not None:
            raise self.exc
        if self.crash:
            os._exit(1)
        return self.result


def answer() -> int:
    return 42


def imports() -> None:
    """What every look needs."""
    importlib.import_module("tilewright.tune.clock")


def index(device: object) -> object:
    return getattr(device, "index", None)


def held() -> tuple[str, int]:
    """The site whose memory a process that times has, and the sites of plans."""
    from tilewright.gemm import plan
    from tilewright.tune import child

    return child._table.site, len(plan._here)


@dataclass(frozen=True)
class Looked:
    """A candidate as it is sent to several cards. It says in a file which card it is run on, and
    takes as long as it is told to; on a card that is slower twice as long."""

    key: str
    us: float
    file: str
    how: str = ""
    slower_on: str = ""
    site: str = "site"
    sets: int = 1

    @property
    def device(self) -> Any:
        import torch

        return torch.device("cpu")

    def open(self) -> Looked:
        from tilewright.tune import child

        card = visible()
        with open(self.file, "a") as said:
            said.write(f"{card} {self.key}\n")
        if self.how == "crash":
            os._exit(3)
        if self.how == "hang":
            sleep()
        if self.how == f"fails on {card}":
            raise RuntimeError("CUDA error: unknown error")
        if self.how.startswith("fails"):  # the card that fails is given something meanwhile
            end = time.monotonic() + 60
            while self._is_early() and time.monotonic() < end:
                time.sleep(0.01)
        child._table.clock = cast("Any", self)
        return self

    def _is_early(self) -> bool:
        """Whether the card that fails has had less than this one, as long as it is in use."""
        lines = [line.split() for line in Path(self.file).read_text().splitlines()]
        cards = [card for card, key in lines if key != "mm"]
        failed = cards.count(self.how.split()[-1])
        return failed < min(2, len(cards) - failed)

    def run(self, stream: int, which: int) -> None: ...

    def check(self) -> str:
        return ""

    def bench(self, run: Any, sets: int) -> Looked:
        """Its own clock."""
        return run.__self__

    waited = 0.0

    def sample(self) -> float:
        return self.us * (2.0 if visible() == self.slower_on else 1.0)


def of_main() -> Any:
    """A job that a program's main file defines, as it is sent from there."""
    main = sys.modules["__main__"]

    def mine() -> None: ...

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    cast("Any", main).mine = mine
    return mine
