"""Outputs of tree attention as they are written: pairs of numbers in the output's dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_ddtree.cuda_target import SIMULATED, device_routine, float32, uint64
from numba_ddtree.tree_attention.work import Work

FLOAT32, BFLOAT16, FLOAT16 = (np.int32(form) for form in range(3))
LN_2 = np.float32(0.6931471805599453)


def output_form(work: Work) -> np.int32:
    """Say to a kernel how outputs are stored."""
    return {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}[work.out.dtype.name]


if not SIMULATED:
    from numba_ddtree.device.ptx import log2, product_of, store_float_pair, store_word, sum_of
    from numba_ddtree.device.tile import (
        make_pack,
        make_row_float_store,
        make_row_word_store,
        without_negative_zeros,
    )

    pack_bfloat16, pack_float16 = make_pack("bf16x2"), make_pack("f16x2")

    @device_routine
    def store_pair(out: Any, place: Any, first: Any, second: Any, form: Any) -> None:
        """Write two neighbours, from element `place` (even) of `out` on; what rounds to -0 as 0."""
        if form == FLOAT32:
            low, high = sum_of(first, float32(0)), sum_of(second, float32(0))
            store_float_pair(uint64(out + uint64(place) * uint64(4)), low, high)
        elif form == BFLOAT16:
            store_word(uint64(out + uint64(place) * uint64(2)), pack_bfloat16(first, second))
        else:
            store_word(uint64(out + uint64(place) * uint64(2)), pack_float16(first, second))

    @device_routine
    def natural_log_sum(maximum: Any, total: Any) -> Any:
        """Natural log (float32) of ``total * 2^maximum``; -inf of nothing."""
        return product_of(sum_of(maximum, log2(total)), LN_2)

    def make_row_output(distance: int) -> Any:
        """Make the store of a lane's pairs of an output row, each `distance` columns after the last."""
        store_floats = make_row_float_store(distance)
        store_bfloat16 = make_row_word_store("bf16x2", distance)
        store_float16 = make_row_word_store("f16x2", distance)

        @device_routine
        def store_row(out: Any, place: Any, pairs: Any, form: Any) -> None:
            """Write pairs of a row, from element `place` (even) of the output on; what rounds to -0 as 0."""
            if form == FLOAT32:
                store_floats(uint64(out + uint64(place) * uint64(4)), without_negative_zeros(pairs))
            elif form == BFLOAT16:
                store_bfloat16(uint64(out + uint64(place) * uint64(2)), pairs)
            else:
                store_float16(uint64(out + uint64(place) * uint64(2)), pairs)

        return store_row
