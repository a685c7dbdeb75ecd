"""What `device.tree_sums` does, for small budgets: fewer steps one after the other, and less code.

A block's time is that of its longest chain of instructions, and each takes longest the first time. So the cut
is found once, of spurs and what continues them by ranks of 0, counted in float32 in bins whose neighbours are
in other banks; all levels are made under it by the first warp, which needs neither barriers nor atomics for
that; and continuations are ranked by comparing all with all. Where there is no room for what one cut leaves,
where a chain is seeded, or a draft has more rows than a warp has lanes, `device.tree_sums` takes over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int32, int64, uint32
from numba_ddtree.device.draft_rows import INVALID_FLAG, NAN_FLAG, POSITIVE_FLAG
from numba_ddtree.device.floats import float_bits, float_of_bits
from numba_ddtree.device.memory import load_flat, store_flat
from numba_ddtree.device.tree_sums import (
    BIN_WORDS,
    FOUND_COUNTERS,
    bounds_word,
    depth_of,
    origin_word,
    parent_of,
    path_precedes,
    rank_of,
)
from numba_ddtree.device.warp import (
    LANES,
    warp_ballot,
    warp_max,
    warp_pair_sum,
    warp_running_cost,
    warp_running_sum,
    warp_sync,
)
from numba_ddtree.refs.tree_build import MAX_TOKEN

# A bin is a 32nd of an octave of -score; the first takes all below 2^-3, the last all from 2^5.
FEW_BINS = 256
_BIN_SHIFT = 23 - 5
_FIRST_BIN = (127 - 3) << 5
_BINS_A_LANE = FEW_BINS // LANES
# Costs that are counted are float32 sums of at most LANES + 2 numbers of one sign; exact ones are no larger
# than so many times what they seem.
_COST_SLACK = 1 + 2.0**-17
_LEAST_COUNTED = np.float32(-(2.0**100))  # what is below is beyond the last bin as well, and never overflows
COUNTED_RANKS = 16  # of a row, by as many neighbouring threads
TEAM = 4  # lanes that look at a parent's children
TEAM_SHIFT = 2
LAST_OF_TEAMS = 0x88888888
PARENTS = LANES >> TEAM_SHIFT  # at once
# A continuation's bounds: the product of its path's rank + 1, the sum over its beginnings of theirs, and the
# place of its earlier sibling. For budgets below 2^8.
_BOUND_BITS = 8
COMPARED = 4  # scores that are compared at a time
BEYOND = 4 * COMPARED  # places past the last continuation that comparing may look at
LOADS = 4  # that a thread has under way at once
INVERSE_SHIFT = 24  # of a width's inverse, which divides what is below 2^14 by one that is at most 2^8


@device_routine
def stage_whole_rows(
    log_probs: Any, request: Any, s_log_probs: Any, inverse: Any, s_flags: Any, threads: Any
) -> None:
    """Check a request's log-probs and copy all of them to shared memory; the whole block takes part.

    `inverse` is 2^INVERSE_SHIFT over the width, rounded up.
    """
    width = uint32(log_probs.shape[2])
    size = uint32(uint32(log_probs.shape[1]) * width)
    first = uint32(cuda.threadIdx.x)
    start = int64(int64(request) * int64(size) + int64(first))
    value = cuda.local.array(LOADS, float32)
    before = cuda.local.array(LOADS, float32)
    while first < size:
        for part in range(LOADS):
            place = uint32(first + uint32(part * threads))
            value[part] = float32(0)
            if place < size:
                value[part] = load_flat(log_probs, start + int64(part * threads))
            before[part] = float32(np.inf)  # not the value, which would be waited for
            row = uint32((int64(place) * int64(inverse)) >> int64(INVERSE_SHIFT))
            if place < size and place != uint32(row * width):
                before[part] = load_flat(log_probs, start + int64(part * threads - 1))
        for part in range(LOADS):
            place = uint32(first + uint32(part * threads))
            number = value[part]
            if place < size:
                s_log_probs[place] = number
            # All but what is NaN, above 0 or above the one before.
            if not (number <= before[part] and number <= float32(0)):
                if number != number:
                    s_flags[NAN_FLAG] = 1
                if number > before[part] or number == float32(np.inf):
                    s_flags[INVALID_FLAG] = 1
                if number > float32(0):
                    s_flags[POSITIVE_FLAG] = 1
        first = uint32(first + uint32(LOADS * threads))
        start = int64(start + int64(LOADS * threads))


@device_routine
def clear_links(tree: Any, slots: int, threads: Any) -> None:
    """Make links of so many slots -1; both are constants, so that the loop is none. The block takes part."""
    thread = uint32(cuda.threadIdx.x)
    for part in range(-(-slots // threads)):
        slot = uint32(thread + uint32(part * threads))
        if slot < uint32(slots):
            tree.first_child[slot] = -1
            tree.next_sibling[slot] = -1


@device_routine
def clear_few(tree: Any, slots: int, paths: Any, s_flags: Any, flags: int, threads: Any) -> None:
    """Make links of so many slots -1, and flags, bins and counters 0, as `clear_search` does.

    All sizes are constants, so that the loops are none. The block takes part.
    """
    thread = uint32(cuda.threadIdx.x)
    clear_links(tree, slots, threads)
    for part in range(-(-BIN_WORDS // threads)):
        place = uint32(thread + uint32(part * threads))
        if place < uint32(BIN_WORDS):
            paths.bins[place] = 0
    if thread < uint32(flags):
        s_flags[thread] = 0
    if thread < uint32(FOUND_COUNTERS):
        paths.counters[thread] = 0
    if thread == uint32(0):
        paths.score[0] = 0.0
        paths.origin[0] = uint32(0)
        paths.bounds[0] = bounds_word(uint32(1), uint32(0), uint32(0))


@device_routine
def clear_bits(ancestor_bits: Any, request: Any, threads: Any) -> None:
    """Do what `clear_ancestor_bits` does."""
    size = uint32(ancestor_bits.shape[1]) * uint32(ancestor_bits.shape[2])
    place = uint32(cuda.threadIdx.x)
    start = int64(request) * int64(size)
    while place < size:
        store_flat(ancestor_bits, int64(start + int64(place)), uint32(0))
        place = uint32(place + uint32(threads))


@device_routine
def whole_log_prob(rows: Any, row: Any, rank: Any) -> Any:
    """Log-prob of a candidate, all of which are staged; of a rank past the row, the last one's."""
    return float64(rows.s_log_probs[uint32(row * rows.staged + min(rank, uint32(rows.staged - uint32(1))))])


@device_routine
def counted_log_prob(rows: Any, place: Any) -> Any:
    """Log-prob at a place of the staged ones, as it is counted."""
    return max(rows.s_log_probs[place], _LEAST_COUNTED)


@device_routine
def count_few(rows: Any, paths: Any, s_costs: Any, threads: Any) -> None:
    """Count the top-1 path, what leaves it in its last place, and what continues that by ranks of 0.

    The whole block takes part, a barrier is to follow. `s_costs` is float32 [LANES + 1], for the costs of the
    top-1 path. What a path costs that leaves it once is what the top-1 path does, and what the leaving adds.
    """
    thread = uint32(cuda.threadIdx.x)
    lane = uint32(thread % uint32(LANES))
    row = min(lane, uint32(rows.depth - uint32(1)))
    # Each warp writes the same numbers, rather than wait for one.
    s_costs[lane] = warp_running_cost(-counted_log_prob(rows, uint32(row * rows.staged)))
    warp_sync()
    width = min(rows.width, rows.budget)
    row = uint32(thread // uint32(COUNTED_RANKS))
    rank = uint32(thread % uint32(COUNTED_RANKS))
    while True:
        while row >= rows.depth:
            row = uint32(row - rows.depth)
            rank = uint32(rank + uint32(COUNTED_RANKS))
        if rank >= width:
            break
        first = uint32(row * rows.staged)
        added = float32(counted_log_prob(rows, first) - counted_log_prob(rows, uint32(first + rank)))
        cost = s_costs[row]
        # Continuations that precede it, itself included. What continues the chain by rank 0 is a spur itself.
        total = uint32(row + rank + uint32(1))
        end = row
        last = rows.depth if rank > uint32(0) else uint32(row + uint32(1))
        while total <= rows.budget and end < last:
            end = uint32(end + uint32(1))
            next_cost = s_costs[end]  # loaded before it is needed; the last one is not
            # Without a sign, which a 0 may have.
            word = uint32(float_bits(float32(cost + added)) & uint32(0x7FFFFFFF))
            index = int32(int32(word >> uint32(_BIN_SHIFT)) - int32(_FIRST_BIN))
            cuda.atomic.add(paths.bins, uint32(min(max(index, int32(0)), int32(FEW_BINS - 1))), int32(1))
            cost = next_cost
            total = uint32(total + rank + uint32(1))
        row = uint32(row + uint32(threads // COUNTED_RANKS))


@device_routine
def find_few_bound(rows: Any, paths: Any) -> Any:
    """Least score of what may be a node, by what was counted; the first warp takes part."""
    lane = uint32(cuda.threadIdx.x)
    first = uint32(lane * uint32(_BINS_A_LANE))
    counts = cuda.local.array(_BINS_A_LANE, int32)
    own = int32(0)
    for part in range(_BINS_A_LANE):
        counts[part] = paths.bins[uint32(first + uint32(part))]
        own = int32(own + counts[part])
    reached = int32(warp_running_sum(own) - own)
    cut = uint32(0)  # the bin after the last one up to which too few are counted
    for part in range(_BINS_A_LANE):
        reached = int32(reached + counts[part])
        if uint32(reached) < rows.budget:
            cut = uint32(first + uint32(part + 1))
    cut = uint32(warp_max(cut))
    if cut >= uint32(FEW_BINS - 1):
        return rows.least
    beyond = float_of_bits(uint32((cut + uint32(_FIRST_BIN + 1)) << uint32(_BIN_SHIFT)))
    return max(rows.least, -(float64(beyond) * _COST_SLACK))


@device_routine
def few_bounds_word(product: Any, total: Any, before: Any) -> Any:
    """Pack a continuation's bounds."""
    return uint32(product | (total << uint32(_BOUND_BITS)) | (before << uint32(2 * _BOUND_BITS)))


@device_routine
def make_levels(rows: Any, paths: Any, bound: Any) -> Any:
    """Store every continuation of scores not below the bound; return how many, with the root.

    0 where there is no room. The first warp takes part: a team of lanes looks at a parent's children.
    """
    lane = uint32(cuda.threadIdx.x)
    member = uint32(lane % uint32(TEAM))
    last_member = uint32(lane | uint32(TEAM - 1))
    below = uint32(uint32(uint32(1) << lane) - uint32(1))
    room = uint32(max(paths.room, uint32(BEYOND)) - uint32(BEYOND))
    start = uint32(0)
    end = uint32(1)
    row = uint32(0)
    while row < rows.depth and start < end and end <= room:
        level_end = end
        first_value = whole_log_prob(rows, row, member)
        first = start
        while first < level_end:
            parent = uint32(first + (lane >> uint32(TEAM_SHIFT)))
            goes_on = parent < level_end
            parent = min(parent, uint32(level_end - uint32(1)))
            bounds = paths.bounds[parent]
            score = paths.score[parent]
            product = uint32(bounds & uint32((1 << _BOUND_BITS) - 1))
            total = uint32((bounds >> uint32(_BOUND_BITS)) & uint32((1 << _BOUND_BITS) - 1))
            rank = member
            child_score = score + first_value
            before = uint32(0)
            while True:
                own_product = uint32(product * (rank + uint32(1)))
                own_total = uint32(total + own_product)
                kept = goes_on & (rank < rows.width) & (own_total <= rows.budget) & (child_score >= bound)
                lanes = uint32(warp_ballot(kept))
                place = uint32(end + uint32(cuda.popc(uint32(lanes & below))))
                if kept and place < room:
                    if member > uint32(0):
                        before = uint32(place - uint32(1))
                    paths.score[place] = child_score
                    paths.origin[place] = origin_word(parent, rank, uint32(row + uint32(1)))
                    paths.bounds[place] = few_bounds_word(own_product, own_total, before)
                end = uint32(end + uint32(cuda.popc(lanes)))
                full = uint32(lanes & uint32(LAST_OF_TEAMS))
                if full == uint32(0):
                    break
                # Of teams all of whose children were kept, the next ones.
                goes_on = uint32((full >> last_member) & uint32(1)) != uint32(0)
                before = uint32(place + uint32(last_member - lane))
                rank = uint32(rank + uint32(TEAM))
                child_score = score + whole_log_prob(rows, row, rank)
            first = uint32(first + uint32(PARENTS))
        start = level_end
        row = uint32(row + uint32(1))
        warp_sync()
    return end if end <= room else uint32(0)


@device_routine
def find_few_paths(rows: Any, paths: Any) -> Any:
    """Store every continuation that may be a node, and some more; return how many, with the root.

    The whole block takes part, after `count_few` and a barrier. 0 where there is no room.
    """
    if cuda.threadIdx.x < LANES:
        stored = uint32(make_levels(rows, paths, find_few_bound(rows, paths)))
        if stored > uint32(0) and cuda.threadIdx.x < BEYOND:
            # Below all others, so that they need no test.
            paths.score[uint32(stored + uint32(cuda.threadIdx.x))] = -np.inf
        if cuda.threadIdx.x == 0:
            paths.counters[0] = int32(stored)
    cuda.syncthreads()
    return uint32(paths.counters[0])


@device_routine
def rank_few(paths: Any, stored: Any, threads: Any) -> None:
    """Make the bin of each continuation's place the number of those that score as high, itself included.

    Where none tie, that is its place in the tree. Two lanes have a continuation each, and compare it with
    half of all. The whole block takes part.
    """
    lane = uint32(uint32(cuda.threadIdx.x) % uint32(LANES))
    half = uint32(lane & uint32(1))
    last = uint32(stored - uint32(1))
    first = uint32(uint32((uint32(cuda.threadIdx.x) - lane) >> uint32(1)) + uint32(1))
    while first < stored:
        place = uint32(first + (lane >> uint32(1)))
        own = paths.score[min(place, last)]
        node = int32(0)
        other = uint32(uint32(1) + uint32(COMPARED) * half)
        a = paths.score[other]
        b = paths.score[uint32(other + uint32(1))]
        c = paths.score[uint32(other + uint32(2))]
        d = paths.score[uint32(other + uint32(3))]
        # An end that is loaded keeps the compiler from unrolling: code that is run the first time is slow.
        while a > -np.inf:
            other = uint32(other + uint32(2 * COMPARED))
            next_a = paths.score[other]
            next_b = paths.score[uint32(other + uint32(1))]
            next_c = paths.score[uint32(other + uint32(2))]
            next_d = paths.score[uint32(other + uint32(3))]
            node = int32(node + (int32(1) if a >= own else int32(0)) + (int32(1) if b >= own else int32(0)))
            node = int32(node + (int32(1) if c >= own else int32(0)) + (int32(1) if d >= own else int32(0)))
            a, b, c, d = next_a, next_b, next_c, next_d
        node = warp_pair_sum(node)
        if half == uint32(0) and place < stored:
            paths.bins[place] = node
            paths.order[uint32(node)] = place
        first = uint32(first + uint32(threads // 2))
    cuda.syncthreads()


@device_routine
def rank_ties(paths: Any, stored: Any, threads: Any) -> None:
    """Make the bin of each continuation's place its place in the tree, whatever ties.

    The whole block takes part, before and after which a barrier is to be.
    """
    place = uint32(uint32(cuda.threadIdx.x) + uint32(1))
    while place < stored:
        own = paths.score[place]
        node = int32(1)
        other = uint32(1)
        while other < stored:
            score = paths.score[other]
            if score > own or (score == own and other != place and path_precedes(paths, other, place)):
                node = int32(node + int32(1))
            other = uint32(other + uint32(1))
        paths.bins[place] = node
        paths.order[uint32(node)] = place
        place = uint32(place + uint32(threads))


@device_routine
def write_few_nodes(
    candidate_ids: Any, request: Any, paths: Any, stored: Any, count: Any, tree: Any, threads: Any
) -> Any:
    """Write the continuations whose bins are at most `count` as nodes, with tokens in place of ranks.

    A token out of range becomes -1. The whole block takes part. Returns whether no two tie; else the nodes
    are not right.
    """
    width = uint32(candidate_ids.shape[2])
    start = int64(request) * int64(uint32(candidate_ids.shape[1]) * width)
    place = uint32(uint32(cuda.threadIdx.x) + uint32(1))
    is_tied = int32(0)
    while place < stored:
        node = uint32(paths.bins[place])
        if uint32(paths.order[node]) != place:
            is_tied = int32(1)
        if node <= count:
            origin = paths.origin[place]
            depth = depth_of(origin)
            rank = rank_of(origin)
            token = load_flat(candidate_ids, start + int64(uint32((depth - uint32(1)) * width + rank)))
            # The root's bin is no place.
            parent = uint32(parent_of(origin))
            parent_node = int32(paths.bins[parent]) if parent > uint32(0) else int32(0)
            tree.score[node] = paths.score[place]
            tree.parent[node] = parent_node
            tree.depth[node] = int32(depth)
            # Of nodes all earlier siblings are nodes.
            if rank == uint32(0):
                tree.first_child[uint32(parent_node)] = int32(node)
            else:
                before = uint32(paths.bounds[place] >> uint32(2 * _BOUND_BITS))
                tree.next_sibling[uint32(paths.bins[before])] = int32(node)
            is_token = token >= 0 and token <= MAX_TOKEN
            tree.rank[node] = int32(token) if is_token else int32(-1)
        place = uint32(place + uint32(threads))
    return cuda.syncthreads_or(is_tied) == 0


@device_routine
def place_few_nodes(
    candidate_ids: Any, request: Any, paths: Any, stored: Any, count: Any, tree: Any, slots: int, threads: Any
) -> None:
    """Write the best `count` continuations as a tree's nodes, with tokens in place of ranks.

    A token out of range becomes -1. The whole block takes part, after `rank_few`.
    """
    while not write_few_nodes(candidate_ids, request, paths, stored, count, tree, threads):
        rank_ties(paths, stored, threads)
        clear_links(tree, slots, threads)
        cuda.syncthreads()


@device_routine
def write_bits_of_few(
    ancestor_bits: Any, request: Any, s_parents: Any, count: Any, first: Any, step: Any
) -> None:
    """Do what `write_ancestor_bits` does, for every `step`-th node from the first on."""
    node = uint32(first)
    words = uint32(ancestor_bits.shape[2])
    start = int64(request) * int64(uint32(ancestor_bits.shape[1]) * words)
    while node < uint32(count):
        # Indices fall on the way to the root, so that each word is complete when the walk leaves it.
        word = uint32(node >> uint32(5))
        bits = uint32(uint32(1) << uint32(node & uint32(31)))
        ancestor = int32(s_parents[node])
        while ancestor >= 0:
            before = int32(s_parents[uint32(ancestor)])
            ancestor_word = uint32(uint32(ancestor) >> uint32(5))
            if ancestor_word != word:
                store_flat(ancestor_bits, start + int64(uint32(node * words + word)), bits)
                word = ancestor_word
                bits = uint32(0)
            bits = uint32(bits | (uint32(1) << uint32(uint32(ancestor) & uint32(31))))
            ancestor = before
        store_flat(ancestor_bits, start + int64(uint32(node * words + word)), bits)
        node = uint32(node + uint32(step))
