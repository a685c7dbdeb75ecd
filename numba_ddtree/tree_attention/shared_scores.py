"""The plain verify attention: every score of a query in shared memory, in float32.

One block computes one (request, node, head) in three phases:

1. scores: threads strided over the keys, each taking whole dot products with the query, which lies
   in shared memory. Only visible keys have a place: the prefix, then the node's own path.
2. softmax: maximum and sum over the block, then probabilities in place.
3. output: threads strided over the latent dimensions, each summing over all keys. No atomics, and the
   order of the sums depends on nothing but the shapes, so that results are deterministic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numba_ddtree.arrays import Placement, StreamLike
from numba_ddtree.cuda_target import SIMULATED, cuda, device_function, float32, float64, int32, int64, uint32
from numba_ddtree.device.memory import load_four
from numba_ddtree.devices import shared_memory_limit
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.transfer import Transfer

THREADS = block_threads(256)
MAX_BLOCKS = 2**31 - 1
PATH_LENGTH, IS_INVALID = range(2)
CONTROL_WORDS = 2
RUN = 8  # terms of a partial sum in float32


@device_function
def dot(s_query, start, rows, request, row, width, is_aligned):  # type: ignore[no-untyped-def]
    """Dot product (float64) of a part of the query with one row of a cache.

    Short partial sums in float32 are added up in float64: the error of a score goes into its
    probability as it is, and that of a plain float32 sum of 576 terms would be the largest of all.
    """
    total = float64(0)
    body = width // RUN * RUN if is_aligned else 0
    first = (int64(request) * rows.shape[1] + row) * width
    for dim in range(0, body, RUN):
        a0, a1, a2, a3 = load_four(rows, first + dim)
        b0, b1, b2, b3 = load_four(rows, first + dim + 4)
        query = start + dim
        left = s_query[query] * a0 + s_query[query + 1] * a1
        left += s_query[query + 2] * a2 + s_query[query + 3] * a3
        right = s_query[query + 4] * b0 + s_query[query + 5] * b1
        right += s_query[query + 6] * b2 + s_query[query + 7] * b3
        total += float64(left + right)
    for dim in range(body, width):
        total += float64(s_query[start + dim]) * float64(rows[request, row, dim])
    return total


@device_function
def cache_row(key, shared, s_path):  # type: ignore[no-untyped-def]
    """Row of the cache that holds a query's key: what is seen of the prefix comes first, then the path."""
    return key if key < shared else s_path[key - shared]


@device_function
def weighted_sum(s_weights, values, request, dim, keys, shared, s_path):  # type: ignore[no-untyped-def]
    """Sum (float64) of one latent dimension over all keys, in short partial sums as in `dot`."""
    total = float64(0)
    partial = float32(0)
    for key in range(keys):
        partial += s_weights[key] * values[request, cache_row(key, shared, s_path), dim]
        if key % RUN == RUN - 1:
            total += float64(partial)
            partial = float32(0)
    return total + float64(partial)


@device_function
def block_reduce(value, s_partial, takes_maximum):  # type: ignore[no-untyped-def]
    """Maximum or sum over the block of one float32 a thread, known to every thread."""
    thread = cuda.threadIdx.x
    cuda.syncthreads()  # nobody still reads the last result
    s_partial[thread] = value
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if thread < half:
            other = s_partial[thread + half]
            mine = s_partial[thread]
            s_partial[thread] = max(mine, other) if takes_maximum else mine + other
        cuda.syncthreads()
        half //= 2
    return s_partial[0]


@device_function
def list_path(ancestor_bits, request, node, count, prefix, s_path, capacity, s_control):  # type: ignore[no-untyped-def]
    """Write the cache rows of a node's path to shared memory, in order of depth, and their number.

    A thread takes a word of bits; the bits of the words before it tell where its slots go.
    """
    words = ancestor_bits.shape[2]
    for word in range(cuda.threadIdx.x, words, THREADS):
        place = 0
        for earlier in range(word):
            place += cuda.popc(uint32(ancestor_bits[request, node, earlier]))
        bits = int64(ancestor_bits[request, node, word])
        while bits != 0:
            slot = word * 32 + cuda.popc(uint32((bits & -bits) - 1))  # the lowest bit left
            if slot < count and place < capacity:
                s_path[place] = prefix + slot
            else:
                s_control[IS_INVALID] = 1
            place += 1
            bits &= bits - 1
        if word == words - 1:
            s_control[PATH_LENGTH] = place


def shared_scores_kernel(  # type: ignore[no-untyped-def]
    q_nope,  # float32 [B, N, H, D_CKV]
    q_pe,  # float32 [B, N, H, D_KPE]
    ckv_cache,  # float32 [B, S, D_CKV]
    kpe_cache,  # float32 [B, S, D_KPE]
    ancestor_bits,  # uint32 [B, N, words]
    num_nodes,  # int32 [B]
    prefix_lengths,  # int32 [B], or empty: 0
    prefix_capacity,  # int32: the longest prefix allowed, whose scores have a place in shared memory
    path_capacity,  # int32
    sees_prefix,  # int32: 0 for the path alone
    is_aligned,  # int32: rows of both caches start at multiples of 16 bytes
    sm_scale,  # float64
    out,  # float32 [B, N, H, D_CKV]
    lse,  # float32 [B, N, H]
):
    thread = cuda.threadIdx.x
    slots, heads, width = out.shape[1], out.shape[2], out.shape[3]
    rope_width = q_pe.shape[3]
    item = uint32(cuda.blockIdx.x)
    head = item % uint32(heads)
    node = item // uint32(heads) % uint32(slots)
    request = item // uint32(heads) // uint32(slots)
    count = num_nodes[request]
    prefix = prefix_lengths[request] if prefix_lengths.shape[0] > 0 else int32(0)
    if node >= count:
        for dim in range(thread, width, THREADS):
            out[request, node, head, dim] = float32(0)
        if thread == 0:
            lse[request, node, head] = float32(-np.inf)
        return

    s_words = cuda.shared.array(0, int32)
    s_floats = cuda.shared.array(0, float32)
    s_control = s_words[:CONTROL_WORDS]
    s_path = s_words[CONTROL_WORDS : CONTROL_WORDS + path_capacity]
    s_partial = s_floats[CONTROL_WORDS + path_capacity :]  # [THREADS]
    s_query = s_partial[THREADS:]  # [D_CKV + D_KPE]
    s_scores = s_query[width + rope_width :]  # [prefix_capacity + path_capacity]
    if thread == 0:
        fits = count <= slots and 0 <= prefix <= prefix_capacity and prefix + count <= ckv_cache.shape[1]
        s_control[IS_INVALID] = 0 if fits else 1
    cuda.syncthreads()
    first_row = prefix if s_control[IS_INVALID] == 0 else int32(0)  # a sum with any other may overflow
    list_path(ancestor_bits, request, node, count, first_row, s_path, path_capacity, s_control)
    cuda.syncthreads()
    if s_control[IS_INVALID] != 0:
        for dim in range(thread, width, THREADS):
            out[request, node, head, dim] = float32(np.nan)
        if thread == 0:
            lse[request, node, head] = float32(np.nan)
        return
    shared = prefix if sees_prefix != 0 else int32(0)
    keys = shared + s_control[PATH_LENGTH]
    for dim in range(thread, width, THREADS):
        s_query[dim] = q_nope[request, node, head, dim]
    for dim in range(thread, rope_width, THREADS):
        s_query[width + dim] = q_pe[request, node, head, dim]
    cuda.syncthreads()

    maximum = float32(-np.inf)
    for key in range(thread, keys, THREADS):
        row = cache_row(key, shared, s_path)
        latent_part = dot(s_query, 0, ckv_cache, request, row, width, is_aligned)
        rope_part = dot(s_query, width, kpe_cache, request, row, rope_width, is_aligned)
        score = float32((latent_part + rope_part) * sm_scale)
        s_scores[key] = score
        maximum = max(maximum, score)

    maximum = block_reduce(maximum, s_partial, True)
    if maximum == float32(-np.inf):
        maximum = float32(0)
    total = float32(0)
    for key in range(thread, keys, THREADS):
        weight = math.exp(s_scores[key] - maximum)
        s_scores[key] = weight
        total += weight
    total = block_reduce(total, s_partial, False)
    for key in range(thread, keys, THREADS):
        s_scores[key] = s_scores[key] / total if total != float32(0) else float32(0)
    cuda.syncthreads()

    for dim in range(thread, width, THREADS):
        out[request, node, head, dim] = float32(
            weighted_sum(s_scores, ckv_cache, request, dim, keys, shared, s_path)
        )
    if thread == 0:
        lse[request, node, head] = maximum + math.log(total) if total != float32(0) else float32(-np.inf)


SHARED_SCORES = Kernel(
    shared_scores_kernel,
    (
        "void(float32[:, :, :, ::1], float32[:, :, :, ::1], float32[:, :, ::1], float32[:, :, ::1], "
        "uint32[:, :, ::1], int32[::1], int32[::1], int32, int32, int32, int32, float64, "
        "float32[:, :, :, ::1], float32[:, :, ::1])",
    ),
    THREADS,
    blocks_per_processor=2,
)


def shared_bytes(prefix: int, path: int, width: int) -> int:
    """Shared memory of a block for a prefix and a path of so many keys and queries so wide."""
    return 4 * (CONTROL_WORDS + path + THREADS + width + prefix + path)


def longest_prefix(limit: int, path: int, width: int) -> int:
    """Longest prefix that fits so many bytes of shared memory, negative where none does."""
    return (limit - shared_bytes(0, path, width)) // 4


def _rows_are_aligned(rows: Any) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    return rows.shape[2] % 4 == 0 and (SIMULATED or rows.pointer % 16 == 0)


def launch_shared_scores(
    placement: Placement,
    views: dict[str, Any],
    prefix_capacity: int,
    path_capacity: int,
    sm_scale: float,
    out: Any,
    lse: Any,
    stream: StreamLike,
    *,
    sees_prefix: bool = True,
) -> tuple[Any, Any]:
    """Launch the kernel on checked views; without `sees_prefix`, any prefix fits.

    Raises
    ------
    ArgumentError
        Where a key range of `prefix_capacity` does not fit the device's shared memory, or there are
        more blocks than a grid may have.
    """
    batch, slots, heads, latent = views["q_nope"].shape
    width = latent + views["q_pe"].shape[3]
    blocks = batch * slots * heads
    if blocks > MAX_BLOCKS:
        raise ArgumentError("q_nope", f"B * N * H = {blocks}", f"at most {MAX_BLOCKS}, one block each")
    with Transfer(placement, stream) as transfer:
        longest = longest_prefix(shared_memory_limit(), path_capacity, width)
        if sees_prefix and prefix_capacity > longest:
            raise ArgumentError(
                "prefix_lengths",
                f"room for a prefix of {prefix_capacity} keys",
                f"at most {longest} keys, for which this kernel's scores fit the shared memory "
                f"({shared_memory_limit()} bytes) of this device",
            )
        arguments = [transfer.input(view) for view in views.values()]
        outputs = [
            transfer.output("out", (batch, slots, heads, latent), np.float32, out),
            transfer.output("lse", (batch, slots, heads), np.float32, lse),
        ]
        transfer.launch(
            SHARED_SCORES,
            blocks,
            *arguments,
            np.int32(prefix_capacity),
            np.int32(path_capacity),
            np.int32(sees_prefix),
            np.int32(all(_rows_are_aligned(rows) for rows in arguments[2:4])),
            np.float64(sm_scale),
            *outputs,
            shared_bytes=shared_bytes(prefix_capacity if sees_prefix else 0, path_capacity, width),
        )
        results = transfer.results()
        return results["out"], results["lse"]
