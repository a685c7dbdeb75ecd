"""Philox 4x32-10, a counter-based random number generator (Salmon et al., SC 2011)."""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED
from numba_ddtree.refs.token_choice import PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL

if SIMULATED:
    from numba_ddtree.refs import token_choice as reference

    def philox(word0: Any, word1: Any, word2: Any, word3: Any, key0: Any, key1: Any) -> Any:
        return reference.philox((word0, word1, word2, word3), (int(key0), int(key1)))

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    _WORD, _LONG = ir.IntType(32), ir.IntType(64)

    def _high_and_low(builder: Any, word: Any, multiplier: int) -> tuple[Any, Any]:
        # Named, since the compiler multiplies by a constant from 2^31 as by one of 64 bits.
        multiply = ir.InlineAsm(
            ir.FunctionType(_LONG, [_WORD]), f"mul.wide.u32 $0, $1, {multiplier};", "=l,r", side_effect=False
        )
        product = builder.call(multiply, [word])
        high = builder.lshr(product, ir.Constant(_LONG, 32))
        return builder.trunc(high, _WORD), builder.trunc(product, _WORD)

    @intrinsic
    def philox(
        typing_context: Any, word0: Any, word1: Any, word2: Any, word3: Any, key0: Any, key1: Any
    ) -> Any:
        """Four random words, uint32, of a counter of four words and a key of two.

        Generated round by round, as one function of 64-bit products.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word0, word1, word2, word3, *keys = args
            for _ in range(PHILOX_ROUNDS):
                high0, low0 = _high_and_low(builder, word0, PHILOX_MULTIPLIERS[0])
                high2, low2 = _high_and_low(builder, word2, PHILOX_MULTIPLIERS[1])
                word0, word1 = builder.xor(builder.xor(high2, word1), keys[0]), low2
                word2, word3 = builder.xor(builder.xor(high0, word3), keys[1]), low0
                keys = [
                    builder.add(key, ir.Constant(_WORD, step))
                    for key, step in zip(keys, PHILOX_WEYL, strict=True)
                ]
            result = ir.Constant(ir.ArrayType(_WORD, 4), ir.Undefined)
            for place, word in enumerate((word0, word1, word2, word3)):
                result = builder.insert_value(result, word, place)
            return result

        return types.UniTuple(types.uint32, 4)(*[types.uint32] * 6), generate
