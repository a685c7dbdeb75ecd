"""Order-preserving integers for scores, and bit strings for paths of ranks.

Both turn an order that has no machine type into one that has: scores (float64) are compared as
signed integers, tuples of ranks as strings of 96 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_function, int32, int64, uint32, uint64
from numba_ddtree.device.memory import store_flat

MAGNITUDE = np.int64(0x7FFF_FFFF_FFFF_FFFF)
PATH_WORDS = 3

if SIMULATED:

    @device_function
    def bits_of(value: Any) -> Any:
        return np.float64(value).view(np.int64)

    @device_function
    def value_of(bits: Any) -> Any:
        return np.int64(bits).view(np.float64)

else:
    from numba.cuda import libdevice

    @device_function
    def bits_of(value: Any) -> Any:
        return libdevice.double_as_longlong(value)

    @device_function
    def value_of(bits: Any) -> Any:
        return libdevice.longlong_as_double(bits)


@device_function
def order_key(score: Any) -> Any:
    """Map a float64 that is not NaN to an int64 of the same order.

    IEEE 754 numbers are ordered as sign and magnitude; flipping the magnitude of the negative ones
    gives two's complement order. The map is its own inverse on the bits.
    """
    bits = bits_of(score)
    return bits ^ ((bits >> np.int64(63)) & MAGNITUDE)


@device_function
def score_of(key: Any) -> Any:
    """Inverse of `order_key`."""
    return value_of(key ^ ((key >> np.int64(63)) & MAGNITUDE))


@device_function
def rank_code(rank: Any) -> Any:
    """Code of a rank (below 2^15) as bits, from the top of a uint32 down.

    The code of a rank r, with e = floor(log2(r + 1)), is e ones, a zero, and the e low bits of
    r + 1 (Elias' gamma code with its unary part inverted): codes are ordered as the ranks are, and
    none is the beginning of another. So the concatenated codes of a tuple of ranks, padded with
    zeros, are ordered as the tuples are, except that a tuple and its extensions by rank 0 are
    equal; the shorter one is first among them.

    A best-first tree holds, with a tuple of ranks, every tuple of the same length that is nowhere
    larger. The product of (r + 1) along a path of a tree of 1024 nodes is thus at most 1024, and
    at most 2048 for a child on offer: its codes have at most 2 * 11 + 64 bits together.
    """
    exponent = int32(31 - cuda.clz(int32(rank + 1)))
    ones = (int64(1) << exponent) - 1
    code = (ones << (exponent + 1)) | (int64(rank + 1) - (int64(1) << exponent))
    return uint32(code << (31 - 2 * exponent))


@device_function
def rank_code_length(rank: Any) -> Any:
    """Length of a rank's code in bits."""
    return int32(2 * (31 - cuda.clz(int32(rank + 1))) + 1)


@device_function
def placed_code(code: Any, start: Any, word: Any) -> Any:
    """Word `word` (uint32) of a bit string that holds only a code, which begins at bit `start`."""
    shift = int32(start - 32 * word)
    if shift <= -32 or shift >= 32:
        return uint32(0)
    return uint32((uint64(code) << uint64(32)) >> uint64(shift + 32))


@device_function
def clear_ancestor_bits(ancestor_bits: Any, request: Any, threads: Any) -> None:
    """Make a request's ancestor bits 0, as `write_ancestor_bits` wants them; the whole block takes part."""
    size = uint32(ancestor_bits.shape[1]) * uint32(ancestor_bits.shape[2])
    start = int64(request) * int64(size)
    # As one row: dividing a running index by a row's length costs more than writing it.
    for place in range(uint32(cuda.threadIdx.x), uint32(size), uint32(threads)):
        store_flat(ancestor_bits, int64(start + int64(place)), uint32(0))


@device_function
def write_ancestor_bits(ancestor_bits: Any, request: Any, s_parents: Any, count: Any, threads: Any) -> None:
    """Write a request's ancestor bits from its parents in shared memory; the whole block takes part.

    Parameters
    ----------
    ancestor_bits : uint32 [B, N, words]
        Cleared, with a barrier since.
    request : int
    s_parents : int32 [N]
        An earlier slot for each node below `count`, -1 for the root.
    count : int
        Nodes in use.
    threads : int
        Threads of the block.
    """
    for node in range(uint32(cuda.threadIdx.x), uint32(count), uint32(threads)):
        # Indices fall on the way to the root, so that each word is complete when the walk leaves it.
        word = uint32(node >> uint32(5))
        bits = uint32(uint32(1) << uint32(node & uint32(31)))
        ancestor = int32(s_parents[node])
        while ancestor >= 0:
            ancestor_word = uint32(uint32(ancestor) >> uint32(5))
            if ancestor_word != word:
                ancestor_bits[request, node, word] = bits
                word = ancestor_word
                bits = uint32(0)
            bits = uint32(bits | (uint32(1) << uint32(uint32(ancestor) & uint32(31))))
            ancestor = int32(s_parents[uint32(ancestor)])
        ancestor_bits[request, node, word] = bits
