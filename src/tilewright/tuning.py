"""`tilewright.tune`: all products of a program measured at once, on every card or every machine.

The program is compiled once to find its questions: which products there are, and what is offered
for each. Questions are data: whoever answers one builds the candidates, makes inputs of their
descriptions, measures, and gives back the records. With all of them answered the program is
compiled again, and finds what it needs. An answer that is lost, with the worker that was to give
it, is asked for again.
"""

from __future__ import annotations

import functools
import importlib
import logging
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from tilewright import caches, config, metrics, monitor
from tilewright.errors import TilewrightError
from tilewright.tune import child, records, select
from tilewright.tune.failures import Crashed
from tilewright.tune.pool import TuningProcessPool
from tilewright.tune.results import Subject, Trial, Verdict

log = logging.getLogger("tilewright.tune")
Engine = Literal["local", "ray"]
ATTEMPTS = 3  # at one question
LONGEST = 1800.0  # seconds for one answer


@dataclass(frozen=True)
class Candidate:
    """A trial as data, and as a trial again where it is measured."""

    name: str
    provider: str
    description: str
    estimate: float
    key: str
    is_library: bool
    compiles: bool
    sent: child.Remote
    _opened: list[child.Opened] = field(default_factory=list["child.Opened"], compare=False)

    @classmethod
    def of(cls, trial: Trial) -> Candidate | None:
        made = getattr(trial, "remote", None)
        if made is None:
            return None
        return cls(trial.name, trial.provider, trial.description, trial.estimate, trial.key,
                   trial.is_library, trial.compiles, made())  # fmt: skip

    def start(self) -> None: ...

    def wait(self, seconds: float) -> bool:
        return True

    def finish(self) -> None:
        if not self._opened:
            self._opened.append(self.sent.open())

    def run(self, stream: int, which: int) -> None:
        self._opened[0].run(stream, which)

    def check(self) -> str:
        self.finish()
        return self._opened[0].check()


@dataclass(frozen=True)
class Question:
    """A subject and what is offered for it."""

    subject: Subject
    candidates: tuple[Candidate, ...]

    def __call__(self) -> tuple[records.Tables, str]:
        """Measure, in a cache folder of its own: the records, and the name of the winner."""
        caches.clear()
        with tempfile.TemporaryDirectory(prefix="tilewright-tune-") as folder:
            with config.patch(cache_dir=folder, autotune_in_subproc=False):
                verdict: Verdict = select.choose(self.subject, self.candidates)
                tables = records.rows_of(self.subject)
            caches.clear()
        return tables, verdict.winner.name


@dataclass(frozen=True)
class Report:
    """What tuning found."""

    questions: int
    answered: int
    lost: tuple[str, ...]  # that nobody answered: they are measured where they are needed
    winners: dict[str, str]
    seconds: float


class Answering(Protocol):
    """Something that answers questions: gives each one's answer, or the error it ended with."""

    def __call__(self, questions: Sequence[Question]) -> list[Any]: ...


def tune(function: Callable[..., Any], *calls: tuple[Any, ...], mode: str = "max-autotune",
         options: dict[str, Any] | None = None, engine: Engine = "local",
         workers: int | None = None) -> Report:  # fmt: skip
    """Measure all products that `function` has when it is called with each of `calls`, which are
    tuples of arguments. With `engine="local"` by one process for each card
    (`autotune_multi_device`), with `engine="ray"` by the workers of a Ray cluster. Compiling the
    function with the same mode and options afterwards measures nothing."""
    began = time.perf_counter()
    wanted = {**config.options_for_mode(mode), **(options or {})}
    with config.patch(config.checked(wanted)):
        questions = _questions(function, calls, wanted)
        answers = _engine(engine, workers)(questions) if questions else []
        lost, winners = [], {}
        for question, answer in zip(questions, answers, strict=True):
            if isinstance(answer, BaseException):
                lost.append(f"{question.subject.title}: {answer}")
                log.warning("%s was not tuned: %s", question.subject.title, answer)
            else:
                records.take(answer[0])
                winners[question.subject.title] = answer[1]
    return Report(len(questions), len(winners), tuple(lost), winners,
                  time.perf_counter() - began)  # fmt: skip


def _questions(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]],
               options: dict[str, Any]) -> list[Question]:  # fmt: skip
    """What a program asks when it is compiled; nothing is measured or kept meanwhile."""
    if not calls or any(type(call) is not tuple for call in calls):
        hint = "tune(f, (x, y)) for f(x, y): one tuple of arguments per call"
        raise TilewrightError("tune needs calls to tune for", hint=hint)
    found: dict[str, Question] = {}
    torch._dynamo.reset()
    with _collected(found), config.patch(fx_graph_cache=False):
        for call in calls:
            given = {**options, "fx_graph_cache": False}
            torch.compile(function, backend="tilewright", options=given)(*call)
    torch._dynamo.reset()
    return list(found.values())


@contextmanager
def _collected(found: dict[str, Question]) -> Generator[None]:
    """Have questions collected, and answered without measuring."""

    def note(subject: Subject, trials: Sequence[Trial]) -> None:
        sent = [c for c in map(Candidate.of, trials) if c is not None]
        if len(sent) == len(trials) > 1 and subject.key:
            found.setdefault(subject.key, Question(subject, tuple(sent)))

    before, select.collect = select.collect, note
    caches.clear()
    try:
        yield
    finally:
        select.collect = before
        caches.clear()


# ---- who answers


def _engine(name: str, workers: int | None) -> Answering:
    if name == "local":
        return _local
    if name == "ray":
        return functools.partial(_by_ray, workers=workers)
    raise TilewrightError(f"there is no engine {name!r}", hint="engine is 'local' or 'ray'")


def _local(questions: Sequence[Question]) -> list[Any]:
    pool = TuningProcessPool()
    try:
        answers = pool.run(questions, LONGEST)
        for _ in range(ATTEMPTS - 1):
            lost = [k for k, a in enumerate(answers) if isinstance(a, Crashed)]
            for k, again in zip(lost, pool.run([questions[k] for k in lost], LONGEST), strict=True):
                answers[k] = again
        return answers
    finally:
        pool.shutdown()


def _by_ray(questions: Sequence[Question], workers: int | None) -> list[Any]:
    """Every question a task of its own: Ray gives those of a worker that died to another."""
    try:
        ray: Any = importlib.import_module("ray")  # an extra, so it may have no types to check
    except ImportError as error:
        raise TilewrightError("engine='ray' needs Ray",
                              hint="pip install tilewright[ray]") from error  # fmt: skip
    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=workers, log_to_driver=False)
    try:
        cards = 1 if any(q.subject.device.type == "cuda" for q in questions) else 0
        settings = child.Settings.now()
        answer = ray.remote(num_cpus=1, num_gpus=cards, max_retries=ATTEMPTS - 1
                            )(_answered)  # fmt: skip
        waiting = [answer.remote(q, settings) for q in questions]
        return [_had(ray, w) for w in waiting]
    finally:
        if own:
            ray.shutdown()


def _had(ray: Any, waiting: Any) -> Any:
    try:
        return ray.get(waiting, timeout=LONGEST)
    except Exception as error:  # a worker that died too often, or what the question raised
        return error


def _answered(question: Question, settings: child.Settings) -> tuple[records.Tables, str]:
    settings.take()
    with config.patch(dict(settings.options)):
        return question()


# ---- warming up


@dataclass(frozen=True)
class Warmth:
    """What warming up compiled, built and tuned, and how long it took."""

    compilations: int
    builds: int
    tunings: int
    seconds: float


def warm_up(function: Callable[..., Any], *calls: tuple[Any, ...], repeat: int = 2) -> Warmth:
    """Call a compiled function with each of `calls`, which are tuples of arguments, so often that
    all is compiled, tuned and recorded that such calls need."""
    if not calls or any(type(call) is not tuple for call in calls):
        hint = "warm_up(f, (x, y)) for f(x, y): one tuple per call"
        raise TilewrightError("warm_up needs calls to warm up for", hint=hint)
    before, began = monitor.counts.copy(), time.perf_counter()
    for call in calls:
        for _ in range(repeat):
            function(*call)
    done = monitor.counts - before
    metrics.counters["serving"]["warmed up"] += 1
    return Warmth(done["compilation"], done["build"], done["tuning"], time.perf_counter() - began)
