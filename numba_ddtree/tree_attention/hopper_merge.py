"""Merges the partial results of tiles whose splits were several workers of the Hopper kernel's.

A slot has a tile's rows by groups of 8 columns, [64 groups, 64 rows, 8 columns]: what a warp stores at once,
or loads, belongs to neighbouring rows, and lies side by side.

All blocks meet when their items are done, and share the merge among them: to launch another kernel for it
takes longer than to meet.
"""

from __future__ import annotations

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32
from numba_ddtree.tree_attention.hopper_state import CONSUMING_WARPS, REST, word_at
from numba_ddtree.tree_attention.split_merge import fold_row, load_row, load_sums, merge_further
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.grid_meeting import meet_all_blocks
    from numba_ddtree.device.mbarriers import fresh_shared_address_of, make_handover
    from numba_ddtree.device.ptx import fresh_thread

    _, meet_in_block = make_handover(10, 32 * CONSUMING_WARPS)

GROUP_COLUMNS = 8
GROUP_NUMBERS = TILE_ROWS * GROUP_COLUMNS
PIECES = 64  # of a tile: four rows, 128 columns; those of the same rows follow each other


@device_routine
def merge_piece(partials, partial_sums, first_rows, max_splits, tile, piece, out, lse, form):  # type: ignore[no-untyped-def]
    """Merge a piece of a tile, by a warp; `tile` counts those that have slots.

    What two splits have is loaded before it is known whether a row has two.
    """
    lane = uint32(fresh_thread() & uint32(31))
    row = uint32(uint32(4) * uint32(piece >> uint32(2)) + uint32(uint32(lane >> uint32(1)) & uint32(3)))
    group = uint32(uint32(16) * uint32(piece & uint32(3)) + uint32(lane >> uint32(3)))
    half = uint32(uint32(lane & uint32(1)) << uint32(2))
    first = int64(int64(tile) * int64(max_splits) * int64(TILE_ROWS))
    in_slot = uint32(group * uint32(GROUP_NUMBERS) + row * uint32(GROUP_COLUMNS) + half)
    out_row = int64(first_rows[tile] + int64(row))
    column = uint32(group * uint32(GROUP_COLUMNS) + half)
    place, start = int64(first + int64(row)), int64(first * int64(LATENT) + int64(in_slot))
    stride, step = int64(TILE_ROWS), int64(4 * GROUP_NUMBERS)
    sums, second_sums = load_sums(partial_sums, place, int64(0)), load_sums(partial_sums, place, stride)
    a, b, c, d = load_row(partials, start, step)
    second = load_row(partials, int64(start + int64(stride * int64(LATENT))), step)
    splits = int32(sums[3])
    if splits > 1:
        merge_further(
            fold_row((sums[0], sums[1], sums[2], a, b, c, d), second_sums, second),
            partials, partial_sums, place, stride, splits, start, step,
            out, int64(out_row * int64(LATENT) + int64(column)), int64(4 * GROUP_COLUMNS),
            lse, out_row, column == uint32(0), form,
        )  # fmt: skip


@device_routine
def merge_rest(s_words, workers, max_splits, partials, partial_sums, first_rows, out, lse, form):  # type: ignore[no-untyped-def]
    """Merge what all blocks have left unmerged, by the warps that consume, when all have stored it.

    Each warp has as many pieces as any other, or one less, that follow each other: of few rows, whose sums
    are then at hand. Those that have one more are spread over all blocks: a multiprocessor gets little at a
    time of what others have just written, however many of its warps ask.
    """
    rest = word_at(fresh_shared_address_of(s_words), REST)
    if rest == 0:
        return
    meet_in_block()
    if fresh_thread() == uint32(0):
        meet_all_blocks(uint32(workers))
    meet_in_block()
    pieces, warps = uint32(uint32(rest) * uint32(PIECES)), uint32(uint32(workers) * uint32(CONSUMING_WARPS))
    warp = uint32(uint32(fresh_thread() >> uint32(5)) * uint32(workers) + uint32(cuda.blockIdx.x))
    each = uint32(pieces // warps)
    more = uint32(pieces - uint32(each * warps))
    index = uint32(uint32(each * warp) + uint32(min(warp, more)))
    end = uint32(index + each + uint32(uint32(1) if warp < more else uint32(0)))
    while index < end:
        tile, piece = uint32(index // uint32(PIECES)), uint32(index % uint32(PIECES))
        merge_piece(partials, partial_sums, first_rows, max_splits, tile, piece, out, lse, form)
        index = uint32(index + uint32(1))
