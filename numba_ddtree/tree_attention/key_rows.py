"""Where a request's keys lie on the device: page tables, and the path of a node in the tree's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_function, device_routine, int32, int64, uint32, uint64
from numba_ddtree.tree_attention.work import KeyRows

ABSENT = np.uint64(0)  # address of a row that is not to be read
NO_PATH = 2**20  # longer than any path
KEY_SIGNATURE = "uint64, int64, int64, uint64, int64, int64, int32, int32, int32[::1], int32[::1], int32"


class Keys(NamedTuple):
    """`KeyRows` as kernels take them, in the order of `KEY_SIGNATURE`."""

    ckv: Any
    ckv_stride: Any
    ckv_page_stride: Any
    kpe: Any
    kpe_stride: Any
    kpe_page_stride: Any
    page_size: Any
    num_pages: Any
    page_table: Any
    page_starts: Any
    table_stride: Any


def key_arguments(keys: KeyRows) -> Keys:
    """Return what a kernel is launched with."""
    return Keys(
        keys.ckv.address,
        np.int64(keys.ckv.stride),
        np.int64(keys.ckv_page_stride),
        keys.kpe.address,
        np.int64(keys.kpe.stride),
        np.int64(keys.kpe_page_stride),
        np.int32(keys.page_size),
        np.int32(keys.num_pages),
        keys.page_table,
        keys.page_starts,
        np.int32(keys.table_stride),
    )


@device_routine
def key_capacity(keys: Any, request: Any) -> Any:
    """Keys (int64) that a request's pages have room for; negative where `page_starts` fall."""
    pages = int32(1)
    if keys.page_starts.shape[0] > 0:
        first, end = keys.page_starts[uint32(request)], keys.page_starts[uint32(request + 1)]
        pages = int32(end - first) if first >= 0 and end <= keys.page_table.shape[0] else int32(-1)
    elif keys.page_table.shape[0] > 0:
        pages = keys.table_stride
    return int64(pages) * int64(keys.page_size)


@device_routine
def row_addresses(keys: Any, request: Any, position: Any) -> Any:
    """Addresses (uint64) of the latent and the rotary part of a key below `key_capacity`.

    Both are `ABSENT` where the page table names a page that is none.
    """
    place = uint32(position)
    page_of_request = place // uint32(keys.page_size)
    row = int64(place - page_of_request * uint32(keys.page_size))
    page = int32(request)
    if keys.page_starts.shape[0] > 0:
        page = keys.page_table[uint32(uint32(keys.page_starts[uint32(request)]) + page_of_request)]
    elif keys.page_table.shape[0] > 0:
        page = keys.page_table[int64(request) * int64(keys.table_stride) + int64(page_of_request)]
    if uint32(page) >= uint32(keys.num_pages):
        return ABSENT, ABSENT
    ckv = int64(page) * keys.ckv_page_stride + row * keys.ckv_stride
    kpe = int64(page) * keys.kpe_page_stride + row * keys.kpe_stride
    return uint64(keys.ckv + uint64(ckv)), uint64(keys.kpe + uint64(kpe))


@device_function
def path_length(ancestor_bits: Any, request: Any, node: Any) -> Any:
    """Slots (int32) that a node sees, itself included."""
    length = int32(0)
    for word in range(uint32(ancestor_bits.shape[2])):
        length += int32(cuda.popc(uint32(ancestor_bits[uint32(request), uint32(node), uint32(word)])))
    return int32(length)


@device_routine
def path_in_use(ancestor_bits: Any, request: Any, node: Any, slots: Any) -> Any:
    """`path_length` where a node sees none but the first `slots`, and no less than `NO_PATH` otherwise."""
    length = int32(0)
    for word in range(uint32(ancestor_bits.shape[2])):
        bits = uint32(ancestor_bits[uint32(request), uint32(node), uint32(word)])
        inside = int32(max(int32(0), min(int32(32), int32(slots - int32(uint32(word) << uint32(5))))))
        length += int32(cuda.popc(bits) if uint64(uint64(bits) >> uint64(inside)) == uint64(0) else NO_PATH)
    return int32(length)


@device_routine
def place_of_bit(bits: Any, index: Any) -> Any:
    """Place (int32) of a word's bit number `index` of those that are 1, from the lowest on."""
    left, place, width = int32(index), uint32(0), uint32(16)
    while width > uint32(0):
        below = int32(cuda.popc(uint32(bits & uint32(uint32(uint32(1) << width) - uint32(1)))))
        if left >= below:
            left = int32(left - below)
            bits = uint32(bits >> width)
            place = uint32(place + width)
        width = uint32(width >> uint32(1))
    return int32(place)


@device_routine
def path_slot(ancestor_bits: Any, request: Any, node: Any, depth: Any) -> Any:
    """Slot (int32) at a depth of a node's path: its bits are in order of depth. -1 if there is none."""
    left = int32(depth)
    for word in range(uint32(ancestor_bits.shape[2])):
        bits = uint32(ancestor_bits[uint32(request), uint32(node), uint32(word)])
        count = int32(cuda.popc(bits))
        if left < count:
            return int32(int32(uint32(word) << uint32(5)) + place_of_bit(bits, left))
        left = int32(left - count)
    return int32(-1)
