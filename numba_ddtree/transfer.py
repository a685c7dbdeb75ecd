"""Inputs to the device and results back, so that an operation is written once for both.

Host arrays are copied to the device, and results back, which synchronises. Device arrays are used
where they are, results are new arrays of the same library, and nothing synchronises; for jax alone
the call waits for its own work, since XLA's streams cannot be named.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from numba_ddtree.arrays import (
    Placement,
    StreamLike,
    check_output,
    device_view,
    dtype_name,
    host_output,
    placement_of,
)
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import (
    device_context,
    launch_stream,
    numba_stream,
    require_device,
    stream_handle,
)
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, LaunchSequence
from numba_ddtree.overlaps import check_apart


@lru_cache(maxsize=64)
def _empty(device_id: int | None) -> Any:
    return device_view("empty", cuda.device_array(0, np.int32))


class Transfer:
    """One call's traffic between the caller's arrays and a kernel.

    Parameters
    ----------
    placement : Placement
        Of the call's arrays.
    stream
        The caller's stream; see `numba_ddtree.devices.stream_handle`. A `LaunchSequence` takes the
        launches.

    Attributes
    ----------
    stream
        The stream in the form of Numba's copies.
    """

    def __init__(self, placement: Placement, stream: StreamLike) -> None:
        require_device()
        self._placement = placement
        self._sequence = stream if isinstance(stream, LaunchSequence) else None
        if self._sequence is not None and (placement.on_host or placement.library == "jax"):
            got = f"a LaunchSequence, with {placement.library} arrays"
            raise ArgumentError("stream", got, "device arrays, of a library whose arrays can be written")
        self._handle = 0 if self._sequence is not None else stream_handle(stream, placement)
        self._contexts = ExitStack()
        self._results: dict[str, tuple[Any, Any]] = {}  # name: the caller's array, the kernel's
        self._given: dict[str, Any] = {}  # the caller's outputs, until they are checked together
        self.stream: Any = None

    def __enter__(self) -> Transfer:
        self._contexts.enter_context(device_context(self._placement.device_id))
        self.stream = numba_stream(self._handle, self._placement.device_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.close()

    def launch(self, kernel: Kernel, blocks: int, *arguments: Any, shared_bytes: int = 0) -> None:
        """Launch a kernel on the caller's stream; see `Kernel.prepare`."""
        if len(self._given) > 1:
            check_apart(self._given, are_contiguous=not self._placement.on_host)
        self._given = {}
        prepared = kernel.prepare(blocks, *arguments, shared_bytes=shared_bytes)
        if self._sequence is None:
            prepared.launch(self._handle)
        else:
            self._sequence.launches.append(prepared)

    def input(self, view: Any) -> Any:
        """Return an input as the kernel's argument, copied to the device if it is on the host.

        None becomes an empty array of int32, by which kernels know an argument that was not given.
        """
        if view is None:
            return _empty(self._placement.device_id)
        if not isinstance(view, np.ndarray):
            return view
        host = np.ascontiguousarray(view)
        # bfloat16 as its bits, since numpy's buffers cannot name it.
        bits = host.view(np.uint16) if host.dtype == bfloat16 and not SIMULATED else host
        copied = device_view("input", cuda.to_device(bits, stream=self.stream))
        if self._sequence is not None and not SIMULATED:
            # A small copy may return before it is done, and the launches' stream need not wait for it.
            cuda.default_stream().synchronize()
        return copied if bits is host else replace(copied, dtype=host.dtype)

    def output(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: type[np.generic],
        out: Any = None,
        *,
        argument: str | None = None,
    ) -> Any:
        """Return a result as the kernel's argument: the caller's own array, or a new one.

        `argument` is what the caller's array is called; by default as the result is.
        """
        if out is not None:
            view = self._checked_out(argument or name, shape, dtype, out)
        else:
            out, view = self._allocate(name, shape, dtype)
        self._results[name] = out, view
        return view

    def outputs(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtypes: dict[str, type[np.generic]],
        out: Any = None,
    ) -> list[Any]:
        """Return several results as `output` does; `out` has the caller's own as attributes."""
        given = {name: None if out is None else getattr(out, name) for name in shapes}
        for name, array in given.items():
            if out is not None and array is None:
                raise ArgumentError(f"out.{name}", None, "an array")
        return [
            self.output(name, shape, dtypes[name], given[name], argument=f"out.{name}")
            for name, shape in shapes.items()
        ]

    def update(self, name: str, view: Any) -> Any:
        """Return an array that the kernel changes in place as its argument; a host array gets it back."""
        self._results[name] = view, self.input(view)
        return self._results[name][1]

    def scratch(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
        """Return memory for the kernels of this call alone, of undefined content, as their argument."""
        return self._allocate("scratch", shape, dtype)[1]

    def results(self) -> dict[str, Any]:
        """Return the results in the caller's kind of array, after the kernels were launched."""
        if self._placement.on_host:
            for name, (out, view) in self._results.items():
                host = view.copy_to_host(stream=self.stream)
                self._results[name] = (host if out is None else out), host
            if self.stream != 0:  # copies on the default stream have waited already
                self.stream.synchronize()
            for out, host in self._results.values():
                if out is not host:
                    np.copyto(out, host)
        return {name: self._exported(out) for name, (out, _) in self._results.items()}

    def _checked_out(self, name: str, shape: tuple[int, ...], dtype: type[np.generic], out: Any) -> Any:
        if self._placement.on_host:
            check_output(name, host_output(name, out), shape, dtype)
            self._given[name] = out
            return self._numba_array(shape, dtype)[1]
        placement = placement_of(name, out)
        if placement.device_id != self._placement.device_id:
            raise ArgumentError(name, placement, str(self._placement))
        view = device_view(name, out)
        check_output(name, view, shape, dtype)
        self._given[name] = view
        return view

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[Any, Any]:
        library, device = self._placement.library, self._placement.device_id
        if library == "torch":
            import torch

            # torch takes the handle 0 of an external stream for the wish for a new one.
            default = torch.cuda.default_stream(device)
            stream = torch.cuda.ExternalStream(self._handle, device=device) if self._handle else default
            with torch.cuda.stream(stream):
                array = torch.empty(shape, dtype=getattr(torch, dtype_name(dtype)), device=f"cuda:{device}")
        elif library == "cupy":
            import cupy

            stream = cupy.cuda.Stream.from_external(launch_stream(self._handle))
            with cupy.cuda.Device(device), stream:
                array = cupy.empty(shape, dtype)
        else:
            array, view = self._numba_array(shape, dtype)
            return (None if self._placement.on_host else array), view
        return array, device_view(name, array)

    def _numba_array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> tuple[Any, Any]:
        array = cuda.device_array(shape, dtype, stream=self.stream)
        return array, device_view("output", array)

    def _exported(self, array: Any) -> Any:
        if self._placement.library != "jax":
            return array
        import jax.numpy

        # Copied, since jax would not keep the memory of another library alive; bfloat16 as its bits,
        # since the array interface cannot name it.
        launch_stream(self._handle).sync()
        view = device_view("output", array)
        named = replace(view, dtype=np.dtype(np.uint16)) if view.dtype == bfloat16 else view
        return jax.numpy.array(named, copy=True).view(view.dtype).block_until_ready()
