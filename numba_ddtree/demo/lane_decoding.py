"""Decoding a batch on several lanes: each has some of the prompts, and one thread drives them all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.demo.array_module import ArrayModule
from numba_ddtree.demo.decoders import (
    Decoded,
    Decoder,
    DecodeSettings,
    Decoding,
    PendingRound,
    Round,
    check_prompts,
)
from numba_ddtree.demo.model import DemoModel, load_model
from numba_ddtree.demo.stage_times import StageEvents, StageTimes
from numba_ddtree.device_group import DeviceGroup, of_each_lane
from numba_ddtree.lane_split import split_requests
from numba_ddtree.lanes import Lane


@dataclass(slots=True, eq=False)
class LaneTime:
    """Times of one lane.

    Attributes
    ----------
    name : str
    requests : int32 [n]
        The prompts' places.
    rounds : int
        That have ended.
    seconds : dict of str to float
        By stage. Lanes that share a device include what they wait for each other.
    """

    name: str
    requests: NDArray[np.int32]
    seconds: dict[str, float]
    rounds: int = 0


class LaneTimes(StageTimes):
    """Times of several lanes: of each its stages, of all together the wall clock.

    Attributes
    ----------
    lanes : list of LaneTime
    wall : float
        Seconds of all rounds.
    """

    def __init__(self, module: ArrayModule) -> None:
        super().__init__(module)
        self.lanes: list[LaneTime] = []
        self.wall = 0.0

    @property
    def decoding(self) -> float:
        """Seconds of all rounds, without reading the prompts."""
        return self.wall

    def as_json(self) -> list[dict[str, Any]]:
        """Return the lanes as JSON's types."""
        return [
            {
                "name": lane.name,
                "prompts": lane.requests.tolist(),
                "rounds": lane.rounds,
                "seconds": lane.seconds,
            }
            for lane in self.lanes
        ]


@dataclass(slots=True, eq=False)
class _Share:
    """A lane's part of the batch."""

    lane: Lane
    decoding: Decoding
    time: LaneTime
    pending: PendingRound | None = None

    @property
    def is_done(self) -> bool:
        return self.pending is None and self.decoding.is_done


class LaneDecoding:
    """A batch that is being decoded on lanes, with the interface of `Decoding`; `begin` makes one.

    Attributes
    ----------
    decoded : Decoded
        What is written so far, in the order of the prompts; its times are `LaneTimes`.
    """

    def __init__(self, decoded: Decoded, times: LaneTimes, shares: Sequence[_Share]) -> None:
        self.decoded = decoded
        self._times = times
        self._shares = shares

    @classmethod
    def begin(
        cls,
        models: Sequence[DemoModel],
        devices: DeviceGroup,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings,
    ) -> LaneDecoding:
        """Split the prompts by their length, as `split_requests` says, and read them.

        Parameters
        ----------
        models : sequence of DemoModel
            Of each lane, on its device.
        devices : DeviceGroup
        decoder, prompts, settings
            As for `decode`.

        Raises
        ------
        ArgumentError, LaneError
            As from `decode`, and what a lane's device raises, with the lane's name.
        """
        of_each_lane("models", list(models), devices)
        check_prompts(models[0], prompts, settings)
        work = np.array([len(prompt) for prompt in prompts], np.int64)
        lanes = split_requests(work, [-(-len(prompts) // len(devices))] * len(devices))
        times = LaneTimes(models[0].module)
        decoded = Decoded.empty(decoder, len(prompts), times)
        shares = []
        for lane, model in zip(devices, models, strict=True):
            requests = np.flatnonzero(lanes == lane.index).astype(np.int32)
            if len(requests):
                own = [prompts[request] for request in requests.tolist()]
                with on_lane(lane, model.module):
                    of_lane = StageEvents(model.module)
                    decoding = Decoding.begin(model, decoder, own, settings, requests=requests, times=of_lane)
                times.lanes.append(LaneTime(str(lane), requests, of_lane.seconds))
                shares.append(_Share(lane, decoding, times.lanes[-1]))
        whole = cls(decoded, times, shares)
        for share in shares:
            whole._collect(share)
        return whole

    @property
    def is_done(self) -> bool:
        """Whether every text has ended."""
        return all(share.is_done for share in self._shares)

    def run_round(self) -> Round:
        """Launch a round on every lane that has none, and return the first that ends, of one lane."""
        began = time.perf_counter()
        for share in self._shares:
            if share.pending is None and not share.decoding.is_done:
                with on_lane(share.lane, share.decoding.model.module):
                    share.pending = share.decoding.begin_round()
        share, pending = self._first_done()
        share.pending = None
        with on_lane(share.lane, share.decoding.model.module):
            this_round = share.decoding.end_round(pending)
        share.time.rounds += 1
        self._collect(share)
        self._times.wall += time.perf_counter() - began
        return this_round

    def _first_done(self) -> tuple[_Share, PendingRound]:
        """Look at the lanes in turn until one has done its round; the lanes work on meanwhile."""
        while True:
            for place, share in enumerate(self._shares):
                if share.pending is not None and share.lane.is_done:
                    self._shares = [*self._shares[place + 1 :], *self._shares[: place + 1]]
                    return share, share.pending

    def _collect(self, share: _Share) -> None:
        """Bring what a lane has written into the order of the prompts."""
        own = share.decoding.decoded
        for place, request in enumerate(share.time.requests.tolist()):
            self.decoded.tokens[request] = own.tokens[place]
            self.decoded.accept_lengths[request] = own.accept_lengths[place]
            self.decoded.margins[request] = own.margins[place]
            self.decoded.finish_reasons[request] = own.finish_reasons[place]
        seconds = [lane.seconds for lane in self._times.lanes]
        self._times.seconds = {
            name: sum(each.get(name, 0.0) for each in seconds) for each in seconds for name in each
        }


def load_models(model: DemoModel, devices: DeviceGroup) -> list[DemoModel]:
    """Return a model for each lane, one for each device; `model` is that of the first lane."""
    models = {devices.home.device_id: model}
    for lane in devices:
        if lane.device_id is not None and lane.device_id not in models:
            with on_lane(lane, model.module):
                models[lane.device_id] = load_model(model.module, model.dtype)
    return [models[lane.device_id] for lane in devices]


@contextmanager
def on_lane(lane: Lane, module: ArrayModule) -> Iterator[None]:
    """Make a lane's device and stream current, for cupy too."""
    with ExitStack() as contexts:
        contexts.enter_context(lane)
        if module.backend == "cuda":
            contexts.enter_context(module.xp.cuda.Device(lane.device_id))
            contexts.enter_context(module.xp.cuda.Stream.from_external(lane.stream))
        yield
