"""What calls of the driver answer, as results or as errors in one line."""

from __future__ import annotations

from typing import Any

# What the libraries that run on the driver call its faults: cuda.core, Numba, cupy and torch.
CUDA_ERRORS = frozenset(
    {
        "DriverError",
        "CUDAError",
        "CudaAPIError",
        "CudaDriverError",
        "CUDADriverError",
        "CUDARuntimeError",
        "OutOfMemoryError",
        "AcceleratorError",
    }
)

# Faults after which the driver refuses whatever follows on the device, until the process ends.
LASTING_FAULTS = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "CONTAINED",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "MPS_CLIENT_TERMINATED",
        "EXTERNAL_DEVICE",
    )
)


class DriverError(Exception):
    """A call of the driver's failed."""


def result_of(answer: Any) -> Any:
    """Return what a call of the driver's gave, or raise its fault."""
    fault, *results = answer
    if fault:
        raise DriverError(fault_text(fault))
    return results[0] if results else None


def fault_text(fault: Any) -> str:
    """Name and describe what the driver answered."""
    from cuda.bindings import driver

    failed, text = driver.cuGetErrorString(fault)
    return str(fault.name) if failed else f"{fault.name}: {text.decode()}"


def is_lasting(fault: Any) -> bool:
    """Whether the driver answers the same to whatever follows on the device, until the process ends."""
    return bool(fault) and fault.name in LASTING_FAULTS


def is_cuda_error(error: BaseException) -> bool:
    """Whether the driver, or a library on it, raised an error."""
    return any(kind.__name__ in CUDA_ERRORS for kind in type(error).__mro__)


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks, or else its class."""
    return " ".join(str(error).split()) or type(error).__name__
