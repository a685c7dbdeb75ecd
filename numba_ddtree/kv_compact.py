"""Cache compaction: the accepted rows of the tree move to the front of the tree's slots, in place.

A block moves the rows of one request in one layer of one cache. A thread moves the same columns of all
rows, some rows at a time: it reads them all, then writes them. An accepted index is at least its place in
the path, so that what it reads later was not written before, and no thread touches another's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    DeviceView,
    StreamLike,
    at,
    check_flag,
    check_indices,
    first_where,
    flat,
    gather,
    to_host,
)
from numba_ddtree.cuda_target import cuda, device_function, int32, int64, uint32, uint64
from numba_ddtree.device.words import WORD_ACCESS
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.kv_caches import ADDRESS, BLOCK_STRIDE, ROW_BYTES, ROW_STRIDE, KVCaches, layer_table
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.page_tables import (
    PAGING,
    check_page_table,
    check_pages,
    check_unshared,
    pages_on_host,
)
from numba_ddtree.refs import kv_compact as reference
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array

THREADS = block_threads(128)
TILE_ROWS = THREADS // 2  # half of the threads look up where they come from, half where they go
ROWS_AT_ONCE = 4
BLOCKS_PER_PROCESSOR = 8
NO_ROW = 0  # no row has this address
PATH = ("prefix_lengths", "accepted_indices", "accept_length")


def make_move_rows(word_bytes: int) -> Any:
    """Make the function that moves a tile of rows by words of a size."""
    load, store = WORD_ACCESS[word_bytes]

    @device_function
    def move_rows(s_source, s_target, rows, row_bytes):  # type: ignore[no-untyped-def]
        for column in range(uint32(cuda.threadIdx.x * word_bytes), row_bytes, uint32(THREADS * word_bytes)):
            for first in range(uint32(0), rows, uint32(ROWS_AT_ONCE)):
                r_low = cuda.local.array(ROWS_AT_ONCE, uint64)
                r_high = cuda.local.array(ROWS_AT_ONCE, uint64)
                for row in range(ROWS_AT_ONCE):
                    source = s_source[uint32(first + row)]
                    r_low[row] = r_high[row] = 0  # or they would live on from the rows before
                    if source != NO_ROW:
                        r_low[row], r_high[row] = load(source + int64(column))
                for row in range(ROWS_AT_ONCE):
                    target = s_target[uint32(first + row)]
                    if target != NO_ROW:
                        store(target + int64(column), r_low[row], r_high[row])

    return move_rows


move_rows_by_16, move_rows_by_4, move_rows_by_1 = (make_move_rows(size) for size in (16, 4, 1))


@device_function
def page_of(request, block, num_blocks, page_ids, page_starts, pages_each):  # type: ignore[no-untyped-def]
    """Where in the cache a request's block of slots lies, int64; below 0 where it has none."""
    page = int64(request) if block == 0 else int64(-1)
    if pages_each > 0 or page_starts.shape[0] > 0:
        first = int64(request) * pages_each
        end = first + pages_each
        if page_starts.shape[0] > 0:
            first = int64(page_starts[request])
            end = min(int64(page_starts[request + 1]), int64(page_ids.shape[0]))
        is_there = first >= 0 and first + block < end
        page = int64(page_ids[first + block]) if is_there else int64(-1)
    return page if page < num_blocks else int64(-1)


def compact_kv_kernel(  # type: ignore[no-untyped-def]
    layers,  # int64 [layers of all caches, 4]: address, block stride, row stride and row size in bytes
    num_blocks,  # int32: pages, or requests of a contiguous cache
    block_size,  # uint32: rows of each
    page_ids,  # int32 [B * pages_each] or [total], or empty: a contiguous cache
    page_starts,  # int32 [B + 1], or empty: a request's pages begin at request * pages_each
    pages_each,  # int32
    prefix_lengths,  # int32 [B]
    accepted_indices,  # int32 [B, L + 1]
    accept_length,  # int32 [B]
):
    thread = cuda.threadIdx.x
    batch = uint32(prefix_lengths.shape[0])
    layer = uint32(uint32(cuda.blockIdx.x) // batch)
    request = uint32(uint32(cuda.blockIdx.x) % batch)
    length = min(accept_length[request], int32(accepted_indices.shape[1]))
    prefix = prefix_lengths[request]
    if prefix < 0:
        length = int32(0)
    address = layers[layer, ADDRESS]
    block_stride = layers[layer, BLOCK_STRIDE]
    row_stride = layers[layer, ROW_STRIDE]
    row_bytes = layers[layer, ROW_BYTES]
    misfit = address | block_stride | row_stride | row_bytes
    s_rows = cuda.shared.array(THREADS, int64)
    s_source = s_rows[:TILE_ROWS]
    s_target = s_rows[TILE_ROWS:]
    for first in range(0, length, TILE_ROWS):
        place = int32(first + thread % TILE_ROWS)
        index = accepted_indices[request, place] if place < length else int32(-1)
        s_rows[thread] = NO_ROW
        if index > place:
            slot = uint32(int64(prefix) + int64(index if thread < TILE_ROWS else place))
            page = page_of(request, int64(slot // block_size), num_blocks, page_ids, page_starts, pages_each)
            if page >= 0:
                s_rows[thread] = address + page * block_stride + int64(slot % block_size) * row_stride
        cuda.syncthreads()
        if thread < TILE_ROWS and s_source[thread] == NO_ROW:
            s_target[thread] = NO_ROW  # nothing is written that was not read
        cuda.syncthreads()
        rows = uint32(min(int32(length - first), int32(TILE_ROWS)))
        if misfit & 15 == 0:
            move_rows_by_16(s_source, s_target, rows, uint32(row_bytes))
        elif misfit & 3 == 0:
            move_rows_by_4(s_source, s_target, rows, uint32(row_bytes))
        else:
            move_rows_by_1(s_source, s_target, rows, uint32(row_bytes))
        cuda.syncthreads()


COMPACT_KV = Kernel(
    compact_kv_kernel,
    (
        "void(int64[:, ::1], int32, uint32, int32[::1], int32[::1], int32, "
        "int32[::1], int32[:, ::1], int32[::1])",
    ),
    THREADS,
    BLOCKS_PER_PROCESSOR,
)


def compact_kv(
    caches: Array | Sequence[Array] | KVCaches,
    prefix_lengths: Array,
    accepted_indices: Array,
    accept_length: Array,
    *,
    block_table: Array | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> None:
    """Move row ``P + accepted_indices[j]`` of each request to row ``P + j``, in place, in all layers.

    One launch for all layers of all caches. The rows of the accepted path are then the prefix's next
    ``accept_length`` rows; all other rows stay, so that a row which is in its place already, and a request
    of accept length 0, are not touched. Rows are moved as they are, bit by bit, whatever their dtype.
    Deterministic.

    On a device no value is read back. A row is left alone where its index is below its place, or where it
    would come from or go to a slot that the request has not: beyond the cache or the page table, or on a
    page that is none of the cache's. Two requests may share pages only where neither of them writes.

    Parameters
    ----------
    caches : array, sequence of arrays, or KVCaches
        Contiguous: [B, S, D], or [layers, B, S, D]. Paged: [pages, page_size, D], or [layers, pages,
        page_size, D]. Several caches, such as the ckv and the kpe of each layer, may differ in D, dtype and
        layers. A row is contiguous; other strides may be any, so that a slice of a fused cache will do.
        Whole words of 16 bytes move where addresses, strides and row sizes are multiples of 16, otherwise
        of 4 bytes or single bytes. Arrays that are not prepared by `KVCaches.plan` are described to the
        device at each call, by a copy from the host that a CUDA graph cannot hold.
    prefix_lengths : int32 [B]
        P, rows in the cache before the tree's.
    accepted_indices : int32 [B, L + 1]
        The accepted slots, rising, as in `AcceptResult`.
    accept_length : int32 [B]
        How many of them; 0 for a request that takes no part.
    block_table : int32 [B, M], optional
        For paged caches: the pages of each request in order. Only those of the accepted rows, and of where
        they go, are looked at; the rest may be anything.
    kv_indptr, kv_indices : int32 [B + 1] and int32 [total], optional
        Another form of the same, FlashInfer's: the pages of request b are ``kv_indices[kv_indptr[b] :
        kv_indptr[b + 1]]``.
    stream
        Stream to launch on; by default the current one of the caches' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays as those of host arrays are; synchronises.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; for host arrays, and with `validate`, also
        lengths, indices or pages out of range, indices that do not rise, and a page that rows move to beside
        another use of it.
    BackendError
        No device for the CUDA backend.

    Notes
    -----
    Synchronises for host arrays only, which are copied to the device and back.
    """
    check_flag("validate", validate)
    if not isinstance(caches, KVCaches):
        caches = KVCaches.describe(caches)
    _, views = gather(
        caches=caches.views[0],
        prefix_lengths=prefix_lengths,
        accepted_indices=accepted_indices,
        accept_length=accept_length,
        block_table=block_table,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
    )
    del views["caches"]
    views = _checked(views, caches)
    runs_reference = use_reference(backend, caches.placement, stream)
    if caches.placement.on_host or validate:
        path = [to_host(name, views[name]) for name in PATH]
        pages, kv_indptr = pages_on_host(views)
        _check_path(caches, path, pages, kv_indptr)
        if runs_reference:
            for layer in caches.layers():
                reference.compact_kv(layer, *path, pages)
            return
    _launch(caches, views, stream)


def _checked(views: dict[str, Any], caches: KVCaches) -> dict[str, Any]:
    """Check every view's shape and dtype, and that the page table has one form."""
    prefixes = check_indices("prefix_lengths", views["prefix_lengths"], B=None)
    (batch,) = prefixes.shape
    dimensions: dict[str, dict[str, int | None]] = {
        "prefix_lengths": {"B": batch},
        "accepted_indices": {"B": batch, "L + 1": None},
        "accept_length": {"B": batch},
    }
    path = {name: check_indices(name, views[name], **dims) for name, dims in dimensions.items()}
    paging = check_page_table({name: views[name] for name in PAGING}, batch)
    is_paged = any(view is not None for view in paging.values())
    if not is_paged and caches.num_blocks != batch:
        expected = f"as many as prefix_lengths has, {batch}, or a block_table or kv_indptr of pages"
        raise ArgumentError("caches", f"caches of {caches.num_blocks} requests", expected)
    return path | paging


def _check_path(
    caches: KVCaches,
    path: list[NDArray[np.int32]],
    pages: Any,  # as the reference takes them
    kv_indptr: NDArray[np.int32] | None,
) -> None:
    """Raise for the first value for which a row would be left alone."""
    prefix_lengths, accepted_indices, accept_length = path
    path_slots = accepted_indices.shape[1]
    for index in first_where((accept_length < 0) | (accept_length > path_slots)):
        expected = f"a number from 0 to L + 1 = {path_slots}"
        raise ArgumentError(at("accept_length", index), accept_length[index], expected)
    for index in first_where((accept_length > 0) & (prefix_lengths < 0)):
        raise ArgumentError(at("prefix_lengths", index), prefix_lengths[index], "a length, not negative")
    used = np.arange(path_slots) < accept_length[:, None]
    steps = np.diff(accepted_indices.astype(np.int64), prepend=-1)
    for index in first_where(used & (steps <= 0)):
        expected = "a slot, not negative, after the one before it"
        raise ArgumentError(at("accepted_indices", index), accepted_indices[index], expected)
    used_blocks, written_blocks = {}, {}
    for request in np.flatnonzero(accept_length > 0).tolist():
        accepted = accepted_indices[request, : accept_length[request]].astype(np.int64)
        num_pages = 1 if pages is None else len(pages[request])
        places = np.arange(len(accepted))
        slots = int(prefix_lengths[request]) + np.concatenate([places, accepted])
        blocks = np.unique(slots // caches.block_size)
        if blocks[-1] >= num_pages:
            got = f"{accepted[-1]} after a prefix of {prefix_lengths[request]}"
            expected = f"a slot within the request's {num_pages * caches.block_size} rows"
            raise ArgumentError(at("accepted_indices", (request, len(accepted) - 1)), got, expected)
        if pages is not None:
            check_pages(pages, kv_indptr, request, blocks, caches.num_blocks)
        targets = int(prefix_lengths[request]) + places[accepted > places]
        used_blocks[request], written_blocks[request] = blocks, np.unique(targets // caches.block_size)
    if pages is not None:
        check_unshared(pages, kv_indptr, used_blocks, written_blocks)


def _launch(caches: KVCaches, views: dict[str, Any], stream: StreamLike) -> None:
    (batch,) = views["prefix_lengths"].shape
    block_table = views["block_table"]
    page_ids = views["kv_indices"] if block_table is None else flat(block_table)
    with Transfer(caches.placement, stream) as transfer:
        if (layers := caches.table) is None:
            on_device = [transfer.update(f"caches[{i}]", view) for i, view in enumerate(caches.views)]
            layers = transfer.input(layer_table(on_device))
        if isinstance(layers, DeviceView):  # which alone says where the caches are
            layers = replace(layers, owner=(layers.owner, caches.views))
        transfer.launch(
            COMPACT_KV,
            caches.num_layers * batch,
            layers,
            np.int32(caches.num_blocks),
            np.uint32(caches.block_size),
            transfer.input(page_ids),
            transfer.input(views["kv_indptr"]),
            np.int32(0 if block_table is None else block_table.shape[1]),
            *(transfer.input(views[name]) for name in PATH),
        )
        transfer.results()
