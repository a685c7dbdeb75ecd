"""Instructions that Numba has no name for, one intrinsic each, as inline PTX.

An intrinsic is typed like a Numba function and generates LLVM code; here that code is one line of PTX
(NVIDIA, "Parallel Thread Execution ISA", whose section each docstring names by its instruction). An
operand written ``$n`` is the n-th of results and arguments, in order; a constraint says where it lies:
``r`` in a register of 32 bits, ``l`` of 64, ``f`` in one of float32, ``=`` marks results.

Instructions that touch memory or order others are marked as having side effects, so that the compiler
keeps them in their order; arithmetic is not. Floating-point arithmetic that has to give the same bits
wherever it is inlined is spelled out here with its rounding (``.rn``), since the compiler may fuse a
product and a sum of its own in one place and not in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba_ddtree.cuda_target import SIMULATED

if not SIMULATED:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda import extending

    # Numba's type of it has the function's own arguments, of which callers give all but the first.
    intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic

    WORD, LONG, FLOAT, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()

    def assemble(
        builder: Any, result: Any, args: Sequence[Any], code: str, constraints: str, *, is_pure: bool = False
    ) -> Any:
        """Call PTX on values of the LLVM builder; memory is clobbered unless the code is pure."""
        signature = ir.FunctionType(result, [arg.type for arg in args])
        clobbered = constraints if is_pure else ",".join(filter(None, (constraints, "~{memory}")))
        return builder.call(ir.InlineAsm(signature, code, clobbered, side_effect=not is_pure), list(args))

    def array_of(builder: Any, values: Sequence[Any]) -> Any:
        """Value of Numba's tuple of values of one type."""
        result = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
        for index, value in enumerate(values):
            result = builder.insert_value(result, value, index)
        return result

    def elements_of(builder: Any, array: Any) -> list[Any]:
        """Values in Numba's tuple of values of one type."""
        return [builder.extract_value(array, index) for index in range(array.type.count)]

    def reduce_by_pairs(builder: Any, instruction: str, terms: Sequence[Any]) -> Any:
        """Reduce float32, neighbours first: no long chain of what waits for the one before."""
        code = f"{instruction} $0, $1, $2;"
        while len(terms) > 1:
            pairs = zip(terms[::2], terms[1::2], strict=False)
            reduced = [assemble(builder, FLOAT, pair, code, "=f,f,f", is_pure=True) for pair in pairs]
            terms = [*reduced, *terms[2 * len(reduced) :]]
        return terms[0]

    def effect(code: str, constraints: str, *argument_types: Any) -> Any:
        """Return an intrinsic's type and code, of one that returns nothing."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, args, code, constraints)
            return context.get_dummy_value()

        return types.void(*argument_types), generate

    def _float_function(code: str, count: int) -> Any:
        constraints = ",".join(["=f"] + ["f"] * count)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, FLOAT, args, code, constraints, is_pure=True)

        return types.float32(*[types.float32] * count), generate

    @intrinsic
    def address_of(typing_context: Any, array: Any) -> Any:
        """Address (uint64) of an array's first element."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.ptrtoint(data, LONG)

        return types.uint64(array), generate

    @intrinsic
    def shared_address_of(typing_context: Any, array: Any) -> Any:
        """Address (uint32) of a shared array in the window of shared memory: ``cvta.to.shared``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            code = "{ .reg .u64 window; cvta.to.shared.u64 window, $1; cvt.u32.u64 $0, window; }"
            return assemble(builder, WORD, [builder.ptrtoint(data, LONG)], code, "=r,l", is_pure=True)

        return types.uint32(array), generate

    @intrinsic
    def fresh_thread(typing_context: Any) -> Any:
        """Index (uint32) of the thread in its block, ``%tid.x``, read anew at each use."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, WORD, [], "mov.u32 $0, %tid.x;", "=r")

        return types.uint32(), generate

    @intrinsic
    def copy_async(typing_context: Any, shared: Any, source: Any, size: Any) -> Any:
        """Copy 16 bytes from global to shared memory without waiting: ``cp.async.cg.shared.global``.

        Of the 16 bytes, `size` (uint32, 0 to 16) are read, and the others are zeros; both addresses, uint32
        in shared and uint64 in global memory, are multiples of 16. The copy bypasses L1.
        """
        code = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        return effect(code, "r,l,r", types.uint32, types.uint64, types.uint32)

    @intrinsic
    def close_copies(typing_context: Any) -> Any:
        """Make a group of this thread's copies since the last group: ``cp.async.commit_group``."""
        return effect("cp.async.commit_group;", "")

    @intrinsic
    def wait_for_copies(typing_context: Any) -> Any:
        """Wait for all of this thread's groups of copies: ``cp.async.wait_group 0``."""
        return effect("cp.async.wait_group 0;", "")

    @intrinsic
    def wait_for_all_copies_but_one(typing_context: Any) -> Any:
        """Wait until only the newest of this thread's groups is under way: ``cp.async.wait_group 1``."""
        return effect("cp.async.wait_group 1;", "")

    @intrinsic
    def named_barrier(typing_context: Any, name: Any, threads: Any) -> Any:
        """Wait at barrier `name` (1 to 15) for so many threads, whole warps: ``bar.sync``."""
        return effect("bar.sync $0, $1;", "r,r", types.uint32, types.uint32)

    @intrinsic
    def named_arrival(typing_context: Any, name: Any, threads: Any) -> Any:
        """Arrive at barrier `name` without waiting; so many threads wait or arrive: ``bar.arrive``."""
        return effect("bar.arrive $0, $1;", "r,r", types.uint32, types.uint32)

    @intrinsic
    def store_shared_word(typing_context: Any, shared: Any, word: Any) -> Any:
        """Write a word (uint32) at an address of shared memory: ``st.shared.b32``."""
        return effect("st.shared.b32 [$0], $1;", "r,r", types.uint32, types.uint32)

    @intrinsic
    def store_word(typing_context: Any, address: Any, word: Any) -> Any:
        """Write a word (uint32) at an address of global memory: ``st.global.b32``."""
        return effect("st.global.b32 [$0], $1;", "l,r", types.uint64, types.uint32)

    @intrinsic
    def store_four_words(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        """Write four words (uint32) at a multiple of 16 in global memory: ``st.global.v4.b32``."""
        code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
        return effect(code, "l,r,r,r,r", types.uint64, *[types.uint32] * 4)

    @intrinsic
    def store_float_pair(typing_context: Any, address: Any, first: Any, second: Any) -> Any:
        """Write two float32 at an address (a multiple of 8) of global memory: ``st.global.v2.f32``."""
        code = "st.global.v2.f32 [$0], {$1, $2};"
        return effect(code, "l,f,f", types.uint64, types.float32, types.float32)

    @intrinsic
    def exp2(typing_context: Any, value: Any) -> Any:
        """2 to the power of a float32, to 2 ulp: ``ex2.approx.ftz.f32``; of -inf 0, of 0 exactly 1."""
        return _float_function("ex2.approx.ftz.f32 $0, $1;", 1)

    @intrinsic
    def log2(typing_context: Any, value: Any) -> Any:
        """Logarithm to base 2 of a float32: ``lg2.approx.ftz.f32``.

        It is off by 2^-22 at most: absolutely from 0.5 to 2, relatively outside.
        """
        return _float_function("lg2.approx.ftz.f32 $0, $1;", 1)

    @intrinsic
    def reciprocal(typing_context: Any, value: Any) -> Any:
        """Correctly rounded 1 / value, float32: ``rcp.rn.f32``."""
        return _float_function("rcp.rn.f32 $0, $1;", 1)

    @intrinsic
    def quick_reciprocal(typing_context: Any, value: Any) -> Any:
        """1 / value of a normal float32, to 1 ulp: ``rcp.approx.ftz.f32``, which calls no function."""
        return _float_function("rcp.approx.ftz.f32 $0, $1;", 1)

    @intrinsic
    def sum_of(typing_context: Any, left: Any, right: Any) -> Any:
        """``left + right``, float32, never fused with a product: ``add.rn.f32``."""
        return _float_function("add.rn.f32 $0, $1, $2;", 2)

    @intrinsic
    def product_of(typing_context: Any, left: Any, right: Any) -> Any:
        """``left * right``, float32, never fused with a sum: ``mul.rn.f32``."""
        return _float_function("mul.rn.f32 $0, $1, $2;", 2)

    @intrinsic
    def multiply_add(typing_context: Any, left: Any, right: Any, addend: Any) -> Any:
        """``left * right + addend``, float32, rounded once: ``fma.rn.f32``."""
        return _float_function("fma.rn.f32 $0, $1, $2, $3;", 3)

    @intrinsic
    def larger_of(typing_context: Any, left: Any, right: Any) -> Any:
        """Larger of two float32; of a number and a NaN the number: ``max.f32``."""
        return _float_function("max.f32 $0, $1, $2;", 2)
