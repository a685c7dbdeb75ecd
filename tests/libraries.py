"""Arrays and streams of the libraries that tests marked `gpu` hand in, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from kernel_checks import Library, numba_library, numpy_library, torch_get, torch_put
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree.cuda_target import cuda
from numba_ddtree.tree_attention.kernels import HOPPER_CAPABILITY


def torch_library() -> Library:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch finds no device")
    return Library("torch", torch_put, torch_get)


def runnable_kernel(kernel: str) -> str:
    """Return a kernel of tree attention, if this device has it; the test is skipped otherwise."""
    if kernel == "hopper" and tuple(cuda.get_current_device().compute_capability) != HOPPER_CAPABILITY:
        pytest.skip("this device has no products of whole warpgroups")
    return kernel


def hopper_library() -> Library:
    """Return torch's, on a device that has the Hopper kernel."""
    runnable_kernel("hopper")
    return torch_library()


def cupy_library() -> Library:
    cupy = pytest.importorskip("cupy")

    def put(array: NDArray[Any]) -> Any:
        try:
            return cupy.array(array)
        except (TypeError, ValueError) as error:
            if array.dtype != bfloat16:
                raise
            pytest.skip(f"this cupy has no bfloat16: {error}")

    return Library("cupy", put, cupy.asnumpy)


def jax_library() -> Library:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax finds no device")
    # jax's arrays are never written to, so that there is nothing to pass as `out`.
    return Library(
        "jax", lambda array: jax.block_until_ready(jax.device_put(array)), np.array, takes_out=False
    )


LIBRARIES: list[Callable[[], Library]] = [
    numpy_library,
    numba_library,
    torch_library,
    cupy_library,
    jax_library,
]

DELAY_CYCLES = 200_000_000  # about a tenth of a second


@contextmanager
def side_stream(form: str) -> Iterator[tuple[Any, Callable[[Any], Any], dict[str, Any]]]:
    """Give a stream of torch's that is busy, so that work on any other stream comes too early.

    Parameters
    ----------
    form : {"torch", "handle", "current"}
        How the call is to be told of the stream: as torch's object, as a raw handle, or not at all,
        since it is the current one.

    Yields
    ------
    torch
        The module.
    delayed_copy
        Copies a host tensor to the device, on the stream, after the delay; until then the device's is
        zeros.
    options
        The stream as keyword arguments.
    """
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()

    def delayed_copy(tensor: Any) -> Any:
        pinned = tensor.pin_memory()
        target = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
            target.copy_(pinned, non_blocking=True)
        return target

    if form == "current":
        with torch.cuda.stream(stream):
            yield torch, delayed_copy, {}
    else:
        yield torch, delayed_copy, {"stream": stream if form == "torch" else stream.cuda_stream}
