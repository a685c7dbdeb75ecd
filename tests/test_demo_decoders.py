"""Decoding the demo model: with a chain and with trees it writes what it writes token by token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from numba_ddtree import ArgumentError, DraftTree
from numba_ddtree.demo.array_module import array_module
from numba_ddtree.demo.comparison import Difference, first_difference
from numba_ddtree.demo.decoders import (
    PLAIN,
    Decoded,
    Decoder,
    DecodeSettings,
    Decoding,
    chain_decoder,
    decode,
    tree_decoder,
)
from numba_ddtree.demo.model import DemoModel, load_model
from numba_ddtree.demo.stage_times import StageTimes
from numba_ddtree.demo.text import shipped_prompts
from numba_ddtree.status import FinishReason

DRAFTED = (chain_decoder(15), tree_decoder(1), tree_decoder(16), tree_decoder(64))
TIE = 1e-4
"""A margin below which float32's rounding may break a tie the other way."""


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return load_model(array_module("numpy"))


def prompts(count: int, longest: int = 96) -> list[list[int]]:
    """Prompts of different lengths, one of them the start token alone."""
    lengths = [1, *np.linspace(2, longest, count - 1).astype(int)]
    return [prompt.tokens[:length] for prompt, length in zip(shipped_prompts(count), lengths, strict=True)]


@pytest.fixture(scope="module")
def rounded_model() -> DemoModel:
    return load_model(array_module("numpy"), "bfloat16")


def check_same(plain: Decoded, other: Decoded) -> None:
    for prompt in range(len(plain.tokens)):
        difference = first_difference(plain, other, prompt)
        is_tie = difference is not None and difference.margin is not None and difference.margin < TIE
        assert difference is None or is_tie, f"{other.decoder.name}, {prompt}: {difference}"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_decoder_writes_the_same(model: DemoModel, temperature: float) -> None:
    settings = DecodeSettings(max_new_tokens=40, temperature=temperature, seed=5)
    plain = decode(model, PLAIN, prompts(6), settings)
    assert plain.num_passes == plain.num_tokens == 240
    for decoder in DRAFTED:
        drafted = decode(model, decoder, prompts(6), settings)
        check_same(plain, drafted)
        assert drafted.num_passes < plain.num_passes


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_decoder_writes_the_same_in_bfloat16(rounded_model: DemoModel, temperature: float) -> None:
    """With ties as in float32: were roundings to go another way, margins of 1e-2 would be lost."""
    settings = DecodeSettings(max_new_tokens=40, temperature=temperature, seed=5)
    plain = decode(rounded_model, PLAIN, prompts(6), settings)
    for decoder in DRAFTED:
        drafted = decode(rounded_model, decoder, prompts(6), settings)
        check_same(plain, drafted)
        assert drafted.num_passes < plain.num_passes


def test_bfloat16_accepts_as_much_as_float32(model: DemoModel, rounded_model: DemoModel) -> None:
    """Texts may part where float32 was nearly undecided; lengths stay within what texts vary by."""
    settings = DecodeSettings(max_new_tokens=48)
    texts = [prompt.tokens for prompt in shipped_prompts(6)]
    for decoder in DRAFTED:
        want = decode(model, decoder, texts, settings)
        got = decode(rounded_model, decoder, texts, settings)
        spread = np.std([length for lengths in want.accept_lengths for length in lengths])
        allowed = 3 * spread / want.num_passes**0.5  # standard errors of the mean
        assert abs(got.mean_accept_length - want.mean_accept_length) < allowed


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_margins_are_those_of_the_choice(model: DemoModel, temperature: float) -> None:
    """Lowering the token's logit by a bit more than the margin changes it, by a bit less does not."""
    settings = DecodeSettings(max_new_tokens=6, temperature=temperature, seed=2**63 - 1)
    texts = prompts(4)
    plain = decode(model, PLAIN, texts, settings)
    forward = DemoModel.forward

    def decode_lowered(change: float) -> Decoded:
        def lowered_forward(tree: DraftTree, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
            logits, features = forward(model, tree, *rest)
            for request, text in enumerate(texts):
                if logits.shape[1] == 1 and tree.positions[request, 0] == len(text) + 2:
                    logits[request, 0, plain.tokens[request][3]] -= plain.margins[request][3] + change
            return logits, features

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DemoModel, "forward", lambda _, *arguments: lowered_forward(*arguments))
            return decode(model, PLAIN, texts, settings)

    less, more = decode_lowered(-1e-4), decode_lowered(1e-4)
    assert less.tokens == plain.tokens
    for prompt in range(len(texts)):
        difference = first_difference(plain, more, prompt)
        assert difference is not None
        assert (difference.place, difference.margin) == (3, plain.margins[prompt][3])


def test_differences() -> None:
    def decoded(tokens: list[int]) -> Decoded:
        margins = [[0.5] * len(tokens)]
        return Decoded(PLAIN, [tokens], [[]], margins, [FinishReason.STOP], StageTimes(array_module("numpy")))

    plain = decoded([1, 2, 3])
    assert first_difference(plain, decoded([1, 2, 3]), 0) is None
    assert first_difference(plain, decoded([1, 5, 3]), 0) == Difference(1, 2, 5, 0.5)
    assert first_difference(plain, decoded([1, 2]), 0) == Difference(2, 3, None, 0.5)
    longer = first_difference(plain, decoded([1, 2, 3, 4]), 0)
    assert longer == Difference(3, None, 4, None)
    assert str(longer) == "token 3 differs: None in plain decoding, 4 here"


def test_acceptance_rises_with_the_budget(model: DemoModel) -> None:
    settings = DecodeSettings(max_new_tokens=64)
    texts = [prompt.tokens for prompt in shipped_prompts(4)]
    decoders = (tree_decoder(1), tree_decoder(4), tree_decoder(16), tree_decoder(64))
    lengths = [decode(model, decoder, texts, settings).mean_accept_length for decoder in decoders]
    chain = decode(model, chain_decoder(15), texts, settings).mean_accept_length
    assert lengths == sorted(lengths)
    assert lengths[0] > 1
    assert 1 < chain < lengths[-1]


def test_a_text_does_not_depend_on_its_batch(model: DemoModel) -> None:
    settings, texts = DecodeSettings(max_new_tokens=24), prompts(5)
    together = decode(model, tree_decoder(16), texts, settings)
    for index in (0, 3):
        alone = decode(model, tree_decoder(16), [texts[index]], settings)
        plain = decode(model, PLAIN, [texts[index]], settings)
        assert alone.tokens[0] == plain.tokens[0] == together.tokens[index]


@pytest.mark.parametrize("decoder", [PLAIN, *DRAFTED], ids=lambda decoder: decoder.name)
def test_stop_tokens_end_a_text(model: DemoModel, decoder: Decoder) -> None:
    newline = ord("\n")
    free = decode(model, PLAIN, prompts(5), DecodeSettings(max_new_tokens=60))
    stopped = decode(model, decoder, prompts(5), DecodeSettings(max_new_tokens=60, stop_tokens=(newline,)))
    for tokens, want, reason in zip(stopped.tokens, free.tokens, stopped.finish_reasons, strict=True):
        if newline in want:
            assert tokens == want[: want.index(newline) + 1]
            assert reason == FinishReason.STOP
        else:
            assert tokens == want
            assert reason == FinishReason.LENGTH
    assert {FinishReason.STOP} <= set(stopped.finish_reasons)


@pytest.mark.parametrize("decoder", [PLAIN, *DRAFTED], ids=lambda decoder: decoder.name)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_the_length_is_kept(model: DemoModel, decoder: Decoder, length: int) -> None:
    decoded = decode(model, decoder, prompts(3), DecodeSettings(max_new_tokens=length))
    assert [len(tokens) for tokens in decoded.tokens] == [length] * 3
    assert [sum(lengths) for lengths in decoded.accept_lengths] == [length] * 3
    assert decoded.finish_reasons == [FinishReason.LENGTH] * 3


def test_a_text_may_fill_the_model(model: DemoModel) -> None:
    longest = model.config.max_length
    text = (shipped_prompts(1)[0].tokens * 4)[: longest - 20]
    settings = DecodeSettings(max_new_tokens=20)
    plain = decode(model, PLAIN, [text], settings)
    check_same(plain, decode(model, tree_decoder(16), [text], settings))
    with pytest.raises(ArgumentError, match=rf"prompts\[0\].*{longest - 19} tokens.*1 to {longest - 20}"):
        decode(model, PLAIN, [[*text, 32]], settings)


@pytest.mark.parametrize(
    ("changes", "texts", "message"),
    [
        ({}, [], "prompts.*no prompt"),
        ({}, [[256], []], r"prompts\[1\].*0 tokens"),
        ({}, [[256, 258]], r"prompts\[0\].*tokens from 0 to 257"),
        ({}, [[-1]], r"prompts\[0\].*tokens from 0 to 257"),
        ({}, [[1.5]], r"prompts\[0\].*tokens from 0 to 257"),
        ({}, "def", r"prompts\[0\].*tokens from 0 to 257"),
        ({"max_new_tokens": 0}, [[256]], "max_new_tokens"),
        ({"max_new_tokens": 1024}, [[256]], "max_new_tokens"),
        ({"temperature": -1.0}, [[256]], "temperature"),
        ({"temperature": float("nan")}, [[256]], "temperature"),
        ({"seed": -1}, [[256]], "seed"),
        ({"stop_tokens": (256,)}, [[256]], "stop_tokens"),
    ],
)
def test_bad_input_is_named(
    model: DemoModel, changes: dict[str, object], texts: list[list[int]], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        decode(model, PLAIN, texts, DecodeSettings(**changes))


@pytest.mark.parametrize("budget", [0, 1025, -1])
def test_budgets_have_limits(budget: int) -> None:
    with pytest.raises(ArgumentError, match="budget"):
        tree_decoder(budget)


def test_rounds_can_be_stopped_between(model: DemoModel) -> None:
    texts, settings = prompts(3), DecodeSettings(max_new_tokens=30)
    decoding = Decoding.begin(model, tree_decoder(16), texts, settings)
    whole = decode(model, tree_decoder(16), texts, settings)
    while not decoding.is_done:
        this_round = decoding.run_round()
        for written, want in zip(decoding.decoded.tokens, whole.tokens, strict=True):
            assert written == want[: len(written)]
        assert this_round.emitted.sum() > 0
    assert decoding.decoded.tokens == whole.tokens


def permutation_p_value(first: list[bytes], second: list[bytes], rng: np.random.Generator) -> float:
    """Probability of two samples as different as these, by chi-square, if they come from one distribution."""
    names = {text: number for number, text in enumerate(sorted({*first, *second}))}
    values = np.array([names[text] for text in first + second])

    def statistic(order: np.ndarray) -> float:
        counts = [np.bincount(part, minlength=len(names)) for part in np.split(order, [len(first)])]
        return float(sum((counts[0] - counts[1]) ** 2 / (counts[0] + counts[1])))

    observed = statistic(values)
    draws = [statistic(rng.permutation(values)) for _ in range(999)]
    return (1 + sum(draw >= observed for draw in draws)) / (1 + len(draws))


def test_sampled_frequencies_agree(model: DemoModel, rng: np.random.Generator) -> None:
    """Of 300 continuations of 2 bytes each way, with different seeds, at a significance of 0.001."""
    text = [256, *b"    def "]

    def sample(decoder: Decoder, seed: int) -> list[bytes]:
        settings = DecodeSettings(max_new_tokens=2, temperature=0.7, seed=seed)
        return [bytes(tokens) for tokens in decode(model, decoder, [text] * 300, settings).tokens]

    plain, tree = sample(PLAIN, 1), sample(tree_decoder(4), 2)
    assert len(Counter(plain)) > 20  # no foregone conclusion
    assert plain != tree
    assert permutation_p_value(plain, tree, rng) > 0.001
    # The test can fail: another temperature is told apart.
    colder = DecodeSettings(max_new_tokens=2, temperature=0.2, seed=3)
    other = [bytes(tokens) for tokens in decode(model, PLAIN, [text] * 300, colder).tokens]
    assert permutation_p_value(plain, other, rng) < 0.005


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_decoder_writes_the_same_on_a_gpu(model: DemoModel, temperature: float) -> None:
    pytest.importorskip("cupy")
    on_gpu = load_model(array_module("cuda"))
    settings = DecodeSettings(max_new_tokens=48, temperature=temperature, seed=5)
    plain = decode(on_gpu, PLAIN, prompts(6), settings)
    check_same(decode(model, PLAIN, prompts(6), settings), plain)
    for decoder in DRAFTED:
        check_same(plain, decode(on_gpu, decoder, prompts(6), settings))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_decoder_writes_the_same_in_bfloat16_on_a_gpu(temperature: float) -> None:
    """To the byte, with no allowance for ties."""
    pytest.importorskip("cupy")
    on_gpu = load_model(array_module("cuda"), "bfloat16")
    settings = DecodeSettings(max_new_tokens=48, temperature=temperature, seed=5)
    plain = decode(on_gpu, PLAIN, prompts(6), settings)
    for decoder in (*DRAFTED, tree_decoder(256)):
        assert decode(on_gpu, decoder, prompts(6), settings).tokens == plain.tokens, decoder.name
