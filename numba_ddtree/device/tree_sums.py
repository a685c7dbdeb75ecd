"""Best-first trees all at once: the largest sums of log-probs, sorted. For log-probs of at most 0.

Why that is the heap's tree, in the heap's order. Adding a log-prob x <= 0 and rounding never raises a
score, nor does a step to the next rank of a sorted row, for rounding is monotone. So no node scores
more than its parent or its earlier sibling; where it scores the same, its tuple of ranks is the larger
one, for the parent's is its beginning and the sibling's differs in the last place. Sorting all
continuations by score, then by tuple, thus puts each after those that offer it: whenever the heap pops,
the first continuation not yet popped is on offer, and it is the best offer.

How the largest are found without making them all:

* A continuation is preceded by each that is nowhere larger in rank and no longer, which are
  ``sum_k prod_(j <= k) (r_j + 1)``, itself included. Where that exceeds the budget, it is no node.
* A histogram counts some continuations by score. All those of the best bins that hold as many as the
  budget, and none of the rest, can be nodes. It starts with the spurs, the continuations that leave the
  top-1 path once, and grows with the levels: each finds the children of the level before it that are
  still within the cut. The more is counted, the tighter the cut.
* Should a level not fit, all of it is counted nevertheless, and the levels are made anew under the
  tighter cut. Should that not help, massive ties, `numba_ddtree.device.tree_pops` takes over.

The order in which continuations are stored is not deterministic, what is made of them is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float64, int32, uint32
from numba_ddtree.device.bits import bits_of
from numba_ddtree.device.draft_rows import log_prob
from numba_ddtree.device.warp import (
    LANES,
    warp_ballot,
    warp_broadcast,
    warp_running_sum,
    warp_sync,
)

BINS = 512
# A bin is a 32nd of an octave of |score|; the first takes all below 2^-4, the last all from 2^12.
_BIN_SHIFT = 52 - 5
_FIRST_BIN = (1023 - 4) << 5
_BINS_A_LANE = BINS // LANES

# Counters: three that take turns to count a level, then these.
FOUND_COUNTERS = 3
CUT, KEPT = 3, 4
COUNTERS = 5
WIDE_BUDGET = 128
MAX_CAPACITY = 3072
PATH_WORDS_A_PLACE = 4  # of shared memory, beside the order

# A continuation's origin in one word: the parent's place, its rank, its depth.
_PLACE_BITS, _RANK_BITS = 12, 10
# And its bounds: the product of its path's rank + 1, the sum over its beginnings of theirs, and how
# often it leaves the top-1 path, 2 for more than once.
_PRODUCT_BITS, _SUM_BITS = 11, 11


def capacity_for(budget: int) -> int:
    """Return how many continuations there is room for: what realistic drafts need, and half again."""
    return min(3 * budget + 128, MAX_CAPACITY)


def order_size(budget: int) -> int:
    """Return the places that sorting takes, a power of two."""
    return 1 << (capacity_for(budget) - 1).bit_length()


class Paths(NamedTuple):
    """Continuations found so far, root first, all in shared memory.

    Attributes
    ----------
    score : float64 [capacity]
        For a seed a number above 0, which falls with the depth: seeds come first.
    origin : uint32 [capacity]
        Parent's place, rank, depth.
    bounds : uint32 [capacity]
        Product, sum and deviations; later the place in the tree.
    order : uint16 [order_size]
        Places of those that may be nodes, in order of the tree in the end.
    bins : int32 [BINS]
        Histogram of scores, see `bin_place`.
    counters : int32 [COUNTERS]
        How many a level has, in turns; the last bin that may hold nodes; how many are within it.
    chain : float64 [L + 1]
        Score of the first d places of the top-1 path.
    room : uint32
        The capacity.
    """

    score: Any
    origin: Any
    bounds: Any
    order: Any
    bins: Any
    counters: Any
    chain: Any
    room: Any


@device_routine
def origin_word(parent: Any, rank: Any, depth: Any) -> Any:
    """Pack a continuation's origin."""
    return uint32(parent | (rank << uint32(_PLACE_BITS)) | (depth << uint32(_PLACE_BITS + _RANK_BITS)))


@device_routine
def parent_of(origin: Any) -> Any:
    """Place of the parent."""
    return uint32(origin & uint32((1 << _PLACE_BITS) - 1))


@device_routine
def rank_of(origin: Any) -> Any:
    """Rank among its siblings."""
    return uint32((origin >> uint32(_PLACE_BITS)) & uint32((1 << _RANK_BITS) - 1))


@device_routine
def depth_of(origin: Any) -> Any:
    """Depth, 0 for the root."""
    return uint32(origin >> uint32(_PLACE_BITS + _RANK_BITS))


@device_routine
def bounds_word(product: Any, total: Any, deviations: Any) -> Any:
    """Pack a continuation's bounds."""
    return uint32(
        product | (total << uint32(_PRODUCT_BITS)) | (deviations << uint32(_PRODUCT_BITS + _SUM_BITS))
    )


@device_routine
def product_of(bounds: Any) -> Any:
    """Product over the path of rank + 1: 1 on the top-1 path alone."""
    return uint32(bounds & uint32((1 << _PRODUCT_BITS) - 1))


@device_routine
def sum_of(bounds: Any) -> Any:
    """Sum of the products of the path and of its beginnings."""
    return uint32((bounds >> uint32(_PRODUCT_BITS)) & uint32((1 << _SUM_BITS) - 1))


@device_routine
def deviations_of(bounds: Any) -> Any:
    """Ranks above 0 along the path, 2 for more."""
    return uint32(bounds >> uint32(_PRODUCT_BITS + _SUM_BITS))


@device_routine
def score_bin(score: Any, least: Any) -> Any:
    """Bin of a score, 0 for the best; ``BINS`` where it is below the least."""
    if not score >= least:
        return int32(BINS)
    if score > 0.0:  # a seed
        return int32(0)
    magnitude = int32((bits_of(score) >> _BIN_SHIFT) & 0xFFFF)
    return int32(min(max(int32(magnitude - int32(_FIRST_BIN)), int32(0)), int32(BINS - 1)))


@device_routine
def bin_place(index: Any) -> Any:
    """Where a bin is kept: such that lane i's share, 16 neighbouring bins, is all in bank i."""
    index = uint32(index)
    return uint32(((index % uint32(_BINS_A_LANE)) * uint32(LANES)) + index // uint32(_BINS_A_LANE))


@device_routine
def count_score(paths: Any, score: Any, least: Any) -> Any:
    """Count a score and return its bin."""
    index = score_bin(score, least)
    if index < int32(BINS):
        cuda.atomic.add(paths.bins, bin_place(index), int32(1))
    return index


@device_routine
def find_cut(paths: Any, budget: Any) -> None:
    """Find the first bin up to which as many are counted as the budget; the first warp takes part."""
    lane = uint32(cuda.threadIdx.x)
    own = int32(0)
    for part in range(_BINS_A_LANE):
        own = int32(own + paths.bins[uint32(uint32(part * LANES) + lane)])
    reached = warp_running_sum(own)
    lanes = warp_ballot(uint32(reached) >= budget)
    if lanes == uint32(0):
        cut = int32(BINS - 1)
    else:
        group = int32(cuda.ffs(int32(lanes)) - 1)
        below = int32(warp_broadcast(int32(reached - own), group))
        member = uint32(lane % uint32(_BINS_A_LANE))
        count = paths.bins[uint32(member * uint32(LANES) + uint32(group))]
        reached = int32(warp_running_sum(count if lane < uint32(_BINS_A_LANE) else int32(0)) + below)
        members = warp_ballot(uint32(reached) >= budget)
        cut = int32(group * int32(_BINS_A_LANE) + int32(cuda.ffs(int32(members))) - 1)
    if lane == uint32(0):
        paths.counters[CUT] = cut


@device_routine
def agree_on_cut(paths: Any, budget: Any) -> Any:
    """Find the cut of what was counted so far; the whole block takes part."""
    cuda.syncthreads()
    if cuda.threadIdx.x < LANES:
        find_cut(paths, budget)
    cuda.syncthreads()
    return paths.counters[CUT]


@device_routine
def count_spurs(rows: Any, paths: Any, threads: Any) -> None:
    """Count the top-1 path and what leaves it in its last place, as far as ranks are staged.

    The histogram may count any continuations, as long as it counts none twice.
    """
    width = min(min(rows.staged, rows.width), rows.budget)
    for task in range(uint32(cuda.threadIdx.x), uint32(rows.depth * width), uint32(threads)):
        row = uint32(uint32(task) // width)
        rank = uint32(uint32(task) - row * width)
        if uint32(row + rank) < rows.budget:
            score = paths.chain[row] + log_prob(rows, row, rank)
            count_score(paths, score, rows.least)


@device_routine
def count_extended_spurs(rows: Any, paths: Any, cut: Any, threads: Any) -> None:
    """Count what continues the spurs by ranks of 0, within the cut and the bounds."""
    width = min(min(rows.staged, rows.width), rows.budget)
    for task in range(uint32(cuda.threadIdx.x), uint32(rows.depth * width), uint32(threads)):
        row = uint32(uint32(task) // width)
        rank = uint32(uint32(task) - row * width)
        score = paths.chain[row] + log_prob(rows, row, rank)
        total = uint32(row + rank + uint32(1))
        row = uint32(row + uint32(1))
        while rank > uint32(0) and row < rows.depth:
            score = score + log_prob(rows, row, uint32(0))
            total = uint32(total + rank + uint32(1))
            if total > rows.budget or score_bin(score, rows.least) > cut:
                break
            count_score(paths, score, rows.least)
            row = uint32(row + uint32(1))


@device_routine
def is_child_kept(rows: Any, cut: Any, score: Any, product: Any, total: Any, row: Any, rank: Any) -> Any:
    """Whether a child may be a node: within the limits, the bounds and the cut, or a seed."""
    if rank >= rows.width or uint32(total + product * (rank + uint32(1))) > rows.budget:
        return False
    if product == uint32(1) and rank == uint32(0) and row < rows.seeds:
        return True
    return score_bin(score + log_prob(rows, row, rank), rows.least) <= cut


@device_routine
def store_child(
    rows: Any,
    paths: Any,
    row: Any,
    parent: Any,
    score: Any,
    bounds: Any,
    rank: Any,
    place: Any,
    counts: Any,
    extended: Any,
) -> None:
    """Store a continuation, where there is room, and count it if it is none of the spurs counted."""
    product = product_of(bounds)
    deviates = product > uint32(1)  # before this rank
    deviations = uint32(deviations_of(bounds))
    if rank > uint32(0):
        deviations = min(uint32(deviations + uint32(1)), uint32(2))
    total = sum_of(bounds)
    product = uint32(product * (rank + uint32(1)))
    score = score + log_prob(rows, row, rank)
    if product == uint32(1) and row < rows.seeds:
        score = float64(uint32(rows.seeds - row))
    elif counts and deviates and (deviations == uint32(2) or not extended):
        count_score(paths, score, rows.least)
    if place < paths.room:
        paths.score[place] = score
        paths.origin[place] = origin_word(parent, rank, uint32(row + uint32(1)))
        paths.bounds[place] = bounds_word(product, uint32(total + product), deviations)


@device_routine
def expand_level(
    rows: Any,
    paths: Any,
    row: Any,
    start: Any,
    end: Any,
    cut: Any,
    counts: Any,
    extended: Any,
    counter: Any,
    threads: Any,
) -> None:
    """Store the children of the places from `start` to `end` from there on; the block takes part.

    A few neighbouring lanes look at as many children of one parent at once, and again while all were
    kept, for those that are kept come first. A parent's children become neighbours.
    """
    thread = uint32(cuda.threadIdx.x)
    lane = uint32(thread % uint32(LANES))
    # Eight lanes a parent, or more where there are few parents.
    shift = uint32(3)
    while shift < uint32(5) and (uint32(end - start) << (shift + uint32(1))) <= uint32(threads):
        shift = uint32(shift + uint32(1))
    size = uint32(uint32(1) << shift)
    member = uint32(thread & (size - uint32(1)))
    leader = uint32(lane - member)
    team = uint32((uint32(0xFFFFFFFF) >> (uint32(LANES) - size)) << leader)
    first = uint32(start)
    while first < end:  # not by range, which would divide by the step
        parent = uint32(first + (thread >> shift))
        goes_on = parent < end
        score = 0.0
        bounds = uint32(1)
        if goes_on:
            score = paths.score[parent]
            bounds = paths.bounds[parent]
        product = product_of(bounds)
        total = sum_of(bounds)
        if product == uint32(1):
            score = paths.chain[row]
        children = uint32(0)
        while True:
            kept = goes_on and is_child_kept(rows, cut, score, product, total, row, uint32(children + member))
            kept_of_team = uint32(cuda.popc(uint32(warp_ballot(kept) & team)))
            goes_on = kept_of_team == size
            children = uint32(children + kept_of_team)
            if warp_ballot(goes_on) == uint32(0):
                break
        base = int32(0)
        if member == uint32(0) and children > uint32(0):
            base = cuda.atomic.add(paths.counters, counter, int32(children))
        place = uint32(uint32(end) + uint32(warp_broadcast(base, int32(leader))))
        rank = member
        while rank < children:
            store_child(rows, paths, row, parent, score, bounds, rank, uint32(place + rank), counts, extended)
            rank = uint32(rank + size)
        first = uint32(first + (uint32(threads) >> shift))


@device_routine
def find_paths(rows: Any, paths: Any, threads: Any) -> Any:
    """Store every continuation that may be a node, and some more; return how many, with the root.

    The whole block takes part. 0 where there is no room.
    """
    thread = cuda.threadIdx.x
    room = paths.room
    for place in range(thread, BINS, threads):
        paths.bins[place] = 0
    if thread < FOUND_COUNTERS:
        paths.counters[thread] = 0
    if thread == 0:
        paths.score[0] = 0.0
        paths.origin[0] = uint32(0)
        paths.bounds[0] = bounds_word(uint32(1), uint32(0), uint32(0))
    cuda.syncthreads()
    count_spurs(rows, paths, threads)
    cut = agree_on_cut(paths, rows.budget)
    # Extended spurs spare wide levels what they would find too late; narrow levels do not need that.
    extended = rows.budget > uint32(WIDE_BUDGET)
    if extended:
        count_extended_spurs(rows, paths, cut, threads)
        cut = agree_on_cut(paths, rows.budget)
    cut_before = int32(BINS)
    counted = uint32(0)
    stored = uint32(room + uint32(1))
    while stored > room and cut < cut_before:
        cut_before = cut
        start = uint32(0)
        stored = uint32(1)
        stored_at_cut = uint32(1)
        row = uint32(0)
        while row < rows.depth and start < stored and stored <= room:
            # Three counters take turns: one counts, one may still be read, and one is made 0.
            counter = uint32(row % uint32(FOUND_COUNTERS))
            if thread == 0:
                paths.counters[uint32(uint32(row + uint32(1)) % uint32(FOUND_COUNTERS))] = 0
            expand_level(rows, paths, row, start, stored, cut, row >= counted, extended, counter, threads)
            cuda.syncthreads()
            start = stored
            stored = uint32(stored + uint32(paths.counters[counter]))
            row = uint32(row + uint32(1))
            counted = max(counted, row)
            # A cut takes as long as a level, and little is won by few.
            if stored > room or uint32(stored - stored_at_cut) > uint32(rows.budget >> uint32(1)):
                cut = agree_on_cut(paths, rows.budget)
                stored_at_cut = stored
        if stored > room:
            cuda.syncthreads()
            if thread < FOUND_COUNTERS:
                paths.counters[thread] = 0
            cuda.syncthreads()
    return stored if stored <= room else uint32(0)


@device_routine
def path_precedes(paths: Any, left: Any, right: Any) -> Any:
    """Whether of two continuations of equal score the left one's tuple of ranks is the smaller."""
    left_depth = depth_of(paths.origin[left])
    right_depth = depth_of(paths.origin[right])
    # Up to the same depth, then up to the same parent: there they part.
    depth = left_depth
    while depth > right_depth:
        left = parent_of(paths.origin[left])
        depth = uint32(depth - uint32(1))
    depth = right_depth
    while depth > left_depth:
        right = parent_of(paths.origin[right])
        depth = uint32(depth - uint32(1))
    if left == right:
        return left_depth < right_depth
    left_origin = paths.origin[left]
    right_origin = paths.origin[right]
    while parent_of(left_origin) != parent_of(right_origin):
        left_origin = paths.origin[parent_of(left_origin)]
        right_origin = paths.origin[parent_of(right_origin)]
    return rank_of(left_origin) < rank_of(right_origin)


@device_routine
def precedes(paths: Any, left: Any, right: Any) -> Any:
    """Whether one continuation comes before another; the root, here a filler, after all."""
    left_score = paths.score[left]
    right_score = paths.score[right]
    if left == uint32(0) or right == uint32(0):
        return left != uint32(0)
    if left_score != right_score:
        return left_score > right_score
    return path_precedes(paths, left, right)


@device_routine
def sort_paths(paths: Any, stored: Any, threads: Any) -> Any:
    """Put the continuations within the cut in order, root excluded, and return how many there are.

    The whole block takes part. A bitonic network: pairs less than 64 apart are a warp's own, and
    need no barrier of the block.
    """
    thread = uint32(cuda.threadIdx.x)
    lane = uint32(thread % uint32(LANES))
    cut = paths.counters[CUT]
    if thread == 0:
        paths.counters[KEPT] = 0
    cuda.syncthreads()
    first = uint32(1)
    while first < stored:
        place = uint32(first + thread)
        keeps = place < stored
        if keeps:
            keeps = score_bin(paths.score[place], -np.inf) <= cut
        lanes = warp_ballot(keeps)
        base = int32(0)
        if lane == uint32(0):
            base = cuda.atomic.add(paths.counters, KEPT, int32(cuda.popc(lanes)))
        base = warp_broadcast(base, 0)
        if keeps:
            earlier = uint32(lanes & uint32((uint32(1) << lane) - uint32(1)))
            paths.order[uint32(uint32(base) + uint32(cuda.popc(earlier)))] = place
        first = uint32(first + uint32(threads))
    cuda.syncthreads()
    kept = uint32(paths.counters[KEPT])
    size = uint32(2)
    while size < kept:
        size = uint32(size + size)
    for place in range(kept + thread, size, uint32(threads)):
        paths.order[place] = 0
    cuda.syncthreads()
    run = uint32(2)
    while run <= size:
        stride = uint32(run >> uint32(1))
        while stride > uint32(0):
            for pair in range(thread, uint32(size >> uint32(1)), uint32(threads)):
                inner = uint32(uint32(pair) & uint32(stride - uint32(1)))
                low = uint32(((uint32(pair) - inner) << uint32(1)) + inner)
                high = uint32(low + stride)
                first = uint32(paths.order[low])
                second = uint32(paths.order[high])
                rises = uint32(low & run) == uint32(0)
                if precedes(paths, second if rises else first, first if rises else second):
                    paths.order[low] = second
                    paths.order[high] = first
            next_stride = uint32(stride >> uint32(1)) if stride > uint32(1) else run
            if stride > uint32(LANES) or next_stride > uint32(LANES):
                cuda.syncthreads()
            else:
                warp_sync()
            stride = uint32(stride >> uint32(1))
        run = uint32(run + run)
    cuda.syncthreads()
    return kept


@device_routine
def place_nodes(paths: Any, count: Any, tree: Any, threads: Any) -> None:
    """Write the first `count` continuations in order as a tree's nodes; the whole block takes part."""
    thread = uint32(cuda.threadIdx.x)
    if thread == 0:
        paths.bounds[0] = uint32(0)
    for index in range(thread, count, uint32(threads)):
        paths.bounds[paths.order[index]] = uint32(uint32(index) + uint32(1))
    cuda.syncthreads()
    for index in range(thread, count, uint32(threads)):
        place = uint32(paths.order[index])
        node = uint32(uint32(index) + uint32(1))
        origin = paths.origin[place]
        parent = int32(paths.bounds[parent_of(origin)])
        depth = depth_of(origin)
        score = paths.score[place]
        tree.score[node] = score if score <= 0.0 else paths.chain[depth]
        tree.parent[node] = parent
        tree.depth[node] = int32(depth)
        tree.rank[node] = int32(rank_of(origin))
        # Siblings are neighbours, and of nodes all earlier siblings are nodes.
        if rank_of(origin) == uint32(0):
            tree.first_child[parent] = int32(node)
        else:
            tree.next_sibling[paths.bounds[uint32(place - uint32(1))]] = int32(node)
    cuda.syncthreads()
