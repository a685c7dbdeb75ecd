"""Tree attention in 16 bits and over pages, by its references; bad page tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from attention_checks import (
    FORMS,
    NO_PAGE,
    CacheInputs,
    arguments_of,
    assert_accurate,
    assert_nodes_equal_decoding,
    compute,
    exact_in_numpy,
    exact_in_torch,
    make_inputs,
    plan_for,
    random_inputs,
    same_bits,
    with_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import numpy_library
from ml_dtypes import bfloat16, finfo
from numpy.typing import NDArray

import numba_ddtree
from numba_ddtree import ArgumentError, TreeAttention

WIDTHS = {"latent": 16, "rope": 8}
HOST = numpy_library()


def small(rng: np.random.Generator, **changed: Any) -> CacheInputs:
    """Draw two requests of narrow rows, of pages of 4 unless told otherwise."""
    options: dict[str, Any] = {"N": 6, "H": 2, "num_nodes": [6, 4], "page_size": 4} | WIDTHS
    return make_inputs(rng, [9, 2], **(options | changed))


def attend_densely(inputs: CacheInputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention of each node alone, by walking to the root and looking up each key's page."""
    batch, slots, heads, _ = inputs.queries.shape
    out = np.zeros((batch, slots, heads, inputs.latent))
    lse = np.full((batch, slots, heads), -np.inf)
    for request in range(batch):
        prefix = int(inputs.prefix_lengths[request])
        for node in range(int(inputs.tree.num_nodes[request])):
            rows = []
            for key in [*range(prefix), *(prefix + slot for slot in inputs.path(request, node))]:
                page, row = request, key
                if "block_table" in inputs.paging:
                    page = inputs.paging["block_table"][request, key // inputs.cache.shape[1]]
                    row = key % inputs.cache.shape[1]
                elif "kv_indptr" in inputs.paging:
                    first = inputs.paging["kv_indptr"][request]
                    page = inputs.paging["kv_indices"][first + key // inputs.cache.shape[1]]
                    row = key % inputs.cache.shape[1]
                rows.append(inputs.cache[page, row].astype(np.float64))
            for head in range(heads):
                query = inputs.queries[request, node, head].astype(np.float64)
                weights = np.exp([inputs.sm_scale * np.dot(query, row) for row in rows])
                values = np.array(rows)[:, : inputs.latent]
                out[request, node, head] = weights @ values / weights.sum()
                lse[request, node, head] = np.log(weights.sum())
    return out, lse


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from([None, 1, 2, 3, 5, 8, 64]),
    st.sampled_from(FORMS),
)
def test_reference_is_attention_along_each_path_of_pages(
    seed: int, prefixes: list[int], N: int, page_size: int | None, form: str
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, N + 1, len(prefixes)).tolist()
    inputs = make_inputs(rng, prefixes, N=N, H=2, num_nodes=counts, page_size=page_size, form=form, **WIDTHS)
    want_out, want_lse = attend_densely(inputs)
    out, lse = exact_in_numpy(inputs)
    np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("sees_prefix", [True, False])
def test_the_judge_on_a_device_is_the_reference(rng: np.random.Generator, sees_prefix: bool) -> None:
    pytest.importorskip("torch")
    inputs = small(rng, num_nodes=[6, 0], page_size=None)
    got = exact_in_torch(inputs, "cpu", sees_prefix=sees_prefix)
    for each, want in zip(got, exact_in_numpy(inputs, sees_prefix=sees_prefix), strict=True):
        np.testing.assert_allclose(each, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("is_planned", [False, True])
def test_numpy_backend_rounds_the_exact_result_once(rng: np.random.Generator, is_planned: bool) -> None:
    for dtype in (bfloat16, np.float16):
        inputs = small(rng, dtype=dtype)
        want_out, want_lse = exact_in_numpy(inputs)
        for out_dtype in (None, np.float32):
            out, lse = compute(HOST, inputs, out_dtype=out_dtype, backend="numpy", is_planned=is_planned)
            np.testing.assert_array_equal(out, want_out.astype(out.dtype))
            np.testing.assert_array_equal(lse, want_lse.astype(np.float32))


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16, 100])
@pytest.mark.parametrize("form", FORMS)
def test_pages_of_any_size_are_a_contiguous_cache(
    rng: np.random.Generator, page_size: int, form: str
) -> None:
    inputs = small(rng, page_size=None)
    rows = [inputs.flat_cache[inputs.places(request)] for request in range(2)]
    paged = with_rows(rng, inputs, rows, page_size, form)
    want = compute(HOST, inputs, backend="numpy")
    for got, each in zip(compute(HOST, paged, backend="numpy"), want, strict=True):
        np.testing.assert_array_equal(got, each)


def test_float32_pages_by_the_numpy_backend(rng: np.random.Generator) -> None:
    inputs = small(rng, dtype=np.float32)
    out, lse = compute(HOST, inputs, backend="numpy")
    want_out, want_lse = exact_in_numpy(inputs)
    np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)


def test_out_says_the_dtype_of_the_output(rng: np.random.Generator) -> None:
    inputs = small(rng)
    given = arguments_of(HOST, inputs) | {"backend": "numpy"}
    want, _ = exact_in_numpy(inputs)
    for dtype in (bfloat16, np.float32):
        out = np.full(want.shape, 7, dtype)
        assert numba_ddtree.verify_attention(**given, out=out)[0] is out
        np.testing.assert_array_equal(out, want.astype(dtype))
    with pytest.raises(ArgumentError, match=r"^out: got float16 of shape .*; expected bfloat16"):
        numba_ddtree.verify_attention(**given, out=np.zeros(want.shape, np.float16))


@pytest.mark.parametrize("dtype", [bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("page_size", [None, 3])
def test_tail_and_prefix_merged_are_the_whole(
    rng: np.random.Generator, dtype: Any, page_size: int | None
) -> None:
    inputs = small(rng, dtype=dtype, page_size=page_size)
    exact_dtype = {"out_dtype": np.float32, "backend": "numpy"}
    tail = compute(HOST, inputs, function=numba_ddtree.tree_tail_attention, **exact_dtype)
    # The prefix alone: what another kernel would give, one row of keys after the other and no tree.
    out, lse = np.zeros(tail[0].shape), np.full(tail[1].shape, -np.inf)
    for request, prefix in enumerate(inputs.prefix_lengths.tolist()):
        rows = inputs.flat_cache[inputs.places(request)[:prefix]].astype(np.float64)
        scores = inputs.sm_scale * inputs.queries[request].astype(np.float64) @ rows.T
        lse[request] = np.log(np.exp(scores).sum(axis=-1))
        weights = np.exp(scores - lse[request][..., None])
        out[request] = weights @ rows[:, : inputs.latent]
    in_use = np.arange(6) < inputs.tree.num_nodes[:, None]
    whole = compute(HOST, inputs, **exact_dtype)
    merged = numba_ddtree.merge_states(out.astype(np.float32), lse.astype(np.float32), *tail, backend="numpy")
    for got, want in zip(merged, whole, strict=True):
        np.testing.assert_allclose(got[in_use], want[in_use], rtol=1e-5, atol=1e-5)


def test_tail_without_a_prefix_is_the_whole(rng: np.random.Generator) -> None:
    inputs = make_inputs(rng, [0, 0], N=5, H=2, page_size=2, **WIDTHS)
    whole = compute(HOST, inputs, backend="numpy")
    tail = compute(HOST, inputs, backend="numpy", function=numba_ddtree.tree_tail_attention)
    for got, want in zip(tail, whole, strict=True):
        np.testing.assert_array_equal(got, want)


def test_nodes_are_decoding_alone_by_the_numpy_backend(rng: np.random.Generator) -> None:
    """The kernels' test of equality, here to a rounding: so that it asks for what is right."""
    inputs = small(rng)
    plain = compute(HOST, inputs, backend="numpy")

    def nearly_equal(got: NDArray[Any], want: NDArray[Any]) -> NDArray[np.bool_]:
        both = got.astype(np.float64), want.astype(np.float64)
        same: NDArray[np.bool_] = np.isclose(*both, rtol=2**-8, atol=1e-6).all(axis=-1)
        return same | (both[0] == both[1]).all(axis=-1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attention_checks.same_bits", nearly_equal)
        for sizes in ((1, None), (3, 7)):
            assert_nodes_equal_decoding(
                HOST,
                rng,
                inputs,
                page_size=sizes[0],
                other_page_size=sizes[1],
                max_prefix_length=20,
                backend="numpy",
            )
    assert not same_bits(plain[0], np.roll(plain[0], 1, axis=-1)).all()


def test_random_inputs_are_good_and_judged_well(rng: np.random.Generator) -> None:
    for _ in range(3):
        inputs, options = random_inputs(rng, 3)
        out, lse = compute(HOST, inputs, backend="numpy", out_dtype=options["out_dtype"])
        assert_accurate(inputs, out, lse)
        if (inputs.tree.num_nodes > 0).any():
            with pytest.raises(AssertionError):
                assert_accurate(inputs, out * out.dtype.type(1.01), lse)
            with pytest.raises(AssertionError):
                assert_accurate(inputs, out, np.where(np.isfinite(lse), lse * np.float32(1.001), lse))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
def test_what_rounds_to_a_negative_zero_is_zero(rng: np.random.Generator, dtype: Any) -> None:
    inputs = make_inputs(rng, [3], N=1, H=2, dtype=dtype, magnitude=0.0)
    rows = np.zeros((4, inputs.cache.shape[-1]), dtype)
    rows[1] = -finfo(dtype).smallest_subnormal  # of four keys of equal weight
    inputs = with_rows(rng, inputs, [rows], None)
    out, lse = compute(HOST, inputs, backend="numpy")
    assert out.dtype == dtype
    assert (out == 0).all()
    assert not np.signbit(out).any()
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


# Bad arguments.


def refuses(inputs: CacheInputs, match: str, **options: Any) -> None:
    with pytest.raises(ArgumentError, match=match):
        compute(HOST, inputs, backend="numpy", **options)


@pytest.mark.parametrize("is_planned", [False, True])
def test_the_reference_takes_no_stream(rng: np.random.Generator, is_planned: bool) -> None:
    inputs = make_inputs(rng, [5], N=3, H=2)
    attend: Any = plan_for(HOST, inputs, backend="numpy").run
    if not is_planned:
        attend = partial(numba_ddtree.verify_attention, backend="numpy")
    with pytest.raises(ArgumentError, match=r"^stream: got int; expected None with the numpy backend"):
        attend(**arguments_of(HOST, inputs), stream=7)


@pytest.mark.parametrize("page", [-1, NO_PAGE, -(2**31)])
def test_pages_out_of_range_are_named(rng: np.random.Generator, page: int) -> None:
    inputs = small(rng)
    inputs.paging["block_table"][1, 1] = page
    refuses(inputs, rf"^block_table\[1, 1\]: got {page}; expected a page from 0 to {len(inputs.cache) - 1}$")
    inputs = small(rng, form="kv_indptr")
    first = int(inputs.paging["kv_indptr"][1])
    inputs.paging["kv_indices"][first] = page
    refuses(inputs, rf"^kv_indices\[{first}\]: got {page}; expected a page from 0 to")


def test_lengths_beyond_the_table_are_named(rng: np.random.Generator) -> None:
    for form in FORMS:
        inputs = small(rng, form=form)
        room = 4 * len(inputs.page_table[1])
        longer = inputs.prefix_lengths.copy()
        longer[1] = room - 3
        wrong = rf"^prefix_lengths\[1\]: got {room - 3}; expected a length from 0 to {room - 4}: {room} rows"
        refuses(replace(inputs, prefix_lengths=longer), wrong, max_prefix_length=room)
        longer[1] = -1
        refuses(replace(inputs, prefix_lengths=longer), r"^prefix_lengths\[1\]: got -1; expected a length")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"kv_indices": None}, "^kv_indices: got None; expected an array, since kv_indptr is given"),
        ({"kv_indptr": None}, "^kv_indptr: got None; expected an array, since kv_indices is given"),
        ({"block_table": np.zeros((2, 9), np.int32)}, "^block_table: got an array beside kv_indptr"),
        ({"kv_indptr": np.zeros(2, np.int32)}, r"^kv_indptr: got int32 of shape \(2,\).*B \+ 1 = 3"),
        ({"kv_indptr": np.array([0, 99, 99])}, r"^kv_indptr\[1\]: got 99; expected a number"),
        ({"kv_indptr": np.array([3, 0, 3])}, r"^kv_indptr\[1\]: got 0; expected a number"),
        ({"kv_indptr": np.array([0.0, 1, 2])}, "^kv_indptr: got float64"),
        ({"kv_indices": np.zeros((2, 2), np.int32)}, "^kv_indices: got int32 of shape"),
    ],
)
def test_page_tables_of_another_form(changed: dict[str, Any], match: str) -> None:
    inputs = small(np.random.default_rng(0), form="kv_indptr")
    paging = {name: array for name, array in (inputs.paging | changed).items() if array is not None}
    arguments = arguments_of(HOST, replace(inputs, paging=paging))
    with pytest.raises(ArgumentError, match=match):
        numba_ddtree.verify_attention(**arguments, backend="numpy")


def test_a_table_of_another_batch(rng: np.random.Generator) -> None:
    inputs = small(rng)
    paging = {"block_table": inputs.paging["block_table"][:1]}
    arguments = arguments_of(HOST, inputs) | paging
    with pytest.raises(ArgumentError, match=r"^block_table: got int32 of shape \(1, \d\); expected .*B = 2"):
        numba_ddtree.verify_attention(**arguments, backend="numpy")


@pytest.mark.parametrize("name", ["q_pe", "ckv_cache", "kpe_cache"])
def test_mixed_dtypes_are_named(rng: np.random.Generator, name: str) -> None:
    arguments = arguments_of(HOST, small(rng))
    arguments[name] = arguments[name].astype(np.float16)
    with pytest.raises(ArgumentError, match=rf"^{name}: got float16 .*; expected bfloat16 of shape"):
        numba_ddtree.verify_attention(**arguments, backend="numpy")


def test_a_tree_of_another_batch_is_refused(rng: np.random.Generator) -> None:
    arguments = arguments_of(HOST, small(rng))
    arguments["tree"] = make_inputs(rng, [1, 1, 1], N=6, H=2, **WIDTHS).tree
    with pytest.raises(ArgumentError, match=r"^(block_table|q_nope): .*B = 3"):
        numba_ddtree.verify_attention(**arguments, backend="numpy")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kernel": "flash"}, "^kernel: got 'flash'; expected None, 'shared_scores' or 'tensor_cores'"),
        ({"kernel": "shared_scores"}, "^kernel: got 'shared_scores' with bfloat16; expected"),
        ({"out_dtype": np.float16}, "^out_dtype: got float16; expected bfloat16 or float32"),
        ({"out_dtype": "nonsense"}, "^out_dtype: got 'nonsense'; expected bfloat16 or float32"),
        ({"max_prefix_length": 8}, "^prefix_lengths: got 9; expected at most max_prefix_length = 8"),
        ({"max_prefix_length": -1}, "^max_prefix_length: got -1; expected a number from 0 to"),
    ],
)
def test_options(options: dict[str, Any], match: str) -> None:
    arguments = arguments_of(HOST, small(np.random.default_rng(0)))
    with pytest.raises(ArgumentError, match=match):
        numba_ddtree.verify_attention(**(arguments | {"backend": "numpy"} | options))


def test_tensor_cores_do_not_take_float32(rng: np.random.Generator) -> None:
    arguments = arguments_of(HOST, small(rng, dtype=np.float32))
    with pytest.raises(ArgumentError, match=r"^kernel: got 'tensor_cores' with float32; expected"):
        numba_ddtree.verify_attention(**arguments, kernel="tensor_cores", backend="numpy")
    with pytest.raises(ArgumentError, match=r"^ckv_cache: got a paged cache of float32; expected a contig"):
        numba_ddtree.verify_attention(**arguments)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"latent": 256}, "^q_nope: got D_CKV = 256; expected D_CKV = 512"),
        ({"latent": 512, "rope": 32}, "^q_pe: got D_KPE = 32; expected D_KPE = 64"),
        ({"latent": 512, "rope": 64, "H": 129}, "^q_nope: got H = 129 heads; expected at most 128"),
        ({"latent": 512, "rope": 64, "H": 1, "N": 1026}, "^tree: got N = 1026 slots; expected at most 1025"),
    ],
)
@pytest.mark.parametrize("function", [numba_ddtree.verify_attention, numba_ddtree.tree_tail_attention])
def test_limits_of_tensor_cores_are_checked_before_a_device_is_looked_for(
    rng: np.random.Generator, changed: dict[str, Any], match: str, function: Any
) -> None:
    arguments = arguments_of(HOST, small(rng, num_nodes=[1, 1], **changed))
    with pytest.raises(ArgumentError, match=match):
        function(**arguments)


# Plans.


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"max_batch": 1}, "^q_nope: got B = 2; expected at most 1, as planned"),
        ({"num_slots": 5}, "^q_nope: got N = 6; expected at most 5, as planned"),
        ({"num_heads": 3}, "^q_nope: got H = 2; expected 3, as planned"),
        ({"max_depth": 0}, r"^tree.max_depth: got 5; expected at most 0, as planned"),
        ({"page_size": 8}, "^ckv_cache: got pages of 4 rows; expected pages of 8 rows, as planned"),
        ({"page_size": None}, "^ckv_cache: got pages of 4 rows; expected a contiguous cache, as planned"),
        ({"dtype": np.float16}, "^q_nope: got bfloat16; expected float16, as planned"),
        ({"max_prefix_length": 8}, "^prefix_lengths: got 9; expected at most max_prefix_length = 8"),
    ],
)
def test_runs_that_were_not_planned_for(changed: dict[str, Any], match: str) -> None:
    inputs = small(np.random.default_rng(0))
    planned: dict[str, Any] = {"max_batch": 2, "num_slots": 6, "num_heads": 2, "max_prefix_length": 20}
    plan = TreeAttention.plan(**(planned | {"page_size": 4, "backend": "numpy"} | changed))
    with pytest.raises(ArgumentError, match=match):
        plan.run(**arguments_of(HOST, inputs))


def test_a_run_may_be_smaller_than_planned(rng: np.random.Generator) -> None:
    inputs = small(rng)
    plan = TreeAttention.plan(5, 9, 2, max_prefix_length=30, page_size=4, backend="numpy")
    got = plan.run(**arguments_of(HOST, inputs))
    for each, want in zip(got, compute(HOST, inputs, backend="numpy"), strict=True):
        np.testing.assert_array_equal(each, want)
