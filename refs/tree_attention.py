"""Tree-masked MLA attention in its absorbed form.

DeepSeek-V2 (arXiv 2405.04434), section 2.1: with the up-projections absorbed into query and output,
every head attends to the same rows, a latent part that is key and value at once and a rotary part
that is key only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.refs.tree_links import visibility_from_bits


def softmax_with_lse(scores: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return probabilities along the last axis and the natural log of their denominator.

    A row of nothing but -inf gives zeros and -inf.
    """
    maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    maximum = np.where(maximum == -np.inf, 0, maximum).astype(scores.dtype)
    weights = np.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    probs = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + maximum
    return probs, lse[..., 0]


def tree_attention(
    q_nope: NDArray[Any],
    q_pe: NDArray[Any],
    ckv_cache: NDArray[Any],
    kpe_cache: NDArray[Any],
    ancestor_bits: NDArray[np.uint32],
    num_nodes: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
    sm_scale: float,
    dtype: type[np.float32] | type[np.float64] = np.float64,
    page_table: NDArray[np.int32] | Sequence[NDArray[np.int32]] | None = None,
    sees_prefix: bool = True,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Attend from each node to the prefix, to its ancestors and to itself.

    Parameters
    ----------
    q_nope : float [B, N, H, D_CKV]
    q_pe : float [B, N, H, D_KPE]
    ckv_cache : float [B, S, D_CKV] or, with a page table, [pages, page_size, D_CKV]
        Slot ``prefix_lengths[b] + i`` of a request holds node i of the tree.
    kpe_cache : float [B, S, D_KPE] or [pages, page_size, D_KPE]
    ancestor_bits : uint32 [B, N, ceil(N / 32)]
    num_nodes, prefix_lengths : int32 [B]
    sm_scale : float
        The factor of the scores.
    dtype
        The precision of every step.
    page_table : int32 [B, pages a request], or such a row for each request, optional
        The page that holds each run of `page_size` slots of a request.
    sees_prefix : bool
        False: nodes see the tree's own rows alone.

    Returns
    -------
    out : dtype [B, N, H, D_CKV]
        Zeros for slots past `num_nodes`.
    lse : dtype [B, N, H]
        Natural log; -inf for slots past `num_nodes`.
    """
    out: NDArray[Any] = np.zeros(q_nope.shape, dtype)
    lse: NDArray[Any] = np.full(q_nope.shape[:3], -np.inf, dtype)
    visibility = visibility_from_bits(ancestor_bits)  # [B, N, N]
    for request, (used, prefix) in enumerate(zip(num_nodes.tolist(), prefix_lengths.tolist(), strict=True)):
        ckv, kpe = (
            request_rows(cache, request, prefix + used, page_table) for cache in (ckv_cache, kpe_cache)
        )  # [P + n, D]
        seen = prefix if sees_prefix else 0
        queries = q_nope[request, :used].astype(dtype), q_pe[request, :used].astype(dtype)
        shared = ckv[:seen].astype(dtype), kpe[:seen].astype(dtype)
        prefix_scores = scores_of(queries, shared, sm_scale)  # [n, H, P]
        prefix_probs = np.zeros_like(prefix_scores)
        for node in range(used):
            # Only these rows are read: a row that the node does not see may hold anything.
            rows = prefix + np.flatnonzero(visibility[request, node])
            own = ckv[rows].astype(dtype), kpe[rows].astype(dtype)
            own_scores = scores_of((queries[0][node], queries[1][node]), own, sm_scale)  # [H, path]
            scores = np.concatenate((prefix_scores[node], own_scores), axis=-1)
            probs, lse[request, node] = softmax_with_lse(scores)
            prefix_probs[node] = probs[:, :seen]
            out[request, node] = probs[:, seen:] @ own[0]
        out[request, :used] += by_rows(prefix_probs, shared[0])
    return out, lse


def request_rows(
    cache: NDArray[Any],
    request: int,
    count: int,
    page_table: NDArray[np.int32] | Sequence[NDArray[np.int32]] | None,
) -> NDArray[Any]:
    """Return the first rows of a request, in order, [count, D]."""
    if page_table is None:
        return cache[request, :count]
    page_size = cache.shape[1]
    pages = page_table[request][: -(-count // page_size)]
    return cache[pages].reshape(-1, cache.shape[2])[:count]


def scores_of(
    queries: tuple[NDArray[Any], NDArray[Any]], keys: tuple[NDArray[Any], NDArray[Any]], sm_scale: float
) -> NDArray[Any]:
    """Scores [..., keys] of queries [..., D] against keys [keys, D], each of two parts."""
    scores = by_rows(queries[0], keys[0].T) + by_rows(queries[1], keys[1].T)
    scaled: NDArray[Any] = scores * scores.dtype.type(sm_scale)
    return scaled


def by_rows(x: NDArray[Any], matrix: NDArray[Any]) -> NDArray[Any]:
    """Return ``x @ matrix`` as one product of all rows of x, which BLAS is quicker at than at many."""
    rows = math.prod(x.shape[:-1])
    product: NDArray[Any] = x.reshape(rows, x.shape[-1]) @ matrix
    return product.reshape(*x.shape[:-1], matrix.shape[1])
