"""Lanes and groups of them: order, errors that name the lane, shutdown, and nothing left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_checks import numba_library
from lane_checks import check_lanes
from libraries import side_stream, torch_library

from numba_ddtree import ArgumentError, BackendError, DeviceGroup, LaneError, device_group, lanes
from numba_ddtree.arrays import device_view
from numba_ddtree.cuda_target import uint32
from numba_ddtree.devices import find_device_fault
from numba_ddtree.driver_faults import DriverError
from numba_ddtree.lanes import DeviceLane, Lane
from numba_ddtree.launch import AnyLaunch, Kernel

SIZES = (7, 3, 200, 17)
TESTS = Path(__file__).parent


@pytest.fixture
def two() -> Iterator[DeviceGroup]:
    with DeviceGroup([None, None]) as group:
        yield group


def test_a_group_of_the_host(two: DeviceGroup) -> None:
    assert len(two) == 2
    assert two.on_host
    assert [str(lane) for lane in two] == ["lane 0 (host)", "lane 1 (host)"]
    assert two.home is two.lanes[0]
    assert all(lane.is_done for lane in two)
    two.fork(None)
    two.join(None)
    two.synchronize()


def test_a_lane_runs_what_it_captured(two: DeviceGroup) -> None:
    seen: list[Any] = []
    lane = two.lanes[1]
    lane.capture("work", seen.append)
    assert lane.graphs == ("work",)
    assert seen == []
    lane.launch("work")
    lane.launch("work")
    assert seen == [None, None]
    assert lane.elapsed_us() >= 0
    with pytest.raises(ArgumentError, match=r"^name: got 'other'; .* lane 1 \(host\) has captured: 'work'"):
        lane.launch("other")
    with pytest.raises(ArgumentError, match=r"lane 0 \(host\) has captured: nothing"):
        two.lanes[0].launch("work")


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], r"^devices: got none; expected at least one"),
        ("01", r"^devices: got '01'; expected a sequence"),
        (3, r"^devices: got 3; expected a sequence"),
        ([None, 0], r"^devices: got \[None, 0\]; expected devices, or None throughout"),
    ],
)
def test_what_is_no_group_is_refused(devices: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DeviceGroup(devices)


def test_what_is_no_way_to_copy_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^copies: got 'peer'; expected None, 'direct' or 'host'"):
        DeviceGroup([None], copies="peer")


@pytest.mark.parametrize(
    ("count", "index", "there"),
    [
        (1, 1, "there is 1"),
        (2, 2, "there are 2, 0 to 1"),
        (2, -1, ""),
        (2, True, ""),
        (2, 0.5, ""),
        (2, "0", ""),
    ],
)
def test_a_missing_device_is_named(
    monkeypatch: pytest.MonkeyPatch, count: int, index: Any, there: str
) -> None:
    monkeypatch.setattr(device_group, "require_device", lambda: None)
    monkeypatch.setattr(device_group, "cuda", SimpleNamespace(gpus=range(count)))
    with pytest.raises(
        ArgumentError, match=rf"^devices\[1\]: got {index!r}; expected a CUDA device: {there}"
    ):
        DeviceGroup([0, index])


def test_a_busy_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def __init__(self, device_id: int) -> None: ...

        def set_current(self) -> None:
            raise DriverError("CUDA_ERROR_DEVICE_UNAVAILABLE: device(s) is/are busy or unavailable")

    monkeypatch.setattr("cuda.core.Device", Busy)
    calls: list[Any] = []
    driver = SimpleNamespace(cuCtxGetCurrent=lambda: (0, 7), cuCtxSetCurrent=calls.append)
    monkeypatch.setattr(lanes, "driver", driver)
    with pytest.raises(LaneError) as caught:
        DeviceLane(3, 1)
    assert str(caught.value) == (
        "lane 3 (CUDA device 1): the device cannot be used: CUDA_ERROR_DEVICE_UNAVAILABLE: device(s) is/are "
        "busy or unavailable; another process has it to itself"
    )
    assert caught.value.lanes == (3,)
    assert calls == [7]  # the device that was current is so again


def test_without_a_device_a_group_says_so() -> None:
    if find_device_fault() is None:
        pytest.skip("there is a device")
    with pytest.raises(BackendError, match="no CUDA device"):
        DeviceGroup([0, 0])


def test_what_fails_names_its_lane(two: DeviceGroup) -> None:
    lane = two.lanes[1]
    with pytest.raises(ArgumentError, match=r"^lane 1 \(host\), logits: got 1; expected 2") as caught, lane:
        raise ArgumentError("logits", 1, "2")
    assert caught.value.argument == "lane 1 (host), logits"
    with pytest.raises(LaneError, match=r"^lane 1 \(host\): no driver") as failed, lane:
        raise BackendError("no driver")
    assert failed.value.lanes == (1,)
    with pytest.raises(LaneError, match=r"^lane 1 \(host\): CUDA_ERROR_X: a b"), lane:
        raise DriverError("CUDA_ERROR_X:\n a b")
    with pytest.raises(ZeroDivisionError), lane:
        _ = 1 // 0
    with pytest.raises(LaneError, match=r"^as it is"), lane:
        raise LaneError((0,), "as it is")


class FailingLane(Lane):
    """A lane whose work has failed."""

    closed = False

    def synchronize(self) -> None:
        raise LaneError((self.index,), f"{self}: it failed")

    def close(self) -> None:
        self.closed = True
        self.synchronize()


def failing_group() -> DeviceGroup:
    group = DeviceGroup([None] * 3)
    group.lanes = (FailingLane(0, None), group.lanes[1], FailingLane(2, None))
    return group


def test_every_failed_lane_is_told_and_all_are_closed() -> None:
    group = failing_group()
    both = r"^lane 0 \(host\): it failed; lane 2 \(host\): it failed$"
    with pytest.raises(LaneError, match=both) as caught:
        group.synchronize()
    assert caught.value.lanes == (0, 2)
    group.lanes[1].capture("work", print)
    with pytest.raises(LaneError, match=both):
        group.close()
    assert group.lanes[0].closed  # type: ignore[attr-defined]
    assert group.lanes[1].graphs == ()


def test_a_failed_lane_does_not_hide_what_came_before() -> None:
    with pytest.raises(ValueError, match="first") as caught, failing_group():
        raise ValueError("first")
    assert caught.value.__notes__ == ["lane 0 (host): it failed", "lane 2 (host): it failed"]
    with pytest.raises(LaneError, match="it failed"), failing_group():
        pass


def test_how_arrays_go_from_lane_to_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {(0, 1), (1, 0)}
    monkeypatch.setattr(device_group, "are_linked", lambda device, peer: (device, peer) in links)
    group = DeviceGroup([None])
    group.lanes = tuple(Lane(index, device) for index, device in enumerate((0, 1, 2, 0)))
    modes = [group.copy_mode(lane, group.home) for lane in group.lanes]
    assert modes == [None, "direct", "host", None]


# On a device.

TURNS = 500_000  # a few milliseconds


def spin_kernel(counter, turns):  # type: ignore[no-untyped-def]
    """Take a while in one block, for which the rest of the device is free."""
    value = counter[0]
    for _ in range(turns):
        value = uint32(value * uint32(1664525) + uint32(1013904223))
    counter[0] = value


def double_kernel(array):  # type: ignore[no-untyped-def]
    array[0] *= 2


SPIN = Kernel(spin_kernel, ("void(uint32[::1], int32)",), 1)
DOUBLE = Kernel(double_kernel, ("void(int32[::1])",), 1)


def prepared_spin(lane: Lane, turns: int) -> AnyLaunch:
    """Prepare a spin on a lane's device."""
    counter = lane.put(np.zeros(1, np.uint32))
    with lane:
        return SPIN.prepare(1, device_view("counter", counter), np.int32(turns))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("copies", [None, "direct", "host"])
def test_two_lanes_on_one_device(rng: np.random.Generator, captured: bool, copies: str | None) -> None:
    with DeviceGroup([0, 0], copies=copies) as devices:
        check_lanes(rng, numba_library(), devices, SIZES, captured=captured)


@pytest.mark.gpu
def test_many_lanes_of_torch(rng: np.random.Generator) -> None:
    library = torch_library()
    with DeviceGroup([0] * 5) as devices:
        check_lanes(rng, library, devices, (33, 15, 512, 64), captured=True)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [151_643, 163_840])
@pytest.mark.parametrize("places", [(3, 3), (1, 5)])
def test_lanes_of_a_large_vocabulary(rng: np.random.Generator, V: int, places: tuple[int, int]) -> None:
    with DeviceGroup([0, 0]) as devices:
        sizes = (5, 3, V, 9)
        check_lanes(rng, numba_library(), devices, sizes, captured=True, places=places, rounds=2, starts=3)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [None, "direct", "host"])
def test_two_devices(rng: np.random.Generator, copies: str | None) -> None:
    from numba_ddtree.cuda_target import cuda

    if len(cuda.gpus) < 2:
        pytest.skip("one device only")
    with DeviceGroup([1, 0, 1], copies=copies) as devices:
        assert int(cuda.get_current_device().id) == 0  # as before
        check_lanes(rng, numba_library(), devices, SIZES, captured=True)


@pytest.mark.gpu
def test_lanes_of_one_device_overlap() -> None:
    with DeviceGroup([0, 0, 0, 0], timing=True) as devices:
        for lane in devices:
            lane.capture("spin", prepared_spin(lane, TURNS).launch)

        def run(chosen: list[Lane]) -> float:
            started = time.perf_counter()
            for lane in chosen:
                lane.launch("spin")
            devices.synchronize()
            return time.perf_counter() - started

        run(list(devices))
        alone = [min(run([lane]) for _ in range(5)) for lane in devices]
        together = min(run(list(devices)) for _ in range(5))
        assert together < 0.6 * sum(alone)
        assert all(1e-6 * lane.elapsed_us() <= together * 1.5 for lane in devices)
        assert sum(1e-6 * lane.elapsed_us() for lane in devices) > 1.5 * together


@pytest.mark.gpu
def test_launching_does_not_wait() -> None:
    with DeviceGroup([0, 0]) as devices:
        lane = devices.lanes[1]
        spin = prepared_spin(lane, 20 * TURNS)
        with lane:
            spin.launch(lane.stream)
        assert not lane.is_done
        assert devices.lanes[0].is_done
        with pytest.raises(ArgumentError, match=r"^timing: got False"):
            lane.elapsed_us()
        devices.synchronize()
        assert lane.is_done


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["torch", "handle"])
def test_lanes_come_after_a_stream_and_a_stream_after_lanes(form: str) -> None:
    torch_library()
    with DeviceGroup([0, 0]) as devices, side_stream(form) as (torch, delayed_copy, options):
        stream = options["stream"]
        arrays = [delayed_copy(torch.tensor([21], dtype=torch.int32)) for _ in devices]
        devices.fork(stream)
        for lane, array in zip(devices, arrays, strict=True):
            with lane:
                DOUBLE.prepare(1, device_view("array", array)).launch(lane.stream)
        devices.join(stream)
        with torch.cuda.stream(stream if form == "torch" else torch.cuda.ExternalStream(stream)):
            copies = [array.to("cpu") for array in arrays]
        assert [copy.item() for copy in copies] == [42, 42]


@pytest.mark.gpu
def test_what_fails_in_a_capture_leaves_the_lane_usable() -> None:
    with DeviceGroup([0, 0]) as devices:
        lane = devices.lanes[1]
        array = lane.put(np.zeros(3, np.int32))

        def fails(stream: Any) -> None:
            lane.write(array, np.ones(3, np.int32))
            raise ArgumentError("logits", 1, "2")

        with pytest.raises(ArgumentError, match=r"^lane 1 \(CUDA device 0\), logits"):
            lane.capture("work", fails)
        lane.capture("work", lambda stream: None)
        lane.launch("work")
        lane.write(array, np.full(3, 7, np.int32))
        lane.synchronize()
        assert array.copy_to_host().tolist() == [7, 7, 7]
        with pytest.raises(ArgumentError, match=r"^lane 1 \(CUDA device 0\), content: got shape"):
            lane.write(array, np.zeros(2, np.int32))


@pytest.mark.gpu
def test_ten_thousand_rounds_leave_nothing_behind(rng: np.random.Generator) -> None:
    from numba_ddtree import RoundLanes
    from numba_ddtree.cuda_target import cuda

    def use_group() -> None:
        with DeviceGroup([0, 0], copies="host" if rng.random() < 0.5 else None) as devices:
            rounds = RoundLanes.plan(devices, 4, 3, 64, 8)
            logits = [[lane.put(np.zeros((2, n, 64), np.float32)) for lane in devices] for n in (3, 9)]
            rounds.capture(*logits)
            rounds.start([1] * 4, [5] * 4)
            for _ in range(100):
                rounds.run()
                rounds.gather()

    def free_bytes() -> int:
        gc.collect()
        context = cuda.current_context()
        context.deallocations.clear()
        cuda.synchronize()
        return int(context.get_memory_info()[0])

    for _ in range(10):  # what the driver keeps for reuse
        use_group()
    before = free_bytes()
    for _ in range(100):
        use_group()
    assert before - free_bytes() <= 0


FAILURE = """
import dataclasses, sys, time
import numpy as np
from cuda.bindings import driver
from numba_ddtree import DeviceGroup, KVCaches, LaneError, RoundLanes
from numba_ddtree.arrays import device_view
from numba_ddtree.cuda_target import cuda
from numba_ddtree.driver_faults import result_of

other = len(cuda.gpus) - 1
group = DeviceGroup([0, other])
caches, options = [], []
for lane in group:
    with lane:
        caches.append(KVCaches.plan(lane.put(np.zeros((8, 2, 1024), np.float32))))
        page = 2**29 if lane.index == 1 else 0
        options.append({"compact_kv": {"block_table": lane.put(np.full((2, 8), page, np.int32))}})
# What says how many pages there are is wrong, so that the kernel cannot know the page id for a bad one.
caches[1] = dataclasses.replace(caches[1], num_blocks=2**30)
rounds = RoundLanes.plan(group, 4, 2, 8, 3, caches=caches, lane_options=options)
rounds.start([1] * 4, [0] * 4)
draft = np.zeros((2, 2, 8), np.float32)
draft[..., 3], draft[..., 5] = 2, 1.9
target = np.zeros((2, 4, 8), np.float32)
target[..., 5] = 9
rounds.capture([lane.put(draft) for lane in group], [lane.put(target) for lane in group])
began = time.perf_counter()
try:
    rounds.run()
    rounds.gather()
    group.synchronize()
except LaneError as error:
    print("failed", error.lanes, error)
if other:
    group.lanes[0].synchronize()
    with group.lanes[0]:
        # By the driver alone: Numba frees what it has on any device, which fails on the other.
        view = device_view("lengths", rounds.rounds[0].result.accept_length)
        lengths = np.empty(view.shape, view.dtype)
        result_of(driver.cuMemcpyDtoH(lengths.ctypes.data, view.pointer, lengths.nbytes))
        print("other", lengths.tolist())
try:
    group.close()
except LaneError as error:
    print("closed", error.lanes, error)
print("seconds", time.perf_counter() - began)
"""


@pytest.mark.gpu
def test_a_failed_kernel_is_told_and_does_not_hang() -> None:
    from numba_ddtree.cuda_target import cuda

    run = subprocess.run([sys.executable, "-c", FAILURE], capture_output=True, text=True, timeout=120)
    print(run.stdout, run.stderr)
    lines = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    last = len(cuda.gpus) - 1
    for key in ("failed", "closed"):
        assert key in lines, run.stderr[-2000:]
        assert "1" in lines[key].split(")")[0]  # of the lanes at fault
        assert f"(CUDA device {last}): " in lines[key]
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in lines[key]
        assert "(lanes 0 and 1 share this device" in lines[key] if last == 0 else "share" not in lines[key]
    assert float(lines["seconds"]) < 60
    if last:
        assert "lane 0" not in lines["failed"]
        assert lines["other"] == "[2, 2]"
