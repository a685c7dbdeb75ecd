"""Four neighbours of a row of float32, float16 or bfloat16, whose bits wait in registers until they are used.

A quad is four words: those of four float32, or two of 16-bit numbers and two of nothing. It is loaded
by one instruction, of 128 or 64 bits, and turned into numbers where these are needed, so that loads
can be issued long before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED

if SIMULATED:
    from ml_dtypes import bfloat16

    def _pack(numbers: Any) -> Any:
        bits = np.array(list(numbers)).view(
            np.uint32 if len(numbers) and numbers[0].nbytes == 4 else np.uint16
        )
        words = bits.view(np.uint32)
        return (*words, *[np.uint32(0)] * (4 - len(words)))

    def load_quad(array: Any, offset: Any) -> Any:
        flat = array.reshape(-1)
        return _pack([flat[int(offset) + lane] for lane in range(4)])

    def load_quad_within(array: Any, offset: Any, column: Any, length: Any) -> Any:
        flat = array.reshape(-1)
        absent = np.uint16(0xFF80) if array.dtype == np.uint16 else array.dtype.type(-np.inf)
        inside = [0 <= int(column) + lane < int(length) for lane in range(4)]
        return _pack([flat[int(offset) + lane] if inside[lane] else absent for lane in range(4)])

    def quad_floats(array: Any, quad: Any) -> Any:
        dtype = bfloat16 if array.dtype == np.uint16 else array.dtype
        words = np.array(quad, np.uint32)[: dtype.itemsize if dtype != bfloat16 else 2]
        return tuple(words.view(dtype).astype(np.float32))

    def is_given(array: Any) -> Any:
        return array.dtype != np.int32

else:
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.cuda.extending import intrinsic

    _HALF, _WORD, _FLOAT, _LONG = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.IntType(64)
    _QUAD = types.UniTuple(types.uint32, 4)
    _MINUS_INFINITY = {types.float32: 0xFF800000, types.float16: 0xFC00, types.uint16: 0xFF80}

    def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
        data = context.make_array(array_type)(context, builder, array).data
        return builder.gep(data, [offset])

    def _tuple(builder: Any, element: Any, values: list[Any]) -> Any:
        result = ir.Constant(ir.ArrayType(element, len(values)), ir.Undefined)
        for place, value in enumerate(values):
            result = builder.insert_value(result, value, place)
        return result

    @intrinsic
    def load_quad(typing_context: Any, array: Any, offset: Any) -> Any:
        """Quad that begins at an element, counted from the array's first, whose address is a quad's multiple.

        Not kept in the first cache: a row is read once.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            count = 4 if array.dtype == types.float32 else 2
            registers = ", ".join(f"${place}" for place in range(count))
            load = ir.InlineAsm(
                ir.FunctionType(ir.LiteralStructType([_WORD] * count), [_LONG]),
                f"ld.global.L1::no_allocate.v{count}.u32 {{{registers}}}, [${count}];",
                ",".join(["=r"] * count + ["l"]),
                side_effect=True,  # so that it stays where it is, ahead of its use
            )
            address = _address(context, builder, signature.args[0], args[0], args[1])
            loaded = builder.call(load, [builder.ptrtoint(address, _LONG)])
            words = [builder.extract_value(loaded, place) for place in range(count)]
            return _tuple(builder, _WORD, words + [ir.Constant(_WORD, 0)] * (4 - count))

        return _QUAD(array, types.int64), generate

    @intrinsic
    def load_quad_within(typing_context: Any, array: Any, offset: Any, column: Any, length: Any) -> Any:
        """Quad that begins at a column of a row, -inf where that is below 0 or not below the row's length."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = 32 if array.dtype == types.float32 else 16
            absent = ir.Constant(_WORD, _MINUS_INFINITY[array.dtype])
            elements = []
            for lane in range(4):
                element = cgutils.alloca_once_value(builder, absent)
                place = builder.add(args[2], ir.Constant(_WORD, lane))
                with builder.if_then(builder.icmp_unsigned("<", place, args[3])):
                    offset = builder.add(args[1], ir.Constant(_LONG, lane))
                    address = _address(context, builder, signature.args[0], args[0], offset)
                    bits = builder.load(builder.bitcast(address, ir.IntType(width).as_pointer()))
                    builder.store(bits if width == 32 else builder.zext(bits, _WORD), element)
                elements.append(builder.load(element))
            if width == 16:
                upper = [builder.shl(element, ir.Constant(_WORD, 16)) for element in elements[1::2]]
                words = [builder.or_(low, high) for low, high in zip(elements[::2], upper, strict=True)]
                elements = words + [ir.Constant(_WORD, 0)] * 2
            return _tuple(builder, _WORD, elements)

        return _QUAD(array, types.int64, types.int32, types.int32), generate

    @intrinsic
    def quad_floats(typing_context: Any, array: Any, quad: Any) -> Any:
        """Four float32 of a quad of the array."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = [builder.extract_value(args[1], place) for place in range(4)]
            if array.dtype == types.float32:
                return _tuple(builder, _FLOAT, [builder.bitcast(word, _FLOAT) for word in words])
            values = []
            for word in words[:2]:
                if array.dtype == types.float16:
                    high = builder.lshr(word, ir.Constant(_WORD, 16))
                    halves = [builder.trunc(bits, _HALF) for bits in (word, high)]
                    values += [builder.fpext(builder.bitcast(bits, ir.HalfType()), _FLOAT) for bits in halves]
                else:
                    low = builder.shl(word, ir.Constant(_WORD, 16))
                    high = builder.and_(word, ir.Constant(_WORD, 0xFFFF0000))
                    values += [builder.bitcast(bits, _FLOAT) for bits in (low, high)]
            return _tuple(builder, _FLOAT, values)

        return types.UniTuple(types.float32, 4)(array, _QUAD), generate

    @intrinsic
    def is_given(typing_context: Any, array: Any) -> Any:
        """Whether an optional argument was given, by its type: where not, the compiler leaves out its use."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(1), int(array.dtype != types.int32))

        return types.boolean(array), generate
