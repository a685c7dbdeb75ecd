"""`merge_states`, and the tail of tree attention, in the simulator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, attend, numba_library, numpy_library
from merge_checks import DTYPES, assert_a_lone_side_is_kept, check_merge, make_states
from ml_dtypes import bfloat16

import numba_ddtree
from inputs import make_attention
from numba_ddtree import BackendError, TreeAttention
from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.refs import tree_attention as reference

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
]


@pytest.fixture(params=["numba", "numpy"])
def library(request: pytest.FixtureRequest) -> Library:
    return numba_library() if request.param == "numba" else numpy_library()


@pytest.mark.parametrize("dtype_a", DTYPES)
@pytest.mark.parametrize("dtype_b", DTYPES)
def test_merge_is_float64(rng: np.random.Generator, library: Library, dtype_a: Any, dtype_b: Any) -> None:
    states = make_states(rng, (2, 5), 66, (dtype_a, dtype_b))
    for out_dtype in (None, np.float32, bfloat16):
        assert_a_lone_side_is_kept(states, *check_merge(library, states, out_dtype=out_dtype))


def test_merge_of_bases(rng: np.random.Generator, library: Library) -> None:
    for bases in ((2, math.e), (math.e, 2), (2, 2)):
        check_merge(library, make_states(rng, (6,), 4, (np.float32, np.float32)), bases=bases)


def test_merge_of_nan_and_of_nothing(library: Library) -> None:
    ones = np.ones((3, 2), np.float32)
    lse = np.array([np.nan, 0, 0], np.float32)
    other = np.array([0, np.nan, 0], np.float32)
    given = library.put_all(out_a=ones, lse_a=lse, out_b=ones, lse_b=other)
    out, merged = map(library.get, numba_ddtree.merge_states(**given))
    assert np.isnan(out[:2]).all()
    assert np.isnan(merged[:2]).all()
    np.testing.assert_array_equal(out[2], [1, 1])
    nothing = library.put_all(out_a=ones[:0], lse_a=lse[:0], out_b=ones[:0], lse_b=lse[:0])
    assert library.get(numba_ddtree.merge_states(**nothing)[0]).shape == (0, 2)


def test_tail_and_prefix_merged_are_the_whole(rng: np.random.Generator, library: Library) -> None:
    given = make_attention(rng, prefixes=[9, 0, 4], N=5, H=1, num_nodes=[5, 3, 0])
    whole = attend(library, given)
    arrays = library.put_all(
        q_nope=given.q_nope,
        q_pe=given.q_pe,
        ckv_cache=given.ckv_cache,
        kpe_cache=given.kpe_cache,
        prefix_lengths=given.prefix_lengths,
    )
    tree = library.put_tree(given.tree)
    tail = [
        library.get(array)
        for array in numba_ddtree.tree_tail_attention(**arrays, tree=tree, sm_scale=given.sm_scale)
    ]
    want = reference.tree_attention(
        given.q_nope,
        given.q_pe,
        given.ckv_cache,
        given.kpe_cache,
        given.tree.ancestor_bits,
        given.tree.num_nodes,
        given.prefix_lengths,
        given.sm_scale,
        sees_prefix=False,
    )
    for got, each in zip(tail, want, strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-6, atol=1e-5)
    # What is left of the whole, by weights, is the prefix's state.
    with np.errstate(invalid="ignore", divide="ignore"):
        lse = np.log(np.exp(whole[1].astype(float)) - np.exp(tail[1].astype(float)))
        lse[given.prefix_lengths == 0] = -np.inf
        shares = [np.exp(each - lse)[..., None] for each in (whole[1], tail[1])]
        out = shares[0] * whole[0] - shares[1] * tail[0]
    prefix = {"out_a": out.astype(np.float32), "lse_a": lse.astype(np.float32)}
    states = library.put_all(**prefix, out_b=tail[0], lse_b=tail[1])
    for got, each in zip(map(library.get, numba_ddtree.merge_states(**states)), whole, strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-4, atol=1e-4)


def test_planned_float32(rng: np.random.Generator, library: Library) -> None:
    given = make_attention(rng, prefixes=[9, 3], N=5, H=1)
    plan = TreeAttention.plan(2, 5, 1, max_prefix_length=12, dtype=np.float32)
    assert (plan.kernel, plan.workspace_bytes) == ("shared_scores", 0)
    arrays = library.put_all(
        q_nope=given.q_nope,
        q_pe=given.q_pe,
        ckv_cache=given.ckv_cache,
        kpe_cache=given.kpe_cache,
        prefix_lengths=given.prefix_lengths,
    )
    got = plan.run(**arrays, tree=library.put_tree(given.tree), sm_scale=given.sm_scale)
    for array, want in zip(got, attend(library, given), strict=True):
        np.testing.assert_array_equal(library.get(array), want)


def test_there_are_no_tensor_cores() -> None:
    with pytest.raises(BackendError, match=r"simulator has no tensor cores.*bfloat16.*backend=\"numpy\""):
        TreeAttention.plan(1, 1, 1, max_prefix_length=5)
