"""The demo model: its layers against an expanded forward pass, and what decoding leans on."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save

from numba_ddtree import ArgumentError, DraftTree
from numba_ddtree.demo.array_module import HOST_ROW_BLOCK, ROW_BLOCK, ArrayModule, array_module
from numba_ddtree.demo.config import MASK_TOKEN, START_TOKEN, ModelConfig
from numba_ddtree.demo.latent_attention import LatentCache
from numba_ddtree.demo.model import WEIGHTS, DemoModel, chain_chunks, load_model, read_model
from numba_ddtree.demo.repetition import repetition
from numba_ddtree.demo.text import shipped_prompts
from tools.demo_training.corpus import is_held_out

ROUNDING = 1e-3
"""Logits are of size 10, and float32 sums of some 2000 such terms; errors seen are below 1e-4."""


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return load_model(array_module("numpy"))


def prompt_tokens(count: int, length: int) -> np.ndarray:
    return np.array([prompt.tokens[:length] for prompt in shipped_prompts(count)], np.int32)


def read(model: DemoModel, tokens: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, ...]:
    """Run a batch of texts in chains of `size`: logits, features, and the caches."""
    rows = tokens.shape[1] + size
    cache = model.new_cache(len(tokens), rows, size)
    draft_cache = model.new_draft_cache(len(tokens), rows)
    logits, features = [], []
    for tree, first in chain_chunks(tokens, lengths, size, model.module):
        part, feature = model.forward(tree, first, cache, tokens.shape[1])
        model.read_features(feature, first, draft_cache)
        logits.append(part)
        features.append(feature)
    return np.concatenate(logits, axis=1), np.concatenate(features, axis=1), cache, draft_cache


def test_the_shipped_model_predicts_held_out_text(model: DemoModel) -> None:
    tokens = prompt_tokens(16, 257)
    logits = read(model, tokens, np.full(16, 257, np.int32), 64)[0][:, :256].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_probs, tokens[:, 1:, None].astype(np.int64), axis=-1)
    assert -chosen.mean() / np.log(2) < 2.2  # bits a byte


def test_matches_the_torch_model_that_was_trained(model: DemoModel) -> None:
    torch = pytest.importorskip("torch")
    from tools.demo_training.torch_model import Drafter, Target

    def loaded(module: object, prefix: str) -> object:
        weights = {
            name.removeprefix(prefix): torch.from_numpy(array)
            for name, array in model.weights.items()
            if name.startswith(prefix)
        }
        module.load_state_dict(weights)  # strict: every weight is there, and none is left over
        return module

    target, drafter = loaded(Target(model.config), "target."), loaded(Drafter(model.config), "drafter.")
    tokens, lengths = prompt_tokens(3, 120), np.array([120, 77, 31], np.int32)
    logits, features, _, draft_cache = read(model, tokens, lengths, 32)
    anchors = np.array([119, 60, 30], np.int32)
    last = tokens[np.arange(3), anchors]
    drafted = model.draft(last, anchors, draft_cache, 119)
    blocks = torch.full((3, 1, model.config.block_size), MASK_TOKEN)
    blocks[:, 0, 0] = torch.from_numpy(last).long()
    with torch.no_grad():
        want, want_features = target(torch.from_numpy(tokens).long())
        want_drafted = drafter(target, want_features, blocks, torch.from_numpy(anchors).long()[:, None])
    for request, length in enumerate(lengths):
        np.testing.assert_allclose(logits[request, :length], want[request, :length], atol=ROUNDING)
        np.testing.assert_allclose(features[request, :length], want_features[request, :length], atol=ROUNDING)
    np.testing.assert_allclose(drafted, want_drafted[:, 0, 1:], atol=ROUNDING)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chains_of_any_length_read_the_same(model: DemoModel, size: int) -> None:
    tokens, lengths = prompt_tokens(3, 65), np.array([65, 64, 1], np.int32)
    logits, features, cache, _ = read(model, tokens, lengths, size)
    want, want_features, want_cache, _ = read(model, tokens, lengths, 65)
    for request, length in enumerate(lengths):
        np.testing.assert_allclose(logits[request, :length], want[request, :length], atol=ROUNDING)
        np.testing.assert_allclose(features[request, :length], want_features[request, :length], atol=ROUNDING)
        np.testing.assert_allclose(
            cache.ckv[:, request, :length], want_cache.ckv[:, request, :length], atol=ROUNDING
        )


def test_a_node_scores_as_its_path_alone(model: DemoModel) -> None:
    text = prompt_tokens(1, 41)
    prefix, branches = text[:, :40], np.frombuffer(b"s e", np.uint8)
    # The root, two children, and a child of the second.
    parents, tokens = [-1, 0, 0, 2], [text[0, 40], *branches.tolist()]
    lengths = np.array([40], np.int32)
    *_, cache, _ = read(model, prefix, lengths, 40)
    tree = DraftTree.from_parents(
        np.array([parents], np.int32), np.array([tokens], np.int32), prefix_lengths=lengths, backend="numpy"
    )
    logits, _ = model.forward(tree, lengths, cache, 40)
    for node, path in ((1, [0, 1]), (3, [0, 2, 3])):
        whole = np.concatenate((prefix[0], [tokens[i] for i in path]))[None].astype(np.int32)
        want = read(model, whole, np.array([whole.shape[1]], np.int32), 64)[0]
        np.testing.assert_allclose(logits[0, node], want[0, whole.shape[1] - 1], atol=ROUNDING)


def test_a_draft_reads_no_further_than_its_text(model: DemoModel) -> None:
    tokens = prompt_tokens(2, 50)
    *_, draft_cache = read(model, tokens, np.array([50, 50], np.int32), 50)
    lengths, last = np.array([50, 20], np.int32), np.array([97, 98], np.int32)
    want = model.draft(last, lengths, draft_cache, 50)
    draft_cache.keys[:, 1, :, 20:] = 1e3
    draft_cache.values[:, 1, :, 20:] = -1e3
    np.testing.assert_array_equal(model.draft(last, lengths, draft_cache, 50), want)


def test_products_on_a_gpu_have_one_shape() -> None:
    """Rows come in blocks of one size, so that cuBLAS has no reason to sum them in another order."""
    shapes = []

    class Recorder:
        pad, concatenate = staticmethod(np.pad), staticmethod(np.concatenate)

        @staticmethod
        def matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
            shapes.append(x.shape)
            return x @ weight

    module = ArrayModule(Recorder, "cuda", ROW_BLOCK)
    rng = np.random.default_rng(0)
    for rows in (0, 1, ROW_BLOCK, ROW_BLOCK + 1):
        x, weight = rng.standard_normal((2, rows, 3)), rng.standard_normal((2, 3, 5))
        np.testing.assert_allclose(module.product(x, weight), x @ weight)
    assert set(shapes[1:]) == {(2, ROW_BLOCK, 3)}
    assert len(shapes) == 5


def test_bits_are_those_of_bfloat16(rng: np.random.Generator) -> None:
    """Of random numbers of all sizes, of ties and their neighbours, of both zeros and of denormal numbers."""
    module = array_module("numpy")
    random = rng.integers(2**32, size=10000, dtype=np.uint32)
    ties = rng.integers(2**16, size=1000, dtype=np.uint32) << 16 | 2**15
    bits = np.concatenate((random, ties, ties - 1, ties + 1, np.array([0, 1 << 31, 1, 0x8000], np.uint32)))
    numbers = bits.view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore"):
        want = numbers.astype(bfloat16)
    got = module.bfloat16_bits(numbers)
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(got, want.view(np.uint16))
    np.testing.assert_array_equal(module.as_bfloat16(got), want)


def test_products_in_bfloat16_have_one_shape() -> None:
    assert load_model(array_module("numpy")).module.row_block is None
    assert load_model(array_module("numpy"), "bfloat16").module.row_block == HOST_ROW_BLOCK
    with pytest.raises(ArgumentError, match=r"^dtype: got 'float16'; expected 'float32' or 'bfloat16'"):
        load_model(array_module("numpy"), "float16")


def text_and_tree(model: DemoModel, length: int) -> tuple[np.ndarray, np.ndarray, DraftTree, LatentCache]:
    """Return a text that was read but for its last token, its length, and a tree of four nodes behind it."""
    text = prompt_tokens(1, length + 1)
    parents, branches = [-1, 0, 0, 2], np.frombuffer(b"s e", np.uint8)
    lengths = np.array([length], np.int32)
    put = model.module.xp.asarray
    cache = model.new_cache(1, length + 64, 64)
    for tree, first in chain_chunks(text[:, :length], lengths, 64, model.module):
        model.forward(tree, put(first), cache, length)
    tree = DraftTree.from_parents(
        put(np.array([parents], np.int32)),
        put(np.array([[text[0, length], *branches]], np.int32)),
        prefix_lengths=put(lengths),
        backend=model.module.backend,
    )
    return text, lengths, tree, cache


def one_by_one(model: DemoModel, cache: LatentCache, lengths: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Score tokens behind a text as plain decoding does; return the logits after the last."""
    put = model.module.xp.asarray
    for step, token in enumerate(tokens):
        root = DraftTree.from_parents(
            put(np.array([[-1]], np.int32)),
            put(np.array([[token]], np.int32)),
            prefix_lengths=put(lengths + step),
            backend=model.module.backend,
        )
        at = int(lengths[0]) + step
        logits, _ = model.forward(root, put(lengths + np.int32(step)), cache, at)
    return model.module.to_host(logits)[0, 0]


def check_nodes(model: DemoModel, length: int, atol: float) -> None:
    """Compare a tree's logits with those of its paths, token by token; `atol` 0 asks for the same bits."""
    text, lengths, tree, cache = text_and_tree(model, length)
    put = model.module.xp.asarray
    scored = model.module.to_host(model.forward(tree, put(lengths), cache, length)[0])
    tokens = model.module.to_host(tree.token_ids)[0]
    for node, path in ((0, [0]), (1, [0, 1]), (2, [0, 2]), (3, [0, 2, 3])):
        want = one_by_one(model, cache, lengths, tokens[path].tolist())
        np.testing.assert_allclose(scored[0, node], want, rtol=0, atol=atol, err_msg=f"{length}, {node}")
    assert text[0, length] == tokens[0]


@pytest.mark.parametrize("length", [1, 62, 63, 64, 130])
def test_a_node_in_bfloat16_scores_as_when_decoded(length: int) -> None:
    """Closer than a rounding that went the other way would leave it, which moves logits by about 1e-3."""
    check_nodes(load_model(array_module("numpy"), "bfloat16"), length, 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 62, 63, 64, 130])
def test_a_node_in_bfloat16_on_a_gpu_has_the_bits_of_decoding(length: int) -> None:
    pytest.importorskip("cupy")
    check_nodes(load_model(array_module("cuda"), "bfloat16"), length, 0.0)


def test_bfloat16_is_close_to_float32(model: DemoModel) -> None:
    tokens, lengths = prompt_tokens(3, 120), np.array([120, 77, 31], np.int32)
    want = read(model, tokens, lengths, 32)[0]
    got = read(load_model(array_module("numpy"), "bfloat16"), tokens, lengths, 32)[0]
    errors = [np.abs(got[i, :n] - want[i, :n]) for i, n in enumerate(lengths)]
    assert 1e-4 < max(map(np.max, errors)) < 0.5
    assert np.mean(np.concatenate(errors)) < 0.02


def test_attention_in_bfloat16_reuses_its_memory() -> None:
    model = load_model(array_module("numpy"), "bfloat16")
    cache = model.new_cache(2, 100, 64)
    assert cache.planned is not None
    assert cache.ckv.dtype == cache.kpe.dtype == np.uint16
    assert cache.planned.plan.max_prefix_length == model.config.max_length
    tree = next(chain_chunks(prompt_tokens(2, 9), np.array([9, 5], np.int32), 16, model.module))[0]
    rng = np.random.default_rng(0)
    shape = 2, 16, model.config.num_heads
    q_nope, q_pe = (rng.standard_normal((*shape, width)).astype(np.float32) for width in (512, 64))
    first = cache.attend(0, q_nope, q_pe, tree, 1.0, np.zeros(2, np.int32), 0)
    assert np.shares_memory(first, cache.planned.out)
    assert first.dtype == np.float32


@pytest.mark.gpu
def test_rows_on_a_gpu_do_not_depend_on_the_batch(rng: np.random.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    module = array_module("cuda")
    x = cupy.asarray(rng.standard_normal((300, 256)), cupy.float32)
    weight = cupy.asarray(rng.standard_normal((256, 640)), cupy.float32)
    together = module.product(x, weight)
    for row in (0, 127, 128, 299):
        assert (module.product(x[row : row + 1], weight) == together[row]).all()


@pytest.mark.gpu
def test_gpu_matches_numpy(model: DemoModel) -> None:
    pytest.importorskip("cupy")
    on_gpu = load_model(array_module("cuda"))
    tokens, lengths = prompt_tokens(2, 70), np.array([70, 33], np.int32)
    want, *_ = read(model, tokens, lengths, 64)
    cache = on_gpu.new_cache(2, 140, 64)
    parts = [
        on_gpu.forward(tree, on_gpu.module.xp.asarray(first), cache, 70)[0]
        for tree, first in chain_chunks(tokens, lengths, 64, on_gpu.module)
    ]
    got = np.concatenate([part.get() for part in parts], axis=1)
    for request, length in enumerate(lengths):
        np.testing.assert_allclose(got[request, :length], want[request, :length], atol=ROUNDING)


def test_the_shipped_prompts_are_held_out() -> None:
    prompts = shipped_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 64
    assert all(is_held_out(prompt.name) for prompt in prompts)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    whole = (files("numba_ddtree.data") / WEIGHTS).read_bytes()
    path = tmp_path / WEIGHTS
    for content in (b"", whole[:5], whole[:-1], save({"x": np.zeros(2, np.float32)})):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match=r"demo_model.safetensors: got a damaged file"):
            read_model(path, array_module("numpy"))
    with pytest.raises(FileNotFoundError):
        read_model(tmp_path / "missing", array_module("numpy"))


def test_config_survives_json() -> None:
    config = replace(ModelConfig(), hidden_size=12, rope_theta=5.0)
    assert ModelConfig.from_json(config.to_json()) == config
    assert START_TOKEN == 256


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"", 0.0), (b"x" * 31, 0.0), (b"x" * 32, 0.0), (b"x" * 33, 0.5), (bytes(range(100)), 0.0)],
)
def test_repetition(text: bytes, expected: float) -> None:
    assert repetition(text) == expected


def test_repetition_of_a_circle() -> None:
    assert repetition(bytes(range(40)) * 10) == pytest.approx(1 - 40 / 369)
