"""Sharing through a Redis server: what was measured, and with a common secret what was built.

A server is a convenience. One that is down, slow, full or returns garbage costs a fraction of a
second, after which it is left alone for a while; nothing that comes from it is believed unless it
matches its digest, and nothing is executed that is not signed with `config.remote_cache_secret`.
"""

from __future__ import annotations

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

log = logging.getLogger("tilewright.remote")
T = TypeVar("T")
PREFIX = "tilewright:1:"
FAILURES, PAUSE = 2, 60.0  # in a row, and seconds without it then
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
_failures = 0
_until = 0.0  # when the server is tried again
_given: Backend | None = None  # in place of a server, for tests


def use(backend: Backend | None) -> None:
    """Another backend in place of a server's; none: the server's again."""
    global _given, _failures, _until
    _given, _failures, _until = backend, 0, 0.0
    stats.__init__()


def enabled() -> bool:
    if config.force_disable_caches or config.autotune_remote_cache is False:
        return False
    return _given is not None or config.remote_cache_url is not None


def get(key: str) -> bytes | None:
    """What somebody put there, unchanged; None where there is nothing to be had."""
    found = _tried(lambda server: server.get(PREFIX + key))
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

    if _tried(store):
        stats.puts += 1


def shares_kernels() -> bool:
    return enabled() and bool(config.remote_cache_secret)


def _sealed(key: str, data: bytes) -> bytes:
    return _signature(key, data) + data


def _opened(key: str, found: bytes) -> bytes | None:
    if len(found) >= 32 and hmac.compare_digest(_signature(key, found[32:]), found[:32]):
        return found[32:]
    _count("garbage, or of somebody who does not know the secret")
    return None


def _signature(key: str, data: bytes) -> bytes:
    """Of a name and what it stands for; by the secret, or else a digest alone."""
    digest = hashlib.sha256(key.encode() + b"\0" + data).digest()
    secret = config.remote_cache_secret
    return hmac.digest(secret.encode(), digest, "sha256") if secret else digest


def _tried(work: Callable[[Backend], T]) -> T | None:
    global _failures, _until
    if not enabled() or time.monotonic() < _until:
        return None
    try:
        found = work(_backend())
    except Exception as error:  # of the client, the network or the server: all the same to us
        with _lock:
            stats.errors += 1
            _failures += 1
            if _failures >= FAILURES:
                _until = time.monotonic() + PAUSE
                log.warning("the remote cache is left alone for %g s: %s", PAUSE, error)
        _count(type(error).__name__)
        return None
    _failures = 0
    return found


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
    global _failures, _until
    _failures, _until = 0, 0.0
    _server.cache_clear()
