"""numpy or cupy: the array module that the demo model is written against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from numba_ddtree.arrays import StreamLike, device_view
from numba_ddtree.errors import BackendError

ROW_BLOCK = 128
"""Rows of every product on a GPU. cuBLAS chooses a kernel by the shape, so that one shape means one order
of summation: a row has the same bits in plain decoding, in verification and at any place of a batch. cuBLAS
does not promise that; it is tested."""

HOST_ROW_BLOCK = 32
"""Likewise on numpy, where bits matter: less, since most rows of most blocks are padding."""

_LOW_BITS = 16  # of a float32 that bfloat16 has not


@dataclass(frozen=True)
class ArrayModule:
    """An array module, and how dense products are made with it.

    Attributes
    ----------
    xp
        numpy or cupy.
    backend : {"numpy", "cuda"}
        What the library's operations run on: the references, or the kernels.
    row_block : int, optional
        Rows of every product; None: as many as are given.
    """

    xp: Any
    backend: Literal["numpy", "cuda"]
    row_block: int | None = None

    def with_row_blocks(self) -> ArrayModule:
        """Return a module whose products all have one number of rows."""
        return self if self.row_block is not None else replace(self, row_block=HOST_ROW_BLOCK)

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
        size = self.row_block
        if size is None or rows == 0:
            return self.xp.matmul(x, weight)
        padding = [(0, 0)] * x.ndim
        padding[-2] = (0, -rows % size)
        padded = self.xp.pad(x, padding)
        blocks = [
            self.xp.matmul(padded[..., start : start + size, :], weight)
            for start in range(0, padded.shape[-2], size)
        ]
        return self.xp.concatenate(blocks, axis=-2)[..., :rows, :]

    def bfloat16_bits(self, x: Any) -> Any:
        """Round finite float32 numbers to the nearest bfloat16, ties to even; return the bits, uint16.

        As bits an array can be indexed and moved in any array module, whether or not it has bfloat16.
        """
        bits = x.view(np.uint32)
        odd = (bits >> _LOW_BITS) & 1
        return ((bits + (odd + ((1 << (_LOW_BITS - 1)) - 1))) >> _LOW_BITS).astype(np.uint16)

    def as_bfloat16(self, bits: Any) -> Any:
        """Return bits as the library's operations take bfloat16: an array of numpy's, or a device view."""
        if self.backend == "numpy":
            return bits.view(bfloat16)
        return replace(device_view("bits", bits), dtype=np.dtype(bfloat16))

    @property
    def stream(self) -> StreamLike:
        """The current stream; None on the host."""
        return None if self.backend == "numpy" else self.xp.cuda.get_current_stream()

    @property
    def device_id(self) -> int | None:
        """The current device; None on the host."""
        return None if self.backend == "numpy" else int(self.xp.cuda.Device().id)

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
    return ArrayModule(cupy, "cuda", ROW_BLOCK)
