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
        self._overloads: dict[Any, Any] = {}  # by types and device
        self._shared_limits: dict[Any, int] = {}  # by overload and device

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
            Numba device arrays and numpy scalars, of one of the signatures.
        stream
            A `cuda.core.Stream`; in the simulator anything.
        shared_bytes : int
            Dynamic shared memory a block.
        """
        if blocks == 0:
            return
        if SIMULATED:
            with _quick_thread_switches():
                self._dispatcher[blocks, self.threads, stream, shared_bytes](*arguments)
            return
        compiled = self._compiled(arguments)
        self._raise_shared_limit(compiled, shared_bytes)
        # The compiled kernel's own launch: the dispatcher would warn of every grid below 128 blocks.
        compiled.launch(arguments, (blocks, 1, 1), (self.threads, 1, 1), stream, shared_bytes)

    def _compiled(self, arguments: tuple[Any, ...]) -> Any:
        """Return the kernel for these types on the current device, compiled at the first call."""
        types = tuple(self._dispatcher.typeof_pyval(argument) for argument in arguments)
        key = types, cuda.get_current_device().id
        if key not in self._overloads:
            with _toolkit_errors():
                self._overloads[key] = self._dispatcher.compile(types)
        return self._overloads[key]

    def _raise_shared_limit(self, compiled: Any, shared_bytes: int) -> None:
        """Opt in to more than 48 KB, which CUDA asks for kernel by kernel and device by device."""
        from cuda.bindings import driver

        device = cuda.get_current_device().id
        if shared_bytes <= self._shared_limits.get((compiled, device), DEFAULT_SHARED_BYTES):
            return
        (fault,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared_bytes,
            compiled._codelibrary.get_cufunc().kernel.handle,
            device,
        )
        if fault != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{self.name}: {shared_bytes} bytes of shared memory were refused: {fault}")
        self._shared_limits[compiled, device] = shared_bytes


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
