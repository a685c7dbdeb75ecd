"""Device time of a call, by replaying a CUDA graph of it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from numba_ddtree.arrays import StreamLike

CALLS_PER_GRAPH = 20


def device_us(call: Callable[[StreamLike], object], repeats: int = 20) -> float:
    """Return the median device time of a call in microseconds.

    The call is captured several times over in one CUDA graph, whose replays are timed by events: what
    the host does between launches does not count. Synchronises.

    Parameters
    ----------
    call
        Launches work on the stream that it is given (a `cuda.core.Stream`), on the current device,
        without allocating and without synchronising: give public functions their ``out=``.
    repeats : int
        Replays; the result is the median over them.
    """
    from cuda.core import Device, EventOptions

    device = Device()
    device.set_current()
    stream = device.create_stream()
    device.sync()  # inputs may be under way on the default stream, which this one does not wait for
    call(stream)  # compiles, and raises limits, which a capture cannot hold
    stream.sync()
    builder = stream.create_graph_builder().begin_building()
    for _ in range(CALLS_PER_GRAPH):
        call(stream)
    graph = builder.end_building().complete()
    timed = EventOptions(timing_enabled=True)
    times = []
    for _ in range(repeats + 1):
        start = stream.record(options=timed)
        graph.launch(stream)
        end = stream.record(options=timed)
        end.sync()
        times.append(1000 * float(end - start) / CALLS_PER_GRAPH)
    graph.close()
    return median(times[1:])  # the first replay also uploads the graph
