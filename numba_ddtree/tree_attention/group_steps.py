"""Steps of a group of four warps that has 32 rows, between products: the same whichever kernel takes them.

For a block of 64 keys, a warp of the group has scores of 16 rows x 32 keys, and outputs of 32 rows x 128
columns. It has 8 of each 16 keys, so that 16 keys may lie in one place of the block or another (as in
`path_blocks`) while their terms stay with the same lanes in the same order. Scores become probabilities here,
rounded to 16 bits, in shared memory; sums of the unrounded ones stay with their lanes. At the end come sums
over lanes and warps, and outputs are written.

What several warps need of a row lies in words of shared memory, a `State`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import (
    SIMULATED,
    cuda,
    device_function,
    device_routine,
    float32,
    int32,
    int64,
    uint32,
    uint64,
)
from numba_ddtree.tree_attention.key_blocks import columns_of
from numba_ddtree.tree_attention.row_outcomes import READ_SLOT, WRITE_OUT, WRITE_SLOT, settle_row
from numba_ddtree.tree_attention.split_items import splits_of
from numba_ddtree.tree_attention.work import KEY_BLOCK, LATENT, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.ptx import (
        address_of,
        exp2,
        fresh_thread,
        larger_of,
        multiply_add,
        named_barrier,
        shared_address_of,
        sum_of,
    )
    from numba_ddtree.device.tile import (
        exp2_below,
        keep_columns,
        make_row_float_fold,
        make_row_float_store,
        make_row_part,
        make_row_store,
        row_maxima,
        row_sums,
        scale_rows,
        scale_tile,
        unit_address,
    )
    from numba_ddtree.tree_attention.outputs import make_row_output

    row_part_0, row_part_1, row_part_2, row_part_3 = (make_row_part(row, 16) for row in range(4))

ALIGNMENT = 128
GROUP_ROWS = 32
GROUP_THREADS = 128
FIRST_GROUP = 1  # name of the first group's barrier
ITEM_WORDS = 10
LONGEST_WORDS = TILE_ROWS // 32
ADDRESS_WORDS = 4 * KEY_BLOCK  # of a block's rows: two addresses of 64 bits each


class State(NamedTuple):
    """What is kept of each row, and of the item, in shared memory; words."""

    maxima: Any  # float32 [rows, 2]: of the keys of two warps, later their sums
    factors: Any  # float32 [rows]: what the row's output is scaled by, later its maximum
    seen: Any  # int32 [rows]: how many keys the row sees
    faults: Any  # int32 [rows]: whether one was not to be found
    item: Any  # int32: what `keep_item` writes
    longest: Any  # int32: of each 32 rows of a tile, how many keys one sees at most


def state_words(rows: int) -> int:
    """Words of the state of so many rows."""
    return 5 * rows + ITEM_WORDS + LONGEST_WORDS


class Place(NamedTuple):
    """Where a thread's part of each step is: addresses in shared memory and numbers of rows and keys."""

    thread: Any
    lane: Any
    warp: Any
    group: Any
    rows: Any  # first of the 16 rows that the warp has scores of
    keys: Any  # first of its 32 keys, 8 and then the same 8 of each further 16
    row: Any  # first of the two rows that the lane has scores of; the other is 8 further


@device_routine
def shared_base():  # type: ignore[no-untyped-def]
    """Address (uint32) of the block's shared memory, rounded up to a multiple of `ALIGNMENT`."""
    raw = shared_address_of(cuda.shared.array(0, int32))
    return uint32(uint32(raw + uint32(ALIGNMENT - 1)) & uint32(~(ALIGNMENT - 1) & 0xFFFFFFFF))


@device_function
def state_at(base, offset, rows):  # type: ignore[no-untyped-def]
    """Return the `State` of so many rows, `offset` bytes after the base of shared memory."""
    s_words = cuda.shared.array(0, int32)
    s_floats = cuda.shared.array(0, float32)
    first = uint32(uint32(base - shared_address_of(s_words) + uint32(offset)) >> uint32(2))
    rows = uint32(rows)
    return State(
        s_floats[first:],
        s_floats[uint32(first + uint32(2) * rows) :],
        s_words[uint32(first + uint32(3) * rows) :],
        s_words[uint32(first + uint32(4) * rows) :],
        s_words[uint32(first + uint32(5) * rows) :],
        s_words[uint32(first + uint32(5) * rows + uint32(ITEM_WORDS)) :],
    )


@device_function
def addresses_at(base, offset):  # type: ignore[no-untyped-def]
    """Return the words (uint64) of shared memory from `offset` bytes after its base on."""
    s_words = cuda.shared.array(0, int32)
    s_long = cuda.shared.array(0, uint64)
    return s_long[uint32(uint32(base - shared_address_of(s_words) + uint32(offset)) >> uint32(3)) :]


@device_routine
def place_of_thread():  # type: ignore[no-untyped-def]
    """Return a thread's `Place`.

    It is worked out anew wherever it is needed, and takes no registers in between.
    """
    thread = fresh_thread()
    lane = uint32(thread & uint32(31))
    warp = uint32(thread >> uint32(5))
    group = uint32(warp >> uint32(2))
    rows = uint32(group * uint32(GROUP_ROWS) + uint32(uint32(warp & uint32(1)) << uint32(4)))
    keys = uint32(uint32(uint32(warp >> uint32(1)) & uint32(1)) << uint32(3))
    row = uint32(rows + uint32(lane >> uint32(2)))
    return Place(thread, lane, warp, group, rows, keys, row)


@device_routine
def group_barrier(place):  # type: ignore[no-untyped-def]
    """Wait for the threads of the group."""
    named_barrier(uint32(place.group + uint32(FIRST_GROUP)), uint32(GROUP_THREADS))


@device_routine
def keep_item(state, request, part, split, slot, length, splits, index, shared_out):  # type: ignore[no-untyped-def]
    """Write what an item is, which would take registers while it is worked on; by one thread.

    `shared_out` is what `shares.share_out` returned.
    """
    s_item = state.item
    s_item[0], s_item[1], s_item[2], s_item[3] = request, part, split, slot
    s_item[4], s_item[5], s_item[6] = length, splits, index
    s_item[7], s_item[8] = shared_out[0], shared_out[1]


@device_routine
def kept_item(state):  # type: ignore[no-untyped-def]
    """Return what `keep_item` was given."""
    s_item = state.item
    shared_out = s_item[7], s_item[8]
    return s_item[0], s_item[1], s_item[2], s_item[3], s_item[4], s_item[5], s_item[6], shared_out


@device_routine
def half_of(place):  # type: ignore[no-untyped-def]
    """Which half of a block's keys the warp has, 0 or 1."""
    return uint32(place.keys >> uint32(3))


def make_weighing(number: str) -> Any:
    """Make the step from scores to probabilities for one kind of numbers, ``"bf16"`` or ``"f16"``."""
    store_weights = make_row_store(f"{number}x2")

    @device_routine
    def weigh_scores(at, tree, item, scale, state, block, node, scores, past):  # type: ignore[no-untyped-def]
        """Turn scores into probabilities in a chunk of shared memory, at address `at`; by a group.

        `past` are the maxima and sums of the lane's two rows, which come back with this block's. Ends with
        the group's barrier.
        """
        maximum_0, maximum_1, sum_0, sum_1 = past
        place = place_of_thread()
        quad = uint32(place.lane & uint32(3))
        below = uint32(place.row + uint32(8))
        own = half_of(place)
        other = uint32(own ^ uint32(1))
        scores = scale_tile(scores, scale)
        if node >= 0:
            column = uint64(place.keys + uint32(quad << uint32(1)))
            upper = uint64(columns_of(item, tree, state, block, node, place.row) >> column)
            lower = uint64(columns_of(item, tree, state, block, node, below) >> column)
            scores = keep_columns(scores, upper, lower)
        largest = row_maxima(scores)
        top_0 = larger_of(largest[0], cuda.shfl_xor_sync(0xFFFFFFFF, largest[0], 1))
        top_1 = larger_of(largest[1], cuda.shfl_xor_sync(0xFFFFFFFF, largest[1], 1))
        top_0 = larger_of(top_0, cuda.shfl_xor_sync(0xFFFFFFFF, top_0, 2))
        top_1 = larger_of(top_1, cuda.shfl_xor_sync(0xFFFFFFFF, top_1, 2))
        if quad == uint32(0):
            state.maxima[uint32(uint32(2) * place.row + own)] = top_0
            state.maxima[uint32(uint32(2) * below + own)] = top_1
        group_barrier(place)
        top_0 = larger_of(top_0, state.maxima[uint32(uint32(2) * place.row + other)])
        top_1 = larger_of(top_1, state.maxima[uint32(uint32(2) * below + other)])
        top_0, top_1 = larger_of(maximum_0, top_0), larger_of(maximum_1, top_1)
        # Of a row that has seen nothing yet, everything is 2^-inf.
        origin_0 = top_0 if top_0 > float32(-np.inf) else float32(0)
        origin_1 = top_1 if top_1 > float32(-np.inf) else float32(0)
        factor_0 = exp2(sum_of(maximum_0, -origin_0))
        factor_1 = exp2(sum_of(maximum_1, -origin_1))
        weights = exp2_below(scores, (origin_0, origin_1))
        target = unit_address(at, place.row, own)
        store_weights(uint32(target + uint32(quad << uint32(2))), weights)
        if quad == uint32(0) and own == uint32(0):
            state.factors[place.row] = factor_0
            state.factors[below] = factor_1
        added = row_sums(weights)
        sum_0 = multiply_add(sum_0, factor_0, added[0])
        sum_1 = multiply_add(sum_1, factor_1, added[1])
        group_barrier(place)
        return top_0, top_1, sum_0, sum_1

    return weigh_scores


@device_routine
def scale_outputs(place, state, output):  # type: ignore[no-untyped-def]
    """Scale a warp's outputs of 32 rows by what the last `weigh_scores` found."""
    row = uint32(place.group * uint32(GROUP_ROWS) + uint32(place.lane >> uint32(2)))
    factors = (
        state.factors[row],
        state.factors[uint32(row + uint32(8))],
        state.factors[uint32(row + uint32(16))],
        state.factors[uint32(row + uint32(24))],
    )
    # Mostly no row has a new maximum; a product with 1 changes no bit.
    is_new = factors[0] != float32(1) or factors[1] != float32(1)
    is_new = is_new or factors[2] != float32(1) or factors[3] != float32(1)
    if cuda.any_sync(0xFFFFFFFF, is_new):
        output = scale_rows(output, factors)
    return output


@device_routine
def share_sums(place, past, state):  # type: ignore[no-untyped-def]
    """Write each row's maximum to the factors, and the sums of its two halves, NaN after a fault."""
    maximum_0, maximum_1, sum_0, sum_1 = past
    sum_0 = sum_of(sum_0, cuda.shfl_xor_sync(0xFFFFFFFF, sum_0, 1))
    sum_1 = sum_of(sum_1, cuda.shfl_xor_sync(0xFFFFFFFF, sum_1, 1))
    sum_0 = sum_of(sum_0, cuda.shfl_xor_sync(0xFFFFFFFF, sum_0, 2))
    sum_1 = sum_of(sum_1, cuda.shfl_xor_sync(0xFFFFFFFF, sum_1, 2))
    below = uint32(place.row + uint32(8))
    sum_0 = float32(np.nan) if state.faults[place.row] else sum_0
    sum_1 = float32(np.nan) if state.faults[below] else sum_1
    if uint32(place.lane & uint32(3)) == uint32(0):
        own = half_of(place)
        state.maxima[uint32(uint32(2) * place.row + own)] = sum_0
        state.maxima[uint32(uint32(2) * below + own)] = sum_1
        if own == uint32(0):
            state.factors[place.row] = maximum_0
            state.factors[below] = maximum_1


@device_routine
def row_total(state, within):  # type: ignore[no-untyped-def]
    """Sum of a row's exponentials, after `share_sums`."""
    twice = uint32(uint32(2) * within)
    return sum_of(state.maxima[twice], state.maxima[uint32(twice + uint32(1))])


@device_routine
def settle_rows(place, rows, item, length, state, first, slot_row, is_folded, results):  # type: ignore[no-untyped-def]
    """Settle each of an item's rows, after `share_sums`, by a thread each; `rows` is how many there may be.

    A row's weights, of what there was and of its outputs, then are where its maxima were, what their sum is
    to be multiplied by is its factor, and what is to be done is where its fault was.
    """
    within = place.thread
    if within < uint32(rows):
        splits = int32(0)
        if int32(within) < item.rows:
            splits = splits_of(state.seen[within], length, int32(0))
        kept, added, factor, to_do = settle_row(
            int64(first + int64(within)),
            int64(slot_row + int64(within)),
            item.split,
            splits,
            is_folded,
            state.factors[within],
            row_total(state, within),
            row_total(state, within),
            results.partial_sums,
            results.lse,
        )
        state.maxima[uint32(uint32(2) * within)] = kept
        state.maxima[uint32(uint32(2) * within + uint32(1))] = added
        state.factors[within] = factor
        state.faults[within] = to_do


def make_output_store(distance: int) -> Any:
    """Make the store of a warp's outputs of 32 rows, for lanes whose pairs are `distance` columns apart."""
    store_floats, store_row = make_row_float_store(distance), make_row_output(distance)
    fold_floats = make_row_float_fold(distance)

    @device_routine
    def store_own_row(column, state, pairs, within, results, slot_row, first):  # type: ignore[no-untyped-def]
        """Write a lane's pairs of row `within` of the item, the first at column `column`."""
        to_do = int32(state.faults[within])
        place = int64(int64(slot_row + int64(within)) * int64(LATENT) + int64(column))
        slot = uint64(address_of(results.partials) + uint64(place * int64(4)))
        if to_do & int32(READ_SLOT):
            twice = uint32(uint32(2) * within)
            pairs = fold_floats(slot, pairs, state.maxima[twice], state.maxima[uint32(twice + uint32(1))])
        if to_do & int32(WRITE_SLOT):
            store_floats(slot, pairs)
        if to_do & int32(WRITE_OUT):
            place = int64(int64(first + int64(within)) * int64(LATENT) + int64(column))
            store_row(results.out, place, scale_tile(pairs, state.factors[within]), results.form)

    @device_routine
    def store_outputs(place, column, state, output, results, slot_row, first):  # type: ignore[no-untyped-def]
        """Write a warp's outputs as `settle_rows` found.

        A lane's first pair is at column `column`. The item's first row is row `first` of all, and row
        `slot_row` of partial results.
        """
        row = uint32(place.group * uint32(GROUP_ROWS) + uint32(place.lane >> uint32(2)))
        row_1, row_2, row_3 = uint32(row + uint32(8)), uint32(row + uint32(16)), uint32(row + uint32(24))
        store_own_row(column, state, row_part_0(output), row, results, slot_row, first)
        store_own_row(column, state, row_part_1(output), row_1, results, slot_row, first)
        store_own_row(column, state, row_part_2(output), row_2, results, slot_row, first)
        store_own_row(column, state, row_part_3(output), row_3, results, slot_row, first)

    return store_outputs
