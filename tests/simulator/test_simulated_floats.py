"""16-bit numbers in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from floats_checks import check_narrowing, check_widening, float_edges
from kernel_checks import numba_library

from numba_ddtree.cuda_target import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")


def test_patterns_are_widened(rng: np.random.Generator) -> None:
    patterns = rng.integers(0, 2**16, 60).astype(np.uint16)
    patterns[:4] = 0x8000, 0x7C00, 0x7F80, 0x7FC0
    check_widening(numba_library(), patterns, blocks=2)


def test_numbers_are_rounded_to_nearest_even() -> None:
    check_narrowing(numba_library(), float_edges(), blocks=4)
