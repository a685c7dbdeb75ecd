"""Tree attention on tensor cores by `mma.sync`, for every GPU since Ampere.

Two kernels do it, by the shared memory that a block of threads may have: `whole_blocks`, and `block_pieces`
where that does not fit. Both take items of query rows, nodes times heads of one request, against one split of
their keys, and go through blocks of 64 keys in the order of `key_blocks`. In a block that was gathered, only
rows of the nodes that share it take part: for the others the maximum stays, the scale is 1 and probabilities
are 0.

Everything is done by the same instructions in the same order for every block, wherever its keys come from,
and by both kernels, so that a row's result has the same bits whatever else is in its tile and whichever
kernel ran: whether a key is in the tree or, without one, in the prefix.
"""

from __future__ import annotations

from typing import Any

from numba_ddtree.devices import multiprocessors, shared_memory_limit
from numba_ddtree.errors import BackendError
from numba_ddtree.transfer import Transfer
from numba_ddtree.tree_attention import block_pieces, whole_blocks
from numba_ddtree.tree_attention.kernel_arguments import kernel_arguments
from numba_ddtree.tree_attention.shares import share_arguments
from numba_ddtree.tree_attention.split_merge import launch_merge
from numba_ddtree.tree_attention.work import SplitPlan, Work


def module_for(limit: int) -> Any:
    """Return the module of the kernel for blocks that may have so many bytes of shared memory."""
    for module in (whole_blocks, block_pieces):
        if limit >= module.SHARED_BYTES:
            return module
    raise BackendError(
        f"tree attention on tensor cores needs {block_pieces.SHARED_BYTES} bytes of shared memory a block, "
        f"and this device has {limit}"
    )


def launch_tensor_cores(transfer: Transfer, work: Work, splits: SplitPlan) -> None:
    """Launch the kernel, and the merge of what it leaves unmerged."""
    share = share_arguments(splits, multiprocessors())
    blocks = int(share[0])
    module = module_for(shared_memory_limit())
    transfer.launch(
        module.KERNELS[work.dtype.name],
        blocks,
        *kernel_arguments(work, splits, share),
        shared_bytes=module.SHARED_BYTES,
    )
    launch_merge(transfer, work, splits, blocks, module.PARTS)
