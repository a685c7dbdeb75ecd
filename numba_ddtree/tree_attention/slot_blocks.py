"""Blocks of the tree's keys as they lie, by slot, of which each row sees its own path.

Where a tile has several nodes, the keys of their paths take as many gathered blocks as `path_blocks` packs
them into: up to one for each node. The tree's keys, each once, may be fewer: they follow the prefix, so that
blocks of both are read like any others, and a mask does the rest. But a key's place among those that a row
sees depends on the tree then, and so do the row's last bits. So this is for lengths of splits that the device
chooses, with which they depend on other requests as well.

All blocks come by tensor copies, where a page holds whole blocks, and none has to be gathered: so even a
single node's path, which is a block or two, is read like that where the tree takes no more pairs of blocks.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from numba_ddtree.cuda_target import device_routine, int32, int64, uint32, uint64
from numba_ddtree.device.memory import load_flat
from numba_ddtree.tree_attention.path_blocks import GROUP, GROUPS
from numba_ddtree.tree_attention.shares import fresh_word
from numba_ddtree.tree_attention.split_items import BY_PATH, BY_SLOT, BY_SLOT_IN_ONE_PAIR, BY_SLOT_IN_ROWS
from numba_ddtree.tree_attention.tensor_maps import takes_boxes
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS, SplitPlan, Work

ALL_SLOTS = 0xFFFFFFFF  # of a word


def way_to_read(work: Work, splits: SplitPlan) -> np.int32:
    """Return how the Hopper kernel reads the tree's keys: `BY_PATH` to `BY_SLOT_IN_ONE_PAIR` (int32)."""
    if splits.split_blocks != 0 or not work.sees_prefix:
        return np.int32(BY_PATH)
    in_boxes = takes_boxes(work.keys)
    if blocks_by_slot(work.slots) < blocks_by_path(work.slots, work.heads, work.max_path):
        return np.int32(BY_SLOT if in_boxes else BY_SLOT_IN_ROWS)
    return np.int32(BY_SLOT_IN_ONE_PAIR if in_boxes else BY_PATH)


@cache
def blocks_by_slot(slots: int) -> float:
    """Return the mean number, over all prefixes, of blocks behind the last whole one of a prefix."""
    return sum(-(-(ahead + slots) // KEY_BLOCK) for ahead in range(KEY_BLOCK)) / KEY_BLOCK


@cache
def blocks_by_path(slots: int, heads: int, max_path: int) -> float:
    """Return the same of gathered blocks, for a full tile's paths of `max_path` slots each."""
    nodes = min(slots, -(-TILE_ROWS // heads))
    blocks = 0
    for ahead in range(KEY_BLOCK):
        groups, common = -(-(ahead + max_path) // GROUP), ahead // GROUP
        for first in range(0, groups, GROUPS):
            shared = max(0, common - first)
            own = max(1, min(GROUPS, groups - first) - shared)
            blocks += -(-nodes // ((GROUPS - shared) // own))
    return blocks / KEY_BLOCK


@device_routine
def visible_slots(ancestor_bits, request, node, first):  # type: ignore[no-untyped-def]
    """Bits (uint64) of the 64 slots from `first` on that a node sees; those before slot 0 are the prefix.

    Of a node that the tree has no room for, none. In a loop, for it to take few registers.
    """
    bits = uint64(0)
    if uint32(node) < uint32(ancestor_bits.shape[1]):
        words = int32(ancestor_bits.shape[2])
        row = uint32(uint32(request) * uint32(ancestor_bits.shape[1]) + uint32(node))
        # Words of 32 slots, the first of which may begin before slot `first`, and the third end behind.
        word, place = int32(int32(first) >> int32(5)), int32(-int32(int32(first) & int32(31)))
        while place < int32(KEY_BLOCK):
            seen = uint64(ALL_SLOTS) if word < int32(0) else uint64(0)
            if uint32(word) < uint32(words):
                seen = uint64(load_flat(ancestor_bits, int64(int64(row) * int64(words) + int64(word))))
            moved = uint64(seen >> uint64(-place)) if place < int32(0) else uint64(seen << uint64(place))
            bits = uint64(bits | moved)
            word, place = int32(word + int32(1)), fresh_word(int32(place + int32(32)))
    return bits
