"""Best-first construction of draft trees in shared memory, a block a request.

Two ways lead to the heap's tree (DDTree, arXiv 2604.12989), equal to the bit: `device.tree_sums` finds
the best continuations all at once and sorts them, for small budgets by the shorter steps of
`device.tree_few`; `device.tree_pops` takes them one by one, where log-probs above 0 make the heap's order
another than that of the scores, and where more continuations tie than there is room for.

Order is the heap's: score (float64, one rounded addition a node) falling, then the tuple of ranks
rising.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    check_scalar,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import (
    cuda,
    device_routine,
    float32,
    float64,
    int32,
    int64,
    uint16,
    uint32,
)
from numba_ddtree.device.bits import clear_ancestor_bits, write_ancestor_bits
from numba_ddtree.device.draft_rows import (
    INVALID_FLAG,
    NAN_FLAG,
    POSITIVE_FLAG,
    Rows,
    stage_log_probs,
)
from numba_ddtree.device.memory import store_flat
from numba_ddtree.device.shared import shared_from
from numba_ddtree.device.tree_few import (
    INVERSE_SHIFT,
    clear_bits,
    clear_few,
    count_few,
    find_few_paths,
    place_few_nodes,
    rank_few,
    stage_whole_rows,
    write_bits_of_few,
)
from numba_ddtree.device.tree_pops import NO_OFFER, OFFER_WORDS, Offers, pop_tree
from numba_ddtree.device.tree_sums import (
    BIN_WORDS,
    COUNTERS,
    PATH_WORDS_A_PLACE,
    Paths,
    capacity_for,
    clear_search,
    find_paths,
    order_size,
    place_nodes,
    sort_paths,
)
from numba_ddtree.device.tree_worth import keep_worth, round_cost
from numba_ddtree.device.warp import LANES, warp_sync
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import tree_build as reference
from numba_ddtree.refs.tree_build import MAX_DEPTH, MAX_PREFIX, MAX_TOKEN
from numba_ddtree.status import TreeStatus
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import TREE_DTYPES, Array, DraftTree, arrays_of, tree_shapes

MAX_BUDGET = 1024
LOWEST = float(np.finfo(np.float64).min)

# A block for budgets up to SMALL_BUDGET and for all others: few warps meet at a barrier sooner, and many
# have more log-probs under way.
SMALL_BUDGET, SMALL_WIDTH = 128, 256
FEW_THREADS, MANY_THREADS = block_threads(256), block_threads(512)
# Tree and search together take about 88 KB for 1024 nodes; what is left of this, which every device
# has, holds the first ranks of each row.
SHARED_WORDS = 99 * 1024 // 4
SLOT_WORDS = 7  # of a `TreeTable`
# For trees up to SMALL_BUDGET, where places in shared memory are known beforehand.
SMALL_STRIDE = -(-(SMALL_BUDGET + 1) // LANES) * LANES
SMALL_CAPACITY = capacity_for(SMALL_BUDGET)
SMALL_SEARCH_WORDS = max(
    OFFER_WORDS * SMALL_STRIDE,
    PATH_WORDS_A_PLACE * SMALL_CAPACITY + BIN_WORDS + order_size(SMALL_BUDGET) // 2,
)
# Flags: draft_rows' three, then these, then tree_sums' counters.
BAD_COST_FLAG, BAD_TOKEN_FLAG, COUNT_WORD = 3, 4, 5
COUNTERS_AT = 6
FLAG_WORDS = COUNTERS_AT + COUNTERS + 1  # an even number, for what comes after it
CHAIN_WORDS = 2 * (MAX_DEPTH + 1)
CHAIN_BATCH = 8  # log-probs that are loaded at once


class TreeTable(NamedTuple):
    """The tree while it grows, a slot a node, all in shared memory.

    Attributes
    ----------
    score : float64 [N]
    parent, depth, rank, first_child, next_sibling : int32 [N]
    """

    score: Any
    parent: Any
    depth: Any
    rank: Any
    first_child: Any
    next_sibling: Any


@device_routine
def chain_scores(s_log_probs: Any, staged: Any, depth: Any, s_chain: Any) -> None:
    """Write the scores of the top-1 path's beginnings; each warp does, rather than wait for one."""
    score = 0.0
    s_chain[0] = score
    values = cuda.local.array(CHAIN_BATCH, float32)
    last = uint32(depth - 1)
    for first in range(uint32(0), uint32(depth), uint32(CHAIN_BATCH)):
        for part in range(CHAIN_BATCH):
            values[part] = s_log_probs[uint32(min(uint32(first + uint32(part)), last) * uint32(staged))]
        for part in range(CHAIN_BATCH):
            score = score + float64(values[part])
            row = uint32(first + uint32(part))
            if row <= last:
                s_chain[uint32(row + uint32(1))] = score
    warp_sync()


@device_routine
def count_seeds(s_chain: Any, most: Any, least: Any) -> Any:
    """Count the nodes of the top-1 path, the first `most` of them, that are there."""
    seeds = uint32(0)
    while seeds < most and s_chain[uint32(seeds + uint32(1))] >= least:
        seeds = uint32(seeds + uint32(1))
    return seeds


_TREE = ", ".join(["int32[:, ::1]"] * 6 + ["uint32[:, :, ::1]"] + ["int32[::1]"] * 2)
SIGNATURES = tuple(
    f"void(float32[:, :, ::1], {ids}[:, :, ::1], {', '.join(['int32[::1]'] * 5)}, {least}[::1], "
    f"{cost}[::1], int32, float64, int32, float64, int32, int32, int32, {_TREE})"
    # Arrays that are not given are empty ones of int32.
    for ids, least, cost in (
        ("int32", "int32", "int32"),
        ("int64", "int32", "int32"),
        ("int64", "float64", "float64"),
        ("int32", "float32", "float64"),
    )
)


def kernel_of(threads: int, is_small: bool = False) -> Kernel:
    """Return the kernel for blocks of so many threads, by which its loops stride.

    One for small trees of few candidates has all log-probs in shared memory, in places known beforehand.
    """
    writers = threads // 2 if is_small and threads > LANES else threads

    def build_tree_kernel(  # type: ignore[no-untyped-def]
        log_probs,  # float32 [B, L, K]
        candidate_ids,  # int32 or int64 [B, L, K]
        budgets,  # int32 [B], or empty: the default for all, as for all arrays up to min_log_probs
        root_tokens,  # int32 [B]
        prefix_lengths,  # int32 [B]
        max_depths,  # int32 [B]
        max_candidates,  # int32 [B]
        min_log_probs,  # float32 or float64 [B]
        verify_cost,  # float64 [M], or empty: no cost
        default_budget,  # int32
        default_least,  # float64
        chain_seed,  # int32
        draft_cost,  # float64
        staged,  # int32: ranks of each row that fit shared memory; if all do, 2^INVERSE_SHIFT / K, rounded up
        capacity,  # int32: continuations that the search has room for
        search_words,  # int32: shared memory of the search
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
        request = uint32(cuda.blockIdx.x)
        thread = uint32(cuda.threadIdx.x)
        slots = uint32(parents.shape[1])
        stride = int32((slots + uint32(LANES - 1)) & uint32(~(LANES - 1) & 0xFFFFFFFF))
        inverse = staged
        room = uint32(capacity)
        if is_small:
            stride = int32(SMALL_STRIDE)
            capacity = int32(SMALL_CAPACITY)
            search_words = int32(SMALL_SEARCH_WORDS)
            staged = int32(log_probs.shape[2])
        s_words = cuda.shared.array(0, int32)
        s_unsigned = cuda.shared.array(0, uint32)
        s_halves = cuda.shared.array(0, uint16)
        s_keys = cuda.shared.array(0, int64)
        s_doubles = cuda.shared.array(0, float64)
        s_floats = cuda.shared.array(0, float32)
        tree = TreeTable(
            score=s_doubles,
            parent=shared_from(s_words, int32(2 * stride)),
            depth=shared_from(s_words, int32(3 * stride)),
            rank=shared_from(s_words, int32(4 * stride)),
            first_child=shared_from(s_words, int32(5 * stride)),
            next_sibling=shared_from(s_words, int32(6 * stride)),
        )
        flags_at = int32(SLOT_WORDS * stride)
        chain_at = int32(flags_at + int32(FLAG_WORDS))
        search_at = int32(chain_at + int32(CHAIN_WORDS))
        s_flags = shared_from(s_words, flags_at)
        s_chain = shared_from(s_doubles, int32(chain_at >> int32(1)))
        s_log_probs = shared_from(s_floats, int32(search_at + search_words))
        bins_at = int32(search_at + int32(PATH_WORDS_A_PLACE) * capacity)
        paths = Paths(
            score=shared_from(s_doubles, int32(search_at >> int32(1))),
            origin=shared_from(s_unsigned, int32(search_at + int32(2) * capacity)),
            bounds=shared_from(s_unsigned, int32(search_at + int32(3) * capacity)),
            bins=shared_from(s_words, bins_at),
            order=shared_from(s_halves, int32(int32(2) * (bins_at + int32(BIN_WORDS)))),
            counters=shared_from(s_words, int32(flags_at + int32(COUNTERS_AT))),
            chain=s_chain,
            room=room,
        )
        # Popping needs its table only after the search has given up, so that both share their memory.
        offers_at = int32(search_at + int32(2) * stride)
        offers = Offers(
            key=shared_from(s_keys, int32(search_at >> int32(1))),
            rank=shared_from(s_words, offers_at),
            last_child=shared_from(s_words, int32(offers_at + stride)),
            path_bits=shared_from(s_words, int32(offers_at + int32(2) * stride)),
            path=shared_from(s_unsigned, int32(offers_at + int32(3) * stride)),
            stride=uint32(stride),
        )

        if is_small:
            clear_few(tree, SMALL_STRIDE, paths, s_flags, COUNTERS_AT, threads)
        else:
            for slot in range(thread, uint32(stride), uint32(threads)):
                tree.first_child[slot] = -1
                tree.next_sibling[slot] = -1
            if thread < COUNTERS_AT:
                s_flags[thread] = 0
            clear_search(paths, threads)
        cuda.syncthreads()
        budget = budgets[request] if budgets.shape[0] > 0 else default_budget
        prefix = prefix_lengths[request] if prefix_lengths.shape[0] > 0 else int32(0)
        root = root_tokens[request] if root_tokens.shape[0] > 0 else int32(0)
        depth = max_depths[request] if max_depths.shape[0] > 0 else int32(log_probs.shape[1])
        width = max_candidates[request] if max_candidates.shape[0] > 0 else int32(log_probs.shape[2])
        least = float64(min_log_probs[request]) if min_log_probs.shape[0] > 0 else default_least
        if is_small:
            stage_whole_rows(log_probs, request, s_log_probs, inverse, s_flags, threads)
            clear_bits(ancestor_bits, request, threads)
        else:
            stage_log_probs(log_probs, request, s_log_probs, staged, s_flags, threads // LANES)
            clear_ancestor_bits(ancestor_bits, request, threads)
        is_in_range = (
            0 <= budget < int32(slots)
            and root >= 0
            and 0 <= prefix <= MAX_PREFIX
            and 1 <= depth <= int32(log_probs.shape[1])
            and 1 <= width <= int32(log_probs.shape[2])
            and least == least
        )
        if is_in_range and verify_cost.shape[0] > 0:
            for nodes in range(thread, uint32(budget + 1), uint32(threads)):
                if not 0.0 < round_cost(verify_cost, draft_cost, nodes) < np.inf:
                    s_flags[BAD_COST_FLAG] = 1
        cuda.syncthreads()

        code = int32(TreeStatus.OK)
        if not is_in_range or s_flags[BAD_COST_FLAG] != 0:
            code = int32(TreeStatus.INVALID)
        elif s_flags[NAN_FLAG] != 0:
            code = int32(TreeStatus.NAN)
        elif s_flags[INVALID_FLAG] != 0:
            code = int32(TreeStatus.INVALID)
        elif s_log_probs[0] == float32(-np.inf):
            code = int32(TreeStatus.NO_CANDIDATE)

        count = int32(1)
        has_tokens = False
        if thread == 0:
            tree.score[0] = 0.0
            tree.parent[0] = -1
            tree.depth[0] = 0
            tree.rank[0] = 0
        if code == int32(TreeStatus.OK) and budget > 0:
            lowest = max(least, LOWEST)
            rows = Rows(
                log_probs=log_probs,
                request=request,
                s_log_probs=s_log_probs,
                staged=uint32(staged),
                depth=uint32(depth),
                width=uint32(width),
                budget=uint32(budget),
                least=lowest,
                seeds=uint32(0),
            )
            stored = uint32(0)
            if is_small and s_flags[POSITIVE_FLAG] == 0 and chain_seed == 0 and depth <= LANES:
                count_few(rows, paths, shared_from(s_floats, chain_at), threads)
                cuda.syncthreads()
                stored = find_few_paths(rows, paths)
            if stored > 0:
                nodes = min(uint32(stored - uint32(1)), rows.budget)
                rank_few(paths, stored, threads)
                place_few_nodes(candidate_ids, request, paths, stored, nodes, tree, SMALL_STRIDE, threads)
                has_tokens = True
                count = int32(nodes + uint32(1))
            else:
                if is_small:
                    cuda.syncthreads()  # all have read the last counter
                    clear_search(paths, threads)
                    cuda.syncthreads()
                chain_scores(s_log_probs, staged, depth, s_chain)
                rows = Rows(
                    log_probs=log_probs,
                    request=request,
                    s_log_probs=s_log_probs,
                    staged=uint32(staged),
                    depth=uint32(depth),
                    width=uint32(width),
                    budget=uint32(budget),
                    least=lowest,
                    seeds=count_seeds(s_chain, uint32(min(depth, budget) if chain_seed != 0 else 0), lowest),
                )
                if s_flags[POSITIVE_FLAG] == 0:
                    stored = find_paths(rows, paths, threads)
                if stored > 0:
                    nodes = min(uint32(sort_paths(rows, paths, stored, threads)), rows.budget)
                    place_nodes(paths, stored, nodes, tree, threads)
                    count = int32(nodes + uint32(1))
                else:
                    for slot in range(thread, uint32(stride), uint32(threads)):
                        offers.key[slot] = NO_OFFER
                    cuda.syncthreads()
                    if thread < LANES:
                        s_flags[COUNT_WORD] = int32(pop_tree(rows, tree, offers))
                    cuda.syncthreads()
                    count = s_flags[COUNT_WORD]
            if count <= budget:
                code = int32(TreeStatus.EXHAUSTED)
            if verify_cost.shape[0] > 0:
                worth = keep_worth(
                    tree.score, count, verify_cost, draft_cost, shared_from(s_flags, COUNT_WORD), threads
                )
                if worth < count:
                    code = int32(TreeStatus.OK)
                    count = worth

        # The rank of a node gives way to its token, so that a bad one is known before anything is written.
        node = uint32(thread + uint32(1))
        while node < uint32(count):
            if has_tokens:
                if tree.rank[node] < 0:
                    s_flags[BAD_TOKEN_FLAG] = 1
            else:
                token = candidate_ids[request, uint32(tree.depth[node] - 1), uint32(tree.rank[node])]
                if token < 0 or token > MAX_TOKEN:
                    s_flags[BAD_TOKEN_FLAG] = 1
                tree.rank[node] = int32(token)
            node = uint32(node + uint32(threads))
        if thread == 0:
            tree.rank[0] = max(root, int32(0))
        cuda.syncthreads()
        if s_flags[BAD_TOKEN_FLAG] != 0:
            code = int32(TreeStatus.INVALID)
            count = int32(1)
        if thread == 0:
            num_nodes[request] = count
            status[request] = code
        base = max(prefix, int32(0))
        if is_small and writers < threads and thread >= uint32(writers):
            # The other half of the block meanwhile.
            first = uint32(thread - uint32(writers))
            write_bits_of_few(ancestor_bits, request, tree.parent, count, first, threads - writers)
            return
        slot = thread
        start = int64(int64(request) * int64(slots))
        while slot < slots:
            used = slot < uint32(count)
            place = int64(start + int64(slot))
            store_flat(token_ids, place, int32(tree.rank[slot] if used else 0))
            store_flat(parents, place, int32(tree.parent[slot] if used else -1))
            store_flat(depths, place, int32(tree.depth[slot] if used else 0))
            store_flat(positions, place, int32(base + (tree.depth[slot] if used else 0)))
            # Links may lead to nodes that were given up.
            child, sibling = tree.first_child[slot], tree.next_sibling[slot]
            store_flat(first_child, place, int32(child if used and child < count else -1))
            store_flat(next_sibling, place, int32(sibling if used and sibling < count else -1))
            slot = uint32(slot + uint32(writers))
        if writers == threads:
            write_ancestor_bits(ancestor_bits, request, tree.parent, count, threads)

    build_tree_kernel.__name__ = f"build_tree_kernel_{threads}"
    return Kernel(build_tree_kernel, SIGNATURES, threads)


BUILD_SMALL_TREE = kernel_of(FEW_THREADS, True)
BUILD_TREE = kernel_of(MANY_THREADS)


class Settings(NamedTuple):
    """What is the same for all requests of a call.

    Attributes
    ----------
    budget : int
        Where there is no array of budgets.
    least : float
        The least score, where there is no array of them.
    chain_seed : bool
    draft_cost : float
    max_budget : int
    """

    budget: int
    least: float
    chain_seed: bool
    draft_cost: float
    max_budget: int


def build_tree(
    draft_log_probs: Array,
    draft_token_ids: Array,
    budget: int | Array,
    *,
    root_tokens: Array | None = None,
    prefix_lengths: Array | None = None,
    max_budget: int | None = None,
    max_depths: Array | None = None,
    max_candidates: Array | None = None,
    min_log_prob: float | Array = -np.inf,
    chain_seed: bool = False,
    verify_cost: Array | None = None,
    draft_cost: float = 0.0,
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

    All options combine: `max_depths`, `max_candidates` and `min_log_prob` decide which continuations
    there are, `chain_seed` which come first, `budget` how many are taken at most, and `verify_cost`
    then cuts what was taken, in the order of the nodes, those of the seed like all others.

    Log-probs need not be normalised. Above 0 they make a child better than its parent; nodes are then
    numbered in the order in which the heap takes them, more slowly than the rest.

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
    max_depths : int32 [B], optional
        The largest depth of a node, 1 to L; L by default.
    max_candidates : int32 [B], optional
        How many of a position's candidates are used, 1 to K; K by default.
    min_log_prob : float, or float32 or float64 [B]
        A node whose score is below it is not taken, nor are its descendants. Not NaN.
    chain_seed : bool
        Put the top-1 path in first, in order of depth and as far as the budget reaches; then the best
        of all others. A tree with the chain in it accepts at least what the chain would.
    verify_cost : float64 [M], optional
        Cost of verifying a tree of 0, 1, 2, ... nodes beside the root, in any unit; M > max_budget.
        The tree ends before the first node that does not raise ``(1 + sum of exp(score)) /
        (draft_cost + verify_cost[nodes])``, the expected tokens of a round over its cost, summed in
        order of the nodes: CaDDTree (arXiv 2606.01813).
    draft_cost : float
        The rest of a round's cost, in the same unit; only with `verify_cost`. Every sum of both is
        above 0 and finite.
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
        no synchronisation. `status` says what became of each request: ``OK`` for as many nodes as the
        budget asks for or the cost is worth, ``EXHAUSTED`` where the limits leave fewer. One whose
        values are bad is its root alone and leaves the others untouched.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; for host arrays, and with `validate`,
        also NaN, unsorted rows, a first row without candidates, a negative token id or prefix
        length, a budget, limit or cost out of range.
    BackendError
        No device for the CUDA backend.
    """
    is_least_scalar = isinstance(min_log_prob, int | float | np.integer | np.floating)
    placement, views = gather(
        draft_log_probs=draft_log_probs,
        draft_token_ids=draft_token_ids,
        budget=None if isinstance(budget, int | np.integer) else budget,
        root_tokens=root_tokens,
        prefix_lengths=prefix_lengths,
        max_depths=max_depths,
        max_candidates=max_candidates,
        min_log_prob=None if is_least_scalar else min_log_prob,
        verify_cost=verify_cost,
    )
    max_budget = _checked_max_budget(budget, views["budget"], max_budget)
    views = _checked(views, max_budget)
    settings = Settings(
        budget=0 if views["budget"] is not None else int(budget),
        least=_checked_least(min_log_prob) if is_least_scalar else -np.inf,
        chain_seed=_checked_flag("chain_seed", chain_seed),
        draft_cost=_checked_draft_cost(draft_cost, verify_cost),
        max_budget=max_budget,
    )
    runs_reference = use_reference(backend, placement)
    if out is not None:
        arrays_of("out", out, DraftTree)
        depth = views["draft_log_probs"].shape[1]
        if out.max_depth != depth:
            raise ArgumentError("out.max_depth", out.max_depth, f"{depth}, as L is")
    if placement.on_host or validate:
        host = _host_inputs(views, settings)
        _check_values(host, settings.draft_cost, max_budget)
        if runs_reference:
            tree = _reference_tree(host, settings)
            return tree if out is None else tree.copy_to(out)
    return _launch(placement, views, settings, out, stream)


def _checked(views: dict[str, Any], max_budget: int) -> dict[str, Any]:
    """Check every view's shape and dtype."""
    log_probs = views["draft_log_probs"]
    check_array("draft_log_probs", log_probs, (np.float32,), B=None, L=None, K=None)
    batch, depth, width = log_probs.shape
    if depth > MAX_DEPTH:
        raise ArgumentError("draft_log_probs", f"L = {depth}", f"a draft depth of at most {MAX_DEPTH}")
    check_array("draft_token_ids", views["draft_token_ids"], TOKEN_DTYPES, B=batch, L=depth, K=width)
    if views["min_log_prob"] is not None:
        check_array("min_log_prob", views["min_log_prob"], (np.float32, np.float64), B=batch)
    cost = views["verify_cost"]
    if cost is not None:
        check_array("verify_cost", cost, (np.float64,), M=None)
        if cost.shape[0] <= max_budget:
            expected = f"the costs of 0 to {max_budget} nodes, {max_budget + 1} numbers or more"
            raise ArgumentError("verify_cost", f"shape ({cost.shape[0]},)", expected)
    names = ("budget", "root_tokens", "prefix_lengths", "max_depths", "max_candidates")
    indices = {name: views[name] for name in names if views[name] is not None}
    return views | {name: check_indices(name, view, B=batch) for name, view in indices.items()}


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
    budgets = check_indices("budget", budgets, B=None)
    return min(max(int(budgets.max(initial=0)), 0), MAX_BUDGET)


def _checked_least(value: Any) -> float:
    if isinstance(value, bool | np.bool_) or np.isnan(value):
        raise ArgumentError("min_log_prob", value, "a number, not NaN, or an array")
    return float(value)


def _checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(name, repr(value), "True or False")
    return bool(value)


def _checked_draft_cost(draft_cost: float, verify_cost: Any) -> float:
    cost = check_scalar("draft_cost", draft_cost)
    if verify_cost is None and cost != 0:
        raise ArgumentError("draft_cost", cost, "0, since there is no verify_cost")
    return cost


def _host_inputs(views: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return host copies of the views, with defaults filled in; `verify_cost` may be None."""
    batch, depth, width = views["draft_log_probs"].shape
    defaults = {
        "budget": np.int32(settings.budget),
        "root_tokens": np.int32(0),
        "prefix_lengths": np.int32(0),
        "max_depths": np.int32(depth),
        "max_candidates": np.int32(width),
        "min_log_prob": np.float64(settings.least),
    }
    host: dict[str, Any] = {name: np.full(batch, value) for name, value in defaults.items()}
    return (
        {"verify_cost": None}
        | host
        | {name: to_host(name, view) for name, view in views.items() if view is not None}
    )


def _reference_tree(host: dict[str, Any], settings: Settings) -> DraftTree:
    arrays = reference.build_tree(
        host["draft_log_probs"],
        host["draft_token_ids"],
        host["budget"],
        host["root_tokens"],
        host["prefix_lengths"],
        settings.max_budget,
        max_depths=host["max_depths"],
        max_candidates=host["max_candidates"],
        min_log_probs=host["min_log_prob"],
        chain_seed=settings.chain_seed,
        verify_cost=host["verify_cost"],
        draft_cost=settings.draft_cost,
    )
    return DraftTree(**arrays._asdict(), max_depth=host["draft_log_probs"].shape[1])


def _check_values(host: dict[str, Any], draft_cost: float, max_budget: int) -> None:
    """Raise for the first value that would end in a bad status."""
    log_probs, tokens = host["draft_log_probs"], host["draft_token_ids"]
    _, depth, width = log_probs.shape
    rules = (
        ("draft_log_probs", np.isnan(log_probs), "a number, not NaN"),
        ("draft_log_probs", log_probs == np.inf, "a log-probability, not infinity"),
        ("draft_log_probs", _rises(log_probs), "at most the value before it: best first"),
        ("draft_log_probs", _is_first_empty(log_probs), "a candidate of probability above 0"),
        ("draft_token_ids", (tokens < 0) | (tokens > MAX_TOKEN), f"a token id from 0 to {MAX_TOKEN}"),
        ("budget", _is_outside(host["budget"], 0, max_budget), f"a number from 0 to {max_budget}"),
        ("root_tokens", host["root_tokens"] < 0, "a token id, not negative"),
        ("prefix_lengths", host["prefix_lengths"] < 0, "a length, not negative"),
        ("prefix_lengths", host["prefix_lengths"] > MAX_PREFIX, f"a length of at most {MAX_PREFIX}"),
        ("max_depths", _is_outside(host["max_depths"], 1, depth), f"a depth from 1 to L = {depth}"),
        ("max_candidates", _is_outside(host["max_candidates"], 1, width), f"a number from 1 to K = {width}"),
        ("min_log_prob", np.isnan(host["min_log_prob"]), "a number, not NaN"),
    )
    for name, is_bad, expected in rules:
        for index in first_where(is_bad):
            raise ArgumentError(at(name, index), host[name][index], expected)
    if host["verify_cost"] is not None:
        costs = draft_cost + host["verify_cost"][: max_budget + 1]
        for index in first_where(~((costs > 0) & (costs < np.inf))):
            expected = f"a cost that is above 0 and finite with draft_cost = {draft_cost}"
            raise ArgumentError(at("verify_cost", index), host["verify_cost"][index], expected)


def _is_outside(array: NDArray[np.int32], low: int, high: int) -> NDArray[np.bool_]:
    return (array < low) | (array > high)


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
    settings: Settings,
    out: DraftTree | None,
    stream: StreamLike,
) -> DraftTree:
    batch, depth, width = views["draft_log_probs"].shape
    slots = settings.max_budget + 1
    stride = -(-slots // LANES) * LANES
    capacity = capacity_for(settings.max_budget)
    search_words = max(
        OFFER_WORDS * stride,
        PATH_WORDS_A_PLACE * capacity + BIN_WORDS + order_size(settings.max_budget) // 2,
    )
    table_words = SLOT_WORDS * stride + FLAG_WORDS + CHAIN_WORDS + search_words
    staged = min(width, max(settings.max_budget, 1), (SHARED_WORDS - table_words) // depth)
    is_small = settings.max_budget <= SMALL_BUDGET and width <= SMALL_WIDTH
    if is_small:
        table_words = SLOT_WORDS * SMALL_STRIDE + FLAG_WORDS + CHAIN_WORDS + SMALL_SEARCH_WORDS
        staged = width
    with Transfer(placement, stream) as transfer:
        outputs = transfer.outputs(tree_shapes(batch, slots), TREE_DTYPES, out)
        transfer.launch(
            BUILD_SMALL_TREE if is_small else BUILD_TREE,
            batch,
            *(transfer.input(view) for view in views.values()),
            np.int32(settings.budget),
            np.float64(settings.least),
            np.int32(settings.chain_seed),
            np.float64(settings.draft_cost),
            np.int32(-(-(1 << INVERSE_SHIFT) // width) if is_small else staged),
            np.int32(capacity),
            np.int32(search_words),
            *outputs,
            shared_bytes=4 * (table_words + depth * staged),
        )
        return DraftTree(**transfer.results(), max_depth=depth)
