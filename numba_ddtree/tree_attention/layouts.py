"""Where the rows of queries and caches lie: any regular ones will do, such as slices of a fused array."""

from __future__ import annotations

import math
from typing import Any

from numba_ddtree.errors import ArgumentError
from numba_ddtree.tree_attention.work import KeyRows, RowSpan

ALIGNMENT = 16  # bytes; what kernels load at once


def query_rows(name: str, view: Any) -> RowSpan:
    """Describe queries [B, N, H, D] on a device, whose rows must be equally far apart.

    Raises
    ------
    ArgumentError
    """
    rows, strides = view.shape[:-1], view.strides[:-1]
    # What the rows' distance has to be in each dimension: a multiple of that of the last.
    steps = [math.prod(rows[axis + 1 :]) for axis in range(len(rows))]
    apart = [(stride, step) for stride, step, size in zip(strides, steps, rows, strict=True) if size > 1]
    stride = apart[-1][0] // apart[-1][1] if apart else _row_bytes(view)
    fits = all(found == step * stride for found, step in apart)
    if not (_is_empty(view) or (fits and _fits_loads(view, stride))):
        raise _layout_error(name, view, "rows [H, D] of all nodes and requests at one distance")
    return RowSpan(view.pointer, stride, view.owner)


def cache_rows(name: str, view: Any) -> tuple[RowSpan, int]:
    """Describe a cache [pages, page_size, D] on a device: a page's rows, and the bytes between pages.

    Raises
    ------
    ArgumentError
    """
    pages, page_size, _ = view.shape
    stride = view.strides[1] if page_size > 1 else _row_bytes(view)
    page_stride = view.strides[0] if pages > 1 else page_size * stride
    if not (_is_empty(view) or _fits_loads(view, stride, page_stride)):
        raise _layout_error(name, view, "rows and pages at positive distances")
    return RowSpan(view.pointer, stride, view.owner), page_stride


def key_rows(ckv_cache: Any, kpe_cache: Any, page_table: Any, page_starts: Any, table_stride: int) -> KeyRows:
    """Describe where keys lie, of views on a device; the last three are as in `KeyRows`.

    Raises
    ------
    ArgumentError
    """
    ckv, ckv_page_stride = cache_rows("ckv_cache", ckv_cache)
    kpe, kpe_page_stride = cache_rows("kpe_cache", kpe_cache)
    num_pages, page_size, _ = ckv_cache.shape
    return KeyRows(
        ckv=ckv,
        kpe=kpe,
        ckv_page_stride=ckv_page_stride,
        kpe_page_stride=kpe_page_stride,
        page_size=page_size,
        num_pages=num_pages,
        page_table=page_table,
        page_starts=page_starts,
        table_stride=table_stride,
    )


def _row_bytes(view: Any) -> int:
    return int(view.shape[-1] * view.dtype.itemsize)


def _is_empty(view: Any) -> bool:
    return 0 in view.shape


def _fits_loads(view: Any, *strides: int) -> bool:
    """Whether rows are contiguous and start at multiples of `ALIGNMENT`."""
    contiguous = view.shape[-1] == 1 or view.strides[-1] == view.dtype.itemsize
    return contiguous and view.pointer % ALIGNMENT == 0 and all(s > 0 and s % ALIGNMENT == 0 for s in strides)


def _layout_error(name: str, view: Any, expected: str) -> ArgumentError:
    got = (
        f"shape {tuple(view.shape)} with strides {tuple(view.strides)} in bytes, "
        f"{view.pointer % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    )
    return ArgumentError(name, got, f"{expected}, contiguous and at multiples of {ALIGNMENT} bytes")
