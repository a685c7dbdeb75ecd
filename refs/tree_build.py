"""Best-first draft tree construction: the heap that the kernel replaces.

Algorithm 1 of DDTree (arXiv 2604.12989): of all continuations, each a rank at each of the first
positions, take the `budget` most probable under the product of the draft's marginals.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.refs.exact_exp import exact_exp
from numba_ddtree.refs.tree_links import TreeArrays, add_node, padding
from numba_ddtree.status import TreeStatus

MAX_TOKEN = np.iinfo(np.int32).max
MAX_DEPTH = 64
MAX_PREFIX = MAX_TOKEN - MAX_DEPTH  # so that every position fits int32

Node = tuple[int, int, int]
"""Parent's index, depth, rank."""


def best_first(
    log_probs: NDArray[np.float32],
    budget: int,
    *,
    chain_seed: bool = False,
    min_log_prob: float = -np.inf,
) -> list[Node]:
    """Return the tree's nodes in order, root excluded.

    A node's score is its parent's plus its own log-prob, in float64, rounded once. Nodes are
    ordered by score, best first; of equal scores the smaller tuple of ranks comes first.

    Parameters
    ----------
    log_probs : float32 [L, K]
        Each row sorted, best first; -inf is no candidate.
    budget : int
        The most nodes to take.
    chain_seed : bool
        The nodes whose ranks are all 0 come before all others, in order of depth.
    min_log_prob : float
        A node of a lower score is not taken, nor is what descends from it.
    """
    depth_limit, width = log_probs.shape
    scores = [0.0]  # of the nodes taken, root first
    nodes: list[Node] = []
    heap: list[tuple[bool, float, tuple[int, ...], int]] = []  # (not of the seed, -score, ranks, parent)

    def offer(parent: int, ranks: tuple[int, ...]) -> None:
        depth, rank = len(ranks), ranks[-1]
        if depth > depth_limit or rank >= width:
            return
        score = scores[parent] + float(log_probs[depth - 1, rank])
        if -np.inf < score >= min_log_prob:
            heapq.heappush(heap, (not chain_seed or any(ranks), -score, ranks, parent))

    offer(0, (0,))
    while heap and len(nodes) < budget:
        _, negative_score, ranks, parent = heapq.heappop(heap)
        scores.append(-negative_score)
        nodes.append((parent, len(ranks), ranks[-1]))
        offer(parent, (*ranks[:-1], ranks[-1] + 1))
        offer(len(nodes), (*ranks, 0))
    return nodes


def path_scores(log_probs: NDArray[np.float32], nodes: list[Node]) -> list[float]:
    """Return the score of the root, which is 0, and of each node."""
    scores = [0.0]
    for parent, depth, rank in nodes:
        scores.append(scores[parent] + float(log_probs[depth - 1, rank]))
    return scores


def nodes_worth(scores: list[float], costs: NDArray[np.float64]) -> int:
    """Return how many nodes to keep under a cost: all before the first that does not raise the ratio.

    The ratio of CaDDTree (arXiv 2606.01813): expected tokens of a round, which are 1 and the sum of
    the nodes' probabilities, over the round's cost. All in float64, summed in order of the nodes.

    Parameters
    ----------
    scores : list of float
        Of the root and the nodes, in order.
    costs : float64 [n]
        Of a round whose tree has 0, 1, ... nodes.
    """
    tokens = 1.0
    best = tokens / costs[0]
    for node, score in enumerate(scores[1:], start=1):
        tokens += exact_exp(score)
        ratio = tokens / costs[node]
        if not ratio > best:
            return node - 1
        best = ratio
    return len(scores) - 1


def values_status(log_probs: NDArray[np.float32]) -> TreeStatus:
    """Judge one request's log-probs before a tree is built from them."""
    if np.isnan(log_probs).any():
        return TreeStatus.NAN
    if (log_probs[:, 1:] > log_probs[:, :-1]).any() or (log_probs == np.inf).any():
        return TreeStatus.INVALID
    if log_probs[0, 0] == -np.inf:
        return TreeStatus.NO_CANDIDATE
    return TreeStatus.OK


def grow(
    log_probs: NDArray[np.float32],
    budget: int,
    chain_seed: bool,
    min_log_prob: float,
    costs: NDArray[np.float64] | None,
) -> tuple[TreeStatus, list[Node]]:
    """Take one request's nodes, and keep those that are worth their cost."""
    nodes = best_first(log_probs, budget, chain_seed=chain_seed, min_log_prob=min_log_prob)
    status = TreeStatus.OK if len(nodes) == budget else TreeStatus.EXHAUSTED
    if costs is not None:
        kept = nodes_worth(path_scores(log_probs, nodes), costs)
        if kept < len(nodes):
            return TreeStatus.OK, nodes[:kept]
    return status, nodes


def build_tree(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[np.int32] | NDArray[np.int64],
    budgets: NDArray[np.int32],
    root_tokens: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
    max_budget: int,
    *,
    max_depths: NDArray[np.int32] | None = None,
    max_candidates: NDArray[np.int32] | None = None,
    min_log_probs: NDArray[np.float64] | None = None,
    chain_seed: bool = False,
    verify_cost: NDArray[np.float64] | None = None,
    draft_cost: float = 0.0,
) -> TreeArrays:
    """Build one tree a request.

    Options combine: limits and the seed decide which nodes there are and in what order; the cost
    then cuts that order. All log-probs are judged, used or not.

    Parameters
    ----------
    log_probs : float32 [B, L, K]
    token_ids : int32 or int64 [B, L, K]
    budgets, root_tokens, prefix_lengths : int32 [B]
    max_budget : int
        N - 1, the number of slots beside the root.
    max_depths, max_candidates : int32 [B], optional
        Positions, and candidates of each, that a tree may use: 1 to L, 1 to K.
    min_log_probs : float64 [B], optional
        As for `best_first`.
    chain_seed : bool
        As for `best_first`.
    verify_cost : float64 [M], optional
        Cost of verifying a tree of 0, 1, ... nodes beside the root, M > max_budget.
    draft_cost : float
        The rest of a round's cost, in the same unit.
    """
    batch, depth_limit, width = log_probs.shape
    max_depths = np.full(batch, depth_limit) if max_depths is None else max_depths
    max_candidates = np.full(batch, width) if max_candidates is None else max_candidates
    min_log_probs = np.full(batch, -np.inf) if min_log_probs is None else min_log_probs
    costs = None if verify_cost is None else draft_cost + verify_cost
    tree = padding(batch, max_budget + 1, prefix_lengths)
    for request in range(batch):
        budget, root = int(budgets[request]), int(root_tokens[request])
        depth, candidates = int(max_depths[request]), int(max_candidates[request])
        least = float(min_log_probs[request])
        status, nodes = TreeStatus.INVALID, list[Node]()
        if (
            0 <= budget <= max_budget
            and root >= 0
            and 0 <= prefix_lengths[request] <= MAX_PREFIX
            and 1 <= depth <= depth_limit
            and 1 <= candidates <= width
            and not math.isnan(least)
            and (costs is None or bool(((costs > 0) & (costs < np.inf))[: budget + 1].all()))
        ):
            status = values_status(log_probs[request])
        if status == TreeStatus.OK:
            rows = log_probs[request, :depth, :candidates]
            status, nodes = grow(rows, budget, chain_seed, least, costs)
        tokens = [int(token_ids[request, depth - 1, rank]) for _, depth, rank in nodes]
        if not all(0 <= token <= MAX_TOKEN for token in tokens):
            status, nodes = TreeStatus.INVALID, []
        add_node(tree, request, 0, -1, max(root, 0))
        for index, ((parent, _, _), token) in enumerate(zip(nodes, tokens, strict=False), start=1):
            add_node(tree, request, index, parent, token)
        tree.status[request] = status
    return tree
