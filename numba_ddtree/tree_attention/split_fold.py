"""How the results of a row's splits are put together: one after the other, each folded into those before.

What splits 0 to s - 1 have come to is a maximum M, a sum L of exponentials relative to it, and an output O
that is not divided by it. Folding in split s, of m, l and o, gives

    M' = max(M, m),   L' = 2^(M - M') L + 2^(m - M') l,   O' = 2^(M - M') O + 2^(m - M') o

(the online softmax of Milakov and Gimelshein, 2018, over splits), and at last ``O / L`` and
``lse = (M + log2 L) ln 2``. A kernel may have two sums, of exponentials as they are, for the log-sum-exp, and
of those it has multiplied with, which are rounded, for the output. A kernel that has a whole tile folds as it
goes along, and `split_merge` does where the splits of a tile were different workers': by these operations in
this order, so that results do not tell.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, device_routine, float32

if not SIMULATED:
    from numba_ddtree.device.ptx import exp2, larger_of, multiply_add, product_of, quick_reciprocal, sum_of


@device_routine
def fold_weights(maximum: Any, added: Any) -> Any:
    """M' of M and m, and the weights of both (float32)."""
    new = larger_of(maximum, added)
    origin = new if new > float32(-np.inf) else float32(0)
    return new, exp2(sum_of(maximum, -origin)), exp2(sum_of(added, -origin))


@device_routine
def folded(weight: Any, value: Any, weight_added: Any, added: Any) -> Any:
    """Weighted sum (float32) of what there was and what is added."""
    return multiply_add(weight_added, added, product_of(weight, value))


@device_routine
def fold_normaliser(total: Any) -> Any:
    """1 / L (float32) of rows of several splits; 0 of nothing."""
    return quick_reciprocal(total) if total != float32(0) else float32(0)
