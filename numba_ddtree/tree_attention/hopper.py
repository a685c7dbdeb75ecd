"""Tree attention on Hopper: `wgmma`, tensor copies, and warps that each have a role.

A block of threads takes one item after another: 64 query rows, nodes times heads of one request, against
one split of their keys, in pairs of blocks of 64. Four warps produce (`hopper_items`, `hopper_loads`), and
two warpgroups consume:

* the left one scores the first block of a pair and has columns 0 to 255 of the outputs,
* the right one scores the second block and has columns 256 to 511, and the rows' sums.

Each adds the values of both blocks, the first block first. Probabilities, the origins they are relative to
(`hopper_scores`), and the rows' sums so far cross through shared memory. The tensor cores' order of a pair is
kept by handing over: scores of the first block; of the second, while the first one's probabilities are
computed; the left half's values of the first, while the second one's are; then the right half's, which begin
between exponentials and their rounding, once the left warpgroup knows the new origins; values of the second.
Each product is waited for before its warpgroup begins the next scores, so that its buffer is free the
soonest, and nothing is under way across the loop's end.

Two blocks make a cluster. Where they have the two splits of a tile they merge them in each other's shared
memory (`hopper_pairs`); other splits are merged by all blocks, when they have met (`hopper_merge`).

Outputs are divided by the sum of rounded probabilities (`split_fold`), by which much of the rounding
cancels. A row's arithmetic does not depend on which warpgroup does it, nor on what shares its tile: results
have the same bits wherever a block comes in its pair, and whether its keys lie in the prefix or were gathered
(`path_blocks`); only where the device chooses splits the tree's keys may be read otherwise (`slot_blocks`).

Registers are a block's own pool of 384 x 168: 216 for each thread that consumes and 72 for one that produces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32, uint64
from numba_ddtree.devices import multiprocessors
from numba_ddtree.errors import BackendError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.bands import may_have_bands
from numba_ddtree.tree_attention.hopper_foretold import read_foretold
from numba_ddtree.tree_attention.hopper_items import is_scheduler, schedule
from numba_ddtree.tree_attention.hopper_loads import (
    acquire_maps,
    load_first_queries,
    load_keys,
    load_queries,
)
from numba_ddtree.tree_attention.hopper_merge import merge_rest
from numba_ddtree.tree_attention.hopper_outputs import row_of_lane, share_outcome
from numba_ddtree.tree_attention.hopper_pairs import (
    LEFT,
    PEER_BYTES,
    RIGHT,
    is_paired,
    keep_sums,
    make_pair_routines,
    send_sums,
    tell_peer_that_queries_are_done,
)
from numba_ddtree.tree_attention.hopper_scores import (
    factor_of,
    grown,
    grown_by_pair,
    limits_of,
    sums_of_quad,
    visible_scores,
    weigh,
)
from numba_ddtree.tree_attention.hopper_state import (
    ALIGNMENT,
    BLOCK_BYTES,
    CHUNK_BYTES,
    CONSUMING_WARPS,
    FAULT,
    GATHERED,
    IS_FOLDED,
    ITEM_COUNTED,
    ITEM_FREE,
    ITEM_FULL,
    ITEM_WORDS,
    ITEMS,
    KEYS_AT,
    KEYS_FULL,
    KIND,
    LATENT_CHUNKS,
    LEFT_FREE,
    ORIGINS,
    PEER_DATA,
    PEER_READY,
    QUERIES_AT,
    QUERIES_FREE,
    QUERIES_FULL,
    RECORD_WORDS,
    RECORDS,
    REQUEST,
    RIGHT_FREE,
    ROTARY_FREE,
    ROUNDED,
    ROWS,
    SEEN,
    SHARED,
    SHARED_BYTES,
    STATE_AT,
    STREAM,
    TOTALS,
    WEIGHTS_AT,
    first_query,
    pair_at,
    set_pair,
    word_at,
)
from numba_ddtree.tree_attention.kernel_arguments import input_arguments, scale_argument
from numba_ddtree.tree_attention.key_rows import (
    KEY_SIGNATURE,
    Keys,
)
from numba_ddtree.tree_attention.outputs import output_form
from numba_ddtree.tree_attention.shares import SHARE_SIGNATURE, Share, share_arguments
from numba_ddtree.tree_attention.slot_blocks import way_to_read
from numba_ddtree.tree_attention.split_items import (
    TREE_SIGNATURE,
    Tree,
)
from numba_ddtree.tree_attention.tensor_maps import key_maps, takes_boxes
from numba_ddtree.tree_attention.unused_rows import fill_unused_rows
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS, SplitPlan, Work

if not SIMULATED:
    from numba_ddtree.device.clusters import arrive_at_cluster
    from numba_ddtree.device.mbarriers import (
        arrive,
        arrive_and_expect,
        fence_async_proxy,
        fresh_lane,
        fresh_shared_address_of,
        fresh_word,
        make_handover,
        make_register_limit,
        publish_barriers,
        start_barrier,
        wait_for,
        wait_for_copies_if,
    )
    from numba_ddtree.device.ptx import product_of, shared_address_of
    from numba_ddtree.device.tile import row_sums, scale_rows, unit_address
    from numba_ddtree.device.wgmma import (
        close_products,
        column_descriptor,
        load_left_words,
        make_pack_tile,
        make_product,
        make_undefined,
        make_word_sums,
        open_products,
        row_descriptor,
        store_words_in_chunk,
        wait_for_all_but_last,
        wait_for_all_products,
    )
    from numba_ddtree.tree_attention.hopper_outputs import make_output_stores

    announce_p0, await_p0 = make_handover(1, 256)
    announce_p1, await_p1 = make_handover(2, 256)
    announce_p0_free, await_p0_free = make_handover(3, 256)
    announce_p1_free, await_p1_free = make_handover(4, 256)
    announce_s0, await_s0 = make_handover(5, 256)
    announce_s1, await_s1 = make_handover(6, 256)
    announce_outcomes, await_outcomes = make_handover(7, 256)
    announce_p1_read, await_p1_read = make_handover(8, 256)
    announce_origins, await_origins = make_handover(9, 256)
    lower_registers = make_register_limit("dec", 72)
    raise_registers = make_register_limit("inc", 216)
    no_scores, no_output = make_undefined(32), make_undefined(128)

ARCHITECTURE = "sm_90a"
THREADS = block_threads(384)
CLUSTER_BLOCKS = 2


def no_kernel(name: str) -> Any:
    """Make what stands for the kernel where there are no warpgroups."""

    def hopper_kernel() -> None:
        raise BackendError(f"{name}: the simulator has no warpgroups")

    hopper_kernel.__name__ = hopper_kernel.__qualname__ = name
    return hopper_kernel


@device_routine
def item_places(base, number):  # type: ignore[no-untyped-def]
    """Addresses of an item's words, and of how many keys its rows see, for the item of a running number."""
    place = uint32(number & uint32(1))
    return (
        uint32(base + uint32(4 * ITEMS) + place * uint32(4 * ITEM_WORDS)),
        uint32(base + uint32(4 * SEEN) + place * uint32(4 * TILE_ROWS)),
    )


@device_routine
def await_item(base, barriers, number):  # type: ignore[no-untyped-def]
    """Wait until the item of a running number is told; return where its words are, and whether it is one."""
    wait_for(
        uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + uint32(number & uint32(1)))),
        uint32(uint32(number >> uint32(1)) & uint32(1)),
    )
    item, _ = item_places(base, number)
    return item, word_at(item, REQUEST) >= 0


@device_routine
def pairs_for_sure(item):  # type: ignore[no-untyped-def]
    """Pairs (int32) that an item has at least, before they are counted: of its shared blocks, an even number.

    So where those that consume wait for the count, an odd number of first values have been added, which is
    what `let_first_pair_begin` waits for.
    """
    return int32(max(int32(1), int32(uint32(uint32(word_at(item, SHARED)) >> uint32(2)) << uint32(1))))


@device_routine
def count_pairs(barriers, item, number):  # type: ignore[no-untyped-def]
    """Pairs (int32) of the item of a running number, at least one, once they are counted."""
    wait_for(
        uint32(barriers + uint32(8) * (uint32(ITEM_COUNTED) + uint32(number & uint32(1)))),
        uint32(uint32(number >> uint32(1)) & uint32(1)),
    )
    return int32(max(int32(1), int32(uint32(word_at(item, STREAM) + int32(1)) >> uint32(1))))


@device_routine
def rotary_words(item, q_pe, pe_stride):  # type: ignore[no-untyped-def]
    """Rotary part of the queries of a lane's two rows, as a left operand; of rows after the last any."""
    row, quad = row_of_lane()
    last = int32(max(int32(0), int32(word_at(item, ROWS) - int32(1))))
    first = first_query(item)
    upper = int64(first + int64(min(int32(row), last)))
    lower = int64(first + int64(min(int32(row + uint32(8)), last)))
    column = uint64(quad << uint32(2))
    return load_left_words(
        uint64(q_pe + uint64(upper * pe_stride) + column), uint64(q_pe + uint64(lower * pe_stride) + column)
    )


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
    pack_weights, sums_of_words = make_pack_tile(f"{number}x2"), make_word_sums(f"{number}x2")
    store_partial, store_outputs = make_output_stores(number)
    part_left, finish_left = make_pair_routines(number, LEFT)
    part_right, finish_right = make_pair_routines(number, RIGHT)

    @device_routine
    def begin_scores(full, gathered, record, phase, turns, rotary, queries, keys):  # type: ignore[no-untyped-def]
        """Begin a block's scores, chunk by chunk of its keys as they come.

        Returns them, the gathered blocks so far, and the block's kind.
        """
        wait_for(uint32(full + uint32(64)), phase)
        kind = word_at(record, KIND)
        is_gathered = uint32(uint32(kind) & uint32(1))
        wait_for_copies_if(gathered, uint32(turns & uint32(1)), is_gathered)
        open_products()
        scores = rotary_product(no_scores(), rotary, keys, uint32(0))
        wait_for(uint32(full + uint32(0)), phase)
        open_products()
        scores = product_0(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(8)), phase)
        open_products()
        scores = product_1(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(16)), phase)
        open_products()
        scores = product_2(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(24)), phase)
        open_products()
        scores = product_3(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(32)), phase)
        open_products()
        scores = product_4(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(40)), phase)
        open_products()
        scores = product_5(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(48)), phase)
        open_products()
        scores = product_6(scores, queries, keys, uint32(1))
        wait_for(uint32(full + uint32(56)), phase)
        open_products()
        scores = product_7(scores, queries, keys, uint32(1))
        close_products()
        return scores, uint32(turns + is_gathered), kind

    @device_routine
    def places_of(s_words, side):  # type: ignore[no-untyped-def]
        """Where a thread of the left warpgroup, 0, or the right one, 1, finds what it works with.

        Shared memory, barriers, and the lane's place; its rows, and where to write their probabilities;
        descriptors of queries, its own keys, values of both blocks and the other's probabilities; and the
        barriers and the record of its own block.
        """
        base = fresh_shared_address_of(s_words)
        barriers = uint32(base + uint32(STATE_AT))
        lane = fresh_lane()
        quad = uint32(lane & uint32(3))
        row, _ = row_of_lane()
        own, other = uint32(side), uint32(1 - side)
        chunk = uint32(base + uint32(WEIGHTS_AT) + own * uint32(CHUNK_BYTES))
        first = uint32(base + uint32(KEYS_AT))
        second = uint32(first + uint32(BLOCK_BYTES))
        columns = uint32(own * uint32(LATENT_CHUNKS // 2 * CHUNK_BYTES))
        return (
            base,
            barriers,
            lane,
            quad,
            row,
            uint32(unit_address(chunk, row, uint32(0)) + uint32(quad << uint32(2))),
            row_descriptor(uint32(base + uint32(QUERIES_AT))),
            row_descriptor(uint32(first + own * uint32(BLOCK_BYTES))),
            column_descriptor(uint32(first + columns)),
            column_descriptor(uint32(second + columns)),
            row_descriptor(uint32(base + uint32(WEIGHTS_AT) + other * uint32(CHUNK_BYTES))),
            uint32(barriers + uint32(8 * KEYS_FULL) + own * uint32(8 * (LATENT_CHUNKS + 1))),
            uint32(barriers + uint32(8 * GATHERED) + own * uint32(8)),
            uint32(base + uint32(4 * RECORDS) + own * uint32(4 * RECORD_WORDS)),
        )

    @device_routine
    def attend_left(  # type: ignore[no-untyped-def]
        s_words, q_nope, nope_stride, q_pe, pe_stride, tree, sees_prefix, scale, partials, out, lse, form,
    ):  # fmt: skip
        """Score the first block of each pair, and keep the left half of the outputs."""
        left_scale = scale if scale > float32(0) else float32(1)
        number, turn, gathers = uint32(0), uint32(0), uint32(0)
        base = fresh_shared_address_of(s_words)
        item, _ = item_places(base, number)
        wait_for(uint32(base + uint32(STATE_AT + 8 * ITEM_FULL)), uint32(0))
        if word_at(item, REQUEST) < 0:
            return
        announce_p1_free()
        load_first_queries(base, item, q_nope, nope_stride)
        rotary = rotary_words(item, q_pe, pe_stride)
        # Once through the code that writes whole tiles, while queries come, for it to be at hand.
        is_wanted, rehearses = True, word_at(item, IS_FOLDED) != 0
        while is_wanted:
            # All anew for each item, so that nothing of it takes registers while outputs are written.
            (
                base, barriers, lane, quad, row, weights, queries, keys, values_0, values_1,
                other_weights, full, gathered, record,
            ) = places_of(s_words, 0)  # fmt: skip
            item, seen = item_places(base, number)
            if not rehearses:
                wait_for_copies_if(
                    uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(number & uint32(1)), uint32(1)
                )
            output, is_continued = no_output(), uint32(0)
            origins = float32(-np.inf), float32(-np.inf)
            pair, pairs = int32(0), int32(0) if rehearses else pairs_for_sure(item)
            while pair < pairs:
                scores, gathers, kind = begin_scores(
                    full, gathered, record, turn, gathers, rotary, queries, keys
                )
                announce_s0()
                await_p0_free()
                if pair == pairs - int32(1):
                    pairs = count_pairs(barriers, item, number)
                if pair == 0:
                    set_pair(base, TOTALS, row, quad, (float32(0), float32(0)))
                    cuda.syncwarp()
                scores = wait_for_all_products(scores)
                scores = visible_scores(scores, kind, tree, item, seen, record, sees_prefix, scale)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * ROTARY_FREE)))
                    if pair == pairs - int32(1):
                        arrive(uint32(barriers + uint32(8 * QUERIES_FREE)))
                limits = limits_of(origins, pair_at(base, TOTALS, row))
                powers, new_0, new_1 = weigh(scores, left_scale, origins, limits)
                words = pack_weights(powers)
                store_words_in_chunk(weights, words)
                factors = factor_of(origins[0], new_0), factor_of(origins[1], new_1)
                added = sums_of_quad(row_sums(powers))
                set_pair(base, TOTALS, row, quad, grown(pair_at(base, TOTALS, row), factors, added))
                set_pair(base, ORIGINS, row, quad, (new_0, new_1))
                fence_async_proxy()
                announce_p0()
                if cuda.any_sync(0xFFFFFFFF, new_0 != origins[0] or new_1 != origins[1]):
                    output = scale_rows(output, factors)
                await_s1()
                open_products()
                output = add_own_values(output, words, values_0, is_continued)
                close_products()
                set_pair(base, ROUNDED, row, quad, sums_of_quad(sums_of_words(words)))
                if pair == pairs - int32(1) and is_paired(item):
                    tell_peer_that_queries_are_done(base)
                output = wait_for_all_products(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * LEFT_FREE)))
                await_origins()
                origins = pair_at(base, ORIGINS + TILE_ROWS, row)
                if cuda.any_sync(0xFFFFFFFF, new_0 != origins[0] or new_1 != origins[1]):
                    output = scale_rows(output, (factor_of(new_0, origins[0]), factor_of(new_1, origins[1])))
                await_p1()
                open_products()
                output = add_values(output, other_weights, values_1, uint32(1))
                close_products()
                output = wait_for_all_products(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * (LEFT_FREE + 1))))
                announce_p1_free()
                is_continued = uint32(1)
                turn = uint32(turn ^ uint32(1))
                pair = int32(pair + int32(1))
            is_stored = False
            if not rehearses:
                announce_p1_read()
                number = uint32(fresh_word(int32(number + uint32(1))))
                next_item, is_wanted = await_item(base, barriers, number)
                if is_wanted:
                    rotary = rotary_words(next_item, q_pe, pe_stride)
                is_stored = store_partial(output, item, 0, partials)
                if is_paired(item):
                    part_left(fresh_shared_address_of(s_words), item, output)
                await_outcomes()
            if not rehearses and is_paired(item):
                finish_left(fresh_shared_address_of(s_words), item, out, lse, form)
            elif not is_stored:
                chunk = uint32(base + uint32(WEIGHTS_AT))
                store_outputs(output, base, chunk, item, 0, out, form, partials, rehearses)
            cuda.syncwarp()
            if not rehearses and fresh_lane() == uint32(0):
                done = uint32(ITEM_FREE) + uint32(uint32(number & uint32(1)) ^ uint32(1))
                arrive(uint32(fresh_shared_address_of(s_words) + uint32(STATE_AT) + uint32(8) * done))
            rehearses = False
        await_p0_free()

    @device_routine
    def attend_right(  # type: ignore[no-untyped-def]
        s_words, q_nope, nope_stride, q_pe, pe_stride, tree, sees_prefix, scale, partials,
        partial_sums, out, lse, form,
    ):  # fmt: skip
        """Score the second block of each pair, and keep the right half of the outputs and the rows' sums."""
        left_scale = scale if scale > float32(0) else float32(1)
        number, turn, gathers = uint32(0), uint32(0), uint32(0)
        base = fresh_shared_address_of(s_words)
        item, _ = item_places(base, number)
        wait_for(uint32(base + uint32(STATE_AT + 8 * ITEM_FULL)), uint32(0))
        if word_at(item, REQUEST) < 0:
            return
        announce_p0_free()
        load_first_queries(base, item, q_nope, nope_stride)
        rotary = rotary_words(item, q_pe, pe_stride)
        # Once through the code that writes whole tiles, while queries come, for it to be at hand.
        is_wanted, rehearses = True, word_at(item, IS_FOLDED) != 0
        while is_wanted:
            # All anew for each item, so that nothing of it takes registers while outputs are written.
            (
                base, barriers, lane, quad, row, weights, queries, keys, values_0, values_1,
                other_weights, full, gathered, record,
            ) = places_of(s_words, 1)  # fmt: skip
            item, seen = item_places(base, number)
            if not rehearses:
                wait_for_copies_if(
                    uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(number & uint32(1)), uint32(1)
                )
            output, is_continued = no_output(), uint32(0)
            new_0, new_1 = float32(-np.inf), float32(-np.inf)
            nothing = float32(0), float32(0)
            totals, rounded, added, last = nothing, nothing, nothing, nothing
            pair, pairs = int32(0), int32(0) if rehearses else pairs_for_sure(item)
            while pair < pairs:
                await_s0()
                if pair > 0:
                    rounded = grown_by_pair(rounded, base, row, last, added)
                scores, gathers, kind = begin_scores(
                    full, gathered, record, turn, gathers, rotary, queries, keys
                )
                announce_s1()
                if pair == pairs - int32(1):
                    pairs = count_pairs(barriers, item, number)
                await_p0()
                origins, totals = pair_at(base, ORIGINS, row), pair_at(base, TOTALS, row)
                factors = factor_of(new_0, origins[0]), factor_of(new_1, origins[1])
                rounded = product_of(rounded[0], factors[0]), product_of(rounded[1], factors[1])
                is_new = cuda.any_sync(0xFFFFFFFF, new_0 != origins[0] or new_1 != origins[1])
                limits = limits_of(origins, totals)
                scores = wait_for_all_products(scores)
                scores = visible_scores(scores, kind, tree, item, seen, record, sees_prefix, scale)
                powers, new_0, new_1 = weigh(scores, left_scale, origins, limits)
                set_pair(base, ORIGINS + TILE_ROWS, row, quad, (new_0, new_1))
                announce_origins()
                if is_new:
                    output = scale_rows(output, factors)
                open_products()
                output = add_values(output, other_weights, values_0, is_continued)
                close_products()
                words = pack_weights(powers)
                await_p1_free()
                store_words_in_chunk(weights, words)
                fence_async_proxy()
                announce_p1()
                # All else comes after what the left warpgroup waits for. Read again, these take no registers
                # meanwhile.
                origins, totals = pair_at(base, ORIGINS, row), pair_at(base, TOTALS, row)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * (ROTARY_FREE + 1))))
                    if pair == pairs - int32(1):
                        arrive(uint32(barriers + uint32(8 * QUERIES_FREE)))
                last = factor_of(origins[0], new_0), factor_of(origins[1], new_1)
                totals = grown(totals, last, sums_of_quad(row_sums(powers)))
                set_pair(base, TOTALS, row, quad, totals)
                if cuda.any_sync(0xFFFFFFFF, new_0 != origins[0] or new_1 != origins[1]):
                    output = scale_rows(wait_for_all_products(output), last)
                open_products()
                output = add_own_values(output, words, values_1, uint32(1))
                close_products()
                output = wait_for_all_but_last(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * RIGHT_FREE)))
                announce_p0_free()
                added = sums_of_quad(sums_of_words(words))
                if pair == pairs - int32(1) and is_paired(item):
                    tell_peer_that_queries_are_done(base)
                output = wait_for_all_products(output)
                if lane == uint32(0):
                    arrive(uint32(barriers + uint32(8 * (RIGHT_FREE + 1))))
                is_continued = uint32(1)
                turn = uint32(turn ^ uint32(1))
                pair = int32(pair + int32(1))
            is_stored = False
            if not rehearses:
                await_p1_read()
                is_stored = store_partial(output, item, LATENT // 2, partials)
                if is_paired(item):
                    part_right(fresh_shared_address_of(s_words), item, output)
                rounded = grown_by_pair(rounded, base, row, last, added)
                if word_at(item, FAULT) != 0:
                    totals = rounded = float32(np.nan), float32(np.nan)
                if is_paired(item):
                    keep_sums(base, row, quad, totals, rounded)
                elif quad == uint32(0):
                    below = uint32(row + uint32(8))
                    share_outcome(base, item, seen, row, new_0, totals[0], rounded[0], partial_sums, lse)
                    share_outcome(base, item, seen, below, new_1, totals[1], rounded[1], partial_sums, lse)
                cuda.syncwarp()
                announce_outcomes()
                number = uint32(fresh_word(int32(number + uint32(1))))
                next_item, is_wanted = await_item(base, barriers, number)
                if is_wanted:
                    rotary = rotary_words(next_item, q_pe, pe_stride)
            if not rehearses and is_paired(item):
                send_sums(fresh_shared_address_of(s_words))
                finish_right(fresh_shared_address_of(s_words), item, out, lse, form)
            elif not is_stored:
                chunk = uint32(base + uint32(WEIGHTS_AT + CHUNK_BYTES))
                store_outputs(output, base, chunk, item, LATENT // 2, out, form, partials, rehearses)
            cuda.syncwarp()
            if not rehearses and fresh_lane() == uint32(0):
                done = uint32(ITEM_FREE) + uint32(uint32(number & uint32(1)) ^ uint32(1))
                arrive(uint32(fresh_shared_address_of(s_words) + uint32(STATE_AT) + uint32(8) * done))
            rehearses = False
        await_p1_free()

    def hopper_kernel(  # type: ignore[no-untyped-def]
        q_nope,  # uint64: address of the rows [B * N * H, LATENT]
        nope_stride,  # int64: bytes from row to row
        q_pe,  # uint64: address of the rows [B * N * H, ROPE]
        pe_stride,  # int64
        ckv,  # to max_keys as `Keys`, `Tree` and `Share` have them
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
        workers,
        rest_tiles,
        split_blocks,
        max_splits,
        max_keys,  # int32
        maps,  # uint64: address of the tensor maps of latent and rotary rows
        in_boxes,  # int32: whether there are maps
        bands,  # int32: whether the rest may be cut into bands
        first_items,  # int32, as `hopper_first_items` writes them, or empty
        sees_prefix,  # int32: whether nodes see the prefix
        by_slot,  # int32: how the tree's keys are read: see `split_items`
        scale,  # float32: of the scores, to base 2
        partials,  # float32 [rows, LATENT]
        partial_sums,  # float32 [rows, 4]
        first_rows,  # int64 [parts]
        out,  # uint64: address of the output, [B, N, H, LATENT]
        lse,  # float32 [B, N, H]
        form,  # int32: of the output
    ):
        keys = Keys(
            ckv, ckv_stride, ckv_page_stride, kpe, kpe_stride, kpe_page_stride, page_size, num_pages,
            page_table, page_starts, table_stride,
        )  # fmt: skip
        tree = Tree(ancestor_bits, num_nodes, prefix_lengths, max_path, heads, by_slot)
        share = Share(workers, rest_tiles, split_blocks, max_splits, 2)
        s_words = cuda.shared.array(0, int32, alignment=ALIGNMENT)
        barriers = uint32(shared_address_of(s_words) + uint32(STATE_AT))
        thread = uint32(cuda.threadIdx.x)
        warp = uint32(thread >> uint32(5))
        # Those that load keys and that tell items read what is foretold while barriers are made.
        if warp >= uint32(8) and warp < uint32(11):
            if first_items.shape[0] > 0:
                read_foretold(fresh_shared_address_of(s_words), keys, tree, first_items)
            if in_boxes != 0 and warp < uint32(10):
                acquire_maps(maps)
        if thread == uint32(0):
            start_barrier(uint32(barriers + uint32(8 * QUERIES_FULL)), uint32(32 * CONSUMING_WARPS))
            start_barrier(uint32(barriers + uint32(8 * QUERIES_FREE)), uint32(8))
            for place in range(uint32(18)):
                start_barrier(uint32(barriers + uint32(8) * (uint32(KEYS_FULL) + uint32(place))), uint32(1))
            for place in range(uint32(2)):
                start_barrier(uint32(barriers + uint32(8) * (uint32(GATHERED) + uint32(place))), uint32(64))
                start_barrier(uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + uint32(place))), uint32(1))
                start_barrier(
                    uint32(barriers + uint32(8) * (uint32(ITEM_COUNTED) + uint32(place))), uint32(1)
                )
                start_barrier(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + uint32(place))), uint32(11))
            for place in range(uint32(6)):
                start_barrier(uint32(barriers + uint32(8) * (uint32(ROTARY_FREE) + uint32(place))), uint32(4))
            start_barrier(uint32(barriers + uint32(8 * PEER_READY)), uint32(CONSUMING_WARPS))
            start_barrier(uint32(barriers + uint32(8 * PEER_DATA)), uint32(1))
            publish_barriers()
            arrive_and_expect(uint32(barriers + uint32(8 * PEER_DATA)), uint32(PEER_BYTES))
        cuda.syncthreads()
        arrive_at_cluster()
        if warp >= uint32(8):
            lower_registers()
            if warp >= uint32(10):  # one finds items, and the other goes ahead of it
                if first_items.shape[0] > 0:
                    schedule(
                        s_words, keys, tree, share, max_keys, sees_prefix, first_rows, first_items,
                        bands != 0, True,
                    )  # fmt: skip
                elif bands != 0:
                    schedule(
                        s_words, keys, tree, share, max_keys, sees_prefix, first_rows, first_items,
                        True, False,
                    )  # fmt: skip
                else:
                    schedule(
                        s_words, keys, tree, share, max_keys, sees_prefix, first_rows, first_items,
                        False, False,
                    )  # fmt: skip
                if not is_scheduler():
                    load_queries(s_words, q_nope, nope_stride)
                    fill_unused_rows(tree, keys, max_keys, out, lse, form, cuda.blockIdx.x, workers)
            else:
                load_keys(
                    s_words, keys, tree, maps, in_boxes, first_items, sees_prefix,
                    uint32(warp - uint32(8)),
                )  # fmt: skip
        else:
            raise_registers()
            if warp < uint32(4):
                attend_left(
                    s_words, q_nope, nope_stride, q_pe, pe_stride, tree, sees_prefix, scale, partials,
                    out, lse, form,
                )  # fmt: skip
            else:
                attend_right(
                    s_words, q_nope, nope_stride, q_pe, pe_stride, tree, sees_prefix, scale, partials,
                    partial_sums, out, lse, form,
                )  # fmt: skip
            merge_rest(s_words, workers, max_splits, partials, partial_sums, first_rows, out, lse, form)

    hopper_kernel.__name__ = hopper_kernel.__qualname__ = name
    return hopper_kernel


SIGNATURE = (
    f"void(uint64, int64, uint64, int64, {KEY_SIGNATURE}, {TREE_SIGNATURE}, {SHARE_SIGNATURE}, int32, "
    "uint64, int32, int32, int32[::1], int32, int32, float32, float32[:, ::1], float32[:, ::1], int64[::1], "
    "uint64, float32[:, :, ::1], int32)"
)
ATTEND_BFLOAT16 = Kernel(
    make_kernel("bf16", "hopper_bfloat16_kernel"),
    (SIGNATURE,),
    THREADS,
    architecture=ARCHITECTURE,
    is_cooperative=True,
    cluster_blocks=CLUSTER_BLOCKS,
)
ATTEND_FLOAT16 = Kernel(
    make_kernel("f16", "hopper_float16_kernel"),
    (SIGNATURE,),
    THREADS,
    architecture=ARCHITECTURE,
    is_cooperative=True,
    cluster_blocks=CLUSTER_BLOCKS,
)
KERNELS = {"bfloat16": ATTEND_BFLOAT16, "float16": ATTEND_FLOAT16}


def workers() -> int:
    """Blocks of a launch on the current device: whole clusters, a block a multiprocessor."""
    return multiprocessors() // CLUSTER_BLOCKS * CLUSTER_BLOCKS


def launch_hopper(transfer: Transfer, work: Work, splits: SplitPlan) -> None:
    """Launch the kernel, which also merges what splits have come to."""
    share = share_arguments(splits, workers())
    blocks = int(share[0])
    in_boxes = takes_boxes(work.keys)
    maps = key_maps(work, int(cuda.get_current_device().id)) if in_boxes else 0
    transfer.launch(
        KERNELS[work.dtype.name],
        blocks,
        *input_arguments(work, splits, share),
        np.uint64(maps),
        np.int32(in_boxes),
        may_have_bands(splits, work.tiles, blocks),
        splits.first_items,
        np.int32(work.sees_prefix),
        way_to_read(work, splits),
        scale_argument(work),
        splits.partials,
        splits.partial_sums,
        splits.first_rows,
        work.out.address,
        work.lse,
        output_form(work),
        shared_bytes=SHARED_BYTES,
    )
