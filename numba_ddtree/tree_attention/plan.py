"""`TreeAttention`: tree attention planned once, with its workspace, for runs that allocate nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import DTypeLike

from numba_ddtree.arrays import (
    HOST,
    Placement,
    StreamLike,
    check_count,
    check_flag,
    device_view,
    placement_of,
)
from numba_ddtree.cuda_target import SIMULATED, cuda
from numba_ddtree.devices import (
    check_backend,
    check_library,
    check_no_stream,
    device_context,
    require_device,
)
from numba_ddtree.errors import ArgumentError
from numba_ddtree.launch import LaunchSequence
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree import Array, DraftTree
from numba_ddtree.tree_attention.arguments import (
    MAX_HEADS,
    MAX_SLOTS,
    Arguments,
    check_tensor_core_limits,
    check_tensor_core_widths,
    check_values,
    gather_arguments,
    gather_keys,
)
from numba_ddtree.tree_attention.calls import (
    INPUT_DTYPES,
    checked_dtype,
    output_dtype,
    run_reference,
    run_shared_scores,
    run_tensor_cores,
    split_plan,
)
from numba_ddtree.tree_attention.kernels import (
    FLOAT32,
    HOPPER,
    SHARED_SCORES,
    check_kernel,
    choose_kernel,
    first_items_launcher,
    launcher_of,
)
from numba_ddtree.tree_attention.plan_memory import memory_of_first_items, memory_of_partials
from numba_ddtree.tree_attention.prepared_runs import PreparedRun, PreparedRuns, forget_owners, run_key
from numba_ddtree.tree_attention.splits import (
    MAX_KEYS,
    WORKSPACE_LIMIT,
    SplitKeys,
    SplitSizes,
    split_sizes,
    whole_range,
)
from numba_ddtree.tree_attention.stand_ins import stand_in, work_of_stand_ins
from numba_ddtree.tree_attention.work import LATENT, ROPE, tiles_of

MAX_BATCH = 2**16
MAX_PAGE_SIZE = 2**20
LIBRARIES = ("torch", "cupy", "numba")
REFERENCE = "reference"


@dataclass(frozen=True, eq=False)
class TreeAttention:
    """`verify_attention` of planned sizes; `plan` makes one, and `run` runs it, in any layer.

    Keeps its workspace alive, and the launches of its latest 128 runs that were given `out` and `lse`, and
    of as many calls of `schedule`, but none of their arrays. Two runs at once, on two streams, need a plan
    each; so do two threads.

    Attributes
    ----------
    max_batch, num_slots, num_heads, max_prefix_length, max_depth : int
    page_size : int or None
    dtype, out_dtype : numpy.dtype
    kernel : str
        What runs: ``"hopper"``, ``"tensor_cores"``, ``"shared_scores"``, or ``"reference"`` for the numpy
        backend.
    split_keys : int or "fastest"
        Keys of a split.
    workspace_bytes : int
        Bytes of the workspace: exactly what partial results take.
    placement : Placement
        Where the workspace is.
    """

    max_batch: int
    num_slots: int
    num_heads: int
    max_prefix_length: int
    max_depth: int
    page_size: int | None
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    kernel: str
    placement: Placement
    _sizes: SplitSizes = field(repr=False)
    _memory: dict[str, Any] = field(repr=False)
    _first_items: Any = field(repr=False)  # of the Hopper kernel's blocks, int32, flat
    _runs: PreparedRuns = field(default_factory=PreparedRuns, init=False, repr=False)
    _schedules: PreparedRuns = field(default_factory=PreparedRuns, init=False, repr=False)

    @classmethod
    def plan(
        cls,
        max_batch: int,
        num_slots: int,
        num_heads: int,
        *,
        max_prefix_length: int,
        max_depth: int | None = None,
        dtype: DTypeLike = bfloat16,
        out_dtype: DTypeLike | None = None,
        page_size: int | None = None,
        split_keys: SplitKeys = None,
        kernel: str | None = None,
        workspace_limit: int = WORKSPACE_LIMIT,
        workspace: Array | None = None,
        library: str | None = None,
        device_id: int | None = None,
        backend: str | None = None,
    ) -> TreeAttention:
        """Allocate all that runs need and compile their kernels; synchronises.

        Parameters
        ----------
        max_batch : int
            Most requests of a run, up to 65536.
        num_slots : int
            Most slots N of a run's trees, with the root: up to 1025.
        num_heads : int
            H, up to 128.
        max_prefix_length : int
            A bound on the prefix lengths.
        max_depth : int, optional
            A bound on the trees' `max_depth`; N - 1 by default.
        dtype : bfloat16, float16 or float32
            Of queries and caches; torch's dtypes will do.
        out_dtype : dtype, optional
            Of the output: `dtype`, the default, or float32.
        page_size : int, optional
            Rows of a page, of any number; None for contiguous caches.
        split_keys : int, "fastest" or None
            The keys of a request are worked on in splits of so many, a multiple of 64, at once; the parts are
            then merged in order. Shorter splits fill more of a device, and longer ones have less to merge. By
            default a power of 2 from 4096 on that depends on `max_prefix_length` alone, so that plans with
            the same bound give the same bits, also where one verifies trees and the other decodes with
            N = 1. ``"fastest"`` lets the device choose, by the lengths of each run, and gives that
            equality up.
        kernel : {None, "tensor_cores", "hopper", "shared_scores"}
            As for `verify_attention`. ``"tensor_cores"`` and ``"hopper"`` do not give the same bits.
        workspace_limit : int
            Bytes that partial results may take; where more would be needed, fewer tiles are cut along their
            keys to fill a device.
        workspace : array on the device, optional
            Memory for partial results, instead of allocating any: at least `tree_attention_workspace_bytes`
            bytes, C-contiguous, of any dtype, from a multiple of 16 bytes on. Plans whose runs do not overlap
            may share it.
        library : {None, "torch", "cupy", "numba"}
            Whose allocator the workspace is to be from; ``"numba"`` by default.
        device_id : int, optional
            By default that of `workspace`, or else the current device.
        backend : {None, "cuda", "numpy"}
            ``"numpy"`` plans for the reference.

        Returns
        -------
        TreeAttention

        Raises
        ------
        ArgumentError
            A number out of range, a dtype or kernel that is none, a kernel that the device cannot run, or a
            workspace that is too small (the message says what is needed and what was given).
        BackendError
            No device for the CUDA backend, or no toolkit to compile with.
        """
        numbers = _checked_numbers(max_batch, num_slots, num_heads, max_prefix_length, max_depth)
        if page_size is not None:
            check_count("page_size", page_size, 1, MAX_PAGE_SIZE)
        checked = checked_dtype("dtype", dtype, INPUT_DTYPES)
        check_kernel(kernel, checked)
        check_backend(backend)
        if checked == FLOAT32 and page_size is not None and backend != "numpy":
            expected = "None, since float32 has no kernel for pages; float16 and bfloat16 have"
            raise ArgumentError("page_size", page_size, expected)
        sizes = _sizes_of(**numbers, split_keys=split_keys, workspace_limit=workspace_limit)
        placement = _planned_placement(library, device_id, backend, workspace)
        with device_context(placement.device_id):
            chosen = REFERENCE if placement.on_host else choose_kernel(kernel, checked)
        if chosen in (REFERENCE, SHARED_SCORES):
            sizes = whole_range()  # without partial results
        planned = cls(
            **numbers,
            page_size=page_size,
            dtype=checked,
            out_dtype=output_dtype(checked, out_dtype, None),
            kernel=chosen,
            placement=placement,
            _sizes=sizes,
            _memory=memory_of_partials(sizes, placement, workspace),
            _first_items=memory_of_first_items(placement, max_batch) if chosen == HOPPER else None,
        )
        if chosen not in (REFERENCE, SHARED_SCORES):
            planned._rehearse()
        return planned

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace."""
        return self._sizes.workspace_bytes

    @property
    def split_keys(self) -> int | str:
        """Keys of a split, or ``"fastest"``."""
        return self._sizes.split_keys

    def schedule(
        self,
        ckv_cache: Array,
        kpe_cache: Array,
        tree: DraftTree,
        *,
        prefix_lengths: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        block_table: Array | None = None,
        stream: StreamLike = None,
    ) -> None:
        """Find out what runs begin with, once for all layers of a model; for runs with `is_scheduled`.

        Each block of the ``"hopper"`` kernel begins with an item of work that depends on lengths alone, and
        spends 5 to 7 µs to find it. This writes all of them to memory of the plan's, by a short kernel, for
        runs that come after it on its stream, or wait for it; one that reads it while it is being written may
        give wrong results. It may be captured by a CUDA graph together with them. For other kernels, and for
        arrays on the host, it checks its arguments and does nothing more. A call that comes again finds its
        launch prepared, as runs do. Deterministic; does not synchronise.

        Parameters
        ----------
        ckv_cache, kpe_cache, tree, prefix_lengths, kv_indptr, kv_indices, block_table
            As for `run`. Of the caches only the shape matters, and all layers' have the same.
        stream
            Stream to launch on; by default the current one of the caches' library.

        Raises
        ------
        ArgumentError
            What `run` refuses of these arguments; but how rows lie matters only where something is launched.
        BackendError
            A launch that the driver refuses.
        """
        key = None
        if not (self.placement.on_host or isinstance(stream, LaunchSequence)):
            others = prefix_lengths, block_table, kv_indptr, kv_indices
            # As of a run without queries, whose outputs are the caches.
            key = run_key(ckv_cache, ckv_cache, kpe_cache, tree, 1.0, *others)
        if key is not None and (known := self._schedules.find(key)) is not None:
            known.launch(stream)
            return
        given = gather_keys(
            ckv_cache,
            kpe_cache,
            tree,
            heads=self.num_heads,
            prefix_lengths=prefix_lengths,
            block_table=block_table,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
        )
        self._check_fits(given, of_dtype="ckv_cache", of_sizes="tree")
        if self.kernel not in (REFERENCE, SHARED_SCORES):
            check_tensor_core_widths(given, "ckv_cache", "kpe_cache")
        if given.placement.on_host:
            check_values(given, self.max_prefix_length)
            if self.kernel == REFERENCE:
                check_no_stream(stream)
        elif key is None:
            self._find_first_items(given, stream)
        else:
            prepared = self._prepare(given, lambda sequence: self._find_first_items(given, sequence))
            self._schedules.keep(key, prepared)
            prepared.launch(stream)

    def run(
        self,
        q_nope: Array,
        q_pe: Array,
        ckv_cache: Array,
        kpe_cache: Array,
        tree: DraftTree,
        *,
        sm_scale: float,
        prefix_lengths: Array | None = None,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        block_table: Array | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        stream: StreamLike = None,
        validate: bool = False,
        is_scheduled: bool = False,
    ) -> tuple[Array, Array]:
        """Attend as `verify_attention` does, in the planned memory.

        Given `out` and `lse`, it allocates nothing on the device, but that on compute capability 9.0 the
        first run for a cache makes tensor maps of it, and waits until they are there. Without `validate` it
        reads nothing from there and does not synchronise, so that a CUDA graph can capture it: lengths, trees
        and page tables are read at each replay. Host arrays are copied to the device and results back, which
        synchronises.

        A run that comes again finds its launches prepared, and has little to do on the host. It has `out`
        and `lse`, device arrays of torch, cupy or numba alone, and one of the latest 128 such runs had the
        same addresses, shapes, strides, dtypes and numbers. Content and stream may differ, and the arrays may
        be other objects.

        Parameters
        ----------
        q_nope, q_pe, ckv_cache, kpe_cache, tree, sm_scale, prefix_lengths, kv_indptr, kv_indices, block_table
            As for `verify_attention`, within what was planned: B up to `max_batch` and N up to `num_slots`.
            A page table is given where a page size was planned.
        out : [B, N, H, D_CKV] of the planned `out_dtype`, optional
        lse : float32 [B, N, H], optional
        stream
            Stream to launch on; by default the current one of the arrays' library.
        validate : bool
            Check the values of device arrays as those of host arrays are; synchronises.
        is_scheduled : bool
            Begin with what the plan's last `schedule` found, for a tree and lengths that are the same still.
            Of others, or after none, results are right, too, to the bit; but first items of others are worked
            on in vain, which may take as long again. Other kernels than ``"hopper"``, and runs of host
            arrays, take no notice.

        Returns
        -------
        out, lse
            As from `verify_attention`, to the bit for the same split length.

        Raises
        ------
        ArgumentError
            What `verify_attention` refuses, and what was not planned for.
        BackendError
            A launch that the driver refuses, as that of ``"hopper"`` in a context of a part of the device.
        """
        check_flag("validate", validate)
        check_flag("is_scheduled", is_scheduled)
        others = q_pe, ckv_cache, kpe_cache, prefix_lengths, block_table, kv_indptr, kv_indices
        comes_again = not (validate or self.placement.on_host or isinstance(stream, LaunchSequence))
        key = run_key(q_nope, out, lse, tree, sm_scale, *others) if comes_again else None
        if key is not None:
            key = (*key, is_scheduled)
            if (known := self._runs.find(key)) is not None:
                known.launch(stream)
                return out, lse
        given = gather_arguments(
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            tree,
            sm_scale=sm_scale,
            prefix_lengths=prefix_lengths,
            block_table=block_table,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            validate=validate,
        )
        self._check_fits(given)
        has_values = given.placement.on_host or validate
        pages = check_values(given, self.max_prefix_length)[1] if has_values else None
        if self.kernel == REFERENCE:
            check_no_stream(stream)
            return run_reference(given, pages, self.out_dtype, out, lse)
        if key is None or given.placement.on_host:
            return self._attend(given, out, lse, stream, is_scheduled)
        outputs = [device_view(name, array) for name, array in (("out", out), ("lse", lse))]
        prepared = self._prepare(
            given, lambda sequence: self._attend(given, out, lse, sequence, is_scheduled), outputs
        )
        self._runs.keep(key, prepared)
        prepared.launch(stream)
        return out, lse

    def _attend(
        self, given: Arguments, out: Array | None, lse: Array | None, stream: StreamLike, is_scheduled: bool
    ) -> tuple[Array, Array]:
        """Launch the kernels of checked arguments, or let a `LaunchSequence` take them."""
        with device_context(self.placement.device_id):
            if self.kernel == SHARED_SCORES:
                return run_shared_scores(given, self.max_prefix_length, out, lse, stream)
            check_tensor_core_limits(given)
            check_tensor_core_widths(given)
            return run_tensor_cores(
                given,
                self.kernel,
                self._sizes,
                self.out_dtype,
                out,
                lse,
                stream,
                memory=self._memory,
                first_items=self._first_items if is_scheduled and not given.placement.on_host else None,
            )

    def _find_first_items(self, given: Arguments, stream: StreamLike) -> None:
        """Launch what finds first items, if the kernel has any, or let a `LaunchSequence` take it."""
        if self.kernel != HOPPER:
            return
        with (
            device_context(self.placement.device_id),
            Transfer(given.placement, stream) as transfer,
        ):
            splits = split_plan(self._sizes, self.placement, transfer, self._memory, self._first_items)
            work = work_of_stand_ins(given, transfer, self.out_dtype, self._first_items)
            first_items_launcher()(transfer, work, splits)
            if given.placement.library == "jax":
                cuda.synchronize()  # jax may give memory to others when nothing of its own needs it

    def _prepare(
        self, given: Arguments, launch: Callable[[LaunchSequence], Any], outputs: Sequence[Any] = ()
    ) -> PreparedRun:
        """Prepare the launches of checked arguments on a device, which keep no array of theirs alive."""
        sequence = LaunchSequence()
        launch(sequence)
        forget_owners(sequence, (*given.views.values(), *outputs))
        return PreparedRun(sequence, given.placement)

    def _check_fits(self, given: Arguments, of_dtype: str = "q_nope", of_sizes: str = "q_nope") -> None:
        """Check a call's arguments against the plan; errors name what the dtype is of, and the sizes."""
        is_elsewhere = given.placement.device_id != self.placement.device_id
        if is_elsewhere and (self.placement.on_host or not given.placement.on_host):
            raise ArgumentError(of_dtype, given.placement, f"{self.placement}, as planned")
        if given.dtype != self.dtype:
            raise ArgumentError(of_dtype, given.dtype, f"{self.dtype}, as planned")
        for label, found, most in (
            ("B", given.batch, self.max_batch),
            ("N", given.slots, self.num_slots),
            ("H", given.heads, self.num_heads),
        ):
            if found > most or (label == "H" and found != most):
                expected = f"{'' if label == 'H' else 'at most '}{most}, as planned"
                raise ArgumentError(of_sizes, f"{label} = {found}", expected)
        if given.max_path > self.max_depth + 1:
            raise ArgumentError("tree.max_depth", given.max_depth, f"at most {self.max_depth}, as planned")
        if given.page_size != self.page_size:
            raise ArgumentError(
                "ckv_cache", _described(given.page_size), f"{_described(self.page_size)}, as planned"
            )

    def _rehearse(self) -> None:
        """Compile and load the kernels, by preparing their launches on arguments that nothing reads."""
        with device_context(self.placement.device_id):
            sequence = LaunchSequence()
            with Transfer(self.placement, sequence) as transfer:
                plan = split_plan(self._sizes, self.placement, transfer, self._memory, self._first_items)
                given = self._stand_ins(plan.partials)
                work = work_of_stand_ins(given, transfer, self.out_dtype, plan.partials)
                launcher_of(self.kernel)(transfer, work, plan)
                if self.kernel == HOPPER:
                    first_items_launcher()(transfer, work, plan)
            cuda.synchronize()  # later calls may be on other streams

    def _stand_ins(self, memory: Any) -> Arguments:
        """Return arguments of one request of the planned sizes, all of them in one place.

        But for the caches, which have no pages: of others, tensor maps would be made.
        """
        batch, slots, heads = 1, self.num_slots, self.num_heads
        rows = (0, self.page_size or self.max_prefix_length + slots)
        shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "q_nope": ((batch, slots, heads, LATENT), self.dtype),
            "q_pe": ((batch, slots, heads, ROPE), self.dtype),
            "ckv_cache": ((*rows, LATENT), self.dtype),
            "kpe_cache": ((*rows, ROPE), self.dtype),
            "ancestor_bits": ((batch, slots, -(-slots // 32)), np.dtype(np.uint32)),
            "num_nodes": ((batch,), np.dtype(np.int32)),
            "prefix_lengths": ((batch,), np.dtype(np.int32)),
        }
        if self.page_size is not None:
            shapes["block_table"] = ((batch, 1), np.dtype(np.int32))
        absent: dict[str, Any] = dict.fromkeys(("block_table", "kv_indptr", "kv_indices"))
        views = {name: stand_in(memory, shape, dtype) for name, (shape, dtype) in shapes.items()}
        return Arguments(self.placement, absent | views, 1.0, self.max_depth)


def tree_attention_workspace_bytes(
    max_batch: int,
    num_slots: int,
    num_heads: int,
    *,
    max_prefix_length: int,
    max_depth: int | None = None,
    split_keys: SplitKeys = None,
    workspace_limit: int = WORKSPACE_LIMIT,
) -> int:
    """Return the bytes of workspace that `TreeAttention.plan` needs for tensor cores; without a device.

    Parameters
    ----------
    max_batch, num_slots, num_heads, max_prefix_length, max_depth, split_keys, workspace_limit
        As for `TreeAttention.plan`.

    Returns
    -------
    int
        0 where no row has several splits.

    Raises
    ------
    ArgumentError
        A number out of range.
    """
    numbers = _checked_numbers(max_batch, num_slots, num_heads, max_prefix_length, max_depth)
    return _sizes_of(**numbers, split_keys=split_keys, workspace_limit=workspace_limit).workspace_bytes


def _checked_numbers(
    max_batch: int, num_slots: int, num_heads: int, max_prefix_length: int, max_depth: int | None
) -> dict[str, int]:
    slots = check_count("num_slots", num_slots, 1, MAX_SLOTS)
    return {
        "max_batch": check_count("max_batch", max_batch, 1, MAX_BATCH),
        "num_slots": slots,
        "num_heads": check_count("num_heads", num_heads, 1, MAX_HEADS),
        "max_prefix_length": check_count("max_prefix_length", max_prefix_length, 0, MAX_KEYS - MAX_SLOTS),
        "max_depth": slots - 1 if max_depth is None else check_count("max_depth", max_depth, 0, MAX_SLOTS),
    }


def _sizes_of(
    max_batch: int,
    num_slots: int,
    num_heads: int,
    max_prefix_length: int,
    max_depth: int,
    *,
    split_keys: SplitKeys,
    workspace_limit: int,
) -> SplitSizes:
    return split_sizes(
        split_keys,
        max_prefix_length=max_prefix_length,
        max_path=min(max_depth + 1, num_slots),
        tiles=tiles_of(max_batch, num_slots, num_heads),
        workspace_limit=workspace_limit,
    )


def _planned_placement(
    library: str | None, device_id: int | None, backend: str | None, workspace: Array | None
) -> Placement:
    """Return where the workspace is or is to be; the host for the numpy backend."""
    check_library(library, LIBRARIES)
    given = {"library": library, "device_id": device_id, "workspace": workspace}
    if backend == "numpy":
        for name, value in given.items():
            if value is not None:
                expected = "None, since the numpy backend has host arrays and no workspace"
                raise ArgumentError(name, type(value).__name__, expected)
        return HOST
    require_device()
    if workspace is not None:
        found = placement_of("workspace", workspace)
        if found.on_host or (device_id is not None and found.device_id != device_id):
            wanted = "a CUDA device" if device_id is None else f"CUDA device {device_id}"
            raise ArgumentError("workspace", found, f"memory on {wanted}")
        device_id = found.device_id
    if device_id is None:
        device_id = 0 if SIMULATED else int(cuda.get_current_device().id)
    return Placement(library or "numba", check_count("device_id", device_id, 0, len(cuda.gpus) - 1))


def _described(page_size: int | None) -> str:
    return "a contiguous cache" if page_size is None else f"pages of {page_size} rows"
