"""Copies from lane to lane: from device to device, or through the host, ordered by events alone."""

from __future__ import annotations

from collections.abc import Sequence
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


class Part(NamedTuple):
    """What is copied to where.

    Attributes
    ----------
    source, target : Rectangle
    width, rows : int
        Bytes of a row, and how many rows.
    """

    source: Rectangle
    target: Rectangle
    width: int
    rows: int


class LaneCopy:
    """Copies from one lane's memory to memory of another's device; prepared once, run any number of times.

    Parameters
    ----------
    source, target : DeviceLane
    mode : {"direct", "host"}
        From device to device, which the driver itself takes through the host where they are not linked,
        or through pinned memory.
    parts : sequence of Part
        Whose memory lives for as long as the copies are run.
    """

    def __init__(self, source: DeviceLane, target: DeviceLane, mode: str, parts: Sequence[Part]) -> None:
        self._source, self._target = source, target
        self._sent, self._read = source.new_event(), target.new_event()
        self._reader: Any = None  # the stream of the last run
        self._sends: list[Any] = []  # to pinned memory
        self._reads: list[Any] = []
        self._pinned: list[Any] = []
        for part in parts:
            middle = part.source
            if mode == "host":
                self._pinned.append(source.allocate_pinned(part.width * part.rows))
                middle = Rectangle(int(self._pinned[-1].handle), part.width)
                self._sends.append(_described(part._replace(target=middle)))
            self._reads.append(_described(part._replace(source=middle)))

    def run(self, stream: Any) -> None:
        """Copy what the source's lane has written so far; the host does not wait.

        Parameters
        ----------
        stream : cuda.core.Stream
            Of the target's device: what it has done comes before the copy, what it does next after.
        """
        with self._source:
            if self._sends:
                self._wait_until_read()
                _launch(self._sends, self._source.stream)
            self._source.stream.record(self._sent)
        with self._target:
            if self._reader is not None and self._reader is not stream:
                stream.wait(self._read)  # so that the event is of what both streams read
            stream.wait(self._sent)
            _launch(self._reads, stream)
            stream.record(self._read)
        self._reader = stream

    @property
    def is_read(self) -> bool:
        """Whether all that was to be copied has been."""
        with self._target:
            return self._reader is None or bool(self._read.is_done)

    def release(self) -> None:
        """Let the source's lane write to what was copied: from now on, it comes after the copy."""
        with self._source:
            self._wait_until_read()

    def _wait_until_read(self) -> None:
        if self._reader is not None:
            self._source.stream.wait(self._read)


class UnreadCopies:
    """Copies that have been launched, each once, of what is not to be written before they are done."""

    def __init__(self) -> None:
        self._kept: dict[LaneCopy, object] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, copies: Sequence[LaneCopy], keep: object) -> None:
        """Add copies, and what has the memory that they read and write."""
        self._kept |= dict.fromkeys(copies, keep)

    def forget_done(self) -> None:
        """Forget copies that are done, with their memory."""
        self._kept = {copy: kept for copy, kept in self._kept.items() if not copy.is_read}

    def release(self) -> None:
        """Let the sources' lanes write again: from now on, they come after the copies."""
        for copy in self._kept:
            copy.release()
        self._kept = {}


def _described(part: Part) -> Any:
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = UNIFIED
    copy.srcDevice, copy.srcPitch = part.source
    copy.dstDevice, copy.dstPitch = part.target
    copy.WidthInBytes, copy.Height = part.width, part.rows
    return copy


def _launch(copies: Sequence[Any], stream: Any) -> None:
    for copy in copies:
        result_of(driver.cuMemcpy2DAsync(copy, stream.handle))
