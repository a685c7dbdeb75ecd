"""The one import of Numba's CUDA target, which the whole package imports from.

Under ``NUMBA_ENABLE_CUDASIM=1`` Numba replaces the target by a simulator that runs each CUDA thread
as a Python thread. There, `cuda` finds a kernel's own names (``threadIdx``, ``shared`` and so on)
while one runs: Numba's way of swapping them into a module's globals is not safe for functions
called from another module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda as _target
from numba import float32, float64, int32, int64, uint16, uint32, uint64
from numba.cuda.core import config

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


class _SimulatedTarget:
    def __getattr__(self, name: str) -> Any:
        from numba.cuda.simulator.kernel import _get_kernel_context

        context = _get_kernel_context()
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
