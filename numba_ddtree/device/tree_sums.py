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
  budget, and none of the rest, can be nodes. It starts with the spurs, which leave the top-1 path in
  their last place, and with what continues them by ranks of 0; it grows with the levels: each finds the
  children of the level before it that are still within the cut. The more is counted, the tighter the cut.
* Should a level not fit, all of it is counted nevertheless, and the levels are made anew under the
  tighter cut. Should that not help, massive ties, `numba_ddtree.device.tree_pops` takes over.

The order in which continuations are stored is not deterministic, what is made of them is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float64, int32, int64, uint32
from numba_ddtree.device.bits import bits_of, value_of
from numba_ddtree.device.draft_rows import log_prob
from numba_ddtree.device.warp import (
    LANES,
    warp_ballot,
    warp_broadcast,
    warp_max,
    warp_running_sum,
    warp_sync,
)

BINS = 512
# A bin is a 32nd of an octave of |score|; the first takes all below 2^-4, the last all from 2^12.
_BIN_SHIFT = 52 - 5
_FIRST_BIN = (1023 - 4) << 5
_BINS_A_LANE = BINS // LANES
_LANE_STRIDE = _BINS_A_LANE + 1
BIN_WORDS = LANES * _LANE_STRIDE  # that bins take, see `bin_place`

# Counters: three that take turns to count a level, then these.
FOUND_COUNTERS = 3
CUT, KEPT, LARGEST = 3, 4, 5
COUNTERS = 7  # an odd number, as the flags before them are
TEAM_SHIFT = 3  # eight lanes look at a parent's children, or more
CUT_EVERY = 256  # continuations, or half a budget: a cut takes as long as a level, and little is won by few
# Buckets of this size and less are sorted by comparing all with all.
MAX_BUCKET = 48
MAX_CAPACITY = 3072
PATH_WORDS_A_PLACE = 4  # of shared memory, beside the order

# A continuation's origin in one word: the parent's place, its rank, its depth.
_PLACE_BITS, _RANK_BITS = 12, 10
# And its bounds: the product of its path's rank + 1, the sum over its beginnings of theirs, and how
# often it leaves the top-1 path, 2 for more than once.
_PRODUCT_BITS, _SUM_BITS = 11, 11
# When they are sorted: its bucket and its number there; a bucket's start and, above it, its size.
_BUCKET_BITS, _START_BITS = 9, 12
_NO_BUCKET = 0xFFFFFFFF


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
        Product, sum and deviations; later the bucket, then the place in the tree.
    order : uint16 [order_size]
        Places of those that may be nodes, bucket by bucket, or in order of the tree.
    bins : int32 [BIN_WORDS]
        Histogram of scores, see `bin_place`; later of buckets.
    counters : int32 [COUNTERS]
        How many a level has, in turns; the last bin that may hold nodes; how many are within it; the size
        of the largest bucket.
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
def score_bin(score: Any) -> Any:
    """Bin of a score of at most 0; 0 for the best."""
    magnitude = int32((bits_of(score) >> _BIN_SHIFT) & 0xFFFF)
    return int32(min(max(int32(magnitude - int32(_FIRST_BIN)), int32(0)), int32(BINS - 1)))


@device_routine
def least_within(rows: Any, cut: Any) -> Any:
    """Least score of a continuation within the cut, a bin, and the request's limit."""
    if cut >= int32(BINS - 1):
        return rows.least
    beyond = (int64(cut) + int64(_FIRST_BIN + 1)) << int64(_BIN_SHIFT)
    return max(rows.least, -value_of(beyond - int64(1)))


@device_routine
def bin_place(index: Any) -> Any:
    """Where a bin is kept: neighbours in other banks, and what lanes read of their 16 bins too."""
    index = uint32(index)
    return uint32(index + index // uint32(_BINS_A_LANE))


@device_routine
def count_score(paths: Any, score: Any) -> None:
    """Count a score."""
    cuda.atomic.add(paths.bins, bin_place(score_bin(score)), int32(1))


@device_routine
def find_cut(paths: Any, budget: Any) -> None:
    """Find the first bin up to which as many are counted as the budget; the first warp takes part."""
    lane = uint32(cuda.threadIdx.x)
    own = int32(0)
    for part in range(_BINS_A_LANE):
        own = int32(own + paths.bins[uint32(lane * uint32(_LANE_STRIDE) + uint32(part))])
    reached = warp_running_sum(own)
    lanes = warp_ballot(uint32(reached) >= budget)
    if lanes == uint32(0):
        cut = int32(BINS - 1)
    else:
        group = int32(cuda.ffs(int32(lanes)) - 1)
        below = int32(warp_broadcast(int32(reached - own), group))
        member = uint32(lane % uint32(_BINS_A_LANE))
        count = paths.bins[uint32(uint32(group) * uint32(_LANE_STRIDE) + member)]
        reached = int32(warp_running_sum(count if lane < uint32(_BINS_A_LANE) else int32(0)) + below)
        members = warp_ballot(uint32(reached) >= budget)
        cut = int32(group * int32(_BINS_A_LANE) + int32(cuda.ffs(int32(members))) - 1)
    if lane == uint32(0):
        paths.counters[CUT] = cut


@device_routine
def agree_on_cut(rows: Any, paths: Any) -> Any:
    """Find the cut of what was counted before the last barrier; the whole block takes part."""
    if cuda.threadIdx.x < LANES:
        find_cut(paths, rows.budget)
    cuda.syncthreads()
    return paths.counters[CUT]


@device_routine
def count_spurs(rows: Any, paths: Any, threads: Any) -> None:
    """Count the top-1 path and what leaves it in its last place, as far as ranks are staged.

    The histogram may count any continuations, as long as it counts none twice.
    """
    thread = uint32(cuda.threadIdx.x)
    width = min(min(rows.staged, rows.width), rows.budget)
    row = uint32(thread // uint32(LANES))  # a warp takes 32 ranks of one row at a time
    rank = uint32(thread % uint32(LANES))
    while True:
        while row >= rows.depth:
            row = uint32(row - rows.depth)
            rank = uint32(rank + uint32(LANES))
        if rank >= width:
            break
        score = paths.chain[row] + log_prob(rows, row, rank)
        if uint32(row + rank) < rows.budget and score >= rows.least:
            count_score(paths, score)
        row = uint32(row + uint32(threads // LANES))


@device_routine
def count_extended_spurs(rows: Any, paths: Any, bound: Any, threads: Any) -> None:
    """Count what continues the spurs by ranks of 0, of scores not below a bound."""
    thread = uint32(cuda.threadIdx.x)
    # A spur of a larger rank has no room for its continuation within the budget.
    width = min(min(rows.staged, rows.width), uint32(rows.budget >> uint32(1)))
    row = uint32(thread // uint32(LANES))
    rank = uint32(thread % uint32(LANES))
    while True:
        while row >= rows.depth:
            row = uint32(row - rows.depth)
            rank = uint32(rank + uint32(LANES))
        if rank >= width:
            break
        score = paths.chain[row] + log_prob(rows, row, rank)
        total = uint32(row + rank + rank + uint32(2))
        next_row = uint32(row + uint32(1))
        while rank > uint32(0) and next_row < rows.depth and total <= rows.budget:
            score = score + log_prob(rows, next_row, uint32(0))
            if not score >= bound:
                break
            count_score(paths, score)
            total = uint32(total + rank + uint32(1))
            next_row = uint32(next_row + uint32(1))
        row = uint32(row + uint32(threads // LANES))


@device_routine
def is_child_kept(
    rows: Any, bound: Any, child_score: Any, product: Any, total: Any, row: Any, rank: Any
) -> Any:
    """Whether a child may be a node: within the limits and the bounds, or a seed.

    Of two children the one of the smaller rank is kept if the other is.
    """
    if rank >= rows.width or uint32(total + product * (rank + uint32(1))) > rows.budget:
        return False
    return child_score >= bound or (product == uint32(1) and rank == uint32(0) and row < rows.seeds)


@device_routine
def parent_score(paths: Any, row: Any, parent: Any, product: Any) -> Any:
    """Score of a continuation of `row` places, which for a seed is not what is kept with it."""
    on_chain = paths.chain[row]
    kept_with_it = paths.score[parent]
    return on_chain if product == uint32(1) else kept_with_it


@device_routine
def any_log_prob(rows: Any, row: Any, rank: Any) -> Any:
    """Log-prob of a candidate, -inf beyond the limits."""
    return log_prob(rows, row, rank) if rank < rows.width else -np.inf


@device_routine
def store_child(
    rows: Any,
    paths: Any,
    row: Any,
    parent: Any,
    bounds: Any,
    score: Any,
    rank: Any,
    place: Any,
    counts: Any,
) -> None:
    """Store a child, where there is room, and count it if it is none of the spurs counted.

    `score` is the child's, `bounds` are its parent's.
    """
    product = product_of(bounds)
    deviations = uint32(deviations_of(bounds))
    if rank > uint32(0):
        deviations = min(uint32(deviations + uint32(1)), uint32(2))
    total = sum_of(bounds)
    product = uint32(product * (rank + uint32(1)))
    if product == uint32(1) and row < rows.seeds:
        score = float64(uint32(rows.seeds - row))
    elif counts and deviations == uint32(2):
        count_score(paths, score)
    if place < paths.room:
        paths.score[place] = score
        paths.origin[place] = origin_word(parent, rank, uint32(row + uint32(1)))
        paths.bounds[place] = bounds_word(product, uint32(total + product), deviations)


@device_routine
def expand_few(
    rows: Any, paths: Any, row: Any, start: Any, end: Any, bound: Any, counts: Any, counter: Any, threads: Any
) -> None:
    """Store the children of few parents: a team of neighbouring lanes looks at as many children at once.

    It looks again while all were kept, for those that are kept come first.
    """
    thread = uint32(cuda.threadIdx.x)
    lane = uint32(thread % uint32(LANES))
    shift = uint32(TEAM_SHIFT)
    if (uint32(end - start) << uint32(TEAM_SHIFT + 1)) <= uint32(threads):
        shift = uint32(TEAM_SHIFT + 1)
    if (uint32(end - start) << uint32(TEAM_SHIFT + 2)) <= uint32(threads):
        shift = uint32(TEAM_SHIFT + 2)
    if uint32(start + ((thread - lane) >> shift)) >= end:  # no lane of the warp has a parent
        return
    size = uint32(uint32(1) << shift)
    member = uint32(thread & (size - uint32(1)))
    parent = uint32(start + (thread >> shift))
    goes_on = parent < end
    parent = min(parent, uint32(end - uint32(1)))
    first_log_prob = any_log_prob(rows, row, member)  # does not wait for what the parent is
    bounds = paths.bounds[parent]
    product = product_of(bounds)
    total = sum_of(bounds)
    score = parent_score(paths, row, parent, product)
    first_score = score + first_log_prob
    leader = uint32(lane - member)
    team = uint32((uint32(0xFFFFFFFF) >> (uint32(LANES) - size)) << leader)
    children = uint32(0)
    child_score = first_score
    while True:
        rank = uint32(children + member)
        kept = goes_on and is_child_kept(rows, bound, child_score, product, total, row, rank)
        kept_of_team = uint32(cuda.popc(uint32(warp_ballot(kept) & team)))
        goes_on = kept_of_team == size
        children = uint32(children + kept_of_team)
        if warp_ballot(goes_on) == uint32(0):
            break
        child_score = score + any_log_prob(rows, row, uint32(children + member))
    base = int32(0)
    if member == uint32(0) and children > uint32(0):
        base = cuda.atomic.add(paths.counters, counter, int32(children))
    place = uint32(uint32(end) + uint32(warp_broadcast(base, int32(leader))))
    child_score = first_score
    rank = member
    while rank < children:
        store_child(rows, paths, row, parent, bounds, child_score, rank, uint32(place + rank), counts)
        rank = uint32(rank + size)
        child_score = score + any_log_prob(rows, row, rank)


@device_routine
def count_children(rows: Any, bound: Any, score: Any, product: Any, total: Any, row: Any) -> Any:
    """Count the children that are kept, by doubling and halving; one lane's work."""
    step = uint32(1)
    child_score = score + any_log_prob(rows, row, uint32(0))
    while is_child_kept(rows, bound, child_score, product, total, row, uint32(step - uint32(1))):
        step = uint32(step + step)
        child_score = score + any_log_prob(rows, row, uint32(step - uint32(1)))
    step = uint32(step >> uint32(1))
    children = step
    step = uint32(step >> uint32(1))
    while step > uint32(0):
        rank = uint32(children + step - uint32(1))
        child_score = score + any_log_prob(rows, row, rank)
        if is_child_kept(rows, bound, child_score, product, total, row, rank):
            children = uint32(children + step)
        step = uint32(step >> uint32(1))
    return children


@device_routine
def expand_many(
    rows: Any, paths: Any, row: Any, start: Any, end: Any, bound: Any, counts: Any, counter: Any, threads: Any
) -> None:
    """Store the children of many parents: a lane counts those of one, then stores a child of any."""
    thread = uint32(cuda.threadIdx.x)
    lane = uint32(thread % uint32(LANES))
    first = uint32(start + thread - lane)
    while first < end:
        parent = uint32(first + lane)
        children = uint32(0)
        if parent < end:
            bounds = paths.bounds[parent]
            product = product_of(bounds)
            score = parent_score(paths, row, parent, product)
            children = count_children(rows, bound, score, product, sum_of(bounds), row)
        reached = warp_running_sum(int32(children))
        before = int32(reached - int32(children))
        count = warp_broadcast(reached, LANES - 1)
        base = int32(0)
        if lane == uint32(0) and count > 0:
            base = cuda.atomic.add(paths.counters, counter, count)
        base = warp_broadcast(base, 0)
        done = int32(0)
        while done < count:
            index = int32(done + int32(lane))
            owner = int32(0)  # in the end the last lane before whose children there are no more than index
            step = int32(LANES // 2)
            while step > 0:
                if warp_broadcast(before, int32(owner + step)) <= index:
                    owner = int32(owner + step)
                step = int32(step >> int32(1))
            rank = uint32(index - warp_broadcast(before, owner))
            if index < count:
                place = uint32(uint32(end) + uint32(base + index))
                parent = uint32(first + uint32(owner))
                bounds = paths.bounds[parent]
                score = parent_score(paths, row, parent, product_of(bounds)) + log_prob(rows, row, rank)
                store_child(rows, paths, row, parent, bounds, score, rank, place, counts)
            done = int32(done + int32(LANES))
        first = uint32(first + uint32(threads))


@device_routine
def expand_level(
    rows: Any, paths: Any, row: Any, start: Any, end: Any, bound: Any, counts: Any, counter: Any, threads: Any
) -> None:
    """Store the children of the places from `start` to `end` from there on; the block takes part.

    A parent's children become neighbours.
    """
    if (uint32(end - start) << uint32(TEAM_SHIFT)) <= uint32(threads):
        expand_few(rows, paths, row, start, end, bound, counts, counter, threads)
    else:
        expand_many(rows, paths, row, start, end, bound, counts, counter, threads)


@device_routine
def clear_search(paths: Any, threads: Any) -> None:
    """Prepare the search, which a barrier is to follow; the whole block takes part."""
    thread = uint32(cuda.threadIdx.x)
    for place in range(thread, uint32(BIN_WORDS), uint32(threads)):
        paths.bins[place] = 0
    if thread < FOUND_COUNTERS:
        paths.counters[thread] = 0
    if thread == 0:
        paths.score[0] = 0.0
        paths.origin[0] = uint32(0)
        paths.bounds[0] = bounds_word(uint32(1), uint32(0), uint32(0))


@device_routine
def find_paths(rows: Any, paths: Any, threads: Any) -> Any:
    """Store every continuation that may be a node, and some more; return how many, with the root.

    The whole block takes part, after `clear_search`. 0 where there is no room.
    """
    thread = cuda.threadIdx.x
    room = paths.room
    count_spurs(rows, paths, threads)
    cuda.syncthreads()
    bound = least_within(rows, agree_on_cut(rows, paths))
    # Levels would find these too late.
    count_extended_spurs(rows, paths, bound, threads)
    cuda.syncthreads()
    cut = agree_on_cut(rows, paths)
    cut_every = min(uint32(rows.budget >> uint32(1)), uint32(CUT_EVERY))
    cut_before = int32(BINS)
    counted = uint32(0)
    stored = uint32(room + uint32(1))
    while stored > room and cut < cut_before:
        cut_before = cut
        bound = least_within(rows, cut)
        start = uint32(0)
        stored = uint32(1)
        stored_at_cut = uint32(1)
        row = uint32(0)
        while row < rows.depth and start < stored and stored <= room:
            # Three counters take turns: one counts, one may still be read, and one is made 0.
            counter = uint32(row % uint32(FOUND_COUNTERS))
            if thread == 0:
                paths.counters[uint32(uint32(row + uint32(1)) % uint32(FOUND_COUNTERS))] = 0
            expand_level(rows, paths, row, start, stored, bound, row >= counted, counter, threads)
            cuda.syncthreads()
            start = stored
            stored = uint32(stored + uint32(paths.counters[counter]))
            row = uint32(row + uint32(1))
            counted = max(counted, row)
            if stored > room or uint32(stored - stored_at_cut) > cut_every:
                cut = agree_on_cut(rows, paths)
                bound = least_within(rows, cut)
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
def bucket_scale(cut: Any) -> Any:
    """Buckets a unit of score, such that they reach from 0 to the cut."""
    beyond = (int64(cut) + int64(_FIRST_BIN + 1)) << int64(_BIN_SHIFT)
    return -float64(BINS) / value_of(beyond)


@device_routine
def fill_buckets(paths: Any, stored: Any, bound: Any, scale: Any, threads: Any) -> None:
    """Give each continuation its bucket, of equal widths of score, and a place in it.

    The whole block takes part. `bounds` then has both, or all bits where the score is below the bound.
    """
    thread = uint32(cuda.threadIdx.x)
    for place in range(thread, uint32(BIN_WORDS), uint32(threads)):
        paths.bins[place] = 0
    cuda.syncthreads()
    for place in range(uint32(thread + uint32(1)), stored, uint32(threads)):
        score = paths.score[place]
        word = uint32(_NO_BUCKET)
        if score >= bound:
            bucket = uint32(max(0.0, min(score * scale, float64(BINS - 1))))
            member = cuda.atomic.add(paths.bins, bin_place(bucket), int32(1))
            word = uint32((uint32(member) << uint32(_BUCKET_BITS)) | bucket)
        paths.bounds[place] = word
    cuda.syncthreads()


@device_routine
def sum_buckets(paths: Any) -> None:
    """Replace a bucket's size by its start and size in one word; the first warp takes part."""
    lane = uint32(cuda.threadIdx.x)
    own = int32(0)
    largest = uint32(0)
    for part in range(_BINS_A_LANE):
        size = paths.bins[uint32(lane * uint32(_LANE_STRIDE) + uint32(part))]
        own = int32(own + size)
        largest = max(largest, uint32(size))
    reached = warp_running_sum(own)
    start = int32(reached - own)
    for part in range(_BINS_A_LANE):
        place = uint32(lane * uint32(_LANE_STRIDE) + uint32(part))
        size = paths.bins[place]
        paths.bins[place] = int32(start | int32(size << int32(_START_BITS)))
        start = int32(start + size)
    largest = warp_max(largest)
    if lane == uint32(LANES - 1):
        paths.counters[KEPT] = reached
        paths.counters[LARGEST] = int32(largest)


@device_routine
def gather_buckets(paths: Any, stored: Any, threads: Any) -> None:
    """Put each bucket's members together; the whole block takes part."""
    thread = uint32(cuda.threadIdx.x)
    for place in range(uint32(thread + uint32(1)), stored, uint32(threads)):
        word = uint32(paths.bounds[place])
        if word != uint32(_NO_BUCKET):
            bucket = uint32(paths.bins[bin_place(word & uint32(BINS - 1))])
            start = uint32(bucket & uint32((1 << _START_BITS) - 1))
            paths.order[uint32(start + (word >> uint32(_BUCKET_BITS)))] = place
    cuda.syncthreads()


@device_routine
def order_buckets(paths: Any, stored: Any, threads: Any) -> None:
    """Turn bounds into places in the tree by comparing each bucket's members; the whole block takes part."""
    thread = uint32(cuda.threadIdx.x)
    for place in range(uint32(thread + uint32(1)), stored, uint32(threads)):
        word = uint32(paths.bounds[place])
        node = uint32(_NO_BUCKET)
        if word != uint32(_NO_BUCKET):
            bucket = uint32(paths.bins[bin_place(word & uint32(BINS - 1))])
            start = uint32(bucket & uint32((1 << _START_BITS) - 1))
            end = uint32(start + (bucket >> uint32(_START_BITS)))
            score = paths.score[place]
            node = uint32(start + uint32(1))
            while start < end:
                other = uint32(paths.order[start])
                other_score = paths.score[other]
                if other_score > score or (
                    other_score == score and other != place and path_precedes(paths, other, place)
                ):
                    node = uint32(node + uint32(1))
                start = uint32(start + uint32(1))
        paths.bounds[place] = node


@device_routine
def merge_paths(paths: Any, kept: Any, threads: Any) -> None:
    """Do what `order_buckets` does, whatever the buckets' sizes: by a bitonic network.

    The whole block takes part. Pairs less than 64 apart are a warp's own, and need no barrier of the block.
    """
    thread = uint32(cuda.threadIdx.x)
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
    for index in range(thread, kept, uint32(threads)):
        paths.bounds[paths.order[index]] = uint32(uint32(index) + uint32(1))


@device_routine
def sort_paths(rows: Any, paths: Any, stored: Any, threads: Any) -> Any:
    """Turn the bounds of the continuations within the cut into their places in the tree; return how many.

    The whole block takes part. The others' bounds become larger than any place.
    """
    cut = paths.counters[CUT]
    bound = least_within(rows, cut)
    fill_buckets(paths, stored, bound, bucket_scale(cut), threads)
    if cuda.threadIdx.x < LANES:
        sum_buckets(paths)
    cuda.syncthreads()
    gather_buckets(paths, stored, threads)
    kept = uint32(paths.counters[KEPT])
    if paths.counters[LARGEST] <= MAX_BUCKET:
        order_buckets(paths, stored, threads)
    else:
        merge_paths(paths, kept, threads)
    if cuda.threadIdx.x == 0:
        paths.bounds[0] = uint32(0)
    cuda.syncthreads()
    return kept


@device_routine
def place_nodes(paths: Any, stored: Any, count: Any, tree: Any, threads: Any) -> None:
    """Write the first `count` continuations in order as a tree's nodes; the whole block takes part."""
    thread = uint32(cuda.threadIdx.x)
    for place in range(uint32(thread + uint32(1)), stored, uint32(threads)):
        node = uint32(paths.bounds[place])
        if node <= count:
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
