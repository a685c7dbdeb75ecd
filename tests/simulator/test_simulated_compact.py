"""Cache compaction in Numba's simulator, where a tile has 32 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, check_compaction, numba_library, numpy_library
from ml_dtypes import bfloat16

from inputs import bad_compaction, compaction_past_the_pages, make_compaction
from numba_ddtree import ArgumentError
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.kv_compact import compact_kv

PAGINGS = ("contiguous", "block_table", "kv_indptr")

pytestmark = pytest.mark.skipif(not SIMULATED, reason="the simulator is off")


@pytest.fixture(params=["numba", "numpy"])
def library(request: pytest.FixtureRequest) -> Library:
    return numba_library() if request.param == "numba" else numpy_library()


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("planned", [False, True])
def test_all_layers_of_all_caches_move(
    rng: np.random.Generator, library: Library, paging: str, planned: bool
) -> None:
    rows = (((2,), 24, bfloat16), ((), 3, np.float32), ((), 7, np.uint8))
    given = make_compaction(rng, B=2, paging=paging, page_size=3, rows=rows)
    check_compaction(library, given, planned=planned)


def test_paths_longer_than_a_tile_move(rng: np.random.Generator) -> None:
    for L in (31, 32, 70):
        given = make_compaction(rng, B=1, N=80, L=L, longest=2, rows=[((), 4, np.float32)])
        given.arrays["accepted_indices"][0] = [0, *range(2, L + 1), 79]
        given.arrays["accept_length"][0] = L + 1
        check_compaction(numba_library(), given)


def test_rows_wider_than_a_block_move(rng: np.random.Generator) -> None:
    for D in (32 * 16, 32 * 16 + 4, 33):
        check_compaction(numba_library(), make_compaction(rng, B=1, rows=[((), D, np.uint8)]))


@pytest.mark.parametrize("paging", PAGINGS)
def test_rows_that_have_no_place_are_left_alone(rng: np.random.Generator, paging: str) -> None:
    for _ in range(4):
        check_compaction(numba_library(), bad_compaction(rng, paging))


@pytest.mark.parametrize("paging", ["block_table", "kv_indptr"])
def test_no_request_has_the_pages_of_the_next(paging: str) -> None:
    check_compaction(numba_library(), compaction_past_the_pages(paging))


def test_rows_of_any_strides_move(rng: np.random.Generator) -> None:
    given = make_compaction(rng, B=2, rows=[((2,), 32, np.uint8)])
    given.arrays["accepted_indices"][0, :2] = [0, 3]
    given.arrays["accept_length"][0] = 2
    (cache,) = given.caches
    arrays = {name: cuda.to_device(array) for name, array in given.arrays.items()}
    for part in (slice(0, 16), slice(4, 24), slice(1, 17), slice(0, 20), slice(0, 6), slice(8, 24)):
        want, on_device = cache.copy(), cuda.to_device(cache)
        compact_kv(want[..., part], **given.arrays, backend="numpy")
        compact_kv(on_device[..., part], **arrays)
        np.testing.assert_array_equal(on_device.copy_to_host(), want)


def test_caches_whose_rows_overlap_are_refused(rng: np.random.Generator) -> None:
    given = make_compaction(rng, B=2, rows=[((), 4, np.float32)])
    cache = cuda.to_device(given.caches[0])
    shape = cache.shape
    overlapping: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        (shape, (0, 16, 4)),
        (shape, (16, 16, 4)),
        ((*shape[:2], 2), (16 * shape[1], 16, 8)),
    ]
    for wrong_shape, strides in overlapping:
        wrong: Any = cuda.to_device(given.caches[0])
        wrong._ary = np.lib.stride_tricks.as_strided(wrong._ary, wrong_shape, strides)
        with pytest.raises(ArgumentError, match=r"^caches: .* with strides"):
            compact_kv(wrong, **{name: cuda.to_device(array) for name, array in given.arrays.items()})


def test_a_page_table_that_points_outside_is_found_on_request(rng: np.random.Generator) -> None:
    given = make_compaction(rng, B=2, paging="block_table")
    given.arrays["accept_length"][:] = 2
    given.arrays["accepted_indices"][:, :2] = [0, 3]
    arrays = {name: cuda.to_device(array) for name, array in given.arrays.items()}
    cache = cuda.to_device(given.caches[0])
    compact_kv(cache, **arrays, validate=True)
    arrays["block_table"] = cuda.to_device(np.full_like(given.arrays["block_table"], 10**6))
    with pytest.raises(ArgumentError, match=r"^block_table\[0, \d\]: got 1000000; expected a page from 0"):
        compact_kv(cache, **arrays, validate=True)


def test_an_empty_batch_moves_nothing() -> None:
    none = np.zeros(0, np.int32)
    compact_kv(np.zeros((0, 4, 2), np.float32), none, np.zeros((0, 3), np.int32), none)
