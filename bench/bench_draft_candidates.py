"""`draft_topk` against a plain read of its logits and torch's top-k and log-sum-exp, and the reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from bench.plain_read import read_all, threads
from numba_ddtree.draft_candidates import draft_topk, draft_topk_workspace_shape
from numba_ddtree.refs import draft_candidates as reference

BATCH, DEPTH, VOCABULARY = 32, 15, 163_840
DTYPES = ("float32", "bfloat16")

pytestmark = pytest.mark.parametrize(("k", "dtype"), [(k, dtype) for k in (64, 1024) for dtype in DTYPES])


def make_logits(batch: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((batch, DEPTH, VOCABULARY), np.float32) * np.float32(3)


def case_of(k: int, dtype: str) -> dict[str, int | str]:
    return {"B": BATCH, "L": DEPTH, "V": VOCABULARY, "k": k, "dtype": dtype}


def device_logits(torch: Any, dtype: str) -> Any:
    return torch.from_numpy(make_logits(BATCH)).cuda().to(getattr(torch, dtype))


@pytest.fixture(autouse=True)
def group(benchmark, k, dtype):
    benchmark.group = f"draft_topk B={BATCH} L={DEPTH} V={VOCABULARY} k={k} {dtype}"


def bench_kernel(kernel_bench, torch, k, dtype):
    logits = device_logits(torch, dtype)
    out = draft_topk(logits, k)
    shape = draft_topk_workspace_shape(BATCH, DEPTH, VOCABULARY, k)
    workspace = torch.empty(shape, dtype=torch.int64, device="cuda")
    kernel_bench(
        "draft_topk",
        case_of(k, dtype),
        "draft_topk",
        lambda stream: draft_topk(logits, k, out=out, workspace=workspace, stream=stream),
        bytes=logits.nbytes,
    )


def bench_read(torch_bench, torch, k, dtype):
    words = device_logits(torch, dtype).view(torch.float32).view(-1)
    sums = torch.empty(threads(), dtype=torch.float32, device="cuda")
    torch_bench("draft_topk", case_of(k, dtype), "reading the logits once", lambda: read_all(words, sums))


def bench_torch(torch_bench, torch, k, dtype):
    logits = device_logits(torch, dtype)

    def call() -> None:
        values, _ = torch.topk(logits, k)
        values.float() - torch.logsumexp(logits, dim=-1, keepdim=True).float()

    torch_bench("draft_topk", case_of(k, dtype), "torch.topk, logsumexp", call)


def bench_reference(peer_bench, k, dtype):
    logits = make_logits(BATCH)
    temperatures = np.ones(BATCH, np.float32)
    call = partial(reference.draft_topk, logits, k, temperatures)
    peer_bench("draft_topk", case_of(k, dtype), "numpy reference", call, rounds=1)
