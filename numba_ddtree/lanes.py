"""Lanes: streams on one or several devices, each with its events, memory and graphs, driven by one thread.

Nothing here waits for a device but `synchronize`, `elapsed_us` and `close`. Work of different lanes
overlaps, whether they are on several devices or on one; what has to come after what is said by events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakSet

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from numba_ddtree.arrays import DeviceView, StreamLike, device_view
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import numba_stream, stop_freeing
from numba_ddtree.driver_faults import fault_text, is_cuda_error, is_lasting, one_line, result_of
from numba_ddtree.errors import ArgumentError, DDTreeError, LaneError

BUSY = "DEVICE_UNAVAILABLE"  # the driver's word for a device that another process has to itself
NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

Capturable: TypeAlias = Callable[[StreamLike], object]
"""Launches work on the stream that it is given, without allocating and without synchronising."""


class Lane:
    """A share of the work that runs at once: on the host, or in Numba's simulator. `DeviceGroup` makes lanes.

    ``with lane:`` makes the lane's device current, and names the lane in whatever fails inside.

    Attributes
    ----------
    index : int
        Place in the group.
    device_id : int or None
        None for the host.
    stream : cuda.core.Stream or None
        The lane's own, which the default stream does not wait for; None where work runs at once.
    """

    stream: Any = None
    companions: tuple[ReferenceType[Lane], ...] = ()  # the lanes of the group

    def __init__(self, index: int, device_id: int | None) -> None:
        self.index = index
        self.device_id = device_id
        self._calls: dict[str, Capturable] = {}
        self._seconds = 0.0

    def __str__(self) -> str:
        return f"lane {self.index} ({_device_text(self.device_id)})"

    def __enter__(self) -> Lane:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.raise_named(error)

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of what was captured."""
        return tuple(self._calls)

    @property
    def is_done(self) -> bool:
        """Whether all that was launched has run to its end; raises `LaneError` if it failed."""
        return True

    @property
    def is_broken(self) -> bool:
        """Whether the device refuses all further work of this process, as after a bad access to memory."""
        return False

    def capture(self, name: str, call: Capturable) -> None:
        """Capture work as a graph, for `launch`; one of the same name is replaced.

        The arrays that the work uses live for as long as the call refers to them.

        Parameters
        ----------
        name : str
        call : callable
            Launches the work on the stream that it is given; it has run before if it compiles anything.

        Raises
        ------
        ArgumentError, LaneError
            What the call raises, with the lane's name.
        """
        self._calls[name] = call

    def launch(self, name: str, *, after: Sequence[Any] = ()) -> Any:
        """Launch a captured graph on the lane's stream; the host does not wait.

        Parameters
        ----------
        name : str
            Of the graph.
        after : sequence of events
            What comes before it, beside the lane's own work.

        Returns
        -------
        event
            Of its end, which the next launch, or `done`, sets anew; None where work runs at once.
        """
        self.check_graph(name)
        began = time.perf_counter()
        with self:
            self._calls[name](None)
        self._seconds = time.perf_counter() - began
        return None

    def wait_for(self, event: Any) -> None:
        """Let what is launched from now on come after an event, of whatever lane; the host goes on."""

    def done(self) -> Any:
        """Return an event of all that was launched so far; the next call of `done` sets it anew."""
        return None

    def put(self, array: NDArray[Any]) -> Any:
        """Copy a host array to where the lane's kernels read it."""
        return cuda.to_device(array) if SIMULATED and self.device_id is not None else array.copy()

    def write(self, target: Any, content: NDArray[Any]) -> None:
        """Replace the content of an array of the lane's, after what was launched before."""
        target[...] = content

    def elapsed_us(self) -> float:
        """Microseconds from the begin to the end of the last `launch`, on the device; waits for the end.

        Needs a group with ``timing=True``.
        """
        return 1e6 * self._seconds

    def synchronize(self) -> None:
        """Wait for all that was launched; raises `LaneError` if it failed."""

    def close(self) -> None:
        """Wait for the lane's work and free what it has; raises `LaneError` if the work failed."""
        self._calls.clear()

    def check_graph(self, name: str) -> None:
        """Check that there is a captured graph of a name."""
        if name not in self._calls:
            known = ", ".join(map(repr, self._calls)) or "nothing"
            raise ArgumentError("name", repr(name), f"what {self} has captured: {known}")

    def raise_named(self, error: Exception) -> None:
        """Raise an error again, with the lane's name."""
        if isinstance(error, LaneError):
            return
        if isinstance(error, ArgumentError):
            raise ArgumentError(f"{self}, {error.argument}", error.got, error.expected) from error
        if isinstance(error, DDTreeError) or is_cuda_error(error):
            raise self._fault(one_line(error)) from error

    def _fault(self, reason: str) -> LaneError:
        return LaneError((self.index,), f"{self}: {reason}")


class DeviceLane(Lane):
    """A lane on a device.

    Parameters
    ----------
    index, device_id : int
    timing : bool
        Whether launches mark their begin and end for `elapsed_us`, which takes the host a microsecond.

    Raises
    ------
    LaneError
        The device cannot be used: another process has it to itself, or it has no memory left.
    """

    def __init__(self, index: int, device_id: int, timing: bool = False) -> None:
        from cuda.core import Device, EventOptions

        super().__init__(index, device_id)
        self._graphs: dict[str, Any] = {}
        self._buffers: WeakSet[Any] = WeakSet()
        self._timing = timing
        self._is_broken = False
        try:
            with kept_context():
                self._device = Device(device_id)
                self._device.set_current()
                self.context = result_of(driver.cuCtxGetCurrent())
                self.stream = self._device.create_stream()
                timed = EventOptions(timing_enabled=True)
                self._begun, self._ended = (self._device.create_event(timed) for _ in range(2))
                self._done = self._device.create_event()
        except Exception as error:
            reason = one_line(error)
            hint = "; another process has it to itself" if BUSY in reason else ""
            raise LaneError((index,), f"{self}: the device cannot be used: {reason}{hint}") from error

    def __enter__(self) -> Lane:
        (fault,) = driver.cuCtxPushCurrent(self.context)
        if fault:
            raise self._fault(fault_text(fault))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver.cuCtxPopCurrent()
        super().__exit__(kind, error, trace)

    @property
    def is_done(self) -> bool:
        """Whether all that was launched has run to its end; raises `LaneError` if it failed."""
        (fault,) = driver.cuStreamQuery(self.stream.handle)
        if fault == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if fault:
            raise self._fault(fault_text(fault))
        return True

    @property
    def is_broken(self) -> bool:
        """Whether the device refuses all further work of this process, as after a bad access to memory."""
        if not self._is_broken and not self.stream.is_closed:
            fault, status = driver.cuStreamIsCapturing(self.stream.handle)
            if fault or status == NOT_CAPTURING:  # to query a stream would end its capture
                (fault,) = driver.cuStreamQuery(self.stream.handle)
            self._is_broken = is_lasting(fault)
        return self._is_broken

    def capture(self, name: str, call: Capturable) -> None:
        """Capture work as a graph; see `Lane.capture`."""
        with self:
            builder = self.stream.create_graph_builder().begin_building()
            try:
                call(self.stream)
            except BaseException:
                fault, begun = driver.cuStreamEndCapture(self.stream.handle)
                if not fault:  # as it is where what was captured is no graph any more
                    driver.cuGraphDestroy(begun)
                raise
            graph = builder.end_building().complete()
            graph.upload(self.stream)
        if name in self._graphs:
            self._graphs[name].close()
        self._graphs[name], self._calls[name] = graph, call

    def launch(self, name: str, *, after: Sequence[Any] = ()) -> Any:
        """Launch a captured graph on the lane's stream; see `Lane.launch`."""
        self.check_graph(name)
        with self:
            return self.enqueue(name, after)

    def enqueue(self, name: str, after: Sequence[Any] = ()) -> Any:
        """Launch a captured graph where the lane's device is current; see `Lane.launch`."""
        stream = self.stream
        for event in after:
            stream.wait(event)
        if self._timing:
            stream.record(self._begun)
        self._graphs[name].launch(stream)
        end = self._ended if self._timing else self._done
        stream.record(end)
        return end

    def wait_for(self, event: Any) -> None:
        """Let what is launched from now on come after an event, of whatever lane; the host goes on."""
        if event is not None:
            with self:
                self.stream.wait(event)

    def done(self) -> Any:
        """Return an event of all that was launched so far; the next call of `done` sets it anew."""
        with self:
            self.stream.record(self._done)
        return self._done

    def new_event(self) -> Any:
        """Make an event of the lane's device, without times."""
        with self:
            return self._device.create_event()

    def put(self, array: NDArray[Any]) -> Any:
        """Copy a host array to the lane's device."""
        with self:
            return cuda.to_device(array, stream=numba_stream(int(self.stream.handle), self.device_id))

    def write(self, target: Any, content: NDArray[Any]) -> None:
        """Replace the content of an array of the lane's, after what was launched before."""
        with self:
            view = device_view("target", target)
            host = np.ascontiguousarray(content, view.dtype)
            if host.shape != view.shape:
                raise ArgumentError("content", f"shape {host.shape}", f"shape {view.shape}")
            result_of(
                driver.cuMemcpyHtoDAsync(view.pointer, host.ctypes.data, host.nbytes, self.stream.handle)
            )

    def allocate(self, nbytes: int) -> DeviceView:
        """Allocate bytes on the lane's device, for as long as the view lives and the lane is open."""
        with self:
            buffer = self._device.allocate(nbytes, stream=self.stream)
        self._buffers.add(buffer)
        device = int(self._device.device_id)
        return DeviceView(int(buffer.handle), (nbytes,), (1,), np.dtype(np.uint8), device, buffer)

    def allocate_pinned(self, nbytes: int) -> Any:
        """Allocate bytes on the host that every device can copy from and to: a `cuda.core.Buffer`.

        They live as those of `allocate` do.
        """
        from cuda.core import LegacyPinnedMemoryResource

        with self:
            buffer = LegacyPinnedMemoryResource().allocate(nbytes)
        self._buffers.add(buffer)
        return buffer

    def elapsed_us(self) -> float:
        """Microseconds from the begin to the end of the last `launch`; waits for the end."""
        if not self._timing:
            raise ArgumentError("timing", False, "a group with timing=True")
        with self:
            self._ended.sync()
            return 1000 * float(self._ended - self._begun)

    def synchronize(self) -> None:
        """Wait for all that was launched; raises `LaneError` if it failed."""
        with self:
            self.stream.sync()

    def close(self) -> None:
        """Wait for the lane's work and free what it has; raises `LaneError` if the work failed."""
        if self.stream.is_closed:
            return
        try:
            self.synchronize()
        finally:
            fault = self._free()
        if fault is not None:
            raise fault

    def _fault(self, reason: str) -> LaneError:
        lanes = [lane for reference in self.companions if (lane := reference()) is not None] or [self]
        broken = [lane for lane in lanes if lane.is_broken]
        for lane in broken:
            if lane.device_id is not None:
                stop_freeing(lane.device_id)
        if not self.is_broken or len(broken) < 2:
            return super()._fault(reason)
        if all(lane.device_id == self.device_id for lane in broken):
            names = " and ".join(str(lane.index) for lane in broken)
            others = f"lanes {names} share this device, and the fault may be of any of them"
        else:
            names = " and ".join(map(str, broken))
            others = f"{names} report faults, and the first may be of any of them"
        return LaneError(tuple(lane.index for lane in broken), f"{self}: {reason} ({others})")

    def _free(self) -> LaneError | None:
        """Free what there is, in a context that may be broken; return the first fault."""
        events = self._begun, self._ended, self._done
        (unusable,) = driver.cuCtxPushCurrent(self.context)
        if not unusable:
            driver.cuCtxSynchronize()  # a caller's stream may still gather; faults were told by `synchronize`
        found = None
        for resource in (*self._graphs.values(), *self._buffers, *events, self.stream):
            try:
                resource.close()
            except Exception as error:  # what is left is closed all the same
                if found is None:
                    found = self._fault(one_line(error))
                    found.__cause__ = error
        if not unusable:
            driver.cuCtxPopCurrent()
        self._graphs.clear()
        self._calls.clear()
        self._buffers.clear()
        return found


class kept_context:  # noqa: N801 - named like contextlib's
    """Leave the current device as it was."""

    def __enter__(self) -> None:
        fault, self._context = driver.cuCtxGetCurrent()
        self._is_known = not fault  # the driver may not even be initialised

    def __exit__(self, *raised: object) -> None:
        if self._is_known:
            driver.cuCtxSetCurrent(self._context)


def _device_text(device_id: int | None) -> str:
    return "host" if device_id is None else f"CUDA device {device_id}"
