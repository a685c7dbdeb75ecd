"""How the keys of several nodes' paths share a block: in groups of 16, the terms of one product.

A block of 64 keys by position has four groups. Those that the prefix fills are the same for every node; those
with path keys are a node's own, and most nodes have one or two. So a gathered block has the common groups,
then the own groups of one node, of the next and so on, and each row sees the common ones and its node's. A
key keeps its place in its group, and groups their order: what a row does not see is multiplied by 0, so that
its sums have the same bits as if the block were its alone.
"""

from __future__ import annotations

from numba_ddtree.cuda_target import device_routine, int32, uint32, uint64
from numba_ddtree.tree_attention.work import KEY_BLOCK

GROUP = 16
GROUPS = KEY_BLOCK // GROUP


@device_routine
def group_shape(prefix, block, longest):  # type: ignore[no-untyped-def]
    """How a block of keys is packed where the longest of the tile's rows sees so many: three int32.

    Groups of the block that the prefix fills and that all nodes share, groups that each node has of its own,
    and nodes that go into one gathered block together.
    """
    ahead = int32(prefix - block * int32(KEY_BLOCK))
    common = int32(uint32(max(int32(0), min(ahead, int32(KEY_BLOCK - 1)))) // uint32(GROUP))
    last = int32(max(int32(1), min(int32(KEY_BLOCK), int32(longest - block * int32(KEY_BLOCK)))))
    groups = int32(uint32(last + int32(GROUP - 1)) // uint32(GROUP))
    own = int32(max(int32(1), int32(groups - common)))
    count = int32(uint32(int32(GROUPS) - common) // uint32(own))
    return common, own, count


@device_routine
def nodes_of(first_row, rows, heads):  # type: ignore[no-untyped-def]
    """First node of a tile's rows, and how many."""
    first = uint32(first_row) // uint32(heads)
    last = uint32(first_row + rows - int32(1)) // uint32(heads)
    return int32(first), int32(int32(last) - int32(first) + int32(1))


@device_routine
def place_of_slot(slot, common, own):  # type: ignore[no-untyped-def]
    """Place (int32) of the node that a slot of a gathered block belongs to; -1 in the common groups."""
    group = int32(uint32(slot) // uint32(GROUP))
    return int32(uint32(group - common) // uint32(own)) if group >= common else int32(-1)


@device_routine
def low_bits(count):  # type: ignore[no-untyped-def]
    """Word (uint64) of so many ones from the lowest bit on, up to all 64."""
    if count <= 0:
        return uint64(0)
    return uint64(
        uint64(0xFFFFFFFFFFFFFFFF) >> uint64(int32(KEY_BLOCK) - int32(min(count, int32(KEY_BLOCK))))
    )


@device_routine
def visible_columns(block, common, own, place, count, keys_seen, first_seen):  # type: ignore[no-untyped-def]
    """Bits (uint64) of a gathered block's columns that a row sees.

    `place` is that of the row's node among the `count` nodes of the block; the row sees the keys from
    `first_seen` to ``keys_seen - 1``. Of a row whose node is not in the block, there are none.
    """
    if place < 0 or place >= count:
        return uint64(0)
    base = int32(block * int32(KEY_BLOCK))
    end = int32(min(int32(KEY_BLOCK), int32(keys_seen - base)))
    begin = int32(max(int32(0), int32(first_seen - base)))
    edge = int32(common * int32(GROUP))
    moved = int32(own * int32(GROUP) * place)
    lower = uint64(low_bits(int32(min(end, edge))) & ~low_bits(begin))
    start = int32(max(begin, edge))
    upper = uint64(0)
    if end > start:
        upper = uint64(low_bits(int32(end + moved)) & ~low_bits(int32(start + moved)))
    return uint64(lower | upper)
