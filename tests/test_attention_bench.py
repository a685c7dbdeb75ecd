"""What benchmarks of tree attention run on: shapes, inputs, and torch's attention on them, on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from bench.attention_shapes import MOST_FLOPS, OFFSETS, PAGE_SIZE, SPLITS, TABLE, Shape, grid
from bench.conftest import Recorder
from numba_ddtree import TreeAttention

torch = pytest.importorskip("torch")
# ruff: noqa: E402 - what follows makes torch's tensors

from bench import attention_bench
from bench.attention_bench import MAIN, AttentionBench, Table
from bench.attention_inputs import Inputs, Pool, tree_parents, tree_visibility

ROUNDING = 1e-2
"""Relative: scores and weights of torch's products are rounded to bfloat16, as their results are."""


def test_flops_are_those_of_the_formula() -> None:
    assert Shape(4, 64, 65, 8192).flops() == 2 * 4 * 65 * 64 * (8192 + 65) * 1088
    assert Shape(4, 64, 65, 8192).flops(17) == 2 * 4 * 65 * 64 * (8192 + 17 + 65) * 1088


def test_the_grid_has_all_kinds_of_shapes_that_take_no_time() -> None:
    shapes = list(grid())
    assert len(set(shapes)) == len(shapes) > 250
    assert max(shape.flops() for shape in shapes) <= MOST_FLOPS
    assert {shape.prefix for shape in shapes} == {0, 2048, 8192, 32768, 131072}
    assert {shape.nodes for shape in shapes} == {1, 17, 65, 257, 1025}
    assert len(set(TABLE)) == 12


@pytest.mark.parametrize("shape", [*TABLE, Shape(1, 8, 1, 0), Shape(2, 8, 1025, 1)], ids=str)
def test_plans_and_pages_hold_every_offset(shape: Shape) -> None:
    longest = shape.prefix + max(OFFSETS)
    assert shape.planned_prefix >= longest
    assert shape.table_pages * PAGE_SIZE >= longest + shape.nodes
    assert (shape.table_pages - 1) * PAGE_SIZE < longest + shape.nodes


@pytest.mark.parametrize("nodes", [1, 2, 65, 1025])
def test_trees_are_trees(nodes: int) -> None:
    parents, visible = tree_parents(nodes), tree_visibility(nodes)
    assert parents[0] == -1
    assert all(0 <= parents[i] < i for i in range(1, nodes))
    depths = visible.sum(axis=1) - 1
    assert depths.max() == Shape(1, 1, nodes, 0).max_depth or nodes > 2
    assert (depths[1:] == depths[parents[1:]] + 1).all()


def host_inputs(shape: Shape, offset: int) -> Inputs:
    inputs = Inputs.make(Pool(torch, "cpu"), shape, offset, backend="numpy")
    rows = shape.batch, shape.nodes, shape.heads
    return replace(inputs, out=np.full((*rows, 512), np.nan, bfloat16), lse=np.zeros(rows, np.float32))


def on_host(shape: Shape, offset: int) -> tuple[Inputs, Any]:
    """Make inputs on the host, and what the reference computes of them by a plan."""
    inputs = host_inputs(shape, offset)
    plan = TreeAttention.plan(
        shape.batch,
        shape.nodes,
        shape.heads,
        max_prefix_length=shape.planned_prefix,
        max_depth=shape.max_depth,
        page_size=PAGE_SIZE,
        backend="numpy",
    )
    out, _ = inputs.planned(plan)()
    return inputs, out.astype(np.float64)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("shape", [Shape(2, 3, 9, 70), Shape(1, 2, 33, 0), Shape(3, 4, 1, 64)], ids=str)
def test_peers_attend_to_the_same(shape: Shape, offset: int) -> None:
    inputs, want = on_host(shape, offset)
    for call in (inputs.packed_matmuls(), inputs.scaled_dot_product()):
        got = call().view(want.shape).double().numpy()
        assert np.linalg.norm(got - want) < ROUNDING * np.linalg.norm(want)
    if shape.nodes > 1:  # the comparison sees a mask that is not there
        free = replace(inputs)
        free.__dict__["hidden"] = torch.zeros_like(inputs.hidden)
        got = free.packed_matmuls()().view(want.shape).double().numpy()
        assert np.linalg.norm(got - want) > 3 * ROUNDING * np.linalg.norm(want)


class FlashMLA:
    """Stands for its module: attention without a mask, on the host."""

    def get_mla_metadata(self) -> tuple[None, None]:
        return None, None

    def flash_mla_with_kvcache(
        self, queries: Any, cache: Any, table: Any, ends: Any, latent: int, *_: Any, **how: Any
    ) -> tuple[Any, Any]:
        B, N, H, width = queries.shape
        out, lse = torch.empty(B, N, H, latent, dtype=queries.dtype), torch.empty(B, H, N)
        for request, end in enumerate(ends.tolist()):
            keys = cache[table[request].long()].view(-1, width)[:end].double()
            scores = how["softmax_scale"] * queries[request].double() @ keys.T  # [N, H, P]
            out[request] = (torch.softmax(scores, -1) @ keys[:, :latent]).to(out.dtype)
            lse[request] = torch.logsumexp(scores, -1).T
        return out, lse


class FlashAttention3:
    """Stands for its module: attention without a mask, on the host."""

    def flash_attn_with_kvcache(self, *, q: Any, qv: Any, k_cache: Any, v_cache: Any, **how: Any) -> Any:
        assert how.pop("causal") is False
        queries, cache = torch.cat((qv, q), -1), torch.cat((v_cache, k_cache), -1)[:, :, 0]
        table, ends = how.pop("page_table"), how.pop("cache_seqlens")
        return FlashMLA().flash_mla_with_kvcache(queries, cache, table, ends, qv.shape[-1], **how)[0]


def test_flash_attention_3_has_the_same_inputs_as_flash_mla() -> None:
    inputs, _ = on_host(Shape(2, 3, 9, 70), 17)
    assert torch.equal(inputs.flash_attention_3(FlashAttention3())(), inputs.flash_mla(FlashMLA())()[0])


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("shape", [Shape(2, 3, 9, 70), Shape(1, 2, 33, 1), Shape(3, 4, 1, 64)], ids=str)
def test_flash_mla_and_a_tail_attend_to_the_same(shape: Shape, offset: int) -> None:
    inputs, want = on_host(shape, offset)
    got = inputs.flash_mla_and_tail(FlashMLA())().double().numpy()
    assert np.linalg.norm(got - want) < ROUNDING * np.linalg.norm(want)
    without_mask, _ = inputs.flash_mla(FlashMLA())()
    is_chain = shape.nodes == 1  # the only tree that needs no mask
    difference = np.linalg.norm(without_mask.double().numpy() - want)
    assert (difference < ROUNDING * np.linalg.norm(want)) == is_chain


def test_inputs_of_one_shape_have_one_table() -> None:
    pool = Pool(torch, "cpu")
    first, second = (Inputs.make(pool, Shape(2, 1, 5, 300), offset, backend="numpy") for offset in (0, 63))
    assert torch.equal(first.block_table, second.block_table)
    assert first.cache.data_ptr() == second.cache.data_ptr()
    assert sorted(first.block_table.flatten().tolist()) == list(range(2 * first.shape.table_pages))
    other = Inputs.make(pool, Shape(2, 1, 5, 3000), backend="numpy")
    flat = other.cache.flatten()[: other.queries.numel()].float()
    overlap = flat @ other.queries.flatten().float() / other.queries.numel()
    assert abs(float(overlap)) < 0.1  # the cache that was made anew is not the queries' numbers


def host_bench(monkeypatch: pytest.MonkeyPatch, kernels: list[str]) -> tuple[AttentionBench, list[Any]]:
    """Return a bench that times nothing, runs the reference, and keeps the plans that it made."""
    plans, times = [], count(1)

    def timed(torch: Any, call: Any, seconds: float) -> float:
        call()
        return float(next(times))

    def plan(*sizes: int, library: str, kernel: str, **options: Any) -> TreeAttention:
        plans.append((kernel, options["split_keys"]))
        return planned(*sizes, backend="numpy", **options)

    planned = TreeAttention.plan
    monkeypatch.setattr(attention_bench, "flushed_us", timed)
    monkeypatch.setattr(attention_bench.TreeAttention, "plan", plan)
    monkeypatch.setattr(AttentionBench, "inputs", lambda self, shape, offset: host_inputs(shape, offset))
    shown = SimpleNamespace(extra_info={}, pedantic=lambda call, rounds: call())
    fake_torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))
    return AttentionBench(fake_torch, lambda: shown, Recorder(), Pool(torch, "cpu"), kernels), plans


def test_figures_of_kernels_and_peers_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, plans = host_bench(monkeypatch, ["tensor_cores", "hopper"])
    shape = Shape(1, 2, 5, 70)
    for kernel in bench.kernels:
        for split in SPLITS:
            out = bench.kernel(MAIN, shape, split, kernel)
            assert out.shape == (1, 5, 2, 512)
    bench.peer(MAIN, shape, "torch", Inputs.packed_matmuls)
    assert plans == [(kernel, keys) for kernel in bench.kernels for keys in SPLITS.values()]
    saved = {
        name: bench.recorder.results(name, "device", "driver", "0" * 12) for name in bench.recorder.operations
    }
    assert list(saved) == [MAIN.operation(kernel) for kernel in bench.kernels]
    for kernel, results in zip(bench.kernels, saved.values(), strict=True):
        assert MAIN.prefixes in results.timing
        assert [row.case["splits"] for row in results.rows] == list(SPLITS)
        assert {(row.kernel, row.peer, row.peer_us) for row in results.rows} == {(kernel, "torch", 20.0)}
    first = saved["tree_attention_tensor_cores"].rows[0]
    assert first.us == 2.0  # the mean of 1, 2 and 3
    assert first.tflops == pytest.approx(np.mean([shape.flops(offset) for offset in OFFSETS]) / 2e6)


def test_a_table_may_have_one_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = host_bench(monkeypatch, ["tensor_cores"])
    table = Table("few", (17,), ("default",), 0.01, "longer")
    bench.kernel(table, Shape(1, 1, 1, 0), "default", "tensor_cores")
    (row,) = bench.recorder.results("few_tensor_cores", "device", "driver", "0" * 12).rows
    assert row.tflops == pytest.approx(Shape(1, 1, 1, 0).flops(17) / 1e6)
