"""`verify_attention`: checks, and the choice of what computes it."""

from __future__ import annotations

from numpy.typing import DTypeLike

from numba_ddtree.arrays import StreamLike, check_count
from numba_ddtree.devices import device_context, require_device, use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.tree import Array, DraftTree
from numba_ddtree.tree_attention.arguments import (
    MAX_SLOTS,
    Arguments,
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
from numba_ddtree.tree_attention.kernels import FLOAT32, check_kernel, choose_kernel
from numba_ddtree.tree_attention.splits import (
    MAX_KEYS,
    WORKSPACE_LIMIT,
    SplitKeys,
    check_splits,
    split_sizes,
)
from numba_ddtree.tree_attention.work import tiles_of


def verify_attention(
    q_nope: Array,
    q_pe: Array,
    ckv_cache: Array,
    kpe_cache: Array,
    tree: DraftTree,
    *,
    sm_scale: float,
    prefix_lengths: Array | None = None,
    max_prefix_length: int | None = None,
    block_table: Array | None = None,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    out_dtype: DTypeLike | None = None,
    kernel: str | None = None,
    split_keys: SplitKeys = None,
    workspace_limit: int = WORKSPACE_LIMIT,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> tuple[Array, Array]:
    """Attend from each node of a draft tree to the prefix, to its ancestors and to itself.

    Multi-head Latent Attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1): all
    heads share one row a key, of a latent part, which is key and value, and a rotary part, which is
    key only. With k over the visible keys::

        score[k] = sm_scale * (q_nope . ckv[k] + q_pe . kpe[k])
        out = sum_k softmax(score)[k] * ckv[k]
        lse = log(sum_k exp(score[k]))

    Keys that a node does not see contribute exactly zero. Deterministic: the same input gives the same
    bits. In float16 and bfloat16 a node's result is moreover, to the bit, that of decoding its sequence
    alone, with all of it in the cache and N = 1: whatever the batch and the place in it, the other nodes,
    the pages and their size; within one kernel and one length of splits, which is not ``"fastest"``. In
    float32 that holds for the same shapes alone, in caches that start at a multiple of 16 bytes as all
    libraries' do; others are summed in another order.

    This is the one-shot form of `TreeAttention`, which allocates the workspace once.

    Parameters
    ----------
    q_nope : float32, float16 or bfloat16 [B, N, H, D_CKV]
        Queries against the latent part, with the key up-projection absorbed. D_CKV is 512 in DeepSeek V3
        and Kimi K2. In float16 and bfloat16 the kernels take that width alone; there are at most 128 heads
        and 1025 slots, and on a device any layout will do with rows at one distance, a multiple of 16 bytes,
        such as slices of one array [B, N, H, 576]; in float32 any width, C-contiguous on a device.
    q_pe : [B, N, H, D_KPE], of the same dtype
        Rotary part of the queries; 64 there.
    ckv_cache : [B, S, D_CKV] or, paged, [pages, page_size, D_CKV], of the same dtype
        Latent rows: keys 0 to P - 1 are the prefix, and key P + i is slot i of the tree. With pages, which
        are for float16 and bfloat16, key p of request b is row ``p % page_size`` of its page
        ``p // page_size``. Page and row distances may be any multiples of 16 bytes: a slice of one array
        [pages, page_size, 576] will do. Rows that no node in use sees may hold anything; in float16 and
        bfloat16 a NaN in the row of one node may spoil others of its request.
    kpe_cache : [B, S, D_KPE] or [pages, page_size, D_KPE], of the same dtype
        Rotary part of the keys.
    tree : DraftTree
        B requests of N slots.
    sm_scale : float
        Factor of the scores: for DeepSeek V3 ``(128 + 64) ** -0.5``, with any YaRN factor.
    prefix_lengths : int32 [B], optional
        P, the keys of each request before the tree's root; 0 by default.
    max_prefix_length : int, optional
        A bound on `prefix_lengths`, which sizes shared memory (float32) and the workspace, and by which
        `split_keys` is chosen. By default all that the cache or the page table has room for, less one; for
        float32 on the host the largest length. Needed with `kv_indptr` on a device.
    block_table : int32 [B, M], optional
        For paged caches: the pages of each request in order; past those in use the entries may be
        anything.
    kv_indptr, kv_indices : int32 [B + 1] and int32 [total], optional
        Another form of the same, FlashInfer's: the pages of request b are ``kv_indices[kv_indptr[b] :
        kv_indptr[b + 1]]``.
    out : [B, N, H, D_CKV], optional
        Where to write the output: of the queries' dtype or float32.
    lse : float32 [B, N, H], optional
        Where to write the log-sum-exp.
    out_dtype : dtype, optional
        Of the output: the queries' or float32; by default that of `out`, or else the queries'.
    kernel : {None, "shared_scores", "tensor_cores", "hopper"}
        By default ``"shared_scores"`` for float32; for float16 and bfloat16 ``"hopper"`` on devices of
        compute capability 9.0, and ``"tensor_cores"`` on others and where the environment's
        ``NUMBA_DDTREE_SHARED_MEMORY`` leaves too little. The reference has no kernels, and the simulator none
        of 16 bits.
    split_keys : int, "fastest" or None
        As for `TreeAttention.plan`; without meaning for float32.
    workspace_limit : int
        Bytes that partial results may take, as for `TreeAttention.plan`. Without meaning for float32.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference on host arrays: of float32 in float32, otherwise in float64 with
        results rounded once. It takes any widths and pages of any dtype.
    validate : bool
        Check the values of a device tree, device lengths and device page tables as those on the host are;
        synchronises.

    Returns
    -------
    out : [B, N, H, D_CKV]
        Zeros for padding slots. NaN for a request of a device array whose prefix length is negative
        or does not fit the cache, its pages or `max_prefix_length`, and for a node whose bits name slots
        that are not in use or more than `max_depth` ancestors, or whose keys are on a page that is none.
    lse : float32 [B, N, H]
        Natural log; -inf for padding slots. Both are numpy arrays for host arrays, after
        synchronising; otherwise arrays of the same library, with no synchronisation.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument, or a key range that the device's shared
        memory does not hold in float32 (the message says the longest that it does); a kernel that the
        device cannot run; for host arrays, and with `validate`, also lengths and pages out of range,
        parents that are no tree and ancestor bits that are not those of the parents.
    BackendError
        No device for the CUDA backend, or one of which the current context has but a part, where the kernel
        needs all of it (``"hopper"``).
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
    check_splits(split_keys, workspace_limit)
    out_dtype = output_dtype(given.dtype, out_dtype, out)
    bound = checked_bound(given, max_prefix_length)
    longest, pages = None, None
    if given.placement.on_host or validate:
        longest, pages = check_values(given, bound)
    runs_reference = use_reference(backend, given.placement, stream)
    if runs_reference and given.dtype == FLOAT32:
        return run_reference(given, pages, out_dtype, out, lse)
    if given.dtype == FLOAT32:
        by_default = int(given.views["ckv_cache"].shape[1]) - 1 if longest is None else longest
        return run_shared_scores(given, by_default if bound is None else bound, out, lse, stream)
    check_tensor_core_limits(given)
    bound = needed_bound(given) if bound is None else bound
    sizes = split_sizes(
        split_keys,
        max_prefix_length=bound,
        max_path=given.max_path,
        tiles=tiles_of(given.batch, given.slots, given.heads),
        workspace_limit=workspace_limit,
    )
    if runs_reference:
        return run_reference(given, pages, out_dtype, out, lse)
    check_tensor_core_widths(given)
    require_device()
    with device_context(given.placement.device_id):
        chosen = choose_kernel(kernel, given.dtype)
    return run_tensor_cores(given, chosen, sizes, out_dtype, out, lse, stream)


def checked_bound(given: Arguments, max_prefix_length: int | None) -> int | None:
    """Check a bound on prefix lengths; in float32 it is for a cache that has room for them."""
    if max_prefix_length is None:
        return None
    keys = int(given.views["ckv_cache"].shape[1])
    limit = keys if given.dtype == FLOAT32 and not given.is_paged else MAX_KEYS - MAX_SLOTS
    return check_count("max_prefix_length", max_prefix_length, 0, limit)


def needed_bound(given: Arguments) -> int:
    """Return the default of a bound on prefix lengths: what there is room for beside a root."""
    capacity = given.key_capacity
    if capacity is None:
        expected = "a bound on the prefix lengths, since kv_indptr is on a device, where it is not read"
        raise ArgumentError("max_prefix_length", None, expected)
    return max(0, min(capacity - 1, MAX_KEYS - MAX_SLOTS))
