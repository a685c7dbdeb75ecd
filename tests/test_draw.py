"""Drawn trees: what is shown, where, and that no token, path or environment spoils it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import LIBRARIES, side_stream

import numba_ddtree
from inputs import (
    TREE_KINDS,
    build,
    link,
    make_log_probs,
    make_parent_batch,
    make_parents,
    make_target_tokens,
)
from numba_ddtree import AcceptResult, ArgumentError, DraftTree
from numba_ddtree.draw import draw_tree

WORDS = ["cat", "sat", "ran", "slept", "on", "in", "the", "a", "mat", "chair"]
LOG_PROBS = np.log([[[0.60, 0.25, 0.10], [0.70, 0.20, 0.05], [0.65, 0.30, 0.03]]]).astype(np.float32)
IDS = np.array([[[1, 2, 3], [4, 5, 6], [6, 7, 8]]])
TARGET = np.array([[1, 4, 7, 0, 0, 0, 9, 0]])

ROUND = """\
cat [0] *
├── sat [1]: .600 *
│   ├── on [2]: .420 *
│   │   ├── the [3]: .273
│   │   └── a [6]: .126 *
│   │       └── chair, the bonus token
│   └── in [7]: .120
└── ran [4]: .250
    └── on [5]: .175"""

CUT_ROUND = r"""digraph draft_tree {
    graph [charset="UTF-8", rankdir=LR, ordering=out]
    node [shape=box, style=rounded, fontname="Helvetica"]
    node0 [label="cat [0]", style="rounded,filled,bold", fillcolor="#cfe3f3"]
    node1 [label="sat [1]", style="rounded,filled,bold", fillcolor="#cfe3f3"]
    node0 -> node1 [penwidth=3]
    node2 [label="on [2]", style="rounded,filled,bold", fillcolor="#cfe3f3"]
    node1 -> node2 [penwidth=3]
    node3 [label="the [3]"]
    node2 -> node3
    node6 [label="a [6]", style="rounded,filled,bold", fillcolor="#cfe3f3"]
    node2 -> node6 [penwidth=3]
    elided5 [label="… 2 more nodes", shape=plaintext]
    node0 -> elided5 [style=dotted, dir=none]
    elided6 [label="… 1 more node", shape=plaintext]
    node1 -> elided6 [style=dotted, dir=none]
    bonus7 [label="chair, the bonus token", style="rounded,dashed"]
    node6 -> bonus7 [style=dashed]
}"""


def word_of(token_id: int) -> str:
    return WORDS[token_id]


def example() -> tuple[DraftTree, AcceptResult]:
    tree = build(LOG_PROBS, IDS, 7)
    return tree, numba_ddtree.accept_tree(tree, TARGET, backend="numpy")


def root_alone(batch: int = 1) -> DraftTree:
    return link(np.full((batch, 1), -1, np.int32), np.zeros((batch, 1), np.int32))


def parse(text: str) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """Read a drawing: its slots in order, their parents, and how many nodes are elided below which."""
    slots: list[int] = []
    parents: dict[int, int] = {}
    elided: dict[int, int] = {}
    above: list[int] = []
    for line in text.splitlines():
        guides, content = re.fullmatch(r"((?:│   |    |├── |└── )*)(.*)", line).groups()  # type: ignore[union-attr]
        depth = len(guides) // 4
        del above[depth:]
        parent = above[-1] if above else -1
        if more := re.fullmatch(r"… (\d+) more nodes?", content):
            elided[parent] = int(more[1])
            continue
        slot = int(re.search(r"\[(\d+)\]", content)[1])  # type: ignore[index]
        above.append(slot)
        slots.append(slot)
        parents[slot] = parent
    return slots, parents, elided


def test_a_round_as_text() -> None:
    tree, result = example()
    text = draw_tree(tree, decode=word_of, accepted=result, draft_log_probs=LOG_PROBS, draft_token_ids=IDS)
    assert text == ROUND


def test_a_cut_round_as_dot() -> None:
    tree, result = example()
    assert draw_tree(tree, decode=word_of, accepted=result, format="dot", max_nodes=5) == CUT_ROUND


def test_token_ids_without_a_decoder() -> None:
    tree, _ = example()
    assert draw_tree(tree, max_nodes=2) == "0 [0]\n├── 1 [1]\n│   └── … 4 more nodes\n└── … 2 more nodes"


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from(TREE_KINDS), st.integers(1, 70))
def test_every_slot_is_drawn_or_counted(seed: int, N: int, kind: str, limit: int) -> None:
    rng = np.random.default_rng(seed)
    tree = link(make_parents(rng, kind, N)[None], rng.integers(0, 3, (1, N)).astype(np.int32))
    result = numba_ddtree.accept_tree(tree, make_target_tokens(rng, tree), backend="numpy")
    path = result.accepted_indices[0, : result.accept_length[0]].tolist()
    text = draw_tree(tree, accepted=path, max_nodes=limit)
    slots, parents, elided = parse(text)

    others = [slot for slot in range(N) if slot not in path]
    assert sorted(slots) == sorted((path + others)[:limit])
    assert parents == {slot: tree.parents[0, slot] for slot in slots}
    siblings: dict[int, list[int]] = {}
    for slot in slots:
        siblings.setdefault(parents[slot], []).append(slot)
    assert all(group == sorted(group) for group in siblings.values())
    marked = [int(found) for found in re.findall(r"\[(\d+)\] \*$", text, re.MULTILINE)]
    assert marked == path[:limit]
    hidden: dict[int, int] = {}
    for slot in sorted(set(range(N)) - set(slots)):
        ancestor = tree.parents[0, slot]
        while ancestor not in slots:
            ancestor = tree.parents[0, ancestor]
        hidden[ancestor] = hidden.get(ancestor, 0) + 1
    assert elided == hidden


def test_the_request_asked_for_is_drawn(rng: np.random.Generator) -> None:
    B, N = 4, 20
    counts = np.array([N, 0, 7, 1], np.int32)
    tree = link(make_parent_batch(rng, B, N), rng.integers(0, 3, (B, N)).astype(np.int32), counts)
    result = numba_ddtree.accept_tree(tree, make_target_tokens(rng, tree), backend="numpy")
    for request in (0, 2, 3):
        one = slice(request, request + 1)
        arrays = {name: array[one] for name, array in tree.arrays().items()}
        alone = DraftTree(**arrays, max_depth=tree.max_depth)
        of_one = AcceptResult(**{name: array[one] for name, array in result.arrays().items()})
        want = draw_tree(alone, accepted=of_one)
        assert draw_tree(tree, request=request, accepted=result) == want
        assert want.count("[") == counts[request]
    for accepted in (None, result, result.accepted_indices[1]):
        assert draw_tree(tree, request=1, accepted=accepted) == "no nodes"
        assert "label" not in draw_tree(tree, request=1, accepted=accepted, format="dot")


def test_the_deepest_chain_keeps_its_lines_whole() -> None:
    parents = np.arange(-1, 1024, dtype=np.int32)[None]
    lines = draw_tree(link(parents, np.arange(1025, dtype=np.int32)[None]), decode=lambda _: "x\u6f22 " * 99)
    lines = lines.splitlines()
    assert len(lines) == 1025
    assert lines[-1].endswith("'… [1024]")
    assert len(lines[-1]) > 4 * 1024


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("cat", "cat"),
        ("7", "7"),
        ("Ünï", "Ünï"),
        ("猫", "猫"),
        ("", "''"),
        (" the", "' the'"),
        ("\n", r"'\n'"),
        (r"\n", r"'\\n'"),
        ("\r\t\0\x1b[31m", r"'\r\t\x00\x1b[31m'"),
        ("'", '"\'"'),
        ("\"'", "'\"\\''"),
        ("[bold]:smile:", "'[bold]:smile:'"),
        ("\u202eabc", r"'\u202eabc'"),
        ("\udcff", r"'\udcff'"),
        ("\u0301", "'\u0301'"),
        ("🙂", "'🙂'"),
        (b"cat", "cat"),
        ("猫".encode(), "猫"),
        (b"\xe7\x8c", r"b'\xe7\x8c'"),
        (b"\xff' \"", r"""b'\xff\' "'"""),
        ("x" * 24, "x" * 24),
        ("x" * 25, "x" * 24 + "…"),
        (" " * 25, "'" + " " * 24 + "'…"),
        ("\n" * 20, "'" + r"\n" * 12 + "'…"),
        ("x" * 22 + "\n", "'" + "x" * 22 + r"\n'"),
        ("x" * 23 + "\n", "'" + "x" * 23 + "'…"),
        (b"\xff" * 99, "b'" + r"\xff" * 6 + "'…"),
        ("\U000e0001" * 3, r"'\U000e0001\U000e0001'…"),
    ],
)
def test_tokens_are_shown_safely(token: str | bytes, shown: str) -> None:
    assert draw_tree(root_alone(), decode=lambda _: token) == f"{shown} [0]"


@settings(max_examples=300)
@given(st.text(st.characters(), max_size=40) | st.binary(max_size=40))
def test_no_token_spoils_a_drawing(token: str | bytes) -> None:
    tree = link(np.array([[-1, 0]], np.int32), np.zeros((1, 2), np.int32))
    lines = draw_tree(tree, decode=lambda _: token).split("\n")
    assert len(lines) == 2
    assert lines[1].startswith("└── ")
    assert all(line.isprintable() and len(line) < 45 and line.encode() for line in lines)
    root, child = dot_labels(draw_tree(tree, decode=lambda _: token, format="dot"))
    assert [root, child] == [lines[0], lines[1].removeprefix("└── ")]


def dot_labels(dot: str) -> list[str]:
    """Labels of nodes, as Graphviz would show them."""
    labels = re.findall(r'label="((?:[^"\\]|\\.)*)"', dot)
    # Nothing but escaped quotes and backslashes, and no entity but the ampersand's.
    assert not any(re.search(r'(?<!\\)(?:\\\\)*\\[^"\\]|&(?!amp;)', label) for label in labels)
    return [re.sub(r"\\(.)", r"\1", label).replace("&amp;", "&") for label in labels]


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz")
def test_graphviz_reads_dot() -> None:
    tree, result = example()
    dot = draw_tree(tree, decode=lambda token: f'\\N&lt;"<b>\n{token}', accepted=result, format="dot")
    drawn = subprocess.run(["dot", "-Tsvg"], input=dot, capture_output=True, encoding="utf-8", check=True)
    assert drawn.stdout.count(r"\\N&amp;lt;&quot;&lt;b&gt;\n") == 9


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "JUPYTER_COLUMNS"])
def test_the_environment_changes_nothing(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "dumb")
    test_a_round_as_text()


def test_a_notebook_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # By this name rich knows a notebook, where it would display the drawing instead of writing it.
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    test_a_round_as_text()


# Probabilities.


def probabilities(text: str) -> dict[int, str | None]:
    found = re.findall(r"\[(\d+)\](?:: (\S+))?", text)
    return {int(slot): shown or None for slot, shown in found}


def test_probabilities_multiply_along_the_path(rng: np.random.Generator) -> None:
    B, L, K = 3, 5, 6
    log_probs = make_log_probs(rng, "realistic", B, L, K)
    # Few tokens, so that a position often has the same one twice.
    ids = rng.integers(0, 4, (B, L, K))
    tree = build(log_probs, ids, 60)
    for request in range(B):
        shown = probabilities(
            draw_tree(tree, request=request, draft_log_probs=log_probs, draft_token_ids=ids)
        )
        count = int(tree.num_nodes[request])
        assert sorted(shown) == list(range(count))
        assert shown[0] is None
        # In a tree from `build_tree`, a node's rank is its place among its siblings.
        product = {0: 1.0}
        for slot in range(1, count):
            parent = int(tree.parents[request, slot])
            rank = int((tree.parents[request, 1:slot] == parent).sum())
            product[slot] = product[parent] * float(
                np.exp(log_probs[request, tree.depths[request, parent], rank])
            )
            assert float(str(shown[slot])) == pytest.approx(product[slot], rel=0.06, abs=0.00051)


def test_nodes_that_are_no_candidates_have_no_probability() -> None:
    # A foreign child, a candidate below it, the same candidate twice, and a node deeper than the rows.
    parents = np.array([[-1, 0, 1, 0, 0, 3]], np.int32)
    tree = link(parents, np.array([[0, 9, 4, 5, 5, 7]], np.int32))
    log_probs = np.log([[[0.5, 0.25]]]).astype(np.float32)
    text = draw_tree(tree, draft_log_probs=log_probs, draft_token_ids=np.array([[[5, 6]]], np.int32))
    assert probabilities(text) == {0: None, 1: None, 2: None, 3: ".500", 4: None, 5: None}


@pytest.mark.parametrize(
    ("log_prob", "shown"),
    [
        (0.0, "1.000"),
        (np.log(0.9996), "1.000"),
        (np.log(0.0005001), ".001"),
        (np.log(0.0004), "4e-04"),
        (-200.0, "1e-87"),
        (-np.inf, ".000"),
        (np.nan, "nan"),
        (np.inf, "inf"),
        (1000.0, "inf"),
    ],
)
def test_probabilities_of_any_size(log_prob: float, shown: str) -> None:
    tree = link(np.array([[-1, 0]], np.int32), np.array([[0, 5]], np.int32))
    given = {
        "draft_log_probs": np.full((1, 1, 1), log_prob, np.float32),
        "draft_token_ids": np.full((1, 1, 1), 5),
    }
    assert draw_tree(tree, **given) == f"0 [0]\n└── 5 [1]: {shown}"


# The accepted path.


@pytest.mark.parametrize(
    "accepted",
    [[0, 1, 2, 6], (0, 1, 2, 6, -1, -1), np.array([0, 1, 2, 6]), np.array([0, 1, 2, 6, -1], np.int32)],
)
def test_paths_of_several_kinds(accepted: Any) -> None:
    tree, result = example()
    want = draw_tree(tree, accepted=result)
    bonus = "\n│   │       └── 9, the bonus token"
    assert draw_tree(tree, accepted=accepted) == want.replace(bonus, "")
    assert bonus in want


@pytest.mark.parametrize("accepted", [[], (), np.array([], np.int64), [-1], np.full(4, -1, np.int32)])
def test_nothing_accepted(accepted: Any) -> None:
    tree, _ = example()
    assert draw_tree(tree, accepted=accepted) == draw_tree(tree)


def test_a_path_longer_than_the_limit_is_cut_with_its_bonus_token() -> None:
    tree, result = example()
    text = draw_tree(tree, accepted=result, max_nodes=3)
    assert text.count("*") == 3
    assert "bonus" not in text


def test_a_bonus_token_that_is_none_is_not_drawn() -> None:
    tree, result = example()
    text = draw_tree(tree, accepted=replace(result, bonus_token=np.array([-1], np.int32)))
    assert "bonus" not in text


# Bad arguments.


def bad_accept(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"accepted": replace(example()[1], **changes)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"tree": 3}, "tree: got int"),
        (lambda: {"request": 1}, "request: got 1"),
        (lambda: {"request": -1}, "request: got -1"),
        (lambda: {"request": True}, "request: got True"),
        (lambda: {"format": "html"}, "format: got 'html'; expected 'text' or 'dot'"),
        (lambda: {"max_nodes": 0}, "max_nodes: got 0"),
        (lambda: {"max_nodes": 2.5}, "max_nodes: got 2.5"),
        (lambda: {"decode": ["a"]}, "decode: got list"),
        (lambda: {"decode": lambda token: None}, "decode: got NoneType of token 0; expected str or bytes"),
        (lambda: {"decode": lambda token: 5}, "decode: got int of token 0"),
        (lambda: {"accepted": [1]}, r"accepted\[0\]: got 1; expected 0, the root"),
        (lambda: {"accepted": [0, 2]}, r"accepted\[1\]: got 2; expected a child of slot 0"),
        (lambda: {"accepted": [0, 8]}, r"accepted\[1\]: got 8"),
        (lambda: {"accepted": [0, -1, 1]}, r"accepted\[1\]: got -1"),
        (lambda: {"accepted": [0, 1, 0]}, r"accepted\[2\]: got 0"),
        (lambda: {"accepted": [0, 2**40]}, r"accepted\[1\]: got 1099511627776"),
        (lambda: {"accepted": [0.0, 1.0]}, "accepted: got float64"),
        (lambda: {"accepted": [[0, 1]]}, "accepted: got int32 of shape"),
        (lambda: {"accepted": "ab"}, "accepted: got dtype"),
        (bad_accept(accept_length=np.array([5], np.int32)), r"accepted.accept_length\[0\]: got 5"),
        (bad_accept(accept_length=np.array([-1], np.int32)), r"accepted.accept_length\[0\]: got -1"),
        (bad_accept(accept_length=np.zeros(2, np.int32)), "accepted.accept_length: got int32 of shape"),
        (bad_accept(bonus_token=np.zeros(1)), "accepted.bonus_token: got float64"),
        (bad_accept(accepted_indices=np.zeros((2, 4), np.int32)), "accepted.accepted_indices: got int32"),
        (bad_accept(accepted_indices=np.zeros((1, 4), np.int32)), r"accepted\[1\]: got 0"),
        (lambda: {"draft_log_probs": LOG_PROBS}, "draft_token_ids: got None"),
        (lambda: {"draft_token_ids": IDS}, "draft_log_probs: got None"),
        (
            lambda: {"draft_log_probs": LOG_PROBS.astype(float), "draft_token_ids": IDS},
            "draft_log_probs: got",
        ),
        (lambda: {"draft_log_probs": LOG_PROBS[0], "draft_token_ids": IDS}, "draft_log_probs: got"),
        (lambda: {"draft_log_probs": LOG_PROBS, "draft_token_ids": IDS[:, :2]}, "draft_token_ids: got"),
        (lambda: {"draft_log_probs": LOG_PROBS, "draft_token_ids": IDS * 1.0}, "draft_token_ids: got"),
    ],
)
def test_bad_arguments(make: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ArgumentError, match="^" + message):
        draw_tree(**{"tree": example()[0], **make()})


def test_parents_that_are_no_tree() -> None:
    tree, _ = example()
    tree.parents[0, 3] = 5
    with pytest.raises(ArgumentError, match=r"^tree\.parents\[0, 3\]: got 5"):
        draw_tree(tree)


def test_faults_of_the_decoder_are_its_callers() -> None:
    tree, _ = example()
    with pytest.raises(IndexError):
        draw_tree(tree, decode=["a"].__getitem__)


def test_only_what_is_shown_is_decoded() -> None:
    tree, result = example()
    asked: list[int] = []

    def decode(token: int) -> str:
        assert type(token) is int
        asked.append(token)
        return "x"

    draw_tree(tree, decode=decode, accepted=result, max_nodes=5)
    assert asked == [0, 1, 4, 6, 7, 9]


# On a device.


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", LIBRARIES)
def test_device_trees(make_library: Any) -> None:
    library = make_library()
    tree, result = example()
    given = AcceptResult(**library.put_all(**result.arrays()))
    draft = library.put_all(draft_log_probs=LOG_PROBS, draft_token_ids=IDS.astype(np.int32))
    text = draw_tree(library.put_tree(tree), decode=word_of, accepted=given, **draft)
    assert text == ROUND
    text = draw_tree(library.put_tree(tree), accepted=library.put(result.accepted_indices[0]))
    assert text.count("*") == 4


@pytest.mark.gpu
def test_a_busy_stream_is_waited_for() -> None:
    tree, _ = example()
    with side_stream("handle") as (torch, delayed_copy, _):
        arrays = {name: torch.from_numpy(array).cuda() for name, array in tree.arrays().items()}
        arrays["token_ids"] = delayed_copy(torch.from_numpy(tree.token_ids))
        text = draw_tree(DraftTree(**arrays, max_depth=tree.max_depth))
    assert text == draw_tree(tree)
