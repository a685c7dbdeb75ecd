"""`compact_kv` of all layers of a model, against the numpy reference and against torch's own operations.

Each call works on another copy of the caches, so that none finds its rows in the second-level cache.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from ml_dtypes import bfloat16

from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.kv_compact import compact_kv
from numba_ddtree.refs import kv_compact as reference

BATCH, LAYERS, ROW = 32, 61, 576
PREFIX, PAGE_SIZE, PAGES_EACH = 13, 16, 3
NUM_COPIES = 4
LENGTHS = (16, 4)

pytestmark = pytest.mark.parametrize("length", LENGTHS)


def case_of(length: int, page_size: int) -> dict[str, int]:
    return {"B": BATCH, "layers": LAYERS, "rows": length, "D": ROW, "page_size": page_size}


def path(length: int) -> dict[str, np.ndarray]:
    """Every other slot of the tree is accepted, so that every row but the root's moves."""
    return {
        "prefix_lengths": np.full(BATCH, PREFIX, np.int32),
        "accepted_indices": np.tile(2 * np.arange(length, dtype=np.int32), (BATCH, 1)),
        "accept_length": np.full(BATCH, length, np.int32),
    }


def moved_bytes(length: int) -> int:
    return 2 * LAYERS * BATCH * (length - 1) * ROW * np.dtype(bfloat16).itemsize


@pytest.fixture(autouse=True)
def group(benchmark, length):
    benchmark.group = f"compact_kv B={BATCH} layers={LAYERS} rows={length}"


def bench_contiguous(kernel_bench, on_device, length):
    shape = (LAYERS, BATCH, PAGES_EACH * PAGE_SIZE, ROW)
    measure(kernel_bench, on_device, length, shape, {}, 0)


def bench_paged(kernel_bench, on_device, length):
    shape = (LAYERS, BATCH * PAGES_EACH, PAGE_SIZE, ROW)
    order = np.random.default_rng(0).permutation(BATCH * PAGES_EACH).astype(np.int32)
    pages = {"block_table": order.reshape(BATCH, PAGES_EACH)}
    measure(kernel_bench, on_device, length, shape, pages, PAGE_SIZE)


def measure(kernel_bench, on_device, length, shape, pages, page_size):
    given = path(length) | pages
    arrays = dict(zip(given, on_device(*given.values()), strict=True))
    copies = [KVCaches.plan(on_device(np.zeros(shape, np.uint16))) for _ in range(NUM_COPIES)]
    caches = cycle(copies)
    kernel_bench(
        "kv_compact",
        case_of(length, page_size),
        "compact_kv",
        lambda stream: compact_kv(next(caches), **arrays, stream=stream),
        bytes=moved_bytes(length),
    )


def bench_reference(peer_bench, length):
    cache = np.zeros((LAYERS, BATCH, PAGES_EACH * PAGE_SIZE, ROW), np.uint16)
    arrays = path(length).values()

    def call() -> None:
        for layer in cache:
            reference.compact_kv(layer, *arrays)

    peer_bench("kv_compact", case_of(length, 0), "numpy reference", call, rounds=5)


def bench_torch(torch_bench, torch, length):
    slots = PAGES_EACH * PAGE_SIZE
    shape = (LAYERS, BATCH * slots, ROW)
    caches = cycle([torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(NUM_COPIES)])
    starts = slots * torch.arange(BATCH, device="cuda")[:, None] + PREFIX
    places = torch.arange(length, device="cuda")
    targets, sources = ((starts + step * places).reshape(-1) for step in (1, 2))

    def call() -> None:
        cache = next(caches)
        cache.index_copy_(1, targets, cache.index_select(1, sources))

    torch_bench("kv_compact", case_of(length, 0), "torch index_select, index_copy_", call)
