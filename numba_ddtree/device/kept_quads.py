"""Quads that a thread puts aside in shared memory, each in a place of its own, to look at later.

A warp of which some lanes have found something would go through the whole of what is to be done for them
at each quad; here all go on together, and what is done with a quad or without is one predicated instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED

if SIMULATED:

    def place_in(array: Any, offset: Any) -> Any:
        return np.uint32(offset)

    def next_place(place: Any, step: Any) -> Any:
        return np.uint32(place + step)

    def keep_or_add(
        array: Any,
        place: Any,
        step: Any,
        mask: Any,
        bit: Any,
        quad: Any,
        largest: Any,
        threshold: Any,
        total: Any,
        sum_: Any,
    ) -> Any:
        if largest <= threshold:
            return place, mask, np.float32(total + sum_)
        array[int(place) : int(place) + 4] = quad
        return np.uint32(place + step), np.uint32(mask | bit), total

    def kept_quad(array: Any, place: Any) -> Any:
        return tuple(array[int(place) : int(place) + 4])

    def summable(quad: Any, threshold: Any) -> Any:
        return tuple(np.fmin(number, threshold) for number in quad)

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    _WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
    _QUAD = types.UniTuple(types.float32, 4)
    _BYTES = 4  # of a float32

    @intrinsic
    def place_in(typing_context: Any, array: Any, offset: Any) -> Any:
        """Place (uint32) of an element (uint32) of a shared array of float32: its address there."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            element = builder.ptrtoint(builder.gep(data, [builder.zext(args[1], _LONG)]), _LONG)
            convert = ir.InlineAsm(
                ir.FunctionType(_WORD, [_LONG]),
                "{ .reg .u64 window; cvta.to.shared.u64 window, $1; cvt.u32.u64 $0, window; }",
                "=r,l",
                side_effect=False,
            )
            return builder.call(convert, [element])

        return types.uint32(array, types.uint32), generate

    @intrinsic
    def next_place(typing_context: Any, place: Any, step: Any) -> Any:
        """Place `step` (uint32) elements further on."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.add(args[0], builder.mul(args[1], ir.Constant(_WORD, _BYTES)))

        return types.uint32(types.uint32, types.uint32), generate

    @intrinsic
    def keep_or_add(
        typing_context: Any,
        array: Any,
        place: Any,
        step: Any,
        mask: Any,
        bit: Any,
        quad: Any,
        largest: Any,
        threshold: Any,
        total: Any,
        sum_: Any,
    ) -> Any:
        """Keep a quad whose largest number is above the threshold, or NaN; add another's sum to the total.

        A quad that is kept goes to the place given, and its bit into the mask. Returns the next place,
        which is `step` elements further on if the quad was kept, the mask and the total.
        """
        code = """{ .reg .pred kept; setp.gtu.f32 kept, $10, $11;
            @kept st.shared.v4.f32 [$3], {$6, $7, $8, $9};
            @kept add.u32 $0, $0, $12;
            @kept or.b32 $1, $1, $13;
            @!kept add.f32 $2, $2, $14; }"""
        result = types.Tuple((types.uint32, types.uint32, types.float32))

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _, place, step, mask, bit, quad, largest, threshold, total, sum_ = args
            numbers = [builder.extract_value(quad, lane) for lane in range(4)]
            operands = [
                place,
                mask,
                total,
                *numbers,
                largest,
                threshold,
                builder.mul(step, ir.Constant(_WORD, _BYTES)),
                bit,
                sum_,
            ]
            assembly = ir.InlineAsm(
                ir.FunctionType(
                    ir.LiteralStructType([_WORD, _WORD, _FLOAT]), [operand.type for operand in operands]
                ),
                code,
                "=&r,=&r,=&f,0,1,2,f,f,f,f,f,f,r,r,f",
                side_effect=True,
            )
            changed = builder.call(assembly, operands)
            kept = [builder.extract_value(changed, place) for place in range(3)]
            return context.make_tuple(builder, signature.return_type, kept)

        arguments = (
            array,
            types.uint32,
            types.uint32,
            types.uint32,
            types.uint32,
            _QUAD,
            types.float32,
            types.float32,
            types.float32,
            types.float32,
        )
        return result(*arguments), generate

    @intrinsic
    def summable(typing_context: Any, quad: Any, threshold: Any) -> Any:
        """Quad itself: the sum of one that is kept means nothing, and only the simulator would warn of it."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return args[0]

        return _QUAD(_QUAD, types.float32), generate

    @intrinsic
    def kept_quad(typing_context: Any, array: Any, place: Any) -> Any:
        """Four float32 that were kept at a place."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            load = ir.InlineAsm(
                ir.FunctionType(ir.LiteralStructType([_FLOAT] * 4), [_WORD]),
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                "=f,=f,=f,=f,r",
                side_effect=True,  # so that it follows the store
            )
            loaded = builder.call(load, [args[1]])
            numbers = [builder.extract_value(loaded, lane) for lane in range(4)]
            return context.make_tuple(builder, signature.return_type, numbers)

        return _QUAD(array, types.uint32), generate
