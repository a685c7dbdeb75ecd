"""What looks like arrays on a device where there are none, for launches that neither read nor write them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from numba_ddtree.arrays import DeviceView, c_strides
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.arguments import Arguments
from numba_ddtree.tree_attention.calls import make_work
from numba_ddtree.tree_attention.kernels import FLOAT32
from numba_ddtree.tree_attention.work import Work


def stand_in(memory: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceView:
    """Return what looks like an array on the device of some memory, and may lie beyond it."""
    strides = c_strides(shape, dtype.itemsize)
    return DeviceView(memory.pointer, shape, strides, dtype, memory.device_id, None)


def work_of_stand_ins(given: Arguments, transfer: Transfer, out_dtype: np.dtype[Any], memory: Any) -> Work:
    """Describe a call whose queries and outputs are stand-ins, of which only the shapes are known."""
    queries = {name: stand_in(memory, given.views[name].shape, given.dtype) for name in ("q_nope", "q_pe")}
    out = stand_in(memory, given.out_shape, out_dtype)
    lse = stand_in(memory, given.out_shape[:3], FLOAT32)
    lse = replace(lse, pointer=out.pointer + math.prod(out.shape) * out.dtype.itemsize)  # behind, not over it
    given = replace(given, views=given.views | queries)
    return make_work(given, transfer, out_dtype, out, lse, True)
