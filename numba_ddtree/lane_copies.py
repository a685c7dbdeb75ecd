"""Copies from lane to lane: from device to device, or through the host, ordered by events alone."""

from __future__ import annotations

from typing import Any, NamedTuple

from cuda.bindings import driver

from numba_ddtree.driver_faults import result_of
from numba_ddtree.lanes import DeviceLane

UNIFIED = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED  # whose device the driver finds by the address


class Rectangle(NamedTuple):
    """Rows of bytes at regular distances.

    Attributes
    ----------
    address : int
        Of the first byte, on a device or in pinned memory.
    pitch : int
        Bytes from one row to the next.
    """

    address: int
    pitch: int


class LaneCopy:
    """A copy from one lane's memory to memory of another's device; made once, run any number of times.

    Parameters
    ----------
    source, target : DeviceLane
    mode : {"direct", "host"}
        From device to device, which the driver itself takes through the host where they are not linked,
        or through pinned memory.
    width, rows : int
        Bytes of a row, and how many rows.
    """

    def __init__(self, source: DeviceLane, target: DeviceLane, mode: str, width: int, rows: int) -> None:
        self._source, self._target = source, target
        self._size = width, rows
        self._sent, self._read = source.new_event(), target.new_event()
        self._has_run = False
        self._pinned = None
        if mode == "host":
            self._pinned = Rectangle(source.allocate_pinned(width * rows), width)

    def run(self, source: Rectangle, target: Rectangle, stream: Any) -> None:
        """Copy what the source's lane has written so far; the host does not wait.

        Parameters
        ----------
        source, target : Rectangle
        stream : cuda.core.Stream
            Of the target's device: what it has done comes before the copy, what it does next after.
        """
        with self._source:
            if self._pinned is not None:
                self._wait_until_read()
                self._copy(source, self._pinned, self._source.stream)
            self._source.stream.record(self._sent)
        with self._target:
            stream.wait(self._sent)
            self._copy(source if self._pinned is None else self._pinned, target, stream)
            stream.record(self._read)
        self._has_run = True

    def release(self) -> None:
        """Let the source's lane write to what was copied: from now on, it comes after the copy."""
        with self._source:
            self._wait_until_read()

    def _wait_until_read(self) -> None:
        if self._has_run:
            self._source.stream.wait(self._read)

    def _copy(self, source: Rectangle, target: Rectangle, stream: Any) -> None:
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = UNIFIED
        copy.srcDevice, copy.srcPitch = source
        copy.dstDevice, copy.dstPitch = target
        copy.WidthInBytes, copy.Height = self._size
        result_of(driver.cuMemcpy2DAsync(copy, stream.handle))
