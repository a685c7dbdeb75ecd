"""The best candidates: the reference against sums in exact arithmetic; the kernels on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import Library, numba_library
from libraries import LIBRARIES, side_stream
from ml_dtypes import bfloat16
from topk_checks import (
    DTYPES,
    ROW_KINDS,
    ULPS,
    assert_candidates,
    bad_rows,
    check_bits_in_any_batch,
    check_topk,
    make_logits,
    make_mask,
    make_rows,
    ulps_apart,
)

import numba_ddtree
from inputs import build
from numba_ddtree import ArgumentError, TreeStatus, draft_candidates
from numba_ddtree.device.candidate_scan import FIRST_TILES, STRIDE, first_maxima_of, strides_of
from numba_ddtree.device.candidates import HEADER, THREADS, capacity_of, shared_bytes_of
from numba_ddtree.draft_candidates import (
    TILE,
    DraftCandidates,
    best_pieces_per_row,
    draft_topk,
    draft_topk_workspace_shape,
)
from numba_ddtree.refs import draft_candidates as reference

ONE = np.ones(1, np.float32)


def host_topk(logits: Any, k: int, **options: Any) -> DraftCandidates:
    return draft_topk(logits, k, backend="numpy", **options)


def first_log_prob(values: list[float], temperature: float) -> float:
    """Log-prob of the largest of a few values, whose differences are exact."""
    best = max(values)
    others = [Fraction(value) - Fraction(best) for value in values]
    others.remove(Fraction(0))
    return -math.log1p(math.fsum(math.exp(other / Fraction(temperature)) for other in others))


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from([-np.inf, -1e30, -3.5, -0.0, 0.0, 1.0, 1.0000001, 40.0]), min_size=1, max_size=9
    ),
    st.integers(1, 9),
)
def test_reference_sorts_by_value_then_id(row: list[float], k: int) -> None:
    k = min(k, len(row))
    got = host_topk(np.array([[row]], np.float32), k)
    values = [float(np.float32(value)) for value in row]
    want = sorted(range(len(row)), key=lambda token: (-values[token], token))[:k]
    assert got.token_ids[0, 0].tolist() == want
    dead = [values[token] == -np.inf for token in want]
    assert np.isneginf(got.log_probs[0, 0]).tolist() == dead
    assert not np.isnan(got.log_probs).any()


@settings(max_examples=200)
@given(st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=8), st.sampled_from([0.25, 1.0, 3.0]))
def test_reference_is_right_near_zero(row: list[float], temperature: float) -> None:
    got = host_topk(np.array([[row]], np.float32), 1, temperature=temperature)
    want = np.array(first_log_prob(row, temperature))
    assert ulps_apart(got.log_probs[0, 0], want) <= ULPS if want else got.log_probs[0, 0, 0] == 0


def test_reference_is_log_softmax(rng: np.random.Generator) -> None:
    logits = make_rows(rng, "normal", 6, 400).reshape(2, 3, 400)
    got = host_topk(logits, 400, temperature=np.array([0.5, 2], np.float32))
    scaled = logits.astype(np.float64) / np.array([0.5, 2])[:, None, None]
    full = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(got.log_probs, np.take_along_axis(full, got.token_ids, -1), rtol=1e-6)
    np.testing.assert_allclose(np.exp(got.log_probs.astype(np.float64)).sum(axis=-1), 1, rtol=1e-6)


def test_masks_and_biases_come_before_the_temperature() -> None:
    logits = np.array([[[1, 2, 3, 4], [4, 3, 2, 1]]], np.float32)
    bias = np.array([0, 5, 0, -np.inf], np.float32)
    got = host_topk(logits, 4, temperature=2.0, bias=bias, token_bitmask=np.array([[0b1110]], np.uint32))
    assert got.token_ids.tolist() == [[[1, 2, 0, 3], [1, 2, 0, 3]]]
    for position, (best, second) in enumerate([(7, 3), (8, 2)]):
        total = math.exp(best / 2) + math.exp(second / 2)
        want = [best / 2 - math.log(total), second / 2 - math.log(total), -np.inf, -np.inf]
        np.testing.assert_allclose(got.log_probs[0, position], want, rtol=1e-6)


@pytest.mark.parametrize("V", [1, 31, 32, 33, 70])
def test_masks_are_little_bit_order(rng: np.random.Generator, V: int) -> None:
    allowed = rng.random((2, 3, V)) < 0.5
    words = np.zeros((2, 3, -(-V // 32)), np.uint32)
    for b, position, token in zip(*np.nonzero(allowed), strict=True):
        words[b, position, token // 32] |= np.uint32(1 << (token % 32))
    np.testing.assert_array_equal(reference.allowed_tokens(words, allowed.shape), allowed)
    np.testing.assert_array_equal(reference.allowed_tokens(words.view(np.int32), allowed.shape), allowed)
    shared = reference.allowed_tokens(words[:, 0], allowed.shape)
    np.testing.assert_array_equal(shared, np.repeat(allowed[:, :1], 3, axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_takes_16_bit_numbers_as_they_are(rng: np.random.Generator, dtype: Any) -> None:
    logits = make_logits(rng, 1, 4, 90, dtype)
    got, want = host_topk(logits, 9), host_topk(logits.astype(np.float32), 9)
    for array, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(array, other)


def test_rows_that_are_none_end_in_a_status_of_the_tree(rng: np.random.Generator) -> None:
    logits = bad_rows(rng, 2, 40)
    candidates = reference.draft_topk(logits, 5, ONE)
    assert np.isnan(candidates.log_probs[0, 1]).all()
    assert candidates.token_ids[0, 1].tolist() == [0, 1, 2, 3, 4]
    assert build(*candidates, 3).status.tolist() == [TreeStatus.NAN]
    empty = reference.draft_topk(np.full((1, 1, 9), -np.inf, np.float32), 3, ONE)
    assert np.isneginf(empty.log_probs).all()
    assert empty.token_ids.tolist() == [[[0, 1, 2]]]
    assert build(*empty, 3).status.tolist() == [TreeStatus.NO_CANDIDATE]
    assert np.isnan(reference.draft_topk(logits, 5, 0 * ONE).log_probs).all()


def test_results_go_into_the_arrays_given(rng: np.random.Generator) -> None:
    logits = make_logits(rng, 2, 3, 50)
    out = DraftCandidates(np.full((2, 3, 4), 7, np.float32), np.full((2, 3, 4), 7, np.int32))
    assert host_topk(logits, 4, out=out) is out
    assert_candidates(out, reference.draft_topk(logits, 4, np.ones(2, np.float32)))


V, L, B = 70, 2, 3
LOGITS = np.zeros((B, L, V), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": LOGITS[0]},
            r"^logits: got float32 of shape \(2, 70\); expected float32 or float16 or bfl",
        ),
        ({"logits": LOGITS.astype(np.float64)}, r"^logits: got float64"),
        ({"logits": LOGITS[:, :, :0]}, r"^logits: got"),
        ({"logits": np.broadcast_to(np.float32(0), (1, 1, 2**18 + 1))}, r"^logits: got V = 262145; expected"),
        ({"k": 0}, r"^k: got 0; expected a number from 1 to 70"),
        ({"k": 71}, r"^k: got 71"),
        ({"k": 2.0}, r"^k: got 2\.0"),
        ({"temperature": 0.0}, r"^temperature: got 0\.0; expected a number from 1e-30 to 1e\+30"),
        ({"temperature": math.nan}, r"^temperature: got nan"),
        ({"temperature": "1"}, r"^temperature: got"),
        (
            {"temperature": np.ones(2, np.float32)},
            r"^temperature: got .* expected float32 of shape \[B = 3\]",
        ),
        ({"temperature": np.array([1, -1, 1], np.float32)}, r"^temperature\[1\]: got -1\.0"),
        (
            {"token_bitmask": np.zeros((B, L, 2), np.uint32)},
            r"^token_bitmask: .* \[B = 3, L = 2, words = 3\]",
        ),
        ({"token_bitmask": np.zeros((B, 3), np.int64)}, r"^token_bitmask: got int64"),
        ({"bias": np.zeros(V - 1, np.float32)}, r"^bias: got"),
        ({"bias": np.full(V, np.inf, np.float32)}, r"^bias\[0\]: got inf"),
        ({"out": (LOGITS, LOGITS)}, r"^out: got tuple; expected a numba_ddtree\.DraftCandidates"),
        ({"workspace": np.zeros((6, 9), np.int64)}, r"^workspace: got ndarray; expected None, since"),
        ({"workspace": 3}, r"^workspace: got int; expected None"),
        ({"out": DraftCandidates(LOGITS, LOGITS)}, r"^out\.log_probs: got"),
        ({"pieces_per_row": 0}, r"^pieces_per_row: got 0; expected a number from 1 to"),
        ({"pieces_per_row": 1.5}, r"^pieces_per_row: got 1\.5"),
        ({"backend": "torch"}, r"^backend: got"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": LOGITS, "k": 5, "backend": "numpy"}
    with pytest.raises(ArgumentError, match=message):
        draft_topk(**(arguments | change))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_values_of_host_arrays_are_named(dtype: Any, value: float) -> None:
    logits = LOGITS.astype(dtype)
    logits[1, 0, 33] = value
    with pytest.raises(ArgumentError, match=r"^logits\[1, 0, 33\]: got (nan|inf); expected a number or -inf"):
        host_topk(logits, 5)
    mask = np.full((B, 3), 2**32 - 1, np.uint32)
    mask[1, 1] = ~np.uint32(2)
    assert np.isfinite(host_topk(logits, 5, token_bitmask=mask).log_probs).all()


@pytest.mark.parametrize("k", [1023, 1024])
def test_k_at_its_limit(rng: np.random.Generator, k: int) -> None:
    logits = make_rows(rng, "few_values", 1, 1100)[None]
    assert host_topk(logits, k).token_ids.shape == (1, 1, k)
    with pytest.raises(ArgumentError, match=r"^k: got 1025; expected a number from 1 to 1024$"):
        host_topk(logits, 1025)


@contextmanager
def a_device(processors: int, kilobytes: int) -> Iterator[None]:
    """Stand in for a device of so many multiprocessors, each with so much shared memory."""
    with (
        patch.object(draft_candidates, "multiprocessors", lambda: processors),
        patch.object(draft_candidates, "shared_memory_of_processor", lambda: kilobytes * 1024),
    ):
        yield


@pytest.mark.parametrize("k", [1, 2, 63, 64, 85, 86, 171, 257, 342, 683, 1000, 1024])
def test_scan_has_room_for_what_it_looks_at(k: int) -> None:
    with a_device(132, 228):
        plan = draft_candidates._plan(7, 100_000, k, False)
        assert draft_candidates._blocks_together(plan.wanted, plan.growth) == 4 * 132
    maxima = first_maxima_of(plan.wanted, plan.growth)
    assert 2 * plan.wanted <= maxima * THREADS <= capacity_of(plan.wanted, plan.growth)
    assert FIRST_TILES % maxima == 0
    # A word has a bit for each tile between looks, and 128 bits are stored at multiples of 16 bytes.
    assert 1 <= strides_of(plan.wanted) * STRIDE <= 32
    assert shared_bytes_of(plan.wanted, plan.growth) % 16 == 0


@given(
    rows=st.integers(0, 3000),
    vocabulary=st.integers(1, 2**18),
    k=st.integers(1, 1024),
    processors=st.integers(1, 200),
    kilobytes=st.sampled_from([100, 164, 228]),
)
def test_workspace_has_room_for_every_cut(
    rows: int, vocabulary: int, k: int, processors: int, kilobytes: int
) -> None:
    k = min(k, vocabulary)
    with a_device(processors, kilobytes):
        shape = draft_topk_workspace_shape(rows, 1, vocabulary, k)
        for has_aligned_rows in (False, True):
            plan = draft_candidates._plan(rows, vocabulary, k, has_aligned_rows)
            assert shape[0] >= rows + plan.blocks - 1
            assert shape[1] == HEADER + plan.wanted
            assert (plan.blocks > 0) == (rows > 0)
            assert plan.blocks <= 4 * processors


@given(
    rows=st.integers(0, 3000),
    vocabulary=st.integers(1, 2**18),
    k=st.integers(1, 1024),
    processors=st.integers(1, 200),
    pieces=st.integers(1, 300),
)
def test_given_pieces_are_those_of_every_row(
    rows: int, vocabulary: int, k: int, processors: int, pieces: int
) -> None:
    k = min(k, vocabulary)
    with a_device(processors, 228):
        shape = draft_topk_workspace_shape(rows, 1, vocabulary, k, pieces_per_row=pieces)
        plans = [draft_candidates._plan(rows, vocabulary, k, aligned, pieces) for aligned in (False, True)]
        alone = draft_candidates._plan(1, vocabulary, k, True, pieces)
    assert plans[0] == plans[1] == alone._replace(blocks=rows * alone.blocks)
    assert alone.blocks == min(pieces, -(-vocabulary // TILE))
    assert shape == (max(0, rows + rows * alone.blocks - 1), HEADER + alone.wanted)


@given(
    rows=st.integers(0, 3000),
    vocabulary=st.integers(1, 2**18),
    k=st.integers(1, 1024),
    processors=st.integers(1, 200),
)
def test_best_pieces_are_worth_a_block(rows: int, vocabulary: int, k: int, processors: int) -> None:
    k = min(k, vocabulary)
    with a_device(processors, 228):
        pieces = best_pieces_per_row(rows, 1, vocabulary, k)
    row_tiles = -(-vocabulary // TILE)
    assert 1 <= pieces <= row_tiles
    assert pieces == 1 or row_tiles // pieces >= max(8, 16 * k // TILE)


@pytest.mark.parametrize(
    ("rows", "k", "pieces"),
    [
        (15, 64, 20),  # all that are worth a block: fewer than run at once
        (15, 1024, 10),
        (30, 64, 16),  # 10 tiles each, as of 17
        (480, 64, 1),  # of 528 that run at once
        (528, 64, 1),
        (529, 64, 3),  # whole rows would need two turns, the second for one row alone
    ],
)
def test_best_pieces_fill_the_device(rows: int, k: int, pieces: int) -> None:
    with a_device(132, 228):
        assert best_pieces_per_row(rows, 1, 163_840, k) == pieces


def test_sizes_of_best_pieces_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r"^vocabulary: got 262145"):
        best_pieces_per_row(1, 1, 2**18 + 1, 5)
    with pytest.raises(ArgumentError, match=r"^pieces_per_row: got 0"):
        draft_topk_workspace_shape(1, 1, 9, 5, pieces_per_row=0)


# On a device.

SIZES = (1, 2, 3, 5, 31, 4095, 4096, 4097, 8191, 12289, 65537)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", SIZES)
def test_kernel_is_the_reference(rng: np.random.Generator, V: int, dtype: Any) -> None:
    for k in {1, min(V, 2), min(V, 64), min(V, 1024)}:
        check_topk(numba_library(), make_logits(rng, 3, 4, V, dtype), k)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("k", [1, 7, 64, 1024])
def test_kernel_on_large_rows_of_every_kind(rng: np.random.Generator, kind: str, k: int) -> None:
    for V in (2**18, 129280, 151643):
        logits = make_rows(rng, kind, 2, V).reshape(1, 2, V)
        check_topk(numba_library(), logits, k, temperature=float(rng.choice([0.2, 1, 1.7])))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [-1e9, 3e6, 2e38])
def test_kernel_leaves_out_absent_numbers_below_a_far_bound(rng: np.random.Generator, value: float) -> None:
    # float32 has no number 60 temperatures below such a bound other than the bound.
    logits = np.full((1, 3, 100_003), value, np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    check_topk(numba_library(), logits, 64, temperature=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [2, 64, 1024])
@pytest.mark.parametrize("B", [31, 37])
def test_kernel_on_rows_that_are_cut_and_whole_ones(rng: np.random.Generator, B: int, k: int) -> None:
    check_topk(numba_library(), make_logits(rng, B, 15, 18_000), k)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 1024])
def test_kernel_finds_candidates_that_crowd_in_one_place(rng: np.random.Generator, k: int) -> None:
    # One thread's quads, or one tile's, have them all: more than there is room for at first.
    logits = rng.normal(size=(1, 4, 100_000)).astype(np.float32)
    logits[0, 0, 40_000::1024] += 20
    logits[0, 1, 50_000:51_500] += 20
    logits[0, 2, 20_000:] += 20
    logits[0, 3, :3000] += 20
    check_topk(numba_library(), logits, k, temperature=0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_on_samples_that_mislead(rng: np.random.Generator, k: int, dtype: Any) -> None:
    # What a sample is taken of, 128 numbers at a time, has nearly all candidates; all, or more than that.
    tiles = 100
    logits = rng.normal(size=(1, 4, tiles * TILE)).astype(np.float32)
    units = np.arange(64) * tiles // 8 * 128
    sampled = (units[:, None] + np.arange(0, 128, 4)).reshape(-1)
    for row, lifted in enumerate((k // 2, k - 1, k, 2 * k)):
        logits[0, row, rng.permutation(sampled)[:lifted]] += 20
    check_topk(numba_library(), logits.astype(dtype), k, pieces_per_row=1)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 64])
def test_kernel_on_one_of_many_equals(k: int) -> None:
    # All of the sum is the same number over and over, so that its errors are too.
    logits = np.full((1, 8, 129_280), -3.37, np.float32)
    logits[0, :, 70_001] = np.linspace(9, 40, 8)
    check_topk(numba_library(), logits, k, temperature=0.7)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "L"), [(1, 1), (33, 3), (300, 7)])
def test_kernel_on_many_rows(rng: np.random.Generator, B: int, L: int) -> None:
    V = 5003
    temperatures = rng.choice([0.1, 1.0, 1e-30, 1e30, 5], B).astype(np.float32)
    check_topk(numba_library(), make_logits(rng, B, L, V), 20, temperature=temperatures)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 33, 4100, 50000])
@pytest.mark.parametrize("shape", [(5, 3), (5,)])
def test_kernel_with_masks_and_biases(
    rng: np.random.Generator, shape: tuple[int, ...], V: int, dtype: Any
) -> None:
    logits = make_logits(rng, 5, 3, V, dtype)
    bias = np.where(rng.random(V) < 0.1, -np.inf, rng.normal(size=V)).astype(np.float32)
    mask = make_mask(rng, *shape, V=V)
    for options in (
        {"token_bitmask": mask, "bias": bias},
        {"token_bitmask": mask.view(np.int32)},
        {"bias": bias},
    ):
        check_topk(numba_library(), logits, min(V, 30), temperature=0.7, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_takes_arrays_of_every_library(
    rng: np.random.Generator, make_library: Any, dtype: Any
) -> None:
    library: Library = make_library()
    logits = make_logits(rng, 2, 3, 9001, dtype)
    check_topk(library, logits, 64, temperature=np.array([0.5, 1], np.float32))
    result = draft_topk(library.put(logits), 3)
    assert all(isinstance(array, type(library.put(logits))) for array in result)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kernel_takes_logits_at_any_address(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    for skipped in range(1, 5):
        flat = torch.from_numpy(rng.normal(size=skipped + 6 * 5000).astype(np.float32)).to(
            getattr(torch, dtype)
        )
        logits = flat.cuda()[skipped:].view(2, 3, 5000)
        got = draft_topk(logits, 50)
        host = flat[skipped:].view(2, 3, 5000).float().numpy()
        want = reference.draft_topk(host, 50, np.ones(2, np.float32))
        assert_candidates(DraftCandidates(*(array.cpu().numpy() for array in got)), want)


@pytest.mark.gpu
def test_kernel_gives_rows_that_are_none_nan(rng: np.random.Generator) -> None:
    for V in (10, 5000, 100_003):
        got = check_topk(numba_library(), bad_rows(rng, 9, V), 10)
        assert np.isnan(got.log_probs[0, 1::2]).all()
        assert np.isfinite(got.log_probs[0, ::2]).all()
    temperatures = np.array([1, 0, -1, np.nan, np.inf, 1e-31, 1e31, 1], np.float32)
    library, logits = numba_library(), make_rows(rng, "normal", 8, 5000)[:, None]
    got = draft_topk(library.put(logits), 5, temperature=library.put(temperatures))
    is_bad = np.isnan(library.get(got.log_probs)).all(axis=(1, 2))
    assert is_bad.tolist() == [False, *[True] * 6, False]
    tree = numba_ddtree.build_tree(*got, 3)
    assert library.get(tree.status).tolist() == [0, *[int(TreeStatus.NAN)] * 6, 0]


@pytest.mark.gpu
def test_kernel_validates_device_arrays_on_request(rng: np.random.Generator) -> None:
    library = numba_library()
    logits = library.put(bad_rows(rng, 2, 99))
    with pytest.raises(ArgumentError, match=r"^logits\[0, 1, \d+\]: got (nan|inf)"):
        draft_topk(logits, 3, validate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 1024])
def test_kernel_repeats_to_the_bit(rng: np.random.Generator, k: int) -> None:
    library = numba_library()
    logits = library.put(make_logits(rng, 4, 15, 40_000))
    first = [library.get(array) for array in draft_topk(logits, k)]
    for _ in range(20):
        for array, other in zip(draft_topk(logits, k), first, strict=True):
            assert library.get(array).tobytes() == other.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 64, 1024])
@pytest.mark.parametrize("V", [5003, 129_280, 151_643, 163_838, 163_840])
def test_a_row_has_the_same_bits_in_any_batch(rng: np.random.Generator, V: int, k: int, dtype: Any) -> None:
    library = numba_library()
    logits = make_logits(rng, 4, 1, V, dtype)
    for pieces in (1, best_pieces_per_row(1, 1, V, k), 1000):
        check_bits_in_any_batch(rng, library, logits[:, 0], k, [8, 33], pieces, temperature=0.7)
        check_topk(library, logits, k, temperature=0.7, pieces_per_row=pieces)


@pytest.mark.gpu
def test_given_pieces_with_masks_and_biases(rng: np.random.Generator) -> None:
    for V in (20_000, 20_001):
        bias = np.where(rng.random(V) < 0.1, -np.inf, rng.normal(size=V)).astype(np.float32)
        options = {"token_bitmask": make_mask(rng, 5, 3, V=V), "bias": bias, "pieces_per_row": 3}
        check_topk(numba_library(), make_logits(rng, 5, 3, V), 30, temperature=0.7, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [20_000, 20_001])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_row_has_the_same_bits_at_any_address(rng: np.random.Generator, dtype: str, V: int) -> None:
    torch = pytest.importorskip("torch")
    logits = torch.from_numpy(rng.normal(size=6 * V).astype(np.float32)).to(getattr(torch, dtype))
    results = []
    for skipped in range(5):
        flat = torch.zeros(skipped + 6 * V, dtype=logits.dtype, device="cuda")
        flat[skipped:] = logits
        got = draft_topk(flat[skipped:].view(2, 3, V), 50, pieces_per_row=2)
        results.append([array.cpu().numpy().tobytes() for array in got])
    assert all(result == results[0] for result in results)


@pytest.mark.gpu
def test_kernel_uses_the_workspace_given(rng: np.random.Generator) -> None:
    library = numba_library()
    logits = make_logits(rng, 2, 3, 9001)
    shape = draft_topk_workspace_shape(2, 3, 9001, 50)
    for content in (0, -1, 2**62):
        check_topk(library, logits, 50, workspace=library.put(np.full(shape, content, np.int64)))
    for wrong in (np.zeros((shape[0] - 1, shape[1]), np.int64), np.zeros(shape, np.int32)):
        with pytest.raises(ArgumentError, match=r"^workspace: got"):
            draft_topk(library.put(logits), 50, workspace=library.put(wrong))
    with pytest.raises(ArgumentError, match=r"^workspace: got an array on the host"):
        draft_topk(library.put(logits), 50, workspace=np.zeros(shape, np.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernel_runs_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    logits = make_rows(rng, "normal", 8, 20_000)[:, None]
    with side_stream(form) as (torch, delayed_copy, options):
        got = draft_topk(delayed_copy(torch.from_numpy(logits)), 64, **options)
    torch.cuda.synchronize()
    want = reference.draft_topk(logits, 64, np.ones(8, np.float32))
    assert_candidates(DraftCandidates(*(array.cpu().numpy() for array in got)), want)


@pytest.mark.gpu
def test_kernel_on_bfloat16_of_a_drafter(rng: np.random.Generator) -> None:
    # Many ties at the edge of the best 1024.
    logits = (rng.normal(size=(1, 3, 163_840)) * 3).astype(bfloat16)
    check_topk(numba_library(), logits, 1024, temperature=0.6)
