"""Whether arrays share memory: by address, shape and strides alone, on the host and on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.errors import ArgumentError

WORK = 10_000  # of numpy's search for a shared byte; views of one array take a few steps


class Extent(NamedTuple):
    """The bytes of a view.

    Attributes
    ----------
    begin, end : int
        Addresses of the first byte and after the last.
    place : int
        Of the view among others.
    period : int
        Rows begin at multiples of it from each other; 0 where there is one row.
    row : int
        Bytes of a row.
    address : int
        Of a row.
    """

    begin: int
    end: int
    place: int
    period: int
    row: int
    address: int


def address_of(view: Any) -> int:
    """Address of a view's first element; in the simulator, where its imitation of an array has it."""
    return int(view.pointer if hasattr(view, "pointer") else view.ctypes.data)


def check_apart(
    views: Mapping[str, Any], expected: str = "memory of its own", *, are_contiguous: bool = False
) -> None:
    """Check that no two arrays of one place share memory.

    Parameters
    ----------
    views : dict
        numpy arrays, or views of arrays on one device, by the names that the caller knows them by.
    expected : str
        What each should be.
    are_contiguous : bool
        Whether all are known to be C-contiguous, which is quicker.

    Raises
    ------
    ArgumentError
        Names the later of two that do.
    """
    names, arrays = list(views), list(views.values())
    extent_of = _contiguous_extent if are_contiguous else _extent
    extents = sorted(extent_of(view, place) for place, view in enumerate(arrays) if 0 not in view.shape)
    reaching: list[Extent] = []  # those that may reach the next
    for extent in extents:
        reaching = [other for other in reaching if other.end > extent.begin]
        for other in reaching:
            if _may_meet(extent, other) and _share_memory(arrays[extent.place], arrays[other.place]):
                first, second = sorted((extent.place, other.place))
                raise ArgumentError(names[second], f"the memory of {names[first]}", expected)
        reaching.append(extent)


def overlaps_itself(view: Any) -> bool:
    """Whether elements of a view lie in each other's memory, as where a stride is 0."""
    if 0 in view.shape:
        return False
    reach = view.dtype.itemsize
    for stride, count in sorted((abs(s), n) for n, s in zip(view.shape, view.strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += (count - 1) * stride
    return False


def _extent(view: Any, place: int) -> Extent:
    address = begin = end = address_of(view)
    row = view.dtype.itemsize
    period = 0
    for count, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if count == 1:
            continue
        if stride == row:
            row *= count
        else:
            period = math.gcd(period, stride)
        if stride < 0:
            begin += (count - 1) * stride
        else:
            end += (count - 1) * stride
    return Extent(begin, end + view.dtype.itemsize, place, period, row, address)


def _contiguous_extent(view: Any, place: int) -> Extent:
    address, nbytes = address_of(view), math.prod(view.shape) * view.dtype.itemsize
    return Extent(address, address + nbytes, place, 0, nbytes, address)


def _may_meet(one: Extent, other: Extent) -> bool:
    """Whether rows of two views meet, if both go on for ever."""
    period = math.gcd(one.period, other.period)
    if period == 0:
        return True  # one row each
    distance = (other.address - one.address) % period
    return distance < one.row or distance + other.row > period


def _share_memory(first: Any, second: Any) -> bool:
    """Whether two views share a byte."""
    try:
        # numpy's type stubs know of no limits but none.
        return np.shares_memory(_Bytes(first).array, _Bytes(second).array, max_work=WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False  # slices are never so entangled, and what may be right is not refused


class _Bytes:
    """Where a view's bytes are, for numpy, which reads none of them."""

    def __init__(self, view: Any) -> None:
        self._view = view

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": tuple(self._view.shape),
            "strides": tuple(self._view.strides),
            "typestr": f"|V{self._view.dtype.itemsize}",
            "data": (address_of(self._view), True),
            "version": 3,
        }

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """An array at these addresses, never to be read."""
        return np.asarray(self)
