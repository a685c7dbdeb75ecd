"""Every kernel compiles for every architecture, without a device, and keeps to registers."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import numba_ddtree
from numba_ddtree.launch import Kernel

if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
    pytest.skip("Numba's simulator compiles nothing", allow_module_level=True)

MEETING = "atom.acq_rel.gpu"
CLUSTER = "barrier.cluster.arrive"
MEETING_KERNELS = {"hopper_bfloat16_kernel", "hopper_float16_kernel"}
ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0, "a"), "sm_100": (10, 0), "sm_120": (12, 0)}
MAIN_ARCHITECTURE = "sm_90a"  # the one for which every signature is compiled


FIGURES = ("numba_ddtree.plot", "numba_ddtree.tree_figure")
"""Modules that need an optional library and have no kernels."""


def find_kernels() -> dict[str, Kernel]:
    """Import every module of the package and collect its kernels."""
    kernels = {}
    for module in pkgutil.walk_packages(numba_ddtree.__path__, "numba_ddtree."):
        if module.name.endswith("__main__"):
            continue
        if module.name in FIGURES:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Kernel):
                kernels[value.name] = value
    return kernels


KERNELS = find_kernels()


def cases() -> list[Any]:
    found = []
    for name, kernel in KERNELS.items():
        for architecture in ARCHITECTURES:
            if kernel.architecture not in (None, architecture):
                continue
            signatures = kernel.signatures if architecture == MAIN_ARCHITECTURE else kernel.signatures[:1]
            for index, _ in enumerate(signatures):
                found.append(pytest.param(name, architecture, index, id=f"{name}-{architecture}-{index}"))
    return found


def link(code: bytes, architecture: str) -> str:
    """Make machine code of LTO IR and return what ptxas says of it."""
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink", exc_type=ImportError)
    options = [f"-arch={architecture}", "-lto", "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), "kernel")
        try:
            nvjitlink.complete(handle)
        finally:
            log = bytearray(nvjitlink.get_info_log_size(handle))
            nvjitlink.get_info_log(handle, log)
        return log.decode(errors="replace")
    finally:
        nvjitlink.destroy(handle)


def compile_for(kernel: Kernel, signature: str, architecture: str, output: str) -> Any:
    """Compile to ``"ltoir"``, bytes, or ``"ptx"``, text."""
    from numba.core.sigutils import normalize_signature

    from numba_ddtree.cuda_target import cuda

    types, _ = normalize_signature(signature)
    device = SimpleNamespace(compute_capability=ARCHITECTURES[architecture][:2])
    try:
        # Routines ask for the current device, of which only this is used.
        with patch("numba.cuda.dispatcher.get_current_device", lambda: device):
            code, _ = cuda.compile(
                kernel.function,
                types,
                device=False,
                abi="numba",
                cc=ARCHITECTURES[architecture],
                launch_bounds=kernel.launch_bounds,
                output=output,
            )
    except Exception as error:
        # What numba-cuda raises where libnvvm or libdevice is not installed; everything else is a fault.
        if type(error).__name__ in ("NvvmSupportError", "DynamicLibNotFoundError"):
            pytest.skip(f"the CUDA toolkit's libraries are missing (extra cu13): {error}")
        raise
    return code


def compile_to_lto_ir(kernel: Kernel, signature: str, architecture: str) -> bytes:
    return bytes(compile_for(kernel, signature, architecture, "ltoir"))


def test_there_are_kernels() -> None:
    assert {
        "build_tree_kernel_256",
        "build_tree_kernel_512",
        "accept_tree_kernel",
        "tree_links_kernel",
    } <= set(KERNELS)


@pytest.mark.parametrize(("name", "architecture", "index"), cases())
def test_kernel_compiles_without_spills(name: str, architecture: str, index: int) -> None:
    kernel = KERNELS[name]
    log = link(compile_to_lto_ir(kernel, kernel.signatures[index], architecture), architecture)
    print(log)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(frames) == 1, "ptxas' report was not understood"
    assert frames[0] == ("0", "0", "0"), "stack frame, spill stores, spill loads"
    assert "wgmma" not in log, "ptxas warns that it serialised wgmma"


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_blocks_meet_only_where_launches_let_them(name: str) -> None:
    kernel = KERNELS[name]
    architecture = kernel.architecture or MAIN_ARCHITECTURE
    text = compile_for(kernel, kernel.signatures[0], architecture, "ptx")
    assert (MEETING in text) == kernel.is_cooperative == (name in MEETING_KERNELS)
    assert (CLUSTER in text) == (kernel.cluster_blocks > 1) == (name in MEETING_KERNELS)
