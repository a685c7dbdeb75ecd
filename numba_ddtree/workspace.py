"""Many arrays in one allocation, whose size is known before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.arrays import Placement, dtype_name
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

ALIGNMENT = 256  # bytes; as CUDA's own allocations have at least


class Field(NamedTuple):
    """An array of a workspace."""

    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without what aligns the next."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def workspace_bytes(groups: Mapping[str, Mapping[str, Field]]) -> int:
    """Bytes that `allocate` allocates."""
    return sum(_aligned(field.nbytes) for fields in groups.values() for field in fields.values())


def allocate(
    groups: Mapping[str, Mapping[str, Field]], placement: Placement
) -> tuple[Array, dict[str, dict[str, Array]]]:
    """Allocate groups of arrays in one piece, of undefined content.

    Parameters
    ----------
    groups : dict of dicts of Field
    placement : Placement
        The library and device of the arrays; for a device, that library's current stream is the one that
        the memory belongs to.

    Returns
    -------
    memory : uint8 [workspace_bytes]
    arrays : dict of dicts of arrays
        Parts of it, in order.
    """
    size = workspace_bytes(groups)
    memory: Array
    if placement.on_host:
        memory = np.zeros(size, np.uint8)
    else:
        with Transfer(placement, None) as transfer:
            transfer.output("memory", (size,), np.uint8)
            memory = transfer.results()["memory"]
    start = 0
    arrays: dict[str, dict[str, Array]] = {}
    for group, fields in groups.items():
        arrays[group] = {}
        for name, field in fields.items():
            part = memory[start : start + field.nbytes]
            arrays[group][name] = part.view(_dtype_of(field, placement)).reshape(field.shape)
            start += _aligned(field.nbytes)
    return memory, arrays


def _dtype_of(field: Field, placement: Placement) -> Any:
    """Return an array's dtype as its library has it."""
    if placement.library != "torch":
        return field.dtype
    import torch

    return getattr(torch, dtype_name(field.dtype))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
