"""16-bit numbers on a device: every pattern, and the points where rounding turns."""

from __future__ import annotations

import numpy as np
import pytest
from floats_checks import check_narrowing, check_widening, float_edges
from kernel_checks import numba_library


@pytest.mark.gpu
def test_device_widens_every_pattern() -> None:
    check_widening(numba_library(), np.arange(2**16, dtype=np.uint16), blocks=2**11)


@pytest.mark.gpu
def test_device_rounds_to_nearest_even(rng: np.random.Generator) -> None:
    values = rng.integers(0, 2**32, 2**14, dtype=np.uint32).view(np.float32)
    check_narrowing(numba_library(), np.concatenate([float_edges(), values]), blocks=2**10)
