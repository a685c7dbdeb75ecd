"""Cache compaction: the accepted rows of the tree move to the front of the tree's slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def compact_kv(
    cache: NDArray[np.generic],
    prefix_lengths: NDArray[np.int32],
    accepted_indices: NDArray[np.int32],
    accept_length: NDArray[np.int32],
    page_table: NDArray[np.int32] | None = None,
) -> None:
    """Move row ``P + accepted_indices[j]`` of each request to row ``P + j``, in place.

    Accepted indices rise and are at least their place in the path, so that moving them in order
    never overwrites a row that is still to be read.

    Parameters
    ----------
    cache : any dtype, [B, S, D] or, with a page table, [pages, page_size, D]
    prefix_lengths, accept_length : int32 [B]
    accepted_indices : int32 [B, L + 1]
    page_table : int32 [B, pages a request], optional
        The page that holds each run of `page_size` slots of a request.
    """

    def row(request: int, slot: int) -> tuple[int, int]:
        if page_table is None:
            return request, slot
        page_size = cache.shape[1]
        return int(page_table[request, slot // page_size]), slot % page_size

    for request, prefix in enumerate(map(int, prefix_lengths)):
        for place in range(int(accept_length[request])):
            source = prefix + int(accepted_indices[request, place])
            cache[row(request, prefix + place)] = cache[row(request, source)]
