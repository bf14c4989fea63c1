"""One measurement for all ranks of a `torch.distributed` job, and one choice.

Whoever comes to a question first claims it in the job's key-value store, measures, and writes down
what it chose; the others wait for that and take it, so that all ranks run the same kernels. No
collective is involved: ranks may compile different graphs, in any order. One that is not heard of
for `config.autotune_rank_timeout_seconds` is taken for dead, and the next one claims the question;
without a store that answers, everybody measures for themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import torch

from tilewright import caches, config, metrics
from tilewright.runtime import store as artefacts
from tilewright.tune import records
from tilewright.tune.records import Choice
from tilewright.tune.results import Subject, Verdict

log = logging.getLogger("tilewright.tune")
POLL, BEAT = 0.05, 1.0  # seconds

_adopted: dict[tuple[str, str], Choice] = {}
caches.register(_adopted.clear)


def adopted(subject: Subject, offered: str) -> Choice | None:
    """What another rank chose of the same."""
    return _adopted.get((subject.key, offered))


def agreed(subject: Subject, offered: str, measure: Callable[[], Verdict]) -> Verdict:
    """The verdict, measured here or by another rank."""
    board = _board()
    if board is None or not subject.key:
        return measure()
    name = artefacts.key(subject.key, offered, records.environment(subject.device))
    question = _Question(board, f"tilewright/{name}")
    try:
        answer = question.answer_of_others()
    except Exception as error:  # the store is gone, or full, or speaks another language
        metrics.counters["ranks"]["without the others"] += 1
        log.warning("%s is measured by every rank: the job's store does not answer (%s)",
                    subject.title, error)  # fmt: skip
        return measure()
    if answer is not None:
        metrics.counters["ranks"]["adopted"] += 1
        found: dict[str, Any] = json.loads(answer)
        records.take(found["rows"])
        _adopted[subject.key, offered] = Choice(found["trial"], found["description"])
        return measure()
    metrics.counters["ranks"]["measured"] += 1
    try:
        with question.alive():
            verdict = measure()
    except BaseException:  # another's turn: nobody is to wait for an answer that does not come
        with contextlib.suppress(Exception):
            question.give_up()
        raise
    said = {"trial": verdict.winner.key, "description": verdict.winner.description,
            "rows": records.rows_of(subject)}  # fmt: skip
    with contextlib.suppress(Exception):
        question.tell(json.dumps(said))
    return verdict


def _board() -> Any:
    """The key-value store that the ranks of this job have in common."""
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() < 2:
        return None
    return distributed.distributed_c10d._get_default_store()


class _Question:
    def __init__(self, board: Any, name: str) -> None:
        self.board = board
        self.name = name
        self.me = f"{torch.distributed.get_rank()}"

    def answer_of_others(self) -> str | None:
        """What another rank found; None where it is ours to find."""
        owner = self._claim("")
        if owner == self.me:
            return self._read("done")
        heard, since = "", time.monotonic()
        while True:
            answer = self._read("done")
            if answer is not None:
                return answer
            beat = f"{owner} {self._read('beat')}"
            if beat != heard:
                heard, since = beat, time.monotonic()
            gave_up = self._read("given up") == owner
            if gave_up or time.monotonic() - since > config.autotune_rank_timeout_seconds:
                log.warning("the tuning of rank %s is taken over: %s", owner, "it failed" if gave_up
                            else f"nothing was heard of it for "
                            f"{config.autotune_rank_timeout_seconds:g} s")  # fmt: skip
                owner = self._claim(owner)
                if owner == self.me:
                    metrics.counters["ranks"]["taken over"] += 1
                    return self._read("done")
                since = time.monotonic()
            time.sleep(POLL)

    def _claim(self, before: str) -> str:
        """Who the question belongs to, which was `before`'s."""
        return self.board.compare_set(f"{self.name}/owner", before, self.me).decode()

    def _read(self, what: str) -> str | None:
        key = f"{self.name}/{what}"
        return self.board.get(key).decode() if self.board.check([key]) else None

    def tell(self, answer: str) -> None:
        # of two that measured the same for want of news the first one's counts
        self.board.compare_set(f"{self.name}/done", "", answer)

    def give_up(self) -> None:
        self.board.set(f"{self.name}/given up", self.me)

    @contextlib.contextmanager
    def alive(self) -> Generator[None]:
        """Let the others hear that this rank is at work."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            while not ended.wait(BEAT):
                count += 1
                with contextlib.suppress(Exception):
                    self.board.set(f"{self.name}/beat", f"{self.me} {count}")

        thread = threading.Thread(target=beat, name="tilewright-rank", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
