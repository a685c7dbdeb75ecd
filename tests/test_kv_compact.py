"""Cache compaction: accepted rows end right after the prefix, all others stay; the kernel on a device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import Library, check_compaction, numba_library, numpy_library
from libraries import LIBRARIES, side_stream
from made_up_device import make_up_device, view
from ml_dtypes import bfloat16
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from inputs import bad_compaction, compaction_past_the_pages, make_compaction, make_paths
from numba_ddtree import ArgumentError, BackendError
from numba_ddtree.arrays import DeviceView
from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.devices import find_device_fault
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.kv_compact import compact_kv as compact
from numba_ddtree.launch import Kernel, LaunchSequence
from numba_ddtree.refs.kv_compact import compact_kv, page_lists

PAGINGS = ("contiguous", "block_table", "kv_indptr")
MIXED_ROWS = (((), 512, bfloat16), ((3,), 64, np.uint16), ((2,), 5, np.float32), ((), 7, np.uint8))


def expected(
    rows: NDArray[Any], prefixes: NDArray[np.int32], indices: NDArray[np.int32], lengths: NDArray[np.int32]
) -> NDArray[Any]:
    """Gather first, then write: no order of moves to get wrong."""
    moved = rows.copy()
    for request, prefix in enumerate(prefixes):
        accepted = indices[request, : lengths[request]]
        moved[request, prefix : prefix + len(accepted)] = rows[request, prefix + accepted]
    return moved


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 12), st.integers(0, 6), st.integers(0, 9))
def test_rows_move_in_a_contiguous_cache(seed: int, B: int, N: int, L: int, longest: int) -> None:
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, longest + 1, B).astype(np.int32)
    indices, lengths = make_paths(rng, B, N, L)
    cache = rng.normal(size=(B, longest + N + 2, 5)).astype(np.float32)
    want = expected(cache, prefixes, indices, lengths)
    compact_kv(cache, prefixes, indices, lengths)
    np.testing.assert_array_equal(cache, want)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 16, 128]), st.integers(1, 4))
def test_rows_move_across_pages(seed: int, page_size: int, B: int) -> None:
    rng = np.random.default_rng(seed)
    N, L, longest = 11, 6, 7
    prefixes = rng.integers(0, longest + 1, B).astype(np.int32)
    indices, lengths = make_paths(rng, B, N, L)
    pages_each = -(-(longest + N) // page_size)
    pages = B * pages_each + 3
    table = rng.permutation(pages)[: B * pages_each].reshape(B, pages_each).astype(np.int32)
    cache = rng.normal(size=(pages, page_size, 3)).astype(np.float32)
    want = cache.copy()
    logical = cache[table].reshape(B, pages_each * page_size, 3)
    moved = expected(logical, prefixes, indices, lengths)
    want[table] = moved.reshape(B, pages_each, page_size, 3)
    compact_kv(cache, prefixes, indices, lengths, table)
    np.testing.assert_array_equal(cache, want)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32, np.float64, np.uint8])
def test_rows_of_any_dtype_move_as_they_are(rng: np.random.Generator, dtype: type[np.generic]) -> None:
    prefixes, lengths = np.array([1, 0], np.int32), np.array([3, 1], np.int32)
    indices = np.array([[0, 2, 5], [0, -1, -1]], np.int32)
    cache = rng.integers(0, 256, (2, 8, 4)).astype(dtype)
    want = expected(cache, prefixes, indices, lengths)
    compact_kv(cache, prefixes, indices, lengths)
    assert cache.tobytes() == want.tobytes()


def test_a_finished_request_is_not_touched(rng: np.random.Generator) -> None:
    cache = np.full((2, 6, 2), np.nan, np.float32)
    cache[1] = rng.normal(size=(6, 2))
    before = cache.copy()
    # A length out of range too, since nothing of such a request is looked at.
    indices = np.full((2, 3), -1, np.int32)
    compact_kv(cache, np.array([10**6, 2], np.int32), indices, np.zeros(2, np.int32))
    np.testing.assert_array_equal(cache, before)


def test_rows_that_have_no_place_are_left_alone() -> None:
    cache = np.arange(8, dtype=np.float32).reshape(1, 8, 1)
    before = cache.copy()
    lengths = np.array([3], np.int32)
    for prefix, indices in ((-1, [0, 2, 3]), (2, [-1, 0, 1]), (4, [0, 4, 2**31 - 1]), (2**31 - 1, [0, 2, 3])):
        compact_kv(cache, np.array([prefix], np.int32), np.array([indices], np.int32), lengths)
        np.testing.assert_array_equal(cache, before)
    for page in (-1, 4, 2**31 - 1):
        pages = np.array([[0, page]], np.int32)
        compact_kv(
            cache.reshape(4, 2, 1), np.zeros(1, np.int32), np.array([[0, 2, 3]], np.int32), lengths, pages
        )
        np.testing.assert_array_equal(cache, before)


def test_pages_of_ranges_that_are_none() -> None:
    lists = page_lists(np.array([0, 2, 1, -1, 1, 9], np.int32), np.array([5, 6, 7], np.int32))
    assert [pages.tolist() for pages in lists] == [[5, 6], [], [], [], [6, 7]]


# The public function, on the references.


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("planned", [False, True])
def test_all_layers_of_all_caches_move(rng: np.random.Generator, paging: str, planned: bool) -> None:
    given = make_compaction(rng, paging=paging, rows=MIXED_ROWS)
    check_compaction(numpy_library(), given, planned=planned, backend="numpy")


def test_plans_count_the_layers_of_all_caches(rng: np.random.Generator) -> None:
    planned = KVCaches.plan(make_compaction(rng, B=2, rows=MIXED_ROWS).caches)
    assert (planned.num_blocks, planned.block_size, planned.num_layers) == (2, 9 + 12, 1 + 3 + 2 + 1)


@pytest.mark.skipif(find_device_fault() is None, reason="there is a device")
def test_without_a_device_the_error_says_so() -> None:
    with pytest.raises(BackendError, match=r"^no CUDA device: "):
        compact(**(compaction() | {"backend": None}))


def test_a_cache_may_stand_alone(rng: np.random.Generator) -> None:
    given = make_compaction(rng)
    (cache,) = given.caches
    alone = cache.copy()
    compact([cache], **given.arrays, backend="numpy")
    compact(alone, **given.arrays, backend="numpy")
    np.testing.assert_array_equal(alone, cache)


def test_a_slice_of_a_fused_cache_moves_by_itself(rng: np.random.Generator) -> None:
    given = make_compaction(rng, rows=[((), 576, np.float32)])
    (fused,) = given.caches
    before = fused.copy()
    whole = fused.copy()
    compact(whole, **given.arrays, backend="numpy")
    compact(fused[..., :512], **given.arrays, backend="numpy")
    np.testing.assert_array_equal(fused[..., :512], whole[..., :512])
    np.testing.assert_array_equal(fused[..., 512:], before[..., 512:])


class Owner:
    """What memory belongs to."""


@pytest.mark.skipif(SIMULATED, reason="arrays of the simulator have no addresses")
@pytest.mark.parametrize("is_planned", [False, True])
def test_a_sequence_keeps_the_caches(monkeypatch: pytest.MonkeyPatch, is_planned: bool) -> None:
    make_up_device(monkeypatch)
    copies: list[DeviceView] = []

    def to_device(array: NDArray[Any], stream: Any) -> DeviceView:
        copies.append(view(1 << 33, array.shape, array.dtype))
        return copies[-1]

    nothing = SimpleNamespace(synchronize=lambda: None)
    target = SimpleNamespace(to_device=to_device, default_stream=lambda: nothing, synchronize=lambda: None)
    monkeypatch.setattr("numba_ddtree.transfer.cuda", target)
    monkeypatch.setattr("numba_ddtree.cuda_target.cuda", target)
    launches: list[Any] = []

    def prepare(_: Any, blocks: int, *given: Any, **__: Any) -> Any:
        launches.append(given)
        return SimpleNamespace(arguments=given)

    monkeypatch.setattr(Kernel, "prepare", prepare)
    owner = Owner()
    cache = replace(view(1 << 32, (2, 4, 16, 8), np.float32), owner=owner)
    kept, sequence = weakref.ref(owner), LaunchSequence()
    path = [view(4096 * (i + 1), shape, np.int32) for i, shape in enumerate(((4,), (4, 3), (4,)))]
    compact(KVCaches.plan(cache) if is_planned else cache, *path, stream=sequence)
    del owner, cache
    gc.collect()
    assert copies
    assert kept() is not None
    sequence.launches.clear()
    launches.clear()
    gc.collect()
    assert kept() is None


def test_an_empty_batch_moves_nothing() -> None:
    none = np.zeros(0, np.int32)
    compact(np.zeros((0, 4, 2), np.float32), none, np.zeros((0, 3), np.int32), none, backend="numpy")
    pages = {"kv_indptr": np.zeros(1, np.int32), "kv_indices": none}
    compact(np.zeros((5, 4, 2), np.float32), none, np.zeros((0, 3), np.int32), none, **pages, backend="numpy")


def compaction() -> dict[str, Any]:
    """Good arguments: B = 2, S = 9, L + 1 = 3, prefixes 2 and 4."""
    return {
        "caches": np.zeros((2, 9, 4), np.float32),
        "prefix_lengths": [2, 4],
        "accepted_indices": [[0, 2, 6], [0, 4, -1]],
        "accept_length": [3, 2],
        "backend": "numpy",
    }


def paged(**changed: Any) -> dict[str, Any]:
    """Good arguments with a block table: pages of 3 rows."""
    return {
        "caches": np.zeros((7, 3, 4), np.float32),
        "block_table": [[4, 1, 0, 99], [6, 5, 2, -1]],
    } | changed


def ranges(**changed: Any) -> dict[str, Any]:
    """Good arguments with FlashInfer's form of the same."""
    pages = {"kv_indptr": [0, 3, 6], "kv_indices": [4, 1, 0, 6, 5, 2]}
    return {"caches": np.zeros((7, 3, 4), np.float32)} | pages | changed


READ_ONLY = np.zeros((2, 9, 4), np.float32)
READ_ONLY.flags.writeable = False


LARGER = np.zeros((2, 10, 4), np.float32)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        paged(),
        ranges(),
        # Pages that nobody writes to are shared: of the prefix, and such as are only read.
        paged(block_table=[[4, 1, 0, 99], [4, 5, 0, -1]]),
        {"caches": [LARGER[:, :9, :3], LARGER[:, :9, 3:]]},
        {"caches": LARGER[:, 8::-1]},
    ],
)
def test_the_good_arguments_are_good(changed: dict[str, Any]) -> None:
    compact(**(compaction() | changed))


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"caches": None}, "caches"),
        ({"caches": []}, "caches"),
        ({"caches": 3.0}, "caches"),
        ({"caches": [[[1.0]]]}, "caches[0]"),
        ({"caches": [np.zeros((2, 9, 4)), None]}, "caches[1]"),
        ({"caches": READ_ONLY}, "caches"),
        ({"caches": np.zeros((2, 9))}, "caches"),
        ({"caches": np.zeros((1, 1, 2, 9, 4))}, "caches"),
        ({"caches": np.zeros((2, 9, 0))}, "caches"),
        ({"caches": np.zeros((0, 2, 9, 4))}, "caches"),
        ({"caches": np.zeros((2, 9, 4), complex)}, "caches"),
        ({"caches": np.zeros((3, 9, 4))}, "caches"),
        ({"caches": [np.zeros((2, 9, 4)), np.zeros((2, 8, 4))]}, "caches[1]"),
        ({"caches": [READ_ONLY.copy()] * 2}, "caches[1]"),
        ({"caches": [LARGER[:, :9], LARGER[:, 1:]]}, "caches[1]"),
        ({"caches": [LARGER[:, :9], LARGER[::-1, :9]]}, "caches[1]"),
        ({"caches": [LARGER[:, :9, :3], LARGER[:, :9, 2:]]}, "caches[1]"),
        ({"caches": as_strided(LARGER, (2, 9, 4), (160, 4, 4))}, "caches"),
        ({"caches": as_strided(LARGER, (2, 9, 4), (0, 16, 4))}, "caches"),
        ({"caches": np.ma.masked_array(LARGER[:, :9].copy(), LARGER[:, :9] == 0)}, "caches"),
        ({"validate": 1}, "validate"),
        ({"prefix_lengths": None}, "prefix_lengths"),
        ({"prefix_lengths": [2.0, 4.0]}, "prefix_lengths"),
        ({"prefix_lengths": [[2, 4]]}, "prefix_lengths"),
        ({"prefix_lengths": [2, -1]}, "prefix_lengths[1]"),
        ({"prefix_lengths": [2, 2**31]}, "prefix_lengths[1]"),
        ({"accepted_indices": None}, "accepted_indices"),
        ({"accepted_indices": [0, 2, 6]}, "accepted_indices"),
        ({"accepted_indices": [[0, 2, 6]]}, "accepted_indices"),
        ({"accepted_indices": [[0, 2, 2], [0, 4, -1]]}, "accepted_indices[0, 2]"),
        ({"accepted_indices": [[0, 2**31 - 1, -(2**31)], [0, 4, -1]]}, "accepted_indices[0, 2]"),
        ({"accepted_indices": [[-1, 2, 3], [0, 4, -1]]}, "accepted_indices[0, 0]"),
        ({"accepted_indices": [[0, 2, 6], [0, 5, -1]]}, "accepted_indices[1, 1]"),
        ({"accept_length": None}, "accept_length"),
        ({"accept_length": [3]}, "accept_length"),
        ({"accept_length": [3, 4]}, "accept_length[1]"),
        ({"accept_length": [-1, 2]}, "accept_length[0]"),
        ({"accept_length": [3, 3]}, "accepted_indices[1, 2]"),
        ({"backend": "torch"}, "backend"),
        (paged(block_table=[[4, 1, 0, 99]]), "block_table"),
        (paged(block_table=[4, 1]), "block_table"),
        (paged(block_table=[[4, 1, 7, 99], [6, 5, 2, -1]]), "block_table[0, 2]"),
        (paged(block_table=[[4, 1, 0, 99], [6, -1, 2, -1]]), "block_table[1, 1]"),
        (paged(block_table=[[4, 1], [6, 5]]), "accepted_indices[0, 2]"),
        (paged(block_table=[[4, 1, 0, 99], [6, 1, 2, -1]]), "block_table[1, 1]"),
        (paged(block_table=[[4, 1, 0, 99], [6, 5, 1, -1]]), "block_table[1, 2]"),
        (paged(block_table=[[4, 1, 1, 99], [6, 5, 2, -1]]), "block_table[0, 2]"),
        (ranges(kv_indices=[4, 1, 0, 6, 1, 2]), "kv_indices[4]"),
        (paged(kv_indptr=[0, 3, 6], kv_indices=[4, 1, 0, 6, 5, 2]), "block_table"),
        (ranges(kv_indices=None), "kv_indices"),
        (ranges(kv_indptr=None), "kv_indptr"),
        (ranges(kv_indptr=[0, 3]), "kv_indptr"),
        (ranges(kv_indptr=[0, 3, 7]), "kv_indptr[2]"),
        (ranges(kv_indptr=[0, -3, 6]), "kv_indptr[1]"),
        (ranges(kv_indptr=[0, 6, 3]), "kv_indptr[2]"),
        (ranges(kv_indptr=[0, 2, 5]), "accepted_indices[0, 2]"),
        (ranges(kv_indices=[[4, 1, 0, 6, 5, 2]]), "kv_indices"),
        (ranges(kv_indices=[4, 1, 0, 6, 7, 2]), "kv_indices[4]"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        compact(**(compaction() | changed))
    assert caught.value.argument == argument


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_kernel_is_the_reference(
    rng: np.random.Generator, make_library: Callable[[], Library], paging: str, page_size: int
) -> None:
    library = make_library()
    if not library.takes_out:
        pytest.skip(f"{library.name} has no arrays to write")
    for planned in (False, True):
        given = make_compaction(
            rng, B=33, N=65, L=15, longest=200, paging=paging, page_size=page_size, rows=MIXED_ROWS
        )
        check_compaction(library, given, planned=planned)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.float32, np.uint8, np.float64])
@pytest.mark.parametrize("D", [1, 2, 7, 16, 63, 576, 1030, 5000])
def test_kernel_moves_rows_of_any_width(rng: np.random.Generator, dtype: Any, D: int) -> None:
    given = make_compaction(rng, B=5, N=20, L=19, rows=[((2,), D, dtype)])
    check_compaction(numba_library(), given)


@pytest.mark.gpu
def test_kernel_moves_the_deepest_paths(rng: np.random.Generator) -> None:
    for L in (63, 64, 65, 127, 128, 1024):
        given = make_compaction(
            rng, B=4, N=1025, L=L, paging="kv_indptr", page_size=48, rows=[((), 40, np.uint16)]
        )
        # Every slot but the first moves one place down, so that all rows overlap.
        given.arrays["accepted_indices"][0] = [0, *range(2, L + 1), 1024]
        given.arrays["accept_length"][0] = L + 1
        check_compaction(numba_library(), given)


@pytest.mark.gpu
def test_kernel_moves_unaligned_rows(rng: np.random.Generator) -> None:
    # A cache that begins anywhere, and slices of a fused one whose strides fit other words than its rows.
    torch = pytest.importorskip("torch")
    for begin in (0, 1, 4, 8, 16):
        given = make_compaction(rng, B=3, paging="block_table", rows=[((), 96, np.uint8)])
        (cache,) = given.caches
        buffer = torch.zeros(cache.size + 64, dtype=torch.uint8, device="cuda")
        whole = buffer[begin : begin + cache.size].view(cache.shape)
        for part in (slice(0, 96), slice(0, 64), slice(4, 20), slice(3, 90), slice(0, 20), slice(8, 40)):
            whole.copy_(torch.from_numpy(cache))
            want = cache.copy()
            compact(want[..., part], **given.arrays, backend="numpy")
            arrays = {name: torch.from_numpy(array).cuda() for name, array in given.arrays.items()}
            compact(whole[..., part], **arrays)
            np.testing.assert_array_equal(whole.cpu().numpy(), want)
        assert not buffer[:begin].any()
        assert not buffer[begin + cache.size :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("paging", PAGINGS)
def test_kernel_leaves_rows_alone_that_have_no_place(rng: np.random.Generator, paging: str) -> None:
    for _ in range(20):
        check_compaction(numba_library(), bad_compaction(rng, paging))
    if paging != "contiguous":
        check_compaction(numba_library(), compaction_past_the_pages(paging))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "int8"])
def test_kernel_moves_torchs_own_dtypes(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    given = make_compaction(rng, paging="kv_indptr", rows=[((), 656, np.uint8)])
    (cache,) = given.caches
    on_device = torch.from_numpy(cache).cuda()
    arrays = {name: torch.from_numpy(array).cuda() for name, array in given.arrays.items()}
    compact([on_device.view(getattr(torch, dtype))], **arrays)
    compact(cache, **given.arrays, backend="numpy")
    np.testing.assert_array_equal(on_device.cpu().numpy(), cache)


@pytest.mark.gpu
def test_kernel_validates_device_arrays_on_request(rng: np.random.Generator) -> None:
    library = numba_library()
    given = make_compaction(rng, B=2, paging="block_table")
    check_compaction(library, given, validate=True)
    table = np.full_like(given.arrays["block_table"], -1)
    given.arrays["accept_length"][:] = 1
    given.arrays["accepted_indices"][:, 0] = 0
    with pytest.raises(ArgumentError, match=r"^block_table\["):
        check_compaction(library, replace(given, arrays=given.arrays | {"block_table": table}), validate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernel_runs_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    given = make_compaction(rng, B=4, rows=[((2,), 64, np.float32)])
    (cache,) = given.caches
    want = cache.copy()
    compact(want, **given.arrays, backend="numpy")
    with side_stream(form) as (torch, delayed_copy, options):
        arrays = {name: torch.from_numpy(array).cuda() for name, array in given.arrays.items()}
        on_device = delayed_copy(torch.from_numpy(cache))
        compact(on_device, **arrays, **options)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(on_device.cpu().numpy(), want)


@pytest.mark.gpu
def test_planned_caches_replay_in_a_graph(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    given = make_compaction(rng, B=4, paging="kv_indptr", rows=[((3,), 576, np.uint16)])
    (cache,) = given.caches
    arrays = {name: torch.from_numpy(array).cuda() for name, array in given.arrays.items()}
    on_device = torch.from_numpy(cache.view(np.int16)).cuda()
    planned = KVCaches.plan(on_device)
    compact(planned, **(arrays | {"accept_length": torch.zeros_like(arrays["accept_length"])}))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compact(planned, **arrays)
    for _ in range(3):
        other = make_paths(rng, 4, 12, 6)
        for name, array in zip(("accepted_indices", "accept_length"), other, strict=True):
            arrays[name].copy_(torch.from_numpy(array))
            given.arrays[name][...] = array
        graph.replay()
        compact(cache, **given.arrays, backend="numpy")
        np.testing.assert_array_equal(on_device.cpu().numpy().view(np.uint16), cache)
