"""Kernels in Numba's simulator, at sizes that it bears; each request of a batch is its own case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_checks import (
    Library,
    assert_same_arrays,
    assert_same_tree,
    attend,
    bad_draft,
    bad_links,
    check_accept,
    check_attention,
    check_bad_masks,
    check_build,
    check_links,
    check_malformed_accept,
    numba_library,
    numpy_library,
)

import numba_ddtree
from golden import load_golden_trees
from inputs import (
    LOG_PROB_KINDS,
    build,
    link,
    make_attention,
    make_endings,
    make_log_probs,
    make_parent_batch,
    make_target_tokens,
    make_token_ids,
)
from numba_ddtree import ArgumentError, DraftTree, TreeStatus
from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.status import FinishReason

GOLDEN = {name: tree for name, tree in load_golden_trees().items() if tree.budget <= 8}

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
]


@pytest.fixture(params=["numba", "numpy"])
def library(request: pytest.FixtureRequest) -> Library:
    return numba_library() if request.param == "numba" else numpy_library()


@pytest.fixture
def device() -> Library:
    return numba_library()


def test_build_tree_of_every_kind_and_small_budget(rng: np.random.Generator, device: Library) -> None:
    L, K = 4, 5
    log_probs = np.concatenate([make_log_probs(rng, kind, 2, L, K) for kind in LOG_PROB_KINDS])
    B = len(log_probs)
    budgets = rng.permutation([0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 20]).astype(np.int32)
    check_build(
        device,
        log_probs,
        make_token_ids(rng, B, L, K, np.int64),
        budgets,
        root_tokens=rng.integers(0, 9, B).astype(np.int32),
        prefix_lengths=rng.integers(0, 999, B).astype(np.int32),
        max_budget=21,
    )


@pytest.mark.parametrize("kind", ["ties", "all_equal"])
def test_build_tree_of_ties_past_one_warp_of_offers(
    rng: np.random.Generator, device: Library, kind: str
) -> None:
    log_probs = make_log_probs(rng, kind, 1, 6, 4)
    check_build(device, log_probs, make_token_ids(rng, 1, 6, 4), 40)


def test_build_tree_of_ties_that_rounding_makes(rng: np.random.Generator, device: Library) -> None:
    # Different log-probs whose float64 sums collide, since the first is so much larger.
    log_probs = -np.sort(rng.random((1, 3, 3)) * 1e-18, axis=-1).astype(np.float32)
    log_probs[:, 0] = [-0.0, -1.0, -1.0]
    log_probs[:, 1, 0] = -1.0
    log_probs[:, 1, 1:] = np.nextafter(np.float32(-1), np.float32(-2))
    check_build(device, log_probs, make_token_ids(rng, 1, 3, 3), 16)


@pytest.mark.parametrize(("L", "K"), [(1, 1), (1, 4), (5, 1), (2, 2)])
def test_build_tree_exhausts(rng: np.random.Generator, library: Library, L: int, K: int) -> None:
    tree = check_build(library, make_log_probs(rng, "ties", 1, L, K), make_token_ids(rng, 1, L, K), 8)
    assert tree.status[0] == TreeStatus.EXHAUSTED


def test_build_tree_of_bad_device_arrays(rng: np.random.Generator, device: Library) -> None:
    log_probs, token_ids, budgets, prefixes = bad_draft(rng, 2, 3)
    tree = check_build(device, log_probs, token_ids, budgets, prefix_lengths=prefixes, max_budget=5)
    status = TreeStatus.NO_CANDIDATE
    want = [TreeStatus.NAN, TreeStatus.NAN, *[TreeStatus.INVALID] * 2, status, *[TreeStatus.INVALID] * 5]
    assert tree.status[1::2].tolist() == want
    assert (tree.num_nodes[1::2] == 1).all()
    assert (tree.status[::2] == TreeStatus.OK).all()


def test_build_tree_validates_device_arrays_on_request(rng: np.random.Generator, device: Library) -> None:
    log_probs, token_ids, budgets, prefixes = bad_draft(rng, 2, 3)
    for request in range(1, len(budgets), 2):
        one = slice(request, request + 1)
        given = device.put_all(
            draft_log_probs=log_probs[one],
            draft_token_ids=token_ids[one],
            budget=budgets[one],
            prefix_lengths=prefixes[one],
        )
        with pytest.raises(
            ArgumentError, match=r"^(draft_log_probs|draft_token_ids|budget|prefix_lengths)\["
        ):
            numba_ddtree.build_tree(**given, max_budget=5, validate=True)


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_tree(library: Library, case: str) -> None:
    golden = GOLDEN[case]
    log_probs, token_ids = golden.draft_log_probs[None], golden.draft_token_ids[None]
    tree = check_build(library, np.array(log_probs), np.array(token_ids), golden.budget)
    np.testing.assert_array_equal(tree.token_ids[0, 1 : len(golden.parents)], golden.token_ids)
    np.testing.assert_array_equal(tree.parents[0, : len(golden.parents)], golden.parents)
    target = np.zeros((1, golden.budget + 1), np.int64)
    target[0, : len(golden.posterior_tokens)] = golden.posterior_tokens
    result = check_accept(library, tree, target)
    assert result.accepted_indices[0, : result.accept_length[0]].tolist() == golden.accepted_indices.tolist()
    assert result.bonus_token[0] == golden.bonus_token


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_accept_tree(rng: np.random.Generator, library: Library, dtype: type[np.integer[Any]]) -> None:
    B, N = 6, 40
    counts = np.array([N, N, 33, 1, 0, 7], np.int32)
    tree = link(make_parent_batch(rng, B, N), rng.integers(0, 3, (B, N)).astype(np.int32), counts)
    check_accept(library, tree, make_target_tokens(rng, tree).astype(dtype))


def test_accept_tree_ends(rng: np.random.Generator, library: Library) -> None:
    B, N = 4, 20
    tree = link(make_parent_batch(rng, B, N), rng.integers(0, 3, (B, N)).astype(np.int32))
    for _ in range(3):
        check_accept(library, tree, make_target_tokens(rng, tree, 1.0), make_endings(rng, B, longest=4))


def test_accept_tree_heeds_every_ending(device: Library) -> None:
    B = 8
    tree = link(np.tile(np.arange(-1, 3, dtype=np.int32), (B, 1)), np.array([[9, 5, 6, 7]] * B, np.int32))
    target = np.array([[5, 6, 7, 8]] * B, np.int32)
    endings = {
        "stop_token_ids": np.array([[-1, 6]] * 3 + [[-1, -1]] * 3 + [[8, 5], [6, 6]], np.int32),
        "remaining": np.array([9, 9, 1, 3, 4, 0, 9, 9], np.int32),
        "ignore_eos": np.arange(B) == 1,
        "finished": np.arange(B) == 7,
    }
    got = check_accept(device, tree, target, endings)
    assert got.accept_length.tolist() == [2, 4, 1, 3, 4, 0, 1, 0]
    assert got.finish_reason.tolist() == [1, 0, 2, 2, 2, 4, 1, 4]
    got = check_accept(device, tree, target, endings | {"ignore_eos": True})
    assert got.accept_length.tolist() == [4, 4, 1, 3, 4, 0, 4, 0]


def test_accept_tree_of_tokens_that_are_none(rng: np.random.Generator, device: Library) -> None:
    # Children of token -1, and padding of stop tokens, are nothing that a token of -1 finds.
    parents = np.tile(np.arange(-1, 3, dtype=np.int32), (5, 1))
    tree = link(parents, np.array([[9, 5, -1, 6]] * 5, np.int32))
    target = np.array([[5, -1, 6, 9], [5, 2**31, 6, 9], [5, 2**32 + 6, 6, 9], [-5, 0, 0, 0], [9, 0, 0, 0]])
    got = check_accept(device, tree, target, {"stop_token_ids": np.array([-1, 9], np.int32)})
    assert got.finish_reason.tolist() == [FinishReason.INVALID] * 4 + [FinishReason.STOP]
    assert got.tokens[:, :2].tolist() == [[5, -1]] * 3 + [[-1, -1], [9, -1]]


def test_accept_tree_of_malformed_parents_ends(rng: np.random.Generator, device: Library) -> None:
    check_malformed_accept(device, rng, B=12, N=20)


def test_tree_links(rng: np.random.Generator, library: Library) -> None:
    B, N = 6, 40
    parents, tokens = make_parent_batch(rng, B, N), rng.integers(0, 99, (B, N)).astype(np.int32)
    check_links(library, parents, tokens)
    counts = np.array([N, 0, 1, 2, 33, 39], np.int32)
    # Padding holds rubbish, which must not be looked at.
    parents = np.where(np.arange(N) < counts[:, None], parents, 10**6).astype(np.int32)
    lengths = rng.integers(0, 50, B).astype(np.int32)
    tree = check_links(library, parents, tokens, num_nodes=counts, prefix_lengths=lengths)
    mask = library.get(library.put_tree(tree).to_visibility())
    assert mask.shape == (B, N, N)
    again = DraftTree.from_visibility(
        **library.put_all(
            visibility=mask, token_ids=tree.token_ids, num_nodes=tree.num_nodes, prefix_lengths=lengths
        ),
        max_depth=tree.max_depth,
    )
    assert_same_tree(library.get_tree(again), tree)


def test_tree_links_of_bad_device_arrays(rng: np.random.Generator, device: Library) -> None:
    N = 12
    parents, counts, prefixes = bad_links(rng, N, B=14)
    tokens = rng.integers(0, 99, parents.shape).astype(np.int32)
    tree = check_links(device, parents, tokens, num_nodes=counts, prefix_lengths=prefixes)
    assert (tree.status[1::2] == TreeStatus.INVALID).all()
    assert (tree.status[::2] == TreeStatus.OK).all()
    for request in range(1, len(parents), 2):
        one = slice(request, request + 1)
        given = device.put_all(
            parents=parents[one], token_ids=tokens[one], num_nodes=counts[one], prefix_lengths=prefixes[one]
        )
        with pytest.raises(ArgumentError):
            DraftTree.from_parents(**given, validate=True)


def test_tree_links_deeper_than_allowed(rng: np.random.Generator, device: Library) -> None:
    N = 9
    parents = make_parent_batch(rng, 4, N)  # the second is a chain of depth 8
    tokens = np.ones((4, N), np.int32)
    tree = check_links(device, parents, tokens, max_depth=7)
    assert tree.status[1] == TreeStatus.INVALID
    with pytest.raises(ArgumentError, match="max_depth"):
        DraftTree.from_parents(device.put(parents), device.put(tokens), max_depth=7, validate=True)


def test_tree_links_of_bad_masks(rng: np.random.Generator, device: Library) -> None:
    check_bad_masks(device, rng, 11)


def test_attention(rng: np.random.Generator, library: Library) -> None:
    check_attention(library, make_attention(rng, prefixes=[0, 37], N=5, num_nodes=[5, 3]))


def test_attention_of_one_head_and_odd_widths(rng: np.random.Generator, device: Library) -> None:
    check_attention(
        device, make_attention(rng, prefixes=[3, 0], N=3, H=1, latent=7, rope=5, num_nodes=[2, 0])
    )


def test_attention_of_a_chain_past_one_word_of_bits(rng: np.random.Generator, device: Library) -> None:
    given = make_attention(rng, prefixes=[2], N=34, H=1, latent=4, rope=2)
    chain = link(np.arange(-1, 33, dtype=np.int32)[None], given.tree.token_ids)
    check_attention(device, replace(given, tree=chain))


def test_attention_of_an_invalid_prefix_is_nan_for_that_request(
    rng: np.random.Generator, device: Library
) -> None:
    given = make_attention(rng, prefixes=[4, 4, 4, 4], N=2, H=1, num_nodes=[2, 1, 2, 2], spare_keys=0)
    want = attend(device, given)
    given.prefix_lengths[1], given.prefix_lengths[2] = -1, 5
    out, lse = attend(device, given)
    for got, before, blank in zip((out, lse), want, (0, -np.inf), strict=True):
        np.testing.assert_array_equal(got[[0, 3]], before[[0, 3]])
        assert np.isnan(got[1, 0]).all()
        assert np.isnan(got[2]).all()
        assert (got[1, 1] == blank).all()
    arrays = device.put_all(
        q_nope=given.q_nope,
        q_pe=given.q_pe,
        ckv_cache=given.ckv_cache,
        kpe_cache=given.kpe_cache,
        prefix_lengths=given.prefix_lengths,
    )
    with pytest.raises(ArgumentError, match=r"^prefix_lengths\[1\]: got -1"):
        numba_ddtree.verify_attention(**arrays, tree=device.put_tree(given.tree), sm_scale=1.0, validate=True)


def test_attention_reads_no_row_that_a_node_does_not_see(rng: np.random.Generator, device: Library) -> None:
    given = make_attention(rng, prefixes=[3], N=4, H=1)
    given = replace(given, tree=link(np.array([[-1, 0, 0, 1]], np.int32), given.tree.token_ids))
    want = attend(device, given)
    given.ckv_cache[0, 3 + 2] = np.nan
    given.kpe_cache[0, 3 + 2] = np.nan
    got = attend(device, given)
    for before, after in zip(want, got, strict=True):
        np.testing.assert_array_equal(after[0, [0, 1, 3]], before[0, [0, 1, 3]])
        assert np.isnan(after[0, 2]).all()


def test_results_repeat_to_the_bit(rng: np.random.Generator, device: Library) -> None:
    given = make_attention(rng, prefixes=[9], N=3)
    first, second = attend(device, given), attend(device, given)
    assert_same_arrays(dict(enumerate(second)), dict(enumerate(first)))  # type: ignore[arg-type]


def test_results_that_cannot_be_written_are_refused(rng: np.random.Generator) -> None:
    given = make_attention(rng, prefixes=[1], N=1, H=1, latent=2, rope=2)
    out, lse = np.full(given.q_nope.shape, 7, np.float32), np.zeros((1, 1, 1), np.float32)
    lse.flags.writeable = False
    for wrong in (lse, lse.tolist()):
        with pytest.raises(ArgumentError, match=r"^lse: "):
            attend(numpy_library(), given, out=out, lse=wrong)
        assert (out == 7).all()


def test_empty_batch(library: Library) -> None:
    empty = {
        "draft_log_probs": np.zeros((0, 2, 2), np.float32),
        "draft_token_ids": np.zeros((0, 2, 2), np.int32),
    }
    tree = library.get_tree(numba_ddtree.build_tree(**library.put_all(**empty), budget=3))
    assert_same_tree(tree, build(*empty.values(), 3))
    target = np.zeros((0, 4), np.int32)
    assert check_accept(library, tree, target).accepted_indices.shape == (0, 3)


def test_scores_are_summed_in_float64(device: Library) -> None:
    # In float32, children would tie with their parents: 1e-6 is less than half an ulp of 64.
    log_probs = np.array(
        [[[-64.0, -64.0], [-1e-6, -30.0]], [[-64.0, -64.000004], [-1e-6, -2e-6]]], np.float32
    )
    check_build(device, log_probs, np.arange(8, dtype=np.int32).reshape(2, 2, 2), 6)


def test_a_tie_is_decided_past_the_first_word_of_the_path(device: Library) -> None:
    # Ranks 0 of a bit each, down to depth 34 and more, then a choice among equals.
    log_probs = np.zeros((1, 40, 2), np.float32)
    log_probs[:, :34, 1] = -5
    check_build(device, log_probs, np.arange(80, dtype=np.int32).reshape(1, 40, 2), 64)


def test_nan_beyond_the_ranks_in_shared_memory(device: Library) -> None:
    # No more ranks of a row are kept there than the budget can reach, which is 20.
    log_probs = np.repeat(-np.arange(700, dtype=np.float32)[None, None], 64, axis=1).repeat(2, axis=0)
    log_probs[1, 63, 699] = np.nan
    check_build(device, log_probs, np.zeros(log_probs.shape, np.int32), 20)


@pytest.mark.parametrize("budget", [12, 13])
def test_exhausted_by_one_node(device: Library, budget: int) -> None:
    log_probs = np.log(np.array([[[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]], np.float32))
    check_build(device, log_probs, np.zeros((1, 2, 3), np.int32), budget)
