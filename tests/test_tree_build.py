"""Best-first trees: golden trees, a second formulation, properties; the kernel on a device."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from build_checks import (
    EDGE_KINDS,
    SEARCHES,
    bad_options,
    build_reference,
    check_options,
    continuations,
    late_tie,
    make_options,
    make_rows,
    use_search,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import Library, assert_same_tree, bad_draft, check_build, numba_library
from libraries import LIBRARIES, side_stream
from numpy.typing import NDArray

import numba_ddtree
from golden import GoldenTree, load_golden_trees
from inputs import LOG_PROB_KINDS, build, make_log_probs, make_token_ids
from numba_ddtree import ArgumentError, DraftTree, TreeStatus
from numba_ddtree.refs.exact_exp import exact_exp
from numba_ddtree.refs.tree_build import best_first, nodes_worth

GOLDEN = load_golden_trees()


@st.composite
def log_prob_rows(draw: st.DrawFn, max_depth: int = 4, max_width: int = 4) -> NDArray[np.float32]:
    """Sorted rows, float32 [L, K], of few values, so that scores tie; some end in -inf."""
    L = draw(st.integers(1, max_depth))
    K = draw(st.integers(1, max_width))
    value = st.sampled_from([-0.0, 0.0, -0.125, -0.5, -1.0, -1.0000001, -2.5, -1e-30, -3e38, -np.inf])
    rows = draw(st.lists(st.lists(value, min_size=K, max_size=K), min_size=L, max_size=L))
    rows[0][0] = -0.25  # a first candidate there must be
    return np.array([sorted(row, reverse=True) for row in rows], np.float32)


def rank_tuples(nodes: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """Paths of ranks of nodes given as (parent, depth, rank)."""
    paths: list[tuple[int, ...]] = [()]
    for parent, _, rank in nodes:
        paths.append((*paths[parent], rank))
    return paths[1:]


def sorted_continuations(log_probs: NDArray[np.float32]) -> list[tuple[float, tuple[int, ...]]]:
    """Every continuation of probability above zero as (-score, ranks), best first."""
    found = []
    for depth in range(1, len(log_probs) + 1):
        for ranks in itertools.product(range(log_probs.shape[1]), repeat=depth):
            score = 0.0
            for row, rank in zip(log_probs, ranks, strict=False):
                score += float(row[rank])
            if score > -np.inf:
                found.append((-score, ranks))
    return sorted(found)


def node_scores(tree: DraftTree, log_probs: NDArray[np.float32], token_ids: NDArray[Any]) -> list[float]:
    """Score of each node of a host tree of one request whose token ids are distinct within a row."""
    scores = [0.0]
    for node in range(1, int(tree.num_nodes[0])):
        row = int(tree.depths[0, node]) - 1
        (rank,) = np.flatnonzero(token_ids[0, row] == tree.token_ids[0, node])
        scores.append(scores[tree.parents[0, node]] + float(log_probs[0, row, rank]))
    return scores


def assert_golden(tree: DraftTree, golden: GoldenTree) -> None:
    count = len(golden.parents)
    assert tree.num_nodes[0] == count
    np.testing.assert_array_equal(tree.token_ids[0, 1:count], golden.token_ids)
    np.testing.assert_array_equal(tree.depths[0, 1:count], golden.depths)
    np.testing.assert_array_equal(tree.parents[0, :count], golden.parents)
    np.testing.assert_array_equal(tree.to_visibility()[0, :count, :count], golden.visibility)
    exhausted = count <= golden.budget
    assert tree.status[0] == (TreeStatus.EXHAUSTED if exhausted else TreeStatus.OK)


@pytest.mark.parametrize("case", GOLDEN)
def test_reference_builds_the_golden_tree(case: str) -> None:
    golden = GOLDEN[case]
    tree = numba_ddtree.build_tree(
        golden.draft_log_probs[None], golden.draft_token_ids[None], golden.budget, backend="numpy"
    )
    assert_golden(tree, golden)


@given(log_prob_rows(), st.integers(0, 60))
def test_heap_takes_the_best_of_all_continuations(log_probs: NDArray[np.float32], budget: int) -> None:
    want = [ranks for _, ranks in sorted_continuations(log_probs)[:budget]]
    assert rank_tuples(best_first(log_probs, budget)) == want


@given(log_prob_rows(max_depth=5, max_width=5), st.integers(0, 40), st.integers(0, 10**6))
def test_tree_is_well_formed(log_probs: NDArray[np.float32], budget: int, seed: int) -> None:
    batch = log_probs[None]
    token_ids = make_token_ids(np.random.default_rng(seed), *batch.shape)
    prefix = np.array([seed], np.int32)
    tree = numba_ddtree.build_tree(
        batch, token_ids, budget, root_tokens=[7], prefix_lengths=prefix, backend="numpy"
    )
    count, parents, depths = int(tree.num_nodes[0]), tree.parents[0], tree.depths[0]
    assert tree.token_ids[0, 0] == 7
    assert parents[0] == -1
    assert depths[0] == 0
    for node in range(1, count):
        assert 0 <= parents[node] < node
        assert depths[node] == depths[parents[node]] + 1
    assert (tree.positions[0, :count] == prefix + depths[:count]).all()
    scores = node_scores(tree, batch, token_ids)
    assert all(later <= earlier for earlier, later in itertools.pairwise(scores))
    assert scores[-1] > -np.inf

    ancestors: list[set[int]] = [{0}]
    for node in range(1, count):
        ancestors.append({node} | ancestors[parents[node]])
    seen = [set(np.flatnonzero(row).tolist()) for row in tree.to_visibility()[0]]
    assert seen == ancestors + [set()] * (budget + 1 - count)

    for node in range(count):
        children = []
        child = tree.first_child[0, node]
        while child >= 0:
            children.append(child)
            child = tree.next_sibling[0, child]
        assert children == [n for n in range(1, count) if parents[n] == node]

    for name in ("token_ids", "depths"):
        assert (tree.arrays()[name][0, count:] == 0).all()
    for name in ("parents", "first_child", "next_sibling"):
        assert (tree.arrays()[name][0, count:] == -1).all()
    assert (tree.positions[0, count:] == prefix).all()


@given(log_prob_rows(), st.integers(0, 30))
def test_a_larger_budget_only_adds_nodes(log_probs: NDArray[np.float32], budget: int) -> None:
    assert best_first(log_probs, budget) == best_first(log_probs, budget + 1)[:budget]


@given(log_prob_rows(max_depth=8, max_width=1), st.integers(0, 10))
def test_one_candidate_gives_the_chain(log_probs: NDArray[np.float32], budget: int) -> None:
    dead = np.flatnonzero(log_probs[:, 0] == -np.inf)
    length = min(budget, dead[0] if len(dead) else len(log_probs))
    assert best_first(log_probs, budget) == [(node, node + 1, 0) for node in range(length)]


@pytest.mark.parametrize("kind", LOG_PROB_KINDS)
def test_every_kind_agrees_with_all_continuations(rng: np.random.Generator, kind: str) -> None:
    for log_probs in make_log_probs(rng, kind, 10, 4, 5):
        want = [ranks for _, ranks in sorted_continuations(log_probs)[:200]]
        assert rank_tuples(best_first(log_probs, 200)) == want


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_requests_do_not_depend_on_one_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    B, L, K = 5, 3, 4
    log_probs = np.concatenate([make_log_probs(rng, kind, 1, L, K) for kind in LOG_PROB_KINDS[:B]])
    token_ids = make_token_ids(rng, B, L, K, np.int64)
    budgets, roots, prefixes = rng.integers(0, 12, (3, B)).astype(np.int32)
    order = rng.permutation(B)
    whole = build(log_probs, token_ids, budgets, roots, prefixes, 12)
    arrays = (log_probs, token_ids, budgets, roots, prefixes)
    moved = build(*(array[order] for array in arrays), 12)
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(moved.arrays()[name], array[order], err_msg=name)


def test_bad_requests_leave_the_others_alone(rng: np.random.Generator) -> None:
    log_probs, token_ids, budgets, prefixes = bad_draft(rng, 4, 5)
    whole = build(log_probs, token_ids, budgets, None, prefixes, 5)
    good = slice(None, None, 2)
    alone = build(log_probs[good], token_ids[good], budgets[good], None, prefixes[good], 5)
    for name, array in alone.arrays().items():
        np.testing.assert_array_equal(whole.arrays()[name][good], array, err_msg=name)
    assert (whole.num_nodes[1::2] == 1).all()
    assert not np.isin(whole.status[1::2], (TreeStatus.OK, TreeStatus.EXHAUSTED)).any()
    root_alone = build(log_probs[good], token_ids[good], 0, None, np.maximum(prefixes[1::2], 0), 5)
    for name in ("parents", "depths", "positions", "first_child", "next_sibling", "ancestor_bits"):
        np.testing.assert_array_equal(whole.arrays()[name][1::2], root_alone.arrays()[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_dtype_of_ids_does_not_matter(rng: np.random.Generator, dtype: type[np.integer[Any]]) -> None:
    log_probs, ids = make_log_probs(rng, "realistic", 2, 4, 6), make_token_ids(rng, 2, 4, 6)
    got = numba_ddtree.build_tree(log_probs, ids.astype(dtype), 9, backend="numpy")
    assert_same_tree(got, build(log_probs, ids, 9))


def test_budgets_of_each_request_are_padded_to_the_largest(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "flat", 3, 4, 6), make_token_ids(rng, 3, 4, 6)
    tree = numba_ddtree.build_tree(log_probs, ids, [3, 0, 9], backend="numpy")
    assert tree.num_slots == 10
    assert tree.num_nodes.tolist() == [4, 1, 10]
    wide = numba_ddtree.build_tree(log_probs, ids, 3, max_budget=7, backend="numpy")
    assert wide.num_slots == 8
    assert wide.num_nodes.tolist() == [4, 4, 4]


def test_results_go_into_the_arrays_given(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "ties", 2, 4, 6), make_token_ids(rng, 2, 4, 6)
    want = build(log_probs, ids, 9)
    out = build(*(make_log_probs(rng, "flat", 2, 4, 6), ids), 9)
    got = numba_ddtree.build_tree(log_probs, ids, 9, out=out, backend="numpy")
    assert all(got.arrays()[name] is array for name, array in out.arrays().items())
    assert_same_tree(out, want)


# Options.


@settings(max_examples=60)
@given(log_prob_rows(), st.integers(0, 30), st.booleans(), st.sampled_from([-np.inf, -3.0, -1.0, 0.0, 1.0]))
def test_options_choose_among_all_continuations(
    log_probs: NDArray[np.float32], budget: int, chain_seed: bool, least: float
) -> None:
    want = continuations(log_probs, chain_seed=chain_seed, min_log_prob=least)[:budget]
    nodes = best_first(log_probs, budget, chain_seed=chain_seed, min_log_prob=least)
    assert rank_tuples(nodes) == want


def test_limits_are_those_of_a_smaller_draft(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "realistic", 3, 5, 6), make_token_ids(rng, 3, 5, 6)
    depths, widths = np.array([5, 1, 3], np.int32), np.array([2, 6, 1], np.int32)
    budgets = np.full(3, 12, np.int32)
    got = build_reference(log_probs, ids, budgets, 12, max_depths=depths, max_candidates=widths)
    for request, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        cut = np.s_[request : request + 1, :depth, :width]
        want = build_reference(log_probs[cut], ids[cut], budgets[:1], 12)
        for name, array in want.arrays().items():
            np.testing.assert_array_equal(got.arrays()[name][request], array[0], err_msg=name)


@pytest.mark.parametrize("budget", [0, 2, 4, 20])
def test_a_seeded_tree_holds_the_chain(rng: np.random.Generator, budget: int) -> None:
    log_probs, ids = make_log_probs(rng, "flat", 1, 4, 5), make_token_ids(rng, 1, 4, 5)
    tree = numba_ddtree.build_tree(log_probs, ids, budget, chain_seed=True, backend="numpy")
    length = min(budget, 4)
    assert tree.parents[0, : length + 1].tolist() == list(range(-1, length))
    assert tree.token_ids[0, 1 : length + 1].tolist() == ids[0, :length, 0].tolist()


def test_the_cost_ends_a_tree_before_the_first_node_that_is_not_worth_it() -> None:
    log_probs = np.log(np.array([[[0.5, 0.25, 0.125]]], np.float32))
    ids = np.arange(3)[None, None]
    # 1 / 2, 1.5 / 2.5, 1.75 / 3 and 1.875 / 3: the second node does not raise 0.6, the third would.
    cost = np.array([1.0, 1.5, 2.0, 2.0])
    tree = numba_ddtree.build_tree(log_probs, ids, 3, verify_cost=cost, draft_cost=1.0, backend="numpy")
    assert tree.num_nodes[0] == 2
    assert tree.status[0] == TreeStatus.OK
    free = numba_ddtree.build_tree(log_probs, ids, 3, verify_cost=np.ones(9), backend="numpy")
    assert free.num_nodes[0] == 4
    # An equal ratio is no raise: 1 / 1 and 1.5 / 1.5.
    level = numba_ddtree.build_tree(log_probs, ids, 3, verify_cost=[1.0, 1.5, 1.0, 1.0], backend="numpy")
    assert level.num_nodes[0] == 1


def test_nodes_worth_is_the_first_maximum_of_ratios_that_rise_and_fall(rng: np.random.Generator) -> None:
    scores = [0.0, *np.sort(-3 * rng.exponential(size=40))[::-1].tolist()]
    costs = np.linspace(1, 20, 41) ** 2
    ratios = np.cumsum(np.exp(scores)) / costs
    rises = np.append(np.diff(ratios) > 0, False)
    assert nodes_worth(scores, costs) == int(np.argmin(rises))


def test_a_tree_that_limits_leave_small_is_exhausted(rng: np.random.Generator) -> None:
    log_probs, ids = make_log_probs(rng, "realistic", 1, 3, 4), make_token_ids(rng, 1, 3, 4)
    for options in ({"min_log_prob": 1.0}, {"max_depths": [1]}, {"min_log_prob": float(log_probs[0, 0, 0])}):
        tree = numba_ddtree.build_tree(log_probs, ids, 9, backend="numpy", **options)
        assert tree.status[0] == TreeStatus.EXHAUSTED
    assert tree.num_nodes[0] == 2  # a score equal to the least is taken


@given(st.floats(-700, 700))
def test_exp_is_right_to_an_ulp_and_a_half(x: float) -> None:
    assert abs(exact_exp(x) / math.exp(x) - 1) < 1.5 * np.finfo(np.float64).eps


def test_exp_at_its_ends() -> None:
    assert exact_exp(0.0) == 1.0
    assert exact_exp(-1e300) == exact_exp(np.nextafter(-700, -701)) == 0.0
    assert exact_exp(1e300) == exact_exp(700.0)


GOOD = np.log(np.array([[[0.5, 0.25]]], np.float32)), np.array([[[1, 2]]])


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_depths": [0]}, "max_depths[0]"),
        ({"max_depths": [1, 1]}, "max_depths"),
        ({"max_depths": [1.0]}, "max_depths"),
        ({"max_candidates": [3]}, "max_candidates[0]"),
        ({"min_log_prob": float("nan")}, "min_log_prob"),
        ({"min_log_prob": True}, "min_log_prob"),
        ({"min_log_prob": -(10**400)}, "min_log_prob"),
        ({"min_log_prob": "low"}, "min_log_prob"),
        ({"min_log_prob": [-1, -2]}, "min_log_prob"),
        ({"min_log_prob": [np.nan]}, "min_log_prob[0]"),
        ({"chain_seed": 1}, "chain_seed"),
        ({"verify_cost": [1.0, 2.0]}, "verify_cost"),
        ({"verify_cost": [[1.0, 2.0, 3.0]]}, "verify_cost"),
        ({"verify_cost": [1.0, 2.0, np.nan]}, "verify_cost[2]"),
        ({"verify_cost": [0.0, 2.0, 3.0]}, "verify_cost[0]"),
        ({"draft_cost": 1.0}, "draft_cost"),
        ({"verify_cost": [1.0, 2.0, 3.0], "draft_cost": np.inf}, "draft_cost"),
        ({"root_tokens": [-1]}, "root_tokens[0]"),
        ({"prefix_lengths": [2**31 - 64]}, "prefix_lengths[0]"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ArgumentError) as error:
        numba_ddtree.build_tree(*GOOD, 2, backend="numpy", **options)
    assert str(error.value).startswith(fault + ":")


def test_costs_beyond_the_largest_tree_do_not_matter() -> None:
    costs = [1.0, 1.1, 1.2, np.nan]
    assert numba_ddtree.build_tree(*GOOD, 2, verify_cost=costs, backend="numpy").num_nodes[0] == 3


# On a device.

SHAPES = list(itertools.product((1, 2, 15, 64), (1, 2, 7, 64, 1024)))
BUDGETS = (0, 1, 2, 31, 32, 33, 64, 255, 256, 1023, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_kernel_builds_the_golden_tree(case: str, dtype: type[np.integer[Any]]) -> None:
    golden = GOLDEN[case]
    log_probs, ids = np.array(golden.draft_log_probs[None]), golden.draft_token_ids[None].astype(dtype)
    assert_golden(check_build(numba_library(), log_probs, ids, golden.budget), golden)


@pytest.mark.gpu
@pytest.mark.parametrize(("L", "K"), SHAPES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_kernel_is_the_reference(rng: np.random.Generator, L: int, K: int, budget: int) -> None:
    kinds = rng.choice(LOG_PROB_KINDS, 2, replace=False)
    log_probs = np.concatenate([make_log_probs(rng, kind, 1, L, K) for kind in kinds])
    dtype = np.int64 if budget % 2 else np.int32
    check_build(numba_library(), log_probs, make_token_ids(rng, 2, L, K, dtype), budget)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LOG_PROB_KINDS)
@pytest.mark.parametrize(("L", "K"), [(15, 64), (64, 64), (7, 1024), (64, 2), (2, 1024)])
def test_kernel_at_the_largest_budget(rng: np.random.Generator, kind: str, L: int, K: int) -> None:
    log_probs, ids = make_log_probs(rng, kind, 3, L, K), make_token_ids(rng, 3, L, K)
    check_build(numba_library(), log_probs, ids, 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 33, 300])
def test_kernel_on_batches_whose_requests_all_differ(rng: np.random.Generator, B: int) -> None:
    L, K, limit = 15, 64, 70
    log_probs = np.concatenate(
        [make_log_probs(rng, LOG_PROB_KINDS[b % len(LOG_PROB_KINDS)], 1, L, K) for b in range(B)]
    )
    given = {
        "budget": rng.integers(0, limit + 1, B).astype(np.int32),
        "root_tokens": rng.integers(0, 10**5, B).astype(np.int32),
        "prefix_lengths": rng.integers(0, 10**6, B).astype(np.int32),
    }
    check_build(numba_library(), log_probs, make_token_ids(rng, B, L, K), max_budget=limit, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_kernel_takes_arrays_of_every_library(
    rng: np.random.Generator, make_library: Any, dtype: type[np.integer[Any]]
) -> None:
    library: Library = make_library()
    if library.name == "jax" and dtype is np.int64:
        pytest.skip("jax has no int64 unless told")
    B, L, K = 5, 15, 64
    check_build(
        library,
        make_log_probs(rng, "realistic", B, L, K),
        make_token_ids(rng, B, L, K, dtype),
        np.array([64, 0, 1, 33, 63], np.int32),
        root_tokens=rng.integers(0, 99, B).astype(np.int32),
        prefix_lengths=rng.integers(0, 99, B).astype(np.int32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_kernel_makes_arrays_of_the_library_given(rng: np.random.Generator, make_library: Any) -> None:
    library: Library = make_library()
    log_probs, ids = make_log_probs(rng, "realistic", 2, 7, 8), make_token_ids(rng, 2, 7, 8)
    given = library.put(log_probs), library.put(ids)
    tree = numba_ddtree.build_tree(*given, 20)
    for array in tree.arrays().values():
        assert isinstance(array, type(given[0]))
    assert_same_tree(library.get_tree(tree), build(log_probs, ids, 20))
    assert_same_tree(tree.to_host(), build(log_probs, ids, 20))


@pytest.mark.gpu
def test_kernel_gives_bad_device_arrays_a_status(rng: np.random.Generator) -> None:
    for L, K in ((2, 3), (15, 64), (64, 1024)):
        log_probs, ids, budgets, prefixes = bad_draft(rng, L, K)
        tree = check_build(numba_library(), log_probs, ids, budgets, prefix_lengths=prefixes, max_budget=5)
        assert (tree.status[::2] == TreeStatus.OK).all()
        assert (tree.num_nodes[1::2] == 1).all()


@pytest.mark.gpu
def test_kernel_validates_device_arrays_on_request(rng: np.random.Generator) -> None:
    library = numba_library()
    log_probs, ids, budgets, prefixes = bad_draft(rng, 4, 5)
    for request in range(1, len(budgets), 2):
        one = slice(request, request + 1)
        given = library.put_all(
            draft_log_probs=log_probs[one],
            draft_token_ids=ids[one],
            budget=budgets[one],
            prefix_lengths=prefixes[one],
        )
        with pytest.raises(ArgumentError, match=r"^(draft_\w+|budget|prefix_lengths)\["):
            numba_ddtree.build_tree(**given, max_budget=5, validate=True)


@pytest.mark.gpu
def test_kernel_repeats_to_the_bit(rng: np.random.Generator) -> None:
    library = numba_library()
    log_probs, ids = make_log_probs(rng, "ties", 33, 15, 64), make_token_ids(rng, 33, 15, 64)
    first = check_build(library, log_probs, ids, 256)
    given = library.put(log_probs), library.put(ids)
    for _ in range(20):
        assert_same_tree(library.get_tree(numba_ddtree.build_tree(*given, 256)), first)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle", "current"])
def test_kernel_runs_on_the_callers_stream(rng: np.random.Generator, form: str) -> None:
    log_probs, ids = make_log_probs(rng, "realistic", 8, 15, 64), make_token_ids(rng, 8, 15, 64)
    with side_stream(form) as (torch, delayed_copy, options):
        rows = delayed_copy(torch.from_numpy(log_probs))
        tree = numba_ddtree.build_tree(rows, torch.from_numpy(ids).cuda(), 64, **options)
    torch.cuda.synchronize()
    got = {name: array.cpu().numpy() for name, array in tree.arrays().items()}
    assert_same_tree(DraftTree(**got, max_depth=15), build(log_probs, ids, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(("L", "K"), [(1, 1024), (15, 1), (15, 64), (64, 3), (64, 200)])
def test_kernel_with_every_option_however_it_searches(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, search: str, L: int, K: int
) -> None:
    use_search(monkeypatch, search)
    kinds = LOG_PROB_KINDS + EDGE_KINDS
    B = len(kinds)
    for limit in (40, 300, 1024):
        log_probs = np.concatenate([make_rows(rng, kind, L, K) for kind in kinds])
        budgets = rng.integers(limit // 2, limit + 1, B).astype(np.int32)
        for options in ({}, make_options(rng, B, L, K, limit)):
            check_options(numba_library(), log_probs, make_token_ids(rng, B, L, K), budgets, limit, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("L", [1, 15, 32, 33])
@pytest.mark.parametrize("K", [2, 5, 64, 256])
def test_kernel_with_small_budgets(rng: np.random.Generator, L: int, K: int) -> None:
    kinds = LOG_PROB_KINDS + EDGE_KINDS
    log_probs = np.concatenate([make_rows(rng, kind, L, K) for kind in kinds])
    # Multiples of a 32nd, whose sums are exact: some of them tie.
    multiples = np.round(np.maximum(log_probs, np.float32(-1000)) * 32) / 32
    multiples = np.where(log_probs > -1000, multiples, log_probs)
    for rows in (log_probs, multiples):
        ids = make_token_ids(rng, len(kinds), L, K)
        for limit in (3, 16, 64, 128):
            budgets = rng.integers(limit // 2, limit + 1, len(kinds)).astype(np.int32)
            check_options(numba_library(), rows, ids, budgets, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("search", SEARCHES)
def test_kernel_decides_ties_past_the_first_word_of_the_path(
    monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    use_search(monkeypatch, search)
    log_probs = np.zeros((1, 40, 2), np.float32)
    log_probs[:, :34, 1] = -5
    for budget in (64, 110, 1024):
        check_build(numba_library(), log_probs, np.arange(80, dtype=np.int32).reshape(1, 40, 2), budget)
    check_build(numba_library(), late_tie(), np.zeros((1, 37, 30), np.int32), 97)


@pytest.mark.gpu
@pytest.mark.parametrize("case", bad_options(2, 3, 5))
def test_kernel_gives_bad_options_a_status(rng: np.random.Generator, case: str) -> None:
    options, _ = bad_options(2, 3, 5)[case]
    log_probs = np.concatenate([make_rows(rng, "realistic", 2, 3) for _ in range(4)])
    budgets = np.array([1, 5, 1, 5], np.int32)
    tree = check_options(numba_library(), log_probs, make_token_ids(rng, 4, 2, 3), budgets, 5, **options)
    assert (tree.status[1::2] == TreeStatus.INVALID).all()
    assert (tree.status[::2] == TreeStatus.OK).all()


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_kernel_takes_options_of_every_library(rng: np.random.Generator, make_library: Any) -> None:
    library: Library = make_library()
    B, L, K = 4, 15, 64
    options = {
        "max_depths": np.array([15, 1, 7, 3], np.int32),
        "max_candidates": np.array([64, 2, 1, 9], np.int32),
        "min_log_prob": -6 * rng.exponential(size=B).astype(np.float32),
        "chain_seed": True,
    }
    if library.name != "jax":  # which has no float64 unless told
        options["verify_cost"] = np.linspace(1, 5, 65)
    log_probs = make_log_probs(rng, "realistic", B, L, K)
    budgets = np.array([64, 5, 33, 64], np.int32)
    check_options(library, log_probs, make_token_ids(rng, B, L, K), budgets, 64, **options)
