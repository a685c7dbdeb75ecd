"""Decoding with one interface: token by token, with a drafted chain, and with draft trees.

All three emit what the target says, and so the same text; they differ in how many tokens the target scores
in one pass, and so in how many passes it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numba_ddtree import AcceptResult, DDTreeRound, DraftTree, KVCaches
from numba_ddtree.arrays import check_count, check_scalar
from numba_ddtree.demo.config import NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS
from numba_ddtree.demo.latent_attention import LatentCache
from numba_ddtree.demo.model import DemoModel, DraftCache, chain_chunks
from numba_ddtree.demo.stage_times import StageTimes
from numba_ddtree.draft_candidates import DraftCandidates
from numba_ddtree.errors import ArgumentError
from numba_ddtree.refs.token_choice import gumbel, random_bits
from numba_ddtree.status import FinishReason
from numba_ddtree.tree import Array
from numba_ddtree.tree_build import MAX_BUDGET

PROMPT_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Decoder:
    """How a round's tree is drafted.

    Attributes
    ----------
    name : str
    budget : int
        Drafted nodes a round; 0 is plain decoding.
    width : int
        Candidates a position.
    """

    name: str
    budget: int
    width: int


PLAIN = Decoder("plain", 0, 0)
"""The target alone, one token a pass."""


def chain_decoder(length: int) -> Decoder:
    """Verify the drafter's best token at each of `length` positions: DFlash (arXiv 2602.06036)."""
    return Decoder("chain", length, 1)


def tree_decoder(budget: int) -> Decoder:
    """Verify a tree of the `budget` most probable continuations: DDTree (arXiv 2604.12989)."""
    check_count("budget", budget, 1, MAX_BUDGET)
    return Decoder(f"tree {budget}", budget, min(budget, NUM_OUTPUT_TOKENS))


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """What is decoded, whatever the decoder.

    Attributes
    ----------
    max_new_tokens : int
    temperature : float
        0 takes the target's best token; above, draws are keyed by seed, request and position, so that
        every decoder draws the same.
    seed : int
    stop_tokens : tuple of int
        A text ends with the first of them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One round of a batch, on the arrays of the model's module.

    All but the root tokens, lengths and `emitted` are the memory of a `DDTreeRound`, which the next round
    writes again: what is to last has to be copied. Candidates of finished requests have no meaning.

    Attributes
    ----------
    decoder : Decoder
    requests : int32 [B], on the host
        The prompts' places among all that are decoded.
    candidates : DraftCandidates or None
        None for plain decoding, as are the budgets.
    budgets : int32 [B] or None
    root_tokens, prefix_lengths, remaining : int32 [B]
    tree : DraftTree
    target_tokens : int32 [B, N]
    result : AcceptResult
    emitted : int32 [B], on the host
        Tokens that the round gave each request.
    """

    decoder: Decoder
    requests: NDArray[np.int32]
    candidates: DraftCandidates | None
    budgets: Array | None
    root_tokens: Array
    prefix_lengths: Array
    remaining: Array
    tree: DraftTree
    target_tokens: Array
    result: AcceptResult
    emitted: NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Decoded:
    """What a decoder wrote.

    Attributes
    ----------
    decoder : Decoder
    tokens : list of list of int
        The new tokens of each request.
    accept_lengths : list of list of int
        Tokens of each of a request's rounds, which are its target passes.
    margins : list of list of float
        For plain decoding, how far the best token was above the second at each place, in logits; at a
        temperature, of logits to which the noise of the draw is added.
    finish_reasons : list of FinishReason
    times : StageTimes
    """

    decoder: Decoder
    tokens: list[list[int]]
    accept_lengths: list[list[int]]
    margins: list[list[float]]
    finish_reasons: list[FinishReason]
    times: StageTimes

    @classmethod
    def empty(cls, decoder: Decoder, batch: int, times: StageTimes) -> Decoded:
        """Return what is there before the first round."""
        return cls(
            decoder,
            [[] for _ in range(batch)],
            [[] for _ in range(batch)],
            [[] for _ in range(batch)],
            [FinishReason.UNFINISHED] * batch,
            times,
        )

    @property
    def is_finished(self) -> bool:
        """Whether every text has ended."""
        return FinishReason.UNFINISHED not in self.finish_reasons

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(map(len, self.tokens))

    @property
    def num_passes(self) -> int:
        """Target passes, counted for each request by itself."""
        return sum(map(len, self.accept_lengths))

    @property
    def mean_accept_length(self) -> float:
        """Tokens a pass."""
        return self.num_tokens / max(self.num_passes, 1)


OnRound = Callable[[Round], None]


def decode(
    model: DemoModel,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_round: OnRound | None = None,
) -> Decoded:
    """Continue prompts, as one batch.

    Parameters
    ----------
    model : DemoModel
    decoder : Decoder
    prompts : sequence of sequences of int
        Tokens, with the start token.
    settings : DecodeSettings
    on_round : callable, optional
        Called after each round, before the next writes over its arrays. What it raises ends decoding.

    Returns
    -------
    Decoded

    Raises
    ------
    ArgumentError
        No prompt, an empty one, one that is too long for the model with what is to be written, a token
        that is none of the model's, or a setting out of range.
    """
    decoding = Decoding.begin(model, decoder, prompts, settings)
    while not decoding.is_done:
        this_round = decoding.run_round()
        if on_round is not None:
            on_round(this_round)
    return decoding.decoded


def check_prompts(
    model: DemoModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    names: Sequence[str] | None = None,
) -> None:
    """Check what `decode` is given; `names` are what errors call the prompts."""
    longest = model.config.max_length
    check_count("max_new_tokens", settings.max_new_tokens, 1, longest - 1)
    check_count("seed", settings.seed, 0, 2**63 - 1)
    temperature = check_scalar("temperature", settings.temperature)
    if not (temperature == 0 or 1e-3 <= temperature <= 100):
        raise ArgumentError("temperature", temperature, "0, or a number from 0.001 to 100")
    for token in settings.stop_tokens:
        check_count("stop_tokens", token, 0, NUM_OUTPUT_TOKENS - 1)
    if len(prompts) == 0:
        raise ArgumentError("prompts", "no prompt", "at least one")
    room = longest - settings.max_new_tokens
    names = names or [f"prompts[{index}]" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        if not 1 <= len(prompt) <= room:
            expected = (
                f"1 to {room}: {longest}, the model's length, less {settings.max_new_tokens} new tokens"
            )
            raise ArgumentError(name, f"{len(prompt)} tokens", expected)
        if not all(isinstance(token, int | np.integer) and 0 <= token < NUM_INPUT_TOKENS for token in prompt):
            raise ArgumentError(name, "another token", f"tokens from 0 to {NUM_INPUT_TOKENS - 1}")


class PendingRound(NamedTuple):
    """A round whose work is launched, and whose results are not read."""

    before: dict[str, Array]  # the state that it began with
    tree: DraftTree
    logits: Array  # [B, N, V], the target's
    result: AcceptResult


@dataclass(slots=True, eq=False)
class Decoding:
    """A batch that is being decoded, round by round; `begin` makes one, and `decode` runs it to its end.

    A request's prefix is what the target's cache holds; its root, the last token known, comes after it.
    Roots, prefix lengths and what may still be written are the state of the planned round, on the device.

    Attributes
    ----------
    decoded : Decoded
        What is written so far.
    planned : DDTreeRound
        What a round is, but for the models.
    lengths : int32 [B]
        The prefix lengths, on the host.
    requests : int32 [B]
        The prompts' places among all that are decoded, by which their draws are keyed.
    """

    model: DemoModel
    decoder: Decoder
    settings: DecodeSettings
    decoded: Decoded
    cache: LatentCache
    draft_cache: DraftCache | None
    planned: DDTreeRound
    lengths: NDArray[np.int32]  # [B]
    is_active: NDArray[np.bool_]  # [B]
    requests: NDArray[np.int32]  # [B]

    @classmethod
    def begin(
        cls,
        model: DemoModel,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings,
        *,
        requests: NDArray[np.int32] | None = None,
        times: StageTimes | None = None,
    ) -> Decoding:
        """Check the arguments, which are those of `decode`, and read the prompts, bar their last tokens.

        `requests` says which of more prompts these are, and `times` what takes the times of the stages.
        """
        check_prompts(model, prompts, settings)
        batch = len(prompts)
        requests = np.arange(batch, dtype=np.int32) if requests is None else requests
        lengths = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
        slots = max(decoder.budget + 1, PROMPT_CHUNK)
        rows = int(lengths.max()) + settings.max_new_tokens + slots
        cache = model.new_cache(batch, rows, slots)
        planned = _plan_round(model, decoder, settings, requests, KVCaches.plan(cache.arrays))
        planned.start(
            np.array([prompt[-1] for prompt in prompts], np.int32),
            lengths,
            remaining=np.full(batch, settings.max_new_tokens, np.int32),
        )
        state = cls(
            model,
            decoder,
            settings,
            Decoded.empty(decoder, batch, StageTimes(model.module) if times is None else times),
            cache,
            model.new_draft_cache(batch, rows) if decoder.budget else None,
            planned,
            lengths,
            np.ones(batch, bool),
            requests,
        )
        with state.decoded.times.stage("prompt"):
            state._read_prompts(prompts)
        return state

    @property
    def is_done(self) -> bool:
        """Whether every text has ended."""
        return not self.is_active.any()

    @property
    def longest_prefix(self) -> int:
        """A bound on the prefix lengths, known without asking the device."""
        return int(self.lengths.max())

    def run_round(self) -> Round:
        """Draft, build, verify and accept; emit tokens."""
        return self.end_round(self.begin_round())

    def begin_round(self) -> PendingRound:
        """Launch a round's work; waits for the device only where the times of stages do."""
        times, planned = self.decoded.times, self.planned
        before = {name: array.copy() for name, array in planned.state.arrays().items()}
        with times.stage("draft"):
            draft_logits = self._draft_logits()
        with times.stage("build"):
            tree = planned.draft(draft_logits)
        with times.stage("verify"):
            logits, features = self.model.forward(
                tree, before["prefix_lengths"], self.cache, self.longest_prefix
            )
        with times.stage("accept"):
            result = planned.accept(logits)
        if self.draft_cache is not None:
            with times.stage("draft"):
                self._read_accepted(features, before["prefix_lengths"], self.draft_cache)
        return PendingRound(before, tree, logits, result)

    def end_round(self, pending: PendingRound) -> Round:
        """Read the results of a round, and emit its tokens."""
        with self.decoded.times.stage("accept"):
            host = pending.result.to_host()
        self.decoded.times.settle()
        if self.draft_cache is None:
            self._note_margins(pending.logits, pending.tree, host)
        self._advance(host)
        return self._describe(pending.before, host)

    def _describe(self, before: dict[str, Array], host: AcceptResult) -> Round:
        """Return the round that was run, from the state that it began with."""
        planned, has_draft = self.planned, self.decoder.budget > 0
        return Round(
            self.decoder,
            self.requests,
            planned.candidates if has_draft else None,
            self.model.module.xp.full_like(before["remaining"], self.decoder.budget) if has_draft else None,
            before["root_tokens"],
            before["prefix_lengths"],
            before["remaining"],
            planned.tree,
            planned.target_tokens,
            planned.result,
            host.accept_length,
        )

    def _read_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        tokens = np.zeros((len(prompts), max(self.longest_prefix, 1)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt) - 1] = prompt[:-1]
        for tree, first in chain_chunks(tokens, self.lengths, PROMPT_CHUNK, self.model.module):
            at = self.model.module.xp.asarray(first)
            _, features = self.model.forward(tree, at, self.cache, self.longest_prefix)
            if self.draft_cache is not None:
                self.model.read_features(features, at, self.draft_cache)

    def _draft_logits(self) -> Array:
        """Return the drafter's logits; of plain decoding, whose trees are their roots, zeros."""
        if self.draft_cache is None:
            return self.model.module.xp.zeros((len(self.lengths), 1, NUM_OUTPUT_TOKENS), np.float32)
        state = self.planned.state
        return self.model.draft(
            state.root_tokens, state.prefix_lengths, self.draft_cache, self.longest_prefix
        )

    def _read_accepted(self, features: Array, prefix_lengths: Array, draft_cache: DraftCache) -> None:
        """Let the drafter see the nodes on the accepted path, which come after the prefix."""
        xp = self.model.module.xp
        path = xp.maximum(self.planned.result.accepted_indices, 0)  # [B, L + 1]
        self.model.read_features(features[xp.arange(len(path))[:, None], path], prefix_lengths, draft_cache)

    def _note_margins(self, logits: Array, tree: DraftTree, host: AcceptResult) -> None:
        to_host, settings = self.model.module.to_host, self.settings
        scores = to_host(logits[:, 0]).astype(np.float64)  # [B, V]
        positions = to_host(tree.positions)[:, 0].tolist()
        for request in np.flatnonzero(host.accept_length).tolist():
            if settings.temperature:
                number = int(self.requests[request])
                bits = random_bits(settings.seed, number, positions[request], NUM_OUTPUT_TOKENS)
                scores[request] += settings.temperature * gumbel(bits)
            second, best = np.sort(scores[request])[-2:].tolist()
            self.decoded.margins[request].append(best - second)

    def _advance(self, host: AcceptResult) -> None:
        for request, length in enumerate(host.accept_length.tolist()):
            if length:
                self.decoded.tokens[request].extend(host.tokens[request, :length].tolist())
                self.decoded.accept_lengths[request].append(length)
                self.decoded.finish_reasons[request] = FinishReason(int(host.finish_reason[request]))
        self.lengths = self.lengths + host.accept_length
        self.is_active = self.is_active & (host.finish_reason == FinishReason.UNFINISHED)


def _plan_round(
    model: DemoModel,
    decoder: Decoder,
    settings: DecodeSettings,
    requests: NDArray[np.int32],
    caches: KVCaches,
) -> DDTreeRound:
    """Plan rounds on the module's arrays, which are those of the caches."""
    stops = np.array(settings.stop_tokens, np.int32)
    return DDTreeRound.plan(
        len(requests),
        model.config.draft_length if decoder.budget else 1,
        NUM_OUTPUT_TOKENS,
        decoder.budget,
        k=max(decoder.width, 1),
        caches=caches,
        options={
            "draft_topk": {"temperature": settings.temperature or 1.0},
            "choose_tokens": {
                "temperature": settings.temperature,
                "seed": settings.seed,
                "request_ids": model.module.xp.asarray(requests),
            },
            "accept_tree": {"stop_token_ids": model.module.xp.asarray(stops)} if stops.size else {},
        },
        backend=model.module.backend,
    )
