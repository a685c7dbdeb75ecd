"""Trees and walks that the original DDTree implementation gave; `data/README.md` describes them.

They judge the references, which in turn judge the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.bundle import read_bundle
from numba_ddtree.refs.tree_links import visibility_from_bits

GOLDEN_TREES_PATH = Path(__file__).parent / "data" / "golden_trees.kdtr"


@dataclass(frozen=True, eq=False)
class GoldenTree:
    """A tree of n nodes besides the root, from L rows of K candidates, and a walk down it.

    Attributes
    ----------
    draft_log_probs : float32 [L, K]
        The drafter's log-probs at each depth, best first.
    draft_token_ids : int32 [L, K]
        The candidates' tokens.
    budget : int
        How many nodes were asked for, without the root.
    token_ids, depths : int32 [n]
        The nodes' tokens and depths, in order of popping, without the root.
    parents : int32 [n + 1]
        The nodes' parents, with the root as node 0, whose parent is -1.
    ancestor_bits : uint32 [n + 1, ceil((n + 1) / 32)]
        Bit ``j % 32`` of word ``j // 32`` of row i: node i sees node j, that is, itself or an ancestor.
    posterior_tokens : int32 [n + 1]
        The target's token after each node.
    accepted_indices : int32 [m]
        The nodes of the walk, from the root on.
    bonus_token : int
        The target's token after the walk's last node.
    """

    draft_log_probs: NDArray[np.float32]
    draft_token_ids: NDArray[np.int32]
    budget: int
    token_ids: NDArray[np.int32]
    depths: NDArray[np.int32]
    parents: NDArray[np.int32]
    ancestor_bits: NDArray[np.uint32]
    posterior_tokens: NDArray[np.int32]
    accepted_indices: NDArray[np.int32]
    bonus_token: int

    @property
    def visibility(self) -> NDArray[np.bool_]:
        """The ancestor bits as a mask, bool [n + 1, n + 1]."""
        mask: NDArray[np.bool_] = visibility_from_bits(self.ancestor_bits[None])[0]
        return mask


def load_golden_trees() -> dict[str, GoldenTree]:
    """Load every case.

    Returns
    -------
    dict of str to GoldenTree
        The cases by name. Their arrays are read-only.
    """
    tensors = read_bundle(GOLDEN_TREES_PATH).tensors
    cases = dict.fromkeys(name.partition("/")[0] for name in tensors)
    names = [field.name for field in fields(GoldenTree)]
    return {case: _golden_tree({name: tensors[f"{case}/{name}"] for name in names}) for case in cases}


def _golden_tree(arrays: dict[str, Any]) -> GoldenTree:
    numbers = {name: int(arrays[name]) for name in ("budget", "bonus_token")}
    return GoldenTree(**{**arrays, **numbers})
