"""What the benchmarks share: device arrays, device and host times, and the results that are kept.

``python -m pytest bench`` prints pytest-benchmark's comparison, a kernel and its peer in one group.
``--save-results DIR`` also writes DIR/<operation>.json, of which tools/bench_report.py makes a page.
"""

from __future__ import annotations

import datetime
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.results_schema import CaseValue, Results, Row
from numba_ddtree.devices import find_device_fault
from numba_ddtree.environment import driver_version
from numba_ddtree.tree_attention.kernels import HOPPER, TENSOR_CORES, has_hopper

TIMING = (
    "kernels: device time by CUDA-graph replays of 20 calls each, median of 20 replays; "
    "host_us: the whole call on the host with out=, without waiting, median of 50; "
    "peers: wall time on the host, median, or where they say device, the device's time between events around "
    "calls that were all enqueued before the first began, median of 10"
)
HOST_CALLS = 50
PAUSE_CYCLES = 20_000_000  # of the device, 10 ms or so: longer than it takes to enqueue ENQUEUED calls
ENQUEUED, PEER_REPEATS = 20, 10
PEER_SECONDS = 0.05  # of a repeat, unless one call takes longer
DEVICE_FAULT = find_device_fault()

Case = dict[str, CaseValue]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--save-results", metavar="DIR", type=Path, help="write DIR/<operation>.json")
    parser.addoption("--commit", help="the commit that is measured, where git cannot tell")
    parser.addoption(
        "--full-attention", action="store_true", help="also time tree attention in shapes of all kinds"
    )
    parser.addoption(
        "--attention-kernels",
        metavar="NAME,...",
        help="the kernels of 16-bit tree attention that are timed (default: all that the device has)",
    )


def attention_kernels(config: pytest.Config) -> list[str]:
    """Return the kernels of 16-bit tree attention that are to be timed."""
    given = config.getoption("--attention-kernels")
    if given is None:
        return [TENSOR_CORES, HOPPER] if DEVICE_FAULT is None and has_hopper() else [TENSOR_CORES]
    names: list[str] = given.split(",")
    if not set(names) <= {TENSOR_CORES, HOPPER}:
        raise pytest.UsageError(
            f"--attention-kernels: {given!r} names others than {TENSOR_CORES} and {HOPPER}"
        )
    return names


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["gpu"] = "none" if DEVICE_FAULT else device_name()


def device_name() -> str:
    """Name of the current device."""
    from cuda.core import Device

    return str(Device().name)


def commit() -> str:
    """Hash of the commit that is measured, with ``-dirty`` where the package's files differ from it."""
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass
class Figures:
    """What was measured of one case of one operation."""

    kernel: dict[str, Any] | None = None
    peers: dict[str, float] = field(default_factory=dict)


class Recorder:
    """The figures of a run; a kernel's and its peers' meet under one operation and case."""

    def __init__(self) -> None:
        self._figures: dict[str, dict[tuple[tuple[str, CaseValue], ...], Figures]] = {}
        self._timings: dict[str, str] = {}

    def _of(self, operation: str, case: Case) -> Figures:
        return self._figures.setdefault(operation, {}).setdefault(tuple(case.items()), Figures())

    def kernel(self, operation: str, case: Case, **figures: Any) -> None:
        """Keep a kernel's figures, by the names of `Row`."""
        self._of(operation, case).kernel = figures

    def peer(self, operation: str, case: Case, peer: str, us: float) -> None:
        """Keep a peer's time."""
        self._of(operation, case).peers[peer] = us

    def timing(self, operation: str, how: str) -> None:
        """Say how the times of an operation are taken, where it is not as `TIMING` says."""
        self._timings[operation] = how

    def save(self, folder: Path, commit: str) -> None:
        """Write one file an operation that has a kernel's figures."""
        for operation in self.operations:
            folder.mkdir(parents=True, exist_ok=True)
            results = self.results(operation, device_name(), driver_version(), commit)
            results.save(folder / f"{operation}.json")

    @property
    def operations(self) -> list[str]:
        """What there are a kernel's figures of."""
        return [
            operation
            for operation, cases in self._figures.items()
            if any(figures.kernel is not None for figures in cases.values())
        ]

    def results(self, operation: str, device: str, driver: str, commit: str) -> Results:
        """Return the figures of one operation."""
        cases = self._figures[operation]
        return Results(
            operation=operation,
            device=device,
            driver=driver,
            date=datetime.date.today(),
            commit=commit,
            timing=self._timings.get(operation, TIMING),
            rows=[row for case, figures in cases.items() for row in _rows(dict(case), figures)],
        )


def _rows(case: Case, figures: Figures) -> list[Row]:
    if figures.kernel is None:
        return []
    if not figures.peers:
        return [Row(case=case, **figures.kernel)]
    return [Row(case=case, peer=peer, peer_us=us, **figures.kernel) for peer, us in figures.peers.items()]


@pytest.fixture(scope="session")
def recorder(request: pytest.FixtureRequest) -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    folder = request.config.getoption("--save-results")
    if folder is not None:
        recorder.save(folder, request.config.getoption("--commit") or commit())


@dataclass
class KernelBench:
    """Measures a public function on the device: `call` launches it on the stream that it is given."""

    benchmark: Any
    recorder: Recorder

    def __call__(
        self, operation: str, case: Case, kernel: str, call: Callable[[Any], object], **figures: Any
    ) -> float:
        """Time the call, and keep its times with `figures`; return the device's, in microseconds.

        Among the figures ``flops`` becomes ``tflops``, and ``bytes`` becomes ``gbps``.
        """
        from numba_ddtree.cuda_target import cuda
        from numba_ddtree.timing import device_us

        us = device_us(call)
        host_us = median(self._host_us(call) for _ in range(HOST_CALLS))
        cuda.synchronize()
        if "flops" in figures:
            figures["tflops"] = figures.pop("flops") / us / 1e6
        if "bytes" in figures:
            figures["gbps"] = figures.pop("bytes") / us / 1e3
        self.recorder.kernel(operation, case, kernel=kernel, us=us, host_us=host_us, **figures)
        self.benchmark.extra_info.update(device_us=us, host_us=host_us, **case)

        def call_and_wait() -> None:
            call(None)
            cuda.synchronize()

        self.benchmark.pedantic(call_and_wait, rounds=20, warmup_rounds=2)
        return us

    @staticmethod
    def _host_us(call: Callable[[Any], object]) -> float:
        start = time.perf_counter()
        call(None)
        return 1e6 * (time.perf_counter() - start)


@pytest.fixture
def kernel_bench(benchmark: Any, recorder: Recorder) -> KernelBench:
    if DEVICE_FAULT:
        pytest.skip(f"no CUDA device: {DEVICE_FAULT}")
    return KernelBench(benchmark, recorder)


@pytest.fixture
def peer_bench(benchmark: Any, recorder: Recorder) -> Callable[..., None]:
    """Time a peer on the host, and keep the median; what is called once is not called before."""

    def run(operation: str, case: Case, peer: str, call: Callable[[], object], rounds: int = 20) -> None:
        benchmark.extra_info.update(case)
        benchmark.pedantic(call, rounds=rounds, warmup_rounds=min(rounds - 1, 1))
        recorder.peer(operation, case, peer, 1e6 * benchmark.stats.stats.median)

    return run


@pytest.fixture
def torch() -> Any:
    """Return torch, if it finds a device."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch finds no device")
    return module


@pytest.fixture
def torch_bench(benchmark: Any, recorder: Recorder, torch: Any) -> Callable[..., None]:
    """Time operations of torch that do not synchronise, on the device."""

    def run(operation: str, case: Case, peer: str, call: Callable[[], object]) -> None:
        us = torch_us(torch, call)
        recorder.peer(operation, case, f"{peer} (device)", us)
        benchmark.extra_info.update(device_us=us, **case)

        def call_and_wait() -> None:
            call()
            torch.cuda.synchronize()

        benchmark.pedantic(call_and_wait, rounds=5, warmup_rounds=1)

    return run


def torch_us(torch: Any, call: Callable[[], object]) -> float:
    """Return the median device time of a call in microseconds, without the gaps that the host would leave."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    enqueued = max(1, min(ENQUEUED, int(PEER_SECONDS / (time.perf_counter() - started))))
    times = []
    for _ in range(PEER_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE_CYCLES)
        start.record()
        for _ in range(enqueued):
            call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / enqueued)
    return median(times)


@pytest.fixture
def on_device() -> Callable[..., list[Any]]:
    """Copy numpy arrays to the device."""
    from numba_ddtree.cuda_target import cuda

    return lambda *arrays: [cuda.to_device(array) for array in arrays]
