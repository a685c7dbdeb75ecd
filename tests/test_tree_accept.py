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
    make_endings,
    make_log_probs,
    make_parent_batch,
    make_parents,
    make_target_tokens,
)
from numba_ddtree import AcceptResult, ArgumentError, DraftTree
from numba_ddtree.refs.tree_accept import accept_path
from numba_ddtree.status import FinishReason
from numba_ddtree.tree_accept import result_shapes

UNFINISHED, STOP, LENGTH = FinishReason.UNFINISHED, FinishReason.STOP, FinishReason.LENGTH
INACTIVE = FinishReason.INACTIVE
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


@settings(max_examples=300)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_endings_cut_what_would_be_emitted_without_them(seed: int, N: int) -> None:
    rng = np.random.default_rng(seed)
    B = 3
    counts = rng.integers(0, N + 1, B).astype(np.int32)
    tree = link(make_parent_batch(rng, B, N), rng.integers(0, 3, (B, N)).astype(np.int32), counts)
    target, endings = make_target_tokens(rng, tree, 0.95), make_endings(rng, B)
    free = numba_ddtree.accept_tree(tree, target, backend="numpy")
    got = numba_ddtree.accept_tree(tree, target, **endings, backend="numpy")
    assert (free.finish_reason == np.where(counts > 0, UNFINISHED, INACTIVE)).all()
    for request in range(B):
        emitted, reason = cut(free.tokens[request, : free.accept_length[request]].tolist(), request, endings)
        length = len(emitted)
        assert got.finish_reason[request] == reason
        assert got.accept_length[request] == length
        assert got.tokens[request, :length].tolist() == emitted
        assert got.bonus_token[request] == (emitted[-1] if emitted else -1)
        assert (got.accepted_indices[request, :length] == free.accepted_indices[request, :length]).all()
        for padded in (got.tokens, got.accepted_indices):
            assert (padded[request, length:] == -1).all()
        accepted = got.accepted_indices[request, 1:length]
        assert tree.token_ids[request, accepted].tolist() == emitted[:-1]


def cut(emitted: list[int], request: int, endings: dict[str, Any]) -> tuple[list[int], FinishReason]:
    """Cut a request's tokens where plain decoding of one token at a time would end."""
    remaining = endings.get("remaining", np.full(request + 1, len(emitted) + 1))[request]
    if not emitted or remaining <= 0 or endings.get("finished", np.zeros(request + 1))[request]:
        return [], INACTIVE
    stops = endings.get("stop_token_ids", np.zeros(0))
    stops = stops[request] if stops.ndim == 2 else stops
    ignores = endings.get("ignore_eos", False)
    heeds_stops = not (ignores[request] if isinstance(ignores, np.ndarray) else ignores)
    for place, token in enumerate(emitted):
        if heeds_stops and token in stops:
            return emitted[: place + 1], STOP
        if place + 1 == remaining:
            return emitted[: place + 1], LENGTH
    return emitted, UNFINISHED


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
    assert result.tokens.tolist() == [[-1, -1]]
    assert result.finish_reason.tolist() == [INACTIVE]


def chain_of_tokens(*tokens: int) -> tuple[DraftTree, NDArray[np.int32]]:
    """Make a chain of these tokens after root token 9, and a target that agrees and then says 9."""
    count = len(tokens) + 1
    tree = link(np.arange(-1, count - 1, dtype=np.int32)[None], np.array([[9, *tokens]], np.int32))
    return tree, np.array([[*tokens, 9]], np.int32)


@pytest.mark.parametrize(
    ("endings", "emitted", "reason"),
    [
        ({}, [5, 6, 7, 9], UNFINISHED),
        # The stop token is the bonus token even where the tree has a child for it.
        ({"stop_token_ids": [6]}, [5, 6], STOP),
        ({"stop_token_ids": [[6, -1]]}, [5, 6], STOP),
        ({"stop_token_ids": [-1, 8]}, [5, 6, 7, 9], UNFINISHED),
        # The root's own token, which an earlier round emitted, stops nothing; the bonus token does.
        ({"stop_token_ids": [9]}, [5, 6, 7, 9], STOP),
        ({"stop_token_ids": [5, 6]}, [5], STOP),
        ({"stop_token_ids": [6], "ignore_eos": True}, [5, 6, 7, 9], UNFINISHED),
        ({"stop_token_ids": [6], "ignore_eos": np.True_}, [5, 6, 7, 9], UNFINISHED),
        ({"stop_token_ids": [6], "ignore_eos": [False]}, [5, 6], STOP),
        ({"remaining": [1]}, [5], LENGTH),
        ({"remaining": [3]}, [5, 6, 7], LENGTH),
        ({"remaining": [4]}, [5, 6, 7, 9], LENGTH),
        ({"remaining": [5]}, [5, 6, 7, 9], UNFINISHED),
        # A stop token that also fills the length.
        ({"remaining": [2], "stop_token_ids": [6]}, [5, 6], STOP),
        ({"remaining": [1], "stop_token_ids": [6]}, [5], LENGTH),
        ({"remaining": [0]}, [], INACTIVE),
        ({"remaining": [-(2**31)], "stop_token_ids": [5]}, [], INACTIVE),
        ({"finished": [True]}, [], INACTIVE),
        ({"finished": [INACTIVE]}, [], INACTIVE),
        ({"finished": [UNFINISHED], "remaining": [2**31 - 1]}, [5, 6, 7, 9], UNFINISHED),
    ],
)
def test_endings(endings: dict[str, Any], emitted: list[int], reason: FinishReason) -> None:
    tree, target = chain_of_tokens(5, 6, 7)
    result = numba_ddtree.accept_tree(tree, target, **endings, backend="numpy")
    length = len(emitted)
    assert result.tokens.tolist() == [emitted + [-1] * (4 - length)]
    assert result.accepted_indices.tolist() == [[*range(length)] + [-1] * (4 - length)]
    assert result.accept_length.tolist() == [length]
    assert result.finish_reason.tolist() == [reason]


def test_a_tree_of_its_root_alone_emits_the_bonus_token() -> None:
    tree, target = chain_of_tokens()
    result = numba_ddtree.accept_tree(tree, target, remaining=[1], backend="numpy")
    assert result.tokens.tolist() == [[9]]
    assert result.accept_length.tolist() == [1]
    assert result.finish_reason.tolist() == [LENGTH]


def test_the_reasons_of_one_round_finish_requests_of_the_next() -> None:
    tree, target = chain_of_tokens(5, 6)
    first = numba_ddtree.accept_tree(tree, target, stop_token_ids=[6], backend="numpy")
    second = numba_ddtree.accept_tree(tree, target, finished=first.finish_reason, backend="numpy")
    assert second.accept_length.tolist() == [0]
    assert second.finish_reason.tolist() == [INACTIVE]


def test_a_negative_token_of_the_target_matches_nothing() -> None:
    # Neither a child that has it too, nor the padding of the stop tokens.
    tree, target = chain_of_tokens(5, 6)
    tree.token_ids[0, 2] = target[0, 1] = -1
    result = numba_ddtree.accept_tree(tree, target, stop_token_ids=[-1], backend="numpy")
    assert result.accepted_indices.tolist() == [[0, 1, -1]]
    assert result.tokens.tolist() == [[5, -1, -1]]
    assert result.bonus_token.tolist() == [-1]
    assert result.finish_reason.tolist() == [FinishReason.INVALID]


def test_tokens_of_padding_slots_are_not_read(rng: np.random.Generator) -> None:
    # A padding slot that looks like a child of the root, with the token the target wants.
    tree = link(np.array([[-1, 0, 0]], np.int32), np.array([[0, 5, 6]], np.int32), np.array([2], np.int32))
    tree.parents[0, 2], tree.token_ids[0, 2] = 0, 6
    result = numba_ddtree.accept_tree(tree, np.array([[6, 0, 2**31]], np.int64), backend="numpy")
    assert result.accept_length.tolist() == [1]
    assert result.bonus_token.tolist() == [6]


def test_a_wrong_token_equal_in_its_low_bits_is_no_match() -> None:
    path, _ = accept_path(np.array([0, 7], np.int32), np.array([-1, 0], np.int32), np.array([2**32 + 7, 0]))
    assert path == [0]


def test_results_go_into_the_arrays_given() -> None:
    tree = link(np.array([[-1, 0, 1]], np.int32), np.array([[0, 5, 6]], np.int32))
    out = AcceptResult(**{name: np.full(shape, 77, np.int32) for name, shape in result_shapes(1, 2).items()})
    got = numba_ddtree.accept_tree(tree, np.array([[5, 6, 9]], np.int32), out=out, backend="numpy")
    assert all(got.arrays()[name] is array for name, array in out.arrays().items())
    assert out.accepted_indices.tolist() == [[0, 1, 2]]
    assert out.bonus_token.tolist() == [9]
    assert out.tokens.tolist() == [[5, 6, 9]]


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
@pytest.mark.parametrize("B", [1, 33, 300])
@pytest.mark.parametrize("N", [1, 2, 65, 1025])
def test_kernel_ends_where_the_reference_does(rng: np.random.Generator, B: int, N: int) -> None:
    for round_number in range(10):
        counts = rng.integers(0, N + 1, B).astype(np.int32)
        parents = make_parent_batch(rng, 12, N)[rng.integers(0, 12, B)]
        tree = link(parents, rng.integers(-1, 3, (B, N)).astype(np.int32), counts)
        target = make_target_tokens(rng, tree, 0.98).astype([np.int32, np.int64][round_number % 2])
        target[rng.random((B, N)) < 0.02] = -1
        check_accept(numba_library(), tree, target, make_endings(rng, B, longest=12))


@pytest.mark.gpu
@pytest.mark.parametrize("stops", [1, 3, 200])
def test_kernel_finds_a_stop_token_of_a_deep_path(rng: np.random.Generator, stops: int) -> None:
    tree, target = chain_of_tokens(*range(10, 74))
    lists = rng.integers(80, 999, (1, stops)).astype(np.int32)
    lists[0, -1] = 70
    got = check_accept(numba_library(), tree, target, {"stop_token_ids": lists})
    assert got.accept_length.tolist() == [61]


@pytest.mark.gpu
def test_kernel_emits_nothing_beyond_int32(rng: np.random.Generator) -> None:
    tree, target = chain_of_tokens(5, 6)
    for token in (2**31, 2**32 + 5, -1, -(2**31) - 1, 2**63 - 1, -(2**63)):
        wide = target.astype(np.int64)
        wide[0, 0] = token
        # As device arrays: host arrays are checked before.
        got = check_accept(numba_library(), tree, wide, {"stop_token_ids": np.array([-1, 5], np.int32)})
        assert got.tokens.tolist() == [[-1, -1, -1]]
        assert got.finish_reason.tolist() == [FinishReason.INVALID]


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
    target = make_target_tokens(rng, tree).astype(dtype)
    check_accept(library, tree, target)
    check_accept(
        library,
        tree,
        target,
        {
            "stop_token_ids": np.array([[2, -1]] * 4 + [[0, 1]] * 4, np.int32),
            "remaining": np.arange(8, dtype=np.int32),
            "ignore_eos": np.arange(8) % 2 == 0,
            "finished": np.arange(8) == 5,
        },
    )


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
