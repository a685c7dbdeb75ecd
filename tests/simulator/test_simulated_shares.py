"""How tree attention's work is shared out, in the simulator: each item once, with a slot that is there."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from numba_ddtree.cuda_target import SIMULATED, cuda, int32
from numba_ddtree.tree_attention.bands import find_in_band, may_have_bands, share_out_in_bands
from numba_ddtree.tree_attention.key_rows import Keys
from numba_ddtree.tree_attention.shares import (
    ALL_WHOLE,
    ITEM_BLOCKS,
    MERGED_SLOTS,
    Share,
    find_item,
    first_requests,
    share_out,
    take_item,
)
from numba_ddtree.tree_attention.split_items import (
    BY_PATH,
    BY_SLOT,
    BY_SLOT_IN_ONE_PAIR,
    BY_SLOT_IN_ROWS,
    Tree,
    is_by_slot,
)
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")

MOST = np.int32(2**31 - 1)
WORKERS = 7
MAX_PATH = 9
MOST_ITEMS = 400


@cuda.jit
def list_items(  # type: ignore[no-untyped-def]
    bits, num_nodes, prefix_lengths, max_path, heads, pages, rest_tiles, length, most, parts, found, shared,
    together,
):  # fmt: skip
    zero = int32(0)
    keys = Keys(zero, zero, zero, zero, zero, zero, int32(64), int32(1), pages, pages[:0], pages.shape[0])
    tree = Tree(bits, num_nodes, prefix_lengths, max_path, heads, 0)
    share = Share(int32(WORKERS), int32(rest_tiles), int32(length), int32(most), int32(together))
    whole, shared_length, rest = share_out(tree, keys, share, MOST, first_requests(tree, keys, MOST))
    if cuda.threadIdx.x == 0:
        shared[0], shared[1], shared[2] = whole, shared_length, rest
    whole = int32(whole * parts)
    index, step, item = int32(cuda.blockIdx.x), int32(0), 0
    while True:
        request, part, split, slot, blocks, splits = take_item(
            tree, keys, share, MOST, parts, whole, shared_length, index, step
        )
        if request < 0:
            break
        if cuda.threadIdx.x == 0:
            row = found[cuda.blockIdx.x, item]
            row[0], row[1], row[2], row[3], row[4], row[5] = request, part, split, slot, blocks, splits
            row[6] = index
        item += 1
        step = int32(split + int32(1))
        if index >= whole or step >= splits:
            index, step = int32(index + WORKERS), int32(0)


def shared_out(
    counts: NDArray[np.int32], prefixes: NDArray[np.int32], N: int, H: int, **how: int
) -> tuple[list[list[tuple[int, ...]]], tuple[int, int, int]]:
    """Return each worker's items, and what tiles are whole, blocks of a split, and tiles of the rest."""
    bits = np.zeros((len(counts), N, -(-N // 32)), np.uint32)
    found, shared = np.full((WORKERS, MOST_ITEMS, 7), -7, np.int32), np.zeros(3, np.int32)
    list_items[WORKERS, 32](
        bits, counts, prefixes, MAX_PATH, H, np.zeros(100, np.int32), how["rest_tiles"], how["length"],
        how["most"], how["parts"], found, shared, how.get("together", 1),
    )  # fmt: skip
    items = [[tuple(map(int, item)) for item in worker if item[0] >= 0] for worker in found]
    whole, length, rest = map(int, shared)
    return items, (whole, length, rest)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("length", "most", "rest_tiles"),
    [(0, 4, 6), (2, 8, 6), (2, 8, 2), (1, 32, 0), (2**20, 1, 0), (0, 1, 0)],
)
def test_every_item_once(
    rng: np.random.Generator, length: int, most: int, rest_tiles: int, parts: int
) -> None:
    for B in (1, 4):
        N, H = 4, 20
        counts = rng.integers(0, N + 1, B).astype(np.int32)
        prefixes = rng.integers(0, 300, B).astype(np.int32)
        if B > 1:
            counts[1] = N + 1  # no request at all
            prefixes[3] = rng.integers(0, 50)
        items, (whole, chosen, rest) = shared_out(
            counts, prefixes, N, H, rest_tiles=rest_tiles, length=length, most=most, parts=parts
        )
        valid = [b for b in range(B) if 0 < counts[b] <= N]
        tiles = [(b, tile) for b in valid for tile in range(-(-int(counts[b]) * H // TILE_ROWS))]
        assert rest <= min(rest_tiles, WORKERS - 1)
        assert rest == (0 if whole == ALL_WHOLE else len(tiles) - whole)
        want, slots = [], []
        for rank, (request, tile) in enumerate(tiles):
            is_whole = rank < whole
            blocks = -(-int(prefixes[request] + counts[request]) // KEY_BLOCK)
            size = (length or 10**9) if is_whole else chosen
            for part in range(tile * parts, (tile + 1) * parts):
                want += [(request, part, split) for split in range(-(-blocks // size))]
            assert is_whole or -(-blocks // size) <= most
        everything = [item for worker in items for item in worker]
        assert sorted(item[:3] for item in everything) == sorted(want)
        for number, worker in enumerate(items):
            for before, item in zip([None, *worker], worker, strict=False):
                _, _, split, slot, _, splits, index = item
                if index < whole * parts:  # all splits in turn, in the worker's own slot
                    assert slot == rest_tiles * most * parts + number
                    assert split == 0 or (before is not None and before[:3] == (*item[:2], split - 1))
                else:
                    assert splits == split + 1
                    slots.append(slot)
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < rest_tiles * most * parts for slot in slots)


def more_blocks(prefix: int, nodes: int, longest: int) -> int:
    """Count blocks that so many nodes' paths take beside one node's, from groups of 16 keys, four a block."""
    more = 0
    for block in range(prefix // KEY_BLOCK, -(-longest // KEY_BLOCK)):
        common = max(0, prefix - KEY_BLOCK * block) // 16
        used = -(-min(KEY_BLOCK, longest - KEY_BLOCK * block) // 16)
        together = (4 - common) // (used - common)
        more += -(-nodes // together) - 1
    return more


def estimated_time(tiles: int, blocks: int, more: int, size: int, is_given: bool) -> int:
    """Time of tiles with splits of so many blocks: rounds of whole splits, what is left of them, a merge."""
    items, left = tiles * (blocks // size), blocks % size
    rounds = -(-items // WORKERS)
    time = rounds * (size + ITEM_BLOCKS)
    merge = 0 if is_given else tiles * -(-blocks // size) // MERGED_SLOTS
    if left == 0:
        return time + more + merge
    is_in_last_round = rounds > 0 and rounds * WORKERS - items >= tiles
    before = time - is_in_last_round * (size + ITEM_BLOCKS)
    return max(time, before + left + more + ITEM_BLOCKS) + merge


@pytest.mark.parametrize(
    ("N", "H", "prefix", "more", "length"),
    # A tile has 1, 4 or 8 nodes, each with a block of paths of its own; or four nodes share one.
    [
        (3, 64, 2045, 0, 0),
        (9, 20, 2039, 3, 0),
        (24, 8, 2039, 7, 0),
        (24, 8, 1984, 1, 0),
        (24, 8, 1990, 1, 0),
        (24, 8, 2039, 7, 11),
    ],
)
def test_the_length_that_balances(N: int, H: int, prefix: int, more: int, length: int) -> None:
    # 3 tiles of 32 blocks on 7 workers: two splits of 16 are a round each, three are two rounds of 11.
    assert more_blocks(prefix, min(N, -(-TILE_ROWS // H)), prefix + min(N, MAX_PATH)) == more
    counts, prefixes = np.array([N], np.int32), np.array([prefix], np.int32)
    _, (whole, chosen, rest) = shared_out(
        counts, prefixes, N, H, rest_tiles=6, length=length, most=32, parts=1
    )
    sizes = [length] if length else [-(-(32 + more) // splits) for splits in range(1, 33)]
    times = {size: estimated_time(3, 32, more, size, length > 0) for size in sizes}  # the longest first
    assert (whole, rest) == (0, 3)
    assert chosen == min(sizes, key=lambda size: times[size])
    assert times[chosen] < 32 + more + ITEM_BLOCKS


def test_whole_tiles_first_and_the_rest_in_splits() -> None:
    # 16 tiles of 10 blocks on 7 workers: two rounds of whole tiles, and the last two cut into three.
    counts, prefixes = np.full(16, 1, np.int32), np.full(16, 10 * KEY_BLOCK - 1, np.int32)
    items, (whole, chosen, rest) = shared_out(
        counts, prefixes, 1, 64, rest_tiles=6, length=0, most=32, parts=1
    )
    assert (whole, rest) == (14, 2)
    assert chosen < 10
    assert all(len(worker) >= 2 for worker in items)


def test_the_rest_is_whole_where_splits_would_gain_nothing() -> None:
    counts, prefixes = np.full(6, 1, np.int32), np.full(6, 2 * KEY_BLOCK - 1, np.int32)
    _, (whole, _, rest) = shared_out(counts, prefixes, 1, 64, rest_tiles=6, length=1, most=4, parts=1)
    assert (whole, rest) == (ALL_WHOLE, 0)


@pytest.mark.parametrize(
    ("prefix", "count", "expected"),
    [(0, 128, True), (0, 129, False), (127, 1, True), (127, 2, False), (128, 128, True), (2111, 65, True)],
)
def test_requests_whose_tree_ends_with_the_prefix(prefix: int, count: int, expected: bool) -> None:
    nothing = np.zeros(0, np.int32)

    def tree(way: int) -> Tree:
        return Tree(nothing, nothing, nothing, MAX_PATH, 64, way)

    assert bool(is_by_slot(tree(BY_SLOT_IN_ONE_PAIR), np.int32(prefix), np.int32(count))) == expected
    for way in (BY_PATH, BY_SLOT_IN_ROWS, BY_SLOT):
        assert bool(is_by_slot(tree(way), np.int32(prefix), np.int32(count))) == (way != BY_PATH)


def test_chosen_lengths_are_of_whole_pairs() -> None:
    counts, prefixes = np.full(2, 1, np.int32), np.full(2, 33 * KEY_BLOCK - 1, np.int32)
    how = {"rest_tiles": 6, "length": 0, "most": 4, "parts": 1}
    _, one = shared_out(counts, prefixes, 1, 64, **how)
    _, two = shared_out(counts, prefixes, 1, 64, **how, together=2)
    assert (one, two) == ((0, 11, 2), (0, 12, 2))


@cuda.jit
def list_bands(  # type: ignore[no-untyped-def]
    bits, num_nodes, prefix_lengths, max_path, heads, pages, rest_tiles, most, found, shared
):  # fmt: skip
    zero = int32(0)
    keys = Keys(zero, zero, zero, zero, zero, zero, int32(64), int32(1), pages, pages[:0], pages.shape[0])
    tree = Tree(bits, num_nodes, prefix_lengths, max_path, heads, 0)
    share = Share(int32(WORKERS), int32(rest_tiles), int32(0), int32(most), int32(1))
    first = first_requests(tree, keys, MOST)
    whole, length, rest, side = share_out_in_bands(tree, keys, share, MOST, first)
    if cuda.threadIdx.x == 0:
        shared[0], shared[1], shared[2], shared[3] = whole, length, rest, side
    index, item = int32(cuda.blockIdx.x), 0
    while True:
        offset = int32(0)
        if length < 0 and index >= whole:
            request, tile, split, slot, offset, index = find_in_band(
                tree, keys, share, MOST, first, whole, int32(-length), side, index
            )
        else:
            request, tile, split, slot = find_item(tree, keys, share, MOST, 1, whole, length, index, first)
            index = int32(index + WORKERS)
        if request < 0:
            break
        if cuda.threadIdx.x == 0:
            row = found[cuda.blockIdx.x, item]
            row[0], row[1], row[2], row[3], row[4] = request, tile, split, slot, offset
        item += 1


def blocks_of_request(prefix: int, count: int) -> int:
    return -(-(prefix + min(count, MAX_PATH)) // KEY_BLOCK)


@pytest.mark.parametrize(
    ("counts", "prefixes", "heads", "most", "side"),
    [
        ([3, 1], [8000, 5000], 64, 8, 1),  # 4 tiles on 7 workers
        ([2, 2], [40000, 30000], 64, 3, 2),  # too many keys for each to read its own
        ([3, 1], [40000, 30000], 64, 3, 0),  # and requests that cannot go side by side
        ([4], [12000], 64, 6, 1),
        ([4, 3, 4, 0, 1], [3000, 5000, 100, 9000, 8000], 64, 8, 1),  # one round of whole tiles
        ([9, 9], [20000, 20000], 20, 8, 0),  # 6 tiles: splits
    ],
)
def test_bands_have_every_block_once(
    counts: list[int], prefixes: list[int], heads: int, most: int, side: int
) -> None:
    N = max(counts)
    found, shared = np.full((WORKERS, MOST_ITEMS, 5), -7, np.int32), np.zeros(4, np.int32)
    list_bands[WORKERS, 32](
        np.zeros((len(counts), N, 1), np.uint32), np.array(counts, np.int32), np.array(prefixes, np.int32),
        MAX_PATH, heads, np.zeros(1000, np.int32), 6, most, found, shared,
    )  # fmt: skip
    whole, length, rest, found_side = map(int, shared)
    assert (length < 0) == (side > 0)
    if side == 0:
        return
    assert found_side == side
    band = -length
    tiles = [(b, tile) for b, count in enumerate(counts) for tile in range(-(-count * heads // TILE_ROWS))]
    assert whole == len(tiles) - rest
    assert whole % WORKERS == 0
    work = np.zeros(WORKERS, int)
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    slots: list[int] = []
    for worker, items in enumerate(found):
        for request, tile, split, slot, offset in items[items[:, 0] >= 0].tolist():
            blocks = blocks_of_request(prefixes[request], counts[request])
            if slot < 0:
                assert (request, tile) in tiles[:whole]
                continue
            begin, end = max(0, split * band - offset), min(blocks, (split + 1) * band - offset)
            assert 0 <= offset < band
            assert begin < end
            assert split < most
            assert slot == (tiles.index((request, tile)) - whole) * most + split
            seen.setdefault((request, tile), []).append((split, begin, end))
            slots.append(slot)
            work[worker] += end - begin
    assert len(set(slots)) == len(slots)
    assert sorted(seen) == tiles[whole:]
    for (request, _), parts in seen.items():
        parts.sort()
        assert [split for split, _, _ in parts] == list(range(len(parts)))
        ends = [0, *(end for _, _, end in parts)]
        assert [begin for _, begin, _ in parts] == ends[:-1]
        assert ends[-1] == blocks_of_request(prefixes[request], counts[request])
    assert work.max() <= band


@pytest.mark.parametrize(
    ("tiles", "is_chosen", "expected"),
    [
        (4, True, True),
        (7, True, False),
        (3, True, True),
        (1, True, False),
        (11, True, True),
        (25, True, False),
        (4, False, False),
    ],
)
def test_bands_are_looked_for_where_splits_leave_workers_idle(
    tiles: int, is_chosen: bool, expected: bool
) -> None:
    splits = SimpleNamespace(split_blocks=0 if is_chosen else 64)
    assert may_have_bands(splits, tiles, WORKERS) == expected  # type: ignore[arg-type]
