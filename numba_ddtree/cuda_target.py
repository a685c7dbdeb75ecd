"""The one import of Numba's CUDA target, which the whole package imports from.

Under ``NUMBA_ENABLE_CUDASIM=1`` Numba replaces the target by a simulator that runs each CUDA thread
as a Python thread. There, `cuda` finds a kernel's own names (``threadIdx``, ``shared`` and so on)
while one runs: Numba's way of swapping them into a module's globals is not safe for functions
called from another module. Nor is its way of making shared arrays safe for threads that ask at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numba import cuda as _target
from numba import float32, float64, int32, int64, uint16, uint32, uint64
from numba.cuda.core import config
from numba.np.numpy_support import as_dtype

__all__ = [
    "SIMULATED",
    "cuda",
    "device_function",
    "device_routine",
    "float32",
    "float64",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
]

SIMULATED: bool = bool(config.ENABLE_CUDASIM)


class _SimulatedShared:
    """Shared arrays of one simulated launch: an array for each line of code that asks, whichever threads do.

    Numba's own look for the line's array and then make it, so that a thread that is interrupted in between
    keeps an array of its own.
    """

    def __init__(self, dynamic: Any) -> None:
        self._dynamic = dynamic
        self._arrays: dict[tuple[str, int], np.ndarray[Any, Any]] = {}
        self._lock = threading.Lock()

    def array(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        if shape == 0:
            return self._dynamic.array(shape, dtype)
        caller = sys._getframe(1)
        line = caller.f_code.co_filename, caller.f_lineno
        with self._lock:
            if line not in self._arrays:
                self._arrays[line] = np.empty(shape, as_dtype(dtype))
            return self._arrays[line]


def _launch_context() -> Any:
    """Return what the simulator has for the running kernel in the place of `cuda`."""
    from numba.cuda.simulator.kernel import _get_kernel_context

    return _get_kernel_context()


class _SimulatedTarget:
    def __init__(self) -> None:
        self._shared: WeakKeyDictionary[Any, _SimulatedShared] = WeakKeyDictionary()  # by launch
        self._lock = threading.Lock()

    @property
    def shared(self) -> _SimulatedShared:
        context = _launch_context()
        with self._lock:
            if context not in self._shared:
                self._shared[context] = _SimulatedShared(context.shared)
            return self._shared[context]

    def __getattr__(self, name: str) -> Any:
        context = _launch_context()
        return getattr(context if hasattr(context, name) else _target, name)


cuda: Any = _SimulatedTarget() if SIMULATED else _target


def device_function(function: Callable[..., Any]) -> Any:
    """Make a function callable from kernels; it is inlined, so that it compiles without a device."""
    return function if SIMULATED else _target.jit(device=True, inline="always")(function)


def device_routine(function: Callable[..., Any]) -> Any:
    """Make a longer function callable from kernels; the compiler's back end inlines it.

    What `device_function` inlines is copied for each call before types are known, which takes Numba half
    a minute where kernels are long. A routine is compiled once for the types of its arguments; Numba asks
    for the current device to do so.
    """
    options: dict[str, Any] = {"device": True, "forceinline": True}
    return function if SIMULATED else _target.jit(**options)(function)
