"""One optimiser's run over a fixed number of steps."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor, nn

_WARMUP_STEPS = 200
_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 1.0
_REPORTS = 20


class Schedule:
    """AdamW with a linear warm-up and a cosine to zero, and a line of the loss now and then.

    Attributes
    ----------
    curve : list of (int, float)
        Steps done, and the mean loss since the entry before, in bits a byte.
    seconds : float
        Wall time so far.
    """

    def __init__(self, name: str, module: nn.Module, learning_rate: float, steps: int) -> None:
        self._name, self._steps, self._done = name, steps, 0
        self._parameters = list(module.parameters())
        matrices = [p for p in self._parameters if p.ndim > 1]
        vectors = [p for p in self._parameters if p.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, learning_rate, betas=_BETAS)
        warmup = min(_WARMUP_STEPS, steps // 10 + 1)

        def factor(step: int) -> float:
            return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

        self._rate = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)
        self.curve: list[tuple[int, float]] = []
        self._recent: list[Tensor] = []
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time since the first step was prepared."""
        return time.perf_counter() - self._began

    def step(self, loss: Tensor) -> None:
        """Update the parameters from a loss in nats a byte."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, _LARGEST_GRADIENT)
        self._optimizer.step()
        self._rate.step()
        self._recent.append(loss.detach())
        self._done += 1
        if self._done % max(self._steps // _REPORTS, 1) == 0 or self._done == self._steps:
            self._report()

    def _report(self) -> None:
        bits = float(torch.stack(self._recent).mean()) / math.log(2)
        self._recent.clear()
        self.curve.append((self._done, round(bits, 4)))
        progress = f"step {self._done:6d} of {self._steps}"
        print(f"{self._name}: {progress}, {bits:.3f} bits a byte, {self.seconds:.0f} s", flush=True)


def half_precision(device: torch.device) -> torch.autocast:
    """Return the context in which products are bfloat16; on a CPU they stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
