"""Greedy acceptance: the walk down a draft tree for as long as the target agrees.

Every node is compared with the target's token at its parent at once; of the matching children of a
node the earliest wins. The walk itself is then a chain of look-ups in shared memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    TOKEN_DTYPES,
    StreamLike,
    at,
    check_array,
    copy_to_outputs,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import cuda, int32, int64
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import tree_accept as reference
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import AcceptResult, Array, DraftTree, arrays_of, check_tree

THREADS = block_threads(128)
NO_CHILD = MAX_TOKEN = np.iinfo(np.int32).max


def accept_tree_kernel(  # type: ignore[no-untyped-def]
    token_ids,  # int32 [B, N]
    parents,  # int32 [B, N]
    num_nodes,  # int32 [B]
    target_tokens,  # int32 or int64 [B, N]
    accepted_indices,  # int32 [B, L + 1]
    accept_length,  # int32 [B]
    bonus_token,  # int32 [B]
):
    request = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    count = min(num_nodes[request], int32(token_ids.shape[1]))
    s_next = cuda.shared.array(0, int32)  # [N]: the child that the target's token leads to
    for node in range(thread, count, THREADS):
        s_next[node] = NO_CHILD
    cuda.syncthreads()
    for node in range(thread + 1, count, THREADS):
        parent = parents[request, node]
        # An earlier parent is what keeps the walk finite, whatever the caller's tree holds.
        if 0 <= parent < node and token_ids[request, node] == target_tokens[request, parent]:
            cuda.atomic.min(s_next, parent, int32(node))
    cuda.syncthreads()
    if thread == 0:
        length = 0
        node = 0 if count > 0 else NO_CHILD
        last = -1
        while node != NO_CHILD and length < accepted_indices.shape[1]:
            accepted_indices[request, length] = node
            length += 1
            last = node
            node = s_next[node]
        for place in range(length, accepted_indices.shape[1]):
            accepted_indices[request, place] = -1
        accept_length[request] = length
        bonus = int64(target_tokens[request, last]) if last >= 0 else int64(-1)
        bonus_token[request] = int32(bonus) if 0 <= bonus <= MAX_TOKEN else int32(-1)


ACCEPT_TREE = Kernel(
    accept_tree_kernel,
    tuple(
        f"void(int32[:, ::1], int32[:, ::1], int32[::1], {tokens}[:, ::1], "
        "int32[:, ::1], int32[::1], int32[::1])"
        for tokens in ("int32", "int64")
    ),
    THREADS,
)


def accept_tree(
    tree: DraftTree,
    target_tokens: Array,
    *,
    out: AcceptResult | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> AcceptResult:
    """Follow the target's tokens down the tree, from the root, for as long as there is such a child.

    The target's token after the last accepted node is the bonus token (DDTree, arXiv 2604.12989,
    section 3). Of several children with the same token the first counts. Deterministic.

    Parameters
    ----------
    tree : DraftTree
        B requests of N slots. A request of 0 nodes passes through, with length 0 and bonus -1.
    target_tokens : int32 or int64 [B, N]
        The target's token after each node; those of padding slots are not read. On a device, one
        below 0 or beyond int32 leads nowhere, and is -1 as a bonus token.
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
    placement, views = gather(target_tokens=target_tokens, **arrays_of("tree", tree, DraftTree))
    target = views.pop("target_tokens")
    checks_values = validate or placement.on_host
    check_tree(views, max_depth=tree.max_depth, values=checks_values)
    batch, slots = views["parents"].shape
    check_array("target_tokens", target, TOKEN_DTYPES, B=batch, N=slots)
    if checks_values:
        _check_tokens(to_host("target_tokens", target), to_host("num_nodes", views["num_nodes"]))
    outputs_given = None if out is None else arrays_of("out", out, AcceptResult)
    if use_reference(backend, placement):
        arrays = [views[name] for name in ("token_ids", "parents", "num_nodes")]
        result = AcceptResult(*reference.accept_tree(*arrays, target, tree.max_depth))
        if out is None or outputs_given is None:
            return result
        copy_to_outputs(result.arrays(), outputs_given)
        return out
    shapes: dict[str, tuple[int, ...]] = {
        "accepted_indices": (batch, tree.max_depth + 1),
        "accept_length": (batch,),
        "bonus_token": (batch,),
    }
    with Transfer(placement, stream) as transfer:
        outputs = transfer.outputs(shapes, dict.fromkeys(shapes, np.int32), out)
        transfer.launch(
            ACCEPT_TREE,
            batch,
            *(transfer.input(views[name]) for name in ("token_ids", "parents", "num_nodes")),
            transfer.input(target),
            *outputs,
            shared_bytes=4 * slots,
        )
        return AcceptResult(**transfer.results())


def _check_tokens(target_tokens: NDArray[Any], num_nodes: NDArray[np.int32]) -> None:
    used = np.arange(target_tokens.shape[1]) < num_nodes[:, None]
    limits = np.iinfo(np.int32)
    for index in first_where(used & ((target_tokens < limits.min) | (target_tokens > limits.max))):
        raise ArgumentError(at("target_tokens", index), target_tokens[index], "a token id of int32")
