"""Text that the target writes itself, for the drafter to learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from tools.demo_training.schedule import half_precision
from tools.demo_training.settings import Settings
from tools.demo_training.torch_model import Target

_MOST_AT_ONCE = 4096
_SAMPLED_SHARE = 0.25
_SAMPLED_TEMPERATURE = 0.8


@torch.no_grad()
def _write(target: Target, prompts: Tensor, new_tokens: int, draw: torch.Generator | None) -> Tensor:
    """Continue prompts [B, P] to [B, P + new_tokens], by the most probable byte or by draws."""
    batch, length = prompts.shape
    dtype = torch.bfloat16 if prompts.is_cuda else torch.float32
    caches = target.new_caches(batch, length + new_tokens, dtype)
    tokens = torch.cat((prompts, prompts.new_zeros(batch, new_tokens)), dim=1)
    start = 0
    for end in range(length, length + new_tokens):
        with half_precision(prompts.device):
            logits, _ = target(tokens[:, start:end], caches, start)
        last = logits[:, -1].float()
        if draw is None:
            tokens[:, end] = last.argmax(-1)
        else:
            probs = (last / _SAMPLED_TEMPERATURE).softmax(-1)
            tokens[:, end] = torch.multinomial(probs, 1, generator=draw)[:, 0]
        start = end
    return tokens


def write_greedily(target: Target, prompts: Tensor, new_tokens: int) -> Tensor:
    """Continue prompts, int64 [B, P], by the most probable byte; returns [B, P + new_tokens]."""
    parts = prompts.split(_MOST_AT_ONCE)
    return torch.cat([_write(target, part, new_tokens, None) for part in parts])


def write_texts(target: Target, prompts: Tensor, settings: Settings, seed: int) -> Tensor:
    """Continue prompts, a quarter of them by draws and the rest greedily; drawn texts come first."""
    draw = torch.Generator(prompts.device).manual_seed(seed)
    sampled = int(len(prompts) * _SAMPLED_SHARE)
    drawn = _write(target, prompts[:sampled], settings.new_tokens, draw)
    return torch.cat((drawn, write_greedily(target, prompts[sampled:], settings.new_tokens)))
