"""Choosing tokens: the generator, the noise and the filters by themselves, draws; the kernels on a device."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import Library, numba_library
from libraries import LIBRARIES, side_stream
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree import ArgumentError
from numba_ddtree.refs import token_choice as reference
from numba_ddtree.token_choice import choose_tokens


def choose(logits: Any, **options: Any) -> Any:
    """Run the reference on one node's logits, or on as many nodes as there are positions."""
    logits = np.asarray(logits)
    if not np.issubdtype(logits.dtype, np.floating) or logits.dtype == np.float64:
        logits = logits.astype(np.float32)
    positions = np.atleast_1d(options.pop("positions", 0))
    rows = np.broadcast_to(logits, (1, len(positions), len(logits)))
    tokens = choose_tokens(rows, positions=positions[None], backend="numpy", **options)[0]
    return tokens if len(tokens) > 1 else int(tokens[0])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    got = reference.philox(tuple(np.array([word], np.uint32) for word in counter), key)
    assert tuple(int(word[0]) for word in got) == words


def test_every_token_of_every_counter_has_its_own_word() -> None:
    base = {"seed": 1, "request_id": 2, "position": 3}
    words = reference.random_bits(**base, vocabulary=1000)
    assert len(np.unique(words)) == 1000
    np.testing.assert_array_equal(reference.random_bits(**base, vocabulary=37), words[:37])
    for name in base:
        for bit in (0, 31) if name == "position" else (0, 31, 32, 63):
            other = reference.random_bits(**(base | {name: base[name] ^ (1 << bit)}), vocabulary=1000)
            assert not np.isin(other, words).any(), (name, bit)


def test_logarithm_is_within_ulps(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.random(10**5), 1 - rng.random(10**5) * 1e-6, rng.random(10**5) * 1e-9 + 2**-33])
    want = np.log(x)
    np.testing.assert_array_less(np.abs(reference.natural_log(x) - want), 4 * np.spacing(np.abs(want)))


def test_noise_is_gumbels(rng: np.random.Generator) -> None:
    words = np.concatenate([NOISE_EDGES, rng.integers(0, 2**32, 10**5, np.uint64).astype(np.uint32)])
    noise = reference.gumbel(words)
    uniform = (words + 0.5) / 2.0**32
    np.testing.assert_allclose(noise, -np.log(-np.log1p(-uniform)), rtol=1e-14, atol=1e-14)
    order = np.argsort(words)
    assert (np.diff(noise[order]) <= 0).all()


def test_masses_are_probabilities(rng: np.random.Generator) -> None:
    logits = np.concatenate([[0], -rng.random(10**4) * 40, [-27.7, -30, -100, -3e38]]).astype(np.float32)
    masses = reference.masses(logits, np.float32(0.7)) / 2**40
    want = np.exp(logits.astype(np.float64) / np.float32(0.7))
    np.testing.assert_allclose(masses, want, rtol=1e-5, atol=2**-40)
    assert masses[0] == 1
    infinite = reference.masses(np.array([np.inf, 3, np.inf], np.float32), np.float32(1))
    assert infinite.tolist() == [2**40, 0, 2**40]


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1, 3, 2], 1),
        ([3, 1, 3], 0),
        ([-1, -0.0, 0.0], 1),
        ([0.0, -0.0, -1], 0),
        ([-np.inf, -5, -np.inf], 1),
        ([-np.inf, np.inf, np.inf], 1),
        ([-np.inf] * 3, -1),
        ([1, np.nan, 9], -1),
        ([7], 0),
    ],
)
def test_the_best_token(logits: list[float], token: int) -> None:
    assert choose(logits) == token
    if token == -1 or np.inf in logits:
        assert choose(logits, temperature=1.0) == token


def test_a_mask_comes_first() -> None:
    logits = np.array([1, np.nan, 5, 4, *[0] * 30], np.float32)
    mask = np.array([[0b1001, 0b10]], np.uint32)  # tokens 0, 3 and 33
    assert choose(logits, token_bitmask=mask) == 3
    drawn = choose(logits, token_bitmask=mask, temperature=9.0, positions=np.arange(300))
    assert set(drawn) == {0, 3, 33}
    assert choose(logits, token_bitmask=np.array([[0b1010, 0]], np.uint32)) == -1
    assert choose(logits, token_bitmask=np.zeros((1, 2), np.uint32)) == -1
    each_node = np.array([[[1, 0], [4, 0]]], np.uint32)
    assert choose(logits, token_bitmask=each_node, positions=[0, 1]).tolist() == [0, 2]


def frequencies(logits: Any, count: int = 3000, **options: Any) -> NDArray[np.float64]:
    drawn = choose(logits, positions=np.arange(count), **options)
    return np.bincount(drawn, minlength=len(logits)) / count


def assert_drawn_from(probabilities: Any, logits: Any, count: int = 3000, **options: Any) -> None:
    """Check frequencies to six standard deviations; what has no probability is never drawn."""
    probabilities = np.asarray(probabilities) / np.sum(probabilities)
    got = frequencies(logits, count, **options)
    assert (got[probabilities == 0] == 0).all()
    deviation = np.sqrt(probabilities * (1 - probabilities) / count)
    assert (np.abs(got - probabilities) <= 6 * deviation).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(rng: np.random.Generator, temperature: float) -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.06, 0.04, 0])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)
    seed = int(rng.integers(2**63))
    assert_drawn_from(probabilities ** (1 / temperature), logits, temperature=temperature, seed=seed)


def test_filters_leave_what_they_say(rng: np.random.Generator) -> None:
    logits = np.log([0.15, 0.5, 0.05, 0.3])
    seed = int(rng.integers(2**63))
    assert_drawn_from([0, 0.5, 0, 0.3], logits, temperature=1.0, top_k=2, seed=seed)
    assert_drawn_from([0, 0.5, 0, 0.3], logits, temperature=1.0, top_p=0.79, seed=seed)
    assert_drawn_from([0.15, 0.5, 0, 0.3], logits, temperature=1.0, top_p=0.81, seed=seed)
    # Of what top-k leaves, 0.5 and 0.3, the first has 5 / 8.
    assert_drawn_from([0, 1, 0, 0], logits, temperature=1.0, top_k=2, top_p=0.62, seed=seed)
    assert_drawn_from([0, 0.5, 0, 0.3], logits, temperature=1.0, top_k=2, top_p=0.63, seed=seed)
    # At temperature 2 the probabilities are those of the roots: 0.21, 0.38, 0.12, 0.29.
    assert_drawn_from([0, 0.5**0.5, 0, 0.3**0.5], logits, temperature=2.0, top_p=0.66, seed=seed)
    assert_drawn_from([0, 1, 0, 0], logits, temperature=1.0, top_p=0.0, seed=seed)


def test_filters_keep_the_smaller_of_equal_tokens() -> None:
    drawn = {
        name: set(choose([0, 1, 1, 1, 0], temperature=1.0, positions=np.arange(200), **{name: value}))
        for name, value in (("top_k", 2), ("top_p", 0.5))
    }
    # Each of the three has a mass of e / (3 e + 2) = 0.27.
    assert drawn == {"top_k": {1, 2}, "top_p": {1, 2}}
    zeros = np.array([-0.0, 0.0, -0.0], np.float32)
    assert set(choose(zeros, temperature=1.0, positions=np.arange(200), top_k=2)) == {0, 1}


def test_top_k_of_one_and_a_temperature_of_next_to_nothing_are_greedy(rng: np.random.Generator) -> None:
    for kind in ("model", "holes", "large"):
        logits = make_logits(rng, kind, (4, 3, 500), np.float32)
        positions = rng.integers(0, 999, (4, 3))
        want = choose_tokens(logits, backend="numpy")
        for options in (
            {"top_k": 1, "temperature": 5.0},
            {"top_p": 0.0, "temperature": 5.0},
            {"temperature": 1e-30},
        ):
            got = choose_tokens(logits, positions=positions, backend="numpy", **options)
            np.testing.assert_array_equal(got, want)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_draw_depends_on_seed_request_and_position_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    B, N, V = 5, 7, 100
    given = make_settings(rng, B, N, V) | {"num_nodes": np.full(B, N, np.int32)}
    logits = make_logits(rng, "model", (B, N, V), np.float32)
    whole = choose_tokens(logits, backend="numpy", **given)
    requests, nodes = rng.permutation(B), rng.permutation(N)
    moved = {name: array[requests] for name, array in given.items()}
    for name in ("positions", "token_bitmask"):
        moved[name] = moved[name][:, nodes]
    got = choose_tokens(logits[requests][:, nodes], backend="numpy", **moved)
    np.testing.assert_array_equal(got, whole[requests][:, nodes])


def test_positions_requests_and_seeds_matter() -> None:
    logits = np.zeros((1, 1, 1000), np.float32)

    def draw(**options: Any) -> int:
        given = {"positions": np.array([[3]]), "request_ids": np.array([4]), "seed": 5} | options
        return int(choose_tokens(logits, temperature=1.0, backend="numpy", **given)[0, 0])

    tokens = [
        draw(),
        draw(positions=np.array([[4]])),
        draw(request_ids=np.array([3])),
        draw(request_ids=np.array([4 + 2**32])),
        draw(seed=6),
        draw(seed=5 + 2**32),
    ]
    assert len(set(tokens)) == len(tokens)
    assert draw(seed=np.array([5])) == draw(request_ids=np.array([4], np.int32)) == tokens[0]
    assert draw(seed=2**64 - 1) == draw(seed=np.array([-1])) == draw(seed=np.array([2**64 - 1], np.uint64))


def test_requests_are_numbered_by_their_places() -> None:
    logits = np.zeros((3, 1, 1000), np.float32)
    given = {"temperature": 1.0, "positions": np.zeros((3, 1), np.int32), "backend": "numpy"}
    want = choose_tokens(logits, request_ids=np.arange(3), **given)
    np.testing.assert_array_equal(choose_tokens(logits, **given), want)
    assert len(np.unique(want)) == 3


def test_padding_slots_are_not_read() -> None:
    logits = np.full((1, 3, 4), np.nan, np.float32)
    logits[0, 0] = [0, 1, 2, 3]
    assert choose_tokens(logits, num_nodes=[1], backend="numpy").tolist() == [[3, -1, -1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bit_logits_count_as_the_numbers_that_they_are(rng: np.random.Generator, dtype: Any) -> None:
    logits = make_logits(rng, "model", (2, 3, 300), dtype)
    given = make_settings(rng, 2, 3, 300)
    want = choose_tokens(logits.astype(np.float32), backend="numpy", **given)
    np.testing.assert_array_equal(choose_tokens(logits, backend="numpy", **given), want)


GOOD: dict[str, Any] = {
    "logits": np.zeros((2, 3, 40), np.float32),
    "temperature": 1.0,
    "positions": np.zeros((2, 3), np.int32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": np.zeros((2, 3, 40))}, "logits: got float64"),
        ({"logits": np.zeros((2, 40), np.float32)}, "logits: got float32 of shape .2, 40."),
        ({"logits": np.zeros((2, 3, 0), np.float32)}, "logits"),
        ({"logits": np.zeros((1, 1, 2**18 + 1), np.float32)}, "logits: got V = 262145"),
        ({"positions": None}, "positions: got None"),
        ({"positions": None, "temperature": [0.0, 0.0]}, "positions: got None"),
        ({"positions": np.zeros((3, 2), np.int32)}, "positions"),
        ({"positions": np.full((2, 3), -1)}, r"positions\[0, 0\]: got -1"),
        ({"positions": np.full((2, 3), 2**31)}, r"positions\[0, 0\]: got 2147483648"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": float("inf")}, "temperature: got inf"),
        ({"temperature": 1e-31}, "temperature: got 1e-31"),
        ({"temperature": 1e-60}, "temperature: got 1e-60"),
        ({"temperature": [1.0, 1e-60]}, r"temperature\[1\]: got 1e-60; expected 0, or a number from 1e-30"),
        ({"temperature": [1e300, 1.0]}, r"temperature\[0\]: got inf"),
        ({"temperature": None}, "temperature: got None; expected a number, or an array"),
        ({"top_k": None}, "top_k: got None"),
        ({"top_p": None}, "top_p: got None"),
        ({"seed": None}, "seed: got None"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature: got True"),
        ({"temperature": [1.0, -1.0]}, r"temperature\[1\]: got -1.0"),
        ({"temperature": [1.0, np.nan]}, r"temperature\[1\]: got nan"),
        ({"temperature": [1.0]}, "temperature: got float32 of shape .1,."),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_k": 1.0}, "top_k: got 1.0"),
        ({"top_k": 2**31}, "top_k: got 2147483648"),
        ({"top_k": [0, -1]}, r"top_k\[1\]: got -1"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"top_p": float("nan")}, "top_p: got nan"),
        ({"top_p": [0.5, -0.5]}, r"top_p\[1\]: got -0.5"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 2**64}, "seed: got 18446744073709551616"),
        ({"seed": 1.0}, "seed: got 1.0"),
        ({"seed": np.zeros(2, np.int32)}, "seed: got int32"),
        ({"seed": np.zeros(3, np.int64)}, "seed: got int64 of shape .3,."),
        ({"request_ids": np.zeros(2)}, "request_ids: got float64"),
        ({"request_ids": np.zeros(1, np.int32)}, "request_ids"),
        ({"token_bitmask": np.zeros((2, 1), np.uint32)}, "token_bitmask: got uint32 of shape .2, 1."),
        ({"token_bitmask": np.zeros((2, 2, 2), np.uint32)}, "token_bitmask"),
        ({"token_bitmask": np.zeros((2, 2), np.int64)}, "token_bitmask: got int64"),
        ({"num_nodes": [1, 4]}, r"num_nodes\[1\]: got 4; expected a number from 0 to N = 3"),
        ({"num_nodes": [-1, 3]}, r"num_nodes\[0\]: got -1"),
        ({"out": np.zeros((2, 3), np.int64)}, "out"),
        ({"backend": "torch"}, "backend"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match="^" + message):
        choose_tokens(**(GOOD | {"backend": "numpy"} | changes))


def test_results_go_into_the_array_given() -> None:
    out = np.full((2, 3), 7, np.int32)
    assert choose_tokens(**GOOD, out=out, backend="numpy") is out
    assert (out != 7).any()


# On a device.

VOCABULARIES = (1, 2, 7, 8, 9, 31, 32, 33, 255, 2040, 2047, 2048, 2049, 2056, 8192, 8200, 10_001)


@pytest.mark.gpu
def test_kernels_make_the_references_noise(rng: np.random.Generator) -> None:
    words = rng.integers(0, 2**32, 2**20, np.uint64).astype(np.uint32)
    small = rng.integers(0, 2**24, 2**18, np.uint64).astype(np.uint32)
    words = np.concatenate([NOISE_EDGES, words, small, ~small])
    check_noise(numba_library(), words, blocks=-(-len(words) // 32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", VOCABULARIES)
def test_kernels_are_the_reference(rng: np.random.Generator, dtype: Any, V: int) -> None:
    B, N = 24, 5
    logits = np.concatenate(
        [make_logits(rng, LOGIT_KINDS[b % len(LOGIT_KINDS)], (1, N, V), dtype) for b in range(B)]
    )
    given = make_settings(rng, B, N, V)
    check_choose(numba_library(), logits)
    check_choose(numba_library(), logits, token_bitmask=given["token_bitmask"][:, 0].copy())
    draw = {name: given[name] for name in ("positions", "seed", "request_ids", "num_nodes", "temperature")}
    check_choose(numba_library(), logits, **draw)
    check_choose(numba_library(), logits, **draw, top_k=given["top_k"])
    check_choose(numba_library(), logits, **draw, top_p=given["top_p"])
    check_choose(numba_library(), logits, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LOGIT_KINDS)
@pytest.mark.parametrize(("V", "dtype"), [(50_257, np.float16), (163_840, bfloat16), (2**18, np.float32)])
def test_kernels_on_whole_vocabularies(rng: np.random.Generator, kind: str, V: int, dtype: Any) -> None:
    logits = make_logits(rng, kind, (2, 2, V), dtype)
    positions = rng.integers(0, 999, (2, 2)).astype(np.int32)
    library = numba_library()
    check_choose(library, logits)
    for options in ({}, {"top_k": 50}, {"top_k": 1000, "top_p": 0.9}):
        check_choose(library, logits, temperature=0.8, positions=positions, seed=3, **options)


@pytest.mark.gpu
def test_kernels_where_scores_are_too_close_for_float32(rng: np.random.Generator) -> None:
    check_close_scores(numba_library(), rng, nodes=8)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [9, 3000, 163_840])
def test_kernels_cut_where_the_reference_does(rng: np.random.Generator, V: int) -> None:
    check_cuts(numba_library(), **make_cut_cases(rng, 60, V))


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_take_arrays_of_every_library(
    rng: np.random.Generator, make_library: Any, dtype: Any
) -> None:
    library: Library = make_library()
    given = make_settings(rng, 5, 6, 1000)
    logits = make_logits(rng, "model", (5, 6, 1000), dtype)
    if library.name in ("jax", "torch"):  # no, or next to no, unsigned numbers; jax has none of 64 bits
        given["seed"] = given["seed"].view(np.int64)
        given["token_bitmask"] = given["token_bitmask"].view(np.int32)
    if library.name == "jax":
        del given["seed"]
        given["request_ids"] = given["request_ids"].astype(np.int32)
    check_choose(library, logits)
    check_choose(library, logits, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [64, 4096, 5001])
def test_kernels_take_rows_that_begin_anywhere(rng: np.random.Generator, dtype: Any, V: int) -> None:
    library = numba_library()
    logits = make_logits(rng, "model", (2, 3, V), np.float16 if dtype == bfloat16 else dtype)
    given = {"temperature": 1.0, "positions": rng.integers(0, 99, (2, 3)).astype(np.int32)}
    for offset in (1, 3, 4):
        buffer = library.put(np.concatenate([np.full(offset, np.nan, logits.dtype), logits.ravel()]))
        moved = buffer[offset:].reshape(logits.shape)
        for options in ({}, given, given | {"top_k": 9}):
            put = {k: library.put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
            got = library.get(choose_tokens(moved, **put))
            np.testing.assert_array_equal(got, choose_tokens(logits, backend="numpy", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("V", [40, 4096])
def test_kernels_give_bad_device_arrays_no_token(rng: np.random.Generator, V: int) -> None:
    check_bad_requests(numba_library(), rng, V)
    check_counts_beyond_the_slots(numba_library())


@pytest.mark.gpu
def test_kernels_validate_device_arrays_on_request(rng: np.random.Generator) -> None:
    library = numba_library()
    given = make_settings(rng, 2, 3, 40)
    logits = library.put(make_logits(rng, "model", (2, 3, 40), np.float32))
    choose_tokens(logits, **library.put_all(**given), validate=True)
    for name, value in (
        ("temperature", -1),
        ("top_k", -1),
        ("top_p", 2),
        ("num_nodes", 4),
        ("positions", -1),
    ):
        bad = given | {name: given[name].copy()}
        bad[name].flat[1] = value
        with pytest.raises(ArgumentError, match=rf"^{name}\["):
            choose_tokens(logits, **library.put_all(**bad), validate=True)


@pytest.mark.gpu
def test_kernels_repeat_to_the_bit(rng: np.random.Generator) -> None:
    library = numba_library()
    logits, given = make_logits(rng, "flat", (16, 9, 30_000), bfloat16), make_settings(rng, 16, 9, 30_000)
    first = check_choose(library, logits, **given)
    logits = library.put(logits)
    put = library.put_all(**given)
    for _ in range(20):
        np.testing.assert_array_equal(library.get(choose_tokens(logits, **put)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernels_run_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    logits = make_logits(rng, "model", (4, 9, 2000), np.float32) + np.float32(1)
    positions = rng.integers(0, 99, (4, 9)).astype(np.int32)
    with side_stream(form) as (torch, delayed_copy, options):
        rows = delayed_copy(torch.from_numpy(logits))
        places = torch.from_numpy(positions).cuda()
        tokens = choose_tokens(rows, temperature=1.0, positions=places, **options)
    torch.cuda.synchronize()
    want = choose_tokens(logits, temperature=1.0, positions=positions, backend="numpy")
    np.testing.assert_array_equal(tokens.cpu().numpy(), want)
