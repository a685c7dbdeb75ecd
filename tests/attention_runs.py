"""Planned runs of tree attention on a device, with outputs that are poisoned before each."""

from __future__ import annotations

from typing import Any

import numpy as np
from attention_checks import CacheInputs, arguments_of, same_bits
from kernel_checks import Library
from numpy.typing import NDArray

from numba_ddtree import TreeAttention
from numba_ddtree.cuda_target import cuda


class Run:
    """A run's arguments on a device, with outputs that are poisoned before each run."""

    def __init__(self, library: Library, inputs: CacheInputs) -> None:
        self.library = library
        self.given = arguments_of(library, inputs, is_fused=False)
        shape, dtype = (*inputs.queries.shape[:3], inputs.latent), inputs.queries.dtype
        self._poison = {
            "out": library.put(np.full(shape, 7, dtype)),
            "lse": library.put(np.full(shape[:3], 7, np.float32)),
        }
        self.outputs = {name: library.put(library.get(array)) for name, array in self._poison.items()}

    def __call__(self, made: TreeAttention, **options: Any) -> list[NDArray[Any]]:
        """Run, and give the results on the host."""
        for name, array in self.outputs.items():
            put(array, self._poison[name])
        cuda.synchronize()
        out, lse = made.run(**self.given, **self.outputs, **options)
        assert out is self.outputs["out"]
        assert lse is self.outputs["lse"]
        cuda.synchronize()
        return self.results()

    def results(self) -> list[NDArray[Any]]:
        return [self.library.get(self.outputs[name]) for name in ("out", "lse")]

    def fill_from(self, other: Run) -> None:
        """Put another run's content into this one's memory."""
        for name, array in self.given.items():
            if name == "tree":
                for part, target in array.arrays().items():
                    put(target, getattr(other.given["tree"], part))
            elif name != "sm_scale":
                put(array, other.given[name])


def put(target: Any, source: Any) -> None:
    """Copy the bytes of a contiguous array to another of the same library."""
    if hasattr(target, "copy_to_device"):
        target.copy_to_device(source)
    elif hasattr(target, "copy_"):
        import torch

        target.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        target.view(np.uint8)[...] = source.view(np.uint8)


def assert_same(got: list[NDArray[Any]], want: list[NDArray[Any]]) -> None:
    for each, array in zip(got, want, strict=True):
        assert same_bits(each[..., None], array[..., None]).all()
