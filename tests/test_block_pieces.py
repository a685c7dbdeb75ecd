"""Tree attention in 99 KB of shared memory: the results of the kernel for more of it, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    PAGE_SIZES,
    CacheInputs,
    assert_accurate,
    assert_nodes_equal_decoding,
    compute,
    make_inputs,
    random_inputs,
    same_bits,
    workspace_limits,
)
from kernel_checks import Library
from libraries import torch_library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import numba_ddtree
from numba_ddtree.devices import SHARED_MEMORY_VARIABLE, shared_memory_limit
from numba_ddtree.tree_attention import block_pieces, tensor_cores, whole_blocks

pytestmark = pytest.mark.gpu

LIMIT = 99 * 1024  # of compute capabilities 8.6, 8.9 and 12.0
SPLIT = 256

Results = tuple[NDArray[Any], NDArray[np.float32]]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Arrays of a device with little shared memory."""
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(LIMIT))
    assert tensor_cores.module_for(shared_memory_limit()) is block_pieces
    return torch_library()


@pytest.fixture
def compute_in_whole_blocks(library: Library, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """Run the kernel for more shared memory, where the device has it."""

    def run(inputs: CacheInputs, **options: Any) -> Results:
        with monkeypatch.context() as patch:
            patch.delenv(SHARED_MEMORY_VARIABLE)
            limit = shared_memory_limit()
            if tensor_cores.module_for(limit) is not whole_blocks:
                pytest.skip(
                    f"this device has {limit} bytes of shared memory a block, too few to compare with"
                )
            return compute(library, inputs, **options)

    return run


def assert_same(got: Results, want: Results) -> None:
    for array, other in zip(got, want, strict=True):
        assert same_bits(array[..., None], other[..., None]).all()


@pytest.mark.parametrize("batch", range(16))
def test_random_requests(
    rng: np.random.Generator,
    library: Library,
    compute_in_whole_blocks: Callable[..., Results],
    batch: int,
) -> None:
    inputs, options = random_inputs(rng, 16)
    options |= {"kernel": "tensor_cores", "is_planned": batch % 2 == 1}
    got = compute(library, inputs, **options)
    assert_accurate(inputs, *got)
    assert_same(got, compute_in_whole_blocks(inputs, **options))


@pytest.mark.parametrize(
    ("prefixes", "H", "N"),
    [
        ([8192], 64, 65),
        ([8191, 8736, 0, 3333], 64, 9),
        ([4096] * 3, 16, 1),
        ([1000], 16, 257),
        ([300], 1, 1025),
        ([200_000, 5], 8, 9),
    ],
)
def test_real_sizes(
    rng: np.random.Generator,
    library: Library,
    compute_in_whole_blocks: Callable[..., Results],
    prefixes: list[int],
    H: int,
    N: int,
) -> None:
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=64)
    got = compute(library, inputs, kernel="tensor_cores")
    assert_accurate(inputs, *got)
    assert_same(got, compute_in_whole_blocks(inputs, kernel="tensor_cores"))


@pytest.mark.parametrize("H", [1, 5, 16, 31, 32, 33, 63, 65, 96, 128])
def test_halves_of_tiles(
    rng: np.random.Generator, library: Library, compute_in_whole_blocks: Callable[..., Results], H: int
) -> None:
    """Rows that end in the first half of a tile, at its end, and in the second half."""
    for N in (1, 2, 3, 8):
        inputs = make_inputs(rng, [70, 0, 129, 5], N=N, H=H, num_nodes=[N, 1, N, 0], page_size=16)
        got = compute(library, inputs, kernel="tensor_cores", split_keys=64)
        assert_accurate(inputs, *got)
        assert_same(got, compute_in_whole_blocks(inputs, kernel="tensor_cores", split_keys=64))


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize(("H", "N"), [(64, 9), (3, 40), (16, 17), (128, 3)])
def test_nodes_equal_decoding_alone(
    rng: np.random.Generator, library: Library, dtype: Any, H: int, N: int
) -> None:
    prefixes = rng.permutation([0, 1, 63, 64, 65, SPLIT - 9, SPLIT - 1, SPLIT, 700]).tolist()
    inputs = make_inputs(rng, prefixes, N=N, H=H, dtype=dtype, page_size=PAGE_SIZES[rng.integers(10)])
    assert_nodes_equal_decoding(
        library,
        rng,
        inputs,
        page_size=64,
        other_page_size=1,
        max_prefix_length=1000,
        kernel="tensor_cores",
        split_keys=SPLIT,
    )


@pytest.mark.parametrize(("H", "N"), [(1, 33), (2, 33), (8, 17), (12, 17), (32, 5)])
def test_nodes_that_share_blocks(
    rng: np.random.Generator,
    library: Library,
    compute_in_whole_blocks: Callable[..., Results],
    H: int,
    N: int,
) -> None:
    """As many as share a block in half a tile, where other nodes share one in a whole tile."""
    prefixes = [64 + start for start in (0, 1, 15, 16, 17, 32, 47, 48, 63)]
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=16)
    options: dict[str, Any] = {"kernel": "tensor_cores", "split_keys": 64, "max_prefix_length": 1000}
    got = compute(library, inputs, **options)
    assert_accurate(inputs, *got)
    assert_same(got, compute_in_whole_blocks(inputs, **options))
    assert_nodes_equal_decoding(library, rng, inputs, page_size=1, other_page_size=64, **options)


def test_tail(rng: np.random.Generator, library: Library) -> None:
    inputs = make_inputs(rng, [0, 63, 64, 5000, 130], N=65, H=4, page_size=64)
    tail = compute(library, inputs, function=numba_ddtree.tree_tail_attention, kernel="tensor_cores")
    assert_accurate(inputs, *tail, sees_prefix=False)


def test_any_number_of_tiles_with_slots_agrees(rng: np.random.Generator, library: Library) -> None:
    inputs = make_inputs(rng, [1500, 0, 700, 64], N=17, H=16, page_size=64)
    options: dict[str, Any] = {"kernel": "tensor_cores", "split_keys": 128, "is_planned": True}
    want = compute(library, inputs, **options)
    for limit in workspace_limits(4, 17, 16, 1500, 128):
        assert_same(compute(library, inputs, workspace_limit=limit, **options), want)


def test_invalid_requests_give_nan_and_leave_the_others_alone(
    rng: np.random.Generator, library: Library
) -> None:
    inputs = make_inputs(rng, [200] * 4, N=9, H=12, page_size=16)
    options: dict[str, Any] = {"kernel": "tensor_cores", "split_keys": 64, "max_prefix_length": 200}
    want = compute(library, inputs, **options)
    lengths, table = inputs.prefix_lengths.copy(), inputs.paging["block_table"].copy()
    bits = inputs.tree.ancestor_bits.copy()
    lengths[0], table[1, 3], bits[2] = -1, -1, 0xFFFFFFFF
    wrong = replace(
        inputs,
        prefix_lengths=lengths,
        paging={"block_table": table},
        tree=replace(inputs.tree, ancestor_bits=bits),
    )
    for got, before in zip(compute(library, wrong, **options), want, strict=True):
        assert np.isnan(got[:3]).all()
        np.testing.assert_array_equal(got[3], before[3])
