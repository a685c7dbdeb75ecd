"""Wall time of a decoder's stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

    def settle(self) -> None:
        """Count what could not be counted before the device was done; it is done now."""

    @property
    def decoding(self) -> float:
        """Seconds of all rounds, without reading the prompts."""
        return sum(self.seconds.get(name, 0.0) for name in STAGES)


class StageEvents(StageTimes):
    """The same without waiting: on a device by events of the current stream, which `settle` reads."""

    def __init__(self, module: ArrayModule) -> None:
        super().__init__(module)
        self._unsettled: list[tuple[str, Any, Any]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what runs inside, on a device when it is done."""
        if self._module.backend == "numpy":
            with super().stage(name):
                yield
            return
        begin = self._record()
        try:
            yield
        finally:
            self._unsettled.append((name, begin, self._record()))

    def settle(self) -> None:
        """Count the stages whose work is done, in order; the rest counts later."""
        while self._unsettled and self._unsettled[0][2].done:
            name, begin, end = self._unsettled.pop(0)
            self.seconds[name] = self.seconds.get(name, 0.0) + 1e-3 * self._elapsed_ms(begin, end)

    def _elapsed_ms(self, begin: Any, end: Any) -> float:
        return float(self._module.xp.cuda.get_elapsed_time(begin, end))

    def _record(self) -> Any:
        event = self._module.xp.cuda.Event()
        event.record()
        return event
