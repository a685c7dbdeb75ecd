"""Cache compaction, the reference: accepted rows end right after the prefix, all others stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from numba_ddtree.refs.kv_compact import compact_kv


def random_paths(
    rng: np.random.Generator, B: int, N: int, L: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw accepted indices [B, L + 1], root first, rising, padded with -1, and their number."""
    lengths = rng.integers(0, min(L + 1, N) + 1, B)
    indices = np.full((B, L + 1), -1, np.int32)
    for request, length in enumerate(lengths):
        if length > 0:
            rest = rng.choice(np.arange(1, N), length - 1, replace=False)
            indices[request, :length] = [0, *sorted(rest)]
    return indices, lengths.astype(np.int32)


def expected(
    rows: NDArray[Any], prefixes: NDArray[np.int32], indices: NDArray[np.int32], lengths: NDArray[np.int32]
) -> NDArray[Any]:
    """Gather first, then write: no order of moves to get wrong."""
    moved = rows.copy()
    for request, prefix in enumerate(prefixes):
        accepted = indices[request, : lengths[request]]
        moved[request, prefix : prefix + len(accepted)] = rows[request, prefix + accepted]
    return moved


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 12), st.integers(0, 6), st.integers(0, 9))
def test_rows_move_in_a_contiguous_cache(seed: int, B: int, N: int, L: int, longest: int) -> None:
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, longest + 1, B).astype(np.int32)
    indices, lengths = random_paths(rng, B, N, L)
    cache = rng.normal(size=(B, longest + N + 2, 5)).astype(np.float32)
    want = expected(cache, prefixes, indices, lengths)
    compact_kv(cache, prefixes, indices, lengths)
    np.testing.assert_array_equal(cache, want)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 16, 128]), st.integers(1, 4))
def test_rows_move_across_pages(seed: int, page_size: int, B: int) -> None:
    rng = np.random.default_rng(seed)
    N, L, longest = 11, 6, 7
    prefixes = rng.integers(0, longest + 1, B).astype(np.int32)
    indices, lengths = random_paths(rng, B, N, L)
    pages_each = -(-(longest + N) // page_size)
    pages = B * pages_each + 3
    table = rng.permutation(pages)[: B * pages_each].reshape(B, pages_each).astype(np.int32)
    cache = rng.normal(size=(pages, page_size, 3)).astype(np.float32)
    want = cache.copy()
    logical = cache[table].reshape(B, pages_each * page_size, 3)
    moved = expected(logical, prefixes, indices, lengths)
    want[table] = moved.reshape(B, pages_each, page_size, 3)
    compact_kv(cache, prefixes, indices, lengths, table)
    np.testing.assert_array_equal(cache, want)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float64, np.uint8])
def test_rows_of_any_dtype_move_as_they_are(rng: np.random.Generator, dtype: type[np.generic]) -> None:
    prefixes, lengths = np.array([1, 0], np.int32), np.array([3, 1], np.int32)
    indices = np.array([[0, 2, 5], [0, -1, -1]], np.int32)
    cache = rng.integers(0, 256, (2, 8, 4)).astype(dtype)
    want = expected(cache, prefixes, indices, lengths)
    compact_kv(cache, prefixes, indices, lengths)
    assert cache.tobytes() == want.tobytes()


def test_a_finished_request_is_not_touched(rng: np.random.Generator) -> None:
    cache = np.full((2, 6, 2), np.nan, np.float32)
    cache[1] = rng.normal(size=(6, 2))
    before = cache.copy()
    # A length out of range too, since nothing of such a request is looked at.
    indices = np.full((2, 3), -1, np.int32)
    compact_kv(cache, np.array([10**6, 2], np.int32), indices, np.zeros(2, np.int32))
    np.testing.assert_array_equal(cache, before)
