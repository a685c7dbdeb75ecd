"""Exponentials of the numbers below a bound, relative to that bound, to an ulp of float32.

The hardware's own exponential is off by several ulp, and the float32 difference of a number and the
largest one by many more. Here a number is multiplied by log2(e) / temperature with a product as exact
as fused operations make it, and split into a whole number and a rest within a half: 2^rest is a
polynomial, and the whole number goes to the exponent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import (
    SIMULATED,
    device_function,
    device_routine,
    float32,
    float64,
    int64,
    uint32,
    uint64,
)
from numba_ddtree.device.floats import double_of_bits, float_bits, float_of_bits, fused_multiply_add, larger

LOG2_E = np.float64(1.4426950408889634)
LN_2 = np.float64(0.6931471805599453)
# 1 + r (c1 + r (c2 + ...)) is 2^r for r from -1/2 to 1/2 to 2e-9, a minimax fit of the relative error.
COEFFICIENTS = tuple(
    np.float32(c)
    for c in (0.693147202855, 0.240226479136, 0.0555033247, 0.009618437357, 0.00133988744, 0.00015353362)
)
# Added to a number below 2^22, leaves its nearest whole number in the low bits.
ROUNDER = np.float64(1.5 * 2**23)
LARGEST_EXPONENT = np.float64(2**20)
DEPTH = np.float64(60)  # e-folds below the bound at which a term counts as nothing
LOWEST = np.float64(np.finfo(np.float32).min)

if SIMULATED:

    def nearest(value: Any) -> Any:
        return np.rint(value)

else:
    from numba.cuda import libdevice

    @device_function
    def nearest(value: Any) -> Any:
        """Nearest whole number of a float64."""
        return libdevice.rint(value)


@device_routine
def exponent_scale(temperature: Any) -> Any:
    """``log2(e) / temperature``, float64."""
    return LOG2_E / temperature


@device_routine
def scale_terms(scale: Any) -> Any:
    """Scale as the sum of two float32."""
    high = float32(scale)
    return high, float32(scale - float64(high))


@device_routine
def bound_terms(bound: Any, temperature: Any, scale: Any) -> Any:
    """Return what `exponential` is to know of a finite bound, and what it is relative to.

    The former are an origin, the lowest distance from it and a rounder, float32. The latter is the
    exponential of ``origin / temperature`` times 2 to the power of a whole number, float64, near that of
    ``bound / temperature``.
    """
    exponent = float64(bound) * scale
    is_small = abs(exponent) <= LARGEST_EXPONENT
    # A difference from a far bound is exact, since what is left of it is within a part in 10^4.
    origin = float32(0) if is_small else bound
    whole = nearest(exponent) if is_small else float64(0)
    # A distance, since a number so little below a far bound would be rounded to the bound.
    floor = float32(max(float64(bound) - float64(origin) - DEPTH * temperature, LOWEST))
    return (origin, floor, float32(ROUNDER - whole)), whole


@device_routine
def power_of_two(exponent: Any) -> Any:
    """``2 ** exponent`` of a whole number (float64) that is at most 1023; 0 for one below -1022."""
    bits = int64(max(exponent, -1023.0)) + int64(1023)
    return double_of_bits(int64(bits << int64(52)))


@device_routine
def exponential(value: Any, terms: Any, scale: Any) -> Any:
    """Exponential of ``value / temperature`` relative to the bound's terms, to 8e-8; at most the bound.

    Of what is farther below than the lowest distance, it is that one's: 1e-26 of the bound's.
    """
    origin, floor, rounder = terms
    scale_high, scale_low = scale
    distance = larger(value - origin, floor)
    shifted = fused_multiply_add(distance, scale_high, rounder)
    whole = shifted - rounder
    rest = fused_multiply_add(distance, scale_high, -whole)
    rest = fused_multiply_add(distance, scale_low, rest)
    series = fused_multiply_add(COEFFICIENTS[5], rest, COEFFICIENTS[4])
    series = fused_multiply_add(series, rest, COEFFICIENTS[3])
    series = fused_multiply_add(series, rest, COEFFICIENTS[2])
    series = fused_multiply_add(series, rest, COEFFICIENTS[1])
    series = fused_multiply_add(series, rest, COEFFICIENTS[0])
    series = fused_multiply_add(series, rest, float32(1))
    # The exponent's bits wrap around, which 64 bits and a mask say without an overflow.
    bits = uint64(float_bits(series)) + (uint64(float_bits(shifted)) << uint64(23))
    return float_of_bits(uint32(bits & uint64(0xFFFFFFFF)))
