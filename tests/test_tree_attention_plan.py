"""Tree attention's plans: splits, workspace, layouts, and what a kernel is launched with.

The device here is made up: arrays on it are addresses, and the kernel notes what it is given.
"""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_up_device import B, H, MadeUpDevice, N, P, arguments, make_up_device, planned, tree_on_device, view
from ml_dtypes import bfloat16

import numba_ddtree
from numba_ddtree import ArgumentError, BackendError, tree_attention_workspace_bytes
from numba_ddtree import transfer as transfer_module
from numba_ddtree.arrays import Address, DeviceView
from numba_ddtree.devices import find_device_fault, shared_memory_limit
from numba_ddtree.launch import Kernel, _kind, _wanted_kinds
from numba_ddtree.tree_attention import (
    block_pieces,
    calls,
    hopper,
    kernels,
    tensor_cores,
    tensor_maps,
    whole_blocks,
)
from numba_ddtree.tree_attention.split_merge import MERGE_SPLITS
from numba_ddtree.tree_attention.splits import default_split_keys, split_sizes, whole_range
from numba_ddtree.tree_attention.work import MAX_WORKERS

SLOT_BYTES = 64 * 4 * (512 + 4)
MAPS = 77 << 32  # where tensor maps are said to lie


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    return make_up_device(monkeypatch)


# Splits.


@pytest.mark.parametrize(
    ("longest", "keys"), [(0, 4096), (131072, 4096), (131073, 8192), (200_000, 8192), (2**20, 32768)]
)
def test_default_splits_depend_on_the_longest_prefix_alone(longest: int, keys: int) -> None:
    assert default_split_keys(longest) == keys
    for tiles, max_path in ((1, 1), (7, 65), (5000, 1025)):
        sizes = split_sizes(
            None, max_prefix_length=longest, max_path=max_path, tiles=tiles, workspace_limit=2**40
        )
        assert sizes.split_blocks == keys // 64
        blocks = math.ceil((longest + max_path) / 64)
        assert sizes.max_splits == max(1, math.ceil(blocks / sizes.split_blocks))


@pytest.mark.parametrize("limit_tiles", [0, 1, 2, 5, 9, 10, 11, 100])
def test_as_many_tiles_have_slots_as_the_limit_allows(limit_tiles: int) -> None:
    tiles, splits_of = 10, {64: 3, "fastest": 2}
    tile_bytes, folding = splits_of[64] * SLOT_BYTES, tiles * SLOT_BYTES
    given: dict[str, Any] = {"max_prefix_length": 191, "max_path": 1, "tiles": tiles}
    for split_keys, workers in zip(splits_of, (tiles, 0), strict=True):
        limit = limit_tiles * tile_bytes + workers * SLOT_BYTES + 7
        sizes = split_sizes(split_keys, **given, workspace_limit=limit)
        rest = min((limit - workers * SLOT_BYTES) // (splits_of[split_keys] * SLOT_BYTES), tiles)
        assert (sizes.rest_tiles, sizes.workers) == (rest, workers)
        assert sizes.workspace_bytes <= limit + 2048
    with pytest.raises(
        ArgumentError, match=rf"^workspace_limit: got {folding - 1}; expected at least {folding} bytes"
    ):
        split_sizes(64, **given, workspace_limit=folding - 1)


def test_slots_do_not_grow_beyond_the_most_workers() -> None:
    sizes = [
        split_sizes(None, max_prefix_length=9000, max_path=65, tiles=tiles, workspace_limit=2**40)
        for tiles in (MAX_WORKERS, 10 * MAX_WORKERS)
    ]
    assert sizes[0] == sizes[1]
    assert sizes[0].rest_tiles == sizes[0].workers == MAX_WORKERS


def test_one_split_needs_no_memory() -> None:
    for sizes in (
        whole_range(),
        split_sizes(None, max_prefix_length=4000, max_path=96, tiles=7, workspace_limit=1),
    ):
        assert (sizes.max_splits, sizes.rest_tiles, sizes.workspace_bytes) == (1, 0, 0)
    assert (
        split_sizes(None, max_prefix_length=4000, max_path=97, tiles=7, workspace_limit=2**30).max_splits == 2
    )


@pytest.mark.parametrize(("longest", "splits"), [(0, 1), (127, 1), (128, 2), (4000, 32), (10**6, 32)])
def test_fastest_leaves_the_length_to_the_device(longest: int, splits: int) -> None:
    sizes = split_sizes("fastest", max_prefix_length=longest, max_path=1, tiles=3, workspace_limit=2**30)
    assert (sizes.split_blocks, sizes.max_splits, sizes.split_keys) == (0, splits, "fastest")


@pytest.mark.parametrize("split_keys", [0, -64, 63, 65, 64.0, True, "quickest", 2**31])
def test_split_lengths_that_are_none(split_keys: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^split_keys: got .*; expected a multiple of 64 up to"):
        tree_attention_workspace_bytes(1, 1, 1, max_prefix_length=9, split_keys=split_keys)


def test_workspace_bytes_are_those_of_the_plan(device: MadeUpDevice) -> None:
    for options in ({}, {"split_keys": 128}, {"split_keys": "fastest"}, {"workspace_limit": 2**22}):
        needed = tree_attention_workspace_bytes(B, N, H, max_prefix_length=P, **options)
        made = planned(**options)
        assert made.workspace_bytes == needed == device.allocated[-1].shape[0]
        _, splits = device.launches[-1]
        fields = splits.partials, splits.partial_sums, splits.first_rows, splits.num_rest
        ends = [array.pointer + int(np.prod(array.shape)) * array.dtype.itemsize for array in fields]
        assert all(end <= array.pointer for end, array in zip(ends, fields[1:], strict=False))
        assert device.allocated[-1].pointer <= splits.partials.pointer
        assert needed - 256 < ends[-1] - device.allocated[-1].pointer <= needed


# What is launched.


@pytest.mark.parametrize("paging", [None, "block_table", "kv_indptr"])
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_kernel_is_told_where_everything_is(
    device: MadeUpDevice, paging: str | None, is_planned: bool
) -> None:
    given = arguments(paging)
    out, lse = view(5 << 32, (B, N, H, 512), bfloat16), view(6 << 32, (B, N, H), np.float32)
    if is_planned:
        results = planned(page_size=None if paging is None else 64).run(**given, out=out, lse=lse)
    else:
        results = numba_ddtree.verify_attention(**given, out=out, lse=lse, max_prefix_length=P)
    assert results == (out, lse)
    work, splits = device.launches[-1]
    assert (work.batch, work.slots, work.heads, work.max_path) == (B, N, H, N)
    assert (work.dtype, work.sm_scale, work.sees_prefix) == (bfloat16, 0.1, True)
    assert (work.q_nope.pointer, work.q_nope.stride) == (1 << 32, 1152)
    assert (work.q_pe.pointer, work.q_pe.stride) == ((1 << 32) + 1024, 1152)
    keys = work.keys
    assert (keys.ckv.pointer, keys.ckv.stride, keys.kpe.pointer, keys.kpe.stride) == (
        2 << 32,
        1024,
        3 << 32,
        128,
    )
    size = 6000 if paging is None else 64
    assert (keys.page_size, keys.num_pages) == (size, B if paging is None else 200)
    assert (keys.ckv_page_stride, keys.kpe_page_stride) == (1024 * size, 128 * size)
    table = {None: (0, 0, 0), "block_table": (180, 0, 90), "kv_indptr": (170, B + 1, 0)}[paging]
    assert (keys.page_table.shape[0], keys.page_starts.shape[0], keys.table_stride) == table
    assert work.ancestor_bits is given["tree"].ancestor_bits
    assert work.num_nodes is given["tree"].num_nodes
    assert work.prefix_lengths is given["prefix_lengths"]
    assert (work.out, work.lse) == (out, lse)
    assert (splits.split_blocks, splits.max_splits, splits.rest_tiles) == (64, 2, 2)
    assert splits.partials.shape == (64 * (2 * 2 + 2), 512)
    assert splits.partial_sums.shape == (64 * (2 * 2 + 2), 4)
    assert (splits.first_rows.shape, splits.num_rest.shape) == ((4,), (1,))
    assert (work.tiles_per_request, work.tiles) == (1, 2)


def test_a_planned_run_allocates_nothing(device: MadeUpDevice) -> None:
    made = planned()
    results = {"out": view(5 << 32, (B, N, H, 512), bfloat16), "lse": view(6 << 32, (B, N, H), np.float32)}
    before = len(device.allocated)
    for _ in range(3):
        made.run(**arguments(), **results)
    assert len(device.allocated) == before
    _, splits = device.launches[-1]
    assert splits.partials.pointer == device.allocated[0].pointer


def test_plans_rehearse_with_the_forms_that_they_run(device: MadeUpDevice) -> None:
    for page_size in (None, 16):
        made = planned(page_size=page_size, out_dtype=np.float32, dtype=np.float16)
        work, _ = device.launches[-1]
        assert (work.dtype, work.out.dtype, work.slots, work.heads) == (np.float16, np.float32, N, H)
        assert (work.keys.page_table.shape[0] > 0) == (page_size is not None)
        assert made.kernel == "hopper"


@pytest.mark.parametrize("paging", [None, "block_table", "kv_indptr"])
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
@pytest.mark.parametrize("limit", [block_pieces.SHARED_BYTES, 101376, whole_blocks.SHARED_BYTES, 232448])
def test_launches_are_of_signatures_that_are_compiled(
    device: MadeUpDevice,
    monkeypatch: pytest.MonkeyPatch,
    paging: str | None,
    dtype: Any,
    out_dtype: Any,
    limit: int,
) -> None:
    launched: list[tuple[Kernel, int, tuple[Any, ...]]] = []

    def launch(_: Any, kernel: Kernel, blocks: int, *given: Any, shared_bytes: int = 0) -> None:
        launched.append((kernel, blocks, given))
        assert shared_bytes <= limit

    monkeypatch.setattr(calls, "launcher_of", kernels.launcher_of)
    monkeypatch.setattr(transfer_module.Transfer, "launch", launch)
    monkeypatch.setattr("numba_ddtree.tree_attention.tensor_cores.multiprocessors", lambda: 132)
    monkeypatch.setattr("numba_ddtree.tree_attention.tensor_cores.shared_memory_limit", lambda: limit)
    for function in (numba_ddtree.verify_attention, numba_ddtree.tree_tail_attention):
        bound = {"max_prefix_length": P} if function is numba_ddtree.verify_attention else {}
        function(**arguments(paging, dtype), out_dtype=out_dtype, kernel="tensor_cores", **bound)
    module = whole_blocks if limit >= whole_blocks.SHARED_BYTES else block_pieces
    attend = module.KERNELS[np.dtype(dtype).name]
    assert {kernel for kernel, *_ in launched} == {attend, MERGE_SPLITS}
    for kernel, blocks, given in launched:
        assert 0 < blocks < 2**31
        assert _wanted_kinds(kernel.signatures, None) == [tuple(map(_kind, given))], kernel.name


@pytest.mark.parametrize("paging", [None, "block_table", "kv_indptr"])
@pytest.mark.parametrize("dtype", [bfloat16, np.float16])
@pytest.mark.parametrize("out_dtype", [None, np.float32])
def test_the_hopper_kernel_is_launched_by_its_signature(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch, paging: str | None, dtype: Any, out_dtype: Any
) -> None:
    launched: list[tuple[Kernel, int, tuple[Any, ...]]] = []

    def launch(_: Any, kernel: Kernel, blocks: int, *given: Any, shared_bytes: int = 0) -> None:
        launched.append((kernel, blocks, given))

    monkeypatch.setattr(calls, "launcher_of", kernels.launcher_of)
    monkeypatch.setattr(transfer_module.Transfer, "launch", launch)
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)
    monkeypatch.setattr(hopper, "key_maps", lambda *_: MAPS)
    monkeypatch.setattr(hopper, "cuda", kernels.cuda)
    numba_ddtree.verify_attention(
        **arguments(paging, dtype), out_dtype=out_dtype, kernel="hopper", max_prefix_length=P
    )
    ((kernel, blocks, given),) = launched
    assert kernel is hopper.KERNELS[np.dtype(dtype).name]
    assert blocks == 132
    assert _wanted_kinds(kernel.signatures, None) == [tuple(map(_kind, given))]
    maps, in_boxes, bands, first_items, sees_prefix, by_slot, scale = given[25:32]
    assert (maps, in_boxes, bands, sees_prefix, by_slot) == (MAPS, 1, 0, 1, 0)
    assert first_items.shape == (0,)
    assert scale == np.float32(0.1 * np.log2(np.e))


class Owner:
    """What memory belongs to."""


def test_launches_keep_the_memory_of_all_their_arguments(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(calls, "launcher_of", kernels.launcher_of)
    monkeypatch.setattr(transfer_module.Transfer, "launch", lambda *given, **_: kept.append(given[3:]))
    monkeypatch.setattr("numba_ddtree.tree_attention.tensor_cores.multiprocessors", lambda: 132)
    monkeypatch.setattr("numba_ddtree.tree_attention.tensor_cores.shared_memory_limit", lambda: 232448)
    given = arguments("block_table")
    given["out"], given["lse"] = (
        view(5 << 32, (B, N, H, 512), bfloat16),
        view(6 << 32, (B, N, H), np.float32),
    )
    views = [name for name, value in given.items() if isinstance(value, DeviceView)]
    given |= {name: replace(given[name], owner=Owner()) for name in views}
    owners = {name: weakref.ref(given[name].owner) for name in views}
    numba_ddtree.verify_attention(**given, kernel="tensor_cores", max_prefix_length=P)
    del given
    gc.collect()
    held = [{id(each.owner) for each in passed if isinstance(each, DeviceView | Address)} for passed in kept]
    names = [{name for name, owner in owners.items() if id(owner()) in each} for each in held]
    assert names == [set(views), {"out", "lse"}]  # of the kernel, and of the merge
    kept.clear()
    gc.collect()
    assert [name for name, owner in owners.items() if owner() is not None] == []


def test_tensor_cores_need_shared_memory() -> None:
    assert tensor_cores.module_for(block_pieces.SHARED_BYTES) is block_pieces
    with pytest.raises(
        BackendError, match=rf"needs {block_pieces.SHARED_BYTES} bytes .* this device has 49152"
    ):
        tensor_cores.module_for(49152)


@pytest.mark.parametrize(("given", "limit"), [("", 227 * 1024), ("101376", 101376), ("1000000", 227 * 1024)])
def test_a_lower_limit_of_shared_memory_can_be_tried(
    monkeypatch: pytest.MonkeyPatch, given: str, limit: int
) -> None:
    device = SimpleNamespace(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=227 * 1024)
    target = SimpleNamespace(get_current_device=lambda: device)
    monkeypatch.setattr("numba_ddtree.cuda_target.cuda", target)
    monkeypatch.setenv("NUMBA_DDTREE_SHARED_MEMORY", given)
    assert shared_memory_limit() == limit
    for wrong in ("99 KB", "-1", "1e5"):
        monkeypatch.setenv("NUMBA_DDTREE_SHARED_MEMORY", wrong)
        with pytest.raises(
            ArgumentError, match=r"^NUMBA_DDTREE_SHARED_MEMORY: got .*; expected a number of bytes"
        ):
            shared_memory_limit()


def test_tensor_maps_are_found_by_where_the_cache_lies(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tensor_maps, "_maps_of", lambda *given: keys.append(given) or MAPS)
    given = arguments("block_table")
    for _ in range(2):
        for name in ("ckv_cache", "kpe_cache"):
            given[name] = replace(given[name], owner=Owner())
        numba_ddtree.verify_attention(**given, max_prefix_length=P)
        assert tensor_maps.key_maps(device.launches[-1][0], 0) == MAPS
    assert keys[0] == keys[1]
    owners = [weakref.ref(given[name].owner) for name in ("ckv_cache", "kpe_cache")]
    del given
    device.launches.clear()
    gc.collect()
    assert [owner() for owner in owners] == [None] * 2  # though the keys live on


def test_caches_that_no_map_reaches_are_gathered(device: MadeUpDevice) -> None:
    given = arguments("block_table")
    numba_ddtree.verify_attention(**given, max_prefix_length=P)
    assert tensor_maps.takes_boxes(device.launches[-1][0].keys)
    wide = given["ckv_cache"]
    given["ckv_cache"] = replace(wide, strides=(2**40, *wide.strides[1:]))
    numba_ddtree.verify_attention(**given, max_prefix_length=P)
    assert not tensor_maps.takes_boxes(device.launches[-1][0].keys)


def test_plans_make_no_tensor_maps(device: MadeUpDevice) -> None:
    for page_size in (None, 64):
        planned(page_size=page_size)
        assert not tensor_maps.takes_boxes(device.launches[-1][0].keys)


def test_a_tail_has_one_split_and_no_memory(device: MadeUpDevice) -> None:
    results = {"out": view(5 << 32, (B, N, H, 512), np.float32), "lse": view(6 << 32, (B, N, H), np.float32)}
    numba_ddtree.tree_tail_attention(**arguments("block_table"), **results)
    work, splits = device.launches[-1]
    assert (work.sees_prefix, work.out.dtype) == (False, np.float32)
    assert device.kernels == ["tensor_cores"]
    assert (splits.max_splits, splits.partials.shape, splits.partial_sums.shape) == (1, (1, 1), (1, 1))
    assert not device.allocated


def test_a_bound_is_needed_where_only_the_device_knows(device: MadeUpDevice) -> None:
    with pytest.raises(ArgumentError, match=r"^max_prefix_length: got None; expected a bound .* kv_indptr"):
        numba_ddtree.verify_attention(**arguments("kv_indptr"))
    for paging, most in ((None, 5999), ("block_table", 90 * 64 - 1)):
        numba_ddtree.verify_attention(**arguments(paging), split_keys=64)
        assert device.launches[-1][1].max_splits == -(-(most + N) // 64)


# Layouts.


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("q_nope", (N * H * 1152, 1152, N * 1152, 2)),  # heads before nodes
        ("q_nope", (N * H * 1152, H * 1152, 1152, 4)),
        ("q_nope", (N * H * 1160, H * 1160, 1160, 2)),  # 8 bytes past a multiple of 16
        ("q_nope", (2 * N * H * 1152, H * 1152, 1152, 2)),
        ("q_pe", (0, 0, 0, 2)),
        ("ckv_cache", (6000 * 1024, 1024, 4)),
        ("ckv_cache", (6000 * 1032, 1032, 2)),
        ("ckv_cache", (6000 * 1024 + 8, 1024, 2)),
        ("ckv_cache", (0, 1024, 2)),
        ("kpe_cache", (-6000 * 128, 128, 2)),
    ],
)
def test_layouts_that_no_kernel_reads(device: MadeUpDevice, name: str, strides: tuple[int, ...]) -> None:
    given = arguments()
    good = given[name]
    given[name] = view(good.pointer, good.shape, good.dtype, strides)
    message = (
        rf"^{name}: got shape \(.* with strides \({strides[0]}, .*; expected rows .* multiples of 16 bytes"
    )
    with pytest.raises(ArgumentError, match=message):
        numba_ddtree.verify_attention(**given, max_prefix_length=P)


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache"])
def test_addresses_that_no_kernel_reads(device: MadeUpDevice, name: str) -> None:
    given = arguments()
    good = given[name]
    given[name] = view(good.pointer + 8, good.shape, good.dtype, good.strides)
    with pytest.raises(ArgumentError, match=rf"^{name}: got .*, 8 bytes past a multiple of 16; expected"):
        numba_ddtree.verify_attention(**given, max_prefix_length=P)


def test_strides_of_single_rows_do_not_matter(device: MadeUpDevice) -> None:
    given = arguments()
    given["tree"] = tree_on_device(1, 1)
    row = 576 * 2
    given["q_nope"] = view(1 << 32, (1, 1, H, 512), bfloat16, (7, 5, row, 2))
    given["q_pe"] = view((1 << 32) + 1024, (1, 1, H, 64), bfloat16, (7, 5, row, 2))
    given["ckv_cache"] = view(2 << 32, (1, 6000, 512), bfloat16, (3, row, 2))
    given["kpe_cache"] = view(3 << 32, (1, 6000, 64), bfloat16, (3, row, 2))
    given["prefix_lengths"] = None
    numba_ddtree.verify_attention(**given)
    work, _ = device.launches[-1]
    assert (work.q_nope.stride, work.keys.ckv.stride, work.keys.kpe.stride) == (row, row, row)
    assert work.prefix_lengths.shape == (0,)


# Devices and workspaces.


@pytest.mark.parametrize("call", [lambda: planned(), lambda: numba_ddtree.verify_attention(**arguments())])
def test_devices_without_the_instructions(device: MadeUpDevice, call: Any) -> None:
    device.capability = (7, 5)
    message = r"^kernel: got 'tensor_cores' on a device of compute capability 7\.5; .*8\.0.*'shared_scores'"
    with pytest.raises(ArgumentError, match=message):
        call()
    assert planned(dtype=np.float32).kernel == "shared_scores"


def test_the_quickest_kernel_that_a_device_has_is_the_default(device: MadeUpDevice) -> None:
    for capability, limit, kernel in (
        ((9, 0), 232448, "hopper"),
        ((9, 0), 101376, "tensor_cores"),
        ((8, 6), 101376, "tensor_cores"),
        ((10, 0), 232448, "tensor_cores"),
    ):
        device.capability, device.shared_limit = capability, limit
        assert planned().kernel == kernel
    with pytest.raises(
        ArgumentError, match=r"^kernel: got 'hopper' on a device of compute capability 10\.0; .*9\.0, or 't"
    ):
        planned(kernel="hopper")
    device.capability, device.shared_limit = (9, 0), 101376
    with pytest.raises(ArgumentError, match=r"^kernel: got 'hopper' with 101376 bytes of shared .* 'tensor_"):
        planned(kernel="hopper")


def test_a_workspace_of_the_callers(device: MadeUpDevice) -> None:
    needed = tree_attention_workspace_bytes(B, N, H, max_prefix_length=P)
    memory = view(7 << 32, (needed // 4,), np.float32)
    assert planned(workspace=memory).workspace_bytes == needed
    assert not device.allocated
    assert device.launches[-1][1].partials.pointer == 7 << 32
    for bad, match in (
        (
            view(7 << 32, (needed - 1,), np.uint8),
            rf"got {needed - 1} bytes; expected at least {needed} bytes",
        ),
        (view((7 << 32) + 8, (needed,), np.uint8), "got an address 8 bytes past a multiple of 16"),
        (view(7 << 32, (needed, 2), np.uint8, (4, 1)), r"got uint8 .* with strides \(4, 1\)"),
        (np.zeros(needed, np.uint8), "got host arrays; expected memory on a CUDA device"),
    ):
        with pytest.raises(ArgumentError, match=f"^workspace: {match}"):
            planned(workspace=bad)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"max_batch": 0}, "^max_batch: got 0"),
        ({"max_batch": 65537}, "^max_batch: got 65537"),
        ({"num_slots": 1026}, "^num_slots: got 1026; expected a number from 1 to 1025"),
        ({"num_heads": 129}, "^num_heads: got 129; expected a number from 1 to 128"),
        ({"max_prefix_length": -1}, "^max_prefix_length: got -1"),
        ({"max_prefix_length": 2**31}, "^max_prefix_length: got"),
        ({"max_depth": -1}, "^max_depth: got -1"),
        ({"page_size": 0}, "^page_size: got 0"),
        ({"page_size": 2.0}, r"^page_size: got 2\.0"),
        ({"dtype": np.float64}, "^dtype: got float64; expected float16 or bfloat16 or float32"),
        ({"dtype": np.float32, "page_size": 64}, "^page_size: got 64; expected None, since float32"),
        ({"dtype": np.float32, "kernel": "tensor_cores"}, "^kernel: got 'tensor_cores' with float32"),
        ({"kernel": "shared_scores"}, "^kernel: got 'shared_scores' with bfloat16"),
        ({"out_dtype": np.float16}, "^out_dtype: got float16; expected bfloat16 or float32"),
        ({"library": "jax"}, "^library: got 'jax'; expected 'torch' or 'cupy' or 'numba'"),
        ({"backend": "flash"}, "^backend: got 'flash'"),
        ({"backend": np.array(["numpy", "cuda"])}, "^backend: got array"),
        ({"library": np.array(["torch", "cupy"])}, "^library: got array"),
        ({"device_id": 1}, "^device_id: got 1"),
        ({"backend": "numpy", "library": "torch"}, "^library: got str; expected None, since the numpy"),
        ({"workspace_limit": 0}, "^workspace_limit: got 0"),
    ],
)
def test_bad_plans(device: MadeUpDevice, changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        planned(**changed)
    assert not device.allocated


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "torch.bfloat16"])
def test_dtypes_by_name(device: MadeUpDevice, dtype: str) -> None:
    assert planned(dtype=dtype).dtype == np.dtype(dtype.removeprefix("torch."))


@pytest.mark.skipif(find_device_fault() is None, reason="there is a device")
def test_without_a_device_a_plan_says_what_to_do() -> None:
    with pytest.raises(numba_ddtree.BackendError, match=r'^no CUDA device: .+; pass backend="numpy"'):
        planned()
    assert planned(backend="numpy").workspace_bytes == 0
