"""The target's token at each node: the most probable one, or a draw by the Gumbel-max trick.

A block has a row of logits. The best token takes one pass over it. So does a draw: the noise of every
token is made, but of its score, which takes two logarithms in float64, only what float32 can tell; scores
that this cannot tell from the best, of one token as a rule, are computed exactly at the end. Top-k and
top-p first find the last token that stays, by a radix selection in several passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    FLOAT_DTYPES,
    TOKEN_DTYPES,
    DeviceView,
    StreamLike,
    at,
    check_array,
    check_count,
    check_indices,
    check_scalar,
    copy_to_outputs,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int32, int64, uint32, uint64
from numba_ddtree.device.bits import order_key
from numba_ddtree.device.floats import float_bits, float_of_bits
from numba_ddtree.device.philox import philox
from numba_ddtree.device.rounded import (
    about_log2,
    gumbel,
    larger32,
    mass,
    over,
    plus,
    reciprocal32,
    smaller32,
    times,
    times32,
)
from numba_ddtree.device.rows import (
    MINUS_INFINITY,
    NEIGHBOURS,
    allowed_eight,
    first_place,
    kept_eight,
    largest,
    load_eight,
    load_eight_within,
    load_within,
    maximum,
    numbers_of,
)
from numba_ddtree.device.warp import LANES, warp_max
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import token_choice as reference
from numba_ddtree.refs.token_choice import LN2, MIN_TEMPERATURE, NO_TOKEN
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

TOKEN_BITS = 18
MAX_VOCABULARY = 1 << TOKEN_BITS
KEY_BITS = {"float32": 32, "float16": 19, "bfloat16": 16}  # of a float32 that holds such a number

THREADS = block_threads(256)
STEP = np.uint32(THREADS)
DIGIT_BITS = 11
BINS = 1 << DIGIT_BITS
SUMS = THREADS + LANES

LARGEST = np.float32(2.0**126)
MAX_GUMBEL = np.float32(22.875)  # above 33 ln 2, the noise of the word 0
SMALL_WORDS = 1 << 22  # of uniforms below 2^-10
LOWEST_SCORE = np.int64(-(2**63))  # below the key of every score
NO_WINNER = np.uint32(0xFFFFFFFF)
FLOOR, HAS_NAN, WINNER = range(3)

RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "temperature": (
        lambda t: (t == 0) | ((t >= MIN_TEMPERATURE) & (t < np.inf)),
        "0, or a number from 1e-30",
    ),
    "top_k": (lambda k: k >= 0, "a number, not negative"),
    "top_p": (lambda p: (p >= 0) & (p <= 1), "a number from 0 to 1"),
    "positions": (lambda positions: positions >= 0, "a position, not negative"),
}


@device_routine
def load_words(logits, start, vector, is_aligned):  # type: ignore[no-untyped-def]
    """Words of the logits of eight tokens, -inf past the row's end."""
    first = uint32(vector * uint32(8))
    if is_aligned:
        return load_eight(logits, start, first)
    return load_eight_within(logits, start, first, uint32(logits.shape[2]))


@device_routine
def masked(values, vector, token_bitmask, mask_start):  # type: ignore[no-untyped-def]
    """Eight logits, -inf in place of those of tokens that the mask does not allow."""
    if token_bitmask.shape[0] == 0:
        return values
    first = uint32(vector * uint32(8))
    word = uint32(token_bitmask[mask_start + int64(first >> uint32(5))])
    return allowed_eight(values, uint32(word >> (first & uint32(31))))


@device_routine
def read_eight(logits, start, vector, is_aligned, token_bitmask, mask_start):  # type: ignore[no-untyped-def]
    """Logits of eight tokens as float32, -inf for those that are masked or past the row's end."""
    values = numbers_of(logits, load_words(logits, start, vector, is_aligned))
    return masked(values, vector, token_bitmask, mask_start)


@device_routine
def read_one(logits, start, token, token_bitmask, mask_start):  # type: ignore[no-untyped-def]
    """Logit of one token as float32, -inf if it is masked or past the row's end."""
    value = load_within(logits, start, token, uint32(logits.shape[2]))
    if value > MINUS_INFINITY and token_bitmask.shape[0] > 0:
        word = uint32(token_bitmask[mask_start + int64(token >> uint32(5))])
        value = value if (word >> (token & uint32(31))) & uint32(1) else MINUS_INFINITY
    return value


@device_routine
def value_key(value):  # type: ignore[no-untyped-def]
    """Map a float32 that is not NaN to a uint32 of the same order; both zeros to the same."""
    bits = float_bits(value + float32(0))
    return uint32(~bits) if bits >> uint32(31) else uint32(bits | uint32(0x80000000))


@device_routine
def key_value(key):  # type: ignore[no-untyped-def]
    """Inverse of `value_key`."""
    return float_of_bits(uint32(key & uint32(0x7FFFFFFF)) if key >> uint32(31) else uint32(~key))


@device_routine
def best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key):  # type: ignore[no-untyped-def]
    """Key of the best token, for the whole block: `value_key`, then the inverted token.

    0 where there is none above -inf, and the largest number where there is a NaN.
    """
    thread = uint32(cuda.threadIdx.x)
    vectors = uint32((logits.shape[2] + 7) // 8)
    if thread == 0:
        s_key[0] = uint64(0)
    cuda.syncthreads()
    best = MINUS_INFINITY
    best_vector = uint32(0)
    vector = thread
    if is_aligned and token_bitmask.shape[0] == 0:
        while uint32(vector + uint32(3) * STEP) < vectors:
            # Four loads in flight, before anything waits for the first.
            words0 = load_eight(logits, start, uint32(vector * uint32(8)))
            vector1 = uint32(vector + STEP)
            words1 = load_eight(logits, start, uint32(vector1 * uint32(8)))
            vector2 = uint32(vector1 + STEP)
            words2 = load_eight(logits, start, uint32(vector2 * uint32(8)))
            vector3 = uint32(vector2 + STEP)
            words3 = load_eight(logits, start, uint32(vector3 * uint32(8)))
            top0, top1 = largest(numbers_of(logits, words0)), largest(numbers_of(logits, words1))
            top2, top3 = largest(numbers_of(logits, words2)), largest(numbers_of(logits, words3))
            best_vector = vector if top0 > best else best_vector
            best = maximum(best, top0)
            best_vector = vector1 if top1 > best else best_vector
            best = maximum(best, top1)
            best_vector = vector2 if top2 > best else best_vector
            best = maximum(best, top2)
            best_vector = vector3 if top3 > best else best_vector
            best = maximum(best, top3)
            vector = uint32(vector3 + STEP)
    while vector < vectors:
        top = largest(read_eight(logits, start, vector, is_aligned, token_bitmask, mask_start))
        best_vector = vector if top > best else best_vector
        best = maximum(best, top)
        vector = uint32(vector + STEP)

    high = low = uint32(0)
    if best > MINUS_INFINITY:
        values = read_eight(logits, start, best_vector, is_aligned, token_bitmask, mask_start)
        high = value_key(best)
        low = uint32(~(uint32(best_vector * uint32(8)) + first_place(values, best)))
    elif best != best:
        high = low = uint32(0xFFFFFFFF)
    warp_high = warp_max(high)
    warp_low = warp_max(low if high == warp_high else uint32(0))
    if thread % uint32(LANES) == 0:
        cuda.atomic.max(s_key, 0, (uint64(warp_high) << uint64(32)) | uint64(warp_low))
    cuda.syncthreads()
    return s_key[0]


@device_routine
def token_of_key(key):  # type: ignore[no-untyped-def]
    """Token of a key of `best_of_row`."""
    if key == uint64(0) or key >> uint64(32) == uint64(0xFFFFFFFF):
        return int32(NO_TOKEN)
    return int32(uint32(~uint32(key & uint64(0xFFFFFFFF))))


@device_routine
def place_key(value, token, key_bits):  # type: ignore[no-untyped-def]
    """Place of a token in the order by logit falling, then by token, as a number that falls with it."""
    key = uint64(value_key(value) >> uint32(32 - key_bits))
    return (key << uint64(TOKEN_BITS)) | uint64(uint32(MAX_VOCABULARY - 1) - token)


@device_routine
def place_value(key, key_bits):  # type: ignore[no-untyped-def]
    """Value of a `place_key`; NaN of the key 0."""
    missing_bits = uint32(32 - key_bits)
    high = uint32(uint32(key >> uint64(TOKEN_BITS)) << missing_bits)
    # Those of a negative number are all set in its key.
    filling = uint32(0) if high >> uint32(31) else uint32((uint32(1) << missing_bits) - uint32(1))
    return key_value(uint32(high | filling))


@device_routine
def place_token(key):  # type: ignore[no-untyped-def]
    """Token of a `place_key`."""
    return uint32(uint32(MAX_VOCABULARY - 1) - uint32(key & uint64(MAX_VOCABULARY - 1)))


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


@device_routine
def is_padding(num_nodes, request, node):  # type: ignore[no-untyped-def]
    return num_nodes.shape[0] > 0 and node >= num_nodes[request]


@device_routine
def mask_row(token_bitmask, vocabulary, row, request):  # type: ignore[no-untyped-def]
    """First word of a row's mask, which each row has, or each request."""
    words = int64((vocabulary + 31) // 32)
    has_each_row = token_bitmask.shape[0] == words * int64(cuda.gridDim.x)
    return words * int64(row if has_each_row else request)


@device_routine
def long_of(words, request, batch, default):  # type: ignore[no-untyped-def]
    """Return an integer of a request, of 64 bits or 32, or the default where none were given."""
    if words.shape[0] == 0:
        return int64(default)
    if words.shape[0] == batch:
        return int64(words[request])
    return (int64(words[2 * request + 1]) << int64(32)) | (int64(words[2 * request]) & int64(0xFFFFFFFF))


@device_routine
def float_of(words, request, default):  # type: ignore[no-untyped-def]
    """Return a float32 of a request, or the default where none were given."""
    return float_of_bits(uint32(words[request])) if words.shape[0] > 0 else float32(default)


@device_routine
def is_temperature(value):  # type: ignore[no-untyped-def]
    return value == float32(0) or MIN_TEMPERATURE <= value < float32(np.inf)


def choose_best_kernel(  # type: ignore[no-untyped-def]
    logits,  # float32, float16 or bfloat16 [B, N, V]
    is_aligned,  # int32: rows are whole vectors of eight, at multiples of 16 bytes
    token_bitmask,  # int32 [B * W] or [B * N * W], W = ceil(V / 32); or empty, as for the next
    num_nodes,  # int32 [B]
    tokens,  # int32 [B, N]
):
    s_key = cuda.shared.array(1, uint64)
    row = cuda.blockIdx.x
    request, node = row // tokens.shape[1], row % tokens.shape[1]
    token = int32(NO_TOKEN)
    if not is_padding(num_nodes, request, node):
        start = int64(row) * int64(logits.shape[2])
        mask_start = mask_row(token_bitmask, logits.shape[2], row, request)
        token = token_of_key(best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key))
    if cuda.threadIdx.x == 0:
        tokens[request, node] = token


def draw_tokens_kernel(  # type: ignore[no-untyped-def]
    logits,  # float32, float16 or bfloat16 [B, N, V]
    is_aligned,  # int32: rows are whole vectors of eight, at multiples of 16 bytes
    token_bitmask,  # int32 [B * W] or [B * N * W], W = ceil(V / 32); or empty, as for the next
    num_nodes,  # int32 [B]
    positions,  # int32 [B, N]
    request_ids,  # int32 [B], or words of int64 [B], or empty: the place in the batch
    seeds,  # int32: words of int64 [B], or empty: the default for all, as for the next
    temperatures,  # int32 [B]: bits of float32
    default_seed,  # int64
    default_temperature,  # float32
    tokens,  # int32 [B, N]
):
    s_key = cuda.shared.array(1, uint64)
    s_score = cuda.shared.array(1, int64)
    s_words = cuda.shared.array(3, uint32)
    row = cuda.blockIdx.x
    request, node = row // tokens.shape[1], row % tokens.shape[1]
    temperature = float_of(temperatures, request, default_temperature)
    token = int32(NO_TOKEN)
    if is_temperature(temperature) and not is_padding(num_nodes, request, node):
        start = int64(row) * int64(logits.shape[2])
        mask_start = mask_row(token_bitmask, logits.shape[2], row, request)
        if temperature == float32(0):
            token = token_of_key(best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key))
        else:
            token = draw_from_row(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                False,
                MINUS_INFINITY,
                uint32(0),
                temperature,
                long_of(seeds, request, -1, default_seed),
                long_of(request_ids, request, tokens.shape[0], request),
                positions[request, node],
                s_words,
                s_score,
            )
    if cuda.threadIdx.x == 0:
        tokens[request, node] = token


def filter_and_draw_kernel(  # type: ignore[no-untyped-def]
    logits,  # as for `draw_tokens_kernel`
    is_aligned,
    token_bitmask,
    num_nodes,
    positions,
    request_ids,
    seeds,
    temperatures,
    top_ks,  # int32 [B], or empty: the default for all, as for the next
    top_ps,  # int32 [B]: bits of float32
    default_seed,
    default_temperature,
    default_top_k,  # int32
    default_top_p,  # float32
    key_bits,  # int32: bits, from the top, in which the keys of logits of this type differ
    tokens,
):
    s_key = cuda.shared.array(1, uint64)
    s_score = cuda.shared.array(1, int64)
    s_words = cuda.shared.array(3, uint32)
    s_low = cuda.shared.array(BINS, uint32)
    s_high = cuda.shared.array(BINS, uint32)
    s_sums = cuda.shared.array(SUMS, int64)
    s_found = cuda.shared.array(4, int64)
    row = cuda.blockIdx.x
    request, node = row // tokens.shape[1], row % tokens.shape[1]
    temperature = float_of(temperatures, request, default_temperature)
    top_k = top_ks[request] if top_ks.shape[0] > 0 else default_top_k
    top_p = float_of(top_ps, request, default_top_p)
    is_valid = is_temperature(temperature) and top_k >= 0 and float32(0) <= top_p <= float32(1)
    token = int32(NO_TOKEN)
    if is_valid and not is_padding(num_nodes, request, node):
        start = int64(row) * int64(logits.shape[2])
        mask_start = mask_row(token_bitmask, logits.shape[2], row, request)
        best = best_of_row(logits, start, is_aligned, token_bitmask, mask_start, s_key)
        token = token_of_key(best)
        if temperature > float32(0) and token != NO_TOKEN:
            cut = cut_of_row(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                key_bits,
                top_k,
                top_p,
                key_value(uint32(best >> uint64(32))),
                reciprocal32(temperature),
                s_low,
                s_high,
                s_sums,
                s_found,
            )
            token = draw_from_row(
                logits,
                start,
                is_aligned,
                token_bitmask,
                mask_start,
                True,
                place_value(cut, key_bits),
                place_token(cut),
                temperature,
                long_of(seeds, request, -1, default_seed),
                long_of(request_ids, request, tokens.shape[0], request),
                positions[request, node],
                s_words,
                s_score,
            )
    if cuda.threadIdx.x == 0:
        tokens[request, node] = token


def _signatures(rest: str) -> tuple[str, ...]:
    return tuple(
        f"void({logits}[:, :, ::1], int32, int32[::1], int32[::1], {rest}int32[:, ::1])"
        for logits in ("uint16", "float32", "float16")
    )


CHOOSE_BEST = Kernel(choose_best_kernel, _signatures(""), THREADS, blocks_per_processor=6)
_DRAW = "int32[:, ::1], int32[::1], int32[::1], int32[::1], "
DRAW_TOKENS = Kernel(
    draw_tokens_kernel, _signatures(_DRAW + "int64, float32, "), THREADS, blocks_per_processor=3
)
FILTER_AND_DRAW = Kernel(
    filter_and_draw_kernel,
    _signatures(_DRAW + "int32[::1], int32[::1], int64, float32, int32, float32, int32, "),
    THREADS,
    blocks_per_processor=3,
)


def choose_tokens(
    logits: Array,
    *,
    temperature: float | Array = 0.0,
    positions: Array | None = None,
    seed: int | Array = 0,
    request_ids: Array | None = None,
    top_k: int | Array = 0,
    top_p: float | Array = 1.0,
    token_bitmask: Array | None = None,
    num_nodes: Array | None = None,
    out: Array | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> Array:
    """Choose the target's token after each node: the most probable one, or a draw at a temperature.

    At temperature 0 the token of the largest logit, the smallest on ties. Above, the token of the largest
    ``logit / T + g``, with Gumbel noise g of its own for every token, which draws from the softmax of
    ``logits / T``. The noise comes from Philox 4x32-10 (Salmon et al., SC 2011), keyed by the seed and
    counted by request id, position and token, so that the token of a request at a position is the same
    whatever the node, the path to it, the tree, the batch and its order: decoding with a tree draws what
    decoding token by token draws. Deterministic, to the bit that of the reference in
    `numba_ddtree.refs.token_choice`, scores in float64.

    What may be drawn is first what the mask allows, of that the `top_k` largest logits, of those the
    fewest, best first, whose probabilities at the temperature reach `top_p`. Of equal logits the smaller
    tokens stay.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [B, N, V]
        The target's logits after each node, V at most 262144. A row with a NaN among the tokens allowed
        gives -1. Fastest where V is a multiple of 8 and the first element at a multiple of 16 bytes.
    temperature : float or float32 [B]
        0, or 1e-30 and more; an array gives each request its own.
    positions : int32 [B, N]
        Position of each node in the sequence, as `DraftTree.positions`. A must unless `temperature` is the
        number 0.
    seed : int or int64 or uint64 [B]
        From 0 to 2^64 - 1; negative numbers of int64 stand for those from 2^63.
    request_ids : int32 or int64 [B], optional
        What tells requests of one seed apart; by default their places in the batch.
    top_k : int or int32 [B]
        0 is off.
    top_p : float or float32 [B]
        1 is off. The best token always stays. Probabilities are exponentials in float32, counted in
        units of 2^-40 of the best token's and summed exactly.
    token_bitmask : uint32 or int32 [B, ceil(V / 32)] or [B, N, ceil(V / 32)], optional
        Bit ``v % 32`` of word ``v // 32`` set: token v is allowed.
    num_nodes : int32 [B], optional
        Slots in use, as `DraftTree.num_nodes`; the logits of the others are not read.
    out : int32 [B, N], optional
        An array to write into.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays, bar the logits, as those of host arrays are; synchronises.

    Returns
    -------
    int32 [B, N]
        A numpy array for host arrays, after synchronising; otherwise an array of the same library, with no
        synchronisation. -1 in padding slots, where no token above -inf is allowed, where a logit is NaN,
        and for requests whose parameters, on a device, are out of range: `accept_tree` ends a walk there.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument, or a number out of range; for host arrays, and
        with `validate`, also values of arrays out of range.
    BackendError
        No device for the CUDA backend.
    """
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    numbers = {name: _checked_number(name, value) for name, value in settings.items() if _is_number(value)}
    placement, views = gather(
        logits=logits,
        positions=positions,
        request_ids=request_ids,
        token_bitmask=token_bitmask,
        num_nodes=num_nodes,
        **{name: None if name in numbers else value for name, value in settings.items()},
    )
    views = _checked(views)
    is_greedy = numbers.get("temperature") == 0
    if views["positions"] is None and not is_greedy:
        raise ArgumentError("positions", None, "the nodes' positions, since tokens may be drawn")
    if placement.on_host or validate:
        _check_values(views)
    if use_reference(backend, placement):
        tokens = reference.choose_tokens(*_reference_inputs(views, numbers))
        if out is None:
            return tokens
        copy_to_outputs({"tokens": tokens}, {"tokens": out})
        return out
    with Transfer(placement, stream) as transfer:
        tokens = transfer.output("tokens", views["logits"].shape[:2], np.int32, out)
        given = {name: transfer.input(_as_kernels_take(name, view)) for name, view in views.items()}
        _launch(transfer, given, numbers, is_greedy, tokens)
        return transfer.results()["tokens"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


def _checked_number(name: str, value: Any) -> int | float:
    """Check one of the numbers that stand for all requests."""
    if name == "seed":
        return check_count(name, value, 0, 2**64 - 1)
    if name == "top_k":
        return check_count(name, value, 0, np.iinfo(np.int32).max)
    number = check_scalar(name, value)
    is_valid, expected = RULES[name]
    # As the kernels see it, bar a number that would round to the 0 of the greedy choice.
    if not is_valid(np.float32(number)) or (name == "temperature" and np.float32(number) == 0 != number):
        raise ArgumentError(name, number, expected)
    return number


def _checked(views: dict[str, Any]) -> dict[str, Any]:
    """Check every view's shape and dtype; host arrays of other numbers are converted."""
    check_array("logits", views["logits"], FLOAT_DTYPES, B=None, N=None, V=None)
    batch, slots, vocabulary = views["logits"].shape
    if vocabulary > MAX_VOCABULARY:
        raise ArgumentError("logits", f"V = {vocabulary}", f"at most {MAX_VOCABULARY} tokens")
    given = {name: view for name, view in views.items() if view is not None}
    if "positions" in given:
        given["positions"] = check_indices("positions", given["positions"], B=batch, N=slots)
    for name in given.keys() & {"num_nodes", "top_k"}:
        given[name] = check_indices(name, given[name], B=batch)
    for name in given.keys() & {"temperature", "top_p"}:
        if isinstance(given[name], np.ndarray) and given[name].dtype.kind in "iuf":
            given[name] = given[name].astype(np.float32, copy=False)
        check_array(name, given[name], (np.float32,), B=batch)
    if "seed" in given:
        check_array("seed", given["seed"], (np.int64, np.uint64), B=batch)
    if "request_ids" in given:
        check_array("request_ids", given["request_ids"], TOKEN_DTYPES, B=batch)
    if "token_bitmask" in given:
        rows = {"N": slots} if len(given["token_bitmask"].shape) == 3 else {}
        words = -(-vocabulary // 32)
        check_array(
            "token_bitmask", given["token_bitmask"], (np.uint32, np.int32), B=batch, **rows, words=words
        )
    return views | given


def _check_values(views: dict[str, Any]) -> None:
    """Raise for the first value that would give -1 in place of a token."""
    rules = RULES | {
        "num_nodes": (
            lambda counts: (counts >= 0) & (counts <= views["logits"].shape[1]),
            f"a number from 0 to N = {views['logits'].shape[1]}",
        )
    }
    for name, (is_valid, expected) in rules.items():
        if views[name] is not None:
            array = to_host(name, views[name])
            for index in first_where(~is_valid(array)):
                raise ArgumentError(at(name, index), array[index], expected)


def _reference_inputs(views: dict[str, Any], numbers: dict[str, int | float]) -> tuple[Any, ...]:
    """Return the reference's arguments, with defaults filled in."""
    batch, slots, _ = views["logits"].shape

    def of_each(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.full(batch, numbers[name], dtype) if views[name] is None else views[name]

    def given_or(name: str, default: NDArray[Any]) -> NDArray[Any]:
        return default if views[name] is None else views[name]

    mask = views["token_bitmask"]
    return (
        views["logits"].astype(np.float32),
        given_or("positions", np.zeros((batch, slots), np.int32)),
        given_or("request_ids", np.arange(batch)),
        of_each("seed", np.uint64),
        of_each("temperature", np.float32),
        of_each("top_k", np.int32),
        of_each("top_p", np.float32),
        None if mask is None else np.ascontiguousarray(mask).view(np.uint32),
        given_or("num_nodes", np.full(batch, slots, np.int32)),
    )


def _as_kernels_take(name: str, view: Any) -> Any:
    """View what is given for each request, or may be absent, as words of int32 in one dimension.

    So one kernel takes 32 and 64 bits, signed and unsigned, and the empty array of int32 that stands for
    what is absent.
    """
    if view is None or name in ("logits", "positions"):
        return view
    if isinstance(view, DeviceView):
        words = math.prod(view.shape) * view.dtype.itemsize // 4
        return replace(view, shape=(words,), strides=(4,), dtype=np.dtype(np.int32))
    contiguous = np.ascontiguousarray(view) if isinstance(view, np.ndarray) else view
    return contiguous.reshape(-1).view(np.int32)


def _launch(
    transfer: Transfer,
    given: dict[str, Any],
    numbers: dict[str, int | float],
    is_greedy: bool,
    tokens: Any,
) -> None:
    logits = given["logits"]
    batch, slots, vocabulary = logits.shape
    is_aligned = vocabulary % NEIGHBOURS == 0 and getattr(logits, "pointer", 0) % 16 == 0
    common = (logits, np.int32(is_aligned), given["token_bitmask"], given["num_nodes"])
    if is_greedy:
        transfer.launch(CHOOSE_BEST, batch * slots, *common, tokens)
        return
    of_draw = [given[name] for name in ("positions", "request_ids", "seed", "temperature")]
    seed = np.uint64(numbers.get("seed", 0)).astype(np.int64)
    temperature = np.float32(numbers.get("temperature", 0))
    if numbers.get("top_k") == 0 and numbers.get("top_p") == 1:
        transfer.launch(DRAW_TOKENS, batch * slots, *common, *of_draw, seed, temperature, tokens)
        return
    transfer.launch(
        FILTER_AND_DRAW,
        batch * slots,
        *common,
        *of_draw,
        given["top_k"],
        given["top_p"],
        seed,
        temperature,
        np.int32(numbers.get("top_k", 0)),
        np.float32(numbers.get("top_p", 1)),
        np.int32(KEY_BITS[logits.dtype.name]),
        tokens,
    )
