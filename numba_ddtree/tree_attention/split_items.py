"""What there is to do for each request of a batch, from the lengths on the device: tiles, blocks, splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import device_routine, int32, int64, uint32
from numba_ddtree.tree_attention.key_rows import key_capacity
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS, SplitPlan, Work

# How the tree's keys are read: gathered by paths (`path_blocks`); as they lie (`slot_blocks`), the last block
# by rows, or by tensor copies as all others; or the last of these where that takes no more pairs of blocks.
BY_PATH, BY_SLOT_IN_ROWS, BY_SLOT, BY_SLOT_IN_ONE_PAIR = range(4)
TREE_SIGNATURE = "uint32[:, :, ::1], int32[::1], int32[::1], int32, int32"


class Tree(NamedTuple):
    """A batch of trees, as kernels take it: in the order of `TREE_SIGNATURE`.

    `max_path` and `heads` are int32; `prefix_lengths` may be empty, for 0. `by_slot`, an int32 that is not in
    the signature, says whether the tree's keys are read as they lie: `BY_PATH` to `BY_SLOT_IN_ONE_PAIR`.
    """

    ancestor_bits: Any
    num_nodes: Any
    prefix_lengths: Any
    max_path: Any
    heads: Any
    by_slot: Any


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
def is_by_slot(tree: Any, prefix: Any, count: Any) -> Any:
    """Whether a request's tree of `count` slots is read as it lies.

    `BY_SLOT_IN_ONE_PAIR` that is where its keys end in the pair of blocks in which the prefix does, as there
    is one for paths anyway.
    """
    if tree.by_slot != BY_SLOT_IN_ONE_PAIR:
        return tree.by_slot != BY_PATH
    ahead = uint32(uint32(prefix) & uint32(2 * KEY_BLOCK - 1))
    return uint32(ahead + uint32(count)) <= uint32(2 * KEY_BLOCK)


@device_routine
def blocks_of(tree: Any, request: Any) -> Any:
    """Blocks (int32) of the longest key range that a node of a valid request can have."""
    prefix, count = prefix_of(tree, request), tree.num_nodes[uint32(request)]
    if not is_by_slot(tree, prefix, count):
        count = min(count, tree.max_path)
    longest = uint32(prefix) + uint32(count)
    return int32(uint32(longest + uint32(KEY_BLOCK - 1)) // uint32(KEY_BLOCK))


@device_routine
def tiles_in_use(tree: Any, keys: Any, request: Any, max_keys: Any) -> Any:
    """Tiles (int32) of a request that have nodes in use; none of no request."""
    if request >= tree.num_nodes.shape[0] or not is_valid_request(tree, keys, request, max_keys):
        return int32(0)
    rows = uint32(tree.num_nodes[uint32(request)]) * uint32(tree.heads)
    return int32(uint32(rows + uint32(TILE_ROWS - 1)) // uint32(TILE_ROWS))


@device_routine
def splits_of(keys_seen: Any, split_blocks: Any, offset: Any) -> Any:
    """Count the splits (int32) of a row that sees so many keys; there is at least one.

    The first has `offset` blocks less than the others; see `bands`.
    """
    blocks = uint32(uint32(max(keys_seen, 1)) + uint32(KEY_BLOCK - 1)) // uint32(KEY_BLOCK)
    blocks = uint32(blocks + uint32(offset))
    return int32(uint32(blocks + uint32(split_blocks) - uint32(1)) // uint32(split_blocks))


@device_routine
def range_of_split(split: Any, split_blocks: Any, offset: Any) -> Any:
    """First block of a split, and the one after its last (int32), if the key range goes on."""
    begin = int32(split * split_blocks - offset)
    return int32(max(int32(0), begin)), int32(begin + split_blocks)


def most_keys(splits: SplitPlan) -> np.int32:
    """Return the most keys that a row may see, for its splits to be no more than planned."""
    most = np.iinfo(np.int32).max
    return np.int32(
        min(most, splits.split_blocks * KEY_BLOCK * splits.max_splits) if splits.split_blocks else most
    )


def tree_arguments(work: Work) -> tuple[Any, ...]:
    """Return what a kernel is launched with: all but `by_slot`."""
    return (
        work.ancestor_bits,
        work.num_nodes,
        work.prefix_lengths,
        np.int32(work.max_path),
        np.int32(work.heads),
    )
