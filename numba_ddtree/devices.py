"""Devices and streams: what there is, and whose stream a call goes to."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from numba_ddtree.arrays import Placement, StreamLike
from numba_ddtree.driver_faults import result_of
from numba_ddtree.errors import ArgumentError, BackendError

NO_DEVICE_ADVICE = (
    'pass backend="numpy" for the references, or set NUMBA_ENABLE_CUDASIM=1 for the kernels in '
    "Numba's simulator (slow)"
)

SHARED_MEMORY_VARIABLE = "NUMBA_DDTREE_SHARED_MEMORY"

_deferred: dict[int, AbstractContextManager[None]] = {}  # what keeps Numba from freeing, by device


def find_device_fault() -> str | None:
    """Say why no CUDA device can be used, or None where one can; creates no context."""
    try:
        from cuda.bindings import driver

        # Of the driver, since the management library does not heed CUDA_VISIBLE_DEVICES.
        fault, *_ = driver.cuInit(0)
        if fault == driver.CUresult.CUDA_SUCCESS:
            fault, count = driver.cuDeviceGetCount()
            if count == 0:
                return "the driver lists no CUDA device"
    except Exception as error:  # the driver's absence has no class of its own in cuda.bindings
        return " ".join(str(error).split()) or type(error).__name__
    return None if fault == driver.CUresult.CUDA_SUCCESS else f"the driver answers {fault.name}"


def are_linked(device: int | None, peer: int | None) -> bool:
    """Whether a device can read another's memory, by NVLink or PCIe, without the host; creates no context."""
    from cuda.bindings import driver

    return bool(result_of(driver.cuDeviceCanAccessPeer(device, peer)))


@lru_cache(maxsize=1)
def require_device() -> None:
    """Raise `BackendError`, with the reason and the ways out, where no kernel can run."""
    from numba_ddtree.cuda_target import SIMULATED

    fault = None if SIMULATED else find_device_fault()
    if fault is not None:
        raise BackendError(f"no CUDA device: {fault}; {NO_DEVICE_ADVICE}")


def device_context(device_id: int | None) -> AbstractContextManager[Any]:
    """Make a device current for a ``with`` block; None keeps the current one."""
    from numba_ddtree.cuda_target import SIMULATED, cuda

    if SIMULATED or device_id is None:
        return nullcontext()
    context: AbstractContextManager[Any] = cuda.gpus[device_id]
    return context


def stop_freeing(device_id: int) -> None:
    """Let Numba free nothing any more on a device that has failed for good; makes no call of the driver.

    Numba frees arrays that are gone in some later call, or when the interpreter ends. On such a device each
    free fails, and so would calls that have nothing to do with it. The end of the process frees all.
    """
    from numba_ddtree.cuda_target import cuda

    context = cuda.gpus[device_id].primary_context
    if context is not None and device_id not in _deferred:
        deferred = context.defer_cleanup()
        deferred.__enter__()  # and never left: this lasts for as long as the device's failure does
        _deferred[device_id] = deferred


def shared_memory_limit() -> int:
    """Bytes of shared memory that a block may have on the current device, with the opt-in.

    The environment's ``NUMBA_DDTREE_SHARED_MEMORY``, also in bytes, lowers it: what devices with less of it
    run can so be tried on any.

    Raises
    ------
    ArgumentError
        A variable that is no number.
    """
    from numba_ddtree.cuda_target import SIMULATED, cuda

    limit = 227 * 1024  # of compute capability 9.0
    if not SIMULATED:
        limit = int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    lower = os.environ.get(SHARED_MEMORY_VARIABLE, "")
    if lower and not lower.isdecimal():
        raise ArgumentError(SHARED_MEMORY_VARIABLE, repr(lower), "a number of bytes")
    return min(limit, int(lower)) if lower else limit


def shared_memory_of_processor() -> int:
    """Bytes of shared memory that a multiprocessor of the current device has for its blocks."""
    from numba_ddtree.cuda_target import SIMULATED, cuda

    if SIMULATED:
        return 228 * 1024  # of compute capability 9.0
    return int(cuda.get_current_device().MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)


def multiprocessors() -> int:
    """Multiprocessors of the current device."""
    from numba_ddtree.cuda_target import SIMULATED, cuda

    if SIMULATED:
        return 1
    return int(cuda.get_current_device().MULTIPROCESSOR_COUNT)


def stream_handle(stream: StreamLike, placement: Placement) -> int:
    """Return the raw handle of the stream that a call goes to.

    Parameters
    ----------
    stream
        See `StreamLike`. None is the current stream of the arrays' library (torch, cupy), or the
        default stream.
    placement : Placement
        Of the call's arrays.
    """
    if stream is None:
        return _current_stream(placement)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):  # torch's and cupy's own names
        if isinstance(handle := getattr(stream, attribute, None), int):
            return handle
    raise ArgumentError("stream", repr(stream), "a CUDA stream, its handle, or None")


def _current_stream(placement: Placement) -> int:
    if placement.library == "torch":
        import torch

        return int(torch.cuda.current_stream(placement.device_id).cuda_stream)
    if placement.library == "cupy":
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    return 0


@lru_cache(maxsize=256)
def numba_stream(handle: int, device_id: int | None) -> Any:
    """Wrap a raw handle for Numba's copies, once for each device; 0, its default stream, stays 0."""
    from numba_ddtree.cuda_target import SIMULATED, cuda

    if SIMULATED or handle == 0:
        return 0
    with device_context(device_id):
        return cuda.external_stream(handle)


@lru_cache(maxsize=256)
def launch_stream(handle: int) -> Any:
    """Wrap a raw handle for launches, once."""
    from numba_ddtree.cuda_target import SIMULATED

    if SIMULATED:
        return 0
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM


def use_reference(backend: str | None, placement: Placement, stream: StreamLike) -> bool:
    """Whether a call runs the numpy reference: None and ``"cuda"`` say no, ``"numpy"`` says yes.

    `stream` is the caller's, which the reference does not take.
    """
    check_backend(backend)
    if backend == "numpy" and not placement.on_host:
        raise ArgumentError("backend", f"'numpy' with {placement}", "host arrays with the numpy backend")
    if backend == "numpy":
        check_no_stream(stream)
    return backend == "numpy"


def check_backend(backend: str | None) -> None:
    """Check that there is such a backend."""
    if backend is not None and not (isinstance(backend, str) and backend in ("cuda", "numpy")):
        raise ArgumentError("backend", repr(backend), "None, 'cuda' or 'numpy'")


def check_library(library: str | None, known: tuple[str, ...]) -> None:
    """Check that a library is one of those whose arrays can be allocated, or none."""
    if library is not None and not (isinstance(library, str) and library in known):
        raise ArgumentError("library", repr(library), " or ".join(map(repr, known)))


def check_no_stream(stream: StreamLike) -> None:
    """Refuse a stream, or a `LaunchSequence`, for the reference, which runs at once."""
    if stream is not None:
        raise ArgumentError("stream", type(stream).__name__, "None with the numpy backend: it runs at once")
