"""The warp of the Hopper kernel that finds items one after the other and describes them for the others."""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.warp import warp_max
from numba_ddtree.tree_attention.bands import find_in_band, share_out_in_bands
from numba_ddtree.tree_attention.hopper_state import (
    FAULT,
    FIRST_NODE,
    FIRST_ROW,
    GATHER_BEGIN,
    IN_SLOT,
    IS_FOLDED,
    ITEM_COUNTED,
    ITEM_FREE,
    ITEM_FULL,
    ITEM_WORDS,
    ITEMS,
    LENGTH,
    LONGEST,
    MIXED,
    NODES,
    OFFSET,
    OUTPUT_KIND,
    PLAIN,
    PREFIX,
    REQUEST,
    REST,
    ROW_HIGH,
    ROW_LOW,
    ROWS,
    SEEN,
    SHARED,
    SHARED_BEGIN,
    SIDE,
    SLOT_ROW,
    SPLIT,
    STATE_AT,
    STREAM,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import path_length
from numba_ddtree.tree_attention.path_blocks import group_shape, nodes_of
from numba_ddtree.tree_attention.shares import (
    find_item,
    first_requests,
    fold_slot,
    share_out,
    splits_of_whole,
)
from numba_ddtree.tree_attention.split_items import prefix_of, range_of_split, splits_of
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.mbarriers import (
        arrive,
        fresh_lane,
        fresh_shared_address_of,
        fresh_word,
        wait_for,
    )
    from numba_ddtree.device.ptx import fresh_thread

SCHEDULER = 320  # first thread of the warp that finds items
TOO_DEEP = 2**31  # marks the keys of a row whose path is longer than was said: of all rows then the most


@device_routine
def describe_shared(  # type: ignore[no-untyped-def]
    base, place, tree, request, tile, split, length, offset, slot, is_folded, sees_prefix
):  # fmt: skip
    """Write what an item is to place 0 or 1, but for what its paths decide; by a warp.

    Returns its number (int32) of shared blocks. Request -1 is the end of all items.
    """
    item = uint32(base + uint32(4 * ITEMS) + place * uint32(4 * ITEM_WORDS))
    is_writer = fresh_thread() == uint32(SCHEDULER)
    if is_writer:
        set_word(item, REQUEST, request)
    if request < 0:
        return int32(0)
    prefix = prefix_of(tree, request)
    first_row = int32(tile * int32(TILE_ROWS))
    rows = int32(tree.num_nodes[uint32(request)] * tree.heads - first_row)
    rows = int32(min(int32(TILE_ROWS), rows))
    begin, split_end = range_of_split(split, length, offset)
    path_begin = int32(uint32(prefix) // uint32(KEY_BLOCK))
    # The longest row reaches the prefix's end, whatever its path.
    end = int32(min(path_begin, split_end))
    shared = int32(max(int32(0), int32(end - begin))) if sees_prefix != 0 else int32(0)
    if is_writer:
        set_word(item, SPLIT, split)
        set_word(item, FIRST_ROW, first_row)
        set_word(item, ROWS, rows)
        set_word(item, PREFIX, prefix)
        set_word(item, SHARED_BEGIN, begin)
        set_word(item, SHARED, shared)
        set_word(item, FAULT, 0)
        set_word(item, LENGTH, length)
        set_word(item, OFFSET, offset)
        request_rows = int64(tree.ancestor_bits.shape[1]) * int64(tree.heads)
        row_64 = int64(int64(request) * request_rows + int64(first_row))
        set_word(item, ROW_LOW, int32(row_64 & int64(0xFFFFFFFF)))
        set_word(item, ROW_HIGH, int32(row_64 >> int64(32)))
        set_word(item, SLOT_ROW, int32(slot * int32(TILE_ROWS)))
        set_word(item, IS_FOLDED, is_folded)
    return shared


@device_routine
def describe_paths(  # type: ignore[no-untyped-def]
    base, place, tree, request, tile, split, length, offset, shared, is_folded
):  # fmt: skip
    """Write what an item's paths decide, by a warp; return its number (int32) of blocks."""
    lane = fresh_lane()
    item = uint32(base + uint32(4 * ITEMS) + place * uint32(4 * ITEM_WORDS))
    seen = uint32(base + uint32(4 * SEEN) + place * uint32(4 * TILE_ROWS))
    prefix = prefix_of(tree, request)
    first_row = int32(tile * int32(TILE_ROWS))
    rows = int32(tree.num_nodes[uint32(request)] * tree.heads - first_row)
    rows = int32(min(int32(TILE_ROWS), rows))
    longest, shortest = uint32(0), uint32(0x7FFFFFFF)
    for half in range(uint32(2)):
        row = uint32(lane + uint32(half) * uint32(32))
        keys_seen = int32(0)
        if int32(row) < rows:
            node = uint32(uint32(first_row) + row) // uint32(tree.heads)
            path = path_length(tree.ancestor_bits, request, node)
            keys_seen = int32(prefix + min(path, tree.max_path))
            shortest = uint32(min(shortest, uint32(keys_seen)))
            if path > tree.max_path:
                longest = uint32(max(longest, uint32(uint32(keys_seen) + uint32(TOO_DEEP))))
        set_word(seen, row, keys_seen)
        longest = uint32(max(longest, uint32(keys_seen)))
    longest, shortest = warp_max(longest), uint32(~warp_max(uint32(~shortest)))
    if longest >= uint32(TOO_DEEP):
        longest = uint32(longest - uint32(TOO_DEEP))
        if lane == uint32(0):
            set_word(item, FAULT, 1)
    begin, split_end = range_of_split(split, length, offset)
    end = int32(uint32(longest + uint32(KEY_BLOCK - 1)) // uint32(KEY_BLOCK))
    end = int32(min(end, split_end))
    splits, kind = splits_of(longest, length, offset), int32(MIXED)
    if splits_of(shortest, length, offset) == splits:
        if splits == 1:
            kind = int32(PLAIN)
        elif is_folded == 0 or split == 0:
            kind = int32(IN_SLOT)
    first_node, nodes = nodes_of(first_row, rows, tree.heads)
    stream = shared
    gather_begin = int32(max(int32(uint32(prefix) // uint32(KEY_BLOCK)), begin))
    for path_block in range(gather_begin, end):
        _, _, count = group_shape(prefix, int32(path_block), int32(longest))
        stream = int32(stream + int32(uint32(nodes + count - int32(1)) // uint32(count)))
    if lane == uint32(0):
        set_word(item, STREAM, stream)
        set_word(item, LONGEST, longest)
        set_word(item, GATHER_BEGIN, gather_begin)
        set_word(item, FIRST_NODE, first_node)
        set_word(item, NODES, nodes)
        set_word(item, OUTPUT_KIND, kind)
    return int32(max(stream, int32(split == 0)))


@device_routine
def tell(at, event):  # type: ignore[no-untyped-def]
    """Arrive at one of an item's barriers, once the whole warp has written."""
    cuda.syncwarp()
    if fresh_lane() == uint32(0):
        arrive(uint32(at + uint32(8) * uint32(event)))


@device_routine
def is_scheduler():  # type: ignore[no-untyped-def]
    """Whether this warp is the one that finds items."""
    return uint32(fresh_thread() & uint32(~31)) == uint32(SCHEDULER)


@device_routine
def schedule(s_words, keys, tree, share, max_keys, sees_prefix, first_rows, has_bands):  # type: ignore[no-untyped-def]
    """Find this block's items one after the other, and describe them for the other warps.

    To get instructions that come for the first time takes longer than to carry them out. So a second warp
    goes ahead: it takes the first request to have a tile, without looking, finds that, and returns, having
    written nothing. What it has come through is then at hand for the scheduler. Where there can be no bands,
    `has_bands`, a constant, keeps their code out of the way.
    """
    first = int32(fresh_lane() == uint32(0)), int32(1)
    if is_scheduler():
        first = first_requests(tree, keys, max_keys)
    side = int32(1)
    if has_bands:
        whole, shared_length, rest, side = share_out_in_bands(tree, keys, share, max_keys, first)
    else:
        whole, shared_length, rest = share_out(tree, keys, share, max_keys, first)
    if is_scheduler():
        set_word(fresh_shared_address_of(s_words), REST, rest)
        set_word(fresh_shared_address_of(s_words), SIDE, side)
        cuda.syncwarp()
    index = int32(cuda.blockIdx.x) if is_scheduler() else int32(0)
    number = uint32(0)
    request = int32(0)
    while request >= 0:
        length = fresh_word(shared_length)
        offset = int32(0)
        if has_bands and length < 0 and index >= whole:
            length, side = int32(-length), int32(1)
            if is_scheduler():  # which wrote it; to the warp that goes ahead any will do
                side = word_at(fresh_shared_address_of(s_words), SIDE)
            request, tile, split, slot, offset, index = find_in_band(
                tree, keys, share, max_keys, first, whole, length, side, index
            )
        else:
            request, tile, split, slot = find_item(
                tree, keys, share, max_keys, 1, whole, length, index, first
            )
            index = int32(index + share.workers)
        end = int32(split + int32(1))
        if request >= 0 and slot < 0:
            end, length = splits_of_whole(tree, share, request)
            slot = fold_slot(share, 1)
        elif request >= 0 and split == 0 and fresh_thread() == uint32(SCHEDULER):
            row = int64(request) * int64(tree.ancestor_bits.shape[1]) * int64(tree.heads)
            first_rows[uint32(slot) // uint32(share.max_splits)] = int64(row + int64(tile * int32(TILE_ROWS)))
        while split < end:
            base = fresh_shared_address_of(s_words)
            place = uint32(number & uint32(1))
            at = uint32(base + uint32(STATE_AT) + place * uint32(8))
            parity = uint32(uint32(uint32(number >> uint32(1)) & uint32(1)) ^ uint32(1))
            wait_for(uint32(at + uint32(8 * ITEM_FREE)), parity)
            is_folded = int32(slot >= int32(share.rest_tiles * share.max_splits))  # in a slot of the worker's
            # A split that no row of the tile reaches is no item, but the first one is there to be written.
            # One with shared blocks is an item for sure: keys and queries may come while paths are counted.
            shared = describe_shared(
                base, place, tree, request, tile, split, length, offset, slot, is_folded, sees_prefix
            )
            if not is_scheduler():
                return
            is_told, blocks = shared > 0 or request < 0, int32(1)
            if is_told:
                tell(at, ITEM_FULL)
            if request >= 0:
                blocks = describe_paths(
                    base, place, tree, request, tile, split, length, offset, shared, is_folded
                )
            if blocks > 0:
                if not is_told:
                    tell(at, ITEM_FULL)
                tell(at, ITEM_COUNTED)
                number = uint32(number + uint32(1))
            split = int32(split + int32(1))
