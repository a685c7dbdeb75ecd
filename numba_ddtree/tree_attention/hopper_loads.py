"""What loads in the Hopper kernel: two warps keys, and one queries, but for the first item's."""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32, uint64
from numba_ddtree.device.warp import warp_ballot
from numba_ddtree.tree_attention.hopper_state import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK_BYTES,
    COMMON,
    CONSUMING_WARPS,
    COUNT,
    FAULT,
    FIRST,
    FIRST_NODE,
    FIRST_ROW,
    FORETOLD,
    GATHER_BEGIN,
    GATHERED,
    IN_BOXES,
    IN_ROWS,
    ITEM_COUNTED,
    ITEM_FREE,
    ITEM_FULL,
    ITEM_WORDS,
    ITEMS,
    KEYS_AT,
    KEYS_FULL,
    KIND,
    LATENT_CHUNKS,
    LEFT_FREE,
    LONGEST,
    NODES,
    OF_PATHS,
    OF_SLOTS,
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
    ROWS,
    SEEN,
    SHARED,
    SHARED_BEGIN,
    STATE_AT,
    STREAM,
    first_query,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.key_rows import (
    ABSENT,
    path_slot,
    row_addresses,
)
from numba_ddtree.tree_attention.path_blocks import GROUP, group_shape
from numba_ddtree.tree_attention.row_copies import load_row
from numba_ddtree.tree_attention.split_items import BY_SLOT_IN_ROWS
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.mbarriers import (
        arrive,
        arrive_after_copies,
        arrive_and_expect,
        fresh_lane,
        fresh_shared_address_of,
        fresh_word,
        wait_for,
    )
    from numba_ddtree.device.ptx import copy_async, fresh_thread
    from numba_ddtree.device.tensor_copies import acquire_map, copy_box
    from numba_ddtree.device.tile import unit_address

REHEARSAL = -1


@device_routine
def load_query_rows(base, item, q_nope, nope_stride, start, steps):  # type: ignore[no-untyped-def]
    """Begin to copy the latent part of an item's queries, four rows a step from `start` on, by a warp.

    What comes after the item's last row becomes zeros.
    """
    lane = fresh_lane()
    unit = uint32(lane & uint32(7))
    rows, first = word_at(item, ROWS), first_query(item)
    for step in range(fresh_word(int32(steps))):
        row = uint32(start + uint32(lane >> uint32(3)) + uint32(step) * uint32(4))
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


@device_routine
def load_first_queries(base, item, q_nope, nope_stride):  # type: ignore[no-untyped-def]
    """Load the first item's queries, by the warps that consume: together they are sooner done than one."""
    start = uint32(uint32(fresh_thread() >> uint32(5)) * uint32(TILE_ROWS // CONSUMING_WARPS))
    load_query_rows(base, item, q_nope, nope_stride, start, TILE_ROWS // CONSUMING_WARPS // 4)
    arrive_after_copies(uint32(base + uint32(STATE_AT + 8 * QUERIES_FULL)))


@device_routine
def load_queries(s_words, q_nope, nope_stride):  # type: ignore[no-untyped-def]
    """Load the latent part of the queries of all items but the first, by a warp."""
    base = fresh_shared_address_of(s_words)
    barriers = uint32(base + uint32(STATE_AT))
    number = uint32(0)
    lane = fresh_lane()
    while True:
        slot = uint32(number & uint32(1))
        phase = uint32(uint32(number >> uint32(1)) & uint32(1))
        wait_for(uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + slot)), phase)
        item = uint32(base + uint32(4 * ITEMS) + slot * uint32(4 * ITEM_WORDS))
        if word_at(item, REQUEST) < 0:
            return
        if number > uint32(0):
            wait_for(
                uint32(barriers + uint32(8 * QUERIES_FREE)), uint32(uint32(number & uint32(1)) ^ uint32(1))
            )
            load_query_rows(base, item, q_nope, nope_stride, uint32(0), TILE_ROWS // 4)
            for _ in range(uint32(CONSUMING_WARPS)):  # as often as for the first item
                arrive_after_copies(uint32(barriers + uint32(8 * QUERIES_FULL)))
        cuda.syncwarp()
        if lane == uint32(0):
            arrive(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + slot)))
        number = uint32(number + uint32(1))


@device_routine
def page_of_block(keys, block):  # type: ignore[no-untyped-def]
    """Place (uint32) of a block's page among the request's, for pages of whole blocks."""
    if keys.page_size == KEY_BLOCK:  # the common size, without a division
        return uint32(block)
    return uint32(uint32(uint32(block) * uint32(KEY_BLOCK)) // uint32(keys.page_size))


@device_routine
def page_and_row(keys, request, block):  # type: ignore[no-untyped-def]
    """Page of a request that has a block of keys, for pages of whole blocks."""
    page = int32(request)
    if keys.page_starts.shape[0] > 0:
        place = uint32(uint32(keys.page_starts[uint32(request)]) + page_of_block(keys, block))
        page = keys.page_table[place]
    elif keys.page_table.shape[0] > 0:
        place_64 = int64(request) * int64(keys.table_stride) + int64(page_of_block(keys, block))
        page = keys.page_table[place_64]
    return int32(page)


@device_routine
def key_of_slot(  # type: ignore[no-untyped-def]
    tree, item, seen, block, first, common, own, count, slot, sees_prefix
):  # fmt: skip
    """Row (int32) of a request's keys that goes into a slot of a masked block; -1: none, -2: a fault.

    The block has paths of `count` nodes from the item's node `first` on, as `path_blocks` packs them; or the
    tree's keys as they lie.
    """
    prefix = word_at(item, PREFIX)
    position = int32(block * int32(KEY_BLOCK) + int32(slot))
    group = int32(uint32(slot) // uint32(GROUP))
    if count == 0:
        return int32(-1)
    if tree.by_slot == BY_SLOT_IN_ROWS:
        return int32(position if position < word_at(item, LONGEST) else int32(-1))
    if group < common:
        return position if sees_prefix != 0 else int32(-1)
    place = int32(uint32(group - common) // uint32(own))
    node = int32(first + place)
    if place >= count or node >= word_at(item, NODES):
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
def addresses_of_key(keys, item, key):  # type: ignore[no-untyped-def]
    """Addresses (uint64) of both parts of a key's row, `ABSENT` if there is none; notes faults."""
    latent, rotary = ABSENT, ABSENT
    if key >= 0:
        latent, rotary = row_addresses(keys, word_at(item, REQUEST), key)
    if key < -1 or (key >= 0 and latent == ABSENT):
        set_word(item, FAULT, 1)
    return latent, rotary


@device_routine
def kind_of_rows(tree, item, index, shared, block, count):  # type: ignore[no-untyped-def]
    """`KIND` (int32) of a gathered block, number `index` of its item."""
    if index < shared:
        is_whole = int32(int32(block + int32(1)) * int32(KEY_BLOCK)) <= word_at(item, PREFIX)
        return int32(IN_ROWS) if is_whole else int32(IN_ROWS | OF_SLOTS)
    by_slot = tree.by_slot == BY_SLOT_IN_ROWS and count > 0
    return int32(IN_ROWS | OF_SLOTS) if by_slot else int32(IN_ROWS | OF_PATHS)


@device_routine
def row_of_loader(which, lane):  # type: ignore[no-untyped-def]
    """Row of a gathered block whose address a lane of warp 0 or 1 finds; of four rows each in turn."""
    return uint32(
        uint32(uint32(lane & uint32(~3)) << uint32(1)) + which * uint32(4) + uint32(lane & uint32(3))
    )


@device_routine
def gather_half(buffer, which, latent, rotary, fills):  # type: ignore[no-untyped-def]
    """Begin to copy half of a block's rows, by a warp whose lanes have an address each.

    Rows that are `ABSENT` become zeros if `fills`, and else may stay what they are, four at a time.
    """
    lane = fresh_lane()
    unit = uint32(lane & uint32(7))
    wanted = warp_ballot(fills or latent != ABSENT)
    for step in range(fresh_word(int32(8))):
        source = uint32(uint32(uint32(step) << uint32(2)) + uint32(lane >> uint32(3)))
        if uint32(wanted >> uint32(uint32(step) << uint32(2))) & uint32(15) != uint32(0):
            row_latent = uint64(cuda.shfl_sync(0xFFFFFFFF, int64(latent), source))
            row_rotary = uint64(cuda.shfl_sync(0xFFFFFFFF, int64(rotary), source))
            load_row(buffer, row_of_loader(which, source), unit, row_latent, row_rotary)


@device_routine
def copy_chunks(buffer, full, tensor_map, first, count, row, page):  # type: ignore[no-untyped-def]
    """Begin to copy latent chunks of a block in a box each, by a thread."""
    for chunk in range(first, first + count):
        barrier = uint32(full + uint32(8) * uint32(chunk))
        arrive_and_expect(barrier, uint32(CHUNK_BYTES))
        place = uint32(buffer + uint32(CHUNK_BYTES) * uint32(chunk))
        copy_box(place, tensor_map, barrier, int32(uint32(chunk) * uint32(64)), row, page)


@device_routine
def path_group(tree, item, index, path_block):  # type: ignore[no-untyped-def]
    """Return how the item's block number `index`, of a path block, is packed: see `path_blocks.group_shape`.

    One after the last, which makes their number even, has no nodes. By slot a block has all.
    """
    common, own, count = int32(0), int32(1), word_at(item, NODES)
    if tree.by_slot != BY_SLOT_IN_ROWS:
        common, own, count = group_shape(word_at(item, PREFIX), path_block, word_at(item, LONGEST))
    return common, own, int32(count if index < word_at(item, STREAM) else int32(0))


@device_routine
def load_boxes(keys, tree, item, index, page, maps, base, which, parity, is_leader):  # type: ignore[no-untyped-def]
    """Load a shared block into the warp's own buffer by tensor copies, chunk by chunk as it is free.

    One that has keys of the tree's, too, is masked by slot. If it is not full, its box is moved back until it
    ends with the last key: what it has before the page's first row becomes zeros, and other rows before the
    block's are keys, which another block has, too.
    """
    barriers = uint32(base + uint32(STATE_AT))
    buffer = uint32(base + uint32(KEYS_AT) + which * uint32(BLOCK_BYTES))
    full = uint32(barriers + uint32(8 * KEYS_FULL) + which * uint32(72))
    free = uint32(barriers + uint32(8) * which)
    row, kind, missing = int32(0), int32(IN_BOXES), int32(0)
    block = int32(word_at(item, SHARED_BEGIN) + int32(index))
    slot = int32(int32(block * int32(KEY_BLOCK)) - word_at(item, PREFIX))
    if is_leader:
        if slot > int32(-KEY_BLOCK):
            kind = int32(IN_BOXES | OF_SLOTS)
            in_use = tree.num_nodes[uint32(word_at(item, REQUEST))]
            missing = int32(max(int32(0), int32(int32(slot + int32(KEY_BLOCK)) - in_use)))
        row = int32(int32(block * int32(KEY_BLOCK)) - missing)
        row = int32(row - int32(page_of_block(keys, block) * uint32(keys.page_size)))
        if uint32(page) >= uint32(keys.num_pages):
            set_word(item, FAULT, 1)
            page = int32(0)
    wait_for(uint32(free + uint32(8 * ROTARY_FREE)), parity)
    if is_leader:
        record = uint32(base + uint32(4 * RECORDS) + which * uint32(4 * RECORD_WORDS))
        set_word(record, KIND, kind)
        set_word(record, FIRST, int32(slot - missing))
        set_word(record, COMMON, missing)
        arrive_and_expect(uint32(full + uint32(64)), uint32(CHUNK_BYTES))
        last = uint32(buffer + uint32(LATENT_CHUNKS * CHUNK_BYTES))
        copy_box(last, uint64(maps + uint64(128)), uint32(full + uint32(64)), int32(0), row, page)
    wait_for(uint32(free + uint32(8 * LEFT_FREE)), parity)
    if is_leader:
        copy_chunks(buffer, full, maps, uint32(0), uint32(4), row, page)
    wait_for(uint32(free + uint32(8 * RIGHT_FREE)), parity)
    if is_leader:
        copy_chunks(buffer, full, maps, uint32(4), uint32(4), row, page)


@device_routine
def acquire_maps(maps):  # type: ignore[no-untyped-def]
    """Make the tensor maps of both parts of keys known to the copies of a warp's first lane."""
    if fresh_lane() == uint32(0):
        acquire_map(maps)
        acquire_map(uint64(maps + uint64(128)))


@device_routine
def load_keys(s_words, keys, tree, maps, in_boxes, first_items, sees_prefix, which):  # type: ignore[no-untyped-def]
    """Load each item's keys, by warp 0 or 1 of two.

    By tensor copies a warp loads every other block, into a buffer of its own. Of a block whose rows are
    gathered both load half, and the first one's addresses are found out ahead, while tensor copies come.

    For a first item that is foretold, which it has read itself, a warp does not wait. Otherwise, while that
    is looked for, it goes through an item of two shared blocks without copying anything, for its instructions
    to be at hand (see `schedule`).
    """
    base = fresh_shared_address_of(s_words)
    barriers = uint32(base + uint32(STATE_AT))
    lane = fresh_lane()
    is_foretold = first_items.shape[0] > 0 and word_at(base, FORETOLD) != 0
    rehearses = in_boxes != 0 and not is_foretold
    number, turn = uint32(fresh_word(int32(REHEARSAL if rehearses else 0))), uint32(0)
    while True:
        slot = uint32(number & uint32(1))
        phase = uint32(uint32(number >> uint32(1)) & uint32(1))
        if int32(number) > 0 or (number == uint32(0) and not is_foretold):
            wait_for(uint32(barriers + uint32(8) * (uint32(ITEM_FULL) + slot)), phase)
        item = uint32(base + uint32(4 * ITEMS) + slot * uint32(4 * ITEM_WORDS))
        seen = uint32(base + uint32(4 * SEEN) + slot * uint32(4 * TILE_ROWS))
        counted = uint32(barriers + uint32(8) * (uint32(ITEM_COUNTED) + slot))
        request = word_at(item, REQUEST)
        shared, shared_begin = word_at(item, SHARED), word_at(item, SHARED_BEGIN)
        is_leader = lane == uint32(0)
        if int32(number) == REHEARSAL:
            request, shared, shared_begin, is_leader = int32(0), int32(2), int32(0), False
        if request < 0:
            return
        pages, next_pages = int32(0), int32(0)
        if in_boxes != 0 and int32(lane) < shared and int32(number) != REHEARSAL:
            next_pages = page_and_row(keys, request, int32(shared_begin + int32(lane)))
        # The number of the block that is next to be gathered, and of its path block; the first of the nodes
        # that share it, and how they do; and addresses of the lane's row.
        gathered, path_block, first = int32(shared if in_boxes != 0 else 0), int32(0), int32(0)
        common, own, count = int32(0), int32(0), int32(0)
        latent, rotary = ABSENT, ABSENT
        # Whether blocks come after the shared ones is known when paths are counted.
        blocks, index, is_counted, is_found = shared, int32(which), False, False
        while True:
            if in_boxes != 0 and index < shared:
                if index & 31 == int32(which):
                    pages = next_pages
                    further = int32(int32(index) - int32(which) + int32(32) + int32(lane))
                    if further < shared:
                        next_pages = page_and_row(keys, request, int32(shared_begin + further))
                page = cuda.shfl_sync(0xFFFFFFFF, pages, index & 31)
                parity = uint32(uint32(uint32(turn + uint32(index >> 1)) & uint32(1)) ^ uint32(1))
                load_boxes(keys, tree, item, index, page, maps, base, which, parity, is_leader)
                index = int32(index + int32(2))
                if int32(number) == REHEARSAL:
                    break
            if not is_counted and gathered >= shared and (in_boxes == 0 or index + 2 >= shared):
                wait_for(counted, phase)
                is_counted, path_block = True, word_at(item, GATHER_BEGIN)
                blocks = int32(uint32(word_at(item, STREAM) + int32(1)) & uint32(0xFFFFFFFE))
                blocks = int32(max(int32(2), blocks))
            if gathered < blocks and not is_found:
                # Where the rows are is found out before their buffer is free, and the last own block's.
                is_found = True
                row = row_of_loader(which, lane)
                key = int32(int32(shared_begin + gathered) * int32(KEY_BLOCK) + int32(row))
                if gathered >= shared:
                    common, own, count = path_group(tree, item, gathered, path_block)
                    key = key_of_slot(
                        tree, item, seen, path_block, first, common, own, count, row, sees_prefix
                    )
                latent, rotary = addresses_of_key(keys, item, key)
            if in_boxes != 0 and index < shared:
                continue
            if gathered >= blocks:
                break
            buffer = uint32(uint32(gathered) & uint32(1))
            free = uint32(barriers + uint32(8) * buffer)
            parity = uint32(uint32(uint32(turn + uint32(gathered >> 1)) & uint32(1)) ^ uint32(1))
            wait_for(uint32(free + uint32(8 * ROTARY_FREE)), parity)
            wait_for(uint32(free + uint32(8 * LEFT_FREE)), parity)
            wait_for(uint32(free + uint32(8 * RIGHT_FREE)), parity)
            is_teller = is_leader and buffer == which
            if is_teller:
                record = uint32(base + uint32(4 * RECORDS) + buffer * uint32(4 * RECORD_WORDS))
                block = path_block if gathered >= shared else int32(shared_begin + gathered)
                kind = kind_of_rows(tree, item, gathered, shared, block, count)
                slot_0 = int32(int32(block * int32(KEY_BLOCK)) - word_at(item, PREFIX))
                set_word(record, KIND, kind)
                set_word(record, BLOCK, block)
                set_word(record, FIRST, slot_0 if kind >= OF_SLOTS else first)
                set_word(record, COMMON, common)
                set_word(record, OWN, own)
                set_word(record, COUNT, count)
            # What no row sees is multiplied by 0, and may be whatever the item has had there before.
            at = uint32(base + uint32(KEYS_AT) + buffer * uint32(BLOCK_BYTES))
            gather_half(at, which, latent, rotary, gathered < 2)
            if is_teller:
                full = uint32(barriers + uint32(8 * KEYS_FULL) + buffer * uint32(72))
                for chunk in range(uint32(LATENT_CHUNKS + 1)):
                    arrive(uint32(full + uint32(8) * uint32(chunk)))
            arrive_after_copies(uint32(barriers + uint32(8) * (uint32(GATHERED) + buffer)))
            if gathered >= shared:
                first = int32(first + count)
                if first >= word_at(item, NODES):
                    first, path_block = int32(0), int32(path_block + int32(1))
            gathered, is_found = int32(gathered + int32(1)), False
        cuda.syncwarp()
        if is_leader:
            arrive(uint32(barriers + uint32(8) * (uint32(ITEM_FREE) + slot)))
        if int32(number) != REHEARSAL:
            turn = uint32(turn + uint32(blocks >> 1))
        number = uint32(number + uint32(1))
