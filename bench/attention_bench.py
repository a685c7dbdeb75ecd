"""Times 16-bit tree attention and others' kernels on the same inputs, and keeps the figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import pytest

from bench.attention_inputs import Inputs, Pool
from bench.attention_shapes import OFFSETS, PAGE_SIZE, SPLITS, Shape
from bench.flushed_time import flushed_us
from numba_ddtree import TreeAttention

HOST_CALLS, FEW_HOST_CALLS = 20, 3
SHORT_US = 1000.0  # a call of which it costs little to wait for HOST_CALLS
TIMING = (
    "device time of replays of a CUDA graph of one call, each after a flush of the L2 cache, median of up to "
    "20; {prefixes}; plans for prefixes of 131072 keys, or of more where the shape has more; pages of 64; "
    "splits: as by default for such a plan, as the device chooses (fastest), none (one); TFLOP/s count the "
    "products of all nodes with all keys, 2 B N H (prefix + N) 1088; host_us: the call on the host with out= "
    "and lse=, without waiting, median; FlashMLA alone has no mask; torch's have, and caches without pages"
)


@dataclass(frozen=True)
class Table:
    """What is timed in one manner, and kept in one file for each kernel.

    Attributes
    ----------
    name : str
        To which a kernel's name is added.
    offsets : tuple of int
        Keys beside a shape's prefix; times are the mean over them.
    splits : tuple of str
        Names of `SPLITS`.
    seconds : float
        Of the replays of one call.
    prefixes : str
        The offsets in words.
    """

    name: str
    offsets: tuple[int, ...]
    splits: tuple[str, ...]
    seconds: float
    prefixes: str

    def operation(self, kernel: str) -> str:
        """Return the name of a kernel's file."""
        return f"{self.name}_{kernel}"


MAIN = Table(
    "tree_attention", OFFSETS, tuple(SPLITS), 0.03, "mean over prefixes 0, 17 and 63 keys longer than stated"
)
GRID = Table(
    "tree_attention_grid", (17,), ("default", "fastest"), 0.015, "prefixes 17 keys longer than stated"
)


@dataclass
class AttentionBench:
    """A run's means of timing.

    Attributes
    ----------
    torch : module
    benchmark : callable
        Returns pytest-benchmark's fixture, which shows the figures; tests that skip are not to have it.
    recorder
        `bench.conftest.Recorder`.
    pool : Pool
    kernels : list of str
        Whose tables the peers' times go to.
    """

    torch: Any
    benchmark: Callable[[], Any]
    recorder: Any
    pool: Pool
    kernels: list[str]

    def kernel(self, table: Table, shape: Shape, split: str, kernel: str) -> Any:
        """Time a kernel; return the output of the first offset."""
        plan = TreeAttention.plan(
            shape.batch,
            shape.nodes,
            shape.heads,
            max_prefix_length=shape.planned_prefix,
            max_depth=shape.max_depth,
            page_size=PAGE_SIZE,
            split_keys=SPLITS[split],
            kernel=kernel,
            library="torch",
        )
        us, first = self._time(table, shape, lambda inputs: inputs.planned(plan))
        host_calls = HOST_CALLS if us < SHORT_US else FEW_HOST_CALLS
        host_us = median(self._host_us(first) for _ in range(host_calls))
        operation = table.operation(kernel)
        self.recorder.timing(operation, TIMING.format(prefixes=table.prefixes))
        tflops = self._tflops(table, shape, us)
        self.recorder.kernel(
            operation, shape.case(split), kernel=kernel, us=us, host_us=host_us, tflops=tflops
        )
        self._show(shape, first, device_us=us, host_us=host_us, tflops=tflops)
        return first()[0]

    def peer(
        self, table: Table, shape: Shape, name: str, call_of: Callable[[Inputs], Callable[[], Any]]
    ) -> Any:
        """Time a peer, whose time stands beside all kernels and splits; return what it computes."""
        us, first = self._time(table, shape, call_of)
        for kernel in self.kernels:
            for split in table.splits:
                self.recorder.peer(table.operation(kernel), shape.case(split), name, us)
        self._show(shape, first, device_us=us, tflops=self._tflops(table, shape, us))
        return first()

    def inputs(self, shape: Shape, offset: int) -> Inputs:
        """Make inputs, if the device has room for them."""
        free, _ = self.torch.cuda.mem_get_info()
        cached = self.torch.cuda.memory_reserved()
        if shape.bytes > free + cached:
            pytest.skip(f"{shape.bytes / 2**30:.1f} GiB do not fit this device")
        return Inputs.make(self.pool, shape, offset)

    def _time(
        self, table: Table, shape: Shape, call_of: Callable[[Inputs], Callable[[], Any]]
    ) -> tuple[float, Callable[[], Any]]:
        """Return the mean time over a table's offsets, and the call of the first."""
        times = []
        for offset in reversed(table.offsets):
            call = call_of(self.inputs(shape, offset))
            times.append(flushed_us(self.torch, call, table.seconds))
        return mean(times), call

    @staticmethod
    def _tflops(table: Table, shape: Shape, us: float) -> float:
        return mean(map(shape.flops, table.offsets)) / us / 1e6

    def _host_us(self, call: Callable[[], Any]) -> float:
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)

    def _show(self, shape: Shape, call: Callable[[], Any], **figures: float) -> None:
        """Put figures into pytest-benchmark's table, beside the wall time of a call."""
        benchmark = self.benchmark()
        benchmark.group = f"TreeAttention {shape}"
        benchmark.extra_info.update(figures)

        def call_and_wait() -> None:
            call()
            self.torch.cuda.synchronize()

        benchmark.pedantic(call_and_wait, rounds=2)
