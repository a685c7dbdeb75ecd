"""Which kernel computes tree attention: by dtype, and by what the device can do."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import SHARED_MEMORY_VARIABLE, shared_memory_limit
from numba_ddtree.errors import ArgumentError, BackendError
from numba_ddtree.tree_attention.hopper_state import SHARED_BYTES

SHARED_SCORES = "shared_scores"
TENSOR_CORES = "tensor_cores"
HOPPER = "hopper"
KERNELS = (SHARED_SCORES, TENSOR_CORES, HOPPER)
LEAST_CAPABILITY = (8, 0)  # of 16-bit products with bfloat16, and of asynchronous copies
HOPPER_CAPABILITY = (9, 0)  # the only one with its products of whole warpgroups
FLOAT32 = np.dtype(np.float32)


def check_kernel(kernel: str | None, dtype: np.dtype[Any]) -> None:
    """Check that there is such a kernel, and that it takes queries and caches of a dtype."""
    if kernel is not None and not (isinstance(kernel, str) and kernel in KERNELS):
        raise ArgumentError("kernel", repr(kernel), "None, " + " or ".join(map(repr, KERNELS)))
    if kernel is not None and (kernel == SHARED_SCORES) != (dtype == FLOAT32):
        takes = "float32" if kernel == SHARED_SCORES else "float16 and bfloat16"
        raise ArgumentError(
            "kernel", f"{kernel!r} with {dtype.name}", f"a kernel of that dtype, since this one takes {takes}"
        )


def choose_kernel(kernel: str | None, dtype: np.dtype[Any]) -> str:
    """Return the kernel for a dtype on the current device: the one asked for, or the quickest in most shapes.

    Raises
    ------
    ArgumentError
        No such kernel, one of another dtype, or one that the device cannot run.
    BackendError
        A kernel of tensor cores in the simulator, which has none.
    """
    check_kernel(kernel, dtype)
    if dtype == FLOAT32:
        return SHARED_SCORES
    if SIMULATED:
        raise BackendError(
            f"Numba's simulator has no tensor cores, which attention in {dtype.name} runs on; "
            'pass backend="numpy" for the reference, or float32'
        )
    capability = tuple(cuda.get_current_device().compute_capability)
    got = f"{kernel or TENSOR_CORES!r} on a device of compute capability {'.'.join(map(str, capability))}"
    least, exact = (".".join(map(str, each)) for each in (LEAST_CAPABILITY, HOPPER_CAPABILITY))
    if kernel == HOPPER and capability != HOPPER_CAPABILITY:
        raise ArgumentError("kernel", got, f"a device of {exact}, or {TENSOR_CORES!r}, from {least} on")
    if capability < LEAST_CAPABILITY:
        expected = f"a device of {least} or newer; {SHARED_SCORES!r}, for float32, still runs"
        raise ArgumentError("kernel", got, expected)
    limit = shared_memory_limit()
    if kernel == HOPPER and limit < SHARED_BYTES:
        expected = f"{SHARED_BYTES} bytes, of the device and in {SHARED_MEMORY_VARIABLE}, or {TENSOR_CORES!r}"
        raise ArgumentError("kernel", f"{kernel!r} with {limit} bytes of shared memory a block", expected)
    return kernel or (HOPPER if has_hopper() else TENSOR_CORES)


def has_hopper() -> bool:
    """Whether the current device runs the Hopper kernel."""
    capability = tuple(cuda.get_current_device().compute_capability)
    return capability == HOPPER_CAPABILITY and shared_memory_limit() >= SHARED_BYTES


def launcher_of(kernel: str) -> Callable[..., None]:
    """Return the function that launches a kernel of tensor cores: (transfer, work, splits)."""
    module = import_module(f"numba_ddtree.tree_attention.{kernel}")
    launcher: Callable[..., None] = getattr(module, f"launch_{kernel}")
    return launcher


def first_items_launcher() -> Callable[..., None]:
    """Return the function that finds the Hopper kernel's first items: (transfer, work, splits)."""
    module = import_module("numba_ddtree.tree_attention.hopper_first_items")
    launcher: Callable[..., None] = module.launch_first_items
    return launcher
