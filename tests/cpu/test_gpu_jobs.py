"""The cases for a card, in processes: one that breaks costs itself alone."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.gpu.jobs import finished

DEEDS = ["last", "unusable", "hangs", "dies", "first"]


def serve(ends: Any) -> None:
    while True:
        name = ends.recv()
        if not name:
            ends.send((DEEDS, {"last"}))
            continue
        if name == "dies":
            os._exit(9)
        if name == "hangs":
            time.sleep(600)
        ends.send((name, f"in {os.getpid()}", 0.0, name != "unusable"))


def test_each_case_costs_itself_alone() -> None:
    found = {name: said for name, said, _ in finished([], 1, serve=serve, most=1.0)}
    assert list(found) == ["first", "dies", "hangs", "unusable", "last"]
    assert found["dies"] == "FAILED ended its process with code 9"
    assert found["hangs"] == "FAILED took longer than 1 s"
    assert len({found[name] for name in ("first", "unusable", "last")}) == 3  # processes


def test_nothing_begins_after_its_time() -> None:
    assert not list(finished(["first"], 1, 0.0, serve=serve))
