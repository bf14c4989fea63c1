"""What is run: one case is one operator sample in one mode."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import types
import unittest
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}
# The card's sweep has one more: half precision is what it is for.
if (DEVICE := os.environ.get("TILEWRIGHT_SWEEP_DEVICE", "cpu")) == "cuda":
    DTYPES["float16"] = torch.float16
MODES = ("static", "dynamic")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, order=True)
class Group:
    """All samples of one operator for one dtype, one shape mode and one direction."""

    op: str
    dtype: str
    mode: str
    direction: str

    def __str__(self) -> str:
        return f"{self.op}/{self.dtype}/{self.mode}/{self.direction}"

    @property
    def fingerprint(self) -> int:
        """A number that is the same in every process and every run."""
        return zlib.crc32(str(self).encode())


@dataclass(frozen=True, order=True)
class Case:
    group: Group
    sample: int

    def __str__(self) -> str:
        return f"{self.group}/{self.sample}"

    @staticmethod
    def parse(text: str) -> Case:
        parts = text.split("/")
        if len(parts) != 5 or not parts[4].isdigit():
            raise ValueError(
                f"not a case: {text!r}; write op/dtype/mode/direction/sample, "
                "for example add/float32/static/forward/0"
            )
        return Case(Group(*parts[:4]), int(parts[4]))


@functools.cache
def operators() -> dict[str, Any]:
    """PyTorch's operator descriptions by full name (name.variant)."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's tables come with test classes that derive from its; nobody runs those here.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    # Importing the table takes seconds, and command line help should not.
    from torch.testing._internal.common_methods_invocations import op_db

    _unwrap_random_operators()
    return {op.full_name: op for op in op_db}


def _unwrap_random_operators() -> None:
    """Take the seeding out of the random operators: it breaks the graph, and we seed every run."""

    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = call  # type: ignore[attr-defined]


def directions(op: Any, dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in op.supported_backward_dtypes(DEVICE):
        return DIRECTIONS
    return ("forward",)


def groups(
    *,
    pattern: str = "",
    dtypes: tuple[str, ...] = tuple(DTYPES),
    modes: tuple[str, ...] = MODES,
    wanted: tuple[str, ...] = DIRECTIONS,
) -> Iterator[Group]:
    """Every group that PyTorch says works on the device, in a fixed order."""
    matches = re.compile(pattern).search
    for name, op in sorted(operators().items()):
        if not matches(name):
            continue
        for dtype in dtypes:
            if DTYPES[dtype] not in op.supported_dtypes(DEVICE):
                continue
            for direction in directions(op, DTYPES[dtype]):
                if direction in wanted:
                    yield from (Group(name, dtype, mode, direction) for mode in modes)


def in_shard(group: Group, index: int, count: int) -> bool:
    """Spread groups over shards by fingerprint: 1 <= index <= count."""
    return group.fingerprint % count == index - 1


def choose(total: int, limit: int | None) -> list[int]:
    """At most ``limit`` of ``total`` sample numbers, evenly spread, the first always among them."""
    if limit is None or total <= limit:
        return list(range(total))
    return [i * total // limit for i in range(limit)]
