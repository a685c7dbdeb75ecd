"""Arithmetic that rounds once an operation, on every machine, and functions made of it.

The compiler contracts ``a * b + c`` to one fused operation, which rounds once where numpy rounds twice;
the operations here it leaves alone. What is built of them gives the bits of `numba_ddtree.refs`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, device_routine, float64, int32, int64
from numba_ddtree.refs.token_choice import (
    ATANH_SERIES,
    EXP_SERIES,
    LN2,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST_EXPONENT,
    MASS_BITS,
    SQRT_HALF,
)

if SIMULATED:

    def times(left: Any, right: Any) -> Any:
        return np.float64(left) * np.float64(right)

    def plus(left: Any, right: Any) -> Any:
        return np.float64(left) + np.float64(right)

    def over(left: Any, right: Any) -> Any:
        return np.float64(left) / np.float64(right)

    def times32(left: Any, right: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.float32(left) * np.float32(right)

    def plus32(left: Any, right: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.float32(left) + np.float32(right)

    def reciprocal32(value: Any) -> Any:
        return np.float32(1) / np.float32(value)

    def nearest32(value: Any) -> Any:
        return np.rint(value)

    def scaled32(value: Any, exponent: Any) -> Any:
        return np.ldexp(np.float32(value), int(exponent))

    def about_log2(value: Any) -> Any:
        return np.log2(np.float32(value))

    def smaller32(left: Any, right: Any) -> Any:
        return np.fmin(left, right)

    def larger32(left: Any, right: Any) -> Any:
        return np.fmax(left, right)

else:
    from numba.cuda import libdevice

    times, plus, over = libdevice.dmul_rn, libdevice.dadd_rn, libdevice.ddiv_rn
    times32, plus32, reciprocal32 = libdevice.fmul_rn, libdevice.fadd_rn, libdevice.frcp_rn
    nearest32 = libdevice.rintf  # ties to even
    scaled32 = libdevice.ldexpf
    smaller32, larger32 = libdevice.fminf, libdevice.fmaxf  # of a number and a NaN the number
    # lg2.approx: off by 2^-22 at most between 1/2 and 2, and by 2^-22 of itself elsewhere.
    about_log2 = libdevice.fast_log2f


@device_routine
def natural_log(x: Any) -> Any:
    """Logarithm of a positive normal float64: `numba_ddtree.refs.token_choice.natural_log`."""
    mantissa, exponent = math.frexp(x)
    if mantissa < SQRT_HALF:
        mantissa = plus(mantissa, mantissa)
        exponent -= 1
    ratio = over(plus(mantissa, -1.0), plus(mantissa, 1.0))
    square = times(ratio, ratio)
    series = ATANH_SERIES[0]
    series = plus(times(series, square), ATANH_SERIES[1])
    series = plus(times(series, square), ATANH_SERIES[2])
    series = plus(times(series, square), ATANH_SERIES[3])
    series = plus(times(series, square), ATANH_SERIES[4])
    series = plus(times(series, square), ATANH_SERIES[5])
    series = plus(times(series, square), ATANH_SERIES[6])
    series = plus(times(series, square), ATANH_SERIES[7])
    series = plus(times(series, square), ATANH_SERIES[8])
    series = plus(times(series, square), ATANH_SERIES[9])
    return plus(times(float64(exponent), LN2), times(plus(ratio, ratio), series))


@device_routine
def gumbel(bits: Any) -> Any:
    """Gumbel noise of a random word, float64: `numba_ddtree.refs.token_choice.gumbel`."""
    complement = times(4294967295.5 - float64(bits), 2.0**-32)
    return -natural_log(-natural_log(complement))


@device_routine
def mass(value: Any, best: Any, inverse_temperature: Any) -> Any:
    """Probability in units of 2^-40 of the best one's, int64: `numba_ddtree.refs.token_choice.masses`."""
    x = times32(plus32(value, -best), inverse_temperature)
    if value == best:
        return int64(1 << MASS_BITS)
    if not x >= LOWEST_EXPONENT:
        return int64(0)
    k = nearest32(times32(x, LOG2_E))
    r = plus32(plus32(x, -times32(k, LN2_HIGH)), -times32(k, LN2_LOW))
    series = EXP_SERIES[0]
    series = plus32(times32(series, r), EXP_SERIES[1])
    series = plus32(times32(series, r), EXP_SERIES[2])
    series = plus32(times32(series, r), EXP_SERIES[3])
    series = plus32(times32(series, r), EXP_SERIES[4])
    series = plus32(times32(series, r), EXP_SERIES[5])
    series = plus32(times32(series, r), EXP_SERIES[6])
    series = plus32(times32(series, r), EXP_SERIES[7])
    return int64(nearest32(scaled32(series, int32(int32(k) + int32(MASS_BITS)))))
