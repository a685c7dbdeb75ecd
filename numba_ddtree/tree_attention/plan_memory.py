"""Memory of a plan's: for partial results, and for what the Hopper kernel's blocks begin with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numba_ddtree.arrays import DeviceView, Placement, c_strides, check_array, device_view
from numba_ddtree.cuda_target import cuda
from numba_ddtree.devices import device_context
from numba_ddtree.errors import ArgumentError
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array
from numba_ddtree.tree_attention.hopper_state import BATCH_AT, REQUEST_WORDS
from numba_ddtree.tree_attention.layouts import ALIGNMENT
from numba_ddtree.tree_attention.splits import SplitSizes
from numba_ddtree.workspace import workspace_bytes


def memory_of_partials(sizes: SplitSizes, placement: Placement, workspace: Array | None) -> dict[str, Any]:
    """Return the arrays for partial results: parts of the caller's workspace, or of a new one."""
    fields = sizes.fields()["splits"]
    if not fields:
        return {}
    if workspace is None:
        with Transfer(placement, None) as transfer:
            view = transfer.scratch((sizes.workspace_bytes,), np.uint8)
            cuda.synchronize()  # runs may be on other streams than the allocation
    else:
        view = _checked_workspace(workspace, sizes.workspace_bytes)
    memory, address = {}, view.pointer
    for name, part in fields.items():
        dtype = np.dtype(part.dtype)
        strides = c_strides(part.shape, dtype.itemsize)
        memory[name] = DeviceView(address, part.shape, strides, dtype, view.device_id, view.owner)
        address += workspace_bytes({"": {name: part}})
    return memory


def _checked_workspace(workspace: Array, needed: int) -> DeviceView:
    """Return a view of a caller's workspace that is large enough."""
    view: DeviceView = device_view("workspace", workspace)
    given = math.prod(view.shape) * view.dtype.itemsize
    if given < needed:
        raise ArgumentError("workspace", f"{given} bytes", f"at least {needed} bytes")
    sizes = {f"d{axis}": size for axis, size in enumerate(view.shape)}
    check_array("workspace", view, (view.dtype.type,), **sizes)
    if view.pointer % ALIGNMENT != 0:
        got = f"an address {view.pointer % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
        raise ArgumentError("workspace", got, f"a multiple of {ALIGNMENT}")
    return view


def memory_of_first_items(placement: Placement, batch: int) -> Any:
    """Return memory for the first items of the Hopper kernel's blocks, which says that there are none."""
    with device_context(placement.device_id):
        array = cuda.to_device(np.full(BATCH_AT + 1 + batch * REQUEST_WORDS, -1, np.int32))
        cuda.synchronize()  # runs may be on other streams than the copy
        return device_view("first_items", array)
