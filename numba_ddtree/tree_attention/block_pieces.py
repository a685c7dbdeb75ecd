"""Tree attention by `mma.sync` in 99 KB of shared memory, where a block of keys does not fit beside queries.

A block of threads is one group of four warps, which computes half a tile at a time, 32 query rows, against
one split of their keys. It does what a group of `whole_blocks` does, by the same instructions in the same
order of terms, so that results of the two have the same bits.

A block of 64 keys comes in pieces: four of 128 latent columns, 16 KB each, and the rotary part, 8 KB. There
are three places for pieces, a, b and c, and one for the rotary part. Scores take pieces 0, 1, 2, 3 and the
rotary part, in this order of columns, and outputs pieces 1, 2, 3, 0, of which the first three are still
there: only piece 0 is loaded twice, the second time from L2. A piece is loaded two steps before it is needed,
when its place is free::

    step         a piece of    loads
    scores 0     a             c: piece 2
    scores 1     b             a: piece 3
    scores 2     c
    scores 3     a, rotary
    outputs 1    b             (looks up the rows of the next block)
    outputs 2    c             b: piece 0 again
    outputs 3    a             c: piece 0 of the next block, and its rotary part
    outputs 0    b             a: piece 1 of the next block

For the next block c, a and b take the parts of a, b and c. In outputs, a warp has every fourth unit of 8
columns, so that all of them have a share of each piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32, uint64
from numba_ddtree.device.tile import (
    CHUNK_BYTES,
    PIECE_BYTES,
    left_address,
    right_address,
    unit_address,
)
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
from numba_ddtree.tree_attention.key_blocks import count_keys, first_block, following, item_of, look_up
from numba_ddtree.tree_attention.key_rows import ABSENT
from numba_ddtree.tree_attention.row_copies import CHUNKS, LATENT_CHUNKS, load_chunks, load_queries
from numba_ddtree.tree_attention.shares import first_requests, share_out, take_item
from numba_ddtree.tree_attention.unused_rows import fill_unused_rows
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.ptx import (
        close_copies,
        copy_async,
        fresh_thread,
        wait_for_all_copies_but_one,
        wait_for_copies,
    )
    from numba_ddtree.device.tile import add_halves, make_column_product, make_row_product, make_zeros
    from numba_ddtree.tree_attention.group_steps import make_output_store, make_weighing

THREADS = block_threads(GROUP_THREADS)
PARTS = TILE_ROWS // GROUP_ROWS
PIECE_CHUNKS = 2
PIECES = LATENT_CHUNKS // PIECE_CHUNKS
PLACE_BYTES = PIECE_CHUNKS * CHUNK_BYTES  # of a piece
QUERY_CHUNK_BYTES = GROUP_ROWS * 128
UNITS_APART = 4  # between a warp's units of a piece
QUERIES_AT = 0
PLACES_AT = QUERIES_AT + CHUNKS * QUERY_CHUNK_BYTES
ROTARY_AT = PLACES_AT + 3 * PLACE_BYTES
WEIGHTS_AT = ROTARY_AT + CHUNK_BYTES
STATE_AT = WEIGHTS_AT + QUERY_CHUNK_BYTES
ADDRESSES_AT = STATE_AT + 4 * state_words(GROUP_ROWS)  # of a block and of the next one
SHARED_BYTES = ALIGNMENT + ADDRESSES_AT + 2 * 4 * ADDRESS_WORDS
NEXT_ADDRESSES = ADDRESS_WORDS // 2


@device_routine
def load_piece(s_addresses, table, buffer, piece):  # type: ignore[no-untyped-def]
    """Begin to copy a latent piece of a block whose rows were looked up."""
    thread = fresh_thread()
    unit = uint32(thread & uint32(7))
    for step in range(uint32(KEY_BLOCK * 8 // GROUP_THREADS)):
        row = uint32(uint32(thread >> uint32(3)) + uint32(step) * uint32(GROUP_THREADS // 8))
        latent = s_addresses[uint32(table + uint32(2) * row)]
        size = uint32(0) if latent == ABSENT else uint32(16)
        place = unit_address(buffer, row, unit)
        first = uint32(piece) * uint32(PIECE_CHUNKS)
        load_chunks(place, latent, unit, first, PIECE_CHUNKS, CHUNK_BYTES, size)


@device_routine
def load_rotary(s_addresses, table, buffer):  # type: ignore[no-untyped-def]
    """Begin to copy the rotary part of a block whose rows were looked up."""
    thread = fresh_thread()
    unit = uint32(thread & uint32(7))
    for step in range(uint32(KEY_BLOCK * 8 // GROUP_THREADS)):
        row = uint32(uint32(thread >> uint32(3)) + uint32(step) * uint32(GROUP_THREADS // 8))
        rotary = s_addresses[uint32(table + uint32(2) * row + uint32(1))]
        size = uint32(0) if rotary == ABSENT else uint32(16)
        copy_async(unit_address(buffer, row, unit), uint64(rotary + uint64(unit << uint32(4))), size)


@device_routine
def next_step():  # type: ignore[no-untyped-def]
    """Wait for copies of the step before the last one, and for all threads to be done with the last."""
    wait_for_all_copies_but_one()
    cuda.syncthreads()


def make_attend(number: str) -> Any:
    """Make the kernel's body for one kind of 16-bit numbers, ``"bf16"`` or ``"f16"`` in PTX."""
    if SIMULATED:
        return None  # tensor cores are not simulated

    weigh_scores = make_weighing(number)
    store_outputs = make_output_store(8 * UNITS_APART)
    add_rows = make_row_product(number, PIECE_CHUNKS, 32, QUERY_CHUNK_BYTES)
    add_rotary_rows = make_row_product(number, 1, 32, QUERY_CHUNK_BYTES)
    add_columns_0, add_columns_1, add_columns_2, add_columns_3 = (
        make_column_product(number, 2, PIECE_CHUNKS, pairs=1, first=piece * 4) for piece in range(PIECES)
    )
    no_totals, no_output = make_zeros(32), make_zeros(128)

    @device_routine
    def queries_at(base, chunk):  # type: ignore[no-untyped-def]
        """Return where a lane reads a chunk of queries, for scores."""
        place = place_of_thread()
        first = uint32(base + uint32(QUERIES_AT) + uint32(chunk) * uint32(QUERY_CHUNK_BYTES))
        return left_address(uint32(first + place.rows * uint32(128)), place.lane)

    @device_routine
    def keys_at(buffer):  # type: ignore[no-untyped-def]
        """Return where a lane reads a piece, for scores."""
        place = place_of_thread()
        return right_address(uint32(buffer + place.keys * uint32(128)), place.lane)

    @device_routine
    def values_at(buffer):  # type: ignore[no-untyped-def]
        """Return where a lane reads a piece, for outputs."""
        place = place_of_thread()
        unit = uint32(place.warp + uint32(uint32(place.lane >> uint32(4)) * uint32(UNITS_APART)))
        return unit_address(buffer, uint32(place.lane & uint32(15)), unit)

    def make_add_values(add_columns: Any) -> Any:
        @device_routine
        def add_values(base, buffer, output):  # type: ignore[no-untyped-def]
            """Add probabilities times a piece of values: 32 rows x 32 columns a warp."""
            weights = left_address(uint32(base + uint32(WEIGHTS_AT)), place_of_thread().lane)
            values = values_at(buffer)
            step = uint32(0)
            while step < uint32(KEY_BLOCK // 16):
                output = add_columns(output, uint32(weights ^ uint32(step << uint32(5))), values)
                values = uint32(values + uint32(PIECE_BYTES))
                step = uint32(step + uint32(1))
            return output

        return add_values

    add_values_0, add_values_1 = make_add_values(add_columns_0), make_add_values(add_columns_1)
    add_values_2, add_values_3 = make_add_values(add_columns_2), make_add_values(add_columns_3)

    @device_routine
    def attend(queries, keys, tree, share, max_keys, sees_prefix, scale, results):  # type: ignore[no-untyped-def]
        base = shared_base()
        state = state_at(base, STATE_AT, GROUP_ROWS)
        s_addresses = addresses_at(base, ADDRESSES_AT)
        rotary_at = uint32(base + uint32(ROTARY_AT))
        weights_at = uint32(base + uint32(WEIGHTS_AT))
        requests = first_requests(tree, keys, max_keys)
        whole, shared_length, num_rest = share_out(tree, keys, share, max_keys, requests)
        shared_out = int32(whole * int32(PARTS)), shared_length
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            results.num_rest[0] = int32(num_rest * int32(PARTS))
        request_rows = int64(tree.ancestor_bits.shape[1]) * int64(tree.heads)
        index, step = int32(cuda.blockIdx.x), int32(0)
        while True:
            request, part, split, slot, length, splits = take_item(
                tree, keys, share, max_keys, PARTS, shared_out[0], shared_out[1], index, step
            )
            if request < 0:
                break
            item = item_of(tree, request, part, GROUP_ROWS, split, length, sees_prefix)
            cuda.syncthreads()  # of the item before, all is read
            row = fresh_thread()
            count_keys(row, GROUP_ROWS, tree, item, state)
            if row == uint32(0):
                keep_item(state, request, part, split, slot, length, splits, index, shared_out)
            first = int64(request) * request_rows + int64(item.first_row)
            at = uint32(base + uint32(QUERIES_AT))
            load_queries(row, GROUP_ROWS, at, queries, first, uint32(item.rows))
            cuda.syncthreads()
            block, node = first_block(item, tree, state, sees_prefix)
            table = uint32(0)
            if block >= 0 and row < uint32(KEY_BLOCK):
                look_up(row, keys, tree, item, block, node, state, s_addresses)
            cuda.syncthreads()
            a = uint32(base + uint32(PLACES_AT))
            b = uint32(a + uint32(PLACE_BYTES))
            c = uint32(b + uint32(PLACE_BYTES))
            if block >= 0:
                load_piece(s_addresses, table, a, 0)
                load_rotary(s_addresses, table, rotary_at)
            close_copies()
            if block >= 0:
                load_piece(s_addresses, table, b, 1)
            close_copies()
            output = no_output()
            past = (float32(-np.inf), float32(-np.inf), float32(0), float32(0))
            while block >= 0:
                next_step()
                load_piece(s_addresses, table, c, 2)
                close_copies()
                totals = add_rows(no_totals(), queries_at(base, 0), keys_at(a))
                next_step()
                load_piece(s_addresses, table, a, 3)
                close_copies()
                totals = add_rows(totals, queries_at(base, 2), keys_at(b))
                next_step()
                totals = add_rows(totals, queries_at(base, 4), keys_at(c))
                wait_for_copies()
                cuda.syncthreads()
                totals = add_rows(totals, queries_at(base, 6), keys_at(a))
                totals = add_rotary_rows(totals, queries_at(base, 8), keys_at(rotary_at))
                past = weigh_scores(
                    weights_at, tree, item, scale, state, block, node, add_halves(totals), past
                )
                output = scale_outputs(place_of_thread(), state, output)
                output = add_values_1(base, b, output)
                block, node = following(item, tree, state, block, node)
                next_table = uint32(table ^ uint32(NEXT_ADDRESSES))
                row = fresh_thread()
                if block >= 0 and row < uint32(KEY_BLOCK):
                    s_next = s_addresses[next_table:]
                    look_up(row, keys, tree, item, block, node, state, s_next)
                cuda.syncthreads()
                load_piece(s_addresses, table, b, 0)
                close_copies()
                output = add_values_2(base, c, output)
                table = next_table
                cuda.syncthreads()
                if block >= 0:
                    load_piece(s_addresses, table, c, 0)
                    load_rotary(s_addresses, table, rotary_at)
                close_copies()
                output = add_values_3(base, a, output)
                next_step()
                if block >= 0:
                    load_piece(s_addresses, table, a, 1)
                close_copies()
                output = add_values_0(base, b, output)
                a, b, c = c, a, b
            wait_for_copies()  # of queries, if there was no block
            cuda.syncthreads()
            place = place_of_thread()
            share_sums(place, past, state)
            cuda.syncthreads()
            request, part, split, slot, length, splits, index, shared_out = kept_item(state)
            item = item_of(tree, request, part, GROUP_ROWS, split, length, sees_prefix)
            is_folded = int32(index < shared_out[0])
            first = int64(request) * request_rows + int64(item.first_row)
            slot_row = int64(int64(slot) * int64(GROUP_ROWS))
            settle_rows(place, GROUP_ROWS, item, length, state, first, slot_row, is_folded, results)
            if not is_folded and split == 0 and place.thread == uint32(0):
                results.first_rows[uint32(slot) // uint32(share.max_splits)] = first
            cuda.syncthreads()
            column = uint32(
                uint32(place.warp << uint32(3)) + uint32(uint32(place.lane & uint32(3)) << uint32(1))
            )
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


PIECES_BFLOAT16 = Kernel(make_kernel(make_attend("bf16"), "pieces_bfloat16_kernel"), (SIGNATURE,), THREADS)
PIECES_FLOAT16 = Kernel(make_kernel(make_attend("f16"), "pieces_float16_kernel"), (SIGNATURE,), THREADS)
KERNELS = {"bfloat16": PIECES_BFLOAT16, "float16": PIECES_FLOAT16}
