"""`build_tree` against the heap that it replaces, on the same log-probs."""

from __future__ import annotations

import pytest

from numba_ddtree import build_tree
from numba_ddtree.cases import DraftInputs, TreeCase
from numba_ddtree.refs.tree_build import best_first

BATCH, DEPTH = 32, 15
SIZES = ((16, 16), (64, 64), (256, 256), (1024, 1024), (1024, 64))  # K and budget

pytestmark = pytest.mark.parametrize(("width", "budget"), SIZES)


def draft_inputs(width: int, budget: int) -> DraftInputs:
    case = TreeCase("realistic", "realistic", (budget,) * BATCH, width=width, prefix_lengths=(2048,) * BATCH)
    return case.inputs().draft


def case_of(width: int, budget: int) -> dict[str, int]:
    return {"B": BATCH, "L": DEPTH, "K": width, "budget": budget}


@pytest.fixture(autouse=True)
def group(benchmark, width, budget):
    benchmark.group = f"build_tree B={BATCH} L={DEPTH} K={width} budget={budget}"


def bench_kernel(kernel_bench, on_device, width, budget):
    draft = draft_inputs(width, budget)
    log_probs, token_ids, prefixes = on_device(
        draft.draft_log_probs, draft.draft_token_ids, draft.prefix_lengths
    )
    out = build_tree(log_probs, token_ids, budget, prefix_lengths=prefixes)
    kernel_bench(
        "tree_build",
        case_of(width, budget),
        "build_tree",
        lambda stream: build_tree(
            log_probs, token_ids, budget, prefix_lengths=prefixes, out=out, stream=stream
        ),
    )


def bench_heap(peer_bench, width, budget):
    rows = list(draft_inputs(width, budget).draft_log_probs)
    peer_bench(
        "tree_build", case_of(width, budget), "heap", lambda: [best_first(row, budget) for row in rows]
    )
