"""Choosing tokens in Numba's simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from choose_checks import (
    DTYPES,
    LOGIT_KINDS,
    NOISE_EDGES,
    check_bad_requests,
    check_choose,
    check_close_scores,
    check_counts_beyond_the_slots,
    check_cuts,
    check_noise,
    make_cut_cases,
    make_logits,
    make_settings,
)
from kernel_checks import Library, numba_library, numpy_library
from ml_dtypes import bfloat16

from numba_ddtree.cuda_target import SIMULATED

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
    # The low words of sums of 64 bits wrap around.
    pytest.mark.filterwarnings("ignore:.*overflow encountered in scalar add:RuntimeWarning"),
]


@pytest.fixture
def device() -> Library:
    return numba_library()


def test_noise_is_the_references(rng: np.random.Generator) -> None:
    words = rng.integers(0, 2**32, 84, np.uint64).astype(np.uint32)
    check_noise(numba_library(), np.concatenate([NOISE_EDGES, words]), blocks=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_token(rng: np.random.Generator, device: Library, dtype: Any) -> None:
    kinds = rng.permutation(LOGIT_KINDS)
    for V in (1, 9, 1032):  # with less than a vector of eight a thread, and with more than four
        logits = np.concatenate([make_logits(rng, kind, (1, 2, V), dtype) for kind in kinds])
        check_choose(device, logits)
        words = rng.integers(0, 2**32, (len(kinds), -(-V // 32)), np.uint64).astype(np.uint32)
        check_choose(device, logits, token_bitmask=words)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [5, 37, 296])
def test_draws(rng: np.random.Generator, device: Library, dtype: Any, V: int) -> None:
    B, N = len(LOGIT_KINDS), 2
    logits = np.concatenate([make_logits(rng, kind, (1, N, V), dtype) for kind in LOGIT_KINDS])
    given = make_settings(rng, B, N, V)
    del given["top_k"], given["top_p"], given["token_bitmask"]
    check_choose(device, logits, **given)
    check_choose(device, logits, temperature=0.8, positions=given["positions"], seed=2**63 + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [5, 296])
def test_draws_from_what_filters_leave(rng: np.random.Generator, device: Library, dtype: Any, V: int) -> None:
    B, N = len(LOGIT_KINDS), 1
    logits = np.concatenate([make_logits(rng, kind, (1, N, V), dtype) for kind in LOGIT_KINDS])
    given = make_settings(rng, B, N, V)
    check_choose(device, logits, **given)
    positions = given["positions"]
    check_choose(device, logits, temperature=1.0, positions=positions, top_k=int(rng.integers(1, V + 1)))
    check_choose(device, logits, temperature=1.0, positions=positions, top_p=float(rng.random()))


def test_draws_of_scores_too_close_for_float32(rng: np.random.Generator) -> None:
    check_close_scores(numba_library(), rng, nodes=3)


def test_cuts(rng: np.random.Generator) -> None:
    check_cuts(numba_library(), **make_cut_cases(rng, 8, 250))


def test_bad_device_arrays_give_no_token(rng: np.random.Generator) -> None:
    check_bad_requests(numba_library(), rng, 40)
    check_counts_beyond_the_slots(numba_library())


def test_host_arrays(rng: np.random.Generator) -> None:
    logits = make_logits(rng, "model", (2, 2, 100), bfloat16)
    check_choose(numpy_library(), logits)
    check_choose(numpy_library(), logits, **make_settings(rng, 2, 2, 100))


@pytest.mark.parametrize("library", [numba_library(), numpy_library()], ids=lambda library: library.name)
def test_an_empty_batch(library: Library) -> None:
    logits = np.zeros((0, 3, 40), np.float32)
    assert check_choose(library, logits).shape == (0, 3)
    positions = np.zeros((0, 3), np.int32)
    assert check_choose(library, logits, temperature=1.0, positions=positions, top_k=3).shape == (0, 3)
