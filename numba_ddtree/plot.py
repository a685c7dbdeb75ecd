"""Figures of decoding: acceptance against the tree's budget, and a draft tree.

Needs matplotlib, which the extra ``plot`` brings. Colours are told apart without colour vision too, and
what is accepted is filled, so that it shows in black and white. Characters that the fonts lack
(matplotlib's setting ``font.family``) are shown by their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

try:
    import matplotlib
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator
except ImportError as error:
    raise ImportError(
        f"figures need matplotlib ({error}); install it with the extra plot: pip install 'numba_ddtree[plot]'"
    ) from error

from numba_ddtree.arrays import check_count, check_scalar
from numba_ddtree.bundle import atomic_file
from numba_ddtree.draw import Decode, drawn_nodes
from numba_ddtree.errors import ArgumentError
from numba_ddtree.tree import AcceptResult, Array, DraftTree
from numba_ddtree.tree_figure import BLUE, FONT_SIZE, Box, add_tree, drawing_size, lay_out

MAX_NODES = 65  # of a budget of 64, with the root
MAX_BUDGET = 1 << 20

# Inches.
MARGIN = 0.25
TITLE_HEIGHT = 0.3
CURVE_SIZE = (5.2, 2.7)
TICKS_WIDTH, TICKS_HEIGHT = 0.45, 0.5  # what the curve's numbers and labels take

TOKEN_LENGTH = 12
ORANGE = "#d55e00"
_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # a token may hold dollar signs
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "savefig.dpi": 150,
    # Else each SVG has random names of its own.
    "svg.hashsalt": "numba_ddtree",
}


def plot_decode(
    acceptance: Mapping[int, float],
    chain: float,
    tree: DraftTree,
    accepted: AcceptResult | Sequence[int] | Array | None,
    decode: Decode | None,
    path: str | os.PathLike[str],
) -> None:
    """Write a figure of what decoding with draft trees gains: acceptance by budget, and one round's tree.

    The same arguments give the same file with the same release of matplotlib and the same fonts: it holds
    neither a date nor random names.

    Parameters
    ----------
    acceptance, chain
        See `plot_acceptance`.
    tree, accepted, decode
        See `plot_tree`; the first request is drawn.
    path : path-like
        The file to write, an SVG or PNG by its suffix. It is replaced once the figure is complete, and stays
        as it was if drawing fails.

    Raises
    ------
    ArgumentError
        Another suffix, or an argument that `plot_acceptance` or `plot_tree` refuses.
    BundleError
        Something is at `path` that is not a regular file.
    """
    kind = check_plot_path(path)
    with _house_style():
        boxes = _boxes(tree, 0, accepted, decode, MAX_NODES)
        (curve_width, curve_height), (tree_width, tree_height) = CURVE_SIZE, drawing_size(boxes)
        if tree_height > tree_width:  # side by side
            offset = curve_width + 2 * MARGIN
            width, height = offset + tree_width, max(curve_height, tree_height)
            curve_bottom, tree_left, tree_bottom = height - curve_height, offset, height - tree_height
        else:
            offset = tree_height + TITLE_HEIGHT + MARGIN
            width, height = max(curve_width, tree_width), offset + curve_height
            curve_bottom, tree_left, tree_bottom = offset, 0.0, 0.0
        figure = _make_figure(width, height)
        _add_curve(figure, acceptance, chain, bottom=curve_bottom)
        add_tree(_add_axes(figure, tree_left, tree_bottom, tree_width, tree_height), boxes)
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        with atomic_file(path) as file:
            figure.savefig(file, format=kind, metadata=metadata)


def plot_acceptance(acceptance: Mapping[int, float], chain: float) -> Figure:
    """Draw the mean acceptance length against the node budget, in numbers too where there is room.

    Parameters
    ----------
    acceptance : mapping of int to float
        From a budget of nodes, from 1, to the mean acceptance length there: the tokens that a round emits,
        at least 1, which is plain decoding.
    chain : float
        The mean acceptance length of the same drafter's chain.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ArgumentError
        No budget, or a value that is no finite number.
    """
    with _house_style():
        figure = _make_figure(*CURVE_SIZE)
        _add_curve(figure, acceptance, chain)
    return figure


def plot_tree(
    tree: DraftTree,
    *,
    request: int = 0,
    accepted: AcceptResult | Sequence[int] | Array | None = None,
    decode: Decode | None = None,
    max_nodes: int | None = MAX_NODES,
) -> Figure:
    """Draw one request's draft tree, the root on the left and each first child on its parent's row.

    So the most probable continuations read along the rows. Device arrays are copied to the host, which
    waits for everything that their device has to do.

    Parameters
    ----------
    tree, request, accepted, decode, max_nodes
        See `numba_ddtree.draw.draw_tree`. Tokens of more than 12 characters are cut. Past some 65 nodes a
        figure is hard to read; None shows them all.

    Returns
    -------
    matplotlib.figure.Figure
        As large as the tree needs.

    Raises
    ------
    ArgumentError
        As `draw_tree` does.
    """
    with _house_style():
        boxes = _boxes(tree, request, accepted, decode, max_nodes)
        size = drawing_size(boxes)
        figure = _make_figure(*size)
        add_tree(_add_axes(figure, 0, 0, *size), boxes)
    return figure


def check_plot_path(path: str | os.PathLike[str]) -> Literal["svg", "png"]:
    """Return the format that a figure's file has by its suffix.

    Raises
    ------
    ArgumentError
        The suffix is neither .svg nor .png, in whatever case.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        return "svg"
    if suffix == ".png":
        return "png"
    raise ArgumentError("path", os.fspath(path), "a file name that ends in .svg or .png")


@contextmanager
def _house_style() -> Iterator[None]:
    """Draw alike everywhere, in the caller's font."""
    font: dict[str, Any] = {k: v for k, v in matplotlib.rcParams.items() if k.startswith("font.")}
    with style.context([font, _STYLE], after_reset=True):
        yield


def _make_figure(width: float, height: float) -> Figure:
    """Make a figure for drawings of this size, in inches, which has margins and titles beside."""
    return Figure(figsize=(width + 2 * MARGIN, height + TITLE_HEIGHT + 2 * MARGIN))


def _add_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes at a place given in inches from the margins."""
    full_width, full_height = figure.get_size_inches()
    corner = (MARGIN + left) / full_width, (MARGIN + bottom) / full_height
    return figure.add_axes((*corner, width / full_width, height / full_height))


def _add_curve(figure: Figure, acceptance: Mapping[int, float], chain: float, *, bottom: float = 0.0) -> None:
    """Add the acceptance curve, so many inches above the lower margin."""
    if not acceptance:
        raise ArgumentError("acceptance", "no budget", "the mean acceptance length for one budget or more")
    budgets = sorted(check_count("acceptance, budget", budget, 1, MAX_BUDGET) for budget in acceptance)
    lengths = [check_scalar(f"acceptance[{budget}]", acceptance[budget]) for budget in budgets]
    chain = check_scalar("chain", chain)
    width, height = CURVE_SIZE
    axes = _add_axes(figure, TICKS_WIDTH, bottom + TICKS_HEIGHT, width - TICKS_WIDTH, height - TICKS_HEIGHT)
    axes.set_xscale("log", base=2)
    margin = max((budgets[-1] / budgets[0]) ** 0.1, 1.5)  # as a factor; a number takes about as much room
    axes.set_xlim(budgets[0] / margin, budgets[-1] * margin)
    labelled = _spaced(budgets, margin)
    axes.set_xticks(labelled, [str(budget) for budget in labelled])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = min(1.0, chain, *lengths), max(chain, *lengths)
    axes.set_ylim(low, high + 0.15 * (high - low or 1))  # room for the number over the highest point
    axes.axhline(chain, color=ORANGE, linestyle="--", label=f"chain: {chain:.2f}", zorder=1)
    axes.plot(budgets, lengths, color=BLUE, marker="o", label="draft tree", zorder=2)
    for budget in labelled:
        axes.annotate(
            f"{acceptance[budget]:.2f}",
            (budget, acceptance[budget]),
            xytext=(-3, 4),  # where a rising curve does not pass
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=FONT_SIZE,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )
    axes.set_xlabel("node budget")
    axes.set_ylabel("tokens a round")
    axes.set_title("Mean acceptance length")
    # Over the axes, where no curve can pass.
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def _spaced(budgets: Sequence[int], factor: float) -> list[int]:
    """Return those of the rising budgets that are at least a factor above the last one returned."""
    chosen = [budgets[0]]
    for budget in budgets[1:]:
        if budget >= factor * chosen[-1]:
            chosen.append(budget)
    return chosen


def _boxes(
    tree: DraftTree,
    request: int,
    accepted: AcceptResult | Sequence[int] | Array | None,
    decode: Decode | None,
    max_nodes: int | None,
) -> list[Box]:
    return lay_out(
        drawn_nodes(
            tree,
            request=request,
            accepted=accepted,
            decode=decode,
            max_nodes=max_nodes,
            token_length=TOKEN_LENGTH,
        )
    )
