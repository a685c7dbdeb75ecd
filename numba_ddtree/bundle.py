"""KDTR bundles: named tensors and metadata in one small binary file.

References, kernels and programs in other languages exchange their inputs and results in this format. It
can be mapped into memory and used without copying, its header is protected by a checksum, and one table
describes all of it.

All integers are little-endian. ``align(x)`` rounds x up to a multiple of 64. A file is made of a header,
padded to a multiple of 64 bytes, and of the tensors' payloads in the order of their records.

==================  ===============  =================================================================
offset              size             content
==================  ===============  =================================================================
0                   4                magic, the bytes ``KDTR``
4                   4                uint32 version, 1
8                   4                uint32 CRC-32 (as in zlib, PNG) of the bytes 12 to header_bytes - 1
12                  4                uint32 tensor_count, at most 65536
16                  8                uint64 file_bytes, the size of the whole file
24                  4                uint32 names_bytes, the sum of the lengths of the names
28                  4                uint32 metadata_bytes, at most 1048576
32                  32               reserved, zero
64                  96 count         one record a tensor (count = tensor_count), see below
64 + 96 count       names_bytes      the names in UTF-8, back to back, in the order of the records
… + names_bytes     metadata_bytes   the metadata: one JSON object in UTF-8
… + metadata_bytes  0 to 63          zeros up to header_bytes = align(64 + 96 count + names + metadata)
header_bytes        …                payloads, each followed by zeros up to a multiple of 64
==================  ===============  =================================================================

A record:

======  ====  =============================================================================
offset  size  content
======  ====  =============================================================================
0       4     uint32 length of the name in bytes, 1 to 1024
4       4     uint32 dtype code, see below
8       4     uint32 ndim, 0 to 8
12      4     reserved, zero
16      8     uint64 offset of the payload from the start of the file, a multiple of 64
24      8     uint64 length of the payload in bytes, without its padding
32      64    8 x int64 shape, outermost dimension first; entries from ndim on are zero
======  ====  =============================================================================

Dtype codes: 1 bool (a byte, 0 or 1), 2 int8, 3 int16, 4 int32, 5 int64, 6 uint8, 7 uint16, 8 uint32,
9 uint64, 10 float16, 11 float32, 12 float64 (IEEE 754), 13 bfloat16 (the upper half of a float32; numpy
has no such type, so here its bits are a uint16 array).

Further rules, each of which the reader enforces:

- Payloads are packed. The first starts at header_bytes, each next one at align(offset + length) of the one
  before, and file_bytes is align(offset + length) of the last (header_bytes without tensors). Payloads
  therefore neither overlap nor leave gaps, and nothing follows them.
- A payload is the elements in C order. Its length is the product of the shape times the size of an
  element, and is 0 if a dimension is 0; the product of the non-zero dimensions times that size is at most
  2**63 - 1 in any case.
- Names are unique and have no control characters (U+0000 to U+001F, U+007F to U+009F). ``/`` groups them
  by convention.
- Numbers in the metadata are finite. What there is to say about one tensor goes there too, by its name.

A bundle is read with as much trust as its header's checksum gives: payloads are not covered by it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import stat
import struct
import unicodedata
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from numba_ddtree.errors import BundleError

__all__ = ["JSON", "Bundle", "atomic_file", "read_bundle", "write_bundle"]

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""A value that JSON can hold."""

MAGIC = b"KDTR"
VERSION = 1
ALIGNMENT = 64
MAX_NDIM = 8
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_METADATA_BYTES = 1 << 20
MAX_TENSOR_BYTES = (1 << 63) - 1

DTYPE_CODES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 13,
}
_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}

_HEADER = struct.Struct("<4sIIIQII32s")
_RECORD = struct.Struct(f"<IIIIQQ{MAX_NDIM}q")
_CHECKSUM_START = 12


@dataclass(frozen=True, eq=False)
class Bundle:
    """What a KDTR file holds.

    Attributes
    ----------
    tensors : dict of str to numpy.ndarray
        The tensors in the order of the file, all read-only.
    metadata : dict
        The metadata.
    bfloat16 : frozenset of str
        Names of the tensors whose uint16 elements are the bits of bfloat16 numbers.
    """

    tensors: dict[str, np.ndarray[Any, Any]]
    metadata: dict[str, JSON]
    bfloat16: frozenset[str]

    def dtype_name(self, name: str) -> str:
        """Name of a tensor's element type in the file.

        Parameters
        ----------
        name : str
            The tensor's name.

        Returns
        -------
        str
            A numpy dtype name, or ``"bfloat16"``.
        """
        return "bfloat16" if name in self.bfloat16 else self.tensors[name].dtype.name


class _Record(NamedTuple):
    """One tensor's entry in the header, with its name."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        return _storage_dtype(self.dtype_name)

    @property
    def padded_end(self) -> int:
        return _align(self.offset + self.nbytes)


class _Sizes(NamedTuple):
    """The numbers at the start of a header, from which every other position follows."""

    tensor_count: int
    file_bytes: int
    names_bytes: int
    metadata_bytes: int

    @property
    def names_start(self) -> int:
        return _HEADER.size + _RECORD.size * self.tensor_count

    @property
    def metadata_start(self) -> int:
        return self.names_start + self.names_bytes

    @property
    def metadata_end(self) -> int:
        return self.metadata_start + self.metadata_bytes

    @property
    def header_bytes(self) -> int:
        return _align(self.metadata_end)


def write_bundle(
    path: str | os.PathLike[str],
    tensors: Mapping[str, ArrayLike],
    metadata: Mapping[str, JSON] | None = None,
    *,
    bfloat16: Collection[str] = (),
) -> None:
    """Write a KDTR file.

    The file appears at once and whole, or not at all. Equal input gives equal bytes.

    Parameters
    ----------
    path : path-like
        Where to write. A file that is there is replaced; mappings of it keep their contents.
    tensors : mapping of str to array_like
        The tensors, written in this order. Any byte order and strides; stored little-endian, in C order.
    metadata : mapping, optional
        A JSON object: string keys, lists rather than tuples, finite numbers.
    bfloat16 : collection of str, optional
        Names of the uint16 tensors that are bits of bfloat16 numbers, to be marked as such.

    Raises
    ------
    BundleError
        If the input does not fit the format: an unsupported dtype, more than 8 dimensions, a bad name,
        metadata that is not JSON, or a `path` that is something else than a file.
    OSError
        If the file cannot be written.
    """
    arrays = {name: _as_stored(name, value) for name, value in tensors.items()}
    header = _encode_header(arrays, _encode_metadata({} if metadata is None else metadata), bfloat16)
    with atomic_file(path) as file:
        file.write(header)
        for array in arrays.values():
            file.write(array.data)
            file.write(_padding(array.nbytes))


def read_bundle(path: str | os.PathLike[str], *, map_payloads: bool = True) -> Bundle:
    """Read a KDTR file.

    Parameters
    ----------
    path : path-like
        The file.
    map_payloads : bool, optional
        Let the tensors be views of the mapped file (the default), or copies of their own. A mapped file
        must not be cut short while its tensors are in use; `write_bundle` replaces files and never does.

    Returns
    -------
    Bundle
        The tensors, read-only, and the metadata.

    Raises
    ------
    BundleError
        If the file breaks any rule of the format.
    OSError
        If the file cannot be opened or mapped; FileNotFoundError if there is none.
    """
    try:
        buffer = _map_file(path)
        sizes = _decode_sizes(buffer)
        header = buffer[: sizes.header_bytes]
        _check_checksum(header)
        records = _decode_records(header, sizes)
        metadata = _decode_metadata(header[sizes.metadata_start : sizes.metadata_end])
        _check_zeros(header[sizes.metadata_end :], "the padding after the metadata")
        _check_packing(buffer, records, sizes)
        tensors = {record.name: _view(buffer, record) for record in records}
        if not map_payloads:
            tensors = {name: _read_only_copy(name, tensor) for name, tensor in tensors.items()}
    except BundleError as error:
        raise BundleError(f"{os.fspath(path)}: {error}") from None
    bfloat16 = frozenset(record.name for record in records if record.dtype_name == "bfloat16")
    return Bundle(tensors, metadata, bfloat16)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes its name only once it is complete.

    Parameters
    ----------
    path : path-like
        Where the file shall be. A symbolic link is followed.

    Yields
    ------
    BinaryIO
        A new file in the same folder. At the end of the block it replaces `path`; if the block raises, it is
        removed and what was at `path` stays.

    Raises
    ------
    BundleError
        If something is at `path` that is not a regular file, or `path` is a folder's name.
    OSError
        If the file cannot be written; it names `path`.
    """
    name = os.fsdecode(path)
    target = Path(os.path.realpath(name))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # os.replace would put a file in the place of a device node just as readily.
        if not os.path.basename(name) or (target.exists() and not target.is_file()):
            raise BundleError(f"{name or repr(name)}: not a regular file; expected a file or nothing there")
        # Not from tempfile, whose files only their owner may read.
        file = open(temporary, "xb")  # noqa: SIM115
        try:
            with file:
                yield file
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink()
            raise
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(target), str(temporary)):
            raise
        # Of a file that the caller knows by another name, or of writing, which names none.
        raise OSError(error.errno, error.strerror, name) from error


def _align(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _padding(nbytes: int) -> bytes:
    return bytes(_align(nbytes) - nbytes)


def _storage_dtype(dtype_name: str) -> np.dtype[Any]:
    dtype = np.dtype("uint16" if dtype_name == "bfloat16" else dtype_name)
    # By way of the string, since newbyteorder marks even the machine's own order as a foreign one.
    return np.dtype(dtype.newbyteorder("<").str)


def _as_stored(name: str, value: ArrayLike) -> np.ndarray[Any, Any]:
    """Convert a tensor to the elements and the order that the file holds."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise BundleError(f"tensor {name!r}: not convertible to an array: {error}") from error
    if array.dtype.name not in DTYPE_CODES:
        supported = ", ".join(DTYPE_CODES)
        raise BundleError(
            f"tensor {name!r}: dtype {array.dtype} is not supported; expected one of {supported}"
        )
    if array.dtype.name == "bfloat16":
        raise BundleError(
            f"tensor {name!r}: dtype bfloat16; expected its bits as uint16 and its name in bfloat16="
        )
    if array.dtype == np.bool_:
        # A view of other bytes may hold truth values above 1, which the format has not.
        array = array.view(np.uint8) != 0
    return np.asarray(array, dtype=_storage_dtype(array.dtype.name), order="C")


def _encode_header(
    arrays: Mapping[str, np.ndarray[Any, Any]], metadata: bytes, bfloat16: Collection[str]
) -> bytes:
    names = [_encode_name(name) for name in arrays]
    dtype_names = _dtype_names(arrays, bfloat16)
    if len(arrays) > MAX_TENSORS:
        raise BundleError(f"{len(arrays)} tensors; expected at most {MAX_TENSORS}")
    sizes = _Sizes(len(arrays), 0, sum(map(len, names)), len(metadata))
    offset = sizes.header_bytes
    encoded_records = []
    for encoded_name, (name, array) in zip(names, arrays.items(), strict=True):
        record = _Record(name, dtype_names[name], array.shape, offset, array.nbytes)
        encoded_records.append(_encode_record(record, len(encoded_name)))
        offset = record.padded_end
    sizes = sizes._replace(file_bytes=offset)
    checked = b"".join(
        [_HEADER.pack(MAGIC, VERSION, 0, *sizes, b"")[_CHECKSUM_START:], *encoded_records, *names, metadata]
    )
    checked += _padding(sizes.metadata_end)
    return struct.pack("<4sII", MAGIC, VERSION, zlib.crc32(checked)) + checked


def _dtype_names(arrays: Mapping[str, np.ndarray[Any, Any]], bfloat16: Collection[str]) -> dict[str, str]:
    dtype_names = {name: array.dtype.name for name, array in arrays.items()}
    for name in bfloat16:
        found = dtype_names.get(name, "no such tensor")
        if found != "uint16":
            raise BundleError(f"bfloat16= names {name!r}: {found}; expected a uint16 tensor")
    return dtype_names | dict.fromkeys(bfloat16, "bfloat16")


def _encode_record(record: _Record, name_bytes: int) -> bytes:
    ndim = len(record.shape)
    if ndim > MAX_NDIM:
        raise BundleError(f"tensor {record.name!r}: {ndim} dimensions; expected at most {MAX_NDIM}")
    _payload_bytes(record.name, record.shape, record.storage_dtype.itemsize)
    unused_dimensions = (0,) * (MAX_NDIM - ndim)
    return _RECORD.pack(
        name_bytes,
        DTYPE_CODES[record.dtype_name],
        ndim,
        0,
        record.offset,
        record.nbytes,
        *record.shape,
        *unused_dimensions,
    )


def _encode_name(name: str) -> bytes:
    if not isinstance(name, str):
        raise BundleError(f"tensor name {name!r}: a {type(name).__name__}; expected a str")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise BundleError(f"tensor name {name!r}: not encodable in UTF-8: {error.reason}") from error
    _check_name(name, len(encoded))
    return encoded


def _check_name(name: str, name_bytes: int) -> None:
    if not 1 <= name_bytes <= MAX_NAME_BYTES:
        raise BundleError(
            f"tensor name {name[:40]!r}: {name_bytes} bytes in UTF-8; expected 1 to {MAX_NAME_BYTES}"
        )
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise BundleError(f"tensor name {name!r}: has a control character; expected none")


def _encode_metadata(metadata: Mapping[str, JSON]) -> bytes:
    if not isinstance(metadata, Mapping):
        raise BundleError(f"metadata: a {type(metadata).__name__}; expected a mapping")
    given = dict(metadata)
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        encoded = text.encode()
        # json.dumps turns keys into strings and tuples into lists without a word.
        unchanged = json.loads(text) == given
    except (TypeError, ValueError, RecursionError) as error:
        raise BundleError(f"metadata: not JSON: {error}") from error
    if not unchanged:
        raise BundleError("metadata: would read back changed; expected string keys, and lists for tuples")
    if len(encoded) > MAX_METADATA_BYTES:
        raise BundleError(f"metadata: {len(encoded)} bytes as JSON; expected at most {MAX_METADATA_BYTES}")
    return encoded


def _map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise BundleError("not a regular file; expected a KDTR bundle")
    with open(path, "rb") as file:
        start = file.read(_HEADER.size)
        if start[: len(MAGIC)] != MAGIC:
            raise BundleError(f"wrong magic {start[: len(MAGIC)]!r} at byte 0; expected {MAGIC!r}")
        if len(start) < _HEADER.size:
            raise BundleError(
                f"truncated header: the file has {len(start)} bytes; expected at least {_HEADER.size}"
            )
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _decode_sizes(buffer: mmap.mmap) -> _Sizes:
    """Read the numbers at the start and check that what they describe lies within the file."""
    _magic, version, _checksum, *numbers, reserved = _HEADER.unpack_from(buffer)
    sizes = _Sizes(*numbers)
    if version != VERSION:
        raise BundleError(f"unknown version {version} at byte 4; expected {VERSION}")
    _check_zeros(reserved, "the reserved bytes 32 .. 64 of the header")
    if sizes.tensor_count > MAX_TENSORS:
        raise BundleError(f"{sizes.tensor_count} tensors at byte 12; expected at most {MAX_TENSORS}")
    if sizes.metadata_bytes > MAX_METADATA_BYTES:
        raise BundleError(
            f"{sizes.metadata_bytes} bytes of metadata at byte 28; expected at most {MAX_METADATA_BYTES}"
        )
    if sizes.header_bytes > len(buffer):
        raise BundleError(
            f"truncated header: the file has {len(buffer)} bytes; "
            f"expected {sizes.header_bytes} for {sizes.tensor_count} tensors"
        )
    if len(buffer) != sizes.file_bytes:
        fault = "truncated payload" if len(buffer) < sizes.file_bytes else "trailing bytes"
        raise BundleError(f"{fault}: the file has {len(buffer)} bytes; expected {sizes.file_bytes}")
    return sizes


def _check_checksum(header: bytes) -> None:
    (stored,) = struct.unpack_from("<I", header, 8)
    computed = zlib.crc32(memoryview(header)[_CHECKSUM_START:])
    if stored != computed:
        raise BundleError(f"header checksum {stored:#010x} at byte 8; expected {computed:#010x}")


def _check_zeros(data: bytes, where: str) -> None:
    if any(data):
        raise BundleError(f"non-zero byte in {where}; expected zeros")


def _decode_records(header: bytes, sizes: _Sizes) -> list[_Record]:
    records = []
    seen: set[str] = set()
    name_start = sizes.names_start
    for index in range(sizes.tensor_count):
        fields = _RECORD.unpack_from(header, _HEADER.size + _RECORD.size * index)
        name_end = name_start + fields[0]
        if name_end > sizes.metadata_start:
            raise BundleError(
                f"record {index}: a name of {fields[0]} bytes; "
                f"expected at most the {sizes.metadata_start - name_start} that are left of the names"
            )
        name = _decode_name(header[name_start:name_end], index)
        if name in seen:
            raise BundleError(f"record {index}: duplicate name {name!r}; expected unique names")
        seen.add(name)
        records.append(_decode_record(name, fields))
        name_start = name_end
    if name_start != sizes.metadata_start:
        raise BundleError(
            f"names: {sizes.metadata_start - name_start} bytes belong to no record; expected none"
        )
    return records


def _decode_name(encoded: bytes, index: int) -> str:
    try:
        name = encoded.decode()
    except UnicodeDecodeError as error:
        raise BundleError(
            f"record {index}: name {encoded[:40]!r} is invalid UTF-8 at byte {error.start}"
        ) from error
    _check_name(name, len(encoded))
    return name


def _decode_record(name: str, fields: tuple[int, ...]) -> _Record:
    _name_bytes, code, ndim, reserved, offset, nbytes, *dimensions = fields
    where = f"tensor {name!r}"
    if code not in _DTYPE_NAMES:
        raise BundleError(f"{where}: unknown dtype code {code}; expected 1 to {max(_DTYPE_NAMES)}")
    if ndim > MAX_NDIM:
        raise BundleError(f"{where}: {ndim} dimensions; expected at most {MAX_NDIM}")
    if reserved or any(dimensions[ndim:]):
        raise BundleError(f"{where}: non-zero reserved field in its record; expected zeros")
    record = _Record(name, _DTYPE_NAMES[code], tuple(dimensions[:ndim]), offset, nbytes)
    expected_bytes = _payload_bytes(name, record.shape, record.storage_dtype.itemsize)
    if nbytes != expected_bytes:
        raise BundleError(
            f"{where}: a payload of {nbytes} bytes; "
            f"expected {expected_bytes} for {record.dtype_name} of shape {record.shape}"
        )
    return record


def _payload_bytes(name: str, shape: tuple[int, ...], itemsize: int) -> int:
    if any(dimension < 0 for dimension in shape):
        raise BundleError(f"tensor {name!r}: negative dimension in shape {shape}; expected none")
    # Strides, which zero dimensions leave out, have to be representable for empty tensors too.
    if math.prod(dimension for dimension in shape if dimension) * itemsize > MAX_TENSOR_BYTES:
        raise BundleError(f"tensor {name!r}: shape {shape} overflows; expected at most 2**63 - 1 bytes")
    return math.prod(shape) * itemsize


def _check_packing(buffer: mmap.mmap, records: list[_Record], sizes: _Sizes) -> None:
    """Check that the payloads fill the file from the end of the header, each after the one before."""
    position = sizes.header_bytes
    for record in records:
        where = f"tensor {record.name!r}"
        if record.offset % ALIGNMENT:
            raise BundleError(
                f"{where}: misaligned payload at byte {record.offset}; expected a multiple of {ALIGNMENT}"
            )
        if record.offset != position:
            fault = "overlaps what is before it" if record.offset < position else "leaves a gap before it"
            raise BundleError(f"{where}: payload at byte {record.offset} {fault}; expected {position}")
        if record.padded_end > sizes.file_bytes:
            raise BundleError(
                f"{where}: payload ends at byte {record.padded_end} with its padding; "
                f"expected at most the file's {sizes.file_bytes}"
            )
        _check_zeros(buffer[record.offset + record.nbytes : record.padded_end], f"the padding after {where}")
        position = record.padded_end
    if position != sizes.file_bytes:
        raise BundleError(f"trailing bytes: the payloads end at byte {position}; expected {sizes.file_bytes}")


def _decode_metadata(encoded: bytes) -> dict[str, JSON]:
    try:
        # `Infinity` and `1e999` alike reach the hooks as text.
        metadata = json.loads(encoded.decode(), parse_constant=_finite_float, parse_float=_finite_float)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"metadata: not JSON in UTF-8: {error}") from error
    if not isinstance(metadata, dict):
        raise BundleError(f"metadata: a JSON {type(metadata).__name__}; expected an object")
    return cast("dict[str, JSON]", metadata)


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _view(buffer: mmap.mmap, record: _Record) -> np.ndarray[Any, Any]:
    tensor: np.ndarray[Any, Any] = np.ndarray(
        record.shape, record.storage_dtype, buffer=buffer, offset=record.offset
    )
    if record.dtype_name == "bool" and tensor.view(np.uint8).max(initial=0) > 1:
        raise BundleError(f"tensor {record.name!r}: a bool that is neither 0 nor 1")
    return tensor


def _read_only_copy(name: str, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    try:
        copy = tensor.copy()
    except MemoryError as error:
        raise BundleError(f"tensor {name!r}: no memory for a copy of {tensor.nbytes} bytes") from error
    copy.flags.writeable = False
    return copy
