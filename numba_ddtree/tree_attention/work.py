"""What a tensor-core kernel of tree attention is given: checked arrays as addresses, strides and lengths.

A request's query rows are numbered node by node, then head by head; `TILE_ROWS` of them in a row are a tile.
Keys are cut into blocks of `KEY_BLOCK` by their position in the sequence, and blocks into splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_ddtree.arrays import Address

TILE_ROWS = 64
KEY_BLOCK = 64
MAX_PARTS = 2  # of a tile
MAX_WORKERS = 192  # blocks of threads that share a launch's work; no GPU has more multiprocessors yet
LATENT = 512
ROPE = 64


def tiles_of(batch: int, slots: int, heads: int) -> int:
    """Tiles of the query rows of B requests of N slots and H heads."""
    return batch * -(-slots * heads // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of numbers at regular distances in a device's memory.

    Attributes
    ----------
    pointer : int
        Address of the first row.
    stride : int
        Bytes from one row to the next.
    owner : object
        The array that the memory belongs to.
    """

    pointer: int
    stride: int
    owner: Any = field(compare=False, repr=False)

    @property
    def address(self) -> Address:
        """The address, as kernels take it."""
        return Address(self.pointer, self.owner)


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Where key p of request b lies: in row ``p % page_size`` of the page ``p // page_size`` of b.

    Attributes
    ----------
    ckv, kpe : RowSpan
        The first page's rows of the latent and of the rotary part.
    ckv_page_stride, kpe_page_stride : int
        Bytes from one page to the next.
    page_size : int
        Rows of a page; S for a contiguous cache, where page b is request b's only one.
    num_pages : int
        Pages of the cache; B for a contiguous one.
    page_table : DeviceView
        int32, flat: page numbers. Empty for a contiguous cache.
    page_starts : DeviceView
        int32 [B + 1]: request b's pages are ``page_table[page_starts[b] : page_starts[b + 1]]``; or empty.
    table_stride : int
        Where `page_starts` is empty: entries of `page_table` a request. 0 for a contiguous cache.
    """

    ckv: RowSpan
    kpe: RowSpan
    ckv_page_stride: int
    kpe_page_stride: int
    page_size: int
    num_pages: int
    page_table: Any
    page_starts: Any
    table_stride: int


@dataclass(frozen=True, slots=True)
class Work:
    """One call of tree attention, of which everything known on the host has been checked.

    Attributes
    ----------
    dtype : numpy.dtype
        float16 or bfloat16, of queries and cache.
    batch, slots, heads : int
        B, N and H.
    q_nope, q_pe : RowSpan
        Query rows, [B * N * H, 512] and [B * N * H, 64]: row ``(b * N + n) * H + h``.
    keys : KeyRows
    ancestor_bits : DeviceView
        uint32 [B, N, words].
    num_nodes : DeviceView
        int32 [B].
    prefix_lengths : DeviceView
        int32 [B], or empty: 0.
    max_path : int
        Most slots of any node's path, itself included.
    sm_scale : float
    sees_prefix : bool
        False: nodes see the tree's own rows alone.
    out : DeviceView
        [B, N, H, 512], of `dtype` or float32.
    lse : DeviceView
        float32 [B, N, H], natural log.
    """

    dtype: np.dtype[Any]
    batch: int
    slots: int
    heads: int
    q_nope: RowSpan
    q_pe: RowSpan
    keys: KeyRows
    ancestor_bits: Any
    num_nodes: Any
    prefix_lengths: Any
    max_path: int
    sm_scale: float
    sees_prefix: bool
    out: Any
    lse: Any

    @property
    def tiles_per_request(self) -> int:
        """Tiles that a request's rows make, the last of which may be partly empty."""
        return tiles_of(1, self.slots, self.heads)

    @property
    def tiles(self) -> int:
        """Tiles of all requests: tile t of request b has the flat index ``b * tiles_per_request + t``."""
        return self.batch * self.tiles_per_request


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How key ranges are split, and where the results of the splits go before they are merged.

    Attributes
    ----------
    split_blocks : int
        Blocks of a split: split s has blocks ``s * split_blocks`` to ``(s + 1) * split_blocks - 1``. 0:
        chosen on the device, from the lengths of the run.
    max_splits : int
        Most splits that a row can have.
    rest_tiles : int
        Tiles that have slots for partial results, `max_splits` each, if they are cut along their keys.
    partials : DeviceView
        float32 [rows, 512], unnormalised outputs: `TILE_ROWS` rows a slot, whose numbers the Hopper kernel
        has in an order of its own (`hopper_merge`); after those of the rest, there is a slot for each worker,
        if splits have a fixed length. Of one element where `max_splits` is 1.
    partial_sums : DeviceView
        float32 [rows, 4]: row maximum, in base 2, two sums (see `split_fold`), and, of a part's first split,
        how many splits the row has; of one element where `max_splits` is 1.
    first_rows : DeviceView
        int64 [2 * rest_tiles]: of each part that is cut along its keys, its first row of all.
    num_rest : DeviceView
        int32 [1]: how many parts there are of those; the Hopper kernel, which merges itself, leaves it alone.
    first_items : DeviceView
        int32, flat: the first item of each of the Hopper kernel's blocks (`hopper_first_items`), or empty.
    """

    split_blocks: int
    max_splits: int
    rest_tiles: int
    partials: Any
    partial_sums: Any
    first_rows: Any
    num_rest: Any
    first_items: Any
