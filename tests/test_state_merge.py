"""Merging attention states: the reference, bad arguments, and the kernel on a device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, assert_same_arrays, numba_library, numpy_library
from libraries import LIBRARIES, side_stream
from merge_checks import DTYPES, assert_a_lone_side_is_kept, check_merge, make_states
from ml_dtypes import bfloat16

import numba_ddtree
from numba_ddtree import ArgumentError

HOST = numpy_library()
BASES = [(math.e, math.e), (2, math.e), (math.e, 2.0), (2, 2)]


@pytest.mark.parametrize("bases", BASES)
def test_reference_is_float64(rng: np.random.Generator, bases: tuple[float, float]) -> None:
    check_merge(HOST, make_states(rng, (3, 5, 2), 16, (np.float32, bfloat16)), bases=bases, backend="numpy")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_lone_side_is_kept(rng: np.random.Generator, dtype: Any) -> None:
    states = make_states(rng, (200,), 4, (dtype, dtype))
    assert_a_lone_side_is_kept(states, *check_merge(HOST, states, backend="numpy"))


def test_far_apart_sides_and_nan(rng: np.random.Generator) -> None:
    states = make_states(rng, (4,), 2, (np.float32, np.float32))
    states |= {
        "out_a": np.ones((4, 2), np.float32),
        "out_b": np.full((4, 2), 3, np.float32),
        "lse_a": np.array([1e4, -1e4, np.nan, 0], np.float32),
        "lse_b": np.array([-1e4, 1e4, 0, np.nan], np.float32),
    }
    out, lse = numba_ddtree.merge_states(**states, backend="numpy")
    np.testing.assert_array_equal(out[:2], [[1, 1], [3, 3]])
    np.testing.assert_array_equal(lse[:2], [1e4, 1e4])
    assert np.isnan(out[2:]).all()
    assert np.isnan(lse[2:]).all()


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"out_a": None}, "^out_a: got None; expected an array"),
        ({"out_a": np.float32(1)}, "^out_a: got a single number"),
        ({"out_a": np.zeros((3, 4))}, "^out_a: got float64"),
        ({"out_a": np.zeros((3, 5), np.float32)}, "^out_a: got D = 5; expected an even D"),
        ({"out_b": np.zeros((2, 4), np.float32)}, r"^out_b: got float32 of shape \(2, 4\)"),
        ({"out_b": np.zeros((3, 6), np.float32)}, r"^out_b: got float32 of shape \(3, 6\)"),
        ({"lse_a": np.zeros((3, 1), np.float32)}, "^lse_a: "),
        ({"lse_b": np.zeros(3)}, "^lse_b: got float64"),
        ({"lse_base_a": 10}, "^lse_base_a: got 10; expected math.e or 2"),
        ({"lse_base_b": None}, "^lse_base_b: got None; expected math.e or 2"),
        ({"lse_base_b": [2]}, r"^lse_base_b: got \[2\]; expected math.e or 2"),
        ({"out": np.zeros((3, 4))}, "^out: got float64; expected"),
        ({"out": np.zeros((3, 2), np.float32)}, "^out: got float32 of shape"),
        ({"lse": np.zeros(3)}, "^lse: got float64"),
        ({"out_dtype": int}, "^out_dtype: got int64; expected"),
        ({"backend": "flash"}, "^backend: got 'flash'"),
    ],
)
def test_bad_arguments(changed: dict[str, Any], match: str) -> None:
    states = make_states(np.random.default_rng(0), (3,), 4, (np.float32, np.float32))
    with pytest.raises(ArgumentError, match=match):
        numba_ddtree.merge_states(**(states | {"backend": "numpy"} | changed))


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype_a", DTYPES)
@pytest.mark.parametrize("dtype_b", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
def test_kernel_is_float64(rng: np.random.Generator, dtype_a: Any, dtype_b: Any, out_dtype: Any) -> None:
    states = make_states(rng, (3, 7, 5), 512, (dtype_a, dtype_b))
    bases = BASES[rng.integers(len(BASES))]
    out, lse = check_merge(numba_library(), states, out_dtype=out_dtype, bases=bases)
    if bases == (math.e, math.e):
        assert_a_lone_side_is_kept(states, out, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [2, 4, 254, 256, 258, 2048])
@pytest.mark.parametrize("rows", [(), (1,), (0,), (300,), (2, 3, 4, 5)])
def test_kernel_at_any_shape(rng: np.random.Generator, D: int, rows: tuple[int, ...]) -> None:
    check_merge(numba_library(), make_states(rng, rows, D, (bfloat16, np.float32)))


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_kernel_takes_arrays_of_every_library(rng: np.random.Generator, make_library: Any) -> None:
    library: Library = make_library()
    for dtypes in ((np.float32, np.float32), (bfloat16, np.float32)):
        check_merge(library, make_states(rng, (9, 4), 64, dtypes), bases=(2, math.e))


@pytest.mark.gpu
def test_kernel_merges_in_place_and_repeats_to_the_bit(rng: np.random.Generator) -> None:
    library = numba_library()
    states = make_states(rng, (4000,), 128, (np.float32, np.float32))
    want = dict(zip(("out", "lse"), check_merge(library, states), strict=True))
    for side in "ab" * 5:
        given = library.put_all(**states)
        got = numba_ddtree.merge_states(**given, out=given[f"out_{side}"], lse=given[f"lse_{side}"])
        assert_same_arrays(dict(zip(want, map(library.get, got), strict=True)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernel_runs_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    states = make_states(rng, (50,), 64, (np.float32, np.float32))
    want = check_merge(numba_library(), states)
    with side_stream(form) as (torch, delayed_copy, options):
        given = {name: delayed_copy(torch.from_numpy(array)) for name, array in states.items()}
        got = numba_ddtree.merge_states(**given, **options)
    torch.cuda.synchronize()
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(array.cpu().numpy(), expected)
