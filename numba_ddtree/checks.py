"""The kernels against the references, and the references against what the original implementation gave.

A reference is never compared with itself: the numpy backend runs the golden trees of
`numba_ddtree.golden`, attention in float32 against float64, and float64 against the formula written out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.cases import (
    ACCEPT_CASES,
    ATTENTION_CASES,
    TREE_CASES,
    AttentionCase,
    AttentionInputs,
    DraftInputs,
    TreeCase,
    reference_tree,
)
from numba_ddtree.check_results import (
    Check,
    CheckResult,
    Comparison,
    OnResult,
    OnStart,
    compare_arrays,
    run_all,
)
from numba_ddtree.devices import device_context
from numba_ddtree.errors import BackendError
from numba_ddtree.golden import GoldenTree, load_golden_trees
from numba_ddtree.refs import draft_candidates as topk_reference
from numba_ddtree.refs import kv_compact as compact_reference
from numba_ddtree.refs import tree_links as links_reference
from numba_ddtree.round_bundle import reference_attention, reference_walk
from numba_ddtree.stages import Backend, Stages
from numba_ddtree.status import TreeStatus
from numba_ddtree.token_choice import choose_tokens

__all__ = ["attention_tolerance", "planned_checks", "run_checks"]

KERNEL_TOLERANCE = 1e-6
"""Of ``out`` and ``lse`` from a kernel, for queries and rows of unit scale.

A score then has a standard deviation of sm_scale * sqrt(576), which is below 2, and stays below 16, so that
rounding it to float32 costs at most half an ulp of 9.5e-7; so does rounding lse. An output is a mean of rows,
weighted by probabilities in which such errors count once and largely cancel.
"""

FLOAT32_TOLERANCE = 1e-5
"""Of ``out`` and ``lse`` from the reference in float32.

Its sums of 576 products reach 100, where an ulp is 7.6e-6, and are taken in the linear algebra library's own
order; an error of one ulp, times sm_scale, is 5e-7 in the score, and the worst of a million several times it.
"""

FORMULA_TOLERANCE = 1e-12
"""Of the reference in float64: its sums have some thousand terms of unit scale."""

SIMULATED_GOLDEN_NODES = 16
COMPACT_SIZE = "B=3 S=40 D=72"
FORMULA_CASE = AttentionCase(heads=3, prefix=21, budget=40, latent=32, rope=16)


def run_checks(
    backend: Backend,
    seed: int = 0,
    device: int = 0,
    on_result: OnResult | None = None,
    on_start: OnStart | None = None,
) -> list[CheckResult]:
    """Run every check of a backend.

    Parameters
    ----------
    backend : {"cuda", "simulator", "numpy"}
        The simulator must have been chosen before Numba was imported; its cases are shrunk.
    seed : int
        Of the cases, not negative.
    device : int
        The CUDA device; without meaning for the other backends.
    on_result, on_start
        Called as the checks go on; see `numba_ddtree.check_results`.

    Returns
    -------
    list of CheckResult

    Raises
    ------
    BackendError
        The backend cannot run here.
    """
    with device_context(device if backend == "cuda" else None):
        return run_all(planned_checks(backend, seed), on_result, on_start, fatal=BackendError)


def planned_checks(backend: Backend, seed: int) -> list[Check]:
    """List the checks that `run_checks` runs."""
    stages = Stages(backend)
    checks = [*_golden_checks(stages)]
    if backend != "numpy":
        checks += _tree_checks(stages, seed)
        checks += _logits_checks(stages, seed)
        checks.append(Check("compact_kv/random", COMPACT_SIZE, partial(_check_compact, stages, seed)))
    checks += _attention_checks(stages, seed)
    if backend == "numpy":
        run = partial(_check_formula, seed)
        checks.append(Check("verify_attention/formula", FORMULA_CASE.size, run))
    return checks


def attention_tolerance(backend: Backend) -> float:
    """Return the largest absolute difference from float64 allowed for inputs of unit scale."""
    return FLOAT32_TOLERANCE if backend == "numpy" else KERNEL_TOLERANCE


def _golden_checks(stages: Stages) -> Iterator[Check]:
    golden = load_golden_trees()
    if stages.backend == "simulator":
        golden = {name: tree for name, tree in golden.items() if len(tree.depths) <= SIMULATED_GOLDEN_NODES}
    largest = max(len(tree.depths) for tree in golden.values())
    size = f"{len(golden)} trees of up to {largest} nodes"
    for operation, check in (
        ("build_tree", _check_golden_build),
        ("tree_links", _check_golden_links),
        ("accept_tree", _check_golden_walk),
    ):
        yield Check(f"{operation}/golden", size, partial(_check_all_golden, golden, partial(check, stages)))


def _tree_checks(stages: Stages, seed: int) -> Iterator[Check]:
    for operation, cases, check in (
        ("build_tree", TREE_CASES, _check_build),
        ("tree_links", ACCEPT_CASES, _check_links),
        ("accept_tree", ACCEPT_CASES, _check_accept),
    ):
        for full in cases:
            case = full.shrunk() if stages.backend == "simulator" else full
            yield Check(f"{operation}/{case.name}", case.size, partial(check, stages, case, seed))


def _logits_checks(stages: Stages, seed: int) -> Iterator[Check]:
    vocabulary, k = (300, 20) if stages.backend == "simulator" else (129280, 64)
    shape = (2, 3, vocabulary)
    size = f"B={shape[0]} L={shape[1]} V={vocabulary}"
    yield Check("draft_topk/random", f"{size} k={k}", partial(_check_topk, stages, shape, k, seed))
    for name, temperature in (("greedy", 0.0), ("drawn", 0.8)):
        run = partial(_check_choose, stages, shape, temperature, seed)
        yield Check(f"choose_tokens/{name}", f"{size} T={temperature}".replace("L=", "N="), run)


def _attention_checks(stages: Stages, seed: int) -> Iterator[Check]:
    for full in ATTENTION_CASES:
        case = full.shrunk() if stages.backend == "simulator" else full
        yield Check(f"verify_attention/{case.name}", case.size, partial(_check_attention, stages, case, seed))


def _check_all_golden(
    golden: Mapping[str, GoldenTree],
    check: Callable[[GoldenTree], tuple[Comparison, float]],
) -> tuple[Comparison, float]:
    total, total_us = Comparison(), 0.0
    for name, tree in golden.items():
        comparison, us = check(tree)
        fault = f"{name}: {comparison.fault}" if comparison.fault else ""
        total += Comparison(comparison.max_abs, comparison.max_rel, fault)
        total_us += us
    return total, total_us


def _check_golden_build(stages: Stages, golden: GoldenTree) -> tuple[Comparison, float]:
    zero = np.zeros(1, np.int32)
    draft = DraftInputs(
        draft_log_probs=golden.draft_log_probs[None],
        draft_token_ids=golden.draft_token_ids[None],
        budgets=np.array([golden.budget], np.int32),
        root_tokens=zero,
        prefix_lengths=zero,
        max_budget=golden.budget,
    )
    timed = stages.build_tree(draft)
    return compare_arrays(timed.arrays, golden_arrays(golden, golden.budget + 1)), timed.us


def _check_golden_links(stages: Stages, golden: GoldenTree) -> tuple[Comparison, float]:
    expected = golden_arrays(golden, len(golden.parents)) | {"status": np.array([TreeStatus.OK], np.int32)}
    return _check_tree_links(stages, expected, golden.visibility[None], len(golden.draft_log_probs))


def _check_golden_walk(stages: Stages, golden: GoldenTree) -> tuple[Comparison, float]:
    depth, length = len(golden.draft_log_probs), len(golden.accepted_indices)
    accepted = np.full((1, depth + 1), -1, np.int32)
    accepted[0, :length] = golden.accepted_indices
    expected = {
        "accepted_indices": accepted,
        "accept_length": np.array([length], np.int32),
        "bonus_token": np.array([golden.bonus_token], np.int32),
    }
    tree = golden_arrays(golden, len(golden.parents))
    timed = stages.accept_tree(tree, golden.posterior_tokens[None], depth)
    return compare_arrays(timed.arrays, expected), timed.us


def golden_arrays(golden: GoldenTree, slots: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of `DraftTree` for a golden tree: one request without prefix, root token 0.

    Parameters
    ----------
    golden : GoldenTree
    slots : int
        N, at least the tree's nodes with the root.
    """
    count = len(golden.parents)
    words = -(-slots // 32)

    def padded(values: Any, padding: int) -> NDArray[np.int32]:
        array = np.full((1, slots), padding, np.int32)
        array[0, :count] = values
        return array

    first_child, next_sibling = np.full((2, count), -1)
    for parent in range(count):
        children = np.flatnonzero(golden.parents == parent)
        first_child[parent] = children[0] if len(children) else -1
        next_sibling[children[:-1]] = children[1:]
    bits = np.zeros((1, slots, words), np.uint32)
    bits[0, :count, : golden.ancestor_bits.shape[1]] = golden.ancestor_bits
    depths = padded([0, *golden.depths], 0)
    status = TreeStatus.OK if count == golden.budget + 1 else TreeStatus.EXHAUSTED
    return {
        "token_ids": padded([0, *golden.token_ids], 0),
        "parents": padded(golden.parents, -1),
        "depths": depths,
        "positions": depths,
        "first_child": padded(first_child, -1),
        "next_sibling": padded(next_sibling, -1),
        "ancestor_bits": bits,
        "num_nodes": np.array([count], np.int32),
        "status": np.array([status], np.int32),
    }


def _check_build(stages: Stages, case: TreeCase, seed: int) -> tuple[Comparison, float]:
    draft = case.inputs(seed).draft
    timed = stages.build_tree(draft)
    return compare_arrays(timed.arrays, reference_tree(draft)._asdict()), timed.us


def _check_links(stages: Stages, case: TreeCase, seed: int) -> tuple[Comparison, float]:
    draft = case.inputs(seed).draft
    tree = reference_tree(draft)
    expected = links_reference.links_from_parents(
        tree.parents, tree.token_ids, tree.num_nodes, draft.prefix_lengths, draft.max_depth
    )
    visibility = links_reference.visibility_from_bits(expected.ancestor_bits)
    return _check_tree_links(stages, expected._asdict(), visibility, draft.max_depth)


def _check_tree_links(
    stages: Stages, expected: dict[str, NDArray[Any]], visibility: NDArray[np.bool_], max_depth: int
) -> tuple[Comparison, float]:
    """Go from parents to a tree, from the tree to its mask, and from the mask to a tree again."""
    given = (expected["token_ids"], expected["num_nodes"], expected["positions"][:, 0], max_depth)
    tree = stages.links_from_parents(expected["parents"], *given)
    mask = stages.visibility(tree.arrays, max_depth)
    again = stages.links_from_visibility(mask.arrays["visibility"], *given)
    comparison = (
        compare_arrays(tree.arrays, expected)
        + compare_arrays(mask.arrays, {"visibility": visibility})
        + compare_arrays(again.arrays, expected)
    )
    return comparison, tree.us + mask.us + again.us


def _check_topk(stages: Stages, shape: tuple[int, ...], k: int, seed: int) -> tuple[Comparison, float]:
    logits = _random_logits(shape, seed)
    timed = stages.draft_topk(logits, k)
    expected = topk_reference.draft_topk(logits, k, np.ones(len(logits), np.float32))._asdict()
    largest = float(np.abs(expected["log_probs"]).max())
    return compare_arrays(timed.arrays, expected, 2 * float(np.spacing(np.float32(largest)))), timed.us


def _check_choose(
    stages: Stages, shape: tuple[int, ...], temperature: float, seed: int
) -> tuple[Comparison, float]:
    logits = _random_logits(shape, seed)
    batch, nodes, _ = shape
    positions = np.arange(batch * nodes, dtype=np.int32).reshape(batch, nodes)
    timed = stages.choose_tokens(logits, positions, temperature, seed)
    expected = choose_tokens(logits, positions=positions, temperature=temperature, seed=seed, backend="numpy")
    return compare_arrays(timed.arrays, {"tokens": expected}), timed.us


def _random_logits(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return 3 * np.random.default_rng(seed).standard_normal(shape, np.float32)


def _check_compact(stages: Stages, seed: int) -> tuple[Comparison, float]:
    rng = np.random.default_rng(seed)
    cache = rng.standard_normal((3, 40, 72), np.float32)
    prefix, length = np.array([0, 7, 20], np.int32), np.array([4, 1, 6], np.int32)
    accepted = np.full((3, 7), -1, np.int32)
    for path, count in zip(accepted, length, strict=True):
        path[1:count] = np.sort(rng.choice(np.arange(1, 20), count - 1, replace=False))
        path[0] = 0
    timed = stages.compact_kv(cache, prefix, accepted, length)
    expected = cache.copy()
    compact_reference.compact_kv(expected, prefix, accepted, length)
    return compare_arrays(timed.arrays, {"cache": expected}), timed.us


def _check_accept(stages: Stages, case: TreeCase, seed: int) -> tuple[Comparison, float]:
    inputs = case.inputs(seed)
    tree = reference_tree(inputs.draft)._asdict()
    timed = stages.accept_tree(tree, inputs.target_tokens, inputs.draft.max_depth)
    return compare_arrays(timed.arrays, reference_walk(inputs, tree)), timed.us


def _check_attention(stages: Stages, case: AttentionCase, seed: int) -> tuple[Comparison, float]:
    inputs = case.inputs(seed)
    tree = reference_tree(inputs.draft)._asdict()
    timed = stages.verify_attention(inputs, tree)
    return compare_arrays(
        timed.arrays, reference_attention(inputs, tree), attention_tolerance(stages.backend)
    ), timed.us


def _check_formula(seed: int) -> tuple[Comparison, float]:
    """Compare the float64 reference, which judges all other attention, with the formula."""
    inputs = FORMULA_CASE.inputs(seed)
    tree = reference_tree(inputs.draft)._asdict()
    started = time.perf_counter()
    got = reference_attention(inputs, tree)
    us = 1e6 * (time.perf_counter() - started)
    expected = attention_formula(inputs.required_attention, tree["parents"][0], FORMULA_CASE.prefix)
    return compare_arrays(got, expected, FORMULA_TOLERANCE), us


def attention_formula(
    attention: AttentionInputs, parents: NDArray[np.int32], prefix: int
) -> dict[str, NDArray[np.float64]]:
    """Verify attention of one request, all of whose slots are in use, as its definition says.

    Each node's visible keys are listed by walking to the root; there is no mask, no shared score matrix
    and no maximum to subtract, so that nothing of the reference's workings comes in.

    Parameters
    ----------
    attention : AttentionInputs
        Of batch size 1.
    parents : int32 [N]
    prefix : int
        P.

    Returns
    -------
    dict
        ``out``, float64 [1, N, H, D_CKV], and ``lse``, float64 [1, N, H].
    """
    queries = np.concatenate([attention.q_nope[0], attention.q_pe[0]], axis=-1).astype(np.float64)
    out = np.zeros(attention.q_nope.shape)
    lse = np.zeros(out.shape[:-1])
    for node in range(len(parents)):
        visible = [*range(prefix), prefix + node]
        ancestor = parents[node]
        while ancestor >= 0:
            visible.append(prefix + ancestor)
            ancestor = parents[ancestor]
        values = attention.ckv_cache[0, visible].astype(np.float64)  # [keys, D_CKV]
        keys = np.concatenate([values, attention.kpe_cache[0, visible]], axis=-1)
        weights = np.exp(attention.sm_scale * (queries[node] @ keys.T))  # [H, keys]
        total = weights.sum(axis=-1)
        out[0, node] = (weights @ values) / total[:, None]
        lse[0, node] = np.log(total)
    return {"out": out, "lse": lse}
