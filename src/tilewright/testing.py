"""Helpers for tests, of this package and of programs that use it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from tilewright import caches, config, metrics, rules

P = ParamSpec("P")
R = TypeVar("R")


def run_and_get_code(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, list[str]]:
    """Call `fn` and return its result and every distinct code text it caused to be generated.

    Dynamo is reset first, so a function compiled before is compiled again. The texts come in
    the order they were made: a forward graph, and then its backward if `fn` runs one.
    """
    codes: list[str] = []

    def listen(code: str) -> None:
        if code not in codes:
            codes.append(code)

    torch._dynamo.reset()
    metrics.on_code.append(listen)
    try:
        result = fn(*args, **kwargs)
    finally:
        metrics.on_code.remove(listen)
    return result, codes


@dataclass(frozen=True)
class KernelFacts:
    """What can be read off the text of a Triton kernel. `kind` is by the family of its name; loads,
    stores, loops and atomics are those in the text: a loop's count once."""

    name: str
    kind: str
    arguments: int
    loads: int
    stores: int
    loops: int
    atomics: int


_KINDS = {"poi": "pointwise", "red": "reduction", "per": "persistent reduction", "tem": "template"}


def kernel_facts(code: str) -> list[KernelFacts]:
    """Of the Triton kernels in a generated program (`run_and_get_code`), in order."""
    found: list[KernelFacts] = []
    for text in re.split(r"^@triton\.jit\n", code, flags=re.M)[1:]:
        head = re.match(r"def (triton_(\w{3})_\w+)\(([^)]*)\):\n", text)
        if head is None:
            continue
        body = re.match(r"(?:(?:[ \t].*)?\n)*", text[head.end() :])
        lines = body[0] if body else ""
        arguments = [a for a in head[3].split(",") if a.strip() and "constexpr" not in a]
        counts = (len(re.findall(p, lines, re.M)) for p in (
            r"\btl\.load\(|\bdesc_\w+\.load\(", r"\btl\.store\(|\bdesc_\w+\.store\(",
            r"^ *for ", r"\btl\.atomic_"))  # fmt: skip
        kind = _KINDS.get(head[2], "other")
        found.append(KernelFacts(head[1], kind, len(arguments), *counts))
    return found


@contextlib.contextmanager
def fresh_cache() -> Generator[Path, None, None]:
    """An empty cache for a `with` block or a decorated function; yields its folder.

    Dynamo and every in-memory cache are cleared on entry and on exit. The folder is deleted at
    the end, and kept for inspection when the block raised.
    """
    folder = Path(tempfile.mkdtemp(prefix="tilewright_cache_"))
    _forget()
    try:
        with config.patch(cache_dir=str(folder)), _environment("TRITON_CACHE_DIR", folder):
            yield folder
    finally:
        _forget()
    shutil.rmtree(folder, ignore_errors=True)


def _forget() -> None:
    torch._dynamo.reset()
    caches.clear()


@contextlib.contextmanager
def _environment(name: str, folder: Path) -> Generator[None, None, None]:
    before = os.environ.get(name)
    os.environ[name] = str(folder / "triton")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def limited(name: str, limit: int) -> Generator[None]:
    """While one of `tilewright.rules` has another limit."""
    rule = getattr(rules, name)
    setattr(rules, name, replace(rule, limit=limit))
    try:
        yield
    finally:
        setattr(rules, name, rule)
