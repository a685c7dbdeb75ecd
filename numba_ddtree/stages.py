"""The stages of a round on a chosen backend: host arrays in, host arrays and a time out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.cases import DraftInputs, RoundInputs
from numba_ddtree.draft_candidates import draft_topk
from numba_ddtree.kv_compact import compact_kv
from numba_ddtree.token_choice import choose_tokens
from numba_ddtree.tree import AcceptResult, DraftTree
from numba_ddtree.tree_accept import accept_tree
from numba_ddtree.tree_attention import verify_attention
from numba_ddtree.tree_build import build_tree

__all__ = ["Backend", "Stages", "Timed"]

Backend: TypeAlias = Literal["cuda", "simulator", "numpy"]
"""The kernels on a device, the kernels in Numba's simulator, or the references."""


@dataclass(frozen=True, eq=False)
class Timed:
    """What a stage gave.

    Attributes
    ----------
    arrays : dict of str to numpy.ndarray
        Results by name, on the host.
    us : float
        Microseconds: of the device for what a CUDA graph can hold, otherwise of the wall clock.
    """

    arrays: dict[str, NDArray[Any]]
    us: float


class Stages:
    """The public functions, on device arrays where there are kernels to run.

    Parameters
    ----------
    backend : {"cuda", "simulator", "numpy"}
        The simulator must have been chosen, by ``NUMBA_ENABLE_CUDASIM``, before Numba was imported.

    Attributes
    ----------
    backend
        As given.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        # Kernels run on device arrays, whose values are read only when asked for.
        self._options = {"backend": "numpy"} if backend == "numpy" else {"validate": True}

    def build_tree(self, draft: DraftInputs) -> Timed:
        """Build the draft's trees: the arrays of `DraftTree`."""
        names = ("draft_log_probs", "draft_token_ids", "budgets", "root_tokens", "prefix_lengths")
        log_probs, token_ids, budgets, root_tokens, prefix_lengths = (
            self._placed(getattr(draft, name)) for name in names
        )

        def call(**options: Any) -> DraftTree:
            return build_tree(
                log_probs,
                token_ids,
                budgets,
                root_tokens=root_tokens,
                prefix_lengths=prefix_lengths,
                max_budget=draft.max_budget,
                **options,
            )

        tree, us = self._timed(call, lambda tree: {"out": tree})
        return Timed(tree.to_host().arrays(), us)

    def links_from_parents(
        self,
        parents: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        num_nodes: NDArray[np.int32],
        prefix_lengths: NDArray[np.int32],
        max_depth: int,
    ) -> Timed:
        """Derive the arrays of `DraftTree` from parents, [B, N]."""
        return self._links(DraftTree.from_parents, parents, token_ids, num_nodes, prefix_lengths, max_depth)

    def links_from_visibility(
        self,
        visibility: NDArray[np.bool_],
        token_ids: NDArray[np.int32],
        num_nodes: NDArray[np.int32],
        prefix_lengths: NDArray[np.int32],
        max_depth: int,
    ) -> Timed:
        """Derive the arrays of `DraftTree` from a mask, [B, N, N]."""
        return self._links(
            DraftTree.from_visibility, visibility, token_ids, num_nodes, prefix_lengths, max_depth
        )

    def visibility(self, tree: dict[str, NDArray[Any]], max_depth: int) -> Timed:
        """Expand a tree's ancestor bits to ``visibility``, bool [B, N, N]."""
        placed = self._placed_tree(tree, max_depth)
        started = time.perf_counter()
        mask = self._fetched(placed.to_visibility())
        return Timed({"visibility": mask}, _elapsed_us(started))

    def accept_tree(
        self,
        tree: dict[str, NDArray[Any]],
        target_tokens: NDArray[Any],
        max_depth: int,
        endings: Mapping[str, NDArray[np.int32]] | None = None,
    ) -> Timed:
        """Walk down a tree: the arrays of `AcceptResult`."""
        placed, target = self._placed_tree(tree, max_depth), self._placed(target_tokens)
        limits = {name: self._placed(array) for name, array in (endings or {}).items()}

        def call(**options: Any) -> AcceptResult:
            return accept_tree(placed, target, **limits, **options)

        result, us = self._timed(call, lambda result: {"out": result})
        return Timed(result.to_host().arrays(), us)

    def verify_attention(self, inputs: RoundInputs, tree: dict[str, NDArray[Any]]) -> Timed:
        """Attend from a tree, in a round with attention: ``out`` and ``lse``."""
        attention, draft = inputs.required_attention, inputs.draft
        placed = self._placed_tree(tree, draft.max_depth)
        q_nope, q_pe, ckv_cache, kpe_cache = (
            self._placed(getattr(attention, name)) for name in ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
        )
        prefix_lengths = self._placed(draft.prefix_lengths)
        # A length beyond the cache is for verify_attention to complain of, as one of prefix_lengths.
        longest = min(int(draft.prefix_lengths.max(initial=0)), attention.ckv_cache.shape[1])

        def call(**options: Any) -> tuple[Any, Any]:
            return verify_attention(
                q_nope,
                q_pe,
                ckv_cache,
                kpe_cache,
                placed,
                sm_scale=attention.sm_scale,
                prefix_lengths=prefix_lengths,
                max_prefix_length=longest,
                **options,
            )

        (out, lse), us = self._timed(call, lambda results: dict(zip(("out", "lse"), results, strict=True)))
        return Timed({"out": self._fetched(out), "lse": self._fetched(lse)}, us)

    def draft_topk(self, logits: NDArray[Any], k: int) -> Timed:
        """Find the best candidates: the arrays of `DraftCandidates`."""
        placed = self._placed(logits)
        found, us = self._timed(
            lambda **options: draft_topk(placed, k, **options), lambda found: {"out": found}
        )
        return Timed({name: self._fetched(array) for name, array in found._asdict().items()}, us)

    def choose_tokens(
        self, logits: NDArray[Any], positions: NDArray[np.int32], temperature: float, seed: int
    ) -> Timed:
        """Choose the target's tokens: ``tokens``, int32 [B, N]."""
        given = self._placed(logits), self._placed(positions)

        def call(**options: Any) -> Any:
            return choose_tokens(given[0], positions=given[1], temperature=temperature, seed=seed, **options)

        tokens, us = self._timed(call, lambda tokens: {"out": tokens})
        return Timed({"tokens": self._fetched(tokens)}, us)

    def compact_kv(
        self,
        cache: NDArray[Any],
        prefix_lengths: NDArray[np.int32],
        accepted_indices: NDArray[np.int32],
        accept_length: NDArray[np.int32],
    ) -> Timed:
        """Move the accepted rows of a copy of a cache: ``cache``."""
        placed = self._placed(cache.copy())
        path = [self._placed(array) for array in (prefix_lengths, accepted_indices, accept_length)]
        started = time.perf_counter()
        compact_kv(placed, *path, **self._options)
        moved = self._fetched(placed)
        return Timed({"cache": moved}, _elapsed_us(started))

    def _links(
        self,
        make: Callable[..., DraftTree],
        structure: NDArray[Any],
        token_ids: NDArray[np.int32],
        num_nodes: NDArray[np.int32],
        prefix_lengths: NDArray[np.int32],
        max_depth: int,
    ) -> Timed:
        arrays = [self._placed(structure), self._placed(token_ids)]
        given = {"num_nodes": self._placed(num_nodes), "prefix_lengths": self._placed(prefix_lengths)}
        # A tree of N slots is at most N - 1 deep, which is all that these functions take.
        depth_limit = min(max_depth, token_ids.shape[1] - 1)
        tree, us = self._timed(
            lambda **options: make(*arrays, **given, max_depth=depth_limit, **options), None
        )
        return Timed(tree.to_host().arrays(), us)

    def _timed(
        self, call: Callable[..., Any], outputs: Callable[[Any], dict[str, Any]] | None
    ) -> tuple[Any, float]:
        """Call once with the values checked, and time it.

        Parameters
        ----------
        call
            Takes the options of a public function.
        outputs
            Gives the options with which a call writes into the results of an earlier one, as a CUDA
            graph needs; None where a call always allocates.
        """
        started = time.perf_counter()
        result = call(**self._options)
        us = _elapsed_us(started)
        if self.backend != "cuda":
            return result, us
        if outputs is not None:
            from numba_ddtree.timing import device_us

            given = outputs(result)
            return result, device_us(lambda stream: call(stream=stream, **given))
        from numba_ddtree.cuda_target import cuda

        # Once more, since the first call also compiled.
        started = time.perf_counter()
        result = call()
        cuda.synchronize()
        return result, _elapsed_us(started)

    def _placed(self, array: NDArray[Any]) -> Any:
        if self.backend == "numpy":
            return array
        from numba_ddtree.cuda_target import cuda

        return cuda.to_device(np.ascontiguousarray(array))

    def _placed_tree(self, tree: dict[str, NDArray[Any]], max_depth: int) -> DraftTree:
        return DraftTree(**{name: self._placed(array) for name, array in tree.items()}, max_depth=max_depth)

    def _fetched(self, array: Any) -> NDArray[Any]:
        fetched: NDArray[Any] = array if self.backend == "numpy" else array.copy_to_host()
        return fetched


def _elapsed_us(started: float) -> float:
    return 1e6 * (time.perf_counter() - started)
