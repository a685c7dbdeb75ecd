"""Tree attention by `mma.sync` where two blocks of keys fit shared memory, 231 KB in all.

A block of threads computes one item at a time: the 64 query rows of a tile against one split of their keys.
The rows' queries stay in shared memory, and blocks of 64 keys pass through two buffers. A key's latent row is
its value too, so that a block is read from global memory once.

Two groups of four warps have 32 rows each. For a block of keys, a group computes

1. scores: a warp has 16 rows x 32 keys, 8 of each 16;
2. the rows' new maxima, over the two warps that share rows;
3. probabilities, rounded to 16 bits, to shared memory; sums of the unrounded ones stay with their lanes;
4. outputs: a warp has 32 rows x 128 columns, which it rescales, and adds probabilities times values.

The groups meet once a block of keys, the first where it begins with scores, the second where it begins with
the last block's outputs, so that one has products for the tensor cores while the other is between them::

    first    | scores i        maxima, probabilities i    outputs i |
    second   | outputs i - 1   loads i + 1   scores i   maxima, probabilities i |

The first group looks up where the rows of block i + 1 are, the second loads them, into the buffer that both
are then done with. In a block that is gathered for some nodes, a group with none of their rows does nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32
from numba_ddtree.device.tile import CHUNK_BYTES, PIECE_BYTES, left_address, right_address
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.tree_attention.group_steps import (
    ADDRESS_WORDS,
    ALIGNMENT,
    GROUP_ROWS,
    GROUP_THREADS,
    addresses_at,
    keep_item,
    kept_item,
    place_of_thread,
    scale_outputs,
    settle_rows,
    share_sums,
    shared_base,
    state_at,
    state_words,
)
from numba_ddtree.tree_attention.kernel_arguments import SIGNATURE, make_kernel
from numba_ddtree.tree_attention.key_blocks import (
    count_keys,
    first_block,
    following,
    has_rows,
    item_of,
    look_up,
)
from numba_ddtree.tree_attention.row_copies import CHUNKS, load_queries, load_row
from numba_ddtree.tree_attention.shares import first_requests, share_out, take_item
from numba_ddtree.tree_attention.unused_rows import fill_unused_rows
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.ptx import (
        close_copies,
        fresh_thread,
        named_arrival,
        named_barrier,
        wait_for_copies,
    )
    from numba_ddtree.device.tile import add_halves, make_column_product, make_row_product, make_zeros
    from numba_ddtree.tree_attention.group_steps import make_output_store, make_weighing

THREADS = block_threads(256)
PARTS = 1  # of a tile
BLOCK_BYTES = CHUNKS * CHUNK_BYTES
QUERIES_AT = 0
KEYS_AT = QUERIES_AT + BLOCK_BYTES
WEIGHTS_AT = KEYS_AT + 2 * BLOCK_BYTES
STATE_AT = WEIGHTS_AT + CHUNK_BYTES
ADDRESSES_AT = STATE_AT + 4 * state_words(TILE_ROWS)
SHARED_BYTES = ALIGNMENT + ADDRESSES_AT + 4 * ADDRESS_WORDS
LOOKED_UP = 3  # name of a barrier, after the groups' own


@device_routine
def load_block(s_addresses, buffer):  # type: ignore[no-untyped-def]
    """Begin to copy a block of keys that was looked up; a group takes part."""
    thread = fresh_thread()
    unit = uint32(thread & uint32(7))
    row_0 = uint32(uint32(thread & uint32(GROUP_THREADS - 1)) >> uint32(3))
    row_1 = uint32(row_0 + uint32(GROUP_THREADS // 8))
    row_2 = uint32(row_1 + uint32(GROUP_THREADS // 8))
    row_3 = uint32(row_2 + uint32(GROUP_THREADS // 8))
    latent_0, rotary_0 = s_addresses[uint32(row_0 * 2)], s_addresses[uint32(row_0 * 2 + 1)]
    latent_1, rotary_1 = s_addresses[uint32(row_1 * 2)], s_addresses[uint32(row_1 * 2 + 1)]
    latent_2, rotary_2 = s_addresses[uint32(row_2 * 2)], s_addresses[uint32(row_2 * 2 + 1)]
    latent_3, rotary_3 = s_addresses[uint32(row_3 * 2)], s_addresses[uint32(row_3 * 2 + 1)]
    load_row(buffer, row_0, unit, latent_0, rotary_0)
    load_row(buffer, row_1, unit, latent_1, rotary_1)
    load_row(buffer, row_2, unit, latent_2, rotary_2)
    load_row(buffer, row_3, unit, latent_3, rotary_3)


def make_attend(number: str) -> Any:
    """Make the kernel's body for one kind of 16-bit numbers, ``"bf16"`` or ``"f16"`` in PTX."""
    if SIMULATED:
        return None  # tensor cores are not simulated

    weigh_scores = make_weighing(number)
    store_outputs = make_output_store(8)
    add_rows = make_row_product(number, CHUNKS, 32)
    add_columns = make_column_product(number, 2, 2)
    no_totals, no_output = make_zeros(32), make_zeros(128)

    @device_routine
    def scores_of(base, buffer):  # type: ignore[no-untyped-def]
        """Products of queries and keys: 16 rows x 32 keys a warp."""
        place = place_of_thread()
        left = left_address(uint32(base + uint32(QUERIES_AT) + place.rows * uint32(128)), place.lane)
        right = right_address(uint32(buffer + place.keys * uint32(128)), place.lane)
        return add_halves(add_rows(no_totals(), left, right))

    @device_routine
    def add_values(base, buffer, state, output):  # type: ignore[no-untyped-def]
        """Scale the outputs, and add probabilities times values: 32 rows x 128 columns a warp."""
        place = place_of_thread()
        first = uint32(place.group * uint32(GROUP_ROWS))
        output = scale_outputs(place, state, output)
        weights = left_address(uint32(base + uint32(WEIGHTS_AT) + first * uint32(128)), place.lane)
        chunk = uint32(uint32(place.warp & uint32(3)) * uint32(2 * CHUNK_BYTES))
        values = left_address(uint32(buffer + chunk), place.lane)
        step = uint32(0)
        while step < uint32(KEY_BLOCK // 16):
            output = add_columns(output, uint32(weights ^ uint32(step << uint32(5))), values)
            values = uint32(values + uint32(PIECE_BYTES))
            step = uint32(step + uint32(1))
        return output

    @device_routine
    def attend(queries, keys, tree, share, max_keys, sees_prefix, scale, results):  # type: ignore[no-untyped-def]
        base = shared_base()
        state = state_at(base, STATE_AT, TILE_ROWS)
        s_addresses = addresses_at(base, ADDRESSES_AT)
        place = place_of_thread()
        is_first = place.group == uint32(0)
        requests = first_requests(tree, keys, max_keys)
        whole, shared_length, num_rest = share_out(tree, keys, share, max_keys, requests)
        shared_out = whole, shared_length
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            results.num_rest[0] = num_rest
        request_rows = int64(tree.ancestor_bits.shape[1]) * int64(tree.heads)
        index, step = int32(cuda.blockIdx.x), int32(0)
        while True:
            request, part, split, slot, length, splits = take_item(
                tree, keys, share, max_keys, PARTS, shared_out[0], shared_out[1], index, step
            )
            if request < 0:
                break
            item = item_of(tree, request, part, TILE_ROWS, split, length, sees_prefix)
            cuda.syncthreads()  # of the item before, all is read
            count_keys(place.thread, TILE_ROWS, tree, item, state)
            if place.thread == uint32(0):
                keep_item(state, request, part, split, slot, length, splits, index, shared_out)
            first = int64(request) * request_rows + int64(item.first_row)
            at = uint32(base + uint32(QUERIES_AT))
            load_queries(place.thread, TILE_ROWS, at, queries, first, uint32(item.rows))
            cuda.syncthreads()
            block, node = first_block(item, tree, state, sees_prefix)
            row = place.thread
            if block >= 0 and row < uint32(KEY_BLOCK):
                look_up(row, keys, tree, item, block, node, state, s_addresses)
            buffer = uint32(base + uint32(KEYS_AT))
            spare = uint32(buffer + uint32(BLOCK_BYTES))
            cuda.syncthreads()
            if block >= 0 and not is_first:
                load_block(s_addresses, buffer)
            output = no_output()
            past = (float32(-np.inf), float32(-np.inf), float32(0), float32(0))
            is_due = False  # whether the second group has outputs to add
            while block >= 0:
                next_block, next_node = following(item, tree, state, block, node)
                own_rows = uint32(place.group * uint32(GROUP_ROWS))
                takes_part = has_rows(own_rows, GROUP_ROWS, item, tree, state, block, node)
                close_copies()
                wait_for_copies()
                cuda.syncthreads()
                if is_first:
                    if next_block >= 0 and row < uint32(KEY_BLOCK):
                        look_up(row, keys, tree, item, next_block, next_node, state, s_addresses)
                    named_arrival(uint32(LOOKED_UP), uint32(THREADS))
                else:
                    if is_due:
                        output = add_values(base, spare, state, output)
                    # The whole group is done with the spare buffer, too.
                    named_barrier(uint32(LOOKED_UP), uint32(THREADS))
                    if next_block >= 0:
                        load_block(s_addresses, spare)
                if takes_part:
                    past = weigh_scores(
                        uint32(base + uint32(WEIGHTS_AT)), tree, item, scale, state, block, node,
                        scores_of(base, buffer), past,
                    )  # fmt: skip
                    if is_first:
                        output = add_values(base, buffer, state, output)
                is_due = takes_part
                buffer, spare = spare, buffer
                block, node = next_block, next_node
            if is_due and not is_first:
                output = add_values(base, spare, state, output)
            wait_for_copies()  # of queries, if there was no block
            cuda.syncthreads()
            place = place_of_thread()
            share_sums(place, past, state)
            cuda.syncthreads()
            request, part, split, slot, length, splits, index, shared_out = kept_item(state)
            item = item_of(tree, request, part, TILE_ROWS, split, length, sees_prefix)
            is_folded = int32(index < shared_out[0])
            first = int64(request) * request_rows + int64(item.first_row)
            slot_row = int64(int64(slot) * int64(TILE_ROWS))
            settle_rows(place, TILE_ROWS, item, length, state, first, slot_row, is_folded, results)
            if not is_folded and split == 0 and place.thread == uint32(0):
                results.first_rows[uint32(slot) // uint32(share.max_splits)] = first
            cuda.syncthreads()
            column = uint32(uint32(place.warp & uint32(3)) * uint32(128))
            column = uint32(column + uint32(uint32(place.lane & uint32(3)) << uint32(1)))
            store_outputs(place, column, state, output, results, slot_row, first)
            step = int32(split + int32(1))
            if not is_folded or step >= splits:
                index, step = int32(index + share.workers), int32(0)
        worker = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS // 32) + uint32(fresh_thread() >> uint32(5)))
        fill_unused_rows(
            tree, keys, max_keys, results.out, results.lse, results.form, worker,
            uint32(uint32(share.workers) * uint32(THREADS // 32)),
        )  # fmt: skip

    return attend


ATTEND_BFLOAT16 = Kernel(make_kernel(make_attend("bf16"), "attend_bfloat16_kernel"), (SIGNATURE,), THREADS)
ATTEND_FLOAT16 = Kernel(make_kernel(make_attend("f16"), "attend_float16_kernel"), (SIGNATURE,), THREADS)
KERNELS = {"bfloat16": ATTEND_BFLOAT16, "float16": ATTEND_FLOAT16}
