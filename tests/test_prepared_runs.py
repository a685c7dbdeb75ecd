"""Runs of tree attention that come again: when launches are found prepared, and that they do the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attention_checks import CacheInputs, assert_accurate, make_inputs, plan_for
from attention_runs import Run, assert_same
from kernel_checks import Library, numba_library
from libraries import cupy_library, runnable_kernel, side_stream, torch_library
from made_up_device import (
    B,
    H,
    MadeUpDevice,
    N,
    NotedLaunch,
    NotingKernel,
    Owner,
    given_arrays,
    make_up_device,
    planned,
    view,
)
from ml_dtypes import bfloat16

from numba_ddtree import ArgumentError, DraftTree, TreeAttention
from numba_ddtree.array_keys import array_key
from numba_ddtree.arrays import HOST, DeviceView
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.launch import LaunchSequence
from numba_ddtree.tree import TREE_DTYPES
from numba_ddtree.tree_attention import calls, plan, tensor_maps
from numba_ddtree.tree_attention.prepared_runs import MAX_RUNS, PreparedRun, PreparedRuns, run_key
from numba_ddtree.tree_attention.work import SplitPlan, Work

pytestmark = pytest.mark.skipif(SIMULATED, reason="arrays of the simulator have no addresses")

ARRAYS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "prefix_lengths", "block_table", "out", "lse")
ELSEWHERE = 1 << 44


# Without a device.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    return make_up_device(monkeypatch)


@pytest.fixture
def prepared(device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch) -> list[NotedLaunch]:
    """Give every launch that was prepared; a run has two."""
    kernel = NotingKernel([])
    scratch = replace(view(9 << 32, (4,), np.float32), owner=Owner())

    def launch(transfer: Any, work: Work, splits: SplitPlan) -> None:
        for _ in range(2):
            rows = (work.q_nope, work.q_pe, work.keys.ckv, work.keys.kpe)
            arrays = work.ancestor_bits, work.keys.page_table, work.lse
            transfer.launch(kernel, 1, *arrays, *(each.address for each in rows), scratch)

    for module in (plan, calls):
        monkeypatch.setattr(module, "launcher_of", lambda _: launch)
    return kernel.prepared


def key_of(given: dict[str, Any]) -> Any:
    names = ("q_pe", "ckv_cache", "kpe_cache", "prefix_lengths", "block_table", "kv_indptr", "kv_indices")
    needed = (given[name] for name in ("q_nope", "out", "lse", "tree", "sm_scale"))
    return run_key(*needed, *(given.get(name) for name in names))


def changes_of(array: DeviceView) -> list[DeviceView]:
    """Make arrays that differ in one thing each."""
    return [
        replace(array, pointer=array.pointer + 16),
        replace(array, shape=(*array.shape[:-1], array.shape[-1] + 1)),
        replace(array, strides=(*array.strides[:-1], 2 * array.strides[-1])),
        replace(array, dtype=np.dtype(np.float64)),
        replace(array, device_id=1),
    ]


def test_keys_are_of_arrays_not_of_objects() -> None:
    assert key_of(given_arrays()) == key_of(given_arrays()) is not None


@pytest.mark.parametrize("name", [*ARRAYS, *(f"tree.{name}" for name in TREE_DTYPES)])
def test_keys_differ_by_all_of_every_array(name: str) -> None:
    given = given_arrays()
    keys = {key_of(given)}
    of_tree = name.removeprefix("tree.")
    old = getattr(given["tree"], of_tree) if name.startswith("tree.") else given[name]
    changed = changes_of(old)
    for array in changed:
        if name.startswith("tree."):
            keys.add(key_of(given | {"tree": replace(given["tree"], **{of_tree: array})}))
        else:
            keys.add(key_of(given | {name: array}))
    assert None not in keys
    assert len(keys) == 1 + len(changed)


def test_keys_differ_by_numbers_and_their_types() -> None:
    given = given_arrays()
    scales = (0.1, 0.2, 1.0, 1, True, np.float32(0.1), np.float32(1))
    depths = (N - 1, N, float(N), np.int64(N), 1, True)
    keys = [key_of(given | {"sm_scale": scale}) for scale in scales]
    keys += [key_of(given | {"tree": replace(given["tree"], max_depth=depth)}) for depth in depths]
    assert None not in keys
    assert len(set(keys)) == len(scales) + len(depths) - 1  # the first of each are what was given


def test_keys_differ_by_which_argument_an_array_is() -> None:
    given = given_arrays()
    table = given.pop("block_table")
    forms = [{}, *({name: table} for name in ("block_table", "kv_indptr", "kv_indices"))]
    keys = {key_of(given | form) for form in forms}
    keys.add(key_of(given | {"prefix_lengths": None}))
    assert None not in keys
    assert len(keys) == 5


def test_keys_differ_by_the_library_of_the_queries() -> None:
    class OfCupy(SimpleNamespace):
        """Its default stream is cupy's current one."""

    class OfNumba(SimpleNamespace):
        """Its default stream is the driver's."""

    OfCupy.__module__, OfNumba.__module__ = "cupy.made_up", "numba.made_up"
    given = given_arrays()
    same = given["q_nope"]
    layout = {"shape": same.shape, "strides": same.strides, "dtype": same.dtype}
    device = SimpleNamespace(id=same.device_id)
    forms = (
        OfCupy(**layout, data=SimpleNamespace(ptr=same.pointer), device=device),
        OfNumba(
            **layout,
            device_ctypes_pointer=SimpleNamespace(value=same.pointer),
            gpu_data=SimpleNamespace(context=SimpleNamespace(device=device)),
        ),
    )
    assert len({array_key(form) for form in (same, *forms)}) == 1
    keys = {key_of(given | {"q_nope": form}) for form in (same, *forms)}
    assert None not in keys
    assert len(keys) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"out": None},
        {"lse": None},
        {"q_nope": np.zeros(3)},
        {"prefix_lengths": [1, 2]},
        {"sm_scale": "0.1"},
        {"sm_scale": [0.1]},
        {"tree": None},
    ],
)
def test_runs_without_a_key(changed: dict[str, Any]) -> None:
    assert key_of(given_arrays() | changed) is None


def test_a_subclass_of_trees_has_no_key() -> None:
    class OtherTree(DraftTree):
        """May read its arrays from anywhere."""

    given = given_arrays()
    tree = given["tree"]
    assert key_of(given | {"tree": OtherTree(**tree.arrays(), max_depth=tree.max_depth)}) is None


def empty_run() -> PreparedRun:
    return PreparedRun(LaunchSequence(), HOST)


def test_the_run_that_was_not_used_for_the_longest_goes() -> None:
    runs = PreparedRuns(3)
    kept = {name: empty_run() for name in "abcdef"}
    for name in "abc":
        runs.keep((name,), kept[name])
    assert runs.find(("a",)) is kept["a"]
    runs.keep(("d",), kept["d"])  # b goes
    assert runs.find(("b",)) is None
    assert runs.find(("c",)) is kept["c"]
    runs.keep(("e",), kept["e"])  # a goes
    runs.keep(("f",), kept["f"])  # d goes
    assert [runs.find((name,)) is not None for name in "abcdef"] == [False, False, True, False, True, True]
    assert runs.find(("f",)) is kept["f"]
    assert len(runs) == 3


def test_as_many_runs_are_kept_as_a_plan_says(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    for number in range(MAX_RUNS + 2):
        made.run(**given_arrays() | {"sm_scale": 1.0 + number})
    assert len(made._runs) == MAX_RUNS
    before = len(prepared)
    for number in range(2, MAX_RUNS + 2):
        made.run(**given_arrays() | {"sm_scale": 1.0 + number})
    assert len(prepared) == before
    made.run(**given_arrays() | {"sm_scale": 1.0})
    assert len(prepared) == before + 2
    assert len(made._runs) == MAX_RUNS


def test_a_run_that_comes_again_is_launched_and_nothing_else(
    device: MadeUpDevice, prepared: list[NotedLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(page_size=64)
    prepared.clear()
    allocated = len(device.allocated)
    first = given_arrays()
    assert made.run(**first, stream=5) == (first["out"], first["lse"])
    assert [launch.streams for launch in prepared] == [[5], [5]]
    monkeypatch.setattr(plan, "gather_arguments", None)
    monkeypatch.setattr(plan, "run_tensor_cores", None)
    again = given_arrays()
    for stream in (7, None, 5):
        out, lse = made.run(**again, stream=stream)
        assert out is again["out"]
        assert lse is again["lse"]
    assert [launch.streams for launch in prepared] == [[5, 7, 0, 5], [5, 7, 0, 5]]
    assert len(device.allocated) == allocated


def test_another_run_is_prepared_for_other_arrays(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    for changed in ({}, {"lse": replace(given_arrays()["lse"], pointer=ELSEWHERE)}, {}):
        made.run(**given_arrays() | changed, stream=3)
    assert [launch.arguments[2].pointer for launch in prepared] == [6 << 32, 6 << 32, ELSEWHERE, ELSEWHERE]
    assert [launch.streams for launch in prepared] == [[3, 3], [3, 3], [3], [3]]


def test_plans_do_not_share_their_runs(prepared: list[NotedLaunch]) -> None:
    plans = [planned(page_size=64) for _ in range(2)]
    prepared.clear()
    for made in plans:
        made.run(**given_arrays())
    assert len(prepared) == 4


def test_memory_of_the_caller_is_not_kept(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    given = given_arrays()
    views = [value for value in given.values() if isinstance(value, DeviceView)]
    owners = [weakref.ref(each.owner) for each in (*views, *given["tree"].arrays().values())]
    made.run(**given)
    scratch = prepared[0].arguments[-1]
    del given, views
    gc.collect()
    assert len(made._runs) == 1
    assert [owner() for owner in owners] == [None] * len(owners)
    for launch in prepared:
        assert [argument.owner for argument in launch.arguments[:-1]] == [None] * 7
        assert launch.arguments[-1] is scratch
        assert isinstance(scratch.owner, Owner)  # not the caller's


def test_tensor_maps_stay_as_long_as_any_launch() -> None:
    assert tensor_maps._maps_of.cache_parameters()["maxsize"] is None


def test_a_sequence_of_the_callers_gets_launches_of_its_own(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    given = given_arrays()
    sequence = LaunchSequence()
    made.run(**given)
    made.run(**given, stream=sequence)
    made.run(**given)
    assert sequence.launches == prepared[2:]
    assert [launch.streams for launch in prepared] == [[0, 0], [0, 0], [], []]
    assert prepared[2].arguments[0] is given["tree"].ancestor_bits  # which it keeps alive


def test_values_are_checked_where_they_are_to_be(
    prepared: list[NotedLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(page_size=64)
    made.run(**given_arrays())
    asked: list[bool] = []

    def gather(*_: Any, validate: bool, **__: Any) -> Any:
        asked.append(validate)
        raise ArgumentError("tree", "values", "others")

    monkeypatch.setattr(plan, "gather_arguments", gather)
    made.run(**given_arrays())
    with pytest.raises(ArgumentError, match=r"^tree: got values"):
        made.run(**given_arrays(), validate=True)
    assert asked == [True]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"sm_scale": True}, "^sm_scale: got True"),
        ({"sm_scale": float("nan")}, "^sm_scale: got nan"),
        ({"out": np.zeros((B, N, H, 512), np.float32)}, "^out: got host arrays"),
        ({"lse": view(6 << 32, (B, N, H), np.float64)}, "^lse: got float64"),
        ({"kpe_cache": view(3 << 32, (200, 64, 63), bfloat16)}, "^kpe_cache: got bfloat16"),
        ({"q_nope": view((1 << 32) + 8, (B, N, H, 512), bfloat16)}, "^q_nope: got .* 8 bytes past"),
        ({"block_table": None}, "^ckv_cache: got"),
        ({"stream": "fast"}, "^stream: got 'fast'"),
    ],
)
def test_what_is_wrong_stays_so_after_good_runs(
    prepared: list[NotedLaunch], changed: dict[str, Any], match: str
) -> None:
    made = planned(page_size=64)
    made.run(**given_arrays() | {"sm_scale": 1.0})
    launched = [list(launch.streams) for launch in prepared]
    kept = len(made._runs)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=match):
            made.run(**given_arrays() | {"sm_scale": 1.0} | changed)
    assert [launch.streams for launch in prepared] == launched
    assert len(made._runs) == kept


def test_outputs_that_are_not_given_are_allocated_each_time(
    device: MadeUpDevice, prepared: list[NotedLaunch]
) -> None:
    made = planned(page_size=64)
    before = len(device.allocated)
    results = [made.run(**given_arrays() | {"out": None}) for _ in range(2)]
    assert len(device.allocated) == before + 2
    assert results[0][0].pointer != results[1][0].pointer
    assert len(made._runs) == 0


# On a device.


gpu = pytest.mark.gpu
KERNELS = ("tensor_cores", "hopper", "shared_scores")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return runnable_kernel(request.param)


def inputs_for(kernel: str, rng: np.random.Generator, **changed: Any) -> CacheInputs:
    is_plain = kernel == "shared_scores"
    own = {"dtype": np.float32, "page_size": None} if is_plain else {"dtype": bfloat16, "page_size": 64}
    return make_inputs(rng, [300, 0, 77], **({"N": 17, "H": 8} | own | changed))


def plan_of(library: Library, inputs: CacheInputs, kernel: str) -> TreeAttention:
    splits = {} if kernel == "shared_scores" else {"split_keys": 128}
    return plan_for(library, inputs, kernel=kernel, **splits)


@pytest.fixture
def found_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give what makes all runs but those that come again fail from then on."""

    def refuse() -> None:
        monkeypatch.setattr(plan, "gather_arguments", None)

    return refuse


@gpu
@pytest.mark.parametrize("make_library", [numba_library, torch_library, cupy_library])
def test_runs_that_come_again_read_what_is_in_memory(
    rng: np.random.Generator, kernel: str, make_library: Any, found_only: Callable[[], None]
) -> None:
    library = make_library()
    inputs = inputs_for(kernel, rng)
    if library.name == "numba" and inputs.queries.dtype == bfloat16:
        inputs = inputs_for(kernel, rng, dtype=np.float16)
    made = plan_of(library, inputs, kernel)
    run = Run(library, inputs)
    first = run(made)
    if kernel != "shared_scores":
        assert_accurate(inputs, *first)
    # The same sizes, lengths and pages; other numbers, and another tree.
    others = [replace(inputs, queries=-inputs.queries), replace(inputs, cache=inputs.cache[..., ::-1].copy())]
    others.append(replace(inputs, tree=replace(inputs.tree, num_nodes=np.array([3, 0, 17], np.int32))))
    wanted = [Run(library, other)(made) for other in others]
    sources = [Run(library, other) for other in (*others, inputs)]
    found_only()
    assert_same(run(made), first)
    for source, want in zip(sources, [*wanted, first], strict=True):
        run.fill_from(source)
        assert_same(run(made), want)


@gpu
def test_runs_at_other_addresses_and_after_others_made_room(
    rng: np.random.Generator, kernel: str, found_only: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.PreparedRuns.__init__, "__defaults__", (3,))
    library = torch_library()
    inputs = inputs_for(kernel, rng)
    made = plan_of(library, inputs, kernel)
    runs = [Run(library, inputs) for _ in range(5)]
    first = runs[0](made)
    for _ in range(2):
        for run in runs:
            assert_same(run(made), first)
    assert len(made._runs) == 3
    found_only()
    for run in runs[2:]:
        assert_same(run(made), first)


@gpu
def test_memory_that_was_freed_and_came_back(rng: np.random.Generator, kernel: str) -> None:
    torch = pytest.importorskip("torch")
    library = torch_library()
    inputs = inputs_for(kernel, rng)
    made = plan_of(library, inputs, kernel)
    gc.collect()  # of earlier tests' arrays, whose memory would be seen to go
    before = torch.cuda.memory_allocated()
    first = Run(library, inputs)(made)
    gc.collect()
    assert torch.cuda.memory_allocated() == before, "a run keeps arrays alive"
    addresses = set()
    for _ in range(5):
        run = Run(library, inputs)
        addresses.add(run.given["ckv_cache"].data_ptr())
        assert_same(run(made), first)
        del run
    assert len(addresses) < 5, "no address came back"


@gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_runs_go_to_the_stream_of_the_call(
    rng: np.random.Generator, kernel: str, form: str, found_only: Callable[[], None]
) -> None:
    library = torch_library()
    inputs = inputs_for(kernel, rng)
    made = plan_of(library, inputs, kernel)
    run = Run(library, inputs)
    want = run(made)  # on the default stream
    found_only()
    queries = run.given["q_nope"]
    host = queries.cpu()
    with side_stream(form) as (torch, delayed_copy, options):
        queries.zero_()
        late = delayed_copy(host)
        stream = options.get("stream", torch.cuda.current_stream())
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream)
        with torch.cuda.stream(stream):
            queries.copy_(late)
        made.run(**run.given, **run.outputs, **options)
    torch.cuda.synchronize()
    assert_same(run.results(), want)


@gpu
def test_a_run_that_comes_again_allocates_nothing(
    rng: np.random.Generator, kernel: str, found_only: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    library = torch_library()
    inputs = inputs_for(kernel, rng)
    made = plan_of(library, inputs, kernel)
    run = Run(library, inputs)
    want = run(made)
    found_only()
    monkeypatch.setattr(cuda, "device_array", None)
    torch.cuda.synchronize()
    requested = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(50):
        made.run(**run.given, **run.outputs)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == requested
    assert_same(run.results(), want)


@gpu
@pytest.mark.parametrize("is_known", [False, True])
def test_a_graph_of_torch_takes_runs(rng: np.random.Generator, kernel: str, is_known: bool) -> None:
    torch = pytest.importorskip("torch")
    library = torch_library()
    inputs = inputs_for(kernel, rng)
    other = replace(inputs, queries=-inputs.queries)
    made = plan_of(library, inputs, kernel)
    wanted = [Run(library, each)(made) for each in (inputs, other)]
    run = Run(library, inputs)
    sources = [Run(library, each) for each in (inputs, other)]
    if is_known:
        run(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(**run.given, **run.outputs)
    made._runs._runs.clear()  # the graph needs none of them
    gc.collect()
    for number in (0, 1, 0):
        run.fill_from(sources[number])
        for array in run.outputs.values():
            array.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(run.results(), wanted[number])
    assert_same(run(made), wanted[0])  # outside of a graph, and not known


@gpu
@pytest.mark.parametrize("is_known", [False, True])
def test_a_graph_of_cuda_core_takes_runs(rng: np.random.Generator, kernel: str, is_known: bool) -> None:
    from cuda.core import Device

    library = torch_library()
    inputs = inputs_for(kernel, rng)
    made = plan_of(library, inputs, kernel)
    want = Run(library, inputs)(made)
    run = Run(library, inputs)
    if is_known:
        run(made)
    cuda.synchronize()
    device = Device()
    device.set_current()
    stream = device.create_stream()
    builder = stream.create_graph_builder().begin_building()
    made.run(**run.given, **run.outputs, stream=stream)
    graph = builder.end_building().complete()
    for _ in range(2):
        for array in run.outputs.values():
            array.fill_(7)
        cuda.synchronize()
        graph.launch(stream)
        stream.sync()
        assert_same(run.results(), want)
    assert_same(run(made), want)


@gpu
def test_values_of_known_runs_are_checked_where_they_are_to_be(rng: np.random.Generator, kernel: str) -> None:
    library = torch_library()
    inputs = inputs_for(kernel, rng)
    made = plan_of(library, inputs, kernel)
    run = Run(library, inputs)
    want = run(made)
    assert_same(run(made, validate=True), want)
    run.given["prefix_lengths"][0] = -1
    with pytest.raises(ArgumentError, match=r"^prefix_lengths\[0\]: got -1"):
        run(made, validate=True)
    got = run(made)  # not checked, and NaN
    assert np.isnan(got[0][0, : int(inputs.tree.num_nodes[0])].astype(np.float32)).all()
    assert_same([each[1:] for each in got], [each[1:] for each in want])
