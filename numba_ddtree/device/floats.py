"""Floating-point numbers and their bits; 16-bit ones, as the bits that kernels see, to float32 and back.

A bfloat16 is the upper half of a float32; a float16 is converted by the hardware. Both are exact
towards float32, and round to nearest, ties to even, on the way back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED

if SIMULATED:
    from ml_dtypes import bfloat16

    def float_bits(value: Any) -> Any:
        return np.float32(value).view(np.uint32)

    def float_of_bits(bits: Any) -> Any:
        return np.uint32(bits).view(np.float32)

    def double_bits(value: Any) -> Any:
        return np.float64(value).view(np.int64)

    def double_of_bits(bits: Any) -> Any:
        return np.int64(bits).view(np.float64)

    def fused_multiply_add(left: Any, right: Any, addend: Any) -> Any:
        # The product is exact in float64, so that only the sum is rounded, though twice.
        return np.float32(np.float64(left) * np.float64(right) + np.float64(addend))

    def larger(left: Any, right: Any) -> Any:
        return np.fmax(left, right)

    def bfloat16_to_float32(bits: Any) -> Any:
        return np.float32(np.uint16(bits).view(bfloat16))

    def float32_to_bfloat16(value: Any) -> Any:
        return np.float32(value).astype(bfloat16).view(np.uint16)

    def float16_to_float32(bits: Any) -> Any:
        return np.float32(np.uint16(bits).view(np.float16))

    def float32_to_float16(value: Any) -> Any:
        with np.errstate(over="ignore"):
            return np.float32(value).astype(np.float16).view(np.uint16)

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda import libdevice
    from numba.cuda.extending import intrinsic

    from numba_ddtree.cuda_target import device_function, uint32

    _HALF, _WORD, _LONG, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

    def _assembly(
        builder: Any, code: str, result: Any, result_constraint: str, constraint: str, arg: Any
    ) -> Any:
        signature = ir.FunctionType(result, [arg.type])
        instruction = ir.InlineAsm(signature, code, f"{result_constraint},{constraint}", side_effect=False)
        return builder.call(instruction, [arg])

    @intrinsic
    def float_bits(typing_context: Any, value: Any) -> Any:
        """Bits of a float32, uint32."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], _WORD)

        return types.uint32(types.float32), generate

    @intrinsic
    def float_of_bits(typing_context: Any, bits: Any) -> Any:
        """Float32 of a uint32's bits."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], _FLOAT)

        return types.float32(types.uint32), generate

    @intrinsic
    def double_bits(typing_context: Any, value: Any) -> Any:
        """Bits of a float64, int64."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], _LONG)

        return types.int64(types.float64), generate

    @intrinsic
    def double_of_bits(typing_context: Any, bits: Any) -> Any:
        """Float64 of an int64's bits."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], ir.DoubleType())

        return types.float64(types.int64), generate

    @device_function
    def fused_multiply_add(left: Any, right: Any, addend: Any) -> Any:
        """``left * right + addend`` of float32, rounded once."""
        return libdevice.fmaf_rn(left, right, addend)

    @device_function
    def larger(left: Any, right: Any) -> Any:
        """Larger of two float32; of a number and a NaN the number."""
        return libdevice.fmaxf(left, right)

    @device_function
    def bfloat16_to_float32(bits: Any) -> Any:
        """Float32 of a bfloat16's bits (uint16, or the low half of a uint32)."""
        return float_of_bits(uint32(uint32(bits) << uint32(16)))

    @intrinsic
    def float32_to_bfloat16(typing_context: Any, value: Any) -> Any:
        """Bits (uint16) of the bfloat16 nearest to a float32: ``cvt.rn.bf16.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _assembly(builder, "cvt.rn.bf16.f32 $0, $1;", _HALF, "=h", "f", args[0])

        return types.uint16(types.float32), generate

    @intrinsic
    def float16_to_float32(typing_context: Any, bits: Any) -> Any:
        """Float32 of a float16's bits (uint16): ``cvt.f32.f16``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _assembly(builder, "cvt.f32.f16 $0, $1;", _FLOAT, "=f", "h", args[0])

        return types.float32(types.uint16), generate

    @intrinsic
    def float32_to_float16(typing_context: Any, value: Any) -> Any:
        """Bits (uint16) of the float16 nearest to a float32: ``cvt.rn.f16.f32``."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _assembly(builder, "cvt.rn.f16.f32 $0, $1;", _HALF, "=h", "f", args[0])

        return types.uint16(types.float32), generate
