"""How the two blocks of a cluster merge the two splits of a tile, in each other's shared memory.

Each sends half of what it has come to, and its rows' sums, to the other, in the place of queries that have
been multiplied with. Of each warpgroup's 256 columns the block with the first split finishes the first 128,
and the other one the rest. What is added, and in what order, is as `split_fold` has it, and as `hopper_merge`
does it where a tile has more splits.
"""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED, cuda, device_routine, float32, int32, int64, uint32, uint64
from numba_ddtree.device.clusters import FOURS_ROW_BYTES
from numba_ddtree.device.memory import store_flat
from numba_ddtree.tree_attention.hopper_outputs import WARP_ROWS, row_of_lane
from numba_ddtree.tree_attention.hopper_state import (
    BLOCK_BYTES,
    KEYS_AT,
    ORIGINS,
    OUTCOME_WORDS,
    OUTCOMES,
    OUTPUT_KIND,
    PAIRED,
    PEER_DATA,
    PEER_READY,
    QUERIES_AT,
    ROUNDED,
    ROWS,
    SPLIT,
    STATE_AT,
    TOTALS,
    first_query,
    float_at,
    set_float,
    set_pair,
    word_at,
)
from numba_ddtree.tree_attention.outputs import FLOAT32
from numba_ddtree.tree_attention.split_fold import fold_normaliser, fold_weights, folded
from numba_ddtree.tree_attention.split_merge import fold_four
from numba_ddtree.tree_attention.work import LATENT, TILE_ROWS

if not SIMULATED:
    from numba_ddtree.device.clusters import (
        arrive_at_peer,
        load_four_floats,
        make_rows_keep,
        make_rows_send,
        peer_address,
        send_four,
        wait_for_cluster,
        wait_for_peer,
    )
    from numba_ddtree.device.mbarriers import fresh_lane
    from numba_ddtree.device.ptx import product_of, store_float_pair, store_four_words, sum_of
    from numba_ddtree.device.tile import make_pack
    from numba_ddtree.tree_attention.outputs import natural_log_sum

LEFT, RIGHT = 0, 1  # warpgroups
COLUMNS = LATENT // 4  # of a warpgroup's that a block finishes
HALF_BYTES = TILE_ROWS * COLUMNS * 4
PEER_BYTES = 2 * HALF_BYTES + TILE_ROWS * OUTCOME_WORDS * 4


@device_routine
def peer_place(address):  # type: ignore[no-untyped-def]
    """Address of the same place in the shared memory of the cluster's other block."""
    return peer_address(uint32(address), uint32(uint32(uint32(cuda.blockIdx.x) & uint32(1)) ^ uint32(1)))


@device_routine
def barrier_at(base, barrier):  # type: ignore[no-untyped-def]
    """Address of one of the barriers."""
    return uint32(base + uint32(STATE_AT) + uint32(8) * uint32(barrier))


@device_routine
def is_paired(item):  # type: ignore[no-untyped-def]
    """Whether an item is one of two splits that the blocks of the cluster have."""
    return word_at(item, OUTPUT_KIND) == PAIRED


@device_routine
def tell_peer_that_queries_are_done(base):  # type: ignore[no-untyped-def]
    """Let the other block send to where a paired item's queries are, by each warp that consumes, once."""
    wait_for_cluster()  # until the other block has made its barriers, as it long has
    if fresh_lane() == uint32(0):
        arrive_at_peer(peer_place(barrier_at(base, PEER_READY)))


@device_routine
def sums_of_row(base, row):  # type: ignore[no-untyped-def]
    """Maximum, sum and rounded sum of a row of the block's own split."""
    return (
        float_at(base, uint32(uint32(ORIGINS + TILE_ROWS) + row)),
        float_at(base, uint32(uint32(TOTALS) + row)),
        float_at(base, uint32(uint32(ROUNDED) + row)),
    )


@device_routine
def keep_sums(base, row, quad, totals, rounded):  # type: ignore[no-untyped-def]
    """Leave a lane's two rows' sums where `sums_of_row` finds them, by the right warpgroup."""
    set_pair(base, TOTALS, row, quad, totals)
    set_pair(base, ROUNDED, row, quad, rounded)


@device_routine
def send_sums(base):  # type: ignore[no-untyped-def]
    """Send a lane's two rows' sums to the other block, when that is ready; by the right warpgroup."""
    row, quad = row_of_lane()
    wait_for_peer(barrier_at(base, PEER_READY), uint32(0))
    if quad < uint32(2):
        row = uint32(row + uint32(quad << uint32(3)))
        maximum, total, rounded = sums_of_row(base, row)
        place = uint32(base + uint32(4 * OUTCOMES) + row * uint32(4 * OUTCOME_WORDS))
        barrier = peer_place(barrier_at(base, PEER_DATA))
        send_four(peer_place(place), barrier, (maximum, total, rounded, float32(0)))


@device_routine
def sent_sums_of_row(base, row):  # type: ignore[no-untyped-def]
    """Maximum, sum and rounded sum of a row of the other block's split."""
    place = uint32(uint32(OUTCOMES) + row * uint32(OUTCOME_WORDS))
    return (
        float_at(base, place),
        float_at(base, uint32(place + uint32(1))),
        float_at(base, uint32(place + uint32(2))),
    )


@device_routine
def fold_sums(first, second):  # type: ignore[no-untyped-def]
    """Weights of both splits of a row, and maximum, sum and rounded sum of both together."""
    maximum, weight, weight_added = fold_weights(first[0], second[0])
    total = folded(weight, first[1], weight_added, second[1])
    return weight, weight_added, maximum, total, folded(weight, first[2], weight_added, second[2])


@device_routine
def fold_with_sent(base, item, row):  # type: ignore[no-untyped-def]
    """`fold_sums` of a row of both blocks' splits."""
    own, sent = sums_of_row(base, row), sent_sums_of_row(base, row)
    return fold_sums(own, sent) if word_at(item, SPLIT) == 0 else fold_sums(sent, own)


@device_routine
def settle_folded_row(base, item, weights_at, row, lse, writes_lse):  # type: ignore[no-untyped-def]
    """Leave a row's two weights, and what their sum is multiplied by, in shared memory; by a thread."""
    weight, weight_added, maximum, total, rounded = fold_with_sent(base, item, row)
    at = uint32(base + uint32(weights_at) + uint32(row << uint32(4)))
    set_float(at, 0, weight)
    set_float(at, 1, weight_added)
    set_float(at, 2, fold_normaliser(rounded))
    if writes_lse and word_at(item, SPLIT) == 0 and int32(row) < word_at(item, ROWS):
        store_flat(lse, int64(first_query(item) + int64(row)), natural_log_sum(maximum, total))


def make_piece_store(number: str) -> Any:
    """Make the store of a piece of a row, 16 columns, in fours as `clusters.unit_of_four` has them."""
    pack = make_pack(f"{number}x2")

    @device_routine
    def store_floats(out, place, low, high):  # type: ignore[no-untyped-def]
        """Write a pair of columns in float32, -0 as 0."""
        address = uint64(out + uint64(place) * uint64(4))
        store_float_pair(address, sum_of(low, float32(0)), sum_of(high, float32(0)))

    @device_routine
    def store_four_of_floats(out, place, four):  # type: ignore[no-untyped-def]
        store_floats(out, place, four[0], four[1])
        store_floats(out, int64(place + int64(8)), four[2], four[3])

    @device_routine
    def store_piece(out, place, a, b, c, d, form):  # type: ignore[no-untyped-def]
        if form == FLOAT32:
            store_four_of_floats(out, place, a)
            store_four_of_floats(out, int64(place + int64(2)), b)
            store_four_of_floats(out, int64(place + int64(4)), c)
            store_four_of_floats(out, int64(place + int64(6)), d)
        else:
            at = uint64(out + uint64(place) * uint64(2))
            store_four_words(at, pack(a[0], a[1]), pack(b[0], b[1]), pack(c[0], c[1]), pack(d[0], d[1]))
            at = uint64(at + uint64(16))
            store_four_words(at, pack(a[2], a[3]), pack(b[2], b[3]), pack(c[2], c[3]), pack(d[2], d[3]))

    return store_piece


def make_pair_routines(number: str, side: int) -> tuple[Any, Any]:
    """Make what the left or the right warpgroup does with its outputs of a paired item.

    Returns
    -------
    part
        Sends the columns that the other block finishes, and leaves the rest in shared memory: there a short
        loop finishes it, whose instructions are soon at hand, as those of an accumulator would not be.
    finish
        Does so, when the other block has sent as much.
    """
    count = COLUMNS // 2  # of a thread's numbers
    send_first, send_second = make_rows_send(0, count), make_rows_send(count, count)
    keep_first, keep_second = make_rows_keep(0, count), make_rows_keep(count, count)
    store_piece = make_piece_store(number)
    sent_at = QUERIES_AT + side * HALF_BYTES
    # In buffers of keys, where the other warpgroup has read no values.
    kept_at = KEYS_AT + side * HALF_BYTES
    weights_at = kept_at + BLOCK_BYTES

    @device_routine
    def part(base, item, output):  # type: ignore[no-untyped-def]
        row, quad = row_of_lane()
        # Pieces are exchanged by `unit_of_four`, of which this is the lane's share.
        unit = uint32(quad ^ uint32(uint32(row & uint32(1)) << uint32(2)))
        place = uint32(row * uint32(FOURS_ROW_BYTES) + uint32(unit << uint32(4)))
        kept, sent = uint32(base + uint32(kept_at) + place), uint32(base + uint32(sent_at) + place)
        wait_for_peer(barrier_at(base, PEER_READY), uint32(0))
        if word_at(item, SPLIT) == 0:
            send_second(peer_place(sent), peer_place(barrier_at(base, PEER_DATA)), output)
            keep_first(kept, output)
        else:
            send_first(peer_place(sent), peer_place(barrier_at(base, PEER_DATA)), output)
            keep_second(kept, output)

    @device_routine
    def fold_piece(first, second, weights):  # type: ignore[no-untyped-def]
        """Return a four of both splits, folded and divided by the row's sum."""
        values, added = load_four_floats(first), load_four_floats(second)
        values = fold_four(weights[0], values, weights[1], added)
        return (
            product_of(values[0], weights[2]),
            product_of(values[1], weights[2]),
            product_of(values[2], weights[2]),
            product_of(values[3], weights[2]),
        )

    @device_routine
    def finish(base, item, out, lse, form):  # type: ignore[no-untyped-def]
        wait_for_peer(barrier_at(base, PEER_DATA), uint32(0))
        row, quad = row_of_lane()
        if quad < uint32(2):
            own = uint32(row + uint32(quad << uint32(3)))
            settle_folded_row(base, item, weights_at, own, lse, side == RIGHT)
        cuda.syncwarp()
        split = word_at(item, SPLIT)
        first, second = uint32(base + uint32(kept_at)), uint32(base + uint32(sent_at))
        if split != 0:
            first, second = second, first
        lane = fresh_lane()
        piece = uint32(lane & uint32(7))
        column = int32(int32(2 * side + split) * int32(COLUMNS) + int32(piece << uint32(4)))
        row = uint32(uint32(row & uint32(TILE_ROWS - WARP_ROWS)) + uint32(lane >> uint32(3)))
        # Of a row and a piece, the first four's unit; the others' are exchanged with it.
        unit = uint32(uint32(piece << uint32(2)) ^ uint32(piece >> uint32(1)))
        unit = uint32(unit ^ uint32(uint32(row & uint32(1)) << uint32(2)))
        place = uint32(row * uint32(FOURS_ROW_BYTES) + uint32(unit << uint32(4)))
        end = int32(min(word_at(item, ROWS), int32(row | uint32(WARP_ROWS - 1)) + int32(1)))
        while int32(row) < end:
            weights = load_four_floats(uint32(base + uint32(weights_at) + uint32(row << uint32(4))))
            a = fold_piece(uint32(first + place), uint32(second + place), weights)
            near, far = uint32(place ^ uint32(16)), uint32(place ^ uint32(32))
            b = fold_piece(uint32(first + near), uint32(second + near), weights)
            c = fold_piece(uint32(first + far), uint32(second + far), weights)
            last = uint32(place ^ uint32(48))
            d = fold_piece(uint32(first + last), uint32(second + last), weights)
            in_out = int64(int64(first_query(item) + int64(row)) * int64(LATENT) + int64(column))
            store_piece(out, in_out, a, b, c, d, form)
            row, place = uint32(row + uint32(4)), uint32(place + uint32(4 * FOURS_ROW_BYTES))

    return part, finish
