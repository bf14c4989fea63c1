"""Compilers that run for this process, so that an interrupt can end them all.

Who waits for a compiler does so in a thread, and Python waits for its threads before it ends: after
Ctrl-C it would otherwise go on to build all that was ordered.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CROWDED = 5.0  # seconds in which others may end, where there is no room for another process
_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()
_ended = 0  # how often all of them were


class Ended(Exception):
    """The program was interrupted meanwhile."""


def run(command: Sequence[str], *, timeout: float, text: str = "", folder: Path | None = None
        ) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a compiler to its end with a text to read, and take what it says. What it writes on its
    way goes to a folder, where one is given: another may be full."""
    env = None if folder is None else {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    before, until = _ended, time.monotonic() + CROWDED
    while (process := _begun(command, env, until)) is None:
        time.sleep(0.1)
    with process:
        try:
            said, errors = process.communicate(text, timeout)
        except BaseException:
            process.kill()
            raise
        finally:
            with _lock:
                _running.discard(process)
    if process.returncode and before != _ended:
        raise Ended
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def _begun(command: Sequence[str], env: Mapping[str, str] | None, until: float
           ) -> subprocess.Popen[str] | None:  # fmt: skip
    """The compiler under way; none where there are as many processes as there may be, which is an
    error after that time."""
    with _lock:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",  # whatever the locale
                errors="replace",
                env=env,
                umask=0o077,  # the linker reads what the assembler wrote
            )
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            return None
        _running.add(process)
        return process


def end() -> None:
    """End all that run."""
    global _ended
    with _lock:
        _ended += 1
        for process in _running:
            process.kill()
