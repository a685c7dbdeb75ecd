"""`merge_states` against float64, for whichever arrays it is given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from kernel_checks import Guarded, Library
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike, NDArray

import numba_ddtree

FLOAT_ULP = 2.0**-23
STEPS = {"float32": FLOAT_ULP, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # between 1 and the number after it
DTYPES = (np.float32, np.float16, bfloat16)
EMPTY = (-np.inf, np.inf)


def make_states(
    rng: np.random.Generator, rows: tuple[int, ...], D: int, dtypes: tuple[DTypeLike, DTypeLike]
) -> dict[str, NDArray[Any]]:
    """Draw two states, some of whose rows are empty on either side or both, with NaN for outputs."""
    states: dict[str, NDArray[Any]] = {}
    for side, dtype in zip("ab", dtypes, strict=True):
        out = rng.standard_normal((*rows, D), np.float32)
        lse = rng.normal(0, 8, rows).astype(np.float32)
        is_empty = rng.random(rows) < 0.25
        out[is_empty] = np.nan
        lse[is_empty] = rng.choice(EMPTY, int(is_empty.sum()))
        states |= {f"out_{side}": out.astype(dtype), f"lse_{side}": lse}
    return states


def merge_in_float64(
    states: dict[str, NDArray[Any]], base_a: float, base_b: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Merge row by row, as the formula says, in float64."""
    rows = states["lse_a"].shape
    out, lse = np.zeros(states["out_a"].shape), np.full(rows, -np.inf)
    for row in np.ndindex(rows):
        parts = [
            (math.log(base) * float(states[f"lse_{side}"][row]), states[f"out_{side}"][row].astype(float))
            for side, base in (("a", base_a), ("b", base_b))
            if np.isfinite(states[f"lse_{side}"][row])
        ]
        if parts:
            lse[row] = np.logaddexp.reduce([log for log, _ in parts])
            out[row] = sum(np.exp(log - lse[row]) * values for log, values in parts)
    return out, lse


def check_merge(
    library: Library,
    states: dict[str, NDArray[Any]],
    *,
    out_dtype: DTypeLike | None = None,
    bases: tuple[float, float] = (math.e, math.e),
    **options: Any,
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Merge into poisoned arrays; results must be float64's, to the rounding of each step.

    A log-sum-exp of up to 50 is rounded to float32, and in base 2 again, so that the weights of float32 are
    off by up to 2^-18 of themselves, relative to each other; an output by that of the outputs' difference.
    """
    dtype = np.dtype(states["out_a"].dtype if out_dtype is None else out_dtype)
    guards = {
        "out": Guarded(library, states["out_a"].shape, dtype),
        "lse": Guarded(library, states["lse_a"].shape, np.float32),
    }
    given = library.put_all(**states)
    if library.takes_out:
        given |= {name: guard.array for name, guard in guards.items()}
    elif out_dtype is not None:
        options["out_dtype"] = out_dtype
    got = numba_ddtree.merge_states(**given, lse_base_a=bases[0], lse_base_b=bases[1], **options)
    out, lse = (library.get(array) for array in got)
    for guard in guards.values():
        guard.check()
    assert (out.dtype, lse.dtype) == (dtype, np.float32)
    want_out, want_lse = merge_in_float64(states, *bases)
    np.testing.assert_allclose(lse, want_lse, rtol=4 * FLOAT_ULP, atol=4 * FLOAT_ULP)
    rounding = STEPS[dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), want_out, rtol=rounding, atol=2.0**-15)
    return out, lse


def assert_a_lone_side_is_kept(
    states: dict[str, NDArray[Any]], out: NDArray[Any], lse: NDArray[np.float32]
) -> None:
    """Check that a row that is empty on one side is the other's, exactly, and 0 where both are empty."""
    lone = {side: ~np.isfinite(states[f"lse_{other}"]) for side, other in (("a", "b"), ("b", "a"))}
    both = lone["a"] & lone["b"]
    assert (out[both] == 0).all()
    assert (lse[both] == -np.inf).all()
    for side, is_lone in lone.items():
        rows = is_lone & ~both
        np.testing.assert_array_equal(out[rows], states[f"out_{side}"][rows].astype(out.dtype))
        np.testing.assert_array_equal(lse[rows], states[f"lse_{side}"][rows])
