"""Status codes of a request: what became of its tree, and of its walk."""

from __future__ import annotations

from enum import IntEnum


class TreeStatus(IntEnum):
    """What became of one request of a batch.

    Attributes
    ----------
    OK
        The tree has as many nodes as the budget asks for, or as its cost is worth.
    NAN
        A draft log-prob is NaN; the tree is its root.
    NO_CANDIDATE
        No candidate of the first position has a probability above zero; the tree is its root.
    EXHAUSTED
        There are fewer continuations of non-zero probability, within the request's limits, than the
        budget; the tree holds them all.
    FINISHED
        The request takes no part: it has no nodes, and nothing of it is read.
    INVALID
        The request's input contradicts its description (unsorted log-probs, a budget, a prefix length
        or a limit out of range, a negative token id, parents that are no tree); the tree is its root.
    """

    OK = 0
    NAN = 1
    NO_CANDIDATE = 2
    EXHAUSTED = 3
    FINISHED = 4
    INVALID = 5


class FinishReason(IntEnum):
    """What a round means for one request of a batch: whether, and why, it emits no more tokens.

    Attributes
    ----------
    UNFINISHED
        The request goes on.
    STOP
        The last token emitted is a stop token. One that also fills the length counts as this.
    LENGTH
        The last token emitted fills the remaining length.
    INVALID
        The target has no token (below 0, or beyond int32) after the last accepted node.
    INACTIVE
        The request took no part: it was finished before, is padding, or has no nodes.
    """

    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    INVALID = 3
    INACTIVE = 4
