"""Rows of logits, four or eight neighbours at a time, as float32 whatever their type.

They are loaded as the words that hold them, and turned into numbers where these are needed, so that loads
can be issued long before. Four, a quad, are always four words: of 16-bit numbers two, and two of nothing.
Tuples of eight are taken apart and put together in generated code, since a function of each element, called
eight times over, compiles slowly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED

NEIGHBOURS = 8
QUAD = 4
MINUS_INFINITY = np.float32(-np.inf)

if SIMULATED:
    from ml_dtypes import bfloat16

    def _widened(numbers: Any) -> Any:
        # The bits of bfloat16 come as uint16.
        return (numbers.view(bfloat16) if numbers.dtype == np.uint16 else numbers).astype(np.float32)

    def load_within(array: Any, start: Any, place: Any, length: Any) -> Any:
        numbers = array.reshape(-1)[int(start) + int(place) : int(start) + int(place) + 1]
        return _widened(numbers)[0] if place < length else MINUS_INFINITY

    def load_eight(array: Any, start: Any, first: Any) -> Any:
        return load_eight_within(array, start, first, int(first) + NEIGHBOURS)

    def load_eight_within(array: Any, start: Any, first: Any, length: Any) -> Any:
        return tuple(load_within(array, start, int(first) + place, length) for place in range(NEIGHBOURS))

    def numbers_of(array: Any, words: Any) -> Any:
        return words

    def allowed_eight(values: Any, bits: Any) -> Any:
        return tuple(
            value if (int(bits) >> place) & 1 else MINUS_INFINITY for place, value in enumerate(values)
        )

    def kept_eight(values: Any, first: Any, cut_value: Any, cut_token: Any) -> Any:
        return tuple(
            value
            if not (value < cut_value or (value == cut_value and int(first) + place > cut_token))
            else MINUS_INFINITY
            for place, value in enumerate(values)
        )

    def begins_with_row(misalignment: Any) -> Any:
        return isinstance(misalignment, np.bool_)

    def load_quad(array: Any, offset: Any, misalignment: Any) -> Any:
        return load_quad_within(array, offset, 0, QUAD)

    def load_quad_within(array: Any, offset: Any, column: Any, length: Any) -> Any:
        inside = [0 <= int(column) + lane < int(length) for lane in range(QUAD)]
        return tuple(
            load_within(array, offset, lane, QUAD) if inside[lane] else MINUS_INFINITY for lane in range(QUAD)
        )

    def quad_floats(array: Any, quad: Any) -> Any:
        return quad

    def maximum(left: Any, right: Any) -> Any:
        return np.maximum(left, right)

    def largest(values: Any) -> Any:
        return np.max(values)

    def first_place(values: Any, wanted: Any) -> Any:
        return np.uint32(values.index(wanted))

else:
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.cuda.extending import intrinsic

    _HALF, _WORD, _FLOAT, _LONG = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.IntType(64)
    _EIGHT = types.UniTuple(types.float32, NEIGHBOURS)
    _QUAD_WORDS = types.UniTuple(types.uint32, QUAD)
    _NOTHING = ir.Constant(_FLOAT, float("-inf"))
    _NOTHING_BITS = {types.float32: 0xFF800000, types.float16: 0xFC00, types.uint16: 0xFF80}

    def _word(number: int) -> Any:
        return ir.Constant(_WORD, number)

    def _element(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
        """Address of an element of a C-contiguous array, counted from its first."""
        data = context.make_array(array_type)(context, builder, array).data
        return builder.gep(data, [offset])

    def _float_of_bits(builder: Any, bits: Any, dtype: Any) -> Any:
        """Float32 of the bits of one number: i16 of a bfloat16 or float16, i32 of a float32."""
        if dtype == types.float32:
            return builder.bitcast(bits, _FLOAT)
        if dtype == types.float16:
            return builder.fpext(builder.bitcast(bits, ir.HalfType()), _FLOAT)
        return builder.bitcast(builder.shl(builder.zext(bits, _WORD), _word(16)), _FLOAT)

    def _floats_of_words(builder: Any, words: list[Any], dtype: Any) -> list[Any]:
        if dtype != types.float32:
            shifted = [builder.lshr(word, _word(shift)) for word in words for shift in (0, 16)]
            words = [builder.trunc(word, _HALF) for word in shifted]
        return [_float_of_bits(builder, bits, dtype) for bits in words]

    def _load_words(builder: Any, address: Any, count: int) -> list[Any]:
        registers = ", ".join(f"${word}" for word in range(count))
        load = ir.InlineAsm(
            ir.FunctionType(ir.LiteralStructType([_WORD] * count), [_LONG]),
            f"ld.global.nc.L1::no_allocate.v{count}.u32 {{{registers}}}, [${count}];",
            ",".join(["=r"] * count + ["l"]),
            side_effect=True,  # so that loads stay together, ahead of the first use
        )
        loaded = builder.call(load, [address])
        return [builder.extract_value(loaded, word) for word in range(count)]

    def _words_type(array: Any) -> Any:
        return types.UniTuple(types.uint32, NEIGHBOURS * array.dtype.bitwidth // 32)

    def _tuple(builder: Any, kind: Any, values: list[Any]) -> Any:
        result = ir.Constant(ir.ArrayType(kind, len(values)), ir.Undefined)
        for place, value in enumerate(values):
            result = builder.insert_value(result, value, place)
        return result

    def _elements(builder: Any, values: Any) -> list[Any]:
        return [builder.extract_value(values, place) for place in range(NEIGHBOURS)]

    def _load_bits_within(
        context: Any, builder: Any, array_type: Any, array: Any, start: Any, place: Any, length: Any
    ) -> Any:
        is_within = builder.icmp_unsigned("<", place, length)
        # Past the end the row's first element is loaded, and not used.
        step = builder.zext(builder.select(is_within, place, _word(0)), _LONG)
        element = _element(context, builder, array_type, array, builder.add(start, step))
        kind = _WORD if array_type.dtype == types.float32 else _HALF
        bits = builder.load(builder.bitcast(element, kind.as_pointer()))
        return builder.select(is_within, bits, ir.Constant(kind, _NOTHING_BITS[array_type.dtype]))

    @intrinsic
    def load_within(typing_context: Any, array: Any, start: Any, place: Any, length: Any) -> Any:
        """Element of the row that begins at `start`, as float32; -inf past the row's end."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _float_of_bits(builder, _load_bits_within(context, builder, array, *args), array.dtype)

        return types.float32(array, types.int64, types.uint32, types.uint32), generate

    @intrinsic
    def load_eight_within(typing_context: Any, array: Any, start: Any, first: Any, length: Any) -> Any:
        """Words of eight neighbours of the row that begins at `start`, one by one; -inf past its end."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bits = []
            for step in range(NEIGHBOURS):
                place = builder.add(args[2], _word(step))
                bits.append(_load_bits_within(context, builder, array, args[0], args[1], place, args[3]))
            if array.dtype != types.float32:
                halves = [builder.zext(half, _WORD) for half in bits]
                pairs = zip(halves[::2], halves[1::2], strict=True)
                bits = [builder.or_(low, builder.shl(high, _word(16))) for low, high in pairs]
            return _tuple(builder, _WORD, bits)

        return _words_type(array)(array, types.int64, types.uint32, types.uint32), generate

    @intrinsic
    def load_eight(typing_context: Any, array: Any, start: Any, first: Any) -> Any:
        """Words of eight neighbours of a row, by loads of 128 bits, from a multiple of 16 bytes."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            offset = builder.add(args[1], builder.zext(args[2], _LONG))
            address = builder.ptrtoint(_element(context, builder, array, args[0], offset), _LONG)
            words = _load_words(builder, address, 4)
            if array.dtype == types.float32:
                words += _load_words(builder, builder.add(address, ir.Constant(_LONG, 16)), 4)
            return _tuple(builder, _WORD, words)

        return _words_type(array)(array, types.int64, types.uint32), generate

    def _load_elements(builder: Any, address: Any, width: int) -> list[Any]:
        """Load the words of four neighbours one by one, from any element's address."""
        names = ", ".join(f"number{lane}" for lane in range(QUAD))
        loads = " ".join(
            f"ld.global.nc.b{width} number{lane}, [${QUAD * width // 32} + {lane * width // 8}];"
            for lane in range(QUAD)
        )
        if width == 32:
            moves = " ".join(f"mov.b32 ${lane}, number{lane};" for lane in range(QUAD))
        else:
            moves = "mov.b32 $0, {number0, number1}; mov.b32 $1, {number2, number3};"
        count = QUAD * width // 32
        load = ir.InlineAsm(
            ir.FunctionType(ir.LiteralStructType([_WORD] * count), [_LONG]),
            f"{{ .reg .b{width} {names}; {loads} {moves} }}",
            ",".join(["=r"] * count + ["l"]),
            side_effect=True,  # as for `_load_words`
        )
        loaded = builder.call(load, [address])
        return [builder.extract_value(loaded, word) for word in range(count)]

    @intrinsic
    def begins_with_row(typing_context: Any, misalignment: Any) -> Any:
        """Whether quads begin with the row, by the argument's type; else at multiples of their size.

        A bool says so, and an int32 is the number of elements from such a multiple to the array's first.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(1), int(misalignment == types.boolean))

        return types.boolean(misalignment), generate

    @intrinsic
    def load_quad(typing_context: Any, array: Any, offset: Any, misalignment: Any) -> Any:
        """Words of four neighbours from an element on, counted from the array's first.

        By one load from a multiple of a quad's size, not kept in the first cache, since a row is read once;
        or one by one, where quads begin with the row: see `begins_with_row`.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = array.dtype.bitwidth
            element = _element(context, builder, signature.args[0], args[0], args[1])
            address = builder.ptrtoint(element, _LONG)
            if misalignment == types.boolean:
                words = _load_elements(builder, address, width)
            else:
                words = _load_words(builder, address, QUAD * width // 32)
            return _tuple(builder, _WORD, words + [_word(0)] * (QUAD - len(words)))

        return _QUAD_WORDS(array, types.int64, misalignment), generate

    @intrinsic
    def load_quad_within(typing_context: Any, array: Any, offset: Any, column: Any, length: Any) -> Any:
        """Words of four neighbours from a column (int32) of a row on; -inf at columns that it has not."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = array.dtype.bitwidth
            absent = _word(_NOTHING_BITS[array.dtype])
            elements = []
            for lane in range(QUAD):
                element = cgutils.alloca_once_value(builder, absent)
                place = builder.add(args[2], _word(lane))
                with builder.if_then(builder.icmp_unsigned("<", place, args[3])):
                    offset = builder.add(args[1], ir.Constant(_LONG, lane))
                    address = _element(context, builder, signature.args[0], args[0], offset)
                    bits = builder.load(builder.bitcast(address, ir.IntType(width).as_pointer()))
                    builder.store(bits if width == 32 else builder.zext(bits, _WORD), element)
                elements.append(builder.load(element))
            if width == 16:
                upper = [builder.shl(element, _word(16)) for element in elements[1::2]]
                words = [builder.or_(low, high) for low, high in zip(elements[::2], upper, strict=True)]
                elements = words + [_word(0)] * 2
            return _tuple(builder, _WORD, elements)

        return _QUAD_WORDS(array, types.int64, types.int32, types.int32), generate

    @intrinsic
    def quad_floats(typing_context: Any, array: Any, quad: Any) -> Any:
        """Four float32 of a quad's words."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            words = [builder.extract_value(args[1], place) for place in range(QUAD)]
            return _tuple(builder, _FLOAT, _floats_of_words(builder, words, array.dtype)[:QUAD])

        return types.UniTuple(types.float32, QUAD)(array, _QUAD_WORDS), generate

    @intrinsic
    def numbers_of(typing_context: Any, array: Any, words: Any) -> Any:
        """Eight float32 of their words."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            bits = [builder.extract_value(args[1], place) for place in range(words.count)]
            return _tuple(builder, _FLOAT, _floats_of_words(builder, bits, array.dtype))

        return _EIGHT(array, _words_type(array)), generate

    @intrinsic
    def allowed_eight(typing_context: Any, values: Any, bits: Any) -> Any:
        """Eight values, -inf in place of those whose bit, from the lowest up, is not set."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = []
            for place, number in enumerate(_elements(builder, args[0])):
                bit = builder.and_(args[1], _word(1 << place))
                is_allowed = builder.icmp_unsigned("!=", bit, _word(0))
                numbers.append(builder.select(is_allowed, number, _NOTHING))
            return _tuple(builder, _FLOAT, numbers)

        return _EIGHT(_EIGHT, types.uint32), generate

    @intrinsic
    def kept_eight(typing_context: Any, values: Any, first: Any, cut_value: Any, cut_token: Any) -> Any:
        """Eight values, -inf in place of those below the cut, or at it but of a later token; NaN stays."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, first, cut_value, cut_token = args
            numbers = []
            for place, number in enumerate(_elements(builder, values)):
                is_late = builder.icmp_unsigned(">", builder.add(first, _word(place)), cut_token)
                is_tied = builder.fcmp_ordered("==", number, cut_value)
                is_below = builder.fcmp_ordered("<", number, cut_value)
                is_out = builder.or_(is_below, builder.and_(is_tied, is_late))
                numbers.append(builder.select(is_out, _NOTHING, number))
            return _tuple(builder, _FLOAT, numbers)

        return _EIGHT(_EIGHT, types.uint32, types.float32, types.uint32), generate

    def _maximum(builder: Any, left: Any, right: Any) -> Any:
        larger = ir.InlineAsm(
            ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT]), "max.NaN.f32 $0, $1, $2;", "=f,f,f", side_effect=False
        )
        return builder.call(larger, [left, right])

    @intrinsic
    def maximum(typing_context: Any, left: Any, right: Any) -> Any:
        """Larger of two float32; NaN if either is: ``max.NaN.f32`` (compute capability 8.0)."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _maximum(builder, *args)

        return types.float32(types.float32, types.float32), generate

    @intrinsic
    def largest(typing_context: Any, values: Any) -> Any:
        """Largest of eight float32; NaN if one is."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            numbers = _elements(builder, args[0])
            while len(numbers) > 1:
                pairs = zip(numbers[::2], numbers[1::2], strict=True)
                numbers = [_maximum(builder, left, right) for left, right in pairs]
            return numbers[0]

        return types.float32(_EIGHT), generate

    @intrinsic
    def first_place(typing_context: Any, values: Any, wanted: Any) -> Any:
        """Place of the first of eight values that equals the one wanted, which is among them."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = _word(NEIGHBOURS - 1)
            for earlier, number in reversed(list(enumerate(_elements(builder, args[0])))):
                is_equal = builder.fcmp_ordered("==", number, args[1])
                place = builder.select(is_equal, _word(earlier), place)
            return place

        return types.uint32(_EIGHT, types.float32), generate
