"""What each node of the graph has become so far, and who reads which buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx

from tilewright.ir.expr import buffers
from tilewright.lower.tensor import Tensor

Node = torch.fx.Node


class Values(dict[Node, Any]):
    """Node -> its value: a `Tensor`, a list of them, a number or a handle."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: dict[str, dict[Node, None]] = {}

    def __setitem__(self, node: Node, value: Any) -> None:
        super().__setitem__(node, value)
        for t in tensors(value):
            for buffer in buffers(t.body):
                self._readers.setdefault(buffer, {})[node] = None

    def readers(self, buffer: str) -> list[Node]:
        """The nodes whose value reads this buffer when it is computed."""
        known = self._readers.get(buffer, {})
        found = [n for n in known if any(buffer in buffers(t.body) for t in tensors(self[n]))]
        self._readers[buffer] = dict.fromkeys(found)
        return found


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
