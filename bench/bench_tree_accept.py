"""`accept_tree` against the numpy reference, on targets that follow each tree to a leaf."""

from __future__ import annotations

import numpy as np
import pytest

from numba_ddtree import DraftTree, accept_tree
from numba_ddtree.cases import RoundInputs, TreeCase, reference_tree
from numba_ddtree.refs import tree_accept as reference

BATCH, DEPTH = 32, 15
STOPS = 8
BUDGETS = (64, 1024)

pytestmark = pytest.mark.parametrize("budget", BUDGETS)


def round_inputs(budget: int) -> RoundInputs:
    batch = (budget,) * BATCH
    return TreeCase(
        "agree", "realistic", batch, width=64, prefix_lengths=(2048,) * BATCH, agreement=1
    ).inputs()


def case_of(budget: int) -> dict[str, int]:
    return {"B": BATCH, "L": DEPTH, "budget": budget}


@pytest.fixture(autouse=True)
def group(benchmark, budget):
    benchmark.group = f"accept_tree B={BATCH} L={DEPTH} budget={budget}"


def bench_kernel(kernel_bench, on_device, budget):
    inputs = round_inputs(budget)
    tree = DraftTree(*on_device(*reference_tree(inputs.draft)), max_depth=DEPTH)
    (target_tokens,) = on_device(inputs.target_tokens)
    out = accept_tree(tree, target_tokens)
    kernel_bench(
        "tree_accept",
        case_of(budget),
        "accept_tree",
        lambda stream: accept_tree(tree, target_tokens, out=out, stream=stream),
    )


def bench_kernel_with_endings(kernel_bench, on_device, budget):
    inputs = round_inputs(budget)
    tree = DraftTree(*on_device(*reference_tree(inputs.draft)), max_depth=DEPTH)
    (target_tokens,) = on_device(inputs.target_tokens)
    # Token ids that no draft has, and a length beyond the depth, so that the walks are as long.
    stops, remaining, ignore_eos, finished = on_device(
        np.full((BATCH, STOPS), np.iinfo(np.int32).max, np.int32),
        np.full(BATCH, DEPTH + 2, np.int32),
        np.zeros(BATCH, bool),
        np.zeros(BATCH, bool),
    )
    endings = {
        "stop_token_ids": stops,
        "remaining": remaining,
        "ignore_eos": ignore_eos,
        "finished": finished,
    }
    out = accept_tree(tree, target_tokens, **endings)
    kernel_bench(
        "tree_accept",
        case_of(budget) | {"stops": STOPS},
        "accept_tree",
        lambda stream: accept_tree(tree, target_tokens, **endings, out=out, stream=stream),
    )


def bench_reference(peer_bench, budget):
    inputs = round_inputs(budget)
    tree = reference_tree(inputs.draft)
    peer_bench(
        "tree_accept",
        case_of(budget),
        "numpy reference",
        lambda: reference.accept_tree(
            tree.token_ids, tree.parents, tree.num_nodes, inputs.target_tokens, DEPTH
        ),
    )
