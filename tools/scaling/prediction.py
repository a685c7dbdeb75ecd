"""Round time and tokens a second over several devices: a closed form, and a simulation that checks it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.lane_split import Places
from tools.scaling.costs import Costs

TURNS = 15  # requests of each place, at least, so that the even split of the first is forgotten


@dataclass(frozen=True)
class Workload:
    """What is decoded, and how.

    Attributes
    ----------
    batch, budget : int
    prefix, new_tokens : int
        Mean length of the prompts, and tokens that each request writes before another takes its place.
    heads, layers : int
        Of the target; without layers there is no attention.
    accept_length : float
        Mean tokens of a round and request.
    model_us : float
        Of the drafter and of the target without its attention, a round on every device.
    by_head : bool
        Heads are split over the devices, and not requests.
    """

    batch: int
    budget: int
    prefix: int
    new_tokens: int
    heads: int
    layers: int
    accept_length: float
    model_us: float
    by_head: bool


@dataclass(frozen=True)
class Prediction:
    """Mean time of a round, and the rate of all devices together."""

    round_us: float
    tokens_per_second: float


def predict(costs: Costs, work: Workload, devices: int) -> Prediction:
    """Return the closed form, by the busiest device's share of the requests and of their keys.

    Places that fall free one at a time are taken by whoever comes next, so that after a while the lengths on
    a device are independent of each other, and their sum is about normal; what is evened out where several
    fall free at once is left out. Of the largest of several such sums the mean
    is by Blom's approximation (Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    sharers = 1 if work.by_head else devices
    requests = -(-work.batch // sharers)
    mean_length = work.prefix + work.new_tokens / 2
    deviation = math.sqrt(((2 * work.prefix) ** 2 + work.new_tokens**2) / 12)  # both are uniform
    above = NormalDist().inv_cdf((sharers - 0.375) / (sharers + 0.25)) if sharers > 1 else 0.0
    keys = requests * mean_length + above * math.sqrt(requests) * deviation
    round_us = _device_us(costs, work, devices, requests, keys)
    return Prediction(round_us, 1e6 * work.batch * work.accept_length / round_us)


def simulate(
    costs: Costs, work: Workload, devices: int, rng: np.random.Generator, requests: int = 600
) -> Prediction:
    """Run rounds of many requests, lengths and acceptance drawn, split as by `RoundLanes`, all in step.

    Prompts are of uniform length, from nothing to twice the mean. A round gives a request a geometric
    number of tokens, at most all drafted ones and one more. Every finished request is followed by another.
    """
    sharers = 1 if work.by_head else devices
    places = Places(work.batch, [-(-work.batch // sharers)] * sharers, work.budget + 1)
    lengths = _prompts(rng, work, work.batch)
    places.begin_all(lengths)
    left = rng.integers(1, work.new_tokens + 1, work.batch)  # so that they do not all end at once
    lengths += (work.new_tokens - left).astype(np.int32)
    deepest = min(costs.draft_length, work.budget) + 1
    chance = _geometric_parameter(work.accept_length, deepest)
    turns = max(requests / work.batch, TURNS)
    rounds = math.ceil(turns * work.new_tokens / work.accept_length)
    total_us, tokens = 0.0, 0
    for _ in range(rounds):
        total_us += max(
            _device_us(costs, work, devices, int(here.sum()), float(lengths[here].sum()))
            for here in (places.lanes == lane for lane in range(sharers))
            if here.any()
        )
        emitted = np.minimum(np.minimum(rng.geometric(chance, work.batch), deepest), left)
        tokens += int(emitted.sum())
        lengths += emitted.astype(np.int32)
        left -= emitted
        ended = np.flatnonzero(left == 0).astype(np.int32)
        if len(ended):
            lengths[ended] = _prompts(rng, work, len(ended))
            left[ended] = work.new_tokens
            places.begin(ended, lengths[ended])
    return Prediction(total_us / rounds, 1e6 * tokens / total_us)


def _device_us(costs: Costs, work: Workload, devices: int, requests: int, keys: float) -> float:
    """Microseconds of one device's round."""
    nodes = work.budget + 1
    heads = -(-work.heads // devices) if work.by_head else work.heads
    attention = costs.attention_us(int(keys) + requests * nodes, heads, nodes, work.layers)
    return work.model_us + costs.round_us(requests, work.budget) + attention


def _prompts(rng: np.random.Generator, work: Workload, count: int) -> NDArray[np.int32]:
    return rng.integers(0, 2 * work.prefix + 1, count).astype(np.int32)


def _geometric_parameter(mean: float, deepest: int) -> float:
    """Return the p for which a geometric number cut at `deepest` has the mean."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        is_long = (1 - (1 - middle) ** deepest) / middle > mean
        low, high = (middle, high) if is_long else (low, middle)
    return high


@dataclass(frozen=True)
class LaneComparison:
    """Two lanes, predicted and measured; microseconds a round.

    Attributes
    ----------
    devices : str
        Of the lanes: ``"0,0"`` for one device, ``"0,1"`` for two.
    batch : int
    predicted : float
        On one device, what does not grow with the batch overlaps entirely.
    measured : float
    alone : float
        Without any overlap: the lanes one after the other.
    """

    devices: str
    batch: int
    predicted: float
    measured: float
    alone: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def overlapped_us(costs: Costs, batch: int, budget: int, lanes: int) -> float:
    """Predict lanes of one device that share its bandwidth, while everything else of them overlaps.

    What grows with the batch is the reading of logits, of which the lanes together have as much as one lane
    of all requests; the rest is the latency of small kernels, for which the device has room beside. The
    host launches one lane after the other, which shows only where that takes it longer than a round.
    """
    together = costs.round_us(batch, budget)
    return max(together, lanes * costs.lane_host_us)


def apart_us(costs: Costs, batch: int, budget: int, lanes: int) -> float:
    """Predict lanes that have a device each, and the larger share of the requests."""
    return max(costs.round_us(-(-batch // lanes), budget), lanes * costs.lane_host_us)
