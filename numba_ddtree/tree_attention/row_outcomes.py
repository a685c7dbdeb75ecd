"""What becomes of a row when an item has been through its split of the keys, the same in every kernel."""

from __future__ import annotations

from typing import Any

from numba_ddtree.cuda_target import SIMULATED, device_routine, float32, int32, int64
from numba_ddtree.device.memory import load_flat, store_flat
from numba_ddtree.tree_attention.split_fold import fold_normaliser, fold_weights, folded
from numba_ddtree.tree_attention.splits import SUMS

if not SIMULATED:
    from numba_ddtree.tree_attention.outputs import natural_log_sum

READ_SLOT, WRITE_SLOT, WRITE_OUT = 1, 2, 4


@device_routine
def settle_row(
    row: Any,
    slot_row: Any,
    split: Any,
    splits: Any,
    is_folded: Any,
    maximum: Any,
    total: Any,
    rounded: Any,
    partial_sums: Any,
    lse: Any,
) -> Any:
    """Settle row `row` of all rows after split number `split` of its `splits`, by a thread.

    `total` is the sum of its exponentials, and `rounded` that of those that were multiplied with.

    Writes its log-sum-exp, or its maximum and sum to row `slot_row` of partial results. Returns the weights
    of what the slot holds and of the item's own outputs, what the sum of both is multiplied by (float32), and
    what is to be done, in bits (int32): nothing for a row that has no such split.
    """
    kept, added, factor, to_do = float32(0), float32(1), float32(1), int32(0)
    place = int64(int64(SUMS) * int64(slot_row))
    if split == 0 and is_folded == 0 and slot_row >= 0:
        store_flat(partial_sums, place + int64(3), float32(splits))
    if split >= splits:
        return kept, added, factor, to_do
    if is_folded != 0 and split > 0:
        maximum, kept, added = fold_weights(load_flat(partial_sums, place), maximum)
        total = folded(kept, load_flat(partial_sums, place + int64(1)), added, total)
        rounded = folded(kept, load_flat(partial_sums, place + int64(2)), added, rounded)
        to_do = int32(READ_SLOT)
    if splits == 1 or (is_folded != 0 and split == splits - int32(1)):
        to_do = int32(to_do | int32(WRITE_OUT))
        factor = fold_normaliser(rounded)
        store_flat(lse, int64(row), natural_log_sum(maximum, total))
    else:
        to_do = int32(to_do | int32(WRITE_SLOT))
        store_flat(partial_sums, place, maximum)
        store_flat(partial_sums, place + int64(1), total)
        store_flat(partial_sums, place + int64(2), rounded)
    return kept, added, factor, to_do
