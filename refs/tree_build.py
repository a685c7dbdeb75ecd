"""Best-first draft tree construction: the heap that the kernel replaces.

Algorithm 1 of DDTree (arXiv 2604.12989): of all continuations, each a rank at each of the first
positions, take the `budget` most probable under the product of the draft's marginals.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.refs.tree_links import TreeArrays, add_node, padding
from numba_ddtree.status import TreeStatus

MAX_TOKEN = np.iinfo(np.int32).max


def best_first(log_probs: NDArray[np.float32], budget: int) -> list[tuple[int, int, int]]:
    """Return the tree's nodes in order, root excluded, each as (parent's index, depth, rank).

    A node's score is its parent's plus its own log-prob, in float64, rounded once. Nodes are
    ordered by score, best first; of equal scores the smaller tuple of ranks comes first.

    Parameters
    ----------
    log_probs : float32 [L, K]
        Each row sorted, best first; -inf is no candidate.
    budget : int
        The most nodes to take.
    """
    depth_limit, width = log_probs.shape
    scores = [0.0]  # of the nodes taken, root first
    nodes: list[tuple[int, int, int]] = []
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-score, ranks, parent's index)

    def offer(parent: int, ranks: tuple[int, ...]) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth <= depth_limit and rank < width and log_probs[depth - 1, rank] > -np.inf:
            score = scores[parent] + float(log_probs[depth - 1, rank])
            heapq.heappush(heap, (-score, ranks, parent))

    offer(0, (0,))
    while heap and len(nodes) < budget:
        negative_score, ranks, parent = heapq.heappop(heap)
        scores.append(-negative_score)
        nodes.append((parent, len(ranks), ranks[-1]))
        offer(parent, (*ranks[:-1], ranks[-1] + 1))
        offer(len(nodes), (*ranks, 0))
    return nodes


def input_status(log_probs: NDArray[np.float32], budget: int, max_budget: int, prefix: int) -> TreeStatus:
    """Judge one request's input before a tree is built from it."""
    if not 0 <= budget <= max_budget or prefix < 0:
        return TreeStatus.INVALID
    if np.isnan(log_probs).any():
        return TreeStatus.NAN
    if (log_probs[:, 1:] > log_probs[:, :-1]).any() or (log_probs == np.inf).any():
        return TreeStatus.INVALID
    if log_probs[0, 0] == -np.inf:
        return TreeStatus.NO_CANDIDATE
    return TreeStatus.OK


def build_tree(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[np.int32] | NDArray[np.int64],
    budgets: NDArray[np.int32],
    root_tokens: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
    max_budget: int,
) -> TreeArrays:
    """Build one tree a request.

    Parameters
    ----------
    log_probs : float32 [B, L, K]
    token_ids : int32 or int64 [B, L, K]
    budgets, root_tokens, prefix_lengths : int32 [B]
    max_budget : int
        N - 1, the number of slots beside the root.
    """
    batch = len(log_probs)
    tree = padding(batch, max_budget + 1, prefix_lengths)
    for request in range(batch):
        budget = int(budgets[request])
        status = input_status(log_probs[request], budget, max_budget, int(prefix_lengths[request]))
        nodes = best_first(log_probs[request], budget) if status == TreeStatus.OK else []
        tokens = [int(token_ids[request, depth - 1, rank]) for _, depth, rank in nodes]
        if not all(0 <= token <= MAX_TOKEN for token in tokens):
            status, nodes = TreeStatus.INVALID, []
        elif status == TreeStatus.OK and len(nodes) < budget:
            status = TreeStatus.EXHAUSTED
        add_node(tree, request, 0, -1, int(root_tokens[request]))
        for index, ((parent, _, _), token) in enumerate(zip(nodes, tokens, strict=False), start=1):
            add_node(tree, request, index, parent, token)
        tree.status[request] = status
    return tree
