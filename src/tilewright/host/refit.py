"""What is called when the driver refuses to load or to launch a kernel that was built for the card.

Configurations that ask for less first; in the end torch's own operations, which always fit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tilewright import metrics
from tilewright.attention.choose import Resort
from tilewright.host.spare import Spare
from tilewright.runtime import launch, triton_build
from tilewright.runtime.launch import Launcher
from tilewright.runtime.triton_build import Built, TritonConfig, TritonSource

log = logging.getLogger("tilewright.run")


@dataclass
class Refit:
    """Called as the kernel is. `order` says where the arguments of `spare` are among its own."""

    name: str
    source: TritonSource
    refused: TritonConfig
    spare: Spare | Resort
    order: tuple[int, ...]
    made: list[tuple[Launcher, str]] = field(default_factory=list[tuple[Launcher, str]])
    taken_over: bool = False  # torch's operations have run

    @cached_property
    def _left(self) -> Iterator[TritonConfig]:
        """What was not tried yet."""
        return triton_build.lesser(self.source, self.refused)

    def __call__(self, stream: int, x: int, y: int, z: int, *args: Any) -> None:
        given = [args[k] for k in self.order]
        names = dict(zip(self.spare.names, given, strict=True))
        for kernel, programs in self._smaller():
            try:
                kernel(stream, eval(programs, {}, names), 1, 1, *args)
                return
            except NameError:  # a size the kernel is not given
                break
            except RuntimeError as error:
                if not launch.is_refusal(error):
                    raise
        if not self.taken_over:
            self.taken_over = True
            metrics.counters["triton"]["kernels that fit in no size"] += 1
            log.warning("torch's own operations run in place of %s: it does not fit the card",
                        self.name)  # fmt: skip
        self.spare(*given)

    def _smaller(self) -> Iterator[tuple[Launcher, str]]:
        """Those of earlier calls, the last first, then new ones."""
        yield from reversed(self.made)
        for less in self._left:
            try:
                binary = triton_build.binaries(_only(self.source, less))[0][1].result()
                kernel = launch.load(self.source, Built(binary, less), self.source.device)
            except RuntimeError:
                continue
            metrics.counters["triton"]["kernels made smaller at their launch"] += 1
            log.debug("%s does not fit the card: it runs with %s", self.name, less)
            self.made.append((kernel, self.source.programs(less)))
            yield self.made[-1]


def _only(source: TritonSource, chosen: TritonConfig) -> TritonSource:
    return replace(source, configs=(chosen,))
