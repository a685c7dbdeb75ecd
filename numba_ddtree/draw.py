"""Draft trees drawn as text for the terminal, and as Graphviz DOT.

`drawn_nodes` settles what is shown and what it says; text, DOT and figures (`numba_ddtree.plot`) differ
in how alone.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from numba_ddtree.arrays import TOKEN_DTYPES, at, check_array, check_count, check_indices, gather, to_host
from numba_ddtree.devices import device_context
from numba_ddtree.errors import ArgumentError
from numba_ddtree.tree import AcceptResult, Array, DraftTree, arrays_of, check_tree

Decode: TypeAlias = Callable[[int], str | bytes]
"""From a token id to its text; bytes where a token need not be UTF-8."""

TOKEN_LENGTH = 24
MAX_WIDTH = 1 << 16  # columns, which the deepest chain of the longest labels stays below
_NUMBERS = (np.int32, np.int64)


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """One line or box of a drawing.

    Attributes
    ----------
    kind : {"draft", "accepted", "bonus", "elided"}
        A slot of the tree that the target did not accept (or was not said to), one that it did, the bonus
        token, or words in the place of slots that are not shown.
    token : str
        The token as it is shown, or those words.
    parent : int
        Place of the parent in the list of nodes, where it comes earlier; -1 at the root.
    slot : int or None
        Of the tree; None for the bonus token and elided slots.
    probability : float or None
        Of the path from the root, as the drafter gave it.
    """

    kind: Literal["draft", "accepted", "bonus", "elided"]
    token: str
    parent: int
    slot: int | None = None
    probability: float | None = None

    @property
    def caption(self) -> str:
        """The token with what is known of it."""
        if self.kind == "bonus":
            return f"{self.token}, the bonus token"
        if self.slot is None:
            return self.token
        return f"{self.token} [{self.slot}]" + _probability_text(self.probability)


def draw_tree(
    tree: DraftTree,
    *,
    request: int = 0,
    decode: Decode | None = None,
    accepted: AcceptResult | Sequence[int] | Array | None = None,
    draft_log_probs: Array | None = None,
    draft_token_ids: Array | None = None,
    format: Literal["text", "dot"] = "text",
    max_nodes: int | None = None,
) -> str:
    r"""Draw one request's draft tree.

    Each node is shown as ``token [slot]: probability of its path``. A token of letters and digits stands
    as it is; any other is quoted and escaped as Python would write it (``' the'``, ``'\n'``, ``b'\xff'``),
    and one longer than 24 characters is cut. Accepted nodes are marked: by an asterisk in text, filled and
    with bold edges in DOT. Deterministic. Device arrays are copied to the host, which waits for everything
    that their device has to do; host arrays are only read.

    Parameters
    ----------
    tree : DraftTree
        B requests of N slots.
    request : int
        Which of them, from 0.
    decode : callable, optional
        From a token id, an int, to its text, str or bytes; called for the nodes shown. By default the ids
        are shown.
    accepted : AcceptResult or int32 or int64 [up to L + 1], optional
        What the target accepted: the result for the batch, whose bonus token is then drawn too, or one
        request's slots, root first, -1 after the last.
    draft_log_probs : float32 [B, L, K], optional
    draft_token_ids : int32 or int64 [B, L, K], optional
        What the tree was built from (see `build_tree`), for the probabilities: those of a path multiply.
        Of equal candidates of one position the first counts for the first such child, and so on; nodes that
        are no candidates are shown without a probability.
    format : {"text", "dot"}
        Lines for the terminal, without colour, or a graph for Graphviz, to be written as UTF-8.
    max_nodes : int, optional
        Show so many slots: the accepted path, then the first ones, which are the most probable where
        `build_tree` made the tree. How many more there are is said below their nearest ancestor.

    Returns
    -------
    str
        Lines, without a line break after the last.

    Raises
    ------
    ArgumentError
        Wrong type, shape, dtype or value of an argument: also parents that are no tree, an accepted path
        that is none of the tree, and a `decode` that gives neither str nor bytes.

    Examples
    --------
    >>> print(draw_tree(tree, decode=words.get, accepted=result))  # doctest: +SKIP
    cat [0] *
    ├── sat [1] *
    │   ├── on [2]
    │   └── down, the bonus token
    └── ran [3]
    """
    if format not in ("text", "dot"):
        raise ArgumentError("format", repr(format), "'text' or 'dot'")
    nodes = drawn_nodes(
        tree,
        request=request,
        decode=decode,
        accepted=accepted,
        draft_log_probs=draft_log_probs,
        draft_token_ids=draft_token_ids,
        max_nodes=max_nodes,
    )
    return _text(nodes) if format == "text" else _dot(nodes)


def drawn_nodes(
    tree: DraftTree,
    *,
    request: int = 0,
    decode: Decode | None = None,
    accepted: AcceptResult | Sequence[int] | Array | None = None,
    draft_log_probs: Array | None = None,
    draft_token_ids: Array | None = None,
    max_nodes: int | None = None,
    token_length: int = TOKEN_LENGTH,
) -> list[DrawnNode]:
    """List what a drawing shows, parents first and siblings in order; see `draw_tree`.

    Parameters
    ----------
    token_length : int
        Longest token shown whole, in characters, from 10: one escape has to fit.
    """
    if decode is not None and not callable(decode):
        raise ArgumentError("decode", type(decode).__name__, "a function from a token id to str or bytes")
    arrays = _host_copies(**arrays_of("tree", tree, DraftTree))
    check_tree(arrays, max_depth=tree.max_depth, values=True)
    batch, slots = arrays["parents"].shape
    request = check_count("request", request, 0, batch - 1)
    limit = slots if max_nodes is None else check_count("max_nodes", max_nodes, 1, np.iinfo(np.int32).max)
    count = int(arrays["num_nodes"][request])
    parents = arrays["parents"][request, :count].tolist()
    token_ids = arrays["token_ids"][request, :count].tolist()
    path, bonus_token = _accepted_path(accepted, request, batch, parents)
    probabilities = _probabilities(draft_log_probs, draft_token_ids, request, batch, parents, token_ids)

    def shown(token_id: int) -> str:
        return _shown_token(token_id, decode, token_length)

    nodes: list[DrawnNode] = []
    place_of = {-1: -1}
    for slot in sorted(islice(chain(path, sorted(set(range(count)) - set(path))), limit)):
        place_of[slot] = len(nodes)
        kind: Literal["accepted", "draft"] = "accepted" if slot in path else "draft"
        parent = place_of[parents[slot]]
        nodes.append(DrawnNode(kind, shown(token_ids[slot]), parent, slot, probabilities[slot]))
    for parent_slot, number in _hidden_below(parents, place_of).items():
        words = f"… {number} more node" + ("s" if number > 1 else "")
        nodes.append(DrawnNode("elided", words, place_of[parent_slot]))
    if bonus_token is not None and path[-1] in place_of:
        nodes.append(DrawnNode("bonus", shown(bonus_token), place_of[path[-1]]))
    return nodes


def _host_copies(**arrays: Array) -> dict[str, NDArray[Any]]:
    placement, views = gather(**arrays)
    if not placement.on_host:
        from numba_ddtree.cuda_target import cuda

        # The arrays may be due on any stream, and copies wait for none but the default one.
        with device_context(placement.device_id):
            cuda.synchronize()
    return {name: to_host(name, view) for name, view in views.items()}


def _accepted_path(
    accepted: AcceptResult | Sequence[int] | Array | None, request: int, batch: int, parents: list[int]
) -> tuple[list[int], int | None]:
    """Return the accepted slots, root first, and the bonus token if there is one and it is known."""
    bonus_token = None
    if accepted is None:
        return [], None
    if isinstance(accepted, AcceptResult):
        arrays = _host_copies(**accepted.arrays())
        check_array("accepted.accepted_indices", arrays["accepted_indices"], _NUMBERS, B=batch, length=None)
        for name in ("accept_length", "bonus_token"):
            check_array(f"accepted.{name}", arrays[name], _NUMBERS, B=batch)
        indices = arrays["accepted_indices"][request]
        name = at("accepted.accept_length", (request,))
        length = check_count(name, arrays["accept_length"][request], 0, len(indices))
        path = indices[:length].tolist()
        if path and arrays["bonus_token"][request] >= 0:
            bonus_token = int(arrays["bonus_token"][request])
    else:
        indices = _host_copies(accepted=accepted)["accepted"]
        path = check_indices("accepted", indices, length=None).tolist() if indices.size else []
        while path and path[-1] == -1:
            path.pop()
    for place, slot in enumerate(path):
        before = path[place - 1] if place else -1
        if not (0 <= slot < len(parents) and parents[slot] == before):
            expected = f"a child of slot {before}, which is accepted before it" if place else "0, the root"
            raise ArgumentError(at("accepted", (place,)), slot, expected)
    return path, bonus_token


def _probabilities(
    draft_log_probs: Array | None,
    draft_token_ids: Array | None,
    request: int,
    batch: int,
    parents: list[int],
    token_ids: list[int],
) -> list[float | None]:
    """Return the probability of each slot's path, None at the root and where the drafter gave none."""
    if draft_log_probs is None and draft_token_ids is None:
        return [None] * len(parents)
    given = {"draft_log_probs": draft_log_probs, "draft_token_ids": draft_token_ids}
    for name, array in given.items():
        if array is None:
            raise ArgumentError(name, None, "an array, since its counterpart is given")
    arrays = _host_copies(**given)
    log_probs, candidates = arrays["draft_log_probs"], arrays["draft_token_ids"]
    check_array("draft_log_probs", log_probs, (np.float32,), B=batch, L=None, K=None)
    rows, ranks = log_probs.shape[1:]
    check_array("draft_token_ids", candidates, TOKEN_DTYPES, B=batch, L=rows, K=ranks)

    scores: list[float | None] = [0.0] * len(parents)
    depths = [0] * len(parents)
    equal_siblings: Counter[tuple[int, int]] = Counter()
    for slot in range(1, len(parents)):
        parent, token_id = parents[slot], token_ids[slot]
        row = depths[parent]
        depths[slot] = row + 1
        matches = np.flatnonzero(candidates[request, row] == token_id).tolist() if row < rows else []
        place = equal_siblings[parent, token_id]
        equal_siblings[parent, token_id] += 1
        score = scores[parent]
        if score is not None and place < len(matches):
            scores[slot] = score + float(log_probs[request, row, matches[place]])
        else:
            scores[slot] = None
    with np.errstate(over="ignore"):  # inf says that the log-probs are none
        return [None, *(None if score is None else float(np.exp(score)) for score in scores[1:])]


def _hidden_below(parents: list[int], shown: dict[int, int]) -> Counter[int]:
    """Count the slots that are not shown, by the nearest ancestor that is."""
    nearest: dict[int, int] = {}
    for slot, parent in enumerate(parents):
        if slot not in shown:
            nearest[slot] = nearest.get(parent, parent)
    return Counter(nearest.values())


def _shown_token(token_id: int, decode: Decode | None, length: int) -> str:
    """Decode a token and make it safe to print: nothing in it breaks lines, moves the cursor or hides."""
    if decode is None:
        return str(token_id)
    token = decode(token_id)
    if isinstance(token, bytes):
        with suppress(UnicodeDecodeError):
            token = token.decode()
    elif not isinstance(token, str):
        raise ArgumentError("decode", f"{type(token).__name__} of token {token_id}", "str or bytes of each")
    whole, token = len(token), token[:length]
    if isinstance(token, str) and token.isalnum():
        return token if len(token) == whole else token + "…"
    quotes = len(repr(token[:0]))
    while len(repr(token)) > length + quotes:
        token = token[:-1]
    return repr(token) if len(token) == whole else repr(token) + "…"


def _probability_text(probability: float | None) -> str:
    if probability is None:
        return ""
    # Three digits say nothing of a probability that rounds to zero.
    is_small = 0 < probability < 0.0005
    return ": " + (f"{probability:.0e}" if is_small else f"{probability:.3f}".removeprefix("0"))


def _text(nodes: list[DrawnNode]) -> str:
    if not nodes:
        return "no nodes"
    branches: list[Tree] = []
    for node in nodes:
        # Text, since a plain string's square brackets would be read as markup.
        label = Text(node.caption + (" *" if node.kind == "accepted" else ""))
        branches.append(Tree(label) if node.parent < 0 else branches[node.parent].add(label))
    file = io.StringIO()
    # As if there were no terminal and no notebook, so that the environment changes nothing.
    console = Console(
        file=file,
        width=MAX_WIDTH,
        color_system=None,
        force_jupyter=False,
        legacy_windows=False,
    )
    console.print(branches[0])
    return file.getvalue().removesuffix("\n")


_DOT_NODES = {
    "draft": "",
    "accepted": ', style="rounded,filled,bold", fillcolor="#cfe3f3"',
    "bonus": ', style="rounded,dashed"',
    "elided": ", shape=plaintext",
}
_DOT_EDGES = {
    "draft": "",
    "accepted": " [penwidth=3]",
    "bonus": " [style=dashed]",
    "elided": " [style=dotted, dir=none]",
}


def _dot(nodes: list[DrawnNode]) -> str:
    names = [
        f"{node.kind}{place}" if node.slot is None else f"node{node.slot}" for place, node in enumerate(nodes)
    ]
    lines = [
        "digraph draft_tree {",
        '    graph [charset="UTF-8", rankdir=LR, ordering=out]',
        '    node [shape=box, style=rounded, fontname="Helvetica"]',
    ]
    for name, node in zip(names, nodes, strict=True):
        lines.append(f"    {name} [label={_dot_string(node.caption)}{_DOT_NODES[node.kind]}]")
        if node.parent >= 0:
            lines.append(f"    {names[node.parent]} -> {name}{_DOT_EDGES[node.kind]}")
    return "\n".join([*lines, "}"])


def _dot_string(label: str) -> str:
    # Labels know backslash sequences and, whatever their quotes, HTML's entities.
    return '"' + label.replace("\\", r"\\").replace('"', r"\"").replace("&", "&amp;") + '"'
