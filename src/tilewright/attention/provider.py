"""What a provider of attention is: the contract of `gemm/provider.py`, for an `AttentionProblem`.

A candidate computes a whole call by one or more kernels, one after the other. Kernels name memory
as the problem does; further buffers of their own are listed with the candidate's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewright.attention.problem import AttentionProblem
from tilewright.gemm.provider import Effort, Kernel
from tilewright.ir.program import Buffer


@dataclass(frozen=True)
class Launch:
    """One kernel of a plan, with what it writes."""

    kernel: Kernel
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Kernels in order, and buffers that are theirs alone."""

    launches: tuple[Launch, ...]
    local: tuple[Buffer, ...] = ()


class Candidate(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def provider(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def estimate(self) -> float:
        """Microseconds, by a model of the machine."""
        ...

    @property
    def key(self) -> str: ...

    def plan(self) -> Plan:
        """Cheap: text is made, nothing is built."""
        ...


class Provider(Protocol):
    name: str

    def supports(self, problem: AttentionProblem) -> str:
        """Why it has nothing to offer for this problem, or an empty string."""
        ...

    def candidates(self, problem: AttentionProblem, effort: Effort) -> Sequence[Candidate]:
        """Best first by the model, all of them valid."""
        ...


PROVIDERS: dict[str, Provider] = {}


def register(make: Callable[[], Provider]) -> Callable[[], Provider]:
    """Class decorator: the provider joins the list under its name."""
    made = make()
    PROVIDERS[made.name] = made
    return make


__all__ = ["PROVIDERS", "Candidate", "Effort", "Launch", "Plan", "Provider", "register"]
