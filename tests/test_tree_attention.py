"""Tree-masked MLA attention: an independent computation, properties; the kernel on a device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    Library,
    assert_same_arrays,
    attend,
    attention_in_float64,
    check_attention,
    numba_library,
)
from libraries import LIBRARIES, side_stream
from numpy.typing import NDArray

import numba_ddtree
from inputs import AttentionInputs, link, make_attention, make_parents
from numba_ddtree import ArgumentError, DraftTree


def path_to_root(tree: DraftTree, request: int, node: int) -> list[int]:
    """Slots of a node and its ancestors, root first, by the parents."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[request, node])
    return path[::-1]


def attend_along_paths(arguments: AttentionInputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention as plain decoding would do it: each node alone, over the keys of its own sequence."""
    q_nope, tree = arguments.q_nope, arguments.tree
    out = np.zeros(q_nope.shape)
    lse = np.full(q_nope.shape[:3], -np.inf)
    for request, prefix in enumerate(map(int, arguments.prefix_lengths)):
        for node in range(int(tree.num_nodes[request])):
            path = [prefix + slot for slot in path_to_root(tree, request, node)]
            keys = [*range(prefix), *path]
            for head in range(q_nope.shape[2]):
                scores = []
                for key in keys:
                    latent = np.dot(
                        q_nope[request, node, head].astype(float),
                        arguments.ckv_cache[request, key].astype(float),
                    )
                    rotary = np.dot(
                        arguments.q_pe[request, node, head].astype(float),
                        arguments.kpe_cache[request, key].astype(float),
                    )
                    scores.append(arguments.sm_scale * (latent + rotary))
                lse[request, node, head] = np.logaddexp.reduce(scores)
                for key, score in zip(keys, scores, strict=True):
                    weight = np.exp(score - lse[request, node, head])
                    out[request, node, head] += weight * arguments.ckv_cache[request, key]
    return out, lse


def reference(arguments: AttentionInputs, **options: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """`verify_attention` by its numpy backend, in float32."""
    return numba_ddtree.verify_attention(
        arguments.q_nope,
        arguments.q_pe,
        arguments.ckv_cache,
        arguments.kpe_cache,
        arguments.tree,
        sm_scale=arguments.sm_scale,
        prefix_lengths=arguments.prefix_lengths,
        backend="numpy",
        **options,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([(16, 8), (7, 3), (1, 1)]),
)
def test_reference_is_decoding_along_each_path(
    seed: int, prefixes: list[int], N: int, H: int, widths: tuple[int, int]
) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, N + 1, len(prefixes)).tolist()
    arguments = make_attention(
        rng, prefixes=prefixes, N=N, H=H, latent=widths[0], rope=widths[1], num_nodes=counts
    )
    want_out, want_lse = attend_along_paths(arguments)
    out, lse = attention_in_float64(arguments)
    np.testing.assert_allclose(out, want_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-13)
    out, lse = reference(arguments)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)
    padding = np.arange(N) >= np.array(counts)[:, None]
    assert (out[padding] == 0).all()
    assert (lse[padding] == -np.inf).all()


@pytest.mark.parametrize(("H", "N"), [(1, 1), (12, 9), (127, 3), (2, 17), (1, 33)])
def test_reference_at_odd_counts_and_the_real_widths(rng: np.random.Generator, H: int, N: int) -> None:
    arguments = make_attention(rng, prefixes=[33, 0], N=N, H=H, latent=512, rope=64)
    want_out, want_lse = attention_in_float64(arguments)
    out, lse = reference(arguments)
    np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_the_order_of_siblings_does_not_matter(seed: int, N: int) -> None:
    rng = np.random.default_rng(seed)
    prefix = int(rng.integers(0, 9))
    arguments = make_attention(rng, prefixes=[prefix], N=N)
    parents = make_parents(rng, "random", N)
    arguments = replace(arguments, tree=link(parents[None], arguments.tree.token_ids))
    # Any order in which parents come first: take the slots whose parents are placed, at random.
    order: list[int] = [0]
    while len(order) < N:
        ready = [slot for slot in range(1, N) if slot not in order and parents[slot] in order]
        order.append(int(rng.choice(ready)))
    place = np.argsort(order)
    moved_parents = np.array([-1, *(place[parents[slot]] for slot in order[1:])], np.int32)
    rows = np.arange(arguments.ckv_cache.shape[1])
    rows[prefix : prefix + N] = prefix + np.array(order)
    moved = replace(
        arguments,
        q_nope=arguments.q_nope[:, order],
        q_pe=arguments.q_pe[:, order],
        ckv_cache=arguments.ckv_cache[:, rows],
        kpe_cache=arguments.kpe_cache[:, rows],
        tree=link(moved_parents[None], arguments.tree.token_ids[:, order]),
    )
    for want, got in zip(attention_in_float64(arguments), attention_in_float64(moved), strict=True):
        np.testing.assert_allclose(got, want[:, order], rtol=1e-12, atol=1e-13)


def zero_queries(arguments: AttentionInputs) -> AttentionInputs:
    return replace(arguments, q_nope=np.zeros_like(arguments.q_nope), q_pe=np.zeros_like(arguments.q_pe))


def assert_mean_of_visible_rows(arguments: AttentionInputs, out: NDArray[Any], lse: NDArray[Any]) -> None:
    for request, prefix in enumerate(map(int, arguments.prefix_lengths)):
        for node in range(int(arguments.tree.num_nodes[request])):
            path = path_to_root(arguments.tree, request, node)
            keys = [*range(prefix), *(prefix + slot for slot in path)]
            mean = arguments.ckv_cache[request, keys].astype(np.float64).mean(axis=0)
            heads = out.shape[2]
            np.testing.assert_allclose(out[request, node], np.tile(mean, (heads, 1)), rtol=0, atol=1e-6)
            np.testing.assert_allclose(lse[request, node], np.log(len(keys)), rtol=1e-6, atol=1e-7)


def test_zero_queries_give_the_mean_of_the_visible_rows(rng: np.random.Generator) -> None:
    arguments = zero_queries(make_attention(rng, prefixes=[0, 7, 30], N=6, num_nodes=[6, 4, 1]))
    assert_mean_of_visible_rows(arguments, *reference(arguments))


def test_a_row_that_no_node_sees_but_its_own_leaks_nowhere(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[3], N=4)
    arguments = replace(arguments, tree=link(np.array([[-1, 0, 0, 1]], np.int32), arguments.tree.token_ids))
    want = reference(arguments)
    arguments.ckv_cache[0, 3 + 2] = np.nan
    arguments.kpe_cache[0, 3 + 2] = np.nan
    for before, after in zip(want, reference(arguments), strict=True):
        np.testing.assert_array_equal(after[0, [0, 1, 3]], before[0, [0, 1, 3]])


@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e12])
def test_reference_takes_large_queries(rng: np.random.Generator, magnitude: float) -> None:
    arguments = make_attention(rng, prefixes=[20, 0], N=5, magnitude=magnitude)
    want_out, want_lse = attend_along_paths(arguments)
    out, lse = attention_in_float64(arguments)
    np.testing.assert_allclose(out, want_out, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12)
    out, lse = reference(arguments)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5 * magnitude)


def test_requests_do_not_depend_on_one_another(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[5, 0, 17, 9], N=6, num_nodes=[6, 3, 0, 1])
    order = np.array([2, 0, 3, 1])
    arrays = {name: array[order] for name, array in arguments.tree.arrays().items()}
    moved = replace(
        arguments,
        tree=DraftTree(**arrays, max_depth=arguments.tree.max_depth),
        **{
            name: getattr(arguments, name)[order]
            for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "prefix_lengths")
        },
    )
    for want, got in zip(reference(arguments), reference(moved), strict=True):
        np.testing.assert_array_equal(got, want[order])


def test_results_go_into_the_arrays_given(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[5], N=3)
    want = reference(arguments)
    out, lse = np.full_like(want[0], 7), np.full_like(want[1], 7)
    got = reference(arguments, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert_same_arrays({"out": out, "lse": lse}, dict(zip(("out", "lse"), want, strict=True)))


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 2, 9, 17, 33, 65])
@pytest.mark.parametrize(
    ("H", "latent", "rope"), [(1, 512, 64), (12, 512, 64), (127, 64, 32), (3, 33, 5), (2, 1, 1)]
)
def test_kernel_is_the_reference(rng: np.random.Generator, N: int, H: int, latent: int, rope: int) -> None:
    counts = [N, int(rng.integers(0, N + 1)), 1, int(rng.integers(0, N + 1))]
    arguments = make_attention(
        rng, prefixes=[0, 197, 1, 33], N=N, H=H, latent=latent, rope=rope, num_nodes=counts
    )
    check_attention(numba_library(), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 255, 256, 257, 2048])
def test_kernel_around_limits_of_prefixes(rng: np.random.Generator, prefix: int) -> None:
    arguments = make_attention(rng, prefixes=[prefix, 0, prefix // 2], N=7, latent=512, rope=64, spare_keys=0)
    check_attention(numba_library(), arguments)


@pytest.mark.gpu
def test_kernel_over_a_long_prefix_is_float64_to_a_millionth(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[3000], N=17, H=4, latent=512, rope=64)
    out, _ = attend(numba_library(), arguments)
    want, _ = attention_in_float64(arguments)
    assert np.abs(out - want).max() <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 33, 300])
def test_kernel_on_batches_whose_requests_all_differ(rng: np.random.Generator, B: int) -> None:
    N = 9
    arguments = make_attention(
        rng,
        prefixes=rng.integers(0, 90, B).tolist(),
        N=N,
        latent=64,
        rope=16,
        num_nodes=rng.integers(0, N + 1, B).tolist(),
    )
    check_attention(numba_library(), arguments)


@pytest.mark.gpu
def test_kernel_on_the_largest_trees(rng: np.random.Generator) -> None:
    check_attention(numba_library(), make_attention(rng, prefixes=[5] * 4, N=1025, H=1, latent=32, rope=8))


@pytest.mark.gpu
def test_kernel_on_more_blocks_than_y_and_z_hold(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[0] * 32, N=65, H=64, latent=8, rope=4)
    assert arguments.q_nope[..., 0].size > 65535
    check_attention(numba_library(), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_kernel_takes_arrays_of_every_library(rng: np.random.Generator, make_library: Any) -> None:
    library: Library = make_library()
    arguments = make_attention(rng, prefixes=[40, 0, 7], N=17, latent=512, rope=64, num_nodes=[17, 5, 0])
    check_attention(library, arguments)
    check_attention(library, arguments, max_prefix_length=40, validate=True)


@pytest.mark.gpu
def test_kernel_makes_the_prefix_default_to_nothing(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[0, 0], N=9)
    check_attention(numba_library(), arguments, prefix_lengths=None)


@pytest.mark.gpu
def test_kernel_on_the_longest_prefix_and_one_past_it(rng: np.random.Generator) -> None:
    N, latent, rope = 3, 16, 8
    library = numba_library()
    far_too_many = make_attention(rng, prefixes=[2], N=N, H=1, latent=latent, rope=rope, spare_keys=10**6)
    message = r"^(max_prefix_length|prefix_lengths): .*at most (\d+) keys"
    with pytest.raises(ArgumentError, match=message) as refused:
        attend(library, far_too_many)
    found = re.match(message, str(refused.value))
    assert found is not None
    longest = int(found[2])
    assert longest > 10**4
    arguments = make_attention(rng, prefixes=[longest], N=N, H=1, latent=latent, rope=rope, spare_keys=1)
    arguments = replace(arguments, tree=replace(far_too_many.tree, positions=arguments.tree.positions))
    check_attention(library, arguments, max_prefix_length=longest)
    with pytest.raises(ArgumentError, match=rf"at most {longest} keys"):
        attend(library, arguments, max_prefix_length=longest + 1)


@pytest.mark.gpu
def test_kernel_gives_invalid_prefixes_nan_and_leaves_the_others_alone(rng: np.random.Generator) -> None:
    arguments = make_attention(
        rng, prefixes=[50, 50, 50, 50, 50, 0], N=9, spare_keys=0, num_nodes=[9, 4, 9, 9, 9, 9]
    )
    library = numba_library()
    options = {"max_prefix_length": 50}
    want = attend(library, arguments, **options)
    arguments.prefix_lengths[1:5] = -1, 51, 2**31 - 1, -(2**31)
    for got, before, blank in zip(attend(library, arguments, **options), want, (0, -np.inf), strict=True):
        np.testing.assert_array_equal(got[[0, 5]], before[[0, 5]])
        assert np.isnan(got[1, :4]).all()
        assert (got[1, 4:] == blank).all()
        assert np.isnan(got[2:5]).all()
    with pytest.raises(ArgumentError, match=r"^prefix_lengths\[1\]: got -1"):
        attend(library, arguments, validate=True, **options)


@pytest.mark.gpu
def test_kernel_gives_malformed_trees_nan_and_leaves_the_others_alone(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[20, 20, 20], N=40)
    library = numba_library()
    want = attend(library, arguments)
    bits = arguments.tree.ancestor_bits
    bits[1] = 0xFFFFFFFF  # slots past N, and more than a path may hold
    arguments.tree.num_nodes[2] = 41
    for got, before in zip(attend(library, arguments), want, strict=True):
        np.testing.assert_array_equal(got[0], before[0])
        assert np.isnan(got[1:]).all()


@pytest.mark.gpu
def test_kernel_reads_no_row_that_a_node_does_not_see(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[70], N=33, latent=512, rope=64)
    star = np.zeros((1, 33), np.int32)
    star[0, 0] = -1
    arguments = replace(arguments, tree=link(star, arguments.tree.token_ids))
    want = attend(numba_library(), arguments)
    arguments.ckv_cache[0, 70 + 20] = np.nan
    arguments.kpe_cache[0, 70 + 20] = np.nan
    others = np.arange(33) != 20
    for before, after in zip(want, attend(numba_library(), arguments), strict=True):
        np.testing.assert_array_equal(after[0, others], before[0, others])
        assert np.isnan(after[0, 20]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e12])
def test_kernel_takes_large_queries(rng: np.random.Generator, magnitude: float) -> None:
    arguments = make_attention(rng, prefixes=[200, 0], N=9, magnitude=magnitude)
    out, lse = attend(numba_library(), arguments)
    _, want_lse = attention_in_float64(arguments)
    # Rounding may change which key wins, so that the output can only be bounded by the rows.
    assert np.abs(out).max() <= np.nanmax(np.abs(arguments.ckv_cache)) * 1.001
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5 * magnitude)


@pytest.mark.gpu
def test_kernel_gives_zero_queries_the_mean_of_the_visible_rows(rng: np.random.Generator) -> None:
    arguments = zero_queries(make_attention(rng, prefixes=[0, 300, 30], N=6, num_nodes=[6, 4, 1]))
    assert_mean_of_visible_rows(arguments, *attend(numba_library(), arguments))


@pytest.mark.gpu
def test_kernel_repeats_to_the_bit(rng: np.random.Generator) -> None:
    arguments = make_attention(rng, prefixes=[500, 20, 0], N=33, H=4, latent=512, rope=64)
    first = dict(zip(("out", "lse"), attend(numba_library(), arguments), strict=True))
    for _ in range(20):
        again = dict(zip(("out", "lse"), attend(numba_library(), arguments), strict=True))
        assert_same_arrays(again, first)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernel_runs_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    arguments = make_attention(rng, prefixes=[100, 3], N=17)
    want = attend(numba_library(), arguments)
    with side_stream(form) as (torch, delayed_copy, options):
        arrays = {name: torch.from_numpy(array).cuda() for name, array in arguments.tree.arrays().items()}
        got = numba_ddtree.verify_attention(
            delayed_copy(torch.from_numpy(arguments.q_nope)),
            torch.from_numpy(arguments.q_pe).cuda(),
            torch.from_numpy(arguments.ckv_cache).cuda(),
            torch.from_numpy(arguments.kpe_cache).cuda(),
            DraftTree(**arrays, max_depth=arguments.tree.max_depth),
            prefix_lengths=torch.from_numpy(arguments.prefix_lengths).cuda(),
            sm_scale=arguments.sm_scale,
            **options,
        )
    torch.cuda.synchronize()
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(array.cpu().numpy(), expected)
