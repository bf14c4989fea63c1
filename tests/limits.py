"""Other limits of the timed rules, so that small programs reach what large ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright import rules


def limit(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    """From here on to the end of a test a rule has another limit."""
    monkeypatch.setattr(rules, name, replace(getattr(rules, name), limit=value))
