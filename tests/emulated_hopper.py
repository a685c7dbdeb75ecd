"""Runs the Hopper kernel's code on the host, case by case: ``python tests/emulated_hopper.py CASE...``."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
from emulated_warpgroups import (
    MAPS,
    SHARED_BASE,
    hopper_modules,
    local,
    options,
    run_block,
    run_cluster,
)
from emulated_warpgroups import (
    block as emulated_block,
)
from ml_dtypes import bfloat16
from numpy.typing import NDArray

hopper, hopper_first_items = hopper_modules()

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

from numba_ddtree.refs import tree_attention as reference  # noqa: E402
from numba_ddtree.tree_attention import (  # noqa: E402
    bands,
    hopper_items,
    hopper_scores,
    hopper_state,
    path_blocks,
    slot_blocks,
)
from numba_ddtree.tree_attention.split_items import (  # noqa: E402
    BY_SLOT,
    BY_SLOT_IN_ONE_PAIR,
    BY_SLOT_IN_ROWS,
)

MAP_BYTES = 128
FIRST_MAP = 4096
MAX_KEYS = 2**30
# Cases in which a block has one item, and all is as it was foretold.
WITH_ONLY_ITEMS = {
    "foretold, and looked for late",
    "foretold, and the only ones",
    "foretold, and paired",
    "foretold, and gathered",
    "foretold bands",
}
OF_FIRST_ITEMS = 28  # place among the arguments
FOUND_WITH = {"counts": 12, "max_path": 14, "sees_prefix": 22}  # places among those of what finds first items


CASES = {
    "prefix alone": Case([200], 1, 64, page_size=64),
    "pages of two blocks": Case([300], 1, 64, page_size=128, split_blocks=3, workers=2),
    "gathered prefix": Case([300], 1, 64, page_size=16),
    "gathered prefixes": Case([330, 200, 70], 2, 64, page_size=24, workers=2),
    "one block": Case([20], 1, 64),
    "shared groups": Case([100], 9, 16, page_size=16, workers=2),
    "late": Case([100], 9, 16, page_size=64, workers=2, is_late=True),
    "late pairs": Case([400], 9, 16, page_size=64, is_late=True),
    "eight heads": Case([121], 9, 8),
    "splits": Case([130], 5, 64, split_blocks=2, workers=2),
    "many splits": Case([130, 300], 3, 24, split_blocks=1, workers=5),
    "late splits": Case([0, 63], 7, 12, page_size=7, split_blocks=1, workers=2, is_late=True),
    "ragged": Case([70, 150], 9, 16, page_size=64, split_blocks=2, workers=3, counts=[5, 9]),
    "float32": Case([100], 9, 16, page_size=16, split_blocks=1, workers=2, is_float32=True),
    "folded": Case([130, 60], 5, 24, split_blocks=1, workers=2, rest_tiles=1),
    "folded in float32": Case([130], 5, 24, split_blocks=1, is_float32=True, rest_tiles=0),
    "tail": Case([100], 9, 16, page_size=16, split_blocks=1, sees_prefix=False),
    "negative scale": Case([70], 3, 64, scale=-SCALE),
    "bands": Case([700], 3, 64, page_size=64, split_blocks=0, workers=4),
    "bands of paths": Case([300, 60], 11, 16, page_size=64, split_blocks=0, workers=7, counts=[11, 8]),
    "late bands": Case([500], 5, 24, split_blocks=0, workers=3, is_late=True, is_float32=True),
    "bands side by side": Case([400, 300], 2, 64, page_size=64, split_blocks=0, workers=5),
    "foretold": Case([130, 300], 5, 24, page_size=64, split_blocks=2, workers=3, foretold=[130, 300]),
    "foretold, and looked for late": Case([64 * 14 + 10], 1, 64, page_size=64, foretold=[64 * 14 + 10]),
    "foretold, and gathered": Case(
        [250, 90], 5, 24, page_size=16, split_blocks=3, workers=3, counts=[5, 3], foretold=[250, 90]
    ),
    "foretold wrongly, and gathered": Case(
        [90, 250], 5, 24, page_size=24, split_blocks=3, workers=3, counts=[2, 5], foretold=[250, 200]
    ),
    "foretold bands": Case([700], 3, 64, page_size=64, split_blocks=0, workers=4, foretold=[700]),
    "foretold whole": Case([300], 5, 64, workers=2, split_blocks=2, rest_tiles=0, foretold=[300]),
    "foretold wrongly": Case([130, 300], 5, 24, page_size=64, split_blocks=2, workers=3, foretold=[310, 70]),
    "foretold wrongly, and late": Case(
        [130, 20], 5, 24, page_size=64, split_blocks=1, workers=3, foretold=[67, 340], is_late=True
    ),
    "foretold what is not there": Case([20, 0], 3, 24, split_blocks=1, workers=2, foretold=[500, 2000]),
    "foretold wrongly to who has none": Case(
        [300, 20], 1, 64, page_size=64, split_blocks=1, workers=7, foretold=[300, 300]
    ),
    "paired": Case([300, 200], 2, 48, page_size=64, split_blocks=3, workers=8),
    "paired, late and in float32": Case(
        [130], 7, 16, split_blocks=2, workers=4, is_late=True, is_float32=True
    ),
    "paired with paths": Case([110, 60], 9, 8, page_size=64, split_blocks=1, workers=9, counts=[9, 4]),
    "foretold wrongly, and paired": Case(
        [150, 20], 3, 32, page_size=64, split_blocks=2, workers=8, foretold=[70, 152], is_late=True
    ),
    "foretold, and the only ones": Case(
        [300], 1, 64, page_size=64, split_blocks=2, workers=3, foretold=[300]
    ),
    "foretold without the last of 33": Case(
        [70] * 33,
        1,
        64,
        page_size=64,
        counts=[1] + 31 * [0] + [1],
        foretold=[70] * 33,
        foretold_with={"counts": [1] + 32 * [0]},
    ),
    "foretold of fewer requests": Case([70, 70], 1, 64, page_size=64, foretold=[70]),
    "foretold of more requests": Case([70], 1, 64, page_size=64, workers=2, foretold=[70, 70]),
    "foretold wrongly, of fewer nodes": Case(
        [70], 2, 16, page_size=64, foretold=[70], foretold_with={"counts": [1]}
    ),
    "foretold of shorter paths": Case(
        [127], 2, 64, page_size=64, split_blocks=2, workers=2, foretold=[127], foretold_with={"max_path": 1}
    ),
    "foretold wrongly, with the prefix": Case(
        [70], 1, 64, page_size=64, sees_prefix=False, foretold=[70], foretold_with={"sees_prefix": 1}
    ),
    "foretold, and paired": Case([250], 3, 64, page_size=64, split_blocks=2, workers=6, foretold=[250]),
    "by slot": Case([100], 9, 16, page_size=64, workers=2, by_slot=BY_SLOT),
    "by slot, and gathered": Case(
        [330, 20], 9, 8, page_size=16, workers=2, by_slot=BY_SLOT_IN_ROWS, counts=[9, 3]
    ),
    "by slot and late": Case(
        [130, 0],
        70,
        2,
        page_size=64,
        split_blocks=1,
        workers=3,
        by_slot=BY_SLOT,
        is_late=True,
        counts=[70, 65],
    ),
    "by slot in bands": Case(
        [400, 63], 70, 2, page_size=128, split_blocks=0, workers=5, by_slot=BY_SLOT, is_float32=True
    ),
    "by slot, foretold": Case(
        [190, 90], 40, 4, page_size=64, split_blocks=2, workers=5, by_slot=BY_SLOT, foretold=[190, 90]
    ),
    "by slot, foretold wrongly": Case(
        [90, 250], 40, 4, page_size=64, split_blocks=2, workers=5, by_slot=BY_SLOT, foretold=[250, 120]
    ),
    "by slot, paired": Case([110, 60], 24, 8, page_size=64, split_blocks=2, workers=12, by_slot=BY_SLOT),
    "by slot, contiguous": Case([20, 130], 9, 16, workers=2, by_slot=BY_SLOT, counts=[9, 5]),
    "by slot in one pair": Case(
        [100, 125, 64, 0],
        12,
        64,
        page_size=128,
        workers=2,
        by_slot=BY_SLOT_IN_ONE_PAIR,
        counts=[12, 7, 12, 4],
    ),
    "by slot in one pair, foretold": Case(
        [190, 250],
        7,
        64,
        page_size=64,
        split_blocks=2,
        workers=5,
        by_slot=BY_SLOT_IN_ONE_PAIR,
        foretold=[190, 240],
    ),
    "by slot in one pair, paired": Case(
        [250, 200], 3, 64, page_size=64, split_blocks=2, workers=12, by_slot=BY_SLOT_IN_ONE_PAIR
    ),
    "rising": Case([500], 5, 24, page_size=64, split_blocks=5, workers=2, bits=1.5),
}


class Merges:
    """What blocks do after they have met, kept until all have come there."""

    def __init__(self) -> None:
        self.merge_rest = hopper.merge_rest
        hopper.merge_rest = self.keep

    def keep(self, *arguments: Any) -> None:
        """Keep a block's number of tiles that are left, and its arguments: the same of all blocks."""
        self.rest = hopper_state.word_at(SHARED_BASE, hopper_state.REST)
        self.arguments = arguments

    def run(self) -> None:
        """Merge what a block is to, by a thread."""
        hopper_state.set_word(SHARED_BASE, hopper_state.REST, self.rest)
        hopper_items.cuda.syncthreads()
        self.merge_rest(*self.arguments)


MERGES = Merges()


def be_late() -> None:
    """Let what paths decide of an item be wrong until long after its keys may be asked for.

    And let loaders begin only when two items may have been told.
    """
    describe_shared, describe_paths = hopper_items.describe_shared, hopper_items.describe_paths
    load_keys = hopper.load_keys
    state = hopper_state
    words = (
        state.STREAM, state.LONGEST, state.GATHER_BEGIN, state.OUTPUT_KIND, state.FIRST_NODE, state.NODES,
    )  # fmt: skip

    def describe_shared_and_spoil(base: Any, place: Any, *given: Any) -> Any:
        shared = describe_shared(base, place, *given)
        if options.is_late and local.thread == hopper_items.SCHEDULER:
            item = np.uint32(base + 4 * state.ITEMS + place * 4 * state.ITEM_WORDS)
            for word in words:
                state.set_word(item, word, -1)
            seen = np.uint32(base + 4 * state.SEEN + place * 4 * hopper.TILE_ROWS)
            for row in range(hopper.TILE_ROWS):
                state.set_word(seen, row, -1)
        hopper_items.cuda.syncwarp()
        return shared

    def describe_paths_late(*given: Any) -> Any:
        if options.is_late:
            time.sleep(0.05)
        return describe_paths(*given)

    def load_keys_late(*given: Any) -> None:
        if options.is_late:
            time.sleep(2)
        load_keys(*given)

    hopper_items.describe_shared, hopper_items.describe_paths = describe_shared_and_spoil, describe_paths_late
    hopper.load_keys = load_keys_late


def look_late() -> None:
    """Let the scheduler look for a foretold item's first pair only when nobody goes on any more."""
    let_first_pair_begin = hopper_items.let_first_pair_begin

    def begin_late(base: Any) -> None:
        barrier = emulated_block().barriers[int(base) + hopper_state.STATE_AT + 8 * hopper_state.LEFT_FREE]
        phase = -1
        while barrier.phase != phase or phase < 1:
            phase = barrier.phase
            time.sleep(3)
        let_first_pair_begin(base)

    hopper_items.let_first_pair_begin = begin_late


def attend(case: Case, given: Inputs, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Run the kernel's blocks one after the other, and what they do after their meeting; in float32."""
    options.is_late = case.is_late
    cache, table, each = paged(case, given.rows, rng)
    ckv, kpe = np.ascontiguousarray(cache[..., :512]), np.ascontiguousarray(cache[..., 512:])
    pages, page_size = cache.shape[:2]
    MAPS[FIRST_MAP], MAPS[FIRST_MAP + MAP_BYTES] = ckv, kpe
    slots, heads = given.q_nope.shape[1:3]
    partials = Partials.make(case)
    out = np.full(given.q_nope.shape, case.poison, np.float32 if case.is_float32 else bfloat16)
    lse = np.full(given.q_nope.shape[:3], case.poison, np.float32)
    i32, i64, u64 = np.int32, np.int64, np.uint64
    arguments = (
        u64(given.q_nope.ctypes.data), i64(1024), u64(given.q_pe.ctypes.data), i64(128),
        u64(ckv.ctypes.data), i64(1024), i64(1024 * page_size),
        u64(kpe.ctypes.data), i64(128), i64(128 * page_size),
        i32(page_size), i32(pages), table, np.zeros(0, np.int32), i32(each),
        given.tree.ancestor_bits, given.tree.num_nodes, np.array(case.prefixes, np.int32),
        i32(case.max_path or slots), i32(heads), i32(case.workers), i32(partials.rest_tiles),
        i32(case.split_blocks), i32(partials.max_splits), i32(MAX_KEYS),
        u64(FIRST_MAP), i32(len(table) == 0 or page_size % 64 == 0),
        i32(case.split_blocks == 0), i32(case.sees_prefix), i32(case.by_slot),
        np.float32(case.scale * math.log2(math.e)),
        partials.numbers, partials.sums, partials.first_rows,
        u64(out.ctypes.data), lse, i32(0 if case.is_float32 else 1),
    )  # fmt: skip
    options.threads = 384
    items = find_first_items(case, arguments)
    arguments = (*arguments[:OF_FIRST_ITEMS], items, *arguments[OF_FIRST_ITEMS:])
    kernel = hopper.make_kernel("bf16", "kernel")
    clusters = range(0, case.workers, hopper.CLUSTER_BLOCKS)
    for first in rng.permutation(clusters).tolist():
        blocks = range(first, min(first + hopper.CLUSTER_BLOCKS, case.workers))
        run_cluster(kernel, list(blocks), arguments)
    options.threads = 32 * hopper_state.CONSUMING_WARPS
    for index in range(case.workers):
        run_block(MERGES.run, index, ())
    return out.astype(np.float32), lse


def find_first_items(case: Case, arguments: tuple[Any, ...]) -> NDArray[np.int32]:
    """Return the first items of a case's foretold prefixes, or an empty array.

    They are written over those of the case itself, and these over poison. Of fewer requests or more, they
    have the trees and pages of the case's, in turns.
    """
    if case.foretold is None:
        return np.zeros(0, np.int32)
    batch, size = len(case.foretold), len(case.prefixes)
    words = hopper_state.BATCH_AT + 1 + max(batch, size) * hopper_state.REQUEST_WORDS
    items = np.full(words, -7, np.int32)
    given = list(arguments[4:25])  # keys, trees, shares and most keys
    given += [*arguments[27:30], items]  # bands, what nodes see, and how
    for index in range(case.workers):
        run_block(hopper_first_items.hopper_first_items_kernel, index, tuple(given))
    for place in (8, 11, 12):  # pages, ancestors and counts
        given[place] = np.resize(given[place], (len(given[place]) // size * batch, *given[place].shape[1:]))
    given[13] = np.array(case.foretold, np.int32)
    for name, value in case.foretold_with.items():
        given[FOUND_WITH[name]] = np.array(value, np.int32) if name == "counts" else np.int32(value)
    for index in range(case.workers):
        run_block(hopper_first_items.hopper_first_items_kernel, index, tuple(given))
    return items


def check_case(case: Case, rng: np.random.Generator) -> None:
    given = random_inputs(case, rng)
    out, lse = attend(case, given, rng)
    assert_close(case, given, out, lse)


def check_alone(case: Case, rng: np.random.Generator) -> None:
    """Check that nodes have the bits that their sequences have by themselves, all of it in the prefix."""
    given = random_inputs(case, rng)
    out, lse = attend(case, given, rng)
    for node, alone, own in sequences_alone(case, given, rng, 2):
        out_alone, lse_alone = attend(alone, own, rng)
        np.testing.assert_array_equal(out_alone[0, 0], out[0, node])
        np.testing.assert_array_equal(lse_alone[0, 0], lse[0, node])


def check_faults_by_slot(rng: np.random.Generator) -> None:
    """Check that a tile is NaN, and no other, of which a node sees what is not in use, or is too deep."""
    for fault in ("deep", "behind"):
        most = 6 if fault == "deep" else 9
        case = Case([70], 10, 16, page_size=64, by_slot=BY_SLOT, counts=[9], max_path=most)
        given = random_inputs(case, rng)
        parents = np.array([[-1, 0, 0, 0, 0, 4, 5, 6, 7, 8]], np.int32)
        if fault == "deep":
            parents[0, 4] = 3
            parents[0, 3] = 2
        tree = tree_of(case, parents)
        if fault == "behind":
            bits = tree.ancestor_bits.copy()
            bits[0, 5, 0] |= 1 << 9
            tree = replace(tree, ancestor_bits=bits)
        out, _ = attend(case, replace(given, tree=tree), rng)
        assert np.isfinite(out[0, :4]).all()
        assert np.isnan(out[0, 4:8]).all()
        assert np.isfinite(out[0, 8]).all() == (fault == "behind")


def check_slots_behind(rng: np.random.Generator) -> None:
    """Check that a node is NaN that sees a slot that is not in use, in a block that its request has not.

    Whether its tile is whole, is cut into splits, or might have been one of a pair.
    """
    for prefixes, counts, more in (
        ([60], [1], {"rest_tiles": 0}),
        ([60, 100], [1, 2], {"workers": 2}),
        ([60, 100], [1, 3], {"workers": 8}),
    ):
        case = Case(prefixes, 8, 64, split_blocks=1, counts=counts, poison=7, max_path=8, **more)
        given = random_inputs(case, rng)
        bits = given.tree.ancestor_bits.copy()
        bits[0, 0, 0] |= 1 << 5
        out, lse = attend(case, replace(given, tree=replace(given.tree, ancestor_bits=bits)), rng)
        assert np.isnan(out[0, 0]).all()
        assert np.isnan(lse[0, 0]).all()
        if len(counts) > 1:
            assert np.isfinite(out[1]).all()
            assert (out[1, : counts[1]] != case.poison).all()


def check_too_deep(rng: np.random.Generator) -> None:
    """Check that nodes with longer paths than was said are NaN, whatever becomes of their splits."""
    for more in ({"page_size": 64}, {"split_blocks": 1, "workers": 2}, {"split_blocks": 1, "rest_tiles": 0}):
        case = Case([126], 5, 64, max_path=2, **more)
        given = random_inputs(case, rng)
        chain = tree_of(case, np.arange(-1, 4, dtype=np.int32)[None])
        given = replace(given, tree=chain)
        out, lse = attend(case, given, rng)
        want, want_lse = reference.tree_attention(
            given.q_nope, given.q_pe, given.rows[..., :512], given.rows[..., 512:], chain.ancestor_bits,
            chain.num_nodes, np.array(case.prefixes, np.int32), case.scale, np.float64,
        )  # fmt: skip
        np.testing.assert_allclose(out[0, :2], want[0, :2], atol=0.02)
        np.testing.assert_allclose(lse[0, :2], want_lse[0, :2], atol=1e-3)
        assert np.isnan(out[0, 2:]).all()
        assert np.isnan(lse[0, 2:]).all()


def check_packing(rng: np.random.Generator) -> None:
    """Check that each row sees its own keys of a block, each once and in its place of a group."""
    for _ in range(300):
        prefix, nodes = int(rng.integers(0, 130)), int(rng.integers(1, 20))
        seen = prefix + rng.integers(1, rng.integers(2, 70), nodes)
        for block in range(prefix // 64, -(-int(seen.max()) // 64)):
            common, own, count = map(int, path_blocks.group_shape(prefix, block, int(seen.max())))
            assert count >= 1
            assert common + own * count <= path_blocks.GROUPS
            for node in range(nodes):
                place = node % count
                bits = int(path_blocks.visible_columns(block, common, own, place, count, int(seen[node]), 0))
                columns = [column for column in range(64) if bits >> column & 1]
                moved = [c - 16 * own * place if c >= 16 * common else c for c in columns]
                assert moved == list(range(max(0, min(64, int(seen[node]) - 64 * block))))
                assert path_blocks.visible_columns(block, common, own, -1, count, int(seen[node]), 0) == 0


def check_mean_blocks(rng: np.random.Generator) -> None:
    """Check the mean number of blocks that paths take against how they are packed."""
    for heads in (1, 5, 8, 16, 24, 63, 64, 128):
        slots, depth = int(rng.integers(1, 80)), int(rng.integers(1, 70))
        nodes, blocks = min(slots, -(-64 // heads)), 0
        for prefix in range(64):
            for block in range(-(-(prefix + depth) // 64)):
                _, _, count = path_blocks.group_shape(prefix, block, prefix + depth)
                blocks += -(-nodes // int(count))
        assert slot_blocks.blocks_by_path(slots, heads, depth) == blocks / 64


def check_slots_seen(rng: np.random.Generator) -> None:
    """Check which keys a node sees of a block that begins anywhere before, in or behind the tree."""
    for slots in (1, 31, 32, 33, 64, 65, 100, 129):
        sees = rng.integers(0, 2, (2, slots, slots)).astype(bool)
        padded = np.zeros((2, slots, -(-slots // 32) * 32), bool)
        padded[..., :slots] = sees
        bits = np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)
        for first in (*range(-63, 70), slots - 1, slots, slots + 64):
            node = int(rng.integers(slots))
            wanted = [
                slot < 0 or (slot < slots and bool(sees[1, node, slot])) for slot in range(first, first + 64)
            ]
            got = int(slot_blocks.visible_slots(bits, 1, node, first))
            assert [bool(got >> column & 1) for column in range(64)] == wanted
        assert slot_blocks.visible_slots(bits, 1, slots, 0) == 0
        assert slot_blocks.visible_slots(bits, 0, -1, 0) == 0


def check_nodes_of_rows() -> None:
    """Check nodes of the first and last rows that each has, with reciprocals that are off by an ulp."""
    changed: Any = hopper_scores
    for toward in (0, 1, np.inf):
        changed.quick_reciprocal = lambda value, toward=toward: np.nextafter(
            np.float32(1) / np.float32(value), np.float32(toward)
        )
        for heads in range(1, 129):
            nodes = np.unique(np.geomspace(1, 1025 + 64, 200).astype(int))
            for node in (0, *nodes):
                for row in (node * heads, node * heads + heads - 1):
                    assert hopper_scores.node_of_row(np.uint32(row), np.int32(heads)) == node


class Foretelling:
    """Counts items that were told as foretold, those that were not looked for, and those that were others."""

    def __init__(self) -> None:
        self.told = self.only = self.disowned = 0
        self.is_as_foretold, self.disown = hopper_items.is_as_foretold, hopper_items.disown
        self.describe_only_item = hopper_items.describe_only_item
        changed: Any = hopper_items
        changed.is_as_foretold, changed.disown = self.compare, self.count
        changed.describe_only_item = self.describe

    def compare(self, base: Any) -> Any:
        self.told += local.thread == hopper_items.SCHEDULER
        return self.is_as_foretold(base)

    def describe(self, *given: Any) -> Any:
        is_only = self.describe_only_item(*given)
        self.told += local.thread == hopper_items.SCHEDULER and is_only
        self.only += local.thread == hopper_items.SCHEDULER and is_only
        return is_only

    def count(self, base: Any) -> None:
        self.disowned += local.thread == hopper_items.SCHEDULER
        self.disown(base)

    def check(self, name: str) -> None:
        """Check that there was what a case's name says."""
        assert (self.told > 0) == ("foretold" in name and "not there" not in name)
        assert (self.disowned > 0) == ("wrongly" in name)
        assert (self.only > 0) == (name in WITH_ONLY_ITEMS), self.only
        hopper_items.is_as_foretold, hopper_items.disown = self.is_as_foretold, self.disown
        hopper_items.describe_only_item = self.describe_only_item


class Pairing:
    """Notes whether sums were sent to other blocks."""

    def __init__(self) -> None:
        self.is_sent = False
        self.send_sums = hopper.send_sums
        hopper.send_sums = self.send

    def send(self, *given: Any) -> None:
        self.is_sent = True
        self.send_sums(*given)

    def check(self, name: str) -> None:
        """Check that there were pairs where a case's name says so."""
        assert self.is_sent or "paired" not in name
        hopper.send_sums = self.send_sums


class Bands:
    """Lets bands cost nothing beside splits in cases that are to have them, and go side by side in one."""

    def __init__(self, name: str) -> None:
        self.sides: set[int] = set()
        self.find_in_band = bands.find_in_band
        self.wanted: set[int] = set()
        changed: Any = bands
        changed.ITEM_BLOCKS, changed.MERGED_SLOTS, changed.L2_BLOCKS = 4, 24, 220
        changed.BEGIN_BLOCKS = 4
        changed = hopper_items
        changed.find_in_band = self.find
        if "bands" in name:
            self.wanted = {2 if "side" in name else 1}
            changed = bands
            changed.ITEM_BLOCKS, changed.MERGED_SLOTS, changed.BEGIN_BLOCKS = 0, 10**9, 2
            changed.L2_BLOCKS = 0 if "side" in name else 220

    def find(self, *given: Any) -> Any:
        if hopper_items.is_scheduler():
            self.sides.add(int(given[7]))
        return self.find_in_band(*given)

    def check(self) -> None:
        """Check that there were bands where they are wanted, and only there."""
        assert self.sides == self.wanted, self.sides
        hopper_items.find_in_band = self.find_in_band


def main(names: list[str]) -> None:
    be_late()
    for name in names:
        looked_for, foretelling, pairing = Bands(name), Foretelling(), Pairing()
        rng = np.random.default_rng(len(name))
        if "looked for late" in name:
            look_late()
        if name == "packing":
            check_packing(rng)
            check_mean_blocks(rng)
        elif name == "slots seen":
            check_slots_seen(rng)
        elif name == "alone":
            check_alone(Case([100], 9, 16, page_size=16, workers=2), rng)
            check_alone(Case([60], 6, 12, page_size=64, split_blocks=1, workers=2), rng)
            check_alone(Case([180], 6, 12, page_size=64, workers=2, bits=0.5), rng)
        elif name == "too deep":
            check_too_deep(rng)
        elif name == "slots behind":
            check_slots_behind(rng)
        elif name == "by slot, and wrong":
            check_faults_by_slot(rng)
        elif name == "nodes of rows":
            check_nodes_of_rows()
        else:
            check_case(CASES[name], rng)
        looked_for.check()
        foretelling.check(name)
        pairing.check(name)
        print(name, "is right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
