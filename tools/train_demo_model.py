"""Train the demo model and its drafter on the source of Python's standard library.

    python tools/train_demo_model.py FOLDER            # some five minutes on one H200
    python tools/train_demo_model.py FOLDER --tiny     # seconds on a CPU

FOLDER gets demo_model.safetensors (bfloat16), demo_model.md (the model card) and demo_prompts.json. Needs
the extra `train`. Deterministic given the seed, on one kind of device and one version of torch and Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when cuBLAS starts
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from numba_ddtree.bundle import atomic_file
from numba_ddtree.command import OneLineParser, run_command, whole_number
from numba_ddtree.errors import ArgumentError, DDTreeError

MAX_SEED = 2**63 - 1 - 3  # three more are counted from it


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write the files, and return the exit code."""
    faults = (DDTreeError, ImportError, OSError)
    return run_command("train_demo_model.py", lambda: _run(_parse(arguments)), faults)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="train_demo_model.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--tiny", action="store_true", help="train for seconds, to test this script")
    parser.add_argument("--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="(default: 0)")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    try:  # here, so that a wrong option is told without torch, too
        import torch

        from tools.demo_training.settings import TINY, Settings
        from tools.demo_training.training import train
    except ImportError as error:
        advice = "install it with the extra train: pip install 'numba_ddtree[train]'"
        raise ImportError(f"training needs torch ({error}); {advice}") from error
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            "FOLDER", f"{options.folder} ({error.strerror})", "a folder, or a new one's name"
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass is not deterministic
    files = train(TINY if options.tiny else Settings(), device, options.seed)
    for name, content in files.items():
        with atomic_file(options.folder / name) as file:
            file.write(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
