"""Synthetic draft distributions, shaped like a real drafter's or like an edge case."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["MARGINALS", "MEAN_ENTROPIES"]

MEAN_ENTROPIES = (
    *(0.378, 0.639, 0.870, 1.082, 1.254, 1.348, 1.402, 1.523),
    *(1.652, 1.735, 1.797, 1.943, 2.095, 2.231, 2.387),
)
"""Mean entropy in nats of a block-diffusion drafter's distribution at each of 15 depths.

Of 4185 distributions on GSM8K, published with github.com/hxri/ddtreeplus.
"""

_SPINE_ENTROPY = 0.02
_BISECTIONS = 50

Rows: TypeAlias = NDArray[np.float64]
"""Log-probs of a whole vocabulary, float64 [B, L, V]."""


def _log_softmax(logits: Rows) -> Rows:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normalised: Rows = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def _entropy(log_probs: Rows) -> Rows:
    """Entropy of each row in nats, [B, L, 1]."""
    entropy: Rows = -(np.exp(log_probs) * log_probs).sum(axis=-1, keepdims=True)
    return entropy


def _with_entropy(logits: Rows, entropies: Rows) -> Rows:
    """Return log-probs of the logits at the inverse temperature that gives the entropies, [.., L, 1].

    Entropy falls as the inverse temperature rises, so that bisection finds it.
    """
    low = np.zeros_like(logits[..., :1])
    high = np.full_like(low, 100.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_too_flat = _entropy(_log_softmax(middle * logits)) > entropies
        low = np.where(is_too_flat, middle, low)
        high = np.where(is_too_flat, high, middle)
    return _log_softmax(high * logits)


def _realistic(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    """Gumbel-shaped logits whose entropy rises with the depth as a real drafter's does."""
    depths = np.minimum(np.arange(shape[1]), len(MEAN_ENTROPIES) - 1)
    return _with_entropy(rng.gumbel(size=shape), np.array(MEAN_ENTROPIES)[depths][:, None])


def _spine(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    """Distributions so sharp that the tree is a path rather than a bush."""
    return _with_entropy(rng.gumbel(size=shape), np.full((shape[1], 1), _SPINE_ENTROPY))


def _flat(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    return _log_softmax(0.05 * rng.standard_normal(shape))


def _ties(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    """Log-probs in steps of 1/2: sums are exact, and many paths have the same one."""
    return np.round(2 * _log_softmax(2 * rng.gumbel(size=shape))) / 2


def _identical_rows(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    batch, _, vocabulary = shape
    row = _with_entropy(rng.gumbel(size=(batch, 1, vocabulary)), np.array(MEAN_ENTROPIES[-1]))
    return np.broadcast_to(row, shape)


def _all_equal(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    return np.full(shape, -np.log(shape[2]))


def _impossible(rng: np.random.Generator, shape: tuple[int, int, int]) -> Rows:
    """Three candidates that are possible at a position, one at the next, and so on; none at the last."""
    log_probs = _realistic(rng, shape)
    ranks = np.argsort(np.argsort(-log_probs, axis=-1), axis=-1)
    candidates = np.where(np.arange(shape[1]) % 2 == 0, 3, 1)
    candidates[-1] = 0
    return np.where(ranks < candidates[:, None], log_probs, -np.inf)


MARGINALS: dict[str, Callable[[np.random.Generator, tuple[int, int, int]], Rows]] = {
    "realistic": _realistic,
    "spine": _spine,
    "flat": _flat,
    "ties": _ties,
    "identical_rows": _identical_rows,
    "all_equal": _all_equal,
    "impossible": _impossible,
}
"""Makers of log-probs, float64 [B, L, V] from a generator and that shape."""
