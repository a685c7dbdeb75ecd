"""The producing warps of the Hopper kernel: one finds items, one loads queries, two load keys."""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32, uint64
from numba_ddtree.device.warp import warp_max
from numba_ddtree.tree_attention.hopper_state import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK_BYTES,
    COMMON,
    COUNT,
    FAULT,
    FIRST,
    FIRST_NODE,
    FIRST_ROW,
    GATHER_BEGIN,
    GATHERED,
    IN_BOXES,
    IN_ROWS,
    ITEM_FREE,
    ITEM_FULL,
    ITEM_WORDS,
    ITEMS,
    KEYS_AT,
    KEYS_FULL,
    KIND,
    LATENT_CHUNKS,
    LEFT_FREE,
    LENGTH,
    LONGEST,
    NODES,
    OF_PATHS,
    OWN,
    PREFIX,
    QUERIES_AT,
    QUERIES_FREE,
    QUERIES_FULL,
    RECORD_WORDS,
    RECORDS,
    REQUEST,
    RIGHT_FREE,
    ROTARY_FREE,
    ROW_HIGH,
    ROW_LOW,
    ROWS,
    SEEN,
    SHARED,
    SHARED_BEGIN,
    SPLIT,
    STATE_AT,
    STREAM,
    WAVE_ROW,
    first_query,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import (
    ABSENT,
    path_length,
    path_slot,
    row_addresses,
)
from numba_ddtree.tree_attention.path_blocks import (
    GROUP,
    group_shape,
    nodes_of,
)
from numba_ddtree.tree_attention.row_copies import load_row
from numba_ddtree.tree_attention.split_items import (
    find_item,
    prefix_of,
    split_length,
    tiles_of_request,
)
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.mbarriers import (
        arrive,
        arrive_after_copies,
        arrive_and_expect,
        fresh_lane,
        fresh_shared_address_of,
        fresh_word,
        make_handover,
        wait_for,
    )
    from numba_ddtree.device.ptx import (
        copy_async,
    )
    from numba_ddtree.device.tensor_copies import (
        acquire_map,
        copy_box,
    )
    from numba_ddtree.device.tile import (
        unit_address,
    )

    _, await_record = make_handover(8, 64)


@device_routine
def describe_item(base, slot, tree, wave, request, tile, split, length, sees_prefix):  # type: ignore[no-untyped-def]
    """Write what an item is, by a warp; return its number (int32) of blocks.

    Request -1 is the end of all items.
    """
    lane = fresh_lane()
    item = uint32(base + uint32(4 * ITEMS) + slot * uint32(4 * ITEM_WORDS))
    seen = uint32(base + uint32(4 * SEEN) + slot * uint32(4 * TILE_ROWS))
    is_writer = lane == uint32(0)
    if is_writer:
        set_word(item, REQUEST, request)
        set_word(item, ROWS, 0)
        set_word(item, FIRST_ROW, 0)
        set_word(item, ROW_LOW, 0)
        set_word(item, ROW_HIGH, 0)
        set_word(item, FAULT, 0)
    if request < 0:
        return int32(1)
    prefix = prefix_of(tree, request)
    first_row = int32(tile * int32(TILE_ROWS))
    rows = int32(tree.num_nodes[uint32(request)] * tree.heads - first_row)
    rows = int32(min(int32(TILE_ROWS), rows))
    longest = uint32(0)
    for half in range(uint32(2)):
        row = uint32(lane + uint32(half) * uint32(32))
        keys_seen = int32(0)
        if int32(row) < rows:
            node = uint32(uint32(first_row) + row) // uint32(tree.heads)
            keys_seen = int32(prefix + path_length(tree.ancestor_bits, request, node))
        set_word(seen, row, keys_seen)
        longest = uint32(max(longest, uint32(keys_seen)))
    longest = warp_max(longest)
    begin = int32(split * length)
    path_begin = int32(uint32(prefix) // uint32(KEY_BLOCK))
    end = int32(uint32(longest + uint32(KEY_BLOCK - 1)) // uint32(KEY_BLOCK))
    end = int32(min(int64(end), int64(begin) + int64(length)))
    shared = int32(0)
    if sees_prefix != 0:
        shared = int32(max(int32(0), int32(min(end, path_begin) - begin)))
    first_node, nodes = nodes_of(first_row, rows, tree.heads)
    stream = shared
    gather_begin = int32(max(path_begin, begin))
    for path_block in range(gather_begin, end):
        _, _, count = group_shape(prefix, int32(path_block), int32(longest))
        stream = int32(stream + int32(uint32(nodes + count - int32(1)) // uint32(count)))
    if is_writer:
        set_word(item, SPLIT, split)
        set_word(item, FIRST_ROW, first_row)
        set_word(item, ROWS, rows)
        set_word(item, PREFIX, prefix)
        set_word(item, SHARED_BEGIN, begin)
        set_word(item, SHARED, shared)
        set_word(item, STREAM, stream)
        set_word(item, LONGEST, longest)
        set_word(item, GATHER_BEGIN, gather_begin)
        set_word(item, LENGTH, length)
        set_word(item, FIRST_NODE, first_node)
        set_word(item, NODES, nodes)
        request_rows = int64(tree.ancestor_bits.shape[1]) * int64(tree.heads)
        row_64 = int64(int64(request) * request_rows + int64(first_row))
        set_word(item, ROW_LOW, int32(row_64 & int64(0xFFFFFFFF)))
        set_word(item, ROW_HIGH, int32(row_64 >> int64(32)))
        flat = int32(request * tiles_of_request(tree) + tile - wave.first_tile)
        set_word(item, WAVE_ROW, int32(flat * int32(TILE_ROWS)))
    return int32(max(stream, int32(split == 0)))


@device_routine
def schedule(s_words, keys, tree, wave, max_keys, sees_prefix):  # type: ignore[no-untyped-def]
    """Find this block's items one after the other, and describe them for the other warps."""
    chosen = split_length(tree, keys, wave, max_keys)
    index = int32(cuda.blockIdx.x)
    number = uint32(0)
    request = int32(0)
    while request >= 0:
        length = fresh_word(chosen)
        request, tile, split = find_item(tree, keys, wave, length, max_keys, index)
        index = int32(index + wave.workers)
        base = fresh_shared_address_of(s_words)
        slot = uint32(number & uint32(1))
        place = uint32(base + uint32(STATE_AT) + slot * uint32(8))
        parity = uint32(uint32(uint32(number >> uint32(1)) & uint32(1)) ^ uint32(1))
        wait_for(uint32(place + uint32(8 * ITEM_FREE)), parity)
        # A split that no row of the tile reaches is no item, but the first one is there to be written.
        if describe_item(base, slot, tree, wave, request, tile, split, length, sees_prefix) > 0:
            cuda.syncwarp()
            if fresh_lane() == uint32(0):
                arrive(uint32(place + uint32(8 * ITEM_FULL)))
            number = uint32(number + uint32(1))


@device_routine
def load_queries(s_words, q_nope, nope_stride, lane):  # type: ignore[no-untyped-def]
    """Load the latent part of each item's queries, by a warp."""
    base = fresh_shared_address_of(s_words)
    barriers = uint32(base + uint32(STATE_AT))
    number = uint32(0)
    unit = uint32(lane & uint32(7))
    while True:
        slot = uint32(number & uint32(1))
        phase = uint32(uint32(number >> uint32(1)) & uint32(1))
        wait_for(uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + slot)), phase)
        item = uint32(base + uint32(4 * ITEMS) + slot * uint32(4 * ITEM_WORDS))
        request, rows = word_at(item, REQUEST), word_at(item, ROWS)
        if request < 0:
            return
        first = first_query(item)
        cuda.syncwarp()
        if lane == uint32(0):
            arrive(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + slot)))
        wait_for(uint32(barriers + uint32(8 * QUERIES_FREE)), uint32(uint32(number & uint32(1)) ^ uint32(1)))
        for step in range(uint32(16)):
            row = uint32(uint32(lane >> uint32(3)) + uint32(step) * uint32(4))
            size = uint32(16) if int32(row) < rows else uint32(0)
            place = unit_address(uint32(base + uint32(QUERIES_AT)), row, unit)
            inside = int64(first + int64(row)) if int32(row) < rows else int64(first)
            source = uint64(q_nope + uint64(inside * nope_stride) + uint64(unit << uint32(4)))
            for chunk in range(uint32(LATENT_CHUNKS)):
                copy_async(
                    uint32(place + uint32(chunk) * uint32(CHUNK_BYTES)),
                    uint64(source + uint64(uint32(chunk) * uint32(128))),
                    size,
                )
        arrive_after_copies(uint32(barriers + uint32(8 * QUERIES_FULL)))
        number = uint32(number + uint32(1))


@device_routine
def page_and_row(keys, request, block):  # type: ignore[no-untyped-def]
    """Page of a request that has a block of keys, for pages of whole blocks."""
    position = uint32(uint32(block) * uint32(KEY_BLOCK))
    page = int32(request)
    if keys.page_starts.shape[0] > 0:
        place = uint32(uint32(keys.page_starts[uint32(request)]) + position // uint32(keys.page_size))
        page = keys.page_table[place]
    elif keys.page_table.shape[0] > 0:
        place_64 = int64(request) * int64(keys.table_stride) + int64(position // uint32(keys.page_size))
        page = keys.page_table[place_64]
    return int32(page)


@device_routine
def key_of_slot(tree, item, record, seen, slot, sees_prefix):  # type: ignore[no-untyped-def]
    """Row (int32) of a request's keys that goes into a slot of a gathered block; -1: none, -2: a fault."""
    prefix = word_at(item, PREFIX)
    position = int32(word_at(record, BLOCK) * int32(KEY_BLOCK) + int32(slot))
    if word_at(record, KIND) == IN_ROWS:
        return position
    group = int32(uint32(slot) // uint32(GROUP))
    common, own = word_at(record, COMMON), word_at(record, OWN)
    if word_at(record, COUNT) == 0:
        return int32(-1)
    if group < common:
        return position if sees_prefix != 0 else int32(-1)
    place = int32(uint32(group - common) // uint32(own))
    node = int32(word_at(record, FIRST) + place)
    if place >= word_at(record, COUNT) or node >= word_at(item, NODES):
        return int32(-1)
    node = int32(word_at(item, FIRST_NODE) + node)
    position = int32(position - place * own * int32(GROUP))
    row = int32(node * tree.heads - word_at(item, FIRST_ROW))
    if position >= word_at(seen, uint32(max(int32(0), row))):
        return int32(-1)
    if position < prefix:
        return position if sees_prefix != 0 else int32(-1)
    found = path_slot(tree.ancestor_bits, word_at(item, REQUEST), node, int32(position - prefix))
    if found < 0 or found >= tree.num_nodes[uint32(word_at(item, REQUEST))]:
        return int32(-2)
    return int32(prefix + found)


@device_routine
def gather_block(keys, item, buffer, half, key):  # type: ignore[no-untyped-def]
    """Begin to copy 32 rows of a block, by a warp whose lanes each have one row's key."""
    latent, rotary = ABSENT, ABSENT
    if key >= 0:
        latent, rotary = row_addresses(keys, word_at(item, REQUEST), key)
    if key < -1 or (key >= 0 and latent == ABSENT):
        set_word(item, FAULT, 1)
    lane = fresh_lane()
    unit = uint32(lane & uint32(7))
    for step in range(uint32(8)):
        source = uint32(uint32(lane >> uint32(3)) + uint32(step) * uint32(4))
        row_latent = uint64(cuda.shfl_sync(0xFFFFFFFF, int64(latent), source))
        row_rotary = uint64(cuda.shfl_sync(0xFFFFFFFF, int64(rotary), source))
        load_row(buffer, uint32(half * uint32(32) + source), unit, row_latent, row_rotary)


@device_routine
def copy_chunks(buffer, full, tensor_map, first, count, row, page):  # type: ignore[no-untyped-def]
    """Begin to copy latent chunks of a block in a box each, by a thread."""
    for chunk in range(first, first + count):
        barrier = uint32(full + uint32(8) * uint32(chunk))
        arrive_and_expect(barrier, uint32(CHUNK_BYTES))
        place = uint32(buffer + uint32(CHUNK_BYTES) * uint32(chunk))
        copy_box(place, tensor_map, barrier, int32(uint32(chunk) * uint32(64)), row, page)


@device_routine
def load_keys(s_words, keys, tree, maps, in_boxes, sees_prefix, lane, half):  # type: ignore[no-untyped-def]
    """Load the blocks of each item in turn into the two buffers, by two warps."""
    base = fresh_shared_address_of(s_words)
    barriers = uint32(base + uint32(STATE_AT))
    number, turn = uint32(0), uint32(0)
    is_leader = half == uint32(0) and lane == uint32(0)
    if in_boxes != 0 and is_leader:
        acquire_map(maps)
        acquire_map(uint64(maps + uint64(128)))
    while True:
        slot = uint32(number & uint32(1))
        phase = uint32(uint32(number >> uint32(1)) & uint32(1))
        wait_for(uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + slot)), phase)
        item = uint32(base + uint32(4 * ITEMS) + slot * uint32(4 * ITEM_WORDS))
        seen = uint32(base + uint32(4 * SEEN) + slot * uint32(4 * TILE_ROWS))
        request = word_at(item, REQUEST)
        if request < 0:
            return
        shared, shared_begin = word_at(item, SHARED), word_at(item, SHARED_BEGIN)
        path_block, first = word_at(item, GATHER_BEGIN), int32(0)
        pages, next_pages = int32(0), int32(0)
        if in_boxes != 0 and int32(lane) < shared:
            next_pages = page_and_row(keys, request, int32(shared_begin + int32(lane)))
        blocks = int32(uint32(word_at(item, STREAM) + int32(1)) & uint32(0xFFFFFFFE))
        blocks = int32(max(int32(2), blocks))
        for index in range(blocks):
            which = uint32(uint32(index) & uint32(1))
            parity = uint32(uint32(turn & uint32(1)) ^ uint32(1))
            buffer = uint32(base + uint32(KEYS_AT) + which * uint32(BLOCK_BYTES))
            full = uint32(barriers + uint32(8 * KEYS_FULL) + which * uint32(72))
            free = uint32(barriers + uint32(8) * which)
            record = uint32(base + uint32(4 * RECORDS) + which * uint32(4 * RECORD_WORDS))
            if in_boxes != 0 and index < shared:
                if index & 31 == 0:
                    pages = next_pages
                    further = int32(int32(index) + int32(32) + int32(lane))
                    if further < shared:
                        next_pages = page_and_row(keys, request, int32(shared_begin + further))
                page = cuda.shfl_sync(0xFFFFFFFF, pages, index & 31)
                row = int32(0)
                if is_leader:
                    position = uint32(uint32(shared_begin + int32(index)) * uint32(KEY_BLOCK))
                    row = int32(position - position // uint32(keys.page_size) * uint32(keys.page_size))
                    if uint32(page) >= uint32(keys.num_pages):
                        set_word(item, FAULT, 1)
                        page = int32(0)
                wait_for(uint32(free + uint32(8 * ROTARY_FREE)), parity)
                if is_leader:
                    set_word(record, KIND, IN_BOXES)
                    arrive_and_expect(uint32(full + uint32(64)), uint32(CHUNK_BYTES))
                    place = uint32(buffer + uint32(LATENT_CHUNKS * CHUNK_BYTES))
                    copy_box(
                        place, uint64(maps + uint64(128)), uint32(full + uint32(64)), int32(0), row, page
                    )
                wait_for(uint32(free + uint32(8 * LEFT_FREE)), parity)
                if is_leader:
                    copy_chunks(buffer, full, maps, uint32(0), uint32(4), row, page)
                wait_for(uint32(free + uint32(8 * RIGHT_FREE)), parity)
                if is_leader:
                    copy_chunks(buffer, full, maps, uint32(4), uint32(4), row, page)
            else:
                wait_for(uint32(free + uint32(8 * ROTARY_FREE)), parity)
                wait_for(uint32(free + uint32(8 * LEFT_FREE)), parity)
                wait_for(uint32(free + uint32(8 * RIGHT_FREE)), parity)
                kind, block = int32(IN_ROWS), int32(shared_begin + int32(index))
                common, own, count = int32(0), int32(0), int32(0)
                if index >= shared:
                    kind, block = int32(OF_PATHS), path_block
                    if index < word_at(item, STREAM):
                        common, own, count = group_shape(
                            word_at(item, PREFIX), path_block, word_at(item, LONGEST)
                        )
                if lane == uint32(0) and half == uint32(0):
                    set_word(record, KIND, kind)
                    set_word(record, BLOCK, block)
                    set_word(record, FIRST, first)
                    set_word(record, COMMON, common)
                    set_word(record, OWN, own)
                    set_word(record, COUNT, count)
                await_record()
                slot_of_lane = uint32(half * uint32(32) + lane)
                key = key_of_slot(tree, item, record, seen, slot_of_lane, sees_prefix)
                gather_block(keys, item, buffer, half, key)
                await_record()
                if is_leader:
                    for chunk in range(uint32(LATENT_CHUNKS + 1)):
                        arrive(uint32(full + uint32(8) * uint32(chunk)))
                arrive_after_copies(uint32(barriers + uint32(8) * (uint32(GATHERED) + which)))
                if index >= shared:
                    first = int32(first + count)
                    if first >= word_at(item, NODES):
                        first = int32(0)
                        path_block = int32(path_block + int32(1))
            turn = uint32(turn + which)
        cuda.syncwarp()
        if lane == uint32(0):
            arrive(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + slot)))
        number = uint32(number + uint32(1))
