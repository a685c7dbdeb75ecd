"""The target's token at each node: the most probable one, or a draw by the Gumbel-max trick.

Adding independent Gumbel noise to logits and taking the argmax draws from their softmax (Gumbel 1954).
The noise of a token comes from a counter-based generator, Philox 4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011), so that it depends on nothing but the seed, the request,
the position and the token.

Every function here is a fixed sequence of operations that IEEE 754 rounds exactly, so that a kernel that
runs the same sequence gives the same bits: logarithm and exponential are written out for that reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
MIN_TEMPERATURE = np.float32(1e-30)  # of a draw; what is below, but not 0, is refused

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
# 1/19, 1/17 ... 1: the series ends where its terms fall below half an ulp of the first.
ATANH_SERIES = tuple(1 / n for n in range(19, 0, -2))

LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693359375)  # 9 bits, so that a small multiple of it is exact
LN2_LOW = np.float32(LN2 - 0.693359375)
# 1/7!, 1/6! ... 1
EXP_SERIES = tuple(np.float32(c) for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0))
MASS_BITS = 40
LOWEST_EXPONENT = np.float32(-30)  # exp(-30) is below half a unit of mass


def philox(counter: tuple[NDArray[np.uint32], ...], key: tuple[int, int]) -> tuple[NDArray[np.uint32], ...]:
    """Philox 4x32-10: four random words for a counter of four words (arrays) and a key of two."""
    words = [np.asarray(word, np.uint64) for word in counter]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys = list(key)
    for _ in range(PHILOX_ROUNDS):
        products = [words[0] * np.uint64(PHILOX_MULTIPLIERS[0]), words[2] * np.uint64(PHILOX_MULTIPLIERS[1])]
        words = [
            (products[1] >> shift) ^ words[1] ^ np.uint64(keys[0]),
            products[1] & low,
            (products[0] >> shift) ^ words[3] ^ np.uint64(keys[1]),
            products[0] & low,
        ]
        keys = [(word + weyl) & 0xFFFFFFFF for word, weyl in zip(keys, PHILOX_WEYL, strict=True)]
    return tuple(word.astype(np.uint32) for word in words)


def random_bits(seed: int, request_id: int, position: int, vocabulary: int) -> NDArray[np.uint32]:
    """Random words of the tokens at one position, uint32 [V]: word v % 4 of counter v // 4."""
    groups = np.arange(-(-vocabulary // 4), dtype=np.uint32)
    rest = (position & 0xFFFFFFFF, request_id & 0xFFFFFFFF, (request_id >> 32) & 0xFFFFFFFF)
    counter = (groups, *(np.full_like(groups, word) for word in rest))
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return np.stack(words, axis=-1).reshape(-1)[:vocabulary]  # [V / 4, 4] to [V]


def natural_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Logarithm of positive normal numbers: log x = e ln 2 + 2 artanh((m - 1) / (m + 1)), x = m 2^e."""
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < SQRT_HALF
    mantissa = np.where(is_low, mantissa + mantissa, mantissa)  # between the roots of 1/2 and of 2
    exponent = np.where(is_low, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(ratio, ATANH_SERIES[0])
    for coefficient in ATANH_SERIES[1:]:
        series = series * square + coefficient
    return exponent * LN2 + (ratio + ratio) * series


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Gumbel noise -log(-log(1 - u)) of random words, u = (bits + 1/2) / 2^32; at most 22.9."""
    complement = (4294967295.5 - bits.astype(np.float64)) * 2.0**-32  # exact
    return -natural_log(-natural_log(complement))


def masses(logits: NDArray[np.float32], temperature: np.float32) -> NDArray[np.int64]:
    """Probabilities in units of 2^-40 of the largest one: integers, whose sums have no rounding.

    exp((logit - best) / T) in float32, by r = x - k ln 2 and Taylor's series for exp r.
    """
    best = logits.max()
    with np.errstate(all="ignore"):  # infinities, and overflow to them
        x = (logits - best) * (np.float32(1) / temperature)
    is_counted = x >= LOWEST_EXPONENT
    x = np.where(is_counted, x, np.float32(0))
    k = np.rint(x * LOG2_E)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = np.full_like(r, EXP_SERIES[0])
    for coefficient in EXP_SERIES[1:]:
        series = series * r + coefficient
    units = np.rint(np.ldexp(series, k.astype(np.int32) + MASS_BITS)).astype(np.int64)
    return np.where(logits == best, 1 << MASS_BITS, np.where(is_counted, units, 0))


def keep_best(
    logits: NDArray[np.float32], temperature: np.float32, top_k: int, top_p: np.float32
) -> NDArray[np.intp]:
    """Return the indices that top-k, then top-p leave; of equal logits the earlier ones stay."""
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        reached = np.cumsum(masses(logits[order], temperature))
        target = max(1, int(np.ceil(np.float64(top_p) * np.float64(reached[-1]))))
        order = order[: np.searchsorted(reached, target) + 1]
    return order


def choose_token(
    logits: NDArray[np.float32],
    is_allowed: NDArray[np.bool_],
    temperature: np.float32,
    top_k: int,
    top_p: np.float32,
    seed: int,
    request_id: int,
    position: int,
) -> int:
    """Choose one node's token; logits float32 [V], is_allowed bool [V]."""
    if np.isnan(logits[is_allowed]).any():
        return NO_TOKEN
    tokens = np.flatnonzero(is_allowed & (logits > -np.inf))
    if len(tokens) == 0:
        return NO_TOKEN
    if temperature == 0:
        return int(tokens[np.argmax(logits[tokens])])
    tokens = np.sort(tokens[keep_best(logits[tokens], temperature, top_k, top_p)])
    noise = gumbel(random_bits(seed, request_id, position, len(logits))[tokens])
    return int(tokens[np.argmax(logits[tokens].astype(np.float64) / np.float64(temperature) + noise)])


def choose_tokens(
    logits: NDArray[np.float32],
    positions: NDArray[np.int32],
    request_ids: NDArray[np.int64],
    seeds: NDArray[Any],
    temperatures: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    token_bitmask: NDArray[np.uint32] | None,
    num_nodes: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Choose a token after each node: int32 [B, N], -1 where there is none.

    Parameters
    ----------
    logits : float32 [B, N, V]
        A row with a NaN among the tokens allowed gives -1, as does one without a token above -inf.
    positions : int32 [B, N]
    request_ids : int32 or int64 [B]
    seeds : int64 or uint64 [B]
    temperatures : float32 [B]
        0 is the argmax, the smallest token on ties.
    top_k : int32 [B]
        0 is off.
    top_p : float32 [B]
        1 is off; the best token always stays.
    token_bitmask : uint32 [B, ceil(V / 32)] or [B, N, ceil(V / 32)], optional
        Bit ``v % 32`` of word ``v // 32``: token v is allowed.
    num_nodes : int32 [B]
        Slots after that are padding, which is not read and gives -1.

    A request whose temperature is neither 0 nor finite and at least `MIN_TEMPERATURE`, whose `top_k` is
    negative or whose `top_p` is not between 0 and 1 gives -1 everywhere.
    """
    batch, slots, vocabulary = logits.shape
    tokens = np.full((batch, slots), NO_TOKEN, np.int32)
    everything = np.ones(vocabulary, bool)
    for request in range(batch):
        temperature = temperatures[request]
        is_valid = temperature == 0 or MIN_TEMPERATURE <= temperature < np.inf
        if not (is_valid and top_k[request] >= 0 and 0 <= top_p[request] <= 1):
            continue
        for node in range(min(int(num_nodes[request]), slots)):
            tokens[request, node] = choose_token(
                logits[request, node],
                everything if token_bitmask is None else unpack(token_bitmask[request], node, vocabulary),
                temperature,
                int(top_k[request]),
                top_p[request],
                int(seeds[request]),
                int(request_ids[request]),
                int(positions[request, node]),
            )
    return tokens


def unpack(words: NDArray[np.uint32], node: int, vocabulary: int) -> NDArray[np.bool_]:
    """Bits of a node's mask, bool [V]; words [W], of all nodes, or [N, W]."""
    row = words if words.ndim == 1 else words[node]
    tokens = np.arange(vocabulary)
    return (row[tokens // 32] >> (tokens % 32).astype(np.uint32) & np.uint32(1)).astype(bool)
