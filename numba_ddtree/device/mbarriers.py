"""Barriers in shared memory, and what orders its different users; compute capability 9.0 and newer.

An mbarrier (PTX ISA, "mbarrier") counts arrivals, and bytes that copies are still to bring. When nothing is
outstanding its phase ends and the next begins. Whoever waits names the parity of the phase whose end it
waits for: 0 for the first, 1 for the second, 0 again; a wait for parity 1 on a new barrier is over at once,
which is how producers wait for buffers that nobody has filled yet.

Shared memory that ordinary stores and `cp.async` write is seen by `wgmma` and by tensor copies, which use
another way to it, only after `fence_async_proxy`.
"""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED

if not SIMULATED:
    from numba.core import types

    from numba_ddtree.device.ptx import FLOAT, LONG, WORD, assemble, effect, intrinsic

    BARRIER_BYTES = 8
    _WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @done bra D; bra W;"

    @intrinsic
    def fresh_shared_address_of(typing_context: Any, array: Any) -> Any:
        """`ptx.shared_address_of`, computed where it stands: warps that part keep no register for it."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            code = "{ .reg .u64 window; cvta.to.shared.u64 window, $1; cvt.u32.u64 $0, window; }"
            return assemble(builder, WORD, [builder.ptrtoint(data, LONG)], code, "=r,l")

        return types.uint32(array), generate

    @intrinsic
    def fresh_lane(typing_context: Any) -> Any:
        """Lane of the warp (uint32), read where it stands: what depends on it is not kept from before."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, WORD, [], "mov.u32 $0, %laneid;", "=r")

        return types.uint32(), generate

    @intrinsic
    def fresh_word(typing_context: Any, word: Any) -> Any:
        """Return a word (int32) as one of which nothing is known, so that nothing is kept from before."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, WORD, args, "mov.b32 $0, $1;", "=r,r")

        return types.int32(types.int32), generate

    @intrinsic
    def load_shared_word(typing_context: Any, address: Any) -> Any:
        """Word (int32) at an address of shared memory: ``ld.shared.b32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, WORD, args, "ld.shared.b32 $0, [$1];", "=r,r")

        return types.int32(types.uint32), generate

    @intrinsic
    def load_shared_float(typing_context: Any, address: Any) -> Any:
        """Float32 at an address of shared memory: ``ld.shared.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, FLOAT, args, "ld.shared.f32 $0, [$1];", "=f,r")

        return types.float32(types.uint32), generate

    @intrinsic
    def store_shared_float(typing_context: Any, address: Any, value: Any) -> Any:
        """Write a float32 at an address of shared memory: ``st.shared.f32``."""
        return effect("st.shared.f32 [$0], $1;", "r,f", types.uint32, types.float32)

    @intrinsic
    def start_barrier(typing_context: Any, barrier: Any, arrivals: Any) -> Any:
        """Make a barrier of so many arrivals a phase: ``mbarrier.init.shared::cta.b64``."""
        return effect("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", types.uint32, types.uint32)

    @intrinsic
    def publish_barriers(typing_context: Any) -> Any:
        """Make new barriers known to copies: ``fence.mbarrier_init.release.cluster``."""
        return effect("fence.mbarrier_init.release.cluster;", "")

    @intrinsic
    def arrive(typing_context: Any, barrier: Any) -> Any:
        """Arrive once: ``mbarrier.arrive.shared::cta.b64``; what this thread did before is done."""
        return effect("mbarrier.arrive.shared::cta.b64 _, [$0];", "r", types.uint32)

    @intrinsic
    def arrive_and_expect(typing_context: Any, barrier: Any, size: Any) -> Any:
        """Arrive, and wait with the phase's end for so many bytes: ``mbarrier.arrive.expect_tx``."""
        code = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
        return effect(code, "r,r", types.uint32, types.uint32)

    @intrinsic
    def arrive_after_copies(typing_context: Any, barrier: Any) -> Any:
        """Arrive when this thread's `copy_async` so far are done: ``cp.async.mbarrier.arrive.noinc``."""
        return effect("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", types.uint32)

    @intrinsic
    def wait_for(typing_context: Any, barrier: Any, parity: Any) -> Any:
        """Wait for the end of a phase: ``mbarrier.try_wait.parity.shared::cta.b64``."""
        code = f"{{ .reg .pred done; {_WAIT} D: }}"
        return effect(code, "r,r", types.uint32, types.uint32)

    @intrinsic
    def wait_for_copies_if(typing_context: Any, barrier: Any, parity: Any, is_wanted: Any) -> Any:
        """Wait for others' `copy_async` and make them seen by `wgmma`, unless `is_wanted` (uint32) is 0."""
        wait = _WAIT.replace("bra D", "bra F")
        code = (
            f"{{ .reg .pred done; setp.eq.u32 done, $2, 0; @done bra D; {wait} "
            "F: fence.proxy.async.shared::cta; D: }"
        )
        return effect(code, "r,r,r", types.uint32, types.uint32, types.uint32)

    @intrinsic
    def fence_async_proxy(typing_context: Any) -> Any:
        """Let `wgmma` and tensor copies see shared memory as this thread does: ``fence.proxy.async``."""
        return effect("fence.proxy.async.shared::cta;", "")

    def make_handover(name: int, threads: int) -> tuple[Any, Any]:
        """Make the two sides of barrier `name` (1 to 15), at which so many threads meet, whole warps.

        Returns
        -------
        announce
            Arrives without waiting: ``bar.arrive``.
        await_announced
            Waits for the rest: ``bar.sync``.
        """

        @intrinsic
        def announce(typing_context: Any) -> Any:
            """Arrive at a named barrier without waiting: ``bar.arrive``."""
            return effect(f"bar.arrive {name}, {threads};", "")

        @intrinsic
        def await_announced(typing_context: Any) -> Any:
            """Wait at a named barrier: ``bar.sync``."""
            return effect(f"bar.sync {name}, {threads};", "")

        return announce, await_announced

    def make_register_limit(change: str, count: int) -> Any:
        """Make a change of how many registers a thread of the warpgroup has, ``"inc"`` or ``"dec"``."""

        @intrinsic
        def limit_registers(typing_context: Any) -> Any:
            """Give registers back, or wait for them: ``setmaxnreg.sync.aligned.u32``; all four warps call."""
            return effect(f"setmaxnreg.{change}.sync.aligned.u32 {count};", "")

        return limit_registers
