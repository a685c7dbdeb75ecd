"""How the Hopper kernel writes what an item has come to.

The right warpgroup, which has the rows' sums, finds out what is to be done with each row, its outcome: folded
into what the splits before came to, and written as it is to be, or to a slot of partial results. Then each
warpgroup writes its half of the columns. They pass through shared memory, in the place of the warpgroup's
own probabilities, which nobody reads any more, so that lanes write 16 bytes side by side. Only where all rows
are partial results, and none is folded, does nothing depend on outcomes: those are written before, from
registers, to where `hopper_merge` finds them.
"""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, int32, int64, uint32, uint64
from numba_ddtree.tree_attention.hopper_merge import GROUP_COLUMNS, GROUP_NUMBERS
from numba_ddtree.tree_attention.hopper_state import (
    ADDED,
    FACTOR,
    IN_SLOT,
    IS_FOLDED,
    KEPT,
    LENGTH,
    OFFSET,
    OUTCOME_WORDS,
    OUTCOMES,
    OUTPUT_KIND,
    PLAIN,
    ROWS,
    SLOT_ROW,
    SPLIT,
    TO_DO,
    first_query,
    float_at,
    set_float,
    set_word,
    word_at,
)
from numba_ddtree.tree_attention.outputs import FLOAT32
from numba_ddtree.tree_attention.row_outcomes import READ_SLOT, WRITE_OUT, WRITE_SLOT, settle_row
from numba_ddtree.tree_attention.split_items import splits_of
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.mbarriers import fresh_lane
    from numba_ddtree.device.ptx import address_of, fresh_thread
    from numba_ddtree.device.tile import unit_address
    from numba_ddtree.device.wgmma import (
        make_group_rows_store,
        make_output_words,
        make_rows_store,
        store_chunk_rows,
        store_words_in_chunk,
    )

WARP_ROWS = 16
GROUP_BYTES = 4 * GROUP_NUMBERS


@device_routine
def row_of_lane():  # type: ignore[no-untyped-def]
    """Row of a tile that a warpgroup's lane has, with the one 8 further, and its place of four in it."""
    thread = fresh_thread()
    row = uint32(uint32(uint32(thread >> uint32(5)) & uint32(3)) * uint32(WARP_ROWS))
    return uint32(row + uint32(uint32(thread & uint32(31)) >> uint32(2))), uint32(thread & uint32(3))


@device_routine
def outcome_at(base, row, word):  # type: ignore[no-untyped-def]
    """Word (float32) of a row's outcome."""
    return float_at(base, uint32(uint32(OUTCOMES) + row * uint32(OUTCOME_WORDS) + uint32(word)))


@device_routine
def share_outcome(base, item, seen, row, maximum, total, rounded, partial_sums, lse):  # type: ignore[no-untyped-def]
    """Settle a row, and write its outcome to shared memory; by a thread."""
    splits = int32(0)
    if int32(row) < word_at(item, ROWS):
        splits = splits_of(word_at(seen, row), word_at(item, LENGTH), word_at(item, OFFSET))
    kept, added, factor, to_do = settle_row(
        int64(first_query(item) + int64(row)),
        int64(word_at(item, SLOT_ROW) + int32(row)),
        word_at(item, SPLIT),
        splits,
        word_at(item, IS_FOLDED),
        maximum,
        total,
        rounded,
        partial_sums,
        lse,
    )
    outcome = uint32(base + uint32(4 * OUTCOMES) + row * uint32(4 * OUTCOME_WORDS))
    set_float(outcome, KEPT, kept)
    set_float(outcome, ADDED, added)
    set_float(outcome, FACTOR, factor)
    set_word(outcome, TO_DO, to_do)


def make_output_stores(number: str) -> tuple[Any, Any]:
    """Make the stores of a warpgroup's outputs, which are of ``"bf16"`` or ``"f16"`` or float32.

    Returns
    -------
    store_partial
        Writes an item all of whose rows are partial results, which needs none of their outcomes. Returns
        whether this is one.
    store_outputs
        Writes any other.
    """
    store_rows = make_rows_store(f"{number}x2", READ_SLOT, WRITE_SLOT, WRITE_OUT, GROUP_BYTES)
    store_slot_rows = make_group_rows_store(GROUP_BYTES)
    words_0, words_1, words_2, words_3 = (
        make_output_words(f"{number}x2", 64 * quarter, 64) for quarter in range(4)
    )

    @device_routine
    def store_quarter(words, places, address, wanted):  # type: ignore[no-untyped-def]
        """Write a warp's 16 rows of 64 columns through its part of a chunk."""
        cuda.syncwarp()
        store_words_in_chunk(places[0], words)
        cuda.syncwarp()
        store_chunk_rows(places[1], address, wanted)

    @device_routine
    def store_plain(output, base, chunk, item, first_column, out, rehearses):  # type: ignore[no-untyped-def]
        """Write outputs in 16 bits, of an item whose rows all have one split; none if it `rehearses`."""
        row, quad = row_of_lane()
        factors = (
            outcome_at(base, row, FACTOR),
            outcome_at(base, uint32(row + uint32(8)), FACTOR),
        )
        lane = fresh_lane()
        start = uint32(uint32(row & uint32(TILE_ROWS - WARP_ROWS)) + uint32(lane >> uint32(3)))
        unit = uint32(lane & uint32(7))
        places = (
            uint32(unit_address(chunk, row, uint32(0)) + uint32(quad << uint32(2))),
            unit_address(chunk, start, unit),
        )
        wanted = int32(0) if rehearses else int32(word_at(item, ROWS) - int32(start))
        place = int64(int64(first_query(item) + int64(start)) * int64(LATENT) + int64(first_column))
        address = uint64(out + uint64(place) * uint64(2) + uint64(unit << uint32(4)))
        store_quarter(words_0(output, factors), places, address, wanted)
        store_quarter(words_1(output, factors), places, uint64(address + uint64(128)), wanted)
        store_quarter(words_2(output, factors), places, uint64(address + uint64(256)), wanted)
        store_quarter(words_3(output, factors), places, uint64(address + uint64(384)), wanted)

    @device_routine
    def store_partial(output, item, first_column, partials):  # type: ignore[no-untyped-def]
        """Write outputs of an item all of which are partial results, none of them folded yet."""
        if word_at(item, OUTPUT_KIND) != IN_SLOT:
            return False
        row, quad = row_of_lane()
        in_slot = uint32(first_column * TILE_ROWS) + row * uint32(GROUP_COLUMNS) + uint32(quad << uint32(1))
        place = int64(int64(word_at(item, SLOT_ROW)) * int64(LATENT) + int64(in_slot))
        store_slot_rows(uint64(address_of(partials) + uint64(place) * uint64(4)), output)
        return True

    @device_routine
    def store_mixed(output, base, chunk, item, first_column, out, form, partials):  # type: ignore[no-untyped-def]
        """Write outputs as each row's outcome says."""
        lane = fresh_lane()
        first_row = uint32(row_of_lane()[0] & uint32(TILE_ROWS - WARP_ROWS))
        row = uint32(first_row + uint32(lane >> uint32(3)))
        column = uint32(uint32(first_column) + uint32(uint32(lane & uint32(7)) << uint32(2)))
        in_slot = uint32(
            uint32(column & uint32(~(GROUP_COLUMNS - 1))) * uint32(TILE_ROWS)
            + row * uint32(GROUP_COLUMNS)
            + uint32(column & uint32(GROUP_COLUMNS - 1))
        )
        width = uint64(4) if form == FLOAT32 else uint64(2)
        place = int64(int64(first_query(item) + int64(row)) * int64(LATENT) + int64(column))
        slot = int64(int64(word_at(item, SLOT_ROW)) * int64(LATENT) + int64(in_slot))
        store_rows(
            uint32(chunk + first_row * uint32(128)),
            output,
            uint32(base + uint32(4 * OUTCOMES) + row * uint32(4 * OUTCOME_WORDS)),
            uint64(address_of(partials) + uint64(slot) * uint64(4)),
            uint64(out + uint64(place) * width),
            uint32(1) if form == FLOAT32 else uint32(0),
        )

    @device_routine
    def store_outputs(output, base, chunk, item, first_column, out, form, partials, rehearses):  # type: ignore[no-untyped-def]
        """Write a warpgroup's outputs, 256 columns from `first_column` on, through its own chunk.

        If it `rehearses`, nothing is written, but most of the code has been there once.
        """
        if form != FLOAT32 and (rehearses or word_at(item, OUTPUT_KIND) == PLAIN):
            store_plain(output, base, chunk, item, first_column, out, rehearses)
        elif not rehearses:
            cuda.syncwarp()
            store_mixed(output, base, chunk, item, first_column, out, form, partials)

    return store_partial, store_outputs
