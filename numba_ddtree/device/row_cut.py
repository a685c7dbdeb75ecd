"""Where top-k and top-p cut a row of logits off: a radix selection, in several passes over the row."""

from __future__ import annotations

import math

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int32, int64, uint32, uint64
from numba_ddtree.device.logit_keys import TOKEN_BITS, place_key
from numba_ddtree.device.logit_rows import STEP, THREADS, read_eight
from numba_ddtree.device.rounded import mass, times
from numba_ddtree.device.rows import MINUS_INFINITY
from numba_ddtree.device.warp import LANES

DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
SUMS = THREADS + LANES


@device_routine
def add_weight(value, digit, by_mass, best, inverse_temperature, s_low, s_high):  # type: ignore[no-untyped-def]
    """Add a token's weight to a bin, which is 64 bits in two words."""
    if by_mass:
        weight = mass(value, best, inverse_temperature)
        low = uint32(weight & int64(0xFFFFFFFF))
        before = cuda.atomic.add(s_low, digit, low)
        carry = uint32(1) if before > uint32(~low) else uint32(0)
        high = uint32(uint32(weight >> int64(32)) + carry)
        if high > uint32(0):
            cuda.atomic.add(s_high, digit, high)
    else:
        cuda.atomic.add(s_low, digit, uint32(1))


@device_routine
def find_digit(s_low, s_high, s_sums, s_found, target, fraction):  # type: ignore[no-untyped-def]
    """Find the bin, from the last one down, in which the running sum of weights reaches the target.

    Leaves in `s_found`: the bin, the sum of those after it, its own weight, the target. A `fraction`
    below 1 makes the target of the total. A target that is not reached gives the bin -1.
    """
    thread = cuda.threadIdx.x
    share = BINS // THREADS
    own = int64(0)
    for place in range(thread * share, (thread + 1) * share):
        own += (int64(s_high[place]) << int64(32)) + int64(s_low[place])
    s_sums[thread] = own
    cuda.syncthreads()
    if thread < LANES:
        group = int64(0)
        for place in range(thread * (THREADS // LANES), (thread + 1) * (THREADS // LANES)):
            group += s_sums[place]
        s_sums[THREADS + thread] = group
    cuda.syncthreads()
    if thread == 0:
        if fraction < float64(1):
            total = int64(0)
            for lane in range(LANES):
                total += s_sums[THREADS + lane]
            target = max(int64(1), int64(math.ceil(times(fraction, float64(total)))))
        above = int64(0)
        lane = LANES - 1
        while lane >= 0 and above + s_sums[THREADS + lane] < target:
            above += s_sums[THREADS + lane]
            lane -= 1
        digit = int64(-1)
        weight = int64(0)
        if lane >= 0:
            part = (lane + 1) * (THREADS // LANES) - 1
            while above + s_sums[part] < target:
                above += s_sums[part]
                part -= 1
            digit = int64((part + 1) * share - 1)
            weight = (int64(s_high[digit]) << int64(32)) + int64(s_low[digit])
            while above + weight < target:
                above += weight
                digit -= 1
                weight = (int64(s_high[digit]) << int64(32)) + int64(s_low[digit])
        s_found[0] = digit
        s_found[1] = above
        s_found[2] = weight
        s_found[3] = target
    cuda.syncthreads()


@device_routine
def find_cut(  # type: ignore[no-untyped-def]
    logits,
    start,
    is_aligned,
    token_bitmask,
    mask_start,
    key_bits,
    lowest,
    by_mass,
    target,
    fraction,
    best,
    inverse_temperature,
    s_low,
    s_high,
    s_sums,
    s_found,
):
    """Find the least `place_key` of the fewest tokens, in order, whose weights reach a target.

    A radix selection, digit by digit from the top. A token weighs 1, or its mass, and those of a key
    below `lowest` take no part. Returns `lowest` where the target is not reached.
    """
    thread = uint32(cuda.threadIdx.x)
    vectors = uint32((logits.shape[2] + 7) // 8)
    prefix = uint64(0)
    shift = int32(key_bits + TOKEN_BITS)
    while shift > 0:
        width = min(shift, int32(DIGIT_BITS))
        chosen = uint64(shift)
        shift = int32(shift - width)
        for place in range(int32(thread), BINS, THREADS):
            s_low[place] = uint32(0)
            s_high[place] = uint32(0)
        cuda.syncthreads()
        vector = thread
        while vector < vectors:
            values = read_eight(logits, start, vector, is_aligned, token_bitmask, mask_start)
            for place in range(8):
                value = values[place]
                if value > MINUS_INFINITY:
                    key = place_key(value, uint32(uint32(vector * uint32(8)) + uint32(place)), key_bits)
                    if key >= lowest and key >> chosen == prefix >> chosen:
                        digit = int32((key >> uint64(shift)) & uint64((1 << width) - 1))
                        add_weight(value, digit, by_mass, best, inverse_temperature, s_low, s_high)
            vector = uint32(vector + STEP)
        cuda.syncthreads()
        find_digit(s_low, s_high, s_sums, s_found, target, fraction)
        if s_found[0] < 0:
            return lowest
        prefix |= uint64(s_found[0]) << uint64(shift)
        target = s_found[3] - s_found[1]
        fraction = float64(1)
        is_whole = s_found[2] == target
        cuda.syncthreads()  # all have read what the next pass overwrites
        if is_whole:
            break
    return prefix


@device_routine
def cut_of_row(  # type: ignore[no-untyped-def]
    logits,
    start,
    is_aligned,
    token_bitmask,
    mask_start,
    key_bits,
    top_k,
    top_p,
    best,
    inverse_temperature,
    s_low,
    s_high,
    s_sums,
    s_found,
):
    """Find a `place_key` at which top-k, then top-p cut a row off: tokens of lower keys go."""
    cut = uint64(0)
    for is_top_p in range(2):
        if (top_p < float32(1)) if is_top_p else (top_k > 0):
            cut = find_cut(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                key_bits,
                cut,
                is_top_p,
                int64(top_k),
                float64(top_p) if is_top_p else float64(1),
                best,
                inverse_temperature,
                s_low,
                s_high,
                s_sums,
                s_found,
            )
    return cut
