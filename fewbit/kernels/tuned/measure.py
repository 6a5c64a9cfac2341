"""Timing calls: device time inside a CUDA graph over rotating operands, elapsed time on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPLAYS = 9
ROTATING_BYTES = 150_000_000
"""Bytes of weights that a measurement walks over: more than twice the largest second-level cache of today's GPUs."""
FEWEST_COPIES, MOST_COPIES = 8, 32  # one graph's start costs some microseconds, which few calls would share
MOST_IDLE_BYTES = 4 << 30

Call = Callable[[], object]


def copies_of(nbytes: int) -> int:
    """How many copies of operands of so many bytes defeat the cache."""
    return min(MOST_COPIES, max(FEWEST_COPIES, ROTATING_BYTES // max(1, nbytes) + 1))


def call_time_us(calls: Sequence[Call], device: str) -> float:
    """Median microseconds of one call.

    Args:
        calls: the same call over different operands, enough of them to defeat the cache.
        device: `cuda` or `cpu`.
    """
    return graph_time_us(calls) if device == "cuda" else elapsed_time_us(calls)


def graph_time_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Median device time of one call, the calls captured one after another in a CUDA graph.

    `torch.cuda.graph` would give all cached memory back before each capture, which takes longer than short calls do;
    here that is done when much of it lies idle, since a graph that is gone leaves its own.
    """
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MOST_IDLE_BYTES:
        torch.cuda.empty_cache()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    times = []
    for _ in range(replays + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[2:])


def elapsed_time_us(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Median elapsed time of one call."""
    for call in calls[:2]:
        call()
    times = []
    for _ in range(replays):
        begin = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - begin) * 1e6 / len(calls))
    return statistics.median(times)
