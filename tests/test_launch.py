"""Prepared launches: what the driver is told, on which stream and device; code kept on disk."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda_driver
from kernel_checks import await_copies, numba_library
from libraries import cupy_library, torch_library
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree import ArgumentError, BackendError, code_cache, launch
from numba_ddtree.arrays import DeviceView, c_strides, device_view
from numba_ddtree.launch import LaunchSequence, LoadedKernel, PreparedLaunch, warmup
from numba_ddtree.round_state import ADVANCE, START_REQUESTS
from numba_ddtree.tree_accept import accept_tree
from numba_ddtree.tree_build import build_tree

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


class Driver:
    """Keeps what is launched: the grid, the stream, and the arguments' memory as it is at the launch."""

    CU_STREAM_LEGACY = 1
    CUlaunchAttribute = cuda_driver.CUlaunchAttribute
    CUlaunchAttributeID = cuda_driver.CUlaunchAttributeID
    CUlaunchConfig = cuda_driver.CUlaunchConfig

    def __init__(self, slots: int, fault: int = 0) -> None:
        self.slots, self.fault = slots, fault
        self.calls: list[tuple[Any, ...]] = []
        self.with_attributes: list[Any] = []  # configurations of the launches that have attributes
        self.memory: list[bytes] = []

    def CUstream(self, handle: int) -> int:  # noqa: N802
        return handle

    def cuCtxGetDevice(self) -> tuple[int, int]:  # noqa: N802
        return 0, 0

    def cuLaunchKernel(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        *call, parameters, extra = arguments
        return self.note(call, parameters, extra)

    def cuLaunchKernelEx(  # noqa: N802
        self, config: Any, function: Any, parameters: int, extra: int
    ) -> tuple[int]:
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        self.with_attributes.append(config)
        call = [function, *grid, *block, config.sharedMemBytes, int(config.hStream)]
        return self.note(call, parameters, extra)

    def note(self, call: list[Any], parameters: int, extra: int) -> tuple[int]:
        assert extra == 0
        self.calls.append(tuple(call))
        addresses = (ctypes.c_uint64 * self.slots).from_address(parameters)
        self.memory.append(b"".join(ctypes.string_at(address, 8) for address in addresses))
        return (self.fault,)


def view(shape: tuple[int, ...], dtype: Any, pointer: int = 0x7F00_0000_1000) -> DeviceView:
    kind = np.dtype(dtype)
    return DeviceView(pointer, shape, c_strides(shape, kind.itemsize), kind, 0, None)


def loaded(arguments: list[Any]) -> LoadedKernel:
    return LoadedKernel.of(SimpleNamespace(handle=99), 0, [launch._kind(a) for a in arguments])


def prepared(
    arguments: list[Any], blocks: int = 7, is_cooperative: bool = False, cluster_blocks: int = 1
) -> PreparedLaunch:
    code = loaded(arguments)
    return PreparedLaunch("kernel", code, blocks, 128, arguments, 4096, is_cooperative, cluster_blocks)


COOPERATIVE = cuda_driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
CLUSTER = cuda_driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SCALARS = [
    (np.bool_(True), b"\x01"),
    (np.int32(-5), struct.pack("<i", -5)),
    (np.uint32(2**32 - 1), b"\xff" * 4),
    (np.int64(-(2**63)), struct.pack("<q", -(2**63))),
    (np.uint64(2**64 - 1), b"\xff" * 8),
    (np.float32(0.1), np.float32(0.1).tobytes()),
    (np.float64(-np.inf), struct.pack("<d", -np.inf)),
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(slots: int, fault: int = 0) -> Driver:
        fake = Driver(slots, fault)
        monkeypatch.setattr(launch, "driver", fake)
        forget()
        return fake

    def forget() -> None:
        launch._driver_stream.cache_clear()
        launch._configuration.cache_clear()

    yield install
    forget()


def test_arguments_are_laid_out_as_numba_reads_them(driver: Any) -> None:
    array = view((3, 4, 5), np.float32)
    arguments = [array, *(scalar for scalar, _ in SCALARS), view((0,), np.int32, 0)]
    given = prepared(arguments)
    fake = driver(5 + 6 + len(SCALARS) + 5 + 2)
    given.launch(123)
    (call,), (memory,) = fake.calls, fake.memory
    assert call[1:] == (7, 1, 1, 128, 1, 1, 4096, 123)
    slots = [memory[start : start + 8] for start in range(0, len(memory), 8)]
    of_array = struct.unpack("<11q", b"".join(slots[:11]))
    assert of_array == (0, 0, 60, 4, array.pointer, 3, 4, 5, 80, 20, 4)
    for slot, (_, expected) in zip(slots[11:], SCALARS, strict=False):
        assert slot[: len(expected)] == expected
    assert struct.unpack("<7q", b"".join(slots[-7:])) == (0, 0, 0, 4, 0, 0, 4)


def test_arguments_are_replaced_for_later_launches(driver: Any) -> None:
    given = prepared([view((2, 2), bfloat16), np.int32(1), np.float32(2)])
    fake = driver(9 + 2)
    given.launch(0)
    given.replace(0, view((2, 2), bfloat16, 4096))
    given.replace(1, np.int32(-1))
    given.replace(2, np.float32(8))
    given.launch(0)
    before, after = (struct.unpack("<9qi4xf4x", memory) for memory in fake.memory)
    assert before == (0, 0, 4, 2, 0x7F00_0000_1000, 2, 2, 4, 2, 1, 2.0)
    assert after == (0, 0, 4, 2, 4096, 2, 2, 4, 2, -1, 8.0)
    assert fake.calls[0][-1] == Driver.CU_STREAM_LEGACY


@pytest.mark.parametrize(
    ("place", "argument"),
    [
        (0, view((2, 3), np.float32)),
        (0, view((2, 2), np.int32)),
        (0, view((4,), np.float32)),
        (0, np.float32(1)),
        (1, np.int64(1)),
        (1, view((2, 2), np.float32)),
    ],
)
def test_arguments_of_another_kind_are_refused(place: int, argument: Any) -> None:
    given = prepared([view((2, 2), np.float32), np.int32(1)])
    with pytest.raises(ArgumentError, match=f"^argument {place}: got "):
        given.replace(place, argument)


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_no_blocks_are_no_launch(driver: Any, is_cooperative: bool) -> None:
    given = prepared([np.int32(1)], blocks=0, is_cooperative=is_cooperative)
    fake = driver(1)
    given.launch(0)
    assert fake.calls == []


def test_a_launch_may_be_cooperative(driver: Any) -> None:
    arguments = [np.int32(-5), view((4,), np.float32)]
    cooperative, other = prepared(arguments, is_cooperative=True), prepared(arguments)
    fake = driver(8)
    for stream in (55, 66, 55, 0):
        cooperative.launch(stream)
        other.launch(stream)
    for config in fake.with_attributes:
        (attribute,) = config.attrs
        assert config.numAttrs == 1
        assert (attribute.id, attribute.value.cooperative) == (COOPERATIVE, 1)
    # Of several threads each has a stream of its own: what one was told stays as it was.
    assert [int(config.hStream) for config in fake.with_attributes] == [55, 66, 55, Driver.CU_STREAM_LEGACY]
    functions = [call[0] for call in fake.calls]
    assert [int(each) for each in functions] == [99] * 8
    grids = [call[1:] for call in fake.calls]
    assert grids[::2] == grids[1::2]
    streams = (55, 66, 55, Driver.CU_STREAM_LEGACY)
    assert grids[::2] == [(7, 1, 1, 128, 1, 1, 4096, stream) for stream in streams]
    assert fake.memory == [fake.memory[0]] * 8


def attributes_of(config: Any) -> dict[Any, Any]:
    """Return what a launch's configuration says beside its grid, by name."""
    values = {}
    for attribute in config.attrs:
        if attribute.id == COOPERATIVE:
            values[attribute.id] = attribute.value.cooperative
        else:
            dimensions = attribute.value.clusterDim
            values[attribute.id] = dimensions.x, dimensions.y, dimensions.z
    assert len(values) == len(config.attrs) == config.numAttrs
    return values


@pytest.mark.parametrize(
    ("is_cooperative", "cluster_blocks", "expected"),
    [
        (True, 2, {COOPERATIVE: 1, CLUSTER: (2, 1, 1)}),
        (False, 2, {CLUSTER: (2, 1, 1)}),
        (True, 1, {COOPERATIVE: 1}),
        (False, 4, {CLUSTER: (4, 1, 1)}),
    ],
)
def test_a_launch_may_be_of_clusters(
    driver: Any, is_cooperative: bool, cluster_blocks: int, expected: dict[Any, Any]
) -> None:
    arguments = [np.int32(-5), view((4,), np.float32)]
    given = prepared(arguments, 8, is_cooperative, cluster_blocks)
    fake = driver(8)
    for stream in (55, 66, 55):
        given.launch(stream)
    assert [attributes_of(config) for config in fake.with_attributes] == [expected] * 3
    assert [call[1:] for call in fake.calls] == [(8, 1, 1, 128, 1, 1, 4096, each) for each in (55, 66, 55)]


def test_launches_of_one_grid_keep_their_attributes(driver: Any) -> None:
    kinds = [(False, 1), (True, 1), (False, 2), (True, 2)]
    launches = [prepared([np.int32(1)], 8, *kind) for kind in kinds]
    fake = driver(1)
    for _ in range(2):
        for given in launches:
            given.launch(55)
    assert len(fake.calls) == 8
    expected = [{COOPERATIVE: 1}, {CLUSTER: (2, 1, 1)}, {COOPERATIVE: 1, CLUSTER: (2, 1, 1)}]
    assert [attributes_of(config) for config in fake.with_attributes] == expected * 2


@pytest.mark.skipif(SIMULATED, reason="the simulator prepares no launches")
@pytest.mark.parametrize("is_cooperative", [False, True])
@pytest.mark.parametrize("cluster_blocks", [1, 2])
def test_kernels_say_what_their_launches_are(
    driver: Any, monkeypatch: pytest.MonkeyPatch, is_cooperative: bool, cluster_blocks: int
) -> None:
    arguments = [np.int32(1)]
    kernel = launch.Kernel(
        lambda number: None, (), 32, is_cooperative=is_cooperative, cluster_blocks=cluster_blocks
    )
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(kernel, "load", lambda *_: loaded(arguments))
    given = kernel.prepare(6, *arguments)
    fake = driver(1)
    given.launch(55)
    (call,) = fake.calls
    assert call[1:] == (6, 1, 1, 32, 1, 1, 0, 55)
    expected = ({COOPERATIVE: 1} if is_cooperative else {}) | (
        {CLUSTER: (cluster_blocks, 1, 1)} if cluster_blocks > 1 else {}
    )
    # One that is neither is launched plainly.
    assert [attributes_of(config) for config in fake.with_attributes] == ([expected] if expected else [])


@pytest.mark.parametrize("is_cooperative", [False, True])
def test_a_refused_launch_is_an_error(driver: Any, is_cooperative: bool) -> None:
    given = prepared([np.int32(1)], is_cooperative=is_cooperative)
    driver(1, fault=700)
    with pytest.raises(BackendError, match="kernel: the launch was refused: 700"):
        given.launch(0)


def test_a_cooperative_launch_that_is_too_large_says_so(driver: Any) -> None:
    given = prepared([np.int32(1)], is_cooperative=True)
    driver(1, fault=launch.TOO_LARGE)
    with pytest.raises(BackendError, match=r"LAUNCH_TOO_LARGE.*, for all of its blocks must run at once$"):
        given.launch(0)


@pytest.mark.parametrize(
    "stream",
    [
        SimpleNamespace(__cuda_stream__=lambda: (0, 55)),
        SimpleNamespace(__cuda_stream__=(0, 55)),
        SimpleNamespace(cuda_stream=55),
        SimpleNamespace(ptr=55),
        55,
    ],
)
def test_streams_of_every_form(driver: Any, stream: Any) -> None:
    given = prepared([np.int32(1)])
    sequence = LaunchSequence()
    sequence.launches.append(given)
    fake = driver(1)
    given.launch(stream)
    sequence.launch(stream)
    assert [call[-1] for call in fake.calls] == [55, 55]


def test_what_is_no_stream_is_refused(driver: Any) -> None:
    given = prepared([np.int32(1)])
    driver(1)
    with pytest.raises(ArgumentError, match=r"^stream: "):
        given.launch("fast")


def test_places_of_an_argument() -> None:
    shared, other = view((2,), np.int32), view((2,), np.int32)
    first, second = prepared([shared, other, shared]), prepared([other, shared])
    sequence = LaunchSequence()
    sequence.launches += [first, second]
    assert sequence.places_of(shared) == [(first, 0), (first, 2), (second, 1)]


@pytest.mark.skipif(SIMULATED, reason="the simulator has no signatures to choose from")
def test_warming_chooses_signatures_by_their_first_array() -> None:
    signatures = (
        "void(uint16[:, ::1], int32)",
        "void(float32[:, ::1], int32)",
        "void(float16[:, ::1], int32)",
    )
    wanted = {np.dtype(np.uint16), np.dtype(np.float32)}
    chosen = launch._wanted_kinds(signatures, wanted)
    assert [kinds[0] for kinds in chosen] == [(np.dtype(np.uint16), 2), (np.dtype(np.float32), 2)]
    assert chosen[0][1] == (np.dtype(np.int32), -1)
    assert len(launch._wanted_kinds(signatures, None)) == 3
    assert len(launch._wanted_kinds(signatures, {np.dtype(np.int64)})) == 3


def test_warming_refuses_what_is_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "require_device", lambda: None)
    with pytest.raises(ArgumentError, match=r"^operations: got 'no_such'"):
        warmup("no_such")


# Code on disk.


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(code_cache.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.delenv(code_cache.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(code_cache, "_sources", lambda: "sources")
    return tmp_path / "numba_ddtree"


def place(*compiled_for: Any) -> Path:
    found = code_cache.place_of(ADVANCE.function, compiled_for)
    assert found is not None
    return found


def test_code_comes_back_as_it_was(cache: Path) -> None:
    file = place("types")
    assert file.parent == cache
    assert code_cache.read(file) is None
    code = code_cache.Code("_Z6kernel", bytes(range(256)) + b"\n\n\x00")
    code_cache.write(file, code)
    assert code_cache.read(file) == code
    assert [each.name for each in cache.iterdir()] == [file.name]


@pytest.mark.parametrize("damage", [b"", b"x", b"name\n", b"name\n0\ncode", None])
def test_code_that_is_not_whole_is_not_used(cache: Path, damage: bytes | None) -> None:
    file = place("types")
    code_cache.write(file, code_cache.Code("name", b"code" * 99))
    file.write_bytes(file.read_bytes()[:-1] if damage is None else damage)
    assert code_cache.read(file) is None


def test_code_has_a_place_of_its_own_for_all_that_it_depends_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {place("types", (128, 1), (9, 0)), place("types", (128, 1), (8, 0)), place("other", (128, 1))}
    other = code_cache.place_of(START_REQUESTS.function, ("types", (128, 1), (9, 0)))
    assert other is not None
    places.add(other)
    monkeypatch.setenv("NUMBA_OPT", "1")
    places.add(place("types", (128, 1), (9, 0)))
    monkeypatch.delenv("NUMBA_OPT")
    monkeypatch.setattr(code_cache, "_sources", lambda: "changed")
    places.add(place("types", (128, 1), (9, 0)))
    monkeypatch.setattr(code_cache, "_sources", lambda: "sources")
    monkeypatch.setattr(code_cache, "_toolchain", lambda: "another")
    places.add(place("types", (128, 1), (9, 0)))
    assert len(places) == 7


def no_home() -> Path:
    raise RuntimeError("no home")


def test_code_is_not_kept_where_that_is_not_wanted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others() -> None: ...

    assert code_cache.place_of(of_others, ()) is None
    monkeypatch.setattr(code_cache, "_sources", lambda: None)
    assert code_cache.place_of(ADVANCE.function, ()) is None
    monkeypatch.setattr(code_cache, "_sources", lambda: "sources")
    with monkeypatch.context() as patch:
        patch.setattr(code_cache, "LIBRARIES", ("no_such_library",))
        code_cache._toolchain.cache_clear()
        assert code_cache.place_of(ADVANCE.function, ()) is None
    code_cache._toolchain.cache_clear()
    with monkeypatch.context() as patch:
        patch.delenv(code_cache.FOLDER_VARIABLE)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(Path, "home", no_home)
        assert code_cache.place_of(ADVANCE.function, ()) is None
    monkeypatch.setenv(code_cache.CACHE_VARIABLE, "0")
    assert code_cache.place_of(ADVANCE.function, ()) is None
    code_cache.write(None, code_cache.Code("name", b"code"))
    assert not cache.exists()
    assert code_cache.read(None) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code_cache.write(file / "below" / "code", code_cache.Code("name", b"code"))
    assert code_cache.read(file / "below" / "code") is None


def test_sources_that_changed_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    code_cache._sources.cache_clear()
    monkeypatch.setattr(code_cache, "IMPORTED_NS", 2**62)
    digest = code_cache._sources()
    assert re.fullmatch("[0-9a-f]{64}", digest or "")
    code_cache._sources.cache_clear()
    monkeypatch.setattr(code_cache, "IMPORTED_NS", Path(code_cache.__file__).stat().st_mtime_ns - 1)
    assert code_cache._sources() is None
    code_cache._sources.cache_clear()


# On a device.


def host_draft(rng: np.random.Generator, B: int = 4) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    log_probs = -np.sort(rng.exponential(size=(B, 5, 8)), axis=-1).astype(np.float32)
    return log_probs, rng.integers(0, 99, (B, 5, 8)).astype(np.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", [numba_library, torch_library, cupy_library])
def test_a_sequence_runs_again_on_what_is_in_memory(rng: np.random.Generator, make_library: Any) -> None:
    library = make_library()
    log_probs, ids = host_draft(rng)
    on_device = library.put(log_probs), library.put(ids)
    sequence = LaunchSequence()
    tree = build_tree(*on_device, 20, stream=sequence)
    target = library.put(np.zeros((4, 21), np.int32))
    result = accept_tree(tree, target, stream=sequence)
    for _ in range(3):
        log_probs, ids = host_draft(rng)
        put = library.put(log_probs), library.put(ids)
        for old, new in zip(on_device, put, strict=True):
            overwrite(library.name, old, new)
        sequence.launch(current_stream(library.name))
        want = build_tree(log_probs, ids, 20, backend="numpy")
        for name, array in want.arrays().items():
            np.testing.assert_array_equal(library.get(getattr(tree, name)), array, err_msg=name)
        walked = accept_tree(want, np.zeros((4, 21), np.int32), backend="numpy")
        np.testing.assert_array_equal(library.get(result.tokens), walked.tokens)


def overwrite(library: str, old: Any, new: Any) -> None:
    if library == "numba":
        old.copy_to_device(new)
    elif library == "torch":
        old.copy_(new)
    else:
        old[...] = new


def current_stream(library: str) -> Any:
    if library == "torch":
        import torch

        return torch.cuda.current_stream()
    if library == "cupy":
        import cupy

        return cupy.cuda.get_current_stream()
    return None


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["cuda.core", "torch", "cupy", "numba", "handle"])
def test_a_sequence_runs_on_every_kind_of_stream(rng: np.random.Generator, form: str) -> None:
    from numba_ddtree.cuda_target import cuda

    library = numba_library()
    log_probs, ids = host_draft(rng)
    sequence = LaunchSequence()
    tree = build_tree(library.put(log_probs), library.put(ids), 20, stream=sequence)
    if form == "torch":
        stream = pytest.importorskip("torch").cuda.Stream()
    elif form == "cupy":
        stream = pytest.importorskip("cupy").cuda.Stream()
    elif form == "numba":
        stream = cuda.stream()
    else:
        from cuda.core import Device

        device = Device()
        device.set_current()
        owner = device.create_stream()
        stream = owner if form == "cuda.core" else int(owner.handle)
    cuda.synchronize()
    sequence.launch(stream)
    cuda.synchronize()
    want = build_tree(log_probs, ids, 20, backend="numpy")
    np.testing.assert_array_equal(library.get(tree.parents), want.parents)


def meeting_kernel() -> launch.Kernel:
    """Make a kernel whose blocks tell each other numbers, so often, and add up those of the next four."""
    from numba_ddtree.cuda_target import cuda, int32, uint32
    from numba_ddtree.device.grid_meeting import meet_all_blocks

    def tell(told, sums, rounds):  # type: ignore[no-untyped-def]
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        for turn in range(rounds):
            if block == turn % blocks:
                cuda.nanosleep(100_000)  # for the others to wait
            if cuda.threadIdx.x == 0:
                told[block] = int32(block * int32(1000) + turn)
                meet_all_blocks(uint32(blocks))
            cuda.syncthreads()
            if cuda.threadIdx.x < 4:
                other = int32((block + 1 + cuda.threadIdx.x) % blocks)
                cuda.atomic.add(sums, block, told[other])
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                meet_all_blocks(uint32(blocks))  # before what was told is written again
            cuda.syncthreads()

    return launch.Kernel(tell, (), 128, is_cooperative=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
def test_blocks_that_meet_see_what_the_others_wrote(is_captured: bool) -> None:
    from cuda.core import Device

    from numba_ddtree.cuda_target import cuda
    from numba_ddtree.devices import multiprocessors

    device = Device()
    device.set_current()
    if tuple(device.compute_capability) < (9, 0):
        pytest.skip("only the kernel for compute capability 9.0 has blocks that meet")
    kernel = meeting_kernel()
    for blocks, rounds in ((multiprocessors(), 5), (1, 2), (7, 4), (multiprocessors(), 2)):
        told, sums = (cuda.to_device(np.zeros(blocks, np.int32)) for _ in range(2))
        await_copies()
        sequence = LaunchSequence()
        arrays = [device_view("array", each) for each in (told, sums)]
        sequence.launches.append(kernel.prepare(blocks, *arrays, np.int32(rounds)))
        stream, run = device.create_stream(), sequence.launch
        if is_captured:
            builder = stream.create_graph_builder().begin_building()
            sequence.launch(stream)
            run = builder.end_building().complete().launch
        run(stream)
        run(stream)
        stream.sync()
        others = (np.arange(blocks)[:, None] + 1 + np.arange(4)) % blocks
        want = 2 * sum((others * 1000 + turn).sum(1) for turn in range(rounds))
        np.testing.assert_array_equal(sums.copy_to_host(), want)


@pytest.mark.gpu
def test_more_blocks_than_run_at_once_cannot_meet() -> None:
    from numba_ddtree.cuda_target import cuda
    from numba_ddtree.devices import multiprocessors

    arrays = [device_view("array", cuda.to_device(np.zeros(1, np.int32))) for _ in range(2)]
    prepared_launch = meeting_kernel().prepare(64 * multiprocessors(), *arrays, np.int32(1))
    with pytest.raises(BackendError, match=r"tell: the launch was refused: .*LAUNCH_TOO_LARGE"):
        prepared_launch.launch(None)


@pytest.mark.gpu
def test_a_sequence_is_captured(rng: np.random.Generator) -> None:
    from cuda.core import Device

    from numba_ddtree.cuda_target import cuda

    library = numba_library()
    log_probs, ids = host_draft(rng)
    on_device = library.put(log_probs), library.put(ids)
    sequence = LaunchSequence()
    tree = build_tree(*on_device, 20, stream=sequence)
    cuda.synchronize()
    device = Device()
    device.set_current()
    stream = device.create_stream()
    builder = stream.create_graph_builder().begin_building()
    sequence.launch(stream)
    graph = builder.end_building().complete()
    for _ in range(2):
        log_probs, ids = host_draft(rng)
        for old, new in zip(on_device, (log_probs, ids), strict=True):
            old.copy_to_device(new)
        await_copies()
        graph.launch(stream)
        stream.sync()
        want = build_tree(log_probs, ids, 20, backend="numpy")
        np.testing.assert_array_equal(library.get(tree.parents), want.parents)


@pytest.mark.parametrize("stream", [LaunchSequence(), 7, "current"])
def test_the_reference_takes_no_stream(rng: np.random.Generator, stream: Any) -> None:
    log_probs, ids = host_draft(rng)
    message = rf"^stream: got {type(stream).__name__}; expected None with the numpy backend"
    with pytest.raises(ArgumentError, match=message):
        build_tree(log_probs, ids, 20, stream=stream, backend="numpy")
    tree = build_tree(log_probs, ids, 20, backend="numpy")
    with pytest.raises(ArgumentError, match=message):
        accept_tree(tree, np.zeros((len(ids), 21), np.int32), stream=stream, backend="numpy")


@pytest.mark.gpu
def test_scalars_change_between_launches(rng: np.random.Generator) -> None:
    library = numba_library()
    log_probs, ids = host_draft(rng)
    sequence = LaunchSequence()
    tree = build_tree(library.put(log_probs), library.put(ids), 3, max_budget=20, stream=sequence)
    (only,) = sequence.launches
    at = next(place for place, given in enumerate(only.arguments) if isinstance(given, np.int32))
    assert only.arguments[at] == 3  # the default budget comes first of the numbers
    for budget in (3, 20, 0):
        only.replace(at, np.int32(budget))
        sequence.launch()
        want = build_tree(log_probs, ids, budget, max_budget=20, backend="numpy")
        np.testing.assert_array_equal(library.get(tree.parents), want.parents)


@pytest.mark.gpu
def test_a_sequence_runs_on_its_own_device(rng: np.random.Generator) -> None:
    from numba_ddtree.cuda_target import cuda

    if len(cuda.gpus) < 2:
        pytest.skip("one device only")
    log_probs, ids = host_draft(rng)
    want = build_tree(log_probs, ids, 20, backend="numpy")
    planned = []
    for device in (0, 1):
        with cuda.gpus[device]:
            sequence = LaunchSequence()
            arrays = cuda.to_device(log_probs), cuda.to_device(ids)
            planned.append((device, sequence, build_tree(*arrays, 20, stream=sequence)))
    for device, sequence, tree in planned:
        sequence.launch()
        with cuda.gpus[device]:
            np.testing.assert_array_equal(tree.parents.copy_to_host(), want.parents)


@pytest.mark.gpu
def test_host_arrays_cannot_wait_for_a_launch(rng: np.random.Generator) -> None:
    with pytest.raises(ArgumentError, match=r"^stream: got a LaunchSequence, with numpy arrays"):
        build_tree(*host_draft(rng), 20, stream=LaunchSequence())


@pytest.mark.gpu
def test_warming_says_what_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    ADVANCE._loaded.clear()
    with caplog.at_level(logging.INFO, logger="numba_ddtree.launch"):
        warmup("round_state")
    lines = [record.getMessage() for record in caplog.records if "advance_kernel" in record.getMessage()]
    assert len(lines) == 1
    assert re.search(r"advance_kernel\(.*\): (compiled|loaded from the cache) in \d+\.\d\d s", lines[0])


_BUILD = """
import logging, sys
import numpy as np
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(message)s")
from numba_ddtree import build_tree
tree = build_tree(np.log(np.full((1, 2, 2), 0.5, "f4")), np.array([[[1, 2], [3, 4]]], "i4"), 3)
print(tree.token_ids.tolist(), file=sys.stderr)
"""


@pytest.mark.gpu
def test_the_next_process_loads_what_this_one_compiled(tmp_path: Path) -> None:
    # Sources that have just been copied here look changed, so the processes are told that they are not.
    trust = "from numba_ddtree import code_cache; code_cache.IMPORTED_NS = 2**62\n"
    environment = os.environ | {code_cache.FOLDER_VARIABLE: str(tmp_path), code_cache.CACHE_VARIABLE: "1"}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", trust + _BUILD],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    for output, origin in zip(outputs, ("compiled", "loaded from the cache"), strict=True):
        assert re.search(rf"build_tree_kernel_256\(.*\): {origin} in", output.stdout)
        assert output.stderr == outputs[0].stderr
