"""Tiles in registers: small matrices that a warp holds together, and their products on tensor cores.

A tile is a tuple in each lane, passed by value; the compiler keeps its elements in registers. With
``g = lane // 4`` and ``t = lane % 4``, lane `lane` of the warp holds of

* a 16 x 8 piece of an accumulator, four float32:
  ``[g, 2t], [g, 2t + 1], [g + 8, 2t], [g + 8, 2t + 1]``;
* a 16 x 16 piece of a left operand, four words of two 16-bit numbers each, the first in the low half:
  ``[g, 2t:2t+2], [g + 8, 2t:2t+2], [g, 2t+8:2t+10], [g + 8, 2t+8:2t+10]``;
* a 16 x 8 piece of a right operand, two words: ``[2t:2t+2, g], [2t+8:2t+10, g]``.

(PTX ISA, "Matrix fragments for mma.m16n8k16".) Larger tiles are tuples of pieces: of an accumulator
row by row, all 8 columns wide pieces of the first 16 rows first; of a left operand the pieces of 16
rows from above; of a right operand the pieces of 8 columns from the left.

In shared memory a matrix of 16-bit numbers lies in chunks of 64 columns. A row of a chunk is 128 bytes,
eight units of 16; the unit u of row r is stored at place ``u ^ (r % 8)`` of its row, so that the eight
rows of a column of units lie in different banks. ``ldmatrix`` reads such columns: each lane gives the
address of one row's unit and gets its part of the fragment.
"""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED, device_function, uint32

ROW_BYTES = 128  # of a chunk
UNIT_BYTES = 16
PIECE_BYTES = 16 * ROW_BYTES  # sixteen rows of a chunk
CHUNK_BYTES = 64 * ROW_BYTES  # of 64 rows
CHUNK_COLUMNS = 64
CHUNK_STEPS = CHUNK_COLUMNS // 16  # products over 16 terms that a chunk's columns, or rows, make
UNITS_APART = 2  # between a warp's pieces of 8 columns of a row product, of whose every other one it has
COLUMNS_APART = 8 * UNITS_APART


@device_function
def unit_address(chunk, row, unit):  # type: ignore[no-untyped-def]
    """Address (uint32) of a row's unit in a chunk, which begins at a multiple of 1024."""
    inside = uint32(uint32(row) & uint32(7)) ^ uint32(unit)
    return uint32(uint32(chunk) + uint32(row) * uint32(ROW_BYTES) + inside * uint32(UNIT_BYTES))


@device_function
def left_address(chunk, lane):  # type: ignore[no-untyped-def]
    """Return where a lane reads a left operand's first 16 x 16 piece; the next columns are at ``^ 32``."""
    return unit_address(chunk, uint32(lane) & uint32(15), uint32(lane) >> uint32(4))


@device_function
def right_address(chunk, lane):  # type: ignore[no-untyped-def]
    """Return where a lane reads a right operand stored by columns, a row of the chunk each.

    Of each 16 rows from `chunk` on, a multiple of 1024, it is the first 8.
    """
    column = uint32(uint32(lane) & uint32(7)) + uint32(uint32(lane) >> uint32(4)) * uint32(COLUMNS_APART)
    return unit_address(chunk, column, uint32(uint32(lane) >> uint32(3)) & uint32(1))


if not SIMULATED:
    from llvmlite import ir
    from numba.core import types

    from numba_ddtree.device.ptx import (
        FLOAT,
        LONG,
        VOID,
        WORD,
        array_of,
        assemble,
        elements_of,
        intrinsic,
        reduce_by_pairs,
    )

    def _load_matrices(builder: Any, address: Any, offset: int, *, is_transposed: bool) -> list[Any]:
        transposed = ".trans" if is_transposed else ""
        code = f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
        loaded = assemble(builder, ir.LiteralStructType([WORD] * 4), [address], code, "=r,=r,=r,=r,r")
        return [builder.extract_value(loaded, index) for index in range(4)]

    def _add_product(builder: Any, number: str, total: list[Any], left: list[Any], right: list[Any]) -> None:
        """Add a product over 16 terms to a total's elements, in place."""
        code = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32 "
            "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"
        )
        constraints = ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * 6)
        result = ir.LiteralStructType([FLOAT] * 4)
        columns = len(right) // 2
        for row in range(len(left) // 4):
            for column in range(columns):
                place = 4 * (row * columns + column)
                operands = [
                    *total[place : place + 4],
                    *left[4 * row : 4 * row + 4],
                    *right[2 * column : 2 * column + 2],
                ]
                piece = assemble(builder, result, operands, code, constraints, is_pure=True)
                total[place : place + 4] = [builder.extract_value(piece, index) for index in range(4)]

    def make_row_product(number: str, chunks: int, columns: int, left_bytes: int = CHUNK_BYTES) -> Any:
        """Make the product of 16 rows and `columns` (a multiple of 16) columns over several chunks.

        The columns are every other 8 of twice as many, those that `right_address` says.
        It is a function of its own, with all steps spelled out, for what the compiler cannot be trusted with:
        each step's operands are loaded two steps ahead, addresses are offsets in the instructions, and even
        and odd steps have totals of their own, so that no product waits for the one before. `number` is
        ``"bf16"`` or ``"f16"``, `left_bytes` the distance of the left operand's chunks.
        """
        steps = [(chunk, part) for chunk in range(chunks) for part in range(CHUNK_STEPS)]

        @intrinsic
        def add_row_product(typing_context: Any, totals: Any, left: Any, right: Any) -> Any:
            """``totals + left @ right``: ``ldmatrix``, ``mma.sync.aligned.m16n8k16``.

            From `left_address` and `right_address` of the first chunks, after which the others follow.
            `totals` are two tiles, float32 of 16 x `columns`, one after the other: of even and of odd steps.
            """

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                lefts, rights = (
                    [
                        builder.xor(arg, ir.Constant(WORD, part * 2 * UNIT_BYTES))
                        for part in range(CHUNK_STEPS)
                    ]
                    for arg in args[1:]
                )

                def load(chunk: int, part: int) -> tuple[list[Any], list[Any]]:
                    own = _load_matrices(builder, lefts[part], chunk * left_bytes, is_transposed=False)
                    other = []
                    for piece in range(columns // 16):
                        place = chunk * CHUNK_BYTES + piece * 2 * COLUMNS_APART * ROW_BYTES
                        other += _load_matrices(builder, rights[part], place, is_transposed=False)
                    return own, other

                elements = elements_of(builder, args[0])
                both = [elements[: columns // 2], elements[columns // 2 :]]
                operands = [load(*step) for step in steps[:2]]
                for index in range(len(steps)):
                    if index + 2 < len(steps):
                        operands.append(load(*steps[index + 2]))
                    _add_product(builder, number, both[index % 2], *operands[index])
                return array_of(builder, both[0] + both[1])

            totals = types.UniTuple(types.float32, columns)
            return totals(totals, types.uint32, types.uint32), generate

        return add_row_product

    def make_column_product(
        number: str, pieces: int, chunks: int, *, pairs: int = CHUNK_STEPS, first: int = 0
    ) -> Any:
        """Make the product of `pieces` times 16 rows of a chunk and columns of chunks stored by rows.

        Of each of `chunks` chunks it takes `pairs` pairs of units, 8 columns each, and adds to pieces of the
        total side by side, from piece `first` of its rows on. Addresses are offsets in the instructions, as
        in `make_row_product`; `number` is ``"bf16"`` or ``"f16"``.
        """

        @intrinsic
        def add_column_product(typing_context: Any, total: Any, left: Any, right: Any) -> Any:
            """``total + left @ right`` over 16 terms: ``ldmatrix``, ``mma.sync.aligned.m16n8k16``.

            `left` is `left_address` of the left chunk; the next terms are at ``left ^ 32`` and `PIECE_BYTES`
            after `right`. From `right`, lanes 0 to 15 read the first unit of 16 rows and lanes 16 to 31 the
            second one, as from `left_address`; the next pair is at ``right ^ 32``. `total` is float32 of
            16 `pieces` rows.
            """
            width = total.count // pieces  # elements of 16 rows

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[0])
                own = []
                for piece in range(pieces):
                    own += _load_matrices(builder, args[1], piece * PIECE_BYTES, is_transposed=False)
                rights = [
                    builder.xor(args[2], ir.Constant(WORD, pair * 2 * UNIT_BYTES)) for pair in range(pairs)
                ]
                size = 4 * 2 * pairs  # elements of 16 rows of a chunk's columns
                for chunk in range(chunks):
                    other = []
                    for address in rights:
                        other += _load_matrices(builder, address, chunk * CHUNK_BYTES, is_transposed=True)
                    starts = [piece * width + 4 * first + chunk * size for piece in range(pieces)]
                    chosen = [element for start in starts for element in elements[start : start + size]]
                    _add_product(builder, number, chosen, own, other)
                    for index, start in enumerate(starts):
                        elements[start : start + size] = chosen[index * size : (index + 1) * size]
                return array_of(builder, elements)

            return total(total, types.uint32, types.uint32), generate

        return add_column_product

    def make_zeros(count: int) -> Any:
        """Make a tile of zeros, float32."""

        @intrinsic
        def zeros(typing_context: Any) -> Any:
            """Zeros, float32."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return ir.Constant(ir.ArrayType(FLOAT, count), [ir.Constant(FLOAT, 0.0)] * count)

            return types.UniTuple(types.float32, count)(), generate

        return zeros

    @intrinsic
    def scale_rows(typing_context: Any, tile: Any, factors: Any) -> Any:
        """Multiply each row of an accumulator by a factor: ``mul.rn.f32``.

        `factors` are two float32 for each 16 rows: for the lane's row g and for its row g + 8.
        """
        width = 4 * tile.count // (2 * factors.count)  # float32 of 16 rows

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            elements, factors = (elements_of(builder, arg) for arg in args)
            scaled = [
                assemble(
                    builder,
                    FLOAT,
                    [element, factors[2 * (index // width) + index % 4 // 2]],
                    "mul.rn.f32 $0, $1, $2;",
                    "=f,f,f",
                    is_pure=True,
                )
                for index, element in enumerate(elements)
            ]
            return array_of(builder, scaled)

        return tile(tile, factors), generate

    def _round_pair(builder: Any, number: str, low: Any, high: Any) -> Any:
        """Word of two 16-bit numbers; a product with 1 and a sum with 0 turn what became -0 into 0.

        (A sum alone is there for bfloat16 from compute capability 9.0 on.)
        """
        one = {"bf16x2": "0x3F803F80", "f16x2": "0x3C003C00"}[number]
        code = (
            "{ .reg .b32 pair, one, zero; "
            f"cvt.rn.{number}.f32 pair, $2, $1; mov.b32 one, {one}; mov.b32 zero, 0; "
            f"fma.rn.{number} $0, pair, one, zero; }}"
        )
        return assemble(builder, WORD, [low, high], code, "=r,f,f", is_pure=True)

    def make_pack(number: str) -> Any:
        """Make the rounding of two float32 to 16 bits, ``"bf16x2"`` or ``"f16x2"`` in PTX."""

        @intrinsic
        def pack(typing_context: Any, low: Any, high: Any) -> Any:
            """Word of two 16-bit numbers, rounded to nearest, -0 as 0: ``cvt.rn``, ``fma.rn``."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return _round_pair(builder, number, *args)

            return types.uint32(types.float32, types.float32), generate

        return pack

    def _of_row(elements: list[Any], row: int) -> list[Any]:
        """Elements of a 16 rows tall tile in the lane's row g, 0, or g + 8, 1."""
        return [element for index, element in enumerate(elements) if index % 4 // 2 == row]

    @intrinsic
    def row_maxima(typing_context: Any, tile: Any) -> Any:
        """Largest element of the lane's part of rows g and g + 8 of a 16 rows tall tile: ``max.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            elements = elements_of(builder, args[0])
            largest = [reduce_by_pairs(builder, "max.f32", _of_row(elements, row)) for row in range(2)]
            return array_of(builder, largest)

        return types.UniTuple(types.float32, 2)(tile), generate

    @intrinsic
    def row_sums(typing_context: Any, tile: Any) -> Any:
        """Sum of the lane's part of rows g and g + 8 of a 16 rows tall tile, in order: ``add.rn.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            totals = []
            for row in range(2):
                total, *rest = _of_row(elements_of(builder, args[0]), row)
                for element in rest:
                    code = "add.rn.f32 $0, $1, $2;"
                    total = assemble(builder, FLOAT, [total, element], code, "=f,f,f", is_pure=True)
                totals.append(total)
            return array_of(builder, totals)

        return types.UniTuple(types.float32, 2)(tile), generate

    @intrinsic
    def add_halves(typing_context: Any, tiles: Any) -> Any:
        """Sum of two accumulators that are halves of one tuple: ``add.rn.f32``."""
        count = tiles.count // 2

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            elements = elements_of(builder, args[0])
            sums = [
                assemble(builder, FLOAT, list(pair), "add.rn.f32 $0, $1, $2;", "=f,f,f", is_pure=True)
                for pair in zip(elements[:count], elements[count:], strict=True)
            ]
            return array_of(builder, sums)

        return types.UniTuple(types.float32, count)(tiles), generate

    @intrinsic
    def scale_tile(typing_context: Any, tile: Any, factor: Any) -> Any:
        """Multiply all elements by one factor: ``mul.rn.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = "mul.rn.f32 $0, $1, $2;"
            scaled = [
                assemble(builder, FLOAT, [element, args[1]], code, "=f,f,f", is_pure=True)
                for element in elements_of(builder, args[0])
            ]
            return array_of(builder, scaled)

        return tile(tile, types.float32), generate

    @intrinsic
    def keep_columns(typing_context: Any, tile: Any, upper: Any, lower: Any) -> Any:
        """Put -inf in a row product's result where a bit is 0.

        `upper` and `lower` are the bits (uint64) of rows g and g + 8, shifted down by the lane's first
        column.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            nothing, zero = ir.Constant(FLOAT, float("-inf")), ir.Constant(LONG, 0)
            kept = []
            for index, element in enumerate(elements_of(builder, args[0])):
                bit = ir.Constant(LONG, 1 << (index // 4 * COLUMNS_APART + index % 2))
                is_kept = builder.icmp_unsigned("!=", builder.and_(args[1 + index % 4 // 2], bit), zero)
                kept.append(builder.select(is_kept, element, nothing))
            return array_of(builder, kept)

        return tile(tile, types.uint64, types.uint64), generate

    @intrinsic
    def exp2_below(typing_context: Any, tile: Any, maxima: Any) -> Any:
        """2 to the power of each element less its row's maximum: ``sub.rn.f32``, ``ex2.approx.ftz.f32``.

        Of a 16 rows tall tile; `maxima` are two float32, of rows g and g + 8.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            elements, maxima = (elements_of(builder, arg) for arg in args)
            code = "{ .reg .f32 d; sub.rn.f32 d, $1, $2; ex2.approx.ftz.f32 $0, d; }"
            powers = [
                assemble(builder, FLOAT, [element, maxima[index % 4 // 2]], code, "=f,f,f", is_pure=True)
                for index, element in enumerate(elements)
            ]
            return array_of(builder, powers)

        return tile(tile, maxima), generate

    def make_row_store(number: str) -> Any:
        """Make the store of a row product's columns as 16-bit numbers, ``"bf16x2"`` or ``"f16x2"``."""

        @intrinsic
        def store(typing_context: Any, address: Any, tile: Any) -> Any:
            """Round a tile and write it to a chunk: ``cvt.rn``, ``st.shared.b32``.

            `address` is `unit_address` of the lane's row g and the tile's first unit, and 4 t more.
            """

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                code = f"cvt.rn.{number}.f32 $0, $2, $1;"
                for index in range(0, len(elements), 2):
                    pair = elements[index : index + 2]
                    word = assemble(builder, WORD, pair, code, "=r,f,f", is_pure=True)
                    place = builder.xor(args[0], ir.Constant(WORD, index // 4 * UNITS_APART * UNIT_BYTES))
                    below = index % 4 // 2 * 8 * ROW_BYTES
                    assemble(builder, VOID, [place, word], f"st.shared.b32 [$0+{below}], $1;", "r,r")
                return context.get_dummy_value()

            return types.void(types.uint32, tile), generate

        return store

    def make_row_part(row: int, columns: int) -> Any:
        """Make the choice of one of a lane's rows of an accumulator `columns` times 8 wide.

        Rows are counted as the lane has them: g, g + 8, g + 16 and so on.
        """

        @intrinsic
        def row_part(typing_context: Any, tile: Any) -> Any:
            """Pairs of neighbouring elements of a row, every 8 columns one."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[0])
                first = row // 2 * 4 * columns + row % 2 * 2
                return array_of(
                    builder,
                    [elements[first + 4 * column + side] for column in range(columns) for side in (0, 1)],
                )

            return types.UniTuple(types.float32, 2 * columns)(tile), generate

        return row_part

    def make_row_float_store(distance: int) -> Any:
        """Make the store of a row's pairs as float32, each `distance` columns after the last."""

        @intrinsic
        def store(typing_context: Any, address: Any, row: Any) -> Any:
            """Write a lane's pairs of a row: ``st.global.v2.f32``."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                for index in range(0, len(elements), 2):
                    code = f"st.global.v2.f32 [$0+{index // 2 * distance * 4}], {{$1, $2}};"
                    assemble(builder, VOID, [args[0], *elements[index : index + 2]], code, "l,f,f")
                return context.get_dummy_value()

            return types.void(types.uint64, row), generate

        return store

    def make_row_float_fold(distance: int) -> Any:
        """Make the sum of a row's pairs and float32 in memory, each `distance` columns after the last."""

        @intrinsic
        def fold(typing_context: Any, address: Any, row: Any, kept: Any, added: Any) -> Any:
            """``kept * memory + added * row``: ``ld.global.v2.f32``, ``mul.rn.f32``, ``fma.rn.f32``."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                pair = ir.LiteralStructType([FLOAT, FLOAT])
                loaded = [
                    assemble(
                        builder,
                        pair,
                        [args[0]],
                        f"ld.global.v2.f32 {{$0, $1}}, [$2+{index * distance * 4}];",
                        "=f,=f,l",
                    )
                    for index in range(len(elements) // 2)
                ]
                code = "{ .reg .f32 x; mul.rn.f32 x, $1, $2; fma.rn.f32 $0, $3, $4, x; }"
                sums = []
                for index, element in enumerate(elements):
                    held = builder.extract_value(loaded[index // 2], index % 2)
                    operands = [held, args[2], args[3], element]
                    sums.append(assemble(builder, FLOAT, operands, code, "=f,f,f,f,f", is_pure=True))
                return array_of(builder, sums)

            return row(types.uint64, row, types.float32, types.float32), generate

        return fold

    def make_row_word_store(number: str, distance: int) -> Any:
        """Make the store of a row's pairs as 16-bit numbers, each `distance` columns after the last.

        `number` is ``"bf16x2"`` or ``"f16x2"``.
        """

        @intrinsic
        def store(typing_context: Any, address: Any, row: Any) -> Any:
            """Write a lane's pairs of a row, rounded, -0 as 0: ``cvt.rn``, ``fma.rn``, ``st.global.b32``."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                for index in range(0, len(elements), 2):
                    word = _round_pair(builder, number, *elements[index : index + 2])
                    code = f"st.global.b32 [$0+{index // 2 * distance * 2}], $1;"
                    assemble(builder, VOID, [args[0], word], code, "l,r")
                return context.get_dummy_value()

            return types.void(types.uint64, row), generate

        return store

    @intrinsic
    def without_negative_zeros(typing_context: Any, tile: Any) -> Any:
        """Turn -0 into 0: ``add.rn.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = "add.rn.f32 $0, $1, 0f00000000;"
            sums = [
                assemble(builder, FLOAT, [element], code, "=f,f", is_pure=True)
                for element in elements_of(builder, args[0])
            ]
            return array_of(builder, sums)

        return tile(tile), generate
