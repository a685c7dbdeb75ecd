"""`TreeAttention.schedule` and `is_scheduled`: what they take, refuse and launch, told without a device."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    CacheInputs,
    arguments_of,
    keys_of,
    make_inputs,
    plan_for,
)
from attention_runs import assert_same
from kernel_checks import numpy_library
from made_up_device import (
    FIRST_ITEMS,
    B,
    H,
    MadeUpDevice,
    N,
    NotedLaunch,
    NotingKernel,
    P,
    arguments,
    given_arrays,
    make_up_device,
    planned,
    tree_on_device,
    view,
)
from ml_dtypes import bfloat16

from numba_ddtree import ArgumentError, DraftTree, TreeAttention
from numba_ddtree import transfer as transfer_module
from numba_ddtree.arrays import Address, DeviceView
from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.launch import Kernel, LaunchSequence, _kind, _wanted_kinds
from numba_ddtree.tree_attention import bands, calls, hopper, hopper_first_items, kernels, plan
from numba_ddtree.tree_attention.hopper_state import BATCH_AT, REQUEST_WORDS
from numba_ddtree.tree_attention.prepared_runs import MAX_RUNS
from numba_ddtree.tree_attention.split_items import BY_PATH, BY_SLOT
from numba_ddtree.tree_attention.work import SplitPlan, Work

pytestmark = pytest.mark.skipif(SIMULATED, reason="arrays of the simulator have no addresses")

FOUND_AT = 2 << 30  # where the made-up device has what is copied to it
FOUND_WORDS = BATCH_AT + 1 + B * REQUEST_WORDS
ELSEWHERE = 1 << 44
HOST = numpy_library()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    return make_up_device(monkeypatch)


@pytest.fixture
def prepared(device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch) -> list[NotedLaunch]:
    """Give every launch that was prepared, the last argument of which are the first items."""
    kernel = NotingKernel([])

    def launch(transfer: Any, work: Work, splits: SplitPlan) -> None:
        arrays = work.ancestor_bits, work.num_nodes, work.prefix_lengths, work.keys.page_table
        addresses = work.keys.ckv.address, work.keys.kpe.address
        transfer.launch(kernel, 1, *arrays, *addresses, splits.first_items)

    for module in (plan, calls):
        monkeypatch.setattr(module, "launcher_of", lambda _: launch)
    monkeypatch.setattr(plan, "first_items_launcher", lambda: launch)
    return kernel.prepared


@pytest.mark.parametrize("kernel", ["hopper", "tensor_cores"])
def test_plans_rehearse_what_finds_first_items(device: MadeUpDevice, kernel: str) -> None:
    planned(kernel=kernel)
    assert device.kernels == ["hopper", FIRST_ITEMS] if kernel == "hopper" else [kernel]
    _, splits = device.launches[-1]
    assert splits.first_items.shape == ((FOUND_WORDS,) if kernel == "hopper" else (0,))


@pytest.mark.parametrize("paging", [None, "block_table", "kv_indptr"])
def test_a_schedule_is_told_what_its_runs_are(device: MadeUpDevice, paging: str | None) -> None:
    made = planned(page_size=None if paging is None else 64)
    given = arguments(paging)
    device.launches.clear()
    device.kernels.clear()
    assert made.schedule(**keys_of(given)) is None
    for is_scheduled in (True, False):
        made.run(**given, is_scheduled=is_scheduled)
    assert device.kernels == [FIRST_ITEMS, "hopper", "hopper"]
    (work, splits), *runs = device.launches
    assert splits.first_items == view(FOUND_AT, (FOUND_WORDS,), np.int32)
    assert [run.first_items for _, run in runs] == [splits.first_items, view(0, (0,), np.int32)]
    for other, run in runs:
        names = "batch", "slots", "heads", "keys", "ancestor_bits", "num_nodes", "prefix_lengths", "max_path"
        for name in (*names, "dtype", "sees_prefix", "tiles"):
            assert getattr(work, name) == getattr(other, name), name
        assert replace(splits, first_items=run.first_items) == run


def plain(argument: Any) -> Any:
    """Return a kernel's argument as what can be compared."""
    return argument.pointer if isinstance(argument, DeviceView | Address) else argument


@pytest.mark.parametrize("paging", [None, "block_table", "kv_indptr"])
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize(
    ("split_keys", "multiprocessors", "may_have_bands"),
    [(128, 132, 0), ("fastest", 133, 0), ("fastest", 4, 1)],
)
def test_first_items_are_found_by_the_numbers_of_the_run(
    device: MadeUpDevice,
    monkeypatch: pytest.MonkeyPatch,
    paging: str | None,
    dtype: Any,
    split_keys: Any,
    multiprocessors: int,
    may_have_bands: int,
) -> None:
    launched: list[tuple[Kernel, int, tuple[Any, ...]]] = []

    def launch(_: Any, kernel: Kernel, blocks: int, *given: Any, shared_bytes: int = 0) -> None:
        launched.append((kernel, blocks, given))
        assert shared_bytes == hopper.SHARED_BYTES

    monkeypatch.setattr(calls, "launcher_of", kernels.launcher_of)
    monkeypatch.setattr(plan, "first_items_launcher", kernels.first_items_launcher)
    monkeypatch.setattr(transfer_module.Transfer, "launch", launch)
    monkeypatch.setattr(hopper, "multiprocessors", lambda: multiprocessors)
    if may_have_bands:
        monkeypatch.setattr(bands, "BUSY", 2)  # all of the workers, and as many again
    monkeypatch.setattr(hopper, "key_maps", lambda *_: 77 << 32)
    monkeypatch.setattr(hopper, "cuda", kernels.cuda)
    made = planned(dtype=dtype, split_keys=split_keys, page_size=None if paging is None else 64)
    launched.clear()
    given = arguments(paging, dtype)
    made.schedule(**keys_of(given))
    made.run(**given, is_scheduled=True)
    (finding, blocks, found), (attend, run_blocks, run) = launched
    assert finding is hopper_first_items.FIND_FIRST_ITEMS
    assert attend is hopper.KERNELS[np.dtype(dtype).name]
    assert blocks == run_blocks == multiprocessors // 2 * 2
    for kernel, passed in ((finding, found), (attend, run)):
        assert _wanted_kinds(kernel.signatures, None) == [tuple(map(_kind, passed))]
    *keys_to_most_keys, has_bands, sees_prefix, by_slot, items = map(plain, found)
    assert keys_to_most_keys == list(map(plain, run[4:25]))
    maps, in_boxes, *others = map(plain, run[25:31])
    assert (maps, in_boxes) == (77 << 32, 1)
    assert others == [has_bands, items, sees_prefix, by_slot]
    assert others == [may_have_bands, FOUND_AT, 1, BY_SLOT if split_keys == "fastest" else BY_PATH]


def test_a_schedule_that_comes_again_is_launched_and_nothing_else(
    device: MadeUpDevice, prepared: list[NotedLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(page_size=64)
    prepared.clear()
    allocated = len(device.allocated)
    made.schedule(**keys_of(given_arrays()), stream=5)
    assert [launch.streams for launch in prepared] == [[5]]
    monkeypatch.setattr(plan, "gather_keys", None)
    for stream in (7, None, 5):
        made.schedule(**keys_of(given_arrays()), stream=stream)
    assert [launch.streams for launch in prepared] == [[5, 7, 0, 5]]
    assert len(device.allocated) == allocated


def test_another_schedule_is_prepared_for_other_arrays(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    for name in (None, "ckv_cache", "kpe_cache", "prefix_lengths", "block_table", None):
        given = given_arrays()
        if name is not None:
            given[name] = replace(given[name], pointer=ELSEWHERE)
        made.schedule(**keys_of(given), stream=3)
    tree = given_arrays()["tree"]
    moved = replace(tree, num_nodes=replace(tree.num_nodes, pointer=ELSEWHERE))
    made.schedule(**keys_of(given_arrays()) | {"tree": moved}, stream=3)
    made.schedule(**keys_of(given_arrays()) | {"tree": replace(tree, max_depth=3)}, stream=3)
    assert [launch.streams for launch in prepared] == [[3, 3], *[[3]] * 6]


def test_schedules_and_runs_of_either_kind_are_kept_apart(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    for stream in (3, 4):
        made.schedule(**keys_of(given_arrays()), stream=stream)
        for is_scheduled in (True, False, np.True_):
            made.run(**given_arrays(), is_scheduled=is_scheduled, stream=stream)
    assert [launch.streams for launch in prepared] == [[3, 4], [3, 3, 4, 4], [3, 4]]
    assert [launch.arguments[-1].pointer for launch in prepared] == [FOUND_AT, FOUND_AT, 0]


def test_runs_whose_outputs_are_the_caches_are_no_schedules(prepared: list[NotedLaunch]) -> None:
    """Which have a schedule's arrays in a schedule's places; they are refused."""
    made = planned(page_size=64)
    given = keys_of(given_arrays())
    made.schedule(**given)
    launched = len(prepared)
    caches = given["ckv_cache"], given["kpe_cache"]
    with pytest.raises(ArgumentError, match=r"^q_nope: got bfloat16 of shape"):
        made.run(*caches, **given, sm_scale=1.0, out=caches[0], lse=caches[1])
    assert len(prepared) == launched


def test_schedules_take_no_place_of_runs(prepared: list[NotedLaunch]) -> None:
    """As of the deepest models, whose runs fill all places."""
    made = planned(page_size=64)
    for _ in range(2):
        made.schedule(**keys_of(given_arrays()))
        for number in range(MAX_RUNS):
            made.run(**given_arrays() | {"sm_scale": 1.0 + number}, is_scheduled=True)
    assert len(made._runs) == MAX_RUNS
    assert len(made._schedules) == 1
    assert [len(launch.streams) for launch in prepared] == [0, 0, *[2] * (1 + MAX_RUNS)]


def test_plans_find_first_items_each_for_itself(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers = iter((FOUND_AT, ELSEWHERE))
    monkeypatch.setattr(plan.cuda, "to_device", lambda array: view(next(pointers), array.shape, array.dtype))
    workspace = view(7 << 32, (2**24,), np.uint8)
    plans = [planned(workspace=workspace) for _ in range(2)]
    device.launches.clear()
    for made in plans:
        made.schedule(**keys_of(arguments()))
    assert [splits.first_items.pointer for _, splits in device.launches] == [FOUND_AT, ELSEWHERE]
    assert len({splits.partials.pointer for _, splits in device.launches}) == 1


def test_what_a_schedule_was_given_is_not_kept(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    given = keys_of(given_arrays())
    views = [value for value in given.values() if isinstance(value, DeviceView)]
    owners = [weakref.ref(each.owner) for each in (*views, *given["tree"].arrays().values())]
    made.schedule(**given)
    del given, views
    gc.collect()
    assert len(made._schedules) == 1
    assert [owner() for owner in owners] == [None] * len(owners)
    ((*of_caller, items),) = (launch.arguments for launch in prepared)
    assert [argument.owner for argument in of_caller] == [None] * len(of_caller)
    assert items is made._first_items  # which belongs to the plan


def test_a_sequence_takes_a_schedule_and_keeps_its_arrays(prepared: list[NotedLaunch]) -> None:
    made = planned(page_size=64)
    prepared.clear()
    given = given_arrays()
    sequence = LaunchSequence()
    made.schedule(**keys_of(given), stream=sequence)
    made.run(**given, is_scheduled=True, stream=sequence)
    assert sequence.launches == prepared
    assert [launch.streams for launch in prepared] == [[], []]
    assert prepared[0].arguments[2] is given["prefix_lengths"]
    assert len(made._schedules) == 0


OTHER_DEVICE = "got an array on CUDA device 1; expected an array on CUDA device 0, where ckv_cache is"
TREE = tree_on_device()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"tree": None}, r"^tree: got NoneType; expected a numba_ddtree\.DraftTree"),
        ({"tree": replace(TREE, parents=view(4096, (B, N), np.int64))}, r"^tree\.parents: got int64"),
        ({"tree": replace(TREE, num_nodes=view(4096, (B + 1,), np.int32))}, r"^tree\.num_nodes: got int32"),
        (
            {"tree": replace(TREE, ancestor_bits=view(4096, (B, N, 2), np.uint32))},
            r"^tree\.ancestor_bits: got uint32 of shape \(2, 9, 2\)",
        ),
        ({"tree": replace(TREE, max_depth=-1)}, r"^tree\.max_depth: got -1"),
        ({"tree": replace(TREE, max_depth=5)}, r"^tree\.max_depth: got 5; expected at most 4, as planned"),
        ({"tree": tree_on_device(B, N + 1)}, "^tree: got N = 10; expected at most 9, as planned"),
        ({"tree": tree_on_device(B - 1, N)}, r"^block_table: got int32 of shape \(2, 90\)"),
        ({"ckv_cache": None}, "^ckv_cache: got None; expected an array"),
        ({"kpe_cache": None}, "^kpe_cache: got None; expected an array"),
        (
            {"ckv_cache": [[[1.0]]]},
            "^kpe_cache: got an array on CUDA device 0; expected an array on the host",
        ),
        (
            {"ckv_cache": view(2 << 32, (200, 64 * 512), bfloat16)},
            r"^ckv_cache: got bfloat16 of shape \(200,",
        ),
        ({"ckv_cache": view(2 << 32, (200, 64, 512), np.int32)}, "^ckv_cache: got int32"),
        ({"ckv_cache": view(2 << 32, (200, 64, 512), np.float16)}, "^kpe_cache: got bfloat16 .*float16"),
        ({"kpe_cache": view(2 << 32, (200, 64, 64), np.float16)}, "^kpe_cache: got float16 .*bfloat16"),
        ({"kpe_cache": view(2 << 32, (200, 64, 64), np.int8)}, "^kpe_cache: got int8"),
        (
            {
                "ckv_cache": view(2 << 32, (200, 64, 512), np.float16),
                "kpe_cache": view(3 << 32, (200, 64, 64), np.float16),
            },
            "^ckv_cache: got float16; expected bfloat16, as planned",
        ),
        ({"kpe_cache": view(3 << 32, (200, 32, 64), bfloat16)}, r"^kpe_cache: got .*page_size = 64"),
        ({"kpe_cache": view(3 << 32, (199, 64, 64), bfloat16)}, r"^kpe_cache: got .*pages = 200"),
        (
            {
                "ckv_cache": view(2 << 32, (200, 32, 512), bfloat16),
                "kpe_cache": view(3 << 32, (200, 32, 64), bfloat16),
            },
            "^ckv_cache: got pages of 32 rows; expected pages of 64 rows, as planned",
        ),
        ({"block_table": None}, r"^ckv_cache: got .*B = 2"),
        (
            {
                "ckv_cache": view(2 << 32, (B, 640, 512), bfloat16),
                "kpe_cache": view(3 << 32, (B, 640, 64), bfloat16),
                "block_table": None,
            },
            "^ckv_cache: got a contiguous cache; expected pages of 64 rows, as planned",
        ),
        (
            {"ckv_cache": view(2 << 32, (200, 64, 256), bfloat16)},
            "^ckv_cache: got D_CKV = 256; expected .* 512",
        ),
        ({"kpe_cache": view(3 << 32, (200, 64, 32), bfloat16)}, "^kpe_cache: got D_KPE = 32; expected .* 64"),
        ({"block_table": view(1024, (B, 90), np.int64)}, "^block_table: got int64"),
        ({"block_table": view(1024, (B + 1, 90), np.int32)}, r"^block_table: got int32 of shape \(3, 90\)"),
        (
            {"kv_indptr": view(1024, (B + 1,), np.int32)},
            "^kv_indices: got None; expected an array, since kv_i",
        ),
        (
            {"kv_indices": view(1024, (9,), np.int32)},
            "^kv_indptr: got None; expected an array, since kv_indi",
        ),
        (
            {"kv_indptr": view(1024, (B + 1,), np.int32), "kv_indices": view(1024, (9,), np.int32)},
            "^block_table: got an array beside kv_indptr",
        ),
        ({"prefix_lengths": view(512, (B + 1,), np.int32)}, r"^prefix_lengths: got int32 of shape \(3,\)"),
        ({"prefix_lengths": view(512, (B,), np.float32)}, "^prefix_lengths: got float32"),
        ({"prefix_lengths": np.zeros(B, np.int32)}, "^prefix_lengths: got an array on the host; expected"),
        (
            {"prefix_lengths": replace(view(512, (B,), np.int32), device_id=1)},
            f"^prefix_lengths: {OTHER_DEVICE}",
        ),
        ({"kpe_cache": replace(arguments()["kpe_cache"], device_id=1)}, f"^kpe_cache: {OTHER_DEVICE}"),
        ({"stream": "fast"}, "^stream: got 'fast'"),
    ],
)
def test_what_a_schedule_refuses(prepared: list[NotedLaunch], changed: dict[str, Any], match: str) -> None:
    """Before a good one and after it."""
    made = planned(page_size=64, max_depth=4)
    prepared.clear()
    good = keys_of(arguments("block_table")) | {"tree": replace(TREE, max_depth=4)}
    with pytest.raises(ArgumentError, match=match):
        made.schedule(**good | changed)
    assert not any(launch.streams for launch in prepared)
    made.schedule(**good)
    with pytest.raises(ArgumentError, match=match):
        made.schedule(**good | changed)
    assert [launch.streams for launch in prepared if launch.streams] == [[0]]


def test_schedules_of_arrays_of_jax_are_waited_for(
    prepared: list[NotedLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned(page_size=64)
    prepared.clear()
    events: list[Any] = []
    gather_keys = plan.gather_keys

    def gather(*given: Any, **options: Any) -> Any:
        found = gather_keys(*given, **options)
        return replace(found, placement=replace(found.placement, library="jax"))

    monkeypatch.setattr(plan, "run_key", lambda *_: None)  # as of jax's arrays
    monkeypatch.setattr(plan, "gather_keys", gather)
    monkeypatch.setattr(plan.cuda, "synchronize", lambda: events.append(list(prepared[0].streams)))
    made.schedule(**keys_of(given_arrays()))
    assert events == [[0]]


def test_batches_beyond_the_plan_are_refused(device: MadeUpDevice) -> None:
    made = planned(page_size=64)
    given = keys_of(arguments("block_table")) | {
        "tree": tree_on_device(B + 1),
        "prefix_lengths": view(512, (B + 1,), np.int32),
        "block_table": view(1024, (B + 1, 90), np.int32),
    }
    with pytest.raises(ArgumentError, match=r"^tree: got B = 3; expected at most 2, as planned"):
        made.schedule(**given)


def test_schedules_of_fewer_requests_and_slots_than_planned(device: MadeUpDevice) -> None:
    made = planned(max_batch=5, num_slots=33)
    for batch, slots in ((0, 1), (1, 1), (2, 20), (5, 33)):
        given = {
            "ckv_cache": view(2 << 32, (batch, 6000, 512), bfloat16),
            "kpe_cache": view(3 << 32, (batch, 6000, 64), bfloat16),
            "tree": tree_on_device(batch, slots),
        }
        made.schedule(**given)
        work, _ = device.launches[-1]
        assert (work.batch, work.slots, work.heads) == (batch, slots, H)
        assert work.prefix_lengths.shape == (0,)  # not given


def test_caches_of_another_device_are_refused(device: MadeUpDevice) -> None:
    made = planned(page_size=64)
    tree = {name: replace(array, device_id=1) for name, array in TREE.arrays().items()}
    given = keys_of(arguments("block_table"))
    given = {name: value if name == "tree" else replace(value, device_id=1) for name, value in given.items()}
    given["tree"] = DraftTree(**tree, max_depth=TREE.max_depth)
    with pytest.raises(ArgumentError, match=r"^ckv_cache: got arrays .*1.*, as planned"):
        made.schedule(**given)


@pytest.mark.parametrize(("name", "bytes_past"), [("ckv_cache", 8), ("kpe_cache", 2)])
def test_rows_that_no_kernel_reads_are_refused(device: MadeUpDevice, name: str, bytes_past: int) -> None:
    made = planned()
    good = arguments()[name]
    for wrong in (
        replace(good, pointer=good.pointer + bytes_past),
        replace(good, strides=(*good.strides[:2], 4)),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: got "):
            made.schedule(**keys_of(arguments()) | {name: wrong})


@pytest.mark.parametrize("kernel", ["hopper", "tensor_cores", "shared_scores", "reference"])
@pytest.mark.parametrize("wrong", [1, 0, None, "yes", np.array([True])])
def test_what_is_neither_scheduled_nor_not(device: MadeUpDevice, kernel: str, wrong: Any) -> None:
    made = plan_of_kernel(kernel)
    before = len(device.launches)
    with pytest.raises(ArgumentError, match=r"^is_scheduled: got .*; expected True or False"):
        made.run(**arguments(), is_scheduled=wrong)
    assert len(device.launches) == before


# Other kernels, and arrays on the host.


def plan_of_kernel(kernel: str) -> TreeAttention:
    options: dict[str, dict[str, Any]] = {
        "shared_scores": {"dtype": np.float32},
        "reference": {"backend": "numpy"},
    }
    made = planned(**options.get(kernel, {"kernel": kernel}))
    assert made.kernel == kernel
    return made


def test_tensor_cores_run_as_ever(device: MadeUpDevice) -> None:
    made = plan_of_kernel("tensor_cores")
    device.launches.clear()
    results = {"out": view(5 << 32, (B, N, H, 512), bfloat16), "lse": view(6 << 32, (B, N, H), np.float32)}
    for _ in range(2):
        made.schedule(**keys_of(arguments()))
    assert not device.launches
    for is_scheduled in (False, True):
        made.run(**arguments(), **results, is_scheduled=is_scheduled)
    (work, splits), (other_work, other_splits) = device.launches
    assert splits == other_splits
    assert repr(work) == repr(other_work)
    assert splits.first_items == view(0, (0,), np.int32)
    with pytest.raises(ArgumentError, match=r"^ckv_cache: got D_CKV = 256; expected D_CKV = 512"):
        made.schedule(**keys_of(arguments()) | {"ckv_cache": view(2 << 32, (B, 6000, 256), bfloat16)})
    with pytest.raises(ArgumentError, match=r"^stream: got 'fast'"):
        made.schedule(**keys_of(arguments()), stream="fast")


def test_shared_scores_run_as_ever(device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan_of_kernel("shared_scores")
    runs: list[tuple[Any, ...]] = []
    monkeypatch.setattr(plan, "run_shared_scores", lambda given, *others: runs.append(others) or others[1:3])
    given = arguments(dtype=np.float32)
    made.schedule(**keys_of(given))
    assert not device.launches
    for is_scheduled in (False, True):
        made.run(**given, is_scheduled=is_scheduled)
    assert runs[0] == runs[1] == (P, None, None, None)
    with pytest.raises(ArgumentError, match=r"^ckv_cache: got bfloat16; expected float32, as planned"):
        made.schedule(**keys_of(arguments()))


def test_the_reference_runs_as_ever(rng: np.random.Generator) -> None:
    for form in (None, "block_table", "kv_indptr"):
        page_size = None if form is None else 4
        inputs = make_inputs(
            rng,
            [9, 0, 2],
            N=6,
            H=2,
            num_nodes=[6, 4, 0],
            page_size=page_size,
            form=form or "",
            latent=16,
            rope=8,
        )
        made = plan_for(HOST, inputs, backend="numpy")
        given = arguments_of(HOST, inputs)
        want = made.run(**given)
        assert made.schedule(**keys_of(given)) is None
        assert_same(list(made.run(**given, is_scheduled=True)), list(want))
    with pytest.raises(ArgumentError, match=r"^stream: got int; expected None with the numpy backend"):
        made.schedule(**keys_of(given), stream=7)


def host_inputs(form: str = "block_table") -> tuple[CacheInputs, dict[str, Any]]:
    """Make small inputs on the host, and what a schedule takes of them."""
    inputs = make_inputs(
        np.random.default_rng(0), [90, 20], N=6, H=H, num_nodes=[6, 4], page_size=16, form=form
    )
    return inputs, keys_of(arguments_of(HOST, inputs))


def test_arrays_on_the_host_are_not_scheduled(device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned(page_size=16)
    inputs, given = host_inputs()
    device.launches.clear()
    made.schedule(**given)
    assert not device.launches
    found: list[Any] = []
    monkeypatch.setattr(plan, "run_tensor_cores", lambda *_, first_items, **__: found.append(first_items))
    made.run(**arguments_of(HOST, inputs), is_scheduled=True)
    assert found == [None]  # of what is copied to the device nothing is known before


@pytest.mark.parametrize("backend", ["cuda", "numpy"])
@pytest.mark.parametrize(
    ("form", "name", "value", "match"),
    [
        (
            "block_table",
            "prefix_lengths",
            [90, -1],
            r"^prefix_lengths\[1\]: got -1; expected a length from 0",
        ),
        (
            "block_table",
            "prefix_lengths",
            [1000, 20],
            r"^prefix_lengths\[0\]: got 1000; expected a length from",
        ),
        ("block_table", "prefix_lengths", [90], r"^prefix_lengths: got int32 of shape \(1,\)"),
        ("block_table", "block_table", -1, r"^block_table\[0, 0\]: got -1; expected a page from 0 to"),
        ("kv_indptr", "kv_indices", 10**6, r"^kv_indices\[0\]: got 1000000; expected a page from 0 to"),
        ("kv_indptr", "kv_indptr", [3, 0, 3], r"^kv_indptr\[1\]: got 0; expected a number"),
        ("kv_indptr", "kv_indptr", [0, 99, 99], r"^kv_indptr\[1\]: got 99; expected a number"),
        ("block_table", "num_nodes", [7, 4], r"^num_nodes\[0\]: got 7; expected a number from 0 to N = 6"),
        ("block_table", "parents", 5, r"^tree\.parents\[0, 0\]: got 5; expected -1, as the root's"),
    ],
)
def test_values_on_the_host_are_checked(
    device: MadeUpDevice, backend: str, form: str, name: str, value: Any, match: str
) -> None:
    made = planned(page_size=16, backend=backend)
    _, given = host_inputs(form)
    made.schedule(**given)
    tree = given["tree"]
    old = getattr(tree, name) if name in tree.arrays() else given[name]
    new = np.array(value)
    if isinstance(value, int):
        new = old.copy()
        new.flat[0] = value
    if name in tree.arrays():
        given["tree"] = replace(tree, **{name: new.astype(old.dtype)})
    else:
        given[name] = new
    with pytest.raises(ArgumentError, match=match):
        made.schedule(**given)


@pytest.mark.parametrize("backend", ["cuda", "numpy"])
def test_lengths_on_the_host_beyond_the_plan(device: MadeUpDevice, backend: str) -> None:
    made = planned(page_size=16, backend=backend, max_prefix_length=89)
    _, given = host_inputs()
    with pytest.raises(
        ArgumentError, match=r"^prefix_lengths: got 90; expected at most max_prefix_length = 89"
    ):
        made.schedule(**given)


def test_the_numpy_backend_takes_no_arrays_of_a_device(device: MadeUpDevice) -> None:
    with pytest.raises(ArgumentError, match=r"^ckv_cache: got .*; expected host arrays, as planned"):
        planned(backend="numpy").schedule(**keys_of(arguments()))
