"""The cost-aware end of a tree: see `numba_ddtree.refs.tree_build.nodes_worth`."""

from __future__ import annotations

import math
from typing import Any

from numba_ddtree.cuda_target import cuda, device_routine, float64, int32, int64
from numba_ddtree.device.bits import value_of
from numba_ddtree.device.rounded import over, plus, times
from numba_ddtree.refs.exact_exp import COEFFICIENTS, LARGEST, LN2_HIGH, LN2_LOW, LOG2_E

_EXPONENT_BIAS, _MANTISSA_BITS = 1023, 52
BATCH = 8  # probabilities that are loaded at once


@device_routine
def exact_exp(x: Any) -> Any:
    """Exponential: `numba_ddtree.refs.exact_exp.exact_exp`."""
    if x < -LARGEST:
        return 0.0
    x = min(x, LARGEST)
    k = math.floor(plus(times(x, LOG2_E), 0.5))
    r = plus(plus(x, -times(float64(k), LN2_HIGH)), -times(float64(k), LN2_LOW))
    series = 0.0
    for degree in range(len(COEFFICIENTS)):
        series = plus(times(series, r), COEFFICIENTS[degree])
    return times(series, value_of((int64(k) + int64(_EXPONENT_BIAS)) << int64(_MANTISSA_BITS)))


@device_routine
def round_cost(verify_cost: Any, draft_cost: Any, nodes: Any) -> Any:
    """Cost of a round whose tree has so many nodes beside the root."""
    return plus(draft_cost, verify_cost[nodes])


@device_routine
def keep_worth(
    s_score: Any, count: Any, verify_cost: Any, draft_cost: Any, s_count: Any, threads: Any
) -> Any:
    """Return how many slots to keep; the whole block takes part, and scores give way to sums.

    Parameters
    ----------
    s_score : float64 [N]
        In shared memory.
    count : int
        Slots in use, with the root.
    verify_cost : float64 [M]
    draft_cost : float
    s_count : int32 [1]
        In shared memory; its content does not matter.
    threads : int
        Threads of the block.
    """
    thread = cuda.threadIdx.x
    for node in range(thread, count, threads):
        s_score[node] = exact_exp(s_score[node])
    cuda.syncthreads()
    if thread == 0:
        s_count[0] = count
        # The order of the sum leaves nothing to do at once but the loads.
        probabilities = cuda.local.array(BATCH, float64)
        tokens = s_score[0]
        for first in range(1, count, BATCH):
            for part in range(BATCH):
                probabilities[part] = s_score[min(first + part, count - 1)]
            for part in range(BATCH):
                tokens = plus(tokens, probabilities[part])
                if first + part < count:
                    s_score[first + part] = tokens
    cuda.syncthreads()
    for node in range(thread + 1, count, threads):
        ratio = over(s_score[node], round_cost(verify_cost, draft_cost, node))
        before = over(s_score[node - 1], round_cost(verify_cost, draft_cost, node - 1))
        if not ratio > before:
            cuda.atomic.min(s_count, 0, int32(node))
    cuda.syncthreads()
    return s_count[0]
