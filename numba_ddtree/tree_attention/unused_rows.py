"""Outputs of nodes that are not in use, and of requests that are none, which no item has."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32
from numba_ddtree.device.memory import store_flat
from numba_ddtree.device.warp import LANES, warp_ballot, warp_broadcast
from numba_ddtree.tree_attention.split_items import is_valid_request
from numba_ddtree.tree_attention.work import LATENT

if not SIMULATED:
    from numba_ddtree.tree_attention.outputs import store_pair


@device_routine
def fill_node(out: Any, lse: Any, first: Any, heads: Any, value: Any, logarithm: Any, form: Any) -> None:
    """Write one value to all rows of a node, the first of which is row `first` of all; by a warp."""
    lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
    for head in range(uint32(heads)):
        row = int64(first + int64(head))
        for pair in range(lane, uint32(LATENT // 2), uint32(LANES)):
            store_pair(out, row * int64(LATENT) + int64(2 * uint32(pair)), value, value, form)
        if lane == uint32(0):
            store_flat(lse, row, logarithm)


@device_routine
def fill_unused_rows(
    tree: Any, keys: Any, max_keys: Any, out: Any, lse: Any, form: Any, worker: Any, workers: Any
) -> None:
    """Write 0 and -inf for nodes that are not in use, and NaN for requests that are none.

    A warp takes every so manieth node of each request.
    """
    batch, slots = int32(tree.num_nodes.shape[0]), int32(tree.ancestor_bits.shape[1])
    lane = int32(cuda.threadIdx.x & 31)
    for start in range(0, batch, LANES):
        request = int32(int32(start) + lane)
        used = slots
        if request < batch:
            is_valid = is_valid_request(tree, keys, request, max_keys)
            used = tree.num_nodes[uint32(request)] if is_valid else int32(-1)
        pending = warp_ballot(used < slots)
        while pending != uint32(0):
            owner = int32(cuda.ffs(int32(pending)) - 1)
            pending = uint32(pending & uint32(pending - uint32(1)))
            count = warp_broadcast(used, owner)
            value, logarithm = float32(0), float32(-np.inf)
            if count < 0:
                count, value, logarithm = int32(0), float32(np.nan), float32(np.nan)
            first = int64(int32(start) + owner) * int64(slots)
            for node in range(int32(count + int32(worker)), slots, int32(workers)):
                row = int64(int64(first + int64(node)) * int64(tree.heads))
                fill_node(out, lse, row, tree.heads, value, logarithm, form)
