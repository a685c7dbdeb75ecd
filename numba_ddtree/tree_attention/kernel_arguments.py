"""What the kernels of `mma.sync` are launched with, and how they take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, int32
from numba_ddtree.tree_attention.key_rows import KEY_SIGNATURE, Keys, key_arguments
from numba_ddtree.tree_attention.outputs import output_form
from numba_ddtree.tree_attention.shares import SHARE_SIGNATURE, Share
from numba_ddtree.tree_attention.split_items import TREE_SIGNATURE, Tree, most_keys, tree_arguments
from numba_ddtree.tree_attention.work import SplitPlan, Work

SIGNATURE = (
    f"void(uint64, int64, uint64, int64, {KEY_SIGNATURE}, {TREE_SIGNATURE}, {SHARE_SIGNATURE}, int32, int32, "
    "float32, float32[:, ::1], float32[:, ::1], int64[::1], int32[::1], uint64, "
    "float32[:, :, ::1], int32)"
)
LOG2_E = 1.4426950408889634


class Queries(NamedTuple):
    """Rows of queries: addresses (uint64) of the two parts, and bytes (int64) from row to row."""

    q_nope: Any
    nope_stride: Any
    q_pe: Any
    pe_stride: Any


class Results(NamedTuple):
    """Where results go: see `make_kernel`."""

    partials: Any
    partial_sums: Any
    first_rows: Any
    num_rest: Any
    out: Any
    lse: Any
    form: Any


def kernel_arguments(work: Work, splits: SplitPlan, share: tuple[np.int32, ...]) -> tuple[Any, ...]:
    """Return a launch's arguments, in the order of `SIGNATURE`."""
    return (
        *input_arguments(work, splits, share),
        np.int32(work.sees_prefix),
        scale_argument(work),
        *result_arguments(work, splits),
    )


def input_arguments(work: Work, splits: SplitPlan, share: tuple[np.int32, ...]) -> tuple[Any, ...]:
    """Return the arguments from `q_nope` to `max_keys`."""
    return (
        work.q_nope.address,
        np.int64(work.q_nope.stride),
        work.q_pe.address,
        np.int64(work.q_pe.stride),
        *key_arguments(work.keys),
        *tree_arguments(work),
        *share,
        most_keys(splits),
    )


def scale_argument(work: Work) -> np.float32:
    """Return the scale of the scores, to base 2."""
    return np.float32(work.sm_scale * LOG2_E)


def result_arguments(work: Work, splits: SplitPlan) -> tuple[Any, ...]:
    """Return the arguments from `partials` on."""
    return (
        splits.partials,
        splits.partial_sums,
        splits.first_rows,
        splits.num_rest,
        work.out.address,
        work.lse,
        output_form(work),
    )


def make_kernel(attend: Any, name: str) -> Any:
    """Make a kernel of ``attend(queries, keys, tree, share, max_keys, sees_prefix, scale, results)``.

    Of nothing where there are no tensor cores, in the simulator.
    """
    if SIMULATED:
        return lambda: None

    def kernel(  # type: ignore[no-untyped-def]
        q_nope,  # as `Queries` has them, of rows [B * N * H, LATENT] and [B * N * H, ROPE]
        nope_stride,
        q_pe,
        pe_stride,
        ckv,  # to max_keys as `Keys`, `Tree` and `Share` have them
        ckv_stride,
        ckv_page_stride,
        kpe,
        kpe_stride,
        kpe_page_stride,
        page_size,
        num_pages,
        page_table,
        page_starts,
        table_stride,
        ancestor_bits,
        num_nodes,
        prefix_lengths,
        max_path,
        heads,
        workers,
        rest_tiles,
        split_blocks,
        max_splits,
        max_keys,  # int32
        sees_prefix,  # int32: whether nodes see the prefix
        scale,  # float32: of the scores, to base 2
        partials,  # float32 [rows, LATENT]
        partial_sums,  # float32 [rows, 4]
        first_rows,  # int64 [parts]
        num_rest,  # int32 [1]
        out,  # uint64: address of the output, [B, N, H, LATENT]
        lse,  # float32 [B, N, H]
        form,  # int32: of the output
    ):
        attend(
            Queries(q_nope, nope_stride, q_pe, pe_stride),
            Keys(
                ckv, ckv_stride, ckv_page_stride, kpe, kpe_stride, kpe_page_stride, page_size, num_pages,
                page_table, page_starts, table_stride,
            ),
            Tree(ancestor_bits, num_nodes, prefix_lengths, max_path, heads, int32(0)),
            Share(workers, rest_tiles, split_blocks, max_splits, 1),
            max_keys,
            sees_prefix,
            scale,
            Results(partials, partial_sums, first_rows, num_rest, out, lse, form),
        )  # fmt: skip

    kernel.__name__ = kernel.__qualname__ = name
    return kernel
