"""Merge of the candidates of a row's pieces: sorted, with their log-probs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, float32, float64, int32, int64, uint32, uint64
from numba_ddtree.device.candidates import (
    BAD,
    COUNT,
    HEADER,
    INFINITY,
    ORIGIN,
    THREADS,
    TILE,
    WHOLE,
    begin_piece,
    key_value,
    raise_threshold,
    split_shared,
    sum_over_block,
    temperature_of,
    unpacked_reference,
)
from numba_ddtree.device.exponentials import LN_2
from numba_ddtree.device.floats import double_of_bits
from numba_ddtree.device.warp import LANES, warp_sync


@device_routine
def scaled_distance(value, best, inverse):  # type: ignore[no-untyped-def]
    """Distance of a value from the best one, times the temperature's inverse, float64."""
    return (float64(value) - float64(best)) * inverse


@device_routine
def relative(sum_, origin, whole, best, inverse):  # type: ignore[no-untyped-def]
    """Return a sum relative to the best candidate instead of its reference; nothing stays nothing."""
    if sum_ > 0.0:
        return sum_ * math.exp(scaled_distance(origin, best, inverse) + whole * LN_2)
    return float64(0)


@device_routine
def in_order(left, right, is_falling):  # type: ignore[no-untyped-def]
    """Two keys in the order asked for."""
    if (left < right) == is_falling:
        return right, left
    return left, right


@device_routine
def bank_place(place):  # type: ignore[no-untyped-def]
    """Where the key of a place of the network is: so that a half warp's keys, however near, are in all banks.

    A permutation within 16 neighbours, after which any 16 keys that the network takes at once differ in the
    lowest four bits of where they are.
    """
    return uint32(place ^ uint32(uint32(uint32(place >> uint32(4)) & uint32(3)) * uint32(5)))


@device_routine
def sort_four(s_keys, start):  # type: ignore[no-untyped-def]
    """Sort four neighbours, falling in the even ones of such fours and rising in the odd ones."""
    place_a = bank_place(start)
    place_b = bank_place(uint32(start + uint32(1)))
    place_c = bank_place(uint32(start + uint32(2)))
    place_d = bank_place(uint32(start + uint32(3)))
    a, b = in_order(s_keys[place_a], s_keys[place_b], True)
    c, d = in_order(s_keys[place_c], s_keys[place_d], False)
    is_falling = uint32(start & uint32(4)) == uint32(0)
    a, c = in_order(a, c, is_falling)
    b, d = in_order(b, d, is_falling)
    a, b = in_order(a, b, is_falling)
    c, d = in_order(c, d, is_falling)
    s_keys[place_a] = a
    s_keys[place_b] = b
    s_keys[place_c] = c
    s_keys[place_d] = d


@device_routine
def merge_step(s_keys, start, near, width, is_double):  # type: ignore[no-untyped-def]
    """Do a step of a bitonic network with four keys `2 * near` apart, or two, then those `near` apart."""
    place_a = bank_place(start)
    place_b = bank_place(uint32(start + near))
    place_c = bank_place(uint32(start + uint32(2) * near))
    place_d = bank_place(uint32(start + uint32(3) * near))
    is_falling = uint32(start & width) == uint32(0)
    a, c = in_order(s_keys[place_a], s_keys[place_c], is_falling)
    b, d = in_order(s_keys[place_b], s_keys[place_d], is_falling)
    if is_double:
        a, b = in_order(a, b, is_falling)
        c, d = in_order(c, d, is_falling)
    s_keys[place_a] = a
    s_keys[place_b] = b
    s_keys[place_c] = c
    s_keys[place_d] = d


@device_routine
def sort_keys(s_keys, size):  # type: ignore[no-untyped-def]
    """Sort keys, best first, by a bitonic network, four keys a thread at a time.

    `size` is a power of two from 4 on. A key's rank is that at its `bank_place`. The block takes part.
    """
    fours = uint32(size >> uint32(2))
    for four in range(uint32(cuda.threadIdx.x), fours, uint32(THREADS)):
        sort_four(s_keys, uint32(uint32(four) << uint32(2)))
    width = uint32(8)
    before = uint32(1)
    is_double = False  # of three steps, the first is by itself
    while width <= size:
        near = uint32(width >> uint32(2))
        takes_two = is_double
        while near > uint32(0):
            # A warp's fours of near keys are all among the 128 neighbouring ones that it had before.
            if max(near, before) > uint32(LANES):
                cuda.syncthreads()
            else:
                warp_sync()
            for four in range(uint32(cuda.threadIdx.x), fours, uint32(THREADS)):
                low = uint32(uint32(four) & uint32(near - uint32(1)))
                start = uint32(uint32(uint32(uint32(four) - low) << uint32(2)) + low)
                merge_step(s_keys, start, near, width, takes_two)
            before = near
            near = uint32(near >> uint32(2 if takes_two else 1))
            takes_two = True
        width = uint32(width << uint32(1))
        is_double = not is_double
    cuda.syncthreads()


@device_routine
def piece_key(workspace, first_piece, place, end, wanted):  # type: ignore[no-untyped-def]
    """Key at a place of the row's pieces, one after the other; 0 from the end on."""
    if place >= end:
        return int64(0)
    piece = uint32(first_piece + place // uint32(wanted))
    rank = uint32(place % uint32(wanted))
    return workspace[piece, uint32(rank + uint32(HEADER))]


@device_routine
def store_key(s_keys, to, key, place, end):  # type: ignore[no-untyped-def]
    """Store the key that was at a place, unless that is the end or past it."""
    if place < end:
        s_keys[to] = uint64(key)


@device_routine
def piece_of(tile, tiles, blocks):  # type: ignore[no-untyped-def]
    """Block of the first kernel that a tile belongs to."""
    place = (tile + 1) * int64(blocks) - 1
    if place < int64(2**32):  # more than the tiles, of which a row has more than blocks can be
        return int32(uint32(place) // uint32(tiles))
    return int32(place // tiles)


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
    s_state, _, s_bound, _, s_scale, s_sums, s_keys = shared
    temperature, is_right = temperature_of(temperatures, default_temperature, request)
    tiles = int64(log_probs.shape[0]) * int64(depth) * int64(row_tiles)
    first_tile = int64(row) * int64(row_tiles)
    first_piece = uint32(row + piece_of(first_tile, tiles, blocks))
    end_piece = uint32(row + piece_of(first_tile + int64(row_tiles - 1), tiles, blocks) + 1)
    begin_piece(shared, temperature)

    # The first of what each thread is to add, loaded ahead of its use.
    own_piece = uint32(min(uint32(first_piece + uint32(thread)), uint32(end_piece - uint32(1))))
    own_sum = double_of_bits(workspace[own_piece, 0])
    own_reference = workspace[own_piece, 1]
    if workspace[own_piece, 2] != int64(0):
        s_state[BAD] = 1

    # Ranks that a piece has not got are keys below all others.
    offered = uint32((end_piece - first_piece) * uint32(wanted))
    taken = uint32(0)
    count = uint32(0)
    while taken < offered:
        room = uint32(uint32(wanted + growth + TILE) - count)
        # Whole pieces: their keys are in no certain order, and what leaves is rounded to units of the
        # threshold at which it does.
        room = uint32(room // uint32(wanted) * uint32(wanted))
        end = uint32(min(offered, uint32(taken + room)))
        place = uint32(taken + uint32(thread))
        while place < end:
            # Four loads at once.
            key_0 = piece_key(workspace, first_piece, place, end, wanted)
            key_1 = piece_key(workspace, first_piece, uint32(place + uint32(THREADS)), end, wanted)
            key_2 = piece_key(workspace, first_piece, uint32(place + uint32(2 * THREADS)), end, wanted)
            key_3 = piece_key(workspace, first_piece, uint32(place + uint32(3 * THREADS)), end, wanted)
            store_key(s_keys, uint32(count + place - taken), key_0, place, end)
            place = uint32(place + uint32(THREADS))
            store_key(s_keys, uint32(count + place - taken), key_1, place, end)
            place = uint32(place + uint32(THREADS))
            store_key(s_keys, uint32(count + place - taken), key_2, place, end)
            place = uint32(place + uint32(THREADS))
            store_key(s_keys, uint32(count + place - taken), key_3, place, end)
            place = uint32(place + uint32(THREADS))
        count = uint32(count + end - taken)
        taken = end
        if thread == 0:
            s_state[COUNT] = int32(count)
        cuda.syncthreads()
        # A few more are sorted sooner than told apart.
        if count > max(uint32(wanted), uint32(THREADS)):
            count = uint32(raise_threshold(shared, wanted, int32(0)))
        cuda.syncthreads()

    padded = uint32(4)
    while padded < count:
        padded = uint32(padded << uint32(1))
    for place in range(uint32(count + uint32(thread)), padded, uint32(THREADS)):
        s_keys[uint32(place)] = uint64(0)
    for piece in range(uint32(first_piece + uint32(THREADS + thread)), end_piece, uint32(THREADS)):
        if workspace[uint32(piece), 2] != int64(0):
            s_state[BAD] = 1
    cuda.syncthreads()
    sort_keys(s_keys, padded)

    best = key_value(s_keys[0])
    is_row = s_state[BAD] == 0 and is_right
    inverse = 1.0 / temperature
    log_sum: Any = float64(0)
    if is_row and best > -INFINITY:
        others = relative(s_sums[uint32(thread)], s_bound[ORIGIN], s_scale[WHOLE], best, inverse)
        if uint32(first_piece + uint32(thread)) < end_piece:
            origin, whole = unpacked_reference(own_reference)
            others += relative(own_sum, origin, whole, best, inverse)
        for piece in range(uint32(first_piece + uint32(THREADS + thread)), end_piece, uint32(THREADS)):
            origin, whole = unpacked_reference(workspace[uint32(piece), 1])
            others += relative(double_of_bits(workspace[uint32(piece), 0]), origin, whole, best, inverse)
        for place in range(uint32(thread + 1), count, uint32(THREADS)):
            others += math.exp(scaled_distance(key_value(s_keys[bank_place(uint32(place))]), best, inverse))
        s_sums[uint32(thread)] = others
        log_sum = math.log1p(sum_over_block(s_sums))
    for place in range(uint32(thread), uint32(k), uint32(THREADS)):
        key = s_keys[bank_place(uint32(place))]
        value = key_value(key)
        log_prob = float32(np.nan)
        if is_row:
            log_prob = -INFINITY
            if value > -INFINITY:
                log_prob = float32(scaled_distance(value, best, inverse) - log_sum)
        log_probs[request, position, uint32(place)] = log_prob
        token_ids[request, position, uint32(place)] = int32(~uint32(key)) if is_row else int32(place)
