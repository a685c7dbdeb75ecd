"""The best token of a row of logits, in one pass over it."""

from __future__ import annotations

from numba_ddtree.cuda_target import cuda, device_routine, int32, uint32, uint64
from numba_ddtree.device.logit_keys import value_key
from numba_ddtree.device.logit_rows import STEP, read_eight
from numba_ddtree.device.rows import MINUS_INFINITY, first_place, largest, load_eight, maximum, numbers_of
from numba_ddtree.device.warp import LANES, warp_max
from numba_ddtree.refs.token_choice import NO_TOKEN


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
