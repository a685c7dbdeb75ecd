"""Wall time of a decoder's stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from numba_ddtree.demo.array_module import ArrayModule

STAGES = {
    "draft": "the drafter",
    "build": "draft_topk, build_tree",
    "verify": "the target",
    "accept": "choose_tokens, accept_tree, compact_kv",
}
"""The stages of a round, and what each holds. The drafter's includes its reading of the accepted nodes."""


class StageTimes:
    """Seconds spent in each stage, the device's work included.

    Attributes
    ----------
    seconds : dict of str to float
        By stage, in the order of their first use: those of `STAGES`, and "prompt", which is read once.
    """

    def __init__(self, module: ArrayModule) -> None:
        self._module = module
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside; waits for the device at the end."""
        began = time.perf_counter()
        try:
            yield
            self._module.synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @property
    def decoding(self) -> float:
        """Seconds of all rounds, without reading the prompts."""
        return sum(self.seconds.get(name, 0.0) for name in STAGES)
