"""Kernels: compile once for a device and types, raise the shared memory limit, launch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numba.core import types
from numba.np.numpy_support import from_dtype

from numba_ddtree.arrays import DeviceView, c_strides
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.errors import BackendError

DEFAULT_SHARED_BYTES = 48 * 1024
SIMULATOR_THREADS = 32


def block_threads(threads: int) -> int:
    """Threads a block: as given, or a single warp in the simulator, where each is a Python thread.

    A kernel strides by this constant; by `blockDim` it would compute every loop's length by a
    64-bit division.
    """
    return SIMULATOR_THREADS if SIMULATED else threads


class Kernel:
    """A CUDA kernel and what is known of it before it runs.

    Parameters
    ----------
    function
        The kernel's Python function.
    signatures : tuple of str
        The Numba signatures that public functions launch it with; the compile test builds each.
    threads : int
        Threads a block, from `block_threads`; the compiler is told, so that registers fit.
    blocks_per_processor : int
        Blocks that registers are to leave room for on one multiprocessor.
    """

    def __init__(
        self,
        function: Callable[..., None],
        signatures: tuple[str, ...],
        threads: int,
        blocks_per_processor: int = 1,
    ) -> None:
        self.function = function
        self.signatures = signatures
        self.threads = threads
        self.launch_bounds = threads, blocks_per_processor
        options = {} if SIMULATED else {"launch_bounds": self.launch_bounds}
        self._dispatcher = cuda.jit(**options)(function)
        self._loaded: dict[tuple[Any, ...], Any] = {}  # by device and kinds of arguments
        self._shared_limits: dict[tuple[Any, ...], int] = {}

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    def launch(self, blocks: int, *arguments: Any, stream: Any, shared_bytes: int = 0) -> None:
        """Launch on the current device, without synchronising.

        Parameters
        ----------
        blocks : int
            Blocks, all along x, whose limit is 2^31 - 1.
        *arguments
            Views of C-contiguous device arrays, and numpy scalars, of one of the signatures; there, an
            array of bfloat16 is one of uint16, the numbers' bits.
        stream
            A `cuda.core.Stream`; in the simulator anything.
        shared_bytes : int
            Dynamic shared memory a block.
        """
        if blocks == 0:
            return
        if SIMULATED:
            with _quick_thread_switches():
                self._dispatcher[blocks, self.threads, stream, shared_bytes](*map(_with_bits, arguments))
            return
        from cuda.core import LaunchConfig, launch

        # Straight through cuda.core: the dispatcher looks at every argument anew, which takes ten times
        # as long, and warns of grids below 128 blocks.
        device_id = cuda.get_current_device().id
        key = (device_id, *(_kind(argument) for argument in arguments))
        kernel = self._loaded.get(key) or self._load(key)
        if shared_bytes > self._shared_limits[key]:
            self._raise_shared_limit(key, shared_bytes)
        config = LaunchConfig(grid=blocks, block=self.threads, shmem_size=shared_bytes)
        launch(stream, config, kernel, *(slot for argument in arguments for slot in _slots(argument)))

    def _load(self, key: tuple[Any, ...]) -> Any:
        """Compile the kernel for the kinds of its arguments, and load it on the current device."""
        with _toolkit_errors():
            compiled = self._dispatcher.compile(tuple(_numba_type(*kind) for kind in key[1:]))
        self._loaded[key] = compiled._codelibrary.get_cufunc().kernel
        self._shared_limits[key] = DEFAULT_SHARED_BYTES
        return self._loaded[key]

    def _raise_shared_limit(self, key: tuple[Any, ...], shared_bytes: int) -> None:
        """Opt in to more than 48 KB, which CUDA asks for kernel by kernel and device by device."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (fault,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._loaded[key].handle, key[0])
        if fault != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{self.name}: {shared_bytes} bytes of shared memory were refused: {fault}")
        self._shared_limits[key] = shared_bytes


def _kind(argument: Any) -> tuple[np.dtype[Any], int]:
    """Return what compiled code depends on: dtype and number of dimensions, -1 for a scalar."""
    return argument.dtype, len(argument.shape) if isinstance(argument, DeviceView) else -1


def _with_bits(argument: Any) -> Any:
    """Return an argument as the simulator takes it: Numba has no bfloat16, so that its bits stand for it."""
    return argument.view(np.uint16) if argument.dtype == bfloat16 else argument


def _numba_type(dtype: np.dtype[Any], ndim: int) -> Any:
    scalar = types.uint16 if dtype == bfloat16 else from_dtype(dtype)
    return scalar if ndim < 0 else types.Array(scalar, ndim, "C")


def _slots(argument: Any) -> tuple[Any, ...]:
    """Return what a launch passes for an argument: for an array, the members of Numba's structure."""
    if not isinstance(argument, DeviceView):
        return (argument,)
    itemsize, shape = argument.dtype.itemsize, argument.shape
    no_reference, no_parent = 0, 0
    head = (no_reference, no_parent, math.prod(shape), itemsize, argument.pointer)
    return (*head, *shape, *c_strides(shape, itemsize))


@contextmanager
def _toolkit_errors() -> Iterator[None]:
    """Say how to get the toolkit's libraries where the compiler does not find them."""
    try:
        yield
    except Exception as error:
        missing = type(error).__name__ in ("NvvmSupportError", "DynamicLibNotFoundError")
        if not missing:
            raise
        raise BackendError(
            f"the CUDA toolkit's libraries were not found ({str(error).splitlines()[0]}); "
            "install them with the extra cu13 (or cu12): pip install 'numba_ddtree[cu13]'"
        ) from error


@contextmanager
def _quick_thread_switches() -> Iterator[None]:
    """Let the simulator's threads take turns often: it polls for barriers, which starves them else."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
