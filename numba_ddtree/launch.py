"""Kernels: compile once for a device and types, raise the shared memory limit, launch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.errors import BackendError

DEFAULT_SHARED_BYTES = 48 * 1024
SIMULATOR_THREADS = 32


class Kernel:
    """A CUDA kernel and what is known of it before it runs.

    Parameters
    ----------
    function
        The kernel's Python function.
    signatures : tuple of str
        The Numba signatures that public functions launch it with; the compile test builds each.
    threads : int
        Threads a block; the compiler is told, so that registers fit.
    """

    def __init__(self, function: Callable[..., None], signatures: tuple[str, ...], threads: int) -> None:
        self.function = function
        self.signatures = signatures
        self.threads = SIMULATOR_THREADS if SIMULATED else threads
        self.launch_bounds = threads
        options = {} if SIMULATED else {"launch_bounds": threads}
        self._dispatcher = cuda.jit(**options)(function)
        self._raised: dict[Any, int] = {}

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
            Numba device arrays and numpy scalars.
        stream
            A stream in Numba's form.
        shared_bytes : int
            Dynamic shared memory a block.
        """
        if blocks == 0:
            return
        if not SIMULATED and shared_bytes > DEFAULT_SHARED_BYTES:
            self._raise_shared_limit(arguments, shared_bytes)
        with _quick_thread_switches() if SIMULATED else _toolkit_errors():
            self._dispatcher[blocks, self.threads, stream, shared_bytes](*arguments)

    def _raise_shared_limit(self, arguments: tuple[Any, ...], shared_bytes: int) -> None:
        """Opt in to more than 48 KB, which CUDA asks for kernel by kernel and device by device."""
        from cuda.bindings import driver

        types = tuple(self._dispatcher.typeof_pyval(argument) for argument in arguments)
        device = cuda.get_current_device().id
        if self._raised.get((types, device), 0) >= shared_bytes:
            return
        compiled = self._dispatcher.compile(types)
        (fault,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared_bytes,
            compiled._codelibrary.get_cufunc().kernel.handle,
            device,
        )
        if fault != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{self.name}: the driver refused {shared_bytes} bytes of shared memory: {fault}")
        self._raised[types, device] = shared_bytes


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
