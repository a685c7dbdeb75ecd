"""Optional arguments of kernels: one that is not given is an empty array of int32."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED

if SIMULATED:

    def is_given(array: Any) -> Any:
        return array.dtype != np.int32

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def is_given(typing_context: Any, array: Any) -> Any:
        """Whether an optional argument was given, by its type: where not, the compiler leaves out its use."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(1), int(array.dtype != types.int32))

        return types.boolean(array), generate
