"""The first item of each block of the Hopper kernel, found once for all layers that have the same lengths.

A block has nothing to do until its first item is found, which takes 5 to 7 µs, most of them for instructions
to come. All layers of a model attend with the same trees and lengths, and so have the same items. What is
written here is believed only until the kernel's own warp has found the first item (`hopper_items`), or, for a
block that has no other, has seen that all that items follow from is as it was. Where it is not, as lengths
have changed, time is lost, but results are right.
"""

from __future__ import annotations

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, uint32
from numba_ddtree.device.warp import LANES
from numba_ddtree.launch import Kernel
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.bands import may_have_bands
from numba_ddtree.tree_attention.hopper import ARCHITECTURE, THREADS, no_kernel, workers
from numba_ddtree.tree_attention.hopper_foretold import (
    FORETOLD_WORDS,
    place_of_request,
    ways_of,
    words_of_request,
)
from numba_ddtree.tree_attention.hopper_items import (
    begin_sharing,
    describe_shared,
    is_folded_in,
    is_scheduler,
    next_item,
)
from numba_ddtree.tree_attention.hopper_state import (
    ALIGNMENT,
    BATCH_AT,
    IS_ONLY,
    ITEM_WORDS,
    ITEMS,
    REQUEST,
    REST,
    SHARED_BYTES,
    SIDE,
    WAS_MAX_PATH,
    WAS_REST,
    WAS_SIDE,
    WAS_WAYS,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import KEY_SIGNATURE, Keys, key_arguments
from numba_ddtree.tree_attention.shares import SHARE_SIGNATURE, Share, share_arguments
from numba_ddtree.tree_attention.slot_blocks import way_to_read
from numba_ddtree.tree_attention.split_items import TREE_SIGNATURE, Tree, most_keys, tree_arguments
from numba_ddtree.tree_attention.work import SplitPlan, Work

if not SIMULATED:
    from numba_ddtree.device.mbarriers import fresh_lane, fresh_shared_address_of


@device_routine
def write_requests(tree, keys, max_keys, items):  # type: ignore[no-untyped-def]
    """Write what items depend on of each request, by the warp that finds items."""
    request = fresh_lane()
    if request == uint32(0):
        items[BATCH_AT] = int32(tree.num_nodes.shape[0])
    while int32(request) < int32(tree.num_nodes.shape[0]):
        place = place_of_request(request)
        prefix, nodes, tiles = words_of_request(tree, keys, max_keys, int32(request))
        items[place], items[place + uint32(1)], items[place + uint32(2)] = prefix, nodes, tiles
        request = uint32(request + uint32(LANES))


@device_routine
def write_first_item(s_words, keys, tree, share, max_keys, sees_prefix, items, has_bands):  # type: ignore[no-untyped-def]
    """Write what the block's first item is, by the warp that finds items; request -1 for none.

    An item without shared blocks counts as none: whether it is one depends on its paths.
    """
    first, whole, shared_length = begin_sharing(s_words, keys, tree, share, max_keys, has_bands)
    request, tile, split, end, slot, length, offset, index = next_item(
        s_words, keys, tree, share, max_keys, has_bands, first, whole, shared_length, int32(cuda.blockIdx.x)
    )
    next_request, _, _, _, _, _, _, _ = next_item(
        s_words, keys, tree, share, max_keys, has_bands, first, whole, shared_length, index
    )
    base = fresh_shared_address_of(s_words)
    item = uint32(base + uint32(4 * ITEMS))
    shared = describe_shared(
        base, uint32(0), tree, request, tile, split, length, offset, slot, is_folded_in(share, slot),
        sees_prefix,
    )  # fmt: skip
    lane = fresh_lane()
    if lane == uint32(0):
        set_word(item, IS_ONLY, int32(next_request < 0 and split + int32(1) == end))
        set_word(item, WAS_REST, word_at(base, REST))
        set_word(item, WAS_SIDE, word_at(base, SIDE))
        set_word(item, WAS_MAX_PATH, tree.max_path)
        set_word(item, WAS_WAYS, ways_of(tree, sees_prefix))
    cuda.syncwarp()
    if lane < uint32(ITEM_WORDS):
        word = int32(0)
        if uint32(uint32(FORETOLD_WORDS) >> lane) & uint32(1) != uint32(0):
            word = word_at(item, lane)
        if lane == uint32(REQUEST) and shared == 0:
            word = int32(-1)
        items[uint32(uint32(cuda.blockIdx.x) * uint32(ITEM_WORDS) + lane)] = word


def hopper_first_items_kernel(  # type: ignore[no-untyped-def]
    ckv,  # to max_keys as `Keys`, `Tree` and `Share` have them
    ckv_stride,
    ckv_page_stride,
    kpe,
    kpe_stride,
    kpe_page_stride,
    page_size,
    num_pages,
    page_table,
    page_starts,
    table_stride,
    ancestor_bits,
    num_nodes,
    prefix_lengths,
    max_path,
    heads,
    workers,
    rest_tiles,
    split_blocks,
    max_splits,
    max_keys,  # int32
    bands,  # int32: whether the rest may be cut into bands
    sees_prefix,  # int32: whether nodes see the prefix
    by_slot,  # int32: how the tree's keys are read: see `split_items`
    items,  # int32 [BATCH_AT + 1 + B * REQUEST_WORDS]
):
    """Write the first item of each block of a launch of the Hopper kernel, by a block each."""
    keys = Keys(
        ckv, ckv_stride, ckv_page_stride, kpe, kpe_stride, kpe_page_stride, page_size, num_pages, page_table,
        page_starts, table_stride,
    )  # fmt: skip
    tree = Tree(ancestor_bits, num_nodes, prefix_lengths, max_path, heads, by_slot)
    share = Share(workers, rest_tiles, split_blocks, max_splits, 2)
    s_words = cuda.shared.array(0, int32, alignment=ALIGNMENT)
    if not is_scheduler():
        return
    if cuda.blockIdx.x == 0:
        write_requests(tree, keys, max_keys, items)
    if bands != 0:
        write_first_item(s_words, keys, tree, share, max_keys, sees_prefix, items, True)
    else:
        write_first_item(s_words, keys, tree, share, max_keys, sees_prefix, items, False)


FIND_FIRST_ITEMS = Kernel(
    no_kernel("hopper_first_items_kernel") if SIMULATED else hopper_first_items_kernel,
    (f"void({KEY_SIGNATURE}, {TREE_SIGNATURE}, {SHARE_SIGNATURE}, int32, int32, int32, int32, int32[::1])",),
    THREADS,
    architecture=ARCHITECTURE,
)


def launch_first_items(transfer: Transfer, work: Work, splits: SplitPlan) -> None:
    """Launch the kernel, which writes to what the plan of splits has for first items."""
    share = share_arguments(splits, workers())
    blocks = int(share[0])
    transfer.launch(
        FIND_FIRST_ITEMS,
        blocks,
        *key_arguments(work.keys),
        *tree_arguments(work),
        *share,
        most_keys(splits),
        may_have_bands(splits, work.tiles, blocks),
        np.int32(work.sees_prefix),
        way_to_read(work, splits),
        splits.first_items,
        shared_bytes=SHARED_BYTES,
    )
