"""Items of work of the kernels of `mma.sync`, and which blocks of keys an item's rows see.

An item is some rows of a tile against one split of their keys. First come the blocks that lie in the prefix,
which all rows see. Then, for each node of the item, come the blocks, one or two, that hold the rest of the
prefix and the node's own path, each key in the slot of its position, gathered from the tree's rows of the
cache. In the prefix, -1 stands for the node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba_ddtree.cuda_target import device_routine, int32, int64, uint32
from numba_ddtree.tree_attention.key_rows import ABSENT, path_length, path_slot, row_addresses
from numba_ddtree.tree_attention.split_items import prefix_of
from numba_ddtree.tree_attention.work import KEY_BLOCK

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
    rows = int32(min(int32(height), int32(tree.num_nodes[uint32(request)] * tree.heads - first_row)))
    begin = int32(split * length)
    end = int32(min(int64(begin) + int64(length), int64(MOST_BLOCKS)))
    return Item(request, split, first_row, rows, prefix, int32(0) if sees_prefix else prefix, begin, end)


@device_routine
def count_keys(thread, height, tree, item, s_seen, s_faults):  # type: ignore[no-untyped-def]
    """Write how many keys each of `height` rows sees, 0 for those after the last; too many are a fault."""
    if thread < uint32(height):
        seen, fault = int32(0), int32(0)
        if int32(thread) < item.rows:
            node = uint32(uint32(item.first_row) + thread) // uint32(tree.heads)
            length = path_length(tree.ancestor_bits, item.request, node)
            fault = int32(length > tree.max_path)
            seen = int32(item.prefix + min(length, tree.max_path))
        s_seen[thread] = seen
        s_faults[thread] = fault


@device_routine
def first_path_block(item):  # type: ignore[no-untyped-def]
    """Block (int32) of the first key that is not in a block of the prefix alone."""
    return int32(uint32(item.prefix) // uint32(KEY_BLOCK))


@device_routine
def first_block(item, tree, s_seen, sees_prefix):  # type: ignore[no-untyped-def]
    """First block of an item and its node, as `following` gives the next ones."""
    start = item.begin if sees_prefix else int32(max(item.begin, first_path_block(item)))
    return following(item, tree, s_seen, int32(start - 1), int32(-1))


@device_routine
def following(item, tree, s_seen, block, node):  # type: ignore[no-untyped-def]
    """Block and node after a block and a node, -1 in the prefix; the block is -1 after the last one.

    Path blocks come node by node, those within the split alone.
    """
    block = int32(block + 1)
    path_block = first_path_block(item)
    last_node = int32(uint32(item.first_row + item.rows - int32(1)) // uint32(tree.heads))
    if node < 0:
        if block < min(item.end, path_block):
            return block, node
        node = int32(uint32(item.first_row) // uint32(tree.heads))
        block = int32(max(path_block, item.begin))
    while node <= last_node:
        if block < item.end and block * int32(KEY_BLOCK) < seen_by(item, tree, s_seen, node):
            return block, node
        node = int32(node + 1)
        block = int32(max(path_block, item.begin))
    return int32(-1), node


@device_routine
def seen_by(item, tree, s_seen, node):  # type: ignore[no-untyped-def]
    """Keys (int32) that a node of the item sees; none in the prefix's blocks, where -1 stands for it."""
    if node < 0:
        return int32(0)
    return int32(s_seen[uint32(max(int32(0), int32(node * int32(tree.heads) - item.first_row)))])


@device_routine
def row_end(item, tree, s_seen, block, node, row):  # type: ignore[no-untyped-def]
    """Column (int32) of a block after the last one that a row sees; 0 for a row that takes no part."""
    owner = int32(uint32(uint32(item.first_row) + row) // uint32(tree.heads))
    end = int32(s_seen[row] - block * int32(KEY_BLOCK))
    return end if node < 0 or owner == node else int32(0)


@device_routine
def look_up(row, keys, tree, item, block, node, s_seen, s_addresses, s_faults):  # type: ignore[no-untyped-def]
    """Write the addresses of row `row` of a block of keys, `ABSENT` for one that is not to be read.

    Of the tree's keys those on the path of `node` are there.
    """
    position = int32(block * int32(KEY_BLOCK) + int32(row))
    if position >= item.prefix:
        if position < seen_by(item, tree, s_seen, node):
            slot = path_slot(tree.ancestor_bits, item.request, node, int32(position - item.prefix))
            position = int32(item.prefix + slot)
            if uint32(slot) >= uint32(tree.num_nodes[uint32(item.request)]):
                position = int32(-1)
                spoil(item, tree, node, s_faults)
        else:
            position = int32(-1)
    latent, rotary = ABSENT, ABSENT
    if position >= 0:
        latent, rotary = row_addresses(keys, item.request, position)
        if latent == ABSENT:
            spoil(item, tree, node, s_faults)
    s_addresses[uint32(uint32(2) * row)] = latent
    s_addresses[uint32(uint32(2) * row + uint32(1))] = rotary


@device_routine
def spoil(item, tree, node, s_faults):  # type: ignore[no-untyped-def]
    """Note that a key of a node was not to be found; in the prefix, of all rows."""
    begin = int32(node * tree.heads - item.first_row) if node >= 0 else int32(0)
    end = int32(begin + tree.heads) if node >= 0 else int32(item.rows)
    for row in range(max(begin, int32(0)), min(end, int32(item.rows))):
        s_faults[uint32(row)] = 1
