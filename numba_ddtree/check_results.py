"""Checks and their results: running them, and measuring how far arrays are from what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.bundle import JSON
from numba_ddtree.errors import DDTreeError

__all__ = ["Check", "CheckResult", "Comparison", "OnResult", "OnStart", "compare_arrays", "run_all"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check.

    Attributes
    ----------
    name : str
        ``operation/case``.
    passed : bool
    max_abs : float
        Largest absolute difference from what was expected; infinity where shapes, dtypes or infinities
        differ, at a NaN, and where the operation raised.
    max_rel : float
        `max_abs` over the largest magnitude that was expected of the same array.
    us : float
        Microseconds, see `numba_ddtree.stages.Timed`; NaN where the operation raised.
    case : str
        The size that was really run.
    fault : str
        What is wrong, for people; empty if passed.
    """

    name: str
    passed: bool
    max_abs: float
    max_rel: float
    us: float
    case: str
    fault: str = ""

    def as_json(self) -> dict[str, JSON]:
        """Return everything but `fault`; numbers that are not finite, which JSON lacks, become null."""
        members = asdict(self)
        del members["fault"]
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in members.items()
        }


@dataclass(frozen=True)
class Comparison:
    """How far arrays are from what was expected, and the first fault."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    fault: str = ""

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel), self.fault or other.fault
        )


@dataclass(frozen=True)
class Check:
    """A check to run: what gives its comparison and its time in microseconds."""

    name: str
    case: str
    run: Callable[[], tuple[Comparison, float]]


OnResult: TypeAlias = Callable[[CheckResult], None]
"""Called with each result as soon as it is there."""

OnStart: TypeAlias = Callable[[str, int, int], None]
"""Called before each check with its name, its number from 0 and the number of checks."""


def run_all(
    checks: Sequence[Check],
    on_result: OnResult | None,
    on_start: OnStart | None,
    fatal: type[DDTreeError],
) -> list[CheckResult]:
    """Run checks one after another.

    Parameters
    ----------
    checks : sequence of Check
    on_result, on_start
        See `OnResult` and `OnStart`.
    fatal
        The errors that end it all. Any other exception is a failed check.

    Returns
    -------
    list of CheckResult
    """
    results = []
    for number, check in enumerate(checks):
        if on_start is not None:
            on_start(check.name, number, len(checks))
        results.append(_outcome(check, fatal))
        if on_result is not None:
            on_result(results[-1])
    return results


def _outcome(check: Check, fatal: type[DDTreeError]) -> CheckResult:
    try:
        comparison, us = check.run()
    except fatal:
        raise
    except Exception as error:  # whatever a kernel raises is a failed check, and the others still run
        fault = " ".join(f"{type(error).__name__}: {error}".split())
        comparison, us = Comparison(math.inf, math.inf, fault), math.nan
    passed = not comparison.fault
    return CheckResult(
        check.name, passed, comparison.max_abs, comparison.max_rel, us, check.case, comparison.fault
    )


def compare_arrays(
    got: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], tolerance: float = 0.0
) -> Comparison:
    """Compare arrays by name.

    Parameters
    ----------
    got, expected : mapping of str to numpy.ndarray
        What is expected decides the names. Integers and booleans must be equal, in dtype too.
    tolerance : float
        Largest absolute difference allowed between floating-point numbers; their dtypes may differ.

    Returns
    -------
    Comparison
    """
    return sum(
        (_compare(name, got[name], array, tolerance) for name, array in expected.items()),
        start=Comparison(),
    )


def _compare(name: str, got: NDArray[Any], expected: NDArray[Any], tolerance: float) -> Comparison:
    is_floating = got.dtype.kind == expected.dtype.kind == "f"
    if got.shape != expected.shape or not (is_floating or got.dtype == expected.dtype):
        found, wanted = (f"{array.dtype} of shape {list(array.shape)}" for array in (got, expected))
        return Comparison(math.inf, math.inf, f"{name}: got {found}; expected {wanted}")
    if not got.size:
        return Comparison()
    differences = _differences(got, expected)
    worst = np.unravel_index(int(differences.argmax()), differences.shape)
    max_abs = float(differences[worst])
    finite = np.where(np.isfinite(expected), expected, 0).astype(np.float64)
    scale = float(np.abs(finite).max())
    max_rel = max_abs / scale if scale > 0 else (math.inf if max_abs > 0 else 0.0)
    if max_abs <= (tolerance if is_floating else 0.0):
        return Comparison(max_abs, max_rel)
    where = f"{name}[{', '.join(map(str, worst))}]"
    return Comparison(max_abs, max_rel, f"{where}: got {got[worst]}; expected {expected[worst]}")


def _differences(got: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """Absolute differences; infinite at a NaN, zero between equal infinities."""
    found, wanted = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences: NDArray[np.float64] = np.where(found == wanted, 0.0, np.abs(found - wanted))
    differences[np.isnan(differences)] = math.inf
    return differences
