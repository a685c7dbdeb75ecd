"""Greedy acceptance: walk down the tree for as long as the target agrees and the request goes on."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.status import FinishReason

MAX_TOKEN = np.iinfo(np.int32).max


class AcceptArrays(NamedTuple):
    """The arrays of `numba_ddtree.AcceptResult`, in its order."""

    accepted_indices: NDArray[np.int32]  # [B, L + 1]
    accept_length: NDArray[np.int32]  # [B]
    bonus_token: NDArray[np.int32]  # [B]
    tokens: NDArray[np.int32]  # [B, L + 1]
    finish_reason: NDArray[np.int32]  # [B]


def accept_path(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    target_tokens: NDArray[np.int32] | NDArray[np.int64],
    stop_tokens: Collection[int] = (),
    remaining: int | None = None,
) -> tuple[list[int], FinishReason]:
    """Return the accepted nodes of one tree, root first, and why the walk ended.

    Parameters
    ----------
    token_ids, parents, target_tokens : int32 [n]
        Nodes in use only.
    stop_tokens : collection of int
    remaining : int, optional
        Tokens, above 0, that the request may still emit.
    """
    path = [0]
    while True:
        token = int(target_tokens[path[-1]])
        if not 0 <= token <= MAX_TOKEN:
            return path, FinishReason.INVALID
        if token in stop_tokens:
            return path, FinishReason.STOP
        if len(path) == remaining:
            return path, FinishReason.LENGTH
        children = np.flatnonzero((parents == path[-1]) & (token_ids == token))
        if not len(children):
            return path, FinishReason.UNFINISHED
        path.append(int(children[0]))


def accept_tree(
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    num_nodes: NDArray[np.int32],
    target_tokens: NDArray[np.int32] | NDArray[np.int64],
    max_depth: int,
    stop_token_ids: NDArray[np.int32] | None = None,
    remaining: NDArray[np.int32] | None = None,
    ignore_eos: NDArray[np.bool_] | bool = False,
    finished: NDArray[np.bool_] | NDArray[np.int32] | None = None,
) -> AcceptArrays:
    """Walk each request's tree.

    Parameters
    ----------
    token_ids, parents : int32 [B, N]
    num_nodes : int32 [B]
    target_tokens : int32 or int64 [B, N]
        The target's token after each node; one below 0 or beyond int32 leads nowhere, and is -1 as
        a bonus token.
    max_depth : int
        L; paths are padded with -1 to L + 1.
    stop_token_ids : int32 [S] or [B, S], optional
        Padded with numbers below 0.
    remaining : int32 [B], optional
        Tokens that each request may still emit.
    ignore_eos : bool or bool [B]
        Stop tokens are tokens like any other.
    finished : bool or int32 [B], optional
        Whether a request takes no part, as one does not that has no nodes or nothing remaining:
        length 0, bonus -1.
    """
    batch = len(token_ids)
    result = AcceptArrays(
        accepted_indices=np.full((batch, max_depth + 1), -1, np.int32),
        accept_length=np.zeros(batch, np.int32),
        bonus_token=np.full(batch, -1, np.int32),
        tokens=np.full((batch, max_depth + 1), -1, np.int32),
        finish_reason=np.full(batch, FinishReason.INACTIVE, np.int32),
    )
    lists = np.zeros(0, np.int32) if stop_token_ids is None else stop_token_ids
    stops = np.broadcast_to(lists, (batch, lists.shape[-1]))
    ignores = np.broadcast_to(ignore_eos, batch)
    for request in range(batch):
        left = None if remaining is None else int(remaining[request])
        is_finished = finished is not None and bool(finished[request])
        if num_nodes[request] == 0 or is_finished or (left is not None and left <= 0):
            continue
        used = slice(0, int(num_nodes[request]))
        path, reason = accept_path(
            token_ids[request, used],
            parents[request, used],
            target_tokens[request, used],
            () if ignores[request] else set(stops[request].tolist()),
            left,
        )
        length = len(path)
        emitted = [int(target_tokens[request, node]) for node in path]
        if reason == FinishReason.INVALID:
            emitted[-1] = -1
        result.accepted_indices[request, :length] = path
        result.accept_length[request] = length
        result.bonus_token[request] = emitted[-1]
        result.tokens[request, :length] = emitted
        result.finish_reason[request] = reason
    return result
