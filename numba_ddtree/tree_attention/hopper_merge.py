"""Merges the partial results of tiles whose splits were several workers of the Hopper kernel's.

A slot has a tile's rows by groups of 8 columns, [64 groups, 64 rows, 8 columns]: what a warp stores at once,
or loads, belongs to neighbouring rows, and lies side by side.

The merge may start early: its blocks come while the last items are at work, and wait for the Hopper kernel's
end before they touch memory.
"""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.memory import load_flat
from numba_ddtree.launch import Kernel
from numba_ddtree.tree_attention.split_merge import SIGNATURE, THREADS, merge_row
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.ptx import await_kernel_before

GROUP_COLUMNS = 8
GROUP_NUMBERS = TILE_ROWS * GROUP_COLUMNS
PIECES = TILE_ROWS  # of a tile, a warp each: four rows, 128 columns; as many as rows, for `launch_merge`


@device_routine
def merge_piece(partials, partial_sums, first_rows, max_splits, tile, piece, out, lse, form):  # type: ignore[no-untyped-def]
    """Merge a piece of a tile, by a warp; `tile` counts those that have slots."""
    lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
    row = uint32(uint32(4) * uint32(piece & uint32(15)) + uint32(uint32(lane >> uint32(1)) & uint32(3)))
    group = uint32(uint32(16) * uint32(piece >> uint32(4)) + uint32(lane >> uint32(3)))
    half = uint32(uint32(lane & uint32(1)) << uint32(2))
    first = int64(int64(tile) * int64(max_splits) * int64(TILE_ROWS))
    place = int64(first + int64(row))
    splits = int32(load_flat(partial_sums, int64(4) * place + int64(3)))
    if splits > 1:
        in_slot = uint32(group * uint32(GROUP_NUMBERS) + row * uint32(GROUP_COLUMNS) + half)
        out_row = int64(first_rows[tile] + int64(row))
        column = uint32(group * uint32(GROUP_COLUMNS) + half)
        merge_row(
            partials, partial_sums, place, int64(TILE_ROWS), splits,
            int64(first * int64(LATENT) + int64(in_slot)), int64(4 * GROUP_NUMBERS),
            out, int64(out_row * int64(LATENT) + int64(column)), int64(4 * GROUP_COLUMNS),
            lse, out_row, uint32(column & uint32(LATENT - 1)) == uint32(0), form,
        )  # fmt: skip


def merge_early_kernel(  # type: ignore[no-untyped-def]
    max_splits,  # as in `split_merge`
    height,
    partials,
    partial_sums,
    first_rows,
    num_rest,
    out,
    lse,
    form,
):
    await_kernel_before()
    warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
    index = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS // 32) + warp)
    tile, piece = uint32(index // uint32(PIECES)), uint32(index % uint32(PIECES))
    if int32(tile) < num_rest[0]:
        merge_piece(partials, partial_sums, first_rows, max_splits, tile, piece, out, lse, form)


MERGE_EARLY = Kernel(merge_early_kernel, (SIGNATURE,), THREADS, architecture="sm_90a", starts_early=True)
