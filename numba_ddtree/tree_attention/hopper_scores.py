"""A block's scores in the Hopper kernel: which its rows see, their probabilities, and the rows' sums.

A lane of a warpgroup has parts of two rows, that of `row_of_lane` and the one 8 further. Four lanes have a
row: they tell each other their maxima, and their sums.

Probabilities are 2^(score - origin). A row's *origin* is its largest score at some time: it becomes that of a
new block, and all that the row has come to is rescaled, only if the block's weighs enough to matter
(`limit_of`). What decides is the row's own, and the sum of all blocks before, so that rows have the same
bits in any company.
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
    FIRST_NODE,
    FIRST_ROW,
    OF_PATHS,
    OF_SLOTS,
    OWN,
    PREFIX,
    REQUEST,
    ROUNDED,
    pair_at,
    word_at,
)
from numba_ddtree.tree_attention.path_blocks import low_bits, visible_columns
from numba_ddtree.tree_attention.slot_blocks import visible_slots

if not SIMULATED:
    from numba_ddtree.device.ptx import exp2, larger_of, log2, product_of, quick_reciprocal, sum_of
    from numba_ddtree.device.tile import row_maxima, scale_rows
    from numba_ddtree.device.wgmma import exp2_of_scores, keep_columns

SHARE_BITS = 4  # a probability up to 2^-4 of the total may be above 1
LARGEST_BITS = 8  # as long as it is not above 2^8, for which float16 has room


@device_routine
def weigh(scores, scale, origins, limits):  # type: ignore[no-untyped-def]
    """Probabilities of two rows of scores, and the rows' new origins."""
    largest = row_maxima(scores)
    top_0 = larger_of(largest[0], cuda.shfl_xor_sync(0xFFFFFFFF, largest[0], 1))
    top_1 = larger_of(largest[1], cuda.shfl_xor_sync(0xFFFFFFFF, largest[1], 1))
    top_0 = product_of(larger_of(top_0, cuda.shfl_xor_sync(0xFFFFFFFF, top_0, 2)), scale)
    top_1 = product_of(larger_of(top_1, cuda.shfl_xor_sync(0xFFFFFFFF, top_1, 2)), scale)
    new_0 = top_0 if top_0 > limits[0] else origins[0]
    new_1 = top_1 if top_1 > limits[1] else origins[1]
    return exp2_of_scores(scores, scale, (finite(new_0), finite(new_1))), new_0, new_1


@device_routine
def limit_of(origin, total):  # type: ignore[no-untyped-def]
    """Score above which a row takes a new origin, of which its probabilities so far add up to `total`.

    Were its score the origin, a row's largest probability would be 1, which is not rounded. Otherwise it is,
    by 2^-9 of itself, and that matters as little as the probability does beside the total.
    """
    bits = larger_of(float32(0), sum_of(log2(total), float32(-SHARE_BITS)))
    return sum_of(origin, bits if bits < float32(LARGEST_BITS) else float32(LARGEST_BITS))


@device_routine
def limits_of(origins, totals):  # type: ignore[no-untyped-def]
    """Limits of two rows."""
    return limit_of(origins[0], totals[0]), limit_of(origins[1], totals[1])


@device_routine
def finite(origin):  # type: ignore[no-untyped-def]
    """Return what is subtracted of scores: the origin, or 0 of a row that has seen nothing yet."""
    return origin if origin > float32(-np.inf) else float32(0)


@device_routine
def factor_of(old, new):  # type: ignore[no-untyped-def]
    """Return what sums are multiplied by when a row's origin changes."""
    return exp2(sum_of(old, -finite(new)))


@device_routine
def sums_of_quad(values):  # type: ignore[no-untyped-def]
    """Return sums of two rows' values over the lanes that have the rows, to all of them."""
    upper = sum_of(values[0], cuda.shfl_xor_sync(0xFFFFFFFF, values[0], 1))
    lower = sum_of(values[1], cuda.shfl_xor_sync(0xFFFFFFFF, values[1], 1))
    return (
        sum_of(upper, cuda.shfl_xor_sync(0xFFFFFFFF, upper, 2)),
        sum_of(lower, cuda.shfl_xor_sync(0xFFFFFFFF, lower, 2)),
    )


@device_routine
def grown(sums, factors, added):  # type: ignore[no-untyped-def]
    """Two rows' sums, relative to new origins, with what a block adds."""
    return (
        sum_of(product_of(sums[0], factors[0]), added[0]),
        sum_of(product_of(sums[1], factors[1]), added[1]),
    )


@device_routine
def grown_by_pair(rounded, base, row, last, added):  # type: ignore[no-untyped-def]
    """Two rows' rounded sums after a pair: that of its first block is in shared memory, the second's given.

    `rounded` are relative to the origins after the first block; `last` are the factors from there on.
    """
    first = pair_at(base, ROUNDED, row)
    return grown((sum_of(rounded[0], first[0]), sum_of(rounded[1], first[1])), last, added)


@device_routine
def node_of_row(row, heads):  # type: ignore[no-untyped-def]
    """``row // heads`` (int32) of a row below 2^18, by a quick reciprocal: a division takes 20 instructions.

    (row + 1/2) / heads is at least 1 / (2 heads) away from integers, and wrong by less than
    row / heads / 2^20.
    """
    return int32(product_of(sum_of(float32(row), float32(0.5)), quick_reciprocal(float32(heads))))


@device_routine
def visible_in_paths(item, seen, record, node_0, node_1, row, sees_prefix):  # type: ignore[no-untyped-def]
    """Bits (uint64) of a block of paths that a lane's two rows see."""
    first_seen = int32(0) if sees_prefix != 0 else word_at(item, PREFIX)
    first = int32(word_at(item, FIRST_NODE) + word_at(record, FIRST))
    block, count = word_at(record, BLOCK), word_at(record, COUNT)
    common, own = word_at(record, COMMON), word_at(record, OWN)
    place_0, place_1 = int32(node_0 - first), int32(node_1 - first)
    bits_0 = visible_columns(block, common, own, place_0, count, word_at(seen, row), first_seen)
    seen_1 = word_at(seen, uint32(row + uint32(8)))
    return bits_0, visible_columns(block, common, own, place_1, count, seen_1, first_seen)


@device_routine
def visible_in_tree(tree, item, record, node_0, node_1):  # type: ignore[no-untyped-def]
    """Bits (uint64) of a block of the tree's keys that a lane's two rows see.

    They mostly come from L1, where the warp that described the item has just read them.
    """
    request = word_at(item, REQUEST)
    first = word_at(record, FIRST)
    counting = uint64(~low_bits(word_at(record, COMMON)))
    bits_0 = uint64(visible_slots(tree.ancestor_bits, request, node_0, first) & counting)
    bits_1 = bits_0
    if node_1 != node_0:
        bits_1 = uint64(visible_slots(tree.ancestor_bits, request, node_1, first) & counting)
    return bits_0, bits_1


@device_routine
def visible_scores(scores, kind, tree, item, seen, record, sees_prefix, scale):  # type: ignore[no-untyped-def]
    """Scores of a block, -inf where its rows do not see a key.

    They are scaled here only by what is not positive, which turns the largest into the least.
    """
    is_masked = kind >= OF_PATHS
    if not is_masked and scale > float32(0):
        return scores
    if not scale > float32(0):
        scores = scale_rows(scores, (scale, scale))
    if is_masked:
        row, quad = row_of_lane()
        first_row = uint32(word_at(item, FIRST_ROW))
        node_0 = node_of_row(uint32(first_row + row), tree.heads)
        node_1 = node_of_row(uint32(first_row + row + uint32(8)), tree.heads)
        if kind >= OF_SLOTS:
            bits_0, bits_1 = visible_in_tree(tree, item, record, node_0, node_1)
        else:
            bits_0, bits_1 = visible_in_paths(item, seen, record, node_0, node_1, row, sees_prefix)
        shift = uint64(quad << uint32(1))
        scores = keep_columns(scores, uint64(bits_0 >> shift), uint64(bits_1 >> shift))
        cuda.syncwarp()
    return scores
