"""Keys of device arrays: all that launches depend on of an array, but for its content."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any, TypeAlias

from numba_ddtree.arrays import DeviceView, device_view, library_of
from numba_ddtree.errors import ArgumentError

ArrayKey: TypeAlias = tuple[Any, ...]
"""Address, shape, strides, dtype and device; of None, nothing."""

VIEWED_LIBRARIES = ("cupy", "numba", "numba_cuda")


def array_key(array: Any) -> ArrayKey | None:
    """Return an array's key: of two arrays of one library with the same key, views are the same.

    It is read from the array anew each time, since an array can be given other memory, and is as little
    work as the library allows. Arrays of torch that are on the host have keys, too, which are no device
    array's.

    Returns
    -------
    tuple or None
        None for what has no key: arrays of other libraries than torch, cupy and numba, what is no array,
        and everything in the simulator.
    """
    try:
        return _reader_of(array.__class__)(array)
    except (ArgumentError, RuntimeError):  # such as tensors without memory, which checks have words for
        return None


@lru_cache(maxsize=256)
def _reader_of(kind: type) -> Callable[[Any], ArrayKey | None]:
    """Return what makes a key of arrays of one kind."""
    from numba_ddtree.cuda_target import SIMULATED

    if kind is NoneType:
        return _key_of_nothing
    library = library_of(kind)
    if SIMULATED or not (kind is DeviceView or library in ("torch", *VIEWED_LIBRARIES)):
        return _no_key
    return _torch_key if library == "torch" else _view_key


def _key_of_nothing(_: None) -> ArrayKey:
    return ()


def _no_key(_: Any) -> None:
    return None


def _torch_key(tensor: Any) -> ArrayKey:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def _view_key(array: Any) -> ArrayKey:
    view = device_view("array", array)
    return view.pointer, view.shape, view.strides, view.dtype, view.device_id
