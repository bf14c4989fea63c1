"""Tests in a process that believes in a card: `bench/pretend` has how."""

from bench.pretend import cuda, pretended, run, stop

__all__ = ["cuda", "pretended", "run", "stop"]
