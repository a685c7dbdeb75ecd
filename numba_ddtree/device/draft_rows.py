"""A request's rows of log-probs, as the kernels that build trees read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int64, uint32
from numba_ddtree.device.memory import load_flat
from numba_ddtree.device.warp import LANES

NAN_FLAG, INVALID_FLAG, POSITIVE_FLAG = range(3)
BATCH = 8  # loads that a lane has under way at once


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

    The whole block takes part; each warp has several pieces of 32 neighbouring ranks under way at a time.
    """
    lane = uint32(cuda.threadIdx.x) % uint32(LANES)
    width = uint32(log_probs.shape[2])
    depth = uint32(log_probs.shape[1])
    start = int64(request) * int64(depth * width)
    pieces = max(uint32((width + uint32(LANES - 1)) // uint32(LANES)), uint32(1))  # of a row
    # A warp's next piece is `warps` further on: so many rows and pieces, which spares divisions.
    row = uint32((uint32(cuda.threadIdx.x) // uint32(LANES)) // pieces)
    piece = uint32((uint32(cuda.threadIdx.x) // uint32(LANES)) - row * pieces)
    row_step = uint32(uint32(warps) // pieces)
    piece_step = uint32(uint32(warps) - row_step * pieces)
    value = cuda.local.array(BATCH, float32)
    before = cuda.local.array(BATCH, float32)
    while row < depth:
        first_row = row
        first_piece = piece
        for part in range(BATCH):
            rank = uint32(piece * uint32(LANES) + lane)
            value[part] = float32(-np.inf)
            if row < depth and rank < width:
                value[part] = load_flat(log_probs, int64(start + int64(uint32(row * width + rank))))
            before[part] = float32(np.inf)  # not the value, which would be waited for
            if row < depth and uint32(0) < rank < width:
                place = uint32(row * width + rank - uint32(1))
                before[part] = load_flat(log_probs, int64(start + int64(place)))
            row = uint32(row + row_step)
            piece = uint32(piece + piece_step)
            if piece >= pieces:
                piece = uint32(piece - pieces)
                row = uint32(row + uint32(1))
        for part in range(BATCH):
            rank = uint32(first_piece * uint32(LANES) + lane)
            if first_row < depth and rank < staged:
                s_log_probs[uint32(first_row * uint32(staged) + rank)] = value[part]
            if value[part] != value[part]:
                s_flags[NAN_FLAG] = 1
            if value[part] > before[part] or value[part] == float32(np.inf):
                s_flags[INVALID_FLAG] = 1
            if value[part] > float32(0):
                s_flags[POSITIVE_FLAG] = 1
            first_row = uint32(first_row + row_step)
            first_piece = uint32(first_piece + piece_step)
            if first_piece >= pieces:
                first_piece = uint32(first_piece - pieces)
                first_row = uint32(first_row + uint32(1))
