"""`draft_topk` against its reference, for arrays of any library: rows of every kind, poisoned results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from kernel_checks import Guarded, Library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree.device.candidates import HEADER
from numba_ddtree.draft_candidates import DraftCandidates, draft_topk, draft_topk_workspace_shape
from numba_ddtree.refs import draft_candidates as reference

ULPS = 2  # of float32, that log-probs may be off their value in real numbers
DTYPES = (np.float32, np.float16, bfloat16)
ROW_KINDS = (
    "normal",
    "flat",
    "peaked",
    "equal",
    "zeros",
    "few_values",
    "ascending",
    "descending",
    "sparse",
    "far",
    "wide",
)


def make_rows(rng: np.random.Generator, kind: str, rows: int, V: int) -> NDArray[np.float32]:
    """Logits of one of `ROW_KINDS`, float32 [rows, V]."""
    logits = rng.normal(size=(rows, V)) * 3
    if kind == "flat":
        logits *= 1e-3
    elif kind == "peaked":
        # The best one's log-prob is so near 0 that the sum of the others has to be right by itself.
        logits[np.arange(rows), rng.integers(0, V, rows)] = rng.choice([20, 35, 60], rows)
    elif kind == "equal":
        logits[:] = logits[:, :1]
    elif kind == "zeros":
        logits = rng.choice([0.0, -0.0], (rows, V))
    elif kind == "few_values":
        logits = rng.integers(0, 3, (rows, V)).astype(float)
    elif kind == "ascending":
        logits = np.sort(logits, axis=-1)
    elif kind == "descending":
        logits = -np.sort(logits, axis=-1)
    elif kind == "sparse":
        logits[rng.random((rows, V)) < rng.choice([0.5, 0.99, 1.0], (rows, 1))] = -np.inf
    elif kind == "far":
        logits += rng.choice([-1e4, 3e6, -1e9], (rows, 1))
    elif kind == "wide":
        logits *= 10.0 ** rng.integers(-30, 37, (rows, V))
    return logits.astype(np.float32)


def make_logits(rng: np.random.Generator, B: int, L: int, V: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Rows of all kinds in turn, from a random one on, [B, L, V]; none has +inf."""
    start = rng.integers(len(ROW_KINDS))
    rows = [make_rows(rng, ROW_KINDS[(start + row) % len(ROW_KINDS)], 1, V)[0] for row in range(B * L)]
    largest = 6e4 if dtype == np.float16 else np.inf
    return np.clip(np.reshape(rows, (B, L, V)), -largest, largest).astype(dtype)


def make_mask(rng: np.random.Generator, *shape: int, V: int) -> NDArray[np.uint32]:
    """Masks of which some rows allow half of the tokens, some one in 32, one none, uint32 [..., words]."""
    rows, words = int(np.prod(shape)), -(-V // 32)
    mask = rng.integers(0, 2**32, (rows, words), dtype=np.uint64).astype(np.uint32)
    few = np.uint32(1) << rng.integers(0, 32, (rows, words)).astype(np.uint32)
    mask = np.where(rng.random((rows, 1)) < 0.5, mask, few).astype(np.uint32)
    mask[rng.integers(rows)] = 0
    return mask.reshape(*shape, words)


def ulps_apart(got: NDArray[np.float32], want: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distances in units in the last place of float32 at the wanted numbers, which are finite."""
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want.astype(np.float32)))


def assert_candidates(got: DraftCandidates, want: reference.CandidateArrays) -> None:
    """Check ids exactly, and log-probs to `ULPS`; infinities and NaN exactly."""
    assert got.log_probs.dtype == np.float32
    assert got.token_ids.dtype == np.int32
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    finite = np.isfinite(want.log_probs)
    np.testing.assert_array_equal(got.log_probs[~finite], want.log_probs[~finite])
    wanted = want.log_probs[finite].astype(np.float64)
    np.testing.assert_array_less(ulps_apart(got.log_probs[finite], wanted), ULPS + 0.01)


def check_topk(
    library: Library,
    logits: NDArray[Any],
    k: int,
    *,
    temperature: Any = 1.0,
    token_bitmask: NDArray[Any] | None = None,
    bias: NDArray[np.float32] | None = None,
    **options: Any,
) -> DraftCandidates:
    """Find the candidates into poisoned arrays; they must be the reference's. Returns them, on the host."""
    B, L, _ = logits.shape
    temperatures = np.broadcast_to(np.asarray(temperature, np.float32), (B,))
    want = reference.draft_topk(logits, k, temperatures, token_bitmask, bias)
    guards = [Guarded(library, (B, L, k), dtype) for dtype in (np.float32, np.int32)]
    out = DraftCandidates(*(guard.array for guard in guards)) if library.takes_out else None
    given = library.put_all(logits=logits, token_bitmask=token_bitmask, bias=bias)
    given["temperature"] = library.put(temperature) if isinstance(temperature, np.ndarray) else temperature
    result = draft_topk(k=k, out=out, **given, **options)
    if out is not None:
        assert all(array is other for array, other in zip(result, out, strict=True))
    got = DraftCandidates(*map(library.get, result))
    for guard in guards:
        guard.check()
    assert_candidates(got, want)
    np.testing.assert_array_equal(library.get(given["logits"]), logits)
    return got


def check_bits_in_any_batch(
    rng: np.random.Generator,
    library: Library,
    rows: NDArray[Any],
    k: int,
    batches: Sequence[int],
    pieces: int,
    **options: Any,
) -> None:
    """Check that rows [n, V] have the same bits alone and at random places of batches.

    Of the workspace too: a piece's sum has more bits than a log-prob, and shows every change of order.
    """
    V = rows.shape[1]

    def bits(chosen: NDArray[Any]) -> list[list[bytes]]:
        shape = draft_topk_workspace_shape(len(chosen), 1, V, k, pieces_per_row=pieces)
        workspace = library.put(np.zeros(shape, np.int64))
        logits = library.put(rows[chosen][:, None])
        got = draft_topk(logits, k, pieces_per_row=pieces, workspace=workspace, **options)
        # A piece is at its row's number and its own, so that a row leaves one place out.
        of_pieces = np.pad(library.get(workspace)[:, :HEADER], ((0, 1), (0, 0)))
        arrays = *map(library.get, got), of_pieces.reshape(len(chosen), -1)
        return [[array[row].tobytes() for array in arrays] for row in range(len(chosen))]

    alone = [bits(np.array([row]))[0] for row in range(len(rows))]
    for batch in batches:
        chosen = rng.integers(len(rows), size=batch)
        assert bits(chosen) == [alone[row] for row in chosen], f"rows {chosen.tolist()}"


def bad_rows(rng: np.random.Generator, L: int, V: int) -> NDArray[np.float32]:
    """Logits of which every row at an odd position is no distribution, [1, L, V]."""
    logits = make_rows(rng, "normal", L, V)[None]
    for position in range(1, L, 2):
        logits[0, position, rng.integers(V)] = rng.choice([np.nan, np.inf, -np.nan])
    return logits
