"""Acceptance: golden walks, an independent walk, properties; the kernel on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    Library,
    assert_same_arrays,
    check_accept,
    check_malformed_accept,
    malformed_parents,
    numba_library,
)
from libraries import LIBRARIES, side_stream
from numpy.typing import NDArray

import numba_ddtree
from golden import GoldenTree, load_golden_trees
from inputs import (
    TREE_KINDS,
    build,
    link,
    make_log_probs,
    make_parent_batch,
    make_parents,
    make_target_tokens,
)
from numba_ddtree import AcceptResult, ArgumentError, DraftTree
from numba_ddtree.refs.tree_accept import accept_path

GOLDEN = load_golden_trees()


def golden_tree(golden: GoldenTree, slots: int) -> tuple[DraftTree, NDArray[np.int64]]:
    """Make the golden tree with padding up to `slots`, and the target's tokens."""
    count = len(golden.parents)
    parents, tokens, target = np.full((3, 1, slots), -1)
    parents[0, :count] = golden.parents
    tokens[0, 1:count] = golden.token_ids
    target[0, :count] = golden.posterior_tokens
    tree = link(parents.astype(np.int32), tokens.astype(np.int32), np.array([count], np.int32))
    return tree, target


def assert_golden_walk(result: AcceptResult, golden: GoldenTree) -> None:
    length = len(golden.accepted_indices)
    assert result.accept_length[0] == length
    assert result.num_accepted_drafts[0] == length - 1
    np.testing.assert_array_equal(result.accepted_indices[0, :length], golden.accepted_indices)
    assert (result.accepted_indices[0, length:] == -1).all()
    assert result.bonus_token[0] == golden.bonus_token


def walk_down_the_links(tree: DraftTree, request: int, target: NDArray[Any]) -> list[int]:
    """Greedy walk by the child links: the first child that has the target's token."""
    path = [0]
    while True:
        child = tree.first_child[request, path[-1]]
        while child >= 0 and tree.token_ids[request, child] != target[request, path[-1]]:
            child = tree.next_sibling[request, child]
        if child < 0:
            return path
        path.append(int(child))


@pytest.mark.parametrize("case", GOLDEN)
def test_reference_takes_the_golden_walk(case: str) -> None:
    tree, target = golden_tree(GOLDEN[case], len(GOLDEN[case].parents) + 3)
    assert_golden_walk(numba_ddtree.accept_tree(tree, target, backend="numpy"), GOLDEN[case])


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from(TREE_KINDS), st.floats(0, 1))
def test_reference_is_the_walk_down_the_links(seed: int, N: int, kind: str, agreement: float) -> None:
    rng = np.random.default_rng(seed)
    # Three tokens, 0 among them, so that siblings often share one.
    tree = link(make_parents(rng, kind, N)[None], rng.integers(0, 3, (1, N)).astype(np.int32))
    target = make_target_tokens(rng, tree, agreement)
    result = numba_ddtree.accept_tree(tree, target, backend="numpy")
    path = walk_down_the_links(tree, 0, target)
    assert result.accepted_indices[0].tolist() == path + [-1] * (tree.max_depth + 1 - len(path))
    assert result.accept_length[0] == len(path)
    assert result.bonus_token[0] == target[0, path[-1]]


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_a_tree_accepts_at_least_what_its_chain_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    log_probs = make_log_probs(rng, "realistic", 1, 5, 4)
    ids = np.tile(np.arange(4, dtype=np.int32), (1, 5, 1))
    tree = build(log_probs, ids, 30)
    sequence = rng.choice(4, 6, p=[0.7, 0.1, 0.1, 0.1])
    target = sequence[tree.depths].astype(np.int32)
    got = numba_ddtree.accept_tree(tree, target, backend="numpy").num_accepted_drafts[0]
    chain = link(np.arange(-1, 5, dtype=np.int32)[None], np.zeros((1, 6), np.int32))
    of_chain = numba_ddtree.accept_tree(chain, sequence[None], backend="numpy").num_accepted_drafts[0]
    on_chain = [node for node in range(1, 31) if not tree.token_ids[0, node_path(tree, node)].any()]
    assert got >= min(of_chain, max((tree.depths[0, node] for node in on_chain), default=0))


def node_path(tree: DraftTree, node: int) -> list[int]:
    """Slots from a node up to the root, root excluded."""
    path = []
    while node > 0:
        path.append(node)
        node = int(tree.parents[0, node])
    return path


def test_requests_do_not_depend_on_one_another(rng: np.random.Generator) -> None:
    B, N = 9, 30
    counts = rng.integers(0, N + 1, B).astype(np.int32)
    tree = link(make_parent_batch(rng, B, N), rng.integers(0, 3, (B, N)).astype(np.int32), counts)
    target = make_target_tokens(rng, tree)
    whole = numba_ddtree.accept_tree(tree, target, backend="numpy")
    order = rng.permutation(B)
    arrays = {name: array[order] for name, array in tree.arrays().items()}
    moved = DraftTree(**arrays, max_depth=tree.max_depth)
    got = numba_ddtree.accept_tree(moved, target[order], backend="numpy")
    assert_same_arrays(got.arrays(), {name: array[order] for name, array in whole.arrays().items()})


def test_a_request_without_nodes_passes_through() -> None:
    tree = link(np.array([[-1, 0]], np.int32), np.zeros((1, 2), np.int32), np.zeros(1, np.int32))
    result = numba_ddtree.accept_tree(tree, np.zeros((1, 2), np.int32), backend="numpy")
    assert result.accepted_indices.tolist() == [[-1, -1]]
    assert result.accept_length.tolist() == [0]
    assert result.bonus_token.tolist() == [-1]


def test_tokens_of_padding_slots_are_not_read(rng: np.random.Generator) -> None:
    # A padding slot that looks like a child of the root, with the token the target wants.
    tree = link(np.array([[-1, 0, 0]], np.int32), np.array([[0, 5, 6]], np.int32), np.array([2], np.int32))
    tree.parents[0, 2], tree.token_ids[0, 2] = 0, 6
    result = numba_ddtree.accept_tree(tree, np.array([[6, 0, 2**31]], np.int64), backend="numpy")
    assert result.accept_length.tolist() == [1]
    assert result.bonus_token.tolist() == [6]


def test_a_wrong_token_equal_in_its_low_bits_is_no_match() -> None:
    path = accept_path(np.array([0, 7], np.int32), np.array([-1, 0], np.int32), np.array([2**32 + 7, 0]))
    assert path == [0]


def test_results_go_into_the_arrays_given() -> None:
    tree = link(np.array([[-1, 0, 1]], np.int32), np.array([[0, 5, 6]], np.int32))
    out = AcceptResult(*(np.full(shape, 77, np.int32) for shape in ((1, 3), (1,), (1,))))
    got = numba_ddtree.accept_tree(tree, np.array([[5, 6, 9]], np.int32), out=out, backend="numpy")
    assert all(got.arrays()[name] is array for name, array in out.arrays().items())
    assert out.accepted_indices.tolist() == [[0, 1, 2]]
    assert out.bonus_token.tolist() == [9]


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_kernel_takes_the_golden_walk(case: str, dtype: type[np.integer[Any]]) -> None:
    tree, target = golden_tree(GOLDEN[case], len(GOLDEN[case].parents) + 3)
    assert_golden_walk(check_accept(numba_library(), tree, target.astype(dtype)), GOLDEN[case])


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 33, 300])
@pytest.mark.parametrize("N", [1, 2, 32, 33, 127, 128, 129, 1025])
def test_kernel_is_the_reference(rng: np.random.Generator, B: int, N: int) -> None:
    counts = rng.integers(0, N + 1, B).astype(np.int32)
    counts[0] = N
    parents = make_parent_batch(rng, min(B, 40), N)
    parents = parents[rng.integers(0, len(parents), B)]
    tree = link(parents, rng.integers(0, 3, (B, N)).astype(np.int32), counts)
    check_accept(
        numba_library(), tree, make_target_tokens(rng, tree, 0.95).astype([np.int32, np.int64][N % 2])
    )


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_kernel_takes_arrays_of_every_library(
    rng: np.random.Generator, make_library: Any, dtype: type[np.integer[Any]]
) -> None:
    library: Library = make_library()
    if library.name == "jax" and dtype is np.int64:
        pytest.skip("jax has no int64 unless told")
    tree = link(make_parent_batch(rng, 8, 65), rng.integers(0, 3, (8, 65)).astype(np.int32))
    check_accept(library, tree, make_target_tokens(rng, tree).astype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [2, 64, 1025])
def test_kernel_ends_on_parents_that_are_no_tree(rng: np.random.Generator, N: int) -> None:
    for _ in range(5):
        check_malformed_accept(numba_library(), rng, B=64, N=N)


@pytest.mark.gpu
def test_kernel_ends_at_the_depth_that_its_results_hold(rng: np.random.Generator) -> None:
    N, depth = 50, 7
    chain = link(np.arange(-1, N - 1, dtype=np.int32)[None], np.ones((1, N), np.int32))
    library = numba_library()
    shallow = replace(library.put_tree(chain), max_depth=depth)
    got = numba_ddtree.accept_tree(shallow, library.put(np.ones((1, N), np.int32)))
    assert library.get(got.accept_length).tolist() == [depth + 1]
    assert library.get(got.accepted_indices).tolist() == [list(range(depth + 1))]


@pytest.mark.gpu
def test_kernel_validates_device_arrays_on_request(rng: np.random.Generator) -> None:
    library = numba_library()
    tree = link(make_parent_batch(rng, 2, 20), np.zeros((2, 20), np.int32))
    target = library.put(np.zeros((2, 20), np.int32))
    numba_ddtree.accept_tree(library.put_tree(tree), target, validate=True)
    broken = replace(tree, parents=malformed_parents(rng, 2, 20))
    with pytest.raises(ArgumentError, match=r"^tree\.parents\["):
        numba_ddtree.accept_tree(library.put_tree(broken), target, validate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernel_runs_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    tree = link(make_parent_batch(rng, 8, 65), rng.integers(1, 3, (8, 65)).astype(np.int32))
    target = make_target_tokens(rng, tree, 1.0)
    with side_stream(form) as (torch, delayed_copy, options):
        arrays = {name: torch.from_numpy(array).cuda() for name, array in tree.arrays().items()}
        given = DraftTree(**arrays, max_depth=tree.max_depth)
        result = numba_ddtree.accept_tree(given, delayed_copy(torch.from_numpy(target)), **options)
    torch.cuda.synchronize()
    want = numba_ddtree.accept_tree(tree, target, backend="numpy")
    assert_same_arrays({k: v.cpu().numpy() for k, v in result.arrays().items()}, want.arrays())
