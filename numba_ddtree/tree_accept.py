"""Greedy acceptance: the walk down a draft tree for as long as the target agrees.

Every node is compared with the target's token at its parent at once; of the matching children of a
node the earliest wins, and a stop token comes before any child. The walk itself is then a chain of
look-ups in shared memory.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    TOKEN_DTYPES,
    StreamLike,
    at,
    check_array,
    check_flag,
    check_indices,
    copy_to_outputs,
    first_where,
    flat,
    gather,
    members_of,
    to_host,
)
from numba_ddtree.cuda_target import cuda, int32, int64
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import tree_accept as reference
from numba_ddtree.status import FinishReason
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import AcceptResult, Array, DraftTree, arrays_of, check_tree

THREADS = block_threads(128)
NO_CHILD = MAX_TOKEN = np.iinfo(np.int32).max
STOP = -1  # below every child, so that none replaces it
NO_TOKEN = -1
ENDINGS = ("stop_token_ids", "remaining", "ignore_eos", "finished")


def accept_tree_kernel(  # type: ignore[no-untyped-def]
    token_ids,  # int32 [B, N]
    parents,  # int32 [B, N]
    num_nodes,  # int32 [B]
    target_tokens,  # int32 or int64 [B, N]
    stop_token_ids,  # int32 [num_stops], [B * num_stops], or empty
    num_stops,  # int32
    remaining,  # int32 [B], or empty: no limit
    ignore_eos,  # bool [B], or empty: False
    finished,  # bool or int32 [B], or empty: False
    accepted_indices,  # int32 [B, L + 1]
    accept_length,  # int32 [B]
    bonus_token,  # int32 [B]
    tokens,  # int32 [B, L + 1]
    finish_reason,  # int32 [B]
):
    request = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    slots = token_ids.shape[1]
    path_slots = int32(accepted_indices.shape[1])
    s_words = cuda.shared.array(0, int32)
    s_target = s_words[:slots]
    s_next = s_words[slots : 2 * slots]  # the child that the target's token leads to

    count = min(num_nodes[request], int32(slots))
    left = remaining[request] if remaining.shape[0] > 0 else int32(MAX_TOKEN)
    if left <= 0 or (finished.shape[0] > 0 and finished[request] != 0):
        count = int32(0)
    stops = int32(0) if ignore_eos.shape[0] > 0 and ignore_eos[request] else num_stops
    first_stop = int64(request) * num_stops if stop_token_ids.shape[0] > num_stops else int64(0)
    for node in range(thread, count, THREADS):
        token = int64(target_tokens[request, node])
        s_target[node] = int32(token) if 0 <= token <= MAX_TOKEN else int32(NO_TOKEN)
        s_next[node] = NO_CHILD
        for place in range(stops):
            if stop_token_ids[first_stop + place] == token:
                s_next[node] = STOP
    for place in range(thread, path_slots, THREADS):
        accepted_indices[request, place] = -1
        tokens[request, place] = NO_TOKEN
    cuda.syncthreads()
    for node in range(thread + 1, count, THREADS):
        parent = parents[request, node]
        # An earlier parent is what keeps the walk finite, whatever the caller's tree holds.
        if 0 <= parent < node:
            wanted = s_target[parent]
            if wanted != NO_TOKEN and token_ids[request, node] == wanted:
                cuda.atomic.min(s_next, parent, int32(node))
    cuda.syncthreads()
    if thread == 0:
        limit = min(left, path_slots)
        length = int32(0)
        bonus = int32(NO_TOKEN)
        reason = int32(FinishReason.INACTIVE)
        if count > 0:
            last = following = int32(0)
            while following != STOP and following != NO_CHILD and length < limit:
                last = following
                accepted_indices[request, length] = last
                tokens[request, length] = s_target[last]
                length += int32(1)
                following = s_next[last]
            bonus = s_target[last]
            if bonus == NO_TOKEN:
                reason = int32(FinishReason.INVALID)
            elif following == STOP:
                reason = int32(FinishReason.STOP)
            elif length == left:
                reason = int32(FinishReason.LENGTH)
            else:
                reason = int32(FinishReason.UNFINISHED)
        accept_length[request] = length
        bonus_token[request] = bonus
        finish_reason[request] = reason


ACCEPT_TREE = Kernel(
    accept_tree_kernel,
    tuple(
        f"void(int32[:, ::1], int32[:, ::1], int32[::1], {target}[:, ::1], int32[::1], int32, int32[::1], "
        f"{ignores}[::1], {finished}[::1], "
        "int32[:, ::1], int32[::1], int32[::1], int32[:, ::1], int32[::1])"
        for target, ignores, finished in product(
            ("int32", "int64"),
            ("int32", "boolean"),  # an array that is not given is an empty one of int32
            ("int32", "boolean"),
        )
    ),
    THREADS,
)


def accept_tree(
    tree: DraftTree,
    target_tokens: Array,
    *,
    stop_token_ids: Array | None = None,
    remaining: Array | None = None,
    ignore_eos: bool | Array = False,
    finished: Array | None = None,
    out: AcceptResult | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> AcceptResult:
    """Follow the target's tokens down the tree, from the root, for as long as there is such a child.

    At the root and at every accepted node, the target's token there is looked for among the children
    (DDTree, arXiv 2604.12989, section 3). The first token that has no such child, that is a stop token,
    or that fills the remaining length is the bonus token and ends the walk, so that path, bonus token and
    number of tokens agree, and a stop token is never an accepted node. Of several children with the same
    token the first counts. Deterministic.

    A request that takes no part passes through: length 0, bonus token -1, and nothing else of it is read.
    It is one of 0 nodes, one that is `finished`, or one with no tokens `remaining`.

    Parameters
    ----------
    tree : DraftTree
        B requests of N slots.
    target_tokens : int32 or int64 [B, N]
        The target's token after each node; those of padding slots are not read. One below 0, or on a
        device beyond int32, leads nowhere and is -1 as a bonus token; the request's reason is then
        ``INVALID``.
    stop_token_ids : int32 [S] or [B, S], optional
        Stop tokens of all requests, or of each; numbers below 0 are padding.
    remaining : int32 [B], optional
        Tokens that each request may still emit; without a limit by default.
    ignore_eos : bool or bool [B]
        Whether stop tokens are tokens like any other.
    finished : bool or int32 [B], optional
        Anything but 0 is a request that takes no part, so that the `finish_reason` of one round will do
        for the next.
    out : AcceptResult, optional
        A result of the right shapes to write into.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check a device tree as host trees are; synchronises.

    Returns
    -------
    AcceptResult
        Numpy arrays for host arrays, after synchronising; otherwise arrays of the same library, with
        no synchronisation.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; for host arrays, and with `validate`,
        also parents that are no tree, ancestor bits that are not theirs and tokens beyond int32.
    BackendError
        No device for the CUDA backend.
    """
    check_flag("validate", validate)
    ignores_all = isinstance(ignore_eos, bool | np.bool_) and bool(ignore_eos)
    placement, views = gather(
        target_tokens=target_tokens,
        **arrays_of("tree", tree, DraftTree),
        stop_token_ids=stop_token_ids,
        remaining=remaining,
        ignore_eos=None if isinstance(ignore_eos, bool | np.bool_) else ignore_eos,
        finished=finished,
    )
    checks_values = validate or placement.on_host
    check_tree(views, max_depth=tree.max_depth, values=checks_values)
    batch, slots = views["parents"].shape
    check_array("target_tokens", views["target_tokens"], TOKEN_DTYPES, B=batch, N=slots)
    views |= _checked_endings(views, batch)
    if checks_values:
        _check_tokens(*(to_host(name, views[name]) for name in ("target_tokens", "num_nodes")))
    outputs_given = None if out is None else arrays_of("out", out, AcceptResult)
    if use_reference(backend, placement, stream):
        result = _run_reference(views, tree.max_depth, ignores_all)
        if out is None or outputs_given is None:
            return result
        copy_to_outputs(*(members_of("out", arrays) for arrays in (result.arrays(), outputs_given)))
        return out
    with Transfer(placement, stream) as transfer:
        shapes = result_shapes(batch, tree.max_depth)
        outputs = transfer.outputs(shapes, dict.fromkeys(shapes, np.int32), out)
        stops = None if ignores_all else views["stop_token_ids"]
        *_, num_stops = (0,) if stops is None else stops.shape
        transfer.launch(
            ACCEPT_TREE,
            batch,
            *(transfer.input(views[name]) for name in ("token_ids", "parents", "num_nodes", "target_tokens")),
            transfer.input(None if stops is None else flat(stops)),
            np.int32(num_stops),
            *(transfer.input(views[name]) for name in ("remaining", "ignore_eos", "finished")),
            *outputs,
            shared_bytes=8 * slots,
        )
        return AcceptResult(**transfer.results())


def result_shapes(batch: int, max_depth: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a result's arrays, all int32, for B requests of trees of depth L."""
    path, requests = (batch, max_depth + 1), (batch,)
    return {
        "accepted_indices": path,
        "accept_length": requests,
        "bonus_token": requests,
        "tokens": path,
        "finish_reason": requests,
    }


def _checked_endings(views: dict[str, Any], batch: int) -> dict[str, Any]:
    """Check what may end a request, and return the arrays that are given."""
    given = {name: view for name in ENDINGS if (view := views[name]) is not None}
    if (stops := given.get("stop_token_ids")) is not None:
        rows = {"B": batch} if len(stops.shape) == 2 else {}
        *_, size = stops.shape or (None,)  # which may be 0
        given["stop_token_ids"] = check_indices("stop_token_ids", stops, **rows, S=size)
    if "remaining" in given:
        given["remaining"] = check_indices("remaining", given["remaining"], B=batch)
    if "ignore_eos" in given:
        check_array("ignore_eos", given["ignore_eos"], (np.bool_,), B=batch)
    if "finished" in given:
        if given["finished"].dtype.kind != "b":
            given["finished"] = check_indices("finished", given["finished"], B=batch)
        check_array("finished", given["finished"], (np.bool_, np.int32), B=batch)
    return given


def _run_reference(views: dict[str, Any], max_depth: int, ignores_all: bool) -> AcceptResult:
    given = (views[name] for name in ("token_ids", "parents", "num_nodes", "target_tokens"))
    ignores = ignores_all if views["ignore_eos"] is None else views["ignore_eos"]
    arrays = reference.accept_tree(
        *given, max_depth, views["stop_token_ids"], views["remaining"], ignores, views["finished"]
    )
    return AcceptResult(*arrays)


def _check_tokens(target_tokens: NDArray[Any], num_nodes: NDArray[np.int32]) -> None:
    used = np.arange(target_tokens.shape[1]) < num_nodes[:, None]
    limits = np.iinfo(np.int32)
    for index in first_where(used & ((target_tokens < limits.min) | (target_tokens > limits.max))):
        raise ArgumentError(at("target_tokens", index), target_tokens[index], "a token id of int32")
