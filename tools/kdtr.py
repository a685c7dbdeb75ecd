"""Look into KDTR bundles, and convert them from and to NumPy's ``.npz``."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from numba_ddtree.bundle import JSON, Bundle, atomic_file, read_bundle, write_bundle
from numba_ddtree.command import OneLineParser, run_command
from numba_ddtree.errors import BundleError
from numba_ddtree.reporting import PipeConsole

_EXAMPLES = """\
examples:
  kdtr.py list trees.kdtr
  kdtr.py list trees.kdtr --json | jq '.tensors[].name'
  kdtr.py extract trees.kdtr out.npz --name case/parents case/depths
  kdtr.py pack arrays.npz trees.kdtr --metadata '{"source": "a run"}'

exit codes: 0 done; 2 wrong usage, or a file that is missing, malformed or cannot be written; 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; by default that of the process.

    Returns
    -------
    int
        The exit code, as ``--help`` lists them.
    """

    def run() -> int:
        options = _parser().parse_args(arguments)
        options.run(options)
        return 0

    return run_command("kdtr", run, (BundleError, OSError))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="kdtr.py",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    lister = commands.add_parser(
        "list", help="show what a bundle holds", description="Show a bundle's tensors and metadata."
    )
    lister.add_argument("file", type=Path, metavar="FILE", help="the bundle")
    lister.add_argument("--json", action="store_true", help="as one JSON object instead of a table")
    lister.set_defaults(run=_list)

    extractor = commands.add_parser(
        "extract",
        help="write tensors to an .npz",
        description="Write a bundle's tensors to a compressed .npz file. It has no place for the metadata, "
        "and bfloat16 tensors become their bits, as uint16.",
    )
    extractor.add_argument("file", type=Path, metavar="FILE", help="the bundle")
    extractor.add_argument("output", type=Path, metavar="OUT.npz", help="where to write")
    extractor.add_argument(
        "--name", nargs="+", action="extend", metavar="N", help="only these tensors (default: all)"
    )
    extractor.set_defaults(run=_extract)

    packer = commands.add_parser(
        "pack", help="make a bundle of an .npz", description="Make a bundle of the arrays of an .npz file."
    )
    packer.add_argument("file", type=Path, metavar="IN.npz", help="the arrays; pickled objects are refused")
    packer.add_argument("output", type=Path, metavar="OUT.kdtr", help="where to write")
    packer.add_argument(
        "--metadata",
        type=_json_object,
        default={},
        metavar="JSON",
        help="a JSON object to keep in the bundle",
    )
    packer.add_argument(
        "--bfloat16",
        nargs="+",
        action="extend",
        default=[],
        metavar="N",
        help="mark these uint16 arrays as the bits of bfloat16 numbers",
    )
    packer.set_defaults(run=_pack)
    return parser


def _json_object(text: str) -> dict[str, JSON]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON {type(value).__name__}; expected an object")
    return value


def _list(options: argparse.Namespace) -> None:
    bundle = read_bundle(options.file)
    if options.json:
        print(json.dumps(_description(bundle), indent=2))
        return
    PipeConsole().print(_table(bundle))
    # Escaped to ASCII, since a JSON string can hold what the terminal's encoding has not.
    print("metadata:", json.dumps(bundle.metadata, indent=2))


def _description(bundle: Bundle) -> dict[str, JSON]:
    tensors: list[JSON] = [
        {
            "name": name,
            "dtype": bundle.dtype_name(name),
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
        }
        for name, tensor in bundle.tensors.items()
    ]
    return {"metadata": bundle.metadata, "tensors": tensors}


def _table(bundle: Bundle) -> Table:
    table = Table()
    for heading in ("name", "dtype", "shape"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right", overflow="fold")
    for name, tensor in bundle.tensors.items():
        # Text, since a plain string's square brackets would be read as markup.
        table.add_row(
            Text(name),
            bundle.dtype_name(name),
            Text(str(tensor.shape)),
            f"{tensor.nbytes:,}",
        )
    total = sum(tensor.nbytes for tensor in bundle.tensors.values())
    table.caption = f"{len(bundle.tensors)} tensors, {total:,} bytes"
    return table


def _extract(options: argparse.Namespace) -> None:
    tensors = read_bundle(options.file).tensors
    names = tensors if options.name is None else dict.fromkeys(options.name)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise BundleError(f"{options.file}: no tensor {missing[0]!r}")
    _write_npz(options.output, {name: tensors[name] for name in names})


def _write_npz(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write an .npz file, at once and whole.

    `numpy.savez` takes the names as keyword arguments and so cannot write a tensor called ``file``.
    """
    for name in tensors:
        if f"{name}.npy" in tensors:
            raise BundleError(f"{path}: an .npz cannot tell tensors {name!r} and '{name}.npy' apart")
    with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, tensor in tensors.items():
            # A ZipInfo made from the name alone has a fixed date, which keeps equal output equal.
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, tensor, allow_pickle=False)


def _pack(options: argparse.Namespace) -> None:
    write_bundle(options.output, _read_npz(options.file), options.metadata, bfloat16=options.bfloat16)


def _read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            arrays = {name.removesuffix(".npy"): _read_member(archive, name) for name in archive.namelist()}
            if len(arrays) != len(archive.namelist()):
                raise ValueError("two arrays have the same name")
            return arrays
    except OSError:
        raise
    # A damaged archive makes zipfile, zlib and numpy raise exceptions of no documented, closed set.
    except Exception as error:
        raise BundleError(f"{path}: not a readable .npz: {error}") from error


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray[Any, Any]:
    with archive.open(name) as stream:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(stream, allow_pickle=False)
    return array


if __name__ == "__main__":
    sys.exit(main())
