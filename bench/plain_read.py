"""A kernel that reads an array once and sums it: how long anything that reads the array takes at least."""

from __future__ import annotations

from typing import Any

from numba_ddtree.arrays import StreamLike, gather
from numba_ddtree.cuda_target import cuda, device_routine, float32, int64
from numba_ddtree.device.memory import load_four
from numba_ddtree.devices import multiprocessors
from numba_ddtree.launch import Kernel
from numba_ddtree.transfer import Transfer

THREADS = 256
BLOCKS_PER_PROCESSOR = 4


@device_routine
def sum_of_four(numbers, quad):  # type: ignore[no-untyped-def]
    a, b, c, d = load_four(numbers, int64(4) * quad)
    return float32(float32(a + b) + float32(c + d))


def read_kernel(  # type: ignore[no-untyped-def]
    numbers,  # float32 [n], a multiple of four
    sums,  # float32 [threads of all blocks]
):
    quad = int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)
    step = int64(cuda.gridDim.x) * THREADS
    quads = int64(numbers.size) // int64(4)
    total = float32(0)
    while quad < quads - 3 * step:
        left = float32(sum_of_four(numbers, quad) + sum_of_four(numbers, quad + step))
        right = float32(sum_of_four(numbers, quad + 2 * step) + sum_of_four(numbers, quad + 3 * step))
        total = float32(total + float32(left + right))
        quad += 4 * step
    while quad < quads:
        total = float32(total + sum_of_four(numbers, quad))
        quad += step
    sums[int64(cuda.blockIdx.x) * THREADS + int64(cuda.threadIdx.x)] = total


READ = Kernel(read_kernel, ("void(float32[::1], float32[::1])",), THREADS)


def read_all(numbers: Any, sums: Any, stream: StreamLike = None) -> None:
    """Read a device's float32 [n], n a multiple of four, and write a sum for each thread; see `threads`."""
    placement, views = gather(numbers=numbers, sums=sums)
    with Transfer(placement, stream) as transfer:
        transfer.launch(READ, threads() // THREADS, views["numbers"], views["sums"])


def threads() -> int:
    """Threads of all blocks, on the current device."""
    return multiprocessors() * BLOCKS_PER_PROCESSOR * THREADS
