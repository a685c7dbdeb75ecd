"""Calls of a kernel that emulated threads run: inputs, the merge of splits, and the reference.

To be imported after the emulation is in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree import DraftTree
from numba_ddtree.refs.tree_attention import tree_attention
from numba_ddtree.refs.tree_links import visibility_from_bits
from numba_ddtree.tree_attention.split_items import BY_PATH

SCALE = 192**-0.5
# Rounded to bfloat16 are the probabilities and, where outputs are not merged, outputs; 2^-9 each at most, and
# about 2^-10 / sqrt(3) on average.
RELATIVE = 3e-3
ABSOLUTE_LSE = 1e-5


@dataclass
class Case:
    """A call of the kernel."""

    prefixes: list[int]
    slots: int
    heads: int
    page_size: int | None = None
    split_blocks: int = 64  # 0: as the kernel chooses
    workers: int = 1
    counts: list[int] | None = None
    is_float32: bool = False
    sees_prefix: bool = True
    is_late: bool = False
    scale: float = SCALE
    rest_tiles: int = 191
    bits: float = 0  # by which weights rise with each 64 keys
    max_path: int | None = None  # that the kernel is told
    foretold: list[int] | None = None  # prefixes of which first items are found before
    foretold_with: dict[str, Any] = field(default_factory=dict)  # and other arguments of theirs
    by_slot: int = BY_PATH
    poison: float = np.nan  # of outputs
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Inputs:
    """Queries, a contiguous cache of fused rows, and trees."""

    q_nope: NDArray[Any]
    q_pe: NDArray[Any]
    rows: NDArray[Any]
    tree: DraftTree


def random_inputs(case: Case, rng: np.random.Generator) -> Inputs:
    batch, slots = len(case.prefixes), case.slots
    parents = np.full((batch, slots), -1, np.int32)
    for slot in range(1, slots):
        parents[:, slot] = rng.integers(max(0, slot - 4), slot, batch)
    tree = tree_of(case, parents)

    def numbers(*shape: int) -> NDArray[Any]:
        return (0.7 * rng.standard_normal(shape)).astype(bfloat16)

    q_nope, q_pe = numbers(batch, slots, case.heads, 512), numbers(batch, slots, case.heads, 64)
    rows = numbers(batch, max(case.prefixes) + slots, 576)
    if case.bits:
        q_nope[..., 0] = 8
        rises = case.bits * np.arange(rows.shape[1]) / (64 * 8 * case.scale * math.log2(math.e))
        rows[..., 0] = rises.astype(bfloat16)
    return Inputs(q_nope, q_pe, rows, tree)


def tree_of(case: Case, parents: NDArray[np.int32]) -> DraftTree:
    counts = case.counts or [case.slots] * len(case.prefixes)
    return DraftTree.from_parents(
        parents,
        np.zeros_like(parents),
        num_nodes=np.array(counts, np.int32),
        prefix_lengths=np.array(case.prefixes, np.int32),
        max_depth=case.slots - 1,
        backend="numpy",
    )


def paged(case: Case, rows: NDArray[Any], rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], int]:
    """Return the cache [pages, page_size, 576], the page table and its entries a request; NaN is unused."""
    batch, keys, width = rows.shape
    if case.page_size is None:
        return rows, np.zeros(0, np.int32), 0
    each = -(-keys // case.page_size)
    padded = np.full((batch, each * case.page_size, width), np.nan, bfloat16)
    padded[:, :keys] = rows
    table = rng.permutation(batch * each + 2)[: batch * each].astype(np.int32)
    cache = np.full((batch * each + 2, case.page_size, width), np.nan, bfloat16)
    cache[table] = padded.reshape(batch * each, case.page_size, width)
    return cache, table, each


MOST_SPLITS = 8


@dataclass
class Partials:
    """Memory for partial results, poisoned, and where splits have been left unmerged."""

    max_splits: int
    rest_tiles: int
    workers: int
    numbers: NDArray[np.float32]
    sums: NDArray[np.float32]
    first_rows: NDArray[np.int64]
    num_rest: NDArray[np.int32]

    @classmethod
    def make(cls, case: Case) -> Partials:
        tiles = len(case.prefixes) * -(-case.slots * case.heads // 64)
        blocks = -(-(max(case.prefixes) + case.slots) // 64)
        max_splits = -(-blocks // case.split_blocks) if case.split_blocks else MOST_SPLITS
        rest_tiles = min(tiles, case.rest_tiles)
        rows = 64 * (max_splits * rest_tiles + case.workers)
        return cls(
            max_splits,
            rest_tiles,
            case.workers,
            np.full((rows, 512), np.nan, np.float32),
            np.full((rows, 4), np.nan, np.float32),
            np.full(2 * rest_tiles + 1, -1, np.int64),
            np.full(1, -1, np.int32),
        )

    def merge(self, height: int, out: NDArray[Any], lse: NDArray[Any]) -> None:
        """Merge rows as the merging kernel does, for parts of so many rows."""
        out_rows, lse_rows = out.reshape(-1, 512), lse.reshape(-1)
        for part in range(int(self.num_rest[0])):
            for row in range(height):
                place = part * self.max_splits * height + row
                splits = int(self.sums[place, 3])
                places = place + height * np.arange(splits)
                if splits > 1:
                    largest = self.sums[places, 0].max()
                    weights = np.exp2(self.sums[places, 0] - largest)
                    total, rounded = weights @ self.sums[places, 1:3]
                    target = self.first_rows[part] + row
                    out_rows[target] = weights @ self.numbers[places] / rounded
                    lse_rows[target] = (largest + np.log2(total)) * math.log(2)


def sequences_alone(
    case: Case, given: Inputs, rng: np.random.Generator, count: int
) -> Iterator[tuple[int, Case, Inputs]]:
    """Yield some nodes of the first request, each with a call whose prefix its sequence is."""
    prefix = case.prefixes[0]
    visibility = visibility_from_bits(np.asarray(given.tree.ancestor_bits))
    for node in rng.choice(case.slots, count, replace=False).tolist():
        path = np.flatnonzero(visibility[0, node])
        rows = np.ascontiguousarray(given.rows[:1, [*range(prefix), *(prefix + path)]])
        alone = Case([prefix + len(path) - 1], 1, case.heads, split_blocks=case.split_blocks)
        queries = [np.ascontiguousarray(each[:1, [node]]) for each in (given.q_nope, given.q_pe)]
        yield node, alone, Inputs(*queries, rows, tree_of(alone, np.full((1, 1), -1, np.int32)))


def assert_close(case: Case, given: Inputs, out: NDArray[Any], lse: NDArray[Any]) -> None:
    rows = given.rows
    want_out, want_lse = tree_attention(
        given.q_nope, given.q_pe, rows[..., :512], rows[..., 512:], np.asarray(given.tree.ancestor_bits),
        np.asarray(given.tree.num_nodes), np.array(case.prefixes, np.int32), case.scale, np.float64, None,
        case.sees_prefix,
    )  # fmt: skip
    assert np.linalg.norm(out - want_out) <= RELATIVE * np.linalg.norm(want_out)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=ABSOLUTE_LSE)
