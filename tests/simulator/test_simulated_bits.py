"""Order-preserving codes in the simulator, against the model."""

from __future__ import annotations

import numpy as np
import pytest
from bits_checks import EDGE_PATHS, EDGES, check_keys, check_paths, random_path
from kernel_checks import numba_library

from numba_ddtree.cuda_target import SIMULATED

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")


def test_keys_are_the_model(rng: np.random.Generator) -> None:
    check_keys(numba_library(), np.concatenate([EDGES, -rng.exponential(size=50)]), blocks=2)


def test_codes_of_paths_are_the_model(rng: np.random.Generator) -> None:
    check_paths(numba_library(), EDGE_PATHS + [random_path(rng) for _ in range(24)], blocks=1)
