"""How long a launch takes on the card: replays of a CUDA graph of many launches.

Each launch has the next of several sets of buffers, which together exceed the card's cache, so that
memory is what is measured. The median of the replays counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

LAUNCHES = 20  # in one graph
REPLAYS = 7
Run = Callable[[int, int], None]  # (raw stream, which set of buffers)


def microseconds(run: Run, sets: int, device: int) -> float:
    """The median time of one launch; infinite for one that fails."""
    try:
        with torch.cuda.device(device):
            return _measured(run, sets)
    except RuntimeError:
        return float("inf")


def _measured(run: Run, sets: int) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for k in range(sets):  # loads the module, warms the clocks
            run(stream.cuda_stream, k)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for k in range(LAUNCHES):
                run(torch.cuda.current_stream().cuda_stream, k % sets)
        times = [_replay(graph) for _ in range(REPLAYS)]
    return statistics.median(times) / LAUNCHES


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def sets_beyond_cache(size: int, device: int) -> int:
    """How many sets of `size` bytes exceed the card's cache; a few at most."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(8, 2 * cache // max(size, 1) + 1))


def filled(dtype: torch.dtype, count: int, device: int) -> torch.Tensor:
    """Memory with plausible contents: small floats, and integers that are safe as indices."""
    where = torch.device("cuda", device)
    if dtype.is_floating_point:
        wide = torch.rand(count, device=where)
        return wide.to(dtype) if dtype != torch.float32 else wide
    return torch.zeros(count, dtype=dtype, device=where)


def interleaved(runs: Sequence[Run], sets: int, device: int, rounds: int = 3) -> list[float]:
    """The best of several medians for each run, taken in turns so that drift meets all alike."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for k, run in enumerate(runs):
            best[k] = min(best[k], microseconds(run, sets, device))
    return best
