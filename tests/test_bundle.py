"""The KDTR format: what is written reads back, and whatever breaks a rule is refused."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import GOLDEN_TREES_PATH, GoldenTree, load_golden_trees
from numba_ddtree.bundle import DTYPE_CODES, JSON, Bundle, atomic_file, read_bundle, write_bundle
from numba_ddtree.errors import BundleError

NUMPY_DTYPES = [name for name in DTYPE_CODES if name != "bfloat16"]

# Positions of fields, as documented.
VERSION, CHECKSUM, TENSOR_COUNT, FILE_BYTES, NAMES_BYTES, METADATA_BYTES, RESERVED = 4, 8, 12, 16, 24, 28, 32
RECORDS, RECORD_BYTES = 64, 96
NAME_LENGTH, DTYPE, NDIM, RECORD_RESERVED, OFFSET, NBYTES, SHAPE = 0, 4, 8, 12, 16, 24, 32
BEYOND_FILE = 1 << 40


def sample_tensors() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bb": np.array([True, False, True]),
        "c": np.arange(20, dtype=np.int64),
    }


def header_bytes(content: bytes) -> int:
    count, _, names, metadata = struct.unpack_from("<IQII", content, TENSOR_COUNT)
    unpadded: int = RECORDS + RECORD_BYTES * count + names + metadata
    return -(-unpadded // 64) * 64


def with_checksum(content: bytes) -> bytes:
    """Make the header's checksum right again, so that the reader gets to see what it covers."""
    checksum = zlib.crc32(content[TENSOR_COUNT : header_bytes(content)])
    return content[:CHECKSUM] + struct.pack("<I", checksum) + content[CHECKSUM + 4 :]


def patched(content: bytes, position: int, field: str, value: int) -> bytes:
    changed = bytearray(content)
    struct.pack_into("<" + field, changed, position, value)
    return with_checksum(bytes(changed))


def record_field(index: int, field: int) -> int:
    return RECORDS + RECORD_BYTES * index + field


def assert_same_tensors(bundle: Bundle, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert list(bundle.tensors) == list(expected)
    for name, tensor in bundle.tensors.items():
        assert tensor.shape == expected[name].shape
        assert tensor.dtype == expected[name].dtype.newbyteorder("=")
        # As bytes, so that NaNs and signed zeros count.
        assert tensor.tobytes() == expected[name].astype(tensor.dtype).tobytes()
        assert not tensor.flags.writeable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bundle.kdtr"


@pytest.fixture
def content(path: Path) -> bytes:
    """Return a small bundle's bytes."""
    write_bundle(path, sample_tensors(), {"k": 1})
    return path.read_bytes()


@pytest.fixture
def read_bytes(tmp_path: Path) -> Callable[[bytes], Bundle]:
    target = tmp_path / "given.kdtr"

    def read(data: bytes) -> Bundle:
        target.write_bytes(data)
        return read_bundle(target)

    return read


class TestRoundTrip:
    @pytest.mark.parametrize("map_payloads", [True, False])
    @pytest.mark.parametrize("dtype", NUMPY_DTYPES)
    def test_dtype(self, path: Path, dtype: str, map_payloads: bool) -> None:
        tensors = {"x": np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)}
        write_bundle(path, tensors)
        bundle = read_bundle(path, map_payloads=map_payloads)
        assert_same_tensors(bundle, tensors)
        assert bundle.dtype_name("x") == dtype

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1 << 40, 0), (1,) * 8])
    def test_shape(self, path: Path, shape: tuple[int, ...]) -> None:
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "before": np.ones(1),
            "x": np.zeros(shape, np.int16),
            "after": np.ones(1),
        }
        write_bundle(path, tensors)
        assert_same_tensors(read_bundle(path), tensors)
        assert_same_tensors(read_bundle(path, map_payloads=False), tensors)

    def test_only_empty_tensors(self, path: Path) -> None:
        tensors = {"x": np.zeros((0, 5)), "y": np.zeros(0, np.bool_)}
        write_bundle(path, tensors)
        assert_same_tensors(read_bundle(path), tensors)

    def test_nothing(self, path: Path) -> None:
        write_bundle(path, {})
        bundle = read_bundle(path)
        assert bundle.tensors == {}
        assert bundle.metadata == {}

    def test_foreign_byte_order_and_strides(self, path: Path) -> None:
        base = np.arange(24, dtype=">i4").reshape(4, 6)
        tensors = {"big": base, "transposed": base.T, "strided": base[::-2, 1::3]}
        write_bundle(path, tensors)
        bundle = read_bundle(path)
        assert_same_tensors(bundle, tensors)
        assert all(repr(tensor.dtype) == "dtype('int32')" for tensor in bundle.tensors.values())

    def test_array_likes(self, path: Path) -> None:
        write_bundle(path, {"scalar": 3, "list": [[1.5, 2.5]]})
        bundle = read_bundle(path)
        assert bundle.tensors["scalar"] == 3
        assert bundle.tensors["list"].tolist() == [[1.5, 2.5]]

    def test_bool_is_stored_as_zero_or_one(self, path: Path) -> None:
        write_bundle(path, {"x": np.array([0, 1, 2, 255], np.uint8).view(np.bool_)})
        assert read_bundle(path).tensors["x"].view(np.uint8).tolist() == [0, 1, 1, 1]

    def test_bfloat16_bits(self, path: Path) -> None:
        bits = np.array([0x3F80, 0xFF80], np.uint16)
        write_bundle(path, {"half": bits, "plain": bits}, bfloat16=["half"])
        bundle = read_bundle(path)
        assert bundle.bfloat16 == {"half"}
        assert bundle.dtype_name("half") == "bfloat16"
        assert bundle.dtype_name("plain") == "uint16"
        np.testing.assert_array_equal(bundle.tensors["half"], bits)

    def test_names_and_metadata_in_unicode(self, path: Path) -> None:
        metadata: dict[str, JSON] = {"ключ": ["é", None, {"deep": [1, 2.5, True, -0.0]}], "": 1 << 70}
        write_bundle(path, {"β/ü": 1, "file": 2, "x" * 1024: 3}, metadata)
        bundle = read_bundle(path)
        assert list(bundle.tensors) == ["β/ü", "file", "x" * 1024]
        assert bundle.metadata == metadata

    def test_many_tensors_keep_their_order(self, path: Path) -> None:
        tensors = {f"{index * 7919 % 1000}": np.array(index) for index in range(1000)}
        write_bundle(path, tensors)
        assert_same_tensors(read_bundle(path), tensors)

    @settings(deadline=None, max_examples=100)
    @given(
        tensors=st.dictionaries(
            st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20),
            st.sampled_from(NUMPY_DTYPES).flatmap(
                lambda dtype: hnp.arrays(
                    dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
                )
            ),
            max_size=4,
        ),
        metadata=st.dictionaries(
            st.text(max_size=5),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
                lambda inner: (
                    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
                ),
                max_leaves=5,
            ),
            max_size=3,
        ),
        map_payloads=st.booleans(),
    )
    def test_any(self, tensors: dict[str, Any], metadata: dict[str, Any], map_payloads: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x.kdtr")
            write_bundle(path, tensors, metadata)
            bundle = read_bundle(path, map_payloads=map_payloads)
            assert_same_tensors(bundle, tensors)
            assert bundle.metadata == metadata


class TestMapping:
    def test_views_share_the_mapped_file(self, path: Path) -> None:
        write_bundle(path, {"x": np.arange(1000), "y": np.arange(1000)})
        tensors = read_bundle(path).tensors
        x, y = tensors["x"], tensors["y"]
        assert isinstance(x.base, mmap.mmap)
        assert x.base is y.base
        assert np.shares_memory(x, np.frombuffer(x.base, np.uint8))

    def test_mapped_payloads_are_aligned(self, path: Path) -> None:
        write_bundle(path, {"x": np.arange(3, dtype=np.int8), "y": np.arange(5, dtype=np.int8)})
        assert all(tensor.ctypes.data % 64 == 0 for tensor in read_bundle(path).tensors.values())

    def test_copies_own_their_memory(self, path: Path) -> None:
        write_bundle(path, {"x": np.arange(1000)})
        tensor = read_bundle(path, map_payloads=False).tensors["x"]
        assert tensor.base is None
        assert tensor.flags.owndata
        assert not tensor.flags.writeable

    def test_replacing_the_file_leaves_mappings_alone(self, path: Path) -> None:
        write_bundle(path, {"x": np.arange(1000)})
        tensor = read_bundle(path).tensors["x"]
        write_bundle(path, {"x": np.zeros(1)})
        np.testing.assert_array_equal(tensor, np.arange(1000))


class TestWriting:
    def test_bytes_depend_on_the_input_alone(self, tmp_path: Path) -> None:
        tensors = sample_tensors()
        foreign = {
            name: np.asfortranarray(tensor.astype(tensor.dtype.newbyteorder(">")))
            for name, tensor in tensors.items()
        }
        write_bundle(tmp_path / "1", tensors, {"b": 1, "a": {"y": 1, "x": 2}})
        write_bundle(tmp_path / "2", foreign, {"a": {"x": 2, "y": 1}, "b": 1})
        assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()

    def test_documented_layout(self, path: Path) -> None:
        """Spell a bundle out byte by byte, as a reader in another language would meet it."""
        write_bundle(path, {"ab": np.array([[1, 2, 3]], np.int16), "c": np.array(7, np.uint8)}, {"k": "v"})
        record_ab = struct.pack("<IIIIQQ8q", 2, 3, 2, 0, 320, 6, 1, 3, 0, 0, 0, 0, 0, 0)
        record_c = struct.pack("<IIIIQQ8q", 1, 6, 0, 0, 384, 1, 0, 0, 0, 0, 0, 0, 0, 0)
        sizes = struct.pack("<IQII32x", 2, 448, 3, 9)
        covered = (sizes + record_ab + record_c + b"abc" + b'{"k":"v"}').ljust(320 - 12, b"\0")
        payloads = struct.pack("<3h", 1, 2, 3).ljust(64, b"\0") + b"\7".ljust(64, b"\0")
        expected = b"KDTR" + struct.pack("<II", 1, zlib.crc32(covered)) + covered + payloads
        assert path.read_bytes() == expected

    @pytest.mark.parametrize(
        "value",
        [
            np.array([None]),
            np.zeros(1, [("x", "i4")]),
            np.zeros(1, np.complex64),
            np.array(["text"]),
            np.array([b"bytes"]),
            np.zeros(1, "datetime64[s]"),
            np.zeros(1, np.longdouble),
            1 << 70,
            [[1], [2, 3]],
            object(),
        ],
        ids=lambda value: str(getattr(value, "dtype", type(value).__name__)),
    )
    def test_unsupported_values(self, path: Path, value: Any) -> None:
        with pytest.raises(BundleError, match="tensor 'x'"):
            write_bundle(path, {"x": value})
        assert not path.exists()

    @pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "\x85", "\ud800", "x" * 1025, "é" * 513, 3, None])
    def test_bad_names(self, path: Path, name: Any) -> None:
        with pytest.raises(BundleError, match="tensor name"):
            write_bundle(path, {name: np.zeros(1)})

    @pytest.mark.parametrize(
        "metadata",
        [
            {"k": object()},
            {"k": float("nan")},
            {"k": float("inf")},
            {"k": (1, 2)},
            {1: "k"},
            {"k": {None: 1}},
            {1: 1, "k": 1},
            {"k": b"bytes"},
            {"k": "\ud800"},
            {"k": np.arange(2)},
            {"k": "x" * (1 << 20)},
            [],
            "text",
        ],
        ids=lambda metadata: repr(metadata)[:20],
    )
    def test_metadata_that_is_not_json(self, path: Path, metadata: Any) -> None:
        with pytest.raises(BundleError, match="metadata"):
            write_bundle(path, {}, metadata)

    def test_metadata_that_is_nested_without_end(self, path: Path) -> None:
        metadata: dict[str, Any] = {}
        metadata["self"] = metadata
        with pytest.raises(BundleError, match="metadata"):
            write_bundle(path, {}, metadata)

    def test_too_many_dimensions(self, path: Path) -> None:
        with pytest.raises(BundleError, match="9 dimensions; expected at most 8"):
            write_bundle(path, {"x": np.zeros((1,) * 9)})

    def test_too_many_tensors(self, path: Path) -> None:
        value = np.array(0, np.int8)
        with pytest.raises(BundleError, match="65537 tensors; expected at most 65536"):
            write_bundle(path, dict.fromkeys(map(str, range(65537)), value))

    @pytest.mark.parametrize("names", [["missing"], ["a"]])
    def test_bfloat16_must_name_uint16(self, path: Path, names: list[str]) -> None:
        with pytest.raises(BundleError, match="expected a uint16 tensor"):
            write_bundle(path, {"a": np.zeros(1, np.float32)}, bfloat16=names)

    def test_permissions_are_those_of_an_ordinary_file(self, tmp_path: Path) -> None:
        write_bundle(tmp_path / "bundle", {})
        (tmp_path / "plain").touch()
        assert (tmp_path / "bundle").stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_link_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("target")
        write_bundle(tmp_path / "link", {})
        assert (tmp_path / "link").is_symlink()
        assert read_bundle(tmp_path / "target").tensors == {}

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            write_bundle(tmp_path / "missing" / "x.kdtr", {})

    def test_what_is_no_file_is_not_replaced(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for target in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(BundleError, match="not a regular file"):
                write_bundle(target, {})


class TestAtomicFile:
    def test_failure_keeps_the_old_file_and_leaves_nothing_else(self, tmp_path: Path) -> None:
        target = tmp_path / "x"
        target.write_bytes(b"old")

        def interrupted_write() -> None:
            with atomic_file(target) as file:
                file.write(b"new")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted_write()
        assert target.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [target]

    def test_name_appears_at_the_end(self, tmp_path: Path) -> None:
        target = tmp_path / "x"
        with atomic_file(target) as file:
            file.write(b"new")
            assert not target.exists()
        assert target.read_bytes() == b"new"
        assert list(tmp_path.iterdir()) == [target]

    @pytest.mark.parametrize("name", ["no/folder/x.kdtr", "x" * 300])
    def test_errors_name_the_file_that_was_asked_for(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for path in (name, tmp_path / name, os.fsencode(name)):
            with pytest.raises(OSError, match=r"(No such file|name too long)") as caught:
                write_bundle(path, sample_tensors())
            assert caught.value.filename == os.fsdecode(path)
            assert ".tmp" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_is_told_of_the_file(self, tmp_path: Path) -> None:
        target = tmp_path / "x"
        with pytest.raises(OSError, match="No space left on device") as caught, atomic_file(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        assert caught.value.filename == str(target)
        assert list(tmp_path.iterdir()) == []

    def test_errors_of_other_files_stay_as_they_are(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught, atomic_file(tmp_path / "x"):
            (tmp_path / "source").read_bytes()
        assert caught.value.filename == str(tmp_path / "source")
        with pytest.raises(OSError, match=r"^odd$"), atomic_file(tmp_path / "x"):
            raise OSError("odd")

    @pytest.mark.parametrize("name", ["", "x.kdtr/", "new/", "."])
    def test_a_folders_name_is_no_files(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(BundleError, match=rf"^{re.escape(name) or repr(name)}: not a regular file"):
            write_bundle(name, {})
        assert list(tmp_path.iterdir()) == []


class TestRefusals:
    """Each rule of the format, broken by itself under a right checksum."""

    def test_the_sample_is_read(self, content: bytes, read_bytes: Callable[[bytes], Bundle]) -> None:
        assert_same_tensors(read_bytes(with_checksum(content)), sample_tensors())

    @pytest.mark.parametrize(
        ("position", "field", "value", "message"),
        [
            (VERSION, "I", 2, "unknown version 2 at byte 4; expected 1"),
            (RESERVED + 31, "B", 1, "non-zero byte in the reserved bytes"),
            (TENSOR_COUNT, "I", 1000, "truncated header: the file has 704 bytes; expected"),
            (TENSOR_COUNT, "I", 0xFFFFFFFF, "4294967295 tensors at byte 12; expected at most 65536"),
            (FILE_BYTES, "Q", 768, "truncated payload: the file has 704 bytes; expected 768"),
            (FILE_BYTES, "Q", 2**64 - 64, "truncated payload"),
            (FILE_BYTES, "Q", 640, "trailing bytes: the file has 704 bytes; expected 640"),
            (NAMES_BYTES, "I", 0xFFFFFFFF, "truncated header"),
            (NAMES_BYTES, "I", 3, "record 2: a name of 1 bytes; expected at most the 0"),
            (NAMES_BYTES, "I", 5, "names: 1 bytes belong to no record"),
            (
                METADATA_BYTES,
                "I",
                0xFFFFFFFF,
                "4294967295 bytes of metadata at byte 28; expected at most 1048576",
            ),
            (METADATA_BYTES, "I", 1000, "truncated header"),
            (METADATA_BYTES, "I", 6, "metadata: not JSON"),
            (METADATA_BYTES, "I", 8, "metadata: not JSON"),
            (record_field(0, NAME_LENGTH), "I", 0, "0 bytes in UTF-8; expected 1 to 1024"),
            (record_field(0, NAME_LENGTH), "I", 0xFFFFFFFF, "record 0: a name of 4294967295 bytes"),
            (record_field(0, DTYPE), "I", 0, "tensor 'a': unknown dtype code 0; expected 1 to 13"),
            (record_field(0, DTYPE), "I", 14, "tensor 'a': unknown dtype code 14; expected 1 to 13"),
            (record_field(0, NDIM), "I", 9, "tensor 'a': 9 dimensions; expected at most 8"),
            (record_field(0, NDIM), "I", 0xFFFFFFFF, "4294967295 dimensions; expected at most 8"),
            (record_field(0, NDIM), "I", 1, "non-zero reserved field"),
            (record_field(0, RECORD_RESERVED), "I", 1, "non-zero reserved field"),
            (record_field(0, SHAPE + 56), "q", 1, "non-zero reserved field"),
            (record_field(0, SHAPE), "q", -2, r"negative dimension in shape \(-2, 3\)"),
            (record_field(0, SHAPE), "q", 4, "a payload of 24 bytes; expected 48"),
            (record_field(0, SHAPE), "q", 2**62, "overflows; expected at most"),
            (record_field(0, NBYTES), "Q", 23, "a payload of 23 bytes; expected 24"),
            (record_field(0, NBYTES), "Q", 2**64 - 1, "a payload of 18446744073709551615 bytes"),
            (record_field(1, OFFSET), "Q", 449, "tensor 'bb': misaligned payload at byte 449"),
            (
                record_field(1, OFFSET),
                "Q",
                384,
                "payload at byte 384 overlaps what is before it; expected 448",
            ),
            (record_field(0, OFFSET), "Q", 0, "payload at byte 0 overlaps what is before it"),
            (record_field(1, OFFSET), "Q", 512, "payload at byte 512 leaves a gap before it; expected 448"),
            (record_field(2, OFFSET), "Q", 2**64 - 64, "leaves a gap before it"),
        ],
    )
    def test_number(
        self,
        content: bytes,
        read_bytes: Callable[[bytes], Bundle],
        position: int,
        field: str,
        value: int,
        message: str,
    ) -> None:
        with pytest.raises(BundleError, match=message):
            read_bytes(patched(content, position, field, value))

    def test_wrong_magic(self, content: bytes, read_bytes: Callable[[bytes], Bundle]) -> None:
        for data in (b"", b"K", b"PK\3\4", b"kdtr" + content[4:]):
            with pytest.raises(BundleError, match=r"wrong magic .* at byte 0; expected b'KDTR'"):
                read_bytes(data)

    def test_wrong_checksum(self, content: bytes, read_bytes: Callable[[bytes], Bundle]) -> None:
        changed = content[:CHECKSUM] + bytes(4) + content[CHECKSUM + 4 :]
        with pytest.raises(BundleError, match="header checksum 0x00000000 at byte 8; expected 0x"):
            read_bytes(changed)

    def test_payload_beyond_the_end(self, path: Path, read_bytes: Callable[[bytes], Bundle]) -> None:
        write_bundle(path, {"x": np.zeros(8, np.int8)})
        content = patched(path.read_bytes(), record_field(0, SHAPE), "q", BEYOND_FILE)
        with pytest.raises(BundleError, match=r"payload ends at byte .* expected at most the file's"):
            read_bytes(patched(content, record_field(0, NBYTES), "Q", BEYOND_FILE))

    def test_overflow_hidden_by_a_zero_dimension(
        self, path: Path, read_bytes: Callable[[bytes], Bundle]
    ) -> None:
        write_bundle(path, {"x": np.zeros((1, 1, 0))})
        content = patched(path.read_bytes(), record_field(0, SHAPE), "q", 2**62)
        with pytest.raises(BundleError, match="overflows"):
            read_bytes(patched(content, record_field(0, SHAPE + 8), "q", 2**62))

    def test_bytes_after_the_last_payload(
        self, content: bytes, read_bytes: Callable[[bytes], Bundle]
    ) -> None:
        with pytest.raises(BundleError, match="trailing bytes: the file has 705 bytes; expected 704"):
            read_bytes(content + b"x")
        longer = patched(content, FILE_BYTES, "Q", len(content) + 64)
        with pytest.raises(BundleError, match="trailing bytes: the payloads end at byte 704; expected 768"):
            read_bytes(longer + bytes(64))

    @pytest.mark.parametrize("position", [383, 384 + 24, 447, 448 + 3, 512 + 160, 703])
    def test_padding(self, content: bytes, read_bytes: Callable[[bytes], Bundle], position: int) -> None:
        with pytest.raises(BundleError, match="non-zero byte in the padding after"):
            read_bytes(patched(content, position, "B", 1))

    def test_names(self, path: Path, read_bytes: Callable[[bytes], Bundle]) -> None:
        write_bundle(path, {"aa": 1, "bb": 2})
        content = path.read_bytes()
        for names, message in (
            (b"aaaa", "record 1: duplicate name 'aa'; expected unique names"),
            (b"aa\xff\xff", "record 1: name .* is invalid UTF-8"),
            (b"aa\xc3(", "record 1: name .* is invalid UTF-8"),
            (b"aab\0", "has a control character"),
        ):
            with pytest.raises(BundleError, match=message):
                read_bytes(with_checksum(content.replace(b"aabb", names)))

    @pytest.mark.parametrize(
        "text",
        [
            b'{"k": NaN   }',
            b'{"k": -Infinity}',
            b'{"k": 1e999}',
            b'{"k": 1',
            b'{"k": "\xff"}',
            b"[1, 2, 3]",
            b"null",
            b"",
            b"\xef\xbb\xbf{}",
            b"[" * 100_000,
            b'{"k": ' + b"9" * 5000 + b"}",
        ],
        ids=lambda text: repr(text[:20]),
    )
    def test_metadata(self, path: Path, read_bytes: Callable[[bytes], Bundle], text: bytes) -> None:
        placeholder = json.dumps({"x": "_" * max(0, len(text) - 8)}, separators=(",", ":")).encode()
        write_bundle(path, {}, json.loads(placeholder))
        content = patched(path.read_bytes(), METADATA_BYTES, "I", len(text))
        content = content.replace(placeholder, text.ljust(len(placeholder), b"\0"))
        with pytest.raises(BundleError, match="metadata"):
            read_bytes(with_checksum(content))

    def test_bool_above_one(self, content: bytes, read_bytes: Callable[[bytes], Bundle]) -> None:
        with pytest.raises(BundleError, match="tensor 'bb': a bool that is neither 0 nor 1"):
            read_bytes(patched(content, 449, "B", 2))

    def test_message_starts_with_the_path(self, path: Path) -> None:
        path.write_bytes(b"something else")
        with pytest.raises(BundleError) as caught:
            read_bundle(path)
        assert str(caught.value).startswith(f"{path}: wrong magic")

    def test_missing_file(self, path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            read_bundle(path)
        assert caught.value.filename == str(path)

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for target in (tmp_path, tmp_path / "pipe", Path(os.devnull)):
            with pytest.raises(BundleError, match="not a regular file"):
                read_bundle(target)

    def test_no_memory_for_copies(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for a file that is larger than memory, as a sparse one may well be."""

        class Unaffordable:
            nbytes = 1 << 50

            def copy(self) -> None:
                raise MemoryError

        write_bundle(path, {"x": 1})
        monkeypatch.setattr("numba_ddtree.bundle._view", lambda buffer, record: Unaffordable())
        with pytest.raises(BundleError, match="tensor 'x': no memory for a copy of"):
            read_bundle(path, map_payloads=False)


class TestFuzzing:
    @staticmethod
    def other_values(value: int) -> set[int]:
        return {value ^ 1 << bit for bit in range(8)} | {0x00, 0xFF, value + 1 & 0xFF, value ^ 0xFF} - {value}

    def test_every_changed_header_byte_is_noticed(
        self, content: bytes, read_bytes: Callable[[bytes], Bundle]
    ) -> None:
        for position in range(header_bytes(content)):
            for value in self.other_values(content[position]) - {content[position]}:
                with pytest.raises(BundleError):
                    read_bytes(content[:position] + bytes([value]) + content[position + 1 :])

    def test_every_forged_header_byte_is_refused_or_harmless(
        self, content: bytes, read_bytes: Callable[[bytes], Bundle]
    ) -> None:
        """Nothing but names, types of the same size and metadata can change under a right checksum."""
        payloads = [tensor.tobytes() for tensor in sample_tensors().values()]
        for position in range(VERSION, header_bytes(content)):
            for value in self.other_values(content[position]) - {content[position]}:
                forged = with_checksum(content[:position] + bytes([value]) + content[position + 1 :])
                try:
                    bundle = read_bytes(forged)
                except BundleError:
                    continue
                assert [tensor.tobytes() for tensor in bundle.tensors.values()] == payloads

    def test_every_truncation_is_noticed(self, content: bytes, read_bytes: Callable[[bytes], Bundle]) -> None:
        for length in range(len(content)):
            with pytest.raises(BundleError, match=r"truncated|magic"):
                read_bytes(content[:length])

    @settings(deadline=None, max_examples=200)
    @given(st.binary(max_size=300), st.booleans())
    def test_arbitrary_bytes(self, data: bytes, as_bundle: bool) -> None:
        data = b"KDTR\1\0\0\0" + data if as_bundle else data
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x.kdtr")
            path.write_bytes(data)
            with pytest.raises(BundleError):
                read_bundle(path)


class TestGoldenTrees:
    def test_cases(self) -> None:
        trees = load_golden_trees()
        assert len(trees) == 29
        metadata = read_bundle(GOLDEN_TREES_PATH).metadata
        assert metadata["budgets"] == {case: tree.budget for case, tree in trees.items()}

    @pytest.mark.parametrize(("case", "tree"), load_golden_trees().items())
    def test_arrays_fit_together(self, case: str, tree: GoldenTree) -> None:
        num_nodes = len(tree.token_ids)
        assert num_nodes == tree.budget or case.startswith("exhausted")
        assert tree.draft_log_probs.shape == tree.draft_token_ids.shape
        assert tree.depths.shape == (num_nodes,)
        assert tree.parents.shape == tree.posterior_tokens.shape == (num_nodes + 1,)
        assert tree.parents[0] == -1
        depths = np.concatenate([[0], tree.depths])
        np.testing.assert_array_equal(tree.visibility.sum(axis=1), depths + 1)
        np.testing.assert_array_equal(depths[tree.parents[1:]] + 1, tree.depths)

    @pytest.mark.parametrize(("case", "tree"), load_golden_trees().items())
    def test_walk_follows_the_target(self, case: str, tree: GoldenTree) -> None:
        walk = tree.accepted_indices
        assert walk[0] == 0
        np.testing.assert_array_equal(tree.parents[walk[1:]], walk[:-1])
        np.testing.assert_array_equal(tree.token_ids[walk[1:] - 1], tree.posterior_tokens[walk[:-1]])
        assert tree.bonus_token == tree.posterior_tokens[walk[-1]]
