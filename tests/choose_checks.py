"""Choosing tokens against the reference, for whichever arrays: on a device or in the simulator."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from kernel_checks import Guarded, Library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree.refs import token_choice as reference
from numba_ddtree.token_choice import choose_tokens

DTYPES = (np.float32, np.float16, bfloat16)
LOGIT_KINDS = ("model", "flat", "few_values", "all_equal", "holes", "wild", "large")
NOISE_EDGES = np.array(
    [0, 1, 2, 3, 2**22 - 1, 2**22, 2**22 + 1, 2**31 - 1, 2**31, 2**32 - 2**22, 2**32 - 2, 2**32 - 1],
    np.uint32,
)


def make_logits(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Logits of one of `LOGIT_KINDS`."""
    logits = rng.normal(size=shape) * rng.uniform(0.5, 4)
    if kind == "model":  # a few tokens far above the rest
        logits += np.where(rng.random(shape) < 0.01, rng.uniform(0, 15, shape), 0)
    elif kind == "flat":
        logits *= 1e-3
    elif kind == "few_values":
        logits = rng.choice([-3.0, -0.0, 0.0, rng.choice([1.5, -1.5]), -(2.0**-20)], shape)
    elif kind == "all_equal":
        logits = np.full(shape, rng.normal())
    elif kind == "holes":
        logits[rng.random(shape) < 0.7] = -np.inf
    elif kind == "wild":
        wild = rng.choice([np.nan, np.inf, -np.inf, 0.0], shape)
        logits = np.where(rng.random(shape) < 1.5 / shape[-1], wild, logits)
    elif kind == "large":
        logits *= 3000
    return logits.astype(dtype)


def make_settings(rng: np.random.Generator, B: int, N: int, V: int) -> dict[str, NDArray[Any]]:
    """Everything beside the logits, all different from request to request."""
    words = -(-V // 32)
    return {
        "temperature": rng.choice([0, 0.3, 0.7, 1, 1, 1, 2, 50, 1e-6, 1e-30, 3e38], B).astype(np.float32),
        "positions": rng.integers(0, 2**31, (B, N)).astype(np.int32),
        "seed": rng.integers(0, 2**64, B, np.uint64),
        "request_ids": rng.integers(-(2**63), 2**63, B),
        "top_k": rng.choice([0, 0, 1, 2, 7, 40, V - 1, V, V + 1, 2**31 - 1], B).clip(0).astype(np.int32),
        "top_p": rng.choice([0, 1e-7, 0.3, 0.9, 0.95, 1 - 2**-24, 1, 1], B).astype(np.float32),
        "token_bitmask": rng.integers(0, 2**32, (B, N, words), np.uint64).astype(np.uint32),
        "num_nodes": rng.integers(0, N + 1, B).astype(np.int32),
    }


def check_choose(library: Library, logits: NDArray[Any], **settings: Any) -> NDArray[np.int32]:
    """Choose into a poisoned array; the tokens must be the reference's, which are returned."""
    want = choose_tokens(logits, backend="numpy", **settings)
    guard = Guarded(library, want.shape, np.int32)
    given = {
        name: library.put(value) if isinstance(value, np.ndarray) else value
        for name, value in settings.items()
    }
    tokens = choose_tokens(library.put(logits), out=guard.array if library.takes_out else None, **given)
    got = library.get(tokens)
    guard.check()
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    return got


def check_bad_requests(library: Library, rng: np.random.Generator, V: int) -> None:
    """Check that parameters out of range give -1 for their request, and for it alone."""
    settings = make_settings(rng, 14, 2, V)
    del settings["token_bitmask"]
    settings["num_nodes"] = np.full(14, 2, np.int32)
    settings["temperature"] = np.ones(14, np.float32)
    bad: dict[str, list[float]] = {
        "temperature": [-1.0, np.nan, np.inf, 1e-31],
        "top_k": [-1],
        "top_p": [-0.1, np.nan],
    }
    faults = [(name, value) for name, values in bad.items() for value in values]
    for request, (name, value) in enumerate(faults):
        settings[name][2 * request + 1] = value
    logits = make_logits(rng, "model", (14, 2, V), np.float32)
    names = ("positions", "request_ids", "seed", "temperature", "top_k", "top_p")
    want = reference.choose_tokens(logits, *(settings[name] for name in names), None, settings["num_nodes"])
    assert (want[1::2] == -1).all()
    assert (want[::2] >= 0).all()
    tokens = choose_tokens(library.put(logits), **library.put_all(**settings))
    np.testing.assert_array_equal(library.get(tokens), want)


def check_counts_beyond_the_slots(library: Library) -> None:
    """Check that `num_nodes` out of range writes nothing beyond a request's row."""
    logits = np.tile(np.arange(9, dtype=np.float32), (3, 2, 1))
    counts = np.array([-1, 2**31 - 1, 1], np.int32)
    tokens = choose_tokens(library.put(logits), num_nodes=library.put(counts))
    assert library.get(tokens).tolist() == [[-1, -1], [8, 8], [8, -1]]


def make_noise_kernel() -> Any:
    """Kernel that writes the noise of words, exact and approximate, and their generator's words."""
    from numba_ddtree.cuda_target import cuda, uint32
    from numba_ddtree.device.rounded import gumbel
    from numba_ddtree.device.row_draw import about_gumbel, most_gumbel, random_word

    @cuda.jit
    def noise_kernel(words, exact, about, bound, counted):  # type: ignore[no-untyped-def]
        place = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if place < words.shape[0]:
            exact[place] = gumbel(words[place])
            about[place] = about_gumbel(words[place])
            bound[place] = most_gumbel(words[place])
            counted[place] = random_word(
                uint32(place), uint32(7), uint32(8), uint32(9), uint32(10), uint32(11)
            )

    return noise_kernel


def check_noise(library: Library, words: NDArray[np.uint32], blocks: int) -> None:
    """Check that noise is the reference's to the bit, and its approximations within their bounds."""
    count = len(words)
    exact = library.put(np.zeros(count))
    about, bound = (library.put(np.zeros(count, np.float32)) for _ in range(2))
    counted = library.put(np.zeros(count, np.uint32))
    make_noise_kernel()[blocks, 32](library.put(words), exact, about, bound, counted)
    want = reference.gumbel(words)
    assert library.get(exact).tobytes() == want.tobytes()
    assert np.abs(library.get(about) - want).max() < 2**-10
    assert (library.get(bound) > want - 2e-5).all()
    random = reference.random_bits(
        seed=10 + (11 << 32), request_id=8 + (9 << 32), position=7, vocabulary=count
    )
    np.testing.assert_array_equal(library.get(counted), random)


def make_cut_kernel() -> Any:
    """Kernel that writes where top-k and top-p cut each row off; a row a block."""
    from numba_ddtree.cuda_target import cuda, int32, int64, uint32
    from numba_ddtree.device.logit_keys import place_token, place_value
    from numba_ddtree.device.logit_rows import THREADS
    from numba_ddtree.device.rounded import reciprocal32
    from numba_ddtree.device.row_cut import BINS, SUMS, cut_of_row

    @cuda.jit
    def cut_kernel(logits, mask, top_k, top_p, best, temperature, values, tokens):  # type: ignore[no-untyped-def]
        s_low = cuda.shared.array(BINS, uint32)
        s_high = cuda.shared.array(BINS, uint32)
        s_sums = cuda.shared.array(SUMS, int64)
        s_found = cuda.shared.array(4, int64)
        row = cuda.blockIdx.x
        cut = cut_of_row(
            logits,
            int64(row) * int64(logits.shape[2]),
            int32(0),
            mask,
            int64(0),
            int32(32),
            top_k[row],
            top_p[row],
            best[row],
            reciprocal32(temperature[row]),
            s_low,
            s_high,
            s_sums,
            s_found,
        )
        if cuda.threadIdx.x == 0:
            values[row] = place_value(cut, int32(32))
            tokens[row] = place_token(cut)

    return cut_kernel, THREADS


def check_cuts(library: Library, logits: NDArray[np.float32], **settings: NDArray[Any]) -> None:
    """Check that the tokens up to the cut are those that the reference keeps; logits [rows, V]."""
    rows = len(logits)
    values = library.put(np.zeros(rows, np.float32))
    tokens = library.put(np.zeros(rows, np.uint32))
    kernel, threads = make_cut_kernel()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ll]ow occupancy")  # of so few rows
        kernel[rows, threads](
            library.put(logits[None]),
            library.put(np.zeros(0, np.int32)),
            library.put(settings["top_k"]),
            library.put(settings["top_p"]),
            library.put(logits.max(axis=-1)),
            library.put(settings["temperature"]),
            values,
            tokens,
        )
    for row in range(rows):
        value, token = library.get(values)[row], library.get(tokens)[row]
        is_out = (logits[row] < value) | ((logits[row] == value) & (np.arange(logits.shape[1]) > token))
        present = np.flatnonzero(logits[row] > -np.inf)
        kept = reference.keep_best(
            logits[row][present],
            settings["temperature"][row],
            int(settings["top_k"][row]),
            settings["top_p"][row],
        )
        got = present[~is_out[present]]
        np.testing.assert_array_equal(got, np.sort(present[kept]))


def make_cut_cases(rng: np.random.Generator, rows: int, V: int) -> dict[str, NDArray[Any]]:
    """Rows of logits of all kinds, bar NaN, and filters of them."""
    kinds = [kind for kind in LOGIT_KINDS if kind != "wild"]
    given = make_settings(rng, rows, 1, V)
    logits = [make_logits(rng, kinds[row % len(kinds)], (1, V), np.float32) for row in range(rows)]
    cases = {
        "logits": np.concatenate(logits),
        "temperature": rng.choice([0.3, 1, 1, 2, 50, 1e-6], rows).astype(np.float32),
        "top_k": given["top_k"],
        "top_p": given["top_p"],
    }
    # Tokens of equal masses just below 2^32 units, whose sum is all carries; a top-p of a few of
    # many; zeros of both signs.
    cases["logits"][0] = -5.6
    cases["logits"][0, -1] = 0
    cases["logits"][1] = rng.normal(size=V) * 1e-3
    cases["logits"][2] = rng.choice([-0.0, 0.0], V)
    is_empty = cases["logits"].max(axis=-1) == -np.inf  # of a few tokens: such rows are not to be cut
    cases["logits"][is_empty, 0] = 0
    cases["temperature"][:3], cases["top_p"][:3], cases["top_k"][:3] = 1, 0.9, (0, V // 4, V // 3)
    return cases


def check_close_scores(library: Library, rng: np.random.Generator, nodes: int) -> None:
    """Check draws of logits a few ulps apart, at temperatures at which float32 mixes up their scores."""
    from numba_ddtree.device.logit_rows import THREADS

    shape = 2, nodes, 12 * 8 * THREADS
    logits = 3 + rng.integers(0, 64, shape) * np.spacing(np.float32(3))
    # All of one thread's: it has to tell its own tokens apart.
    logits[0, :, np.arange(shape[-1]) // 8 % THREADS != 0] = -np.inf
    positions = rng.integers(0, 2**31, shape[:2]).astype(np.int32)
    for temperature in (1.5e-7, 2e-7, 3e-7, 1e-20):
        check_choose(library, logits.astype(np.float32), temperature=temperature, positions=positions)
