"""Latent caches of several layers as one argument: where each layer's rows lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import Placement, gather
from numba_ddtree.errors import ArgumentError
from numba_ddtree.overlaps import address_of, check_apart, overlaps_itself
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

ADDRESS, BLOCK_STRIDE, ROW_STRIDE, ROW_BYTES = range(4)  # columns of the table
IMMUTABLE = ("jax", "jaxlib")  # libraries whose arrays are never written


@dataclass(frozen=True, eq=False)
class KVCaches:
    """Caches that are worked on together, all layers of all of them in one launch; `plan` makes one.

    Keeps the caches alive, and is true of them for as long as they stay where they are in memory.

    Attributes
    ----------
    num_blocks : int
        Pages, or requests of contiguous caches.
    block_size : int
        Rows of each: page_size, or S.
    num_layers : int
        Layers of all caches together.
    placement : Placement
        Where they live.
    views : tuple
        Views of the caches, as `numba_ddtree.arrays.gather` makes them.
    table : optional
        Where each layer lies, on the device, int64 [num_layers, 4]: address, block stride, row stride and
        row size in bytes.
    """

    num_blocks: int
    block_size: int
    num_layers: int
    placement: Placement
    views: tuple[Any, ...]
    table: Any = None

    @classmethod
    def plan(cls, caches: Array | Sequence[Array]) -> KVCaches:
        """Prepare caches, so that later calls copy nothing from the host.

        Parameters
        ----------
        caches : array or sequence of arrays
            As for `numba_ddtree.compact_kv`.

        Returns
        -------
        KVCaches
            For device arrays, after synchronising.

        Raises
        ------
        ArgumentError
            Wrong shape, place or layout of a cache, or one that cannot be written or shares another's memory.
        BackendError
            No device for device arrays.
        """
        described = cls.describe(caches)
        if described.placement.on_host:
            return described
        from numba_ddtree.cuda_target import cuda

        with Transfer(described.placement, None) as transfer:
            table = transfer.input(layer_table(described.views))
            cuda.synchronize()  # a later call may be on another stream
        return replace(described, table=table)

    @classmethod
    def describe(cls, caches: Array | Sequence[Array]) -> KVCaches:
        """Check caches as `plan` does, and copy nothing."""
        given = dict(_named(caches))
        placement, views = gather(**given)
        shapes = {name: tuple(view.shape) for name, view in views.items()}
        for name, view in views.items():
            _check_shape(name, shapes[name], next(iter(shapes.items())))
            _check_layout(name, view)
        check_apart(views, "each cache once, in memory of its own")
        num_blocks, block_size, _ = next(iter(shapes.values()))[-3:]
        num_layers = sum(_num_layers(shape) for shape in shapes.values())
        return cls(num_blocks, block_size, num_layers, placement, tuple(views.values()))

    def layers(self) -> Iterator[Any]:
        """Yield each layer of host caches, [num_blocks, block_size, D]."""
        for view in self.views:
            yield from view if view.ndim == 4 else [view]


def layer_table(views: Sequence[Any]) -> NDArray[np.int64]:
    """Say where the layers of views on a device lie: `KVCaches.table`."""
    rows = []
    for view in views:
        shape, strides = tuple(view.shape), tuple(view.strides)
        layer_stride = strides[0] if len(shape) == 4 else 0
        row_bytes = shape[-1] * view.dtype.itemsize
        for layer in range(_num_layers(shape)):
            rows.append((address_of(view) + layer * layer_stride, *strides[-3:-1], row_bytes))
    return np.array(rows, np.int64)


def _named(caches: Array | Sequence[Array]) -> Iterator[tuple[str, Array]]:
    """Yield each cache with its name as an argument; every one has to be an array that can be written."""
    if not isinstance(caches, list | tuple):
        given = {"caches": caches}
    elif not caches:
        raise ArgumentError("caches", "no cache", "one cache or more")
    else:
        given = {f"caches[{index}]": cache for index, cache in enumerate(caches)}
    for name, cache in given.items():
        library = type(cache).__module__.partition(".")[0]
        if not hasattr(cache, "shape") or library in IMMUTABLE:
            raise ArgumentError(name, type(cache).__name__, "an array that can be written in place")
        yield name, cache


def _check_shape(name: str, shape: tuple[int, ...], first: tuple[str, tuple[int, ...]]) -> None:
    first_name, first_shape = first
    if len(shape) not in (3, 4) or 0 in shape[:-3] + shape[-2:]:
        expected = "[B, S, D] or [pages, page_size, D], or several layers of that in one array"
        raise ArgumentError(name, f"shape {shape}", expected)
    if shape[-3:-1] != first_shape[-3:-1]:
        raise ArgumentError(name, f"shape {shape}", f"blocks and rows as in {first_name}, {first_shape}")


def _check_layout(name: str, view: Any) -> None:
    """Check that a cache can be written and that its rows are contiguous and do not overlap."""
    if isinstance(view, np.ndarray):
        if not view.flags.writeable:
            raise ArgumentError(name, "a read-only array", "an array that can be written in place")
        if overlaps_itself(view):
            got = f"shape {view.shape} with strides {view.strides}"
            raise ArgumentError(name, got, "rows that do not overlap")
        return  # it is copied to the device, whatever its layout
    *outer, (size, step) = zip(view.shape, view.strides, strict=True)
    itemsize = view.dtype.itemsize
    fits = size == 1 or step == itemsize
    reach = size * itemsize
    for stride, count in sorted((stride, count) for count, stride in outer):
        if count > 1:
            fits = fits and stride >= reach
            reach += (count - 1) * stride
    if not fits and 0 not in view.shape:
        expected = "contiguous rows that do not overlap"
        raise ArgumentError(name, f"shape {tuple(view.shape)} with strides {tuple(view.strides)}", expected)


def _num_layers(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 4 else 1
