"""The warp of the Hopper kernel that finds items one after the other and describes them for the others."""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.warp import LANES, warp_max
from numba_ddtree.tree_attention.bands import find_in_band, share_out_in_bands
from numba_ddtree.tree_attention.hopper_foretold import disown, is_as_foretold, is_as_found
from numba_ddtree.tree_attention.hopper_state import (
    FAULT,
    FIRST_NODE,
    FIRST_ROW,
    FORETOLD,
    GATHER_BEGIN,
    IN_SLOT,
    IS_FOLDED,
    IS_ONLY,
    ITEM_COUNTED,
    ITEM_FREE,
    ITEM_FULL,
    ITEM_WORDS,
    ITEMS,
    LEFT_FREE,
    LENGTH,
    LONGEST,
    MIXED,
    NODES,
    OFFSET,
    OUTPUT_KIND,
    PAIRED,
    PAIRS,
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
    WAS_REST,
    WAS_SIDE,
    first_query,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import path_in_use
from numba_ddtree.tree_attention.path_blocks import group_shape, nodes_of
from numba_ddtree.tree_attention.shares import (
    ALL_WHOLE,
    find_item,
    first_requests,
    fold_slot,
    share_out,
    splits_of_whole,
    tiles_and_blocks,
)
from numba_ddtree.tree_attention.split_items import (
    BY_SLOT_IN_ROWS,
    blocks_of,
    is_by_slot,
    prefix_of,
    range_of_split,
    splits_of,
)
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
LONG_BLOCKS = 12  # of an item that lasts for longer than it takes to find out what else there is to do
FAULTY = 2**31  # marks the keys of a row whose path is not as it was said: of all rows then the most


@device_routine
def end_of_shared(tree, request, prefix):  # type: ignore[no-untyped-def]
    """Block (int32) behind those that all rows have in common and that tensor copies can bring."""
    keys, in_use = prefix, tree.num_nodes[uint32(request)]
    if is_by_slot(tree, prefix, in_use):
        keys = int32(prefix + in_use)
        if tree.by_slot != BY_SLOT_IN_ROWS:
            keys = int32(keys + int32(KEY_BLOCK - 1))
    return int32(uint32(keys) // uint32(KEY_BLOCK))


@device_routine
def first_row_of(tree, request, row):  # type: ignore[no-untyped-def]
    """Place (int64) of a request's row among all rows; no registers are kept for the rows of a request."""
    rows = int64(tree.ancestor_bits.shape[1]) * int64(fresh_word(tree.heads))
    return int64(int64(request) * rows + int64(row))


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
    # The longest row reaches the prefix's end, whatever its path; by slot all reach the tree's.
    end = int32(min(end_of_shared(tree, request, prefix), split_end))
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
        row_64 = first_row_of(tree, request, first_row)
        set_word(item, ROW_LOW, int32(row_64 & int64(0xFFFFFFFF)))
        set_word(item, ROW_HIGH, int32(row_64 >> int64(32)))
        set_word(item, SLOT_ROW, int32(slot * int32(TILE_ROWS)))
        set_word(item, IS_FOLDED, is_folded)
    return shared


@device_routine
def describe_paths(  # type: ignore[no-untyped-def]
    base, place, tree, request, tile, split, length, offset, shared, is_folded
):  # fmt: skip
    """Write what an item's paths, or its tree, decide, by a warp; return its number (int32) of blocks."""
    lane = fresh_lane()
    item = uint32(base + uint32(4 * ITEMS) + place * uint32(4 * ITEM_WORDS))
    seen = uint32(base + uint32(4 * SEEN) + place * uint32(4 * TILE_ROWS))
    prefix = prefix_of(tree, request)
    first_row = int32(tile * int32(TILE_ROWS))
    in_use = tree.num_nodes[uint32(request)]
    rows = int32(min(int32(TILE_ROWS), int32(in_use * tree.heads - first_row)))
    longest, shortest = uint32(0), uint32(0x7FFFFFFF)
    row = lane
    while row < uint32(TILE_ROWS):
        keys_seen = int32(0)
        if int32(row) < rows:
            node = uint32(uint32(first_row) + row) // uint32(tree.heads)
            path = path_in_use(tree.ancestor_bits, request, node, in_use)
            keys_seen = int32(min(path, tree.max_path))
            # For splits to be no more than there are; and found out anew, as it would take a register.
            if keys_seen > in_use or is_by_slot(tree, fresh_word(prefix), in_use):
                keys_seen = in_use
            keys_seen = int32(prefix + keys_seen)
            shortest = uint32(min(shortest, uint32(keys_seen)))
            if path > tree.max_path:
                longest = uint32(max(longest, uint32(uint32(keys_seen) + uint32(FAULTY))))
        set_word(seen, row, keys_seen)
        longest = uint32(max(longest, uint32(keys_seen)))
        row = uint32(fresh_word(int32(row + uint32(LANES))))  # so that this is not unrolled
    longest, shortest = warp_max(longest), uint32(~warp_max(uint32(~shortest)))
    if longest >= uint32(FAULTY):
        longest = uint32(longest - uint32(FAULTY))
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
    if splits > 1 and word_at(base, SIDE) == PAIRS:
        kind = int32(PAIRED)
    first_node, nodes = nodes_of(first_row, rows, tree.heads)
    stream = shared
    gather_begin = int32(max(end_of_shared(tree, request, prefix), begin))
    for path_block in range(gather_begin, end):
        count = nodes
        if tree.by_slot != BY_SLOT_IN_ROWS:
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
def let_first_pair_begin(base):  # type: ignore[no-untyped-def]
    """Wait for the first values of a long item, for those that consume to get their instructions sooner.

    Whoever consumes goes on meanwhile, up to the last of the `pairs_for_sure`.
    """
    item = uint32(base + uint32(4 * ITEMS))
    if word_at(item, SHARED) >= int32(LONG_BLOCKS):
        wait_for(uint32(base + uint32(STATE_AT + 8 * LEFT_FREE)), uint32(0))


@device_routine
def describe_only_item(  # type: ignore[no-untyped-def]
    s_words, keys, tree, share, max_keys, sees_prefix, first_rows, first_items
):  # fmt: skip
    """Describe the rest of a foretold item, and the end, if it is the block's only one and as it was found.

    Returns whether it is, by a warp. To find out that nothing has changed takes fewer instructions than to
    find the item, for which a short one would wait.
    """
    base = fresh_shared_address_of(s_words)
    item, at = uint32(base + uint32(4 * ITEMS)), uint32(base + uint32(STATE_AT))
    if word_at(item, IS_ONLY) == 0 or not is_as_found(base, tree, keys, max_keys, sees_prefix, first_items):
        return False
    first_row, split, is_folded = word_at(item, FIRST_ROW), word_at(item, SPLIT), word_at(item, IS_FOLDED)
    if fresh_lane() == uint32(0):
        set_word(base, REST, word_at(item, WAS_REST))
        set_word(base, SIDE, word_at(item, WAS_SIDE))
        set_word(uint32(item + uint32(4 * ITEM_WORDS)), REQUEST, -1)
        if is_folded == 0 and split == 0:
            slot = uint32(uint32(word_at(item, SLOT_ROW)) // uint32(TILE_ROWS))
            first_rows[uint32(slot // uint32(share.max_splits))] = first_query(item)
    cuda.syncwarp()
    describe_paths(
        base, uint32(0), tree, word_at(item, REQUEST), int32(uint32(first_row) // uint32(TILE_ROWS)), split,
        word_at(item, LENGTH), word_at(item, OFFSET), word_at(item, SHARED), is_folded,
    )  # fmt: skip
    tell(at, ITEM_COUNTED)
    tell(uint32(at + uint32(8)), ITEM_FULL)
    return True


@device_routine
def may_be_paired(tree, keys, share, max_keys, first, whole, length, rest):  # type: ignore[no-untyped-def]
    """Whether all tiles have two splits or one, and each a cluster of two blocks to itself; by a warp."""
    if rest == 0 or whole != 0 or length <= 0 or int32(2) * rest > share.workers:
        return False
    longest, start = uint32(0), int32(0)
    while start < int32(tree.num_nodes.shape[0]):
        _, blocks = first
        if start > 0:
            _, blocks = tiles_and_blocks(tree, keys, int32(start + int32(fresh_lane())), max_keys)
        longest = uint32(max(longest, warp_max(uint32(blocks))))
        start = int32(start + int32(LANES))
    return int32(longest) <= int32(2) * length


@device_routine
def begin_sharing(s_words, keys, tree, share, max_keys, has_bands):  # type: ignore[no-untyped-def]
    """Share the work out: `first_requests`, tiles taken whole, blocks of a split; and `REST` and `SIDE`."""
    first = int32(fresh_lane() == uint32(0)), int32(1)
    if is_scheduler():
        first = first_requests(tree, keys, max_keys)
    side = int32(1)
    if has_bands:
        whole, length, rest, side = share_out_in_bands(tree, keys, share, max_keys, first)
    else:
        whole, length, rest = share_out(tree, keys, share, max_keys, first)
    if may_be_paired(tree, keys, share, max_keys, first, whole, length, rest):
        rest, side = int32(0), int32(PAIRS)
    if is_scheduler():
        set_word(fresh_shared_address_of(s_words), REST, rest)
        set_word(fresh_shared_address_of(s_words), SIDE, side)
        cuda.syncwarp()
    return first, whole, length


@device_routine
def splits_are_paired(s_words):  # type: ignore[no-untyped-def]
    """Whether the two blocks of a cluster have a tile's two splits; of the warp that goes ahead, no."""
    return is_scheduler() and word_at(fresh_shared_address_of(s_words), SIDE) == PAIRS


@device_routine
def next_item(  # type: ignore[no-untyped-def]
    s_words, keys, tree, share, max_keys, has_bands, first, whole, shared_length, index
):  # fmt: skip
    """Find what the worker does at an index: request, tile, split, the one after the last to be done, slot.

    And blocks of a split, offset, and the worker's next index; all int32. The request is -1 at the end.
    """
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
        place, until, are_paired = index, whole, splits_are_paired(s_words)
        if are_paired:
            place, until = int32(uint32(index) >> uint32(1)), int32(ALL_WHOLE)
        request, tile, split, slot = find_item(tree, keys, share, max_keys, 1, until, length, place, first)
        if are_paired and request >= 0:
            split = int32(index & int32(1))
            slot = int32(place * share.max_splits + split)
            if split * length >= blocks_of(tree, request):
                request = int32(-1)
        index = int32(index + share.workers)
    end = int32(split + int32(1))
    if request >= 0 and slot < 0:
        end, length = splits_of_whole(tree, share, request)
        slot = fold_slot(share, 1)
    return request, tile, split, end, slot, length, offset, index


@device_routine
def is_folded_in(share, slot):  # type: ignore[no-untyped-def]
    """Whether (int32) a slot is the worker's own, in which splits are folded one after the other."""
    return int32(slot >= int32(share.rest_tiles * share.max_splits))


@device_routine
def schedule(  # type: ignore[no-untyped-def]
    s_words, keys, tree, share, max_keys, sees_prefix, first_rows, first_items, has_bands, are_foretold
):  # fmt: skip
    """Find this block's items one after the other, and describe them for the other warps.

    To get instructions that come for the first time takes longer than to carry them out. So a second warp
    goes ahead: it takes the first request to have a tile, without looking, finds that, and returns, having
    written nothing. What it has come through is then at hand for the scheduler. Where there can be no bands,
    `has_bands`, a constant, keeps their code out of the way.

    In a scheduled run, `are_foretold`, a constant, too, nobody goes ahead, and `has_bands` need not be a
    constant; what `read_foretold` has found is told at once, and looked for only if it may be another one by
    now, or there are more.
    """
    number, is_foretold = uint32(0), False
    if are_foretold:
        if not is_scheduler():
            return
        is_foretold = word_at(fresh_shared_address_of(s_words), FORETOLD) != 0
        number = uint32(is_foretold)
        if is_foretold:
            tell(uint32(fresh_shared_address_of(s_words) + uint32(STATE_AT)), ITEM_FULL)
            let_first_pair_begin(fresh_shared_address_of(s_words))
            if describe_only_item(s_words, keys, tree, share, max_keys, sees_prefix, first_rows, first_items):
                return
    first, whole, shared_length = begin_sharing(s_words, keys, tree, share, max_keys, has_bands)
    index = int32(cuda.blockIdx.x) if is_scheduler() else int32(0)
    request = int32(0)
    while request >= 0:
        request, tile, split, end, slot, length, offset, index = next_item(
            s_words, keys, tree, share, max_keys, has_bands, first, whole, shared_length, index
        )
        is_folded = is_folded_in(share, slot)
        if is_folded == 0 and request >= 0 and split == 0 and fresh_thread() == uint32(SCHEDULER):
            row = first_row_of(tree, request, int32(tile * int32(TILE_ROWS)))
            first_rows[uint32(slot) // uint32(share.max_splits)] = row
        while split < end:
            base = fresh_shared_address_of(s_words)
            place = uint32(number & uint32(1))
            at = uint32(base + uint32(STATE_AT) + place * uint32(8))
            parity = uint32(uint32(uint32(number >> uint32(1)) & uint32(1)) ^ uint32(1))
            wait_for(uint32(at + uint32(8 * ITEM_FREE)), parity)
            # A split that no row of the tile reaches is no item, but the first one is there to be written.
            # One with shared blocks is an item for sure: keys and queries may come while paths are counted.
            shared = describe_shared(
                base, place, tree, request, tile, split, length, offset, slot, is_folded, sees_prefix
            )
            if not is_scheduler():
                return
            is_told, blocks = shared > 0 or request < 0, int32(1)
            if is_foretold:
                is_foretold = False
                at = uint32(base + uint32(STATE_AT))
                if is_as_foretold(base):
                    is_told, number, place = True, uint32(0), uint32(0)
                else:
                    disown(base)
                    tell(at, ITEM_COUNTED)
                    at = uint32(at + uint32(8))
                    if is_told:
                        tell(at, ITEM_FULL)
            elif is_told:
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
