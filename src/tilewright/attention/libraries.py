"""Which of torch's own kernels computes attention on a card: cuDNN, flash or memory-efficient.

Eager takes the first of a fixed list that can. Under `max_autotune` those that can are measured, on
operands of the same sizes and strides; where something is trained the backward is timed with the
forward, for it has to be of the same library. The choice is made while a graph is traced, so it is
in the graph: which operator computes the backward follows from the forward's. Without measuring,
cuDNN comes first where cards and calls are of a kind that it is known to be fastest for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from tilewright import config
from tilewright.errors import NoValidChoicesError
from tilewright.gemm.choose import Decision, decided
from tilewright.gemm.plan import difference, tolerance
from tilewright.graph import attention as graph
from tilewright.runtime import store
from tilewright.tune import clock, select
from tilewright.tune.choices import effort
from tilewright.tune.memory import room

NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
}
MOST_SETS = 4  # of operands
# Hopper and the data centre's Blackwell: 1.7 to 2.3 times flash's speed on an H100, others report;
# torch has it first there itself, if its libraries are new enough.
CUDNN_FIRST = ((9, 0), (10, 0))
LONG, NARROW = 512, 128  # queries and keys that a call has, elements of a head
Order = tuple[SDPBackend, ...]
WHOLE = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Layout:
    """A tensor, without what is in it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trained: bool

    @classmethod
    def of(cls, t: torch.Tensor) -> Layout | None:
        numbers: list[Any] = [*t.size(), *t.stride()]
        if not all(isinstance(n, int) for n in numbers):
            return None  # a choice for one size says little about others
        return cls(tuple(t.size()), tuple(t.stride()), t.dtype,
                   t.requires_grad and torch.is_grad_enabled())  # fmt: skip

    def filled(self, device: torch.device, generator: torch.Generator) -> torch.Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        if self.dtype == torch.bool:
            made.fill_(True)
        else:
            made.copy_(torch.randn(self.size, generator=generator, device=device))
        return made.requires_grad_(self.trained)


@dataclass(frozen=True)
class Call:
    """One call of the operator."""

    operands: tuple[Layout, ...]  # queries, keys, values, and a mask if there is one
    dropout: float
    causal: bool
    scale: float | None
    grouped: bool
    device: torch.device

    def __str__(self) -> str:
        q, k = self.operands[0].size, self.operands[1].size
        kind = str(self.operands[0].dtype).removeprefix("torch.")
        words = [f"attention {'x'.join(map(str, q))} keys {k[-2]} {kind}"]
        words += ["causal"] if self.causal else []
        words += ["masked"] if len(self.operands) > 3 else []
        words += ["trained"] if self.is_trained else []
        return " ".join(words)

    @property
    def is_trained(self) -> bool:
        return any(t.trained for t in self.operands)

    @property
    def bytes(self) -> int:
        """Of operands, results and gradients."""
        sizes = [math.prod(t.size) * t.dtype.itemsize for t in self.operands]
        return (sum(sizes) + sizes[0]) * (2 if self.is_trained else 1)

    def run(self, given: Sequence[torch.Tensor], dropout: float) -> list[torch.Tensor]:
        """The result, and the gradients of what is trained."""
        query, key, value, *mask = given
        with torch.set_grad_enabled(self.is_trained):
            out = WHOLE(query, key, value, mask[0] if mask else None, dropout, self.causal,
                        scale=self.scale, enable_gqa=self.grouped)  # fmt: skip
            if not self.is_trained:
                return [out]
            trained = [t for t in given if t.requires_grad]
            return [out, *torch.autograd.grad(out, trained, torch.ones_like(out))]


class _Memory:
    """Operands that all kernels are timed on, and what torch's own choice makes of them."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.count = max(1, min(MOST_SETS, clock.sets_beyond_cache(call.bytes, call.device)))
        self._sets: list[list[torch.Tensor]] = []
        self._expected: list[torch.Tensor] = []

    @property
    def sets(self) -> list[list[torch.Tensor]]:
        if not self._sets:
            generator = torch.Generator(self.call.device).manual_seed(0)
            self._sets = [[t.filled(self.call.device, generator) for t in self.call.operands]
                          for _ in range(self.count)]  # fmt: skip
        return self._sets

    def compared(self, found: Sequence[torch.Tensor]) -> str:
        """Why results are not those of torch's own choice. Which weights are dropped is another
        matter in each library, so none are here."""
        if not self._expected:
            self._expected = self.call.run(self.sets[0], 0.0)
        pairs = zip(found, self._expected, strict=True)
        reasons = (difference(a.detach(), b.detach(), 2 * tolerance(b.dtype)) for a, b in pairs)
        return next(filter(None, reasons), "")


@dataclass(eq=False)
class Kernel:
    """A library's kernel under trial. It is a `tune.Trial`."""

    call: Call
    backend: SDPBackend
    memory: _Memory
    is_library: bool  # it is what torch takes by itself
    provider: str = "SDPA"
    description: str = ""
    estimate: float = 0.0
    compiles: bool = False

    @property
    def name(self) -> str:
        return NAMES[self.backend]

    @property
    def key(self) -> str:
        return store.key("sdpa", repr(self.call), self.name, torch.__version__)

    def start(self) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        return True

    def finish(self) -> None:
        self._run(0, 0.0)  # raises where the library cannot

    def run(self, stream: int, which: int) -> None:
        self._run(which, self.call.dropout)

    def check(self) -> str:
        return self.memory.compared(self._run(0, 0.0))

    def _run(self, which: int, dropout: float) -> list[torch.Tensor]:
        with sdpa_kernel(self.backend):
            return self.call.run(self.memory.sets[which], dropout)


def preferred(operands: Sequence[torch.Tensor], dropout: float, causal: bool, scale: float | None,
              grouped: bool) -> Order | None:  # fmt: skip
    """The fastest for these, then those that may take its place, or None where torch is to
    choose."""
    if not _is_measured(operands[0].device):
        return None
    if config.deterministic or torch.are_deterministic_algorithms_enabled():
        return None
    if not config.max_autotune or effort() == "none":
        return _likely(operands)
    layouts = [Layout.of(t) for t in operands]
    if any(t is None for t in layouts) or any(not math.prod(t.size()) for t in operands):
        return None
    call = Call(tuple(t for t in layouts if t is not None), dropout, causal, scale, grouped,
                operands[0].device)  # fmt: skip
    if call not in _memo:
        try:
            found = _measured(call)
            _memo[call] = None if found is None else (found,)
        except Exception as error:  # of the card or its libraries: torch still computes it
            decided(Decision(str(call), "torch's own", f"it could not be measured: {error!r}"))
            _memo[call] = None
    return _memo[call]


_memo: dict[Call, Order | None] = {}


def _likely(operands: Sequence[torch.Tensor]) -> Order | None:
    """By a model: cuDNN first, for long calls of narrow heads on some cards."""
    query, key, value = operands[:3]
    sizes: list[Any] = [n for t in operands[:3] for n in t.shape]
    enabled, cudnn = _enabled(), SDPBackend.CUDNN_ATTENTION
    order: list[int] = torch._C._get_sdp_priority_order()
    if _capability(query.device) not in CUDNN_FIRST or cudnn not in enabled:
        return None
    if order[0] != SDPBackend.FLASH_ATTENTION.value:  # somebody has chosen already
        return None
    if query.dtype not in (torch.bfloat16, torch.float16) or query.dim() != 4:
        return None
    if not all(isinstance(n, int) for n in sizes) or min(query.size(2), key.size(2)) < LONG:
        return None
    if max(query.size(3), value.size(3)) > NARROW:
        return None
    return (cudnn, *(b for b in NAMES if b in enabled and b is not cudnn), SDPBackend.MATH)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _is_measured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _measured(call: Call) -> SDPBackend | None:
    enabled = [b for b in NAMES if b in _enabled()]
    if len(enabled) < 2 or 4 * call.bytes > room(call.device):
        return None
    with _disable_current_modes(), torch.enable_grad(), _random_numbers_kept(call.device):
        memory = _Memory(call)
        own = _own(call, memory)
        if own is None:
            return None  # torch computes it in its mathematical form: no kernel can
        trials = [Kernel(call, b, memory, b is own) for b in enabled]
        subject = select.Subject(
            store.key("sdpa", repr(call), str(_card(call.device)), *map(str, enabled)),
            str(call), call.device, memory.count,
            {"op": "scaled_dot_product_attention", "sizes": call.operands[0].size},
            call.bytes,
        )  # fmt: skip
        try:
            verdict = select.choose(subject, trials)
        except NoValidChoicesError:
            return None
    winner = next(t for t in trials if t is verdict.winner)
    times = sorted(verdict.times.items(), key=lambda t: t[1].median_us)
    shown = ", ".join(f"{name} {t.median_us:.3g} us" for name, t in times)
    refused = (f"{name}: {why}" for name, why in verdict.rejected.items())
    told = filter(None, (f"{verdict.source}: {shown}", verdict.why, *refused))
    decided(Decision(str(call), winner.name, "; ".join(told)))
    return winner.backend


def _enabled() -> set[SDPBackend]:
    """Those that the user has not switched off."""
    cuda = torch.backends.cuda
    on = {SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
          SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
          SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled()}  # fmt: skip
    return {b for b, is_on in on.items() if is_on}


def _own(call: Call, memory: _Memory) -> SDPBackend | None:
    """What torch takes by itself."""
    query, key, value, *mask = memory.sets[0]
    choice = torch._fused_sdp_choice(query, key, value, mask[0] if mask else None, call.dropout,
                                     call.causal, scale=call.scale,
                                     enable_gqa=call.grouped)  # fmt: skip
    return next((b for b in NAMES if b.value == choice), None)


@functools.cache
def _card(device: torch.device) -> str:
    return "" if device.type == "cpu" else torch.cuda.get_device_name(device)


def _random_numbers_kept(device: torch.device) -> Any:
    index = [] if device.type == "cpu" else [device.index or 0]
    return torch.random.fork_rng(devices=index)


graph.library = preferred
