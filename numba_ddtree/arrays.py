"""Arrays of any library in, checked views out.

A call's arrays live together, on the host or on one device. Host arrays (numpy's, or whatever
`numpy.asarray` takes) become numpy arrays; device arrays (torch, cupy, jax, numba, anything with
DLPack or ``__cuda_array_interface__``) become `DeviceView` of the same memory, without a copy and
without synchronising. bfloat16, which numpy itself has not, is the dtype of `ml_dtypes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike, NDArray

from numba_ddtree.errors import ArgumentError
from numba_ddtree.overlaps import check_apart, overlaps_itself

StreamLike: TypeAlias = Any
"""A stream of cuda.core, torch, cupy or numba, anything with ``__cuda_stream__``, a raw handle, or None.

Or a `numba_ddtree.launch.LaunchSequence`, which takes the launches to make them later.
"""

TOKEN_DTYPES = (np.int32, np.int64)
FLOAT_DTYPES = (np.float32, np.float16, bfloat16)
_DLPACK_CUDA = (2, 13)  # kDLCUDA and kDLCUDAManaged


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the arrays of a call live.

    Attributes
    ----------
    library : str
        ``"numpy"``, or the device library whose kind of array the results are to be: ``"torch"``,
        ``"cupy"``, ``"jax"``; ``"numba"`` for any other.
    device_id : int or None
        None for host arrays.
    """

    library: str
    device_id: int | None

    @property
    def on_host(self) -> bool:
        """Whether the arrays are the host's."""
        return self.device_id is None

    def __str__(self) -> str:
        return "host arrays" if self.on_host else f"arrays on CUDA device {self.device_id}"


HOST = Placement("numpy", None)


def placement_of(name: str, array: Any) -> Placement:
    """Say where one array lives."""
    library = library_of(array.__class__)
    if library == "torch" and hasattr(array, "is_cuda"):  # which is ten times as fast as its DLPack
        return _placement(library, array.get_device()) if array.is_cuda else HOST
    # The simulator's device arrays pass numpy's DLPack on as their own.
    is_numba = hasattr(array, "__cuda_ndarray__")
    dlpack_device = None if is_numba else getattr(array, "__dlpack_device__", None)
    if dlpack_device is not None:
        kind, index = dlpack_device()
        if int(kind) not in _DLPACK_CUDA:
            return HOST
        return _placement(library if library in ("cupy", "jax") else "numba", int(index))
    if is_numba or hasattr(array, "__cuda_array_interface__"):
        return _placement("numba", getattr(device_view(name, array), "device_id", 0))
    return HOST


@lru_cache(maxsize=256)
def library_of(kind: type) -> str:
    """Name the library that a class of arrays is from."""
    library = kind.__module__.partition(".")[0]
    return {"jaxlib": "jax"}.get(library, library)


@lru_cache(maxsize=256)
def _placement(library: str, device_id: int) -> Placement:
    return Placement(library, device_id)


def gather(**arguments: Any) -> tuple[Placement, dict[str, Any]]:
    """Turn a call's arrays into views and say where they live.

    Parameters
    ----------
    **arguments
        The arrays by the names that the caller knows them by; None passes through.

    Returns
    -------
    placement : Placement
    views : dict
        numpy arrays, or `DeviceView`.

    Raises
    ------
    ArgumentError
        Where an argument is no array, or lives elsewhere than the first one.
    """
    given = {name: array for name, array in arguments.items() if array is not None}
    placements = {name: placement_of(name, array) for name, array in given.items()}
    first_name, first = next(iter(placements.items()), ("", HOST))
    for name, placement in placements.items():
        if placement.device_id != first.device_id:
            raise ArgumentError(name, _described(placement), f"{_described(first)}, where {first_name} is")
    view = _host_view if first.on_host else device_view
    return first, {name: None if array is None else view(name, array) for name, array in arguments.items()}


def _described(placement: Placement) -> str:
    return "an array on the host" if placement.on_host else f"an array on CUDA device {placement.device_id}"


def _host_view(name: str, array: Any) -> NDArray[Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(name, "a masked array", "an array without a mask, which would be ignored")
    try:
        view = (
            _host_bfloat16(array)
            if str(getattr(array, "dtype", "")) == "torch.bfloat16"
            else np.asarray(array)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(name, f"{type(array).__name__} ({error})", "an array") from error
    if view.dtype.kind not in "biuf" and view.dtype != bfloat16:
        raise ArgumentError(name, f"dtype {view.dtype}", "an array of numbers")
    return view


def _host_bfloat16(tensor: Any) -> NDArray[Any]:
    """View a torch tensor that torch itself gives numpy no view of."""
    import torch

    bits: NDArray[Any] = tensor.detach().view(torch.int16).numpy()
    return bits.view(bfloat16)


@dataclass(frozen=True, slots=True)
class Address:
    """An address on a device as kernels take it, a uint64; keeps the owner of what lies there alive.

    Attributes
    ----------
    pointer : int
    owner : object
        The array that the memory belongs to.
    """

    dtype: ClassVar = np.dtype(np.uint64)
    shape: ClassVar = ()
    pointer: int
    owner: Any


@dataclass(frozen=True, slots=True)
class DeviceView:
    """An array of any library on a device, as kernels take it; keeps its owner alive.

    Attributes
    ----------
    pointer : int
        Address of the first element.
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : numpy.dtype
    device_id : int
    owner : object
        The array that the memory belongs to.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device_id: int
    owner: Any

    @property
    def address(self) -> Address:
        """The address, for kernels that take it alone."""
        return Address(self.pointer, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
        }

    def copy_to_host(self, stream: Any = 0) -> NDArray[Any]:
        """Copy to numpy on a stream of Numba's; its default stream synchronises."""
        from numba_ddtree.cuda_target import cuda

        with cuda.gpus[self.device_id]:
            host: NDArray[Any] = cuda.as_cuda_array(self, sync=False).copy_to_host(stream=stream)
        return host.view(self.dtype)  # of bfloat16, the interface tells the size alone


def device_view(name: str, array: Any) -> Any:
    """View an array of any library on a device; in the simulator, the array as it is.

    Raises
    ------
    ArgumentError
        Where its dtype is neither one of numpy's nor bfloat16.
    """
    view = _view_of(array.__class__)
    try:
        return view(array)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        got = f"{type(array).__name__} ({error})"
        raise ArgumentError(name, got, "an array of bfloat16 or of a dtype that numpy has") from error


@lru_cache(maxsize=256)
def _view_of(kind: type) -> Callable[[Any], Any]:
    """Return what makes a view of arrays of one kind."""
    from numba_ddtree.cuda_target import SIMULATED

    if SIMULATED or kind is DeviceView:
        return _same
    views = {"numba": _numba_view, "numba_cuda": _numba_view, "torch": _torch_view, "cupy": _cupy_view}
    return views.get(library_of(kind), _any_view)


def _same(array: Any) -> Any:
    return array


def _numba_view(array: Any) -> DeviceView:
    pointer, device = array.device_ctypes_pointer.value or 0, array.gpu_data.context.device.id
    return DeviceView(pointer, array.shape, array.strides, array.dtype, device, array)


def _torch_view(array: Any) -> DeviceView:
    dtype = _torch_dtype(array.dtype)
    strides = tuple(step * dtype.itemsize for step in array.stride())
    return DeviceView(array.data_ptr(), tuple(array.shape), strides, dtype, array.get_device(), array)


@lru_cache(maxsize=64)
def _torch_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def _cupy_view(array: Any) -> DeviceView:
    dtype = np.dtype(array.dtype)
    return DeviceView(array.data.ptr, array.shape, array.strides, dtype, array.device.id, array)


def _any_view(array: Any) -> DeviceView:
    from cuda.core.utils import StridedMemoryView

    # -1: the caller orders the streams, so nothing is synchronised here. jax has no way to say that;
    # it makes the default stream (1) wait for the array.
    stream = 1 if type(array).__module__.startswith("jax") else -1
    memory = StridedMemoryView.from_any_interface(array, stream_ptr=stream)
    dtype = np.dtype(memory.dtype)
    shape = tuple(memory.shape)
    steps = c_strides(shape, 1) if memory.strides is None else memory.strides
    strides = tuple(step * dtype.itemsize for step in steps)
    # The view, too, since what was exported may be a copy.
    return DeviceView(memory.ptr, shape, strides, dtype, memory.device_id, (array, memory))


def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides of a C-contiguous array, in the unit of the item's size."""
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[-len(shape) :] if shape else ()


def flat(view: Any) -> Any:
    """View a C-contiguous array as one of one dimension."""
    if isinstance(view, DeviceView):
        return replace(view, shape=(math.prod(view.shape),), strides=(view.dtype.itemsize,))
    return view.reshape(-1)


def to_host(name: str, array: Any) -> NDArray[Any]:
    """Copy an array to numpy; synchronises when it is on a device."""
    if array is None:
        raise ArgumentError(name, None, "an array")
    placement, views = gather(**{name: array})
    view = views[name]
    host: NDArray[Any] = np.array(view) if placement.on_host else view.copy_to_host()
    return host


def copy_to_outputs(arrays: dict[str, NDArray[Any]], outputs: dict[str, Any]) -> None:
    """Copy a reference's results into the caller's own host arrays, once all are found to fit.

    Both are by the names that the caller knows the arrays by.
    """
    for name, array in arrays.items():
        check_output(name, host_output(name, outputs[name]), array.shape, array.dtype.type)
    check_apart({name: outputs[name] for name in arrays})
    for name, array in arrays.items():
        np.copyto(outputs[name], array)


def host_output(name: str, output: Any) -> NDArray[Any]:
    """Return one of the caller's own result arrays, which has to be numpy's and writable."""
    if not isinstance(output, np.ndarray):
        raise ArgumentError(name, type(output).__name__, "a numpy array")
    if not output.flags.writeable:
        raise ArgumentError(name, "a read-only array", "an array that can be written")
    if overlaps_itself(output):
        got = f"strides {output.strides}, by which elements share memory"
        raise ArgumentError(name, got, "memory of its own for each element")
    return output


def check_output(name: str, view: Any, shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    """Check one of the caller's own result arrays, as `check_array` does."""
    check_array(name, view, (dtype,), **{f"d{axis}": size for axis, size in enumerate(shape)})


def members_of(name: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arrays that an argument has as its attributes as the caller knows them."""
    return {f"{name}.{member}": array for member, array in arrays.items()}


def check_array(name: str, array: Any, dtypes: tuple[type[np.generic], ...], **dims: int | None) -> None:
    """Check a view's dtype and shape, and that a device array is C-contiguous.

    Parameters
    ----------
    name : str
        The argument's name.
    array
        A view from `gather`.
    dtypes
        The dtypes allowed.
    **dims
        Each dimension's name and size, None for any size above zero (a batch, B, may be empty); a
        trailing underscore is for a name that occurs twice.

    Raises
    ------
    ArgumentError
    """
    if array is None:
        raise ArgumentError(name, None, "an array")
    shape_fits = len(array.shape) == len(dims) and all(
        size == wanted if wanted is not None else size > 0 or label == "B"
        for size, (label, wanted) in zip(array.shape, dims.items(), strict=True)
    )
    contiguous = isinstance(array, np.ndarray) or _is_c_contiguous(array)
    if shape_fits and contiguous and any(array.dtype == dtype for dtype in dtypes):
        return
    kind = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    wanted_shape = ", ".join(_dimension_text(label, size) for label, size in dims.items())
    layout = "" if contiguous else " with strides " + str(tuple(array.strides))
    raise ArgumentError(
        name,
        f"{array.dtype} of shape {tuple(array.shape)}{layout}",
        f"{kind} of shape [{wanted_shape}]" + ("" if contiguous else ", C-contiguous"),
    )


def _dimension_text(label: str, size: int | None) -> str:
    label = label.rstrip("_")
    return label if size is None else f"{label} = {size}"


def _is_c_contiguous(array: Any) -> bool:
    if 0 in array.shape:  # whatever its strides, which libraries choose differently
        return True
    step = array.dtype.itemsize
    for size, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def check_indices(name: str, array: Any, **dims: int | None) -> Any:
    """Check an array of int32 (on the host: of any integers that fit int32) and return it as int32."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu":
        limits = np.iinfo(np.int32)
        for index in first_where((array < limits.min) | (array > limits.max)):
            raise ArgumentError(at(name, index), array[index], "a number that fits int32")
        array = array.astype(np.int32, copy=False)
    check_array(name, array, (np.int32,), **dims)
    return array


def first_where(condition: NDArray[np.bool_]) -> Iterator[tuple[int, ...]]:
    """Yield the index of the first element that is true, or nothing."""
    if condition.any():
        yield tuple(int(i) for i in np.unravel_index(int(np.argmax(condition)), condition.shape))


def at(name: str, index: tuple[int, ...]) -> str:
    """Name one element of an argument."""
    return f"{name}[{', '.join(map(str, index))}]"


def check_count(name: str, value: Any, low: int, high: int) -> int:
    """Check a whole number and its range, ends included."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ArgumentError(name, repr(value), f"a whole number from {low} to {high}")
    if not low <= value <= high:
        raise ArgumentError(name, int(value), f"a number from {low} to {high}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Check a choice of yes or no."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(name, repr(value), "True or False")
    return bool(value)


def check_scalar(name: str, value: Any) -> float:
    """Check a real number that is finite in float32."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise ArgumentError(name, repr(value), "a real number")
    limit = float(np.finfo(np.float32).max)
    if not -limit <= value <= limit:
        raise ArgumentError(name, value, "a number that is finite in float32")
    return float(value)


def dtype_name(dtype: DTypeLike) -> str:
    """Name of a dtype, as numpy, torch and cupy spell it."""
    return np.dtype(dtype).name
