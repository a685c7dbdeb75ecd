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
from numba_ddtree.tree_attention.work import KEY_BLOCK, LATENT, TILE_ROWS
from numba_ddtree.workspace import Field, workspace_bytes

SplitKeys = int | Literal["fastest"] | None

DEFAULT_SPLIT_KEYS = 4096
DEFAULT_SPLITS = 32  # beyond this many the splits of the default are longer
FASTEST = "fastest"
FASTEST_SPLITS = 32
FASTEST_LEAST_BLOCKS = 2
MAX_KEYS = 2**30  # so that numbers of keys, and the next whole split, fit int32
MAX_BLOCKS = 2**31 - 1  # of a grid
WORKSPACE_LIMIT = 2**30
FLOAT_BYTES = 4
SUMS = 2  # a row's maximum and sum


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """The numbers of a `SplitPlan`, before there is memory.

    Attributes
    ----------
    split_blocks, max_splits, tiles_per_wave : int
        As in `SplitPlan`.
    """

    split_blocks: int
    max_splits: int
    tiles_per_wave: int

    @property
    def split_keys(self) -> int | str:
        """Keys of a split, or ``"fastest"``."""
        return self.split_blocks * KEY_BLOCK or FASTEST

    def fields(self) -> dict[str, dict[str, Field]]:
        """Describe the memory of partial results; there is none where no row has several splits."""
        if self.max_splits == 1:
            return {"splits": {}}
        rows = self.max_splits, self.tiles_per_wave * TILE_ROWS
        return {
            "splits": {
                "partials": Field((*rows, LATENT), np.float32),
                "partial_sums": Field((*rows, SUMS), np.float32),
            }
        }

    @property
    def workspace_bytes(self) -> int:
        """Bytes of that memory."""
        return workspace_bytes(self.fields())


def whole_range(tiles: int) -> SplitSizes:
    """Return sizes with which every row has one split."""
    return SplitSizes(split_blocks=MAX_KEYS // KEY_BLOCK, max_splits=1, tiles_per_wave=max(tiles, 1))


def default_split_keys(max_prefix_length: int) -> int:
    """Return the keys of a split for a longest prefix: a power of 2 times `DEFAULT_SPLIT_KEYS`."""
    keys = DEFAULT_SPLIT_KEYS
    while keys * DEFAULT_SPLITS < max_prefix_length:
        keys *= 2
    return keys


def split_sizes(
    split_keys: SplitKeys, *, max_prefix_length: int, max_path: int, tiles: int, workspace_limit: int
) -> SplitSizes:
    """Work out splits and waves.

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
        Bytes that partial results may take at once; further tiles have to wait.

    Raises
    ------
    ArgumentError
        A split length that is none, or a limit that is too low for a single tile.
    """
    blocks = -(-(max_prefix_length + max_path) // KEY_BLOCK)
    if split_keys == FASTEST:
        split_blocks = 0
        max_splits = max(1, min(FASTEST_SPLITS, -(-blocks // FASTEST_LEAST_BLOCKS)))
    else:
        split_blocks = _checked_keys(split_keys, max_prefix_length) // KEY_BLOCK
        max_splits = max(1, -(-blocks // split_blocks))
    if max_splits == 1:
        return SplitSizes(split_blocks, max_splits, max(tiles, 1))
    tile_bytes = max_splits * TILE_ROWS * (LATENT + SUMS) * FLOAT_BYTES
    check_count("workspace_limit", workspace_limit, 1, 2**63 - 1)
    if workspace_limit < tile_bytes:
        expected = f"at least {tile_bytes} bytes, for one tile's {max_splits} splits"
        raise ArgumentError("workspace_limit", workspace_limit, expected)
    most = max(1, min(workspace_limit // tile_bytes, MAX_BLOCKS // max_splits, tiles))
    waves = max(1, -(-tiles // most))
    return SplitSizes(split_blocks, max_splits, max(1, -(-tiles // waves)))  # waves of like size


def _checked_keys(split_keys: Any, max_prefix_length: int) -> int:
    if split_keys is None:
        return default_split_keys(max_prefix_length)
    is_number = isinstance(split_keys, int | np.integer) and not isinstance(split_keys, bool)
    if not is_number or not KEY_BLOCK <= split_keys <= MAX_KEYS or split_keys % KEY_BLOCK != 0:
        expected = f"a multiple of {KEY_BLOCK} up to {MAX_KEYS}, {FASTEST!r} or None"
        raise ArgumentError("split_keys", repr(split_keys), expected)
    return int(split_keys)
