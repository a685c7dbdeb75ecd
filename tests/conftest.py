"""What every test shares: devices, seeds, and which folder runs in the simulator."""

from __future__ import annotations

import os
import secrets
from typing import Any

import numpy as np
import pytest

from numba_ddtree.devices import find_device_fault

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")

# Numba chooses the simulator when its CUDA target is first imported, so these run in a process of their
# own, which test_simulator.py starts.
collect_ignore = [] if SIMULATED else ["simulator"]

# jax would otherwise take most of the device's memory and leave little for the other libraries.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of the fixture rng, to repeat a failure")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    fault = "Numba's simulator is on" if SIMULATED else find_device_fault()
    if fault is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {fault}"))


@pytest.fixture
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the package allocates, so that a result that is not written shows."""
    from kernel_checks import await_copies

    from numba_ddtree.cuda_target import cuda

    allocate = cuda.device_array

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = allocate(*args, **kwargs)
        if array.size:
            poison = np.full(array.nbytes, 0xA5, np.uint8).view(array.dtype)
            array.copy_to_device(poison.reshape(tuple(array.shape)))
            await_copies()
        return array

    monkeypatch.setattr(cuda, "device_array", poisoned)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Make a generator of a fresh seed, which pytest shows where the test fails."""
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = secrets.randbits(32)
    print(f"repeat with --seed={seed}")
    return np.random.default_rng(seed)
