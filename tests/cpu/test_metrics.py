"""Counters add up, reset, and can be re-applied from a recorded change."""

from __future__ import annotations

import pickle
from collections import Counter

from tilewright import metrics


def compile_something() -> None:
    metrics.generated_kernel_count += 2
    metrics.num_bytes_accessed += 80
    metrics.num_bytes_moved += 60
    metrics.ir_nodes += 5
    metrics.native_nodes += 4
    metrics.fallback_nodes += 1
    metrics.fallback_ops["aten.sort"] += 1
    metrics.counters["fusion"]["horizontal"] += 1
    metrics.nodes_num_elem.append(("cpp_fused_add_0", 20))
    metrics.compile_seconds += 0.5
    metrics.cache_misses += 1


def test_reset_zeroes_everything_and_keeps_the_containers():
    kept = metrics.fallback_ops, metrics.nodes_num_elem, metrics.counters
    compile_something()
    metrics.cache_hits += 1
    metrics.reset()
    assert metrics.snapshot() == metrics.Delta()
    assert (metrics.compile_seconds, metrics.cache_hits, metrics.cache_misses) == (0.0, 0, 0)
    assert metrics.nodes_num_elem == []
    assert kept == (metrics.fallback_ops, metrics.nodes_num_elem, metrics.counters)
    assert kept[0] is metrics.fallback_ops


def test_delta_is_what_was_added_since():
    compile_something()
    before = metrics.snapshot()
    assert metrics.delta(before) == metrics.Delta()
    compile_something()
    change = metrics.delta(before)
    assert change.generated_kernel_count == 2
    assert change.num_bytes_accessed == 80
    assert change.fallback_ops == Counter({"aten.sort": 1})
    assert change.counters == {"fusion": Counter({"horizontal": 1})}


def test_a_snapshot_does_not_change_afterwards():
    before = metrics.snapshot()
    compile_something()
    assert before == metrics.Delta()


def test_apply_repeats_a_change_except_for_this_process_own_facts():
    before = metrics.snapshot()
    compile_something()
    change = pickle.loads(pickle.dumps(metrics.delta(before)))
    metrics.reset()
    metrics.apply(change)
    metrics.apply(change)
    assert metrics.generated_kernel_count == 4
    assert metrics.num_bytes_moved == 120
    assert metrics.ir_nodes == 10
    assert (metrics.native_nodes, metrics.fallback_nodes) == (8, 2)
    assert metrics.fallback_ops["aten.sort"] == 2
    assert metrics.counters["fusion"]["horizontal"] == 2
    assert metrics.compile_seconds == 0.0
    assert metrics.nodes_num_elem == []
