"""What a block of the Hopper kernel is foretold of its first item, and whether it is to be believed.

`hopper_first_items` writes it, once for all runs of the same lengths; but a run may be of others.
"""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.warp import LANES, warp_ballot
from numba_ddtree.tree_attention.hopper_state import (
    BATCH_AT,
    FIRST_NODE,
    FIRST_ROW,
    FORETOLD,
    GATHER_BEGIN,
    IS_FOLDED,
    IS_ONLY,
    ITEM_WORDS,
    ITEMS,
    LENGTH,
    LONGEST,
    MIXED,
    NODES,
    OFFSET,
    OUTPUT_KIND,
    PREFIX,
    REQUEST,
    REQUEST_WORDS,
    ROW_HIGH,
    ROW_LOW,
    ROWS,
    SHARED,
    SHARED_BEGIN,
    SLOT_ROW,
    SPLIT,
    STREAM,
    WAS_MAX_PATH,
    WAS_REST,
    WAS_SIDE,
    WAS_WAYS,
    first_query,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import key_capacity
from numba_ddtree.tree_attention.split_items import prefix_of, tiles_in_use
from numba_ddtree.tree_attention.work import KEY_BLOCK

if not SIMULATED:
    from numba_ddtree.device.mbarriers import fresh_lane, fresh_word

# What `describe_shared` writes, but for the fault that is to be found, a bit a word.
SHARED_WORDS = sum(
    1 << word
    for word in (
        REQUEST, SPLIT, FIRST_ROW, ROWS, PREFIX, SHARED_BEGIN, SHARED, LENGTH, OFFSET, ROW_LOW, ROW_HIGH,
        SLOT_ROW, IS_FOLDED,
    )
)  # fmt: skip
FORETOLD_WORDS = SHARED_WORDS | sum(
    1 << word for word in (IS_ONLY, WAS_REST, WAS_SIDE, WAS_MAX_PATH, WAS_WAYS)
)


@device_routine
def ways_of(tree, sees_prefix):  # type: ignore[no-untyped-def]
    """Return, in an int32, how many slots there are, how they are read, and whether nodes see the prefix."""
    way = uint32(uint32(tree.by_slot) << uint32(1)) | uint32(sees_prefix != 0)
    return int32(uint32(uint32(tree.ancestor_bits.shape[1]) << uint32(8)) | way)


@device_routine
def place_of_request(request):  # type: ignore[no-untyped-def]
    """Return where `words_of_request` are kept (uint32)."""
    return uint32(uint32(BATCH_AT + 1) + uint32(request) * uint32(REQUEST_WORDS))


@device_routine
def words_of_request(tree, keys, max_keys, request):  # type: ignore[no-untyped-def]
    """Return what items depend on of a request: `REQUEST_WORDS` int32."""
    return (
        prefix_of(tree, request),
        tree.num_nodes[uint32(request)],
        tiles_in_use(tree, keys, request, max_keys),
    )


@device_routine
def read_foretold(base, keys, tree, first_items):  # type: ignore[no-untyped-def]
    """Write what `first_items` say of the first item to its place, and whether it may be, by a warp.

    They may be of other lengths than these: that there are such keys and queries is made sure of. Each warp
    that goes by them before the item is told does so for itself, and all come to the same.
    """
    lane = fresh_lane()
    item = uint32(base + uint32(4 * ITEMS))
    if lane < uint32(ITEM_WORDS):
        set_word(item, lane, first_items[uint32(uint32(cuda.blockIdx.x) * uint32(ITEM_WORDS) + lane)])
    cuda.syncwarp()
    request, shared, begin = word_at(item, REQUEST), word_at(item, SHARED), word_at(item, SHARED_BEGIN)
    may_be = request >= 0 and request < tree.num_nodes.shape[0] and shared > 0 and begin >= 0
    if may_be:
        rows = int64(tree.num_nodes.shape[0]) * int64(tree.ancestor_bits.shape[1]) * int64(tree.heads)
        rows_end = int64(first_query(item) + int64(word_at(item, ROWS)))
        last_block = int64(int64(begin + shared - int32(1)) * int64(KEY_BLOCK))
        may_be = rows_end <= rows and last_block < key_capacity(keys, request)
    set_word(base, FORETOLD, int32(may_be))


@device_routine
def is_as_foretold(base):  # type: ignore[no-untyped-def]
    """Whether the first item, described in the second one's place, is as it was told; by a warp."""
    lane = fresh_lane()
    item, found = uint32(base + uint32(4 * ITEMS)), uint32(base + uint32(4 * ITEMS + 4 * ITEM_WORDS))
    cuda.syncwarp()
    differs = False
    if uint32(uint32(SHARED_WORDS) >> lane) & uint32(1) != uint32(0):
        differs = word_at(item, lane) != word_at(found, lane)
    return warp_ballot(differs) == uint32(0)


@device_routine
def is_as_found(base, tree, keys, max_keys, sees_prefix, first_items):  # type: ignore[no-untyped-def]
    """Whether all that items follow from is still what it was when first items were found; by a warp."""
    item = uint32(base + uint32(4 * ITEMS))
    differs = word_at(item, WAS_MAX_PATH) != tree.max_path
    differs = differs or word_at(item, WAS_WAYS) != ways_of(tree, sees_prefix)
    differs = differs or first_items[BATCH_AT] != int32(tree.num_nodes.shape[0])
    request = fresh_lane()
    while int32(request) < int32(tree.num_nodes.shape[0]):
        place = place_of_request(request)
        prefix, nodes, tiles = words_of_request(tree, keys, max_keys, int32(request))
        differs = differs or first_items[place] != prefix or first_items[place + uint32(1)] != nodes
        differs = differs or first_items[place + uint32(2)] != tiles
        request = uint32(fresh_word(int32(request + uint32(LANES))))
    return warp_ballot(differs) == uint32(0)


@device_routine
def disown(base):  # type: ignore[no-untyped-def]
    """Make an item that was foretold wrongly one of no rows, of whose shared blocks nothing is written."""
    item = uint32(base + uint32(4 * ITEMS))
    if fresh_lane() == uint32(0):
        prefix = word_at(item, PREFIX)
        set_word(item, ROWS, 0)
        set_word(item, SPLIT, 1)
        set_word(item, STREAM, word_at(item, SHARED))
        set_word(item, LONGEST, int32(prefix + int32(1)))
        set_word(item, GATHER_BEGIN, int32(uint32(prefix) // uint32(KEY_BLOCK)))
        set_word(item, FIRST_NODE, 0)
        set_word(item, NODES, 0)
        set_word(item, OUTPUT_KIND, MIXED)
