"""A meeting of all blocks of a launch, after which each sees what the others have written before."""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED

if not SIMULATED:
    from llvmlite import ir
    from numba.core import types

    from numba_ddtree.device.ptx import LONG, VOID, WORD, assemble, intrinsic

    GLOBAL_MEMORY = 1  # LLVM's number of the address space
    MEETING = "numba_ddtree_meeting"

    @intrinsic
    def meet_all_blocks(typing_context: Any, blocks: Any) -> Any:
        """Wait, by one thread of each block, until one thread of each of the `blocks` (uint32) waits.

        The word that counts them belongs to the kernel's code, and is 0 when that is loaded. Block 0 adds
        what makes the sum of all 2^31, and any other 1: when the highest bit has changed, all have come,
        and the word is ready for the next meeting. That all blocks run at once is up to the launch
        (`launch.Kernel`, `is_cooperative`).
        """
        code = (
            "{ .reg .b32 before, now, own; .reg .pred first, waits; "
            "mov.u32 own, %ctaid.x; setp.eq.u32 first, own, 0; "
            "sub.u32 own, 0x80000001, $1; selp.b32 own, own, 1, first; "
            "atom.acq_rel.gpu.global.add.u32 before, [$0], own; "
            "W: ld.acquire.gpu.global.u32 now, [$0]; xor.b32 now, now, before; "
            "setp.ge.s32 waits, now, 0; @waits bra W; }"
        )

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            module = builder.module
            counter = module.globals.get(MEETING)
            if counter is None:
                counter = ir.GlobalVariable(module, WORD, MEETING, GLOBAL_MEMORY)
                counter.linkage, counter.initializer, counter.align = "internal", ir.Constant(WORD, 0), 4
            assemble(builder, VOID, [builder.ptrtoint(counter, LONG), args[0]], code, "l,r")
            return context.get_dummy_value()

        return types.void(types.uint32), generate
