"""Runs both kernels of `mma.sync` on the host: ``python tests/emulated_tensor_cores.py CASE...``.

Their results have to be the reference's, and each other's to the bit. Copies are made as late as they may be,
when they are waited for, and, in a second run of `block_pieces`, at once: places that are filled before they
are free then show.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from emulated_warpgroups import (
    EMULATIONS,
    SHARED_BASE,
    Target,
    block,
    by_rows,
    copy_async,
    emulated,
    global_bytes,
    local,
    make_handover,
    options,
    replace_outputs,
    row_maxima,
    row_sums,
    run_block,
    spread,
    types,
    unit_address,
    write_global,
)
from ml_dtypes import bfloat16
from numpy.typing import NDArray

Tile = NDArray[np.float32]
FLOAT = np.float32
CHUNK_BYTES, PIECE_BYTES, UNIT_BYTES = 64 * 128, 16 * 128, 16
LANES = np.arange(32)
KINDS: dict[Any, Any] = {}
"""By the function that kernels know as a type of Numba's: numpy's."""


class SharedWords:
    """Shared memory as an array of some type, of which kernels take slices."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return block().memory.view(self.kind)[int(part.start) :]


# Copies.


def groups_of_copies() -> Any:
    if not hasattr(local, "groups"):
        local.groups, local.begun = [], []
    return local


def begin_copy(shared: Any, source: Any, size: Any) -> None:
    if options.is_late:
        groups_of_copies().begun.append((shared, source, size))
    else:
        copy_async(shared, source, size)


def close_copies() -> None:
    own = groups_of_copies()
    own.groups.append(own.begun)
    own.begun = []


def make_wait(under_way: int) -> Callable[[], None]:
    def wait() -> None:
        own = groups_of_copies()
        while len(own.groups) > under_way:
            for copy in own.groups.pop(0):
                copy_async(*copy)

    return wait


# Products.


def by_warp(value: Any, combine: Callable[[list[Any]], Any]) -> Any:
    """Give every lane its part of what the warp makes of all lanes' values."""
    return block().warps[local.thread // 32].exchange(local.thread % 32, value, combine)[local.thread % 32]


def matrices(addresses: NDArray[np.int64]) -> list[Tile]:
    """Read four 8 x 8 matrices, a row at each lane's address, as ``ldmatrix`` does."""
    places = addresses.reshape(4, 8, 1) - SHARED_BASE + np.arange(UNIT_BYTES)
    return list(block().memory[places].view(bfloat16).astype(np.float32))


def left_matrix(addresses: NDArray[np.int64]) -> Tile:
    upper_left, lower_left, upper_right, lower_right = matrices(addresses)
    return np.block([[upper_left, upper_right], [lower_left, lower_right]])


def fragment_places(columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    index = np.arange(columns // 2)
    row = (LANES // 4)[:, None] + 8 * (index % 4 // 2)
    column = 2 * (LANES % 4)[:, None] + 8 * (index // 4) + index % 2
    return row, column


def matrix_of(parts: Tile) -> Tile:
    """Put the lanes' parts of a 16 rows tall tile together."""
    matrix = np.zeros((16, 2 * parts.shape[1]), np.float32)
    matrix[fragment_places(matrix.shape[1])] = parts
    return matrix


def parts_of(matrix: Tile) -> Tile:
    return matrix[fragment_places(matrix.shape[1])]


def addresses_of(given: Sequence[tuple[Any, ...]], place: int) -> NDArray[np.int64]:
    return np.array([int(each[place]) for each in given])


def add_product(total: Tile, column: int, left: Tile, right: Tile) -> None:
    total[:, column : column + 8] += left @ right


def make_row_product(number: str, chunks: int, columns: int, left_bytes: int = CHUNK_BYTES) -> Any:
    def combine(given: list[Any]) -> Any:
        parts = np.stack([totals for totals, *_ in given])
        left, right = addresses_of(given, 1), addresses_of(given, 2)
        totals = [matrix_of(half) for half in np.split(parts, 2, axis=1)]
        for chunk in range(chunks):
            for part in range(4):
                own = left_matrix((left ^ 32 * part) + chunk * left_bytes)
                for start in range(0, columns, 16):
                    place = chunk * CHUNK_BYTES + start // 16 * 2 * PIECE_BYTES
                    found = matrices((right ^ 32 * part) + place)
                    for side in range(2):
                        other = np.concatenate(found[2 * side : 2 * side + 2], axis=1).T
                        add_product(totals[part % 2], start + 8 * side, own, other)
        return list(np.concatenate([parts_of(total) for total in totals], axis=1))

    return lambda *given: by_warp(given, combine)


def make_column_product(number: str, pieces: int, chunks: int, *, pairs: int = 4, first: int = 0) -> Any:
    def combine(given: list[Any]) -> Any:
        parts = np.stack([total for total, *_ in given])
        left, right = addresses_of(given, 1), addresses_of(given, 2)
        totals = [matrix_of(piece) for piece in np.split(parts, pieces, axis=1)]
        owns = [left_matrix(left + piece * PIECE_BYTES) for piece in range(pieces)]
        for chunk in range(chunks):
            for pair in range(pairs):
                found = matrices((right ^ 32 * pair) + chunk * CHUNK_BYTES)
                for side in range(2):
                    other = np.concatenate(found[2 * side : 2 * side + 2])
                    column = 8 * (first + 2 * (chunk * pairs + pair) + side)
                    for total, own in zip(totals, owns, strict=True):
                        add_product(total, column, own, other)
        return list(np.concatenate([parts_of(total) for total in totals], axis=1))

    return lambda *given: by_warp(given, combine)


# Tiles.


def scale_rows(tile: Tile, factors: Any) -> Tile:
    pieces = np.split(tile, len(factors) // 2)
    own = [spread(factors[2 * index : 2 * index + 2], len(piece)) for index, piece in enumerate(pieces)]
    return tile * np.concatenate(own)


def keep_columns(tile: Tile, upper: Any, lower: Any) -> Tile:
    bits = int(upper), int(lower)
    kept = [bits[index % 4 // 2] >> (index // 4 * 16 + index % 2) & 1 for index in range(len(tile))]
    return np.where(kept, tile, FLOAT(-np.inf))


def exp2_below(tile: Tile, maxima: Any) -> Tile:
    return np.exp2((tile - spread(maxima, len(tile))).astype(np.float32))


def make_row_store(number: str) -> Any:
    def store(address: Any, tile: Tile) -> None:
        words = tile.astype(bfloat16).view(np.uint32)
        for index, word in enumerate(words):
            place = (int(address) ^ index // 2 * 2 * UNIT_BYTES) + index % 2 * 8 * 128 - SHARED_BASE
            block().memory[place : place + 4].view(np.uint32)[0] = word

    return store


def make_row_part(row: int, columns: int) -> Any:
    def part(tile: Tile) -> Tile:
        return by_rows(np.split(tile, 2)[row // 2])[row % 2]

    return part


def make_store(dtype: Any, distance: int) -> Any:
    def store(address: Any, row: Tile) -> None:
        rounded = row.astype(dtype)
        if dtype is bfloat16:
            rounded[rounded == 0] = 0  # without the sign
        for index, pair in enumerate(rounded.reshape(-1, 2)):
            write_global(int(address) + index * distance * pair.itemsize, pair.tobytes())

    return store


def make_fold(distance: int) -> Any:
    def fold(address: Any, row: Tile, kept: Any, added: Any) -> Tile:
        pairs = [global_bytes(int(address) + index * distance * 4, 8) for index in range(len(row) // 2)]
        return FLOAT(kept) * np.concatenate(pairs).view(np.float32) + FLOAT(added) * row

    return fold


def right_address(chunk: Any, lane: Any) -> Any:
    return unit_address(chunk, int(lane) % 8 + 16 * (int(lane) // 16), int(lane) // 8 % 2)


PTX = {
    "close_copies": close_copies,
    "copy_async": begin_copy,
    "log2": lambda value: FLOAT(np.log2(FLOAT(value))),
    "named_arrival": lambda name, threads: make_handover(int(name), int(threads))[0](),
    "named_barrier": lambda name, threads: make_handover(int(name), int(threads))[1](),
    "reciprocal": lambda value: FLOAT(1) / FLOAT(value),
    "wait_for_all_copies_but_one": make_wait(1),
    "wait_for_copies": make_wait(0),
}
TILE = {
    "add_halves": lambda tile: tile[: len(tile) // 2] + tile[len(tile) // 2 :],
    "exp2_below": exp2_below,
    "keep_columns": keep_columns,
    "left_address": lambda chunk, lane: unit_address(chunk, int(lane) % 16, int(lane) // 16),
    "make_column_product": make_column_product,
    "make_row_float_fold": make_fold,
    "make_row_float_store": lambda distance: make_store(np.float32, distance),
    "make_row_part": make_row_part,
    "make_row_product": make_row_product,
    "make_row_store": make_row_store,
    "make_row_word_store": lambda number, distance: make_store(bfloat16, distance),
    "make_zeros": lambda count: lambda: np.zeros(count, np.float32),
    "right_address": right_address,
    "row_maxima": row_maxima,
    "row_sums": row_sums,
    "scale_rows": scale_rows,
    "scale_tile": lambda tile, factor: tile * FLOAT(factor),
    "unit_address": unit_address,
    "without_negative_zeros": lambda tile: tile + FLOAT(0),
}


def kernel_modules() -> tuple[Any, Any]:
    """Import the modules of both kernels with everything under them emulated."""
    import numba_ddtree.launch as launch

    launch.block_threads = lambda threads: threads
    barriers = {"fresh_word": EMULATIONS["mbarriers"]["fresh_word"]}
    with emulated({"mbarriers": barriers, "ptx": EMULATIONS["ptx"] | PTX, "tile": TILE}):
        from numba_ddtree import cuda_target as target

        KINDS.update({target.int32: np.int32, target.uint64: np.uint64, target.float32: np.float32})
        array = types.SimpleNamespace(array=lambda count, kind: SharedWords(KINDS[kind]))
        Target.shared = array
        from numba_ddtree.tree_attention import block_pieces, whole_blocks
    replace_outputs()

    return whole_blocks, block_pieces


MODULES = kernel_modules()

from emulated_cases import (  # noqa: E402  after the emulation is in place
    SCALE,
    Case,
    Inputs,
    Partials,
    assert_close,
    paged,
    random_inputs,
    sequences_alone,
    tree_of,
)

from numba_ddtree.refs.tree_links import visibility_from_bits  # noqa: E402
from numba_ddtree.tree_attention import key_blocks  # noqa: E402
from numba_ddtree.tree_attention.group_steps import State  # noqa: E402
from numba_ddtree.tree_attention.key_rows import Keys  # noqa: E402
from numba_ddtree.tree_attention.split_items import Tree  # noqa: E402

FIRST_KEY, APART = 1000, 10**6
NONE = np.zeros(0, np.int32)
CONTIGUOUS = Keys(
    np.uint64(FIRST_KEY), np.int64(1), np.int64(APART), np.uint64(FIRST_KEY), np.int64(1), np.int64(APART),
    np.int32(APART), np.int32(1), NONE, NONE, np.int32(0),
)  # fmt: skip
"""A cache whose addresses alone matter: they count the keys."""

CASES = {
    "one block": Case([20], 1, 40),
    "prefix alone": Case([200], 1, 32, page_size=64, scale=-SCALE),
    "splits": Case([127], 3, 24, split_blocks=2, workers=3, is_float32=True),
    "ragged": Case([62, 150], 5, 16, page_size=16, split_blocks=1, workers=3, counts=[2, 5]),
    "tail": Case([100], 5, 8, page_size=16, split_blocks=1, sees_prefix=False),
    "shared groups": Case([96], 7, 9),
    "folded": Case([127, 70], 3, 24, split_blocks=1, workers=2, rest_tiles=1),
}
ALONE = {
    "alone": Case([64], 9, 8),
    "alone across blocks": Case([58], 12, 3, page_size=16, split_blocks=1, workers=2),
    "alone after common groups": Case([85], 7, 12, page_size=64),
}


def attend(
    module: Any, case: Case, given: Inputs, rng: np.random.Generator
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Run a kernel's blocks one after the other, and merge splits; outputs in float32."""
    cache, table, each = paged(case, given.rows, rng)
    ckv, kpe = np.ascontiguousarray(cache[..., :512]), np.ascontiguousarray(cache[..., 512:])
    pages, page_size = cache.shape[:2]
    slots, heads = given.q_nope.shape[1:3]
    partials = Partials.make(case)
    out = np.full(given.q_nope.shape, np.nan, np.float32 if case.is_float32 else bfloat16)
    lse = np.full(given.q_nope.shape[:3], np.nan, np.float32)
    i32, i64, u64 = np.int32, np.int64, np.uint64
    arguments = (
        u64(given.q_nope.ctypes.data), i64(1024), u64(given.q_pe.ctypes.data), i64(128),
        u64(ckv.ctypes.data), i64(1024), i64(1024 * page_size),
        u64(kpe.ctypes.data), i64(128), i64(128 * page_size),
        i32(page_size), i32(pages), table, np.zeros(0, np.int32), i32(each),
        given.tree.ancestor_bits, given.tree.num_nodes, np.array(case.prefixes, np.int32),
        i32(slots), i32(heads), i32(case.workers), i32(partials.rest_tiles), i32(case.split_blocks),
        i32(partials.max_splits), i32(2**30), i32(case.sees_prefix), FLOAT(case.scale * math.log2(math.e)),
        partials.numbers, partials.sums, partials.first_rows, partials.num_rest,
        u64(out.ctypes.data), lse, i32(0 if case.is_float32 else 1),
    )  # fmt: skip
    options.threads = module.THREADS
    for index in range(case.workers):
        run_block(module.KERNELS["bfloat16"].function, index, arguments)
    merged = out.astype(np.float32)
    partials.merge(64 // module.PARTS, merged, lse)
    return merged, lse


def check_case(case: Case, rng: np.random.Generator) -> None:
    given = random_inputs(case, rng)
    whole_blocks, block_pieces = MODULES
    results = []
    for module, options.is_late in ((whole_blocks, True), (block_pieces, True), (block_pieces, False)):
        out, lse = attend(module, case, given, rng)
        assert_close(case, given, out, lse)
        results.append((out.view(np.uint32), lse.view(np.uint32)))
    for result in results[1:]:
        for bits, others in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(bits, others)


def check_alone(case: Case, rng: np.random.Generator) -> None:
    """Check that nodes have the bits that their sequences have by themselves, all of it in the prefix."""
    given = random_inputs(case, rng)
    options.is_late = True
    for module in MODULES:
        out, lse = attend(module, case, given, rng)
        for node, alone, own in sequences_alone(case, given, rng, 2):
            out_alone, lse_alone = attend(module, alone, own, rng)
            np.testing.assert_array_equal(out_alone[0, 0].view(np.uint32), out[0, node].view(np.uint32))
            np.testing.assert_array_equal(lse_alone[0, 0].view(np.uint32), lse[0, node].view(np.uint32))


def check_blocks(rng: np.random.Generator) -> None:
    """Check which keys the rows of random trees meet."""
    for _ in range(60):
        heads = int(rng.choice([1, 2, 3, 8, 12, 16, 64, 128]))
        prefix = int(rng.choice([0, 1, 47, 48, 49, 63, 64, 65, 100, 112, 127, 128, rng.integers(200)]))
        slots = int(rng.choice([1, 2, 7, 17, 70]))
        parents = np.arange(slots, dtype=np.int32) - rng.integers(1, 4, slots).astype(np.int32)
        parents[1:] = np.maximum(parents[1:], 0)
        parents[0] = -1
        links = tree_of(Case([prefix], slots, heads), parents[None])
        bits, counts = np.asarray(links.ancestor_bits), np.asarray(links.num_nodes)
        tree = Tree(bits, counts, np.array([prefix], np.int32), np.int32(slots), np.int32(heads), np.int32(0))
        sees = visibility_from_bits(bits)[0]
        height, length = int(rng.choice([32, 64])), int(rng.choice([1, 2, 100]))
        sees_prefix = bool(rng.integers(4))
        for part in range(-(-slots * heads // height)):
            for split in range(-(-(prefix + int(sees.sum(-1).max())) // (64 * length))):
                item = key_blocks.item_of(tree, 0, part, height, split, length, sees_prefix)
                check_item(tree, item, sees, height, sees_prefix)


def check_item(tree: Tree, item: Any, sees: NDArray[np.bool_], height: int, sees_prefix: bool) -> None:
    """Check that each row meets its own keys, each once and in order, in its place of a group of 16."""
    prefix = int(item.prefix)
    nodes = (int(item.first_row) + np.arange(int(item.rows))) // int(tree.heads)
    seen, faults = np.zeros(height, np.int32), np.zeros(height, np.int32)
    seen[: len(nodes)] = prefix + sees[nodes].sum(-1)
    state = State(None, None, seen, faults, None, np.array([seen.max(), 0]))
    found: list[list[int]] = [[] for _ in nodes]
    block, node = key_blocks.first_block(item, tree, state, sees_prefix)
    while block >= 0:
        addresses = np.zeros(128, np.uint64)
        for slot in range(64):
            key_blocks.look_up(slot, CONTIGUOUS, tree, item, block, node, state, addresses)
        met = set()
        for row, owner in enumerate(nodes):
            columns = np.arange(64)
            if node >= 0:
                bits = int(key_blocks.columns_of(item, tree, state, block, node, np.uint32(row)))
                columns = np.flatnonzero([bits >> column & 1 for column in range(64)])
            half = row // 32 * 32
            assert key_blocks.has_rows(half, 32, item, tree, state, block, node) or len(columns) == 0
            places = addresses[2 * columns].astype(np.int64) - FIRST_KEY
            depths = np.cumsum(sees[owner])[np.maximum(0, places - prefix)] - 1
            positions = np.where(places < prefix, places, prefix + depths)
            assert (positions % 16 == columns % 16).all()
            assert (positions // 64 == int(block)).all()
            found[row] += places.tolist()
            met |= set(columns.tolist())
        assert np.flatnonzero(addresses[::2]).tolist() == sorted(met), "a row is loaded for nobody"
        block, node = key_blocks.following(item, tree, state, block, node)
    assert not faults.any()
    for row, owner in enumerate(nodes):
        keys = [*range(prefix), *(prefix + np.flatnonzero(sees[owner])).tolist()]
        first = max(64 * int(item.begin), 0 if sees_prefix else prefix)
        assert found[row] == keys[first : 64 * int(item.end)]


def main(names: list[str]) -> None:
    for name in names:
        rng = np.random.default_rng(len(name))
        if name == "blocks":
            check_blocks(rng)
        elif name in ALONE:
            check_alone(ALONE[name], rng)
        else:
            check_case(CASES[name], rng)
        print(name, "is right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
