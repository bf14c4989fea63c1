"""What runs at every call, in C (`launch.cpp`): built once per machine, beside other work.

`module` waits for it. Where it cannot be built (no compiler, no Python headers) there is none, and
ctypes does the same in several times the time.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from tilewright.runtime import extension

SOURCE = Path(__file__).parent / "launch.cpp"
MOST = 39  # arguments of a function of the host's
ATTEMPTS = 3  # at building it: a cache may be deleted meanwhile

_lock = threading.Lock()
_made: tuple[int, Future[Any]] | None = None  # by process: after a fork its thread is gone
_attempts = 0


def start() -> Future[Any]:
    """The module under way; one that was built before is there at once."""
    global _made, _attempts
    with _lock:
        if _made is not None and _is_good(*_made):
            return _made[1]
        future: Future[Any] = Future()
        _made = os.getpid(), future
        _attempts += 1
    if extension.is_built(SOURCE):
        _load(future)
    else:
        # A process that ends sooner waits for it: the next one finds it built.
        load = contextvars.copy_context().run  # the options of this thread
        threading.Thread(target=load, args=(_load, future), name="tilewright-native").start()
    return future


def _is_good(process: int, future: Future[Any]) -> bool:
    """Whether there is no use in another attempt."""
    if not future.done():
        return process == os.getpid()
    return _attempts >= ATTEMPTS or (future.exception() is None and future.result() is not None)


def _load(future: Future[Any]) -> None:
    try:
        found = extension.load(SOURCE)
        if found is not None:
            found.tensor(torch.Tensor)
        future.set_result(found)
    except BaseException as error:  # whoever waits is told
        future.set_exception(error)


def module() -> Any:
    """The module, waited for; None where it cannot be built."""
    return start().result()


def when_ready(use: Callable[[Any], None]) -> None:
    """Call `use` with the module, now or when it is built; never where it cannot be."""

    def done(future: Future[Any]) -> None:
        if future.exception() is None and future.result() is not None:
            use(future.result())

    start().add_done_callback(done)


try:  # what Dynamo's own wrapper switches with; private, so it may go away
    from torch._C._dynamo.eval_frame import set_eval_frame  # type: ignore[import]
except ImportError:
    set_eval_frame = None


def entry(program: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """The program, called with its arguments one by one, and nothing of it seen by Dynamo."""
    future = start()
    found = future.result() if future.done() and future.exception() is None else None
    if found is not None and set_eval_frame is not None:
        return found.Entry(program, set_eval_frame)
    call = found.Entry(program) if found is not None else lambda *args: program(list(args))
    return torch._dynamo.disable(call, reason="a compiled graph")


def is_entry(function: Any) -> bool:
    """Whether a function keeps Dynamo away from what it calls, without a wrapper of Dynamo's."""
    module = start().result() if start().done() else None
    return module is not None and isinstance(function, module.Entry) and function.switch is not None
