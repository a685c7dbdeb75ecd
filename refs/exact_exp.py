"""The exponential function as a fixed sequence of IEEE 754 operations.

Libraries differ in the last bit of exp. Where a comparison of sums of probabilities decides how large a
tree is, the reference and the kernel have to agree to the bit, so both evaluate this one.
"""

from __future__ import annotations

import math

LARGEST = 700.0
"""Beyond it, either way, the argument counts as this, or the result as 0."""

LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first with 21 zeros at its end, so that its product with an exponent is exact.
LN2_HIGH = 0.693147180369123816490
LN2_LOW = 1.90821492927058770002e-10

COEFFICIENTS = tuple(1.0 / math.factorial(degree) for degree in range(13, -1, -1))
"""Of Taylor's series, highest first; for |r| <= ln(2) / 2 the rest is below 2^-57."""


def exact_exp(x: float) -> float:
    """Return exp(x) to about an ulp: each addition and multiplication rounded, none fused.

    ``x = k ln 2 + r``, and exp(x) is 2^k times the series of exp(r), by Horner's rule.
    """
    if x < -LARGEST:
        return 0.0
    x = min(x, LARGEST)
    k = math.floor(x * LOG2_E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = 0.0
    for coefficient in COEFFICIENTS:
        series = series * r + coefficient
    return math.ldexp(series, k)
