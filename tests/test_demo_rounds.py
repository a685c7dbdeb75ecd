"""Rounds of decoding held-out text: real marginals, real target tokens.

``data/demo_rounds.kdtr`` is the trace that `numba-ddtree decode --prompts 6 --budget 64 --max-new-tokens 24`
wrote on numpy: chains and trees.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numba_ddtree.bundle import read_bundle
from numba_ddtree.demo.array_module import array_module
from numba_ddtree.demo.decoders import DecodeSettings, Decoding, Round, tree_decoder
from numba_ddtree.demo.model import load_model
from numba_ddtree.demo.text import shipped_prompts
from numba_ddtree.round_bundle import RoundBundle, read_round, reference_results
from numba_ddtree.round_checks import run_round

ROUNDS = Path(__file__).parent / "data" / "demo_rounds.kdtr"

ROUNDING = 1e-4
"""Of log-probs, relative to the largest. Another library sums in another order: torch is 2e-5 from numpy."""


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


def first_round(temperature: float) -> Round:
    model = load_model(array_module("numpy"))
    texts = [prompt.tokens for prompt in shipped_prompts(6)]
    settings = DecodeSettings(max_new_tokens=24, temperature=temperature)
    return Decoding.begin(model, tree_decoder(64), texts, settings).run_round()


def test_the_model_drafts_what_it_drafted() -> None:
    """Weights, rotary positions, features and prompts are those of the day when the rounds were recorded."""
    stored = read_bundle(ROUNDS).tensors
    is_first = (stored["trace/decoder"] == 1) & (stored["trace/round"] == 0)  # the tree's
    assert stored["trace/prompt"][is_first].tolist() == [0, 1, 2, 3, 4, 5]
    drafted = first_round(0.0).candidates
    assert drafted is not None
    want = stored["draft_log_probs"][is_first]
    np.testing.assert_allclose(drafted.log_probs, want, atol=ROUNDING * np.abs(want).max())
    same = drafted.token_ids == stored["draft_token_ids"][is_first]
    assert same.mean() > 0.99  # but for ties within rounding


def test_drafts_have_the_temperature_of_the_draws() -> None:
    plain, colder = first_round(0.0).candidates, first_round(0.5).candidates
    assert plain is not None
    assert colder is not None
    gaps, wider = (found.log_probs[..., :1] - found.log_probs[..., 1:] for found in (plain, colder))
    np.testing.assert_allclose(wider, 2 * gaps, rtol=1e-4, atol=1e-4)
