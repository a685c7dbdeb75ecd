"""Splits that the two blocks of a cluster merge, on a device: accuracy, and equality with other merges.

Blocks do so where all tiles have two splits or one, and there are two blocks for each tile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    FORMS,
    NO_PAGE,
    CacheInputs,
    arguments_of,
    assert_accurate,
    assert_nodes_equal_decoding,
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
from numpy.typing import NDArray

from inputs import link
from numba_ddtree import ArgumentError, DraftTree
from numba_ddtree.cuda_target import cuda
from numba_ddtree.devices import multiprocessors
from numba_ddtree.tree_attention.hopper import workers
from numba_ddtree.tree_attention.work import TILE_ROWS

pytestmark = pytest.mark.gpu

SPLIT = 1024  # keys
OPTIONS: dict[str, Any] = {"kernel": "hopper", "split_keys": SPLIT}
SHAPES = [(64, 9), (16, 65), (128, 5), (64, 1), (128, 1), (1, 65), (3, 40), (20, 7)]  # H, N
NEAR_SPLIT = [SPLIT - 6, SPLIT - 4, SPLIT - 1, SPLIT]  # prefixes after which chains cross the boundary
RUNS = 20


@pytest.fixture
def library() -> Library:
    return hopper_library()


def tiles_of(inputs: CacheInputs) -> int:
    """Count the tiles that have nodes in use."""
    rows = inputs.tree.num_nodes * inputs.queries.shape[2]
    return int((-(-rows // TILE_ROWS)).sum())


def requests_of(inputs: CacheInputs, requests: NDArray[np.int64]) -> CacheInputs:
    """Take requests of a batch, in any order and any number of times."""
    tree = inputs.tree
    chosen: dict[str, Any] = {
        "queries": inputs.queries[requests],
        "tree": DraftTree(
            **{name: array[requests] for name, array in tree.arrays().items()}, max_depth=tree.max_depth
        ),
        "prefix_lengths": inputs.prefix_lengths[requests],
    }
    if inputs.paging:
        chosen["paging"] = {"block_table": inputs.paging["block_table"][requests]}
    else:
        chosen["cache"] = inputs.cache[requests]
    return replace(inputs, **chosen)


def compute_in_pairs(
    library: Library, inputs: CacheInputs, **options: Any
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Run what has two blocks for each tile."""
    assert 0 < 2 * tiles_of(inputs) <= workers(), "the test's own tiles are too many"
    return compute(library, inputs, **(OPTIONS | options))


def assert_as_among_many(library: Library, inputs: CacheInputs, **options: Any) -> None:
    """Check results, and that copies of the requests have their bits in batches too large for pairs."""
    got = compute_in_pairs(library, inputs, **options)
    assert_accurate(inputs, *got)
    tiles = tiles_of(inputs)
    # Fewer tiles than workers, all of them whole; and more, of which the rest has splits.
    for copies in (workers() // (2 * tiles) + 1, workers() // tiles + 1):
        requests = np.tile(np.arange(len(inputs.prefix_lengths)), copies)
        many = compute(library, requests_of(inputs, requests), **(OPTIONS | options))
        for each, array in zip(many, got, strict=True):
            assert same_bits(each[..., None], array[requests][..., None]).all(), f"{copies} copies"


# Accuracy.


@pytest.mark.parametrize(("H", "N"), SHAPES)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
@pytest.mark.parametrize("page_size", [None, 64, 5])
def test_both_splits_of_a_request(
    rng: np.random.Generator,
    library: Library,
    H: int,
    N: int,
    dtype: Any,
    out_dtype: Any,
    page_size: int | None,
) -> None:
    form = str(rng.choice(FORMS))
    inputs = make_inputs(rng, [1500], N=N, H=H, dtype=dtype, page_size=page_size, form=form)
    for is_planned in (False, True):
        got = compute_in_pairs(
            library, inputs, is_planned=is_planned, is_fused=bool(rng.integers(2)), out_dtype=out_dtype
        )
        assert_accurate(inputs, *got)


@pytest.mark.parametrize("prefix", [SPLIT, SPLIT + 1, SPLIT + 63, SPLIT + 64, 1500, 2 * SPLIT - 9])
def test_second_splits_of_any_length(rng: np.random.Generator, library: Library, prefix: int) -> None:
    for page_size in (None, 64):
        inputs = make_inputs(rng, [prefix], N=9, H=64, page_size=page_size)
        assert_as_among_many(library, inputs)


@pytest.mark.parametrize(
    ("batch", "H", "N", "prefix"), [(1, 64, 65, 2048), (7, 64, 9, 1500), (3, 16, 65, 1000), (60, 64, 1, 2048)]
)
@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
def test_the_fastest_splits(
    rng: np.random.Generator,
    library: Library,
    batch: int,
    H: int,
    N: int,
    prefix: int,
    page_size: int | None,
    out_dtype: Any,
) -> None:
    inputs = make_inputs(rng, [prefix] * batch, N=N, H=H, page_size=page_size)
    for is_planned in (False, True):
        got = compute(
            library, inputs, kernel="hopper", split_keys="fastest", is_planned=is_planned, out_dtype=out_dtype
        )
        assert_accurate(inputs, *got)


# Equality with splits that are merged otherwise.


@pytest.mark.parametrize(("H", "N"), SHAPES)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
@pytest.mark.parametrize("page_size", [None, 64])
def test_a_request_has_the_bits_of_its_copies_in_a_large_batch(
    rng: np.random.Generator,
    library: Library,
    H: int,
    N: int,
    dtype: Any,
    out_dtype: Any,
    page_size: int | None,
) -> None:
    inputs = make_inputs(rng, [1500], N=N, H=H, dtype=dtype, page_size=page_size)
    assert_as_among_many(library, inputs, out_dtype=out_dtype, is_planned=bool(rng.integers(2)))


@pytest.mark.parametrize(("H", "N"), [(64, 9), (16, 33), (128, 5), (1, 64), (3, 40), (20, 17)])
@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("page_size", [None, 64])
def test_tiles_of_rows_with_one_split_and_with_two(
    rng: np.random.Generator, library: Library, H: int, N: int, is_chain: bool, page_size: int | None
) -> None:
    inputs = make_inputs(rng, NEAR_SPLIT, N=N, H=H, page_size=page_size)
    assert_as_among_many(library, chains(inputs) if is_chain else inputs)


@pytest.mark.parametrize(("H", "N"), [(64, 9), (16, 33), (3, 40)])
@pytest.mark.parametrize("page_size", [1, 64])
def test_nodes_near_the_boundary_equal_decoding_alone(
    rng: np.random.Generator, library: Library, H: int, N: int, page_size: int
) -> None:
    inputs = chains(make_inputs(rng, NEAR_SPLIT, N=N, H=H, page_size=16))
    assert 2 * tiles_of(inputs) <= workers()
    assert_nodes_equal_decoding(
        library, rng, inputs, page_size=page_size, other_page_size=None, max_prefix_length=1500, **OPTIONS
    )


@pytest.mark.parametrize(("H", "N"), [(64, 9), (16, 17), (128, 5), (2, 33)])
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("page_size", [None, 64])
def test_requests_with_one_split_and_with_two(
    rng: np.random.Generator, library: Library, H: int, N: int, dtype: Any, page_size: int | None
) -> None:
    prefixes = rng.permutation([1500, 300, 0, SPLIT - 1, 2 * SPLIT - N, SPLIT - N]).tolist()
    for counts in (None, rng.permutation([0, 1, 2, N // 2, N - 1, N]).tolist()):
        inputs = make_inputs(rng, prefixes, N=N, H=H, num_nodes=counts, dtype=dtype, page_size=page_size)
        assert_as_among_many(library, inputs)


@pytest.mark.parametrize("counts", [[9, 4], [0, 9], [1, 0], [8, 0]])
@pytest.mark.parametrize("H", [64, 16])
def test_slots_that_are_not_in_use(
    rng: np.random.Generator, library: Library, counts: list[int], H: int
) -> None:
    for page_size in (None, 64):
        inputs = make_inputs(rng, [1500, 1100], N=9, H=H, num_nodes=counts, page_size=page_size)
        assert_as_among_many(library, inputs)


def test_no_nodes(rng: np.random.Generator, library: Library) -> None:
    inputs = make_inputs(rng, [1500, 1100], N=9, H=64, num_nodes=[0, 0], page_size=64)
    assert_accurate(inputs, *compute(library, inputs, **OPTIONS))


def test_a_request_of_three_splits_changes_no_other(rng: np.random.Generator, library: Library) -> None:
    """Beside it, no tiles are paired."""
    inputs = make_inputs(rng, [1500, 3000, 1020], N=9, H=64, page_size=64)
    want = compute(library, inputs, max_prefix_length=3000, **OPTIONS)
    assert_accurate(inputs, *want)
    requests = np.array([0, 2])
    got = compute_in_pairs(library, requests_of(inputs, requests), max_prefix_length=3000)
    for each, array in zip(got, want, strict=True):
        assert same_bits(each[..., None], array[requests][..., None]).all()


@pytest.mark.parametrize("bits", [0.3, 2, 30])
def test_scores_that_rise_from_split_to_split(
    rng: np.random.Generator, library: Library, bits: float
) -> None:
    """Second splits of some, and of nearly all weight."""
    inputs = make_inputs(rng, [1500, SPLIT - 4, 2 * SPLIT - 9], N=9, H=64, page_size=64)
    assert_as_among_many(library, rising(rng, inputs, bits))


# The most tiles that are paired.


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
def test_as_many_requests_as_there_are_clusters_and_one_more(
    rng: np.random.Generator, library: Library, page_size: int | None, out_dtype: Any
) -> None:
    most = multiprocessors() // 2
    lengths = rng.integers(SPLIT, 2 * SPLIT - 1, most + 1)
    inputs = make_inputs(rng, lengths.tolist(), N=1, H=64, page_size=page_size)
    options = OPTIONS | {"max_prefix_length": 2 * SPLIT - 1, "out_dtype": out_dtype}
    want = compute(library, inputs, **options)
    assert_accurate(inputs, *want)
    for count in (most, most - 1):
        fewer = requests_of(inputs, np.arange(count))
        assert tiles_of(fewer) == count
        got = compute_in_pairs(library, fewer, **options)
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[..., None], array[:count][..., None]).all(), f"{count} requests"


@pytest.mark.parametrize("prefix", [SPLIT - 4, 1500])
def test_as_many_nodes_as_there_are_clusters_and_one_more(
    rng: np.random.Generator, library: Library, prefix: int
) -> None:
    most = multiprocessors() // 2
    inputs = make_inputs(rng, [prefix], N=most + 1, H=64, page_size=64)
    want = compute(library, inputs, **OPTIONS)
    assert_accurate(inputs, *want)
    for count in (most, most - 1):
        tree = link(
            inputs.tree.parents, inputs.tree.token_ids, np.array([count], np.int32), inputs.prefix_lengths
        )
        fewer = replace(inputs, tree=tree)
        assert tiles_of(fewer) == count
        got = compute_in_pairs(library, fewer)
        assert_accurate(fewer, *got)
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[:, :count, ..., None], array[:, :count, ..., None]).all(), f"{count} nodes"


# Bad values on a device.


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize(
    "prefixes", [[1500, 1300], [1500, 300], [SPLIT - 4, 1300], [SPLIT - 1, 300], [SPLIT - 2, SPLIT - 1]]
)
def test_nodes_deeper_than_said_give_nan_and_leave_other_requests_alone(
    rng: np.random.Generator, library: Library, H: int, prefixes: list[int]
) -> None:
    inputs = make_inputs(rng, prefixes, N=9, H=H, page_size=64)
    parents = np.stack([np.arange(-1, 8), np.minimum(np.arange(-1, 8), 0)]).astype(
        np.int32
    )  # a chain, a star
    tree = link(parents, inputs.tree.token_ids, None, inputs.prefix_lengths)
    want = compute_in_pairs(library, replace(inputs, tree=tree))
    shallow = replace(inputs, tree=replace(tree, max_depth=1))
    for got, before in zip(compute_in_pairs(library, shallow), want, strict=True):
        np.testing.assert_array_equal(got[1], before[1])
        np.testing.assert_array_equal(got[0, :2], before[0, :2])
        assert np.isnan(got[0, 2:]).all()


def test_invalid_lengths_give_nan_and_leave_the_others_alone(
    rng: np.random.Generator, library: Library
) -> None:
    for page_size in (None, 64):
        inputs = make_inputs(rng, [1500] * 6, N=9, H=64, num_nodes=[9, 4, 9, 9, 9, 9], page_size=page_size)
        want = compute_in_pairs(library, inputs, max_prefix_length=1500)
        lengths = inputs.prefix_lengths.copy()
        lengths[1:5] = -1, 10**6, 2**31 - 1, -(2**31)
        wrong = replace(inputs, prefix_lengths=lengths)
        for got, before in zip(compute_in_pairs(library, wrong, max_prefix_length=1500), want, strict=True):
            np.testing.assert_array_equal(got[[0, 5]], before[[0, 5]])
            assert np.isnan(got[1, :4]).all()
            assert np.isnan(got[2:5]).all()


@pytest.mark.parametrize("block", [3, SPLIT // 16 + 3])
def test_pages_out_of_range_give_nan_and_leave_the_others_alone(
    rng: np.random.Generator, library: Library, block: int
) -> None:
    """Of the first split, and of the second."""
    inputs = make_inputs(rng, [1500] * 3, N=9, H=64, page_size=16)
    want = compute_in_pairs(library, inputs)
    for page in (NO_PAGE, -1, len(inputs.cache), -(2**31)):
        table = inputs.paging["block_table"].copy()
        table[1, block] = page
        wrong = replace(inputs, paging={"block_table": table})
        for got, before in zip(compute_in_pairs(library, wrong), want, strict=True):
            np.testing.assert_array_equal(got[[0, 2]], before[[0, 2]])
            assert np.isnan(got[1]).all()
        with pytest.raises(ArgumentError, match=rf"got {page}; expected a page from 0 to"):
            compute_in_pairs(library, wrong, validate=True)


# Runs that come again.


REPEATED = [
    ([1500], 64, 9, SPLIT),
    ([1500, 300, SPLIT - 4], 16, 33, SPLIT),
    ([2 * SPLIT - 1] * 60, 64, 1, SPLIT),
    ([2048], 64, 65, 1088),
    ([2048], 64, 65, "fastest"),
]


@pytest.mark.parametrize(("prefixes", "H", "N", "split_keys"), REPEATED)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_results_repeat_to_the_bit(
    rng: np.random.Generator,
    library: Library,
    prefixes: list[int],
    H: int,
    N: int,
    split_keys: Any,
    dtype: Any,
) -> None:
    inputs = make_inputs(rng, prefixes, N=N, H=H, dtype=dtype, page_size=64)
    made = plan_for(library, inputs, kernel="hopper", split_keys=split_keys)
    run = Run(library, inputs)
    want = run(made)
    assert_accurate(inputs, *want)
    for _ in range(RUNS):
        assert_same(run(made), want)


@pytest.mark.parametrize(("prefixes", "H", "N", "split_keys"), REPEATED)
def test_runs_that_follow_at_once_have_the_same_bits(
    rng: np.random.Generator, library: Library, prefixes: list[int], H: int, N: int, split_keys: Any
) -> None:
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=64)
    made = plan_for(library, inputs, kernel="hopper", split_keys=split_keys)
    given = arguments_of(library, inputs)
    results = [made.run(**given) for _ in range(RUNS)]
    cuda.synchronize()
    first, *others = ([library.get(array) for array in outputs] for outputs in results)
    assert_accurate(inputs, *first)
    for each in others:
        assert_same(each, first)
