"""What a bug report needs is said everywhere, above all where something is missing."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from numba_ddtree import environment, run
from numba_ddtree.environment import Device, choose_backend, collect_environment, find_devices


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    devices = [Device("NVIDIA H200", "9.0", 141 * 2**30, 232448)] * 2
    monkeypatch.delenv(environment.SIMULATOR_VARIABLE, raising=False)
    monkeypatch.setattr(environment, "find_device_fault", lambda: None)
    monkeypatch.setattr(environment, "_devices", lambda: devices)
    monkeypatch.setattr("numba_ddtree.devices.are_linked", lambda device, peer: device == 1)
    return devices


def test_versions_and_libraries() -> None:
    found = collect_environment()
    assert set(found.packages) == set(environment.PACKAGES)
    assert found.packages["numpy"] == __import__("numpy").__version__
    assert set(found.libraries) == {"nvvm", "nvrtc", "nvjitlink", "cudart"}
    assert found.backend.backend in ("cuda", "simulator")
    json.dumps(found.as_json(), allow_nan=False)


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cuda.core", "cuda.bindings", "cuda.pathfinder"):
        monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    found = collect_environment()
    assert found.packages == {"no-such-package": "not installed"}
    assert found.driver.startswith("not found: ")
    assert found.devices == []
    assert found.device_fault
    assert all(path.startswith("not found: ") for path in found.libraries.values())
    labels = dict(found.lines())
    assert labels["devices"] == found.device_fault
    assert labels["backend"].startswith("simulator: ")


def test_a_broken_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Device]:
        raise RuntimeError("\n cuInit: CUDA_ERROR_NO_DEVICE\nmore")

    monkeypatch.setattr(environment, "find_device_fault", lambda: None)
    monkeypatch.setattr(environment, "_devices", fails)
    assert find_devices() == ([], "cuInit: CUDA_ERROR_NO_DEVICE")


def test_a_driver_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_device_fault", lambda: None)
    monkeypatch.setattr(environment, "_devices", list)
    monkeypatch.delenv(environment.SIMULATOR_VARIABLE, raising=False)
    assert find_devices() == ([], "the driver lists no CUDA device")
    assert choose_backend() == ("simulator", "no CUDA device: the driver lists no CUDA device")


def test_devices(two_devices: list[Device]) -> None:
    found = collect_environment()
    assert found.devices == two_devices
    assert found.peer_links == [[False, False], [True, False]]
    assert found.device_fault is None
    labels = dict(found.lines())
    expected = "NVIDIA H200, compute capability 9.0, 141.0 GiB, 227 KiB shared memory a block"
    assert labels["device 0"] == labels["device 1"] == expected
    assert (labels["links of 0"], labels["links of 1"]) == ("none", "0")
    assert found.backend == ("cuda", "a CUDA device was found")


def test_links_are_the_drivers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def can_access(device: int, peer: int) -> tuple[int, int]:
        asked.append((device, peer))
        return 0, int(device < peer)

    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(cuDeviceCanAccessPeer=can_access)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert environment.find_peer_links(2) == [[False, True], [False, False]]
    assert asked == [(0, 1), (1, 0)]
    assert environment.find_peer_links(0) == []


def test_the_variable_chooses_the_simulator(
    two_devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.SIMULATOR_VARIABLE, "1")
    assert choose_backend() == ("simulator", "NUMBA_ENABLE_CUDASIM is set")


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = {"MAJOR": 9, "MINOR": 0, "SHARED": 1000}

    class Result:
        CUDA_SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")

    ok = Result.CUDA_SUCCESS
    prefix = "CU_DEVICE_ATTRIBUTE_"
    names = {
        f"{prefix}COMPUTE_CAPABILITY_MAJOR": "MAJOR",
        f"{prefix}COMPUTE_CAPABILITY_MINOR": "MINOR",
        f"{prefix}MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": "SHARED",
    }
    driver: Any = ModuleType("cuda.bindings.driver")
    driver.CUresult = Result
    driver.CUdevice_attribute = SimpleNamespace(**names)
    driver.cuInit = lambda flags: (ok,)
    driver.cuDeviceGetCount = lambda: (ok, 1)
    driver.cuDeviceGet = lambda index: (ok, index)
    driver.cuDeviceGetAttribute = lambda name, device: (ok, attributes[name])
    driver.cuDeviceGetName = lambda length, device: (ok, b"H200\0\0")
    driver.cuDeviceTotalMem = lambda device: (ok, 5)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    assert environment._devices() == [Device("H200", "9.0", 5, 1000)]

    def cu_init(flags: int) -> tuple[Any, ...]:
        return (SimpleNamespace(name="CUDA_ERROR_UNKNOWN"),)

    driver.cuInit = cu_init
    with pytest.raises(RuntimeError, match="cu_init: CUDA_ERROR_UNKNOWN"):
        environment._devices()


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "numba_ddtree"
    assert lines[-1].startswith("backend")
    assert run.main(["env", "--json"]) == 0
    members = json.loads(capsys.readouterr().out)
    assert set(members["backend"]) == {"backend", "reason"}
