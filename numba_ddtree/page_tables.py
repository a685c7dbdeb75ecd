"""Page tables: which pages of a cache hold a request's rows, in one of two forms, checked.

``block_table``, int32 [B, M], has a row of pages for each request. ``kv_indptr``, int32 [B + 1], and
``kv_indices``, int32 [total], are FlashInfer's form: request b's pages are
``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import at, check_indices, first_where, to_host
from numba_ddtree.errors import ArgumentError
from numba_ddtree.refs.kv_compact import page_lists

PAGING = ("block_table", "kv_indptr", "kv_indices")


def check_page_table(views: dict[str, Any], batch: int) -> dict[str, Any]:
    """Check that a page table has one form, and its shapes and dtypes.

    Parameters
    ----------
    views : dict
        Of `PAGING`, each a view or None.
    batch : int
        B.

    Returns
    -------
    dict
        The same; host arrays of other integers as int32.

    Raises
    ------
    ArgumentError
    """
    for name, other in (("kv_indptr", "kv_indices"), ("kv_indices", "kv_indptr")):
        if views[name] is None and views[other] is not None:
            raise ArgumentError(name, None, f"an array, since {other} is given")
    if views["block_table"] is not None and views["kv_indptr"] is not None:
        raise ArgumentError("block_table", "an array beside kv_indptr", "the pages in one form alone")
    total = None if views["kv_indices"] is None else math.prod(views["kv_indices"].shape)  # which may be 0
    dimensions: dict[str, dict[str, int | None]] = {
        "block_table": {"B": batch, "M": None},
        "kv_indptr": {"B + 1": batch + 1},
        "kv_indices": {"total": total},
    }
    return {
        name: None if views[name] is None else check_indices(name, views[name], **dims)
        for name, dims in dimensions.items()
    }


def pages_on_host(views: dict[str, Any]) -> tuple[Any, NDArray[np.int32] | None]:
    """Copy a checked page table to the host; synchronises where it is on a device.

    Returns
    -------
    pages
        A row of pages for each request, as references take them; None for a contiguous cache.
    kv_indptr : optional
        Where that form was given.

    Raises
    ------
    ArgumentError
        A range in `kv_indptr` that is none.
    """
    paging = {name: to_host(name, views[name]) for name in PAGING if views[name] is not None}
    if "kv_indptr" not in paging:
        return paging.get("block_table"), None
    _check_ranges(**paging)
    return page_lists(**paging), paging["kv_indptr"]


def _check_ranges(kv_indptr: NDArray[np.int32], kv_indices: NDArray[np.int32]) -> None:
    total = len(kv_indices)
    steps = np.diff(kv_indptr.astype(np.int64), prepend=0)
    is_bad = (kv_indptr < 0) | (kv_indptr > total) | (steps < 0)
    for index in first_where(is_bad):
        expected = f"a number that is not below the one before it, up to total = {total}"
        raise ArgumentError(at("kv_indptr", index), kv_indptr[index], expected)


def check_pages(
    pages: Any,
    kv_indptr: NDArray[np.int32] | None,
    request: int,
    blocks: NDArray[np.integer[Any]],
    num_pages: int,
) -> None:
    """Check entries of one request in a page table from `pages_on_host`, which has them.

    Raises
    ------
    ArgumentError
        Names the entry as the caller knows it.
    """
    found = pages[request][blocks]
    for (place,) in first_where((found < 0) | (found >= num_pages)):
        name = _entry(kv_indptr, request, int(blocks[place]))
        raise ArgumentError(name, found[place], f"a page from 0 to {num_pages - 1}")


def check_unshared(
    pages: Any,
    kv_indptr: NDArray[np.int32] | None,
    used: Mapping[int, NDArray[np.integer[Any]]],
    written: Mapping[int, NDArray[np.integer[Any]]],
) -> None:
    """Check that a page that is written to has one use: one block of one request.

    Parameters
    ----------
    pages, kv_indptr
        As for `check_pages`.
    used, written : dict
        Blocks by request.

    Raises
    ------
    ArgumentError
        Names the entry as the caller knows it.
    """
    is_written = {int(pages[request][block]) for request, blocks in written.items() for block in blocks}
    users: dict[int, str] = {}
    for request, blocks in used.items():
        for block in blocks.tolist():
            page, name = int(pages[request][block]), _entry(kv_indptr, request, block)
            user = users.setdefault(page, name)
            if page in is_written and user != name:
                raise ArgumentError(name, page, f"another page than {user}, since rows move there")


def _entry(kv_indptr: NDArray[np.int32] | None, request: int, block: int) -> str:
    """Name an entry of a page table as the caller knows it."""
    if kv_indptr is None:
        return at("block_table", (request, block))
    return at("kv_indices", (int(kv_indptr[request]) + block,))
