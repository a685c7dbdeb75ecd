"""A made-up device for host code of tree attention: arrays on it are addresses, launches are noted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from numba_ddtree import DraftTree, TreeAttention
from numba_ddtree import transfer as transfer_module
from numba_ddtree.arrays import DeviceView, c_strides
from numba_ddtree.tree import TREE_DTYPES, tree_shapes
from numba_ddtree.tree_attention import calls, kernels, plan, plan_memory, tail, verify
from numba_ddtree.tree_attention.work import SplitPlan, Work

B, N, H, P = 2, 9, 3, 5000
FIRST_ITEMS = "first items"  # in place of the kernel's name


def view(
    address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None
) -> DeviceView:
    dtype = np.dtype(dtype)
    return DeviceView(address, shape, strides or c_strides(shape, dtype.itemsize), dtype, 0, None)


class MadeUpDevice:
    """Addresses instead of memory, and the launches asked for."""

    def __init__(self) -> None:
        self.allocated: list[DeviceView] = []
        self.launches: list[tuple[Work, SplitPlan]] = []
        self.kernels: list[str] = []  # of the launches
        self.capability = (9, 0)
        self.shared_limit = 227 * 1024
        self.next_address = 1 << 40

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any) -> tuple[DeviceView, DeviceView]:
        self.next_address += 1 << 36
        array = view(self.next_address, shape, dtype)
        self.allocated.append(array)
        return array, array

    def launcher_of(self, kernel: str) -> Any:
        def launch(transfer: Any, work: Work, splits: SplitPlan) -> None:
            self.launches.append((work, splits))
            self.kernels.append(kernel)

        return launch


class Owner:
    """What memory belongs to."""


@dataclass(eq=False)
class NotedLaunch:
    """A launch that only says on which stream it was made."""

    arguments: list[Any]
    streams: list[Any]
    device_id: int | None = None

    def launch(self, stream: Any) -> None:
        self.streams.append(stream)


@dataclass
class NotingKernel:
    """Prepares launches that are noted."""

    prepared: list[NotedLaunch]

    def prepare(self, blocks: int, *given: Any, shared_bytes: int = 0) -> NotedLaunch:
        self.prepared.append(NotedLaunch(list(given), []))
        return self.prepared[-1]


def make_up_device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    """Put a made-up device in the place of CUDA's, where plans and calls of tree attention look for one."""
    made_up = MadeUpDevice()
    empty, nothing = view(0, (0,), np.int32), view(1 << 30, (1, 1), np.float32)
    no_rows, no_word = view(1 << 30, (1,), np.int64), view(1 << 30, (1,), np.int32)
    target = SimpleNamespace(
        synchronize=lambda: None,
        gpus=[0],
        get_current_device=lambda: SimpleNamespace(id=0, compute_capability=made_up.capability),
        to_device=lambda array: view(2 << 30, array.shape, array.dtype),
    )
    for module in (transfer_module, plan, verify, tail):
        monkeypatch.setattr(module, "require_device", lambda: None)
    for module in (transfer_module, plan, plan_memory, verify, tail):
        monkeypatch.setattr(module, "device_context", lambda _: nullcontext())
    for module in (plan, plan_memory, kernels):
        monkeypatch.setattr(module, "cuda", target)
    monkeypatch.setattr(kernels, "shared_memory_limit", lambda: made_up.shared_limit)
    monkeypatch.setattr(transfer_module, "_empty", lambda _: empty)
    monkeypatch.setattr(transfer_module, "numba_stream", lambda *_: 0)
    monkeypatch.setattr(transfer_module.Transfer, "_allocate", lambda _, *given: made_up.allocate(*given))
    monkeypatch.setattr(calls, "_nothing", lambda _: (nothing, no_rows, no_word))
    for module in (plan, calls):
        monkeypatch.setattr(module, "launcher_of", made_up.launcher_of)
    monkeypatch.setattr(plan, "first_items_launcher", lambda: made_up.launcher_of(FIRST_ITEMS))
    return made_up


def tree_on_device(batch: int = B, slots: int = N) -> DraftTree:
    shapes = tree_shapes(batch, slots)
    arrays = {name: view(4096 * (i + 1), shapes[name], TREE_DTYPES[name]) for i, name in enumerate(shapes)}
    return DraftTree(**arrays, max_depth=slots - 1)


def arguments(paging: str | None = None, dtype: Any = bfloat16, pages: int = 200) -> dict[str, Any]:
    """Good arguments: queries fused, caches apart."""
    rows = (B, 6000) if paging is None else (pages, 64)
    row, stride = 576 * 2, 576 * 2 * H
    queries = 1 << 32
    given: dict[str, Any] = {
        "q_nope": view(queries, (B, N, H, 512), dtype, (N * stride, stride, row, 2)),
        "q_pe": view(queries + 1024, (B, N, H, 64), dtype, (N * stride, stride, row, 2)),
        "ckv_cache": view(2 << 32, (*rows, 512), dtype),
        "kpe_cache": view(3 << 32, (*rows, 64), dtype),
        "tree": tree_on_device(),
        "sm_scale": 0.1,
        "prefix_lengths": view(512, (B,), np.int32),
    }
    if paging == "block_table":
        given["block_table"] = view(1024, (B, 90), np.int32)
    elif paging == "kv_indptr":
        given |= {"kv_indptr": view(1024, (B + 1,), np.int32), "kv_indices": view(2048, (170,), np.int32)}
    return given


def given_arrays() -> dict[str, Any]:
    """Make good arguments of a run, outputs among them, all arrays of which have owners."""

    def owned(array: DeviceView) -> DeviceView:
        return replace(array, owner=Owner())

    given = arguments("block_table")
    given["out"] = view(5 << 32, (B, N, H, 512), bfloat16)
    given["lse"] = view(6 << 32, (B, N, H), np.float32)
    tree = given["tree"]
    given["tree"] = replace(tree, **{name: owned(array) for name, array in tree.arrays().items()})
    return {name: owned(value) if isinstance(value, DeviceView) else value for name, value in given.items()}


def planned(**changed: Any) -> TreeAttention:
    return TreeAttention.plan(
        **({"max_batch": B, "num_slots": N, "num_heads": H, "max_prefix_length": P} | changed)
    )
