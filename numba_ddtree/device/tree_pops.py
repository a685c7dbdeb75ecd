"""Best-first growth of a tree, one node at a time: right for any sorted log-probs.

The heap of the original (DDTree, arXiv 2604.12989) becomes a table: every node of the tree offers
its best child that is not yet in the tree, and the best offer becomes the next node. That node makes
an offer of its own, and its parent offers the next sibling, so that each step changes two places of
the table and none is ever freed. One warp finds the best of up to 1024 offers in two steps: lane g
knows the best of offers 32 g to 32 g + 31, and only the groups of the two changed places are looked
at again.

Offers whose scores are equal to the bit are told apart by their paths' bit strings
(`numba_ddtree.device.bits.rank_code`). Those are equal only for a path and its extensions by rank 0,
of which the shorter one has left the table before the longer one is offered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numba_ddtree.cuda_target import cuda, device_routine, int32, int64, uint32
from numba_ddtree.device.bits import (
    PATH_WORDS,
    order_key,
    placed_code,
    rank_code,
    rank_code_length,
)
from numba_ddtree.device.draft_rows import log_prob
from numba_ddtree.device.warp import LANES, warp_ballot, warp_broadcast, warp_max, warp_sync

NO_OFFER = np.int64(-(2**63))  # below the key of every finite score
SEED_OFFER = np.int64(2**63 - 1)  # above it
OFFER_WORDS = 8  # of shared memory a slot, beside the tree's own


class Offers(NamedTuple):
    """The table of offers, one a slot, all in shared memory.

    Attributes
    ----------
    key : int64 [N]
        `order_key` of the offered child's score, `SEED_OFFER` or `NO_OFFER`.
    rank : int32 [N]
        Rank of the offered child.
    last_child : int32 [N]
    path : uint32 [PATH_WORDS * N]
        Bit string of the slot's own path, word by word.
    path_bits : int32 [N]
    stride : uint32
        N.
    """

    key: Any
    rank: Any
    last_child: Any
    path: Any
    path_bits: Any
    stride: Any


@device_routine
def offer_word(offers: Any, slot: Any, word: Any) -> Any:
    """Word of the bit string of an offer: its parent's path, then the offered rank."""
    path = offers.path[uint32(word * offers.stride + slot)]
    return uint32(path | placed_code(rank_code(offers.rank[slot]), offers.path_bits[slot], word))


@device_routine
def offer_precedes(offers: Any, left: Any, right: Any) -> Any:
    """Whether of two offers of equal score the left one's tuple of ranks is the smaller."""
    for word in range(PATH_WORDS):
        left_word = offer_word(offers, left, word)
        right_word = offer_word(offers, right, word)
        if left_word != right_word:
            return left_word < right_word
    return False


@device_routine
def best_lane(offers: Any, key: Any, slot: Any) -> Any:
    """Lane whose offer comes first; the whole warp takes part. Any lane, where none has an offer."""
    # The top bit is flipped so that unsigned comparison orders signed keys.
    high = uint32(uint32(key >> int64(32)) ^ uint32(0x80000000))
    best = warp_max(high)
    tied = high == best
    lanes = warp_ballot(tied)
    if best != uint32(0) and cuda.popc(lanes) > 1:
        low = uint32(key & int64(0xFFFFFFFF)) if tied else uint32(0)
        best = warp_max(low)
        tied = tied and low == best
        lanes = warp_ballot(tied)
        if cuda.popc(lanes) > 1:
            for word in range(PATH_WORDS):
                # Inverted, so that the smallest path is the maximum and lanes out of the race are 0.
                path = uint32(0)
                if tied:
                    path = uint32(~offer_word(offers, slot, word))
                best = warp_max(path)
                tied = tied and path == best
            lanes = warp_ballot(tied)
    return int32(cuda.ffs(int32(lanes)) - 1)


@device_routine
def child_key(rows: Any, score: Any, row: Any, rank: Any, is_seed: Any) -> Any:
    """Key of a node's child of a given rank, or ``NO_OFFER`` where there is no such child."""
    if row >= rows.depth or rank >= rows.width:
        return NO_OFFER
    child_score = score + log_prob(rows, row, rank)
    if not child_score >= rows.least:
        return NO_OFFER
    return SEED_OFFER if is_seed else order_key(child_score)


@device_routine
def pop_tree(rows: Any, tree: Any, offers: Any) -> Any:
    """Take the best offer until the budget or the offers run out, and return the number of nodes.

    The first warp takes part as a whole; the root is in place, and no slot has an offer.

    Parameters
    ----------
    rows : Rows
    tree : TreeTable
    offers : Offers
    """
    lane_id = cuda.threadIdx.x
    taken: Any = uint32(1)
    root_child = child_key(rows, 0.0, uint32(0), uint32(0), rows.seeds > uint32(0))
    # Every lane does the same with the chosen offer, so that none waits for another; what differs
    # is the word of the path that it writes.
    path_word = uint32(min(lane_id, PATH_WORDS - 1))
    path_start = uint32(path_word * offers.stride)
    offers.key[0] = root_child
    offers.rank[0] = 0
    offers.path_bits[0] = 0
    offers.path[path_start] = uint32(0)
    best_key = root_child if lane_id == 0 else NO_OFFER  # of the lane's group of 32 offers
    best_slot = uint32(0)
    warp_sync()
    while True:
        winner = best_lane(offers, best_key, best_slot)
        slot = uint32(warp_broadcast(int32(best_slot), winner))
        key = offers.key[slot]
        if key == NO_OFFER or taken > rows.budget:
            break
        node = taken
        depth = uint32(tree.depth[slot])
        rank = uint32(offers.rank[slot])
        path_bits = offers.path_bits[slot]
        path = offers.path[uint32(path_start + slot)]
        elder = uint32(offers.last_child[slot])
        group_slot = uint32((slot & uint32(0xFFFFFFE0)) + uint32(lane_id))
        group_key = offers.key[group_slot]
        score = tree.score[slot] + log_prob(rows, depth, rank)
        next_rank = uint32(rank + uint32(1))
        sibling = child_key(rows, tree.score[slot], depth, next_rank, False)
        # Seeds are the first nodes of all: only theirs have the index that their depth is.
        child_is_seed = node == depth + uint32(1) and node < rows.seeds
        child = child_key(rows, score, uint32(depth + uint32(1)), uint32(0), child_is_seed)
        warp_sync()  # all have read what now changes
        taken = uint32(taken + uint32(1))
        tree.score[node] = score
        tree.parent[node] = int32(slot)
        tree.depth[node] = int32(depth + uint32(1))
        tree.rank[node] = int32(rank)
        offers.rank[node] = 0
        offers.rank[slot] = int32(next_rank)
        offers.key[node] = child
        offers.key[slot] = sibling
        offers.path[uint32(path_start + node)] = uint32(
            path | placed_code(rank_code(rank), path_bits, path_word)
        )
        offers.path_bits[node] = path_bits + rank_code_length(rank)
        if rank == uint32(0):
            tree.first_child[slot] = int32(node)
        else:
            tree.next_sibling[elder] = int32(node)
        offers.last_child[slot] = int32(node)
        warp_sync()
        if group_slot == slot:
            group_key = sibling
        if group_slot == node:
            group_key = child
        winner = best_lane(offers, group_key, group_slot)
        group_best = uint32((slot & uint32(0xFFFFFFE0)) + uint32(winner))
        if lane_id == slot // uint32(LANES):
            best_slot = group_best
            best_key = offers.key[group_best]
        # The new node's group gained one offer, which was seen just now if it is the same group.
        if lane_id == node // uint32(LANES) and (
            child > best_key
            or (
                child == best_key
                and child != NO_OFFER
                and best_slot != node
                and offer_precedes(offers, node, best_slot)
            )
        ):
            best_key = child
            best_slot = node
    return taken
