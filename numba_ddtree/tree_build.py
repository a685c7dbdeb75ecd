"""Best-first construction of draft trees in shared memory, a block a request (`device.tree_kernel`).

Two ways lead to the heap's tree (DDTree, arXiv 2604.12989), equal to the bit: `device.tree_sums` finds
the best continuations all at once and sorts them, for small budgets by the shorter steps of
`device.tree_few`; `device.tree_pops` takes them one by one, where log-probs above 0 make the heap's order
another than that of the scores, and where more continuations tie than there is room for.

Order is the heap's: score (float64, one rounded addition a node) falling, then the tuple of ranks
rising.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.arrays import (
    TOKEN_DTYPES,
    Placement,
    StreamLike,
    at,
    check_array,
    check_count,
    check_flag,
    check_indices,
    check_scalar,
    first_where,
    gather,
    to_host,
)
from numba_ddtree.device.tree_few import INVERSE_SHIFT
from numba_ddtree.device.tree_kernel import (
    CHAIN_WORDS,
    FLAG_WORDS,
    SLOT_WORDS,
    SMALL_BUDGET,
    SMALL_SEARCH_WORDS,
    SMALL_STRIDE,
    make_build_tree_kernel,
)
from numba_ddtree.device.tree_pops import OFFER_WORDS
from numba_ddtree.device.tree_sums import BIN_WORDS, PATH_WORDS_A_PLACE, capacity_for, order_size
from numba_ddtree.device.warp import LANES
from numba_ddtree.devices import use_reference
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import Kernel, block_threads
from numba_ddtree.refs import tree_build as reference
from numba_ddtree.refs.tree_build import MAX_DEPTH, MAX_PREFIX, MAX_TOKEN
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import TREE_DTYPES, Array, DraftTree, arrays_of, tree_shapes

MAX_BUDGET = 1024
# A block for budgets up to SMALL_BUDGET and for all others: few warps meet at a barrier sooner, and many
# have more log-probs under way.
FEW_THREADS, MANY_THREADS = block_threads(256), block_threads(512)
SMALL_WIDTH = 256  # candidates a position, up to which all log-probs of a small tree fit in shared memory
# Tree and search together take about 88 KB for 1024 nodes; what is left of this, which every device
# has, holds the first ranks of each row.
SHARED_WORDS = 99 * 1024 // 4

_TREE = ", ".join(["int32[:, ::1]"] * 6 + ["uint32[:, :, ::1]"] + ["int32[::1]"] * 2)
SIGNATURES = tuple(
    f"void(float32[:, :, ::1], {ids}[:, :, ::1], {', '.join(['int32[::1]'] * 5)}, {least}[::1], "
    f"{cost}[::1], int32, float64, int32, float64, int32, int32, int32, {_TREE})"
    # Arrays that are not given are empty ones of int32.
    for ids, least, cost in (
        ("int32", "int32", "int32"),
        ("int64", "int32", "int32"),
        ("int64", "float64", "float64"),
        ("int32", "float32", "float64"),
    )
)
BUILD_SMALL_TREE = Kernel(make_build_tree_kernel(FEW_THREADS, True), SIGNATURES, FEW_THREADS)
BUILD_TREE = Kernel(make_build_tree_kernel(MANY_THREADS, False), SIGNATURES, MANY_THREADS)


class Settings(NamedTuple):
    """What is the same for all requests of a call.

    Attributes
    ----------
    budget : int
        Where there is no array of budgets.
    least : float
        The least score, where there is no array of them.
    chain_seed : bool
    draft_cost : float
    max_budget : int
    """

    budget: int
    least: float
    chain_seed: bool
    draft_cost: float
    max_budget: int


def build_tree(
    draft_log_probs: Array,
    draft_token_ids: Array,
    budget: int | Array,
    *,
    root_tokens: Array | None = None,
    prefix_lengths: Array | None = None,
    max_budget: int | None = None,
    max_depths: Array | None = None,
    max_candidates: Array | None = None,
    min_log_prob: float | Array = -np.inf,
    chain_seed: bool = False,
    verify_cost: Array | None = None,
    draft_cost: float = 0.0,
    out: DraftTree | None = None,
    stream: StreamLike = None,
    backend: str | None = None,
    validate: bool = False,
) -> DraftTree:
    """Build the tree of the `budget` most probable continuations of each request.

    Algorithm 1 of DDTree (arXiv 2604.12989). A node's score is the sum of the log-probs on its path,
    in float64, rounded once a node. Nodes are numbered by score, best first; of equal scores the
    smaller tuple of ranks comes first. Candidates of log-prob -inf are never nodes. The result is
    deterministic, to the bit that of the reference in `numba_ddtree.refs.tree_build`.

    All options combine: `max_depths`, `max_candidates` and `min_log_prob` decide which continuations
    there are, `chain_seed` which come first, `budget` how many are taken at most, and `verify_cost`
    then cuts what was taken, in the order of the nodes, those of the seed like all others.

    Log-probs need not be normalised. Above 0 they make a child better than its parent; nodes are then
    numbered in the order in which the heap takes them, more slowly than the rest.

    Parameters
    ----------
    draft_log_probs : float32 [B, L, K]
        The draft's log-probs (natural log) of the best K candidates at each of the next L positions,
        each row sorted, best first. L is at most 64.
    draft_token_ids : int32 or int64 [B, L, K]
        The candidates' token ids.
    budget : int or int32 [B]
        Nodes beside the root, at most 1024; an array gives each request its own.
    root_tokens : int32 [B], optional
        Token of the root, the last one that the target confirmed; 0 by default.
    prefix_lengths : int32 [B], optional
        Keys in the cache before the root, from which positions count; 0 by default.
    max_budget : int, optional
        The result has ``max_budget + 1`` slots; by default the largest budget. A must where `budget`
        is a device array.
    max_depths : int32 [B], optional
        The largest depth of a node, 1 to L; L by default.
    max_candidates : int32 [B], optional
        How many of a position's candidates are used, 1 to K; K by default.
    min_log_prob : float, or float32 or float64 [B]
        A node whose score is below it is not taken, nor are its descendants. Not NaN.
    chain_seed : bool
        Put the top-1 path in first, in order of depth and as far as the budget reaches; then the best
        of all others. A tree with the chain in it accepts at least what the chain would.
    verify_cost : float64 [M], optional
        Cost of verifying a tree of 0, 1, 2, ... nodes beside the root, in any unit; M > max_budget.
        The tree ends before the first node that does not raise ``(1 + sum of exp(score)) /
        (draft_cost + verify_cost[nodes])``, the expected tokens of a round over its cost, summed in
        order of the nodes: CaDDTree (arXiv 2606.01813).
    draft_cost : float
        The rest of a round's cost, in the same unit; only with `verify_cost`. Every sum of both is
        above 0 and finite.
    out : DraftTree, optional
        A tree of the right shapes to write into.
    stream
        Stream to launch on; by default the current one of the arrays' library.
    backend : {None, "cuda", "numpy"}
        ``"numpy"`` runs the reference, on host arrays.
    validate : bool
        Check the values of device arrays as those of host arrays are; synchronises.

    Returns
    -------
    DraftTree
        Numpy arrays for host arrays, after synchronising; otherwise arrays of the same library, with
        no synchronisation. `status` says what became of each request: ``OK`` for as many nodes as the
        budget asks for or the cost is worth, ``EXHAUSTED`` where the limits leave fewer. One whose
        values are bad is its root alone and leaves the others untouched.

    Raises
    ------
    ArgumentError
        Wrong shape, dtype, device or layout of an argument; for host arrays, and with `validate`,
        also NaN, unsorted rows, a first row without candidates, a negative token id or prefix
        length, a budget, limit or cost out of range.
    BackendError
        No device for the CUDA backend.
    """
    check_flag("validate", validate)
    is_least_scalar = isinstance(min_log_prob, int | float | np.integer | np.floating)
    placement, views = gather(
        draft_log_probs=draft_log_probs,
        draft_token_ids=draft_token_ids,
        budget=None if isinstance(budget, int | np.integer) else budget,
        root_tokens=root_tokens,
        prefix_lengths=prefix_lengths,
        max_depths=max_depths,
        max_candidates=max_candidates,
        min_log_prob=None if is_least_scalar else min_log_prob,
        verify_cost=verify_cost,
    )
    max_budget = _checked_max_budget(budget, views["budget"], max_budget)
    views = _checked(views, max_budget)
    settings = Settings(
        budget=0 if views["budget"] is not None else int(budget),
        least=_checked_least(min_log_prob) if is_least_scalar else -np.inf,
        chain_seed=check_flag("chain_seed", chain_seed),
        draft_cost=_checked_draft_cost(draft_cost, verify_cost),
        max_budget=max_budget,
    )
    runs_reference = use_reference(backend, placement, stream)
    if out is not None:
        arrays_of("out", out, DraftTree)
        depth = views["draft_log_probs"].shape[1]
        if out.max_depth != depth:
            raise ArgumentError("out.max_depth", out.max_depth, f"{depth}, as L is")
    if placement.on_host or validate:
        host = _host_inputs(views, settings)
        _check_values(host, settings.draft_cost, max_budget)
        if runs_reference:
            tree = _reference_tree(host, settings)
            return tree if out is None else tree.copy_to(out)
    return _launch(placement, views, settings, out, stream)


def _checked(views: dict[str, Any], max_budget: int) -> dict[str, Any]:
    """Check every view's shape and dtype."""
    log_probs = views["draft_log_probs"]
    check_array("draft_log_probs", log_probs, (np.float32,), B=None, L=None, K=None)
    batch, depth, width = log_probs.shape
    if depth > MAX_DEPTH:
        raise ArgumentError("draft_log_probs", f"L = {depth}", f"a draft depth of at most {MAX_DEPTH}")
    check_array("draft_token_ids", views["draft_token_ids"], TOKEN_DTYPES, B=batch, L=depth, K=width)
    if views["min_log_prob"] is not None:
        check_array("min_log_prob", views["min_log_prob"], (np.float32, np.float64), B=batch)
    cost = views["verify_cost"]
    if cost is not None:
        check_array("verify_cost", cost, (np.float64,), M=None)
        if cost.shape[0] <= max_budget:
            expected = f"the costs of 0 to {max_budget} nodes, {max_budget + 1} numbers or more"
            raise ArgumentError("verify_cost", f"shape ({cost.shape[0]},)", expected)
    names = ("budget", "root_tokens", "prefix_lengths", "max_depths", "max_candidates")
    indices = {name: views[name] for name in names if views[name] is not None}
    return views | {name: check_indices(name, view, B=batch) for name, view in indices.items()}


def _checked_max_budget(budget: Any, budgets: Any, max_budget: int | None) -> int:
    """Return N - 1: as given, or else the largest budget."""
    if max_budget is not None:
        max_budget = check_count("max_budget", max_budget, 0, MAX_BUDGET)
    if budgets is None:
        budget = check_count("budget", budget, 0, MAX_BUDGET if max_budget is None else max_budget)
        return budget if max_budget is None else max_budget
    if max_budget is not None:
        return max_budget
    if not isinstance(budgets, np.ndarray):
        raise ArgumentError("max_budget", None, "a number, since budgets on the device cannot size the tree")
    budgets = check_indices("budget", budgets, B=None)
    return min(max(int(budgets.max(initial=0)), 0), MAX_BUDGET)


def _checked_least(value: Any) -> float:
    try:
        least = math.nan if isinstance(value, bool | np.bool_) else float(value)
    except OverflowError:  # a whole number
        least = math.nan
    if math.isnan(least):
        raise ArgumentError("min_log_prob", repr(value), "a number of float64, not NaN, or an array")
    return least


def _checked_draft_cost(draft_cost: float, verify_cost: Any) -> float:
    cost = check_scalar("draft_cost", draft_cost)
    if verify_cost is None and cost != 0:
        raise ArgumentError("draft_cost", cost, "0, since there is no verify_cost")
    return cost


def _host_inputs(views: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return host copies of the views, with defaults filled in; `verify_cost` may be None."""
    batch, depth, width = views["draft_log_probs"].shape
    defaults = {
        "budget": np.int32(settings.budget),
        "root_tokens": np.int32(0),
        "prefix_lengths": np.int32(0),
        "max_depths": np.int32(depth),
        "max_candidates": np.int32(width),
        "min_log_prob": np.float64(settings.least),
    }
    host: dict[str, Any] = {name: np.full(batch, value) for name, value in defaults.items()}
    return (
        {"verify_cost": None}
        | host
        | {name: to_host(name, view) for name, view in views.items() if view is not None}
    )


def _reference_tree(host: dict[str, Any], settings: Settings) -> DraftTree:
    arrays = reference.build_tree(
        host["draft_log_probs"],
        host["draft_token_ids"],
        host["budget"],
        host["root_tokens"],
        host["prefix_lengths"],
        settings.max_budget,
        max_depths=host["max_depths"],
        max_candidates=host["max_candidates"],
        min_log_probs=host["min_log_prob"],
        chain_seed=settings.chain_seed,
        verify_cost=host["verify_cost"],
        draft_cost=settings.draft_cost,
    )
    return DraftTree(**arrays._asdict(), max_depth=host["draft_log_probs"].shape[1])


def _check_values(host: dict[str, Any], draft_cost: float, max_budget: int) -> None:
    """Raise for the first value that would end in a bad status."""
    log_probs, tokens = host["draft_log_probs"], host["draft_token_ids"]
    _, depth, width = log_probs.shape
    rules = (
        ("draft_log_probs", np.isnan(log_probs), "a number, not NaN"),
        ("draft_log_probs", log_probs == np.inf, "a log-probability, not infinity"),
        ("draft_log_probs", _rises(log_probs), "at most the value before it: best first"),
        ("draft_log_probs", _is_first_empty(log_probs), "a candidate of probability above 0"),
        ("draft_token_ids", (tokens < 0) | (tokens > MAX_TOKEN), f"a token id from 0 to {MAX_TOKEN}"),
        ("budget", _is_outside(host["budget"], 0, max_budget), f"a number from 0 to {max_budget}"),
        ("root_tokens", host["root_tokens"] < 0, "a token id, not negative"),
        ("prefix_lengths", host["prefix_lengths"] < 0, "a length, not negative"),
        ("prefix_lengths", host["prefix_lengths"] > MAX_PREFIX, f"a length of at most {MAX_PREFIX}"),
        ("max_depths", _is_outside(host["max_depths"], 1, depth), f"a depth from 1 to L = {depth}"),
        ("max_candidates", _is_outside(host["max_candidates"], 1, width), f"a number from 1 to K = {width}"),
        ("min_log_prob", np.isnan(host["min_log_prob"]), "a number, not NaN"),
    )
    for name, is_bad, expected in rules:
        for index in first_where(is_bad):
            raise ArgumentError(at(name, index), host[name][index], expected)
    if host["verify_cost"] is not None:
        costs = draft_cost + host["verify_cost"][: max_budget + 1]
        for index in first_where(~((costs > 0) & (costs < np.inf))):
            expected = f"a cost that is above 0 and finite with draft_cost = {draft_cost}"
            raise ArgumentError(at("verify_cost", index), host["verify_cost"][index], expected)


def _is_outside(array: NDArray[np.int32], low: int, high: int) -> NDArray[np.bool_]:
    return (array < low) | (array > high)


def _rises(log_probs: NDArray[np.float32]) -> NDArray[np.bool_]:
    rises = np.zeros(log_probs.shape, bool)
    np.greater(log_probs[..., 1:], log_probs[..., :-1], out=rises[..., 1:])
    return rises


def _is_first_empty(log_probs: NDArray[np.float32]) -> NDArray[np.bool_]:
    is_empty = np.zeros(log_probs.shape, bool)
    is_empty[:, 0, 0] = log_probs[:, 0, 0] == -np.inf
    return is_empty


def _launch(
    placement: Placement,
    views: dict[str, Any],
    settings: Settings,
    out: DraftTree | None,
    stream: StreamLike,
) -> DraftTree:
    batch, depth, width = views["draft_log_probs"].shape
    slots = settings.max_budget + 1
    stride = -(-slots // LANES) * LANES
    capacity = capacity_for(settings.max_budget)
    search_words = max(
        OFFER_WORDS * stride,
        PATH_WORDS_A_PLACE * capacity + BIN_WORDS + order_size(settings.max_budget) // 2,
    )
    table_words = SLOT_WORDS * stride + FLAG_WORDS + CHAIN_WORDS + search_words
    staged = min(width, max(settings.max_budget, 1), (SHARED_WORDS - table_words) // depth)
    is_small = settings.max_budget <= SMALL_BUDGET and width <= SMALL_WIDTH
    if is_small:
        table_words = SLOT_WORDS * SMALL_STRIDE + FLAG_WORDS + CHAIN_WORDS + SMALL_SEARCH_WORDS
        staged = width
    with Transfer(placement, stream) as transfer:
        outputs = transfer.outputs(tree_shapes(batch, slots), TREE_DTYPES, out)
        transfer.launch(
            BUILD_SMALL_TREE if is_small else BUILD_TREE,
            batch,
            *(transfer.input(view) for view in views.values()),
            np.int32(settings.budget),
            np.float64(settings.least),
            np.int32(settings.chain_seed),
            np.float64(settings.draft_cost),
            np.int32(-(-(1 << INVERSE_SHIFT) // width) if is_small else staged),
            np.int32(capacity),
            np.int32(search_words),
            *outputs,
            shared_bytes=4 * (table_words + depth * staged),
        )
        return DraftTree(**transfer.results(), max_depth=depth)
