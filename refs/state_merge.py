"""Merging of two attention results over different keys, by their log-sum-exps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def merge_states(
    out_a: NDArray[Any],
    lse_a: NDArray[np.float32],
    out_b: NDArray[Any],
    lse_b: NDArray[np.float32],
    lse_base_a: float = math.e,
    lse_base_b: float = math.e,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Merge, row by row, what a query got of two sets of keys into what it gets of both.

    With ``w_a = exp(lse_a)``, and likewise b, ``out = (w_a out_a + w_b out_b) / (w_a + w_b)`` and
    ``lse = log(w_a + w_b)``.

    Parameters
    ----------
    out_a, out_b : float [..., D]
    lse_a, lse_b : float32 [...]
        -inf, or +inf, for a row that saw no key, whose `out` has no meaning.
    lse_base_a, lse_base_b : float
        The base of each side's logarithm.

    Returns
    -------
    out : float64 [..., D]
        Zeros where both rows are empty.
    lse : float64 [...]
        Natural log.
    """
    logs = [
        np.where(lse == np.inf, -np.inf, lse.astype(np.float64) * math.log(base))
        for lse, base in ((lse_a, lse_base_a), (lse_b, lse_base_b))
    ]
    largest = np.maximum(*logs)
    base = np.where(largest == -np.inf, 0, largest)
    weights = [np.exp(log - base) for log in logs]
    total = weights[0] + weights[1]
    is_empty = total == 0
    out = np.zeros(out_a.shape)
    for side, weight in zip((out_a, out_b), weights, strict=True):
        # Of a side without weight nothing is taken, whatever is there.
        share = np.divide(weight, total, out=np.zeros_like(weight), where=~is_empty)[..., None]
        out += np.where(share == 0, 0, share * np.where(share == 0, 0, side.astype(np.float64)))
    with np.errstate(divide="ignore"):
        return out, base + np.log(total)
