"""Requests and heads over lanes: the stated policy, and that every request has one place at any time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from numba_ddtree.errors import ArgumentError
from numba_ddtree.lane_split import NOBODY, Places, split_heads, split_requests


def naive_split(work: list[int], free: list[int], loads: list[int]) -> list[int]:
    """Do what the policy says, a request at a time."""
    lanes = [-1] * len(work)
    while -1 in lanes:
        request = max((r for r, lane in enumerate(lanes) if lane < 0), key=lambda r: (work[r], -r))
        lane = min((n for n, places in enumerate(free) if places), key=lambda n: (loads[n], n))
        lanes[request] = lane
        loads[lane] += work[request]
        free[lane] -= 1
    return lanes


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
def test_the_policy(rng: np.random.Generator, lanes: int) -> None:
    for _ in range(20):
        count = int(rng.integers(0, 30))
        work = rng.integers(0, rng.choice([3, 9000]), count)  # few values, so that there are ties
        free = (np.bincount(rng.integers(0, lanes, count), minlength=lanes) + rng.integers(0, 2)).tolist()
        loads = rng.integers(0, 2000, lanes).tolist()
        got = split_requests(work, free, loads)
        assert got.dtype == np.int32
        assert got.tolist() == naive_split(work.tolist(), list(free), list(loads))


def test_the_busiest_lane_is_within_grahams_bound(rng: np.random.Generator) -> None:
    for lanes in (2, 3):
        work = rng.integers(1, 100, 7)
        split = split_requests(work, [7] * lanes)
        busiest = np.bincount(split, weights=work, minlength=lanes).max()
        best = min(
            np.bincount(other, weights=work, minlength=lanes).max()
            for other in itertools.product(range(lanes), repeat=7)
        )
        assert busiest <= best * (4 / 3 - 1 / (3 * lanes))


def test_lengths_are_balanced() -> None:
    assert split_requests(np.array([9000, 10, 10, 10, 8900, 10]), [3, 3]).tolist() == [0, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("heads", "lanes", "sizes"), [(64, 8, [8] * 8), (7, 3, [3, 2, 2]), (1, 1, [1]), (5, 5, [1] * 5)]
)
def test_heads_are_cut_in_equal_parts(heads: int, lanes: int, sizes: list[int]) -> None:
    parts = split_heads(heads, lanes)
    assert [part.stop - part.start for part in parts] == sizes
    assert np.r_[tuple(parts)].tolist() == list(range(heads))


def test_a_lane_without_a_head_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^num_heads: got 3; expected a number from 4"):
        split_heads(3, 4)


@pytest.mark.parametrize("sizes", [[2, 1], [4, 0], [0, 9]])
def test_places_for_all_are_needed(sizes: list[int]) -> None:
    with pytest.raises(ArgumentError, match=r"^places: .*at least 1 for each lane, and 4 together"):
        Places(4, sizes, 1)


def check(places: Places, sizes: list[int]) -> None:
    """Every request has one place, and its place has it."""
    assert [len(owners) for owners in places.owners] == sizes
    seated = [int(owner) for owners in places.owners for owner in owners if owner != NOBODY]
    assert sorted(seated) == list(range(len(places.lanes)))
    for request, (lane, place) in enumerate(zip(places.lanes, places.places, strict=True)):
        assert places.owners[lane][place] == request


@pytest.mark.parametrize("sizes", [[5], [3, 2], [4, 4], [1, 1, 3], [5, 5, 5]])
def test_requests_come_and_go(rng: np.random.Generator, sizes: list[int]) -> None:
    places = Places(5, sizes, 10)
    check(places, sizes)
    active: dict[int, int] = {}
    for _ in range(60):
        before = [owners.copy() for owners in places.owners]
        if rng.random() < 0.2:
            lengths = rng.integers(0, 99, rng.integers(0, 6)).astype(np.int32)
            places.begin_all(lengths)
            active = dict(enumerate((lengths + 10).tolist()))
            for owners in places.owners:
                takes_part = np.isin(owners, list(active))
                assert takes_part.tolist() == sorted(takes_part.tolist(), reverse=True)
                assert owners[takes_part].tolist() == sorted(owners[takes_part].tolist())
        else:
            requests = rng.choice(5, rng.integers(1, 6), replace=False).astype(np.int32)
            lengths = rng.integers(0, 99, len(requests)).astype(np.int32)
            goes_on = {r: (places.lanes[r], places.places[r]) for r in active if r not in requests}
            want = want_lanes(places, active, requests, lengths + 10, sizes)
            changed = places.begin(requests, lengths)
            assert places.lanes[requests].tolist() == want
            assert all((places.lanes[r], places.places[r]) == home for r, home in goes_on.items())
            active |= dict(zip(requests.tolist(), (lengths + 10).tolist(), strict=True))
            for owners, old, marked in zip(places.owners, before, changed, strict=True):
                is_new = (owners != old) | np.isin(owners, requests)
                assert marked.tolist() == np.flatnonzero(is_new).tolist()
        check(places, sizes)
        assert places.loads() == [
            sum(work for request, work in active.items() if places.lanes[request] == lane)
            for lane in range(len(sizes))
        ]


def want_lanes(
    places: Places,
    active: dict[int, int],
    requests: NDArray[np.int32],
    work: NDArray[np.int32],
    sizes: list[int],
) -> list[int]:
    going = [request for request in active if request not in requests]
    free = [size - sum(places.lanes[r] == lane for r in going) for lane, size in enumerate(sizes)]
    loads = [sum(active[r] for r in going if places.lanes[r] == lane) for lane in range(len(sizes))]
    return naive_split(work.tolist(), free, loads)
