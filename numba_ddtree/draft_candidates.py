"""The best candidates of each position and their log-probs, in one pass over the draft's logits.

Each row of logits is cut into tiles, and each block takes the same number of neighbouring tiles, which
are a piece of one row, or of two or more. Of a piece it keeps the best candidates in shared memory: a
number enters if it is above a threshold, at least as many as are wanted being above or at it; whenever
enough have entered, a radix search finds a higher threshold, and those below it leave. What never
enters is summed by its thread, as exponentials relative to the threshold. A second kernel merges a
row's pieces, sorts, and turns logits into log-probs.

Most of a row is scanned in strides of several tiles, and threads wait for each other only now and then:
few numbers are above the threshold, so that there is room for those that enter meanwhile. Where there
was none, the tiles are scanned again, one at a time, as are a row's first ones and those at its ends.

The sum of the exponentials is exact enough for log-probs near 0 to be right: the best candidate's own
is left out of the sum s, so that its log-prob is -log1p(s). Those that leave are summed as integers,
since they leave in no certain order, and everything else in a fixed one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    FLOAT_DTYPES,
    DeviceView,
    Placement,
    StreamLike,
    at,
    check_array,
    check_count,
    check_scalar,
    copy_to_outputs,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import (
    cuda,
    device_function,
    device_routine,
    float32,
    float64,
    int32,
    int64,
    uint32,
    uint64,
)
from numba_ddtree.device.exponentials import bound_terms, exponent_scale, exponential
from numba_ddtree.device.floats import double_bits, double_of_bits, float_bits, float_of_bits
from numba_ddtree.device.quads import is_given, load_quad, load_quad_within, quad_floats
from numba_ddtree.device.rows import maximum
from numba_ddtree.device.warp import LANES, warp_running_sum, warp_sync
from numba_ddtree.devices import device_context, multiprocessors, use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import draft_candidates as reference
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

MAX_K = 1024
MAX_VOCABULARY = 2**18
# Within these, log2(e) / temperature and its rest are numbers of full precision in float32.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-30, 1e30

THREADS = block_threads(256)  # a power of two
BLOCKS_PER_PROCESSOR = 3
TILE = THREADS * 4  # neighbouring numbers that a block looks at at a time, a quad a thread
STRIDE = 4  # tiles whose loads are in flight at once
STRIDES = 4  # between looks at how many have entered
# The threshold rises when this part of the wanted number has entered beyond it, at least so many.
# From 1 on, the merge has room for two pieces at once: were it less, it might find too few keys in them.
GROWTH = 2
LEAST_GROWTH = 96
SLACK_SHIFT = 3  # of the growth, the part that may stay beyond the wanted number
PIECE_SHARE = 16  # a piece has at least so many numbers for each one that is kept of it

BINS = 256
DIGIT_BITS = 8
COUNT, KEPT, ABOVE, BIN, FILLED, BAD, PIECE = range(7)  # words of a block's state
STATE_WORDS = 8
THRESHOLD, ORIGIN, FLOOR, ROUNDER = range(4)  # of a block's bound
BOUND_WORDS = 4
TEMPERATURE, REFERENCE, FACTOR, SCALE_HIGH, SCALE_LOW = range(5)  # of a block's scale
# Where a block's shared arrays begin, in units of 8 bytes.
LEFT_AT = (STATE_WORDS + BINS + BOUND_WORDS) // 2
SCALE_AT = LEFT_AT + 1
SUMS_AT = SCALE_AT + 5
KEYS_AT = SUMS_AT + THREADS
HEADER = 3  # words before a piece's keys in the workspace: sum, reference, whether it has NaN or +inf
UNIT = 2.0**40  # of the integers that the sums of those that leave are made of
INFINITY = np.float32(np.inf)
LOWEST_ORDER = np.uint32(0x007FFFFF)  # of -inf
NO_END = np.uint32(0xFFFFFFFF)  # a length of columns that are known to be within it


class DraftCandidates(NamedTuple):
    """The best candidates of each position, best first: what `build_tree` takes.

    Attributes
    ----------
    log_probs : float32 [B, L, k]
        Natural logs of their probabilities.
    token_ids : int32 [B, L, k]
    """

    log_probs: Array
    token_ids: Array


def shared_bytes_of(wanted: int, growth: int) -> int:
    """Bytes of shared memory that `split_shared` makes arrays of."""
    return 8 * (KEYS_AT + wanted + growth + TILE)


@device_function
def split_shared():  # type: ignore[no-untyped-def]
    """Return a block's arrays: state, bins, bound, what left, scale, threads' sums, candidates' keys.

    The keys, whose number is known at run time alone, are the last, so that addresses are constants.
    """
    s_words = cuda.shared.array(0, int32)
    s_floats = cuda.shared.array(0, float32)
    s_long = cuda.shared.array(0, int64)
    s_doubles = cuda.shared.array(0, float64)
    s_keys = cuda.shared.array(0, uint64)
    return (
        s_words[:STATE_WORDS],
        s_words[STATE_WORDS : STATE_WORDS + BINS],
        s_floats[STATE_WORDS + BINS : STATE_WORDS + BINS + BOUND_WORDS],
        s_long[LEFT_AT:SCALE_AT],
        s_doubles[SCALE_AT:SUMS_AT],
        s_doubles[SUMS_AT:KEYS_AT],
        s_keys[KEYS_AT:],
    )


@device_routine
def begin_piece(shared, piece, temperature):  # type: ignore[no-untyped-def]
    """Forget all candidates and sums; the block takes part."""
    s_state, _, s_bound, _, s_scale, s_sums, _ = shared
    thread = uint32(cuda.threadIdx.x)
    s_sums[thread] = 0.0
    if thread < uint32(STATE_WORDS):
        s_state[thread] = int32(piece) if thread == uint32(PIECE) else int32(0)
    if thread == uint32(0):
        s_bound[THRESHOLD] = float32(np.nan)
        s_bound[ORIGIN] = s_bound[FLOOR] = s_bound[ROUNDER] = float32(0)
        s_scale[TEMPERATURE] = temperature
        s_scale[REFERENCE] = 0.0
        s_scale[SCALE_HIGH], s_scale[SCALE_LOW] = exponent_scale(temperature)
    cuda.syncthreads()


@device_routine
def candidate_key(value, column):  # type: ignore[no-untyped-def]
    """Key (uint64) of a candidate, the larger the better: its value's order, then its id inverted."""
    bits = float_bits(value + float32(0))  # -0 becomes 0
    order = uint32(bits ^ (uint32(int32(bits) >> int32(31)) | uint32(0x80000000)))
    return uint64((uint64(order) << uint64(32)) | uint64(uint32(~uint32(column))))


@device_routine
def key_value(key):  # type: ignore[no-untyped-def]
    """Value (float32) of a key; of one below all keys, -inf."""
    order = uint32(max(uint32(key >> uint64(32)), LOWEST_ORDER))
    flip = uint32(0x80000000) if order >> uint32(31) else uint32(0xFFFFFFFF)
    return float_of_bits(uint32(order ^ flip))


@device_routine
def find_edge(s_state, s_bins, s_keys, wanted, slack):  # type: ignore[no-untyped-def]
    """Key at or above which there are `wanted` of the keys, or up to `slack` more; the block takes part.

    There are at least `wanted` keys, no two the same. A radix search, from the first digit on: it ends
    as soon as a digit's bin is fine enough.
    """
    thread = uint32(cuda.threadIdx.x)
    count = uint32(s_state[COUNT])
    shift = uint32(64 - DIGIT_BITS)
    prefix = uint64(0)
    above = int32(0)
    while True:
        for place in range(thread, uint32(BINS), uint32(THREADS)):
            s_bins[uint32(place)] = 0
        cuda.syncthreads()
        for place in range(thread, count, uint32(THREADS)):
            digits = uint64(s_keys[uint32(place)] >> uint64(shift))
            if digits >> uint64(DIGIT_BITS) == prefix:
                cuda.atomic.add(s_bins, uint32(uint32(digits) & uint32(BINS - 1)), 1)
        cuda.syncthreads()
        if thread < uint32(LANES):
            # A lane has the bins from `top` down; the lanes before it have those above.
            place = uint32(uint32(BINS - 1) - uint32(BINS // LANES) * thread)
            own = int32(0)
            for back in range(uint32(BINS // LANES)):
                own = int32(own + s_bins[uint32(place - uint32(back))])
            before = int32(above + warp_running_sum(own) - own)
            if before < wanted and wanted <= before + own:
                filled = s_bins[place]
                while before + filled < wanted:
                    before = int32(before + filled)
                    place = uint32(place - uint32(1))
                    filled = s_bins[place]
                s_state[ABOVE] = before
                s_state[BIN] = int32(place)
                s_state[FILLED] = filled
        cuda.syncthreads()
        above = s_state[ABOVE]
        prefix = uint64((prefix << uint64(DIGIT_BITS)) | uint64(s_state[BIN]))
        if above + s_state[FILLED] <= wanted + slack or shift == uint32(0):
            return uint64(prefix << uint64(shift))
        shift = uint32(shift - uint32(DIGIT_BITS))


@device_routine
def stay_or_leave(key, place, count, edge, terms, scale, s_state, s_keys):  # type: ignore[no-untyped-def]
    """Move a key that is not below the edge to the front; return the exponential of another, as an integer.

    The keys are those at places below `count`.
    """
    if place >= count:
        return int64(0)
    if key >= edge:
        s_keys[uint32(cuda.atomic.add(s_state, KEPT, 1))] = key
        return int64(0)
    return int64(exponential(key_value(key), terms, scale) * float32(UNIT))


@device_routine
def set_bound(s_bound, s_scale, bound, temperature):  # type: ignore[no-untyped-def]
    """Note a new threshold, what sums are relative to then, and what those before are multiplied by."""
    is_finite = bound > -INFINITY
    terms, reference = bound_terms(bound if is_finite else float32(0), temperature)
    # Without a threshold, or at -inf, the sum is nothing.
    has_sum = s_bound[THRESHOLD] > -INFINITY
    s_scale[FACTOR] = math.exp(s_scale[REFERENCE] - reference) if has_sum else float64(0)
    s_scale[REFERENCE] = reference
    s_bound[THRESHOLD] = bound
    s_bound[ORIGIN], s_bound[FLOOR], s_bound[ROUNDER] = terms


@device_routine
def raise_threshold(shared, wanted, slack):  # type: ignore[no-untyped-def]
    """Find a higher threshold, let go of what is below it and sum that; the block takes part.

    There are more candidates than `wanted`; so many, or up to `slack` more, stay. Returns their number.
    """
    s_state, s_bins, s_bound, s_left, s_scale, s_sums, s_keys = shared
    thread = uint32(cuda.threadIdx.x)
    edge = find_edge(s_state, s_bins, s_keys, wanted, slack)
    # By one thread, since float64 divisions would keep every warp busy.
    if thread == uint32(0):
        set_bound(s_bound, s_scale, key_value(edge), s_scale[TEMPERATURE])
        s_state[KEPT] = 0
        s_left[0] = 0
    count = uint32(s_state[COUNT])
    left = int64(0)
    start = uint32(0)
    while start < count:
        place_0 = uint32(start + thread)
        place_1 = uint32(place_0 + uint32(THREADS))
        place_2 = uint32(place_1 + uint32(THREADS))
        place_3 = uint32(place_2 + uint32(THREADS))
        key_0 = s_keys[place_0] if place_0 < count else uint64(0)
        key_1 = s_keys[place_1] if place_1 < count else uint64(0)
        key_2 = s_keys[place_2] if place_2 < count else uint64(0)
        key_3 = s_keys[place_3] if place_3 < count else uint64(0)
        cuda.syncthreads()  # all have read, so that earlier places can be written
        terms = s_bound[ORIGIN], s_bound[FLOOR], s_bound[ROUNDER]
        scale = float32(s_scale[SCALE_HIGH]), float32(s_scale[SCALE_LOW])
        left += stay_or_leave(key_0, place_0, count, edge, terms, scale, s_state, s_keys)
        left += stay_or_leave(key_1, place_1, count, edge, terms, scale, s_state, s_keys)
        left += stay_or_leave(key_2, place_2, count, edge, terms, scale, s_state, s_keys)
        left += stay_or_leave(key_3, place_3, count, edge, terms, scale, s_state, s_keys)
        start = uint32(start + uint32(4 * THREADS))
    s_sums[thread] *= s_scale[FACTOR]
    if s_bound[THRESHOLD] > -INFINITY and left != int64(0):
        cuda.atomic.add(s_left, 0, left)
    cuda.syncthreads()
    if thread == uint32(0):
        s_state[COUNT] = s_state[KEPT]
        s_sums[0] += float64(s_left[0]) / UNIT
    cuda.syncthreads()
    return int32(s_state[KEPT])


@device_routine
def sum_over_block(s_sums):  # type: ignore[no-untyped-def]
    """Sum of the threads' float64, in a fixed order, for every thread; the block takes part."""
    thread = uint32(cuda.threadIdx.x)
    width = uint32(THREADS // 2)
    while width > uint32(0):
        if width >= uint32(LANES):
            cuda.syncthreads()
        else:
            warp_sync()  # the rest is the first warp's
        if thread < width:
            s_sums[thread] += s_sums[uint32(thread + width)]
        width = uint32(width >> uint32(1))
    cuda.syncthreads()
    return s_sums[0]


@device_routine
def scaled_distance(value, best, temperature):  # type: ignore[no-untyped-def]
    """Distance of a value from the best one, divided by the temperature, float64."""
    return (float64(value) - float64(best)) / temperature


@device_routine
def relative(sum_, reference, best, temperature):  # type: ignore[no-untyped-def]
    """Return a sum relative to the best candidate instead of its reference; nothing stays nothing."""
    return sum_ * math.exp(reference - float64(best) / temperature) if sum_ > 0.0 else float64(0)


@device_routine
def adjusted(value, column, length, bias, token_bitmask, mask_start):  # type: ignore[no-untyped-def]
    """Return a logit with its bias, or -inf where its token is forbidden."""
    if 0 <= column < length:
        if is_given(bias):
            value = float32(value + bias[column])
        if is_given(token_bitmask):
            word = uint32(token_bitmask[mask_start + int64(column >> 5)])
            value = value if (word >> uint32(column & 31)) & uint32(1) else -INFINITY
    return value


@device_routine
def numbers_of(quad, column, logits, bias, token_bitmask, mask_start):  # type: ignore[no-untyped-def]
    """Four float32 of a quad, biased and masked."""
    a, b, c, d = quad_floats(logits, quad)
    if is_given(bias) or is_given(token_bitmask):
        length = int32(logits.shape[2])
        a = adjusted(a, column, length, bias, token_bitmask, mask_start)
        b = adjusted(b, int32(column + 1), length, bias, token_bitmask, mask_start)
        c = adjusted(c, int32(column + 2), length, bias, token_bitmask, mask_start)
        d = adjusted(d, int32(column + 3), length, bias, token_bitmask, mask_start)
    return a, b, c, d


@device_routine
def enters(value, column, length, threshold):  # type: ignore[no-untyped-def]
    """Whether a number is above the threshold, or there is none, and within its row."""
    return int32(not value <= threshold and uint32(column) < uint32(length))


@device_routine
def scan_quad(  # type: ignore[no-untyped-def]
    numbers, column, length, capacity, threshold, terms, scale, s_state, s_keys
):
    """Let the quad's numbers above the threshold enter; return the others' sum of exponentials, float32.

    Counts those that find no room as well. Says in the block's state if a number is none at all.
    """
    a, b, c, d = numbers
    # NaN if one is, so that NaN is above every threshold, and all above one that is NaN.
    largest = maximum(maximum(a, b), maximum(c, d))
    if not largest <= threshold:
        if largest < INFINITY:
            a_enters = enters(a, column, length, threshold)
            b_enters = enters(b, int32(column + 1), length, threshold)
            c_enters = enters(c, int32(column + 2), length, threshold)
            d_enters = enters(d, int32(column + 3), length, threshold)
            added = int32(int32(a_enters + b_enters) + int32(c_enters + d_enters))
            place = uint32(cuda.atomic.add(s_state, COUNT, added))
            if uint32(place + uint32(added)) <= uint32(capacity):
                if a_enters:
                    s_keys[place] = candidate_key(a, column)
                place = uint32(place + uint32(a_enters))
                if b_enters:
                    s_keys[place] = candidate_key(b, int32(column + 1))
                place = uint32(place + uint32(b_enters))
                if c_enters:
                    s_keys[place] = candidate_key(c, int32(column + 2))
                place = uint32(place + uint32(c_enters))
                if d_enters:
                    s_keys[place] = candidate_key(d, int32(column + 3))
        else:
            s_state[BAD] = 1
        a = a if a <= threshold else -INFINITY
        b = b if b <= threshold else -INFINITY
        c = c if c <= threshold else -INFINITY
        d = d if d <= threshold else -INFINITY
    left = float32(exponential(a, terms, scale) + exponential(b, terms, scale))
    right = float32(exponential(c, terms, scale) + exponential(d, terms, scale))
    return float32(left + right)


@device_routine
def count_of_all(s_state):  # type: ignore[no-untyped-def]
    """Candidates that have entered, the same for all threads; the block takes part."""
    cuda.syncthreads()
    count = s_state[COUNT]
    cuda.syncthreads()  # all have read it, so that more can enter
    return int32(count)


@device_routine
def temperature_of(temperatures, default_temperature, request):  # type: ignore[no-untyped-def]
    """Temperature of a request, float64, and whether it is in range; 1 where it is not."""
    temperature = float32(temperatures[request] if is_given(temperatures) else default_temperature)
    # In float32, where each limit is the nearest number to what it is called.
    is_right = temperature >= float32(LOWEST_TEMPERATURE) and temperature <= float32(HIGHEST_TEMPERATURE)
    return float64(temperature if is_right else float32(1)), is_right


def scan_logits_kernel(  # type: ignore[no-untyped-def]
    logits,  # float32, float16 or bfloat16 [B, L, V]
    temperatures,  # float32 [B], or not given, as for the next two
    token_bitmask,  # uint32 [rows, words], flat
    bias,  # float32 [V]
    default_temperature,  # float32
    rows_per_mask,  # int32: 1, or L where a request's positions share a row of the mask
    misalignment,  # int32: numbers from a quad's multiple to the first logit
    row_tiles,  # int32: tiles that cover a row
    wanted,  # int32: candidates to keep of each piece
    growth,  # int32: candidates that enter beyond them before the threshold rises
    workspace,  # int64 [pieces, HEADER + wanted]
):
    thread = int32(cuda.threadIdx.x)
    depth, length = int32(logits.shape[1]), int32(logits.shape[2])
    shared = split_shared()
    s_state, _, s_bound, _, s_scale, s_sums, s_keys = shared
    limit = int32(wanted + growth)
    capacity = int32(limit + TILE)
    tiles = int64(logits.shape[0]) * int64(depth) * int64(row_tiles)
    begin = int32(int64(cuda.blockIdx.x) * tiles // int64(cuda.gridDim.x))
    end = int32((int64(cuda.blockIdx.x) + 1) * tiles // int64(cuda.gridDim.x))
    while begin < end:
        row = int32(uint32(begin) // uint32(row_tiles))
        tile = int32(begin - row * row_tiles)
        last = int32(min(row_tiles, tile + end - begin))
        begin = int32(begin + last - tile)
        request = uint32(row) // uint32(depth)
        temperature, _ = temperature_of(temperatures, default_temperature, request)
        scale = exponent_scale(temperature)
        start = int64(row) * int64(length)
        mask_start = int64(uint32(row) // uint32(rows_per_mask)) * int64((length + 31) >> 5)
        # Quads begin at multiples of their size: up to three numbers before the row's first.
        skipped = int32((misalignment + int32(start & int64(3))) & 3)
        offset = int32(4 * thread - skipped)
        begin_piece(shared, row + int32(cuda.blockIdx.x), temperature)
        count = int32(0)
        piece_start = tile
        strides = int32(1)
        # Strides that begin from `careful_end` to `last_stride` are within the row, and need no care.
        careful_end = int32(skipped > 0)
        last_stride = int32(min(last, int32(uint32(length + skipped) // uint32(TILE))) - STRIDE)
        while tile < last:
            threshold = s_bound[THRESHOLD]
            terms = s_bound[ORIGIN], s_bound[FLOOR], s_bound[ROUNDER]
            column = int32(tile * TILE + offset)
            place = start + int64(column)
            before, first = count, tile
            is_near = threshold == threshold and s_bound[ORIGIN] == float32(0)
            if not is_near or tile < careful_end or tile > last_stride:
                quad = load_quad_within(logits, place, column, length)
                numbers = numbers_of(quad, column, logits, bias, token_bitmask, mask_start)
                total = float64(
                    scan_quad(numbers, column, length, capacity, threshold, terms, scale, s_state, s_keys)
                )
                tile = int32(tile + 1)
                count = count_of_all(s_state)
                if threshold > -INFINITY:
                    s_sums[uint32(thread)] += total
            else:
                # No bound is far, so that exponentials need no other origin.
                near_terms = float32(0), s_bound[FLOOR], s_bound[ROUNDER]
                quad_0 = load_quad(logits, place)
                quad_1 = load_quad(logits, place + TILE)
                quad_2 = load_quad(logits, place + 2 * TILE)
                quad_3 = load_quad(logits, place + 3 * TILE)
                while tile <= last_stride and count <= limit:
                    before, first = count, tile
                    total = float64(0)
                    look = int32(min(last_stride, int32(tile + STRIDE * (strides - 1))))
                    while tile <= look:
                        # Each quad's registers take the next stride's as soon as they are free, not sooner:
                        # a load into others would be waited for, to move it.
                        tile = int32(tile + STRIDE)
                        if tile <= last_stride:
                            place = place + STRIDE * TILE
                        numbers = numbers_of(quad_0, column, logits, bias, token_bitmask, mask_start)
                        total_0 = scan_quad(
                            numbers, column, NO_END, capacity, threshold, near_terms, scale, s_state, s_keys
                        )
                        quad_0 = load_quad(logits, place)
                        column = int32(column + TILE)
                        numbers = numbers_of(quad_1, column, logits, bias, token_bitmask, mask_start)
                        total_1 = scan_quad(
                            numbers, column, NO_END, capacity, threshold, near_terms, scale, s_state, s_keys
                        )
                        quad_1 = load_quad(logits, place + TILE)
                        column = int32(column + TILE)
                        left = float32(total_0 + total_1)
                        numbers = numbers_of(quad_2, column, logits, bias, token_bitmask, mask_start)
                        total_2 = scan_quad(
                            numbers, column, NO_END, capacity, threshold, near_terms, scale, s_state, s_keys
                        )
                        quad_2 = load_quad(logits, place + 2 * TILE)
                        column = int32(column + TILE)
                        numbers = numbers_of(quad_3, column, logits, bias, token_bitmask, mask_start)
                        total_3 = scan_quad(
                            numbers, column, NO_END, capacity, threshold, near_terms, scale, s_state, s_keys
                        )
                        quad_3 = load_quad(logits, place + 3 * TILE)
                        column = int32(column + TILE)
                        total += float64(float32(left + float32(total_2 + total_3)))
                    count = count_of_all(s_state)
                    if count <= capacity and threshold > -INFINITY:
                        s_sums[uint32(thread)] += total
                # What was loaded beyond is loaded again, so that no registers wait for it meanwhile.
            if count > capacity:
                # Not all that entered found room: the same again, with care.
                if thread == 0:
                    s_state[COUNT] = before
                count = before
                careful_end = tile
                tile = first
                cuda.syncthreads()
            elif count > (limit if tile < last else wanted):
                slack = int32(growth >> SLACK_SHIFT) if tile < last else int32(0)
                count = raise_threshold(shared, wanted, slack)
                # Of half as many numbers as there were, about half as many enter as stayed.
                strides = int32(min(STRIDES, max(1, (tile - piece_start) // (2 * STRIDE))))
        piece = uint32(s_state[PIECE])
        for rank in range(uint32(thread), uint32(wanted), uint32(THREADS)):
            key = s_keys[uint32(rank)] if uint32(rank) < uint32(count) else uint64(0)
            workspace[piece, uint32(uint32(rank) + uint32(HEADER))] = int64(key)
        total = sum_over_block(s_sums)
        if thread == 0:
            workspace[piece, 0] = double_bits(total)
            workspace[piece, 1] = double_bits(s_scale[REFERENCE])
            workspace[piece, 2] = int64(s_state[BAD])
        cuda.syncthreads()


@device_routine
def sort_keys(s_keys, size):  # type: ignore[no-untyped-def]
    """Sort keys, best first, by a bitonic network; `size` is a power of two. The block takes part."""
    one = uint32(1)
    width = uint32(2)
    while width <= size:
        stride = uint32(width >> one)
        while stride > uint32(0):
            for step in range(uint32(cuda.threadIdx.x), uint32(size >> one), uint32(THREADS)):
                pair = uint32(step)
                left = uint32(uint32(pair << one) - uint32(pair & uint32(stride - one)))
                right = uint32(left + stride)
                a, b = s_keys[left], s_keys[right]
                if (a < b) == (uint32(left & width) == uint32(0)):
                    s_keys[left] = b
                    s_keys[right] = a
            following = uint32(stride >> one) if stride > one else width
            # Pairs of nearer keys are all among the 64 that one warp sorts.
            if max(stride, following) > uint32(LANES):
                cuda.syncthreads()
            else:
                warp_sync()
            stride = uint32(stride >> one)
        width = uint32(width << one)
    cuda.syncthreads()  # few keys are one warp's alone, and all are to read them


@device_routine
def piece_of(tile, tiles, blocks):  # type: ignore[no-untyped-def]
    """Block of the first kernel that a tile belongs to."""
    return int32(((tile + 1) * int64(blocks) - 1) // tiles)


def merge_pieces_kernel(  # type: ignore[no-untyped-def]
    workspace,  # int64 [pieces, HEADER + wanted]
    temperatures,  # float32 [B], or not given
    default_temperature,  # float32
    blocks,  # int32: of the kernel before
    row_tiles,  # int32
    wanted,  # int32
    growth,  # int32
    log_probs,  # float32 [B, L, k]
    token_ids,  # int32 [B, L, k]
):
    thread = int32(cuda.threadIdx.x)
    row = int32(cuda.blockIdx.x)
    depth, k = int32(log_probs.shape[1]), int32(log_probs.shape[2])
    request, position = row // depth, row % depth
    shared = split_shared()
    s_state, _, _, _, s_scale, s_sums, s_keys = shared
    temperature, is_right = temperature_of(temperatures, default_temperature, request)
    tiles = int64(log_probs.shape[0]) * int64(depth) * int64(row_tiles)
    first_tile = int64(row) * int64(row_tiles)
    first_piece = uint32(row + piece_of(first_tile, tiles, blocks))
    end_piece = uint32(row + piece_of(first_tile + int64(row_tiles - 1), tiles, blocks) + 1)
    begin_piece(shared, first_piece, temperature)

    # Ranks that a piece has not got are keys below all others.
    offered = uint32((end_piece - first_piece) * uint32(wanted))
    taken = uint32(0)
    count = uint32(0)
    while taken < offered:
        room = uint32(uint32(wanted + growth + TILE) - count)
        end = uint32(min(offered, uint32(taken + room)))
        for place in range(uint32(taken + uint32(thread)), end, uint32(THREADS)):
            piece = uint32(first_piece + uint32(place) // uint32(wanted))
            rank = uint32(uint32(place) % uint32(wanted))
            key = uint64(workspace[piece, uint32(rank + uint32(HEADER))])
            s_keys[uint32(count + uint32(place) - taken)] = key
        count = uint32(count + end - taken)
        taken = end
        if thread == 0:
            s_state[COUNT] = int32(count)
        cuda.syncthreads()
        # A few more are sorted sooner than told apart.
        if count > max(uint32(wanted), uint32(THREADS)):
            count = uint32(raise_threshold(shared, wanted, int32(0)))
        cuda.syncthreads()

    padded = uint32(1)
    while padded < count:
        padded = uint32(padded << uint32(1))
    for place in range(uint32(count + uint32(thread)), padded, uint32(THREADS)):
        s_keys[uint32(place)] = uint64(0)
    for piece in range(uint32(first_piece + uint32(thread)), end_piece, uint32(THREADS)):
        if workspace[uint32(piece), 2] != int64(0):
            s_state[BAD] = 1
    cuda.syncthreads()
    sort_keys(s_keys, padded)

    best = key_value(s_keys[0])
    is_row = s_state[BAD] == 0 and is_right
    log_sum: Any = float64(0)
    if is_row and best > -INFINITY:
        others = relative(s_sums[uint32(thread)], s_scale[REFERENCE], best, temperature)
        for piece in range(uint32(first_piece + uint32(thread)), end_piece, uint32(THREADS)):
            piece_sum = double_of_bits(workspace[uint32(piece), 0])
            others += relative(piece_sum, double_of_bits(workspace[uint32(piece), 1]), best, temperature)
        for place in range(uint32(thread + 1), count, uint32(THREADS)):
            others += math.exp(scaled_distance(key_value(s_keys[uint32(place)]), best, temperature))
        s_sums[uint32(thread)] = others
        log_sum = math.log1p(sum_over_block(s_sums))
    for place in range(uint32(thread), uint32(k), uint32(THREADS)):
        key = s_keys[uint32(place)]
        value = key_value(key)
        log_prob = float32(np.nan)
        if is_row:
            log_prob = -INFINITY
            if value > -INFINITY:
                log_prob = float32(scaled_distance(value, best, temperature) - log_sum)
        log_probs[request, position, uint32(place)] = log_prob
        token_ids[request, position, uint32(place)] = int32(~uint32(key)) if is_row else int32(place)


_LOGITS = ("float32", "float16", "uint16")
_GIVEN = {False: ("int32", "int32", "int32"), True: ("float32", "uint32", "float32")}
SCAN_LOGITS = Kernel(
    scan_logits_kernel,
    tuple(
        f"void({logits}[:, :, ::1], {temperatures}[::1], {bitmask}[::1], {bias}[::1], "
        "float32, int32, int32, int32, int32, int32, int64[:, ::1])"
        for logits in _LOGITS
        for temperatures, bitmask, bias in _GIVEN.values()
    ),
    THREADS,
    BLOCKS_PER_PROCESSOR,
)
MERGE_PIECES = Kernel(
    merge_pieces_kernel,
    tuple(
        f"void(int64[:, ::1], {temperatures}[::1], float32, int32, int32, int32, int32, "
        "float32[:, :, ::1], int32[:, :, ::1])"
        for temperatures in ("int32", "float32")
    ),
    THREADS,
)


class Plan(NamedTuple):
    """How the rows are cut; see the kernels' arguments of the same names."""

    blocks: int
    row_tiles: int
    wanted: int
    growth: int


def _plan(rows: int, vocabulary: int, k: int, has_aligned_rows: bool, processors: int) -> Plan:
    # Of one candidate there is no telling how far below it the rest of the row is, of two there is.
    wanted = max(k, 2)
    growth = max(LEAST_GROWTH, int(GROWTH * wanted))
    row_tiles = -(-(vocabulary + (0 if has_aligned_rows else 3)) // TILE)
    piece_tiles = max(STRIDE, PIECE_SHARE * wanted // TILE)
    blocks = min(processors * BLOCKS_PER_PROCESSOR, -(-rows * row_tiles // piece_tiles))
    return Plan(blocks, row_tiles, wanted, growth)


def draft_topk_workspace_shape(
    batch: int, depth: int, vocabulary: int, k: int, device_id: int | None = None
) -> tuple[int, int]:
    """Shape of the int64 workspace that `draft_topk` takes for logits [batch, depth, vocabulary].

    Parameters
    ----------
    batch, depth, vocabulary, k : int
    device_id : int, optional
        The logits' device, whose multiprocessors count; by default the current one.
    """
    check_count("batch", batch, 0, np.iinfo(np.int32).max)
    check_count("depth", depth, 1, np.iinfo(np.int32).max)
    check_count("vocabulary", vocabulary, 1, MAX_VOCABULARY)
    check_count("k", k, 1, min(vocabulary, MAX_K))
    with device_context(device_id):
        plan = _plan(batch * depth, vocabulary, k, False, multiprocessors())
    # A piece begins with a row or with a block.
    return max(0, batch * depth + plan.blocks - 1), HEADER + plan.wanted


def draft_topk(
    logits: Array,
    k: int,
    *,
    temperature: float | Array = 1.0,
    token_bitmask: Array | None = None,
    bias: Array | None = None,
    workspace: Array | None = None,
    out: DraftCandidates | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> DraftCandidates:
    """Find the `k` best tokens of each position, sorted, and their log-probs.

    The log-probs are those of ``log_softmax((logits + bias) / temperature)`` over the allowed tokens,
    in float32, within 2 units in the last place of their value in real numbers; ``logits + bias`` is
    rounded to float32. Tokens are ordered by that sum, not by its quotient, so that a temperature makes
    no ties; of equal ones (0 and -0 among them) the smaller id comes first. Tokens forbidden or of
    logit -inf have log-prob -inf, and come last in order of their ids; a row of nothing else is -inf
    throughout, of which `build_tree` makes the status ``NO_CANDIDATE`` in the first row.

    A row that is no distribution, since it has NaN or +inf at an allowed token or its temperature is
    out of range, has log-prob NaN and ids 0 to k - 1: `build_tree` gives it the status ``NAN``. The
    other rows are untouched.

    Deterministic: the same call gives the same bits on the same kind of device. The same row in another
    batch has the same ids, and log-probs that may differ in the last place.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [B, L, V]
        V is at most 262144.
    k : int
        Candidates a position: 1 to 1024, at most V.
    temperature : float or float32 [B]
        1e-30 to 1e30; an array gives each request its own. Rounded to float32.
    token_bitmask : uint32 or int32 [B, L, ceil(V / 32)] or [B, ceil(V / 32)], optional
        Bit ``v % 32`` of word ``v // 32`` is set where token v is allowed, as in xgrammar; without L
        it holds for all positions of the request.
    bias : float32 [V], optional
        Added to the logits; -inf forbids a token.
    workspace : int64 of shape `draft_topk_workspace_shape`, optional
        Memory on the device for the call's own use, of any content. Allocated by default. Calls that
        may run at the same time need one each.
    out : DraftCandidates, optional
        Arrays of the right shapes to write into.
    stream
        Stream to launch on; by default the current one of the logits' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays as those of host arrays are; synchronises.

    Returns
    -------
    DraftCandidates
        Numpy arrays for host arrays, after synchronising; otherwise arrays of the same library, with no
        synchronisation.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; a number out of range; for host arrays, and
        with `validate`, also logits that are NaN or +inf where they are allowed, a bias that is, and
        temperatures out of range.
    BackendError
        No device for the CUDA backend.
    """
    has_one_temperature = isinstance(temperature, int | float | np.integer | np.floating)
    placement, views = gather(
        logits=logits,
        temperature=None if has_one_temperature else temperature,
        token_bitmask=token_bitmask,
        bias=bias,
    )
    _check_shapes(views)
    k = check_count("k", k, 1, min(views["logits"].shape[2], MAX_K))
    default = _check_temperature(temperature) if has_one_temperature else 1.0
    if out is not None and not isinstance(out, DraftCandidates):
        raise ArgumentError("out", type(out).__name__, "a numba_ddtree.DraftCandidates")
    runs_reference = use_reference(backend, placement)
    if placement.on_host or validate:
        host: list[Any] = [None if view is None else to_host(name, view) for name, view in views.items()]
        _check_values(*host)
        if runs_reference:
            result = DraftCandidates(*reference.draft_topk(host[0], k, *_with_defaults(host, default)))
            if out is None:
                return result
            copy_to_outputs(result._asdict(), out._asdict())
            return out
    return _launch(placement, views, k, default, workspace, out, stream)


def _check_shapes(views: dict[str, Any]) -> None:
    """Check every view's shape and dtype."""
    check_array("logits", views["logits"], FLOAT_DTYPES, B=None, L=None, V=None)
    batch, depth, vocabulary = views["logits"].shape
    if vocabulary > MAX_VOCABULARY:
        raise ArgumentError("logits", f"V = {vocabulary}", f"a vocabulary of at most {MAX_VOCABULARY}")
    if views["temperature"] is not None:
        check_array("temperature", views["temperature"], (np.float32,), B=batch)
    bitmask = views["token_bitmask"]
    if bitmask is not None:
        positions = {"L": depth} if len(bitmask.shape) == 3 else {}
        words = -(-vocabulary // 32)
        check_array("token_bitmask", bitmask, (np.uint32, np.int32), B=batch, **positions, words=words)
    if views["bias"] is not None:
        check_array("bias", views["bias"], (np.float32,), V=vocabulary)


def _check_temperature(temperature: Any) -> float:
    value = check_scalar("temperature", temperature)
    if not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
        raise ArgumentError("temperature", value, _TEMPERATURE_RANGE)
    return value


_TEMPERATURE_RANGE = f"a number from {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"


def _check_values(
    logits: NDArray[Any],
    temperatures: NDArray[np.float32] | None,
    bitmask: NDArray[Any] | None,
    bias: NDArray[np.float32] | None,
) -> None:
    """Raise for the first value that would make a row none."""
    if temperatures is not None:
        is_bad = ~((temperatures >= LOWEST_TEMPERATURE) & (temperatures <= HIGHEST_TEMPERATURE))
        for index in first_where(is_bad):
            raise ArgumentError(at("temperature", index), temperatures[index], _TEMPERATURE_RANGE)
    is_allowed = True if bitmask is None else reference.allowed_tokens(bitmask, logits.shape)
    named: list[tuple[str, NDArray[Any], NDArray[np.bool_]]] = [
        ("logits", logits, ~(logits < np.inf) & is_allowed)
    ]
    if bias is not None:
        named.append(("bias", bias, ~(bias < np.inf)))
    for name, array, is_bad in named:
        for index in first_where(is_bad):
            raise ArgumentError(at(name, index), array[index], "a number or -inf, not NaN and not +inf")


def _with_defaults(host: list[Any], temperature: float) -> list[Any]:
    """Return the reference's last arguments."""
    logits, temperatures, bitmask, bias = host
    if temperatures is None:
        temperatures = np.full(logits.shape[0], temperature, np.float32)
    return [temperatures, bitmask, bias]


def _flat_words(bitmask: Any) -> Any:
    """View a mask's words as uint32, in one row."""
    if isinstance(bitmask, DeviceView):
        return replace(bitmask, shape=(math.prod(bitmask.shape),), strides=(4,), dtype=np.dtype(np.uint32))
    return bitmask.view(np.uint32).reshape(-1)


def _misalignment(logits: Any) -> int:
    """Numbers from the last multiple of a quad's size to the first logit."""
    if not isinstance(logits, DeviceView):  # in the simulator
        return 0
    return logits.pointer // logits.dtype.itemsize % 4


def _launch(
    placement: Placement,
    views: dict[str, Any],
    k: int,
    default_temperature: float,
    workspace: Array | None,
    out: DraftCandidates | None,
    stream: StreamLike,
) -> DraftCandidates:
    batch, depth, vocabulary = views["logits"].shape
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(DraftCandidates._fields, (batch, depth, k))
    bitmask = views["token_bitmask"]
    with Transfer(placement, stream) as transfer:
        log_probs, token_ids = transfer.outputs(shapes, {"log_probs": np.float32, "token_ids": np.int32}, out)
        given = transfer.input(views["logits"])
        temperatures = transfer.input(views["temperature"])
        misalignment = _misalignment(given)
        has_aligned_rows = misalignment == 0 and vocabulary % 4 == 0
        plan = _plan(batch * depth, vocabulary, k, has_aligned_rows, multiprocessors())
        pieces = _workspace(transfer, views["logits"].shape, k, workspace)
        shared_bytes = shared_bytes_of(plan.wanted, plan.growth)
        transfer.launch(
            SCAN_LOGITS,
            plan.blocks,
            given,
            temperatures,
            transfer.input(None if bitmask is None else _flat_words(bitmask)),
            transfer.input(views["bias"]),
            np.float32(default_temperature),
            np.int32(depth if bitmask is not None and len(bitmask.shape) == 2 else 1),
            np.int32(misalignment),
            *map(np.int32, (plan.row_tiles, plan.wanted, plan.growth)),
            pieces,
            shared_bytes=shared_bytes,
        )
        transfer.launch(
            MERGE_PIECES,
            batch * depth,
            pieces,
            temperatures,
            np.float32(default_temperature),
            *map(np.int32, plan),
            log_probs,
            token_ids,
            shared_bytes=shared_bytes,
        )
        return DraftCandidates(**transfer.results())


def _workspace(transfer: Transfer, shape: tuple[int, ...], k: int, workspace: Array | None) -> Any:
    """Return the caller's workspace as the kernels' argument, or a new one."""
    batch, depth, vocabulary = shape
    wanted = draft_topk_workspace_shape(batch, depth, vocabulary, k)
    if workspace is None:
        return transfer.scratch(wanted, np.int64)
    placement, views = gather(workspace=workspace)
    if placement.on_host:
        raise ArgumentError("workspace", "an array on the host", "an array on the device")
    check_array("workspace", views["workspace"], (np.int64,), pieces=wanted[0], words=wanted[1])
    return views["workspace"]
