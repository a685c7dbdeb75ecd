"""Merges the partial results of tiles whose splits were several workers', as `split_fold` says."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.memory import load_flat, load_four_written, store_flat
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention.outputs import BFLOAT16, FLOAT16, FLOAT32, output_form
from numba_ddtree.tree_attention.split_fold import fold_normaliser, fold_weights, folded
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS, SplitPlan, Work

if not SIMULATED:
    from numba_ddtree.device.ptx import product_of
    from numba_ddtree.tree_attention.outputs import natural_log_sum, store_pair

THREADS = block_threads(256)
ROWS = THREADS // 32  # of a block, a warp each


@device_routine
def load_row(partials, start, step):  # type: ignore[no-untyped-def]
    """Load a lane's numbers of a row of partial results, four times four, `step` numbers apart."""
    return (
        load_four_written(partials, start),
        load_four_written(partials, int64(start + step)),
        load_four_written(partials, int64(start + int64(2) * step)),
        load_four_written(partials, int64(start + int64(3) * step)),
    )


@device_routine
def load_sums(partial_sums, place, further):  # type: ignore[no-untyped-def]
    """Load the sums of the row so many rows behind row `place`."""
    return load_four_written(partial_sums, int64(4) * int64(place + further))


@device_routine
def fold_four(weight, values, weight_added, added):  # type: ignore[no-untyped-def]
    return (
        folded(weight, values[0], weight_added, added[0]),
        folded(weight, values[1], weight_added, added[1]),
        folded(weight, values[2], weight_added, added[2]),
        folded(weight, values[3], weight_added, added[3]),
    )


@device_routine
def fold_row(state, sums, added):  # type: ignore[no-untyped-def]
    """Fold a split's sums and numbers into what there is: maximum, two sums and four times four numbers."""
    maximum, total, rounded, a, b, c, d = state
    maximum, weight, weight_added = fold_weights(maximum, sums[0])
    total = folded(weight, total, weight_added, sums[1])
    rounded = folded(weight, rounded, weight_added, sums[2])
    a = fold_four(weight, a, weight_added, added[0])
    b = fold_four(weight, b, weight_added, added[1])
    c = fold_four(weight, c, weight_added, added[2])
    d = fold_four(weight, d, weight_added, added[3])
    return maximum, total, rounded, a, b, c, d


def make_row_store(form: np.int32) -> Any:
    """Make the store of a lane's numbers of a row, as `load_row` has them, in an output's form."""

    @device_routine
    def store_four(out, start, values, factor):  # type: ignore[no-untyped-def]
        store_pair(out, start, product_of(values[0], factor), product_of(values[1], factor), form)
        after = int64(start + int64(2))
        store_pair(out, after, product_of(values[2], factor), product_of(values[3], factor), form)

    @device_routine
    def store_row(out, start, step, a, b, c, d, factor):  # type: ignore[no-untyped-def]
        store_four(out, start, a, factor)
        store_four(out, int64(start + step), b, factor)
        store_four(out, int64(start + int64(2) * step), c, factor)
        store_four(out, int64(start + int64(3) * step), d, factor)

    return store_row


store_floats, store_bfloat16, store_float16 = map(make_row_store, (FLOAT32, BFLOAT16, FLOAT16))


@device_routine
def merge_row(  # type: ignore[no-untyped-def]
    partials, partial_sums, place, stride, splits, start, step, out, out_start, out_step, lse, row,
    writes_lse, form,
):  # fmt: skip
    """Merge a lane's numbers of a row's splits, of which there are at least two, `stride` rows apart.

    The row's sums are in row `place`. The lane has four times four numbers, `step` apart from number `start`
    of the first split on, and `out_step` apart from number `out_start` of the output on.
    """
    further = int64(stride * int64(LATENT))
    sums, second_sums = load_sums(partial_sums, place, int64(0)), load_sums(partial_sums, place, stride)
    a, b, c, d = load_row(partials, start, step)
    second = load_row(partials, int64(start + further), step)
    state = fold_row((sums[0], sums[1], sums[2], a, b, c, d), second_sums, second)
    merge_further(
        state, partials, partial_sums, place, stride, splits, start, step, out, out_start, out_step, lse, row,
        writes_lse, form,
    )  # fmt: skip


@device_routine
def merge_further(  # type: ignore[no-untyped-def]
    state, partials, partial_sums, place, stride, splits, start, step, out, out_start, out_step, lse, row,
    writes_lse, form,
):  # fmt: skip
    """Fold the splits from the third on into what the first two have come to, and write it."""
    further = int64(stride * int64(LATENT))
    last = int32(splits - int32(1))
    for split in range(2, splits, 2):  # two at once, for the loads of both to be under way together
        near, far = int64(split), int64(min(int32(int32(split) + int32(1)), last))
        sums = load_sums(partial_sums, place, int64(near * stride))
        sums_far = load_sums(partial_sums, place, int64(far * stride))
        added = load_row(partials, int64(start + near * further), step)
        added_far = load_row(partials, int64(start + far * further), step)
        state = fold_row(state, sums, added)
        if far != near:
            state = fold_row(state, sums_far, added_far)
    maximum, total, rounded, a, b, c, d = state
    factor = fold_normaliser(rounded)
    # One branch a row: most of a merge's time is that of code that runs for the first time.
    if form == FLOAT32:
        store_floats(out, out_start, out_step, a, b, c, d, factor)
    elif form == BFLOAT16:
        store_bfloat16(out, out_start, out_step, a, b, c, d, factor)
    else:
        store_float16(out, out_start, out_step, a, b, c, d, factor)
    if writes_lse:
        store_flat(lse, row, natural_log_sum(maximum, total))


def merge_splits_kernel(  # type: ignore[no-untyped-def]
    max_splits,  # int32
    height,  # int32: rows of a part
    partials,  # float32 [rows, LATENT]
    partial_sums,  # float32 [rows, 4]
    first_rows,  # int64 [parts]
    num_rest,  # int32 [1]
    out,  # uint64: address of the output, [B, N, H, LATENT]
    lse,  # float32 [B, N, H]
    form,  # int32: of the output
):
    lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
    warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
    index = uint32(uint32(cuda.blockIdx.x) * uint32(ROWS) + warp)
    part = uint32(index // uint32(height))
    in_part = int64(uint32(index - part * uint32(height)))
    place = int64(int64(part) * int64(max_splits) * int64(height) + in_part)
    # Of a part that nothing was left of, this is any number. Both loads are under way together.
    splits = int32(load_flat(partial_sums, int64(4) * place + int64(3)))
    if (int32(part) < num_rest[0]) & (splits > 1):
        row = int64(first_rows[part] + in_part)
        column = int64(uint32(lane << uint32(2)))
        merge_row(
            partials, partial_sums, place, int64(height), splits,
            int64(place * int64(LATENT) + column), int64(128),
            out, int64(row * int64(LATENT) + column), int64(128),
            lse, row, lane == uint32(0), form,
        )  # fmt: skip


SIGNATURE = (
    "void(int32, int32, float32[:, ::1], float32[:, ::1], int64[::1], int32[::1], uint64, "
    "float32[:, :, ::1], int32)"
)
MERGE_SPLITS = Kernel(merge_splits_kernel, (SIGNATURE,), THREADS)


def launch_merge(transfer: Transfer, work: Work, splits: SplitPlan, workers: int, parts: int) -> None:
    """Launch the merge of what so many workers of a kernel, with so many parts a tile, left unmerged."""
    most_tiles = min(splits.rest_tiles, work.tiles, workers)
    if splits.max_splits == 1 or most_tiles == 0:
        return
    transfer.launch(
        MERGE_SPLITS,
        most_tiles * TILE_ROWS // ROWS,
        np.int32(splits.max_splits),
        np.int32(TILE_ROWS // parts),
        splits.partials,
        splits.partial_sums,
        splits.first_rows,
        splits.num_rest,
        work.out.address,
        work.lse,
        output_form(work),
    )
