"""Rounds of decoding held-out text: real marginals, real target tokens.

``data/demo_rounds.kdtr`` is the trace that `numba-ddtree decode --prompts 6 --budget 64 --max-new-tokens 24`
wrote on numpy: chains and trees.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numba_ddtree.round_bundle import RoundBundle, read_round, reference_results
from numba_ddtree.round_checks import run_round

ROUNDS = Path(__file__).parent / "data" / "demo_rounds.kdtr"


@pytest.fixture(scope="module")
def rounds() -> RoundBundle:
    return read_round(ROUNDS)


def test_the_rounds_are_real(rounds: RoundBundle) -> None:
    draft, walk = rounds.inputs.draft, rounds.expected["accept_tree"]
    mass = np.exp(draft.draft_log_probs.astype(np.float64)).sum(axis=-1)
    assert (mass < 1.00001).all()
    assert (draft.draft_log_probs[:, 1:, 0] < draft.draft_log_probs[:, :1, 0]).any()  # less sure further on
    assert set(np.unique(draft.budgets)) == {15, 64}
    assert walk["accept_length"].min() == 1
    assert walk["accept_length"].max() > 8


def test_references(rounds: RoundBundle) -> None:
    for stage, arrays in reference_results(rounds.inputs).items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(rounds.expected[stage][name], array, err_msg=name)


@pytest.mark.gpu
def test_kernels(rounds: RoundBundle) -> None:
    results = run_round(rounds, "cuda")
    assert [result.fault for result in results if not result.passed] == []
    assert {result.name for result in results} >= {"build_tree/stored", "accept_tree/stored"}
