"""Trees and walks that the original DDTree implementation gave; `tests/data/README.md` describes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.bundle import read_bundle

GOLDEN_TREES_PATH = Path(__file__).parent / "data" / "golden_trees.kdtr"


@dataclass(frozen=True, eq=False)
class GoldenTree:
    """A tree of n nodes besides the root, from L rows of K candidates, and a walk down it.

    Attributes
    ----------
    draft_log_probs : (L, K) float32
        The drafter's log-probs at each depth, best first.
    draft_token_ids : (L, K) int64
        The candidates' tokens.
    budget : int
        How many nodes were asked for, without the root.
    token_ids, depths : (n,) int64
        The nodes' tokens and depths, in order of popping, without the root.
    parents : (n + 1,) int64
        The nodes' parents, with the root as node 0, whose parent is -1.
    visibility : (n + 1, n + 1) bool
        In row i, what node i sees: itself and its ancestors.
    posterior_tokens : (n + 1,) int64
        The target's token after each node.
    accepted_indices : (m,) int64
        The nodes of the walk, from the root on.
    bonus_token : int
        The target's token after the walk's last node.
    """

    draft_log_probs: NDArray[np.float32]
    draft_token_ids: NDArray[np.int64]
    budget: int
    token_ids: NDArray[np.int64]
    depths: NDArray[np.int64]
    parents: NDArray[np.int64]
    visibility: NDArray[np.bool_]
    posterior_tokens: NDArray[np.int64]
    accepted_indices: NDArray[np.int64]
    bonus_token: int


def load_golden_trees() -> dict[str, GoldenTree]:
    """Load every case.

    Returns
    -------
    dict of str to GoldenTree
        The cases by name. Their arrays are read-only.
    """
    tensors = read_bundle(GOLDEN_TREES_PATH).tensors
    cases = dict.fromkeys(name.partition("/")[0] for name in tensors)
    return {
        case: GoldenTree(
            draft_log_probs=tensors[f"{case}/draft_log_probs"],
            draft_token_ids=tensors[f"{case}/draft_token_ids"],
            budget=int(tensors[f"{case}/budget"]),
            token_ids=tensors[f"{case}/token_ids"],
            depths=tensors[f"{case}/depths"],
            parents=tensors[f"{case}/parents"],
            visibility=tensors[f"{case}/visibility"],
            posterior_tokens=tensors[f"{case}/posterior_tokens"],
            accepted_indices=tensors[f"{case}/accepted_indices"],
            bonus_token=int(tensors[f"{case}/bonus_token"]),
        )
        for case in cases
    }
