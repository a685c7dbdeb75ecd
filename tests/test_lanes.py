"""Lanes and groups of them: order, errors that name the lane, shutdown, and nothing left behind."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from kernel_checks import numba_library
from lane_checks import check_lanes
from libraries import side_stream, torch_library

from numba_ddtree import ArgumentError, BackendError, DeviceGroup, LaneError, RoundLanes, device_group, lanes
from numba_ddtree.arrays import device_view
from numba_ddtree.cuda_target import cuda, uint32
from numba_ddtree.devices import find_device_fault, stop_freeing
from numba_ddtree.driver_faults import DriverError, is_lasting, result_of
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


OK, ILLEGAL = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY


class MadeUpDriver:
    """A driver without devices, whose streams answer what `states` says, by device."""

    CUresult = driver.CUresult
    CUstreamCaptureStatus = driver.CUstreamCaptureStatus

    def __init__(self) -> None:
        self.states: dict[int, Any] = {}
        self.refused: set[int] = set()  # devices whose context cannot be made current
        self.capturing: set[int] = set()
        self.queried: list[int] = []
        self.current = [0]

    def cuCtxGetCurrent(self) -> tuple[Any, int]:  # noqa: N802
        return OK, self.current[-1]

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:  # noqa: N802
        self.current[-1] = context
        return (OK,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any]:  # noqa: N802
        if context in self.refused:
            return (self.states[context],)
        self.current.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:  # noqa: N802
        return OK, self.current.pop()

    def cuCtxSynchronize(self) -> tuple[Any]:  # noqa: N802
        return (self.states.get(self.current[-1], OK),)

    def cuStreamIsCapturing(self, handle: int) -> tuple[Any, Any]:  # noqa: N802
        status = driver.CUstreamCaptureStatus
        is_capturing = handle in self.capturing
        return OK, (
            status.CU_STREAM_CAPTURE_STATUS_ACTIVE if is_capturing else status.CU_STREAM_CAPTURE_STATUS_NONE
        )

    def cuStreamQuery(self, handle: int) -> tuple[Any]:  # noqa: N802
        self.queried.append(handle)
        return (self.states.get(handle, OK),)

    def cuGetErrorString(self, fault: Any) -> tuple[Any, bytes]:  # noqa: N802
        return OK, b"the text"


class MadeUpResource:
    """A stream or an event of a device; its number is the stream's handle and the context."""

    is_closed = False

    def __init__(self, made_up: MadeUpDriver, number: int, fails: bool = False) -> None:
        self._driver, self.handle, self._fails = made_up, number, fails

    def sync(self) -> None:
        if state := self._driver.states.get(self.handle, OK):
            raise DriverError(f"{state.name}: the text")

    def close(self) -> None:
        self.is_closed = not self._fails
        if self._fails:
            raise DriverError("CUDA_ERROR_X: not to be closed")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpDriver:
    """Let lanes of device 1 and others be made without devices; they note where Numba is to free nothing."""
    made = MadeUpDriver()

    class MadeUpDevice:
        def __init__(self, device_id: int) -> None:
            self.device_id = device_id

        def set_current(self) -> None:
            made.cuCtxSetCurrent(self.device_id)

        def create_stream(self) -> MadeUpResource:
            return MadeUpResource(made, self.device_id)

        def create_event(self, options: Any = None) -> MadeUpResource:
            return MadeUpResource(made, self.device_id)

    monkeypatch.setattr("cuda.core.Device", MadeUpDevice)
    monkeypatch.setattr(lanes, "driver", made)
    monkeypatch.setattr("cuda.bindings.driver.cuGetErrorString", made.cuGetErrorString)
    monkeypatch.setattr(device_group, "_checked_devices", list)
    monkeypatch.setattr(device_group, "are_linked", lambda device, peer: False)
    return made


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the devices on which Numba was told to free nothing."""
    told: set[int] = set()
    monkeypatch.setattr(lanes, "stop_freeing", told.add)
    return told


def assert_all_closed(group: DeviceGroup) -> None:
    for lane in group:
        assert isinstance(lane, DeviceLane)
        assert lane.stream.is_closed
        assert lane._begun.is_closed
        assert lane._done.is_closed


def test_a_broken_device_is_told_once_and_closed(made_up: MadeUpDriver, stopped: set[int]) -> None:
    group = DeviceGroup([1, 2])
    made_up.states = {1: NOT_READY, 2: ILLEGAL}
    assert [lane.is_broken for lane in group] == [False, True]
    made_up.states[1] = OK
    told = r"^lane 1 \(CUDA device 2\): CUDA_ERROR_ILLEGAL_ADDRESS: the text$"
    for call in (group.synchronize, group.lanes[1].synchronize, group.close):
        with pytest.raises(LaneError, match=told) as caught:
            call()
        assert caught.value.lanes == (1,)
        assert stopped == {2}
    assert_all_closed(group)
    group.close()
    assert group.lanes[1].is_broken
    assert made_up.current == [0]


def test_all_lanes_that_report_a_fault_are_named(made_up: MadeUpDriver, stopped: set[int]) -> None:
    group = DeviceGroup([1, 2, 3])
    made_up.states = {1: ILLEGAL, 3: ILLEGAL}
    named = "lane 0 (CUDA device 1) and lane 2 (CUDA device 3)"
    both = f"({named} report faults, and the first may be of any of them)"
    texts = [f"lane {i} (CUDA device {i + 1}): CUDA_ERROR_ILLEGAL_ADDRESS: the text {both}" for i in (0, 2)]
    calls: list[tuple[Callable[[], object], str]] = [
        (group.lanes[0].synchronize, texts[0]),
        (lambda: group.lanes[2].is_done, texts[1]),
        (group.synchronize, "; ".join(texts)),
        (group.close, "; ".join(texts)),
    ]
    for call, text in calls:
        with pytest.raises(LaneError) as caught:
            call()
        assert str(caught.value) == text
        assert caught.value.lanes == (0, 2)
    assert stopped == {1, 3}
    assert_all_closed(group)


def test_lanes_of_a_broken_device_share_its_fault(made_up: MadeUpDriver, stopped: set[int]) -> None:
    group = DeviceGroup([1, 1, 2])
    made_up.states = {1: ILLEGAL}
    with pytest.raises(LaneError, match=r"lanes 0 and 1 share this device, and the fault may") as caught:
        group.close()
    assert caught.value.lanes == (0, 1)
    assert stopped == {1}


def test_a_context_that_cannot_be_current_names_its_lane(made_up: MadeUpDriver, stopped: set[int]) -> None:
    group = DeviceGroup([1, 2])
    made_up.states, made_up.refused = {1: ILLEGAL}, {1}
    for call in (group.synchronize, group.close):
        with pytest.raises(LaneError, match=r"^lane 0 \(CUDA device 1\): CUDA_ERROR_ILLEGAL_ADDRESS"):
            call()
    assert_all_closed(group)
    assert made_up.current == [0]


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_cannot_be_closed_stops_nothing_else(
    made_up: MadeUpDriver, stopped: set[int], is_broken: bool
) -> None:
    group = DeviceGroup([1, 2])
    lane = group.lanes[0]
    assert isinstance(lane, DeviceLane)
    lane._begun = MadeUpResource(made_up, 1, fails=True)
    if is_broken:
        made_up.states = {1: ILLEGAL}
    # What the work failed of comes before what it leads to.
    told = "CUDA_ERROR_ILLEGAL_ADDRESS: the text" if is_broken else "CUDA_ERROR_X: not to be closed"
    with pytest.raises(LaneError, match=rf"^lane 0 \(CUDA device 1\): {told}$"):
        group.close()
    assert lane.stream.is_closed
    assert lane._done.is_closed
    assert group.lanes[1].stream.is_closed
    assert stopped == ({1} if is_broken else set())


def test_faults_that_pass_break_nothing(made_up: MadeUpDriver, stopped: set[int]) -> None:
    group = DeviceGroup([1, 2])
    made_up.states = {1: driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 2: ILLEGAL}
    made_up.capturing = {2}  # which a query would end
    assert not any(lane.is_broken for lane in group)
    assert made_up.queried == [1]
    with pytest.raises(LaneError, match=r"^lane 0 \(CUDA device 1\): CUDA_ERROR_OUT_OF_MEMORY: the text$"):
        group.lanes[0].synchronize()
    assert stopped == set()
    made_up.capturing = set()
    assert group.lanes[1].is_broken


def test_which_faults_last() -> None:
    assert is_lasting(ILLEGAL)
    assert is_lasting(driver.CUresult.CUDA_ERROR_LAUNCH_FAILED)
    for fault in (OK, NOT_READY, driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED):
        assert not is_lasting(fault)


def test_numba_frees_nothing_on_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.cuda.cudadrv.driver import Context

    context = Context(SimpleNamespace(id=0), 1)
    deferred: dict[int, Any] = {}
    monkeypatch.setattr("numba_ddtree.devices._deferred", deferred)
    # Which Numba makes with its first call of the driver.
    monkeypatch.setattr("numba.cuda.cudadrv.driver._logger", logging.getLogger(__name__), raising=False)
    gpus = [SimpleNamespace(primary_context=context), SimpleNamespace(primary_context=None)]
    monkeypatch.setattr(cuda, "gpus", gpus, raising=False)

    def refuse(pointer: int) -> None:
        raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")

    queues = context.memory_manager.deallocations, context.deallocations
    for queue in queues:
        with pytest.raises(DriverError):
            queue.add_item(refuse, 7, 1 << 20)
    stop_freeing(0)
    stop_freeing(0)
    stop_freeing(1)  # where Numba has nothing
    gc.collect()
    assert list(deferred) == [0]
    for queue in queues:
        for _ in range(30):  # more than Numba puts off otherwise
            queue.add_item(refuse, 7, 1 << 20)
        queue.clear()
    with ExitStack() as stack:  # what the test has stopped
        stack.push(deferred[0])
    assert not any(queue.is_disabled for queue in queues)


ENDS = """
import logging, sys, weakref
from types import SimpleNamespace
import numba.cuda.cudadrv.driver as numba_driver
from numba_ddtree.cuda_target import cuda
from numba_ddtree.devices import stop_freeing


def refuse(pointer):
    raise RuntimeError("refused")


numba_driver._logger = logging.getLogger()
vars(numba_driver.driver)["cuMemFree"] = refuse
context = numba_driver.Context(SimpleNamespace(id=0), 1)
manager, arrays = context.memory_manager, []
manager.deallocations.memory_capacity = 2**40
for address in range(30):
    free = numba_driver._alloc_finalizer(manager, address, address, 512)
    pointer = numba_driver.AutoFreePointer(weakref.proxy(context), address, 512, finalizer=free)
    manager.allocations[address] = pointer
    arrays.append(pointer.own())
cuda.gpus = [SimpleNamespace(primary_context=context)]
if sys.argv[1] == "stopped":
    stop_freeing(0)
"""


@pytest.mark.parametrize("freeing", ["stopped", "going on"])
def test_the_interpreter_ends_quietly_where_numba_frees_nothing(freeing: str) -> None:
    run = subprocess.run([sys.executable, "-c", ENDS, freeing], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0
    assert ("refused" in run.stderr) == ("Traceback" in run.stderr) == (freeing == "going on"), run.stderr


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


def use_group(copies: str | None) -> None:
    """Run a hundred rounds on two new lanes of the device, and leave no garbage."""
    with DeviceGroup([0, 0], copies=copies) as group:
        rounds = RoundLanes.plan(group, 4, 3, 64, 8)
        logits = [[lane.put(np.zeros((2, n, 64), np.float32)) for lane in group] for n in (3, 9)]
        rounds.capture(*logits)
        rounds.start([1] * 4, [5] * 4)
        for _ in range(100):
            rounds.run()
            rounds.gather()
    del rounds, logits
    gc.collect()
    # Numba puts frees off; each use is to find the device as the one before did, and so to need no more.
    cuda.current_context().deallocations.clear()
    cuda.current_context().memory_manager.deallocations.clear()


def own_memory() -> dict[str, int]:
    """Return what this process has in use on device 0, to the byte, without what the driver keeps."""
    in_use = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    pool = result_of(driver.cuDeviceGetMemPool(0))
    in_graphs = driver.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT
    arrays = cuda.current_context().memory_manager.allocations.values()
    return {
        "numba": sum(int(array.size) for array in arrays),
        "pool": int(result_of(driver.cuMemPoolGetAttribute(pool, in_use))),
        "graphs": int(result_of(driver.cuDeviceGetGraphMemAttribute(0, in_graphs))),
    }


def free_bytes() -> int:
    cuda.synchronize()
    return int(cuda.current_context().get_memory_info()[0])


def loses_by_each(free: list[int]) -> bool:
    """Whether there was less memory after each batch than after the one before."""
    return all(before > after for before, after in pairwise(free))


@pytest.mark.gpu
def test_ten_thousand_rounds_leave_nothing_behind() -> None:
    # What is done for the first time makes the driver load code and grow its pools, in chunks of 2 MB. So one
    # batch of uses warms up, in which all kinds of copies are made; those that follow are its equals. Other
    # processes may take memory of the device, too, but what leaks is lost by every batch, of however many.
    gc.collect()
    gc.freeze()  # what was there before need not be searched for garbage after every use
    try:
        owned, free = [], []
        while len(free) < 3 or (len(free) < 10 and loses_by_each(free)):
            for _ in range(34):
                for copies in (None, "direct", "host"):
                    use_group(copies)
            free.append(free_bytes())
            owned.append(own_memory())
    finally:
        gc.unfreeze()
    assert owned[1:] == owned[:1] * (len(owned) - 1)
    assert not loses_by_each(free), free


FAILURE = """
import dataclasses, json, sys, time
import numpy as np
from cuda.bindings import driver
from numba_ddtree import DeviceGroup, KVCaches, LaneError, RoundLanes
from numba_ddtree.arrays import device_view
from numba_ddtree.cuda_target import cuda
from numba_ddtree.driver_faults import result_of


def tell(name, value):
    print(json.dumps([name, value]), flush=True)


def lengths(rounds, lane):
    # By the driver alone, since Numba would do more than copy.
    with group.lanes[lane]:
        view = device_view("lengths", rounds.rounds[lane].result.accept_length)
        copied = np.empty(view.shape, view.dtype)
        result_of(driver.cuMemcpyDtoH(copied.ctypes.data, view.pointer, copied.nbytes))
    return copied.tolist()


def fault_of(call):
    try:
        call()
    except LaneError as error:
        return [list(error.lanes), str(error)]
    return None


group = DeviceGroup([0, len(cuda.gpus) - 1])
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
# Lane 0 alone runs to its end. So what fails after it is lane 1's.
group.lanes[0].launch("round")
group.synchronize()
tell("before", lengths(rounds, 0))


def run():
    group.lanes[1].launch("round")
    if sys.argv[1] == "gathered":  # lane 0 waits for lane 1
        rounds.gather()
    group.synchronize()


began = time.perf_counter()
tell("failed", fault_of(run))
tell("reporting", [lane.index for lane in group if fault_of(lane.synchronize)])
tell("broken", [lane.index for lane in group if lane.is_broken])
if not group.lanes[0].is_broken:
    tell("after", lengths(rounds, 0))
tell("closed", fault_of(group.close))
tell("closed again", fault_of(group.close))
tell("seconds", time.perf_counter() - began)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["alone", "gathered"])
def test_a_failed_kernel_is_told_and_does_not_hang(how: str) -> None:
    run = subprocess.run([sys.executable, "-c", FAILURE, how], capture_output=True, text=True, timeout=120)
    print(run.stdout, run.stderr)
    assert run.returncode == 0, run.stderr[:2000]
    assert "Traceback" not in run.stderr  # nor when the interpreter ends
    told: dict[str, Any] = dict(json.loads(line) for line in run.stdout.splitlines())
    last = len(cuda.gpus) - 1
    assert told["before"] == [2, 2]
    # The bad access is lane 1's. Where the driver gives up lane 0's device with it, both are named.
    assert told["reporting"] == told["broken"]
    assert told["broken"] in ([[0, 1]] if last == 0 else [[1], [0, 1]])
    for key in ("failed", "closed"):
        named, text = told[key]
        assert 1 in named
        assert set(named) <= set(told["broken"])
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in text
        assert ("(lanes 0 and 1 share this device" in text) == (last == 0)
        if last:
            assert f"lane 1 (CUDA device {last})" in text
            assert ("report faults, and the first may be of any of them" in text) == (named == [0, 1])
            assert ("lane 0" in text) == (named == [0, 1])
    assert told["closed"][0] == told["broken"]
    if told["broken"] == [1]:
        assert told["after"] == [2, 2]
    assert told["closed again"] is None
    assert told["seconds"] < 60
