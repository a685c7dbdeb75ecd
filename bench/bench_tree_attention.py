"""Tree attention: in float32 against the numpy reference, in bfloat16 against FlashMLA and torch.

What begins with `bench_table` makes the table of `TreeAttention` in bfloat16, for the kernels that
``--attention-kernels`` names. With ``--full-attention`` what begins with `bench_grid` times shapes of all
kinds. The peers have the same queries and keys; FlashMLA (the package sgl-flash-mla, where it is installed)
attends without a mask, and so to more, or has the prefix alone, for torch to do the rest. FlashAttention-3
(fa3-fwd) has no mask either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.attention_bench import GRID, MAIN, AttentionBench
from bench.attention_inputs import Inputs, Pool
from bench.attention_shapes import SPLITS, TABLE, grid
from bench.conftest import attention_kernels
from numba_ddtree import DraftTree, verify_attention
from numba_ddtree.cases import ATTENTION_CASES, AttentionCase, RoundInputs, reference_tree
from numba_ddtree.refs import tree_attention as reference

FLASH_MLA = "FlashMLA, no mask (device)"
FLASH_MLA_AND_TAIL = "FlashMLA, and torch for the tree (device)"
FLASH_ATTENTION_3 = "FlashAttention-3, no mask (device)"
MATMULS = "torch, two matmuls and a softmax (device)"
SDPA = "torch scaled_dot_product_attention (device)"
ALLOWED = 2e-2
"""Relative difference from torch's matmuls, which round scores to bfloat16 as well: sizes up to 8 by up to
2^-6, so that weights change by about 1 %, not all the same way. A missing mask would change outputs by
sqrt(N / (P + N)): 4 % at 32,768 keys."""

of_float32 = pytest.mark.parametrize("attention_case", ATTENTION_CASES, ids=lambda case: case.name)
peer_may_warn = pytest.mark.filterwarnings("ignore")
of_table = pytest.mark.parametrize("shape", TABLE, ids=str)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if "kernel" in metafunc.fixturenames:
        metafunc.parametrize("kernel", attention_kernels(config))
    if "grid_shape" in metafunc.fixturenames:
        shapes = list(grid()) if config.getoption("--full-attention") else []
        metafunc.parametrize("grid_shape", shapes, ids=str)


def case_of(case: AttentionCase) -> dict[str, int]:
    return {"B": 1, "H": case.heads, "N": case.budget + 1, "prefix": case.prefix, "budget": case.budget}


def run_reference(inputs: RoundInputs, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    attention, tree = inputs.required_attention, reference_tree(inputs.draft)
    return reference.tree_attention(
        attention.q_nope,
        attention.q_pe,
        attention.ckv_cache,
        attention.kpe_cache,
        tree.ancestor_bits,
        tree.num_nodes,
        inputs.draft.prefix_lengths,
        attention.sm_scale,
        dtype,
    )


def flops_of(case: AttentionCase, inputs: RoundInputs) -> int:
    """Multiplications and additions of the products with every key that a node sees, its path included."""
    tree = reference_tree(inputs.draft)
    keys = sum(case.prefix + int(depth) + 1 for depth in tree.depths[0, : tree.num_nodes[0]])
    return 2 * keys * case.heads * (2 * case.latent + case.rope)


@of_float32
def bench_shared_scores(benchmark, kernel_bench, on_device, attention_case):
    benchmark.group = f"verify_attention {attention_case.name}"
    inputs = attention_case.inputs()
    attention = inputs.required_attention
    tree = DraftTree(*on_device(*reference_tree(inputs.draft)), max_depth=inputs.draft.max_depth)
    arrays = on_device(attention.q_nope, attention.q_pe, attention.ckv_cache, attention.kpe_cache)
    (prefixes,) = on_device(inputs.draft.prefix_lengths)
    longest = attention_case.prefix

    def call(stream, **outputs):
        return verify_attention(
            *arrays,
            tree,
            sm_scale=attention.sm_scale,
            prefix_lengths=prefixes,
            max_prefix_length=longest,
            stream=stream,
            **outputs,
        )

    out, lse = call(None)
    expected, _ = run_reference(inputs, np.float64)
    kernel_bench(
        "tree_attention",
        case_of(attention_case),
        "shared_scores",
        lambda stream: call(stream, out=out, lse=lse),
        max_abs=float(np.abs(out.copy_to_host() - expected).max()),
        flops=flops_of(attention_case, inputs),
    )


@of_float32
def bench_reference(benchmark, peer_bench, attention_case):
    benchmark.group = f"verify_attention {attention_case.name}"
    inputs = attention_case.inputs()
    peer_bench(
        "tree_attention",
        case_of(attention_case),
        "numpy reference",
        lambda: run_reference(inputs, np.float32),
    )


@pytest.fixture(scope="session")
def pools() -> list[Pool]:
    """Hold the memory that all shapes share, once there is any."""
    return []


@pytest.fixture
def attention_bench(request, recorder, torch, pools) -> AttentionBench:
    if not pools:
        pools.append(Pool(torch, "cuda"))
    kernels = attention_kernels(request.config)
    return AttentionBench(torch, lambda: request.getfixturevalue("benchmark"), recorder, pools[0], kernels)


@pytest.fixture
def flash_mla() -> Any:
    return pytest.importorskip("flash_mla")


@of_table
@pytest.mark.parametrize("split", SPLITS)
def bench_table(attention_bench, kernel, shape, split):
    out = attention_bench.kernel(MAIN, shape, split, kernel)
    want = attention_bench.inputs(shape, MAIN.offsets[0]).packed_matmuls()().view_as(out)
    assert float((out.float() - want.float()).norm() / want.float().norm()) < ALLOWED


@of_table
@peer_may_warn
def bench_table_flash_mla(attention_bench, flash_mla, shape):
    attention_bench.peer(MAIN, shape, FLASH_MLA, lambda inputs: inputs.flash_mla(flash_mla))


@of_table
@peer_may_warn
def bench_table_flash_mla_and_tail(attention_bench, flash_mla, shape):
    out = attention_bench.peer(
        MAIN, shape, FLASH_MLA_AND_TAIL, lambda inputs: inputs.flash_mla_and_tail(flash_mla)
    )
    want = attention_bench.inputs(shape, MAIN.offsets[0]).packed_matmuls()().view_as(out)
    assert float((out.float() - want.float()).norm() / want.float().norm()) < ALLOWED


@of_table
@peer_may_warn
def bench_table_flash_attention_3(attention_bench, shape):
    module = pytest.importorskip("fa3_fwd_interface")
    try:
        attention_bench.peer(MAIN, shape, FLASH_ATTENTION_3, lambda inputs: inputs.flash_attention_3(module))
    except RuntimeError as fault:  # builds leave combinations out
        if "does not support" not in str(fault):
            raise
        pytest.skip(str(fault))


@of_table
@peer_may_warn
def bench_table_matmuls(attention_bench, shape):
    attention_bench.peer(MAIN, shape, MATMULS, Inputs.packed_matmuls)


@of_table
@peer_may_warn
def bench_table_sdpa(attention_bench, shape):
    attention_bench.peer(MAIN, shape, SDPA, Inputs.scaled_dot_product)


@pytest.mark.parametrize("split", GRID.splits)
def bench_grid(attention_bench, kernel, grid_shape, split):
    attention_bench.kernel(GRID, grid_shape, split, kernel)


@peer_may_warn
def bench_grid_flash_mla(attention_bench, flash_mla, grid_shape):
    attention_bench.peer(GRID, grid_shape, FLASH_MLA, lambda inputs: inputs.flash_mla(flash_mla))


@peer_may_warn
def bench_grid_matmuls(attention_bench, grid_shape):
    attention_bench.peer(GRID, grid_shape, MATMULS, Inputs.packed_matmuls)
