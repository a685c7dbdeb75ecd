"""Loads and stores of 16, 4 and 1 bytes at addresses in global memory.

A word travels as two uint64, of which the words of 4 bytes and 1 use the first alone, so that code for
one size is code for all. Its bits are moved as they are. An address is a multiple of the size. The loads
and stores of a thread keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED

WORD_SIZES = (16, 4, 1)

if SIMULATED:
    import ctypes

    def _access(size: int) -> tuple[Callable[..., Any], Callable[..., None]]:
        def check(address: Any) -> None:
            if int(address) % size != 0:
                raise ValueError(f"a word of {size} bytes at {int(address):#x}")

        def load(address: Any) -> Any:
            check(address)
            content = ctypes.string_at(int(address), size).ljust(16, b"\0")
            return tuple(np.frombuffer(content, np.uint64))

        def store(address: Any, low: Any, high: Any) -> None:
            check(address)
            ctypes.memmove(int(address), np.array([low, high], np.uint64).tobytes(), size)

        return load, store

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    _SHORT, _LONG = ir.IntType(32), ir.IntType(64)
    _PAIR = ir.LiteralStructType([_LONG, _LONG])
    _FORMS = {  # type in PTX, registers and their constraint
        16: ("v2.b64", [_LONG, _LONG], "l"),
        4: ("b32", [_SHORT], "r"),
        1: ("u8", [_SHORT], "r"),
    }

    def _access(size: int) -> tuple[Callable[..., Any], Callable[..., None]]:
        kind, registers, constraint = _FORMS[size]
        count = len(registers)

        @intrinsic
        def load(typing_context: Any, address: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                result, operands = (_SHORT, "$0") if count == 1 else (_PAIR, "{$0, $1}")
                code = f"ld.global.{kind} {operands}, [${count}];"
                constraints = ",".join([f"={constraint}"] * count + ["l"])
                function = ir.FunctionType(result, [_LONG])
                word = builder.call(ir.InlineAsm(function, code, constraints, side_effect=True), args)
                halves = [word] if count == 1 else [builder.extract_value(word, half) for half in range(2)]
                pair = ir.Constant(ir.ArrayType(_LONG, 2), [0, 0])
                for place, half in enumerate(halves):
                    pair = builder.insert_value(pair, builder.zext(half, _LONG), place)
                return pair

            return types.UniTuple(types.uint64, 2)(types.int64), generate

        @intrinsic
        def store(typing_context: Any, address: Any, low: Any, high: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                words = [builder.trunc(half, kept) for half, kept in zip(args[1:], registers, strict=False)]
                operands = "$1" if count == 1 else "{$1, $2}"
                code = f"st.global.{kind} [$0], {operands};"
                constraints = ",".join(["l"] + [constraint] * count)
                function = ir.FunctionType(ir.VoidType(), [_LONG, *registers])
                store = ir.InlineAsm(function, code, constraints, side_effect=True)
                builder.call(store, [args[0], *words])
                return context.get_dummy_value()

            return types.void(types.int64, types.uint64, types.uint64), generate

        return load, store


WORD_ACCESS = {size: _access(size) for size in WORD_SIZES}
"""For each size a function that loads a word, ``(low, high)`` of an address, and one that stores it."""
