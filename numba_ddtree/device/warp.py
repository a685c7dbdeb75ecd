"""Operations of a whole warp: maximum, ballot, broadcast, sums.

Every lane of the warp must take part. In the simulator, which has no warps, a block must be a
single warp, and its barrier stands in for the warp's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, cuda, device_function

FULL_WARP = np.uint32(0xFFFFFFFF)
LANES = 32

if SIMULATED:
    _exchange = np.zeros(LANES, np.int64)

    def _share(value: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        _exchange[cuda.threadIdx.x] = value
        cuda.syncthreads()
        values = _exchange.copy()
        cuda.syncthreads()
        return values

    def warp_max(value: Any) -> Any:
        return np.uint32(_share(value).max())

    def warp_ballot(predicate: Any) -> Any:
        return np.uint32(sum(1 << lane for lane, vote in enumerate(_share(bool(predicate))) if vote))

    def warp_broadcast(value: Any, lane: Any) -> Any:
        return np.int32(_share(value)[lane])

    def warp_pair_sum(value: Any) -> Any:
        return np.int32(_share(value)[cuda.threadIdx.x & ~1 :][:2].sum())

    def warp_running_sum(value: Any) -> Any:
        return np.int32(_share(value)[: cuda.threadIdx.x + 1].sum())

    def warp_running_cost(value: Any) -> Any:
        values = _share(np.float64(value).view(np.int64)).view(np.float64)
        return np.float32(values[: cuda.threadIdx.x + 1].sum())

    def warp_sum(value: Any) -> Any:
        return np.int32(_share(value).sum())

    def warp_total(value: Any) -> Any:
        return np.int64(_share(value).sum())

    def warp_sync() -> None:
        cuda.syncthreads()

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    def _reduction(operation: str) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(32)
            reduction = ir.InlineAsm(
                ir.FunctionType(word, [word]),
                f"redux.sync.{operation} $0, $1, 0xffffffff;",
                "=r,r",
                side_effect=True,
            )
            return builder.call(reduction, args)

        return generate

    @intrinsic
    def warp_max(typing_context: Any, value: Any) -> Any:
        """Largest of the lanes' values, uint32: ``redux.sync.max.u32`` (compute capability 8.0)."""
        return types.uint32(types.uint32), _reduction("max.u32")

    @intrinsic
    def warp_sum(typing_context: Any, value: Any) -> Any:
        """Sum of the lanes' values, int32, for each of them: ``redux.sync.add.s32`` (8.0, too)."""
        return types.int32(types.int32), _reduction("add.s32")

    @device_function
    def warp_ballot(predicate: Any) -> Any:
        """Bit i of the result (uint32) is lane i's predicate."""
        return np.uint32(cuda.ballot_sync(FULL_WARP, predicate))

    @device_function
    def warp_broadcast(value: Any, lane: Any) -> Any:
        """Lane `lane`'s value, int32."""
        return cuda.shfl_sync(FULL_WARP, value, lane)

    @device_function
    def warp_pair_sum(value: Any) -> Any:
        """Sum of the values (int32) of this lane and its neighbour, an even lane and the next."""
        return np.int32(value + cuda.shfl_xor_sync(FULL_WARP, value, 1))

    @device_function
    def warp_running_sum(value: Any) -> Any:
        """Sum of the values (int32) of the lanes up to and including this one."""
        lane = np.uint32(np.uint32(cuda.threadIdx.x) % np.uint32(LANES))
        total = np.int32(value)  # of 64 bits, sums would take twice the shuffles
        for distance in (1, 2, 4, 8, 16):
            below = cuda.shfl_up_sync(FULL_WARP, total, distance)
            total = np.int32(total + (below if lane >= np.uint32(distance) else np.int32(0)))
        return total

    @device_function
    def warp_running_cost(value: Any) -> Any:
        """Sum of the values (float32) of the lanes up to and including this one, rounded five times."""
        lane = np.uint32(np.uint32(cuda.threadIdx.x) % np.uint32(LANES))
        total = np.float32(value)
        for distance in (1, 2, 4, 8, 16):
            below = cuda.shfl_up_sync(FULL_WARP, total, distance)
            total = np.float32(total + (below if lane >= np.uint32(distance) else np.float32(0)))
        return total

    @device_function
    def warp_total(value: Any) -> Any:
        """Sum of the lanes' values, int64, for each of them."""
        total = np.int64(value)
        for distance in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(FULL_WARP, total, distance)
        return total

    @device_function
    def warp_sync() -> None:
        """Order the lanes' accesses to memory."""
        cuda.syncwarp()
