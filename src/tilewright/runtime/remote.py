"""Sharing through a Redis server: what was measured, and with a common secret what was built.

A server is a convenience. One that is down, slow, full or returns garbage costs seconds at most,
after which it is left alone for a while; nothing that comes from it is believed unless it
matches its digest, and nothing is executed that is not signed with `config.remote_cache_secret`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tilewright import caches, config, metrics
from tilewright.runtime.limit import within

log = logging.getLogger("tilewright.remote")
T = TypeVar("T")
PREFIX = "tilewright:1:"
FAILURES, PAUSE = 2, 60.0  # in a row, and seconds without it then
# Of one answer: times the limit of each of its pieces, which a server that sends a few bytes now
# and then never reaches. And seconds in all of answers that take longer than building a kernel.
WHOLE, LONG, LOST = 10.0, 0.1, 5.0
MOST = 64 << 20  # bytes of one value


class Backend(Protocol):
    """What is asked of a server."""

    def get(self, key: str) -> bytes | None: ...
    def set(self, key: str, value: bytes) -> object: ...


@dataclass
class Stats:
    """How often something was put there, found there, or looked for in vain."""

    puts: int = 0
    hits: int = 0
    misses: int = 0
    errors: int = 0


stats = Stats()
_lock = threading.Lock()
_given: Backend | None = None  # in place of a server, for tests


@dataclass
class _Gate:
    """Whether a server is asked, for one kind of request: after failures in a row, or answers that
    together took too long, not for a while."""

    what: str
    failures: int = 0
    lost: float = 0.0  # seconds
    until: float = 0.0  # when it is tried again

    @property
    def is_open(self) -> bool:
        return time.monotonic() >= self.until

    def answered(self, seconds: float) -> None:
        with _lock:
            self.failures = 0
            self.lost += seconds if seconds > LONG else 0.0
            if self.lost > LOST:
                self._close(f"it took {self.lost:.1f} s of answers that were slow")

    def failed(self, error: BaseException) -> None:
        with _lock:
            stats.errors += 1
            self.failures += 1
            if self.failures >= FAILURES:
                self._close(str(error))

    def _close(self, why: str) -> None:
        self.until, self.lost = time.monotonic() + PAUSE, 0.0
        log.warning("the remote cache is left alone for %g s (%s): %s", PAUSE, self.what, why)


_reads, _writes = _Gate("reading"), _Gate("writing")  # one that is full can still be read


def use(backend: Backend | None) -> None:
    """Another backend in place of a server's; none: the server's again."""
    global _given
    _given = backend
    _open_gates()
    stats.__init__()


def _open_gates() -> None:
    for gate in (_reads, _writes):
        gate.failures, gate.lost, gate.until = 0, 0.0, 0.0


def enabled() -> bool:
    if config.force_disable_caches or config.autotune_remote_cache is False:
        return False
    return _given is not None or config.remote_cache_url is not None


def get(key: str) -> bytes | None:
    """What somebody put there, unchanged; None where there is nothing to be had."""
    found = _tried(_reads, lambda server: server.get(PREFIX + key))
    data = None if found is None else _opened(key, found)
    if data is None:
        stats.misses += 1
    else:
        stats.hits += 1
    return data


def put(key: str, data: bytes) -> None:
    if len(data) > MOST:
        return

    def store(server: Backend) -> bool:
        server.set(PREFIX + key, _sealed(key, data))
        return True

    if _tried(_writes, store):
        stats.puts += 1


def shares_kernels() -> bool:
    return enabled() and bool(config.remote_cache_secret)


def _sealed(key: str, data: bytes) -> bytes:
    return _signature(key, data) + data


def is_signed() -> bool:
    """Whether what is there was put there by who knows the secret."""
    return bool(config.remote_cache_secret)


def _opened(key: str, found: object) -> bytes | None:
    data = found if isinstance(found, bytes) else b""  # a client may be told to give text
    if len(data) >= 32 and hmac.compare_digest(_signature(key, data[32:]), data[:32]):
        return data[32:]
    _count("garbage, or of somebody who does not know the secret")
    return None


def _signature(key: str, data: bytes) -> bytes:
    """Of a name and what it stands for; by the secret, or else a digest alone."""
    digest = hashlib.sha256(key.encode() + b"\0" + data).digest()
    secret = config.remote_cache_secret
    return hmac.digest(secret.encode(), digest, "sha256") if secret else digest


def _tried(gate: _Gate, work: Callable[[Backend], T]) -> T | None:
    if not enabled() or not gate.is_open:
        return None
    began = time.monotonic()
    try:
        whole = WHOLE * config.remote_cache_timeout_seconds
        found = within(whole, functools.partial(work, _backend()), "no whole answer")
    except Exception as error:  # of the client, the network or the server: all the same to us
        gate.failed(error)
        _count(type(error).__name__)
        if isinstance(error, TimeoutError):
            _hang_up()
        return None
    gate.answered(time.monotonic() - began)
    return found


def _hang_up() -> None:
    """Close the connections: whoever reads without end would take all memory for it."""
    with contextlib.suppress(Exception):
        pool: Any = getattr(_backend(), "connection_pool", None)
        if pool is not None:
            pool.disconnect()


def _count(what: str) -> None:
    metrics.counters["remote"][what] += 1


def _backend() -> Backend:
    if _given is not None:
        return _given
    assert config.remote_cache_url is not None
    return _server(config.remote_cache_url, config.remote_cache_timeout_seconds)


@functools.cache
def _server(url: str, seconds: float) -> Any:
    import redis  # an extra: `pip install tilewright[redis]`

    return redis.Redis.from_url(
        url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=None
    )


@caches.register
def forget() -> None:
    """Try a server again that was left alone."""
    _open_gates()
    _server.cache_clear()
