"""Training of the demo model and its drafter, from the texts to the files."""

from __future__ import annotations

import json
import platform
import time

import torch
from safetensors.torch import save
from torch import Tensor, nn

from numba_ddtree.demo.repetition import repetition
from tools.demo_training.card import Facts, model_card
from tools.demo_training.corpus import Corpus, sample_prompts, standard_library
from tools.demo_training.draft_training import chain_acceptance, train_drafter
from tools.demo_training.settings import Settings
from tools.demo_training.target_training import Windows, bits_a_byte, discourage_loops, train_target
from tools.demo_training.torch_model import Drafter, Target
from tools.demo_training.writing import write_greedily, write_texts

NUM_PROMPTS = 64
PROMPT_LENGTH = CONTINUATION = 256


def train(settings: Settings, device: torch.device, seed: int) -> dict[str, bytes]:
    """Train both models; return the contents of the files by name."""
    torch.manual_seed(seed)
    training, held_out = standard_library()
    target, drafter = Target(settings.model).to(device), Drafter(settings.model).to(device)

    began = time.perf_counter()
    target_schedule = train_target(target, training, settings, seed)
    bits_before = bits_a_byte(target, held_out, settings)
    repetition_before = _greedy_repetition(_judged_texts(target, held_out, settings, seed))
    loop_schedule = discourage_loops(target, training, settings, seed + 1)
    _round_to_bfloat16(target)
    target_seconds = time.perf_counter() - began

    texts = _texts_to_learn(target, training, settings, seed + 2)
    writing_seconds = time.perf_counter() - began - target_seconds
    draft_schedule = train_drafter(target, drafter, texts, settings, seed + 3)
    _round_to_bfloat16(drafter)

    judged = _judged_texts(target, held_out, settings, seed)
    weights = _weights_file(target, drafter, settings)
    facts = Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        seed=seed,
        modules=len(training.texts),
        data_bytes=training.num_bytes,
        held_out_modules=len(held_out.texts),
        held_out_bytes=held_out.num_bytes,
        target_parameters=_num_parameters(target),
        drafter_parameters=_num_parameters(drafter),
        file_bytes=len(weights),
        target_seconds=target_seconds,
        writing_seconds=writing_seconds,
        drafter_seconds=draft_schedule.seconds,
        bits=bits_a_byte(target, held_out, settings),
        bits_before_loops=bits_before,
        repetition=_greedy_repetition(judged),
        repetition_before_loops=repetition_before,
        repetition_real=_own_repetition(held_out, settings.new_tokens),
        chain=chain_acceptance(target, drafter, judged, settings.model),
    )
    card = model_card(facts, settings.model, settings, [target_schedule, loop_schedule, draft_schedule])
    print(card)
    prompts = sample_prompts(held_out, NUM_PROMPTS, PROMPT_LENGTH, CONTINUATION, seed, training)
    return {
        "demo_model.safetensors": weights,
        "demo_model.md": card.encode(),
        "demo_prompts.json": json.dumps(prompts, indent=1).encode(),
    }


def _texts_to_learn(target: Target, corpus: Corpus, settings: Settings, seed: int) -> dict[int, Tensor]:
    windows = Windows(corpus, target.embedding.device, settings.model.max_length, seed)
    share = settings.generated // len(settings.prompt_lengths)
    return {
        length: write_texts(target, windows.sample(share, length), settings, seed)
        for length in settings.prompt_lengths
    }


def _judged_texts(target: Target, corpus: Corpus, settings: Settings, seed: int) -> dict[int, Tensor]:
    windows = Windows(corpus, target.embedding.device, settings.model.max_length, seed)
    return {
        length: write_greedily(target, windows.sample(settings.judged, length), settings.new_tokens)
        for length in settings.prompt_lengths
    }


def _greedy_repetition(texts: dict[int, Tensor]) -> float:
    """Return the mean repetition of what follows the prompts, whose lengths are the keys."""
    written = [row.byte().cpu().numpy().tobytes() for p, text in texts.items() for row in text[:, p:]]
    return sum(map(repetition, written)) / len(written)


def _own_repetition(corpus: Corpus, length: int) -> float:
    """Return the mean repetition of a corpus's own text, cut into pieces."""
    text = corpus.joined().tobytes()
    starts = range(0, len(text) - length, length)
    return sum(repetition(text[start : start + length]) for start in starts) / len(starts)


@torch.no_grad()
def _round_to_bfloat16(module: nn.Module) -> None:
    """Give the parameters the values that are stored, so that what is measured is what is shipped."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _weights_file(target: Target, drafter: Drafter, settings: Settings) -> bytes:
    named = [
        (f"{prefix}.{name}", parameter)
        for prefix, module in (("target", target), ("drafter", drafter))
        for name, parameter in module.named_parameters()
    ]
    tensors = {name: parameter.detach().bfloat16().contiguous().cpu() for name, parameter in named}
    return save(tensors, metadata={"config": settings.model.to_json()})
