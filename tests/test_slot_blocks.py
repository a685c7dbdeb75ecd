"""The tree's keys as they lie, in the Hopper kernel: when it reads them so, and results on a device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    FORMS,
    CacheInputs,
    assert_accurate,
    chains,
    compute,
    make_inputs,
    plan_for,
    rising,
    same_bits,
)
from attention_runs import Run, assert_same
from kernel_checks import Library
from libraries import hopper_library
from ml_dtypes import bfloat16

from inputs import link
from numba_ddtree.tree_attention import slot_blocks
from numba_ddtree.tree_attention.slot_blocks import blocks_by_path, blocks_by_slot, way_to_read
from numba_ddtree.tree_attention.split_items import (
    BY_PATH,
    BY_SLOT,
    BY_SLOT_IN_ONE_PAIR,
    BY_SLOT_IN_ROWS,
)

OPTIONS: dict[str, Any] = {"kernel": "hopper", "split_keys": "fastest"}
# H, N: tiles of several nodes, and, in the last three, of one or two.
SHAPES = [(8, 65), (16, 65), (1, 129), (2, 33), (5, 100), (20, 40), (32, 9), (64, 40), (128, 20), (96, 9)]
gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("slots", "heads", "max_path", "expected"),
    [
        (65, 8, 16, True),
        (65, 16, 16, True),
        (33, 32, 16, True),
        (65, 64, 16, False),  # one node a tile
        (1, 8, 1, False),
        (1025, 8, 16, False),  # more blocks than paths take
        (257, 1, 9, True),
        (65, 8, 1, True),
    ],
)
def test_when_keys_are_read_by_slot(
    monkeypatch: pytest.MonkeyPatch, slots: int, heads: int, max_path: int, expected: bool
) -> None:
    chosen: Any = SimpleNamespace(split_blocks=0)
    given: Any = SimpleNamespace(split_blocks=64)
    for in_boxes, ways in ((True, (BY_SLOT_IN_ONE_PAIR, BY_SLOT)), (False, (BY_PATH, BY_SLOT_IN_ROWS))):
        monkeypatch.setattr(slot_blocks, "takes_boxes", lambda _, answer=in_boxes: answer)
        work: Any = SimpleNamespace(slots=slots, heads=heads, max_path=max_path, sees_prefix=True, keys=None)
        assert way_to_read(work, chosen) == ways[expected]
        assert way_to_read(work, given) == BY_PATH
        work.sees_prefix = False
        assert way_to_read(work, chosen) == BY_PATH


def test_mean_numbers_of_blocks() -> None:
    assert blocks_by_slot(1) == 1
    assert blocks_by_slot(2) == 65 / 64
    assert blocks_by_slot(65) == 2
    assert blocks_by_path(9, 64, 1) == 1
    # Eight nodes of one key, behind 0 to 63 of a prefix: four, three, two or one share a block.
    assert blocks_by_path(8, 8, 1) == (2 + 3 + 4 + 8) / 4


# On a device.


@pytest.fixture
def library() -> Library:
    return hopper_library()


def offsets(rng: np.random.Generator, longest: int) -> list[int]:
    """Return prefixes that end anywhere in a block, and near its ends."""
    near = [k * 64 + more for k, more in ((0, 0), (1, -1), (1, 0), (1, 1), (5, -1), (9, 0), (9, 48), (3, 15))]
    return [*near, *rng.integers(0, longest, 8).tolist()]


@gpu
@pytest.mark.parametrize(("H", "N"), SHAPES)
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 100, 128])
def test_prefixes_that_end_anywhere(
    rng: np.random.Generator, library: Library, H: int, N: int, page_size: int | None
) -> None:
    inputs = make_inputs(rng, offsets(rng, 2000), N=N, H=H, page_size=page_size)
    for is_planned in (False, True):
        assert_accurate(inputs, *compute(library, inputs, is_planned=is_planned, **OPTIONS))


@gpu
@pytest.mark.parametrize(("H", "N"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out_dtype", [None, np.float32])
def test_trees_of_any_size(
    rng: np.random.Generator, library: Library, H: int, N: int, form: str, out_dtype: Any
) -> None:
    prefixes = offsets(rng, 9000)
    counts = rng.integers(0, N + 1, len(prefixes)).tolist()
    dtype = np.float16 if rng.integers(2) else bfloat16
    inputs = make_inputs(rng, prefixes, N=N, H=H, num_nodes=counts, page_size=64, form=form, dtype=dtype)
    assert_accurate(inputs, *compute(library, inputs, out_dtype=out_dtype, **OPTIONS))


@gpu
@pytest.mark.parametrize("batch", [1, 2, 8, 33])
@pytest.mark.parametrize("length", [64 * 63, 64 * 64 - 1, 8192, 8209, 8255])
def test_bands_and_splits(rng: np.random.Generator, library: Library, batch: int, length: int) -> None:
    inputs = make_inputs(rng, [length] * batch, N=65, H=8, page_size=64)
    got = compute(library, inputs, **OPTIONS)
    assert_accurate(inputs, *got)
    for again, first in zip(compute(library, inputs, **OPTIONS), got, strict=True):
        assert same_bits(again[..., None], first[..., None]).all()


@gpu
def test_rising_weights(rng: np.random.Generator, library: Library) -> None:
    inputs = rising(rng, make_inputs(rng, [1000, 30, 64], N=65, H=8, page_size=64), 1.5)
    assert_accurate(inputs, *compute(library, inputs, **OPTIONS))


@gpu
def test_chains_see_all_before_them(rng: np.random.Generator, library: Library) -> None:
    inputs = chains(make_inputs(rng, [500, 63, 0, 8000], N=130, H=4, page_size=64))
    assert_accurate(inputs, *compute(library, inputs, **OPTIONS))


@gpu
def test_schedules_of_trees_of_other_sizes(rng: np.random.Generator, library: Library) -> None:
    """Where one is read by slot and the other by path, and where both are by slot, of other lengths."""
    batches = [([2000, 700], 65), ([2010, 64], 64), ([1999], 1), ([2040, 640], 5), ([64, 63], 65)]
    made = None
    runs, wanted = [], []
    for prefixes, slots in batches:
        inputs = make_inputs(rng, prefixes, N=slots, H=16, page_size=64)
        if made is None:
            made = plan_for(library, inputs, max_prefix_length=3000, **OPTIONS)
        runs.append(Run(library, inputs))
        wanted.append(runs[-1](made))
        assert_accurate(inputs, *wanted[-1])
    assert made is not None
    for other in runs:
        keys = {
            name: array for name, array in other.given.items() if name not in ("q_nope", "q_pe", "sm_scale")
        }
        made.schedule(**keys)
        for run, want in zip(runs, wanted, strict=True):
            assert_same(run(made, is_scheduled=True), want)


@gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_trees_that_are_wrong(rng: np.random.Generator, library: Library, page_size: int) -> None:
    """Slots that are not in use, and paths that are too deep, make a request NaN and no other."""
    inputs = make_inputs(rng, [300, 40, 300], N=40, H=1, num_nodes=[40, 33, 40], page_size=page_size)
    want = compute(library, inputs, **OPTIONS)
    for bit in (33, 39, 63):  # in use by nobody, the last of all, and behind all
        bits = inputs.tree.ancestor_bits.copy()
        bits[1, 5, bit // 32] |= np.uint32(1 << bit % 32)
        wrong = replace(inputs, tree=replace(inputs.tree, ancestor_bits=bits))
        assert_only_request_1_is_nan(inputs, compute(library, wrong, **OPTIONS), want)
    deep = np.array(inputs.tree.parents)
    deep[[0, 2]] = np.minimum(np.arange(-1, 39), 0)
    deep[1] = np.arange(-1, 39)
    tree = link(deep, inputs.tree.token_ids, inputs.tree.num_nodes, inputs.prefix_lengths)
    want = compute(library, replace(inputs, tree=tree), **OPTIONS)
    shallow = replace(inputs, tree=replace(tree, max_depth=5))
    assert_only_request_1_is_nan(inputs, compute(library, shallow, **OPTIONS), want)


def assert_only_request_1_is_nan(inputs: CacheInputs, got: Any, want: Any) -> None:
    """All of its rows are in one tile, and the others have the bits that they have anyway."""
    used = int(inputs.tree.num_nodes[1])
    for each, before in zip(got, want, strict=True):
        assert np.isnan(each[1, :used].astype(np.float32)).all()
        np.testing.assert_array_equal(each[[0, 2]], before[[0, 2]])
