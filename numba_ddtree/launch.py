"""Kernels: compile once for a device and types, raise the shared memory limit, launch.

A launch is prepared first: its arguments are laid out in memory as the driver reads them, once. What is
left to do is one call of the driver, which can be repeated, on any stream and while one is captured.
"""

from __future__ import annotations

import logging
import math
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from cuda.bindings import driver
from ml_dtypes import bfloat16
from numba.core import types
from numba.core.sigutils import normalize_signature
from numba.np.numpy_support import as_dtype, from_dtype
from numpy.typing import DTypeLike, NDArray

from numba_ddtree import code_cache
from numba_ddtree.arrays import Address, DeviceView, Placement, StreamLike, c_strides
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import device_context, require_device, stream_handle
from numba_ddtree.errors import ArgumentError, BackendError

DEFAULT_SHARED_BYTES = 48 * 1024
SIMULATOR_THREADS = 32
SLOT_BYTES = 8
# What a launch passes, each in a slot of its own: `struct`'s code of a number, and bytes to fill the slot.
SCALAR_FORMATS = {
    "b1": "?7x",
    "i4": "i4x",
    "u4": "I4x",
    "i8": "q",
    "u8": "Q",
    "f4": "f4x",
    "f8": "d",
}
ARRAY_HEAD = 5  # slots before an array's shape: references, parent, items, size of an item, address
ADDRESS_SLOT = 4
OF_A_ROUND = (
    "draft_candidates",
    "tree_build",
    "tree_attention.shared_scores",
    "token_choice",
    "tree_accept",
    "kv_compact",
    "round_state",
)

NO_LIBRARY = Placement("numba", None)
TOO_LARGE = driver.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
UINT16 = np.dtype(np.uint16)
BFLOAT16 = np.dtype(bfloat16)

logger = logging.getLogger(__name__)

Kind: TypeAlias = tuple[np.dtype[Any], int]
"""What compiled code depends on of an argument: dtype and number of dimensions, -1 for a scalar."""


def block_threads(threads: int) -> int:
    """Threads a block: as given, or a single warp in the simulator, where each is a Python thread.

    A kernel strides by this constant; by `blockDim` it would compute every loop's length by a
    64-bit division.
    """
    return SIMULATOR_THREADS if SIMULATED else threads


@dataclass(slots=True, eq=False)
class LoadedKernel:
    """A kernel's code on one device, for one choice of its arguments' kinds.

    Attributes
    ----------
    code
        The `cuda.core.Kernel`; while it lives, the code stays loaded.
    function
        What the driver launches.
    device_id : int
    layout : struct.Struct
        Of all arguments, a slot a number.
    first_slots : tuple of int
        Where each argument begins.
    slot_offsets : uint64 [slots]
        In bytes.
    shared_limit : int
        Bytes of dynamic shared memory a block that the driver grants so far.
    """

    code: Any
    function: Any
    device_id: int
    layout: struct.Struct
    first_slots: tuple[int, ...]
    slot_offsets: NDArray[np.uint64]
    shared_limit: int = DEFAULT_SHARED_BYTES

    @classmethod
    def of(cls, code: Any, device_id: int, kinds: Sequence[Kind]) -> LoadedKernel:
        """Describe loaded code."""
        formats = [_slot_formats(kind) for kind in kinds]
        starts = np.cumsum([0, *map(len, formats)]).tolist()
        return cls(
            code,
            driver.CUfunction(int(code.handle)),
            device_id,
            struct.Struct("<" + "".join(text for slots in formats for text in slots)),
            tuple(starts[:-1]),
            np.arange(starts[-1], dtype=np.uint64) * np.uint64(SLOT_BYTES),
        )

    def raise_shared_limit(self, name: str, shared_bytes: int) -> None:
        """Opt in to more than 48 KB, which CUDA asks for kernel by kernel and device by device."""
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (fault,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self.code.handle, self.device_id)
        if fault:
            raise BackendError(f"{name}: {shared_bytes} bytes of shared memory were refused: {fault}")
        self.shared_limit = shared_bytes


class PreparedLaunch:
    """A kernel with its grid and arguments, to be launched any number of times; `Kernel.prepare` makes one.

    Keeps the arrays whose views or addresses are among its arguments alive. Not for several threads at once
    while an argument is replaced; the driver reads the arguments during `launch` alone.

    Attributes
    ----------
    name : str
        The kernel's.
    device_id : int
        The device that must be current at a launch.
    arguments : list
        As given; see `replace`.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedKernel,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        shared_bytes: int,
        is_cooperative: bool = False,
        cluster_blocks: int = 1,
    ) -> None:
        self.name = name
        self.device_id = loaded.device_id
        self.arguments = list(arguments)
        self._loaded = loaded
        self._grid = blocks, 1, 1, threads, 1, 1, shared_bytes
        self._attributes = is_cooperative, cluster_blocks
        slots = len(loaded.slot_offsets)
        self._words = np.empty(2 * slots, np.uint64)  # the arguments' slots, then the address of each
        loaded.layout.pack_into(self._words.data, 0, *(slot for a in arguments for slot in _slots(a)))
        address = self._words.__array_interface__["data"][0]
        np.add(loaded.slot_offsets, np.uint64(address), out=self._words[slots:])
        self._parameters = address + SLOT_BYTES * slots

    def launch(self, stream: StreamLike) -> None:
        """Launch on a stream of the current device, which is the one prepared for; does not synchronise.

        None is the default stream.
        """
        blocks = self._grid[0]
        if blocks == 0:
            return
        handle = stream if type(stream) is int else stream_handle(stream, NO_LIBRARY)
        function, parameters = self._loaded.function, self._parameters
        if self._attributes == (False, 1):
            (fault,) = driver.cuLaunchKernel(function, *self._grid, _driver_stream(handle), parameters, 0)
        else:
            configuration = _configuration(self._grid, handle, *self._attributes)
            (fault,) = driver.cuLaunchKernelEx(configuration, function, parameters, 0)
        if fault:
            why = ", for all of its blocks must run at once" if fault == TOO_LARGE else ""
            raise BackendError(f"{self.name}: the launch was refused: {fault}{why}")

    def replace(self, place: int, argument: Any) -> None:
        """Put another scalar, or array, in the place of one of the arguments, for the launches to come.

        Parameters
        ----------
        place : int
            Which argument.
        argument
            A numpy scalar of the same dtype, or a view of an array of the same dtype and shape.
        """
        old = self.arguments[place]
        if _kind(argument) != _kind(old) or argument.shape != old.shape:
            expected = f"{old.dtype} of shape {old.shape}"
            raise ArgumentError(f"argument {place}", f"{argument.dtype} of shape {argument.shape}", expected)
        self.arguments[place] = argument
        slot = self._loaded.first_slots[place]
        if isinstance(argument, DeviceView):
            self._words[slot + ADDRESS_SLOT] = argument.pointer
        else:
            (text,) = _slot_formats(_kind(argument))
            struct.pack_into("<" + text, self._words.data, SLOT_BYTES * slot, *_slots(argument))


class SimulatedLaunch:
    """What `PreparedLaunch` is on a device, in Numba's simulator."""

    device_id = None

    def __init__(
        self,
        dispatcher: Any,
        name: str,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        shared_bytes: int,
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        self._dispatcher = dispatcher
        self._grid = blocks, threads, 0, shared_bytes

    def launch(self, stream: StreamLike) -> None:
        """Run the kernel to its end."""
        if self._grid[0] > 0:
            # Configured only now: to the simulator, a kernel has one grid at a time.
            with _quick_thread_switches():
                self._dispatcher[self._grid](*map(_with_bits, self.arguments))

    def replace(self, place: int, argument: Any) -> None:
        """Put another argument in the place of one, as `PreparedLaunch.replace` does."""
        self.arguments[place] = argument


AnyLaunch: TypeAlias = PreparedLaunch | SimulatedLaunch


class LaunchSequence:
    """Launches that were prepared instead of made, to be made later, in order and any number of times.

    Given as the stream of a public function of this package, it takes the function's launches, and nothing
    runs: the function checks its arguments and allocates what it is not given, once. Such results have no
    content until `launch`, and the arguments are read then, from the arrays' memory.

    Examples
    --------
    >>> sequence = LaunchSequence()
    >>> tree = build_tree(log_probs, token_ids, 64, stream=sequence)  # device arrays
    >>> sequence.launch(stream)  # as often as log_probs and token_ids change

    Attributes
    ----------
    launches : list of PreparedLaunch
    """

    def __init__(self) -> None:
        self.launches: list[AnyLaunch] = []

    def launch(self, stream: StreamLike = None) -> None:
        """Launch all, in order, on a stream; does not synchronise. None is the default stream."""
        handle = stream_handle(stream, NO_LIBRARY)
        if not self.launches:
            return
        device_id = self.launches[0].device_id
        if device_id is None or _current_device() == device_id:
            self._launch(handle)
        else:
            with device_context(device_id):
                self._launch(handle)

    def places_of(self, argument: Any) -> list[tuple[AnyLaunch, int]]:
        """Find where an argument was passed: each launch, and its place there, for `replace`."""
        return [
            (launch, place)
            for launch in self.launches
            for place, passed in enumerate(launch.arguments)
            if passed is argument
        ]

    def _launch(self, handle: int) -> None:
        for launch in self.launches:
            launch.launch(handle)


class Kernel:
    """A CUDA kernel and what is known of it before it runs.

    Compiled code is kept on disk, as `numba_ddtree.code_cache` says.

    Parameters
    ----------
    function
        The kernel's Python function.
    signatures : tuple of str
        The Numba signatures that public functions launch it with; the compile test builds each.
    threads : int
        Threads a block, from `block_threads`; the compiler is told, so that registers fit.
    blocks_per_processor : int
        Blocks that registers are to leave room for on one multiprocessor.
    architecture : str, optional
        The only one that has the kernel's instructions, such as ``"sm_90a"``.
    is_cooperative : bool
        Whether blocks of a launch wait for each other, as by `grid_meeting.meet_all_blocks`. All of them
        then run at once, or the driver refuses the launch.
    cluster_blocks : int
        Neighbouring blocks that reach each other's shared memory (`device.clusters`); a launch has a multiple
        of them.
    """

    def __init__(
        self,
        function: Callable[..., None],
        signatures: tuple[str, ...],
        threads: int,
        blocks_per_processor: int = 1,
        architecture: str | None = None,
        is_cooperative: bool = False,
        cluster_blocks: int = 1,
    ) -> None:
        self.function = function
        self.architecture = architecture
        self.is_cooperative = is_cooperative
        self.cluster_blocks = cluster_blocks
        self.signatures = signatures
        self.threads = threads
        self.launch_bounds = threads, blocks_per_processor
        options = {} if SIMULATED else {"launch_bounds": self.launch_bounds}
        self._dispatcher = cuda.jit(**options)(function)
        self._loaded: dict[tuple[Any, ...], LoadedKernel] = {}  # by device and kinds of arguments

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    def prepare(self, blocks: int, *arguments: Any, shared_bytes: int = 0) -> AnyLaunch:
        """Prepare a launch on the current device; compiles the kernel if need be.

        Parameters
        ----------
        blocks : int
            Blocks, all along x, whose limit is 2^31 - 1.
        *arguments
            Views of C-contiguous device arrays, addresses and numpy scalars, of one of the signatures; there,
            an array of bfloat16 is one of uint16, the numbers' bits.
        shared_bytes : int
            Dynamic shared memory a block.
        """
        if SIMULATED:
            return SimulatedLaunch(self._dispatcher, self.name, blocks, self.threads, arguments, shared_bytes)
        loaded = self.load(_current_device(), tuple(map(_kind, arguments)))
        if shared_bytes > loaded.shared_limit:
            loaded.raise_shared_limit(self.name, shared_bytes)
        return PreparedLaunch(
            self.name,
            loaded,
            blocks,
            self.threads,
            arguments,
            shared_bytes,
            self.is_cooperative,
            self.cluster_blocks,
        )

    def load(self, device_id: int, kinds: tuple[Kind, ...]) -> LoadedKernel:
        """Load the kernel for its arguments' kinds on the current device, where it is not loaded yet."""
        key = device_id, *kinds
        if (loaded := self._loaded.get(key)) is not None:
            return loaded
        started = time.perf_counter()
        signature = tuple(_numba_type(*kind) for kind in kinds)
        with _toolkit_errors():
            code, origin = self._code(signature)
        loaded = self._loaded[key] = LoadedKernel.of(code, device_id, kinds)
        seconds = time.perf_counter() - started
        logger.info("%s(%s): %s in %.2f s", self.name, ", ".join(map(str, signature)), origin, seconds)
        return loaded

    def _code(self, signature: tuple[Any, ...]) -> tuple[Any, str]:
        """Return the code, a `cuda.core.Kernel`, and where it is from."""
        from cuda.core import ObjectCode

        capability = cuda.get_current_device().compute_capability
        place = code_cache.place_of(self.function, (signature, self.launch_bounds, tuple(capability)))
        if (found := code_cache.read(place)) is not None:
            return ObjectCode.from_cubin(found.code).get_kernel(found.name), "loaded from the cache"
        compiled = self._dispatcher.compile(signature)
        library = compiled._codelibrary
        code_cache.write(place, code_cache.Code(compiled.entry_name, bytes(library.get_cubin().code)))
        return library.get_cufunc().kernel, "compiled"


def warmup(*operations: str, dtypes: Sequence[DTypeLike] | None = None, device_id: int | None = None) -> None:
    """Compile kernels ahead of their first launch, or load them from the cache on disk.

    Says so by one line a kernel and choice of dtypes, at level INFO of the logger ``numba_ddtree.launch``.
    What is planned needs no warming: `DDTreeRound.plan` and `LaunchSequence` compile what they launch.

    Parameters
    ----------
    *operations : str
        Modules of this package, such as ``"tree_build"``; by default those of a round.
    dtypes : sequence of dtypes, optional
        Of the logits: a kernel that takes arrays of several dtypes first is compiled for these alone. All
        by default.
    device_id : int, optional
        By default the current device.

    Raises
    ------
    ArgumentError
        An operation that is none.
    BackendError
        No device, or no toolkit to compile with.
    """
    require_device()
    kernels = [kernel for name in operations or OF_A_ROUND for kernel in _kernels_of(name)]
    wanted = None if dtypes is None else {_bits(np.dtype(dtype)) for dtype in dtypes}
    if SIMULATED:
        return
    with device_context(device_id):
        device = _current_device()
        for kernel in kernels:
            for kinds in _wanted_kinds(kernel.signatures, wanted):
                kernel.load(device, kinds)


def _kernels_of(operation: str) -> list[Kernel]:
    try:
        module = import_module(f"numba_ddtree.{operation}")
    except ModuleNotFoundError as error:
        raise ArgumentError("operations", repr(operation), "a module of numba_ddtree") from error
    return [value for value in vars(module).values() if isinstance(value, Kernel)]


def _wanted_kinds(signatures: Sequence[str], wanted: set[np.dtype[Any]] | None) -> list[tuple[Kind, ...]]:
    """Return the kinds of the signatures whose first array is of a wanted dtype; of all where none is."""
    kinds = [tuple(map(_kind_of_type, normalize_signature(text)[0])) for text in signatures]
    chosen = [each for each in kinds if wanted is None or each[0][0] in wanted]
    return chosen or kinds


@lru_cache(maxsize=256)
def _driver_stream(handle: int) -> Any:
    return driver.CUstream(handle or driver.CU_STREAM_LEGACY)


@lru_cache(maxsize=256)
def _configuration(grid: tuple[int, ...], handle: int, is_cooperative: bool, cluster_blocks: int) -> Any:
    """Return the driver's configuration of a launch; never changed, for all threads."""
    attributes = []
    if is_cooperative:
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    if cluster_blocks > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x = cluster_blocks
        cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
        attributes.append(cluster)
    made = driver.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = grid[:3]
    made.blockDimX, made.blockDimY, made.blockDimZ, made.sharedMemBytes = grid[3:]
    made.hStream = _driver_stream(handle)
    made.attrs, made.numAttrs = attributes, len(attributes)
    return made


def _current_device() -> int:
    fault, device = driver.cuCtxGetDevice()
    return int(cuda.get_current_device().id) if fault else int(device)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype as Numba has it: no bfloat16, so that its bits stand for it."""
    return UINT16 if dtype == BFLOAT16 else dtype


def _with_bits(argument: Any) -> Any:
    return argument.view(np.uint16) if argument.dtype == BFLOAT16 else argument


def _kind(argument: Any) -> Kind:
    return _bits(argument.dtype), len(argument.shape) if isinstance(argument, DeviceView) else -1


def _numba_type(dtype: np.dtype[Any], ndim: int) -> Any:
    return from_dtype(dtype) if ndim < 0 else types.Array(from_dtype(dtype), ndim, "C")


def _kind_of_type(numba_type: Any) -> Kind:
    is_array = isinstance(numba_type, types.Array)
    return as_dtype(numba_type.dtype if is_array else numba_type), numba_type.ndim if is_array else -1


def _slot_formats(kind: Kind) -> list[str]:
    dtype, ndim = kind
    return [SCALAR_FORMATS[dtype.str[1:]]] if ndim < 0 else ["Q"] * ARRAY_HEAD + ["q"] * 2 * ndim


def _slots(argument: Any) -> tuple[Any, ...]:
    """Return what a launch passes for an argument: for an array, the members of Numba's structure."""
    if isinstance(argument, Address):
        return (argument.pointer,)
    if not isinstance(argument, DeviceView):
        return (argument,)
    head, tail = _array_slots(argument.shape, argument.dtype.itemsize)
    return (*head, argument.pointer, *tail)


@lru_cache(maxsize=1024)
def _array_slots(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what comes before and after an array's address."""
    no_reference, no_parent = 0, 0
    return (no_reference, no_parent, math.prod(shape), itemsize), (*shape, *c_strides(shape, itemsize))


@contextmanager
def _toolkit_errors() -> Iterator[None]:
    """Say how to get the toolkit's libraries where the compiler does not find them."""
    try:
        yield
    except Exception as error:
        missing = type(error).__name__ in ("NvvmSupportError", "DynamicLibNotFoundError")
        if not missing:
            raise
        raise BackendError(
            f"the CUDA toolkit's libraries were not found ({str(error).splitlines()[0]}); "
            "install them with the extra cu13 (or cu12): pip install 'numba_ddtree[cu13]'"
        ) from error


@contextmanager
def _quick_thread_switches() -> Iterator[None]:
    """Let the simulator's threads take turns often: it polls for barriers, which starves them else."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
