"""The drafter learns to predict blocks of what the target writes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from numba_ddtree.demo.config import MASK_TOKEN, ModelConfig
from tools.demo_training.schedule import Schedule, half_precision
from tools.demo_training.settings import Settings
from tools.demo_training.torch_model import Drafter, Target

_LOSS_DECAY = 7.0
"""Position i of a block counts by exp(-i / 7): it is of use only if all before it are accepted."""


def _draft(
    target: Target, drafter: Drafter, tokens: Tensor, anchors: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor]:
    """Draft blocks at `anchors` [B, A] of texts [B, T]: logits [B, A, L, 256], true bytes [B, A, L]."""
    with torch.no_grad():
        _, features = target(tokens[:, :-1])
    offsets = torch.arange(config.block_size, device=tokens.device)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    blocks = tokens[rows, anchors[..., None] + offsets]  # [B, A, block]
    inputs = torch.where(offsets == 0, blocks, MASK_TOKEN)
    return drafter(target, features, inputs, anchors)[:, :, 1:], blocks[:, :, 1:]


def draft_loss(logits: Tensor, drafted: Tensor) -> Tensor:
    """Return the weighted mean loss of blocks, in nats a byte."""
    losses = functional.cross_entropy(logits.flatten(0, 2).float(), drafted.flatten(), reduction="none")
    losses = losses.view(-1, drafted.shape[-1])  # [blocks, L]
    weights = torch.exp(-torch.arange(losses.shape[1], device=losses.device) / _LOSS_DECAY)
    return (losses * weights).sum() / (weights.sum() * len(losses))


def train_drafter(
    target: Target, drafter: Drafter, texts: dict[int, Tensor], settings: Settings, seed: int
) -> Schedule:
    """Train the drafter on texts by the length of their prompts; the target stays as it is."""
    device, config = target.embedding.device, settings.model
    target.requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    schedule = Schedule("drafter", drafter, settings.draft_learning_rate, settings.draft_steps)
    for index in range(settings.draft_steps):
        prompt = settings.prompt_lengths[index % len(settings.prompt_lengths)]
        written = texts[prompt]
        rows = torch.randint(len(written), (settings.draft_batch,), generator=generator, device=device)
        shape = settings.draft_batch, settings.draft_blocks
        end = written.shape[1] - config.block_size + 1
        anchors = torch.randint(prompt, end, shape, generator=generator, device=device)
        with half_precision(device):
            loss = draft_loss(*_draft(target, drafter, written[rows], anchors, config))
        schedule.step(loss)
    return schedule


@torch.no_grad()
def chain_acceptance(
    target: Target, drafter: Drafter, texts: dict[int, Tensor], config: ModelConfig
) -> float:
    """Return the mean accept length of a chain: 1 + the drafted bytes before the first wrong one.

    An estimate on greedy texts by the length of their prompts: blocks are spread evenly, while decoding
    starts one where the last ended.
    """
    lengths = []
    for prompt, tokens in texts.items():
        ends = tokens.shape[1] - config.block_size + 1
        anchors = torch.arange(prompt, ends, config.block_size, device=tokens.device)
        with half_precision(tokens.device):
            logits, drafted = _draft(target, drafter, tokens, anchors.expand(len(tokens), -1), config)
        agreed = (logits.argmax(-1) == drafted).long().cumprod(-1).sum(-1)  # [B, A]
        lengths.append(1 + agreed.float().mean())
    return float(torch.stack(lengths).mean())
