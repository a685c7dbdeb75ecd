"""Shared arrays in the simulator, whose threads may be interrupted anywhere."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from numba_ddtree.cuda_target import SIMULATED, cuda, int32

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")

THREADS = 32


@cuda.jit
def sum_twice(sums):  # type: ignore[no-untyped-def]
    s_first = cuda.shared.array(1, int32)
    s_second = cuda.shared.array((1, 2), int32)
    thread = cuda.threadIdx.x
    if thread == 0:
        s_first[0] = 0
        s_second[0, 1] = 0
    cuda.syncthreads()
    cuda.atomic.add(s_first, 0, thread)
    cuda.atomic.add(s_second, (0, 1), 1)
    cuda.syncthreads()
    sums[cuda.blockIdx.x, thread, 0] = s_first[0]
    sums[cuda.blockIdx.x, thread, 1] = s_second[0, 1]


def test_threads_that_ask_at_once_share_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    make = np.empty

    def interrupted(*args: Any, **options: Any) -> Any:
        time.sleep(0.01)  # lets the other threads run
        return make(*args, **options)

    monkeypatch.setattr(np, "empty", interrupted)
    for _ in range(2):  # a launch has arrays of its own
        sums = np.full((2, THREADS, 2), -1, np.int32)
        sum_twice[2, THREADS](sums)
        np.testing.assert_array_equal(sums[..., 0], THREADS * (THREADS - 1) // 2)
        np.testing.assert_array_equal(sums[..., 1], THREADS)
