"""A batch's rounds over several lanes: every request on one of them, results in the caller's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from numba_ddtree.arrays import HOST, StreamLike, check_count
from numba_ddtree.device_group import DeviceGroup, as_core_stream, of_each_lane
from numba_ddtree.draft_candidates import best_pieces_per_row
from numba_ddtree.errors import ArgumentError
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.lane_split import Places
from numba_ddtree.lanes import Capturable, DeviceLane, Lane
from numba_ddtree.refs.round_state import NO_LIMIT
from numba_ddtree.request_options import (
    BUDGETS,
    PIECES,
    Option,
    StageOptions,
    checked_rows,
    merged,
    split_options,
)
from numba_ddtree.round import DDTreeRound
from numba_ddtree.round_gather import ResultGatherer
from numba_ddtree.round_plan import MAX_BATCH, check_sizes, checked_width
from numba_ddtree.round_state import checked_start
from numba_ddtree.tree import AcceptResult, Array, DraftTree
from numba_ddtree.tree_accept import result_shapes
from numba_ddtree.workspace import Field, allocate

ROUND = "round"
"""The name of the graphs that `RoundLanes.capture` makes."""

Model: TypeAlias = Callable[[int, StreamLike], object]
"""Runs a model on a lane, which it is given by its index, and on that lane's stream."""


class RoundLanes:
    """Rounds of one batch, split over the lanes of a `DeviceGroup`; `plan` makes them.

    Each lane has a `DDTreeRound` of its own for some of the requests, and runs each round as one CUDA graph.
    Requests are split when they begin: the longest prefix first, each to the lane that has the least to do,
    a request's work being its prefix and its tree (`numba_ddtree.lane_split.split_requests`). Lengths count
    as they were when their requests began, and finished requests count until others begin in their places.

    What the stages give a request does not depend on the rest of the batch, since every lane's `draft_topk`
    cuts a row into as many pieces as that of a `DDTreeRound` of the whole batch would; and draws are keyed by
    the request's number here, not by its place in a lane. On devices of one kind, results are to the bit
    those of one `DDTreeRound` of the same sizes and options.

    Attributes
    ----------
    devices : DeviceGroup
    rounds : tuple of DDTreeRound
        Of each lane.
    result : AcceptResult
        Of all requests in the caller's order, on the first lane's device; undefined until `gather`.
    """

    def __init__(
        self,
        devices: DeviceGroup,
        rounds: Sequence[DDTreeRound],
        places: Places,
        options: Mapping[Option, NDArray[Any]],
        lane_options: Sequence[Mapping[Option, Any]],
    ) -> None:
        self.devices = devices
        self.rounds = tuple(rounds)
        self._places = places
        self._options = options  # of each request
        self._lane_options = lane_options  # the same, of the places of each lane
        planned = self.rounds[0].planned
        shapes = result_shapes(len(places.lanes), planned.draft_length)
        owners = {str(lane): Field(table.shape, np.int32) for lane, table in enumerate(places.owners)}
        result = {name: Field(shape, np.int32) for name, shape in shapes.items()}
        with devices.home:
            _, arrays = allocate({"result": result, "owners": owners}, planned.placement)
        self.result = AcceptResult(**arrays["result"])
        self._owners = list(arrays["owners"].values())
        self._gatherers = [
            ResultGatherer(devices, lane, of_lane.result, table, self.result)
            for lane, of_lane, table in zip(devices, self.rounds, self._owners, strict=True)
        ]
        home = devices.home
        self._gathered = home.new_event() if isinstance(home, DeviceLane) else None
        self._unread: list[Any] = []  # events of a `gather` that the lanes do not come after yet
        self._reader: Any = None  # the stream of the last `gather`
        self._results = [lane.done() for lane in devices]  # events of each lane's results
        self._write_owners()

    @classmethod
    def plan(
        cls,
        devices: DeviceGroup,
        max_batch: int,
        draft_length: int,
        vocabulary: int,
        budget: int,
        *,
        k: int | None = None,
        draft_dtype: DTypeLike = np.float32,
        target_dtype: DTypeLike = np.float32,
        budgets: NDArray[np.int32] | None = None,
        caches: Sequence[KVCaches | None] | None = None,
        options: StageOptions | None = None,
        lane_options: Sequence[StageOptions] | None = None,
        places: Sequence[int] | None = None,
        library: str | None = None,
    ) -> RoundLanes:
        """Plan a `DDTreeRound` on each lane; synchronises.

        Parameters
        ----------
        devices : DeviceGroup
            Open for as long as the rounds are used.
        max_batch : int
            B, the requests of all lanes together.
        draft_length, vocabulary, budget, k, draft_dtype, target_dtype, library
            As for `DDTreeRound.plan`.
        budgets : int32 [B], on the host, optional
            Each request's own budget; read when the request begins.
        caches : sequence of KVCaches, optional
            Of each lane. Contiguous ones hold a request for each of the lane's places.
        options : dict of dicts, optional
            As for `DDTreeRound.plan`, in the caller's order. Arrays are the host's with a row for each
            request, which is read when the request begins; but ``bias``, ``verify_cost`` and
            ``stop_token_ids`` of one dimension are for all requests, and have to be where the lanes are.
            Without ``request_ids``, draws are keyed by the requests' numbers. Without ``pieces_per_row`` of
            `draft_topk`, it is for every lane what a `DDTreeRound` of B requests would use on the first
            lane's device; of small lanes, more pieces may be quicker.
        lane_options : sequence of dicts of dicts, optional
            Further options of each lane: arrays on its device with a row for each of its places, read at
            every round. Page tables are among these.
        places : sequence of int, optional
            How many requests each lane has room for; by default as many on each as B asks for. More make
            for better balanced splits, and for rounds that take longer.
        library : str, optional
            Whose arrays the results are.

        Returns
        -------
        RoundLanes

        Raises
        ------
        ArgumentError, BackendError, LaneError
            As from `DDTreeRound.plan`, with the lane's name.
        """
        check_sizes(max_batch, draft_length, vocabulary, budget)
        width = checked_width(k, vocabulary, budget)
        if not isinstance(devices, DeviceGroup):
            raise ArgumentError("devices", type(devices).__name__, "a DeviceGroup")
        equal = [-(-max_batch // len(devices))] * len(devices)
        sizes = of_each_lane("places", places, devices, equal)
        seats = Places(max_batch, [check_count("places", size, 0, MAX_BATCH) for size in sizes], budget + 1)
        for_all, of_each = split_options(options or {}, max_batch)
        if budgets is not None:
            of_each[BUDGETS] = checked_rows("budgets", budgets, max_batch).astype(np.int32)
        of_each.setdefault(("choose_tokens", "request_ids"), np.arange(max_batch, dtype=np.int32))
        if not devices.on_host:
            device_id = devices.home.device_id
            pieces = best_pieces_per_row(max_batch, draft_length, vocabulary, width, device_id)
            for_all.setdefault(PIECES, pieces)
        rounds, lane_rows = [], []
        for lane, own_caches, own in zip(
            devices,
            of_each_lane("caches", caches, devices, [None] * len(devices)),
            of_each_lane("lane_options", lane_options, devices, [{}] * len(devices)),
            strict=True,
        ):
            with lane:
                rows = {name: lane.put(seats.rows_of(row, lane.index)) for name, row in of_each.items()}
                lane_rows.append(dict(rows))
                planned = DDTreeRound.plan(
                    len(seats.owners[lane.index]),
                    draft_length,
                    vocabulary,
                    budget,
                    k=k,
                    draft_dtype=draft_dtype,
                    target_dtype=target_dtype,
                    budgets=rows.pop(BUDGETS, None),
                    caches=own_caches,
                    options=merged(for_all, rows, own=own),
                    library=library,
                    device_id=lane.device_id,
                    backend="numpy" if lane.device_id is None else None,
                )
                rounds.append(planned)
        return cls(devices, rounds, seats, of_each, lane_rows)

    @property
    def lane_of(self) -> NDArray[np.int32]:
        """The lane of each request, int32 [B]; a copy."""
        return self._places.lanes.copy()

    @property
    def place_of(self) -> NDArray[np.int32]:
        """The place of each request in its lane's round and caches, int32 [B]; a copy."""
        return self._places.places.copy()

    def start(
        self,
        root_tokens: Array,
        prefix_lengths: Array,
        *,
        remaining: Array | None = None,
        requests: Array | None = None,
    ) -> None:
        """Put requests into the batch, each on a lane and at a place there: `lane_of` and `place_of`.

        Parameters
        ----------
        root_tokens, prefix_lengths, remaining, requests
            As for `DDTreeRound.start`, on the host, which splits the requests. Without `requests`, the first
            ones are split anew, and no other takes part; with them, those that go on stay where they are.

        Raises
        ------
        ArgumentError
            As from `DDTreeRound.start`, and for device arrays.

        Notes
        -----
        Comes after the rounds that were launched before, without waiting for them.
        """
        batch = len(self._places.lanes)
        _, views = checked_start(batch, HOST, root_tokens, prefix_lengths, remaining, requests)
        if requests is None:
            order = np.arange(len(views["root_tokens"]), dtype=np.int32)
            self._places.begin_all(views["prefix_lengths"])
            places = [
                np.flatnonzero(np.isin(owners, order)).astype(np.int32) for owners in self._places.owners
            ]
        else:
            order, rows = _last_of_each(views["requests"])
            views = {name: None if view is None else view[rows] for name, view in views.items()}
            places = self._places.begin(order, views["prefix_lengths"])
        self._follow_reader()
        self._write_owners()
        columns = _columns(batch, order, views)
        for lane, planned, changed in zip(self.devices, self.rounds, places, strict=True):
            owners = self._places.owners[lane.index][changed]
            # A place whose owner does not begin has nothing remaining, and so takes no part.
            start = {name: np.where(owners < 0, 0, column[owners]) for name, column in columns.items()}
            if requests is not None:
                start["requests"] = changed.astype(np.int32)
            with lane:
                self._write_options(lane)
                planned.start(**start, stream=lane.stream)
        self._results = [lane.done() for lane in self.devices]

    def draft(self, logits: Sequence[Array]) -> tuple[DraftTree, ...]:
        """Make a round's trees on every lane; neither allocates nor synchronises.

        Parameters
        ----------
        logits : sequence of arrays [places, L, V] of the planned dtype
            The drafter's, of each lane: on its device, and ready on its stream.

        Returns
        -------
        tuple of DraftTree
            Of each lane's places, on its device and its stream.

        Raises
        ------
        ArgumentError
            As from `DDTreeRound.draft`, with the lane's name.
        """
        trees = []
        for lane, planned, own in self._with("logits", logits):
            with lane:
                trees.append(planned.draft(own, stream=lane.stream))
        return tuple(trees)

    def accept(self, target_logits: Sequence[Array]) -> None:
        """Walk down the trees, compact the caches and move on, on every lane; `gather` gives the results.

        Parameters
        ----------
        target_logits : sequence of arrays [places, N, V] of the planned dtype
            The target's, of each lane, as for `draft`.

        Raises
        ------
        ArgumentError
            As from `DDTreeRound.accept`, with the lane's name.
        """
        self._follow_reader()
        for lane, planned, own in self._with("target_logits", target_logits):
            with lane:
                planned.accept(own, stream=lane.stream)
        self._results = [lane.done() for lane in self.devices]

    def capture(
        self,
        draft_logits: Sequence[Array],
        target_logits: Sequence[Array],
        *,
        drafter: Model | None = None,
        target: Model | None = None,
    ) -> None:
        """Capture a round of each lane as one graph, which `run` launches.

        Parameters
        ----------
        draft_logits, target_logits : sequences of arrays
            Of each lane, as for `draft` and `accept`; every round reads what is in them when it runs.
        drafter, target : callable, optional
            The models, to be captured with the round: the drafter writes a lane's draft logits; the target
            reads the tree of the lane's round, and writes its logits. Neither allocates nor synchronises,
            and what they compile is compiled before.

        Raises
        ------
        ArgumentError, LaneError
            As from `draft` and `accept`, and what a model raises, with the lane's name.
        """
        of_targets = self._with("target_logits", target_logits)
        for (lane, planned, logits), (_, _, scores) in zip(
            self._with("draft_logits", draft_logits), of_targets, strict=True
        ):
            lane.capture(ROUND, _round_call(lane, planned, logits, scores, drafter, target))

    def run(self, *, after: StreamLike = None) -> None:
        """Launch the captured round on every lane, one graph each; the host does not wait.

        Parameters
        ----------
        after
            A stream of the first lane's device: the round comes after what it has to do. By default it
            comes after the lanes' own work alone.

        Raises
        ------
        ArgumentError
            Nothing was captured.
        LaneError
            A launch failed, by its own fault or that of earlier work.
        """
        self.devices.check_stream(after)
        marks, reader = [], self._reader
        if after is not None:
            stream = as_core_stream(after)
            marks.append(self.devices.mark(stream))
            if stream is reader:  # whose mark comes after what it has read
                self._unread = []
        # What the reader itself does comes after its reading anyway.
        events = [marks if lane.stream is reader else marks + self._unread for lane in self.devices]
        self._results = self.devices.launch(ROUND, after=events)
        self._unread = []

    def gather(self, *, stream: StreamLike = None) -> AcceptResult:
        """Bring the results of the last round to the first lane's device, in the caller's order.

        Parameters
        ----------
        stream
            Of the first lane's device: what it does next sees the results, and they stay until what it does
            before the next `gather` is done. By default the first lane's own.

        Returns
        -------
        AcceptResult
            `result`, whose arrays the next `gather` writes again.

        Notes
        -----
        Neither allocates nor synchronises on a device: events order the copies and what the lanes do next.
        """
        self.devices.check_stream(stream)
        home = self.devices.home
        target = home.stream if stream is None or self._gathered is None else as_core_stream(stream)
        with home:
            if self._reader is not None and self._reader is not target:
                target.wait(self._gathered)  # so that the event is of what both streams read
            for gatherer, event in zip(self._gatherers, self._results, strict=True):
                gatherer.run(target, event)
            if self._gathered is not None:
                target.record(self._gathered)
                self._unread, self._reader = [self._gathered], target
        return self.result

    def _with(self, name: str, arrays: Sequence[Array]) -> list[tuple[Lane, DDTreeRound, Array]]:
        """Return each lane with its round and its array of the caller's."""
        return list(zip(self.devices, self.rounds, of_each_lane(name, arrays, self.devices), strict=True))

    def _follow_reader(self) -> None:
        """Let the lanes write again after the last `gather` has read."""
        for event in self._unread:
            for lane in self.devices:
                lane.wait_for(event)
        self._unread = []

    def _write_owners(self) -> None:
        # On the first lane's stream, which `gather` comes after.
        for table, owners in zip(self._owners, self._places.owners, strict=True):
            self.devices.home.write(table, owners)

    def _write_options(self, lane: Lane) -> None:
        for name, rows in self._options.items():
            lane.write(self._lane_options[lane.index][name], self._places.rows_of(rows, lane.index))


def _last_of_each(requests: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Return each request once, in order, and where it stands last."""
    found, from_end = np.unique(requests[::-1], return_index=True)
    return found, len(requests) - 1 - from_end


def _columns(
    batch: int, order: NDArray[np.int32], views: Mapping[str, NDArray[np.int32] | None]
) -> dict[str, NDArray[np.int32]]:
    """Return what requests begin with, by request; 0 for those that do not begin."""
    columns = {}
    for name in ("root_tokens", "prefix_lengths", "remaining"):
        columns[name] = np.zeros(batch, np.int32)
        given = views[name]
        columns[name][order] = NO_LIMIT if given is None else given
    return columns


def _round_call(
    lane: Lane,
    planned: DDTreeRound,
    logits: Array,
    scores: Array,
    drafter: Model | None,
    target: Model | None,
) -> Capturable:
    def call(stream: StreamLike) -> None:
        if drafter is not None:
            drafter(lane.index, stream)
        planned.draft(logits, stream=stream)
        if target is not None:
            target(lane.index, stream)
        planned.accept(scores, stream=stream)

    return call
