"""`build_tree` with its options: brute force, random options, kernels against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, assert_same_tree, guarded_tree
from numpy.typing import NDArray

import numba_ddtree
from inputs import LOG_PROB_KINDS, make_log_probs
from numba_ddtree import DraftTree, tree_build
from numba_ddtree.refs import tree_build as reference

EDGE_KINDS = ("positive", "zeros", "plateau", "denormal", "unnormalised", "huge")

SEARCHES: dict[str, Callable[[int], int]] = {
    "roomy": tree_build.capacity_for,
    "tight": lambda budget: budget + 8,  # levels that do not fit, and are made anew
    "popping": lambda budget: 1,  # nothing fits: one node after the other
}
"""How the kernel finds nodes, by the room that its search has."""


def use_search(monkeypatch: pytest.MonkeyPatch, search: str) -> None:
    """Give the kernel's search so much room."""
    monkeypatch.setattr(tree_build, "capacity_for", SEARCHES[search])


def make_rows(rng: np.random.Generator, kind: str, L: int, K: int) -> NDArray[np.float32]:
    """Sorted log-probs, float32 [1, L, K], of one of `LOG_PROB_KINDS` or `EDGE_KINDS`."""
    shape = (1, L, K)
    if kind in LOG_PROB_KINDS:
        return make_log_probs(rng, kind, 1, L, K)
    values = {
        "positive": lambda: rng.normal(size=shape),
        "zeros": lambda: rng.choice([0.0, -0.0], shape),
        "plateau": lambda: -rng.integers(0, 3, shape) / 4,
        "denormal": lambda: -rng.integers(0, 5, shape) * 1e-45,
        "unnormalised": lambda: -20 * rng.exponential(size=shape),
        "huge": lambda: -rng.choice([0, 1e-30, 1, 3e38, np.inf], shape),
    }[kind]()
    rows = np.sort(values.astype(np.float32), axis=-1)[..., ::-1].copy()
    rows[:, 0, 0] = np.maximum(rows[:, 0, 0], np.float32(-3e38))  # a first candidate there must be
    return rows


def make_options(rng: np.random.Generator, B: int, L: int, K: int, max_budget: int) -> dict[str, Any]:
    """Draw options of `build_tree`, each there or not."""
    cost = np.sort(rng.random(max_budget + 1 + rng.integers(3))) * rng.choice([0.01, 0.1, 1.0])
    options: dict[str, Any] = {
        "max_depths": rng.integers(1, L + 1, B).astype(np.int32),
        "max_candidates": rng.integers(1, K + 1, B).astype(np.int32),
        "chain_seed": True,
        "min_log_prob": [
            float(rng.choice([-10, -3, -0.25, 0, 1])),
            (-3 * rng.exponential(size=B)).astype(np.float32),
            -6 * rng.exponential(size=B),
        ][rng.integers(3)],
    }
    options = {name: value for name, value in options.items() if rng.random() < 0.5}
    if rng.random() < 0.5:
        options |= {"verify_cost": cost, "draft_cost": float(rng.random() + 0.01)}
    return options


def build_reference(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[Any],
    budgets: NDArray[np.int32],
    max_budget: int,
    root_tokens: NDArray[np.int32] | None = None,
    prefix_lengths: NDArray[np.int32] | None = None,
    **options: Any,
) -> DraftTree:
    """Make the reference's tree; bad values end in its status."""
    B = len(log_probs)
    least = np.broadcast_to(np.asarray(options.pop("min_log_prob", -np.inf), np.float64), (B,))
    arrays = reference.build_tree(
        log_probs,
        token_ids,
        budgets,
        np.zeros(B, np.int32) if root_tokens is None else root_tokens,
        np.zeros(B, np.int32) if prefix_lengths is None else prefix_lengths,
        max_budget,
        min_log_probs=least,
        **options,
    )
    return DraftTree(*arrays, max_depth=log_probs.shape[1])


def check_options(
    library: Library,
    log_probs: NDArray[np.float32],
    token_ids: NDArray[Any],
    budgets: NDArray[np.int32],
    max_budget: int,
    **options: Any,
) -> DraftTree:
    """Build into poisoned arrays; the tree must be the reference's. Returns it, on the host."""
    want = build_reference(log_probs, token_ids, budgets, max_budget, **options)
    out, guards = guarded_tree(library, *want.parents.shape, want.max_depth)
    given = {
        name: library.put(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    tree = numba_ddtree.build_tree(
        *(library.put(array) for array in (log_probs, token_ids, budgets)),
        max_budget=max_budget,
        out=out,
        **given,
    )
    got = library.get_tree(tree)
    for guard in guards:
        guard.check()
    assert_same_tree(got, want)
    return got


def bad_options(L: int, K: int, max_budget: int) -> dict[str, tuple[dict[str, Any], str]]:
    """Options of four requests, of which every odd one is bad, and the argument that is at fault."""
    good_cost = np.linspace(1.0, 2.0, max_budget + 1)

    def cost(node: int, value: float) -> NDArray[np.float64]:
        costs = good_cost.copy()
        costs[node] = value
        return costs

    def ints(*values: int) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    # The even requests have the budget 1, so that they never ask for the cost of the largest tree.
    last = max_budget
    least = -1.01 * np.log(K)  # the best of K candidates that make up all has more
    return {
        "no depth": ({"max_depths": ints(1, 0, L, 0)}, "max_depths[1]"),
        "too deep": ({"max_depths": ints(1, L + 1, L, -1)}, "max_depths[1]"),
        "no candidates": ({"max_candidates": ints(1, 0, K, -5)}, "max_candidates[1]"),
        "too many candidates": ({"max_candidates": ints(K, K + 1, K, 2**31 - 1)}, "max_candidates[1]"),
        "least is NaN": ({"min_log_prob": np.array([least, np.nan, -9, np.nan])}, "min_log_prob[1]"),
        "cost is NaN": ({"verify_cost": cost(last, np.nan)}, f"verify_cost[{last}]"),
        "cost is infinite": ({"verify_cost": cost(last, np.inf)}, f"verify_cost[{last}]"),
        "cost is 0": ({"verify_cost": cost(last, -0.5), "draft_cost": 0.5}, f"verify_cost[{last}]"),
        "root is negative": ({"root_tokens": ints(0, -1, 5, -(2**31))}, "root_tokens[1]"),
        "positions would wrap": (
            {"prefix_lengths": ints(0, 2**31 - 1, 2**31 - 65, 2**31 - 64)},
            "prefix_lengths[1]",
        ),
    }


def continuations(
    log_probs: NDArray[np.float32], *, chain_seed: bool, min_log_prob: float
) -> list[tuple[int, ...]]:
    """Every continuation that a tree may hold, in order, by brute force; log-probs of at most 0."""
    found = []
    for depth in range(1, len(log_probs) + 1):
        for ranks in itertools.product(range(log_probs.shape[1]), repeat=depth):
            score = 0.0
            for row, rank in zip(log_probs, ranks, strict=False):
                score += float(row[rank])
            if score > -np.inf and score >= min_log_prob:
                found.append((chain_seed and any(ranks), -score, ranks))
    if chain_seed:
        found = [(late, 0.0 if not late else score, ranks) for late, score, ranks in found]
    return [ranks for _, _, ranks in sorted(found)]


def late_tie() -> NDArray[np.float32]:
    """Log-probs [1, 37, 30] of a tie that a new offer wins in another group than that of its parent.

    Nodes 1 to 34 are a chain of score 0, which fills the first word of every path. Node 35 is its
    continuation, 36 to 63 are 28 siblings of -0.5 and 64 another of -1, whose child would score -2.5.
    Node 65 is a child of node 35 of -1.5, and its own child would score -2.5 as well: it comes first.
    """
    log_probs = np.full((1, 37, 30), -9, np.float32)
    log_probs[0, :34, 0] = 0
    log_probs[0, 34] = [0, *[-0.5] * 28, -1]
    log_probs[0, 35, 0] = -1.5
    log_probs[0, 36, 0] = -1
    return log_probs
