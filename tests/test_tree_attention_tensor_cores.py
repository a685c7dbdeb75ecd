"""Tree attention in 16 bits on a device: accuracy, layouts, and equality with plain decoding, to the bit."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    FORMS,
    NO_PAGE,
    PAGE_SIZES,
    CacheInputs,
    arguments_of,
    assert_accurate,
    assert_nodes_equal_decoding,
    chains,
    compute,
    exact,
    make_inputs,
    plan_for,
    random_inputs,
    rising,
    same_bits,
    with_rows,
    workspace_limits,
)
from kernel_checks import Library, numpy_library
from libraries import LIBRARIES, runnable_kernel, side_stream, torch_library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import numba_ddtree
from inputs import link, make_parents
from numba_ddtree import ArgumentError, DraftTree, TreeAttention, tree_attention_workspace_bytes
from numba_ddtree.refs.tree_links import visibility_from_bits

pytestmark = pytest.mark.gpu

KERNELS = ("tensor_cores", "hopper")
REQUESTS = 32  # of a batch, each its own case
BATCHES = 100
SPLIT = 256  # keys of a split where tests cross its boundary


@pytest.fixture
def library() -> Library:
    return torch_library()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return runnable_kernel(request.param)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_requests(rng: np.random.Generator, library: Library, kernel: str, batch: int) -> None:
    inputs, options = random_inputs(rng, REQUESTS)
    out, lse = compute(library, inputs, kernel=kernel, is_planned=batch % 2 == 1, **options)
    assert_accurate(inputs, out, lse)


@pytest.mark.parametrize(
    ("prefixes", "H", "N"),
    [
        ([2048], 64, 65),
        ([8192], 64, 65),
        ([8191, 8736, 0, 3333], 64, 65),
        ([32768], 8, 65),
        ([8192] * 4, 64, 9),
        ([8192] * 8, 64, 1),
        ([1000], 16, 257),
        ([300], 2, 1025),
        ([131072], 8, 9),
        ([200_000, 5], 16, 17),
    ],
)
@pytest.mark.parametrize("page_size", [None, 64])
def test_real_sizes(
    rng: np.random.Generator,
    library: Library,
    kernel: str,
    prefixes: list[int],
    H: int,
    N: int,
    page_size: int | None,
) -> None:
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=page_size)
    assert_accurate(inputs, *compute(library, inputs, kernel=kernel))


@pytest.mark.parametrize("form", FORMS)
def test_ragged_lengths(rng: np.random.Generator, library: Library, kernel: str, form: str) -> None:
    lengths = rng.integers(0, 8737, 24)
    lengths[:4] = 0, 8736, 1, 4096
    counts = rng.integers(0, 34, 24).tolist()
    inputs = make_inputs(rng, lengths.tolist(), N=33, H=16, num_nodes=counts, page_size=64, form=form)
    for split_keys in (None, 512, "fastest"):
        assert_accurate(inputs, *compute(library, inputs, kernel=kernel, split_keys=split_keys))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_every_page_size(
    rng: np.random.Generator, library: Library, kernel: str, page_size: int | None, dtype: Any
) -> None:
    inputs = make_inputs(rng, [0, 63, 64, 65, 200, 700], N=9, H=8, page_size=page_size, dtype=dtype)
    for is_fused in (True, False):
        assert_accurate(inputs, *compute(library, inputs, kernel=kernel, is_fused=is_fused))


def test_pages_of_any_size_are_a_contiguous_cache_to_the_bit(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [0, 130, 64, 321], N=17, H=5)
    rows = [inputs.flat_cache[inputs.places(request)] for request in range(4)]
    want = compute(library, inputs, kernel=kernel, split_keys=128)
    for page_size in range(1, 129):
        paged = with_rows(rng, inputs, rows, page_size, FORMS[page_size % 2])
        is_fused = bool(rng.integers(2))
        got = compute(library, paged, kernel=kernel, split_keys=128, is_fused=is_fused)
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[..., None], array[..., None]).all(), f"pages of {page_size}"


@pytest.mark.parametrize("H", range(1, 129, 9))
def test_every_number_of_queries(rng: np.random.Generator, library: Library, kernel: str, H: int) -> None:
    for N in (1, 2, 3, 7, 15, 31):
        inputs = make_inputs(rng, [70, 0, 5], N=N, H=H, page_size=16)
        assert_accurate(inputs, *compute(library, inputs, kernel=kernel))


# Extremes.


def truncation_errors(inputs: CacheInputs) -> NDArray[np.float64]:
    """How far log-sums [B, N, H] may be off where each step of a score truncates the running sum.

    Tensor cores align the terms of a step, 16 products and the sum so far, and cut off what is below the 24
    bits of the largest: up to 2^-23 of the running sum, in each of 36 steps. A log-sum is off by what scores
    are, weighted by the probabilities: d lse = sum_k p_k d s_k.
    """
    visibility = visibility_from_bits(inputs.tree.ancestor_bits)
    errors = np.zeros(inputs.queries.shape[:3])
    for request, prefix in enumerate(inputs.prefix_lengths.tolist()):
        rows = inputs.flat_cache[inputs.places(request)].astype(np.float64).reshape(-1, 36, 16)
        queries = inputs.queries[request].astype(np.float64)
        terms = np.einsum("nhjc,kjc->nhkj", queries.reshape(*queries.shape[:2], 36, 16), rows, optimize=True)
        sums = inputs.sm_scale * terms.cumsum(axis=-1)
        sees = np.ones((*sums.shape[:1], 1, sums.shape[2]), np.bool_)
        sees[:, 0, prefix:] = visibility[request]
        scores = np.where(sees, sums[..., -1], -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        errors[request] = (weights * 2.0**-23 * np.abs(sums).sum(axis=-1)).sum(axis=-1)
    return errors


def test_large_queries(rng: np.random.Generator, library: Library, kernel: str) -> None:
    inputs = make_inputs(rng, [0, 300, 1000], N=17, H=8, page_size=64, magnitude=100)
    out, lse = compute(library, inputs, kernel=kernel, split_keys=128)
    # Running sums are in the thousands, so that truncation shows where log-sums are near 0.
    assert_accurate(inputs, out, lse, lse_allowance=truncation_errors(inputs))


@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_scores(rng: np.random.Generator, library: Library, kernel: str, sign: int) -> None:
    inputs = make_inputs(rng, [0, 130, 700], N=9, H=4, page_size=64)
    # Latent rows near one direction, and queries along or against it: all scores far from 0.
    direction = rng.standard_normal(576).astype(np.float32)
    cache = (inputs.cache.astype(np.float32) * 0.1 + direction).astype(bfloat16)
    queries = (inputs.queries.astype(np.float32) + sign * 200 * direction).astype(bfloat16)
    extreme = replace(inputs, cache=cache, queries=queries)
    _, want = exact(extreme)
    assert (sign * want > 2000).all()
    assert_accurate(extreme, *compute(library, extreme, kernel=kernel, split_keys=128))


@pytest.mark.parametrize("bits", [0.2, 1, 4, 30])
def test_scores_that_rise_block_by_block(
    rng: np.random.Generator, library: Library, kernel: str, bits: float
) -> None:
    """New largest scores all along, of little and of nearly all weight."""
    inputs = rising(rng, make_inputs(rng, [0, 130, 3000], N=9, H=4, page_size=64), bits)
    assert_accurate(inputs, *compute(library, inputs, kernel=kernel, split_keys=1024))


def test_zero_queries_give_the_mean_of_the_visible_rows(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [0, 7, 300], N=17, H=3, page_size=7)
    inputs = replace(inputs, queries=np.zeros_like(inputs.queries))
    out, lse = compute(library, inputs, kernel=kernel, out_dtype=np.float32, split_keys=64)
    for request, prefix in enumerate(inputs.prefix_lengths.tolist()):
        rows = inputs.flat_cache[inputs.places(request)].astype(np.float64)
        for node in range(17):
            keys = [*range(prefix), *(prefix + slot for slot in inputs.path(request, node))]
            mean = rows[keys, :512].mean(axis=0)
            # Probabilities are all 1 before the division: products and sums are float32's alone.
            np.testing.assert_allclose(out[request, node], np.tile(mean, (3, 1)), rtol=0, atol=1e-5)
            np.testing.assert_allclose(lse[request, node], np.log(len(keys)), rtol=1e-6, atol=1e-6)


def test_zero_queries_and_zero_rows_give_zeros(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [70], N=9, H=3)
    zeros = replace(inputs, queries=np.zeros_like(inputs.queries), cache=np.zeros_like(inputs.cache))
    out, lse = compute(library, zeros, kernel=kernel)
    assert (out.view(np.uint16) == 0).all()
    for node in range(9):
        np.testing.assert_allclose(lse[0, node], np.log(70 + len(inputs.path(0, node))), rtol=1e-6)


def test_no_requests_and_no_nodes(rng: np.random.Generator, library: Library, kernel: str) -> None:
    inputs = make_inputs(rng, [50, 0], N=5, H=2, num_nodes=[0, 0], page_size=16)
    out, lse = compute(library, inputs, kernel=kernel)
    assert (out.view(np.uint16) == 0).all()
    assert (lse == -np.inf).all()
    given = arguments_of(library, inputs)
    tree = given.pop("tree")
    tree = DraftTree(**{name: array[:0] for name, array in tree.arrays().items()}, max_depth=tree.max_depth)
    for name in ("q_nope", "q_pe", "prefix_lengths", "block_table"):
        given[name] = given[name][:0]
    out, _ = numba_ddtree.verify_attention(**given, tree=tree, kernel=kernel, max_prefix_length=50)
    assert tuple(out.shape) == (0, 5, 2, 512)


def test_a_cache_beyond_32_bits(rng: np.random.Generator, library: Library, kernel: str) -> None:
    torch = pytest.importorskip("torch")
    inputs = make_inputs(rng, [500, 90], N=9, H=4, page_size=64)
    pages = 2**31 // (64 * 576) + 2 * len(inputs.cache)
    try:
        cache = torch.empty((pages, 64, 576), dtype=torch.bfloat16, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("a cache of 2^31 elements does not fit this device")
    # Its last pages are in use, beyond 2^31 elements and 2^32 bytes.
    cache[-len(inputs.cache) :] = library.put(inputs.cache)
    assert (pages - len(inputs.cache)) * 64 * 576 > 2**31
    moved = inputs.paging["block_table"].astype(np.int64)
    moved = np.where(moved == NO_PAGE, NO_PAGE, moved + pages - len(inputs.cache)).astype(np.int32)
    given = arguments_of(library, inputs) | {
        "ckv_cache": cache[..., :512],
        "kpe_cache": cache[..., 512:],
        "block_table": library.put(moved),
    }
    options = {"kernel": kernel, "max_prefix_length": 500}
    out, lse = map(library.get, numba_ddtree.verify_attention(**given, **options))
    for got, want in zip((out, lse), compute(library, inputs, kernel=kernel), strict=True):
        assert same_bits(got[..., None], want[..., None]).all()


# Splits, slots, workspaces.


def test_splits_and_slots_of_any_number_agree(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [1500, 0, 700, 64], N=17, H=16, page_size=64)
    options: dict[str, Any] = {"kernel": kernel, "split_keys": 128, "is_planned": True}
    want = compute(library, inputs, **options)
    assert_accurate(inputs, *want)
    for limit in workspace_limits(4, 17, 16, 1500, 128):
        got = compute(library, inputs, workspace_limit=limit, **options)
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[..., None], array[..., None]).all(), f"a limit of {limit} bytes"
    for split_keys in (64, 192, 1024, 4096, 65536, "fastest"):
        assert_accurate(inputs, *compute(library, inputs, kernel=kernel, split_keys=split_keys))


@pytest.mark.parametrize(("batch", "longest"), [(8, 5000), (3, 5000), (1, 8000)])
def test_a_rest_that_fills_half_a_device(
    rng: np.random.Generator, library: Library, kernel: str, batch: int, longest: int
) -> None:
    """Where splits leave many multiprocessors idle, so that the Hopper kernel cuts the rest into bands."""
    from numba_ddtree.devices import multiprocessors

    nodes = max(1, int(0.55 * multiprocessors()) // batch)
    prefixes = (longest - rng.integers(0, 200, batch)).tolist()
    inputs = make_inputs(rng, prefixes, N=nodes, H=64, page_size=64)
    options: dict[str, Any] = {"kernel": kernel, "split_keys": "fastest", "is_planned": True}
    got = compute(library, inputs, **options)
    assert_accurate(inputs, *got)
    for again, first in zip(compute(library, inputs, **options), got, strict=True):
        assert same_bits(again[..., None], first[..., None]).all()


@pytest.mark.parametrize(("batch", "N", "H"), [(3, 65, 64), (40, 4, 64), (5, 33, 96), (140, 1, 20)])
def test_whole_tiles_that_are_folded_equal_decoding_alone(
    rng: np.random.Generator, library: Library, kernel: str, batch: int, N: int, H: int
) -> None:
    """More tiles than a device has multiprocessors, so that some are whole and the rest is merged."""
    prefixes = rng.integers(200, 700, batch).tolist()
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=64)
    got = compute(library, inputs, kernel=kernel, split_keys=128, max_prefix_length=1000)
    assert_accurate(inputs, *got)
    assert_nodes_equal_decoding(
        library,
        rng,
        inputs,
        page_size=64,
        other_page_size=16,
        kernel=kernel,
        split_keys=128,
        max_prefix_length=1000,
    )


def test_a_poisoned_workspace_of_exact_size_between_canaries(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    torch = pytest.importorskip("torch")
    inputs = make_inputs(rng, [900, 40], N=9, H=16, page_size=16)
    sizes = {"max_prefix_length": 900, "max_depth": min(inputs.tree.max_depth, 8), "split_keys": 128}
    needed = tree_attention_workspace_bytes(2, 9, 16, **sizes)
    memory = torch.full((needed + 512,), 0xFF, dtype=torch.uint8, device="cuda")  # NaN
    plan = TreeAttention.plan(
        2, 9, 16, page_size=16, kernel=kernel, workspace=memory[256 : 256 + needed], **sizes
    )
    assert plan.workspace_bytes == needed
    out, lse = map(library.get, plan.run(**arguments_of(library, inputs)))
    assert_accurate(inputs, out, lse)
    assert (memory[:256] == 0xFF).all()
    assert (memory[256 + needed :] == 0xFF).all()
    with pytest.raises(
        ArgumentError, match=rf"^workspace: got {needed - 1} bytes; expected at least {needed}"
    ):
        TreeAttention.plan(2, 9, 16, kernel=kernel, workspace=memory[256 : 255 + needed], **sizes)


def test_runs_smaller_than_planned(rng: np.random.Generator, library: Library, kernel: str) -> None:
    plan = TreeAttention.plan(
        5, 33, 16, max_prefix_length=3000, page_size=32, split_keys=256, kernel=kernel, workspace_limit=2**24
    )
    for batch, slots in ((1, 1), (5, 33), (3, 17), (2, 32)):
        prefixes = rng.integers(0, 3001, batch).tolist()
        inputs = make_inputs(rng, prefixes, N=slots, H=16, page_size=32)
        given = arguments_of(library, inputs)
        got = [library.get(array) for array in plan.run(**given)]
        assert_accurate(inputs, *got)
        want = compute(library, inputs, kernel=kernel, split_keys=256, max_prefix_length=3000)
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[..., None], array[..., None]).all()


def test_results_repeat_to_the_bit(rng: np.random.Generator, library: Library, kernel: str) -> None:
    inputs = make_inputs(rng, [5000, 20, 0], N=33, H=16, page_size=64)
    for split_keys in (None, 512, "fastest"):
        first = compute(library, inputs, kernel=kernel, split_keys=split_keys)
        for _ in range(10):
            again = compute(library, inputs, kernel=kernel, split_keys=split_keys)
            for each, array in zip(again, first, strict=True):
                assert same_bits(each[..., None], array[..., None]).all()


# Arrays, streams, graphs.


@pytest.mark.parametrize("make_library", LIBRARIES)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
def test_arrays_of_every_library(
    rng: np.random.Generator, kernel: str, make_library: Any, dtype: Any
) -> None:
    library: Library = make_library()
    inputs = make_inputs(rng, [40, 0, 700], N=17, H=4, num_nodes=[17, 5, 0], page_size=16, dtype=dtype)
    is_fused = library.name in ("numpy", "torch", "cupy")  # jax's slices are copies
    options: dict[str, Any] = {"kernel": kernel, "is_fused": is_fused}
    assert_accurate(inputs, *compute(library, inputs, **options))
    assert_accurate(inputs, *compute(library, inputs, validate=True, **options))
    if library.name != "jax":
        assert_accurate(inputs, *compute(library, inputs, is_planned=True, **options))


@pytest.mark.parametrize("is_planned", [False, True])
def test_copies_of_host_arrays_live_until_they_are_read(
    rng: np.random.Generator, kernel: str, monkeypatch: pytest.MonkeyPatch, is_planned: bool
) -> None:
    # Numba otherwise frees memory only some time after nothing refers to it, when it may hide a mistake.
    monkeypatch.setattr("numba.cuda.cudadrv.driver.config.CUDA_DEALLOCS_COUNT", 0)
    for _ in range(5):
        inputs, options = random_inputs(rng, 3)
        results = compute(numpy_library(), inputs, kernel=kernel, is_planned=is_planned, **options)
        assert_accurate(inputs, *results)


def test_runs_on_two_streams_at_once(rng: np.random.Generator, library: Library, kernel: str) -> None:
    """Of either dtype, in splits that are merged: none waits for blocks that wait for it."""
    torch = pytest.importorskip("torch")
    runs = []
    for dtype in (bfloat16, bfloat16, np.float16):
        inputs = make_inputs(rng, [3000, 1000], N=9, H=64, page_size=64, dtype=dtype)
        given = arguments_of(library, inputs)
        plan = TreeAttention.plan(
            2, 9, 64, max_prefix_length=3000, page_size=64, split_keys="fastest", kernel=kernel, dtype=dtype
        )
        outputs = [library.get(each) for each in plan.run(**given)]
        assert_accurate(inputs, *outputs)
        runs.append((plan, given, torch.cuda.Stream(), outputs))
    for _ in range(20):
        results = [(plan.run(**given, stream=stream), want) for plan, given, stream, want in runs]
        torch.cuda.synchronize()
        for outputs, expected in results:
            for each, array in zip(map(library.get, outputs), expected, strict=True):
                assert same_bits(each[..., None], array[..., None]).all()


@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_runs_on_the_callers_stream(
    rng: np.random.Generator, library: Library, kernel: str, form: str
) -> None:
    inputs = make_inputs(rng, [100, 3], N=17, H=4, page_size=16)
    want = compute(library, inputs, kernel=kernel)
    with side_stream(form) as (torch, delayed_copy, options):
        given = arguments_of(library, inputs)
        bits = delayed_copy(torch.from_numpy(inputs.queries.view(np.int16).copy()))
        queries = bits.view(torch.bfloat16)
        given |= {"q_nope": queries[..., :512], "q_pe": queries[..., 512:]}
        got = numba_ddtree.verify_attention(**given, kernel=kernel, max_prefix_length=100, **options)
    torch.cuda.synchronize()
    for array, expected in zip(map(library.get, got), want, strict=True):
        assert same_bits(array[..., None], expected[..., None]).all()


def test_a_graph_replays_on_what_is_in_memory(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    torch = pytest.importorskip("torch")
    B, N, H, page_size, rows = 3, 17, 8, 16, 1300
    cases = [
        make_inputs(
            rng,
            rng.integers(0, 1200, B).tolist(),
            N=N,
            H=H,
            num_nodes=rng.integers(0, N + 1, B).tolist(),
            page_size=page_size,
        )
        for _ in range(4)
    ]
    pages = max(len(case.cache) for case in cases)
    table = rows // page_size + 2

    def of_one_size(case: CacheInputs) -> CacheInputs:
        cache = np.full((pages, *case.cache.shape[1:]), np.nan, bfloat16)
        cache[: len(case.cache)] = case.cache
        entries = np.full((B, table), NO_PAGE, np.int32)
        entries[:, : case.paging["block_table"].shape[1]] = case.paging["block_table"]
        return replace(case, cache=cache, paging={"block_table": entries})

    cases = [of_one_size(case) for case in cases]
    static = arguments_of(library, cases[0], is_fused=False)
    out = torch.empty((B, N, H, 512), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty((B, N, H), dtype=torch.float32, device="cuda")
    plan = plan_for(library, cases[0], max_prefix_length=1200, kernel=kernel, split_keys=SPLIT)
    gc.collect()  # of earlier tests' arrays, whose memory would be seen to go
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()  # the capture's own random state included
        plan.run(**static, out=out, lse=lse)
        assert torch.cuda.memory_allocated() == before
    for case in (*cases, cases[0]):
        fresh = arguments_of(library, case, is_fused=False)
        for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "prefix_lengths", "block_table"):
            static[name].copy_(fresh[name])
        for name, array in static["tree"].arrays().items():
            array.view(torch.int32).copy_(getattr(fresh["tree"], name).view(torch.int32))
        out.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        got = library.get(out), library.get(lse)
        assert_accurate(case, *got)
        want = compute(library, case, kernel=kernel, split_keys=SPLIT)
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[..., None], array[..., None]).all()


# Bad values on a device.


def test_invalid_lengths_give_nan_and_leave_the_others_alone(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    for page_size in (None, 16):
        inputs = make_inputs(rng, [50] * 6, N=9, H=4, num_nodes=[9, 4, 9, 9, 9, 9], page_size=page_size)
        options: dict[str, Any] = {"kernel": kernel, "max_prefix_length": 50}
        want = compute(library, inputs, **options)
        lengths = inputs.prefix_lengths.copy()
        lengths[1:5] = -1, 10**6, 2**31 - 1, -(2**31)
        wrong = replace(inputs, prefix_lengths=lengths)
        for got, before in zip(compute(library, wrong, **options), want, strict=True):
            np.testing.assert_array_equal(got[[0, 5]], before[[0, 5]])
            assert np.isnan(got[1, :4]).all()
            assert np.isnan(got[2:5]).all()
        with pytest.raises(ArgumentError, match=r"^prefix_lengths\[1\]: got -1"):
            compute(library, wrong, validate=True, **options)


@pytest.mark.parametrize("form", FORMS)
def test_pages_out_of_range_give_nan_and_leave_the_others_alone(
    rng: np.random.Generator, library: Library, kernel: str, form: str
) -> None:
    inputs = make_inputs(rng, [200, 200, 200], N=9, H=4, page_size=16, form=form)
    want = compute(library, inputs, kernel=kernel, split_keys=64)
    for page in (NO_PAGE, -1, len(inputs.cache), -(2**31)):
        paging = {name: array.copy() for name, array in inputs.paging.items()}
        if form == "block_table":
            paging[form][1, 3] = page
        else:
            paging["kv_indices"][paging["kv_indptr"][1] + 3] = page
        wrong = replace(inputs, paging=paging)
        for got, before in zip(compute(library, wrong, kernel=kernel, split_keys=64), want, strict=True):
            np.testing.assert_array_equal(got[[0, 2]], before[[0, 2]])
            assert np.isnan(got[1]).all()
        with pytest.raises(ArgumentError, match=rf"got {page}; expected a page from 0 to"):
            compute(library, wrong, kernel=kernel, validate=True)


def test_malformed_trees_leave_the_others_alone(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [20, 20, 20], N=40, H=2, page_size=16)
    want = compute(library, inputs, kernel=kernel)
    bits, counts = inputs.tree.ancestor_bits.copy(), inputs.tree.num_nodes.copy()
    bits[1] = 0xFFFFFFFF  # slots past N
    counts[2] = 2**31 - 1
    wrong = replace(inputs, tree=replace(inputs.tree, ancestor_bits=bits, num_nodes=counts))
    for got, before in zip(compute(library, wrong, kernel=kernel), want, strict=True):
        np.testing.assert_array_equal(got[0], before[0])
        assert np.isnan(got[1]).all()
        assert np.isnan(got[2]).all()


# Where the device chooses lengths, blocks of keys are to be as many with either depth.
@pytest.mark.parametrize(("split_keys", "prefix"), [(64, 126), (2**30, 126), ("fastest", 100)])
def test_nodes_deeper_than_said_give_nan_and_leave_other_requests_alone(
    rng: np.random.Generator, library: Library, kernel: str, split_keys: Any, prefix: int
) -> None:
    inputs = make_inputs(rng, [prefix, 300], N=9, H=64, page_size=64)
    parents = np.stack([np.arange(-1, 8), np.minimum(np.arange(-1, 8), 0)]).astype(
        np.int32
    )  # a chain, a star
    tree = link(parents, inputs.tree.token_ids, None, inputs.prefix_lengths)
    options = {"kernel": kernel, "split_keys": split_keys}
    want = compute(library, replace(inputs, tree=tree), **options)
    shallow = replace(inputs, tree=replace(tree, max_depth=1))
    for got, before in zip(compute(library, shallow, **options), want, strict=True):
        np.testing.assert_array_equal(got[1], before[1])
        np.testing.assert_array_equal(got[0, :2], before[0, :2])
        assert np.isnan(got[0, 2:]).all()


# The tail, and merging.


@pytest.mark.parametrize("page_size", [None, 1, 64])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
def test_tail(
    rng: np.random.Generator, library: Library, kernel: str, page_size: int | None, out_dtype: Any
) -> None:
    inputs = make_inputs(rng, [0, 63, 64, 5000, 130], N=65, H=4, page_size=page_size)
    tail = compute(
        library, inputs, function=numba_ddtree.tree_tail_attention, kernel=kernel, out_dtype=out_dtype
    )
    assert_accurate(inputs, *tail, sees_prefix=False)


def test_tail_and_prefix_merged_are_the_whole(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    prefixes = [300, 64, 1000]
    inputs = make_inputs(rng, prefixes, N=17, H=8, page_size=64)
    tail = compute(
        library, inputs, function=numba_ddtree.tree_tail_attention, kernel=kernel, out_dtype=np.float32
    )
    # What a kernel without a tree mask gives for the prefix, in float64.
    out, lse = np.zeros(tail[0].shape), np.zeros(tail[1].shape)
    for request, prefix in enumerate(prefixes):
        rows = inputs.flat_cache[inputs.places(request)[:prefix]].astype(np.float64)
        scores = inputs.sm_scale * inputs.queries[request].astype(np.float64) @ rows.T
        lse[request] = np.logaddexp.reduce(scores, axis=-1)
        out[request] = np.exp(scores - lse[request][..., None]) @ rows[:, :512]
    states = library.put_all(
        out_a=out.astype(bfloat16), lse_a=(lse / np.log(2)).astype(np.float32), out_b=tail[0], lse_b=tail[1]
    )
    merged = numba_ddtree.merge_states(**states, lse_base_a=2)
    assert_accurate(inputs, *map(library.get, merged))


# Equality with plain decoding.


EQUALITY_PREFIXES = [
    0,
    1,
    62,
    63,
    64,
    65,
    127,
    128,
    129,
    SPLIT - 9,
    SPLIT - 2,
    SPLIT - 1,
    SPLIT,
    SPLIT + 1,
    700,
]


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize(("H", "N"), [(64, 9), (8, 33), (16, 17), (128, 5), (1, 65), (3, 40)])
@pytest.mark.parametrize("page_size", [1, 64, 5])
def test_nodes_equal_decoding_alone(
    rng: np.random.Generator, library: Library, kernel: str, dtype: Any, H: int, N: int, page_size: int
) -> None:
    prefixes = rng.permutation(EQUALITY_PREFIXES).tolist()
    inputs = make_inputs(rng, prefixes, N=N, H=H, dtype=dtype, page_size=PAGE_SIZES[rng.integers(10)])
    assert_nodes_equal_decoding(
        library,
        rng,
        inputs,
        page_size=page_size,
        other_page_size=PAGE_SIZES[rng.integers(len(PAGE_SIZES))],
        max_prefix_length=1000,
        kernel=kernel,
        split_keys=SPLIT,
        is_planned=bool(rng.integers(2)),
        out_dtype=np.float32 if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize("bits", [0.3, 2])
def test_nodes_equal_decoding_alone_where_scores_rise(
    rng: np.random.Generator, library: Library, kernel: str, bits: float
) -> None:
    """What a row takes for its largest score depends on no other row, nor on where a block comes."""
    inputs = rising(rng, make_inputs(rng, [40, 63, 130, 700, 1000], N=17, H=24, page_size=64), bits)
    assert_nodes_equal_decoding(
        library,
        rng,
        inputs,
        page_size=64,
        other_page_size=16,
        max_prefix_length=1100,
        kernel=kernel,
        split_keys=512,
    )


@pytest.mark.parametrize(
    ("H", "N"), [(1, 33), (2, 33), (3, 33), (8, 33), (12, 17), (16, 17), (64, 5), (128, 3)]
)
def test_nodes_that_share_blocks_equal_decoding_alone(
    rng: np.random.Generator, library: Library, kernel: str, H: int, N: int
) -> None:
    """Paths that begin in every group of 16 keys, so that as many nodes as can be share a block."""
    prefixes = [64 + start for start in (0, 1, 14, 15, 16, 17, 31, 32, 33, 47, 48, 49, 62, 63)]
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=16)
    assert_nodes_equal_decoding(
        library,
        rng,
        inputs,
        page_size=1,
        other_page_size=64,
        max_prefix_length=1000,
        kernel=kernel,
        split_keys=64,
    )


@pytest.mark.parametrize("N", [66, 200])
def test_nodes_of_long_chains_equal_decoding_alone(
    rng: np.random.Generator, library: Library, kernel: str, N: int
) -> None:
    inputs = chains(
        make_inputs(rng, [0, 1, 63, 64, 65, SPLIT - 1, SPLIT - 64, SPLIT], N=N, H=4, page_size=16)
    )
    assert_nodes_equal_decoding(
        library,
        rng,
        inputs,
        page_size=1,
        other_page_size=64,
        max_prefix_length=1000,
        kernel=kernel,
        split_keys=SPLIT,
    )


def test_nodes_equal_decoding_alone_at_the_default_split(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [4095, 4096, 4097, 4080, 8191], N=33, H=8, page_size=64)
    assert_nodes_equal_decoding(
        library, rng, inputs, page_size=1, other_page_size=None, max_prefix_length=131072, kernel=kernel
    )


def test_a_node_does_not_depend_on_the_rest_of_its_tree(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    """More nodes after those there are, of other branches, change nothing of theirs."""
    inputs = make_inputs(rng, [100, 63, 300], N=65, H=16, page_size=16)
    want = compute(library, inputs, kernel=kernel, split_keys=128)
    for count in (1, 2, 17, 64):
        fewer = np.full(3, count, np.int32)
        parents = inputs.tree.parents
        tree = link(parents, inputs.tree.token_ids, fewer, inputs.prefix_lengths)
        got = compute(library, replace(inputs, tree=tree), kernel=kernel, split_keys=128)
        for each, array in zip(got, want, strict=True):
            rows: tuple[NDArray[Any], NDArray[Any]] = (each[:, :count], array[:, :count])
            assert same_bits(rows[0][..., None], rows[1][..., None]).all()


def test_rows_of_finite_values_of_other_nodes_do_not_leak(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [70], N=33, H=4, page_size=16)
    parents = make_parents(rng, "star", 33)[None]
    inputs = replace(inputs, tree=link(parents, inputs.tree.token_ids, None, inputs.prefix_lengths))
    want = compute(library, inputs, kernel=kernel)
    cache = inputs.cache.copy()
    cache.reshape(-1, 576)[inputs.places(0)[70 + 20]] = 1e30
    others = np.arange(33) != 20
    for got, before in zip(compute(library, replace(inputs, cache=cache), kernel=kernel), want, strict=True):
        np.testing.assert_array_equal(got[0, others], before[0, others])
