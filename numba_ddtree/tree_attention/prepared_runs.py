"""Runs of a plan that come again: their launches, kept by all that they depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from numba_ddtree.array_keys import array_key
from numba_ddtree.arrays import Address, DeviceView, Placement, StreamLike
from numba_ddtree.devices import stream_handle
from numba_ddtree.launch import LaunchSequence
from numba_ddtree.tree import TREE_DTYPES, Array, DraftTree

MAX_RUNS = 128  # two for each layer of the deepest models
NUMBERS = (float, int, np.number)

RunKey: TypeAlias = tuple[Any, ...]
"""Keys of all arrays, and the numbers, with their types; equal for runs with the same checks and launches."""

_tree_arrays = attrgetter(*TREE_DTYPES)


@dataclass(slots=True, eq=False)
class PreparedRun:
    """Launches of a run whose arguments were checked.

    They keep none of the caller's arrays alive: whoever launches them has arrays at the same addresses.

    Attributes
    ----------
    sequence : LaunchSequence
    placement : Placement
        Of the arrays, which says what the default stream is.
    last_use : int
        Larger than that of every run used before.
    """

    sequence: LaunchSequence
    placement: Placement
    last_use: int = -1

    def launch(self, stream: StreamLike) -> None:
        """Launch on a stream, None for the current one of the arrays' library; does not synchronise."""
        self.sequence.launch(stream_handle(stream, self.placement))


class PreparedRuns:
    """A plan's latest runs; the one that was not used for the longest makes room for another.

    Parameters
    ----------
    capacity : int
        Most runs to keep.
    """

    def __init__(self, capacity: int = MAX_RUNS) -> None:
        self._capacity = capacity
        self._runs: dict[RunKey, PreparedRun] = {}
        self._clock = count()

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, key: RunKey) -> PreparedRun | None:
        """Return the run of a key, if it is kept."""
        run = self._runs.get(key)
        if run is not None:
            run.last_use = next(self._clock)  # not moved in the dict, which would hash the key again
        return run

    def keep(self, key: RunKey, run: PreparedRun) -> None:
        """Keep a run that was not found."""
        if len(self._runs) >= self._capacity:
            del self._runs[min(self._runs, key=lambda each: self._runs[each].last_use)]
        run.last_use = next(self._clock)
        self._runs[key] = run


def run_key(
    q_nope: Array,
    out: Array | None,
    lse: Array | None,
    tree: DraftTree,
    sm_scale: float,
    *others: Array | None,
) -> RunKey | None:
    """Return the key of a run, or None where its launches cannot be kept.

    They cannot where an output is still to be allocated, or an argument has no key: it is no device array of
    torch, cupy or numba, or is not what it should be, which checks will say. Numbers count with their types,
    since True equals 1, and checks tell them apart.
    """
    if out is None or lse is None or tree.__class__ is not DraftTree:
        return None
    max_depth = tree.max_depth
    if not (isinstance(sm_scale, NUMBERS) and isinstance(max_depth, NUMBERS)):
        return None
    # Classes, since the default stream is that of the library of the first array.
    key: list[Any] = [q_nope.__class__, sm_scale.__class__, sm_scale, max_depth.__class__, max_depth]
    for array in (q_nope, *others, out, lse, *_tree_arrays(tree)):
        part = array_key(array)
        if part is None:
            return None
        key.append(part)
    return tuple(key)


def forget_owners(sequence: LaunchSequence, views: Iterable[DeviceView | None]) -> None:
    """Let launches keep the owners of some views alive no longer."""
    owners = {id(view.owner) for view in views if view is not None and view.owner is not None}
    for launch in sequence.launches:
        for place, argument in enumerate(launch.arguments):
            if isinstance(argument, DeviceView | Address) and id(argument.owner) in owners:
                launch.arguments[place] = replace(argument, owner=None)
