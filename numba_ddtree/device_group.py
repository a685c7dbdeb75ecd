"""A group of lanes over one or several devices, ordered by events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any
from weakref import ref

import numpy as np
from cuda.bindings import driver
from cuda.core import Stream

from numba_ddtree.arrays import StreamLike
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import (
    are_linked,
    check_no_stream,
    launch_stream,
    require_device,
    stream_handle,
)
from numba_ddtree.driver_faults import fault_text
from numba_ddtree.errors import ArgumentError, LaneError
from numba_ddtree.lanes import DeviceLane, Lane
from numba_ddtree.launch import NO_LIBRARY

COPIES = ("direct", "host")
LINKED = (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)


class DeviceGroup:
    """Lanes over devices, one for each entry; close it, or use it as a context manager.

    The same device may have several lanes, which then overlap on it. One thread drives all lanes, since
    nothing waits for a device. All lanes of one device share its CUDA context: a kernel that reads out of
    bounds breaks all of them, and the driver may give up the process's other devices with it, where lanes
    wait for that work or even where they do not. Errors name every lane whose device reports a fault. From
    then on, Numba frees nothing on these devices, since each free would raise, in whatever call comes next.

    Parameters
    ----------
    devices : sequence of int, or of None
        Indices of CUDA devices; None throughout for lanes on the host, which run the references.
    timing : bool
        Whether lanes keep device times for `Lane.elapsed_us`.
    copies : {None, "direct", "host"}
        How arrays go from lane to lane: by copies from device to device, or through pinned memory of the
        host. By default direct where the devices are linked, and not at all where they are the same.

    Attributes
    ----------
    lanes : tuple of Lane
    copies
        As given.

    Raises
    ------
    ArgumentError
        No device, or an index that is none.
    BackendError
        No device at all.
    LaneError
        A device that cannot be used; the message names the lane.

    Examples
    --------
    >>> with DeviceGroup([0, 1]) as group:
    ...     rounds = RoundLanes.plan(group, 64, 15, vocabulary, 64)
    """

    def __init__(
        self, devices: Sequence[int | None], *, timing: bool = False, copies: str | None = None
    ) -> None:
        if copies not in (None, *COPIES):
            raise ArgumentError("copies", repr(copies), "None, 'direct' or 'host'")
        indices = _checked_devices(devices)
        self.copies = copies
        self.lanes: tuple[Lane, ...] = ()
        self._marked: Any = None  # an event
        try:
            for index, device_id in enumerate(indices):
                self.lanes += (_new_lane(index, device_id, timing),)
            self._link_peers()
            for lane in self.lanes:
                lane.companions = tuple(map(ref, self.lanes))
        except BaseException:
            self._close_all()
            raise

    def __len__(self) -> int:
        return len(self.lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self.lanes)

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faults = self._close_all()
        if not faults:
            return
        if error is None:
            raise _joined(faults)
        for fault in faults:  # what struck first is what is told
            error.add_note(str(fault))

    @property
    def home(self) -> Lane:
        """The first lane, on whose device results are gathered."""
        return self.lanes[0]

    @property
    def on_host(self) -> bool:
        """Whether the lanes are the host's."""
        return self.home.device_id is None

    def copy_mode(self, source: Lane, target: Lane) -> str | None:
        """Say how an array gets from lane to lane: "direct", "host", or None where it is there already."""
        if self.copies is not None and isinstance(source, DeviceLane):
            return self.copies
        if source.device_id == target.device_id:
            return None
        return "direct" if are_linked(target.device_id, source.device_id) else "host"

    def launch(self, name: str, *, after: Sequence[Sequence[Any]]) -> list[Any]:
        """Launch the graphs of a name on all lanes; the host does not wait.

        Parameters
        ----------
        name : str
        after : sequence of sequences of events
            What each lane's comes after, beside the lane's own work.

        Returns
        -------
        list of events
            As from `Lane.launch`.

        Raises
        ------
        ArgumentError
            A lane has captured nothing of the name.
        LaneError
            A launch failed, by its own fault or that of earlier work.
        """
        for lane in self.lanes:
            lane.check_graph(name)
        home, events = self.home, []
        with home:  # once for all lanes of its device, since a change of devices costs two calls
            for lane, before in zip(self.lanes, after, strict=True):
                if isinstance(lane, DeviceLane) and lane.device_id == home.device_id:
                    try:
                        events.append(lane.enqueue(name, before))
                    except Exception as error:
                        lane.raise_named(error)
                        raise
                else:
                    events.append(lane.launch(name, after=before))
        return events

    def fork(self, stream: StreamLike) -> None:
        """Let what all lanes do from now on come after what a stream has; the host goes on.

        Parameters
        ----------
        stream
            Of the first lane's device; see `StreamLike`.
        """
        event = self.mark(stream)
        for lane in self.lanes:
            lane.wait_for(event)

    def mark(self, stream: StreamLike) -> Any:
        """Return an event of what a stream of the first lane's device has; the next `mark` sets it anew."""
        self.check_stream(stream)
        if not isinstance(self.home, DeviceLane):
            return None
        self._marked = self._marked or self.home.new_event()
        with self.home:
            as_core_stream(stream).record(self._marked)
        return self._marked

    def join(self, stream: StreamLike) -> None:
        """Let what a stream does from now on come after what all lanes have; the host goes on."""
        self.check_stream(stream)
        if isinstance(self.home, DeviceLane):
            target = as_core_stream(stream)
            for lane in self.lanes:
                event = lane.done()
                with self.home:
                    target.wait(event)

    def check_stream(self, stream: StreamLike) -> None:
        """Refuse a caller's stream where the lanes are the host's, which run at once."""
        if self.on_host:
            check_no_stream(stream)

    def synchronize(self) -> None:
        """Wait for all lanes; raises one `LaneError` that names every lane whose work failed."""
        faults = []
        for lane in self.lanes:
            try:
                lane.synchronize()
            except LaneError as error:
                faults.append(error)
        if faults:
            raise _joined(faults)

    def close(self) -> None:
        """Wait for all lanes and free what they have; raises as `synchronize` does, after all are closed."""
        faults = self._close_all()
        if faults:
            raise _joined(faults)

    def _close_all(self) -> list[LaneError]:
        faults = []
        for lane in self.lanes:
            try:
                lane.close()
            except LaneError as error:
                faults.append(error)
        return faults

    def _link_peers(self) -> None:
        """Let linked devices read each other's memory, so that copies do not go through the host."""
        by_device = {lane.device_id: lane for lane in self.lanes if isinstance(lane, DeviceLane)}
        for device, lane in by_device.items():
            for peer, other in by_device.items():
                if device != peer and are_linked(device, peer):
                    with lane:
                        (fault,) = driver.cuCtxEnablePeerAccess(other.context, 0)
                        if fault not in LINKED:
                            raise LaneError((lane.index,), f"{lane}: no link to {other}: {fault_text(fault)}")


def of_each_lane(name: str, given: Sequence[Any] | None, devices: DeviceGroup, default: Any = None) -> Any:
    """Check that there is one for each lane."""
    if given is None and default is not None:
        return default
    if not isinstance(given, list | tuple) or len(given) != len(devices):
        got = f"{len(given)}" if isinstance(given, list | tuple) else type(given).__name__
        raise ArgumentError(name, got, f"a list or tuple with one for each of {len(devices)} lanes")
    return given


def as_core_stream(stream: StreamLike) -> Any:
    """Return a stream as cuda.core has it."""
    if isinstance(stream, Stream):
        return stream
    return launch_stream(stream_handle(stream, NO_LIBRARY))


def _new_lane(index: int, device_id: int | None, timing: bool) -> Lane:
    if device_id is None or SIMULATED:
        return Lane(index, device_id)
    return DeviceLane(index, device_id, timing)


def _checked_devices(devices: Sequence[int | None]) -> list[int | None]:
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ArgumentError("devices", repr(devices), "a sequence of device indices, one for each lane")
    if not devices:
        raise ArgumentError("devices", "none", "at least one")
    if any(device is None for device in devices):
        if any(device is not None for device in devices):
            raise ArgumentError("devices", list(devices), "devices, or None throughout for the host")
        return list(devices)
    require_device()
    count = 1 if SIMULATED else len(cuda.gpus)
    for lane, device in enumerate(devices):
        known = isinstance(device, int | np.integer) and not isinstance(device, bool)
        if not known or not 0 <= int(device or 0) < count:
            there = "there is 1" if count == 1 else f"there are {count}, 0 to {count - 1}"
            raise ArgumentError(f"devices[{lane}]", repr(device), f"a CUDA device: {there}")
    return [int(device) for device in devices if device is not None]


def _joined(faults: Sequence[LaneError]) -> LaneError:
    if len(faults) == 1:
        return faults[0]
    lanes = {lane for fault in faults for lane in fault.lanes}
    return LaneError(tuple(sorted(lanes)), "; ".join(fault.reason for fault in faults))
