"""Rounds against the references, each stage on the inputs that it had, for arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_checks import Library, assert_same_arrays, assert_same_tree, await_copies
from numpy.typing import NDArray

from inputs import make_target_tokens
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.refs import draft_candidates as topk_reference
from numba_ddtree.refs import kv_compact as compact_reference
from numba_ddtree.refs import round_state as state_reference
from numba_ddtree.refs import token_choice as choose_reference
from numba_ddtree.refs import tree_accept as accept_reference
from numba_ddtree.refs import tree_build as build_reference
from numba_ddtree.round import DDTreeRound
from numba_ddtree.tree import AcceptResult, DraftTree

PAGE_SIZE = 3
LOG_PROB_TOLERANCE = 2.5e-7  # relative: 2 units in the last place


@dataclass
class RoundCase:
    """What is planned, as numpy arrays; options of one request each may change between rounds."""

    B: int = 5
    L: int = 4
    V: int = 20
    budget: int = 9
    k: int | None = None
    draft_dtype: Any = np.float32
    target_dtype: Any = np.float32
    budgets: NDArray[np.int32] | None = None
    cache: NDArray[Any] | None = None
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def option(self, stage: str, name: str, default: Any, dtype: Any) -> NDArray[Any]:
        """Return an option as an array, a number a request."""
        return np.broadcast_to(self.options.get(stage, {}).get(name, default), self.B).astype(dtype)


def make_case(rng: np.random.Generator, *, paging: str, sampled: bool, **changes: Any) -> RoundCase:
    """Make a case with options of every stage; `paging` is "", "contiguous", or a page table's form."""
    case = RoundCase(**changes)
    B = case.B
    case.budgets = rng.integers(0, case.budget + 1, B).astype(np.int32)
    case.budgets[0] = case.budget
    case.options = {
        "draft_topk": {"temperature": rng.uniform(0.5, 2, B).astype(np.float32)},
        "build_tree": {"chain_seed": bool(rng.integers(2))},
        "accept_tree": {
            "stop_token_ids": rng.integers(-1, case.V, (B, 2)).astype(np.int32),
            "ignore_eos": rng.random(B) < 0.3,
        },
    }
    if sampled:
        words = -(-case.V // 32)
        case.options["choose_tokens"] = {
            "temperature": rng.choice([0, 0.5, 1.5], B).astype(np.float32),
            "seed": rng.integers(0, 2**63, B),
            "request_ids": rng.integers(0, 9, B),
            "top_k": rng.integers(0, case.V, B).astype(np.int32),
            "top_p": rng.uniform(0.3, 1, B).astype(np.float32),
            "token_bitmask": rng.integers(0, 2**32, (B, case.budget + 1, words)).astype(np.uint32),
        }
    if paging:
        rows = 60
        blocks = (B, rows) if paging == "contiguous" else (B * rows // PAGE_SIZE, PAGE_SIZE)
        case.cache = rng.integers(0, 256, (2, *blocks, 16)).astype(np.uint8)
        pages = rng.permutation(blocks[0]).astype(np.int32)
        if paging == "block_table":
            case.options["compact_kv"] = {"block_table": pages.reshape(B, -1)}
        elif paging == "kv_indptr":
            starts = np.arange(B + 1, dtype=np.int32) * (rows // PAGE_SIZE)
            case.options["compact_kv"] = {"kv_indptr": starts, "kv_indices": pages}
    return case


class RoundChecker:
    """A planned round in one library's arrays, beside what the references make of it."""

    def __init__(self, library: Library, case: RoundCase) -> None:
        self.library, self.case = library, case
        self.options = {
            stage: {k: library.put(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
            for stage, options in case.options.items()
        }
        self.cache = None if case.cache is None else library.put(case.cache)
        place: dict[str, Any] = {"backend": "numpy"} if library.on_host else {"library": library.name}
        self.round = DDTreeRound.plan(
            case.B,
            case.L,
            case.V,
            case.budget,
            k=case.k,
            draft_dtype=case.draft_dtype,
            target_dtype=case.target_dtype,
            budgets=None if case.budgets is None else library.put(case.budgets),
            caches=None if self.cache is None else KVCaches.plan(self.cache),
            options=self.options,
            **place,
        )

    def start(self, rng: np.random.Generator, count: int) -> None:
        """Put requests into the first places, and check that they are there."""
        given = {
            "root_tokens": rng.integers(0, self.case.V, count).astype(np.int32),
            "prefix_lengths": rng.integers(0, 9, count).astype(np.int32),
            "remaining": rng.choice([0, 1, 4, 14], count, p=[0.1, 0.1, 0.3, 0.5]).astype(np.int32),
        }
        state = self._state()
        state_reference.start_requests(state, **given)
        self.round.start(**self.library.put_all(**given))
        self._check_state(state)

    def write(self, array: Any, content: NDArray[Any]) -> None:
        """Replace a device array's content, in place."""
        source = self.library.put(content)
        if self.library.name == "numba":
            array.copy_to_device(source)
            await_copies()
        elif self.library.name == "torch":
            array.copy_(source)
        else:
            array[...] = source

    def inputs(self, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw draft logits, and target logits that mostly follow the tree that they make."""
        case = self.case
        logits = (rng.normal(size=(case.B, case.L, case.V)) * 2).astype(case.draft_dtype)
        trees = self._built(self._candidates(logits), self._state())
        wanted = make_target_tokens(rng, trees, 0.9) % case.V
        target = rng.normal(size=(case.B, case.budget + 1, case.V))
        np.put_along_axis(target, wanted[..., None], 9.0, axis=-1)
        return logits, target.astype(case.target_dtype)

    def check(
        self, logits: NDArray[Any], target_logits: NDArray[Any], run: Callable[[], object]
    ) -> DraftTree:
        """Run a round on these inputs, and check what each stage made of its own; returns the tree.

        `run` makes the round work on the inputs: eagerly, or by a replay.
        """
        case, library = self.case, self.library
        before = self._state()
        cache = None if self.cache is None else library.get(self.cache)
        is_active = state_reference.is_active(before)
        planned = self.round
        for array in (*planned.tree.arrays().values(), *planned.result.arrays().values()):
            self.write(array, np.full(array.shape, 77, library.get(array).dtype))
        run()

        candidates = topk_reference.CandidateArrays(*map(library.get, planned.candidates))
        want = self._candidates(logits)
        np.testing.assert_array_equal(candidates.token_ids[is_active], want.token_ids[is_active])
        np.testing.assert_allclose(
            candidates.log_probs[is_active], want.log_probs[is_active], LOG_PROB_TOLERANCE, 1e-30
        )
        tree = library.get_tree(planned.tree)
        assert_same_tree(tree, self._built(candidates, before))
        tokens = library.get(planned.target_tokens)
        np.testing.assert_array_equal(tokens, self._chosen(target_logits, tree))
        endings = case.options.get("accept_tree", {})
        result = AcceptResult(
            *accept_reference.accept_tree(
                tree.token_ids,
                tree.parents,
                tree.num_nodes,
                tokens,
                case.L,
                remaining=before.remaining,
                finished=before.finish_reason,
                **endings,
            )
        )
        got = {name: library.get(array) for name, array in planned.result.arrays().items()}
        assert_same_arrays(got, result.arrays())
        if cache is not None:
            self._check_cache(cache, before, result)
        state_reference.advance(before, result.accept_length, result.bonus_token, result.finish_reason)
        self._check_state(before)
        return tree

    def _state(self) -> state_reference.StateArrays:
        arrays = self.round.state.arrays().values()
        return state_reference.StateArrays(*(np.array(self.library.get(array)) for array in arrays))

    def _check_state(self, want: state_reference.StateArrays) -> None:
        assert_same_arrays(self._state()._asdict(), want._asdict())

    def _candidates(self, logits: NDArray[Any]) -> topk_reference.CandidateArrays:
        temperatures = self.case.option("draft_topk", "temperature", 1, np.float32)
        return topk_reference.draft_topk(logits, self.round.planned.k, temperatures)

    def _built(
        self, candidates: topk_reference.CandidateArrays, state: state_reference.StateArrays
    ) -> DraftTree:
        case = self.case
        arrays = build_reference.build_tree(
            *candidates,
            np.full(case.B, case.budget, np.int32) if case.budgets is None else case.budgets,
            state.root_tokens,
            state.prefix_lengths,
            case.budget,
            **case.options.get("build_tree", {}),
        )
        state_reference.pass_by(state, *arrays)
        return DraftTree(*arrays, max_depth=case.L)

    def _chosen(self, logits: NDArray[Any], tree: DraftTree) -> NDArray[np.int32]:
        option = self.case.option
        return choose_reference.choose_tokens(
            logits.astype(np.float32),
            tree.positions,
            option("choose_tokens", "request_ids", np.arange(self.case.B), np.int64),
            option("choose_tokens", "seed", 0, np.uint64),
            option("choose_tokens", "temperature", 0, np.float32),
            option("choose_tokens", "top_k", 0, np.int32),
            option("choose_tokens", "top_p", 1, np.float32),
            self.case.options.get("choose_tokens", {}).get("token_bitmask"),
            tree.num_nodes,
        )

    def _check_cache(
        self, cache: NDArray[Any], before: state_reference.StateArrays, result: AcceptResult
    ) -> None:
        paging = self.case.options.get("compact_kv", {})
        pages = compact_reference.page_lists(**paging) if "kv_indptr" in paging else paging.get("block_table")
        for layer in cache:
            compact_reference.compact_kv(
                layer, before.prefix_lengths, result.accepted_indices, result.accept_length, pages
            )
        np.testing.assert_array_equal(self.library.get(self.cache), cache)


def check_rounds(library: Library, rng: np.random.Generator, case: RoundCase, rounds: int) -> None:
    """Run rounds eagerly, the last places empty; logits come in new arrays each time."""
    checker = RoundChecker(library, case)
    checker.start(rng, case.B - 1)
    for _ in range(rounds):
        logits, target_logits = checker.inputs(rng)
        if not library.on_host:
            spoil(rng, logits, target_logits)

        def run(arrays: tuple[NDArray[Any], ...] = (logits, target_logits)) -> None:
            planned = checker.round
            assert planned.draft(library.put(arrays[0])) is planned.tree
            assert planned.accept(library.put(arrays[1])) is planned.result

        checker.check(logits, target_logits, run)


def spoil(rng: np.random.Generator, *arrays: NDArray[Any]) -> None:
    """Put NaN and infinity into some requests' logits, which only device arrays may have."""
    for array in arrays:
        for value in (np.nan, np.inf):
            if rng.random() < 0.3:
                array[rng.integers(len(array)), rng.integers(array.shape[1]), rng.integers(4)] = value
