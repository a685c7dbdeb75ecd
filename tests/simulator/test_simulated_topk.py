"""The best candidates in the simulator, at sizes that it bears."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, numba_library, numpy_library
from topk_checks import (
    DTYPES,
    ROW_KINDS,
    bad_rows,
    check_bits_in_any_batch,
    check_topk,
    make_logits,
    make_mask,
    make_rows,
)

from numba_ddtree import ArgumentError
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.device import candidate_merge, candidate_scan
from numba_ddtree.device.candidate_merge import bank_place, piece_of, sort_keys
from numba_ddtree.device.candidates import COUNT, THREADS
from numba_ddtree.draft_candidates import TILE, draft_topk, draft_topk_workspace_shape

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
]


@pytest.fixture
def device() -> Library:
    return numba_library()


def test_rows_of_every_kind(rng: np.random.Generator, device: Library) -> None:
    V = 11 * TILE + 37
    rows = np.stack([make_rows(rng, kind, 1, V) for kind in ROW_KINDS])
    temperatures = rng.choice([0.1, 1.0, 7.0], len(rows)).astype(np.float32)
    check_topk(device, rows, 9, temperature=temperatures)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("V", "k"), [(1, 1), (3, 2), (TILE - 1, 1), (TILE, 2), (TILE + 1, TILE + 1), (1601, 30)]
)
def test_sizes_and_dtypes(rng: np.random.Generator, device: Library, V: int, k: int, dtype: Any) -> None:
    check_topk(device, make_logits(rng, 1, 3, V, dtype), k)


@pytest.mark.parametrize("kind", ["ascending", "descending", "equal", "few_values"])
def test_thresholds_that_rise_with_every_tile(rng: np.random.Generator, device: Library, kind: str) -> None:
    check_topk(device, make_rows(rng, kind, 1, 23 * TILE + 5)[None], 40)


@pytest.mark.parametrize("k", [2, 40])
def test_candidates_that_crowd_in_one_place(rng: np.random.Generator, device: Library, k: int) -> None:
    logits = rng.normal(size=(1, 4, 45 * TILE)).astype(np.float32)
    logits[0, 0, 20 * TILE :: TILE] += 20
    logits[0, 1, 30 * TILE : 32 * TILE] += 20
    logits[0, 2, 12 * TILE :] += 20
    logits[0, 3, : 3 * TILE] += 20
    check_topk(device, logits, k, temperature=0.9)


@pytest.mark.parametrize(("lifted", "looks"), [(0, 1), (20, 1), (30, 2), (128, 2)])
def test_samples_that_mislead(
    rng: np.random.Generator, device: Library, monkeypatch: pytest.MonkeyPatch, lifted: int, looks: int
) -> None:
    apart: list[int] = []
    find = candidate_scan.find_first_threshold

    def recording(*args: Any) -> None:
        if cuda.threadIdx.x == 0:
            apart.append(int(args[8]))
        find(*args)

    monkeypatch.setattr(candidate_scan, "find_first_threshold", recording)
    tiles = 45
    logits = rng.normal(size=(1, 1, tiles * TILE)).astype(np.float32)
    # One of each quad of every other warp's load in the sample, so that all are maxima of groups.
    sampled = np.concatenate([np.arange(0, TILE, 4) + unit * (tiles // 8) * TILE for unit in range(0, 8, 2)])
    logits[0, 0, rng.permutation(sampled)[:lifted]] += 20
    check_topk(device, logits, 40, pieces_per_row=1)
    assert apart == [tiles // 8 * TILE, TILE][:looks]


def test_pieces_are_merged_whole(
    rng: np.random.Generator, device: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of a piece are in no certain order, and those that leave later are rounded to other units."""
    offered: list[Any] = []
    raise_threshold = candidate_merge.raise_threshold

    def recording(shared: Any, *args: Any) -> Any:
        if cuda.threadIdx.x == 0:
            offered.append(np.array(shared[6][: shared[0][COUNT]]))
        return raise_threshold(shared, *args)

    monkeypatch.setattr(candidate_merge, "raise_threshold", recording)
    k, pieces = 100, 24
    check_topk(device, rng.normal(size=(1, 1, pieces * TILE)).astype(np.float32), k, pieces_per_row=pieces)
    assert len(offered) > 1
    known: set[int] = set()
    for keys in offered:
        columns = ~(keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        new = [int(column) // TILE for column in columns if int(column) // TILE not in known]
        assert set(np.bincount(new, minlength=pieces)) <= {0, k}
        known |= set(new)
    assert known == set(range(pieces))


@pytest.mark.parametrize("value", [-1e9, 3e6, 2e38])
def test_absent_numbers_below_a_far_bound(rng: np.random.Generator, device: Library, value: float) -> None:
    # float32 has no number 60 temperatures below such a bound other than the bound.
    logits = np.full((1, 1, 9 * TILE + 37), value, np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    check_topk(device, logits, 5, temperature=0.1)


@pytest.mark.parametrize("size", [4, 8, 16, 32, 128, 256, 512, 1024])
def test_sorted_keys_are_falling(rng: np.random.Generator, size: int) -> None:
    def sort_kernel(keys: Any, ranked: Any) -> None:
        sort_keys(keys, np.uint32(size))
        for rank in range(cuda.threadIdx.x, size, THREADS):
            ranked[rank] = keys[bank_place(np.uint32(rank))]

    keys = rng.integers(0, 2**63, size, dtype=np.uint64)
    keys[rng.random(size) < 0.2] = 0
    ranked = cuda.to_device(np.ones(size, np.uint64))
    cuda.jit(sort_kernel)[1, THREADS](cuda.to_device(keys), ranked)
    np.testing.assert_array_equal(ranked.copy_to_host(), np.sort(keys)[::-1])


def test_no_two_keys_that_are_taken_at_once_share_a_bank() -> None:
    for near in 2 ** np.arange(9):
        fours = np.arange(256)
        low = fours & (near - 1)
        starts = ((fours - low) << 2) + low
        for key in range(4):
            places = np.array([int(bank_place(np.uint32(start + key * near))) for start in starts])
            half_warps = np.sort(places.reshape(-1, 16) % 16, axis=1)
            np.testing.assert_array_equal(half_warps, np.tile(np.arange(16), (16, 1)))


def test_host_arrays(rng: np.random.Generator) -> None:
    check_topk(numpy_library(), make_logits(rng, 1, 2, 300), 5)


@pytest.mark.parametrize("shape", [(2, 2), (2,)])
def test_masks_and_biases(rng: np.random.Generator, device: Library, shape: tuple[int, ...]) -> None:
    V = TILE + 70
    bias = np.where(rng.random(V) < 0.1, -np.inf, rng.normal(size=V)).astype(np.float32)
    mask = make_mask(rng, *shape, V=V)
    check_topk(device, make_logits(rng, 2, 2, V), 30, token_bitmask=mask, bias=bias, temperature=0.7)


def test_rows_that_are_none(rng: np.random.Generator, device: Library) -> None:
    got = check_topk(device, bad_rows(rng, 4, 700), 10)
    assert np.isnan(got.log_probs[0, 1::2]).all()
    with pytest.raises(ArgumentError, match=r"^logits\[0, 1, \d+\]"):
        draft_topk(device.put(bad_rows(rng, 2, 99)), 3, validate=True)


def test_temperatures_out_of_range(rng: np.random.Generator, device: Library) -> None:
    temperatures = np.array([1, 0, -1, np.nan, 1e31], np.float32)
    logits = make_rows(rng, "normal", 5, 2 * TILE)[:, None]
    got = draft_topk(device.put(logits), 5, temperature=device.put(temperatures))
    assert np.isnan(device.get(got.log_probs)).all(axis=(1, 2)).tolist() == [False, *[True] * 4]


def test_workspaces(rng: np.random.Generator, device: Library) -> None:
    logits = make_logits(rng, 2, 1, 600)
    shape = draft_topk_workspace_shape(2, 1, 600, 5)
    check_topk(device, logits, 5, workspace=device.put(np.full(shape, -1, np.int64)))
    with pytest.raises(ArgumentError, match=r"^workspace: got int64 .*expected int64 of shape \[pieces = "):
        draft_topk(device.put(logits), 5, workspace=device.put(np.zeros((1, 1), np.int64)))


@pytest.mark.parametrize(
    ("V", "pieces"), [(11 * TILE, 2), (11 * TILE + 37, 1), (11 * TILE + 2, 2), (2 * TILE + 1, 999)]
)
def test_a_row_has_the_same_bits_in_any_batch(
    rng: np.random.Generator, device: Library, V: int, pieces: int
) -> None:
    rows = np.concatenate([make_rows(rng, kind, 1, V) for kind in rng.choice(ROW_KINDS, 2, replace=False)])
    check_bits_in_any_batch(rng, device, rows, 9, [3, 7], pieces, temperature=0.7)
    check_topk(device, rows[:, None], 9, temperature=0.7, pieces_per_row=pieces)


@pytest.mark.parametrize("rows", [1, 3, 7, 5000])
@pytest.mark.parametrize(("row_tiles", "pieces"), [(1, 1), (7, 1), (7, 3), (7, 7), (160, 20), (256, 255)])
def test_rows_of_given_pieces_are_cut_alike(rows: int, row_tiles: int, pieces: int) -> None:
    # What the scan takes from a block on, and what the merge makes of it.
    tiles = rows * row_tiles
    for row in {0, rows // 2, rows - 1}:
        starts = [block * tiles // (rows * pieces) for block in range(row * pieces, (row + 1) * pieces + 1)]
        assert [start - row * row_tiles for start in starts] == [
            piece * row_tiles // pieces for piece in range(pieces + 1)
        ]
        for block, (start, end) in enumerate(pairwise(starts), row * pieces):
            for tile in (start, end - 1):
                assert piece_of(np.int64(tile), np.int64(tiles), rows * pieces) == block


def test_workspaces_of_given_pieces(rng: np.random.Generator, device: Library) -> None:
    V = 5 * TILE + 3
    logits = make_logits(rng, 2, 2, V)
    for pieces in (1, 7):
        shape = draft_topk_workspace_shape(2, 2, V, 5, pieces_per_row=pieces)
        workspace = device.put(np.full(shape, -1, np.int64))
        check_topk(device, logits, 5, workspace=workspace, pieces_per_row=pieces)
    assert shape == draft_topk_workspace_shape(2, 2, V, 5, pieces_per_row=6)
    with pytest.raises(ArgumentError, match=r"^workspace: got int64"):
        draft_topk(device.put(logits), 5, workspace=workspace)


def test_empty_batch(device: Library) -> None:
    got = draft_topk(device.put(np.zeros((0, 2, 9), np.float32)), 3)
    assert device.get(got.token_ids).shape == (0, 2, 3)
