"""The kernel of `build_tree`: what lies where in a block's shared memory, and which way leads to its tree.

First `device.tree_few` or `device.tree_sums` tries, then `device.tree_pops`: see `numba_ddtree.tree_build`.
Then come the cut where more nodes are not worth their cost, tokens, and the status.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
from numba_ddtree.refs.tree_build import MAX_DEPTH, MAX_PREFIX, MAX_TOKEN
from numba_ddtree.status import TreeStatus

LOWEST = float(np.finfo(np.float64).min)

SLOT_WORDS = 7  # of a `TreeTable`
SMALL_BUDGET = 128  # up to which places in shared memory are known beforehand
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


def make_build_tree_kernel(threads: int, is_small: bool) -> Any:
    """Make the kernel for blocks of so many threads, by which its loops stride.

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
    return build_tree_kernel
