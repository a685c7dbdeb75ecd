"""The cost-aware end of a tree, on a measured cost of verification and on real drafts."""

from __future__ import annotations

import numpy as np
import pytest
from build_checks import check_options
from cost_checks import CONTEXTS, Draft, check_stop, cost_options, real_draft, whole_trees
from kernel_checks import numba_library

import numba_ddtree
from inputs import make_log_probs, make_token_ids

BUDGET = 512


@pytest.fixture(scope="module")
def draft() -> Draft:
    return real_draft()


def test_the_reference_ends_where_the_ratio_is_largest(draft: Draft) -> None:
    whole = whole_trees(draft, BUDGET)
    sizes: list[int] = []
    means = []
    for context in CONTEXTS:
        costs = cost_options(context)
        tree = numba_ddtree.build_tree(draft.log_probs, draft.token_ids, BUDGET, backend="numpy", **costs)
        sizes = check_stop(tree, draft, whole, costs)
        means.append(np.mean(sizes))
    assert len(set(sizes)) > len(sizes) // 2  # where nodes are dear, each round has a size of its own
    # The first nodes cost nothing at a short context, and each of them something at a long one.
    assert 0 < max(means[1:]) < means[0] < BUDGET


def test_the_reference_ends_there_on_other_distributions(rng: np.random.Generator) -> None:
    for kind in ("realistic", "flat", "inf_tails"):
        log_probs = make_log_probs(rng, kind, 3, 8, 40)
        other = Draft(log_probs, make_token_ids(rng, 3, 8, 40))
        whole = whole_trees(other, 200)
        for context in CONTEXTS:
            costs = cost_options(context)
            tree = numba_ddtree.build_tree(other.log_probs, other.token_ids, 200, backend="numpy", **costs)
            check_stop(tree, other, whole, costs)


@pytest.mark.gpu
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_kernel_ends_where_the_reference_does(draft: Draft, context: int) -> None:
    budgets = np.full(len(draft.log_probs), BUDGET, np.int32)
    costs = cost_options(context)
    tree = check_options(numba_library(), draft.log_probs, draft.token_ids, budgets, BUDGET, **costs)
    check_stop(tree, draft, whole_trees(draft, BUDGET), costs)
