"""A block's candidates in shared memory: the best of a row, and the sum of those that have left.

Of numbers that come in, those above a threshold become candidates, at least as many as are wanted being
above or at it; whenever enough have entered, a radix search finds a higher threshold, and those below it
leave. What never enters is summed by its thread, as exponentials relative to the threshold; those that leave
are summed as integers, since they leave in no certain order, and everything else in a fixed one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

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
from numba_ddtree.device.exponentials import (
    LN_2,
    bound_terms,
    exponent_scale,
    exponential,
    power_of_two,
    scale_terms,
)
from numba_ddtree.device.floats import float_bits, float_of_bits
from numba_ddtree.device.optional import is_given
from numba_ddtree.device.shared import shared_from
from numba_ddtree.device.warp import LANES, warp_running_sum, warp_sync, warp_total
from numba_ddtree.launch import block_threads

# Within these, log2(e) / temperature and its rest are numbers of full precision in float32.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-30, 1e30

THREADS = block_threads(256)  # a power of two
TILE = THREADS * 4  # neighbouring numbers that a block looks at at a time, a quad a thread

BINS = 256
DIGIT_BITS = 8
# Words of a block's state: of its candidates, then of its piece, for the scan.
COUNT, KEPT, ABOVE, BIN, FILLED, BAD = range(6)
PIECE, START, LAST, CARE, FIRST, PACE, NEXT, FOLLOWING, END, SURE = range(6, 16)
STATE_WORDS = 16
THRESHOLD, ORIGIN, FLOOR, ROUNDER = range(4)  # of a block's bound
BOUND_WORDS = 4
TEMPERATURE, SCALE, WHOLE, FACTOR = range(4)  # of a block's scale
SCALE_WORDS = 4
WARPS = THREADS // LANES
# Where a block's shared arrays begin, in units of 8 bytes.
LEFT_AT = (STATE_WORDS + BINS + BOUND_WORDS) // 2
SCALE_AT = LEFT_AT + WARPS
SUMS_AT = SCALE_AT + SCALE_WORDS
KEYS_AT = SUMS_AT + THREADS
HEADER = 3  # words before a piece's keys in the workspace: sum, its reference, whether it has NaN or +inf
UNIT = 2.0**40  # of the integers that the sums of those that leave are made of
INFINITY = np.float32(np.inf)
LOWEST_ORDER = np.uint32(0x007FFFFF)  # of -inf


def capacity_of(wanted: int, growth: int) -> int:
    """Candidates that a block has room for: a tile may enter before it is seen that enough have."""
    return wanted + growth + TILE


def shared_bytes_of(wanted: int, growth: int) -> int:
    """Bytes of shared memory that `split_shared` makes arrays of."""
    return 8 * (KEYS_AT + capacity_of(wanted, growth))


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
        s_words,
        shared_from(s_words, int32(STATE_WORDS)),
        shared_from(s_floats, int32(STATE_WORDS + BINS)),
        shared_from(s_long, int32(LEFT_AT)),
        shared_from(s_doubles, int32(SCALE_AT)),
        shared_from(s_doubles, int32(SUMS_AT)),
        shared_from(s_keys, int32(KEYS_AT)),
    )


@device_routine
def begin_piece(shared, temperature):  # type: ignore[no-untyped-def]
    """Forget all candidates and sums; the block takes part. Returns the scale; see `scale_terms`."""
    s_state, _, s_bound, _, s_scale, s_sums, _ = shared
    thread = uint32(cuda.threadIdx.x)
    s_sums[thread] = 0.0
    if thread <= uint32(BAD):
        s_state[thread] = 0
    if thread == uint32(0):
        s_bound[THRESHOLD] = float32(np.nan)
        s_bound[ORIGIN] = s_bound[FLOOR] = s_bound[ROUNDER] = float32(0)
        s_scale[TEMPERATURE] = temperature
        s_scale[WHOLE] = 0.0
    cuda.syncthreads()
    # Of the shared temperature: a quotient of the kernel's own would be kept in registers throughout.
    scale = exponent_scale(s_scale[TEMPERATURE])
    if thread == uint32(0):
        s_scale[SCALE] = scale
    return scale_terms(scale)


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
        # Of a range the number of steps, of 64 bits, would be kept in registers throughout.
        place = thread
        while place < uint32(BINS):
            s_bins[place] = 0
            place = uint32(place + uint32(THREADS))
        cuda.syncthreads()
        place = thread
        while place < count:
            digits = uint64(s_keys[place] >> uint64(shift))
            if digits >> uint64(DIGIT_BITS) == prefix:
                cuda.atomic.add(s_bins, uint32(uint32(digits) & uint32(BINS - 1)), 1)
            place = uint32(place + uint32(THREADS))
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
def set_bound(s_bound, s_scale, bound):  # type: ignore[no-untyped-def]
    """Note a new threshold, what sums are relative to then, and what those before are multiplied by."""
    is_finite = bound > -INFINITY
    terms, whole = bound_terms(bound if is_finite else float32(0), s_scale[TEMPERATURE], s_scale[SCALE])
    # Without a threshold, or at -inf, the sum is nothing.
    factor: Any = float64(0)
    if s_bound[THRESHOLD] > -INFINITY:
        if s_bound[ORIGIN] == terms[0]:
            factor = power_of_two(s_scale[WHOLE] - whole)
        else:
            distance = (float64(s_bound[ORIGIN]) - float64(terms[0])) / s_scale[TEMPERATURE]
            factor = math.exp(distance + (s_scale[WHOLE] - whole) * LN_2)
    s_scale[FACTOR] = factor
    s_scale[WHOLE] = whole
    s_bound[THRESHOLD] = bound
    s_bound[ORIGIN], s_bound[FLOOR], s_bound[ROUNDER] = terms


@device_routine
def packed_reference(s_bound, s_scale):  # type: ignore[no-untyped-def]
    """Pack what sums are relative to, see `bound_terms`: a whole number above an origin's bits, int64."""
    return int64((int64(s_scale[WHOLE]) << int64(32)) | int64(float_bits(s_bound[ORIGIN])))


@device_routine
def unpacked_reference(packed):  # type: ignore[no-untyped-def]
    """Return the origin (float32) and the whole number (float64) that were packed."""
    origin = float_of_bits(uint32(uint64(packed) & uint64(0xFFFFFFFF)))
    return origin, float64(packed >> int64(32))


@device_routine
def raise_threshold(shared, wanted, slack):  # type: ignore[no-untyped-def]
    """Find a higher threshold, let go of what is below it and sum that; the block takes part.

    There are more candidates than `wanted`; so many, or up to `slack` more, stay. Returns their number.
    """
    s_state, s_bins, s_bound, s_left, s_scale, s_sums, s_keys = shared
    thread = uint32(cuda.threadIdx.x)
    edge = find_edge(s_state, s_bins, s_keys, wanted, slack)
    if thread == uint32(0):
        set_bound(s_bound, s_scale, key_value(edge))
        s_state[KEPT] = 0
    count = uint32(s_state[COUNT])
    scale = scale_terms(s_scale[SCALE])
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
        left += stay_or_leave(key_0, place_0, count, edge, terms, scale, s_state, s_keys)
        left += stay_or_leave(key_1, place_1, count, edge, terms, scale, s_state, s_keys)
        left += stay_or_leave(key_2, place_2, count, edge, terms, scale, s_state, s_keys)
        left += stay_or_leave(key_3, place_3, count, edge, terms, scale, s_state, s_keys)
        start = uint32(start + uint32(4 * THREADS))
    s_sums[thread] *= s_scale[FACTOR]
    left = warp_total(left)
    if thread % uint32(LANES) == uint32(0):
        s_left[uint32(thread // uint32(LANES))] = left
    cuda.syncthreads()
    if thread == uint32(0):
        s_state[COUNT] = s_state[KEPT]
        if s_bound[THRESHOLD] > -INFINITY:
            left = int64(0)
            for warp in range(uint32(WARPS)):
                left += s_left[uint32(warp)]
            s_sums[0] += float64(left) * (1.0 / UNIT)
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
