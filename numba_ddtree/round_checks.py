"""A round from a bundle, stage after stage, against the results stored there and the references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.cases import SM_SCALE, AttentionInputs, RoundInputs, reference_tree
from numba_ddtree.check_results import (
    Check,
    CheckResult,
    Comparison,
    OnResult,
    OnStart,
    compare_arrays,
    run_all,
)
from numba_ddtree.checks import attention_tolerance
from numba_ddtree.devices import device_context
from numba_ddtree.errors import BundleError, DDTreeError
from numba_ddtree.round_bundle import STAGES, RoundBundle, reference_attention, reference_walk
from numba_ddtree.stages import Backend, Stages, Timed

__all__ = ["run_round"]


def run_round(
    bundle: RoundBundle,
    backend: Backend,
    device: int = 0,
    on_result: OnResult | None = None,
    on_start: OnStart | None = None,
) -> list[CheckResult]:
    """Run the stages of a round, each on the results of those before.

    Results are compared with those that the bundle holds and, if they come from kernels, with the
    references, which are given the same input.

    Parameters
    ----------
    bundle : RoundBundle
    backend : {"cuda", "simulator", "numpy"}
        The simulator must have been chosen before Numba was imported.
    device : int
        The CUDA device; without meaning for the other backends.
    on_result, on_start
        Called as the checks go on; see `numba_ddtree.check_results`.

    Returns
    -------
    list of CheckResult

    Raises
    ------
    ArgumentError
        A value in the bundle is out of range.
    BackendError
        The backend cannot run here.
    BundleError
        The references would have nothing to be compared with.
    """
    if backend == "numpy" and not bundle.expected:
        raise BundleError("no expected arrays, with which the numpy references could be compared")
    checks = list(_round_checks(_Round(bundle.inputs, Stages(backend)), bundle))
    with device_context(device if backend == "cuda" else None):
        return run_all(checks, on_result, on_start, fatal=DDTreeError)


class _Round:
    """The stages' results, each computed when it is first asked for."""

    def __init__(self, inputs: RoundInputs, stages: Stages) -> None:
        self.inputs = inputs
        self.stages = stages

    @cached_property
    def build_tree(self) -> Timed:
        return self.stages.build_tree(self.inputs.draft)

    @cached_property
    def verify_attention(self) -> Timed:
        return self.stages.verify_attention(self.inputs, self.build_tree.arrays)

    @cached_property
    def accept_tree(self) -> Timed:
        inputs = self.inputs
        return self.stages.accept_tree(
            self.build_tree.arrays, inputs.target_tokens, inputs.draft.max_depth, inputs.endings
        )

    def reference(self, stage: str) -> Mapping[str, NDArray[Any]]:
        """Run a stage's reference on the input that the stage has here."""
        if stage == "build_tree":
            tree: Mapping[str, NDArray[Any]] = reference_tree(self.inputs.draft)._asdict()
            return tree
        reference = {"verify_attention": reference_attention, "accept_tree": reference_walk}[stage]
        return reference(self.inputs, self.build_tree.arrays)


def _round_checks(work: _Round, bundle: RoundBundle) -> Iterator[Check]:
    for stage in STAGES:
        if stage == "verify_attention" and work.inputs.attention is None:
            continue
        if stage in bundle.expected:
            check = partial(_compare, work, stage, partial(bundle.expected.__getitem__, stage))
            yield Check(f"{stage}/stored", work.inputs.size, check)
        if work.stages.backend != "numpy":
            check = partial(_compare, work, stage, partial(work.reference, stage))
            yield Check(f"{stage}/reference", work.inputs.size, check)


UNIT_NORM = 30.0
"""No row of 576 numbers of unit scale is longer: the norm is 24 with a standard deviation of 0.7."""

UNIT_VALUE = 6.0
"""Nor does one of a million such numbers exceed this."""


def _scales(
    attention: AttentionInputs, rows: NDArray[np.int32], nodes: NDArray[np.int32]
) -> dict[str, float]:
    """Return how much larger than for inputs of unit scale the errors of ``out`` and ``lse`` may be.

    The error of a score, and of lse with it, goes with sm_scale * |q| * |k|, which bounds the score and
    every partial sum of it; that of an output also with the values that are averaged. Only what is read
    counts, so that rubbish in a row that no node sees does not widen a bound.

    Parameters
    ----------
    attention : AttentionInputs
    rows, nodes : int32 [B]
        The rows of the cache and the slots of the tree that each request uses.
    """

    def largest_norm(used: NDArray[np.int32], *parts: NDArray[np.float32]) -> float:
        norms = [
            np.hypot(*(np.linalg.norm(part[request, :count].astype(np.float64), axis=-1) for part in parts))
            for request, count in enumerate(used)
        ]
        return max((float(norm.max(initial=0.0)) for norm in norms), default=0.0)

    queries = largest_norm(nodes, attention.q_nope, attention.q_pe)
    keys = largest_norm(rows, attention.ckv_cache, attention.kpe_cache)
    used = (attention.ckv_cache[request, :count] for request, count in enumerate(rows))
    values = max((float(np.abs(row).max(initial=0.0)) for row in used), default=0.0)
    scores = max(1.0, abs(attention.sm_scale) * queries * keys / (SM_SCALE * UNIT_NORM**2))
    return {"lse": scores, "out": scores * max(1.0, values / UNIT_VALUE)}


def _compare(
    work: _Round, stage: str, expected: Callable[[], Mapping[str, NDArray[Any]]]
) -> tuple[Comparison, float]:
    timed: Timed = getattr(work, stage)
    if stage != "verify_attention":
        return compare_arrays(timed.arrays, expected()), timed.us
    tolerance, wanted = attention_tolerance(work.stages.backend), expected()
    nodes = work.build_tree.arrays["num_nodes"]
    scales = _scales(work.inputs.required_attention, work.inputs.draft.prefix_lengths + nodes, nodes)
    comparison = Comparison()
    for name, scale in scales.items():
        got = {name: timed.arrays[name]}
        comparison += compare_arrays(got, {name: wanted[name]}, tolerance * scale)
    return comparison, timed.us
