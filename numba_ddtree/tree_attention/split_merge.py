"""The splits' partial results of each row become one; rows of no node are filled.

A row of one split has its result already. The results of several are merged by log-sum-exp, in order::

    M = max_s m_s,   out = sum_s 2^(m_s - M) O_s / sum_s 2^(m_s - M) l_s,   lse = (M + log2 sum) ln 2

which for a single split are the same operations as writing it at once: results do not tell.
"""

from __future__ import annotations

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32
from numba_ddtree.device.memory import load_four, store_flat
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.key_rows import KEY_SIGNATURE, Keys, key_arguments, path_length
from numba_ddtree.tree_attention.outputs import output_form
from numba_ddtree.tree_attention.split_items import (
    TREE_SIGNATURE,
    WAVE_SIGNATURE,
    Tree,
    Wave,
    blocks_of,
    is_valid_request,
    most_keys,
    prefix_of,
    split_length,
    splits_of,
    tiles_of_request,
    tree_arguments,
)
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS, SplitPlan, Work

if not SIMULATED:
    from numba_ddtree.device.ptx import exp2, larger_of, multiply_add, product_of
    from numba_ddtree.tree_attention.outputs import natural_log_sum, normaliser, store_pair

THREADS = block_threads(256)
WARPS = THREADS // 32
PARTS = 2  # blocks that share a tile
QUADS = LATENT // 128  # of a row, four numbers each, that a lane has


@device_routine
def fill_row(out, lse, row, value, logarithm, form, lane):  # type: ignore[no-untyped-def]
    """Write one value to all of a row, by a warp."""
    for quad in range(uint32(lane), uint32(LATENT // 2), uint32(32)):
        store_pair(out, row * int64(LATENT) + int64(2 * uint32(quad)), value, value, form)
    if lane == uint32(0):
        store_flat(lse, row, logarithm)


@device_routine
def merge_row(partials, partial_sums, place, splits, out, lse, row, form, lane):  # type: ignore[no-untyped-def]
    """Merge a row's splits, by a warp."""
    maximum = float32(-np.inf)  # a NaN among them is in the sums, too
    for split in range(splits):
        maximum = larger_of(maximum, partial_sums[uint32(split), place, uint32(0)])
    total = float32(0)
    for split in range(splits):
        weight = exp2(float32(partial_sums[uint32(split), place, uint32(0)] - maximum))
        total = multiply_add(weight, partial_sums[uint32(split), place, uint32(1)], total)
    factor = normaliser(total)
    split_stride = int64(partials.shape[1]) * int64(LATENT)
    for part in range(uint32(QUADS)):
        column = int64(uint32(4 * (uint32(part) * uint32(32) + lane)))
        offset = int64(place) * int64(LATENT) + column
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        for split in range(splits):
            weight = exp2(float32(partial_sums[uint32(split), place, uint32(0)] - maximum))
            x, y, z, w = load_four(partials, offset + int64(split) * split_stride)
            a, b = multiply_add(weight, x, a), multiply_add(weight, y, b)
            c, d = multiply_add(weight, z, c), multiply_add(weight, w, d)
        start = row * int64(LATENT) + column
        store_pair(out, start, product_of(a, factor), product_of(b, factor), form)
        store_pair(out, start + int64(2), product_of(c, factor), product_of(d, factor), form)
    if lane == uint32(0):
        store_flat(lse, row, natural_log_sum(maximum, total))


def merge_splits_kernel(  # type: ignore[no-untyped-def]
    ckv,  # to max_keys as `Keys`, `Tree` and `Wave` have them
    ckv_stride,
    ckv_page_stride,
    kpe,
    kpe_stride,
    kpe_page_stride,
    page_size,
    num_pages,
    page_table,
    page_starts,
    table_stride,
    ancestor_bits,
    num_nodes,
    prefix_lengths,
    max_path,
    heads,
    first_tile,
    tiles,
    workers,
    split_blocks,
    max_splits,
    max_keys,  # int32
    partials,  # float32 [splits, rows, LATENT]
    partial_sums,  # float32 [splits, rows, 2]
    out,  # uint64: address of the output, [B, N, H, LATENT]
    lse,  # float32 [B, N, H]
    form,  # int32: of the output
):
    keys = Keys(
        ckv, ckv_stride, ckv_page_stride, kpe, kpe_stride, kpe_page_stride, page_size, num_pages, page_table,
        page_starts, table_stride,
    )  # fmt: skip
    tree = Tree(ancestor_bits, num_nodes, prefix_lengths, max_path, heads)
    wave = Wave(first_tile, tiles, workers, split_blocks, max_splits)
    lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
    warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
    slots = uint32(ancestor_bits.shape[1])
    tile_of_wave = uint32(uint32(cuda.blockIdx.x) // uint32(PARTS))
    flat = uint32(uint32(first_tile) + tile_of_wave)
    per_request = uint32(tiles_of_request(tree))
    request = uint32(flat // per_request)
    first_row = uint32(uint32(flat - uint32(request * per_request)) * uint32(TILE_ROWS))
    rows = uint32(slots * uint32(heads))
    is_valid = is_valid_request(tree, keys, request, max_keys)
    used = uint32(uint32(num_nodes[request]) * uint32(heads)) if is_valid else uint32(0)
    length = int32(1)
    if is_valid:
        length = split_length(tree, keys, wave, max_keys)
        is_whole = first_row + uint32(TILE_ROWS) <= used or used == rows
        if is_whole and blocks_of(tree, request) <= length:
            return
    prefix = prefix_of(tree, request)
    within = uint32(uint32(uint32(cuda.blockIdx.x) % uint32(PARTS)) * uint32(TILE_ROWS // PARTS))
    for step in range(warp, uint32(TILE_ROWS // PARTS), uint32(WARPS)):
        in_tile = uint32(within + uint32(step))
        row = uint32(first_row + in_tile)
        if row < rows:
            place = int64(request) * int64(rows) + int64(row)
            if not is_valid:
                fill_row(out, lse, place, float32(np.nan), float32(np.nan), form, lane)
            elif row >= used:
                fill_row(out, lse, place, float32(0), float32(-np.inf), form, lane)
            else:
                length_of_path = path_length(ancestor_bits, request, uint32(row // uint32(heads)))
                seen = int32(prefix + min(length_of_path, max_path))
                splits = uint32(splits_of(seen, length))
                if splits > uint32(1):
                    partial = uint32(uint32(tile_of_wave * uint32(TILE_ROWS)) + in_tile)
                    merge_row(partials, partial_sums, partial, splits, out, lse, place, form, lane)


MERGE_SPLITS = Kernel(
    merge_splits_kernel,
    (
        f"void({KEY_SIGNATURE}, {TREE_SIGNATURE}, {WAVE_SIGNATURE}, int32, float32[:, :, ::1], "
        "float32[:, :, ::1], uint64, float32[:, :, ::1], int32)",
    ),
    THREADS,
)


def launch_merge(transfer: Transfer, work: Work, splits: SplitPlan, wave: Wave) -> None:
    """Launch the merge of a wave, after its splits."""
    transfer.launch(
        MERGE_SPLITS,
        PARTS * int(wave.tiles),
        *key_arguments(work.keys),
        *tree_arguments(work),
        *wave,
        most_keys(splits),
        splits.partials,
        splits.partial_sums,
        np.uint64(work.out.pointer),
        work.lse,
        output_form(work),
    )
