"""Status codes of a request."""

from __future__ import annotations

from enum import IntEnum


class TreeStatus(IntEnum):
    """What became of one request of a batch.

    Attributes
    ----------
    OK
        The tree has as many nodes as the budget asks for.
    NAN
        A draft log-prob is NaN; the tree is its root.
    NO_CANDIDATE
        No candidate of the first position has a probability above zero; the tree is its root.
    EXHAUSTED
        There are fewer continuations of non-zero probability than the budget; the tree holds them all.
    FINISHED
        The request takes no part: it has no nodes, and nothing of it is read.
    INVALID
        The request's input contradicts its description (unsorted log-probs, a budget or a prefix
        length out of range, a negative token id, parents that are no tree); the tree is its root.
    """

    OK = 0
    NAN = 1
    NO_CANDIDATE = 2
    EXHAUSTED = 3
    FINISHED = 4
    INVALID = 5
