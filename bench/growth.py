"""How the time to decide what runs grows with the graph: processor seconds, stage by stage."""

from __future__ import annotations

import gc
import time
from itertools import pairwise

import torch.fx

from bench.graphs import FAMILIES
from bench.measure import Result
from bench.suites import Options, Row, Table
from tilewright.graph.boundary import EVERYTHING, return_arguments
from tilewright.graph.simplify import simplify
from tilewright.lower.graph import lower
from tilewright.schedule.plan import arranged, planned

SIZES = (1250, 2500, 5000, 10_000)
QUICK_SIZES = (500, 1000)
MOST_PER_DOUBLING = 2.3
OURS = "tilewright"


def growth_suite(options: Options) -> Table:
    """Every family of graphs at sizes that double. No other backend has stages to compare."""
    table: Table = {}
    if OURS not in options.backends:
        return table
    for family, build in FAMILIES.items():
        if not options.only.search(family):
            continue
        deciding_seconds(build(100))  # imports and first-time tables
        before: Result | None = None
        for size in QUICK_SIZES if options.quick else SIZES:
            label = f"{family} {size}"
            options.progress(label)
            given = build(size)
            gc.collect()
            result = Result(extra=deciding_seconds(given))
            if before is not None:
                result.extra["ratio"] = result.extra["seconds"] / before.extra["seconds"]
                if result.extra["ratio"] > MOST_PER_DOUBLING:
                    result.error = f"{result.extra['ratio']:.2f} times for twice the nodes"
            row: Row = {OURS: result}
            table[label] = row
            options.finished(label, row)
            before = result
    return table


def deciding_seconds(gm: torch.fx.GraphModule) -> dict[str, float]:
    """Processor seconds of this process in each stage up to the memory plan."""
    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())

    return_arguments(gm, EVERYTHING)
    simplify(gm)
    mark()
    program = lower(gm)
    mark()
    groups = arranged(program)
    mark()
    plan = planned(groups)
    mark()
    graph, lowered, grouped, memory = (b - a for a, b in pairwise(marks))
    return {
        "seconds": marks[-1] - marks[0],
        "graph": graph,
        "lower": lowered,
        "group": grouped,
        "memory": memory,
        "nests": len(program.nodes),
        "kernels": len(plan.steps),
    }
