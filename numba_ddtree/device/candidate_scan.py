"""Scan of a piece of a row of logits for its best candidates, and the sum of the others.

A piece begins with a look for a threshold. In a long piece that is a look at a sample, all over it, for a
number that somewhat more than as many as are wanted are expected to reach; should they not, the piece is
scanned anew. In a short one, and then, it is one at the first tiles: for one of the maxima of so many
groups of their numbers that as many as are wanted reach. Then most of it is scanned in strides of several
tiles. Quads with a number above the threshold are few: their threads put them aside, and go through them
after several strides; and threads wait for each other more rarely still, since there is room for what
enters meanwhile. Where there was none, the tiles are scanned again, one at a time, as are those at a row's
ends.
"""

from __future__ import annotations

import math

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int32, int64, uint32, uint64
from numba_ddtree.device.candidates import (
    BAD,
    CARE,
    COUNT,
    END,
    FIRST,
    FLOOR,
    FOLLOWING,
    HEADER,
    INFINITY,
    KEYS_AT,
    LAST,
    LOWEST_ORDER,
    NEXT,
    ORIGIN,
    PACE,
    PIECE,
    ROUNDER,
    START,
    SURE,
    TEMPERATURE,
    THREADS,
    THRESHOLD,
    TILE,
    begin_piece,
    candidate_key,
    capacity_of,
    count_of_all,
    find_edge,
    key_value,
    packed_reference,
    raise_threshold,
    set_bound,
    shared_bytes_of,
    split_shared,
    sum_over_block,
    temperature_of,
)
from numba_ddtree.device.exponentials import exponent_scale, exponential, scale_terms
from numba_ddtree.device.floats import double_bits
from numba_ddtree.device.kept_quads import keep_or_add, kept_quad, next_place, place_in, summable
from numba_ddtree.device.optional import is_given
from numba_ddtree.device.rows import begins_with_row, load_quad, load_quad_within, maximum, quad_floats
from numba_ddtree.device.warp import LANES

STRIDE = 4  # tiles whose loads are in flight at once
STRIDES = 8  # between looks at how many have entered, at most: a bit for each tile of them in a word
KEPT_QUADS = 7  # that a thread has room for
FIRST_TILES = 16  # that are looked at for a first threshold, at most
BATCH = 8  # of them, whose loads are in flight at once; as many make a sample
SAMPLE_MAXIMA = 4  # groups a thread that a sample has
SAMPLED_TILES = 4 * BATCH  # that a piece has at least of which a sample is taken
# Of random rows one in a million has more of the wanted numbers in its sample than m + 5 (m^1/2 + 1), m being
# how many it has on average.
SAMPLE_MARGIN = np.float32(5)
SLACK_SHIFT = 3  # of the growth, the part that may stay beyond the wanted number
NO_END = np.uint32(0xFFFFFFFF)  # a length of columns that are known to be within it
INFINITE_ORDER = np.uint32(0xFF800000)  # of +inf


def scan_bytes_of(wanted: int, growth: int) -> int:
    """Bytes of shared memory that a scan takes."""
    return shared_bytes_of(wanted, growth) + 16 * KEPT_QUADS * THREADS


def strides_of(wanted: int) -> int:
    """Choose strides between looks at how many have entered.

    Of the numbers in 16 tiles somewhat more than the wanted ones are above the first threshold; a tile's
    number of them finds room after enough have entered.
    """
    return min(STRIDES, max(1, STRIDE * TILE // wanted))


def first_maxima_of(wanted: int, growth: int) -> int:
    """Choose of how many groups a thread a first threshold takes maxima: a power of two, or 0 for none."""
    maxima = 1 << (max(1, 6 * wanted // THREADS).bit_length() - 1)
    while maxima * THREADS > capacity_of(wanted, growth):
        maxima //= 2
    return maxima if maxima <= FIRST_TILES and maxima * THREADS >= 2 * wanted else 0


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
def skipped_before(start, misalignment):  # type: ignore[no-untyped-def]
    """Numbers before the row's first that its first quad has: up to three, for quads at multiples."""
    if begins_with_row(misalignment):
        return int32(0)
    return int32((int32(misalignment) + int32(start & int64(3))) & 3)


@device_routine
def enters(value, column, length, threshold):  # type: ignore[no-untyped-def]
    """Whether a number is above the threshold, or there is none, and within its row."""
    return int32(not value <= threshold and uint32(column) < uint32(length))


@device_routine
def largest_of(numbers):  # type: ignore[no-untyped-def]
    """Largest of four float32; NaN if one is."""
    a, b, c, d = numbers
    return maximum(maximum(a, b), maximum(c, d))


@device_routine
def quad_sum(numbers, terms, scale):  # type: ignore[no-untyped-def]
    """Sum of the exponentials of four numbers that are not above the threshold, float32."""
    a, b, c, d = numbers
    left = float32(exponential(a, terms, scale) + exponential(b, terms, scale))
    right = float32(exponential(c, terms, scale) + exponential(d, terms, scale))
    return float32(left + right)


@device_routine
def scan_quad(  # type: ignore[no-untyped-def]
    numbers, column, length, capacity, threshold, terms, scale, s_state, s_keys
):
    """Let the quad's numbers above the threshold enter; return the others' sum of exponentials, float32.

    Counts those that find no room as well. Says in the block's state if a number is none at all.
    """
    a, b, c, d = numbers
    # NaN is above every threshold, and all are above one that is NaN.
    largest = largest_of(numbers)
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
    return quad_sum((a, b, c, d), terms, scale)


@device_routine
def reaching_of_sample(wanted, tiles):  # type: ignore[no-untyped-def]
    """Choose how many of a sample's numbers reach the threshold, so that more than are wanted of all do."""
    mean = float32(float32(wanted * BATCH) / float32(tiles))
    return int32(mean + SAMPLE_MARGIN * float32(math.sqrt(mean) + float32(1)))


@device_routine
def find_first_threshold(  # type: ignore[no-untyped-def]
    logits,
    bias,
    token_bitmask,
    mask_start,
    misalignment,
    place,
    column,
    tiles,
    apart,
    first_maxima,
    wanted,
    growth,
    shared,
):
    """Set a threshold that `wanted` of the numbers of so many tiles are above, if it is finite.

    The tiles are within the row, and a multiple of the batch. Where a thread's quads are more than a tile
    apart, they are a sample, and so many of all numbers are expected to be above. The block takes part.
    """
    s_state, s_bins, s_bound, _, s_scale, _, s_keys = shared
    thread = uint32(cuda.threadIdx.x)
    last_of_group = uint32(uint32(tiles) // uint32(first_maxima) - uint32(1))
    key_place = thread
    highest = -INFINITY
    for start in range(uint32(0), uint32(tiles), uint32(BATCH)):
        quads = (
            load_quad(logits, place, misalignment),
            load_quad(logits, place + apart, misalignment),
            load_quad(logits, place + 2 * apart, misalignment),
            load_quad(logits, place + 3 * apart, misalignment),
            load_quad(logits, place + 4 * apart, misalignment),
            load_quad(logits, place + 5 * apart, misalignment),
            load_quad(logits, place + 6 * apart, misalignment),
            load_quad(logits, place + 7 * apart, misalignment),
        )
        for step in range(BATCH):
            numbers = numbers_of(quads[step], column, logits, bias, token_bitmask, mask_start)
            highest = maximum(highest, largest_of(numbers))
            column = int32(column + apart)
            if uint32(uint32(start) + uint32(step)) & last_of_group == last_of_group:
                s_keys[key_place] = candidate_key(highest, key_place)
                key_place = uint32(key_place + uint32(THREADS))
                highest = -INFINITY
        place = place + BATCH * apart
    if thread == uint32(0):
        s_state[COUNT] = int32(first_maxima * THREADS)
    cuda.syncthreads()
    reaching, slack = int32(wanted), int32(growth >> SLACK_SHIFT)
    if apart > TILE:  # here, so that they take no registers before
        reaching = reaching_of_sample(wanted, apart // (TILE // BATCH))
        slack = int32(reaching >> SLACK_SHIFT)
    edge = find_edge(s_state, s_bins, s_keys, reaching, slack)
    order = uint32(edge >> uint64(32))
    if thread == uint32(0):
        s_state[COUNT] = 0
        # Below the number by more than -0, so that those equal to it enter.
        if order > LOWEST_ORDER + uint32(2) and order < INFINITE_ORDER:
            bound = key_value(uint64(uint64(order - uint32(2)) << uint64(32)))
            set_bound(s_bound, s_scale, bound)
    cuda.syncthreads()


@device_routine
def keep_or_sum(  # type: ignore[no-untyped-def]
    s_all, kept, mask, bit, numbers, threshold, total, terms, scale
):
    """Keep a quad with a number above the threshold, or add its exponentials to the total."""
    return keep_or_add(
        s_all,
        kept,
        uint32(4 * THREADS),
        mask,
        bit,
        numbers,
        largest_of(numbers),
        threshold,
        total,
        quad_sum(summable(numbers, threshold), terms, scale),
    )


@device_routine
def scan_kept(  # type: ignore[no-untyped-def]
    s_all, place, mask, column, capacity, threshold, terms, scale, s_state, s_keys
):
    """Scan the quads that the thread kept, the first of them at `place`; return the others' sum, float64.

    The mask's highest bit is the first quad's; its lowest would be that of the quad a tile before `column`.
    """
    total = float64(0)
    while mask != uint32(0):
        back = uint32(uint32(31) - uint32(cuda.clz(mask)))
        mask = uint32(mask ^ uint32(uint32(1) << back))
        own_column = int32(column - TILE * int32(back + uint32(1)))
        total += float64(
            scan_quad(
                kept_quad(s_all, place),
                own_column,
                NO_END,
                capacity,
                threshold,
                terms,
                scale,
                s_state,
                s_keys,
            )
        )
        place = next_place(place, uint32(4 * THREADS))
    return total


def scan_logits_kernel(  # type: ignore[no-untyped-def]
    logits,  # float32, float16 or bfloat16 [B, L, V]
    temperatures,  # float32 [B], or not given, as for the next two
    token_bitmask,  # uint32 [rows, words], flat
    bias,  # float32 [V]
    default_temperature,  # float32
    rows_per_mask,  # int32: 1, or L where a request's positions share a row of the mask
    misalignment,  # int32: numbers from a quad's multiple to the first logit; bool: quads begin with rows
    row_tiles,  # int32: tiles that cover a row
    wanted,  # int32: candidates to keep of each piece
    growth,  # int32: candidates that enter beyond them before the threshold rises
    first_maxima,  # int32: groups a thread whose maxima make a first threshold, or 0
    most_strides,  # int32: between looks at how many have entered
    workspace,  # int64 [pieces, HEADER + wanted]
):
    thread = int32(cuda.threadIdx.x)
    depth, length = int32(logits.shape[1]), int32(logits.shape[2])
    shared = split_shared()
    s_state, _, s_bound, _, s_scale, s_sums, s_keys = shared
    limit = int32(wanted + growth)
    capacity = int32(limit + TILE)
    s_all = cuda.shared.array(0, float32)
    first_kept = place_in(s_all, uint32(uint32(2 * KEYS_AT) + uint32(2 * capacity) + uint32(4 * thread)))
    full = next_place(first_kept, uint32(4 * THREADS * (KEPT_QUADS - STRIDE)))
    all_tiles = int64(logits.shape[0]) * int64(depth) * int64(row_tiles)
    begin = int32(int64(cuda.blockIdx.x) * all_tiles // int64(cuda.gridDim.x))
    end = int32((int64(cuda.blockIdx.x) + 1) * all_tiles // int64(cuda.gridDim.x))
    # What only a piece's beginning and end need is shared, so that it takes no registers meanwhile.
    if thread == 0:
        s_state[NEXT] = begin
        s_state[END] = end
        s_state[SURE] = 0
    cuda.syncthreads()
    while s_state[NEXT] < s_state[END]:
        begin, end = s_state[NEXT], s_state[END]
        row = int32(uint32(begin) // uint32(row_tiles))
        tile = int32(begin - row * row_tiles)
        last = int32(min(row_tiles, tile + end - begin))
        request = uint32(row) // uint32(depth)
        temperature, _ = temperature_of(temperatures, default_temperature, request)
        start = int64(row) * int64(length)
        mask_start = int64(uint32(row) // uint32(rows_per_mask)) * int64((length + 31) >> 5)
        skipped = skipped_before(start, misalignment)
        offset = int32(4 * thread - skipped)
        if thread == 0:
            s_state[PIECE] = int32(row + int32(cuda.blockIdx.x))
            s_state[START] = tile
            s_state[LAST] = last
            s_state[CARE] = int32(skipped > 0)
            s_state[PACE] = 1
            s_state[FOLLOWING] = int32(begin + last - tile)
        begin_piece(shared, temperature)
        count = int32(0)
        # Strides that begin from `s_state[CARE]` to `last_stride` are within the row, and need no care.
        last_stride = int32(min(last, int32(uint32(length + skipped) // uint32(TILE))) - STRIDE)
        first = int32(max(tile, s_state[CARE]))
        tiles = int32(FIRST_TILES)
        while tiles >= BATCH and tiles > last_stride + STRIDE - first:
            tiles = int32(tiles >> 1)
        maxima = int32(first_maxima)
        apart = int32(TILE)
        own = int32(4 * thread)
        whole = int32(last_stride + STRIDE - first)
        many = int32(reaching_of_sample(wanted, max(whole, 1)))
        if s_state[SURE] == 0 and whole >= SAMPLED_TILES and many <= SAMPLE_MAXIMA * THREADS // 2:
            # What a warp loads at once is as far from what the next one loads.
            tiles = int32(BATCH)
            maxima = int32(SAMPLE_MAXIMA)
            apart = int32(uint32(whole * TILE) // uint32(BATCH * 4 * LANES) * uint32(4 * LANES))
            part = uint32(uint32(thread) // uint32(LANES) * uint32(apart)) // uint32(TILE)
            own = int32(part * uint32(4 * LANES) + uint32(thread) % uint32(LANES) * uint32(4))
        if tiles >= max(BATCH, maxima) and maxima > 0:
            if thread == 0:
                s_state[PACE] = most_strides
            column = int32(first * TILE - skipped + own)
            find_first_threshold(
                logits,
                bias,
                token_bitmask,
                mask_start,
                misalignment,
                start + int64(column),
                column,
                tiles,
                apart,
                maxima,
                wanted,
                growth,
                shared,
            )
        # Only now, so that it takes no registers before.
        scale = scale_terms(exponent_scale(s_scale[TEMPERATURE]))
        while tile < s_state[LAST]:
            threshold = s_bound[THRESHOLD]
            terms = s_bound[ORIGIN], s_bound[FLOOR], s_bound[ROUNDER]
            column = int32(tile * TILE + offset)
            place = start + int64(column)
            is_near = threshold == threshold and s_bound[ORIGIN] == float32(0)
            before = count
            if not is_near or tile < s_state[CARE] or tile > last_stride:
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
                quad_0 = load_quad(logits, place, misalignment)
                quad_1 = load_quad(logits, place + TILE, misalignment)
                quad_2 = load_quad(logits, place + 2 * TILE, misalignment)
                quad_3 = load_quad(logits, place + 3 * TILE, misalignment)
                while tile <= last_stride and count <= limit:
                    before = count
                    if thread == 0:
                        s_state[FIRST] = tile
                    total = float64(0)
                    look = int32(min(last_stride, int32(tile + STRIDE * (s_state[PACE] - 1))))
                    kept, mask = first_kept, uint32(0)
                    while tile <= look:
                        column = int32(tile * TILE + offset)
                        tile = int32(tile + STRIDE)
                        # Of the next stride, or once more of the last.
                        place = start + int64(int32(min(tile, last_stride) * TILE + offset))
                        mask = uint32(mask << uint32(STRIDE))
                        numbers = numbers_of(quad_0, column, logits, bias, token_bitmask, mask_start)
                        kept, mask, left = keep_or_sum(
                            s_all, kept, mask, uint32(8), numbers, threshold, float32(0), near_terms, scale
                        )
                        quad_0 = load_quad(logits, place, misalignment)
                        numbers = numbers_of(
                            quad_1, int32(column + TILE), logits, bias, token_bitmask, mask_start
                        )
                        kept, mask, left = keep_or_sum(
                            s_all, kept, mask, uint32(4), numbers, threshold, left, near_terms, scale
                        )
                        quad_1 = load_quad(logits, place + TILE, misalignment)
                        # Two quads' loads are under way while the other two are summed. Were this not a loop,
                        # of one turn, the compiler would put all loads at the end, where all are waited for.
                        is_again = True
                        while is_again:
                            numbers = numbers_of(
                                quad_2, int32(column + 2 * TILE), logits, bias, token_bitmask, mask_start
                            )
                            kept, mask, right = keep_or_sum(
                                s_all,
                                kept,
                                mask,
                                uint32(2),
                                numbers,
                                threshold,
                                float32(0),
                                near_terms,
                                scale,
                            )
                            quad_2 = load_quad(logits, place + 2 * TILE, misalignment)
                            numbers = numbers_of(
                                quad_3, int32(column + 3 * TILE), logits, bias, token_bitmask, mask_start
                            )
                            kept, mask, right = keep_or_sum(
                                s_all, kept, mask, uint32(1), numbers, threshold, right, near_terms, scale
                            )
                            quad_3 = load_quad(logits, place + 3 * TILE, misalignment)
                            # With masks, registers do not suffice for that.
                            is_again = kept < first_kept and not is_given(token_bitmask)
                        total += float64(float32(left + right))
                        if kept > full or tile > look:
                            total += scan_kept(
                                s_all,
                                first_kept,
                                mask,
                                int32(tile * TILE + offset),
                                capacity,
                                threshold,
                                near_terms,
                                scale,
                                s_state,
                                s_keys,
                            )
                            kept, mask = first_kept, uint32(0)
                    count = count_of_all(s_state)
                    if count <= capacity and threshold > -INFINITY:
                        s_sums[uint32(thread)] += total
                # What was loaded beyond is loaded again, so that no registers wait for it meanwhile.
            if count > capacity:
                # Not all that entered found room: the same again, with care.
                if thread == 0:
                    s_state[COUNT] = before
                    s_state[CARE] = tile
                count = before
                tile = s_state[FIRST]
                cuda.syncthreads()
            elif count > (limit if tile < s_state[LAST] else wanted):
                slack = int32(growth >> SLACK_SHIFT) if tile < s_state[LAST] else int32(0)
                if thread == 0:
                    # Of half as many numbers as there were, about half as many enter as stay.
                    s_state[PACE] = int32(min(most_strides, max(1, (tile - s_state[START]) // (2 * STRIDE))))
                count = raise_threshold(shared, wanted, slack)
        is_misled = count < wanted and s_bound[THRESHOLD] > -INFINITY
        if is_misled and s_state[SURE] == 0 and s_state[BAD] == 0:
            # The sample's threshold was too high: the same piece again, without.
            cuda.syncthreads()  # all have read that there was one
            if thread == 0:
                s_state[SURE] = 1
        else:
            piece = uint32(s_state[PIECE])
            rank = uint32(thread)
            while rank < uint32(wanted):
                key = s_keys[rank] if rank < uint32(count) else uint64(0)
                workspace[piece, uint32(rank + uint32(HEADER))] = int64(key)
                rank = uint32(rank + uint32(THREADS))
            total = sum_over_block(s_sums)
            if thread == 0:
                workspace[piece, 0] = double_bits(total)
                workspace[piece, 1] = packed_reference(s_bound, s_scale)
                workspace[piece, 2] = int64(s_state[BAD])
                s_state[NEXT] = s_state[FOLLOWING]
                s_state[SURE] = 0
        cuda.syncthreads()
