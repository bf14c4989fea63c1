"""Dynamo, for processes that compile thousands of small programs."""

from __future__ import annotations

import sys


def without_statistics() -> None:
    """Without what it does after each graph for its statistics and for long-lived processes: it
    flushes caches to time its guards, collects garbage, and writes a log of its phases that nobody
    reads. That was a twelfth of a test's own time. Nothing is done before torch's own modules are
    imported."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.guards.profile_guard_manager = lambda *_: 0.0
        dynamo.utils.ChromiumEventLogger._log_timed_event = lambda *_: {}
        dynamo.config.run_gc_after_compile = False
