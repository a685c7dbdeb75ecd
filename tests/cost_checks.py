"""Trees under a verification's measured cost, against the ratio evaluated for every size of tree.

``data/verify_cost.json`` holds seconds of verifying 0 to 512 nodes at three context lengths, and of drafting,
and names their source.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from build_checks import build_reference
from numpy.typing import NDArray

from numba_ddtree.bundle import read_bundle
from numba_ddtree.tree import DraftTree

DATA = Path(__file__).parent / "data"
CONTEXTS = (1, 4000, 8000)


@dataclass(frozen=True, eq=False)
class Draft:
    """Log-probs and tokens that a drafter gave."""

    log_probs: NDArray[np.float32]  # [B, L, K]
    token_ids: NDArray[np.int32]  # [B, L, K]


def cost_options(context: int) -> dict[str, Any]:
    """Return `verify_cost` and `draft_cost` as `build_tree` takes them, in seconds."""
    stored = json.loads((DATA / "verify_cost.json").read_text())
    return {
        "verify_cost": np.array(stored["verify_cost"][str(context)]),
        "draft_cost": stored["draft_cost"],
    }


def real_draft() -> Draft:
    """Return what the demo model drafted for its trees' rounds, [28, 15, 64]."""
    stored = read_bundle(DATA / "demo_rounds.kdtr").tensors
    is_tree = stored["trace/decoder"] == 1
    return Draft(stored["draft_log_probs"][is_tree], stored["draft_token_ids"][is_tree])


def ratios(
    draft: Draft, tree: DraftTree, request: int, verify_cost: NDArray[np.float64], draft_cost: float
) -> list[float]:
    """Return (1 + sum of the first n nodes' probabilities) / (draft_cost + verify_cost[n]) for every n.

    As CaDDTree (arXiv 2606.01813) has it, each n and each node's product of marginals by itself.
    """
    marginals = np.exp(draft.log_probs[request].astype(np.float64))  # [L, K]
    probabilities = [1.0]
    for node in range(1, int(tree.num_nodes[request])):
        path = [node]
        while tree.parents[request, path[-1]] > 0:
            path.append(int(tree.parents[request, path[-1]]))
        depths = tree.depths[request, path] - 1
        tokens = tree.token_ids[request, path]
        is_token = draft.token_ids[request, depths] == tokens[:, None]
        probabilities.append(float(np.prod(marginals[depths, is_token.argmax(axis=1)])))
    return [
        math.fsum(probabilities[: n + 1]) / (draft_cost + float(verify_cost[n]))
        for n in range(len(probabilities))
    ]


def check_stop(tree: DraftTree, draft: Draft, whole: DraftTree, costs: dict[str, Any]) -> list[int]:
    """Check that trees end where the ratio is largest, and are the beginnings of whole ones.

    Under a convex cost, as the fitted one is, the ratio has one maximum, at which a tree that ends before the
    first node that does not raise it ends too. Returns the nodes of each request, without the root.
    """
    sizes = (tree.num_nodes - 1).tolist()
    for request, size in enumerate(sizes):
        rates = ratios(draft, whole, request, **costs)
        assert size == int(np.argmax(rates)), f"request {request}"
        for name in ("parents", "token_ids", "depths"):
            got, want = (each.arrays()[name][request, : size + 1] for each in (tree, whole))
            np.testing.assert_array_equal(got, want, err_msg=name)
    return sizes


def whole_trees(draft: Draft, budget: int) -> DraftTree:
    """Return the reference's trees without a cost."""
    budgets = np.full(len(draft.log_probs), budget, np.int32)
    return build_reference(draft.log_probs, draft.token_ids, budgets, budget)
