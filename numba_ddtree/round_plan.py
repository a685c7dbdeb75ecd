"""What a round is planned for: checked numbers and options, and the arrays that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from numba_ddtree.arrays import FLOAT_DTYPES, HOST, Placement, check_count
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import check_backend, check_library, require_device
from numba_ddtree.draft_candidates import (
    MAX_K,
    MAX_VOCABULARY,
    best_pieces_per_row,
    draft_topk,
    draft_topk_workspace_shape,
)
from numba_ddtree.errors import ArgumentError
from numba_ddtree.kv_caches import KVCaches
from numba_ddtree.kv_compact import compact_kv
from numba_ddtree.refs.tree_build import MAX_DEPTH
from numba_ddtree.round_state import RoundState
from numba_ddtree.token_choice import choose_tokens
from numba_ddtree.tree import TREE_DTYPES, Array, tree_shapes
from numba_ddtree.tree_accept import accept_tree, result_shapes
from numba_ddtree.tree_build import MAX_BUDGET, build_tree
from numba_ddtree.workspace import Field

MAX_BATCH = 2**20  # so that rows of logits can be counted in int32
LIBRARIES = ("torch", "cupy", "numba")
STAGES: dict[str, Callable[..., Any]] = {
    "draft_topk": draft_topk,
    "build_tree": build_tree,
    "choose_tokens": choose_tokens,
    "accept_tree": accept_tree,
    "compact_kv": compact_kv,
}
# Arguments that the round itself gives its stages.
OWN_ARGUMENTS = frozenset(
    {
        "root_tokens",
        "prefix_lengths",
        "max_budget",
        "workspace",
        "positions",
        "num_nodes",
        "remaining",
        "finished",
        "out",
        "stream",
        "backend",
        "validate",
    }
)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round was planned for; `DDTreeRound.plan` describes the numbers and options.

    Attributes
    ----------
    max_batch, draft_length, vocabulary, budget, k : int
    draft_dtype, target_dtype : numpy.dtype
    placement : Placement
        The arrays' library and device.
    budgets : array or None
    caches : KVCaches or None
    options : dict of dicts
        Of every stage, by the function's name; on a device with `pieces_per_row` of `draft_topk`.
    """

    max_batch: int
    draft_length: int
    vocabulary: int
    budget: int
    k: int
    draft_dtype: np.dtype[Any]
    target_dtype: np.dtype[Any]
    placement: Placement
    budgets: Array | None
    caches: KVCaches | None
    options: dict[str, dict[str, Any]]

    @classmethod
    def checked(
        cls,
        max_batch: int,
        draft_length: int,
        vocabulary: int,
        budget: int,
        *,
        k: int | None,
        draft_dtype: DTypeLike,
        target_dtype: DTypeLike,
        budgets: Array | None,
        caches: KVCaches | None,
        options: Mapping[str, Mapping[str, Any]],
        library: str | None,
        device_id: int | None,
        backend: str | None,
    ) -> RoundPlan:
        """Check the parameters of `DDTreeRound.plan`, and fill in defaults."""
        check_sizes(max_batch, draft_length, vocabulary, budget)
        if caches is not None and not isinstance(caches, KVCaches):
            raise ArgumentError("caches", type(caches).__name__, "caches that KVCaches.plan made")
        k = checked_width(k, vocabulary, budget)
        placement = _checked_placement(library, device_id, backend, caches)
        of_stages = _checked_options(options)
        if not placement.on_host:
            pieces = best_pieces_per_row(max_batch, draft_length, vocabulary, k, placement.device_id)
            of_stages["draft_topk"].setdefault("pieces_per_row", pieces)
        return cls(
            max_batch=max_batch,
            draft_length=draft_length,
            vocabulary=vocabulary,
            budget=budget,
            k=k,
            draft_dtype=_checked_dtype("draft_dtype", draft_dtype),
            target_dtype=_checked_dtype("target_dtype", target_dtype),
            placement=placement,
            budgets=budgets,
            caches=caches,
            options=of_stages,
        )

    def fields(self) -> dict[str, dict[str, Field]]:
        """Describe the round's arrays, by what they are part of and by name."""
        batch, slots = self.max_batch, self.budget + 1
        candidates = batch, self.draft_length, self.k
        groups = {
            "state": {field.name: Field((batch,), np.int32) for field in fields(RoundState)},
            "candidates": {
                "log_probs": Field(candidates, np.float32),
                "token_ids": Field(candidates, np.int32),
            },
            "tree": {
                name: Field(shape, TREE_DTYPES[name]) for name, shape in tree_shapes(batch, slots).items()
            },
            "target": {"tokens": Field((batch, slots), np.int32)},
            "result": {
                name: Field(shape, np.int32)
                for name, shape in result_shapes(batch, self.draft_length).items()
            },
        }
        if not self.placement.on_host:
            sizes = batch, self.draft_length, self.vocabulary, self.k
            shape = draft_topk_workspace_shape(
                *sizes,
                self.placement.device_id,
                pieces_per_row=self.options["draft_topk"]["pieces_per_row"],
            )
            groups["draft_topk"] = {"workspace": Field(shape, np.int64)}
        return groups


def check_sizes(max_batch: int, draft_length: int, vocabulary: int, budget: int) -> None:
    """Check the sizes of `DDTreeRound.plan`."""
    check_count("max_batch", max_batch, 1, MAX_BATCH)
    check_count("draft_length", draft_length, 1, MAX_DEPTH)
    check_count("vocabulary", vocabulary, 1, MAX_VOCABULARY)
    check_count("budget", budget, 0, MAX_BUDGET)


def checked_width(k: int | None, vocabulary: int, budget: int) -> int:
    """Return the candidates of a position: by default as many as the budget can use."""
    widest = min(vocabulary, MAX_K)
    return max(1, min(budget, widest)) if k is None else check_count("k", k, 1, widest)


def _checked_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    expected = " or ".join(np.dtype(each).name for each in FLOAT_DTYPES)
    try:
        found = np.dtype(str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype)
    except TypeError as error:
        raise ArgumentError(name, repr(dtype), expected) from error
    if not any(found == each for each in FLOAT_DTYPES):
        raise ArgumentError(name, found, expected)
    return found


def _checked_placement(
    library: str | None, device_id: int | None, backend: str | None, caches: KVCaches | None
) -> Placement:
    """Return where the round's arrays are to be, which is where its caches are."""
    check_backend(backend)
    check_library(library, LIBRARIES)
    of_caches = HOST if caches is None else caches.placement
    if backend == "numpy":
        if library is not None or device_id is not None:
            given = "library" if library is not None else "device_id"
            expected = "None, since the numpy backend has host arrays"
            raise ArgumentError(given, repr(device_id if library is None else library), expected)
        placement = HOST
    else:
        require_device()
        library = library or (of_caches.library if of_caches.library in LIBRARIES else "numba")
        if device_id is None:
            device_id = _current_device() if of_caches.on_host else of_caches.device_id
        placement = Placement(library, check_count("device_id", device_id, 0, len(cuda.gpus) - 1))
    if caches is not None and of_caches.device_id != placement.device_id:
        raise ArgumentError("caches", of_caches, f"{placement}, as the round's")
    return placement


def _current_device() -> int:
    return 0 if SIMULATED else int(cuda.get_current_device().id)


def _checked_options(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of every stage, after checking that it takes them."""
    for name in options:
        if name not in STAGES:
            raise ArgumentError("options", repr(name), "a stage: " + ", ".join(STAGES))
    for name, stage in STAGES.items():
        parameters = inspect.signature(stage).parameters.values()
        taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - OWN_ARGUMENTS
        for option in options.get(name, {}):
            if option not in taken:
                raise ArgumentError(f"options[{name!r}]", repr(option), "one of " + ", ".join(sorted(taken)))
    return {name: dict(options.get(name, {})) for name in STAGES}
