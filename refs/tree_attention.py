"""Tree-masked MLA attention in its absorbed form.

DeepSeek-V2 (arXiv 2405.04434), section 2.1: with the up-projections absorbed into query and output,
every head attends to the same rows, a latent part that is key and value at once and a rotary part
that is key only.
"""

from __future__ import annotations

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
    q_nope: NDArray[np.float32],
    q_pe: NDArray[np.float32],
    ckv_cache: NDArray[np.float32],
    kpe_cache: NDArray[np.float32],
    ancestor_bits: NDArray[np.uint32],
    num_nodes: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
    sm_scale: float,
    dtype: type[np.float32] | type[np.float64] = np.float64,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Attend from each node to the prefix, to its ancestors and to itself.

    Parameters
    ----------
    q_nope : float32 [B, N, H, D_CKV]
    q_pe : float32 [B, N, H, D_KPE]
    ckv_cache : float32 [B, S, D_CKV]
        Slot ``prefix_lengths[b] + i`` holds node i of the tree.
    kpe_cache : float32 [B, S, D_KPE]
    ancestor_bits : uint32 [B, N, ceil(N / 32)]
    num_nodes, prefix_lengths : int32 [B]
    sm_scale : float
        The factor of the scores.
    dtype
        The precision of every step.

    Returns
    -------
    out : dtype [B, N, H, D_CKV]
        Zeros for slots past `num_nodes`.
    lse : dtype [B, N, H]
        Natural log; -inf for slots past `num_nodes`.
    """
    batch, slots, heads, _ = q_nope.shape
    out: NDArray[Any] = np.zeros(q_nope.shape, dtype)
    lse: NDArray[Any] = np.full((batch, slots, heads), -np.inf, dtype)
    visibility = visibility_from_bits(ancestor_bits)  # [B, N, N]
    for request in range(batch):
        prefix = np.arange(prefix_lengths[request])
        for node in range(num_nodes[request]):
            # Only these rows are read: a row that the node does not see may hold anything.
            rows = np.append(prefix, len(prefix) + np.flatnonzero(visibility[request, node]))
            latent: NDArray[Any] = ckv_cache[request, rows].astype(dtype)  # [keys, D_CKV]
            rotary: NDArray[Any] = kpe_cache[request, rows].astype(dtype)  # [keys, D_KPE]
            scores: NDArray[Any] = q_nope[request, node].astype(dtype) @ latent.T  # [H, keys]
            scores += q_pe[request, node].astype(dtype) @ rotary.T
            probs, lse[request, node] = softmax_with_lse(scores * dtype(sm_scale))
            out[request, node] = probs @ latent
    return out, lse
