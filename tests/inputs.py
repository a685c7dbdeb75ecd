"""Random inputs: sorted log-probs, token ids, trees, and attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from numba_ddtree.refs import tree_build as build_reference
from numba_ddtree.refs import tree_links as links_reference
from numba_ddtree.tree import DraftTree

LOG_PROB_KINDS = ("realistic", "flat", "ties", "identical_rows", "all_equal", "inf_tails")
TREE_KINDS = ("random", "chain", "star", "recent")


def make_log_probs(rng: np.random.Generator, kind: str, B: int, L: int, K: int) -> NDArray[np.float32]:
    """Sorted log-probs of one of `LOG_PROB_KINDS`, float32 [B, L, K]."""
    shape = (B, L, K)
    if kind == "realistic":
        logits = rng.gumbel(size=shape) * rng.uniform(0.5, 3, (B, L, 1))
    elif kind == "flat":
        logits = rng.normal(size=shape) * 1e-3
    elif kind == "ties":
        # Few multiples of an eighth, whose sums are exact: many paths of the very same score.
        return np.sort(-rng.integers(1, 9, shape) / np.float32(8), axis=-1)[..., ::-1].astype(np.float32)
    elif kind == "identical_rows":
        logits = np.broadcast_to(rng.normal(size=(B, 1, K)), shape)
    elif kind == "all_equal":
        logits = np.zeros(shape)
    elif kind == "inf_tails":
        logits = rng.normal(size=shape)
        first_dead = rng.integers(0, K + 1, (B, L, 1))
        first_dead[:, 0] = np.maximum(first_dead[:, 0], 1)
        logits = np.where(np.arange(K) < first_dead, -np.sort(-logits, axis=-1), -np.inf)
    else:
        raise ValueError(kind)
    peak = np.maximum(logits.max(axis=-1, keepdims=True), -1e30)
    total = np.log(np.maximum(np.exp(logits - peak).sum(axis=-1, keepdims=True), 1e-30)) + peak
    return -np.sort(-(logits - total), axis=-1).astype(np.float32)


def make_token_ids(
    rng: np.random.Generator, B: int, L: int, K: int, dtype: type[np.integer[Any]] = np.int32
) -> NDArray[Any]:
    """Token ids, distinct within a row, the 0 among them, [B, L, K]."""
    ids = np.broadcast_to(np.arange(K) * 3, (B, L, K))
    return np.ascontiguousarray(rng.permuted(ids, axis=-1), dtype)


def make_parents(rng: np.random.Generator, kind: str, slots: int) -> NDArray[np.int32]:
    """Parents of a tree of one of `TREE_KINDS`, int32 [slots]."""
    nodes = np.arange(slots)
    lowest = {"random": 0, "chain": nodes - 1, "star": 0, "recent": np.maximum(nodes - 4, 0)}[kind]
    highest = np.ones(slots, int) if kind == "star" else nodes
    parents = rng.integers(np.minimum(lowest, np.maximum(highest, 1) - 1), np.maximum(highest, 1))
    parents[0] = -1
    return parents.astype(np.int32)


def make_parent_batch(rng: np.random.Generator, B: int, N: int) -> NDArray[np.int32]:
    """Parents of trees of all kinds in turn, int32 [B, N]."""
    kinds = (TREE_KINDS[request % len(TREE_KINDS)] for request in range(B))
    return np.stack([make_parents(rng, kind, N) for kind in kinds])


def link(
    parents: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    num_nodes: NDArray[np.int32] | None = None,
    prefix_lengths: NDArray[np.int32] | None = None,
    max_depth: int | None = None,
) -> DraftTree:
    """Make the reference's tree of these parents; bad ones end in its status."""
    B, N = parents.shape
    depth_limit = N - 1 if max_depth is None else max_depth
    arrays = links_reference.links_from_parents(
        parents,
        token_ids,
        np.full(B, N, np.int32) if num_nodes is None else num_nodes,
        np.zeros(B, np.int32) if prefix_lengths is None else prefix_lengths,
        depth_limit,
    )
    return DraftTree(*arrays, max_depth=depth_limit)


def build(
    log_probs: NDArray[np.float32],
    token_ids: NDArray[Any],
    budget: int | NDArray[np.int32],
    root_tokens: NDArray[np.int32] | None = None,
    prefix_lengths: NDArray[np.int32] | None = None,
    max_budget: int | None = None,
) -> DraftTree:
    """Make the reference's tree of these log-probs; bad ones end in its status."""
    B, L, _ = log_probs.shape
    budgets = np.broadcast_to(np.asarray(budget, np.int32), (B,))
    arrays = build_reference.build_tree(
        log_probs,
        token_ids,
        budgets,
        np.zeros(B, np.int32) if root_tokens is None else root_tokens,
        np.zeros(B, np.int32) if prefix_lengths is None else prefix_lengths,
        int(np.max(budget, initial=0)) if max_budget is None else max_budget,
    )
    return DraftTree(*arrays, max_depth=L)


def make_target_tokens(
    rng: np.random.Generator, tree: DraftTree, agreement: float = 0.8
) -> NDArray[np.int32]:
    """Draw the target's token after each node: mostly that of one of its children, int32 [B, N]."""
    B, N = tree.parents.shape
    target = rng.integers(0, 5, (B, N)).astype(np.int32)
    for request in range(B):
        for node in rng.permutation(np.arange(1, tree.num_nodes[request])):
            if rng.random() < agreement:
                target[request, tree.parents[request, node]] = tree.token_ids[request, node]
    return target


def make_endings(rng: np.random.Generator, B: int, *, tokens: int = 5, longest: int = 6) -> dict[str, Any]:
    """Draw what may end requests: the optional arrays of `accept_tree`, some of them not given."""
    shape = [(3,), (B, 3), (1,), (B, 0)][rng.integers(4)]
    endings = {
        "stop_token_ids": rng.integers(-1, tokens, shape).astype(np.int32),
        "remaining": rng.integers(-1, longest + 1, B).astype(np.int32),
        "ignore_eos": rng.random(B) < 0.3 if rng.random() < 0.8 else bool(rng.integers(2)),
        "finished": rng.random(B) < 0.2 if rng.random() < 0.5 else rng.integers(-1, 2, B).astype(np.int32),
    }
    return {name: value for name, value in endings.items() if rng.random() < 0.7}


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Arguments of `verify_attention`, as numpy arrays."""

    q_nope: NDArray[np.float32]
    q_pe: NDArray[np.float32]
    ckv_cache: NDArray[np.float32]
    kpe_cache: NDArray[np.float32]
    tree: DraftTree
    prefix_lengths: NDArray[np.int32]
    sm_scale: float


def make_attention(
    rng: np.random.Generator,
    *,
    prefixes: list[int],
    N: int,
    H: int = 2,
    latent: int = 16,
    rope: int = 8,
    num_nodes: list[int] | None = None,
    spare_keys: int = 3,
    magnitude: float = 1.0,
) -> AttentionInputs:
    """Attention inputs whose dead cache rows, those of no key of the request, are NaN."""
    B = len(prefixes)
    counts = np.full(B, N, np.int32) if num_nodes is None else np.array(num_nodes, np.int32)
    lengths = np.array(prefixes, np.int32)
    keys = max(prefixes) + N + spare_keys
    tree = link(make_parent_batch(rng, B, N), rng.integers(0, 9, (B, N)).astype(np.int32), counts, lengths)
    caches = []
    for width in (latent, rope):
        cache = rng.normal(size=(B, keys, width)).astype(np.float32)
        for request in range(B):
            cache[request, lengths[request] + counts[request] :] = np.nan
        caches.append(cache)
    return AttentionInputs(
        q_nope=(rng.normal(size=(B, N, H, latent)) * magnitude).astype(np.float32),
        q_pe=(rng.normal(size=(B, N, H, rope)) * magnitude).astype(np.float32),
        ckv_cache=caches[0],
        kpe_cache=caches[1],
        tree=tree,
        prefix_lengths=lengths,
        sm_scale=float((latent + rope) ** -0.5),
    )


def make_paths(
    rng: np.random.Generator, B: int, N: int, L: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Draw accepted indices [B, L + 1], root first, rising, padded with -1, and their number."""
    lengths = rng.integers(0, min(L + 1, N) + 1, B)
    indices = np.full((B, L + 1), -1, np.int32)
    for request, length in enumerate(lengths):
        if length > 0:
            rest = rng.choice(np.arange(1, N), length - 1, replace=False)
            indices[request, :length] = [0, *sorted(rest)]
    return indices, lengths.astype(np.int32)


@dataclass(frozen=True, eq=False)
class CompactInputs:
    """Arguments of `compact_kv`, as numpy arrays; every byte of the caches is random."""

    caches: list[NDArray[Any]]
    arrays: dict[str, NDArray[np.int32]]
    """The path's arrays and the page table's, by name."""


def make_compaction(
    rng: np.random.Generator,
    *,
    B: int = 3,
    N: int = 12,
    L: int = 6,
    longest: int = 9,
    paging: str = "contiguous",
    page_size: int = 4,
    rows: Sequence[tuple[tuple[int, ...], int, DTypeLike]] = (((), 4, np.float32),),
) -> CompactInputs:
    """Make caches of the given layers, D and dtypes: contiguous, or of pages in random order.

    Parameters
    ----------
    paging : {"contiguous", "block_table", "kv_indptr"}
    rows
        For each cache ``(layers, D, dtype)``; `layers` is () or a tuple of their number.
    """
    prefixes = rng.integers(0, longest + 1, B).astype(np.int32)
    indices, lengths = make_paths(rng, B, N, L)
    arrays = {"prefix_lengths": prefixes, "accepted_indices": indices, "accept_length": lengths}
    if paging == "contiguous":
        blocks: tuple[int, int] = (B, longest + N)
    else:
        # Pages in random order, some that are no request's, and as few as each request's slots need.
        needs = -(-(prefixes + N) // page_size)
        blocks = (int(needs.sum()) + 3, page_size)
        pages = rng.permutation(blocks[0])[: needs.sum()].astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(needs)]).astype(np.int32)
        if paging == "kv_indptr":
            arrays |= {"kv_indptr": starts, "kv_indices": pages}
        else:
            table = rng.choice(np.array([-1, blocks[0], 2**31 - 1, -(2**31)], np.int32), (B, needs.max() + 1))
            for request, need in enumerate(needs):
                table[request, :need] = pages[starts[request] : starts[request + 1]]
            arrays["block_table"] = table
    return CompactInputs(
        [_random_bytes(rng, (*layers, *blocks, D), dtype) for layers, D, dtype in rows], arrays
    )


def bad_compaction(rng: np.random.Generator, paging: str) -> CompactInputs:
    """Arguments of which every odd request has faults, which only device arrays may have."""
    B, L = 8, 6
    given = make_compaction(rng, B=B, L=L, paging=paging, page_size=3, rows=[((2,), 20, np.uint8)])
    arrays = given.arrays
    extremes = np.array([-(2**31), -2, -1, 3, 7, 40, 2**31 - 1], np.int32)
    no_pages = np.array([-(2**31), -1, given.caches[0].shape[1], 2**31 - 1], np.int32)
    for request in range(1, B, 2):
        arrays["accept_length"][request] = rng.choice([L + 1, L + 2, 2**31 - 1, 4, -1])
        row = arrays["accepted_indices"][request]
        row[...] = np.where(rng.random(L + 1) < 0.4, rng.choice(extremes, L + 1), rng.integers(0, 12, L + 1))
        if rng.random() < 0.3:
            arrays["prefix_lengths"][request] = rng.choice(extremes)
        if paging == "block_table":
            arrays["block_table"][request, rng.integers(3)] = rng.choice(no_pages)
        elif paging == "kv_indptr":
            start, end = arrays["kv_indptr"][request : request + 2]
            arrays["kv_indices"][rng.integers(start, end)] = rng.choice(no_pages)
    if paging == "kv_indptr":
        arrays["kv_indptr"][rng.integers(1, B)] = rng.choice([-(2**31), -1])
        arrays["kv_indptr"][B] = rng.choice([2**31 - 1, -1, -(2**31), 0, len(arrays["kv_indices"]) + 1])
    return given


def compaction_past_the_pages(paging: str) -> CompactInputs:
    """Paths whose last slot is the first one after a request's pages, where another's pages follow."""
    pages = np.array([[3, 1], [0, 2], [4, 5]], np.int32)
    arrays = {
        "prefix_lengths": np.full(3, 2, np.int32),
        "accepted_indices": np.tile(np.array([0, 3, 4], np.int32), (3, 1)),
        "accept_length": np.full(3, 3, np.int32),
    }
    if paging == "block_table":
        arrays["block_table"] = pages
    else:
        arrays |= {"kv_indptr": np.array([0, 2, 4, 6], np.int32), "kv_indices": pages.reshape(-1)}
    return CompactInputs([np.arange(6 * 3 * 4, dtype=np.float32).reshape(6, 3, 4)], arrays)


def _random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Numbers of random bits, which include every kind of NaN."""
    kind = np.dtype(dtype)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)
