"""Tree attention on tensor cores by `mma.sync`, for every GPU since Ampere.

A block of threads computes one item at a time: 64 query rows, nodes times heads of one request, against
one split of their keys. The rows' queries stay in shared memory, and blocks of 64 keys pass through two
buffers. A key's latent row is its value too, so that a block is read from global memory once.

Two groups of four warps have 32 rows each. For a block of keys, a group computes

1. scores: a warp has 16 rows x 32 keys;
2. the rows' new maxima, over the two warps that share rows;
3. probabilities, rounded to 16 bits, to shared memory; sums of the unrounded ones stay with their lanes;
4. outputs: a warp has 32 rows x 128 columns, which it rescales, and adds probabilities times values.

The groups meet once a block of keys, the first where it begins with scores, the second where it begins with
the last block's outputs, so that one has products for the tensor cores while the other is between them::

    first    | scores i        maxima, probabilities i    outputs i |
    second   | outputs i - 1   loads i + 1   scores i   maxima, probabilities i |

The first group looks up where the rows of block i + 1 are, the second loads them, into the buffer that both
are then done with.

First come the blocks that lie in the prefix, which all rows see. Then, for each node of the tile, come the
blocks, one or two, that hold the rest of the prefix and the node's own path, each key in the slot of its
position, gathered from the tree's rows of the cache. Only the node's own rows take part: for the others the
maximum stays, the scale is 1 and probabilities are 0, and a group that has none of its rows does nothing.
Everything is done by the same instructions in the same order for every block, wherever its keys come from, so
that a row's result has the same bits whatever else is in its tile: whether a key is in the tree or, decoding
without one, in the prefix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32, uint64
from numba_ddtree.device.memory import store_flat
from numba_ddtree.device.tile import CHUNK_BYTES, PIECE_BYTES
from numba_ddtree.devices import multiprocessors
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.key_rows import (
    ABSENT,
    KEY_SIGNATURE,
    Keys,
    key_arguments,
    path_length,
    path_slot,
    row_addresses,
)
from numba_ddtree.tree_attention.outputs import output_form
from numba_ddtree.tree_attention.split_items import (
    TREE_SIGNATURE,
    WAVE_SIGNATURE,
    Tree,
    Wave,
    find_item,
    most_keys,
    prefix_of,
    split_length,
    splits_of,
    tiles_of_request,
    tree_arguments,
    waves,
)
from numba_ddtree.tree_attention.split_merge import launch_merge
from numba_ddtree.tree_attention.work import KEY_BLOCK, LATENT, TILE_ROWS, SplitPlan, Work

if not SIMULATED:
    from numba_ddtree.device.ptx import (
        address_of,
        close_copies,
        copy_async,
        exp2,
        fresh_thread,
        larger_of,
        multiply_add,
        named_arrival,
        named_barrier,
        shared_address_of,
        sum_of,
        wait_for_copies,
    )
    from numba_ddtree.device.tile import (
        exp2_below,
        keep_columns,
        left_address,
        make_column_product,
        make_row_part,
        make_row_product,
        make_row_store,
        make_zeros,
        right_address,
        row_maxima,
        row_sums,
        scale_rows,
        scale_tile,
        store_row_floats,
        unit_address,
    )
    from numba_ddtree.tree_attention.outputs import natural_log_sum, normaliser, store_row

    row_part_0, row_part_1, row_part_2, row_part_3 = (make_row_part(row, 16) for row in range(4))

THREADS = block_threads(256)
CHUNKS = 9  # eight of the latent part, one of the rotary part
BLOCK_BYTES = CHUNKS * CHUNK_BYTES
QUERIES_AT = 0
KEYS_AT = BLOCK_BYTES
WEIGHTS_AT = KEYS_AT + 2 * BLOCK_BYTES  # probabilities; before them, halves of sums on their way
STATE_AT = WEIGHTS_AT + CHUNK_BYTES
ALIGNMENT = 128
# Words of a block's state: of each row the maxima, later the sums, of two halves of a block's keys, what
# its output is scaled by, how many keys it sees and whether one was not to be found; the item and its split's
# length, which would take registers. After them the addresses of a block's rows, two of 64 bits each.
MAXIMA, FACTORS, SEEN, FAULTS = 0, 2 * TILE_ROWS, 3 * TILE_ROWS, 4 * TILE_ROWS
ITEM = 5 * TILE_ROWS
REQUEST, TILE, SPLIT, INDEX, LENGTH = range(5)
ADDRESSES = ITEM + 8
STATE_WORDS = ADDRESSES + 4 * KEY_BLOCK
SHARED_BYTES = ALIGNMENT + STATE_AT + 4 * STATE_WORDS
GROUP_ROWS = 32
GROUP_THREADS = 128
FIRST_GROUP, LOOKED_UP = 1, 3  # names of barriers
LOG2_E = 1.4426950408889634


class Place(NamedTuple):
    """Where a thread's part of each step is: addresses in shared memory and numbers of rows and keys."""

    thread: Any
    lane: Any
    warp: Any
    group: Any
    rows: Any  # first of the 16 rows that the warp has scores of
    keys: Any  # first of its 32 keys
    row: Any  # first of the two rows that the lane has scores of; the other is 8 further
    queries: Any
    weights: Any


@device_routine
def place_of_thread(base):  # type: ignore[no-untyped-def]
    """Return a thread's `Place` in shared memory from `base` on.

    It is worked out anew wherever it is needed, and takes no registers in between.
    """
    thread = fresh_thread()
    lane = uint32(thread & uint32(31))
    warp = uint32(thread >> uint32(5))
    group = uint32(warp >> uint32(2))
    rows = uint32(group * uint32(GROUP_ROWS) + uint32(uint32(warp & uint32(1)) << uint32(4)))
    keys = uint32(uint32(uint32(warp >> uint32(1)) & uint32(1)) << uint32(5))
    row = uint32(rows + uint32(lane >> uint32(2)))
    queries, weights = uint32(base + uint32(QUERIES_AT)), uint32(base + uint32(WEIGHTS_AT))
    return Place(thread, lane, warp, group, rows, keys, row, queries, weights)


@device_routine
def group_barrier(place):  # type: ignore[no-untyped-def]
    """Wait for the threads of the group."""
    named_barrier(uint32(place.group + uint32(FIRST_GROUP)), uint32(GROUP_THREADS))


@device_routine
def load_row(buffer, row, unit, latent, rotary):  # type: ignore[no-untyped-def]
    """Begin to copy one unit of each chunk of a row; zeros for a row that is `ABSENT`.

    The addresses of a row that is there are those of its two parts.
    """
    size = uint32(0) if latent == ABSENT else uint32(16)
    place = unit_address(buffer, row, unit)
    offset = uint64(unit << uint32(4))
    for chunk in range(uint32(CHUNKS - 1)):
        source = uint64(latent + offset + uint64(uint32(chunk) * uint32(128)))
        copy_async(uint32(place + uint32(chunk) * uint32(CHUNK_BYTES)), source, size)
    copy_async(uint32(place + uint32((CHUNKS - 1) * CHUNK_BYTES)), uint64(rotary + offset), size)


@device_routine
def load_queries(place, q_nope, nope_stride, q_pe, pe_stride, first, count):  # type: ignore[no-untyped-def]
    """Begin to copy a tile's queries, from row `first` of all on; zeros from the tile's row `count` on."""
    unit = uint32(place.thread & uint32(7))
    for step in range(uint32(2)):
        row = uint32(uint32(place.thread >> uint32(3)) + uint32(step) * uint32(32))
        latent, rotary = ABSENT, ABSENT
        if row < count:
            latent = uint64(q_nope + uint64(int64(first + int64(row)) * nope_stride))
            rotary = uint64(q_pe + uint64(int64(first + int64(row)) * pe_stride))
        load_row(place.queries, row, unit, latent, rotary)


@device_routine
def spoil(item, tree, node, s_faults):  # type: ignore[no-untyped-def]
    """Note that a key of a node was not to be found; in the prefix, for -1, of all rows."""
    begin = int32(node * tree.heads - item.first_row) if node >= 0 else int32(0)
    end = int32(begin + tree.heads) if node >= 0 else int32(TILE_ROWS)
    for row in range(max(begin, int32(0)), min(end, int32(TILE_ROWS))):
        s_faults[uint32(row)] = 1


@device_routine
def look_up(row, keys, tree, item, block, node, s_seen, s_addresses, s_faults):  # type: ignore[no-untyped-def]
    """Write the addresses of row `row` of a block of keys, `ABSENT` for one that is not to be read.

    Of the tree's keys those on the path of `node` are there. In the prefix, -1 stands for it.
    """
    position = int32(block * int32(KEY_BLOCK) + int32(row))
    if position >= item.prefix:
        if position < seen_by(item, tree, s_seen, node):
            slot = path_slot(tree.ancestor_bits, item.request, node, int32(position - item.prefix))
            position = int32(item.prefix + slot)
            if uint32(slot) >= uint32(tree.num_nodes[uint32(item.request)]):
                position = int32(-1)
                spoil(item, tree, node, s_faults)
        else:
            position = int32(-1)
    latent, rotary = ABSENT, ABSENT
    if position >= 0:
        latent, rotary = row_addresses(keys, item.request, position)
        if latent == ABSENT:
            spoil(item, tree, node, s_faults)
    s_addresses[uint32(uint32(2) * row)] = latent
    s_addresses[uint32(uint32(2) * row + uint32(1))] = rotary


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


class Item(NamedTuple):
    """An item of work, int32: rows `first_row` to ``first_row + rows - 1`` of a request against a split.

    `first_seen` is the first key that rows see: 0, or the prefix length where the tree alone is seen.
    """

    request: Any
    split: Any
    first_row: Any
    rows: Any
    prefix: Any
    first_seen: Any
    begin: Any  # first block of the split
    end: Any  # block after its last one


@device_routine
def item_of(tree, request, tile, split, length, sees_prefix):  # type: ignore[no-untyped-def]
    """Return an `Item` of a valid request."""
    prefix = prefix_of(tree, request)
    first_row = int32(tile * int32(TILE_ROWS))
    rows = int32(min(int32(TILE_ROWS), int32(tree.num_nodes[uint32(request)] * tree.heads - first_row)))
    begin = int32(split * length)
    end = int32(min(int64(begin) + int64(length), int64(1 << 26)))
    return Item(request, split, first_row, rows, prefix, int32(0) if sees_prefix else prefix, begin, end)


@device_routine
def first_path_block(item):  # type: ignore[no-untyped-def]
    """Block (int32) of the first key that is not in a block of the prefix alone."""
    return int32(uint32(item.prefix) // uint32(KEY_BLOCK))


@device_routine
def has_rows(place, item, tree, node):  # type: ignore[no-untyped-def]
    """Whether any of the group's rows takes part in a block of a node; in the prefix, -1, all do."""
    begin = int32(node * int32(tree.heads) - item.first_row)
    first = int32(place.group * uint32(GROUP_ROWS))
    return node < 0 or (begin < first + int32(GROUP_ROWS) and begin + tree.heads > first)


@device_routine
def share_sums(place, past, s_faults, s_maxima, s_factors):  # type: ignore[no-untyped-def]
    """Write each row's maximum to the factors, and the sums of its two halves, NaN after a fault."""
    maximum_0, maximum_1, sum_0, sum_1 = past
    sum_0 = sum_of(sum_0, cuda.shfl_xor_sync(0xFFFFFFFF, sum_0, 1))
    sum_1 = sum_of(sum_1, cuda.shfl_xor_sync(0xFFFFFFFF, sum_1, 1))
    sum_0 = sum_of(sum_0, cuda.shfl_xor_sync(0xFFFFFFFF, sum_0, 2))
    sum_1 = sum_of(sum_1, cuda.shfl_xor_sync(0xFFFFFFFF, sum_1, 2))
    below = uint32(place.row + uint32(8))
    sum_0 = float32(np.nan) if s_faults[place.row] else sum_0
    sum_1 = float32(np.nan) if s_faults[below] else sum_1
    if uint32(place.lane & uint32(3)) == uint32(0):
        own = uint32(place.keys << uint32(1))
        s_maxima[uint32(own + place.row)] = sum_0
        s_maxima[uint32(own + below)] = sum_1
        if place.keys == uint32(0):
            s_factors[place.row] = maximum_0
            s_factors[below] = maximum_1


@device_routine
def count_keys(place, tree, item, s_seen, s_faults):  # type: ignore[no-untyped-def]
    """Write how many keys each row of the tile sees, 0 for the rows after the last; too many are a fault."""
    if place.thread < uint32(TILE_ROWS):
        seen, fault = int32(0), int32(0)
        if int32(place.thread) < item.rows:
            node = uint32(uint32(item.first_row) + place.thread) // uint32(tree.heads)
            length = path_length(tree.ancestor_bits, item.request, node)
            fault = int32(length > tree.max_path)
            seen = int32(item.prefix + min(length, tree.max_path))
        s_seen[place.thread] = seen
        s_faults[place.thread] = fault


@device_routine
def following(item, tree, s_seen, block, node):  # type: ignore[no-untyped-def]
    """Block and node after a block and a node, -1 in the prefix; the block is -1 after the last one.

    Path blocks come node by node, those within the split alone.
    """
    block = int32(block + 1)
    path_block = first_path_block(item)
    last_node = int32(uint32(item.first_row + item.rows - int32(1)) // uint32(tree.heads))
    if node < 0:
        if block < min(item.end, path_block):
            return block, node
        node = int32(uint32(item.first_row) // uint32(tree.heads))
        block = int32(max(path_block, item.begin))
    while node <= last_node:
        if block < item.end and block * int32(KEY_BLOCK) < seen_by(item, tree, s_seen, node):
            return block, node
        node = int32(node + 1)
        block = int32(max(path_block, item.begin))
    return int32(-1), node


@device_routine
def seen_by(item, tree, s_seen, node):  # type: ignore[no-untyped-def]
    """Keys (int32) that a node of the tile sees; none in the prefix's blocks, where -1 stands for it."""
    if node < 0:
        return int32(0)
    return int32(s_seen[uint32(max(int32(0), int32(node * int32(tree.heads) - item.first_row)))])


@device_routine
def row_end(item, tree, s_seen, block, node, row):  # type: ignore[no-untyped-def]
    """Column (int32) of a block after the last one that a row sees; 0 for a row that takes no part."""
    owner = int32(uint32(uint32(item.first_row) + row) // uint32(tree.heads))
    end = int32(s_seen[row] - block * int32(KEY_BLOCK))
    return end if node < 0 or owner == node else int32(0)


@device_routine
def store_tile_row(  # type: ignore[no-untyped-def]
    column, item, length, s_seen, s_maxima, s_factors, pairs, within, partials, partial_sums, wave_row,
    out, lse, first, form,
):  # fmt: skip
    """Write a lane's pairs of 128 columns of row `within` of the tile, the first at column `column`."""
    if int32(within) >= item.rows:
        return
    column = int64(column)
    row = int64(first + int64(within))
    splits = splits_of(s_seen[within], length)
    total = sum_of(s_maxima[within], s_maxima[uint32(within + uint32(TILE_ROWS))])
    is_first = column == int64(0)
    if splits == 1:
        store_row(out, row * int64(LATENT) + column, pairs, form)
        if is_first:
            store_flat(lse, row, natural_log_sum(s_factors[within], total))
    elif item.split < splits:
        partial = int64(int64(item.split) * int64(partials.shape[1]) + wave_row + int64(within))
        target = uint64(address_of(partials) + uint64((partial * int64(LATENT) + column) * int64(4)))
        store_row_floats(target, pairs)
        if is_first:
            store_flat(partial_sums, int64(2) * partial, s_factors[within])
            store_flat(partial_sums, int64(2) * partial + int64(1), total)


@device_routine
def row_factor(length, s_seen, s_maxima, within):  # type: ignore[no-untyped-def]
    """Return what a row's output is to be multiplied by before it is written."""
    total = sum_of(s_maxima[within], s_maxima[uint32(within + uint32(TILE_ROWS))])
    return normaliser(total) if splits_of(s_seen[within], length) == 1 else float32(1)


@device_routine
def store_outputs(  # type: ignore[no-untyped-def]
    place, item, length, s_seen, s_maxima, s_factors, output, partials, partial_sums, wave_row, out, lse,
    first, form,
):  # fmt: skip
    """Write a warp's 32 rows x 128 columns: rows of one split as they are to be, others to be merged."""
    row = uint32(place.group * uint32(GROUP_ROWS) + uint32(place.lane >> uint32(2)))
    column = uint32(uint32(place.warp & uint32(3)) * uint32(128))
    column = uint32(column + uint32(uint32(place.lane & uint32(3)) << uint32(1)))
    output = scale_rows(
        output,
        (
            row_factor(length, s_seen, s_maxima, uint32(row + uint32(0))),
            row_factor(length, s_seen, s_maxima, uint32(row + uint32(8))),
            row_factor(length, s_seen, s_maxima, uint32(row + uint32(16))),
            row_factor(length, s_seen, s_maxima, uint32(row + uint32(24))),
        ),
    )
    store_tile_row(
        column, item, length, s_seen, s_maxima, s_factors, row_part_0(output), uint32(row + uint32(0)),
        partials, partial_sums, wave_row, out, lse, first, form,
    )  # fmt: skip
    store_tile_row(
        column, item, length, s_seen, s_maxima, s_factors, row_part_1(output), uint32(row + uint32(8)),
        partials, partial_sums, wave_row, out, lse, first, form,
    )  # fmt: skip
    store_tile_row(
        column, item, length, s_seen, s_maxima, s_factors, row_part_2(output), uint32(row + uint32(16)),
        partials, partial_sums, wave_row, out, lse, first, form,
    )  # fmt: skip
    store_tile_row(
        column, item, length, s_seen, s_maxima, s_factors, row_part_3(output), uint32(row + uint32(24)),
        partials, partial_sums, wave_row, out, lse, first, form,
    )  # fmt: skip


def make_kernel(number: str, name: str):  # type: ignore[no-untyped-def]
    """Make the kernel for one kind of 16-bit numbers, ``"bf16"`` or ``"f16"`` in PTX."""
    if SIMULATED:
        return lambda: None  # tensor cores are not simulated

    store_weights = make_row_store(f"{number}x2")
    multiply_rows = make_row_product(number, CHUNKS, 32)
    add_columns = make_column_product(number, 2, 2)
    no_output = make_zeros(128)

    @device_routine
    def scores_of(base, buffer):  # type: ignore[no-untyped-def]
        """Products of queries and keys: 16 rows x 32 keys a warp."""
        place = place_of_thread(base)
        left = left_address(uint32(place.queries + place.rows * uint32(128)), place.lane)
        right = right_address(uint32(buffer + place.keys * uint32(128)), place.lane)
        return multiply_rows(left, right)

    @device_routine
    def weigh_scores(base, tree, item, scale, s_seen, s_maxima, s_factors, block, node, scores, past):  # type: ignore[no-untyped-def]
        """Turn scores into probabilities in shared memory; a group takes part.

        `past` are the maxima and sums of the lane's two rows, which come back with this block's.
        """
        maximum_0, maximum_1, sum_0, sum_1 = past
        place = place_of_thread(base)
        quad = uint32(place.lane & uint32(3))
        own = uint32(place.keys << uint32(1))  # where the warp's maxima begin, and the others of its rows
        other = uint32(own ^ uint32(TILE_ROWS))
        below = uint32(place.row + uint32(8))
        scores = scale_tile(scores, scale)
        if node >= 0:
            ends = (
                row_end(item, tree, s_seen, block, node, place.row),
                row_end(item, tree, s_seen, block, node, below),
            )
            column = int32(place.keys + uint32(quad << uint32(1)))
            first_column = int32(item.first_seen - block * int32(KEY_BLOCK))
            scores = keep_columns(scores, column, first_column, ends)
        largest = row_maxima(scores)
        top_0 = larger_of(largest[0], cuda.shfl_xor_sync(0xFFFFFFFF, largest[0], 1))
        top_1 = larger_of(largest[1], cuda.shfl_xor_sync(0xFFFFFFFF, largest[1], 1))
        top_0 = larger_of(top_0, cuda.shfl_xor_sync(0xFFFFFFFF, top_0, 2))
        top_1 = larger_of(top_1, cuda.shfl_xor_sync(0xFFFFFFFF, top_1, 2))
        if quad == uint32(0):
            s_maxima[uint32(own + place.row)] = top_0
            s_maxima[uint32(own + below)] = top_1
        group_barrier(place)
        top_0 = larger_of(top_0, s_maxima[uint32(other + place.row)])
        top_1 = larger_of(top_1, s_maxima[uint32(other + below)])
        top_0, top_1 = larger_of(maximum_0, top_0), larger_of(maximum_1, top_1)
        # Of a row that has seen nothing yet, everything is 2^-inf.
        origin_0 = top_0 if top_0 > float32(-np.inf) else float32(0)
        origin_1 = top_1 if top_1 > float32(-np.inf) else float32(0)
        factor_0 = exp2(sum_of(maximum_0, -origin_0))
        factor_1 = exp2(sum_of(maximum_1, -origin_1))
        weights = exp2_below(scores, (origin_0, origin_1))
        unit = uint32(place.keys >> uint32(3))
        target = uint32(unit_address(place.weights, place.row, unit) + uint32(quad << uint32(2)))
        store_weights(target, weights)
        if quad == uint32(0) and place.keys == uint32(0):
            s_factors[place.row] = factor_0
            s_factors[below] = factor_1
        added = row_sums(weights)
        sum_0 = multiply_add(sum_0, factor_0, added[0])
        sum_1 = multiply_add(sum_1, factor_1, added[1])
        group_barrier(place)
        return top_0, top_1, sum_0, sum_1

    @device_routine
    def add_values(base, buffer, s_factors, output):  # type: ignore[no-untyped-def]
        """Scale the outputs, and add probabilities times values: 32 rows x 128 columns a warp."""
        place = place_of_thread(base)
        first = uint32(place.group * uint32(GROUP_ROWS))
        row = uint32(first + uint32(place.lane >> uint32(2)))
        factors = (
            s_factors[row],
            s_factors[uint32(row + uint32(8))],
            s_factors[uint32(row + uint32(16))],
            s_factors[uint32(row + uint32(24))],
        )
        weights = left_address(uint32(place.weights + uint32(first * uint32(128))), place.lane)
        chunk = uint32(uint32(place.warp & uint32(3)) * uint32(2 * CHUNK_BYTES))
        values = left_address(uint32(buffer + chunk), place.lane)
        # Mostly no row has a new maximum; a product with 1 changes no bit.
        is_new = factors[0] != float32(1) or factors[1] != float32(1)
        is_new = is_new or factors[2] != float32(1) or factors[3] != float32(1)
        if cuda.any_sync(0xFFFFFFFF, is_new):
            output = scale_rows(output, factors)
        step = uint32(0)
        while step < uint32(KEY_BLOCK // 16):
            output = add_columns(output, uint32(weights ^ uint32(step << uint32(5))), values)
            values = uint32(values + uint32(PIECE_BYTES))
            step = uint32(step + uint32(1))
        return output

    def tensor_cores_kernel(  # type: ignore[no-untyped-def]
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
        s_words = cuda.shared.array(0, int32)
        s_floats = cuda.shared.array(0, float32)
        raw = shared_address_of(s_words)
        base = uint32(uint32(raw + uint32(ALIGNMENT - 1)) & uint32(~(ALIGNMENT - 1) & 0xFFFFFFFF))
        state_at = uint32(uint32(base - raw + uint32(STATE_AT)) >> uint32(2))
        s_item = s_words[uint32(state_at + uint32(ITEM)) :]
        s_faults = s_words[uint32(state_at + uint32(FAULTS)) :]
        s_seen = s_words[uint32(state_at + uint32(SEEN)) :]
        s_maxima = s_floats[uint32(state_at + uint32(MAXIMA)) :]
        s_factors = s_floats[uint32(state_at + uint32(FACTORS)) :]
        s_long = cuda.shared.array(0, uint64)
        s_addresses = s_long[uint32(uint32(state_at + uint32(ADDRESSES)) >> uint32(1)) :]
        place = place_of_thread(base)
        is_first = place.group == uint32(0)
        length = split_length(tree, keys, wave, max_keys)
        request_rows = int64(ancestor_bits.shape[1]) * int64(heads)
        index = int32(cuda.blockIdx.x)
        while True:
            request, tile, split = find_item(tree, keys, wave, length, max_keys, index)
            if request < 0:
                return
            item = item_of(tree, request, tile, split, length, sees_prefix)
            cuda.syncthreads()  # of the item before, all is read
            count_keys(place, tree, item, s_seen, s_faults)
            if place.thread == uint32(0):
                s_item[REQUEST], s_item[TILE], s_item[SPLIT] = request, tile, split
                s_item[INDEX], s_item[LENGTH] = index, length
            first = int64(request) * request_rows + int64(item.first_row)
            load_queries(place, q_nope, nope_stride, q_pe, pe_stride, first, uint32(item.rows))
            cuda.syncthreads()
            start = item.begin if sees_prefix else int32(max(item.begin, first_path_block(item)))
            block, node = following(item, tree, s_seen, int32(start - 1), int32(-1))
            row = place.thread
            if block >= 0 and row < uint32(KEY_BLOCK):
                look_up(row, keys, tree, item, block, node, s_seen, s_addresses, s_faults)
            buffer = uint32(base + uint32(KEYS_AT))
            spare = uint32(buffer + uint32(BLOCK_BYTES))
            cuda.syncthreads()
            if block >= 0 and not is_first:
                load_block(s_addresses, buffer)
            output = no_output()
            past = (float32(-np.inf), float32(-np.inf), float32(0), float32(0))
            is_due = False  # whether the second group has outputs to add
            while block >= 0:
                next_block, next_node = following(item, tree, s_seen, block, node)
                takes_part = has_rows(place, item, tree, node)
                close_copies()
                wait_for_copies()
                cuda.syncthreads()
                if is_first:
                    if next_block >= 0 and row < uint32(KEY_BLOCK):
                        look_up(row, keys, tree, item, next_block, next_node, s_seen, s_addresses, s_faults)
                    named_arrival(uint32(LOOKED_UP), uint32(THREADS))
                else:
                    if is_due:
                        output = add_values(base, spare, s_factors, output)
                    # The whole group is done with the spare buffer, too.
                    named_barrier(uint32(LOOKED_UP), uint32(THREADS))
                    if next_block >= 0:
                        load_block(s_addresses, spare)
                if takes_part:
                    past = weigh_scores(
                        base, tree, item, scale, s_seen, s_maxima, s_factors, block, node,
                        scores_of(base, buffer), past,
                    )  # fmt: skip
                    if is_first:
                        output = add_values(base, buffer, s_factors, output)
                is_due = takes_part
                buffer, spare = spare, buffer
                block, node = next_block, next_node
            if is_due and not is_first:
                output = add_values(base, spare, s_factors, output)
            wait_for_copies()  # of queries, if there was no block
            cuda.syncthreads()
            place = place_of_thread(base)
            share_sums(place, past, s_faults, s_maxima, s_factors)
            cuda.syncthreads()
            request, tile, split = s_item[REQUEST], s_item[TILE], s_item[SPLIT]
            index, length = int32(s_item[INDEX] + workers), s_item[LENGTH]
            item = item_of(tree, request, tile, split, length, sees_prefix)
            first = int64(request) * request_rows + int64(item.first_row)
            wave_row = int64(request) * int64(tiles_of_request(tree)) + int64(tile) - int64(first_tile)
            wave_row = int64(wave_row * int64(TILE_ROWS))
            store_outputs(
                place, item, length, s_seen, s_maxima, s_factors, output, partials, partial_sums, wave_row,
                out, lse, first, form,
            )  # fmt: skip

    tensor_cores_kernel.__name__ = tensor_cores_kernel.__qualname__ = name
    return tensor_cores_kernel


SIGNATURE = (
    f"void(uint64, int64, uint64, int64, {KEY_SIGNATURE}, {TREE_SIGNATURE}, {WAVE_SIGNATURE}, int32, int32, "
    "float32, float32[:, :, ::1], float32[:, :, ::1], uint64, float32[:, :, ::1], int32)"
)
ATTEND_BFLOAT16 = Kernel(make_kernel("bf16", "attend_bfloat16_kernel"), (SIGNATURE,), THREADS)
ATTEND_FLOAT16 = Kernel(make_kernel("f16", "attend_float16_kernel"), (SIGNATURE,), THREADS)
KERNELS = {"bfloat16": ATTEND_BFLOAT16, "float16": ATTEND_FLOAT16}


def launch_tensor_cores(transfer: Transfer, work: Work, splits: SplitPlan) -> None:
    """Launch the kernel, and the merge of splits, wave by wave."""
    workers = multiprocessors()
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
