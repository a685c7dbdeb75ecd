"""`build_tree` against the heap that it replaces, on the same log-probs."""

from __future__ import annotations

import pytest

from numba_ddtree import build_tree
from numba_ddtree.cases import DraftInputs, TreeCase
from numba_ddtree.refs.tree_build import best_first

BATCH, DEPTH = 32, 15
BUDGETS = (16, 64, 256, 1024)

pytestmark = pytest.mark.parametrize("budget", BUDGETS)


def draft_inputs(budget: int) -> DraftInputs:
    case = TreeCase("realistic", "realistic", (budget,) * BATCH, width=budget, prefix_lengths=(2048,) * BATCH)
    return case.inputs().draft


def case_of(budget: int) -> dict[str, int]:
    return {"B": BATCH, "L": DEPTH, "K": budget, "budget": budget}


@pytest.fixture(autouse=True)
def group(benchmark, budget):
    benchmark.group = f"build_tree B={BATCH} L={DEPTH} K={budget} budget={budget}"


def bench_kernel(kernel_bench, on_device, budget):
    draft = draft_inputs(budget)
    log_probs, token_ids, prefixes = on_device(
        draft.draft_log_probs, draft.draft_token_ids, draft.prefix_lengths
    )
    out = build_tree(log_probs, token_ids, budget, prefix_lengths=prefixes)
    kernel_bench(
        "tree_build",
        case_of(budget),
        "build_tree",
        lambda stream: build_tree(
            log_probs, token_ids, budget, prefix_lengths=prefixes, out=out, stream=stream
        ),
    )


def bench_heap(peer_bench, budget):
    rows = list(draft_inputs(budget).draft_log_probs)
    peer_bench("tree_build", case_of(budget), "heap", lambda: [best_first(row, budget) for row in rows])
