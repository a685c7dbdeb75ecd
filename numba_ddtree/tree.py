"""Draft trees and acceptance results: the arrays, their layout, and conversions.

Arrays are numpy's, or a device library's: what made them decides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    StreamLike,
    at,
    check_array,
    check_count,
    copy_to_outputs,
    first_where,
    members_of,
    to_host,
)
from numba_ddtree.errors import ArgumentError

Array: TypeAlias = Any
"""A numpy array, or an array on a CUDA device (torch, cupy, jax, numba, ...)."""

TREE_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "parents": np.int32,
    "depths": np.int32,
    "positions": np.int32,
    "first_child": np.int32,
    "next_sibling": np.int32,
    "ancestor_bits": np.uint32,
    "num_nodes": np.int32,
    "status": np.int32,
}


def tree_shapes(batch: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a tree's arrays for B requests of N slots."""
    rows: tuple[int, ...] = (batch, slots)
    words = -(-slots // 32)
    special = {"ancestor_bits": (*rows, words), "num_nodes": rows[:1], "status": rows[:1]}
    return {name: special.get(name, rows) for name in TREE_DTYPES}


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A batch of draft trees, one a request.

    Slot 0 is the root: the last token that the target has confirmed. A node's parent is an earlier
    slot. Slots from ``num_nodes[b]`` on are padding: token 0, position = prefix length, depth 0,
    parent and links -1, no bits.

    Attributes
    ----------
    token_ids : int32 [B, N]
    parents : int32 [B, N]
        -1 at the root.
    depths : int32 [B, N]
        0 at the root.
    positions : int32 [B, N]
        Position in the sequence: prefix length + depth.
    first_child, next_sibling : int32 [B, N]
        -1: none. Siblings come in order of their index.
    ancestor_bits : uint32 [B, N, ceil(N / 32)]
        Bit ``j % 32`` of word ``j // 32`` of row i: node i sees node j, that is, j is i or one of
        its ancestors.
    num_nodes : int32 [B]
        Slots in use, with the root.
    status : int32 [B]
        `TreeStatus` of each request.
    max_depth : int
        A bound on every depth, known on the host: L for a tree from `build_tree`.
    """

    token_ids: Array
    parents: Array
    depths: Array
    positions: Array
    first_child: Array
    next_sibling: Array
    ancestor_bits: Array
    num_nodes: Array
    status: Array
    max_depth: int

    @property
    def batch_size(self) -> int:
        """B, the number of requests."""
        return int(self.parents.shape[0])

    @property
    def num_slots(self) -> int:
        """N, the number of slots of each request, with the root."""
        return int(self.parents.shape[1])

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, without copying."""
        return {name: getattr(self, name) for name in TREE_DTYPES}

    def to_host(self) -> DraftTree:
        """Copy the arrays to numpy; synchronises when they are on a device."""
        return DraftTree(**{k: to_host(k, v) for k, v in self.arrays().items()}, max_depth=self.max_depth)

    def copy_to(self, out: DraftTree) -> DraftTree:
        """Copy a host tree into the arrays of another of the same shapes, and return that one."""
        given = arrays_of("out", out, DraftTree)
        copy_to_outputs(*(members_of("out", arrays) for arrays in (self.arrays(), given)))
        return out

    @classmethod
    def from_parents(
        cls,
        parents: Array,
        token_ids: Array,
        *,
        num_nodes: Array | None = None,
        prefix_lengths: Array | None = None,
        max_depth: int | None = None,
        stream: StreamLike = None,
        backend: str | None = None,
        validate: bool = False,
    ) -> DraftTree:
        """Make a tree of parents, int32 [B, N], and tokens, int32 [B, N], that another builder gave.

        `numba_ddtree.tree_links.tree_from_parents` describes the parameters, errors and guarantees.
        """
        from numba_ddtree.tree_links import tree_from_parents

        return tree_from_parents(
            parents,
            token_ids,
            num_nodes=num_nodes,
            prefix_lengths=prefix_lengths,
            max_depth=max_depth,
            stream=stream,
            backend=backend,
            validate=validate,
        )

    @classmethod
    def from_visibility(
        cls,
        visibility: Array,
        token_ids: Array,
        *,
        num_nodes: Array | None = None,
        prefix_lengths: Array | None = None,
        max_depth: int | None = None,
        stream: StreamLike = None,
        backend: str | None = None,
        validate: bool = False,
    ) -> DraftTree:
        """Make a tree of an ancestor mask, bool [B, N, N], and tokens, int32 [B, N].

        `numba_ddtree.tree_links.tree_from_visibility` describes the parameters, errors and guarantees.
        """
        from numba_ddtree.tree_links import tree_from_visibility

        return tree_from_visibility(
            visibility,
            token_ids,
            num_nodes=num_nodes,
            prefix_lengths=prefix_lengths,
            max_depth=max_depth,
            stream=stream,
            backend=backend,
            validate=validate,
        )

    def to_visibility(self, *, stream: StreamLike = None) -> Array:
        """Expand the ancestor bits to a mask, bool [B, N, N].

        `numba_ddtree.tree_links.tree_to_visibility` describes the stream and errors.
        """
        from numba_ddtree.tree_links import tree_to_visibility

        return tree_to_visibility(self, stream=stream)


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What the target accepted of a batch of trees.

    Attributes
    ----------
    accepted_indices : int32 [B, L + 1]
        Slots of the accepted path, root first, padded with -1; L is the tree's `max_depth`.
    accept_length : int32 [B]
        Accepted slots, with the root: the number of tokens that the round emits, namely the tokens
        of ``accepted_indices[1:]`` and then the bonus token. 0 for a request that takes no part.
    bonus_token : int32 [B]
        The target's own token after the last accepted slot; -1 for a request that takes no part.
    tokens : int32 [B, L + 1]
        The tokens that the round emits, padded with -1.
    finish_reason : int32 [B]
        `FinishReason` of each request; 0 where it goes on.
    """

    accepted_indices: Array
    accept_length: Array
    bonus_token: Array
    tokens: Array
    finish_reason: Array

    def arrays(self) -> dict[str, Array]:
        """Return the arrays by name, without copying."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_accepted_drafts(self) -> Array:
        """``accept_length - 1``, int32 [B]: draft tokens accepted (-1 for a request that takes no part)."""
        return self.accept_length - 1

    def to_host(self) -> AcceptResult:
        """Copy the arrays to numpy; synchronises when they are on a device."""
        return AcceptResult(**{name: to_host(name, array) for name, array in self.arrays().items()})


def arrays_of(name: str, value: Any, kind: type[DraftTree] | type[AcceptResult]) -> dict[str, Array]:
    """Return the arrays of an argument that has to be of a certain kind."""
    if not isinstance(value, kind):
        raise ArgumentError(name, type(value).__name__, f"a numba_ddtree.{kind.__name__}")
    return value.arrays()


def deepest(parents: NDArray[np.int32], num_nodes: NDArray[np.int32]) -> int:
    """Largest depth of any node in use, of parents that are known to be earlier slots."""
    depths = np.zeros(parents.shape, np.int32)
    rows = np.arange(len(parents))
    for slot in range(1, parents.shape[1]):
        used = slot < num_nodes  # padding may hold any parent
        depths[:, slot] = np.where(used, depths[rows, np.where(used, parents[:, slot], 0)] + 1, 0)
    return int(depths.max(initial=0))


def check_tree(arrays: dict[str, Any], *, max_depth: int, values: bool) -> None:
    """Check the arrays of a tree, given as views.

    Parameters
    ----------
    arrays : dict
        Views of a tree's arrays, by name.
    max_depth : int
        The tree's `max_depth`.
    values : bool
        Also check that the parents are a tree and the ancestor bits those of the parents; synchronises
        for device arrays.

    Raises
    ------
    ArgumentError
    """
    check_array("tree.parents", arrays["parents"], (np.int32,), B=None, N=None)
    for name, shape in tree_shapes(*arrays["parents"].shape).items():
        labels = zip(("B", "N", "words"), shape, strict=False)
        check_array(f"tree.{name}", arrays[name], (TREE_DTYPES[name],), **dict(labels))
    # A depth of 64 is the most that `build_tree` gives, also for a tree of fewer slots.
    check_count("tree.max_depth", max_depth, 0, max(int(arrays["parents"].shape[1]) - 1, 64))
    if values:
        parents, num_nodes = (to_host(name, arrays[name]) for name in ("parents", "num_nodes"))
        check_parents("tree.parents", parents, num_nodes)
        depth = deepest(parents, num_nodes)
        if depth > max_depth:
            raise ArgumentError("tree.max_depth", max_depth, f"at least {depth}, the depth of the tree")
        _check_bits(to_host("ancestor_bits", arrays["ancestor_bits"]), parents, num_nodes)


def _check_bits(
    ancestor_bits: NDArray[np.uint32], parents: NDArray[np.int32], num_nodes: NDArray[np.int32]
) -> None:
    """Check that each node in use sees itself and what its parent sees; the parents are a tree."""
    order = np.arange(parents.shape[1])
    used = order < num_nodes[:, None]
    has_parent = used & (order > 0)
    rows = np.arange(len(parents))[:, None]
    expected = ancestor_bits[rows, np.where(has_parent, parents, 0)]  # [B, N, words]
    expected = np.where(has_parent[..., None], expected, np.uint32(0))
    expected[:, order, order // 32] |= (1 << order % 32).astype(np.uint32)
    for index in first_where(used & (ancestor_bits != expected).any(axis=-1)):
        got = "bits that are not those of tree.parents"
        raise ArgumentError(at("tree.ancestor_bits", index), got, "the node's and its ancestors' bits")


def check_parents(name: str, parents: NDArray[np.int32], num_nodes: NDArray[np.int32]) -> None:
    """Check that slot 0 is the root and the parent of every other slot in use an earlier one."""
    slots = parents.shape[1]
    for index in first_where((num_nodes < 0) | (num_nodes > slots)):
        raise ArgumentError(at("num_nodes", index), num_nodes[index], f"a number from 0 to N = {slots}")
    order = np.arange(slots)
    used = order < num_nodes[:, None]
    is_bad = used & np.where(order == 0, parents != -1, (parents < 0) | (parents >= order))
    for index in first_where(is_bad):
        expected = "-1, as the root's" if index[1] == 0 else f"an earlier slot, from 0 to {index[1] - 1}"
        raise ArgumentError(at(name, index), parents[index], expected)
