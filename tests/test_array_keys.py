"""Keys of arrays: equal where launches would be, and only there."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_checks import numba_library
from libraries import cupy_library, torch_library
from made_up_device import view
from ml_dtypes import bfloat16

from numba_ddtree.array_keys import array_key
from numba_ddtree.arrays import device_view

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
pytestmark = pytest.mark.skipif(SIMULATED, reason="arrays of the simulator have no addresses")


def test_views_differ_by_all_but_their_owner() -> None:
    array = view(4096, (3, 4, 8), bfloat16)
    key = array_key(array)
    assert key is not None
    assert array_key(replace(array, owner=object())) == key
    changes: list[dict[str, Any]] = [
        {"pointer": 4112},
        {"shape": (3, 4, 7)},
        {"shape": (3, 32)},
        {"strides": (128, 16, 2)},
        {"dtype": np.dtype(np.float16)},
        {"device_id": 1},
    ]
    others = [array_key(replace(array, **change)) for change in changes]
    assert None not in others
    assert len({key, *others}) == 1 + len(changes)


def test_tensors_differ_by_memory_shape_strides_and_dtype() -> None:
    torch = pytest.importorskip("torch")
    memory = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    tensors = [
        memory,
        memory[1:],
        memory[:3],
        memory[..., :6],
        memory.reshape(4, 48),
        memory.transpose(0, 1),
        memory.view(torch.float16),
        memory.clone(),
    ]
    keys = [array_key(tensor) for tensor in tensors]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    again = [array_key(memory.as_strided(t.shape, t.stride(), t.storage_offset())) for t in tensors[:6]]
    assert again == keys[:6]
    assert array_key(torch.nn.Parameter(memory)) == keys[0]


def test_a_tensor_that_was_given_other_memory_has_another_key() -> None:
    torch = pytest.importorskip("torch")
    tensor, other = torch.zeros(4, 6), torch.zeros(3, 5)
    before = array_key(tensor)
    tensor.set_(other)
    assert array_key(tensor) == array_key(other) != before


def test_what_has_no_key() -> None:
    unknown = SimpleNamespace(__cuda_array_interface__={"data": (4096, False), "shape": (3,)})
    for array in (np.zeros(3), [1, 2], 7, "text", unknown):
        assert array_key(array) is None
    torch = pytest.importorskip("torch")
    assert array_key(torch.eye(3).to_sparse()) is None


def test_nothing_is_no_array() -> None:
    assert array_key(None) == ()
    assert array_key(view(0, (0,), np.int32)) != ()


@pytest.mark.gpu
@pytest.mark.parametrize("make_library", [numba_library, torch_library, cupy_library])
def test_keys_say_what_views_do(rng: np.random.Generator, make_library: Any) -> None:
    library = make_library()
    host = rng.standard_normal((5, 6, 8), np.float32)
    whole, other = library.put(host), library.put(host)
    arrays = [whole, whole[1:], whole[:, :, :4], whole[:, 2], other]
    keys = [array_key(array) for array in arrays]
    assert None not in keys
    assert len(set(keys)) == len(arrays)
    assert [array_key(array) for array in arrays] == keys
    for key, array in zip(keys, arrays, strict=True):
        found = device_view("array", array)
        assert key is not None
        assert (key[0], tuple(key[1]), key[4]) == (found.pointer, found.shape, found.device_id)
