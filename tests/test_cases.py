"""The named cases: reproducible, shaped as they say, small once shrunk."""

from __future__ import annotations

import numpy as np
import pytest

from numba_ddtree.cases import (
    ACCEPT_CASES,
    ATTENTION_CASES,
    TREE_CASES,
    AttentionCase,
    RoundInputs,
    TreeCase,
    reference_tree,
)
from numba_ddtree.marginals import MARGINALS, MEAN_ENTROPIES
from numba_ddtree.refs.tree_accept import accept_tree
from numba_ddtree.round_bundle import round_tensors
from numba_ddtree.status import TreeStatus

DRAFT_CASES = (*TREE_CASES, *ACCEPT_CASES)
ALL_CASES = [
    *(pytest.param(case, id=case.name) for case in (*DRAFT_CASES, *ATTENTION_CASES)),
    *(pytest.param(case.shrunk(), id=f"{case.name}-shrunk") for case in (*DRAFT_CASES, *ATTENTION_CASES)),
]


def named(name: str) -> TreeCase:
    return next(case for case in DRAFT_CASES if case.name == name)


def walk_length(inputs: RoundInputs) -> int:
    tree = reference_tree(inputs.draft)
    arrays = (tree.token_ids, tree.parents, tree.num_nodes)
    return int(accept_tree(*arrays, inputs.target_tokens, inputs.draft.max_depth).accept_length[0])


@pytest.mark.parametrize("case", ALL_CASES)
def test_inputs_are_valid_and_reproducible(case: TreeCase | AttentionCase) -> None:
    first, second, other = case.inputs(3), case.inputs(3), case.inputs(4)
    for name, array in round_tensors(first, {}).items():
        np.testing.assert_array_equal(array, round_tensors(second, {})[name])
    assert not np.array_equal(first.draft.root_tokens, other.draft.root_tokens) or not np.array_equal(
        first.target_tokens, other.target_tokens
    )
    log_probs = first.draft.draft_log_probs
    assert log_probs.dtype == np.float32
    assert (log_probs[..., 1:] <= log_probs[..., :-1]).all()
    assert (log_probs <= 0).all()
    assert first.draft.draft_token_ids.shape == log_probs.shape
    assert first.target_tokens.shape == (len(log_probs), first.draft.max_budget + 1)


def test_names_are_unique() -> None:
    for shrink in (False, True):
        cases = [case.shrunk() if shrink else case for case in (*DRAFT_CASES, *ATTENTION_CASES)]
        assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("case", DRAFT_CASES, ids=lambda case: case.name)
def test_shrunk_trees_keep_their_kind(case: TreeCase) -> None:
    small = case.shrunk()
    assert max(small.budgets) <= 72
    assert str(max(small.budgets)) in small.name
    if case.label == "exhausted":
        assert reference_tree(small.inputs().draft).status[0] == TreeStatus.EXHAUSTED
    if case.label == "depth_64":
        assert reference_tree(small.inputs().draft).depths.max() == 64


@pytest.mark.parametrize("kind", MARGINALS)
def test_marginals_are_distributions(kind: str) -> None:
    log_probs = MARGINALS[kind](np.random.default_rng(0), (2, 15, 256))
    assert log_probs.shape == (2, 15, 256)
    if kind not in ("ties", "impossible"):  # rounded and cut, respectively
        np.testing.assert_allclose(np.exp(log_probs).sum(axis=-1), 1)


def test_realistic_entropies() -> None:
    log_probs = MARGINALS["realistic"](np.random.default_rng(1), (2, 15, 4096))
    entropies = -(np.exp(log_probs) * log_probs).sum(axis=-1)
    np.testing.assert_allclose(entropies, np.tile(MEAN_ENTROPIES, (2, 1)), rtol=1e-6)
    assert list(MEAN_ENTROPIES) == sorted(MEAN_ENTROPIES)


def test_special_trees() -> None:
    def tree(name: str) -> tuple[int, int, int]:
        built = reference_tree(named(name).inputs().draft)
        return int(built.num_nodes[0]), int(built.depths.max()), int(built.status[0])

    assert tree("exhausted_b64") == (1 + 3 + 9, 2, TreeStatus.EXHAUSTED)
    assert tree("chain_b15") == (16, 15, TreeStatus.OK)
    assert tree("root_only_b0") == (1, 0, TreeStatus.OK)
    assert tree("single_depth_b32") == (33, 1, TreeStatus.OK)
    assert tree("depth_64_b96")[1:] == (64, TreeStatus.OK)
    assert tree("impossible_b64") == (1 + 3 + 3 + 9 + 9 + 27, 5, TreeStatus.EXHAUSTED)


def test_targets_follow_a_path() -> None:
    assert walk_length(named("agree_root_only_b0").inputs()) == 1
    for seed in range(5):
        # Random tokens elsewhere could agree by chance, but the path can only get longer by that.
        assert walk_length(named("agree_fully_b48").inputs(seed)) >= 2
    lengths = [walk_length(named("agree_partway_b256").inputs(seed)) for seed in range(10)]
    assert max(lengths) > 1


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_attention_inputs(case: AttentionCase) -> None:
    inputs = case.inputs()
    attention = inputs.required_attention
    assert attention.q_nope.shape == (1, case.budget + 1, case.heads, 512)
    assert attention.q_pe.shape[-1] == attention.kpe_cache.shape[-1] == 64
    assert attention.sm_scale == 192**-0.5
    used = case.prefix + case.budget + 1
    for cache in (attention.ckv_cache, attention.kpe_cache):
        assert np.isfinite(cache[:, :used]).all()
        assert cache.shape[1] > used
        assert np.isnan(cache[:, used:]).all()
    assert abs(attention.q_nope.std() - 1) < 0.05


def test_rounds_without_attention_say_so() -> None:
    with pytest.raises(ValueError, match="without attention"):
        _ = named("chain_b15").inputs().required_attention


def test_simulator_cost_grows_with_the_round() -> None:
    full, small = ATTENTION_CASES[0], ATTENTION_CASES[0].shrunk()
    assert small.inputs().simulator_seconds < 5
    assert full.inputs().simulator_seconds > 60
