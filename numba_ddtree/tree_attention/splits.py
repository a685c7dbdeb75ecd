"""How key ranges are split: how long the splits are, and what memory their partial results take.

The length of a split decides in what order a row's sums are taken, and so its last bits. By default it is a
function of the longest prefix planned for alone: plans of the same longest prefix agree to the bit, whatever
their batch, slots and heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from numba_ddtree.arrays import check_count
from numba_ddtree.errors import ArgumentError
from numba_ddtree.tree_attention.work import KEY_BLOCK, LATENT, MAX_PARTS, MAX_WORKERS, TILE_ROWS
from numba_ddtree.workspace import Field, workspace_bytes

SplitKeys = int | Literal["fastest"] | None

DEFAULT_SPLIT_KEYS = 4096
DEFAULT_SPLITS = 32  # beyond this many the splits of the default are longer
FASTEST = "fastest"
FASTEST_SPLITS = 32
FASTEST_LEAST_BLOCKS = 2
MAX_KEYS = 2**30  # so that numbers of keys, and the next whole split, fit int32
WORKSPACE_LIMIT = 2**30
FLOAT_BYTES = 4
SUMS = 4  # a row's maximum, its two sums and its splits
SLOT_BYTES = TILE_ROWS * (LATENT + SUMS) * FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """The numbers of a `SplitPlan`, before there is memory.

    Attributes
    ----------
    split_blocks, max_splits, rest_tiles : int
        As in `SplitPlan`.
    workers : int
        Workers that have a slot for what a whole tile's splits have come to.
    """

    split_blocks: int
    max_splits: int
    rest_tiles: int
    workers: int

    @property
    def split_keys(self) -> int | str:
        """Keys of a split, or ``"fastest"``."""
        return self.split_blocks * KEY_BLOCK or FASTEST

    def fields(self) -> dict[str, dict[str, Field]]:
        """Describe the memory of partial results; there is none where no row has several splits."""
        if self.max_splits == 1:
            return {"splits": {}}
        rows = (self.max_splits * self.rest_tiles + self.workers) * TILE_ROWS
        return {
            "splits": {
                "partials": Field((rows, LATENT), np.float32),
                "partial_sums": Field((rows, SUMS), np.float32),
                "first_rows": Field((max(MAX_PARTS * self.rest_tiles, 1),), np.int64),
                "num_rest": Field((1,), np.int32),
            }
        }

    @property
    def workspace_bytes(self) -> int:
        """Bytes of that memory."""
        return workspace_bytes(self.fields())


def whole_range() -> SplitSizes:
    """Return sizes with which every row has one split."""
    return SplitSizes(split_blocks=MAX_KEYS // KEY_BLOCK, max_splits=1, rest_tiles=0, workers=0)


def default_split_keys(max_prefix_length: int) -> int:
    """Return the keys of a split for a longest prefix: a power of 2 times `DEFAULT_SPLIT_KEYS`."""
    keys = DEFAULT_SPLIT_KEYS
    while keys * DEFAULT_SPLITS < max_prefix_length:
        keys *= 2
    return keys


def split_sizes(
    split_keys: SplitKeys, *, max_prefix_length: int, max_path: int, tiles: int, workspace_limit: int
) -> SplitSizes:
    """Work out splits, and how many tiles have memory for partial results.

    Parameters
    ----------
    split_keys : int, "fastest" or None
        As for `TreeAttention.plan`.
    max_prefix_length : int
    max_path : int
        Most slots of a node's path.
    tiles : int
        Tiles of all requests.
    workspace_limit : int
        Bytes that partial results may take; of tiles that have none, a worker does all splits in turn.

    Raises
    ------
    ArgumentError
        A split length that is none, or a limit below what workers need for such tiles.
    """
    check_splits(split_keys, workspace_limit)
    blocks = -(-(max_prefix_length + max_path) // KEY_BLOCK)
    is_fastest = split_keys == FASTEST
    if is_fastest:
        split_blocks = 0
        max_splits = max(1, min(FASTEST_SPLITS, -(-blocks // FASTEST_LEAST_BLOCKS)))
    else:
        keys = default_split_keys(max_prefix_length) if split_keys is None else int(split_keys)
        split_blocks = keys // KEY_BLOCK
        max_splits = max(1, -(-blocks // split_blocks))
    if max_splits == 1:
        return SplitSizes(split_blocks, max_splits, 0, 0)
    most_tiles = max(1, min(tiles, MAX_WORKERS))
    workers = 0 if is_fastest else most_tiles
    left = workspace_limit - workers * SLOT_BYTES
    if left < 0:
        expected = f"at least {workers * SLOT_BYTES} bytes, for what tiles' splits have come to"
        raise ArgumentError("workspace_limit", workspace_limit, expected)
    rest_tiles = min(most_tiles, left // (max_splits * SLOT_BYTES))
    if workers + rest_tiles == 0:  # then every tile is whole, and has one split
        return SplitSizes(split_blocks, 1, 0, 0)
    return SplitSizes(split_blocks, max_splits, rest_tiles, workers)


def check_splits(split_keys: Any, workspace_limit: Any) -> None:
    """Check what a caller says of splits, whatever is to be split.

    Raises
    ------
    ArgumentError
    """
    check_count("workspace_limit", workspace_limit, 1, 2**63 - 1)
    if split_keys is None or (isinstance(split_keys, str) and split_keys == FASTEST):
        return
    is_number = isinstance(split_keys, int | np.integer) and not isinstance(split_keys, bool)
    if not is_number or not KEY_BLOCK <= split_keys <= MAX_KEYS or split_keys % KEY_BLOCK != 0:
        expected = f"a multiple of {KEY_BLOCK} up to {MAX_KEYS}, {FASTEST!r} or None"
        raise ArgumentError("split_keys", repr(split_keys), expected)
