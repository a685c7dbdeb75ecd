"""Cache compaction: the accepted rows of the tree move to the front of the tree's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def compact_kv(
    cache: NDArray[Any],
    prefix_lengths: NDArray[np.int32],
    accepted_indices: NDArray[np.int32],
    accept_length: NDArray[np.int32],
    page_table: NDArray[np.int32] | Sequence[NDArray[np.int32]] | None = None,
) -> None:
    """Move row ``P + accepted_indices[j]`` of each request to row ``P + j``, in place.

    Accepted indices rise and are at least their place in the path, so that moving them in order
    never overwrites a row that is still to be read. A row is left alone where its index is below its
    place, or where it would come from or go to a slot that the request has not.

    Parameters
    ----------
    cache : any dtype, [B, S, D] or, with a page table, [pages, page_size, D]
    prefix_lengths, accept_length : int32 [B]
    accepted_indices : int32 [B, L + 1]
    page_table : int32 [B, pages a request], or such a row for each request, optional
        The page that holds each run of `page_size` slots of a request.
    """

    def row(request: int, slot: int) -> tuple[int, int] | None:
        block, place = divmod(slot, cache.shape[1])
        pages = [request] if page_table is None else page_table[request]
        is_there = 0 <= block < len(pages) and 0 <= pages[block] < len(cache)
        return (int(pages[block]), place) if is_there else None

    for request, prefix in enumerate(map(int, prefix_lengths)):
        if prefix < 0:
            continue
        for place, index in enumerate(accepted_indices[request, : max(int(accept_length[request]), 0)]):
            source, target = row(request, prefix + int(index)), row(request, prefix + place)
            if index > place and source is not None and target is not None:
                cache[target] = cache[source]


def page_lists(kv_indptr: NDArray[np.int32], kv_indices: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Return each request's pages, as rows of a page table, from FlashInfer's form of one.

    A request whose range begins below 0 has none, and no range goes beyond the indices.

    Parameters
    ----------
    kv_indptr : int32 [B + 1]
    kv_indices : int32 [total]
    """
    ranges = zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)
    return [kv_indices[start : max(end, 0)] if start >= 0 else kv_indices[:0] for start, end in ranges]
