"""A draw from a row of logits by the Gumbel-max trick, in one pass over it.

The noise of every token is made, but of its score, which takes two logarithms in float64, only what float32
can tell; scores that this cannot tell from the best, of one token as a rule, are computed exactly at the
end.
"""

from __future__ import annotations

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int32, int64, uint32, uint64
from numba_ddtree.device.bits import order_key
from numba_ddtree.device.logit_keys import key_value, value_key
from numba_ddtree.device.logit_rows import STEP, load_words, masked, read_one
from numba_ddtree.device.philox import philox
from numba_ddtree.device.rounded import (
    about_log2,
    gumbel,
    larger32,
    over,
    plus,
    reciprocal32,
    smaller32,
    times32,
)
from numba_ddtree.device.rows import MINUS_INFINITY, kept_eight, largest, numbers_of
from numba_ddtree.refs.token_choice import LN2, NO_TOKEN

LARGEST = np.float32(2.0**126)
MAX_GUMBEL = np.float32(22.875)  # above 33 ln 2, the noise of the word 0
SMALL_WORDS = 1 << 22  # of uniforms below 2^-10
LOWEST_SCORE = np.int64(-(2**63))  # below the key of every score
NO_WINNER = np.uint32(0xFFFFFFFF)
FLOOR, HAS_NAN, WINNER = range(3)


@device_routine
def random_word(token, position, id_low, id_high, seed_low, seed_high):  # type: ignore[no-untyped-def]
    """Random word of one token: `numba_ddtree.refs.token_choice.random_bits`."""
    words = philox(uint32(token >> uint32(2)), position, id_low, id_high, seed_low, seed_high)
    word = uint32(token & uint32(3))
    pair = (words[2], words[3]) if word >> uint32(1) else (words[0], words[1])
    return pair[1] if word & uint32(1) else pair[0]


@device_routine
def about_gumbel(bits):  # type: ignore[no-untyped-def]
    """Gumbel noise of a random word, float32, to within 2^-10.

    With u = (bits + 1/2) / 2^32: -log(1 - u) is u + u^2 / 2 to 4e-7 of itself where u is below 2^-10, and
    elsewhere at least 2^-10, which the hardware's logarithm and the rounding of 1 - u miss by 3e-4 of it.
    """
    uniform = (float32(bits) + float32(0.5)) * float32(2**-32)
    complement = (float32(uint32(~bits)) + float32(0.5)) * float32(2**-32)
    exponential = (
        uniform + uniform * uniform * float32(0.5)
        if bits < uint32(SMALL_WORDS)
        else about_log2(complement) * float32(-LN2)
    )
    return about_log2(exponential) * float32(-LN2)


@device_routine
def most_gumbel(bits):  # type: ignore[no-untyped-def]
    """Bound on the Gumbel noise of a random word, to 1e-5: -log u, since -log(1 - u) is above u."""
    return (float32(32) - about_log2(float32(bits) + float32(0.5))) * float32(LN2)


@device_routine
def scaled_logit(value, inverse_temperature):  # type: ignore[no-untyped-def]
    """``value / T`` in float32, or the nearest number up to 2^126.

    The bounds of what lies beyond are wrong, but on its own side of every floor there can be.
    """
    scaled = times32(value, inverse_temperature)
    return smaller32(larger32(scaled, float32(-LARGEST)), float32(LARGEST))


@device_routine
def slack(scaled):  # type: ignore[no-untyped-def]
    """Bound on what a score in float32, a scaled logit plus noise, differs from the exact one by."""
    return abs(scaled) * float32(2**-20) + float32(2**-9)


@device_routine
def bounds(value, bits, inverse_temperature, upper, lower):  # type: ignore[no-untyped-def]
    """Raise an upper and a lower bound of the best score to those of one token's."""
    scaled = scaled_logit(value, inverse_temperature)
    score = scaled + about_gumbel(bits)
    return larger32(upper, score + slack(scaled)), larger32(lower, score - slack(scaled))


@device_routine
def draw_from_row(  # type: ignore[no-untyped-def]
    logits,
    start,
    is_aligned,
    token_bitmask,
    mask_start,
    has_cut,
    cut_value,
    cut_token,
    temperature,
    seed,
    request_id,
    position,
    s_words,
    s_score,
):
    """Draw a token from a row, of those up to the cut in the order of `place_key`, for the whole block.

    Every thread keeps the vector of eight tokens with the largest upper bound of a score, and the
    largest bound of its others; the block keeps a floor, the largest lower bound. What reaches the floor
    in the end is scored exactly: a thread's vector, or where another may win, all of them again.
    """
    thread = uint32(cuda.threadIdx.x)
    vectors = uint32((logits.shape[2] + 7) // 8)
    inverse = reciprocal32(temperature)
    seed_low, seed_high = uint32(seed & int64(0xFFFFFFFF)), uint32(uint64(seed) >> uint64(32))
    id_low, id_high = uint32(request_id & int64(0xFFFFFFFF)), uint32(uint64(request_id) >> uint64(32))
    position_word = uint32(position)
    if thread == 0:
        s_words[FLOOR] = value_key(MINUS_INFINITY)
        s_words[HAS_NAN] = uint32(0)
        s_words[WINNER] = NO_WINNER
        s_score[0] = LOWEST_SCORE
    cuda.syncthreads()
    best_bound = other_bound = MINUS_INFINITY
    best_vector = uint32(0)
    vector = thread
    words = load_words(logits, start, min(vector, uint32(vectors - uint32(1))), is_aligned)
    while vector < vectors:
        # The next load is under way while this vector's noise is made; the last one is for nothing.
        following = uint32(vector + STEP)
        upcoming = load_words(logits, start, following if following < vectors else vector, is_aligned)
        values = masked(numbers_of(logits, words), vector, token_bitmask, mask_start)
        if has_cut:
            values = kept_eight(values, uint32(vector * uint32(8)), cut_value, cut_token)
        top = largest(values)
        if top != top:
            s_words[HAS_NAN] = uint32(1)
        floor = key_value(s_words[FLOOR])
        scaled = scaled_logit(top, inverse)
        reach = scaled + slack(scaled)
        if top > MINUS_INFINITY and not reach + MAX_GUMBEL < floor:
            group = uint32(vector * uint32(2))
            a = philox(group, position_word, id_low, id_high, seed_low, seed_high)
            b = philox(uint32(group + uint32(1)), position_word, id_low, id_high, seed_low, seed_high)
            least = min(min(min(a[0], a[1]), min(a[2], a[3])), min(min(b[0], b[1]), min(b[2], b[3])))
            if not reach + most_gumbel(least) < floor:
                upper = lower = MINUS_INFINITY
                for place in range(8):
                    word = a[place & 3] if place < 4 else b[place & 3]
                    upper, lower = bounds(values[place], word, inverse, upper, lower)
                other_bound = larger32(other_bound, smaller32(upper, best_bound))
                best_vector = vector if upper > best_bound else best_vector
                best_bound = larger32(best_bound, upper)
                if lower > floor:
                    cuda.atomic.max(s_words, FLOOR, value_key(lower))
        words = upcoming
        vector = following
    cuda.syncthreads()
    floor = key_value(s_words[FLOOR])
    best_score = LOWEST_SCORE
    winner = NO_WINNER
    if best_bound >= floor:
        is_unsure = other_bound >= floor
        vector = thread if is_unsure else best_vector
        end = vectors if is_unsure else uint32(best_vector + uint32(1))
        while vector < end:
            for place in range(8):
                token = uint32(uint32(vector * uint32(8)) + uint32(place))
                value = read_one(logits, start, token, token_bitmask, mask_start)
                is_out = value < cut_value or (value == cut_value and token > cut_token)
                if value > MINUS_INFINITY and not is_out:
                    bits = random_word(token, position_word, id_low, id_high, seed_low, seed_high)
                    upper, _ = bounds(value, bits, inverse, MINUS_INFINITY, MINUS_INFINITY)
                    if upper >= floor:
                        score = order_key(plus(over(float64(value), float64(temperature)), gumbel(bits)))
                        winner = token if score > best_score else winner
                        best_score = max(best_score, score)
            vector = uint32(vector + STEP)
        cuda.atomic.max(s_score, 0, best_score)
    cuda.syncthreads()
    if winner != NO_WINNER and best_score == s_score[0]:
        cuda.atomic.min(s_words, WINNER, winner)
    cuda.syncthreads()
    if s_words[HAS_NAN] or s_words[WINNER] == NO_WINNER:
        return int32(NO_TOKEN)
    return int32(s_words[WINNER])
