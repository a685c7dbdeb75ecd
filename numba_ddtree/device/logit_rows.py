"""Rows of logits and their masks, as the blocks that choose tokens read them: a vector of eight a thread."""

from __future__ import annotations

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, int64, uint32
from numba_ddtree.device.rows import (
    MINUS_INFINITY,
    allowed_eight,
    load_eight,
    load_eight_within,
    load_within,
    numbers_of,
)
from numba_ddtree.launch import block_threads

THREADS = block_threads(256)
STEP = np.uint32(THREADS)


@device_routine
def load_words(logits, start, vector, is_aligned):  # type: ignore[no-untyped-def]
    """Words of the logits of eight tokens, -inf past the row's end."""
    first = uint32(vector * uint32(8))
    if is_aligned:
        return load_eight(logits, start, first)
    return load_eight_within(logits, start, first, uint32(logits.shape[2]))


@device_routine
def mask_row(token_bitmask, vocabulary, row, request):  # type: ignore[no-untyped-def]
    """First word of a row's mask, which each row has, or each request."""
    words = int64((vocabulary + 31) // 32)
    has_each_row = token_bitmask.shape[0] == words * int64(cuda.gridDim.x)
    return words * int64(row if has_each_row else request)


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
