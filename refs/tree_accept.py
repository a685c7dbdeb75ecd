"""Greedy acceptance: walk down the tree for as long as the target agrees."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TOKEN = np.iinfo(np.int32).max


class AcceptArrays(NamedTuple):
    """The arrays of `numba_ddtree.AcceptResult`, in its order."""

    accepted_indices: NDArray[np.int32]  # [B, L + 1]
    accept_length: NDArray[np.int32]  # [B]
    bonus_token: NDArray[np.int32]  # [B]


def accept_path(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    target_tokens: NDArray[np.int32] | NDArray[np.int64],
) -> list[int]:
    """Return the accepted nodes of one tree, root first; all arrays are [n], nodes in use only.

    A node comes after its parent, so that one pass meets the path in order.
    """
    path = [0]
    for node in range(1, len(parents)):
        if parents[node] == path[-1] and token_ids[node] == target_tokens[path[-1]]:
            path.append(node)
    return path


def accept_tree(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    num_nodes: NDArray[np.int32],
    target_tokens: NDArray[np.int32] | NDArray[np.int64],
    max_depth: int,
) -> AcceptArrays:
    """Walk each request's tree.

    Parameters
    ----------
    token_ids, parents : int32 [B, N]
    num_nodes : int32 [B]
        A request of 0 nodes passes through: length 0, bonus -1.
    target_tokens : int32 or int64 [B, N]
        The target's token after each node; one below 0 or beyond int32 leads nowhere, and is -1 as
        a bonus token.
    max_depth : int
        L; paths are padded with -1 to L + 1.
    """
    batch = len(token_ids)
    result = AcceptArrays(
        accepted_indices=np.full((batch, max_depth + 1), -1, np.int32),
        accept_length=np.zeros(batch, np.int32),
        bonus_token=np.full(batch, -1, np.int32),
    )
    for request in range(batch):
        used = slice(0, int(num_nodes[request]))
        if num_nodes[request] == 0:
            continue
        path = accept_path(token_ids[request, used], parents[request, used], target_tokens[request, used])
        result.accepted_indices[request, : len(path)] = path
        result.accept_length[request] = len(path)
        bonus = int(target_tokens[request, path[-1]])
        result.bonus_token[request] = bonus if 0 <= bonus <= MAX_TOKEN else -1
    return result
