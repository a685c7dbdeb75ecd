"""Host time of a launch: prepared, by `cuda.core.launch`, and by Numba's dispatcher."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pytest

from numba_ddtree.devices import find_device_fault
from numba_ddtree.launch import LaunchSequence
from numba_ddtree.tree_accept import ACCEPT_TREE, accept_tree
from numba_ddtree.tree_build import build_tree

BATCH, DEPTH, BUDGET = 32, 15, 64
LAUNCHES = 200
CASE = {"kernel arguments": 14, "arrays among them": 13}
TIMING = (
    "host time of a launch of accept_tree's kernel, without waiting: median of 20 means over 200 launches, "
    "each 200 beginning on an idle device"
)

DEVICE_FAULT = find_device_fault()
pytestmark = pytest.mark.skipif(DEVICE_FAULT is not None, reason=f"no CUDA device: {DEVICE_FAULT}")


@pytest.fixture(autouse=True)
def timing(recorder):
    recorder.timing("launch", TIMING)


@pytest.fixture
def sequence(on_device):
    """One launch of `accept_tree`, of 14 arguments, 13 of them arrays."""
    rng = np.random.default_rng(0)
    log_probs = -np.sort(rng.exponential(size=(BATCH, DEPTH, BUDGET)), axis=-1).astype(np.float32)
    arrays = on_device(
        log_probs, np.zeros(log_probs.shape, np.int32), np.zeros((BATCH, BUDGET + 1), np.int32)
    )
    tree = build_tree(*arrays[:2], BUDGET)
    recorded = LaunchSequence()
    accept_tree(tree, arrays[2], stream=recorded)
    return recorded


def measure(benchmark, launch):
    """Return a launch's time as they come, a few at a time, so that the driver's queue never fills."""
    from numba_ddtree.cuda_target import cuda

    launch()
    times = []
    for _ in range(20):
        cuda.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        times.append(1e6 * (time.perf_counter() - started) / LAUNCHES)
    cuda.synchronize()
    benchmark.group = "host time of a launch of accept_tree_kernel"
    benchmark.extra_info["host_us"] = median(times)
    benchmark.pedantic(launch, rounds=20, iterations=LAUNCHES)
    cuda.synchronize()
    return median(times)


def bench_prepared(benchmark, recorder, sequence):
    (prepared,) = sequence.launches
    us = measure(benchmark, lambda: prepared.launch(0))
    recorder.kernel("launch", CASE, kernel="PreparedLaunch", us=us)


def bench_sequence_of_one(benchmark, recorder, sequence):
    us = measure(benchmark, lambda: sequence.launch(0))
    recorder.peer("launch", CASE, "LaunchSequence of one", us)


def bench_cuda_core(benchmark, recorder, sequence):
    from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, launch

    from numba_ddtree.launch import _slots

    (prepared,) = sequence.launches
    config = LaunchConfig(grid=BATCH, block=ACCEPT_TREE.threads, shmem_size=8 * (BUDGET + 1))
    slots = [slot for argument in prepared.arguments for slot in _slots(argument)]
    code = prepared._loaded.code
    us = measure(benchmark, lambda: launch(LEGACY_DEFAULT_STREAM, config, code, *slots))
    recorder.peer("launch", CASE, "cuda.core.launch", us)


@pytest.mark.filterwarnings("ignore:.*low occupancy")
@pytest.mark.parametrize("library", ["numba", "torch"])
def bench_dispatcher(benchmark, recorder, sequence, library):
    from numba_ddtree.cuda_target import cuda

    (prepared,) = sequence.launches
    arguments = [a if isinstance(a, np.generic) else cuda.as_cuda_array(a) for a in prepared.arguments]
    if library == "torch":
        torch = pytest.importorskip("torch")
        arguments = [a if isinstance(a, np.generic) else torch.as_tensor(a, device="cuda") for a in arguments]
    configured = ACCEPT_TREE._dispatcher[BATCH, ACCEPT_TREE.threads, 0, 8 * (BUDGET + 1)]
    us = measure(benchmark, lambda: configured(*arguments))
    recorder.peer("launch", CASE, f"Numba's dispatcher, {library} arrays", us)
