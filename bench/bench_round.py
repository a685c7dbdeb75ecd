"""A whole round without the model: a graph's replay, and the calls on the host.

The target agrees with the drafter's best token everywhere, so that paths are as long as they can be and
every round compacts the caches by all of one.
"""

from __future__ import annotations

import numpy as np
import pytest

from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.round import DDTreeRound

BATCH, DEPTH, VOCABULARY, WIDTH, BUDGET = 32, 15, 163840, 64, 64
LAYERS, ROW = 61, 576
ROWS = 8704  # enough for all the rounds that are timed
TOKEN = 7

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
def bench_round(kernel_bench, choice):
    torch = pytest.importorskip("torch")
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


def bench_torch(peer_bench):
    """Only what reads the logits, by torch's own operations."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch finds no device")
    logits, target = make_logits(torch, DEPTH, 15), make_logits(torch, BUDGET + 1, 20).bfloat16()

    def call() -> None:
        torch.topk(logits, WIDTH)
        torch.logsumexp(logits, -1)
        torch.argmax(target, -1)
        torch.cuda.synchronize()

    peer_bench("round", case_of("best"), "torch topk, logsumexp and argmax alone", call)
