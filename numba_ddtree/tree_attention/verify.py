"""`verify_attention`: checks, and the choice of what computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    StreamLike,
    at,
    check_array,
    check_count,
    check_indices,
    check_scalar,
    copy_to_outputs,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.refs import tree_attention as reference
from numba_ddtree.tree import Array, DraftTree, arrays_of, check_tree
from numba_ddtree.tree_attention.shared_scores import launch_shared_scores

ARGUMENTS = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "ancestor_bits", "num_nodes", "prefix_lengths")


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
    out: Array | None = None,
    lse: Array | None = None,
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

    Keys that a node does not see contribute exactly zero and their rows are not read. Deterministic:
    the same input gives the same bits, in caches that start at a multiple of 16 bytes as all
    libraries' do; others are summed in another order.

    Parameters
    ----------
    q_nope : float32 [B, N, H, D_CKV]
        Queries against the latent part, with the key up-projection absorbed. D_CKV is 512 in
        DeepSeek V3 and Kimi K2; any width is taken.
    q_pe : float32 [B, N, H, D_KPE]
        Rotary part of the queries; 64 there.
    ckv_cache : float32 [B, S, D_CKV]
        Latent rows: keys 0 to P - 1 are the prefix, and key P + i is slot i of the tree.
    kpe_cache : float32 [B, S, D_KPE]
        Rotary part of the keys.
    tree : DraftTree
        B requests of N slots.
    sm_scale : float
        Factor of the scores: for DeepSeek V3 ``(128 + 64) ** -0.5``, with any YaRN factor.
    prefix_lengths : int32 [B], optional
        P, the keys of each request before the tree's root; 0 by default.
    max_prefix_length : int, optional
        A bound on `prefix_lengths`, which sizes the shared memory. By default the largest length for
        host arrays, and all that the cache holds (S - 1) for device arrays.
    out : float32 [B, N, H, D_CKV], optional
        Where to write the output.
    lse : float32 [B, N, H], optional
        Where to write the log-sum-exp.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference in float32, on host arrays.
    validate : bool
        Check the values of a device tree and device lengths as those on the host are; synchronises.

    Returns
    -------
    out : float32 [B, N, H, D_CKV]
        Zeros for padding slots. NaN for a request of a device array whose prefix length is negative
        or does not fit the cache or `max_prefix_length`, and for a node whose bits name slots that are
        not in use or more than `max_depth` ancestors.
    lse : float32 [B, N, H]
        Natural log; -inf for padding slots. Both are numpy arrays for host arrays, after
        synchronising; otherwise arrays of the same library, with no synchronisation.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument, or a key range that the device's shared
        memory does not hold (the message says the longest that it does); for host arrays, and with
        `validate`, also lengths out of range, parents that are no tree
        and ancestor bits that are not those of the parents.
    BackendError
        No device for the CUDA backend.
    """
    placement, views = gather(
        q_nope=q_nope,
        q_pe=q_pe,
        ckv_cache=ckv_cache,
        kpe_cache=kpe_cache,
        prefix_lengths=prefix_lengths,
        **arrays_of("tree", tree, DraftTree),
    )
    sm_scale = check_scalar("sm_scale", sm_scale)
    values = placement.on_host or validate
    check_tree({name: views[name] for name in tree.arrays()}, max_depth=tree.max_depth, values=values)
    _check_shapes(views)
    capacity = _prefix_capacity(views, max_prefix_length, values)
    runs_reference = use_reference(backend, placement)
    if runs_reference:
        lengths = _lengths(views)
        arrays = [views[name] for name in ARGUMENTS[:-1]]
        results = reference.tree_attention(*arrays, lengths, sm_scale, np.float32)
        given = {name: array for name, array in (("out", out), ("lse", lse)) if array is not None}
        computed = dict(zip(("out", "lse"), results, strict=True))
        copy_to_outputs({name: computed[name] for name in given}, given)
        return given.get("out", computed["out"]), given.get("lse", computed["lse"])
    return launch_shared_scores(
        placement,
        {name: views[name] for name in ARGUMENTS},
        capacity,
        min(tree.max_depth + 1, tree.num_slots),
        sm_scale,
        out,
        lse,
        stream,
    )


def _check_shapes(views: dict[str, Any]) -> None:
    float32 = (np.float32,)
    batch, slots = views["parents"].shape
    check_array("q_nope", views["q_nope"], float32, B=batch, N=slots, H=None, D_CKV=None)
    heads, latent = views["q_nope"].shape[2:]
    check_array("q_pe", views["q_pe"], float32, B=batch, N=slots, H=heads, D_KPE=None)
    check_array("ckv_cache", views["ckv_cache"], float32, B=batch, S=None, D_CKV=latent)
    keys = views["ckv_cache"].shape[1]
    check_array("kpe_cache", views["kpe_cache"], float32, B=batch, S=keys, D_KPE=views["q_pe"].shape[3])
    if views["prefix_lengths"] is not None:
        views["prefix_lengths"] = check_indices("prefix_lengths", views["prefix_lengths"], B=batch)


def _lengths(views: dict[str, Any]) -> NDArray[np.int32]:
    """Host copy of the prefix lengths, with the default filled in."""
    lengths = views["prefix_lengths"]
    if lengths is None:
        return np.zeros(views["parents"].shape[0], np.int32)
    return to_host("prefix_lengths", lengths)


def _prefix_capacity(views: dict[str, Any], max_prefix_length: int | None, values: bool) -> int:
    """Return the longest prefix to make room for; check the lengths where they can be read."""
    keys = int(views["ckv_cache"].shape[1])
    if max_prefix_length is not None:
        max_prefix_length = check_count("max_prefix_length", max_prefix_length, 0, keys)
    if not values:
        return keys - 1 if max_prefix_length is None else max_prefix_length
    lengths, counts = _lengths(views), to_host("num_nodes", views["num_nodes"])
    for index in first_where((lengths < 0) | (lengths.astype(np.int64) + counts > keys)):
        expected = f"a length from 0 to {keys - counts[index]}: S = {keys} keys less {counts[index]} nodes"
        raise ArgumentError(at("prefix_lengths", index), lengths[index], expected)
    longest = int(lengths.max(initial=0))
    if max_prefix_length is not None and longest > max_prefix_length:
        raise ArgumentError("prefix_lengths", longest, f"at most max_prefix_length = {max_prefix_length}")
    return longest if max_prefix_length is None else max_prefix_length
