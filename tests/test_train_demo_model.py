"""Training of the demo model, tiny: what it writes, the package decodes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs torch (the extra train)")
# ruff: noqa: E402 - what follows imports torch

from numba_ddtree.demo.array_module import array_module
from numba_ddtree.demo.config import START_TOKEN
from numba_ddtree.demo.decoders import PLAIN, DecodeSettings, chain_decoder, decode, tree_decoder
from numba_ddtree.demo.model import read_model
from numba_ddtree.errors import ArgumentError
from tools import train_demo_model
from tools.demo_training import draft_training, target_training
from tools.demo_training.corpus import Corpus, is_held_out, sample_prompts, standard_library
from tools.demo_training.settings import TINY
from tools.demo_training.torch_model import Target
from tools.demo_training.training import NUM_PROMPTS, PROMPT_LENGTH
from tools.demo_training.writing import write_greedily


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    assert train_demo_model.main([str(folder), "--tiny"]) == 0
    return folder


def test_what_is_written_can_be_decoded(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "demo_model.md",
        "demo_model.safetensors",
        "demo_prompts.json",
    ]
    model = read_model(folder / "demo_model.safetensors", array_module("numpy"))
    assert model.config == TINY.model
    texts = [[START_TOKEN, *b"def "], [START_TOKEN]]
    settings = DecodeSettings(max_new_tokens=12)
    plain = decode(model, PLAIN, texts, settings)
    for decoder in (chain_decoder(model.config.draft_length), tree_decoder(8)):
        assert decode(model, decoder, texts, settings).tokens == plain.tokens


def test_the_card_and_the_prompts(folder: Path) -> None:
    card = (folder / "demo_model.md").read_text()
    assert "bits a byte" in card
    assert f"{(folder / 'demo_model.safetensors').stat().st_size} bytes" in card
    prompts = json.loads((folder / "demo_prompts.json").read_text())
    assert len(prompts) == NUM_PROMPTS
    assert all(is_held_out(prompt["module"]) for prompt in prompts)
    assert {len(prompt["prompt"]) for prompt in prompts} == {PROMPT_LENGTH}


def test_equal_seeds_give_equal_weights(folder: Path, tmp_path: Path) -> None:
    assert train_demo_model.main([str(tmp_path), "--tiny"]) == 0
    names = "demo_model.safetensors", "demo_prompts.json"
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_the_corpus_is_split_by_module() -> None:
    training, held_out = standard_library()
    assert not set(training.texts) & set(held_out.texts)
    assert 0.02 < len(held_out.texts) / len(training.texts) < 0.12
    for name in (*training.texts, *held_out.texts):
        assert not {"test", "tests", "site-packages"} & set(Path(name).parts)
    assert all(map(is_held_out, held_out.texts))
    corpus = Corpus({"b.py": b"two\n", "a.py": b"one\n"})
    assert corpus.joined().tobytes() == b"one\ntwo\n"
    chosen = sample_prompts(held_out, 3, 64, 32, 1, training)
    assert chosen == sample_prompts(held_out, 3, 64, 32, 1, training)


def test_prompts_differ_and_are_in_no_module_to_train_on() -> None:
    lines = [f"def f{number}(): return {number % 7}\n".encode() for number in range(100, 180)]
    text, shared = b"".join(lines), b"".join(lines[:40])
    held_out = Corpus({"a.py": text, "copy_of_a.py": text})
    training = Corpus({"b.py": b"x = 1\n" + shared})
    prompts = [found["prompt"] for found in sample_prompts(held_out, 20, 48, 24, 0, training)]
    assert len(set(prompts)) == 20
    assert all(prompt.encode() in text and prompt.encode() not in shared for prompt in prompts)
    with pytest.raises(ArgumentError, match=r"corpus: got \d+ different prompts; expected at least 81"):
        sample_prompts(held_out, 81, 48, 24, 0, training)


def test_repeated_windows_are_found() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (4, 60))
    found = target_training.repeated_windows(torch.from_numpy(tokens), 5)
    for row, repeated in zip(tokens, found.tolist(), strict=True):
        windows = [tuple(row[start : start + 5]) for start in range(56)]
        assert repeated == [window in windows[:start] for start, window in enumerate(windows)]


def test_writing_equals_the_expanded_model() -> None:
    """What is generated with the cache, in absorbed form, is what the forward pass over it all says."""
    torch.manual_seed(0)
    target = Target(TINY.model)
    prompts = torch.randint(0, 256, (3, 9))
    texts = write_greedily(target, prompts, 12)
    logits, _ = target(texts)
    assert (logits[:, 8:-1].argmax(-1) == texts[:, 9:]).all()


def test_a_perfect_drafter_has_no_loss() -> None:
    drafted = torch.randint(0, 256, (2, 3, 15))
    sure = torch.nn.functional.one_hot(drafted, 256).float() * 100
    assert draft_training.draft_loss(sure, drafted) < 1e-6
    assert draft_training.draft_loss(sure * 0, drafted).item() == pytest.approx(np.log(256))
