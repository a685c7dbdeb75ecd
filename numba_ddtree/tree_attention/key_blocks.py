"""Items of work of the kernels of `mma.sync`, and which blocks of keys an item's rows see.

An item is some rows of a tile against one split of their keys. First come the blocks that lie in the prefix,
which all rows see. Then come those with the rest of the prefix and a node's path, one or two, gathered from
the tree's rows of the cache; nodes whose paths fit together share them, as `path_blocks` has it. Of a
gathered block, `node` is the first node; in the prefix it is -1.

What a function here needs of the item's rows, it takes as the `State` of `group_steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba_ddtree.cuda_target import device_routine, int32, int64, uint32
from numba_ddtree.device.warp import warp_max
from numba_ddtree.tree_attention.key_rows import ABSENT, path_length, path_slot, row_addresses
from numba_ddtree.tree_attention.path_blocks import GROUP, group_shape, place_of_slot, visible_columns
from numba_ddtree.tree_attention.split_items import prefix_of
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

MOST_BLOCKS = 1 << 26  # no split has a block after these


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
def item_of(tree, request, part, height, split, length, sees_prefix):  # type: ignore[no-untyped-def]
    """Return the `Item` of a valid request's part number `part`, of `height` rows, and a split."""
    prefix = prefix_of(tree, request)
    first_row = int32(part * int32(height))
    rows = int32(tree.num_nodes[uint32(request)] * tree.heads - first_row)
    rows = int32(max(int32(0), min(int32(height), rows)))
    begin = int32(split * length)
    end = int32(min(int64(begin) + int64(length), int64(MOST_BLOCKS)))
    return Item(request, split, first_row, rows, prefix, int32(0) if sees_prefix else prefix, begin, end)


@device_routine
def count_keys(thread, height, tree, item, state):  # type: ignore[no-untyped-def]
    """Write how many keys each of `height` rows sees, 0 for those after the last; too many are a fault.

    By the warps of a tile's rows, which also write how many their longest row sees.
    """
    if thread < uint32(TILE_ROWS):
        seen, fault = int32(0), int32(0)
        if int32(thread) < item.rows:
            node = uint32(uint32(item.first_row) + thread) // uint32(tree.heads)
            length = path_length(tree.ancestor_bits, item.request, node)
            most = min(tree.max_path, tree.num_nodes[uint32(item.request)])
            fault = int32(length > most)
            seen = int32(item.prefix + min(length, most))
        if thread < uint32(height):
            state.seen[thread] = seen
            state.faults[thread] = fault
        longest = warp_max(uint32(seen))
        if uint32(thread & uint32(31)) == uint32(0):
            state.longest[uint32(thread >> uint32(5))] = int32(longest)


@device_routine
def longest_of(state):  # type: ignore[no-untyped-def]
    """Keys (int32) that the longest of an item's rows sees."""
    return int32(max(state.longest[0], state.longest[1]))


@device_routine
def first_path_block(item):  # type: ignore[no-untyped-def]
    """Block (int32) of the first key that is not in a block of the prefix alone."""
    return int32(uint32(item.prefix) // uint32(KEY_BLOCK))


@device_routine
def first_node_of(item, tree):  # type: ignore[no-untyped-def]
    """Node (int32) of an item's first row."""
    return int32(uint32(item.first_row) // uint32(tree.heads))


@device_routine
def last_node_of(item, tree):  # type: ignore[no-untyped-def]
    """Node (int32) of an item's last row."""
    return int32(uint32(item.first_row + item.rows - int32(1)) // uint32(tree.heads))


@device_routine
def first_block(item, tree, state, sees_prefix):  # type: ignore[no-untyped-def]
    """First block of an item and its node, as `following` gives the next ones."""
    if item.rows == 0:
        return int32(-1), int32(-1)
    start = item.begin if sees_prefix else int32(max(item.begin, first_path_block(item)))
    return following(item, tree, state, int32(start - 1), int32(-1))


@device_routine
def following(item, tree, state, block, node):  # type: ignore[no-untyped-def]
    """Block and node after a block and a node, -1 in the prefix; the block is -1 after the last one.

    A block by position is gathered for all nodes before the next one is.
    """
    path_block = first_path_block(item)
    if node < 0:
        block = int32(block + 1)
        if block < min(item.end, path_block):
            return block, node
        block = int32(max(path_block, item.begin))
        node = first_node_of(item, tree)
    else:
        _, _, count = group_shape(item.prefix, block, longest_of(state))
        node = int32(node + count)
        if node > last_node_of(item, tree):
            block = int32(block + 1)
            node = first_node_of(item, tree)
    if block >= item.end or block * int32(KEY_BLOCK) >= longest_of(state):
        block = int32(-1)
    return block, node


@device_routine
def has_rows(first, count, item, tree, state, block, node):  # type: ignore[no-untyped-def]
    """Whether any of `count` rows of an item takes part in a block; in the prefix, all do."""
    if node < 0:
        return True
    _, _, nodes = group_shape(item.prefix, block, longest_of(state))
    begin = int32(node * int32(tree.heads) - item.first_row)
    end = int32(begin + nodes * int32(tree.heads))
    return begin < int32(first) + int32(count) and end > int32(first)


@device_routine
def columns_of(item, tree, state, block, node, row):  # type: ignore[no-untyped-def]
    """Bits (uint64) of a gathered block's columns that a row sees, none if it takes no part."""
    common, own, count = group_shape(item.prefix, block, longest_of(state))
    owner = int32(uint32(uint32(item.first_row) + row) // uint32(tree.heads))
    place = int32(owner - node)
    return visible_columns(block, common, own, place, count, state.seen[row], item.first_seen)


@device_routine
def look_up(row, keys, tree, item, block, node, state, s_addresses):  # type: ignore[no-untyped-def]
    """Write the addresses of row `row` of a block of keys, `ABSENT` for one that is not to be read.

    Of the tree's keys those on the paths of the block's nodes are there.
    """
    position = int32(block * int32(KEY_BLOCK) + int32(row))
    owner = int32(-1)  # all nodes
    if node >= 0:
        common, own, count = group_shape(item.prefix, block, longest_of(state))
        place = place_of_slot(row, common, own)
        if place >= 0:
            owner = int32(node + place)
            position = int32(position - place * own * int32(GROUP))
            if place >= count or position >= seen_by(item, tree, state, owner):
                position = int32(-1)
    if position >= item.prefix:
        slot = path_slot(tree.ancestor_bits, item.request, owner, int32(position - item.prefix))
        position = int32(item.prefix + slot)
        if uint32(slot) >= uint32(tree.num_nodes[uint32(item.request)]):
            position = int32(-1)
            spoil(item, tree, owner, state.faults)
    latent, rotary = ABSENT, ABSENT
    if position >= item.first_seen:
        latent, rotary = row_addresses(keys, item.request, position)
        if latent == ABSENT:
            spoil(item, tree, owner, state.faults)
    s_addresses[uint32(uint32(2) * row)] = latent
    s_addresses[uint32(uint32(2) * row + uint32(1))] = rotary


@device_routine
def seen_by(item, tree, state, node):  # type: ignore[no-untyped-def]
    """Keys (int32) that a node sees, none if it is not the item's."""
    if node > last_node_of(item, tree):
        return int32(0)
    return int32(state.seen[uint32(max(int32(0), int32(node * int32(tree.heads) - item.first_row)))])


@device_routine
def spoil(item, tree, node, s_faults):  # type: ignore[no-untyped-def]
    """Note that a key of a node was not to be found; of all rows if the node is -1."""
    begin = int32(node * tree.heads - item.first_row) if node >= 0 else int32(0)
    end = int32(begin + tree.heads) if node >= 0 else int32(item.rows)
    for row in range(max(begin, int32(0)), min(end, int32(item.rows))):
        s_faults[uint32(row)] = 1
