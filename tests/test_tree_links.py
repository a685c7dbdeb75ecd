"""Trees of given parents or masks: round trips, faults; the kernels on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    Library,
    assert_same_tree,
    bad_links,
    bad_masks,
    check_bad_masks,
    check_links,
    malformed_parents,
    numba_library,
)
from libraries import LIBRARIES, side_stream

from golden import load_golden_trees
from inputs import TREE_KINDS, build, link, make_log_probs, make_parent_batch, make_parents, make_token_ids
from numba_ddtree import ArgumentError, DraftTree, TreeStatus

GOLDEN = load_golden_trees()


@pytest.mark.parametrize("case", GOLDEN)
def test_reference_links_the_golden_tree(case: str) -> None:
    golden = GOLDEN[case]
    tokens = np.concatenate([[0], golden.token_ids])[None]
    tree = DraftTree.from_parents(golden.parents[None], tokens, backend="numpy")
    np.testing.assert_array_equal(tree.depths[0, 1:], golden.depths)
    np.testing.assert_array_equal(tree.to_visibility()[0], golden.visibility)
    again = DraftTree.from_visibility(golden.visibility[None], tokens, backend="numpy")
    assert_same_tree(again, tree)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70), st.sampled_from(TREE_KINDS))
def test_masks_and_parents_say_the_same(seed: int, N: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    parents, tokens = make_parents(rng, kind, N)[None], rng.integers(0, 99, (1, N))
    count, prefix = rng.integers(0, N + 1, 1), rng.integers(0, 1000, 1)
    tree = DraftTree.from_parents(
        parents, tokens, num_nodes=count, prefix_lengths=prefix, max_depth=N - 1, backend="numpy"
    )
    closure = np.zeros((N, N), bool)
    for node in range(int(count[0])):
        closure[node] = closure[parents[0, node]] if node > 0 else False
        closure[node, node] = True
    mask = tree.to_visibility()
    np.testing.assert_array_equal(mask[0], closure)
    again = DraftTree.from_visibility(
        mask, tokens, num_nodes=count, prefix_lengths=prefix, max_depth=N - 1, backend="numpy"
    )
    assert_same_tree(again, tree)
    used = slice(0, int(count[0]))
    np.testing.assert_array_equal(again.parents[0, used], parents[0, used])
    assert tree.status[0] == (TreeStatus.OK if count[0] else TreeStatus.FINISHED)


def test_a_built_tree_survives_the_round_trip(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "inf_tails", 6, 5, 8), make_token_ids(rng, 6, 5, 8)
    tree = build(log_probs, ids, 40, None, np.arange(6, dtype=np.int32))
    again = DraftTree.from_parents(
        tree.parents,
        tree.token_ids,
        num_nodes=tree.num_nodes,
        prefix_lengths=np.arange(6),
        max_depth=5,
        backend="numpy",
    )
    for name, array in tree.arrays().items():
        if name != "status":
            np.testing.assert_array_equal(again.arrays()[name], array, err_msg=name)


def test_slots_past_the_nodes_are_not_looked_at(rng: np.random.Generator) -> None:
    N, count = 12, np.array([5], np.int32)
    parents, tokens = make_parents(rng, "random", N)[None], np.ones((1, N), np.int32)
    want = DraftTree.from_parents(parents, tokens, num_nodes=count, backend="numpy")
    parents[0, 5:] = 10**6
    assert_same_tree(DraftTree.from_parents(parents, tokens, num_nodes=count, backend="numpy"), want)
    mask = want.to_visibility()
    mask[0, 5:] = rng.random((N - 5, N)) < 0.5
    mask[0, :, 5:] = rng.random((N, N - 5)) < 0.5
    assert_same_tree(DraftTree.from_visibility(mask, tokens, num_nodes=count, backend="numpy"), want)


def test_bad_requests_end_as_their_root_alone(rng: np.random.Generator) -> None:
    parents, counts, prefixes = bad_links(rng, 12, B=14)
    tokens = rng.integers(0, 99, parents.shape).astype(np.int32)
    tree = link(parents, tokens, counts, prefixes)
    assert (tree.status[::2] == TreeStatus.OK).all()
    assert (tree.num_nodes[::2] == 12).all()
    assert (tree.status[1::2] == TreeStatus.INVALID).all()
    assert (tree.num_nodes[1::2] == 1).all()
    np.testing.assert_array_equal(tree.token_ids[1::2, 0], tokens[1::2, 0])
    for name, blank in (("token_ids", 0), ("parents", -1), ("depths", 0), ("first_child", -1)):
        assert (tree.arrays()[name][1::2, 1:] == blank).all()


@pytest.mark.parametrize("fault", range(1, 7))
def test_a_bad_mask_is_refused(rng: np.random.Generator, fault: int) -> None:
    masks, _ = bad_masks(rng, 9)
    with pytest.raises(ArgumentError, match=r"^visibility\[1\]: got a mask that is no tree's"):
        DraftTree.from_visibility(masks[[0, fault]], np.zeros((2, 9), np.int32), backend="numpy")


@pytest.mark.parametrize("fault", range(7))
def test_bad_parents_are_refused(rng: np.random.Generator, fault: int) -> None:
    parents, counts, prefixes = bad_links(rng, 12, B=14)
    one = slice(2 * fault + 1, 2 * fault + 2)
    with pytest.raises(ArgumentError, match=r"^(parents\[0, |num_nodes\[0\]|prefix_lengths\[0\])"):
        DraftTree.from_parents(
            parents[one],
            np.zeros((1, 12), np.int32),
            num_nodes=counts[one],
            prefix_lengths=prefixes[one],
            backend="numpy",
        )


# On a device.


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_allocations")
@pytest.mark.parametrize("B", [1, 33])
@pytest.mark.parametrize("N", [1, 2, 31, 32, 33, 64, 255, 256, 257, 1025])
def test_kernels_are_the_reference(rng: np.random.Generator, B: int, N: int) -> None:
    library = numba_library()
    parents, tokens = make_parent_batch(rng, B, N), rng.integers(0, 99, (B, N)).astype(np.int32)
    check_links(library, parents, tokens)
    counts = rng.integers(0, N + 1, B).astype(np.int32)
    lengths = rng.integers(0, 10**6, B).astype(np.int32)
    rubbish = malformed_parents(rng, B, N)
    parents = np.where(np.arange(N) < counts[:, None], parents, rubbish).astype(np.int32)
    tree = check_links(library, parents, tokens, num_nodes=counts, prefix_lengths=lengths)
    mask = library.get(library.put_tree(tree).to_visibility())
    np.testing.assert_array_equal(mask, tree.to_visibility())
    # Of what no slot in use is concerned with, nothing counts.
    is_used = np.arange(N) < counts[:, None]
    noise = rng.random(mask.shape) < 0.5
    mask = np.where(is_used[:, :, None] & is_used[:, None, :], mask, noise)
    given = library.put_all(visibility=mask, token_ids=tokens, num_nodes=counts, prefix_lengths=lengths)
    again = DraftTree.from_visibility(**given)
    assert_same_tree(library.get_tree(again), tree)


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_kernels_take_arrays_of_every_library(rng: np.random.Generator, make_library: Any) -> None:
    library: Library = make_library()
    B, N = 5, 65
    parents, tokens = make_parent_batch(rng, B, N), rng.integers(0, 99, (B, N)).astype(np.int32)
    tree = check_links(library, parents, tokens, max_depth=N - 1)
    given = library.put(tree.to_visibility()), library.put(tokens)
    again = DraftTree.from_visibility(*given, max_depth=N - 1)
    assert isinstance(again.parents, type(given[1]))
    assert_same_tree(library.get_tree(again), tree)
    mask = again.to_visibility()
    assert isinstance(mask, type(given[0]))
    np.testing.assert_array_equal(library.get(mask), tree.to_visibility())


@pytest.mark.gpu
@pytest.mark.parametrize("N", [2, 12, 300, 1025])
def test_kernels_give_bad_device_arrays_a_status(rng: np.random.Generator, N: int) -> None:
    library = numba_library()
    parents, counts, prefixes = bad_links(rng, N, B=56)
    tokens = rng.integers(0, 99, parents.shape).astype(np.int32)
    tree = check_links(library, parents, tokens, num_nodes=counts, prefix_lengths=prefixes)
    assert (tree.status[::2] == TreeStatus.OK).all()
    if N > 2:
        check_bad_masks(library, rng, N)


@pytest.mark.gpu
def test_kernel_gives_deep_trees_a_status(rng: np.random.Generator) -> None:
    parents = make_parent_batch(rng, 8, 40)
    tree = check_links(numba_library(), parents, np.ones((8, 40), np.int32), max_depth=20)
    assert (tree.status[1::4] == TreeStatus.INVALID).all()  # the chains


@pytest.mark.gpu
def test_kernels_validate_device_arrays_on_request(rng: np.random.Generator) -> None:
    library = numba_library()
    parents, counts, prefixes = bad_links(rng, 12, B=14)
    for request in range(1, 14, 2):
        one = slice(request, request + 1)
        given = library.put_all(
            parents=parents[one],
            token_ids=np.zeros((1, 12), np.int32),
            num_nodes=counts[one],
            prefix_lengths=prefixes[one],
        )
        with pytest.raises(ArgumentError, match=r"^(parents|num_nodes|prefix_lengths)\["):
            DraftTree.from_parents(**given, validate=True)
    masks, is_bad = bad_masks(rng, 9)
    for mask in masks[is_bad]:
        given = library.put_all(visibility=mask[None], token_ids=np.zeros((1, 9), np.int32))
        with pytest.raises(ArgumentError, match=r"^visibility\[0\]"):
            DraftTree.from_visibility(**given, validate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernels_run_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    B, N = 8, 65
    parents, tokens = make_parent_batch(rng, B, N), rng.integers(0, 99, (B, N)).astype(np.int32)
    want = link(parents, tokens)
    with side_stream(form) as (torch, delayed_copy, options):
        mask = delayed_copy(torch.from_numpy(want.to_visibility()))
        tree = DraftTree.from_visibility(mask, torch.from_numpy(tokens).cuda(), **options)
        expanded = tree.to_visibility(**options)
    torch.cuda.synchronize()
    got = {name: array.cpu().numpy() for name, array in tree.arrays().items()}
    assert_same_tree(DraftTree(**got, max_depth=N - 1), want)
    np.testing.assert_array_equal(expanded.cpu().numpy(), want.to_visibility())
