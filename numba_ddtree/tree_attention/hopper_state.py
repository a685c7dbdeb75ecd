"""Shared memory of the Hopper kernel: what lies where, and what its warps tell each other there.

Each of the two blocks of a pair has a buffer of nine chunks of 64 rows x 64 columns: eight of the latent
part, then the rotary one. The queries' latent part has eight chunks; their rotary part is in registers.
"""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, device_function, device_routine, int64, uint32
from numba_ddtree.tree_attention.work import LATENT, MAX_WORKERS, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.mbarriers import load_shared_float, load_shared_word, store_shared_float
    from numba_ddtree.device.ptx import store_shared_word

CONSUMING_WARPS = 8  # of a block: two warpgroups
CHUNK_BYTES = TILE_ROWS * 128
LATENT_CHUNKS = LATENT // 64
BLOCK_BYTES = (LATENT_CHUNKS + 1) * CHUNK_BYTES
QUERIES_AT = 0
KEYS_AT = LATENT_CHUNKS * CHUNK_BYTES
WEIGHTS_AT = KEYS_AT + 2 * BLOCK_BYTES
STATE_AT = WEIGHTS_AT + 2 * CHUNK_BYTES
ALIGNMENT = 1024

# Barriers, eight bytes each from STATE_AT on.
QUERIES_FULL, QUERIES_FREE = 0, 1
KEYS_FULL = 2  # nine of each buffer: the latent chunks, the rotary one
GATHERED, ROTARY_FREE, LEFT_FREE, RIGHT_FREE = 20, 22, 24, 26
ITEM_FULL, ITEM_FREE, ITEM_COUNTED = 28, 30, 32
PEER_READY, PEER_DATA = 34, 35  # the other block of the cluster's: see `hopper_pairs`
BARRIERS = 36

# Words of shared memory.
ORIGINS = STATE_AT // 4 + 2 * BARRIERS  # of each row after the first and after the second block of a pair
TOTALS = ORIGINS + 2 * TILE_ROWS  # of each row's probabilities so far, as they are
ROUNDED = TOTALS + TILE_ROWS  # of each row's probabilities in a pair's first block, rounded
OUTCOMES = ROUNDED + TILE_ROWS  # of each row, at an item's end
OUTCOME_WORDS = 4
ITEMS = OUTCOMES + OUTCOME_WORDS * TILE_ROWS  # of two items, the one at work and the next
ITEM_WORDS = 20
SEEN = ITEMS + 2 * ITEM_WORDS  # keys that each of an item's rows sees
RECORDS = SEEN + 2 * TILE_ROWS  # of the block in each buffer
RECORD_WORDS = 6
REST = RECORDS + 2 * RECORD_WORDS  # tiles that are cut along their keys, once items are told
SIDE = REST + 1  # tiles that go side by side, for the warp that finds items (see `bands`); or `PAIRS`
PAIRS = 0  # that all splits are two of a tile, of which the blocks of a cluster have one each
FORETOLD = SIDE + 1  # whether the first item is foretold, in a scheduled run
SHARED_BYTES = 4 * (FORETOLD + 1)

# Words of an item: the shared blocks, `SHARED` from `SHARED_BEGIN` on, come first of `STREAM` in all, then
# those with path keys, or, by slot in rows, the last one, which is not full; the longest row sees `LONGEST`
# keys, and a split has `LENGTH` blocks, of which the first lacks `OFFSET` (see `bands`). Partial results go
# to rows from `SLOT_ROW` on, where an item that `IS_FOLDED` finds what the splits before have come to.
# What paths decide is there only with `ITEM_COUNTED`: `STREAM`, `LONGEST`, `GATHER_BEGIN`, `OUTPUT_KIND`,
# `FIRST_NODE`, `NODES`, and the keys of `SEEN`.
(
    REQUEST,
    SPLIT,
    FIRST_ROW,
    ROWS,
    PREFIX,
    SHARED_BEGIN,
    SHARED,
    STREAM,
    FAULT,
    LONGEST,
    GATHER_BEGIN,
    LENGTH,
    SLOT_ROW,
    IS_FOLDED,
    OUTPUT_KIND,
    ROW_LOW,
    ROW_HIGH,
    FIRST_NODE,
    NODES,
    OFFSET,
) = range(20)
# A first item that is foretold has other words in place of some of these (`hopper_first_items`): whether the
# block has no other item; `REST` and `SIDE`; and the longest path and the `ways_of` that it was found with.
IS_ONLY, WAS_REST, WAS_SIDE, WAS_MAX_PATH, WAS_WAYS = STREAM, LONGEST, GATHER_BEGIN, FIRST_NODE, NODES
# Behind the foretold items of all blocks is the number of requests, and of each its prefix, nodes and tiles.
BATCH_AT = MAX_WORKERS * ITEM_WORDS
REQUEST_WORDS = 3
# OUTPUT_KIND: whether all rows are written the same way, or are folded with those of the other block first.
MIXED, PLAIN, IN_SLOT, PAIRED = range(4)
# Words of a row's outcome: weights of what was before, and of what this item adds; what the sum is multiplied
# by; and what is to be done with it, in bits.
KEPT, ADDED, FACTOR, TO_DO = range(4)
# Words of a buffer's record: `COUNT` nodes from the tile's node `FIRST` on share a block of paths, as
# `path_blocks` packs them. A block by slot begins with slot `FIRST`, a key of the prefix if that is negative,
# and its first `COMMON` columns do not count.
KIND, BLOCK, FIRST, COMMON, OWN, COUNT = range(6)
IN_BOXES, IN_ROWS = 0, 1  # KIND, bit 0: how it is loaded
OF_PATHS, OF_SLOTS = 2, 4  # the other bits: what masks it


@device_function
def word_at(start, index):  # type: ignore[no-untyped-def]
    """Word (int32) of shared memory, so many after an address."""
    return load_shared_word(uint32(start + uint32(uint32(index) << uint32(2))))


@device_function
def set_word(start, index, word):  # type: ignore[no-untyped-def]
    """Write a word (int32) of shared memory."""
    store_shared_word(uint32(start + uint32(uint32(index) << uint32(2))), uint32(word))


@device_function
def float_at(start, index):  # type: ignore[no-untyped-def]
    """Float32 of shared memory, so many after an address."""
    return load_shared_float(uint32(start + uint32(uint32(index) << uint32(2))))


@device_function
def set_float(start, index, value):  # type: ignore[no-untyped-def]
    """Write a float32 of shared memory."""
    store_shared_float(uint32(start + uint32(uint32(index) << uint32(2))), value)


@device_routine
def pair_at(base, first, row):  # type: ignore[no-untyped-def]
    """Floats of shared memory of a lane's two rows."""
    place = uint32(uint32(first) + row)
    return float_at(base, place), float_at(base, uint32(place + uint32(8)))


@device_routine
def set_pair(base, first, row, quad, values):  # type: ignore[no-untyped-def]
    """Write the floats of a lane's two rows, by one lane of four."""
    if quad == uint32(0):
        place = uint32(uint32(first) + row)
        set_float(base, place, values[0])
        set_float(base, uint32(place + uint32(8)), values[1])


@device_routine
def first_query(item):  # type: ignore[no-untyped-def]
    """Return the number (int64) of an item's first row among all rows of queries."""
    low = int64(uint32(word_at(item, ROW_LOW)))
    return int64(int64(word_at(item, ROW_HIGH)) << int64(32) | low)
