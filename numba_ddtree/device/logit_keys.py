"""Integers in the order of logits, and of tokens by their logits.

As an integer, a token's place in the order by logit falling, then by token, is found digit by digit, ties and
all. Of a logit's own key it has only the bits in which the keys of logits of its type differ.
"""

from __future__ import annotations

from numba_ddtree.cuda_target import device_routine, float32, uint32, uint64
from numba_ddtree.device.floats import float_bits, float_of_bits

TOKEN_BITS = 18
MAX_VOCABULARY = 1 << TOKEN_BITS
KEY_BITS = {"float32": 32, "float16": 19, "bfloat16": 16}  # of a float32 that holds such a number


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
