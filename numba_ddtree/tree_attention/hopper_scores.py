"""A block's scores in the Hopper kernel: which its rows see, their probabilities, and the rows' sums.

A lane of a warpgroup has parts of two rows, that of `row_of_lane` and the one 8 further. Four lanes have a
row: they tell each other their maxima, and their sums.
"""

from __future__ import annotations

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, uint32, uint64
from numba_ddtree.tree_attention.hopper_outputs import row_of_lane
from numba_ddtree.tree_attention.hopper_state import (
    BLOCK,
    COMMON,
    COUNT,
    FIRST,
    FIRST_ROW,
    OF_PATHS,
    OWN,
    PREFIX,
    SUMS,
    float_at,
    word_at,
)
from numba_ddtree.tree_attention.path_blocks import visible_columns
from numba_ddtree.tree_attention.work import TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.ptx import exp2, larger_of, product_of, sum_of
    from numba_ddtree.device.tile import row_maxima, row_sums, scale_rows
    from numba_ddtree.device.wgmma import exp2_of_scores, keep_columns


@device_routine
def weigh(scores, scale, maximum_0, maximum_1):  # type: ignore[no-untyped-def]
    """Probabilities of two rows of scores, and the rows' new maxima."""
    largest = row_maxima(scores)
    top_0 = larger_of(largest[0], cuda.shfl_xor_sync(0xFFFFFFFF, largest[0], 1))
    top_1 = larger_of(largest[1], cuda.shfl_xor_sync(0xFFFFFFFF, largest[1], 1))
    top_0 = larger_of(top_0, cuda.shfl_xor_sync(0xFFFFFFFF, top_0, 2))
    top_1 = larger_of(top_1, cuda.shfl_xor_sync(0xFFFFFFFF, top_1, 2))
    top_0 = larger_of(maximum_0, product_of(top_0, scale))
    top_1 = larger_of(maximum_1, product_of(top_1, scale))
    return exp2_of_scores(scores, scale, (origin_of(top_0), origin_of(top_1))), top_0, top_1


@device_routine
def origin_of(maximum):  # type: ignore[no-untyped-def]
    """Return what is subtracted of scores: the maximum, or 0 of a row that has seen nothing yet."""
    return maximum if maximum > float32(-np.inf) else float32(0)


@device_routine
def factor_of(old, new):  # type: ignore[no-untyped-def]
    """Return what sums are multiplied by when a row's maximum changes."""
    return exp2(sum_of(old, -origin_of(new)))


@device_routine
def sum_of_quad(value):  # type: ignore[no-untyped-def]
    value = sum_of(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1))
    return sum_of(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 2))


@device_routine
def sums_of(powers, rounded):  # type: ignore[no-untyped-def]
    """Return sums of a block's probabilities over two rows, as they are and rounded, to all their lanes."""
    exact = row_sums(powers)
    return (
        sum_of_quad(exact[0]),
        sum_of_quad(exact[1]),
        sum_of_quad(rounded[0]),
        sum_of_quad(rounded[1]),
    )


@device_routine
def times(sums, factors):  # type: ignore[no-untyped-def]
    """Two rows' sums, exact and rounded, each times its row's factor."""
    return (
        product_of(sums[0], factors[0]),
        product_of(sums[1], factors[1]),
        product_of(sums[2], factors[0]),
        product_of(sums[3], factors[1]),
    )


@device_routine
def grown(sums, base, row, below, last, added):  # type: ignore[no-untyped-def]
    """Two rows' sums after a pair: those of its first block are in shared memory, of the second given.

    `sums` are relative to the maxima after the first block; `last` are the factors from these to the last.
    """
    exact_0 = sum_of(sums[0], float_at(base, uint32(uint32(SUMS) + row)))
    exact_1 = sum_of(sums[1], float_at(base, uint32(uint32(SUMS) + below)))
    rounded_0 = sum_of(sums[2], float_at(base, uint32(uint32(SUMS + TILE_ROWS) + row)))
    rounded_1 = sum_of(sums[3], float_at(base, uint32(uint32(SUMS + TILE_ROWS) + below)))
    exact_0, exact_1, rounded_0, rounded_1 = times((exact_0, exact_1, rounded_0, rounded_1), last)
    return (
        sum_of(exact_0, added[0]),
        sum_of(exact_1, added[1]),
        sum_of(rounded_0, added[2]),
        sum_of(rounded_1, added[3]),
    )


@device_routine
def visible_scores(scores, kind, item, seen, record, heads, sees_prefix, scale):  # type: ignore[no-untyped-def]
    """Scores of a block, -inf where its rows do not see a key.

    They are scaled here only by what is not positive, which turns the largest into the least.
    """
    if kind != OF_PATHS and scale > float32(0):
        return scores
    if not scale > float32(0):
        scores = scale_rows(scores, (scale, scale))
    if kind == OF_PATHS:
        row, quad = row_of_lane()
        first_row, first_seen = (
            word_at(item, FIRST_ROW),
            int32(0) if sees_prefix != 0 else word_at(item, PREFIX),
        )
        first = int32(uint32(first_row) // uint32(heads))
        node_0 = int32(int32(uint32(uint32(first_row) + row) // uint32(heads)) - first)
        node_1 = int32(int32(uint32(uint32(first_row) + row + uint32(8)) // uint32(heads)) - first)
        block, count = word_at(record, BLOCK), word_at(record, COUNT)
        common, own = word_at(record, COMMON), word_at(record, OWN)
        place_0 = int32(node_0 - word_at(record, FIRST))
        place_1 = int32(node_1 - word_at(record, FIRST))
        bits_0 = visible_columns(block, common, own, place_0, count, word_at(seen, row), first_seen)
        seen_1 = word_at(seen, uint32(row + uint32(8)))
        bits_1 = visible_columns(block, common, own, place_1, count, seen_1, first_seen)
        shift = uint64(quad << uint32(1))
        scores = keep_columns(scores, uint64(bits_0 >> shift), uint64(bits_1 >> shift))
        cuda.syncwarp()
    return scores
