"""Tree attention on Hopper: `wgmma`, tensor copies, and warps that each have a role.

A block of threads takes one item after another: 64 query rows, nodes times heads of one request, against
one split of their keys, in pairs of blocks of 64. Four warps produce (`hopper_loads`), and two warpgroups
consume:

* the left one scores the first block of a pair and has columns 0 to 255 of the outputs,
* the right one scores the second block and has columns 256 to 511, and the rows' sums.

Each adds the values of both blocks, the first block first. Probabilities, and the maxima they are relative
to, cross through shared memory. The tensor cores' order of a pair is kept by handing over: scores of the
first block; of the second, while the first one's probabilities are computed; values of the first, while the
second one's are; values of the second. Scores of the next pair follow at once, also those of the next item,
before the outputs of this one are written.

A row's maximum is raised only when a score exceeds it by a factor of 2^8 (`PATIENCE`), as FlashAttention-4
does: sums are as exact with another maximum, and outputs have to be rescaled only rarely. A row's arithmetic
does not depend on which warpgroup does it, nor on what shares its tile: results have the same bits wherever
a block comes in its pair, and whether its keys lie in the prefix or were gathered (`path_blocks`).

Registers are a block's own pool of 384 x 168: 224 for each thread that consumes and 56 for one that produces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32, uint64
from numba_ddtree.device.memory import store_flat
from numba_ddtree.devices import multiprocessors
from numba_ddtree.errors import BackendError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.hopper_loads import load_keys, load_queries, schedule
from numba_ddtree.tree_attention.hopper_state import (
    ALIGNMENT,
    BLOCK,
    BLOCK_BYTES,
    CHUNK_BYTES,
    COMMON,
    COUNT,
    FAULT,
    FIRST,
    FIRST_ROW,
    GATHERED,
    ITEM_FREE,
    ITEM_FULL,
    ITEM_WORDS,
    ITEMS,
    KEYS_AT,
    KEYS_FULL,
    KIND,
    LATENT_CHUNKS,
    LEFT_FREE,
    LENGTH,
    MAXIMA,
    OF_PATHS,
    OWN,
    PREFIX,
    QUERIES_AT,
    QUERIES_FREE,
    QUERIES_FULL,
    RECORD_WORDS,
    RECORDS,
    REQUEST,
    RIGHT_FREE,
    ROTARY_FREE,
    ROWS,
    SEEN,
    SHARED_BYTES,
    SPLIT,
    STATE_AT,
    STREAM,
    SUMS,
    TOTALS,
    WAVE_ROW,
    WEIGHTS_AT,
    first_query,
    float_at,
    set_float,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import (
    KEY_SIGNATURE,
    Keys,
    key_arguments,
)
from numba_ddtree.tree_attention.outputs import FLOAT32, output_form
from numba_ddtree.tree_attention.path_blocks import (
    visible_columns,
)
from numba_ddtree.tree_attention.split_items import (
    TREE_SIGNATURE,
    WAVE_SIGNATURE,
    Tree,
    Wave,
    most_keys,
    splits_of,
    tree_arguments,
    waves,
)
from numba_ddtree.tree_attention.split_merge import launch_merge
from numba_ddtree.tree_attention.tensor_maps import key_maps, takes_boxes
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS, SplitPlan, Work

if not SIMULATED:
    from numba_ddtree.device.mbarriers import (
        arrive,
        fence_async_proxy,
        fresh_shared_address_of,
        fresh_word,
        make_handover,
        make_register_limit,
        publish_barriers,
        start_barrier,
        wait_for,
        wait_for_copies_if,
        wait_if,
    )
    from numba_ddtree.device.ptx import (
        address_of,
        exp2,
        fresh_thread,
        larger_of,
        multiply_add,
        product_of,
        quick_reciprocal,
        shared_address_of,
        sum_of,
    )
    from numba_ddtree.device.tile import (
        row_maxima,
        row_sums,
        scale_rows,
        unit_address,
    )
    from numba_ddtree.device.wgmma import (
        close_products,
        column_descriptor,
        exp2_of_scores,
        keep_columns,
        load_left_words,
        make_pack_tile,
        make_product,
        make_rows_store,
        make_undefined,
        open_products,
        row_descriptor,
        store_words_in_chunk,
        wait_for_all_products,
        wait_for_products_but_one,
    )
    from numba_ddtree.tree_attention.outputs import natural_log_sum

    announce_p0, await_p0 = make_handover(1, 256)
    announce_p1, await_p1 = make_handover(2, 256)
    announce_p0_free, await_p0_free = make_handover(3, 256)
    announce_p1_free, await_p1_free = make_handover(4, 256)
    announce_s0, await_s0 = make_handover(5, 256)
    announce_s1, await_s1 = make_handover(6, 256)
    announce_totals, await_totals = make_handover(7, 256)
    lower_registers = make_register_limit("dec", 56)
    raise_registers = make_register_limit("inc", 224)
    no_scores, no_output = make_undefined(32), make_undefined(128)

ARCHITECTURE = "sm_90a"
THREADS = block_threads(384)
LOG2_E = 1.4426950408889634
PATIENCE = np.float32(8)  # a row's maximum is raised when a score exceeds it by so much, to base 2


def no_kernel(name: str) -> Any:
    """Make what stands for the kernel where there are no warpgroups."""

    def hopper_kernel() -> None:
        raise BackendError(f"{name}: the simulator has no warpgroups")

    hopper_kernel.__name__ = hopper_kernel.__qualname__ = name
    return hopper_kernel


@device_routine
def row_of_thread():  # type: ignore[no-untyped-def]
    """Row of a tile that a warpgroup's thread has, with the one 8 further, and its place of four in it."""
    thread = fresh_thread()
    row = uint32(uint32(uint32(thread >> uint32(5)) & uint32(3)) * uint32(16))
    return uint32(row + uint32(uint32(thread & uint32(31)) >> uint32(2))), uint32(thread & uint32(3))


@device_routine
def rotary_words(item, q_pe, pe_stride):  # type: ignore[no-untyped-def]
    """Rotary part of the queries of a lane's two rows, as a left operand; of rows after the last any."""
    row, quad = row_of_thread()
    last = int32(max(int32(0), int32(word_at(item, ROWS) - int32(1))))
    first = first_query(item)
    upper = int64(first + int64(min(int32(row), last)))
    lower = int64(first + int64(min(int32(row + uint32(8)), last)))
    column = uint64(quad << uint32(2))
    return load_left_words(
        uint64(q_pe + uint64(upper * pe_stride) + column), uint64(q_pe + uint64(lower * pe_stride) + column)
    )


@device_routine
def weigh(scores, scale, maximum_0, maximum_1):  # type: ignore[no-untyped-def]
    """Probabilities of two rows of scores, and the rows' new maxima."""
    largest = row_maxima(scores)
    top_0 = larger_of(largest[0], cuda.shfl_xor_sync(0xFFFFFFFF, largest[0], 1))
    top_1 = larger_of(largest[1], cuda.shfl_xor_sync(0xFFFFFFFF, largest[1], 1))
    top_0 = larger_of(top_0, cuda.shfl_xor_sync(0xFFFFFFFF, top_0, 2))
    top_1 = larger_of(top_1, cuda.shfl_xor_sync(0xFFFFFFFF, top_1, 2))
    top_0, top_1 = product_of(top_0, scale), product_of(top_1, scale)
    top_0 = top_0 if top_0 > sum_of(maximum_0, PATIENCE) else maximum_0
    top_1 = top_1 if top_1 > sum_of(maximum_1, PATIENCE) else maximum_1
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
def visible_scores(scores, item, seen, record, heads, sees_prefix, scale):  # type: ignore[no-untyped-def]
    """Scores of a block, -inf where its rows do not see a key.

    They are scaled here only by what is not positive, which turns the largest into the least.
    """
    if not scale > float32(0):
        scores = scale_rows(scores, (scale, scale))
    if word_at(record, KIND) == OF_PATHS:
        row, quad = row_of_thread()
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


@device_routine
def place_of_row(  # type: ignore[no-untyped-def]
    item, seen, row, total, column, out, form, partials
):  # fmt: skip
    """Where a lane writes its part of a row: address, whether at all in floats and in words, factor."""
    splits = splits_of(word_at(seen, row), word_at(item, LENGTH))
    takes_part = int32(row) < word_at(item, ROWS) and word_at(item, SPLIT) < splits
    is_direct = takes_part and splits == 1
    is_partial = takes_part and splits > 1
    place = int64(first_query(item) + int64(row))
    width = uint64(4) if form == FLOAT32 else uint64(2)
    address = uint64(out + uint64(place * int64(LATENT) + int64(column)) * width)
    if is_partial:
        partial = int64(
            int64(word_at(item, SPLIT)) * int64(partials.shape[1])
            + int64(word_at(item, WAVE_ROW))
            + int64(row)
        )
        address = uint64(address_of(partials) + uint64(partial * int64(LATENT) + int64(column)) * uint64(4))
    has_floats = uint32(1) if is_partial or (is_direct and form == FLOAT32) else uint32(0)
    has_words = uint32(1) if is_direct and form != FLOAT32 else uint32(0)
    factor = quick_reciprocal(total) if is_direct else float32(1)
    factor = float32(0) if total == float32(0) else factor
    return address, has_floats, has_words, factor


@device_routine
def store_sums(  # type: ignore[no-untyped-def]
    item, seen, row, maximum, total, partial_sums, lse
):  # fmt: skip
    """Write a row's log-sum-exp, or what it is to be merged from."""
    splits = splits_of(word_at(seen, row), word_at(item, LENGTH))
    if int32(row) < word_at(item, ROWS) and word_at(item, SPLIT) < splits:
        place = int64(first_query(item) + int64(row))
        if splits == 1:
            store_flat(lse, place, natural_log_sum(maximum, total))
        else:
            partial = int64(
                int64(word_at(item, SPLIT)) * int64(partial_sums.shape[1])
                + int64(word_at(item, WAVE_ROW))
                + int64(row)
            )
            store_flat(partial_sums, int64(2) * partial, maximum)
            store_flat(partial_sums, int64(2) * partial + int64(1), total)


@device_routine
def store_totals(  # type: ignore[no-untyped-def]
    base, item, seen, maximum_0, maximum_1, total_0, total_1, partial_sums, lse
):  # fmt: skip
    """Write the sums of a lane's two rows, for the other warpgroup and for the caller."""
    row, quad = row_of_thread()
    if quad == uint32(0):
        below = uint32(row + uint32(8))
        set_float(base, uint32(uint32(TOTALS) + row), total_0)
        set_float(base, uint32(uint32(TOTALS) + below), total_1)
        store_sums(item, seen, row, maximum_0, total_0, partial_sums, lse)
        store_sums(item, seen, below, maximum_1, total_1, partial_sums, lse)


def make_kernel(number: str, name: str) -> Any:
    """Make the kernel for operands of ``"bf16"`` or ``"f16"``, as PTX has them; the simulator has none."""
    if SIMULATED:
        return no_kernel(name)
    rotary_product = make_product(
        number, 64, [(4 * j, LATENT_CHUNKS * 512 + 2 * j) for j in range(4)], has_left_in_registers=True
    )
    product_0, product_1, product_2, product_3, product_4, product_5, product_6, product_7 = (
        make_product(number, 64, [(512 * chunk + 2 * j, 512 * chunk + 2 * j) for j in range(4)])
        for chunk in range(LATENT_CHUNKS)
    )
    add_own_values = make_product(
        number, 256, [(4 * j, 128 * j) for j in range(4)],
        has_left_in_registers=True, has_right_by_columns=True,
    )  # fmt: skip
    add_values = make_product(number, 256, [(2 * j, 128 * j) for j in range(4)], has_right_by_columns=True)
    pack_weights = make_pack_tile(f"{number}x2")
    store_rows = make_rows_store(f"{number}x2")

    @device_routine
    def begin_scores(full, gathered, record, phase, turns, is_wanted, rotary, queries, keys):  # type: ignore[no-untyped-def]
        """Begin a block's scores with half of their terms."""
        wait_if(uint32(full + uint32(64)), phase, is_wanted)
        is_gathered = uint32(uint32(word_at(record, KIND)) & is_wanted)
        wait_for_copies_if(gathered, uint32(turns & uint32(1)), is_gathered)
        open_products()
        scores = rotary_product(no_scores(), rotary, keys, uint32(0))
        wait_if(uint32(full + uint32(0)), phase, is_wanted)
        open_products()
        scores = product_0(scores, queries, keys, uint32(1))
        wait_if(uint32(full + uint32(8)), phase, is_wanted)
        open_products()
        scores = product_1(scores, queries, keys, uint32(1))
        wait_if(uint32(full + uint32(16)), phase, is_wanted)
        open_products()
        scores = product_2(scores, queries, keys, uint32(1))
        wait_if(uint32(full + uint32(24)), phase, is_wanted)
        open_products()
        scores = product_3(scores, queries, keys, uint32(1))
        return scores, uint32(turns + is_gathered)

    @device_routine
    def end_scores(scores, full, phase, is_wanted, queries, keys):  # type: ignore[no-untyped-def]
        """Begin the other half of a block's scores."""
        wait_if(uint32(full + uint32(32)), phase, is_wanted)
        open_products()
        scores = product_4(scores, queries, keys, uint32(1))
        wait_if(uint32(full + uint32(40)), phase, is_wanted)
        open_products()
        scores = product_5(scores, queries, keys, uint32(1))
        wait_if(uint32(full + uint32(48)), phase, is_wanted)
        open_products()
        scores = product_6(scores, queries, keys, uint32(1))
        wait_if(uint32(full + uint32(56)), phase, is_wanted)
        open_products()
        scores = product_7(scores, queries, keys, uint32(1))
        return scores

    @device_routine
    def store_outputs(  # type: ignore[no-untyped-def]
        output, item, seen, total_0, total_1, first_column, out, form, partials
    ):  # fmt: skip
        """Write a lane's part of two rows, from `first_column` on, 256 columns wide."""
        row, quad = row_of_thread()
        column = uint32(uint32(first_column) + uint32(quad << uint32(1)))
        below = uint32(row + uint32(8))
        address_0, floats_0, words_0, factor_0 = place_of_row(
            item, seen, row, total_0, column, out, form, partials
        )
        address_1, floats_1, words_1, factor_1 = place_of_row(
            item, seen, below, total_1, column, out, form, partials
        )
        store_rows(
            (address_0, address_1), output, (factor_0, factor_1), (floats_0, floats_1), (words_0, words_1)
        )

    @device_routine
    def attend_left(  # type: ignore[no-untyped-def]
        s_words, q_pe, pe_stride, heads, sees_prefix, scale, partials, out, form,
    ):  # fmt: skip
        """Score the first block of each pair, and keep the left half of the outputs."""
        left_scale = scale if scale > float32(0) else float32(1)
        base = fresh_shared_address_of(s_words)
        barriers = uint32(base + uint32(STATE_AT))
        thread = uint32(cuda.threadIdx.x)
        lane, quad = uint32(thread & uint32(31)), uint32(thread & uint32(3))
        row = uint32(uint32(thread >> uint32(5)) * uint32(16) + uint32(lane >> uint32(2)))
        below = uint32(row + uint32(8))
        weights = uint32(
            unit_address(uint32(base + uint32(WEIGHTS_AT)), row, uint32(0)) + uint32(quad << uint32(2))
        )
        queries = row_descriptor(uint32(base + uint32(QUERIES_AT)))
        keys = row_descriptor(uint32(base + uint32(KEYS_AT)))
        values_0 = column_descriptor(uint32(base + uint32(KEYS_AT)))
        values_1 = column_descriptor(uint32(base + uint32(KEYS_AT + BLOCK_BYTES)))
        weights_1 = row_descriptor(uint32(base + uint32(WEIGHTS_AT + CHUNK_BYTES)))
        full = uint32(barriers + uint32(8 * KEYS_FULL))
        gathered = uint32(barriers + uint32(8 * GATHERED))
        record = uint32(base + uint32(4 * RECORDS))
        number, turn, gathers = uint32(0), uint32(0), uint32(0)

        wait_for(uint32(barriers + uint32(8 * ITEM_FULL)), uint32(0))
        item, seen = uint32(base + uint32(4 * ITEMS)), uint32(base + uint32(4 * SEEN))
        if word_at(item, REQUEST) < 0:
            return
        announce_p1_free()
        rotary = rotary_words(item, q_pe, pe_stride)
        wait_for_copies_if(uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(0), uint32(1))
        scores, gathers = begin_scores(
            full, gathered, record, uint32(0), gathers, uint32(1), rotary, queries, keys
        )
        scores = end_scores(scores, full, uint32(0), uint32(1), queries, keys)
        close_products()
        announce_s0()
        scores = wait_for_all_products(scores)
        is_wanted = uint32(1)
        output = no_output()
        while is_wanted != uint32(0):
            pairs = int32(max(int32(1), int32(uint32(word_at(item, STREAM) + int32(1)) >> uint32(1))))
            maximum_0, maximum_1 = float32(-np.inf), float32(-np.inf)
            is_continued = uint32(0)
            for _ in range(pairs - int32(1)):
                scores = visible_scores(scores, item, seen, record, heads, sees_prefix, scale)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * ROTARY_FREE)))
                powers, new_0, new_1 = weigh(scores, left_scale, maximum_0, maximum_1)
                words = pack_weights(powers)
                sums = row_sums(powers)
                await_p0_free()
                store_words_in_chunk(weights, words)
                if quad == uint32(0):
                    set_float(base, uint32(uint32(MAXIMA) + row), new_0)
                    set_float(base, uint32(uint32(MAXIMA) + below), new_1)
                fence_async_proxy()
                announce_p0()
                if cuda.any_sync(0xFFFFFFFF, new_0 != maximum_0 or new_1 != maximum_1):
                    output = scale_rows(output, (factor_of(maximum_0, new_0), factor_of(maximum_1, new_1)))
                await_s1()
                set_float(base, uint32(uint32(SUMS) + thread), sums[0])
                set_float(base, uint32(uint32(SUMS) + uint32(thread + uint32(128))), sums[1])
                open_products()
                output = add_own_values(output, words, values_0, is_continued)
                close_products()
                output = wait_for_all_products(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * LEFT_FREE)))
                await_p1()
                maximum_0, maximum_1 = (
                    float_at(base, uint32(uint32(MAXIMA + TILE_ROWS) + row)),
                    float_at(base, uint32(uint32(MAXIMA + TILE_ROWS) + below)),
                )
                if cuda.any_sync(0xFFFFFFFF, new_0 != maximum_0 or new_1 != maximum_1):
                    output = scale_rows(output, (factor_of(new_0, maximum_0), factor_of(new_1, maximum_1)))
                open_products()
                output = add_values(output, weights_1, values_1, uint32(1))
                close_products()
                is_continued = uint32(1)
                turn = uint32(turn ^ uint32(1))
                scores, gathers = begin_scores(
                    full, gathered, record, turn, gathers, uint32(1), rotary, queries, keys
                )
                close_products()
                output = wait_for_products_but_one(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * (LEFT_FREE + 1))))
                announce_p1_free()
                open_products()
                scores = end_scores(scores, full, turn, uint32(1), queries, keys)
                close_products()
                announce_s0()
                scores = wait_for_all_products(scores)

            # The last pair: the next item's scores begin before this item's outputs are written.
            scores = visible_scores(scores, item, seen, record, heads, sees_prefix, scale)
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8 * ROTARY_FREE)))
                arrive(uint32(barriers + uint32(8 * QUERIES_FREE)))
            powers, new_0, new_1 = weigh(scores, left_scale, maximum_0, maximum_1)
            words = pack_weights(powers)
            sums = row_sums(powers)
            await_p0_free()
            store_words_in_chunk(weights, words)
            if quad == uint32(0):
                set_float(base, uint32(uint32(MAXIMA) + row), new_0)
                set_float(base, uint32(uint32(MAXIMA) + below), new_1)
            fence_async_proxy()
            announce_p0()
            if cuda.any_sync(0xFFFFFFFF, new_0 != maximum_0 or new_1 != maximum_1):
                output = scale_rows(output, (factor_of(maximum_0, new_0), factor_of(maximum_1, new_1)))
            await_s1()
            set_float(base, uint32(uint32(SUMS) + thread), sums[0])
            set_float(base, uint32(uint32(SUMS) + uint32(thread + uint32(128))), sums[1])
            open_products()
            output = add_own_values(output, words, values_0, is_continued)
            close_products()
            output = wait_for_all_products(output)
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8 * LEFT_FREE)))
            number = uint32(fresh_word(int32(number)))
            slot = uint32(number & uint32(1))
            number = uint32(number + uint32(1))
            next_slot = uint32(number & uint32(1))
            wait_for(
                uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + next_slot)),
                uint32(uint32(number >> uint32(1)) & uint32(1)),
            )
            next_item = uint32(base + uint32(4 * ITEMS) + next_slot * uint32(4 * ITEM_WORDS))
            is_wanted = uint32(1) if word_at(next_item, REQUEST) >= 0 else uint32(0)
            rotary = rotary_words(next_item, q_pe, pe_stride)
            await_p1()
            maximum_0, maximum_1 = (
                float_at(base, uint32(uint32(MAXIMA + TILE_ROWS) + row)),
                float_at(base, uint32(uint32(MAXIMA + TILE_ROWS) + below)),
            )
            if cuda.any_sync(0xFFFFFFFF, new_0 != maximum_0 or new_1 != maximum_1):
                output = scale_rows(output, (factor_of(new_0, maximum_0), factor_of(new_1, maximum_1)))
            open_products()
            output = add_values(output, weights_1, values_1, uint32(1))
            close_products()
            turn = uint32(turn ^ uint32(1))
            wait_for_copies_if(
                uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(number & uint32(1)), is_wanted
            )
            scores, gathers = begin_scores(
                full, gathered, record, turn, gathers, is_wanted, rotary, queries, keys
            )
            close_products()
            output = wait_for_products_but_one(output)
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8 * (LEFT_FREE + 1))))
            announce_p1_free()
            open_products()
            scores = end_scores(scores, full, turn, is_wanted, queries, keys)
            close_products()
            announce_s0()
            await_totals()
            store_outputs(
                output, item, seen, float_at(base, uint32(uint32(TOTALS) + row)),
                float_at(base, uint32(uint32(TOTALS) + below)), 0, out, form, partials,
            )  # fmt: skip
            scores = wait_for_all_products(scores)
            cuda.syncwarp()
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + slot)))
            item = next_item
            seen = uint32(base + uint32(4 * SEEN) + next_slot * uint32(4 * TILE_ROWS))
        await_s1()
        await_p0_free()

    @device_routine
    def attend_right(  # type: ignore[no-untyped-def]
        s_words, q_pe, pe_stride, heads, sees_prefix, scale, partials,
        partial_sums, out, lse, form,
    ):  # fmt: skip
        """Score the second block of each pair, and keep the right half of the outputs and the rows' sums."""
        left_scale = scale if scale > float32(0) else float32(1)
        base = fresh_shared_address_of(s_words)
        barriers = uint32(base + uint32(STATE_AT))
        thread = uint32(uint32(cuda.threadIdx.x) & uint32(127))
        lane, quad = uint32(thread & uint32(31)), uint32(thread & uint32(3))
        row = uint32(uint32(thread >> uint32(5)) * uint32(16) + uint32(lane >> uint32(2)))
        below = uint32(row + uint32(8))
        weights = uint32(
            unit_address(uint32(base + uint32(WEIGHTS_AT + CHUNK_BYTES)), row, uint32(0))
            + uint32(quad << uint32(2))
        )
        queries = row_descriptor(uint32(base + uint32(QUERIES_AT)))
        keys = row_descriptor(uint32(base + uint32(KEYS_AT + BLOCK_BYTES)))
        values_0 = column_descriptor(uint32(base + uint32(KEYS_AT + 4 * CHUNK_BYTES)))
        values_1 = column_descriptor(uint32(base + uint32(KEYS_AT + BLOCK_BYTES + 4 * CHUNK_BYTES)))
        weights_0 = row_descriptor(uint32(base + uint32(WEIGHTS_AT)))
        full = uint32(barriers + uint32(8 * (KEYS_FULL + 9)))
        gathered = uint32(barriers + uint32(8 * (GATHERED + 1)))
        record = uint32(base + uint32(4 * (RECORDS + RECORD_WORDS)))
        number, turn, gathers = uint32(0), uint32(0), uint32(0)

        wait_for(uint32(barriers + uint32(8 * ITEM_FULL)), uint32(0))
        item, seen = uint32(base + uint32(4 * ITEMS)), uint32(base + uint32(4 * SEEN))
        if word_at(item, REQUEST) < 0:
            return
        announce_p0_free()
        rotary = rotary_words(item, q_pe, pe_stride)
        wait_for_copies_if(uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(0), uint32(1))
        await_s0()
        scores, gathers = begin_scores(
            full, gathered, record, uint32(0), gathers, uint32(1), rotary, queries, keys
        )
        scores = end_scores(scores, full, uint32(0), uint32(1), queries, keys)
        close_products()
        announce_s1()
        scores = wait_for_all_products(scores)
        is_wanted = uint32(1)
        output = no_output()
        while is_wanted != uint32(0):
            pairs = int32(max(int32(1), int32(uint32(word_at(item, STREAM) + int32(1)) >> uint32(1))))
            maximum_0, maximum_1 = float32(-np.inf), float32(-np.inf)
            sum_0, sum_1 = float32(0), float32(0)
            is_continued = uint32(0)
            for _ in range(pairs - int32(1)):
                scores = visible_scores(scores, item, seen, record, heads, sees_prefix, scale)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * (ROTARY_FREE + 1))))
                await_p0()
                middle_0, middle_1 = (
                    float_at(base, uint32(uint32(MAXIMA) + row)),
                    float_at(base, uint32(uint32(MAXIMA) + below)),
                )
                factor_0, factor_1 = factor_of(maximum_0, middle_0), factor_of(maximum_1, middle_1)
                if cuda.any_sync(0xFFFFFFFF, middle_0 != maximum_0 or middle_1 != maximum_1):
                    output = scale_rows(output, (factor_0, factor_1))
                open_products()
                output = add_values(output, weights_0, values_0, is_continued)
                close_products()
                powers, maximum_0, maximum_1 = weigh(scores, left_scale, middle_0, middle_1)
                words = pack_weights(powers)
                sums = row_sums(powers)
                last_0, last_1 = factor_of(middle_0, maximum_0), factor_of(middle_1, maximum_1)
                await_p1_free()
                store_words_in_chunk(weights, words)
                if quad == uint32(0):
                    set_float(base, uint32(uint32(MAXIMA + TILE_ROWS) + row), maximum_0)
                    set_float(base, uint32(uint32(MAXIMA + TILE_ROWS) + below), maximum_1)
                fence_async_proxy()
                announce_p1()
                output = wait_for_all_products(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * RIGHT_FREE)))
                announce_p0_free()
                if cuda.any_sync(0xFFFFFFFF, middle_0 != maximum_0 or middle_1 != maximum_1):
                    output = scale_rows(output, (last_0, last_1))
                open_products()
                output = add_own_values(output, words, values_1, uint32(1))
                close_products()
                output = wait_for_all_products(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * (RIGHT_FREE + 1))))
                await_s0()
                sum_0 = multiply_add(sum_0, factor_0, float_at(base, uint32(uint32(SUMS) + thread)))
                sum_1 = multiply_add(
                    sum_1, factor_1, float_at(base, uint32(uint32(SUMS) + uint32(thread + uint32(128))))
                )
                sum_0 = multiply_add(sum_0, last_0, sums[0])
                sum_1 = multiply_add(sum_1, last_1, sums[1])
                is_continued = uint32(1)
                turn = uint32(turn ^ uint32(1))
                scores, gathers = begin_scores(
                    full, gathered, record, turn, gathers, uint32(1), rotary, queries, keys
                )
                scores = end_scores(scores, full, turn, uint32(1), queries, keys)
                close_products()
                announce_s1()
                scores = wait_for_all_products(scores)

            scores = visible_scores(scores, item, seen, record, heads, sees_prefix, scale)
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8 * (ROTARY_FREE + 1))))
                arrive(uint32(barriers + uint32(8 * QUERIES_FREE)))
            await_p0()
            middle_0, middle_1 = (
                float_at(base, uint32(uint32(MAXIMA) + row)),
                float_at(base, uint32(uint32(MAXIMA) + below)),
            )
            factor_0, factor_1 = factor_of(maximum_0, middle_0), factor_of(maximum_1, middle_1)
            if cuda.any_sync(0xFFFFFFFF, middle_0 != maximum_0 or middle_1 != maximum_1):
                output = scale_rows(output, (factor_0, factor_1))
            open_products()
            output = add_values(output, weights_0, values_0, is_continued)
            close_products()
            powers, maximum_0, maximum_1 = weigh(scores, left_scale, middle_0, middle_1)
            words = pack_weights(powers)
            sums = row_sums(powers)
            last_0, last_1 = factor_of(middle_0, maximum_0), factor_of(middle_1, maximum_1)
            await_p1_free()
            store_words_in_chunk(weights, words)
            if quad == uint32(0):
                set_float(base, uint32(uint32(MAXIMA + TILE_ROWS) + row), maximum_0)
                set_float(base, uint32(uint32(MAXIMA + TILE_ROWS) + below), maximum_1)
            fence_async_proxy()
            announce_p1()
            output = wait_for_all_products(output)
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8 * RIGHT_FREE)))
            announce_p0_free()
            if cuda.any_sync(0xFFFFFFFF, middle_0 != maximum_0 or middle_1 != maximum_1):
                output = scale_rows(output, (last_0, last_1))
            open_products()
            output = add_own_values(output, words, values_1, uint32(1))
            close_products()
            output = wait_for_all_products(output)
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8 * (RIGHT_FREE + 1))))
            number = uint32(fresh_word(int32(number)))
            slot = uint32(number & uint32(1))
            number = uint32(number + uint32(1))
            next_slot = uint32(number & uint32(1))
            wait_for(
                uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + next_slot)),
                uint32(uint32(number >> uint32(1)) & uint32(1)),
            )
            next_item = uint32(base + uint32(4 * ITEMS) + next_slot * uint32(4 * ITEM_WORDS))
            is_wanted = uint32(1) if word_at(next_item, REQUEST) >= 0 else uint32(0)
            await_s0()
            sum_0 = multiply_add(sum_0, factor_0, float_at(base, uint32(uint32(SUMS) + thread)))
            sum_1 = multiply_add(
                sum_1, factor_1, float_at(base, uint32(uint32(SUMS) + uint32(thread + uint32(128))))
            )
            sum_0 = sum_of_quad(multiply_add(sum_0, last_0, sums[0]))
            sum_1 = sum_of_quad(multiply_add(sum_1, last_1, sums[1]))
            rotary = rotary_words(next_item, q_pe, pe_stride)
            if word_at(item, FAULT) != 0:
                sum_0, sum_1 = float32(np.nan), float32(np.nan)
            store_totals(base, item, seen, maximum_0, maximum_1, sum_0, sum_1, partial_sums, lse)
            announce_totals()
            turn = uint32(turn ^ uint32(1))
            wait_for_copies_if(
                uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(number & uint32(1)), is_wanted
            )
            scores, gathers = begin_scores(
                full, gathered, record, turn, gathers, is_wanted, rotary, queries, keys
            )
            scores = end_scores(scores, full, turn, is_wanted, queries, keys)
            close_products()
            announce_s1()
            store_outputs(output, item, seen, sum_0, sum_1, LATENT // 2, out, form, partials)
            scores = wait_for_all_products(scores)
            cuda.syncwarp()
            if lane == uint32(0):
                arrive(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + slot)))
            item = next_item
            seen = uint32(base + uint32(4 * SEEN) + next_slot * uint32(4 * TILE_ROWS))
        await_p1_free()

    def hopper_kernel(  # type: ignore[no-untyped-def]
        q_nope,  # uint64: address of the rows [B * N * H, LATENT]
        nope_stride,  # int64: bytes from row to row
        q_pe,  # uint64: address of the rows [B * N * H, ROPE]
        pe_stride,  # int64
        ckv,  # to max_keys as `Keys`, `Tree` and `Wave` have them
        ckv_stride,
        ckv_page_stride,
        kpe,
        kpe_stride,
        kpe_page_stride,
        page_size,
        num_pages,
        page_table,
        page_starts,
        table_stride,
        ancestor_bits,
        num_nodes,
        prefix_lengths,
        max_path,
        heads,
        first_tile,
        tiles,
        workers,
        split_blocks,
        max_splits,
        max_keys,  # int32
        maps,  # uint64: address of the tensor maps of latent and rotary rows
        in_boxes,  # int32: whether there are maps
        sees_prefix,  # int32: whether nodes see the prefix
        scale,  # float32: of the scores, to base 2
        partials,  # float32 [splits, rows, LATENT]
        partial_sums,  # float32 [splits, rows, 2]
        out,  # uint64: address of the output, [B, N, H, LATENT]
        lse,  # float32 [B, N, H]
        form,  # int32: of the output
    ):
        keys = Keys(
            ckv, ckv_stride, ckv_page_stride, kpe, kpe_stride, kpe_page_stride, page_size, num_pages,
            page_table, page_starts, table_stride,
        )  # fmt: skip
        tree = Tree(ancestor_bits, num_nodes, prefix_lengths, max_path, heads)
        wave = Wave(first_tile, tiles, workers, split_blocks, max_splits)
        s_words = cuda.shared.array(0, int32, alignment=ALIGNMENT)
        barriers = uint32(shared_address_of(s_words) + uint32(STATE_AT))
        thread = uint32(cuda.threadIdx.x)
        lane = uint32(thread & uint32(31))
        warp = uint32(thread >> uint32(5))
        if thread == uint32(0):
            start_barrier(uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(32))
            start_barrier(uint32(barriers + uint32(8 * QUERIES_FREE)), uint32(8))
            for place in range(uint32(18)):
                start_barrier(uint32(barriers + uint32(8) * (uint32(KEYS_FULL) + uint32(place))), uint32(1))
            for place in range(uint32(2)):
                start_barrier(uint32(barriers + uint32(8) * (uint32(GATHERED) + uint32(place))), uint32(64))
                start_barrier(uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + uint32(place))), uint32(1))
                start_barrier(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + uint32(place))), uint32(11))
            for place in range(uint32(6)):
                start_barrier(uint32(barriers + uint32(8) * (uint32(ROTARY_FREE) + uint32(place))), uint32(4))
            publish_barriers()
        cuda.syncthreads()
        if warp >= uint32(8):
            lower_registers()
            if warp == uint32(10):
                schedule(s_words, keys, tree, wave, max_keys, sees_prefix)
            elif warp == uint32(11):
                load_queries(s_words, q_nope, nope_stride, lane)
            else:
                load_keys(
                    s_words, keys, tree, maps, in_boxes, sees_prefix, lane,
                    uint32(warp - uint32(8)),
                )  # fmt: skip
        else:
            raise_registers()
            if warp < uint32(4):
                attend_left(
                    s_words, q_pe, pe_stride, heads, sees_prefix, scale, partials,
                    out, form,
                )  # fmt: skip
            else:
                attend_right(
                    s_words, q_pe, pe_stride, heads, sees_prefix, scale, partials,
                    partial_sums, out, lse, form,
                )  # fmt: skip

    hopper_kernel.__name__ = hopper_kernel.__qualname__ = name
    return hopper_kernel


SIGNATURE = (
    f"void(uint64, int64, uint64, int64, {KEY_SIGNATURE}, {TREE_SIGNATURE}, {WAVE_SIGNATURE}, int32, uint64, "
    "int32, int32, float32, float32[:, :, ::1], float32[:, :, ::1], uint64, float32[:, :, ::1], int32)"
)
ATTEND_BFLOAT16 = Kernel(
    make_kernel("bf16", "hopper_bfloat16_kernel"), (SIGNATURE,), THREADS, architecture=ARCHITECTURE
)
ATTEND_FLOAT16 = Kernel(
    make_kernel("f16", "hopper_float16_kernel"), (SIGNATURE,), THREADS, architecture=ARCHITECTURE
)
KERNELS = {"bfloat16": ATTEND_BFLOAT16, "float16": ATTEND_FLOAT16}


def launch_hopper(transfer: Transfer, work: Work, splits: SplitPlan) -> None:
    """Launch the kernel, and the merge of splits, wave by wave."""
    workers = multiprocessors()
    in_boxes = takes_boxes(work.keys)
    maps = key_maps(work, int(cuda.get_current_device().id)) if in_boxes else 0
    for wave in waves(work, splits, workers):
        transfer.launch(
            KERNELS[work.dtype.name],
            workers,
            np.uint64(work.q_nope.address),
            np.int64(work.q_nope.stride),
            np.uint64(work.q_pe.address),
            np.int64(work.q_pe.stride),
            *key_arguments(work.keys),
            *tree_arguments(work),
            *wave,
            most_keys(splits),
            np.uint64(maps),
            np.int32(in_boxes),
            np.int32(work.sees_prefix),
            np.float32(work.sm_scale * LOG2_E),
            splits.partials,
            splits.partial_sums,
            np.uint64(work.out.pointer),
            work.lse,
            output_form(work),
            shared_bytes=SHARED_BYTES,
        )
        launch_merge(transfer, work, splits, wave)
