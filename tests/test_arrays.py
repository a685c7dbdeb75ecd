"""Which arrays are taken and how they are seen: host arrays of any layout, device arrays by protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_checks import assert_same_tree, numba_library
from libraries import LIBRARIES
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import numba_ddtree
from inputs import build, make_attention, make_log_probs, make_token_ids
from numba_ddtree import ArgumentError
from numba_ddtree.arrays import (
    HOST,
    Placement,
    check_array,
    check_count,
    check_indices,
    check_scalar,
    first_where,
    gather,
    placement_of,
    to_host,
)
from numba_ddtree.transfer import Transfer


class DummyDeviceArray:
    """Says by DLPack that it lives on a device; has no memory to look at."""

    def __init__(self, kind: int = 2, index: int = 0) -> None:
        self.device = (kind, index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def fortran(array: NDArray[Any]) -> NDArray[Any]:
    return np.asfortranarray(array)


def strided(array: NDArray[Any]) -> NDArray[Any]:
    wide = np.repeat(array, 2, axis=-1)
    return wide[..., ::2]


def reversed_twice(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array[::-1])[::-1]


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def as_list(array: NDArray[Any]) -> Any:
    return array.tolist()


LAYOUTS: list[Callable[[NDArray[Any]], Any]] = [fortran, strided, reversed_twice, read_only]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_arrays_of_any_layout_are_taken(rng: np.random.Generator, layout: Any) -> None:
    log_probs, ids = make_log_probs(rng, "realistic", 3, 4, 5), make_token_ids(rng, 3, 4, 5)
    budgets, prefixes = np.array([5, 0, 7], np.int32), np.array([3, 9, 0], np.int32)
    want = build(log_probs, ids, budgets, prefixes, prefixes)
    got = numba_ddtree.build_tree(
        layout(log_probs),
        layout(ids),
        layout(budgets),
        root_tokens=layout(prefixes),
        prefix_lengths=layout(prefixes),
        backend="numpy",
    )
    assert_same_tree(got, want)
    again = numba_ddtree.DraftTree.from_visibility(
        layout(want.to_visibility()),
        layout(want.token_ids),
        num_nodes=layout(want.num_nodes),
        prefix_lengths=layout(prefixes),
        max_depth=4,
        backend="numpy",
    )
    np.testing.assert_array_equal(again.parents, want.parents)
    given = make_attention(rng, prefixes=[4, 0], N=3)
    arrays = (given.q_nope, given.q_pe, given.ckv_cache, given.kpe_cache)
    options: dict[str, Any] = {"sm_scale": 0.5, "backend": "numpy"}
    plain = numba_ddtree.verify_attention(*arrays, given.tree, prefix_lengths=given.prefix_lengths, **options)
    laid_out = numba_ddtree.verify_attention(
        *map(layout, arrays), given.tree, prefix_lengths=layout(given.prefix_lengths), **options
    )
    for left, right in zip(plain, laid_out, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)


def test_results_go_into_host_arrays_of_any_layout(rng: np.random.Generator) -> None:
    given = make_attention(rng, prefixes=[4, 0], N=3)
    arguments = (given.q_nope, given.q_pe, given.ckv_cache, given.kpe_cache, given.tree)
    options: dict[str, Any] = {"sm_scale": 0.5, "prefix_lengths": given.prefix_lengths, "backend": "numpy"}
    want = numba_ddtree.verify_attention(*arguments, **options)
    out, lse = np.asfortranarray(np.empty_like(want[0])), np.empty((2, 3, 4), np.float32)[..., ::2]
    numba_ddtree.verify_attention(*arguments, out=out, lse=lse, **options)
    np.testing.assert_array_equal(out, want[0])
    np.testing.assert_array_equal(lse, want[1])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64, ">i4", ">i8"])
def test_lengths_of_any_integers_are_taken(rng: np.random.Generator, dtype: Any) -> None:
    log_probs, ids = make_log_probs(rng, "flat", 2, 3, 4), make_token_ids(rng, 2, 3, 4)
    lengths = np.array([5, 100])
    got = numba_ddtree.build_tree(
        log_probs, ids, lengths.astype(dtype) // 50 + 1, prefix_lengths=lengths.astype(dtype), backend="numpy"
    )
    assert_same_tree(got, build(log_probs, ids, np.array([1, 3], np.int32), None, lengths.astype(np.int32)))


def test_lists_are_taken_where_their_dtype_fits(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "flat", 2, 3, 4), make_token_ids(rng, 2, 3, 4, np.int64)
    got = numba_ddtree.build_tree(log_probs, ids.tolist(), [2, 3], root_tokens=[1, 2], backend="numpy")
    assert_same_tree(got, build(log_probs, ids, np.array([2, 3], np.int32), np.array([1, 2], np.int32)))
    with pytest.raises(ArgumentError, match=r"^draft_log_probs: got float64 .* expected float32"):
        numba_ddtree.build_tree(log_probs.tolist(), ids, 2, backend="numpy")


def test_inputs_are_left_as_they_are(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "flat", 2, 3, 4), make_token_ids(rng, 2, 3, 4)
    copies = log_probs.copy(), ids.copy()
    tree = numba_ddtree.build_tree(log_probs, ids, 5, backend="numpy")
    tree.token_ids[...] = 77
    np.testing.assert_array_equal(log_probs, copies[0])
    np.testing.assert_array_equal(ids, copies[1])


def test_copies_to_the_host_are_copies(rng: np.random.Generator) -> None:
    tree = build(make_log_probs(rng, "flat", 1, 3, 4), make_token_ids(rng, 1, 3, 4), 4)
    copy = tree.to_host()
    assert_same_tree(copy, tree)
    copy.parents[...] = 9
    assert tree.parents[0, 0] == -1
    array = np.arange(3)
    assert not np.shares_memory(to_host("array", array), array)


def test_placements() -> None:
    assert placement_of("x", np.zeros(3)) == HOST
    assert placement_of("x", [1, 2]) == HOST
    assert placement_of("x", DummyDeviceArray(1)) == HOST
    assert placement_of("x", DummyDeviceArray(2, 3)) == Placement("numba", 3)
    assert placement_of("x", DummyDeviceArray(13, 1)).device_id == 1  # managed memory
    assert str(HOST) == "host arrays"
    assert str(Placement("torch", 1)) == "arrays on CUDA device 1"
    assert HOST.on_host
    assert not Placement("torch", 0).on_host


def test_arrays_of_different_places_do_not_mix() -> None:
    with pytest.raises(ArgumentError) as caught:
        gather(first=np.zeros(2), second=None, third=DummyDeviceArray(2, 1))
    assert caught.value.argument == "third"
    assert str(caught.value) == (
        "third: got an array on CUDA device 1; expected an array on the host, where first is"
    )
    with pytest.raises(
        ArgumentError, match=r"^b: got an array on CUDA device 1; expected .* device 0, where a is$"
    ):
        gather(a=DummyDeviceArray(2, 0), b=DummyDeviceArray(2, 1))


def test_what_is_no_array_is_named() -> None:
    for wrong in ({"a": 1}, "text", [[1], [2, 3]], [object()], np.zeros(2, complex), np.zeros(2, "M8[s]")):
        with pytest.raises(ArgumentError, match=r"^x: got .*; expected an array"):
            gather(x=wrong)


def test_gather_passes_over_what_is_not_given() -> None:
    placement, views = gather(x=None, y=[1, 2], z=None)
    assert placement == HOST
    assert views["x"] is None
    assert views["z"] is None
    assert views["y"].tolist() == [1, 2]


def test_check_array_says_what_is_and_what_should_be() -> None:
    array = np.zeros((2, 3), np.float32)
    check_array("x", array, (np.float32,), B=None, N=3)
    check_array("x", array[:0], (np.float32, np.int32), B=None, N=3)
    with pytest.raises(ArgumentError) as caught:
        check_array("x", array, (np.int32, np.int64), B=None, N=4)
    assert str(caught.value) == "x: got float32 of shape (2, 3); expected int32 or int64 of shape [B, N = 4]"
    with pytest.raises(ArgumentError, match=r"^x: got float32 of shape \(2, 0\)"):
        check_array("x", array[:, :0], (np.float32,), B=None, N=None)
    with pytest.raises(ArgumentError, match=r"expected float32 of shape \[B\]$"):
        check_array("x", array, (np.float32,), B=None)
    with pytest.raises(ArgumentError, match=r"\[B, N = 2, N = 2\]$"):
        check_array("x", array, (np.float32,), B=None, N=2, N_=2)


def test_check_indices_takes_what_fits_int32() -> None:
    for dtype in (np.int64, np.uint8, np.int32):
        assert check_indices("x", np.array([1, 2], dtype), B=2).dtype == np.int32
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(ArgumentError, match=rf"^x\[1\]: got {value}; expected a number that fits int32$"):
            check_indices("x", np.array([1, value]), B=2)
    with pytest.raises(ArgumentError, match=r"^x\[0\]: got 18446744073709551615;"):
        check_indices("x", np.array([2**64 - 1], np.uint64), B=1)
    for wrong in (np.array([1.0, 2.0]), np.array([True, False])):
        with pytest.raises(ArgumentError, match=r"^x: got (float64|bool) of shape \(2,\); expected int32"):
            check_indices("x", wrong, B=2)


def test_check_count() -> None:
    assert check_count("n", np.int64(3), 0, 3) == 3
    for wrong in (True, np.True_, 1.0, None, "1", float("nan"), np.float32(1)):
        with pytest.raises(ArgumentError, match=r"^n: got .*; expected a whole number from 0 to 3$"):
            check_count("n", wrong, 0, 3)
    for wrong in (-1, 4, 10**30):
        with pytest.raises(ArgumentError, match=rf"^n: got {wrong}; expected a number from 0 to 3$"):
            check_count("n", wrong, 0, 3)


def test_check_scalar() -> None:
    for value in (1, 0.5, np.float32(0.5), np.int8(3), -2.0):
        assert check_scalar("s", value) == value
    for wrong in (True, None, "1", 1j, np.ones(1)):
        with pytest.raises(ArgumentError, match=r"^s: got .*; expected a real number$"):
            check_scalar("s", wrong)
    for wrong in (float("nan"), float("inf"), -np.inf, np.float32("nan")):
        with pytest.raises(ArgumentError, match=r"^s: got .*; expected a number that is finite in float32$"):
            check_scalar("s", wrong)


def test_check_scalar_refuses_what_overflows() -> None:
    with pytest.raises(ArgumentError, match=r"^s: "):
        check_scalar("s", 10**400)


def test_first_where() -> None:
    assert list(first_where(np.zeros((2, 2), bool))) == []
    assert list(first_where(np.array([[False, False], [True, True]]))) == [(1, 0)]
    assert list(first_where(np.zeros((0, 3), bool))) == []


@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.uint8, np.int8])
def test_small_numbers_are_seen_as_they_are(dtype: Any) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    placement, views = gather(x=array)
    assert placement == HOST
    assert views["x"] is array
    check_array("x", views["x"], (dtype,), B=2, N=3)
    with pytest.raises(
        ArgumentError, match=rf"^x: got {np.dtype(dtype).name} of .*; expected int32 or bfloat16"
    ):
        check_array("x", views["x"], (np.int32, bfloat16), B=3, N=3)
    assert to_host("x", array).dtype == dtype


def test_bfloat16_of_torch_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    view = gather(x=tensor)[1]["x"]
    assert view.dtype == bfloat16
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor[0, 0] = 7
    assert view[0, 0] == 7
    assert gather(x=tensor.T)[1]["x"].tolist() == tensor.T.tolist()


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.uint8, np.int8])
def test_small_numbers_go_to_the_device_and_back(
    rng: np.random.Generator, make_library: Any, dtype: Any
) -> None:
    library = make_library()
    values = rng.integers(0, 99, (3, 5)).astype(dtype)
    array = library.put(values)
    placement, views = gather(x=array)
    with Transfer(placement, None) as transfer:
        given = transfer.input(views["x"])
        transfer.output("result", (5, 3), dtype)
        assert given.dtype == dtype
        np.testing.assert_array_equal(given.copy_to_host().view(np.uint8), values.view(np.uint8))
        result = transfer.results()["result"]
    assert result.shape == (5, 3)
    assert isinstance(result, type(array))
    assert result.dtype == array.dtype


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES[1:])
def test_device_arrays_are_seen_where_they_are(rng: np.random.Generator, make_library: Any) -> None:
    library = make_library()
    values = rng.integers(0, 99, (3, 5)).astype(np.int32)
    array = library.put(values)
    placement, views = gather(x=array, y=None)
    assert placement == Placement(library.name, 0)
    assert views["x"].shape == (3, 5)
    np.testing.assert_array_equal(views["x"].copy_to_host(), values)
    np.testing.assert_array_equal(to_host("x", array), values)
    with pytest.raises(
        ArgumentError, match=r"^y: got an array on the host; expected an array on CUDA device 0"
    ):
        gather(x=array, y=values)


@pytest.mark.gpu
def test_device_arrays_that_are_not_contiguous_are_refused(rng: np.random.Generator) -> None:
    library = numba_library()
    log_probs, ids = make_log_probs(rng, "flat", 2, 3, 4), make_token_ids(rng, 2, 3, 4)
    with pytest.raises(ArgumentError, match=r"^draft_log_probs: got float32 .* strides .*C-contiguous$"):
        numba_ddtree.build_tree(library.put(np.repeat(log_probs, 2, axis=-1))[:, :, ::2], library.put(ids), 3)
    # A dimension of one may have any stride.
    torch = pytest.importorskip("torch")
    one = torch.from_numpy(log_probs[:1]).cuda().as_strided((1, 3, 4), (999, 4, 1))
    tree = numba_ddtree.build_tree(one, torch.from_numpy(ids[:1]).cuda(), 3)
    np.testing.assert_array_equal(tree.parents.cpu().numpy(), build(log_probs[:1], ids[:1], 3).parents)


@pytest.mark.gpu
def test_budgets_on_a_device_need_a_largest_one(rng: np.random.Generator) -> None:
    library = numba_library()
    given = library.put_all(
        draft_log_probs=make_log_probs(rng, "flat", 2, 3, 4),
        draft_token_ids=make_token_ids(rng, 2, 3, 4),
        budget=np.array([1, 2], np.int32),
    )
    with pytest.raises(ArgumentError, match=r"^max_budget: got None; expected a number"):
        numba_ddtree.build_tree(**given)


@pytest.mark.gpu
def test_the_numpy_backend_takes_no_device_arrays(rng: np.random.Generator) -> None:
    library = numba_library()
    given = library.put(make_log_probs(rng, "flat", 2, 3, 4)), library.put(make_token_ids(rng, 2, 3, 4))
    with pytest.raises(ArgumentError, match=r"^backend: got 'numpy' with arrays on CUDA device 0"):
        numba_ddtree.build_tree(*given, 3, backend="numpy")


@pytest.mark.gpu
def test_results_do_not_go_into_host_arrays_for_device_ones(rng: np.random.Generator) -> None:
    library = numba_library()
    log_probs, ids = make_log_probs(rng, "flat", 2, 3, 4), make_token_ids(rng, 2, 3, 4)
    with pytest.raises(
        ArgumentError, match=r"^out\.token_ids: got host arrays; expected arrays on CUDA device 0$"
    ):
        numba_ddtree.build_tree(library.put(log_probs), library.put(ids), 3, out=build(log_probs, ids, 3))
