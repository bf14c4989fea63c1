"""How long a loop kernel takes on a card, by a model: what `explain` predicts.

A kernel starts, and moves its bytes or issues its instructions, whichever takes longer. Memory is
as fast as a copy if enough bytes are in flight for its latency, and all programs of the last wave
have something to do. No choice depends on it yet: block sizes come from `plan/configs.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.triton.plan.config import Config
from tilewright.codegen.triton.plan.tiling import Shape
from tilewright.ir.expr import free_vars, walk
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Nest
from tilewright.schedule.nests.hints import hint_product
from tilewright.target import LATENCY, LAUNCH, REGISTERS, Target


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a kernel, which part of the copy bandwidth that is, and what limits it."""

    time: float
    share: float
    limit: str

    def __str__(self) -> str:
        return f"{self.time:.3g} us, {self.share:.0%} of the copy bandwidth: {self.limit}"


def estimate(shape: Shape, config: Config, target: Target, moved: int) -> Estimate:
    """`moved` are the bytes that pass between the kernel and memory."""
    rates = target.rates
    copied = moved / rates.memory
    programs = _programs(shape, config)
    resident = _resident(config, target)
    waves = programs / (resident * target.sms)
    in_flight = min(1.0, waves) * resident * _bytes_in_flight(shape, config, moved / programs)
    wanted = rates.memory / target.sms * LATENCY
    by_latency = copied * max(1.0, wanted / in_flight)
    by_waves = copied * math.ceil(waves) / waves if waves > 1 else copied
    by_issue = sum(map(_instructions, shape.members)) / (rates.single / 2)
    limits = {
        "the copy bandwidth": copied,
        "too few bytes in flight": by_latency,
        "idle SMs in the last wave": by_waves,
        "instructions": by_issue,
    }
    limit = max(limits, key=lambda name: limits[name])
    time = LAUNCH + limits[limit]
    return Estimate(time, copied / time, limit if limits[limit] > LAUNCH else "its launch")


def _programs(shape: Shape, config: Config) -> int:
    blocks = config.kwargs
    tiles = (-(-(a.likely + a.slack) // blocks.get(a.block, 1)) for a in shape.parallel)
    return math.prod(tiles) * max(shape.row_programs, 1)


def _resident(config: Config, target: Target) -> int:
    """Programs that an SM has at once, as far as threads and known registers say."""
    threads = 32 * config.num_warps
    by_registers = REGISTERS // (threads * (config.registers or 32))
    return max(1, min(target.threads_per_sm // threads, by_registers))


def _bytes_in_flight(shape: Shape, config: Config, each: float) -> float:
    """Of a program that moves so many: all of them, but where it loops over blocks."""
    if shape.persistent or shape.chunk or shape.preloaded or not shape.inner:
        return each
    rounds = max(a.likely / config.kwargs.get(a.block, 1) for a in shape.inner)
    prefetched = shape.prefetched or shape.prefetched_scan
    return min(each, each / max(rounds, 1.0) * max(config.ahead, 1 + prefetched))


def _instructions(nest: Nest) -> int:
    """Of all points: an operation for each point of the loops it depends on."""
    nodes = (n for n in walk(*nest.exprs) if n.op in TABLE and n.src)
    return sum(TABLE[n.op].cost * hint_product(v.src[0] for v in free_vars(n)) for n in nodes)
