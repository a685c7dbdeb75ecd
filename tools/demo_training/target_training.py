"""The target learns to predict the next byte of the corpus, and then not to run in circles."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from numba_ddtree.demo.config import START_TOKEN
from tools.demo_training.corpus import Corpus, line_starts
from tools.demo_training.schedule import Schedule, half_precision
from tools.demo_training.settings import Settings
from tools.demo_training.torch_model import Target
from tools.demo_training.writing import write_greedily

_LOOP_WINDOW = 24
_HASH_FACTOR = 6364136223846793005


class Windows:
    """Random windows of a corpus that begin at a line, on a device, each after the start token."""

    def __init__(self, corpus: Corpus, device: torch.device, room: int, seed: int) -> None:
        text = corpus.joined()
        self._text = torch.from_numpy(text.copy()).to(device)
        self._starts = torch.from_numpy(line_starts(text, room)).to(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def sample(self, count: int, length: int) -> Tensor:
        """Return int64 [count, length]: the start token and the text's first length - 1 bytes."""
        device = self._text.device
        chosen = torch.randint(len(self._starts), (count,), generator=self._generator, device=device)
        offsets = torch.arange(length - 1, device=device)
        tokens = self._text[self._starts[chosen, None] + offsets].long()
        return functional.pad(tokens, (1, 0), value=START_TOKEN)


def next_byte_loss(target: Target, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each byte of [B, T + 1] from those before it, in nats."""
    logits, _ = target(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_target(target: Target, corpus: Corpus, settings: Settings, seed: int) -> Schedule:
    """Train the target on the corpus; return its loss curve."""
    device, length = target.embedding.device, settings.model.max_length + 1
    windows = Windows(corpus, device, length, seed)
    schedule = Schedule("target", target, settings.learning_rate, settings.steps)
    for _ in range(settings.steps):
        with half_precision(device):
            loss = next_byte_loss(target, windows.sample(settings.batch, length))
        schedule.step(loss)
    return schedule


def repeated_windows(tokens: Tensor, window: int) -> Tensor:
    """Tell of each window of [B, T] whether its row had it before; bool [B, T - window + 1]."""
    hashes = torch.zeros_like(tokens[:, window - 1 :])
    for offset in range(window):
        hashes = hashes * _HASH_FACTOR + tokens[:, offset : tokens.shape[1] - window + 1 + offset] + 1
    ordered, order = hashes.sort(dim=1, stable=True)
    again = functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(again).scatter(1, order, again)


def unlikelihood_loss(target: Target, tokens: Tensor, prompt: int) -> Tensor:
    """Return the loss of bytes that end a repeated window of what the target wrote, [B, T].

    Unlikelihood, -log(1 - p), of Welleck et al. (arXiv 1908.04319), a mean over all written bytes.
    """
    logits, _ = target(tokens[:, :-1])
    written = tokens[:, prompt:]
    log_probs = logits[:, prompt - 1 :].float().log_softmax(-1)  # [B, T - prompt, 256]
    # Taken from the other bytes' probabilities: 1 - p rounds to 0 for a loop that the model is sure of.
    others = log_probs.masked_fill(functional.one_hot(written, log_probs.shape[-1]).bool(), -torch.inf)
    losses = -others.logsumexp(-1)
    repeated = functional.pad(repeated_windows(written, _LOOP_WINDOW), (_LOOP_WINDOW - 1, 0))
    return (losses * repeated).mean()


def discourage_loops(target: Target, corpus: Corpus, settings: Settings, seed: int) -> Schedule:
    """Let the target write, and make it less sure of what it repeats; the corpus keeps its weight."""
    device, length = target.embedding.device, settings.model.max_length + 1
    windows = Windows(corpus, device, length, seed)
    steps = settings.loop_rounds * settings.loop_steps
    schedule = Schedule("loops", target, settings.loop_learning_rate, steps)
    for index in range(settings.loop_rounds):
        prompt = settings.prompt_lengths[index % len(settings.prompt_lengths)]
        count = settings.loop_steps * settings.batch // 2
        texts = write_greedily(target, windows.sample(count, prompt), settings.new_tokens)
        for part in texts.split(settings.batch // 2):
            with half_precision(device):
                loss = next_byte_loss(target, windows.sample(settings.batch // 2, length))
                loss = loss + unlikelihood_loss(target, part, prompt)
            schedule.step(loss)
    return schedule


@torch.no_grad()
def bits_a_byte(target: Target, corpus: Corpus, settings: Settings) -> float:
    """Return the loss on a corpus, cut into windows that each start without context."""
    device, length = target.embedding.device, target.config.max_length
    text = torch.from_numpy(corpus.joined().copy()).long()
    windows = text[: len(text) // length * length].view(-1, length)[: settings.held_out_windows]
    tokens = functional.pad(windows, (1, 0), value=START_TOKEN)
    losses = []
    for part in tokens.split(settings.batch):
        with half_precision(device):
            losses.append(float(next_byte_loss(target, part.to(device))) * len(part))
    return sum(losses) / len(tokens) / math.log(2)
