"""A draft tree's arrays, derived from its parents or from its visibility mask."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.status import TreeStatus

WORD_BITS = 32


class TreeArrays(NamedTuple):
    """The arrays of `numba_ddtree.DraftTree`, in its order."""

    token_ids: NDArray[np.int32]  # [B, N]
    parents: NDArray[np.int32]  # [B, N]
    depths: NDArray[np.int32]  # [B, N]
    positions: NDArray[np.int32]  # [B, N]
    first_child: NDArray[np.int32]  # [B, N]
    next_sibling: NDArray[np.int32]  # [B, N]
    ancestor_bits: NDArray[np.uint32]  # [B, N, ceil(N / 32)]
    num_nodes: NDArray[np.int32]  # [B]
    status: NDArray[np.int32]  # [B]


def padding(batch: int, slots: int, prefix_lengths: NDArray[np.int32]) -> TreeArrays:
    """Return trees of no nodes: every slot is padding.

    Parameters
    ----------
    batch, slots : int
        B and N.
    prefix_lengths : int32 [B]
        The position that padding slots are given; a negative length counts as 0.
    """
    words = -(-slots // WORD_BITS)
    positions = np.repeat(np.maximum(prefix_lengths, 0)[:, None], slots, axis=1)  # [B, N]
    return TreeArrays(
        token_ids=np.zeros((batch, slots), np.int32),
        parents=np.full((batch, slots), -1, np.int32),
        depths=np.zeros((batch, slots), np.int32),
        positions=positions.astype(np.int32),
        first_child=np.full((batch, slots), -1, np.int32),
        next_sibling=np.full((batch, slots), -1, np.int32),
        ancestor_bits=np.zeros((batch, slots, words), np.uint32),
        num_nodes=np.zeros(batch, np.int32),
        status=np.full(batch, TreeStatus.FINISHED, np.int32),
    )


def add_node(tree: TreeArrays, request: int, node: int, parent: int, token: int) -> None:
    """Write slot `node` of a request as a child of `parent` (-1: the root), and link it."""
    tree.token_ids[request, node] = token
    tree.parents[request, node] = parent
    tree.num_nodes[request] = node + 1
    if parent >= 0:
        tree.depths[request, node] = tree.depths[request, parent] + 1
        tree.positions[request, node] = tree.positions[request, parent] + 1
        tree.ancestor_bits[request, node] = tree.ancestor_bits[request, parent]
        append_child(tree, request, parent, node)
    tree.ancestor_bits[request, node, node // WORD_BITS] |= np.uint32(1 << node % WORD_BITS)


def append_child(tree: TreeArrays, request: int, parent: int, node: int) -> None:
    """Put `node` at the end of the parent's list of children."""
    first_child, next_sibling = tree.first_child[request], tree.next_sibling[request]
    if first_child[parent] < 0:
        first_child[parent] = node
        return
    last = first_child[parent]
    while next_sibling[last] >= 0:
        last = next_sibling[last]
    next_sibling[last] = node


def links_from_parents(
    parents: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    num_nodes: NDArray[np.int32],
    prefix_lengths: NDArray[np.int32],
    max_depth: int,
) -> TreeArrays:
    """Derive depths, positions, links and ancestor bits from parents.

    A request whose parents are no tree (slot 0 must have -1, every other an earlier slot), whose
    `num_nodes` is not in 0 ... N, whose prefix length is negative, or that is deeper than
    `max_depth`, becomes its root alone, with status ``INVALID``. A request of 0 nodes is padding,
    with status ``FINISHED``.

    Parameters
    ----------
    parents, token_ids : int32 [B, N]
    num_nodes, prefix_lengths : int32 [B]
    max_depth : int
        The largest depth allowed.
    """
    batch, slots = parents.shape
    tree = padding(batch, slots, prefix_lengths)
    for request in range(batch):
        count = int(num_nodes[request])
        if count == 0:
            continue
        if not 0 < count <= slots or prefix_lengths[request] < 0 or not is_tree(parents[request, :count]):
            add_root_alone(tree, request, int(token_ids[request, 0]))
            continue
        for node in range(count):
            add_node(tree, request, node, int(parents[request, node]), int(token_ids[request, node]))
        tree.status[request] = TreeStatus.OK
        if tree.depths[request].max() > max_depth:
            clear(tree, request)
            add_root_alone(tree, request, int(token_ids[request, 0]))
    return tree


def is_tree(parents: NDArray[np.int32]) -> bool:
    """Whether slot 0 is the only root and every other slot's parent is an earlier slot."""
    return bool(parents[0] == -1) and all(0 <= parents[i] < i for i in range(1, len(parents)))


def add_root_alone(tree: TreeArrays, request: int, token: int) -> None:
    """Make a request's tree its root, with status ``INVALID``."""
    add_node(tree, request, 0, -1, token)
    tree.status[request] = TreeStatus.INVALID


def clear(tree: TreeArrays, request: int) -> None:
    """Turn every slot of a request back into padding."""
    prefix = tree.positions[request, :1].copy()
    for array, blank in zip(tree, padding(1, tree.parents.shape[1], prefix), strict=True):
        array[request] = blank[0]


def parents_from_visibility(visibility: NDArray[np.bool_], num_nodes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Recover parents from a mask in which each node sees itself and its ancestors.

    The parent of a node is the latest earlier slot that it sees. A request whose mask is not what
    its parents imply gets a -2 in slot 0, which is no tree.

    Parameters
    ----------
    visibility : bool [B, N, N]
        ``visibility[b, i, j]``: node i sees node j.
    num_nodes : int32 [B]

    Returns
    -------
    parents : int32 [B, N]
    """
    batch, slots, _ = visibility.shape
    parents = np.full((batch, slots), -1, np.int32)
    for request in range(batch):
        count = min(max(int(num_nodes[request]), 0), slots)
        for node in range(count):
            row = visibility[request, node, :count]
            seen = np.flatnonzero(row[:node])
            parent = int(seen[-1]) if len(seen) else -1
            parents[request, node] = parent
            implied = visibility[request, parent, :count].copy() if parent >= 0 else np.zeros(count, bool)
            implied[node] = True
            if not np.array_equal(row, implied):
                parents[request, 0] = -2
                break
    return parents


def visibility_from_bits(ancestor_bits: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Expand ancestor bits [B, N, ceil(N / 32)] to a mask, bool [B, N, N]."""
    slots = ancestor_bits.shape[1]
    bits = np.unpackbits(ancestor_bits.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :slots].astype(bool)
