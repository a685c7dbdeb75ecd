"""Figures: nothing overlaps, files are whole or left alone, and the same call gives the same file."""

# ruff: noqa: E402
# Without matplotlib, its imports and those of numba_ddtree.plot would fail before the skip.

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib", reason="the extra plot is not installed")

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text
from matplotlib.transforms import Bbox

import numba_ddtree
from inputs import TREE_KINDS, build, link, make_log_probs, make_parents, make_target_tokens, make_token_ids
from numba_ddtree import AcceptResult, ArgumentError, BundleError, DraftTree
from numba_ddtree.plot import check_plot_path, plot_acceptance, plot_decode, plot_tree

ACCEPTANCE = {64: 4.7, 1: 1.8, 4: 2.9, 16: 3.9, 256: 5.2}
CHAIN = 3.05
# Wide, narrow, mathematical, unprintable and missing in the font.
TOKENS = [
    " the",
    "internationalization",
    "$x_1$",
    "\n",
    b"\xff\xfe",
    "猫",
    "WWWWWWWWWWWW",
    ",",
    "\\",
    "^{}%&#",
]


def decode(token_id: int) -> str | bytes:
    return TOKENS[token_id % len(TOKENS)]


def drafted(rng: np.random.Generator, budget: int = 64) -> tuple[DraftTree, AcceptResult]:
    log_probs = make_log_probs(rng, "realistic", 2, 7, 8)
    tree = build(log_probs, make_token_ids(rng, 2, 7, 8), budget)
    return tree, numba_ddtree.accept_tree(tree, make_target_tokens(rng, tree, 1.0), backend="numpy")


def extents(figure: Figure, artists: list[Any]) -> list[Bbox]:
    """Where artists are in the figure, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [artist.get_tightbbox(canvas.get_renderer()) for artist in artists]


def title_of(axes: Axes) -> Text:
    (title,) = axes.findobj(
        lambda artist: isinstance(artist, Text) and artist.get_text() == axes.get_title("left")
    )
    return title


def assert_apart(boxes: list[Bbox]) -> None:
    for place, box in enumerate(boxes):
        for other in boxes[:place]:
            assert not box.overlaps(other), (box, other)


def assert_inside(figure: Figure, boxes: list[Bbox]) -> None:
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height


@pytest.mark.parametrize("kind", TREE_KINDS)
@pytest.mark.parametrize("N", [1, 2, 65, 70])
def test_boxes_of_a_tree_hold_their_tokens_and_lie_apart(rng: np.random.Generator, kind: str, N: int) -> None:
    tree = link(make_parents(rng, kind, N)[None], rng.integers(0, 99, (1, N)).astype(np.int32))
    result = numba_ddtree.accept_tree(tree, make_target_tokens(rng, tree), backend="numpy")
    figure = plot_tree(tree, accepted=result, decode=decode)
    (axes,) = figure.axes
    boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    found = extents(figure, [*boxes, *axes.texts, title_of(axes)])
    box_extents, text_extents = found[: len(boxes)], found[len(boxes) : -1]
    assert len(boxes) >= min(N, 65)
    assert_apart(box_extents)
    assert_inside(figure, found)
    for box, text in zip(box_extents, text_extents, strict=True):
        assert box.x0 <= text.x0
        assert text.x1 <= box.x1 + 1  # a pixel of rounding
        assert box.y0 <= text.y0
        assert text.y1 <= box.y1


def test_the_accepted_path_is_filled_and_its_edges_are_bold(rng: np.random.Generator) -> None:
    tree, result = drafted(rng, 30)
    figure = plot_tree(tree, request=1, accepted=result, decode=lambda token: "x")
    (axes,) = figure.axes
    white = (1.0, 1.0, 1.0, 1.0)
    filled = [patch for patch in axes.patches if patch.get_facecolor() != white]
    bold = [line for line in axes.lines if line.get_linewidth() > 2]
    dashed = [line for line in axes.lines if line.get_linewidth() == 1]
    assert len(filled) == result.accept_length[1]
    assert len(bold) == result.accept_length[1] - 1
    assert len(dashed) == (result.bonus_token[1] >= 0)
    assert "filled: accepted" in axes.get_title(loc="left")


def test_first_children_are_on_their_parents_row() -> None:
    tree = link(np.array([[-1, 0, 1, 0, 1, 3]], np.int32), np.arange(6, dtype=np.int32)[None])
    (axes,) = plot_tree(tree).axes
    rows = {text.get_text(): text.get_position()[1] for text in axes.texts}
    columns = {text.get_text(): text.get_position()[0] for text in axes.texts}
    assert rows["0"] == rows["1"] == rows["2"] < rows["4"] < rows["3"] == rows["5"]
    assert columns["0"] < columns["1"] == columns["3"] < columns["2"] == columns["4"] == columns["5"]


def test_nodes_past_the_limit_are_said_in_words() -> None:
    tree = link(np.array([[-1, 0, 0, 0]], np.int32), np.arange(4, dtype=np.int32)[None])
    (axes,) = plot_tree(tree, max_nodes=2).axes
    assert [text.get_text() for text in axes.texts] == ["0", "1", "… 2 more nodes"]
    star = link(make_parents(np.random.default_rng(0), "star", 200)[None], np.zeros((1, 200), np.int32))
    assert len(plot_tree(star).axes[0].texts) == 66
    assert len(plot_tree(star, max_nodes=None).axes[0].texts) == 200


def test_labels_are_neither_mathematics_nor_missing_glyphs() -> None:
    tree = link(np.array([[-1, 0, 1]], np.int32), np.array([[2, 5, 3]], np.int32))
    figure = plot_tree(tree, decode=decode)
    assert [text.get_text() for text in figure.axes[0].texts] == ["'$x_1$'", r"\u732b", r"'\n'"]
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)
    FigureCanvasAgg(figure).draw()  # a missing glyph would warn


def test_a_request_without_nodes() -> None:
    tree = link(np.array([[-1]], np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    (axes,) = plot_tree(tree).axes
    assert axes.get_title(loc="left") == "Draft tree of one round (no nodes)"
    assert not axes.patches


@pytest.mark.parametrize(
    "acceptance",
    [
        ACCEPTANCE,
        {8: 4.0},
        {1: 0.5, 2: 3.05},
        {1024: 1.0, 512: 60.0},
        {budget: 1 + budget / 9 for budget in range(1, 1025)},
    ],
)
def test_the_curve(acceptance: dict[int, float]) -> None:
    figure = plot_acceptance(acceptance, CHAIN)
    (axes,) = figure.axes
    chain, curve = axes.lines
    assert list(chain.get_ydata()) == [CHAIN, CHAIN]
    assert dict(zip(curve.get_xdata(), curve.get_ydata(), strict=True)) == acceptance
    assert list(curve.get_xdata()) == sorted(acceptance)
    assert axes.get_xscale() == "log"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["chain: 3.05", "draft tree"]
    numbers = {text.xy[0]: text.get_text() for text in axes.texts}
    assert all(text == f"{acceptance[budget]:.2f}" for budget, text in numbers.items())
    ticks = [int(label.get_text()) for label in axes.get_xticklabels()]
    assert ticks == list(numbers)
    assert len(ticks) == len(acceptance) or len(acceptance) > 5
    assert_apart(extents(figure, list(axes.texts)))
    assert_apart(extents(figure, axes.get_xticklabels()))
    assert_apart(extents(figure, [title_of(axes), axes.get_legend()]))
    left_spine = extents(figure, [axes.spines["left"]])[0]
    assert_inside(figure, extents(figure, [axes]))
    assert all(box.x0 > left_spine.x1 for box in extents(figure, list(axes.texts)))
    low, high = axes.get_ylim()
    assert low <= 1
    assert low <= min(*acceptance.values(), CHAIN) <= max(*acceptance.values(), CHAIN) < high


@pytest.mark.parametrize(
    ("acceptance", "chain", "message"),
    [
        ({}, 1.0, "acceptance: got no budget"),
        ({0: 1.0}, 1.0, "acceptance, budget: got 0"),
        ({2.5: 1.0}, 1.0, "acceptance, budget: got 2.5"),
        ({4: np.nan}, 1.0, r"acceptance\[4\]: got nan"),
        ({4: None}, 1.0, r"acceptance\[4\]: got None"),
        ({4: 1.0}, np.inf, "chain: got inf"),
    ],
)
def test_bad_curves(acceptance: Any, chain: float, message: str) -> None:
    with pytest.raises(ArgumentError, match="^" + message):
        plot_acceptance(acceptance, chain)


# Files.


def write(path: Path | str, **changes: Any) -> None:
    tree, result = drafted(np.random.default_rng(1))
    arguments = {
        "acceptance": ACCEPTANCE,
        "chain": CHAIN,
        "tree": tree,
        "accepted": result.accepted_indices[0].tolist(),
        "decode": decode,
    }
    plot_decode(**(arguments | changes), path=path)


@pytest.mark.parametrize("name", ["figure.svg", "figure.png", "figure.PNG"])
def test_the_same_call_writes_the_same_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("what was there")
    write(path)
    content = path.read_bytes()
    assert content.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")
    assert not re.search(rb"<dc:date>|tIME", content)
    write(str(path))
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", ["star", "chain"])
def test_the_drawings_of_a_figure_lie_apart(
    kind: str, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    tree = link(make_parents(rng, kind, 20)[None], np.zeros((1, 20), np.int32))
    write(tmp_path / "figure.svg", tree=tree, accepted=[0])
    curve, drawn = figures[0].axes
    of_both = extents(figures[0], [curve, drawn])
    assert_inside(figures[0], of_both)
    assert_apart(of_both)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"acceptance": {}}, ArgumentError),
        ({"accepted": [3]}, ArgumentError),
        ({"decode": {}.__getitem__}, KeyError),
    ],
)
def test_a_drawing_that_fails_leaves_the_file(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    path = tmp_path / "figure.svg"
    path.write_text("what was there")
    with pytest.raises(error):
        write(path, **changes)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_breaks_off_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(figure: Figure, file: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    path = tmp_path / "figure.png"
    path.write_text("what was there")
    monkeypatch.setattr(Figure, "savefig", break_off)
    with pytest.raises(OSError, match="no space left"):
        write(path)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "figure.svg"
    folder.mkdir()
    with pytest.raises(BundleError, match="not a regular file"):
        write(folder)


@pytest.mark.parametrize("path", ["figure", "figure.pdf", "svg", ".png", Path("figure.svg.gz")])
def test_other_suffixes_are_refused_first(path: Any) -> None:
    expected = "expected a file name that ends in .svg or .png"
    with pytest.raises(ArgumentError, match=expected):
        check_plot_path(path)
    with pytest.raises(ArgumentError, match=expected):
        plot_decode({}, 0.0, None, None, None, path)  # type: ignore[arg-type]


def test_formats_by_suffix() -> None:
    assert check_plot_path("a.svg") == check_plot_path(Path("b/a.b.SVG")) == "svg"
    assert check_plot_path("a.Png") == "png"


def test_the_callers_settings_are_kept(rng: np.random.Generator, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"lines.linewidth": 77, "figure.facecolor": "black", "text.usetex": True}):
        write(tmp_path / "styled.svg")
        assert matplotlib.rcParams["lines.linewidth"] == 77
    write(tmp_path / "plain.svg")
    assert (tmp_path / "styled.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_extra_is_named() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import numba_ddtree.plot"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'numba_ddtree[plot]'" in result.stderr.splitlines()[-1]
