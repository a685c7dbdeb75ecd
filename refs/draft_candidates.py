"""The best candidates of each position, and their log-probs, by a stable sort and sums in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class CandidateArrays(NamedTuple):
    """The arrays of `numba_ddtree.DraftCandidates`, in its order."""

    log_probs: NDArray[np.float32]  # [B, L, k]
    token_ids: NDArray[np.int32]  # [B, L, k]


def allowed_tokens(bitmask: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Unpack a mask, uint32 or int32 [B, L, words] or [B, words], to one bool a token, of shape [B, L, V]."""
    batch, _, vocabulary = shape
    little_words = np.ascontiguousarray(bitmask).astype("<u4", casting="unsafe")
    bits = np.unpackbits(little_words.view(np.uint8), axis=-1, bitorder="little", count=vocabulary)
    return np.broadcast_to(bits.reshape(batch, -1, vocabulary).astype(bool), shape)


def best_of_row(
    values: NDArray[np.float32], k: int, temperature: np.float32
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return log-probs and ids of the k best values of one row, float32 [V].

    The best value's own exponential, 1, stays out of the sum, so that its log-prob is exact near 0.
    """
    if not (values < np.inf).all() or not temperature > 0:
        return np.full(k, np.nan, np.float32), np.arange(k, dtype=np.int32)
    # Stable, so that of equal values, 0 and -0 among them, the smaller id comes first.
    order = np.argsort(-values, kind="stable")
    ids = order[:k].astype(np.int32)
    best = values[order[0]]
    if best == -np.inf:
        return np.full(k, -np.inf, np.float32), ids
    distances = (values[order].astype(np.float64) - np.float64(best)) / np.float64(temperature)
    log_sum = np.log1p(np.exp(distances[1:]).sum())
    with np.errstate(over="ignore"):
        return (distances[:k] - log_sum).astype(np.float32), ids


def draft_topk(
    logits: NDArray[Any],
    k: int,
    temperatures: NDArray[np.float32],
    bitmask: NDArray[Any] | None = None,
    bias: NDArray[np.float32] | None = None,
) -> CandidateArrays:
    """Find the k best tokens of each row, best first, and their log-probs.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 [B, L, V]
    k : int
    temperatures : float32 [B]
    bitmask : uint32 or int32 [B, L, ceil(V / 32)] or [B, ceil(V / 32)], optional
        Bit ``v % 32`` of word ``v // 32``: token v is allowed.
    bias : float32 [V], optional
    """
    values = logits.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values if bias is None else values + bias
    if bitmask is not None:
        values[~allowed_tokens(bitmask, values.shape)] = -np.inf
    batch, depth, _ = values.shape
    result = CandidateArrays(np.empty((batch, depth, k), np.float32), np.empty((batch, depth, k), np.int32))
    for request in range(batch):
        for position in range(depth):
            log_probs, ids = best_of_row(values[request, position], k, temperatures[request])
            result.log_probs[request, position], result.token_ids[request, position] = log_probs, ids
    return result
