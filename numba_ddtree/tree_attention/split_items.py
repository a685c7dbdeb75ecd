"""How the work of a batch is cut into items: (request, tile, split), from the lengths on the device.

Every warp computes what it needs by itself, from the same lengths, so that all agree without waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.warp import LANES, warp_ballot, warp_broadcast, warp_max, warp_running_sum
from numba_ddtree.tree_attention.key_rows import key_capacity
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS, SplitPlan, Work

ITEM_BLOCKS = 3  # blocks' worth of time that an item takes beside its blocks
TREE_SIGNATURE = "uint32[:, :, ::1], int32[::1], int32[::1], int32, int32"
WAVE_SIGNATURE = "int32, int32, int32, int32, int32"


class Tree(NamedTuple):
    """A batch of trees, as kernels take it: in the order of `TREE_SIGNATURE`.

    `max_path` and `heads` are int32; `prefix_lengths` may be empty, for 0.
    """

    ancestor_bits: Any
    num_nodes: Any
    prefix_lengths: Any
    max_path: Any
    heads: Any


class Wave(NamedTuple):
    """What one launch is to do, all int32: in the order of `WAVE_SIGNATURE`.

    Flat tiles from `first_tile` on, `tiles` of them, which `workers` blocks share; see `SplitPlan` for the
    rest.
    """

    first_tile: Any
    tiles: Any
    workers: Any
    split_blocks: Any
    max_splits: Any


@device_routine
def prefix_of(tree: Any, request: Any) -> Any:
    """Prefix length (int32) of a request."""
    return int32(tree.prefix_lengths[uint32(request)] if tree.prefix_lengths.shape[0] > 0 else 0)


@device_routine
def is_valid_request(tree: Any, keys: Any, request: Any, max_keys: Any) -> Any:
    """Whether a request's lengths fit its pages, the tree's slots and the plan."""
    count, prefix = tree.num_nodes[uint32(request)], prefix_of(tree, request)
    fits = int64(prefix) + int64(count) <= key_capacity(keys, request)
    fits = fits and int64(prefix) + int64(min(count, tree.max_path)) <= int64(max_keys)
    return fits and prefix >= 0 and count >= 0 and count <= tree.ancestor_bits.shape[1]


@device_routine
def blocks_of(tree: Any, request: Any) -> Any:
    """Blocks (int32) of the longest key range that a node of a valid request can have."""
    longest = uint32(prefix_of(tree, request)) + uint32(min(tree.num_nodes[uint32(request)], tree.max_path))
    return int32(uint32(longest + uint32(KEY_BLOCK - 1)) // uint32(KEY_BLOCK))


@device_routine
def tiles_of_request(tree: Any) -> Any:
    """Flat tiles (int32) a request."""
    rows = uint32(tree.ancestor_bits.shape[1]) * uint32(tree.heads)
    return int32(uint32(rows + uint32(TILE_ROWS - 1)) // uint32(TILE_ROWS))


@device_routine
def tiles_in_use(tree: Any, keys: Any, request: Any, max_keys: Any, parts: Any) -> Any:
    """Tiles (int32) of a request that have nodes in use, each of which counts as so many parts."""
    if request >= tree.num_nodes.shape[0] or not is_valid_request(tree, keys, request, max_keys):
        return int32(0)
    rows = uint32(tree.num_nodes[uint32(request)]) * uint32(tree.heads)
    height = uint32(uint32(TILE_ROWS) // uint32(parts))
    return int32(uint32(rows + uint32(height - uint32(1))) // height)


@device_routine
def tiles_in_wave(tree: Any, wave: Any, request: Any, used: Any, has_splits: Any, parts: Any) -> Any:
    """First tile (int32) of a request in a wave, and how many of the `used` ones there are.

    Without several splits there are no partial results, for which waves are: all is in the first one.
    """
    if not has_splits:
        return int32(0), int32(used if wave.first_tile == 0 else 0)
    before = int32(int32(wave.first_tile - int32(request) * tiles_of_request(tree)) * int32(parts))
    first = int32(max(int32(0), before))
    end = int32(min(used, int32(before + int32(wave.tiles) * int32(parts))))
    return first, int32(max(int32(0), int32(end - first)))


@device_routine
def tiles_and_blocks(tree: Any, keys: Any, request: Any, max_keys: Any) -> Any:
    """Tiles in use of a request, and blocks of its longest key range (int32); none of no request."""
    tiles = tiles_in_use(tree, keys, request, max_keys, 1)
    return tiles, blocks_of(tree, request) if tiles > 0 else int32(0)


@device_routine
def split_length(tree: Any, keys: Any, wave: Any, max_keys: Any) -> Any:
    """Blocks (int32) of a split: as planned, or what balances the work best; the warp takes part.

    A lane tries one number of splits for the longest key range. What it costs is the number of items that
    the busiest worker takes, each as long as a split.
    """
    if wave.split_blocks > 0:
        return int32(wave.split_blocks)
    batch = int32(tree.num_nodes.shape[0])
    lane = int32(cuda.threadIdx.x & 31)
    longest = uint32(1)
    for start in range(0, batch, LANES):
        _, blocks = tiles_and_blocks(tree, keys, int32(int32(start) + lane), max_keys)
        longest = uint32(max(longest, warp_max(uint32(blocks))))
    splits = uint32(lane + 1)
    length = uint32(uint32(longest + splits - uint32(1)) // splits)
    items = uint32(0)
    for start in range(0, batch, LANES):
        tiles, blocks = tiles_and_blocks(tree, keys, int32(int32(start) + lane), max_keys)
        for owner in range(LANES):
            longer = uint32(uint32(warp_broadcast(blocks, int32(owner))) + length - uint32(1))
            items += uint32(warp_broadcast(tiles, int32(owner))) * uint32(longer // length)
    rounds = uint32(uint32(items + uint32(wave.workers - 1)) // uint32(wave.workers))
    cost = uint32(min(rounds * uint32(length + uint32(ITEM_BLOCKS)), uint32((1 << 26) - 1)))
    if splits > uint32(wave.max_splits):
        cost = uint32((1 << 26) - 1)
    # The least cost, and of equal ones the least number of splits.
    key = uint32(uint32(~uint32(cost << uint32(5))) - uint32(lane))
    best = uint32(uint32(~warp_max(key)) & uint32(31))
    return int32(warp_broadcast(int32(length), int32(best)))


@device_routine
def splits_of(keys_seen: Any, split_blocks: Any) -> Any:
    """Count the splits (int32) of a row that sees so many keys; there is at least one."""
    blocks = uint32(uint32(max(keys_seen, 1)) + uint32(KEY_BLOCK - 1)) // uint32(KEY_BLOCK)
    return int32(uint32(blocks + uint32(split_blocks) - uint32(1)) // uint32(split_blocks))


@device_routine
def find_item(tree: Any, keys: Any, wave: Any, split_blocks: Any, max_keys: Any, index: Any) -> Any:
    """Request, tile of the request and split (int32) of an item; the warp takes part.

    Items are numbered request by request, then split by split, so that neighbours read the same keys. The
    request is -1 if there are not so many.
    """
    return find_part(tree, keys, wave, split_blocks, max_keys, 1, index)


@device_routine
def find_part(
    tree: Any, keys: Any, wave: Any, split_blocks: Any, max_keys: Any, parts: Any, index: Any
) -> Any:
    """Find an item as `find_item` does where each tile is so many items, of equal numbers of rows.

    Parts of tiles are numbered like tiles; of those without a node in use there is no item.
    """
    batch = int32(tree.num_nodes.shape[0])
    lane = int32(cuda.threadIdx.x & 31)
    before = int32(0)
    for start in range(0, batch, LANES):
        request = int32(int32(start) + lane)
        first, tiles, items = int32(0), int32(0), int32(0)
        used = tiles_in_use(tree, keys, request, max_keys, parts)
        if used > 0:
            blocks, length = uint32(blocks_of(tree, request)), uint32(split_blocks)
            splits = uint32(uint32(blocks + length - uint32(1)) // length)
            first, tiles = tiles_in_wave(tree, wave, request, used, splits > uint32(1), parts)
            items = int32(uint32(tiles) * splits)
        running = int32(warp_running_sum(items))
        is_beyond = warp_ballot(index < before + running)
        if is_beyond != uint32(0):
            owner = int32(cuda.ffs(int32(is_beyond)) - 1)
            inside = int32(index - before - warp_broadcast(int32(running - items), owner))
            tiles = int32(warp_broadcast(tiles, owner))
            split = int32(uint32(inside) // uint32(tiles))
            tile = int32(warp_broadcast(first, owner) + inside - split * tiles)
            return int32(int32(start) + owner), tile, split
        before = int32(before + warp_broadcast(running, int32(LANES - 1)))
    return int32(-1), int32(0), int32(0)


def most_keys(splits: SplitPlan) -> np.int32:
    """Return the most keys that a row may see, for its splits to be no more than planned."""
    most = np.iinfo(np.int32).max
    return np.int32(
        min(most, splits.split_blocks * KEY_BLOCK * splits.max_splits) if splits.split_blocks else most
    )


def tree_arguments(work: Work) -> Tree:
    """Return what a kernel is launched with."""
    return Tree(
        work.ancestor_bits,
        work.num_nodes,
        work.prefix_lengths,
        np.int32(work.max_path),
        np.int32(work.heads),
    )


def waves(work: Work, splits: SplitPlan, workers: int) -> Iterator[Wave]:
    """Yield the waves of a call, each as a kernel's arguments."""
    for first in range(0, work.tiles, splits.tiles_per_wave):
        tiles = min(splits.tiles_per_wave, work.tiles - first)
        yield Wave(*map(np.int32, (first, tiles, workers, splits.split_blocks, splits.max_splits)))
