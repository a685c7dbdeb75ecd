"""The arguments of a call of tree attention, checked before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    FLOAT_DTYPES,
    DeviceView,
    Placement,
    at,
    c_strides,
    check_array,
    check_flag,
    check_indices,
    check_scalar,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.errors import ArgumentError
from numba_ddtree.page_tables import PAGING, check_page_table, check_pages, pages_on_host
from numba_ddtree.tree import Array, DraftTree, arrays_of, check_tree
from numba_ddtree.tree_attention.work import LATENT, ROPE

MAX_HEADS = 128
MAX_SLOTS = 1025
QUERIES_AND_CACHES = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
TREE = ("ancestor_bits", "num_nodes")


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """Arguments whose shapes and dtypes fit together.

    Attributes
    ----------
    placement : Placement
    views : dict
        Of all arrays by name, as `numba_ddtree.arrays.gather` makes them; None where not given.
    sm_scale : float
    max_depth : int
        The tree's.
    """

    placement: Placement
    views: dict[str, Any]
    sm_scale: float
    max_depth: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of queries and caches."""
        dtype: np.dtype[Any] = self.views["q_nope"].dtype
        return dtype

    @property
    def batch(self) -> int:
        """B."""
        return int(self.views["q_nope"].shape[0])

    @property
    def slots(self) -> int:
        """N."""
        return int(self.views["q_nope"].shape[1])

    @property
    def heads(self) -> int:
        """H."""
        return int(self.views["q_nope"].shape[2])

    @property
    def max_path(self) -> int:
        """Most slots of a node's path."""
        return min(self.max_depth + 1, self.slots)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[B, N, H, D_CKV]."""
        return tuple(self.views["q_nope"].shape)

    @property
    def is_paged(self) -> bool:
        """Whether there is a page table."""
        return _has_pages(self.views)

    @property
    def page_size(self) -> int | None:
        """Rows of a page; None for a contiguous cache."""
        return int(self.views["ckv_cache"].shape[1]) if self.is_paged else None

    @property
    def key_capacity(self) -> int | None:
        """Most keys of a request that there is room for; None where only the device knows."""
        _, rows, _ = self.views["ckv_cache"].shape
        if not self.is_paged:
            return int(rows)
        if self.views["block_table"] is not None:
            return int(rows * self.views["block_table"].shape[1])
        if not self.placement.on_host:
            return None
        return int(rows * np.diff(self.views["kv_indptr"].astype(np.int64)).max(initial=0))

    def prefix_lengths_on_host(self) -> NDArray[np.int32]:
        """Host copy of the prefix lengths, with the default filled in; synchronises on a device."""
        lengths = self.views["prefix_lengths"]
        if lengths is None:
            return np.zeros(self.batch, np.int32)
        return to_host("prefix_lengths", lengths)


def gather_arguments(
    q_nope: Array,
    q_pe: Array,
    ckv_cache: Array,
    kpe_cache: Array,
    tree: DraftTree,
    *,
    sm_scale: float,
    prefix_lengths: Array | None,
    block_table: Array | None,
    kv_indptr: Array | None,
    kv_indices: Array | None,
    validate: bool,
) -> Arguments:
    """Check everything that is known without reading from a device; with `validate`, also the tree's values.

    Raises
    ------
    ArgumentError
    """
    check_flag("validate", validate)
    placement, views = gather(
        q_nope=q_nope,
        q_pe=q_pe,
        ckv_cache=ckv_cache,
        kpe_cache=kpe_cache,
        prefix_lengths=prefix_lengths,
        block_table=block_table,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        **arrays_of("tree", tree, DraftTree),
    )
    sm_scale = check_scalar("sm_scale", sm_scale)
    _check_tree(views, tree, placement.on_host or validate)
    return _checked(placement, views, sm_scale, tree)


def gather_keys(
    ckv_cache: Array,
    kpe_cache: Array,
    tree: DraftTree,
    *,
    heads: int,
    prefix_lengths: Array | None,
    block_table: Array | None,
    kv_indptr: Array | None,
    kv_indices: Array | None,
) -> Arguments:
    """Check the arguments of a call that has no queries yet, of which it will have so many `heads`.

    Queries are of the caches' dtype and widths, and lie where the latent cache does.

    Raises
    ------
    ArgumentError
    """
    placement, views = gather(
        ckv_cache=ckv_cache,
        kpe_cache=kpe_cache,
        prefix_lengths=prefix_lengths,
        block_table=block_table,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        **arrays_of("tree", tree, DraftTree),
    )
    _check_tree(views, tree, placement.on_host)
    for name, cache, label in (("q_nope", "ckv_cache", "D_CKV"), ("q_pe", "kpe_cache", "D_KPE")):
        rows = ("pages", "page_size") if _has_pages(views) else ("B", "S")
        check_array(cache, _any_layout(views[cache]), FLOAT_DTYPES, **dict.fromkeys((*rows, label)))
        shape = (*views["parents"].shape, heads, views[cache].shape[2])
        views[name] = _queries_like(views["ckv_cache"], shape)
    return _checked(placement, views, 1.0, tree)


def _queries_like(cache: Any, shape: tuple[int, ...]) -> Any:
    """Return what looks like queries of a cache's dtype, to be checked and not to be read."""
    if not isinstance(cache, DeviceView):
        return np.broadcast_to(np.zeros((), cache.dtype), shape)
    return replace(cache, shape=shape, strides=c_strides(shape, cache.dtype.itemsize))


def _check_tree(views: dict[str, Any], tree: DraftTree, values: bool) -> None:
    check_tree({name: views[name] for name in tree.arrays()}, max_depth=tree.max_depth, values=values)


def _checked(placement: Placement, views: dict[str, Any], sm_scale: float, tree: DraftTree) -> Arguments:
    """Check all that fits to a tree that is one."""
    batch = int(views["parents"].shape[0])
    views |= check_page_table({name: views[name] for name in PAGING}, batch)
    _check_shapes(views)
    if views["prefix_lengths"] is not None:
        views["prefix_lengths"] = check_indices("prefix_lengths", views["prefix_lengths"], B=batch)
    return Arguments(placement, views, sm_scale, tree.max_depth)


def _check_shapes(views: dict[str, Any]) -> None:
    batch, slots = views["parents"].shape
    check_array("q_nope", _any_layout(views["q_nope"]), FLOAT_DTYPES, B=batch, N=slots, H=None, D_CKV=None)
    dtype = (views["q_nope"].dtype.type,)
    heads, latent = views["q_nope"].shape[2:]
    check_array("q_pe", _any_layout(views["q_pe"]), dtype, B=batch, N=slots, H=heads, D_KPE=None)
    rows = {"pages": None, "page_size": None} if _has_pages(views) else {"B": batch, "S": None}
    check_array("ckv_cache", _any_layout(views["ckv_cache"]), dtype, **rows, D_CKV=latent)
    rows = dict(zip(rows, views["ckv_cache"].shape, strict=False))
    check_array("kpe_cache", _any_layout(views["kpe_cache"]), dtype, **rows, D_KPE=views["q_pe"].shape[3])


def _has_pages(views: dict[str, Any]) -> bool:
    return any(views[name] is not None for name in PAGING)


def _any_layout(view: Any) -> Any:
    """Return a view without its strides, for a check of shape and dtype."""
    if not isinstance(view, DeviceView):
        return view
    return replace(view, strides=c_strides(view.shape, view.dtype.itemsize))


def check_contiguous(views: dict[str, Any]) -> None:
    """Check that queries and caches are C-contiguous, as the kernel for float32 needs them on a device."""
    for name in QUERIES_AND_CACHES:
        view = views[name]
        sizes = {f"d{axis}": size for axis, size in enumerate(view.shape)}
        check_array(name, view, (view.dtype.type,), **sizes)


def check_tensor_core_widths(given: Arguments, latent: str = "q_nope", rope: str = "q_pe") -> None:
    """Check the widths that the kernels of tensor cores are made for, of the arrays of those names.

    The reference takes any.
    """
    for name, label, width in ((latent, "D_CKV", LATENT), (rope, "D_KPE", ROPE)):
        if (found := given.views[name].shape[-1]) != width:
            expected = f"{label} = {width}, the width that the kernels of tensor cores are made for"
            raise ArgumentError(name, f"{label} = {found}", expected)


def check_tensor_core_limits(given: Arguments) -> None:
    """Check the limits of attention in 16 bits: heads and slots."""
    if given.heads > MAX_HEADS:
        raise ArgumentError("q_nope", f"H = {given.heads} heads", f"at most {MAX_HEADS}")
    if given.slots > MAX_SLOTS:
        raise ArgumentError("tree", f"N = {given.slots} slots", f"at most {MAX_SLOTS}")


def check_lengths(given: Arguments, max_prefix_length: int | None, pages: Any) -> int:
    """Check the values of prefix lengths; synchronises where they are on a device.

    Parameters
    ----------
    given : Arguments
    max_prefix_length : int, optional
        The bound on them.
    pages
        Of each request, from `check_pages`; None for a contiguous cache.

    Returns
    -------
    int
        The longest.

    Raises
    ------
    ArgumentError
    """
    rows = int(given.views["ckv_cache"].shape[1])
    lengths = given.prefix_lengths_on_host()
    counts = to_host("num_nodes", given.views["num_nodes"])
    room = np.full(given.batch, rows, np.int64)
    if pages is not None:
        room = np.array([rows * len(each) for each in pages], np.int64)
    for index in first_where((lengths < 0) | (lengths.astype(np.int64) + counts > room)):
        which = f"S = {rows} keys" if pages is None else f"{room[index]} rows of the request's pages"
        expected = f"a length from 0 to {room[index] - counts[index]}: {which} less {counts[index]} nodes"
        raise ArgumentError(at("prefix_lengths", index), lengths[index], expected)
    longest = int(lengths.max(initial=0))
    if max_prefix_length is not None and longest > max_prefix_length:
        raise ArgumentError("prefix_lengths", longest, f"at most max_prefix_length = {max_prefix_length}")
    return longest


def check_values(given: Arguments, max_prefix_length: int | None) -> tuple[int, Any]:
    """Check the values of lengths and of the pages that they reach; synchronises on a device.

    Returns
    -------
    longest : int
        The longest prefix.
    pages
        The pages of each request, as the reference takes them.

    Raises
    ------
    ArgumentError
    """
    num_pages, rows, _ = given.views["ckv_cache"].shape
    pages, kv_indptr = pages_on_host({name: given.views[name] for name in PAGING})
    longest = check_lengths(given, max_prefix_length, pages)
    if pages is not None:
        ends = given.prefix_lengths_on_host() + to_host("num_nodes", given.views["num_nodes"])
        for request, end in enumerate(ends.tolist()):
            check_pages(pages, kv_indptr, request, np.arange(-(-end // rows)), num_pages)
    return longest, pages
