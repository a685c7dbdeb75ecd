"""The rounds of decoding as one bundle, which ``numba-ddtree round`` replays.

Each active request of each round is a request of the bundle, so that all rounds are replayed at once. Beside
the tensors of `numba_ddtree.round_bundle` a trace has, a row a request, ``trace/decoder`` and ``trace/round``
(int32: counted from 0), and ``trace/prompt`` (int32: place of the prompt); the decoders' names are metadata.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.bundle import write_bundle
from numba_ddtree.cases import DraftInputs, RoundInputs
from numba_ddtree.demo.array_module import ArrayModule
from numba_ddtree.demo.decoders import Round
from numba_ddtree.errors import ArgumentError
from numba_ddtree.refs.tree_links import TreeArrays, padding
from numba_ddtree.round_bundle import round_tensors

Rows = dict[str, NDArray[Any]]


@dataclass
class Trace:
    """Rounds of drafting decoders, kept on the host until they are written.

    Attributes
    ----------
    module : ArrayModule
        That of the model.
    stop_tokens : tuple of int
        Of all rounds.
    """

    module: ArrayModule
    stop_tokens: tuple[int, ...]
    _decoders: list[str] = field(default_factory=list)
    _rounds: list[int] = field(default_factory=list)
    _rows: list[Rows] = field(default_factory=list)

    def add(self, this_round: Round) -> None:
        """Keep the requests that took part in a round; one of plain decoding has no tree to keep."""
        if this_round.candidates is None:
            return
        name = this_round.decoder.name
        if name not in self._decoders:
            self._decoders.append(name)
            self._rounds.append(0)
        place = self._decoders.index(name)
        active = np.flatnonzero(this_round.emitted)
        rows = {
            name: self.module.to_host(array)[active]
            for name, array in {
                "draft_log_probs": this_round.candidates.log_probs,
                "draft_token_ids": this_round.candidates.token_ids,
                "budgets": this_round.budgets,
                "root_tokens": this_round.root_tokens,
                "prefix_lengths": this_round.prefix_lengths,
                "remaining": this_round.remaining,
                "target_tokens": this_round.target_tokens,
                **this_round.tree.arrays(),
                **this_round.result.arrays(),
            }.items()
        }
        rows["trace/decoder"] = np.full(len(active), place, np.int32)
        rows["trace/round"] = np.full(len(active), self._rounds[place], np.int32)
        rows["trace/prompt"] = this_round.requests[active]
        self._rounds[place] += 1
        self._rows.append(rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is no round yet."""
        return not self._rows

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the bundle, which appears whole or not at all.

        Raises
        ------
        ArgumentError
            There is no round to write.
        OSError
            The file cannot be written.
        """
        if not self._rows:
            raise ArgumentError("--trace", "no round with a draft", "a chain or a tree decoder that ran")
        write_bundle(path, self.tensors(), {"decoders": list(self._decoders)})

    def tensors(self) -> Rows:
        """Return all rounds as the tensors of one, narrower ones padded to the widest."""
        slots = max(rows["parents"].shape[1] for rows in self._rows)
        width = max(rows["draft_log_probs"].shape[2] for rows in self._rows)
        padded = [_padded(rows, slots, width) for rows in self._rows]
        joined = {name: np.concatenate([rows[name] for rows in padded]) for name in padded[0]}
        draft = {
            name: joined[name]
            for name in ("draft_log_probs", "draft_token_ids", "budgets", "root_tokens", "prefix_lengths")
        }
        endings = {"remaining": joined["remaining"]}
        if self.stop_tokens:
            endings["stop_token_ids"] = np.array(self.stop_tokens, np.int32)
        inputs = RoundInputs(
            DraftInputs(**draft, max_budget=slots - 1), joined["target_tokens"], None, endings
        )
        walk = ("accepted_indices", "accept_length", "bonus_token", "tokens", "finish_reason")
        expected = {
            "build_tree": {name: joined[name] for name in TreeArrays._fields},
            "accept_tree": {name: joined[name] for name in walk},
        }
        notes = {name: array for name, array in joined.items() if name.startswith("trace/")}
        return round_tensors(inputs, expected) | notes


def _padded(rows: Rows, slots: int, width: int) -> Rows:
    """Widen a round to N slots and K candidates, as if it had been built with them."""
    count, depth, candidates = rows["draft_log_probs"].shape
    used = rows["parents"].shape[1]
    log_probs = np.full((count, depth, width), -np.inf, np.float32)  # no candidates
    token_ids = np.zeros((count, depth, width), np.int32)
    target_tokens = np.zeros((count, slots), np.int32)
    log_probs[..., :candidates] = rows["draft_log_probs"]
    token_ids[..., :candidates] = rows["draft_token_ids"]
    target_tokens[:, :used] = rows["target_tokens"]
    tree = padding(count, slots, rows["prefix_lengths"])
    for name in TreeArrays._fields:
        padded, own = getattr(tree, name), rows[name]
        if name == "ancestor_bits":
            padded[:, :used, : own.shape[2]] = own
        elif own.ndim == 2:
            padded[:, :used] = own
        else:
            padded[...] = own
    widened = {"draft_log_probs": log_probs, "draft_token_ids": token_ids, "target_tokens": target_tokens}
    padded_tree: Rows = tree._asdict()
    return rows | widened | padded_tree
