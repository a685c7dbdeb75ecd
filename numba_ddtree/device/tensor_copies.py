"""Copies of boxes of a matrix to shared memory by the tensor copy engine; compute capability 9.0 and newer.

The matrix is described by a tensor map of 128 bytes, which the host makes
(`numba_ddtree.tree_attention.tensor_maps`).
"""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED

if not SIMULATED:
    from numba.core import types

    from numba_ddtree.device.ptx import VOID, assemble, intrinsic

    @intrinsic
    def acquire_map(typing_context: Any, tensor_map: Any) -> Any:
        """Make a tensor map in global memory known to this thread's copies: ``fence.proxy.tensormap``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, args, "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "l")
            return context.get_dummy_value()

        return types.void(types.uint64), generate

    @intrinsic
    def copy_box(
        typing_context: Any, shared: Any, tensor_map: Any, barrier: Any, column: Any, row: Any, page: Any
    ) -> Any:
        """Begin to copy a box of a map of three dimensions: ``cp.async.bulk.tensor.3d``.

        `shared` (uint32) is a multiple of 1024 where the map swizzles by 128 bytes. The barrier's phase has
        to expect the box's bytes.
        """
        code = (
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[$0], [$1, {$3, $4, $5}], [$2];"
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, args, code, "r,l,r,r,r,r")
            return context.get_dummy_value()

        numbers = types.uint32, types.uint64, types.uint32, types.int32, types.int32, types.int32
        return types.void(*numbers), generate
