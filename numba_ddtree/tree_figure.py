"""The drawing of a tree in a figure: which box goes where, and what it looks like.

The root is on the left. Each depth has a column as wide as its widest token, and each leaf a row, which its
ancestors share as long as it is their first descendant; so nothing overlaps. `numba_ddtree.plot` has the
public functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import FancyBboxPatch
from matplotlib.textpath import TextPath

from numba_ddtree.draw import DrawnNode

FONT_SIZE = 8.0
POINTS_PER_INCH = 72

# Inches.
TITLE_WIDTH = 4.2
ROW_HEIGHT = 0.25
BOX_HEIGHT = 0.2
BOX_PADDING = 0.05
COLUMN_GAP = 0.32

BLUE, GREY, LIGHT_GREY = "#0072b2", "#555555", "#999999"
_DASHES, _DOTS = (0, (3, 2)), (0, (1, 2))
_BOXES: dict[str, dict[str, Any]] = {
    "accepted": {"facecolor": BLUE, "edgecolor": BLUE},
    "draft": {"facecolor": "white", "edgecolor": LIGHT_GREY},
    "bonus": {"facecolor": "white", "edgecolor": BLUE, "linestyle": _DASHES},
    "elided": {"facecolor": "white", "edgecolor": "none"},
}
_TEXTS: dict[str, dict[str, Any]] = {
    "accepted": {"color": "white", "weight": "bold"},
    "draft": {"color": "black"},
    "bonus": {"color": BLUE},
    "elided": {"color": GREY, "style": "italic"},
}
_EDGES: dict[str, dict[str, Any]] = {
    "accepted": {"color": BLUE, "linewidth": 2.5, "zorder": 2},
    "draft": {"color": LIGHT_GREY, "linewidth": 0.8, "zorder": 1},
    "bonus": {"color": BLUE, "linewidth": 1.0, "zorder": 1, "linestyle": _DASHES},
    "elided": {"color": LIGHT_GREY, "linewidth": 0.8, "zorder": 1, "linestyle": _DOTS},
}
_MEANINGS = {"accepted": "filled: accepted", "bonus": "dashed: bonus"}


@dataclass(frozen=True, slots=True)
class Box:
    """A node's box, in inches from the drawing's upper left corner."""

    node: DrawnNode
    label: str
    left: float
    width: float
    middle: float

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width


def lay_out(nodes: Sequence[DrawnNode]) -> list[Box]:
    """Place the nodes' boxes, in the nodes' order."""
    labels = _labels(nodes)
    widths = [_text_width(label, node) + 2 * BOX_PADDING for label, node in zip(labels, nodes, strict=True)]
    depths: list[int] = []
    for node in nodes:
        depths.append(depths[node.parent] + 1 if node.parent >= 0 else 0)
    columns = [0.0] * (max(depths, default=-1) + 1)
    for depth, width in zip(depths, widths, strict=True):
        columns[depth] = max(columns[depth], width)
    lefts = list(accumulate((width + COLUMN_GAP for width in columns), initial=0.0))
    return [
        Box(node, label, lefts[depth], width, (row + 0.5) * ROW_HEIGHT)
        for node, label, depth, width, row in zip(nodes, labels, depths, widths, _rows(nodes), strict=True)
    ]


def drawing_size(boxes: Sequence[Box]) -> tuple[float, float]:
    """Return the width and height of a drawing, in inches, its title's width included."""
    width = max([TITLE_WIDTH, *(box.right for box in boxes)])
    return width, max((box.middle for box in boxes), default=0.0) + ROW_HEIGHT / 2


def add_tree(axes: Axes, boxes: Sequence[Box]) -> None:
    """Draw a tree into axes of the drawing's size."""
    width, height = drawing_size(boxes)
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    kinds = {box.node.kind for box in boxes}
    notes = [meaning for kind, meaning in _MEANINGS.items() if kind in kinds] if boxes else ["no nodes"]
    axes.set_title("Draft tree of one round" + (f" ({', '.join(notes)})" if notes else ""))
    for box in boxes:
        _add_box(axes, box)
        if box.node.parent >= 0:
            _add_edge(axes, boxes[box.node.parent], box)


def _labels(nodes: Sequence[DrawnNode]) -> list[str]:
    """Return the nodes' tokens, with characters that the fonts lack as escapes."""
    known: set[int] = set()
    for family in FontProperties().get_family():
        known.update(get_font(findfont(FontProperties(family=[family]))).get_charmap())
    return ["".join(c if ord(c) in known else ascii(c)[1:-1] for c in node.token) for node in nodes]


def _text_width(label: str, node: DrawnNode) -> float:
    style: Mapping[str, Any] = _TEXTS[node.kind]
    font = FontProperties(size=FONT_SIZE, weight=style.get("weight"), style=style.get("style"))
    return float(TextPath((0, 0), label, prop=font).get_extents().x1) / POINTS_PER_INCH


def _rows(nodes: Sequence[DrawnNode]) -> list[int]:
    """Return each node's row: a first child's is its parent's, any other's the next that is free."""
    children: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].append(place)
    rows = [0] * len(nodes)
    last_row = 0
    unplaced = [0] if nodes else []
    while unplaced:  # depth first, so that a subtree's rows follow one another
        place = unplaced.pop()
        parent = nodes[place].parent
        if parent >= 0 and place != children[parent][0]:
            last_row += 1
        rows[place] = last_row
        unplaced += reversed(children[place])
    return rows


def _add_box(axes: Axes, box: Box) -> None:
    kind = box.node.kind
    corner = (box.left, box.middle - BOX_HEIGHT / 2)
    shape = f"round,pad=0,rounding_size={BOX_PADDING}"
    patch = FancyBboxPatch(
        corner, box.width, BOX_HEIGHT, boxstyle=shape, clip_on=False, zorder=3, **_BOXES[kind]
    )
    axes.add_patch(patch)
    style: dict[str, Any] = {"fontsize": FONT_SIZE, "verticalalignment": "center_baseline"}
    axes.text(box.left + BOX_PADDING, box.middle, box.label, zorder=4, **style, **_TEXTS[kind])


def _add_edge(axes: Axes, parent: Box, child: Box) -> None:
    """Draw a line out of the parent, along the gap between their columns, and into the child."""
    bend = child.left - COLUMN_GAP / 2
    along = [parent.right, bend, bend, child.left]
    across = [parent.middle, parent.middle, child.middle, child.middle]
    axes.plot(along, across, clip_on=False, **_EDGES[child.node.kind])
