"""What a report of a problem needs: versions, driver, devices, toolkit libraries, the backend of choice."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

from numba_ddtree.bundle import JSON
from numba_ddtree.devices import find_device_fault

if TYPE_CHECKING:
    from numba_ddtree.stages import Backend

__all__ = [
    "Choice",
    "Device",
    "Environment",
    "choose_backend",
    "collect_environment",
    "find_devices",
    "find_peer_links",
]

PACKAGES = (
    "numba_ddtree",
    "numba",
    "numba-cuda",
    "numpy",
    "cuda-python",
    "cuda-core",
    "cuda-bindings",
    "cuda-pathfinder",
)
LIBRARIES = {"nvvm": "nvvm", "nvrtc": "nvrtc", "nvjitlink": "nvJitLink", "cudart": "cudart"}
"""The toolkit's libraries by the names that people and `cuda.pathfinder` know them by."""

SIMULATOR_VARIABLE = "NUMBA_ENABLE_CUDASIM"


class Choice(NamedTuple):
    """What ``--backend auto`` means here: the backend and the reason."""

    backend: Backend
    reason: str


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes
    ----------
    name : str
    compute_capability : str
        For example ``"9.0"``.
    memory_bytes, shared_memory_bytes : int
        Of the device, and the most that a block may opt in to.
    """

    name: str
    compute_capability: str
    memory_bytes: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class Environment:
    """Everything at once; what is missing says so in place of its value.

    Attributes
    ----------
    packages : dict of str to str
        Versions.
    python, system : str
    driver : str
        The driver's version and the newest CUDA version that it supports.
    devices : list of Device
    peer_links : list of list of bool
        Whether each device can read the memory of each other one without the host; of itself it is false.
    device_fault : str or None
        Why there is no device.
    libraries : dict of str to str
        Paths.
    backend : Choice
    """

    packages: dict[str, str]
    python: str
    system: str
    driver: str
    devices: list[Device]
    peer_links: list[list[bool]]
    device_fault: str | None
    libraries: dict[str, str]
    backend: Choice

    def as_json(self) -> dict[str, JSON]:
        """Return the members as JSON holds them."""
        return asdict(self) | {"backend": self.backend._asdict()}

    def lines(self) -> list[tuple[str, str]]:
        """Return pairs of a label and a value, for people."""
        devices = [(f"device {index}", _device_line(device)) for index, device in enumerate(self.devices)]
        return [
            *self.packages.items(),
            ("Python", self.python),
            ("system", self.system),
            ("driver", self.driver),
            *(devices or [("devices", self.device_fault or "none")]),
            *_link_lines(self.peer_links),
            *self.libraries.items(),
            ("backend", f"{self.backend.backend}: {self.backend.reason}"),
        ]


def collect_environment() -> Environment:
    """Look at everything; creates no CUDA context and imports no Numba.

    Returns
    -------
    Environment
    """
    devices, fault = find_devices()
    return Environment(
        packages={name: _version(name) for name in PACKAGES},
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=platform.platform(),
        driver=_driver(),
        devices=devices,
        peer_links=find_peer_links(len(devices)),
        device_fault=fault,
        libraries={name: _library(known_as) for name, known_as in LIBRARIES.items()},
        backend=choose_backend(),
    )


def choose_backend() -> Choice:
    """Choose what ``auto`` means: kernels on a device, or in the simulator where there is none.

    Returns
    -------
    Choice
    """
    if os.environ.get(SIMULATOR_VARIABLE, "0") not in ("", "0"):
        return Choice("simulator", f"{SIMULATOR_VARIABLE} is set")
    devices, fault = find_devices()
    if devices:
        return Choice("cuda", "a CUDA device was found")
    return Choice("simulator", f"no CUDA device: {fault}")


def find_devices() -> tuple[list[Device], str | None]:
    """List the CUDA devices; creates no context.

    Returns
    -------
    devices : list of Device
    fault : str or None
        Why there is none, if so.
    """
    fault = find_device_fault()
    if fault is not None:
        return [], fault
    try:
        devices = _devices()
    except Exception as error:  # a broken driver fails in ways that have no common class
        return [], _reason(error)
    return devices, None if devices else "the driver lists no CUDA device"


def find_peer_links(count: int) -> list[list[bool]]:
    """Say which of so many devices can read each other's memory, by NVLink or PCIe; creates no context."""
    from numba_ddtree.devices import are_linked

    devices = range(count)
    return [[device != peer and are_linked(device, peer) for peer in devices] for device in devices]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    try:
        from cuda.core import system

        supported = ".".join(map(str, system.get_user_mode_driver_version()))
        return f"{driver_version()}, CUDA {supported}"
    except Exception as error:  # no driver, no NVML, no cuda.core: each with a class of its own
        return f"not found: {_reason(error)}"


def driver_version() -> str:
    """Version of the driver as NVIDIA writes it, like 580.159.04; raises where there is none."""
    from cuda.core import system

    major, *rest = system.get_kernel_mode_driver_version()
    return ".".join([str(major), *(f"{part:02d}" for part in rest)])


def _devices() -> list[Device]:
    """Ask the driver, which heeds ``CUDA_VISIBLE_DEVICES``, as the management library does not."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute

    def call(function: Any, *arguments: Any) -> Any:
        fault, *results = function(*arguments)
        if fault != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__}: {fault.name}")
        return results[0] if results else None

    call(driver.cuInit, 0)
    devices = []
    for index in range(call(driver.cuDeviceGetCount)):
        device = call(driver.cuDeviceGet, index)
        major, minor, shared_bytes = (
            call(driver.cuDeviceGetAttribute, wanted, device)
            for wanted in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )
        name = call(driver.cuDeviceGetName, 256, device).split(b"\0")[0].decode()
        memory_bytes = int(call(driver.cuDeviceTotalMem, device))
        devices.append(Device(name, f"{major}.{minor}", memory_bytes, int(shared_bytes)))
    return devices


def _library(name: str) -> str:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return load_nvidia_dynamic_lib(name).abs_path or "loaded, path unknown"
    except Exception as error:  # pathfinder's own errors, or its absence
        return f"not found: {_reason(error)}"


def _reason(error: Exception) -> str:
    """First line of an error, or its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _link_lines(links: list[list[bool]]) -> list[tuple[str, str]]:
    """Say of each device which others it is linked to, where there are others."""
    if len(links) < 2:
        return []
    return [
        (f"links of {device}", ", ".join(str(peer) for peer, linked in enumerate(row) if linked) or "none")
        for device, row in enumerate(links)
    ]


def _device_line(device: Device) -> str:
    memory, shared_memory = device.memory_bytes / 2**30, device.shared_memory_bytes / 2**10
    return (
        f"{device.name}, compute capability {device.compute_capability}, {memory:.1f} GiB, "
        f"{shared_memory:.0f} KiB shared memory a block"
    )
