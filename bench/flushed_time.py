"""Device time of one call whose operands are not in the L2 cache, by replays of a CUDA graph of torch's."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

FLUSH_BYTES = 256 * 2**20  # several times any L2 cache; zeroing them also takes longer than the enqueueing
MOST_REPLAYS = 20
LEAST_REPLAYS = 3


def flushed_us(torch: Any, call: Callable[[], object], seconds: float) -> float:
    """Return the median device time of a call in microseconds, with an L2 flush before each replay.

    Parameters
    ----------
    torch : module
    call
        Launches work on torch's current stream, and does not synchronise.
    seconds : float
        What the replays may take: from 3 to 20 of them are timed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # compiles, and fills torch's caches, which a capture cannot hold
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(1e3 * start.elapsed_time(end))

    replay()  # which also uploads the graph
    first = replay()
    replays = max(LEAST_REPLAYS, min(MOST_REPLAYS, int(1e6 * seconds / first)))
    us = median([first, *(replay() for _ in range(replays - 1))])
    graph.reset()
    return us
