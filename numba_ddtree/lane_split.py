"""Who works where: requests over lanes by the length of their prefix, heads over lanes in equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import check_count
from numba_ddtree.errors import ArgumentError

NOBODY = -1


def split_requests(
    work: NDArray[np.int64], free_places: Sequence[int], loads: Sequence[int] | None = None
) -> NDArray[np.int32]:
    """Choose a lane for each request: the one with the most work goes first, to the lane that has the least.

    This is Graham's rule of the longest processing time first (SIAM J. Appl. Math. 17, 1969): with places
    for all on every lane, the busiest lane has at most 4/3 - 1/(3 lanes) of what the best split gives it.
    Of equal work the earlier request goes first, of equal lanes the earlier one takes it.

    Parameters
    ----------
    work : int64 [n]
        Of each request: the keys that its queries attend to.
    free_places : sequence of int
        Requests that each lane may still take; n together, or more.
    loads : sequence of int, optional
        Work that each lane has already; none by default.

    Returns
    -------
    int32 [n]
        Lanes.
    """
    free = list(free_places)
    load = [0] * len(free) if loads is None else list(loads)
    lanes = np.empty(len(work), np.int32)
    for request in np.argsort(-work, kind="stable").tolist():
        lane = min((lane for lane, places in enumerate(free) if places), key=load.__getitem__)
        lanes[request] = lane
        load[lane] += int(work[request])
        free[lane] -= 1
    return lanes


def split_heads(num_heads: int, lanes: int) -> list[slice]:
    """Cut heads into neighbouring parts, one for each lane, the first ones larger by one where need be.

    Raises
    ------
    ArgumentError
        Fewer heads than lanes.
    """
    check_count("num_heads", num_heads, lanes, 2**31 - 1)
    ends = [lane * (num_heads // lanes) + min(lane, num_heads % lanes) for lane in range(lanes + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


class Places:
    """Who has which place of which lane: every request of a batch has one, whether it takes part or not.

    Parameters
    ----------
    max_batch : int
        Requests.
    sizes : sequence of int
        Places of each lane, `max_batch` together or more.
    slots : int
        Of a tree; with the prefix, a request's work.

    Attributes
    ----------
    lanes, places : int32 [max_batch]
        Where each request is.
    owners : list of int32 [size]
        Whose each lane's places are; `NOBODY` where a place is no one's.
    """

    def __init__(self, max_batch: int, sizes: Sequence[int], slots: int) -> None:
        if min(sizes) < 1 or sum(sizes) < max_batch:
            expected = f"at least 1 for each lane, and {max_batch} together"
            raise ArgumentError("places", list(sizes), expected)
        self._slots = slots
        self._work = np.zeros(max_batch, np.int64)  # 0: takes no part, as far as is known here
        self.lanes = np.full(max_batch, NOBODY, np.int32)
        self.places = np.full(max_batch, NOBODY, np.int32)
        self.owners = [np.full(size, NOBODY, np.int32) for size in sizes]
        for request, lane in enumerate(split_requests(np.ones(max_batch, np.int64), sizes).tolist()):
            self._seat(request, lane)

    def loads(self) -> list[int]:
        """Return each lane's work, as it was when its requests began."""
        return [int(self._work[self.lanes == lane].sum()) for lane in range(len(self.owners))]

    def rows_of(self, rows: NDArray[Any], lane: int) -> NDArray[Any]:
        """Return the requests' rows in the order of a lane's places; any row where a place is no one's."""
        return rows[np.maximum(self.owners[lane], 0)]

    def begin_all(self, prefix_lengths: NDArray[np.int32]) -> None:
        """Find places for the first requests, when no other takes part any more.

        On every lane they have the first places, in their order.

        Parameters
        ----------
        prefix_lengths : int32 [n]
        """
        count = len(prefix_lengths)
        self._work[:] = 0
        self._work[:count] = prefix_lengths.astype(np.int64) + self._slots
        for request in range(len(self._work)):
            self._vacate(request)
        for request, lane in enumerate(split_requests(self._work[:count], self._free()).tolist()):
            self._seat(request, lane)
        self._seat_idle()

    def begin(
        self, requests: NDArray[np.int32], prefix_lengths: NDArray[np.int32]
    ) -> list[NDArray[np.int32]]:
        """Find places for requests that begin; those that go on keep theirs, the rest may have to move.

        Parameters
        ----------
        requests : int32 [n]
            Each once.
        prefix_lengths : int32 [n]

        Returns
        -------
        list of int32 arrays
            The places of each lane whose owner is another one than before, or begins.
        """
        before = [owners.copy() for owners in self.owners]
        self._work[requests] = 0
        homes = {request: (self.lanes[request], self.places[request]) for request in self._idle()}
        for request in homes:
            self._vacate(request)
        work = prefix_lengths.astype(np.int64) + self._slots
        lanes = split_requests(work, self._free(), self.loads())
        self._work[requests] = work
        chosen = list(zip(requests.tolist(), lanes.tolist(), strict=True))
        for request, lane in chosen:
            if homes[request][0] == lane:
                self._seat(request, *homes[request])
        for request, lane in chosen:
            if homes[request][0] != lane:
                self._seat(request, lane)
        for request in self._idle():
            lane, place = homes[request]
            if self.owners[lane][place] < 0:
                self._seat(request, lane, place)
        self._seat_idle()
        return [
            np.flatnonzero((owners != old) | np.isin(owners, requests)).astype(np.int32)
            for owners, old in zip(self.owners, before, strict=True)
        ]

    def _idle(self) -> list[int]:
        """Return the requests that take no part."""
        idle: list[int] = np.flatnonzero(self._work == 0).tolist()
        return idle

    def _free(self) -> list[int]:
        return [int((owners < 0).sum()) for owners in self.owners]

    def _seat_idle(self) -> None:
        """Give those that have no place what is left."""
        left = [lane for lane, places in enumerate(self._free()) for _ in range(places)]
        for request, lane in zip(np.flatnonzero(self.lanes < 0).tolist(), left, strict=False):
            self._seat(request, lane)

    def _seat(self, request: int, lane: int, place: int | None = None) -> None:
        """Give a request a place, by default the lane's first that is no one's."""
        if place is None:
            place = int(np.argmax(self.owners[lane] < 0))
        self.owners[lane][place] = request
        self.lanes[request], self.places[request] = lane, place

    def _vacate(self, request: int) -> None:
        self.owners[self.lanes[request]][self.places[request]] = NOBODY
        self.lanes[request] = self.places[request] = NOBODY
