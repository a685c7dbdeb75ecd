"""The bit codes of `numba_ddtree.device.bits`: written a second time, and kernels that print them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from kernel_checks import Library
from numpy.typing import NDArray

WORDS = 3
MAX_PRODUCT = 2048  # of the ranks + 1 along a path, for an offer to a tree of 1024 nodes
MAX_DEPTH = 64


def order_key_model(score: float) -> int:
    """Key of a score, by way of its bytes."""
    (bits,) = struct.unpack("<q", struct.pack("<d", score))
    return int(bits if bits >= 0 else -(bits + 2**63) - 1)


def rank_code_model(rank: int) -> str:
    """Code of one rank as a string of digits."""
    digits = format(rank + 1, "b")
    return "1" * (len(digits) - 1) + "0" + digits[1:]


def path_code_model(ranks: tuple[int, ...]) -> list[int]:
    """Words of a path's code, padded with zeros."""
    digits = "".join(map(rank_code_model, ranks)).ljust(32 * WORDS, "0")
    return [int(digits[start : start + 32], 2) for start in range(0, 32 * WORDS, 32)]


def random_path(rng: np.random.Generator) -> tuple[int, ...]:
    """Ranks of a path that may be offered to a tree of 1024 nodes; many are zero."""
    ranks: list[int] = []
    product = 1
    for _ in range(rng.integers(1, MAX_DEPTH + 1)):
        room = MAX_PRODUCT // product
        rank = (
            0 if rng.random() < 0.6 else int(rng.integers(0, max(1, min(room, rng.choice([2, 4, 40, 2048])))))
        )
        ranks.append(rank)
        product *= rank + 1
    return tuple(ranks)


def make_kernels() -> tuple[Any, Any]:
    """Kernels that write scores' keys and back, and paths' words; one request a thread."""
    from numba_ddtree.cuda_target import cuda, uint32
    from numba_ddtree.device.bits import (
        order_key,
        placed_code,
        rank_code,
        rank_code_length,
        score_of,
    )

    @cuda.jit
    def keys_kernel(scores, keys, back):  # type: ignore[no-untyped-def]
        place = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if place < scores.shape[0]:
            keys[place] = order_key(scores[place])
            back[place] = score_of(keys[place])

    @cuda.jit
    def paths_kernel(ranks, depths, words, lengths):  # type: ignore[no-untyped-def]
        place = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if place < ranks.shape[0]:
            for word in range(words.shape[1]):
                start = 0
                bits = uint32(0)
                for depth in range(depths[place]):
                    rank = ranks[place, depth]
                    bits = uint32(bits | placed_code(rank_code(rank), start, word))
                    start += rank_code_length(rank)
                words[place, word] = bits
                lengths[place] = start

    return keys_kernel, paths_kernel


def check_keys(library: Library, scores: NDArray[np.float64], blocks: int) -> None:
    """Check that keys are the model's, rise as the scores do, and turn back into them."""
    kernel, _ = make_kernels()
    keys = library.put(np.zeros(len(scores), np.int64))
    back = library.put(np.zeros(len(scores)))
    kernel[blocks, 32](library.put(scores), keys, back)
    np.testing.assert_array_equal(library.get(keys), [order_key_model(score) for score in scores])
    assert library.get(back).tobytes() == scores.tobytes()


def check_paths(library: Library, paths: list[tuple[int, ...]], blocks: int) -> None:
    """Check that paths' words and lengths are the model's."""
    _, kernel = make_kernels()
    ranks = np.zeros((len(paths), MAX_DEPTH), np.int32)
    for row, path in zip(ranks, paths, strict=True):
        row[: len(path)] = path
    words = library.put(np.full((len(paths), WORDS), 0xA5A5A5A5, np.uint32))
    lengths = library.put(np.zeros(len(paths), np.int32))
    depths = np.array([len(path) for path in paths], np.int32)
    kernel[blocks, 32](library.put(ranks), library.put(depths), words, lengths)
    np.testing.assert_array_equal(library.get(words), [path_code_model(path) for path in paths])
    want = [sum(len(rank_code_model(rank)) for rank in path) for path in paths]
    np.testing.assert_array_equal(library.get(lengths), want)


EDGES = np.array(
    [
        0.0,
        -0.0,
        -1.0,
        1.0,
        np.nextafter(-1.0, 0),
        -5e-324,
        5e-324,
        -2.3e-308,
        -1.7976931348623157e308,
        1.7976931348623157e308,
        np.inf,
        -np.inf,
        -64 * 3.4e38,
    ]
)
EDGE_PATHS = [
    (0,),
    (1,),
    (1023,),
    (2047,),
    (0,) * 64,
    (1,) * 11 + (0,) * 53,
    (0,) * 63 + (2047,),
    (0,) * 15 + (1,),
]
