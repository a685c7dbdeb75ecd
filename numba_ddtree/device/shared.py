"""Parts of a block's shared memory."""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED

if SIMULATED:

    def shared_from(array: Any, start: Any) -> Any:
        return array[start:]

else:
    from llvmlite import ir
    from numba.core import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def shared_from(typing_context: Any, array: Any, start: Any) -> Any:
        """Elements of a one-dimensional array from the element `start` (int32) on.

        The shape of the result means nothing. A slice would compute it, and test for indices that count
        from the end: a dozen slices take as long as a level of a tree.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            view = context.make_array(signature.args[0])(context, builder, args[0])
            offset = builder.zext(args[1], ir.IntType(64))
            view.data = builder.gep(view.data, [offset])
            return view._getvalue()

        return array(array, types.int32), generate
