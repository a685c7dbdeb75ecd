"""Named, seeded inputs: what `check`, the reference bundles, tests and benchmarks run on.

A case is a frozen description; `inputs(seed)` makes its arrays, the same ones each time, and `shrunk()` is
its form for Numba's simulator, which runs every CUDA thread as a Python thread. A case's name and size
always say what is really run, shrunk or not. `numba_ddtree.round_bundle` stores inputs in files.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.marginals import MARGINALS
from numba_ddtree.refs import tree_build as tree_reference

__all__ = [
    "ACCEPT_CASES",
    "ATTENTION_CASES",
    "TREE_CASES",
    "AttentionCase",
    "AttentionInputs",
    "DraftInputs",
    "RoundInputs",
    "TreeCase",
    "reference_tree",
]

SM_SCALE = (128 + 64) ** -0.5
"""The scale of scores in DeepSeek V3 and Kimi K2, whose heads are 128 + 64 wide before absorption."""

_UNUSED_ROWS = 16
_MOST_LISTED = 8


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """What a tree is built from.

    Attributes
    ----------
    draft_log_probs : float32 [B, L, K]
        Natural log, sorted, best first.
    draft_token_ids : int32 or int64 [B, L, K]
    budgets, root_tokens, prefix_lengths : int32 [B]
    max_budget : int
        N - 1, the slots of each tree beside the root.
    """

    draft_log_probs: NDArray[np.float32]
    draft_token_ids: NDArray[np.int32] | NDArray[np.int64]
    budgets: NDArray[np.int32]
    root_tokens: NDArray[np.int32]
    prefix_lengths: NDArray[np.int32]
    max_budget: int

    @property
    def max_depth(self) -> int:
        """L, the draft depth."""
        return int(self.draft_log_probs.shape[1])


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What verify attention reads beside the tree.

    Attributes
    ----------
    q_nope : float32 [B, N, H, D_CKV]
    q_pe : float32 [B, N, H, D_KPE]
    ckv_cache : float32 [B, S, D_CKV]
    kpe_cache : float32 [B, S, D_KPE]
    sm_scale : float
    """

    q_nope: NDArray[np.float32]
    q_pe: NDArray[np.float32]
    ckv_cache: NDArray[np.float32]
    kpe_cache: NDArray[np.float32]
    sm_scale: float


@dataclass(frozen=True, eq=False)
class RoundInputs:
    """The inputs of one round.

    Attributes
    ----------
    draft : DraftInputs
    target_tokens : int32 or int64 [B, N]
        The target's token after each node.
    attention : AttentionInputs or None
        None for a round that only builds and accepts.
    endings : mapping of str to int32 array
        What may end a request, as `numba_ddtree.accept_tree` takes it: ``stop_token_ids`` [S] and
        ``remaining`` [B], each if there is one.
    """

    draft: DraftInputs
    target_tokens: NDArray[np.int32] | NDArray[np.int64]
    attention: AttentionInputs | None
    endings: Mapping[str, NDArray[np.int32]] = field(default_factory=dict)

    @property
    def simulator_seconds(self) -> float:
        """Rough time that Numba's simulator takes for the kernels on one core, from a few measurements."""
        seconds = 0.045 * float(self.draft.budgets.sum())
        if self.attention is not None:
            blocks = math.prod(self.attention.q_nope.shape[:3])
            row = self.attention.ckv_cache.shape[2] + self.attention.kpe_cache.shape[2]
            keys = float(self.draft.prefix_lengths.mean()) + self.draft.max_depth
            seconds += blocks * (0.05 + 5e-6 * keys * row)
        return seconds

    @property
    def required_attention(self) -> AttentionInputs:
        """The inputs of attention; ValueError for a round without."""
        if self.attention is None:
            raise ValueError("a round without attention")
        return self.attention

    @property
    def size(self) -> str:
        """The dimensions in words."""
        batch, depth, width = self.draft.draft_log_probs.shape
        sizes = _tree_size(batch, depth, width, tuple(map(int, self.draft.budgets)))
        if self.attention is None:
            return sizes
        prefixes = tuple(map(int, self.draft.prefix_lengths))
        _, _, heads, latent = self.attention.q_nope.shape
        return f"{sizes} {_attention_size(heads, prefixes, latent, self.attention.q_pe.shape[3])}"


def reference_tree(draft: DraftInputs) -> Any:
    """Build the draft's trees by the numpy reference.

    Returns
    -------
    numba_ddtree.refs.tree_links.TreeArrays
    """
    return tree_reference.build_tree(
        draft.draft_log_probs,
        draft.draft_token_ids,
        draft.budgets,
        draft.root_tokens,
        draft.prefix_lengths,
        draft.max_budget,
    )


@dataclass(frozen=True)
class TreeCase:
    """Drafts to build trees from, and a target that agrees with part of a path.

    Attributes
    ----------
    label : str
        What the distributions or the target are like; with the largest budget it makes the name.
    marginals : str
        How the distributions are made, a key of `numba_ddtree.marginals.MARGINALS`.
    budgets : tuple of int
        One a request.
    depth, width, vocabulary : int
        L, K and V.
    prefix_lengths : tuple of int
        One a request.
    token_dtype : str
        Of the candidates and the target's tokens.
    agreement : float
        The part of a random path, from the root to a leaf, that the target follows, from 0 to 1.
        Its tokens at all other nodes are random.
    least_budget : int
        Below this budget the case would lose its point.
    """

    label: str
    marginals: str
    budgets: tuple[int, ...]
    depth: int = 15
    width: int = 64
    vocabulary: int = 4096
    prefix_lengths: tuple[int, ...] = (2048,)
    token_dtype: str = "int32"
    agreement: float = 0.5
    least_budget: int = 0

    @property
    def name(self) -> str:
        """The label and the largest budget, as in ``realistic_b64``."""
        return f"{self.label}_b{max(self.budgets)}"

    @property
    def size(self) -> str:
        """The dimensions in words."""
        return _tree_size(len(self.budgets), self.depth, self.width, self.budgets)

    def shrunk(self) -> TreeCase:
        """Return the case for the simulator: small budgets that still differ from case to case."""
        budgets = tuple(max(_shrunk_size(budget), self.least_budget) for budget in self.budgets)
        width = min(self.width, max(budgets, default=0) + 1)
        return replace(self, budgets=budgets, width=width, vocabulary=min(self.vocabulary, 64))

    def inputs(self, seed: int = 0) -> RoundInputs:
        """Make the arrays; equal seeds give equal arrays.

        Parameters
        ----------
        seed : int
            Not negative.
        """
        rng = _generator(self.name, seed)
        batch = len(self.budgets)
        log_probs = MARGINALS[self.marginals](rng, (batch, self.depth, self.vocabulary))
        order = np.argsort(-log_probs, axis=-1, kind="stable")[..., : self.width]
        draft = DraftInputs(
            draft_log_probs=np.take_along_axis(log_probs, order, axis=-1).astype(np.float32),
            draft_token_ids=order.astype(self.token_dtype),
            budgets=np.array(self.budgets, np.int32),
            root_tokens=rng.integers(self.vocabulary, size=batch, dtype=np.int32),
            prefix_lengths=np.array(self.prefix_lengths, np.int32),
            max_budget=max(self.budgets),
        )
        return RoundInputs(draft, self._target_tokens(rng, draft), None)

    def _target_tokens(self, rng: np.random.Generator, draft: DraftInputs) -> Any:
        tree = reference_tree(draft)
        targets = rng.integers(self.vocabulary, size=tree.parents.shape).astype(self.token_dtype)
        for target, tokens, parents, count in zip(
            targets, tree.token_ids, tree.parents, tree.num_nodes, strict=True
        ):
            path = _random_path(rng, parents[:count])
            agreed = round(self.agreement * (len(path) - 1))
            for node, child in pairwise(path[: agreed + 1]):
                target[node] = tokens[child]
        return targets


@dataclass(frozen=True)
class AttentionCase:
    """One request's attention over a prefix and a tree, as part of a whole round.

    Queries and cache rows are normal with unit scale; rows that no slot of the tree uses are NaN.

    Attributes
    ----------
    heads, prefix, budget : int
        H, P, and the tree's nodes beside the root.
    latent, rope : int
        D_CKV and D_KPE.
    """

    heads: int
    prefix: int
    budget: int
    latent: int = 512
    rope: int = 64

    @property
    def name(self) -> str:
        """``h{heads}_p{prefix}_b{budget}``."""
        return f"h{self.heads}_p{self.prefix}_b{self.budget}"

    @property
    def tree(self) -> TreeCase:
        """The case of the round's tree."""
        return TreeCase("realistic", "realistic", (self.budget,), prefix_lengths=(self.prefix,))

    @property
    def size(self) -> str:
        """The dimensions in words."""
        return (
            f"B=1 N={self.budget + 1} {_attention_size(self.heads, (self.prefix,), self.latent, self.rope)}"
        )

    def shrunk(self) -> AttentionCase:
        """Return the case for the simulator: few heads, short prefixes, narrow rows."""
        return AttentionCase(
            heads=-(-self.heads // 32),
            prefix=_shrunk_size(self.prefix),
            budget=_shrunk_size(self.budget),
            latent=16,
            rope=8,
        )

    def inputs(self, seed: int = 0) -> RoundInputs:
        """Make the arrays; equal seeds give equal arrays.

        Parameters
        ----------
        seed : int
            Not negative.
        """
        rng = _generator(self.name, seed)
        tree = self.tree.inputs(seed)
        slots = self.budget + 1
        used = self.prefix + int(reference_tree(tree.draft).num_nodes[0])

        def normal(*shape: int) -> NDArray[np.float32]:
            return rng.standard_normal(shape, np.float32)

        def cache(width: int) -> NDArray[np.float32]:
            rows = np.full((1, self.prefix + slots + _UNUSED_ROWS, width), np.nan, np.float32)
            rows[:, :used] = normal(1, used, width)
            return rows

        attention = AttentionInputs(
            q_nope=normal(1, slots, self.heads, self.latent),
            q_pe=normal(1, slots, self.heads, self.rope),
            ckv_cache=cache(self.latent),
            kpe_cache=cache(self.rope),
            sm_scale=SM_SCALE,
        )
        return replace(tree, attention=attention)


def _tree_size(batch: int, depth: int, width: int, budgets: tuple[int, ...]) -> str:
    return f"B={batch} L={depth} K={width} budget={_listed(budgets)}"


def _attention_size(heads: int, prefixes: tuple[int, ...], latent: int, rope: int) -> str:
    return f"H={heads} prefix={_listed(prefixes)} D={latent}+{rope}"


def _listed(values: tuple[int, ...]) -> str:
    """Write a few values out, and many as a range."""
    if len(values) > _MOST_LISTED:
        return f"{min(values)}..{max(values)}"
    return ",".join(map(str, values))


def _shrunk_size(size: int) -> int:
    return min(size, 8 + size // 64)


def _generator(name: str, seed: int) -> np.random.Generator:
    """Return a generator of the case's own, so that cases do not depend on each other's order."""
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


def _random_path(rng: np.random.Generator, parents: NDArray[np.int32]) -> list[int]:
    """Return the nodes from the root to some leaf."""
    path = [0]
    while len(children := np.flatnonzero(parents == path[-1])):
        path.append(int(rng.choice(children)))
    return path


TREE_CASES = (
    TreeCase("realistic", "realistic", (1,), width=1),
    TreeCase("realistic", "realistic", (7,), width=8, token_dtype="int64"),
    TreeCase("realistic", "realistic", (16,), width=16),
    TreeCase("realistic", "realistic", (64,), width=64, token_dtype="int64"),
    TreeCase("realistic", "realistic", (256,), width=256),
    TreeCase("realistic", "realistic", (1024,), width=1024),
    TreeCase("flat", "flat", (64,)),
    TreeCase("ties", "ties", (256,), vocabulary=256),
    TreeCase("identical_rows", "identical_rows", (128,)),
    TreeCase("all_equal", "all_equal", (100,), depth=5, width=7, vocabulary=7),
    TreeCase("exhausted", "realistic", (64,), depth=2, width=3, vocabulary=16, least_budget=13),
    TreeCase("single_depth", "realistic", (32,), depth=1),
    TreeCase("depth_64", "spine", (96,), depth=64, width=8, least_budget=72),
    TreeCase("chain", "realistic", (15,), width=1),
    TreeCase("root_only", "realistic", (0,), width=4),
    TreeCase("impossible", "impossible", (64,), depth=6, width=16),
    TreeCase("mixed", "realistic", (5, 0, 128, 33), prefix_lengths=(0, 1, 131072, 77)),
)
"""Trees; the budgets 1 to 1024 on realistic distributions, and every kind of edge."""

ACCEPT_CASES = (
    TreeCase("disagree", "realistic", (64,), agreement=0.0),
    TreeCase("agree_partway", "realistic", (256,), width=256, token_dtype="int64"),
    TreeCase("agree_fully", "spine", (48,), depth=31, width=8, agreement=1.0),
    TreeCase("agree_root_only", "realistic", (0,), width=4, agreement=1.0),
    TreeCase("agree_ties", "all_equal", (100,), depth=5, width=7, vocabulary=7, agreement=1.0),
    TreeCase("agree_mixed", "realistic", (5, 0, 128, 33), prefix_lengths=(0, 1, 2048, 77), agreement=0.7),
)
"""Trees with targets that follow nothing, a part or the whole of a path."""

ATTENTION_CASES = (
    AttentionCase(heads=16, prefix=2048, budget=16),
    AttentionCase(heads=64, prefix=128, budget=32),
    AttentionCase(heads=64, prefix=512, budget=8),
    AttentionCase(heads=8, prefix=0, budget=8),
    AttentionCase(heads=64, prefix=2048, budget=64),
    AttentionCase(heads=8, prefix=1, budget=64),
)
"""Attention at the widths of DeepSeek V3 and Kimi K2."""
