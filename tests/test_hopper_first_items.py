"""Runs on a device that begin with what `TreeAttention.schedule` has found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    CacheInputs,
    arguments_of,
    assert_accurate,
    compute,
    keys_of,
    longest_prefix,
    make_inputs,
    plan_for,
    same_bits,
)
from attention_runs import Run, assert_same
from kernel_checks import Library, numba_library, numpy_library
from libraries import cupy_library, runnable_kernel, side_stream, torch_library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree import TreeAttention
from numba_ddtree.cuda_target import cuda
from numba_ddtree.launch import LaunchSequence
from numba_ddtree.tree_attention.hopper_state import BATCH_AT, ITEM_WORDS, REQUEST
from numba_ddtree.tree_attention.work import MAX_WORKERS

pytestmark = pytest.mark.gpu

KERNELS = ("tensor_cores", "hopper")


@pytest.fixture
def library() -> Library:
    return torch_library()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return runnable_kernel(request.param)


def found_in(made: TreeAttention) -> NDArray[np.int32]:
    """Return what a plan's last schedule found, [MAX_WORKERS, ITEM_WORDS], on the host."""
    cuda.synchronize()
    items: NDArray[np.int32] = made._first_items.owner.copy_to_host()
    return items[:BATCH_AT].reshape(MAX_WORKERS, ITEM_WORDS)


def assert_found(got: NDArray[np.int32], want: NDArray[np.int32]) -> None:
    """Check that the same was found; of blocks without a first item nothing else is said."""
    np.testing.assert_array_equal(got[:, REQUEST], want[:, REQUEST])
    is_one = want[:, REQUEST] >= 0
    np.testing.assert_array_equal(got[is_one], want[is_one])


def assert_scheduled_runs_are_the_same(
    library: Library, inputs: CacheInputs, kernel: str, **options: Any
) -> None:
    """Check runs before any schedule, after one, and after the same again, against one without."""
    made = plan_for(library, inputs, kernel=kernel, **options)
    run = Run(library, inputs)
    want = run(made)
    assert_accurate(inputs, *want)
    assert_same(run(made, is_scheduled=True), want)  # before any schedule
    for _ in range(3):
        made.schedule(**keys_of(run.given))
        for _ in range(2):
            assert_same(run(made, is_scheduled=True), want)
    assert_same(run(made), want)


@pytest.mark.parametrize(
    ("prefixes", "H", "N", "options"),
    [
        ([2048], 64, 65, {"split_keys": 1088}),  # two splits a tile
        ([2048], 64, 65, {"split_keys": "fastest"}),
        ([8192], 64, 65, {}),
        ([32768], 8, 65, {"split_keys": 512}),
        ([32768], 8, 65, {"split_keys": "fastest"}),
        ([8192] * 8, 8, 65, {"split_keys": "fastest"}),  # bands
        ([8192] * 8, 8, 65, {"split_keys": 512}),
        ([500, 333, 700], 64, 65, {"split_keys": 128}),  # whole tiles and a rest
        ([8192] * 32, 64, 1, {"split_keys": "fastest"}),
        ([3000] * 12, 64, 33, {"split_keys": "fastest"}),
        ([0, 5, 63], 16, 17, {}),
        ([0], 1, 1, {}),
    ],
)
@pytest.mark.parametrize("page_size", [None, 64])
def test_scheduled_runs_have_the_bits_of_others(
    rng: np.random.Generator,
    library: Library,
    kernel: str,
    prefixes: list[int],
    H: int,
    N: int,
    options: dict[str, Any],
    page_size: int | None,
) -> None:
    inputs = make_inputs(rng, prefixes, N=N, H=H, page_size=page_size)
    assert_scheduled_runs_are_the_same(library, inputs, kernel, **options)


@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("form", ["block_table", "kv_indptr", None])
@pytest.mark.parametrize("page_size", [64, 16])
def test_scheduled_runs_of_ragged_batches(
    rng: np.random.Generator, library: Library, kernel: str, dtype: Any, form: str | None, page_size: int
) -> None:
    lengths = rng.integers(0, 1600, 24)
    lengths[:4] = 0, 1600, 1, 1024
    counts = rng.integers(0, 34, 24)
    counts[:6] = 33, 0, 0, 1, 33, 7
    inputs = make_inputs(
        rng,
        lengths.tolist(),
        N=33,
        H=16,
        num_nodes=counts.tolist(),
        dtype=dtype,
        page_size=None if form is None else page_size,
        form=form or "block_table",
    )
    for split_keys in (None, 512, "fastest"):
        assert_scheduled_runs_are_the_same(library, inputs, kernel, split_keys=split_keys)


def test_scheduled_runs_without_any_nodes(rng: np.random.Generator, library: Library, kernel: str) -> None:
    inputs = make_inputs(rng, [50, 0], N=5, H=2, num_nodes=[0, 0], page_size=16)
    assert_scheduled_runs_are_the_same(library, inputs, kernel, max_prefix_length=50)


@pytest.mark.parametrize("split_keys", [256, "fastest"])
@pytest.mark.parametrize("form", ["block_table", "kv_indptr", None])
def test_stale_schedules_change_no_bit(
    rng: np.random.Generator, library: Library, kernel: str, split_keys: Any, form: str | None
) -> None:
    """Of every batch for every other: of other lengths, of more requests or fewer, and of other trees."""
    batches = (
        ([3000, 100, 2000], 33, [33, 20, 33]),
        ([100, 3000, 64], 33, [33, 33, 0]),
        ([5, 0, 63], 33, [1, 33, 33]),
        ([4000], 33, [33]),
        ([2000] * 40, 17, [17] * 40),
        ([60, 4000] * 20, 9, [9, 0] * 20),
    )
    made = TreeAttention.plan(
        40,
        33,
        16,
        max_prefix_length=4000,
        page_size=None if form is None else 64,
        split_keys=split_keys,
        kernel=kernel,
    )
    runs, wanted = [], []
    for prefixes, slots, counts in batches:
        inputs = make_inputs(
            rng,
            prefixes,
            N=slots,
            H=16,
            num_nodes=counts,
            page_size=None if form is None else 64,
            form=form or "block_table",
        )
        runs.append(Run(library, inputs))
        wanted.append(runs[-1](made))
        assert_accurate(inputs, *wanted[-1])
    for other in runs:
        made.schedule(**keys_of(other.given))
        for run, want in zip(runs, wanted, strict=True):
            assert_same(run(made, is_scheduled=True), want)


@pytest.mark.parametrize("split_keys", [256, "fastest"])
def test_lengths_that_change_after_a_schedule(
    rng: np.random.Generator, library: Library, kernel: str, split_keys: Any
) -> None:
    """In the same arrays, so that runs and schedules come again."""
    inputs = make_inputs(rng, [4000, 4000, 4000], N=33, H=16, page_size=64)
    made = plan_for(library, inputs, kernel=kernel, split_keys=split_keys)
    run = Run(library, inputs)
    lengths = [np.array(each, np.int32) for each in ([4000] * 3, [64, 4000, 0], [3999, 63, 1000], [0, 0, 5])]
    wanted = []
    for each in lengths:
        run.given["prefix_lengths"].copy_(library.put(each))
        wanted.append(run(made))
    for scheduled in lengths:
        run.given["prefix_lengths"].copy_(library.put(scheduled))
        made.schedule(**keys_of(run.given))
        for each, want in zip(lengths, wanted, strict=True):
            run.given["prefix_lengths"].copy_(library.put(each))
            assert_same(run(made, is_scheduled=True), want)
    assert (len(made._schedules), len(made._runs)) == (1, 2)


def test_first_items_are_found(rng: np.random.Generator, library: Library, kernel: str) -> None:
    """Of requests that there are; a schedule that comes again reads lengths anew."""
    if kernel != "hopper":
        pytest.skip("this kernel has no first items")
    inputs = make_inputs(rng, [3000, 2000], N=33, H=16, page_size=64)
    options: dict[str, Any] = {"kernel": kernel, "split_keys": 256}
    made = plan_for(library, inputs, **options)
    assert (found_in(made)[:, REQUEST] == -1).all()
    given = arguments_of(library, inputs)
    made.schedule(**keys_of(given))
    first = found_in(made)
    assert set(first[:, REQUEST].tolist()) >= {0, 1}
    given["prefix_lengths"].copy_(library.put(np.array([0, 1000], np.int32)))
    made.schedule(**keys_of(given))
    second = found_in(made)
    assert set(second[:, REQUEST].tolist()) == {-1, 1}  # all keys of the other are of paths
    fresh = plan_for(library, inputs, **options)
    fresh.schedule(**keys_of(given))
    assert_found(found_in(fresh), second)


@pytest.mark.parametrize("split_keys", [256, "fastest"])
def test_a_graph_of_a_schedule_and_its_runs(
    rng: np.random.Generator, library: Library, kernel: str, split_keys: Any
) -> None:
    """Two layers of other keys and queries; the lengths change between replays."""
    torch = pytest.importorskip("torch")
    layers = [make_inputs(rng, [4000, 4000, 4000], N=33, H=16, page_size=64)]
    layers.append(replace(layers[0], queries=-layers[0].queries, cache=layers[0].cache[..., ::-1].copy()))
    made = plan_for(library, layers[0], kernel=kernel, split_keys=split_keys)
    runs = [Run(library, layer) for layer in layers]
    for name in ("tree", "prefix_lengths", "block_table"):
        runs[1].given[name] = runs[0].given[name]
    for run in runs:
        run(made)  # for tensor maps of the caches
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.schedule(**keys_of(runs[0].given))
        for run in runs:
            made.run(**run.given, **run.outputs, is_scheduled=True)
    for lengths in ([4000, 4000, 4000], [64, 4000, 0], [3999, 63, 1000], [0, 0, 5], [4000, 4000, 4000]):
        runs[0].given["prefix_lengths"].copy_(library.put(np.array(lengths, np.int32)))
        wanted = [run(made) for run in runs]
        for array in (*runs[0].outputs.values(), *runs[1].outputs.values()):
            array.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        for run, want in zip(runs, wanted, strict=True):
            assert_same(run.results(), want)


def test_a_graph_of_runs_alone_after_schedules_of_other_lengths(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    torch = pytest.importorskip("torch")
    inputs = make_inputs(rng, [3000, 100], N=17, H=64, page_size=64)
    other = replace(inputs, prefix_lengths=np.array([10, 100], np.int32))
    made = plan_for(library, inputs, kernel=kernel, split_keys=256)
    run = Run(library, inputs)
    want = run(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(**run.given, **run.outputs, is_scheduled=True)
    for each in (other, inputs):
        made.schedule(**keys_of(arguments_of(library, each)))
        for array in run.outputs.values():
            array.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(run.results(), want)


@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_a_schedule_goes_to_the_stream_of_the_call(
    rng: np.random.Generator, library: Library, kernel: str, form: str
) -> None:
    """Lengths come late on that stream: on any other, it would find first items of earlier ones."""
    if kernel != "hopper":
        pytest.skip("this kernel has no first items")
    inputs = make_inputs(rng, [3000, 2000], N=33, H=16, page_size=64)
    made = plan_for(library, inputs, kernel=kernel, split_keys=256)
    given = arguments_of(library, inputs)
    made.schedule(**keys_of(given))
    want = found_in(made)
    lengths = given["prefix_lengths"]
    host = lengths.cpu()
    with side_stream(form) as (torch, delayed_copy, options):
        lengths.zero_()
        late = delayed_copy(host)
        stream = options.get("stream", torch.cuda.current_stream())
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream)
        with torch.cuda.stream(stream):
            lengths.copy_(late)
        made.schedule(**keys_of(given), **options)
    torch.cuda.synchronize()
    assert_found(found_in(made), want)


def test_schedules_and_runs_that_come_again_allocate_nothing(
    rng: np.random.Generator, library: Library, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    inputs = make_inputs(rng, [300, 0, 77], N=17, H=8, page_size=64)
    made = plan_for(library, inputs, kernel=kernel, split_keys=128)
    run = Run(library, inputs)
    want = run(made)
    made.schedule(**keys_of(run.given))
    run(made, is_scheduled=True)
    monkeypatch.setattr(cuda, "device_array", None)
    torch.cuda.synchronize()
    requested = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        made.schedule(**keys_of(run.given))
        made.run(**run.given, **run.outputs, is_scheduled=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requested
    assert_same(run.results(), want)


@pytest.mark.parametrize("make_library", [numpy_library, numba_library, torch_library, cupy_library])
def test_schedules_of_arrays_of_every_library(
    rng: np.random.Generator, kernel: str, make_library: Any
) -> None:
    library: Library = make_library()
    inputs = make_inputs(rng, [40, 0, 700], N=17, H=4, num_nodes=[17, 5, 0], page_size=16, dtype=np.float16)
    made = plan_for(library, inputs, kernel=kernel, split_keys=128)
    given = arguments_of(library, inputs, is_fused=False)
    want = compute(
        library,
        inputs,
        is_fused=False,
        kernel=kernel,
        split_keys=128,
        max_prefix_length=longest_prefix(inputs),
    )
    for _ in range(2):
        made.schedule(**keys_of(given))
        got = map(library.get, made.run(**given, is_scheduled=True))
        for each, array in zip(got, want, strict=True):
            assert same_bits(each[..., None], array[..., None]).all()


def test_a_sequence_has_a_schedule_and_its_run(
    rng: np.random.Generator, library: Library, kernel: str
) -> None:
    inputs = make_inputs(rng, [3000, 100], N=17, H=16, page_size=64)
    made = plan_for(library, inputs, kernel=kernel, split_keys=256)
    run = Run(library, inputs)
    want = run(made)
    sequence = LaunchSequence()
    made.schedule(**keys_of(run.given), stream=sequence)
    made.run(**run.given, **run.outputs, is_scheduled=True, stream=sequence)
    for _ in range(2):
        for array in run.outputs.values():
            array.fill_(7)
        cuda.synchronize()
        sequence.launch()
        cuda.synchronize()
        assert_same(run.results(), want)
