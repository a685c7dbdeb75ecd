"""`verify_attention` against the numpy reference in float32; its error against float64."""

from __future__ import annotations

import numpy as np
import pytest

from numba_ddtree import DraftTree, verify_attention
from numba_ddtree.cases import ATTENTION_CASES, AttentionCase, RoundInputs, reference_tree
from numba_ddtree.refs import tree_attention as reference

pytestmark = pytest.mark.parametrize("attention_case", ATTENTION_CASES, ids=lambda case: case.name)


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


@pytest.fixture(autouse=True)
def group(benchmark, attention_case):
    benchmark.group = f"verify_attention {attention_case.name}"


def bench_shared_scores(kernel_bench, on_device, attention_case):
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


def bench_reference(peer_bench, attention_case):
    inputs = attention_case.inputs()
    peer_bench(
        "tree_attention",
        case_of(attention_case),
        "numpy reference",
        lambda: run_reference(inputs, np.float32),
    )
