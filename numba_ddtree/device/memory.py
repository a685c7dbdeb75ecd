"""Wide loads from global memory, and loads and stores by an element's place."""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED

if SIMULATED:

    def load_four(array: Any, offset: Any) -> Any:
        return tuple(array.reshape(-1)[offset : offset + 4])

    load_four_written = load_four

    def load_flat(array: Any, offset: Any) -> Any:
        return array.reshape(-1)[offset]

    def store_flat(array: Any, offset: Any, value: Any) -> None:
        array.reshape(-1)[offset] = value

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    def _four(is_written: bool) -> Any:
        constraints = "=f,=f,=f,=f,l" + (",~{memory}" if is_written else "")

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            element = builder.gep(data, [args[1]])
            lanes = ir.LiteralStructType([ir.FloatType()] * 4)
            load = ir.InlineAsm(
                ir.FunctionType(lanes, [ir.IntType(64)]),
                f"ld{'.relaxed.gpu' if is_written else ''}.global.v4.f32 {{$0, $1, $2, $3}}, [$4];",
                constraints,
                side_effect=is_written,
            )
            loaded = builder.call(load, [builder.ptrtoint(element, ir.IntType(64))])
            result = ir.Constant(ir.ArrayType(ir.FloatType(), 4), ir.Undefined)
            for lane in range(4):
                result = builder.insert_value(result, builder.extract_value(loaded, lane), lane)
            return result

        return generate

    @intrinsic
    def load_four(typing_context: Any, array: Any, offset: Any) -> Any:
        """Four neighbouring float32 of a C-contiguous array in one 128-bit load: ``ld.global.v4.f32``.

        `offset` counts elements from the array's first; the address must be a multiple of 16 bytes. For
        memory that nobody writes meanwhile: the load may come before anything that it stands behind.
        """
        return types.UniTuple(types.float32, 4)(array, types.int64), _four(False)

    @intrinsic
    def load_four_written(typing_context: Any, array: Any, offset: Any) -> Any:
        """`load_four` of what others have written in the meantime: it stays behind what it stands behind.

        ``ld.relaxed.gpu``, which passes L1 by: that is quicker, too.
        """
        return types.UniTuple(types.float32, 4)(array, types.int64), _four(True)

    @intrinsic
    def load_flat(typing_context: Any, array: Any, offset: Any) -> Any:
        """Element of a C-contiguous array; `offset` (int64) counts from the array's first."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.load(builder.gep(data, [args[1]]))

        return array.dtype(array, types.int64), generate

    @intrinsic
    def store_flat(typing_context: Any, array: Any, offset: Any, value: Any) -> Any:
        """Store an element of a C-contiguous array; `offset` (int64) counts from the array's first."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            builder.store(args[2], builder.gep(data, [args[1]]))
            return context.get_dummy_value()

        return types.void(array, types.int64, array.dtype), generate
