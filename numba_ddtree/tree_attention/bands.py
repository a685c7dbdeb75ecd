"""The rest of a batch cut into bands: as much work for each worker, wherever in a tile it begins.

Splits of one length are as long for all tiles, and where they are no multiple of the workers some are idle
in the last round. Bands leave hardly any idle: the work of all tiles of the rest, one tile after the other,
is cut into as many equal bands as there are workers. A worker may so have a tile's end and the next one's
beginning, each with outputs of its own to be merged, so that bands are taken only where that pays.

Workers should read the same keys at the same time, too, unless L2 holds all of them. So where requests have
as many tiles as each other, these go *side* by side: each band is cut out of the requests' blocks, and as
many workers as a request has tiles go through it, one for each tile.

Time counts, not blocks alone: a tile takes some for its beginning, before its first block, and half a pair of
blocks takes as long as a pair. So each tile has a *stretch* of positions, as many as `stretch_of` says, of
which bands are cut: the first `BEGIN_BLOCKS` have no block. Stretches and bands are even.

To the others a tile in bands looks as if it had splits: `length` blocks each, but the first, which lacks the
tile's *offset*, the positions of its first band that come before its first block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, int32, uint32
from numba_ddtree.device.warp import (
    LANES,
    warp_ballot,
    warp_broadcast,
    warp_max,
    warp_running_sum,
    warp_sum,
)
from numba_ddtree.tree_attention.shares import (
    ALL_WHOLE,
    ITEM_BLOCKS,
    MERGED_SLOTS,
    count_work,
    cut_rest,
    fresh_word,
    quotient,
    tiles_and_blocks,
)
from numba_ddtree.tree_attention.work import SplitPlan

LEAST_GAIN = 1 / 16  # of the time of splits, for bands to be taken
MOST_BLOCKS = 2**20  # of a request, for all positions of the rest to fit int32
BUSY = 0.9  # share of the workers that splits give something to do
FEW_ROUNDS = 3  # of whole tiles
L2_BLOCKS = 220  # of keys that any worker may read at any time, 16 MB
BEGIN_BLOCKS = 6  # blocks' worth of time, an even number, that a tile in a band takes beside its blocks


@device_routine
def share_out_in_bands(tree: Any, keys: Any, share: Any, max_keys: Any, first: Any) -> Any:
    """Return what `share_out` does, and how many tiles go side by side (int32).

    Where there are bands, their blocks, negative, stand for a split's.
    """
    if share.max_splits == 1:
        return int32(ALL_WHOLE), int32(share.split_blocks), int32(0), int32(1)
    work = count_work(tree, keys, max_keys, first)
    whole, length, rest, time, left = cut_rest(share, work)
    is_possible = left != uint32(0) and left <= uint32(share.rest_tiles) and work[2] < uint32(MOST_BLOCKS)
    if share.split_blocks == 0 and is_possible and may_pay(share, work, time, left):
        whole_tiles = int32(work[0] - int32(left))
        band, side = cut_in_bands(tree, keys, share, max_keys, first, whole_tiles, time, work[3])
        if band > 0:
            return whole_tiles, int32(-band), int32(left), side
    return whole, length, rest, int32(1)


def may_have_bands(splits: SplitPlan, tiles: int, workers: int) -> np.int32:
    """Whether bands may pay (int32): a split for each worker would leave too many of them without.

    And there are not so many whole tiles that it hardly matters. Known on the host, this spares the others
    the look. `tiles` are those of trees that have all of their slots in use, which others need not have: then
    the rest is cut into splits.
    """
    rest, rounds = tiles % workers, tiles // workers
    busy = workers // max(rest, 1) * rest
    may_pay = splits.split_blocks == 0 and rest > 0 and rounds < FEW_ROUNDS and busy < BUSY * workers
    return np.int32(may_pay)


@device_routine
def stretch_of(blocks: Any) -> Any:
    """Positions (int32) of a tile of so many blocks."""
    return int32(BEGIN_BLOCKS + int32(uint32(blocks + int32(1)) & uint32(0xFFFFFFFE)))


@device_routine
def merge_time(slots: Any) -> Any:
    """Blocks' worth of time (float32) to merge so many slots."""
    return float32(float32(slots) * float32(1 / MERGED_SLOTS))


@device_routine
def may_pay(share: Any, work: Any, time: Any, left: Any) -> Any:
    """Whether the `left` tiles might take less than `time` in bands; without a division, which takes long."""
    total, in_all, _, more = work
    workers = float32(share.workers)
    each = float32(more + uint32(2 * ITEM_BLOCKS))
    each += merge_time(uint32(left + uint32(share.workers)))
    blocks = float32(left) * float32(in_all)  # of the rest, times all tiles
    least = float32(total) * workers * float32(float32(time) * float32(1 - LEAST_GAIN) - each)
    return blocks < least


@device_routine
def cut_in_bands(
    tree: Any,
    keys: Any,
    share: Any,
    max_keys: Any,
    first: Any,
    whole: Any,
    time: Any,
    more: Any,
) -> Any:
    """Positions of a band and tiles side by side (int32) for all tiles but the first `whole`; by a warp.

    0 where splits, which take `time`, are better.
    """
    places, places_of_keys, longest, most, requests, left = count_rest(tree, keys, max_keys, first, whole)
    is_even = uint32(most * requests) == left
    is_large = places_of_keys > uint32(uint32(L2_BLOCKS) + requests * uint32(BEGIN_BLOCKS))
    if is_large and most > uint32(1) and not is_even:
        return int32(0), int32(1)
    side = most if is_large and is_even else uint32(1)
    bands = uint32(uint32(share.workers) // side)
    band = quotient(places if side == uint32(1) else places_of_keys, uint32(uint32(2) * bands))
    band = uint32(uint32(2) * band)
    splits = uint32(quotient(longest, band) + uint32(1))
    slots = uint32(left + uint32(bands * side))
    of_bands = float32(band + more + uint32(ITEM_BLOCKS)) + merge_time(slots)
    if splits > uint32(share.max_splits) or of_bands > float32(time) * float32(1 - LEAST_GAIN):
        return int32(0), int32(1)
    return int32(band), int32(side)


@device_routine
def tiles_of_rest(count: Any, whole: Any, before: Any) -> Any:
    """Tiles (int32) of a lane's request that are taken whole, and how many come before it; by a warp.

    `before` are those of all requests before the first lane's, which are returned with this warp's added.
    """
    running = warp_running_sum(count)
    first = int32(before + running - count)
    skipped = int32(min(max(int32(whole - first), int32(0)), count))
    return skipped, first, int32(before + warp_broadcast(running, LANES - 1))


@device_routine
def count_rest(tree: Any, keys: Any, max_keys: Any, first: Any, whole: Any) -> Any:
    """Count all tiles but the first `whole`, by a warp; all that is returned is uint32.

    Their positions; those of one tile of each request that has any; blocks of the longest of these; most of a
    request's tiles; such requests, and the tiles.
    """
    lane = int32(cuda.threadIdx.x & 31)
    places, places_of_keys, longest, most = uint32(0), uint32(0), uint32(1), uint32(0)
    requests, tiles, before, start = uint32(0), uint32(0), int32(0), int32(0)
    while start < int32(tree.num_nodes.shape[0]):
        count, blocks = first
        if start > 0:
            count, blocks = tiles_and_blocks(tree, keys, int32(start + lane), max_keys)
        skipped, _, before = tiles_of_rest(count, whole, before)
        left = int32(count - skipped)
        blocks = int32(blocks if left > 0 else 0)
        stretch = int32(stretch_of(blocks) if left > 0 else 0)
        places = uint32(places + uint32(warp_sum(int32(left * stretch))))
        places_of_keys = uint32(places_of_keys + uint32(warp_sum(stretch)))
        longest = uint32(max(longest, warp_max(uint32(blocks))))
        most = uint32(max(most, warp_max(uint32(left))))
        requests = uint32(requests + uint32(warp_sum(int32(left > 0))))
        tiles = uint32(tiles + uint32(warp_sum(left)))
        start = int32(start + int32(LANES))
    return places, places_of_keys, longest, most, requests, tiles


@device_routine
def find_in_band(
    tree: Any,
    keys: Any,
    share: Any,
    max_keys: Any,
    first: Any,
    whole: Any,
    band: Any,
    side: Any,
    index: Any,
) -> Any:
    """Request, tile, split, slot and offset of the worker's next item, and the index of the one after it.

    All are int32. An index past the whole tiles and the workers is a position in the rest, from which on the
    worker's band is still to be done; before that, as for splits, it says which band is the worker's. The
    request is -1 at the band's end, and where no tile is left.
    """
    lane = int32(cuda.threadIdx.x & 31)
    number = int32(uint32(cuda.blockIdx.x) // uint32(side))
    beside = int32(int32(cuda.blockIdx.x) - number * side)
    before, places_before, start = int32(0), int32(0), int32(0)
    position, workers = int32(index - whole), fresh_word(share.workers)  # no register is kept for their sum
    position = int32(number * band if position < workers else position - workers)
    end = int32(int32(number + int32(1)) * band)
    while start < int32(tree.num_nodes.shape[0]) and position < end:
        count, blocks = first
        if start > 0:
            count, blocks = tiles_and_blocks(tree, keys, int32(start + lane), max_keys)
        skipped, first_tile, before = tiles_of_rest(count, whole, before)
        left = int32(count - skipped)
        amount = int32(int32(uint32(left) // uint32(side)) * stretch_of(blocks))
        running = warp_running_sum(amount)
        is_beyond = warp_ballot(position < places_before + running)
        if is_beyond != uint32(0):
            owner = int32(cuda.ffs(int32(is_beyond)) - 1)
            stretch = stretch_of(warp_broadcast(blocks, owner))
            begin = int32(places_before + warp_broadcast(int32(running - amount), owner))
            inside = int32(uint32(position - begin) // uint32(stretch))
            tile = int32(warp_broadcast(skipped, owner) + inside * side + beside)
            place = int32(warp_broadcast(first_tile, owner) + tile - whole)
            next_begin = int32(begin + int32(inside + int32(1)) * stretch)
            begin = int32(next_begin - stretch + int32(BEGIN_BLOCKS))
            if begin >= end:
                break
            first_band = int32(uint32(begin) // uint32(band))
            split = int32(number - first_band)
            return (
                int32(start + owner),
                tile,
                split,
                int32(place * share.max_splits + split),
                int32(begin - first_band * band),
                int32(whole + workers + int32(min(next_begin, end))),
            )
        places_before = int32(places_before + warp_broadcast(running, LANES - 1))
        start = int32(start + int32(LANES))
    return int32(-1), int32(0), int32(0), int32(-1), int32(0), int32(index)
