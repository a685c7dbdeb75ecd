"""Costs of a round, fitted to what was measured on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.results_schema import Results, Row
from numba_ddtree.errors import DDTreeError

DRAFT_BYTES, TARGET_BYTES = 4, 2  # of a logit: float32, bfloat16
LATENT, ROPE = 512, 64
FLOPS_A_KEY = 2 * (LATENT + ROPE + LATENT)  # of one head of one node
MEASURED_BUDGET = 64


class CostError(DDTreeError, ValueError):
    """The results do not hold what the costs are fitted to."""


@dataclass(frozen=True)
class Line:
    """A cost that grows with its work: microseconds = ``fixed + slope * work``.

    Attributes
    ----------
    fixed, slope : float
        Neither below 0.
    error : float
        Largest relative difference from what it was fitted to.
    """

    fixed: float
    slope: float
    error: float

    def at(self, work: float) -> float:
        """Microseconds of some work."""
        return self.fixed + self.slope * work

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Fit work and microseconds by least squares of the relative error."""
        work, us = np.array(points, np.float64).T
        columns = np.stack([np.ones_like(work), work], axis=1) / us[:, None]
        if len(points) == 1:
            fixed, slope = 0.0, float(us[0] / work[0])
        else:
            fixed, slope = np.linalg.lstsq(columns, np.ones_like(us), rcond=None)[0].tolist()
        if fixed < 0:  # then all of it grows
            fixed, slope = 0.0, float((work / us).sum() / ((work / us) ** 2).sum())
        if slope < 0:
            fixed, slope = float((1 / us).sum() / (1 / us**2).sum()), 0.0
        return cls(fixed, slope, float(np.abs((fixed + slope * work) / us - 1).max()))


@dataclass(frozen=True)
class Costs:
    """What a device takes.

    Attributes
    ----------
    device : str
        What was measured.
    draft_length, vocabulary : int
        Of the rounds that were measured.
    round : Line
        A round at the measured budget, by bytes of logits.
    build : mapping of int to float
        Microseconds of `build_tree` by budget.
    attention : Line or None
        Tree attention of one layer, by floating-point operations.
    lane_host_us : float
        Host time of a round and lane.
    """

    device: str
    draft_length: int
    vocabulary: int
    round: Line
    build: Mapping[int, float]
    attention: Line | None
    lane_host_us: float

    def round_us(self, requests: int, budget: int) -> float:
        """Microseconds of a round of some requests on one device, without the models."""
        if requests == 0:
            return 0.0
        growth = self.build_us(budget) - self.build_us(MEASURED_BUDGET)
        return max(0.0, self.round.at(self.logit_bytes(requests, budget)) + growth)

    def logit_bytes(self, requests: int, budget: int) -> int:
        """Bytes of logits that a round reads."""
        rows = self.draft_length * DRAFT_BYTES + (budget + 1) * TARGET_BYTES
        return requests * rows * self.vocabulary

    def build_us(self, budget: int) -> float:
        """Microseconds of `build_tree`, between and beyond what was measured in proportion to the budget."""
        budgets = sorted(self.build)
        if budget > budgets[-1]:
            return self.build[budgets[-1]] * budget / budgets[-1]
        return float(np.interp(budget, [0, *budgets], [0.0, *(self.build[each] for each in budgets)]))

    def attention_us(self, keys: int, heads: int, nodes: int, layers: int) -> float:
        """Microseconds of tree attention in all layers; `keys` are those of all requests together."""
        if self.attention is None or layers == 0 or keys == 0:
            return 0.0
        return layers * self.attention.at(FLOPS_A_KEY * keys * heads * nodes)


def costs_of(results: Mapping[str, Results]) -> Costs:
    """Fit the costs to results as `bench` leaves them.

    Raises
    ------
    CostError
        Without rounds of one lane, or without times of `build_tree`.
    """
    if "lanes" not in results:
        raise CostError("no lanes.json; python -m pytest bench/bench_lanes.py --save-results writes it")
    lanes = results["lanes"]
    rounds = [row for row in lanes.rows if row.case["work"] == "round" and row.case["lanes"] == 1]
    if len(rounds) < 2:
        raise CostError("lanes.json has not two batches of rounds on one lane")
    first = rounds[0].case
    sizes = {"draft_length": int(first["L"]), "vocabulary": int(first["V"])}
    build = {
        int(row.case["budget"]): row.us
        for row in (results["tree_build"].rows if "tree_build" in results else ())
        if row.kernel == "build_tree" and row.case.get("B") == 32
    }
    if MEASURED_BUDGET not in build:
        raise CostError(f"tree_build.json has no build_tree of budget {MEASURED_BUDGET} with B = 32")
    by_bytes = Costs(lanes.device, **sizes, round=Line(0, 0, 0), build=build, attention=None, lane_host_us=0)
    points = [(by_bytes.logit_bytes(int(row.case["B"]), int(row.case["budget"])), row.us) for row in rounds]
    return Costs(
        lanes.device,
        **sizes,
        round=Line.fit(points),
        build=build,
        attention=_attention(lanes.rows),
        lane_host_us=max(row.host_us or 0.0 for row in lanes.rows if row.case["work"] == "round"),
    )


def _attention(rows: Iterable[Row]) -> Line | None:
    points = [
        (FLOPS_A_KEY * _number(row, "B") * (_number(row, "prefix") + _number(row, "N")) * _number(row, "H")
         * _number(row, "N"), row.us)
        for row in rows
        if row.case["work"] == "attention" and row.case["lanes"] == 1
    ]  # fmt: skip
    return Line.fit(points) if points else None


def _number(row: Row, name: str) -> float:
    return float(row.case[name])
