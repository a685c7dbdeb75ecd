"""A whole round without the model: a graph's replay, and the calls on the host; its first part by itself.

The target agrees with the drafter's best token everywhere, so that paths are as long as they can be and
every round compacts the caches by all of one.
"""

from __future__ import annotations

import numpy as np
import pytest

from numba_ddtree.draft_candidates import draft_topk, draft_topk_workspace_shape
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.refs.tree_build import best_first
from numba_ddtree.round import DDTreeRound
from numba_ddtree.timing import device_us
from numba_ddtree.tree_build import build_tree

BATCH, DEPTH, VOCABULARY, WIDTH, BUDGET = 32, 15, 163840, 64, 64
LAYERS, ROW = 61, 576
ROWS = 8704  # enough for all the rounds that are timed
TOKEN = 7
ALLOWED_US = 5.0  # of logits to trees in one graph over the sum of its parts

OPTIONS = {
    "best": {},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


def case_of(choice: str) -> dict[str, int | str]:
    return {"B": BATCH, "L": DEPTH, "V": VOCABULARY, "k": WIDTH, "budget": BUDGET, "tokens": choice}


def make_logits(torch, rows: int, height: float):
    """Noise, and one token that stands out."""
    logits = torch.randn(BATCH, rows, VOCABULARY, device="cuda")
    logits[..., TOKEN] += height
    return logits


@pytest.fixture(autouse=True)
def group(benchmark):
    benchmark.group = f"round B={BATCH} L={DEPTH} V={VOCABULARY} budget={BUDGET}"


@pytest.mark.parametrize("choice", OPTIONS)
def bench_round(kernel_bench, torch, choice):
    logits, target = make_logits(torch, DEPTH, 15), make_logits(torch, BUDGET + 1, 20).bfloat16()
    cache = torch.zeros(LAYERS, BATCH, ROWS, ROW, dtype=torch.bfloat16, device="cuda")
    planned = DDTreeRound.plan(
        BATCH,
        DEPTH,
        VOCABULARY,
        BUDGET,
        k=WIDTH,
        target_dtype="bfloat16",
        caches=KVCaches.plan(cache),
        options={"choose_tokens": OPTIONS[choice]},
    )
    planned.start(np.full(BATCH, TOKEN, np.int32), np.zeros(BATCH, np.int32))

    def call(stream):
        planned.draft(logits, stream=stream)
        planned.accept(target, stream=stream)

    kernel_bench("round", case_of(choice), "DDTreeRound", call, bytes=logits.nbytes + target.nbytes)
    assert planned.result.accept_length.tolist() == [DEPTH + 1] * BATCH


def bench_torch(torch_bench, torch):
    """Only what reads the logits, by torch's own operations."""
    logits, target = make_logits(torch, DEPTH, 15), make_logits(torch, BUDGET + 1, 20).bfloat16()

    def call() -> None:
        torch.topk(logits, WIDTH)
        torch.logsumexp(logits, -1)
        torch.argmax(target, -1)

    torch_bench("round", case_of("best"), "torch topk, logsumexp and argmax alone", call)


def tree_case() -> dict[str, int | str]:
    return {"B": BATCH, "L": DEPTH, "V": VOCABULARY, "k": WIDTH, "budget": BUDGET}


def make_draft_logits(torch):
    """Logits without a token that stands out, whose trees branch."""
    torch.manual_seed(0)
    return 3 * torch.randn(BATCH, DEPTH, VOCABULARY, device="cuda")


def bench_logits_to_trees(kernel_bench, recorder, torch):
    """From the drafter's logits to trees, in one graph: no slower than the parts by themselves."""
    logits = make_draft_logits(torch)
    shape = draft_topk_workspace_shape(BATCH, DEPTH, VOCABULARY, WIDTH)
    workspace = torch.empty(shape, dtype=torch.int64, device="cuda")
    candidates = draft_topk(logits, WIDTH)
    tree = build_tree(*candidates, BUDGET)

    def choose(stream):
        draft_topk(logits, WIDTH, out=candidates, workspace=workspace, stream=stream)

    def build(stream):
        build_tree(*candidates, BUDGET, out=tree, stream=stream)

    def both(stream):
        choose(stream)
        build(stream)

    together = kernel_bench("logits_to_trees", tree_case(), "draft_topk, build_tree", both)
    apart = sum(map(device_us, (choose, build)))
    recorder.peer("logits_to_trees", tree_case(), "draft_topk and build_tree, a graph each (device)", apart)
    assert together <= apart + ALLOWED_US


def bench_logits_to_trees_by_the_heap(peer_bench, torch):
    """As the original does: torch's top-k and log-sum-exp, and a heap a request on the host."""
    logits = make_draft_logits(torch)

    def call() -> None:
        values, _ = torch.topk(logits, WIDTH)
        log_probs = (values - torch.logsumexp(logits, -1, keepdim=True)).cpu().numpy()
        for rows in log_probs:
            best_first(rows, BUDGET)

    peer_bench("logits_to_trees", tree_case(), "torch topk, logsumexp; heap on the host", call, rounds=10)
