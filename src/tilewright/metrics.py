"""Counters of what the compiler did since `reset()`, and the listeners of generated code.

Read and add to them as module attributes (`metrics.generated_kernel_count += 1`). They add up
over every graph compiled, forward and backward alike. A graph that comes out of a cache
re-applies its recorded `Delta`, so the numbers do not depend on the state of the cache.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

# Generated kernels only: library calls and fallbacks are not among them.
generated_kernel_count: int = 0
# Bytes under the compatible counting contract: whole buffers, best case, in-place targets read.
num_bytes_accessed: int = 0
# Bytes as they move: slices and gathers by extent, write-only targets not read.
num_bytes_moved: int = 0
# One (kernel name, four-byte elements) per scheduled kernel, in schedule order.
nodes_num_elem: list[tuple[str, int]] = []
# Loop nests and opaque nodes before fusion.
ir_nodes: int = 0
# FX nodes lowered to loops of ours, and those left to ATen.
native_nodes: int = 0
fallback_nodes: int = 0
fallback_ops: Counter[str] = Counter()
# Wall-clock seconds spent compiling in this process.
compile_seconds: float = 0.0
# Kernels compiled in this process, and those found in the store instead; not part of a `Delta`.
kernels_compiled: int = 0
kernels_found: int = 0
# Whole graphs found, or not found, in a cache.
cache_hits: int = 0
cache_misses: int = 0
# Anything else, by group and name.
counters: defaultdict[str, Counter[str]] = defaultdict(Counter)

# The pipeline calls each of these with the code text of every graph it generates or loads.
on_code: list[Callable[[str], None]] = []


def _no_groups() -> dict[str, Counter[str]]:
    return {}


@dataclass(frozen=True)
class Delta:
    """What compiling something added to the counters; picklable, kept beside a cached graph.

    Seconds, cache hits and the per-kernel list are not in it: they describe this process, and
    a cache hit does not spend the seconds again.
    """

    generated_kernel_count: int = 0
    num_bytes_accessed: int = 0
    num_bytes_moved: int = 0
    ir_nodes: int = 0
    native_nodes: int = 0
    fallback_nodes: int = 0
    fallback_ops: Counter[str] = field(default_factory=Counter)
    counters: Mapping[str, Counter[str]] = field(default_factory=_no_groups)


# Counters of what this process measured and built, which a cached graph does not do again.
_OF_THIS_PROCESS = ("select_algorithm_", "benchmarking.")
_GROUPS_OF_THIS_PROCESS = frozenset({"store", "remote", "ranks", "serving"})


def snapshot() -> Delta:
    """The counters as they are now, to be passed to `delta` later."""
    return Delta(
        generated_kernel_count=generated_kernel_count,
        num_bytes_accessed=num_bytes_accessed,
        num_bytes_moved=num_bytes_moved,
        ir_nodes=ir_nodes,
        native_nodes=native_nodes,
        fallback_nodes=fallback_nodes,
        fallback_ops=Counter(fallback_ops),
        counters={name: Counter(group) for name, group in counters.items()},
    )


def delta(before: Delta) -> Delta:
    """What was added since `before = snapshot()`."""
    now = snapshot()
    groups = {
        name: _added(group, before.counters.get(name, Counter()))
        for name, group in now.counters.items()
        if name not in _GROUPS_OF_THIS_PROCESS
    }
    return Delta(
        generated_kernel_count=now.generated_kernel_count - before.generated_kernel_count,
        num_bytes_accessed=now.num_bytes_accessed - before.num_bytes_accessed,
        num_bytes_moved=now.num_bytes_moved - before.num_bytes_moved,
        ir_nodes=now.ir_nodes - before.ir_nodes,
        native_nodes=now.native_nodes - before.native_nodes,
        fallback_nodes=now.fallback_nodes - before.fallback_nodes,
        fallback_ops=_added(now.fallback_ops, before.fallback_ops),
        counters={name: group for name, group in groups.items() if group},
    )


def _added(now: Counter[str], before: Counter[str]) -> Counter[str]:
    changed = {key: n - before[key] for key, n in now.items() if n != before[key]}
    return Counter({k: n for k, n in changed.items() if not k.startswith(_OF_THIS_PROCESS)})


def apply(change: Delta) -> None:
    """Add a recorded change, as if what it was recorded from had been compiled just now."""
    global generated_kernel_count, num_bytes_accessed, num_bytes_moved
    global ir_nodes, native_nodes, fallback_nodes
    generated_kernel_count += change.generated_kernel_count
    num_bytes_accessed += change.num_bytes_accessed
    num_bytes_moved += change.num_bytes_moved
    ir_nodes += change.ir_nodes
    native_nodes += change.native_nodes
    fallback_nodes += change.fallback_nodes
    fallback_ops.update(change.fallback_ops)
    for name, group in change.counters.items():
        counters[name].update(group)


@contextmanager
def unchanged() -> Generator[None, None, None]:
    """What is compiled in the block to be looked at, and not to run, is not counted."""
    global generated_kernel_count, num_bytes_accessed, num_bytes_moved
    global ir_nodes, native_nodes, fallback_nodes
    before, nodes = snapshot(), list(nodes_num_elem)
    try:
        yield
    finally:
        generated_kernel_count = before.generated_kernel_count
        num_bytes_accessed, num_bytes_moved = before.num_bytes_accessed, before.num_bytes_moved
        ir_nodes, native_nodes = before.ir_nodes, before.native_nodes
        fallback_nodes = before.fallback_nodes
        nodes_num_elem[:] = nodes
        fallback_ops.clear()
        fallback_ops.update(before.fallback_ops)
        for name, group in counters.items():
            group.clear()
            group.update(before.counters.get(name, {}))


def reset() -> None:
    """Zero every counter. Containers are emptied in place, so references to them stay good."""
    global generated_kernel_count, num_bytes_accessed, num_bytes_moved
    global ir_nodes, native_nodes, fallback_nodes
    global compile_seconds, cache_hits, cache_misses, kernels_compiled, kernels_found
    generated_kernel_count = num_bytes_accessed = num_bytes_moved = 0
    ir_nodes = native_nodes = fallback_nodes = 0
    compile_seconds = 0.0
    cache_hits = cache_misses = kernels_compiled = kernels_found = 0
    nodes_num_elem.clear()
    fallback_ops.clear()
    counters.clear()
