"""`tree_tail_attention`: the tree's part of verify attention, for those who have a kernel for the prefix."""

from __future__ import annotations

from numpy.typing import DTypeLike

from numba_ddtree.arrays import StreamLike
from numba_ddtree.devices import device_context, require_device, use_reference
from numba_ddtree.tree import Array, DraftTree
from numba_ddtree.tree_attention.arguments import (
    MAX_SLOTS,
    check_tensor_core_limits,
    check_tensor_core_widths,
    check_values,
    gather_arguments,
)
from numba_ddtree.tree_attention.calls import (
    output_dtype,
    run_reference,
    run_shared_scores,
    run_tensor_cores,
)
from numba_ddtree.tree_attention.kernels import FLOAT32, TENSOR_CORES, check_kernel, choose_kernel
from numba_ddtree.tree_attention.splits import MAX_KEYS, whole_range


def tree_tail_attention(
    q_nope: Array,
    q_pe: Array,
    ckv_cache: Array,
    kpe_cache: Array,
    tree: DraftTree,
    *,
    sm_scale: float,
    prefix_lengths: Array | None = None,
    block_table: Array | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    out_dtype: DTypeLike | None = None,
    kernel: str | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Array, Array]:
    """Attend from each node of a draft tree to its ancestors and to itself, and not to the prefix.

    Another kernel, which needs no tree mask, attends from all nodes to the prefix; `merge_states` makes
    `verify_attention` of the two. FlashMLA's log-sum-exp is a natural log, as this one's is; FlashInfer's
    is to base 2. Deterministic. Since the sums of the two parts are rounded apart, a result is not to the
    bit that of plain decoding, as `verify_attention`'s is.

    Parameters
    ----------
    q_nope, q_pe, ckv_cache, kpe_cache, tree, sm_scale, prefix_lengths
        As for `verify_attention`: node i's own row is key P + i. Rows of the prefix are not used.
    block_table, kv_indptr, kv_indices, out, lse, out_dtype, kernel, stream, backend, validate
        As for `verify_attention`, but that ``"tensor_cores"`` is the default for float16 and bfloat16.

    Returns
    -------
    out : [B, N, H, D_CKV]
        Zeros for padding slots, and NaN as for `verify_attention`.
    lse : float32 [B, N, H]
        Natural log of the sum over the node's path; -inf for padding slots.

    Raises
    ------
    ArgumentError
        As `verify_attention`; there is no limit to the prefix.
    BackendError
        No device for the CUDA backend.
    """
    given = gather_arguments(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        tree,
        sm_scale=sm_scale,
        prefix_lengths=prefix_lengths,
        block_table=block_table,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        validate=validate,
    )
    check_kernel(kernel, given.dtype)
    out_dtype = output_dtype(given.dtype, out_dtype, out)
    pages = check_values(given, None)[1] if given.placement.on_host or validate else None
    runs_reference = use_reference(backend, given.placement, stream)
    if given.dtype != FLOAT32:
        check_tensor_core_limits(given)
    if runs_reference:
        return run_reference(given, pages, out_dtype, out, lse, sees_prefix=False)
    if given.dtype == FLOAT32:
        return run_shared_scores(given, MAX_KEYS - MAX_SLOTS, out, lse, stream, sees_prefix=False)
    check_tensor_core_widths(given)
    require_device()
    with device_context(given.placement.device_id):
        # A path is short, which the kernel with less to set up is quicker at.
        chosen = choose_kernel(kernel or TENSOR_CORES, given.dtype)
    # One split, so that there is nothing to merge and no memory to merge it in.
    sizes = whole_range()
    return run_tensor_cores(given, chosen, sizes, out_dtype, out, lse, stream, sees_prefix=False)
