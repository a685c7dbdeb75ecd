"""The items of tree attention, in the simulator: over all waves each item once, in memory that is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from numba_ddtree.cuda_target import SIMULATED, cuda, int32
from numba_ddtree.tree_attention.key_rows import Keys
from numba_ddtree.tree_attention.split_items import Tree, Wave, find_part, split_length
from numba_ddtree.tree_attention.work import KEY_BLOCK, TILE_ROWS

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")

MOST = np.int32(2**31 - 1)
WORKERS = 7


@cuda.jit
def list_items(  # type: ignore[no-untyped-def]
    bits, num_nodes, prefix_lengths, max_path, heads, pages, first, tiles, length, most, parts, found, lengths
):  # fmt: skip
    zero = int32(0)
    keys = Keys(zero, zero, zero, zero, zero, zero, int32(64), int32(1), pages, pages[:0], pages.shape[0])
    tree = Tree(bits, num_nodes, prefix_lengths, max_path, heads)
    wave = Wave(int32(first), int32(tiles), int32(WORKERS), int32(length), int32(most))
    length = split_length(tree, keys, wave, MOST)
    index = 0
    while True:
        request, tile, split = find_part(tree, keys, wave, length, MOST, parts, int32(index))
        if request < 0:
            break
        if cuda.threadIdx.x == 0:
            found[index, 0], found[index, 1], found[index, 2] = request, tile, split
        index += 1
    if cuda.threadIdx.x == 0:
        lengths[0], lengths[1] = length, index


def items_of_waves(
    counts: NDArray[np.int32], prefixes: NDArray[np.int32], N: int, H: int, per_wave: int, **splits: int
) -> tuple[list[NDArray[np.int32]], int]:
    """Return each wave's items, and the split's length, which all waves agree on."""
    B, parts = len(counts), splits["parts"]
    bits = np.zeros((B, N, -(-N // 32)), np.uint32)
    tiles = B * -(-N * H // TILE_ROWS)
    waves, lengths = [], set()
    for first in range(0, tiles, per_wave):
        found, length = np.full((1000, 3), -7, np.int32), np.zeros(2, np.int32)
        list_items[1, 32](
            bits, counts, prefixes, 9, H, np.zeros(100, np.int32), first, min(per_wave, tiles - first),
            splits["length"], splits["most"], parts, found, length,
        )  # fmt: skip
        waves.append(found[: length[1]])
        lengths.add(int(length[0]))
    assert len(lengths) == 1
    return waves, lengths.pop()


@pytest.mark.parametrize(
    ("length", "most", "parts", "per_wave"),
    [(0, 4, 1, 2), (2, 8, 2, 1), (2, 8, 1, 1000), (3, 8, 1, 3), (2**20, 1, 1, 2)],
)
def test_waves_have_each_item_once(
    rng: np.random.Generator, length: int, most: int, parts: int, per_wave: int
) -> None:
    B, N, H = 4, 5, 20
    counts = rng.integers(0, N + 1, B).astype(np.int32)
    counts[1] = N + 1  # no request at all
    prefixes = rng.integers(0, 600, B).astype(np.int32)
    prefixes[3] = rng.integers(0, 50)
    waves, chosen = items_of_waves(counts, prefixes, N, H, per_wave, parts=parts, length=length, most=most)
    per_request = -(-N * H // TILE_ROWS)
    want = []
    for request in range(B):
        if counts[request] in (0, N + 1):
            continue
        blocks = -(-int(prefixes[request] + counts[request]) // KEY_BLOCK)
        splits = -(-blocks // chosen)
        assert splits <= most
        used = -(-int(counts[request]) * H * parts // TILE_ROWS)
        want += [(request, tile, split) for tile in range(used) for split in range(splits)]
    assert sorted(map(tuple, np.concatenate(waves).tolist())) == sorted(want)
    # What has several splits needs a place among the wave's partial results.
    for number, wave in enumerate(waves):
        several = {request for request, _, split in wave.tolist() if split > 0}
        for request, tile, _ in wave.tolist():
            if request in several:
                row_tile = request * per_request + tile // parts - number * per_wave
                assert 0 <= row_tile < per_wave
            else:
                assert number == 0


def test_the_length_that_balances(rng: np.random.Generator) -> None:
    # 3 tiles of 32 blocks on 7 workers: two splits of 16 are a round each, three are two rounds of 11.
    counts, prefixes = np.array([9], np.int32), np.array([32 * KEY_BLOCK - 9], np.int32)
    _, chosen = items_of_waves(counts, prefixes, 9, 20, 1000, parts=1, length=0, most=32)
    costs: dict[int, Any] = {
        splits: -(-3 * -(-32 // -(-32 // splits)) // WORKERS) * (-(-32 // splits) + 3)
        for splits in range(1, 33)
    }
    assert chosen == -(-32 // min(costs, key=lambda splits: (costs[splits], splits)))
