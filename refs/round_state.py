"""The requests of a round's batch: they come in, are passed by, and move on; all in place."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.status import FinishReason, TreeStatus

NO_LIMIT = np.iinfo(np.int32).max


class StateArrays(NamedTuple):
    """The arrays of `numba_ddtree.round_state.RoundState`, in its order; int32 [B]."""

    root_tokens: NDArray[np.int32]
    prefix_lengths: NDArray[np.int32]
    remaining: NDArray[np.int32]
    finish_reason: NDArray[np.int32]


def is_active(state: StateArrays) -> NDArray[np.bool_]:
    """Whether each request takes part in a round."""
    goes_on: NDArray[np.bool_] = state.finish_reason == FinishReason.UNFINISHED
    return goes_on & (state.remaining > 0)


def start_requests(
    state: StateArrays,
    root_tokens: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
    remaining: NDArray[np.int32] | None = None,
    requests: NDArray[np.int32] | None = None,
) -> None:
    """Put requests into places of the batch.

    Parameters
    ----------
    state : StateArrays
    root_tokens, prefix_lengths : int32 [n]
    remaining : int32 [n], optional
        `NO_LIMIT` by default.
    requests : int32 [n], optional
        The place of each; one that is none is left out, and the last of several in one place counts. By
        default the first n places, and no other takes part any more.
    """
    batch = len(state.root_tokens)
    places = np.arange(len(root_tokens)) if requests is None else requests
    if requests is None:
        state.finish_reason[len(places) :] = FinishReason.INACTIVE
        state.remaining[len(places) :] = 0
    for source, place in enumerate(places.tolist()):
        if 0 <= place < batch:
            state.root_tokens[place] = root_tokens[source]
            state.prefix_lengths[place] = prefix_lengths[source]
            state.remaining[place] = NO_LIMIT if remaining is None else remaining[source]
            state.finish_reason[place] = FinishReason.UNFINISHED


def pass_by(
    state: StateArrays,
    token_ids: NDArray[np.int32],
    parents: NDArray[np.int32],
    depths: NDArray[np.int32],
    positions: NDArray[np.int32],
    first_child: NDArray[np.int32],
    next_sibling: NDArray[np.int32],
    ancestor_bits: NDArray[np.uint32],
    num_nodes: NDArray[np.int32],
    status: NDArray[np.int32],
) -> None:
    """Leave requests that take no part no node; the arrays are those of a `DraftTree`."""
    passed = ~is_active(state)
    for array in (token_ids, depths, ancestor_bits, num_nodes):
        array[passed] = 0
    for array in (parents, first_child, next_sibling):
        array[passed] = -1
    positions[passed] = np.maximum(state.prefix_lengths, 0)[passed, None]
    status[passed] = TreeStatus.FINISHED


def advance(
    state: StateArrays,
    accept_length: NDArray[np.int32],
    bonus_token: NDArray[np.int32],
    finish_reason: NDArray[np.int32],
) -> None:
    """Move each request on by what its round emitted; the arrays are those of an `AcceptResult`.

    A bonus token of -1, after which a request does not go on, leaves the root as it is.
    """
    for request in np.flatnonzero(accept_length > 0):
        state.prefix_lengths[request] += accept_length[request]
        state.remaining[request] -= accept_length[request]
        state.finish_reason[request] = finish_reason[request]
        if bonus_token[request] >= 0:
            state.root_tokens[request] = bonus_token[request]
