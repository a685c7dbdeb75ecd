"""Options of a round's stages for requests that are on several lanes: what is for all, what is of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import placement_of
from numba_ddtree.errors import ArgumentError

Option: TypeAlias = tuple[str, str]
"""The stage and the option's name."""

StageOptions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Options by stage and name, as `DDTreeRound.plan` takes them."""

BUDGETS: Option = "round", "budgets"
OF_LANES = frozenset({("compact_kv", name) for name in ("block_table", "kv_indptr", "kv_indices")})
OF_ALL = frozenset({("draft_topk", "bias"), ("build_tree", "verify_cost")})
PIECES: Option = "draft_topk", "pieces_per_row"
STOP_TOKENS: Option = "accept_tree", "stop_token_ids"


def split_options(
    options: StageOptions, max_batch: int
) -> tuple[dict[Option, Any], dict[Option, NDArray[Any]]]:
    """Tell options that are for all requests from arrays that have a row of each.

    Raises
    ------
    ArgumentError
        An array of a device, or of another number of rows, or one that belongs to a lane's caches.
    """
    for_all: dict[Option, Any] = {}
    of_each: dict[Option, NDArray[Any]] = {}
    for stage, given in options.items():
        for name, value in given.items():
            option = stage, name
            if option in OF_LANES:
                raise ArgumentError(_text(option), "given for all lanes", "in lane_options, for each lane")
            if np.ndim(value) == 0 or option in OF_ALL or (option == STOP_TOKENS and np.ndim(value) == 1):
                for_all[option] = value
            else:
                of_each[option] = checked_rows(_text(option), value, max_batch)
    return for_all, of_each


def checked_rows(name: str, array: Any, max_batch: int) -> NDArray[Any]:
    """Return a copy of an array of the host's that has a row of each request."""
    placement = placement_of(name, array)
    if not placement.on_host:
        raise ArgumentError(name, placement, "host arrays, or arrays of each lane's in lane_options")
    rows = np.array(array)
    if rows.shape[:1] != (max_batch,):
        raise ArgumentError(
            name, f"shape {rows.shape}", f"a row for each of max_batch = {max_batch} requests"
        )
    return rows


def merged(*parts: Mapping[Option, Any], own: StageOptions) -> dict[str, dict[str, Any]]:
    """Return options by stage and name, a lane's own last."""
    options: dict[str, dict[str, Any]] = {}
    for part in parts:
        for (stage, name), value in part.items():
            options.setdefault(stage, {})[name] = value
    for stage, given in own.items():
        options.setdefault(stage, {}).update(given)
    return options


def _text(option: Option) -> str:
    return f"options[{option[0]!r}][{option[1]!r}]"
