"""What two blocks of a cluster do with each other's shared memory.

Addresses of it are those of `peer_address`, valid until the other block's last thread returns. What was sent
is there when the barrier that it was sent to has its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numba_ddtree.cuda_target import SIMULATED

FOURS_ROW_BYTES = 512


def unit_of_four(piece: int, quad: int, row: int) -> int:
    """Place of a four of numbers in its row of `FOURS_ROW_BYTES`, in units of 16 bytes.

    Each 16 columns of an accumulator, a *piece*, are four fours: lane t of four has columns 2t, 2t + 1,
    2t + 8 and 2t + 9. They are exchanged so that neither lanes that write a piece of several rows, nor those
    that read several pieces of a row, meet in a bank.
    """
    return 4 * piece ^ piece >> 1 ^ quad ^ (row & 1) << 2


if not SIMULATED:
    from llvmlite import ir
    from numba.core import types

    from numba_ddtree.device.ptx import FLOAT, VOID, WORD, array_of, assemble, effect, elements_of, intrinsic

    _SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$2, $3, $4, $5}, [$1];"

    @intrinsic
    def arrive_at_cluster(typing_context: Any) -> Any:
        """Arrive where all threads of the cluster do, without waiting: ``barrier.cluster.arrive.relaxed``.

        It tells only of what fences have made known before, as `mbarriers.publish_barriers` does.
        """
        return effect("barrier.cluster.arrive.relaxed;", "")

    @intrinsic
    def wait_for_cluster(typing_context: Any) -> Any:
        """Wait until all threads of the cluster have arrived: ``barrier.cluster.wait``."""
        return effect("barrier.cluster.wait.acquire;", "")

    @intrinsic
    def peer_address(typing_context: Any, address: Any, block: Any) -> Any:
        """Address (uint32) of the same place in the cluster's block number `block`: ``mapa``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return assemble(builder, WORD, args, "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")

        return types.uint32(types.uint32, types.uint32), generate

    @intrinsic
    def arrive_at_peer(typing_context: Any, barrier: Any) -> Any:
        """Arrive once at another block's barrier: ``mbarrier.arrive.release.cluster``."""
        return effect("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", "r", types.uint32)

    @intrinsic
    def wait_for_peer(typing_context: Any, barrier: Any, parity: Any) -> Any:
        """Wait for a phase of an own barrier that others arrive at: ``mbarrier.try_wait.acquire.cluster``."""
        code = (
            "{ .reg .pred done; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; "
            "@!done bra W; }"
        )
        return effect(code, "r,r", types.uint32, types.uint32)

    @intrinsic
    def send_four(typing_context: Any, address: Any, barrier: Any, values: Any) -> Any:
        """Write four float32 to another block, whose barrier counts the 16 bytes: ``st.async``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            assemble(builder, VOID, [*args[:2], *elements_of(builder, args[2])], _SEND, "r,r,f,f,f,f")
            return context.get_dummy_value()

        return types.void(types.uint32, types.uint32, values), generate

    def make_rows_send(first: int, count: int) -> Any:
        """Make the sending of `count` numbers of an accumulator from `first` on, as `fours_of_rows` lie."""

        @intrinsic
        def send_rows(typing_context: Any, address: Any, barrier: Any, tile: Any) -> Any:
            """Send a thread's numbers, as `send_four` does, from its first place, `address` (uint32), on."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                for place, four in fours_of_rows(builder, args[0], args[2], first, count):
                    assemble(builder, VOID, [place, args[1], *four], _SEND, "r,r,f,f,f,f")
                return context.get_dummy_value()

            return types.void(types.uint32, types.uint32, tile), generate

        return send_rows

    def make_rows_keep(first: int, count: int) -> Any:
        """Make the store of `count` numbers of an accumulator from `first` on, as `fours_of_rows` lie."""

        @intrinsic
        def keep_rows(typing_context: Any, address: Any, tile: Any) -> Any:
            """Write a thread's numbers to shared memory, from its first place, `address` (uint32), on."""

            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                code = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
                for place, four in fours_of_rows(builder, args[0], args[1], first, count):
                    assemble(builder, VOID, [place, *four], code, "r,f,f,f,f")
                return context.get_dummy_value()

            return types.void(types.uint32, tile), generate

        return keep_rows

    def fours_of_rows(
        builder: Any, address: Any, tile: Any, first: int, count: int
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Go through a thread's numbers in fours, each with its place; see `unit_of_four`.

        `address` is that of unit ``unit_of_four(0, t, g)`` of row g, of which the lane is number t of four.
        """
        elements = elements_of(builder, tile)[first : first + count]
        for piece in range(count // 8):
            place = builder.xor(address, ir.Constant(WORD, 16 * unit_of_four(piece, 0, 0)))
            for row in range(2):
                start = 8 * piece + 2 * row
                four = [elements[start + number] for number in (0, 1, 4, 5)]
                yield builder.add(place, ir.Constant(WORD, row * 8 * FOURS_ROW_BYTES)), four

    @intrinsic
    def load_four_floats(typing_context: Any, address: Any) -> Any:
        """Load four float32 of shared memory: ``ld.shared.v4.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            four = ir.LiteralStructType([FLOAT] * 4)
            code = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            loaded = assemble(builder, four, args, code, "=f,=f,=f,=f,r")
            return array_of(builder, [builder.extract_value(loaded, number) for number in range(4)])

        return types.UniTuple(types.float32, 4)(types.uint32), generate
