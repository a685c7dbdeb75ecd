"""Best-first construction of draft trees in shared memory.

The heap of the original (DDTree, arXiv 2604.12989) becomes a table: every node of the tree offers
its best child that is not yet in the tree, and the best offer becomes the next node. That node makes
an offer of its own, and its parent offers the next sibling, so that each step changes two places of
the table and none is ever freed. One warp finds the best of up to 1024 offers in two steps: lane g
knows the best of offers 32 g to 32 g + 31, and only the groups of the two changed places are looked
at again.

Order is the heap's: score (float64, one rounded addition a node) falling, then the tuple of ranks
rising. Offers whose scores are equal to the bit are told apart by their paths' bit strings
(`numba_ddtree.device.bits.rank_code`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    TOKEN_DTYPES,
    Placement,
    StreamLike,
    at,
    check_array,
    check_count,
    check_indices,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import cuda, device_function, float32, float64, int32, int64, uint32
from numba_ddtree.device.bits import (
    PATH_WORDS,
    order_key,
    placed_code,
    rank_code,
    rank_code_length,
    score_of,
    write_ancestor_bits,
)
from numba_ddtree.device.warp import LANES, warp_ballot, warp_broadcast, warp_max, warp_sync
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import tree_build as reference
from numba_ddtree.status import TreeStatus
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import TREE_DTYPES, Array, DraftTree, arrays_of, tree_shapes

MAX_BUDGET = 1024
MAX_DEPTH = 64
MAX_TOKEN = np.iinfo(np.int32).max

THREADS = block_threads(256)
NO_OFFER = np.int64(-(2**63))  # below the key of every finite score
# A tree of N slots takes 15 words of shared memory a slot; what is left of this, which every device
# has and which leaves room for a second block on most, holds the first ranks of each row.
SHARED_BYTES = 99 * 1024
SLOT_WORDS = 15
FLAG_WORDS = 4
NAN_FLAG, INVALID_FLAG, COUNT_WORD = range(3)


@device_function
def offer_word(s_path, s_path_bits, s_offer_rank, slot, word):  # type: ignore[no-untyped-def]
    """Word of the bit string of an offer: its parent's path, then the offered rank."""
    path = s_path[uint32(word * s_path_bits.shape[0] + slot)]
    return uint32(path | placed_code(rank_code(s_offer_rank[slot]), s_path_bits[slot], word))


@device_function
def offer_precedes(s_path, s_path_bits, s_offer_rank, s_depth, left, right):  # type: ignore[no-untyped-def]
    """Whether of two offers of equal score the left one's tuple of ranks is the smaller."""
    for word in range(PATH_WORDS):
        left_word = offer_word(s_path, s_path_bits, s_offer_rank, left, word)
        right_word = offer_word(s_path, s_path_bits, s_offer_rank, right, word)
        if left_word != right_word:
            return left_word < right_word
    return s_depth[left] < s_depth[right]


@device_function
def best_lane(key, slot, s_path, s_path_bits, s_offer_rank, s_depth):  # type: ignore[no-untyped-def]
    """Lane whose offer comes first; the whole warp takes part. Any lane, where none has an offer."""
    # The top bit is flipped so that unsigned comparison orders signed keys.
    high = uint32(uint32(key >> int64(32)) ^ uint32(0x80000000))
    best = warp_max(high)
    tied = high == best
    lanes = warp_ballot(tied)
    if best != uint32(0) and cuda.popc(lanes) > 1:
        low = uint32(key & int64(0xFFFFFFFF)) if tied else uint32(0)
        best = warp_max(low)
        tied = tied and low == best
        lanes = warp_ballot(tied)
        if cuda.popc(lanes) > 1:
            for word in range(PATH_WORDS):
                # Inverted, so that the smallest path is the maximum and lanes out of the race are 0.
                path = uint32(0)
                if tied:
                    path = uint32(~offer_word(s_path, s_path_bits, s_offer_rank, slot, word))
                best = warp_max(path)
                tied = tied and path == best
            shallow = uint32(0)
            if tied:
                shallow = uint32(MAX_DEPTH + 1 - s_depth[slot])
            best = warp_max(shallow)
            lanes = warp_ballot(tied and shallow == best)
    return int32(cuda.ffs(int32(lanes)) - 1)


@device_function
def child_key(score, row, rank, log_probs, request, s_log_probs, staged):  # type: ignore[no-untyped-def]
    """Key of a node's child of a given rank, or ``NO_OFFER`` where there is none of probability > 0."""
    if row >= log_probs.shape[1] or rank >= log_probs.shape[2]:
        return NO_OFFER
    log_prob = s_log_probs[uint32(row * staged + rank)] if rank < staged else log_probs[request, row, rank]
    return NO_OFFER if log_prob == float32(-np.inf) else order_key(score + float64(log_prob))


@device_function
def stage_log_probs(log_probs, request, s_log_probs, staged, s_flags):  # type: ignore[no-untyped-def]
    """Check a request's log-probs and copy the first ranks of each row; a row a warp."""
    lane = cuda.threadIdx.x % LANES
    for row in range(cuda.threadIdx.x // LANES, log_probs.shape[1], THREADS // LANES):
        for rank in range(lane, log_probs.shape[2], LANES):
            value = log_probs[request, row, rank]
            if rank < staged:
                s_log_probs[row * staged + rank] = value
            if value != value:
                s_flags[NAN_FLAG] = 1
            elif value == float32(np.inf) or (rank > 0 and value > log_probs[request, row, rank - 1]):
                s_flags[INVALID_FLAG] = 1


@device_function
def grow_tree(  # type: ignore[no-untyped-def]
    log_probs,
    request,
    budget,
    s_log_probs,
    staged,
    s_score,
    s_offer,
    s_parent,
    s_depth,
    s_rank,
    s_offer_rank,
    s_first_child,
    s_last_child,
    s_next_sibling,
    s_path,
    s_path_bits,
):
    """Take the best offer until the budget or the offers run out, and return the number of nodes.

    The first warp takes part as a whole; the root is in place, its offer is not.
    """
    lane_id = cuda.threadIdx.x
    taken: Any = uint32(1)
    root_child = child_key(0.0, uint32(0), uint32(0), log_probs, request, s_log_probs, staged)
    s_offer[0] = root_child
    best_key = root_child if lane_id == 0 else NO_OFFER  # of the lane's group of 32 offers
    best_slot = uint32(0)
    warp_sync()
    # Every lane does the same with the chosen offer, so that none waits for another; what differs
    # is the word of the path that it writes.
    path_word = uint32(min(lane_id, PATH_WORDS - 1))
    path_start = uint32(path_word * uint32(s_score.shape[0]))
    while True:
        winner = best_lane(best_key, best_slot, s_path, s_path_bits, s_offer_rank, s_depth)
        slot = uint32(warp_broadcast(int32(best_slot), winner))
        key = s_offer[slot]
        if key == NO_OFFER or taken > budget:
            break
        node = taken
        depth = uint32(s_depth[slot])
        rank = uint32(s_offer_rank[slot])
        path_bits = s_path_bits[slot]
        path = s_path[uint32(path_start + slot)]
        elder = uint32(s_last_child[slot])
        group_slot = uint32((slot & uint32(0xFFFFFFE0)) + uint32(lane_id))
        group_key = s_offer[group_slot]
        score = score_of(key)
        next_rank = uint32(rank + uint32(1))
        sibling = child_key(s_score[slot], depth, next_rank, log_probs, request, s_log_probs, staged)
        child = child_key(
            score, uint32(depth + uint32(1)), uint32(0), log_probs, request, s_log_probs, staged
        )
        warp_sync()  # all have read what now changes
        taken = uint32(taken + uint32(1))
        s_score[node] = score
        s_parent[node] = int32(slot)
        s_depth[node] = int32(depth + uint32(1))
        s_rank[node] = int32(rank)
        s_offer_rank[node] = 0
        s_offer_rank[slot] = int32(next_rank)
        s_offer[node] = child
        s_offer[slot] = sibling
        s_path[uint32(path_start + node)] = uint32(path | placed_code(rank_code(rank), path_bits, path_word))
        s_path_bits[node] = path_bits + rank_code_length(rank)
        if rank == uint32(0):
            s_first_child[slot] = int32(node)
        else:
            s_next_sibling[elder] = int32(node)
        s_last_child[slot] = int32(node)
        warp_sync()
        if group_slot == slot:
            group_key = sibling
        if group_slot == node:
            group_key = child
        winner = best_lane(group_key, group_slot, s_path, s_path_bits, s_offer_rank, s_depth)
        group_best = uint32((slot & uint32(0xFFFFFFE0)) + uint32(winner))
        if lane_id == slot // uint32(LANES):
            best_slot = group_best
            best_key = s_offer[group_best]
        # The new node's group gained one offer, which was seen just now if it is the same group.
        if lane_id == node // uint32(LANES) and (
            child > best_key
            or (
                child == best_key
                and child != NO_OFFER
                and best_slot != node
                and offer_precedes(s_path, s_path_bits, s_offer_rank, s_depth, node, best_slot)
            )
        ):
            best_key = child
            best_slot = node
    return taken


def build_tree_kernel(  # type: ignore[no-untyped-def]
    log_probs,  # float32 [B, L, K]
    candidate_ids,  # int32 or int64 [B, L, K]
    budgets,  # int32 [B], or empty: the default for all, as for the next two
    root_tokens,  # int32 [B]
    prefix_lengths,  # int32 [B]
    default_budget,  # int32
    staged,  # int32: ranks of each row that fit shared memory
    token_ids,  # int32 [B, N], and so on as DraftTree
    parents,
    depths,
    positions,
    first_child,
    next_sibling,
    ancestor_bits,
    num_nodes,
    status,
):
    request = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    slots = parents.shape[1]
    stride = (slots + LANES - 1) // LANES * LANES
    s_words = cuda.shared.array(0, int32)
    s_unsigned = cuda.shared.array(0, uint32)
    s_keys = cuda.shared.array(0, int64)
    s_doubles = cuda.shared.array(0, float64)
    s_floats = cuda.shared.array(0, float32)
    s_score = s_doubles[:stride]
    s_offer = s_keys[stride : 2 * stride]
    s_parent = s_words[4 * stride : 5 * stride]
    s_depth = s_words[5 * stride : 6 * stride]
    s_rank = s_words[6 * stride : 7 * stride]
    s_offer_rank = s_words[7 * stride : 8 * stride]
    s_first_child = s_words[8 * stride : 9 * stride]
    s_last_child = s_words[9 * stride : 10 * stride]
    s_next_sibling = s_words[10 * stride : 11 * stride]
    s_path = s_unsigned[11 * stride : 14 * stride]
    s_path_bits = s_words[14 * stride : 15 * stride]
    s_flags = s_words[15 * stride : 15 * stride + FLAG_WORDS]
    s_log_probs = s_floats[15 * stride + FLAG_WORDS :]

    budget = budgets[request] if budgets.shape[0] > 0 else default_budget
    prefix = prefix_lengths[request] if prefix_lengths.shape[0] > 0 else int32(0)
    for slot in range(thread, stride, THREADS):
        s_offer[slot] = NO_OFFER
        s_first_child[slot] = -1
        s_next_sibling[slot] = -1
    if thread < FLAG_WORDS:
        s_flags[thread] = 0
    cuda.syncthreads()
    stage_log_probs(log_probs, request, s_log_probs, staged, s_flags)
    cuda.syncthreads()

    code = int32(TreeStatus.OK)
    if budget < 0 or budget >= slots or prefix < 0:
        code = int32(TreeStatus.INVALID)
    elif s_flags[NAN_FLAG] != 0:
        code = int32(TreeStatus.NAN)
    elif s_flags[INVALID_FLAG] != 0:
        code = int32(TreeStatus.INVALID)
    elif log_probs[request, 0, 0] == float32(-np.inf):
        code = int32(TreeStatus.NO_CANDIDATE)

    if thread == 0:
        s_score[0] = 0.0
        s_parent[0] = -1
        s_depth[0] = 0
        s_rank[0] = 0
        s_offer_rank[0] = 0
        s_path_bits[0] = 0
        for word in range(PATH_WORDS):
            s_path[word * stride] = uint32(0)
        s_flags[COUNT_WORD] = 1
    cuda.syncthreads()
    if thread < LANES and code == int32(TreeStatus.OK) and budget > 0:
        taken = grow_tree(
            log_probs,
            request,
            budget,
            s_log_probs,
            staged,
            s_score,
            s_offer,
            s_parent,
            s_depth,
            s_rank,
            s_offer_rank,
            s_first_child,
            s_last_child,
            s_next_sibling,
            s_path,
            s_path_bits,
        )
        s_flags[COUNT_WORD] = int32(taken)
    cuda.syncthreads()
    count = s_flags[COUNT_WORD]

    # The rank of a node gives way to its token, so that a bad one is known before anything is written.
    for node in range(thread + 1, count, THREADS):
        token = candidate_ids[request, s_depth[node] - 1, s_rank[node]]
        if token < 0 or token > MAX_TOKEN:
            s_flags[INVALID_FLAG] = 1
        s_rank[node] = int32(token)
    cuda.syncthreads()
    if code == int32(TreeStatus.OK):
        if s_flags[INVALID_FLAG] != 0:
            code = int32(TreeStatus.INVALID)
            count = int32(1)
        elif count <= budget:
            code = int32(TreeStatus.EXHAUSTED)
    if thread == 0:
        num_nodes[request] = count
        status[request] = code
        s_rank[0] = root_tokens[request] if root_tokens.shape[0] > 0 else int32(0)
        if count == 1:
            s_first_child[0] = -1
    cuda.syncthreads()
    base = max(prefix, int32(0))
    for slot in range(thread, slots, THREADS):
        used = slot < count
        token_ids[request, slot] = s_rank[slot] if used else 0
        parents[request, slot] = s_parent[slot] if used else -1
        depths[request, slot] = s_depth[slot] if used else 0
        positions[request, slot] = base + (s_depth[slot] if used else 0)
        first_child[request, slot] = s_first_child[slot] if used else -1
        next_sibling[request, slot] = s_next_sibling[slot] if used else -1
    write_ancestor_bits(ancestor_bits, request, s_parent, count, THREADS)


_TREE = ", ".join(["int32[:, ::1]"] * 6 + ["uint32[:, :, ::1]"] + ["int32[::1]"] * 2)
BUILD_TREE = Kernel(
    build_tree_kernel,
    tuple(
        f"void(float32[:, :, ::1], {ids}[:, :, ::1], int32[::1], int32[::1], int32[::1], "
        f"int32, int32, {_TREE})"
        for ids in ("int32", "int64")
    ),
    THREADS,
)


def build_tree(
    draft_log_probs: Array,
    draft_token_ids: Array,
    budget: int | Array,
    *,
    root_tokens: Array | None = None,
    prefix_lengths: Array | None = None,
    max_budget: int | None = None,
    out: DraftTree | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> DraftTree:
    """Build the tree of the `budget` most probable continuations of each request.

    Algorithm 1 of DDTree (arXiv 2604.12989). A node's score is the sum of the log-probs on its path,
    in float64, rounded once a node. Nodes are numbered by score, best first; of equal scores the
    smaller tuple of ranks comes first. Candidates of log-prob -inf are never nodes. The result is
    deterministic, to the bit that of the reference in `numba_ddtree.refs.tree_build`.

    Parameters
    ----------
    draft_log_probs : float32 [B, L, K]
        The draft's log-probs (natural log) of the best K candidates at each of the next L positions,
        each row sorted, best first. L is at most 64.
    draft_token_ids : int32 or int64 [B, L, K]
        The candidates' token ids.
    budget : int or int32 [B]
        Nodes beside the root, at most 1024; an array gives each request its own.
    root_tokens : int32 [B], optional
        Token of the root, the last one that the target confirmed; 0 by default.
    prefix_lengths : int32 [B], optional
        Keys in the cache before the root, from which positions count; 0 by default.
    max_budget : int, optional
        The result has ``max_budget + 1`` slots; by default the largest budget. A must where `budget`
        is a device array.
    out : DraftTree, optional
        A tree of the right shapes to write into.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays as those of host arrays are; synchronises.

    Returns
    -------
    DraftTree
        Numpy arrays for host arrays, after synchronising; otherwise arrays of the same library, with
        no synchronisation. `status` says what became of each request; one whose values are bad is
        its root alone and leaves the others untouched.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; for host arrays, and with `validate`,
        also NaN, unsorted rows, a first row without candidates, a negative token id or prefix
        length, a budget out of range.
    BackendError
        No device for the CUDA backend.
    """
    placement, views = gather(
        draft_log_probs=draft_log_probs,
        draft_token_ids=draft_token_ids,
        budget=None if isinstance(budget, int | np.integer) else budget,
        root_tokens=root_tokens,
        prefix_lengths=prefix_lengths,
    )
    views = _checked(views)
    max_budget = _checked_max_budget(budget, views["budget"], max_budget)
    default_budget = int(budget) if views["budget"] is None else 0
    runs_reference = use_reference(backend, placement)
    if out is not None:
        arrays_of("out", out, DraftTree)
        depth = views["draft_log_probs"].shape[1]
        if out.max_depth != depth:
            raise ArgumentError("out.max_depth", out.max_depth, f"{depth}, as L is")
    if placement.on_host or validate:
        host = _host_inputs(views, default_budget)
        _check_values(max_budget, *host)
        if runs_reference:
            arrays = reference.build_tree(*host, max_budget)
            tree = DraftTree(**arrays._asdict(), max_depth=host[0].shape[1])
            return tree if out is None else tree.copy_to(out)
    return _launch(placement, views, default_budget, max_budget, out, stream)


def _checked(views: dict[str, Any]) -> dict[str, Any]:
    """Check every view's shape and dtype."""
    log_probs = views["draft_log_probs"]
    check_array("draft_log_probs", log_probs, (np.float32,), B=None, L=None, K=None)
    batch, depth, width = log_probs.shape
    if depth > MAX_DEPTH:
        raise ArgumentError("draft_log_probs", f"L = {depth}", f"a draft depth of at most {MAX_DEPTH}")
    check_array("draft_token_ids", views["draft_token_ids"], TOKEN_DTYPES, B=batch, L=depth, K=width)
    return views | {
        name: None if views[name] is None else check_indices(name, views[name], B=batch)
        for name in ("budget", "root_tokens", "prefix_lengths")
    }


def _checked_max_budget(budget: Any, budgets: Any, max_budget: int | None) -> int:
    """Return N - 1: as given, or else the largest budget."""
    if max_budget is not None:
        max_budget = check_count("max_budget", max_budget, 0, MAX_BUDGET)
    if budgets is None:
        budget = check_count("budget", budget, 0, MAX_BUDGET if max_budget is None else max_budget)
        return budget if max_budget is None else max_budget
    if max_budget is not None:
        return max_budget
    if not isinstance(budgets, np.ndarray):
        raise ArgumentError("max_budget", None, "a number, since budgets on the device cannot size the tree")
    return min(int(budgets.max(initial=0)), MAX_BUDGET)


def _host_inputs(views: dict[str, Any], default_budget: int) -> tuple[NDArray[Any], ...]:
    """Return the reference's arguments: host copies of the views, with defaults filled in."""
    batch = views["draft_log_probs"].shape[0]
    defaults = {"budget": default_budget, "root_tokens": 0, "prefix_lengths": 0}
    return tuple(
        np.full(batch, defaults[name], np.int32) if view is None else to_host(name, view)
        for name, view in views.items()
    )


def _check_values(
    max_budget: int,
    log_probs: NDArray[np.float32],
    candidate_ids: NDArray[Any],
    budgets: NDArray[np.int32],
    root_tokens: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
) -> None:
    """Raise for the first value that would end in a bad status."""
    is_token = (candidate_ids >= 0) & (candidate_ids <= MAX_TOKEN)
    longest = MAX_TOKEN - MAX_DEPTH
    rules = (
        ("draft_log_probs", log_probs, np.isnan(log_probs), "a number, not NaN"),
        ("draft_log_probs", log_probs, log_probs == np.inf, "a log-probability, not infinity"),
        ("draft_log_probs", log_probs, _rises(log_probs), "at most the value before it: best first"),
        ("draft_log_probs", log_probs, _is_first_empty(log_probs), "a candidate of probability above 0"),
        ("draft_token_ids", candidate_ids, ~is_token, f"a token id from 0 to {MAX_TOKEN}"),
        ("budget", budgets, (budgets < 0) | (budgets > max_budget), f"a number from 0 to {max_budget}"),
        ("root_tokens", root_tokens, root_tokens < 0, "a token id, not negative"),
        ("prefix_lengths", prefix_lengths, prefix_lengths < 0, "a length, not negative"),
        ("prefix_lengths", prefix_lengths, prefix_lengths > longest, f"a length of at most {longest}"),
    )
    for name, array, is_bad, expected in rules:
        for index in first_where(is_bad):
            raise ArgumentError(at(name, index), array[index], expected)


def _rises(log_probs: NDArray[np.float32]) -> NDArray[np.bool_]:
    rises = np.zeros(log_probs.shape, bool)
    np.greater(log_probs[..., 1:], log_probs[..., :-1], out=rises[..., 1:])
    return rises


def _is_first_empty(log_probs: NDArray[np.float32]) -> NDArray[np.bool_]:
    is_empty = np.zeros(log_probs.shape, bool)
    is_empty[:, 0, 0] = log_probs[:, 0, 0] == -np.inf
    return is_empty


def _launch(
    placement: Placement,
    views: dict[str, Any],
    default_budget: int,
    max_budget: int,
    out: DraftTree | None,
    stream: StreamLike,
) -> DraftTree:
    batch, depth, width = views["draft_log_probs"].shape
    table_bytes = 4 * (SLOT_WORDS * _padded(max_budget + 1) + FLAG_WORDS)
    staged = min(width, max(max_budget, 1), (SHARED_BYTES - table_bytes) // (4 * depth))
    with Transfer(placement, stream) as transfer:
        outputs = transfer.outputs(tree_shapes(batch, max_budget + 1), TREE_DTYPES, out)
        transfer.launch(
            BUILD_TREE,
            batch,
            *(transfer.input(view) for view in views.values()),
            np.int32(default_budget),
            np.int32(staged),
            *outputs,
            shared_bytes=table_bytes + 4 * depth * staged,
        )
        return DraftTree(**transfer.results(), max_depth=depth)


def _padded(slots: int) -> int:
    return -(-slots // LANES) * LANES
