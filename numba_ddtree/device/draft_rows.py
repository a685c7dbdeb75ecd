"""A request's rows of log-probs, as the kernels that build trees read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, uint32
from numba_ddtree.device.warp import LANES

NAN_FLAG, INVALID_FLAG, POSITIVE_FLAG = range(3)
BATCH = 8  # loads that a lane has under way at once
CHUNK = BATCH * LANES


class Rows(NamedTuple):
    """One request's log-probs and the limits of its tree; all whole numbers are uint32.

    Attributes
    ----------
    log_probs : float32 [B, L, K]
    request : int
    s_log_probs : float32 [L * staged]
        The first ranks of each row.
    staged : int
        Ranks a row in shared memory.
    depth, width : int
        Rows, and ranks of each, that the tree may use.
    budget : int
        The most nodes that the tree may have beside its root.
    least : float
        The least score of a node; finite, so that -inf is below it.
    seeds : int
        Nodes of the top-1 path that come before all others.
    """

    log_probs: Any
    request: Any
    s_log_probs: Any
    staged: Any
    depth: Any
    width: Any
    budget: Any
    least: Any
    seeds: Any


@device_routine
def log_prob(rows: Any, row: Any, rank: Any) -> Any:
    """Log-prob of a candidate within the limits, as float64."""
    if rank < rows.staged:
        return float64(rows.s_log_probs[uint32(row * rows.staged + rank)])
    return float64(rows.log_probs[rows.request, row, rank])


@device_routine
def stage_log_probs(
    log_probs: Any, request: Any, s_log_probs: Any, staged: Any, s_flags: Any, warps: Any
) -> None:
    """Check a request's log-probs and copy the first ranks of each row to shared memory.

    The whole block takes part; each warp has 256 neighbouring ranks under way at a time.
    """
    warp = uint32(cuda.threadIdx.x) // uint32(LANES)
    lane = uint32(cuda.threadIdx.x) % uint32(LANES)
    width = uint32(log_probs.shape[2])
    chunks = uint32((width + uint32(CHUNK - 1)) // uint32(CHUNK))
    value = cuda.local.array(BATCH, float32)
    before = cuda.local.array(BATCH, float32)
    for task in range(warp, uint32(uint32(log_probs.shape[1]) * chunks), uint32(warps)):
        row = uint32(uint32(task) // chunks)
        first = uint32(uint32(uint32(task) - row * chunks) * uint32(CHUNK) + lane)
        for part in range(BATCH):
            rank = uint32(first + uint32(part * LANES))
            value[part] = log_probs[request, row, rank] if rank < width else float32(-np.inf)
            before[part] = value[part]
            if uint32(0) < rank < width:
                before[part] = log_probs[request, row, uint32(rank - uint32(1))]
        for part in range(BATCH):
            rank = uint32(first + uint32(part * LANES))
            if rank < staged:
                s_log_probs[uint32(row * uint32(staged) + rank)] = value[part]
            if value[part] != value[part]:
                s_flags[NAN_FLAG] = 1
            if value[part] > before[part] or value[part] == float32(np.inf):
                s_flags[INVALID_FLAG] = 1
            if value[part] > float32(0):
                s_flags[POSITIVE_FLAG] = 1
