"""numpy or cupy: the array module that the demo model is written against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from numba_ddtree.errors import BackendError

ROW_BLOCK = 128
"""Rows of every product on a GPU. cuBLAS chooses a kernel by the shape, so that one shape means one order
of summation: a row has the same bits in plain decoding, in verification and at any place of a batch."""


@dataclass(frozen=True)
class ArrayModule:
    """An array module, and how dense products are made with it.

    Attributes
    ----------
    xp
        numpy or cupy.
    backend : {"numpy", "cuda"}
        What the library's operations run on: the references, or the kernels.
    """

    xp: Any
    backend: Literal["numpy", "cuda"]

    def product(self, x: Any, weight: Any) -> Any:
        """Multiply rows by a matrix, or by one matrix a head.

        Parameters
        ----------
        x : float32 [..., rows, inputs]
        weight : float32 [..., inputs, outputs]

        Returns
        -------
        float32 [..., rows, outputs]
        """
        rows = x.shape[-2]
        if self.backend == "numpy" or rows == 0:
            return self.xp.matmul(x, weight)
        padding = [(0, 0)] * x.ndim
        padding[-2] = (0, -rows % ROW_BLOCK)
        padded = self.xp.pad(x, padding)
        blocks = [
            self.xp.matmul(padded[..., start : start + ROW_BLOCK, :], weight)
            for start in range(0, padded.shape[-2], ROW_BLOCK)
        ]
        return self.xp.concatenate(blocks, axis=-2)[..., :rows, :]

    def to_host(self, array: Any) -> NDArray[Any]:
        """Copy an array to numpy, after the work that makes it."""
        return array if isinstance(array, np.ndarray) else self.xp.asnumpy(array)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        if self.backend == "cuda":
            self.xp.cuda.get_current_stream().synchronize()


def array_module(backend: Literal["numpy", "cuda"], device: int = 0) -> ArrayModule:
    """Return numpy, or cupy with `device` as its current device.

    Raises
    ------
    BackendError
        The CUDA backend without cupy.
    """
    if backend == "numpy":
        return ArrayModule(np, "numpy")
    try:
        import cupy
    except ImportError:
        raise BackendError(
            "decoding on a GPU needs cupy: pip install 'numba_ddtree[cupy]', or use --backend numpy"
        ) from None
    cupy.cuda.Device(device).use()
    return ArrayModule(cupy, "cuda")
