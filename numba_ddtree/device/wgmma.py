"""Products by a warpgroup, ``wgmma``: 128 threads and 64 rows; compute capability 9.0 alone (sm_90a).

Fragments (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"): warp w of the warpgroup has rows
16 w to 16 w + 15, and its lanes have of them what `numba_ddtree.device.tile` describes: of an accumulator,
piece after piece of 8 columns, four float32; of a left operand, 16 columns after another, four words.

Operands in shared memory are chunks of 64 columns as `tile` describes them, 64 rows of 128 bytes swizzled
by 128 bytes, and begin at multiples of 1024. A descriptor says where (PTX ISA, "Matrix descriptor format").

A product runs while its warpgroup goes on: it begins between `open_products` and `close_products`, and its
tile must not be touched until one of the waits here has returned it. ptxas serialises every product of a
kernel in which it sees a tile touched before; so a wait ties its tile by an empty instruction, offsets of
descriptors are immediates within the instruction, and no product runs across a loop's end or into an arm
of a branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numba_ddtree.cuda_target import SIMULATED, device_function, uint32, uint64

STEP_COLUMNS = 16  # of the left operand, that one instruction takes
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

    from numba_ddtree.device.ptx import FLOAT, VOID, WORD, array_of, assemble, elements_of, intrinsic

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

    def _make_wait(groups: int) -> Any:
        @intrinsic
        def wait(typing_context: Any, tile: Any) -> Any:
            """Return a tile when the groups before the newest ones are done: ``wgmma.wait_group``."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                assemble(builder, VOID, [], f"wgmma.wait_group.sync.aligned {groups};", "")
                return array_of(builder, _tied(builder, elements_of(builder, args[0]), [], "", ""))

            return tile(tile), generate

        return wait

    def _tied(builder: Any, tile: list[Any], args: Sequence[Any], code: str, constraints: str) -> list[Any]:
        """Elements of a tile after an instruction that reads and writes them in their registers."""
        count = len(tile)
        own = ["=f"] * count + [str(index) for index in range(count)]
        result = ir.LiteralStructType([FLOAT] * count)
        text = ",".join([*own, constraints] if constraints else own)
        changed = assemble(builder, result, [*tile, *args], code, text)
        return [builder.extract_value(changed, index) for index in range(count)]

    wait_for_all_products = _make_wait(0)
    wait_for_products_but_one = _make_wait(1)

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

    def make_rows_store(number: str) -> Any:
        """Make the store of an accumulator's rows, in ``"bf16x2"`` or ``"f16x2"``, or in float32."""

        @intrinsic
        def store_rows(
            typing_context: Any, addresses: Any, tile: Any, factors: Any, has_floats: Any, has_words: Any
        ) -> Any:
            """Scale an accumulator's rows and write them: ``st.global.v2.f32`` or ``st.global.b32``.

            Each but the tile is a pair, of rows g and g + 8: where the lane's first column goes (uint64),
            by what it is scaled (float32), and whether it is written in float32, and in 16 bits, -0 as 0
            (uint32). There is no branch, since other products may be under way.
            """

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                elements = elements_of(builder, args[1])
                pairs = [elements_of(builder, args[each]) for each in (0, 2, 3, 4)]
                for index in range(0, len(elements), 2):
                    place, factor, floats, words = (pair[index % 4 // 2] for pair in pairs)
                    code = (
                        "{ .reg .pred floats, words; .reg .b32 pair, zero; .reg .f32 low, high; "
                        "setp.ne.u32 floats, $4, 0; setp.ne.u32 words, $5, 0; mov.b32 zero, 0; "
                        "mul.rn.f32 low, $1, $3; mul.rn.f32 high, $2, $3; "
                        "add.rn.f32 low, low, 0f00000000; add.rn.f32 high, high, 0f00000000; "
                        f"@floats st.global.v2.f32 [$0+{index // 4 * 32}], {{low, high}}; "
                        f"cvt.rn.{number}.f32 pair, high, low; add.rn.{number} pair, pair, zero; "
                        f"@words st.global.b32 [$0+{index // 4 * 16}], pair; }}"
                    )
                    operands = [place, *elements[index : index + 2], factor, floats, words]
                    assemble(builder, VOID, operands, code, "l,f,f,f,r,r")
                return context.get_dummy_value()

            both = types.UniTuple(types.uint32, 2)
            return types.void(types.UniTuple(types.uint64, 2), tile, factors, both, both), generate

        return store_rows
