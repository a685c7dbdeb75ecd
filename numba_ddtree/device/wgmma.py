"""Products by a warpgroup, ``wgmma``: 128 threads and 64 rows; compute capability 9.0 alone (sm_90a).

Fragments (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"): warp w of the warpgroup has rows
16 w to 16 w + 15, and its lanes have of them what `numba_ddtree.device.tile` describes: of an accumulator,
piece after piece of 8 columns, four float32; of a left operand, 16 columns after another, four words.

Operands in shared memory are chunks of 64 columns as `tile` describes them, 64 rows of 128 bytes swizzled
by 128 bytes, and begin at multiples of 1024. A descriptor says where (PTX ISA, "Matrix descriptor format").

A product runs while its warpgroup goes on: it begins between `open_products` and `close_products`, and its
tile must not be touched until one of the waits here has returned it. ptxas serialises every product of a
kernel in which it sees a tile touched before; so a wait ties its tile by an empty instruction, offsets of
descriptors are immediates within the instruction, no product runs across a loop's end, and an arm of a branch
into which one runs waits for it before all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba_ddtree.cuda_target import SIMULATED, device_function, uint32, uint64

STEPS = 4  # of a chunk's 64
CHUNK_UNITS = 64 * 128 // 16  # of a chunk, in descriptors' units of 16 bytes
SWIZZLE_128 = 1 << 62
ADDRESS_MASK = (1 << 14) - 1
ROWS_APART = (8 * 128) >> 4  # eight rows of a chunk


@device_function
def row_descriptor(chunk):  # type: ignore[no-untyped-def]
    """Descriptor (uint64) of a chunk whose columns are summed over, as those of both operands of scores."""
    rest = (ROWS_APART << 32) | (1 << 16) | SWIZZLE_128
    return uint64(uint64(uint32(uint32(chunk) >> uint32(4)) & uint32(ADDRESS_MASK)) | uint64(rest))


@device_function
def column_descriptor(chunk):  # type: ignore[no-untyped-def]
    """Descriptor (uint64) of chunks side by side whose rows are summed over: a right operand's."""
    rest = (ROWS_APART << 32) | (CHUNK_UNITS << 16) | SWIZZLE_128
    return uint64(uint64(uint32(uint32(chunk) >> uint32(4)) & uint32(ADDRESS_MASK)) | uint64(rest))


if not SIMULATED:
    from llvmlite import ir
    from numba.core import types

    from numba_ddtree.device.ptx import (
        FLOAT,
        VOID,
        WORD,
        array_of,
        assemble,
        elements_of,
        intrinsic,
        reduce_by_pairs,
    )

    def _order(code: str) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, [], code, "")
            return context.get_dummy_value()

        return types.void(), generate

    @intrinsic
    def open_products(typing_context: Any) -> Any:
        """Order what registers hold before the products that follow: ``wgmma.fence.sync.aligned``."""
        return _order("wgmma.fence.sync.aligned;")

    @intrinsic
    def close_products(typing_context: Any) -> Any:
        """Make a group of the products since the last one: ``wgmma.commit_group.sync.aligned``."""
        return _order("wgmma.commit_group.sync.aligned;")

    @intrinsic
    def wait_for_all_products(typing_context: Any, tile: Any) -> Any:
        """Return a tile when all products of the warpgroup are done: ``wgmma.wait_group 0``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, [], "wgmma.wait_group.sync.aligned 0;", "")
            return array_of(builder, _tied(builder, elements_of(builder, args[0]), [], "", ""))

        return tile(tile), generate

    @intrinsic
    def wait_for_all_but_last(typing_context: Any, tile: Any) -> Any:
        """Return a tile when all products but the last group are done: ``wgmma.wait_group 1``.

        The last group goes on: its tile still must not be touched.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, [], "wgmma.wait_group.sync.aligned 1;", "")
            return args[0]

        return tile(tile), generate

    def _tied(builder: Any, tile: list[Any], args: Sequence[Any], code: str, constraints: str) -> list[Any]:
        """Elements of a tile after an instruction that reads and writes them in their registers."""
        count = len(tile)
        own = ["=f"] * count + [str(index) for index in range(count)]
        result = ir.LiteralStructType([FLOAT] * count)
        text = ",".join([*own, constraints] if constraints else own)
        changed = assemble(builder, result, [*tile, *args], code, text)
        return [builder.extract_value(changed, index) for index in range(count)]

    def make_undefined(count: int) -> Any:
        """Make a tile of no content, for a product that starts it."""

        @intrinsic
        def undefined(typing_context: Any) -> Any:
            """Float32 of any value."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return ir.Constant(ir.ArrayType(FLOAT, count), ir.Undefined)

            return types.UniTuple(types.float32, count)(), generate

        return undefined

    def make_product(
        number: str,
        columns: int,
        steps: Sequence[tuple[int, int]],
        *,
        has_left_in_registers: bool = False,
        has_right_by_columns: bool = False,
    ) -> Any:
        """Make a run of products on one tile of 64 rows x `columns`.

        Parameters
        ----------
        number : {"bf16", "f16"}
            The operands' numbers.
        columns : int
            Of the tile.
        steps : sequence of pairs of int
            For each instruction, which adds 16 terms: where its left operand begins, in units after the
            descriptor or, in registers, as the first of four words, and its right one, in units.
        has_left_in_registers : bool
            Whether the left operand is a tuple of words.
        has_right_by_columns : bool
            Whether the right operand's descriptor is a `column_descriptor`.
        """
        count = columns // 2
        words = 4 * len(steps) if has_left_in_registers else 1
        tile = ", ".join(f"${index}" for index in range(count))
        left, right, is_continued = 2 * count, 2 * count + words, 2 * count + words + 1
        lines = [".reg .b64 a, b; .reg .pred adds, goes;"]
        lines += [f"setp.ne.u32 goes, ${is_continued}, 0; setp.eq.u32 adds, 0, 0;"]
        for index, (first, second) in enumerate(steps):
            lines.append(f"add.s64 b, ${right}, {second};")
            if has_left_in_registers:
                operand = "{" + ", ".join(f"${left + first + part}" for part in range(4)) + "}"
                layout = f"1, 1, {int(has_right_by_columns)}"
            else:
                lines.append(f"add.s64 a, ${left}, {first};")
                operand = "a"
                layout = f"1, 1, 0, {int(has_right_by_columns)}"
            instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{number}.{number}"
            lines.append(f"{instruction} {{{tile}}}, {operand}, b, {'adds' if index else 'goes'}, {layout};")
        code = "{ " + " ".join(lines) + " }"
        constraints = ",".join((["r"] * words if has_left_in_registers else ["l"]) + ["l", "r"])

        @intrinsic
        def product(typing_context: Any, total: Any, left: Any, right: Any, is_continued: Any) -> Any:
            """Begin ``total + left @ right``: ``wgmma.mma_async.sync.aligned.m64nNk16``, step by step.

            `is_continued` (uint32): 0 leaves out what `total` held.
            """
            left_type = types.UniTuple(types.uint32, words) if has_left_in_registers else types.uint64

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                operands = elements_of(builder, args[1]) if has_left_in_registers else [args[1]]
                operands += [args[2], args[3]]
                changed = _tied(builder, elements_of(builder, args[0]), operands, code, constraints)
                return array_of(builder, changed)

            return total(total, left_type, types.uint64, types.uint32), generate

        return product

    @intrinsic
    def load_left_words(typing_context: Any, upper: Any, lower: Any) -> Any:
        """Left operand's 64 columns from global memory: sixteen words, ``ld.global.nc.b32``.

        `upper` and `lower` (uint64) are the addresses of the lane's row g and row g + 8, and 4 t bytes more.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = "ld.global.nc.b32 $0, [$1+{}];"
            return array_of(
                builder,
                [
                    assemble(builder, WORD, [args[row]], code.format(32 * step + 16 * side), "=r,l")
                    for step in range(STEPS)
                    for side in range(2)
                    for row in range(2)
                ],
            )

        return types.UniTuple(types.uint32, 4 * STEPS)(types.uint64, types.uint64), generate

    @intrinsic
    def exp2_of_scores(typing_context: Any, tile: Any, scale: Any, origins: Any) -> Any:
        """2 to the power of ``element * scale - origin``: ``fma.rn.ftz.f32``, ``ex2.approx.ftz.f32``.

        `origins` are two float32, of rows g and g + 8.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            negated = [
                assemble(builder, FLOAT, [origin], "neg.ftz.f32 $0, $1;", "=f,f", is_pure=True)
                for origin in elements_of(builder, args[2])
            ]
            code = "{ .reg .f32 x; fma.rn.ftz.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }"
            powers = [
                assemble(
                    builder, FLOAT, [each, args[1], negated[index % 4 // 2]], code, "=f,f,f,f", is_pure=True
                )
                for index, each in enumerate(elements_of(builder, args[0]))
            ]
            return array_of(builder, powers)

        return tile(tile, types.float32, origins), generate

    @intrinsic
    def keep_columns(typing_context: Any, tile: Any, upper: Any, lower: Any) -> Any:
        """Put -inf in a tile of 64 columns where a bit is 0.

        `upper` and `lower` are the bits (uint64) of rows g and g + 8, shifted down by the lane's first
        column, 2 t.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            nothing = ir.Constant(FLOAT, float("-inf"))
            zero = ir.Constant(ir.IntType(64), 0)
            kept = []
            for index, element in enumerate(elements_of(builder, args[0])):
                bit = ir.Constant(ir.IntType(64), 1 << (index // 4 * 8 + index % 2))
                is_kept = builder.icmp_unsigned("!=", builder.and_(args[1 + index % 4 // 2], bit), zero)
                kept.append(builder.select(is_kept, element, nothing))
            return array_of(builder, kept)

        return tile(tile, types.uint64, types.uint64), generate

    def make_pack_tile(number: str) -> Any:
        """Make the rounding of an accumulator to a left operand, ``"bf16x2"`` or ``"f16x2"`` in PTX."""

        @intrinsic
        def pack_tile(typing_context: Any, tile: Any) -> Any:
            """Words of a tile's pairs: ``cvt.rn.bf16x2.f32``, ``cvt.rn.f16x2.f32``."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[0])
                code = f"cvt.rn.{number}.f32 $0, $2, $1;"
                return array_of(
                    builder,
                    [
                        assemble(builder, WORD, elements[index : index + 2], code, "=r,f,f", is_pure=True)
                        for index in range(0, len(elements), 2)
                    ],
                )

            return types.UniTuple(types.uint32, tile.count // 2)(tile), generate

        return pack_tile

    def make_word_sums(number: str) -> Any:
        """Make the sums of what `make_pack_tile` packs."""
        kind = number.removesuffix("x2")
        unpack = {
            "bf16": "shl.b32 low, $1, 16; and.b32 high, $1, 0xffff0000;",
            "f16": "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 low, l; cvt.f32.f16 high, h; }",
        }[kind]
        code = "{ .reg .f32 low, high; " + unpack + " add.rn.f32 $0, low, high; }"

        @intrinsic
        def word_sums(typing_context: Any, words: Any) -> Any:
            """Add up the lane's numbers of rows g and g + 8: ``add.rn.f32``, neighbours first."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                pairs = [
                    assemble(builder, FLOAT, [word], code, "=f,r", is_pure=True)
                    for word in elements_of(builder, args[0])
                ]
                totals = [reduce_by_pairs(builder, "add.rn.f32", pairs[row::2]) for row in range(2)]
                return array_of(builder, totals)

            return types.UniTuple(types.float32, 2)(words), generate

        return word_sums

    @intrinsic
    def store_words_in_chunk(typing_context: Any, address: Any, words: Any) -> Any:
        """Write the words of a tile of 64 columns to a chunk: ``st.shared.b32``.

        `address` (uint32) is `tile.unit_address` of the lane's row g and unit 0, and 4 t bytes more.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for index, word in enumerate(elements_of(builder, args[1])):
                place = builder.xor(args[0], ir.Constant(WORD, index // 2 * 16))
                code = f"st.shared.b32 [$0+{index % 2 * 8 * 128}], $1;"
                assemble(builder, VOID, [place, word], code, "r,r")
            return context.get_dummy_value()

        return types.void(types.uint32, words), generate

    def make_output_words(number: str, first: int, columns: int) -> Any:
        """Make the rounding of some columns of an accumulator, ``"bf16x2"`` or ``"f16x2"`` in PTX."""

        @intrinsic
        def output_words(typing_context: Any, tile: Any, factors: Any) -> Any:
            """Words of pairs, each times its row's factor, of rows g and g + 8; -0 as 0."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[0])[first // 2 : (first + columns) // 2]
                scales = elements_of(builder, args[1])
                code = (
                    "{ .reg .f32 low, high; .reg .b32 zero; mov.b32 zero, 0; mul.rn.f32 low, $1, $3; "
                    f"mul.rn.f32 high, $2, $3; cvt.rn.{number}.f32 $0, high, low; "
                    f"add.rn.{number} $0, $0, zero; }}"
                )
                words = [
                    assemble(
                        builder,
                        WORD,
                        [*elements[index : index + 2], scales[index // 2 % 2]],
                        code,
                        "=r,f,f,f",
                        is_pure=True,
                    )
                    for index in range(0, len(elements), 2)
                ]
                return array_of(builder, words)

            return types.UniTuple(types.uint32, columns // 4)(tile, factors), generate

        return output_words

    @intrinsic
    def store_chunk_rows(typing_context: Any, chunk: Any, address: Any, wanted: Any) -> Any:
        """Write a warp's 16 rows of a chunk, 16 bytes a lane: ``ld.shared.v4.b32``, ``st.global.v4.b32``.

        `chunk` (uint32) and `address` (uint64) are those of the lane's unit in the first four rows, which are
        1024 bytes apart in memory; `wanted` (int32) is how many rows there are from the lane's first one on.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            other = builder.xor(args[0], ir.Constant(WORD, 64))  # of rows that are 4 further: another swizzle
            for step in range(4):
                code = (
                    "{ .reg .pred goes; .reg .b32 a, b, c, d; "
                    f"setp.gt.s32 goes, $2, {4 * step}; ld.shared.v4.b32 {{a, b, c, d}}, [$0+{512 * step}]; "
                    f"@goes st.global.v4.b32 [$1+{4096 * step}], {{a, b, c, d}}; }}"
                )
                assemble(builder, VOID, [(args[0], other)[step % 2], args[1], args[2]], code, "r,l,r")
            return context.get_dummy_value()

        return types.void(types.uint32, types.uint64, types.int32), generate

    def make_group_rows_store(group_bytes: int) -> Any:
        """Make the store of an accumulator's rows by groups of 8 columns, which are so many bytes apart."""

        @intrinsic
        def store_group_rows(typing_context: Any, address: Any, tile: Any) -> Any:
            """Write an accumulator's rows in float32, 32 bytes of a group: ``st.global.v2.f32``.

            `address` (uint64) is that of the lane's first pair in its row g.
            """

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                for index in range(0, len(elements), 2):
                    place = index // 4 * group_bytes + index // 2 % 2 * 8 * 32
                    code = f"st.global.v2.f32 [$0+{place}], {{$1, $2}};"
                    assemble(builder, VOID, [args[0], *elements[index : index + 2]], code, "l,f,f")
                return context.get_dummy_value()

            return types.void(types.uint64, tile), generate

        return store_group_rows

    def make_rows_store(
        number: str, read_slot: int, write_slot: int, write_out: int, group_bytes: int
    ) -> Any:
        """Make the store of an accumulator's rows, in ``"bf16x2"`` or ``"f16x2"``, or in float32.

        The next three arguments are bits of a row's outcome. A slot has rows of 32 bytes by groups of 8
        columns, which are `group_bytes` apart.
        """

        @intrinsic
        def store_rows(
            typing_context: Any, stage: Any, tile: Any, outcomes: Any, slot: Any, out: Any, in_floats: Any
        ) -> Any:
            """Write an accumulator's rows as their outcomes say: ``st.global.v4.f32``, ``st.global.v2.b32``.

            A warp has 16 rows, which pass through its part of shared memory at `stage` (uint32), 16 rows of
            128 bytes, 32 columns at a time; a lane then has four columns of each fourth row. Of the first of
            those rows, `outcomes` (uint32) is the address of the outcome in shared memory, and `slot` and
            `out` (uint64) where the lane's columns are in a slot and in the output, whose numbers are
            float32 if `in_floats` (uint32) is not 0. An outcome is three float32, k, a and f, and a word of
            bits: the result is ``f (k s + a x)``, where s is what the slot holds, if it is to be read, or 0.
            There is no branch, since other products may be under way.
            """

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                for step in range(len(elements) // 16):
                    chosen = elements[16 * step : 16 * (step + 1)]
                    _stage_columns(builder, args[0], chosen)
                    for pair in range(2):
                        bits = read_slot, write_slot, write_out
                        code = _write_rows_code(number, step, pair, bits, 4 * step * group_bytes)
                        operands = [args[0], args[2], args[3], args[4], args[5]]
                        assemble(builder, VOID, operands, code, "r,r,l,l,r")
                return context.get_dummy_value()

            word, long = types.uint32, types.uint64
            return types.void(word, tile, word, long, long, word), generate

        return store_rows

    def _stage_columns(builder: Any, stage: Any, elements: Sequence[Any]) -> None:
        """Write a warp's 16 rows x 32 columns to shared memory: ``st.shared.v2.f32``.

        Rows have 128 bytes, of which those of every four neighbours are rotated against each other, so that
        neither these stores nor loads of rows meet in a bank.
        """
        place = (
            "{ .reg .b32 l, g, a; mov.u32 l, %laneid; shr.u32 g, l, 2; shl.b32 a, g, 7; and.b32 g, g, 3; "
            "shl.b32 g, g, 5; add.u32 a, a, g; and.b32 l, l, 3; shl.b32 l, l, 3; add.u32 a, a, l; "
            "add.u32 $0, a, $1; }"
        )
        start = assemble(builder, WORD, [stage], place, "=r,r")
        assemble(builder, VOID, [], "bar.warp.sync 0xffffffff;", "")
        for piece in range(4):
            at = builder.xor(start, ir.Constant(WORD, 32 * piece))
            four = elements[4 * piece : 4 * piece + 4]
            code = "st.shared.v2.f32 [$0], {$1, $2}; st.shared.v2.f32 [$0+1024], {$3, $4};"
            assemble(builder, VOID, [at, *four], code, "r,f,f,f,f")
        assemble(builder, VOID, [], "bar.warp.sync 0xffffffff;", "")

    def _write_rows_code(
        number: str, step: int, pair: int, bits: tuple[int, int, int], slot_offset: int
    ) -> str:
        """PTX that writes a lane's columns of two of its four rows from where `_stage_columns` put them."""
        read, write, final = bits
        lines = [
            ".reg .b32 l, g, u, b, zero; .reg .pred r, w, o, floats; mov.b32 zero, 0;",
            "setp.ne.u32 floats, $4, 0; mov.u32 l, %laneid; shr.u32 g, l, 3; and.b32 u, l, 7;",
            "shl.b32 b, g, 1; xor.b32 u, u, b; shl.b32 u, u, 4; shl.b32 g, g, 7;",
            "add.u32 u, u, g; add.u32 u, u, $0;",
        ]
        for each, name in enumerate("ab"):
            row = 4 * (2 * pair + each)  # after the lane's first
            lines += [
                f".reg .f32 x{name}<4>, s{name}<4>, k{name}, a{name}, f{name}; .reg .b32 t{name};",
                f"ld.shared.v4.f32 {{x{name}0, x{name}1, x{name}2, x{name}3}}, [u+{128 * row}];",
                f"ld.shared.v4.b32 {{k{name}, a{name}, f{name}, t{name}}}, [$1+{16 * row}];",
                f"and.b32 b, t{name}, {read}; setp.ne.u32 r, b, 0;",
                *(f"mov.f32 s{name}{column}, 0f00000000;" for column in range(4)),
                f"@r ld.global.v4.f32 {{s{name}0, s{name}1, s{name}2, s{name}3}}, "
                f"[$2+{slot_offset + 32 * row}];",
            ]
        for each, name in enumerate("ab"):
            row = 4 * (2 * pair + each)
            x = [f"x{name}{column}" for column in range(4)]
            for column in range(4):
                lines.append(f"mul.rn.f32 s{name}{column}, s{name}{column}, k{name};")
                lines.append(f"fma.rn.f32 {x[column]}, a{name}, {x[column]}, s{name}{column};")
                lines.append(f"mul.rn.f32 {x[column]}, {x[column]}, f{name};")
                lines.append(f"add.rn.f32 {x[column]}, {x[column]}, 0f00000000;")
            lines += [
                f".reg .b32 p{name}, q{name}; .reg .pred o{name};",
                f"and.b32 b, t{name}, {write}; setp.ne.u32 w, b, 0;",
                f"@w st.global.v4.f32 [$2+{slot_offset + 32 * row}], {{{', '.join(x)}}};",
                f"and.b32 b, t{name}, {final}; setp.ne.and.u32 o, b, 0, floats;",
                f"@o st.global.v4.f32 [$3+{2048 * row + 128 * step}], {{{', '.join(x)}}};",
                f"setp.ne.and.u32 o{name}, b, 0, !floats;",
                f"cvt.rn.{number}.f32 p{name}, {x[1]}, {x[0]}; add.rn.{number} p{name}, p{name}, zero;",
                f"cvt.rn.{number}.f32 q{name}, {x[3]}, {x[2]}; add.rn.{number} q{name}, q{name}, zero;",
                f"@o{name} st.global.v2.b32 [$3+{1024 * row + 64 * step}], {{p{name}, q{name}}};",
            ]
        return "{ " + " ".join(lines) + " }"
