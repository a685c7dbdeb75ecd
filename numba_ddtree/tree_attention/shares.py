"""How a batch is shared out over the blocks of threads that work on it, from the lengths on the device.

Each of the workers takes whole tiles, with all of their keys, one a round as long as there is one for every
worker. The rest, fewer tiles than there are workers, is cut along the keys into splits, so that all have work
to the end: those items come after the whole tiles, each (tile, split) with a slot for its partial results.

A kernel of smaller tiles cuts each into parts of equal numbers of rows, which are numbered and taken like
tiles; the last may have no rows. Every warp that asks computes the same by itself, from the same lengths, so
that all agree without waiting.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, uint32
from numba_ddtree.device.warp import LANES, warp_ballot, warp_broadcast, warp_max, warp_running_sum, warp_sum
from numba_ddtree.tree_attention.path_blocks import group_shape
from numba_ddtree.tree_attention.split_items import blocks_of, is_by_slot, prefix_of, tiles_in_use
from numba_ddtree.tree_attention.work import KEY_BLOCK, MAX_WORKERS, TILE_ROWS, SplitPlan

if SIMULATED:

    def fresh_word(word: Any) -> Any:
        return word

else:
    from numba_ddtree.device.mbarriers import fresh_word

SHARE_SIGNATURE = "int32, int32, int32, int32"
ITEM_BLOCKS = 4  # blocks' worth of time that an item takes beside its blocks
MERGED_SLOTS = 24  # slots of partial results that are merged in a block's worth of time
ALL_WHOLE = 2**29  # tiles that are taken whole, if all are
MOST_TIME = 2**26 - 1
WITHOUT_SPLITS = 2**24  # blocks of a split, where there is to be but one


class Share(NamedTuple):
    """Who shares, and what a split is, all int32: in the order of `SHARE_SIGNATURE`.

    `rest_tiles` tiles have slots for partial results, `max_splits` each; see `SplitPlan` for `split_blocks`.
    `blocks_together`, a constant that is not in the signature, are blocks of keys that take as long as one.
    """

    workers: Any
    rest_tiles: Any
    split_blocks: Any
    max_splits: Any
    blocks_together: Any


@device_routine
def quotient(count: Any, size: Any) -> Any:
    """``ceil(count / size)`` (uint32)."""
    return uint32(uint32(uint32(count) + uint32(size) - uint32(1)) // uint32(size))


@device_routine
def tiles_and_blocks(tree: Any, keys: Any, request: Any, max_keys: Any) -> Any:
    """Tiles in use of a request, and blocks of its longest key range (int32); none of no request."""
    count = tiles_in_use(tree, keys, request, max_keys)
    return count, blocks_of(tree, request) if count > 0 else int32(0)


@device_routine
def first_requests(tree: Any, keys: Any, max_keys: Any) -> Any:
    """`tiles_and_blocks` of a lane's request of the first 32, for who looks through them several times."""
    return tiles_and_blocks(tree, keys, int32(cuda.threadIdx.x & 31), max_keys)


@device_routine
def gathered_more(tree: Any, request: Any, blocks: Any) -> Any:
    """Blocks (int32) that paths of a full tile's nodes take beside those of one node; see `path_blocks`."""
    prefix, in_use = prefix_of(tree, request), tree.num_nodes[uint32(request)]
    if tree.heads >= TILE_ROWS or is_by_slot(tree, prefix, in_use):
        return int32(0)  # rows of one node, or of two, for which no time is spent here; or no paths
    longest = int32(prefix + min(in_use, tree.max_path))
    nodes = uint32(min(in_use, int32(quotient(TILE_ROWS, tree.heads))))
    more, block = int32(0), int32(uint32(prefix) // uint32(KEY_BLOCK))
    while block < blocks:
        _, _, count = group_shape(prefix, block, longest)
        more = int32(more + int32(quotient(nodes, count)) - int32(1))
        block = fresh_word(int32(block + int32(1)))  # so that this is not unrolled: few blocks have paths
    return more


@device_routine
def share_out(tree: Any, keys: Any, share: Any, max_keys: Any, first: Any) -> Any:
    """Share the work out: tiles taken whole, blocks of a split, and tiles of the rest; the warp takes part.

    All three are int32, and `first` are the `first_requests`. The rest is taken whole, too, where its splits
    would not end earlier, or where it has no slots.
    """
    if share.max_splits == 1:
        return int32(ALL_WHOLE), int32(share.split_blocks), int32(0)
    whole, length, rest, _, _ = cut_rest(share, count_work(tree, keys, max_keys, first))
    return whole, length, rest


@device_routine
def count_work(tree: Any, keys: Any, max_keys: Any, first: Any) -> Any:
    """Tiles, blocks of all of them (int32), the longest request's and most `gathered_more` (uint32)."""
    batch = int32(tree.num_nodes.shape[0])
    lane = int32(cuda.threadIdx.x & 31)
    total, in_all, longest, more = int32(0), int32(0), uint32(1), uint32(0)
    start = int32(0)
    while start < batch:  # in 32 bits, which a range would not count in
        count, blocks = first
        if start > 0:
            count, blocks = tiles_and_blocks(tree, keys, int32(start + lane), max_keys)
        total = int32(total + warp_sum(count))
        in_all = int32(in_all + warp_sum(int32(count * blocks)))
        longest = uint32(max(longest, warp_max(uint32(blocks))))
        own_more = int32(0)
        if count > 0:
            own_more = gathered_more(tree, int32(start + lane), blocks)
        more = uint32(max(more, warp_max(uint32(own_more))))
        start = int32(start + int32(LANES))
    return total, in_all, longest, more


@device_routine
def time_as_whole(longest: Any, more: Any) -> Any:
    """Blocks' worth of time (uint32) that a tile takes which is not cut."""
    return uint32(uint32(longest + more) + uint32(ITEM_BLOCKS))


@device_routine
def cut_rest(share: Any, work: Any) -> Any:
    """Return what `share_out` does, of what `count_work` has, and the rest's time and tiles (uint32).

    Time is in blocks' worth. Tiles of the rest are counted whether it is cut into splits or not.
    """
    total, in_all, longest, more = work
    workers = uint32(share.workers)
    rest = uint32(uint32(total) - uint32(total) // workers * workers)
    if rest == uint32(0) or rest > uint32(share.rest_tiles):
        return int32(ALL_WHOLE), int32(share.split_blocks), int32(0), time_as_whole(longest, more), rest
    length, time = best_length(share, rest, longest, quotient(in_all, total), more)
    if time >= time_as_whole(longest, more):
        return int32(ALL_WHOLE), int32(share.split_blocks), int32(0), time_as_whole(longest, more), rest
    return int32(total - int32(rest)), int32(length), int32(rest), time, rest


@device_routine
def time_of_rest(share: Any, rest: Any, longest: Any, typical: Any, more: Any, length: Any) -> Any:
    """Estimate how long (uint32) the rest takes with splits of a length, in blocks' worth of time.

    First the workers share whole splits, so many as `longest` blocks have but not more than tiles of
    `typical` length may have. Those that are idle in the last round take what is left of the tiles; if they
    are too few, that comes after. A tile's last split has `more` blocks beside those of its range, for paths.
    And then partial results are merged, which counts where the length is chosen: with a given one, tiles that
    are taken whole fold as many.
    """
    splits = uint32(longest // length)
    left = uint32(longest - uint32(splits * length))
    items = uint32(rest * min(splits, quotient(typical, length)))
    rounds = quotient(items, share.workers)
    idle = uint32(uint32(rounds * uint32(share.workers)) - items)
    round_time = uint32(length + uint32(ITEM_BLOCKS))
    time = uint32(rounds * round_time)
    merge = uint32(0)
    if share.split_blocks == 0:
        merge = uint32(uint32(rest * quotient(longest, length)) // uint32(MERGED_SLOTS))
    if left == 0:
        return uint32(time + more + merge)
    last = uint32(uint32(left + more) + uint32(ITEM_BLOCKS))
    before = uint32(time - round_time) if rounds > 0 and rest <= idle else time
    return uint32(max(time, uint32(before + last)) + merge)


@device_routine
def best_length(share: Any, rest: Any, longest: Any, typical: Any, more: Any) -> Any:
    """Blocks of a split with which the rest is done the soonest, and its time (uint32 both); by a warp.

    A lane tries one number of splits for the longest key range, with the `more` blocks of paths shared out,
    too. Where `share` says how long a split is, all try that.
    """
    splits = uint32(uint32(cuda.threadIdx.x & 31) + uint32(1))
    length = uint32(share.split_blocks)
    if length == uint32(0):
        together = uint32(share.blocks_together)
        length = uint32(quotient(uint32(longest + more), uint32(splits * together)) * together)
    time = uint32(min(time_of_rest(share, rest, longest, typical, more, length), uint32(MOST_TIME)))
    if share.split_blocks == 0 and splits > uint32(share.max_splits):
        time = uint32(MOST_TIME)
    # The least time, and of equal ones the least number of splits.
    key = uint32(uint32(~uint32(time << uint32(5))) - uint32(splits - uint32(1)))
    best = int32(uint32(~warp_max(key)) & uint32(31))
    return uint32(warp_broadcast(int32(length), best)), uint32(warp_broadcast(int32(time), best))


@device_routine
def find_item(
    tree: Any,
    keys: Any,
    share: Any,
    max_keys: Any,
    parts: Any,
    whole: Any,
    length: Any,
    index: Any,
    first: Any,
) -> Any:
    """Request, part of the request, split and slot (int32) of an item; the warp takes part.

    Items from 0 to ``whole - 1`` are whole parts, split 0 and slot -1. The rest are numbered request by
    request, then split by split, so that neighbours read the same keys. The request is -1 if there are not so
    many items. `first` are the `first_requests`.
    """
    batch = int32(tree.num_nodes.shape[0])
    lane = int32(cuda.threadIdx.x & 31)
    is_whole = index < whole
    target = int32(index) if is_whole else int32(index - whole)
    parts_before, before = int32(0), int32(0)
    start = int32(0)
    while start < batch:
        count, blocks = first
        if start > 0:
            count, blocks = tiles_and_blocks(tree, keys, int32(start + lane), max_keys)
        count = int32(count * int32(parts))
        running = warp_running_sum(count)
        first_part = int32(parts_before + running - count)
        skipped = int32(min(max(int32(whole - first_part), int32(0)), count))
        left = int32(count - skipped)
        items = skipped if is_whole else int32(uint32(left) * quotient(blocks, length))
        found = warp_running_sum(items)
        is_beyond = warp_ballot(target < before + found)
        if is_beyond != uint32(0):
            owner = int32(cuda.ffs(int32(is_beyond)) - 1)
            request = int32(start + owner)
            inside = int32(target - before - warp_broadcast(int32(found - items), owner))
            if is_whole:
                return request, inside, int32(0), int32(-1)
            left, skipped = warp_broadcast(left, owner), warp_broadcast(skipped, owner)
            split = int32(uint32(inside) // uint32(left))
            part = int32(skipped + inside - split * left)
            place = int32(warp_broadcast(first_part, owner) + part - whole)
            return request, part, split, int32(place * share.max_splits + split)
        before = int32(before + warp_broadcast(found, LANES - 1))
        parts_before = int32(parts_before + warp_broadcast(running, LANES - 1))
        start = int32(start + int32(LANES))
    return int32(-1), int32(0), int32(0), int32(-1)


@device_routine
def fold_slot(share: Any, parts: Any) -> Any:
    """Slot (int32) in which a worker keeps what the splits of a whole part have come to so far."""
    return int32(share.rest_tiles * share.max_splits * int32(parts) + int32(cuda.blockIdx.x))


@device_routine
def splits_of_whole(tree: Any, share: Any, request: Any) -> Any:
    """Return how many splits a whole part goes through, and blocks (int32) of each."""
    length = int32(share.split_blocks if share.split_blocks > 0 else int32(WITHOUT_SPLITS))
    return int32(quotient(blocks_of(tree, request), length)), length


@device_routine
def take_item(
    tree: Any,
    keys: Any,
    share: Any,
    max_keys: Any,
    parts: Any,
    whole: Any,
    length: Any,
    index: Any,
    step: Any,
) -> Any:
    """Request, part, split, slot, blocks of a split, and splits (int32) of the worker's next item.

    `step` counts the splits of a whole part, which the worker takes one after the other: those are so many.
    Of the rest, an item's split is its last one.
    """
    first = first_requests(tree, keys, max_keys)
    request, part, split, slot = find_item(tree, keys, share, max_keys, parts, whole, length, index, first)
    if request >= 0 and index < whole:
        splits, length = splits_of_whole(tree, share, request)
        return request, part, int32(step), fold_slot(share, parts), int32(length), splits
    return request, part, split, slot, int32(length), int32(split + int32(1))


def share_arguments(splits: SplitPlan, workers: int) -> tuple[np.int32, ...]:
    """Return what a kernel is launched with, by so many blocks of threads at most: the first of them."""
    numbers = min(workers, MAX_WORKERS), splits.rest_tiles, splits.split_blocks, splits.max_splits
    return tuple(map(np.int32, numbers))
