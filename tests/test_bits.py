"""Order-preserving codes: the model keeps the order, and the device functions are the model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from bits_checks import (
    EDGE_PATHS,
    EDGES,
    WORDS,
    check_keys,
    check_paths,
    order_key_model,
    path_code_model,
    random_path,
    rank_code_model,
)
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import numba_library


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_keys_are_ordered_as_scores_are(left: float, right: float) -> None:
    if left != right:
        assert (order_key_model(left) < order_key_model(right)) == (left < right)
    else:
        # Only the two zeros are equal and differ, and no score is a negative zero.
        assert order_key_model(left) == order_key_model(right) or left == 0


def test_no_score_has_the_key_of_no_offer() -> None:
    assert min(order_key_model(score) for score in EDGES) > -(2**63)


@given(st.integers(0, 2**15 - 2), st.integers(0, 2**15 - 2))
def test_codes_of_ranks_are_ordered_and_prefix_free(left: int, right: int) -> None:
    codes = rank_code_model(left), rank_code_model(right)
    assert (codes[0] < codes[1]) == (left < right)
    assert left == right or not codes[0].startswith(codes[1])


@given(st.integers(0, 2**32 - 1))
def test_codes_of_paths_fit_and_are_ordered_as_tuples_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    paths = [random_path(rng) for _ in range(12)]
    # Neighbours that share long beginnings, where order is decided late.
    paths += [(*path[:-1], path[-1] + 1) for path in paths] + [(*path[:60], 0) for path in paths]
    for left, right in itertools.combinations(paths, 2):
        codes = path_code_model(left), path_code_model(right)
        if codes[0] != codes[1]:
            assert (codes[0] < codes[1]) == (left < right)
        else:
            longer, shorter = sorted((left, right), key=len, reverse=True)
            assert longer[: len(shorter)] == shorter
            assert not any(longer[len(shorter) :])


def test_the_longest_code_fits() -> None:
    path = (1,) * 11 + (0,) * 53
    assert np.prod([rank + 1 for rank in path]) == 2048
    assert sum(len(rank_code_model(rank)) for rank in path) == 86 <= 32 * WORDS


@pytest.mark.gpu
def test_device_keys_are_the_model(rng: np.random.Generator) -> None:
    scores = np.concatenate([EDGES, -rng.exponential(size=4000) * 10.0 ** rng.integers(-300, 300, 4000)])
    check_keys(numba_library(), scores, blocks=128)


@pytest.mark.gpu
def test_device_codes_of_paths_are_the_model(rng: np.random.Generator) -> None:
    check_paths(numba_library(), EDGE_PATHS + [random_path(rng) for _ in range(4000)], blocks=128)
