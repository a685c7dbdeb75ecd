"""Tree building in Numba's simulator: every way to find nodes, every option, ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from build_checks import (
    EDGE_KINDS,
    SEARCHES,
    bad_options,
    check_options,
    late_tie,
    make_options,
    make_rows,
    use_search,
)
from cost_checks import Draft, check_stop, cost_options, real_draft, whole_trees
from kernel_checks import check_build, numba_library

import numba_ddtree
from inputs import LOG_PROB_KINDS, make_token_ids
from numba_ddtree import ArgumentError, TreeStatus, tree_build
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.device import tree_few, tree_kernel, tree_sums

pytestmark = [
    pytest.mark.skipif(not SIMULATED, reason="the simulator is off"),
    pytest.mark.usefixtures("poisoned_allocations"),
]


LARGE = tree_kernel.SMALL_BUDGET + 1
"""A largest budget for which `device.tree_few` does nothing."""


@pytest.mark.parametrize("search", SEARCHES)
def test_every_kind_and_option(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    use_search(monkeypatch, search)
    kinds = rng.permutation(LOG_PROB_KINDS + EDGE_KINDS)
    for chosen in np.array_split(kinds, 4):
        L, K, B = int(rng.integers(1, 6)), int(rng.integers(1, 7)), len(chosen)
        log_probs = np.concatenate([make_rows(rng, kind, L, K) for kind in chosen])
        budgets = rng.integers(0, 25, B).astype(np.int32)
        options = make_options(rng, B, L, K, 25)
        check_options(
            numba_library(), log_probs, make_token_ids(rng, B, L, K, np.int64), budgets, 25, **options
        )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_levels_that_do_not_fit_are_made_anew(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows: list[int] = []
    expand_level = tree_sums.expand_level

    def recording(draft: Any, paths: Any, row: Any, *args: Any) -> None:
        if cuda.threadIdx.x == 0:
            rows.append(int(row))
        expand_level(draft, paths, row, *args)

    def refusing(*args: Any) -> None:
        pytest.fail("nodes are popped one by one, though there is room for a tenth more than the budget")

    monkeypatch.setattr(tree_build, "capacity_for", lambda budget: budget + budget // 10)
    monkeypatch.setattr(tree_kernel, "pop_tree", refusing)
    monkeypatch.setattr(tree_sums, "expand_level", recording)
    log_probs = make_rows(rng, "realistic", 6, 8)
    check_build(numba_library(), log_probs, make_token_ids(rng, 1, 6, 8), 40)
    assert rows.count(0) > 1


def recorded_calls(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Names of a kernel's routines as its first thread calls them; those of a false result with a minus."""
    calls: list[str] = []

    def recording(name: str, routine: Any) -> Any:
        def record(*args: Any) -> Any:
            result = routine(*args)
            if cuda.threadIdx.x == 0:
                calls.append(name if result is None or result else f"-{name}")
            return result

        return record

    for name in names:
        module = tree_kernel if hasattr(tree_kernel, name) else tree_few
        monkeypatch.setattr(module, name, recording(name, getattr(module, name)))
    return calls


@pytest.mark.parametrize("kind", ["realistic", "identical_rows"])
def test_few_continuations_are_ranked(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    calls = recorded_calls(monkeypatch, "find_few_paths", "rank_few", "rank_ties", "find_paths")
    log_probs = make_rows(rng, "realistic", 4, 9)
    if kind == "identical_rows":
        log_probs[:] = log_probs[:, :1]
    check_build(numba_library(), log_probs, make_token_ids(rng, 1, 4, 9), 12)
    ties = ["rank_ties"] if kind == "identical_rows" else []
    assert calls == ["find_few_paths", "rank_few", *ties]


def test_a_parent_has_more_children_than_a_team_lanes(rng: np.random.Generator) -> None:
    # 4, 5, 8 and all of 11 siblings are kept, beside others.
    for children in (4, 5, 8, 11):
        log_probs = np.full((1, 3, 11), -9, np.float32)
        log_probs[0, 0, :3] = [-0.5, -0.625, -0.75]
        log_probs[0, 1, :children] = -1 - np.arange(children, dtype=np.float32) / 64
        log_probs[0, 2, :2] = [-0.0625, -2]
        check_build(numba_library(), log_probs, make_token_ids(rng, 1, 3, 11), 3 + 6 * children)


@pytest.mark.parametrize("case", ["seeded", "deep", "above 0", "no room"])
def test_what_is_not_done_for_few(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    L = 33 if case == "deep" else 4
    log_probs, ids = make_rows(rng, "realistic", L, 5), make_token_ids(rng, 1, L, 5)
    if case == "above 0":
        log_probs[0, 0, 0] = 1
    if case == "no room":
        monkeypatch.setattr(tree_build, "capacity_for", lambda budget: budget + 2 + tree_few.BEYOND // 2)
    calls = recorded_calls(monkeypatch, "find_few_paths", "find_paths", "pop_tree")
    budgets = np.array([20], np.int32)
    check_options(numba_library(), log_probs, ids, budgets, 20, chain_seed=case == "seeded")
    others = ["pop_tree"] if case == "above 0" else ["find_paths"]
    assert calls == (["-find_few_paths"] if case == "no room" else []) + others


def test_a_draft_as_deep_as_a_warp_is_wide(rng: np.random.Generator) -> None:
    log_probs = make_rows(rng, "realistic", 32, 3)
    # The chain is better than all that leave it.
    log_probs[0, :, 1:] = np.minimum(log_probs[0, :, 1:], -1)
    log_probs[0, :, 0] = -rng.random(32) / 64
    tree = check_build(numba_library(), log_probs, make_token_ids(rng, 1, 32, 3), 70)
    assert tree.depths.max() == 32


def test_spurs_are_extended_for_large_budgets(rng: np.random.Generator) -> None:
    log_probs = np.concatenate([make_rows(rng, kind, 5, 9) for kind in ("realistic", "inf_tails")])
    check_options(
        numba_library(),
        log_probs,
        make_token_ids(rng, 2, 5, 9),
        np.array([140, 150], np.int32),
        150,
        chain_seed=True,
    )


@pytest.mark.parametrize("max_bucket", [0, tree_sums.MAX_BUCKET])
def test_continuations_are_sorted(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, max_bucket: int
) -> None:
    orders: list[str] = []

    def recording(name: str) -> Any:
        order = getattr(tree_sums, name)
        monkeypatch.setattr(tree_sums, name, lambda *args: (orders.append(name), order(*args)))

    recording("order_buckets")
    recording("merge_paths")
    monkeypatch.setattr(tree_sums, "MAX_BUCKET", max_bucket)
    for kind in ("realistic", "ties", "huge"):
        log_probs = make_rows(rng, kind, 4, 9)
        ids = make_token_ids(rng, 1, 4, 9)
        check_build(numba_library(), log_probs, ids, np.array([50], np.int32), max_budget=LARGE)
    # Equal log-probs make one bucket of each depth, of which one is as large as the budget.
    flat = np.full((1, 2, 80), -1, np.float32)
    ids = make_token_ids(rng, 1, 2, 80)
    check_build(numba_library(), flat, ids, np.array([60], np.int32), max_budget=LARGE)
    assert "merge_paths" in orders
    assert ("order_buckets" in orders) == (max_bucket > 0)


def test_equal_offers_in_two_groups_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    use_search(monkeypatch, "popping")
    log_probs = np.zeros((1, 36, 2), np.float32)
    log_probs[:, :30, 1] = -5
    check_build(numba_library(), log_probs, np.arange(72, dtype=np.int32).reshape(1, 36, 2), 72)
    check_build(numba_library(), late_tie(), np.zeros((1, 37, 30), np.int32), 97)


def test_log_probs_above_0_end_the_search(rng: np.random.Generator) -> None:
    # A child that is better than its parent's siblings, which the order of scores would put first.
    log_probs = np.array([[[-1.0, -1.5], [2.0, -4.0]]], np.float32)
    tree = check_build(numba_library(), log_probs, make_token_ids(rng, 1, 2, 2), 6)
    assert tree.depths[0].tolist() == [0, 1, 2, 1, 2, 2, 2]


def test_an_equal_ratio_ends_the_tree() -> None:
    # Probabilities of 1: the third node is the first that leaves the ratio as it is.
    tree = check_options(
        numba_library(),
        np.zeros((1, 2, 3), np.float32),
        np.arange(6, dtype=np.int32).reshape(1, 2, 3),
        np.array([8], np.int32),
        8,
        verify_cost=np.array([1, 1.5, 1.5, 2, 2, 1, 1, 1, 1.0]),
        draft_cost=0.0,
    )
    assert tree.num_nodes[0] == 3
    # What is left has no links to what was given up.
    assert tree.first_child[0, :3].max() < 3
    assert tree.next_sibling[0, :3].max() < 3


@pytest.mark.parametrize("case", bad_options(2, 3, 5))
def test_bad_options(rng: np.random.Generator, case: str) -> None:
    options, fault = bad_options(2, 3, 5)[case]
    log_probs = np.concatenate([make_rows(rng, "realistic", 2, 3) for _ in range(4)])
    given = log_probs, make_token_ids(rng, 4, 2, 3), np.array([1, 5, 1, 5], np.int32)
    device = numba_library()
    tree = check_options(device, *given, 5, **options)
    assert (tree.status[1::2] == TreeStatus.INVALID).all()
    assert (tree.num_nodes[1::2] == 1).all()
    assert (tree.status[::2] == TreeStatus.OK).all()
    assert (tree.positions >= 0).all()
    assert (tree.token_ids >= 0).all()
    for put, extra in ((np.array, {}), (device.put, {"validate": True})):
        placed = {k: put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        with pytest.raises(ArgumentError) as error:
            numba_ddtree.build_tree(*map(put, given), max_budget=5, **placed, **extra)
        assert str(error.value).startswith(fault + ":")


def test_a_measured_cost_ends_a_tree_where_the_ratio_is_largest() -> None:
    drafted = real_draft()
    draft = Draft(drafted.log_probs[:4, :, :24].copy(), drafted.token_ids[:4, :, :24].copy())
    costs = cost_options(8000)
    budgets = np.full(4, 120, np.int32)
    tree = check_options(numba_library(), draft.log_probs, draft.token_ids, budgets, 120, **costs)
    sizes = check_stop(tree, draft, whole_trees(draft, 120), costs)
    assert 0 < min(sizes) < 120
