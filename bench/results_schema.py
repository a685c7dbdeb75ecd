"""The files that benchmarks leave in ``bench/results``: what they hold, how they are read and written.

A file is one JSON object, ``<operation>.json``, with the members of `Results`; its ``rows`` are objects with
the members of `Row` and a ``ratio``, the peer's time over the kernel's. ``peer``, ``peer_us`` and ``ratio``
are null in a row without a peer; optional numbers may be left out.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from numba_ddtree.bundle import atomic_file
from numba_ddtree.errors import DDTreeError

__all__ = ["CaseValue", "Results", "ResultsError", "Row", "RowKey", "load_results"]

CaseValue: TypeAlias = int | float | str
"""What a case may give as the value of one of its parameters."""

RowKey: TypeAlias = tuple[frozenset[tuple[str, CaseValue]], str, str | None]
"""What tells the rows of one operation apart: the case whatever its order, the kernel and the peer."""

_RATIO_TOLERANCE = 0.01
_RATIO_DIGITS = 4

_NULLABLE_KEYS = ("peer", "peer_us", "ratio")
_OPTIONAL_KEYS = ("host_us", "max_abs", "tflops", "gbps")


class ResultsError(DDTreeError, ValueError):
    """Benchmark results are malformed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel's figures for one case, next to those of a peer if there is one.

    Attributes
    ----------
    case : mapping of str to int, float or str
        The parameters of the case, such as ``{"B": 32, "L": 15}``.
    kernel : str
        What was measured.
    us : float
        Its time in microseconds: the device's, unless the results' `timing` says otherwise.
    peer, peer_us : str and float, optional
        What it is compared with, and the peer's time in microseconds, taken as the results' `timing` says;
        both or neither.
    host_us : float, optional
        Host time of a call, in microseconds.
    max_abs : float, optional
        Largest absolute difference from the reference.
    tflops, gbps : float, optional
        Attained TFLOP/s and GB/s.

    Raises
    ------
    ResultsError
        If a value has a wrong type, a number is not finite or negative, or a time is zero.
    """

    case: Mapping[str, CaseValue]
    kernel: str
    us: float
    peer: str | None = None
    peer_us: float | None = None
    host_us: float | None = None
    max_abs: float | None = None
    tflops: float | None = None
    gbps: float | None = None

    def __post_init__(self) -> None:
        _check_case(self.case)
        _check_text("kernel", self.kernel)
        _check_positive("us", self.us)
        self._check_peer()
        if self.host_us is not None:
            _check_positive("host_us", self.host_us)
        for name in ("max_abs", "tflops", "gbps"):
            value = getattr(self, name)
            if value is not None:
                _check_not_negative(name, value)

    def _check_peer(self) -> None:
        if (self.peer is None) != (self.peer_us is None):
            raise ResultsError(f"peer {self.peer!r} with peer_us {self.peer_us!r}; expected both or neither")
        if self.peer is not None:
            _check_text("peer", self.peer)
            _check_positive("peer_us", self.peer_us)
            # Two times that are finite each may have a quotient that is not.
            _check_positive("peer_us / us", self.ratio)

    @property
    def ratio(self) -> float | None:
        """Speed-up over the peer: its time over the kernel's; None without a peer."""
        return None if self.peer_us is None else self.peer_us / self.us

    @property
    def key(self) -> RowKey:
        """What no other row of the same operation has."""
        return frozenset(self.case.items()), self.kernel, self.peer


@dataclass(frozen=True, kw_only=True)
class Results:
    """The figures of one operation from one run on one device.

    Attributes
    ----------
    operation : str
        What was measured, in lower case with underscores; also the name of the file.
    device, driver : str
        The device's name and the version of its driver.
    date : datetime.date
        When it was measured.
    commit : str
        Git's hash of what was measured, with ``-dirty`` behind it if the tree had changes.
    timing : str
        How times were taken.
    rows : sequence of Row
        The figures, at least one row.

    Raises
    ------
    ResultsError
        If a value has a wrong type or form, or two rows have the same case, kernel and peer.
    """

    operation: str
    device: str
    driver: str
    date: datetime.date
    commit: str
    timing: str
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        for name in ("operation", "device", "driver", "commit", "timing"):
            _check_text(name, getattr(self, name))
        _check_form("operation", self.operation, r"[a-z][a-z0-9_]*", "lower case with underscores")
        _check_form("commit", self.commit, r"[0-9a-f]{7,64}(-dirty)?", "a git hash")
        # A datetime is a date too, but its time of day would be lost or break the format.
        if type(self.date) is not datetime.date:
            raise ResultsError(f"date: {self.date!r}; expected a datetime.date")
        self._check_rows()

    def _check_rows(self) -> None:
        if not self.rows:
            raise ResultsError("rows: none; expected at least one")
        first_index: dict[RowKey, int] = {}
        for index, row in enumerate(self.rows):
            if not isinstance(row, Row):
                raise ResultsError(f"rows[{index}]: a {type(row).__name__}; expected a Row")
            other = first_index.setdefault(row.key, index)
            if other != index:
                raise ResultsError(f"rows[{index}]: same case, kernel and peer as rows[{other}]")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read a file.

        Parameters
        ----------
        path : path-like
            The file. Its name need not be that of the operation.

        Returns
        -------
        Results
            What it holds.

        Raises
        ------
        ResultsError
            If it is malformed; the message names the file and the row.
        OSError
            If it cannot be read.
        """
        try:
            text = Path(path).read_bytes().decode()
            return _results_from_json(json.loads(text, object_pairs_hook=_distinct_members))
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{os.fspath(path)}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, at once and whole; equal results give equal bytes.

        Parameters
        ----------
        path : path-like
            Where; ``bench/results/<operation>.json`` is what `load_results` expects in a folder.

        Raises
        ------
        DDTreeError
            If something is at `path` that is not a regular file.
        OSError
            If it cannot be written.
        """
        members = {name: getattr(self, name) for name in _names(Results)}
        members["date"] = self.date.isoformat()
        members["rows"] = [_row_to_json(row) for row in self.rows]
        text = json.dumps(members, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        with atomic_file(path) as file:
            file.write(text.encode())


def load_results(path: str | os.PathLike[str]) -> dict[str, Results]:
    """Read one file, or every ``*.json`` of a folder.

    Parameters
    ----------
    path : path-like
        The file or folder. The files of a folder have to be called after their operations.

    Returns
    -------
    dict of str to Results
        The results by operation, sorted.

    Raises
    ------
    ResultsError
        If a file is malformed or misnamed, or the folder has none.
    OSError
        If there is no such file or folder, or it cannot be read.
    """
    if not Path(path).is_dir():
        results = Results.load(path)
        return {results.operation: results}
    files = sorted(Path(path).glob("*.json"))
    if not files:
        raise ResultsError(f"{os.fspath(path)}: no .json files; expected one an operation")
    return {file.stem: _load_named(file) for file in files}


def _load_named(path: Path) -> Results:
    results = Results.load(path)
    if results.operation != path.stem:
        raise ResultsError(f"{path}: operation {results.operation!r}; expected that of the file's name")
    return results


def _results_from_json(value: object) -> Results:
    members = _members(value, required=_names(Results))
    rows = members["rows"]
    if not isinstance(rows, list):
        raise ResultsError(f"rows: a {type(rows).__name__}; expected a list")
    members["rows"] = tuple(_row_from_json(index, row) for index, row in enumerate(rows))
    members["date"] = _date_from_json(members["date"])
    return Results(**members)


def _row_from_json(index: int, value: object) -> Row:
    try:
        members = _members(value, required=("case", "kernel", "us", *_NULLABLE_KEYS), optional=_OPTIONAL_KEYS)
        stated_ratio = members.pop("ratio")
        row = Row(**members)
        _check_ratio(stated_ratio, row.ratio)
    except ResultsError as error:
        raise ResultsError(f"rows[{index}]: {error}") from error
    return row


def _row_to_json(row: Row) -> dict[str, object]:
    members: dict[str, object] = {}
    for name in _names(Row):
        value = getattr(row, name)
        if value is not None or name in _NULLABLE_KEYS:
            members[name] = dict(value) if name == "case" else value
        if name == "peer_us":
            members["ratio"] = None if row.ratio is None else float(f"{row.ratio:.{_RATIO_DIGITS}g}")
    return members


def _names(record: type[Row] | type[Results]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record))


def _members(value: object, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """Check that a JSON value is an object with these members and no others."""
    if not isinstance(value, dict):
        raise ResultsError(f"a {type(value).__name__}; expected an object")
    missing = [name for name in required if name not in value]
    if missing:
        raise ResultsError(f"no {missing[0]!r}")
    unknown = value.keys() - {*required, *optional}
    if unknown:
        raise ResultsError(f"unknown member {min(unknown)!r}")
    return dict(value)


def _distinct_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _value in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ResultsError(f"member {repeated!r} twice in one object")
    return members


def _date_from_json(value: object) -> datetime.date:
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError as error:
            raise ResultsError(f"date: {value!r}: {error}") from error
    raise ResultsError(f"date: {value!r}; expected a date like '2026-01-31'")


def _check_ratio(stated: object, ratio: float | None) -> None:
    if ratio is None:
        if stated is not None:
            raise ResultsError(f"ratio: {stated!r}; expected null without a peer")
        return
    stated_ratio = _check_positive("ratio", stated)
    if abs(stated_ratio - ratio) > _RATIO_TOLERANCE * ratio:
        raise ResultsError(f"ratio: {stated_ratio!r}; expected peer_us / us = {ratio:.{_RATIO_DIGITS}g}")


def _check_case(case: object) -> None:
    if not isinstance(case, Mapping):
        raise ResultsError(f"case: a {type(case).__name__}; expected an object")
    for name, value in case.items():
        _check_text("name in case", name)
        if isinstance(value, str):
            _check_text(f"case {name!r}", value)
        elif not _is_finite_number(value):
            raise ResultsError(f"case {name!r}: {value!r}; expected a finite number or a string")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ResultsError(f"{name}: {value!r}; expected a line of printable text")


def _check_form(name: str, value: str, pattern: str, expected: str) -> None:
    if not re.fullmatch(pattern, value):
        raise ResultsError(f"{name}: {value!r}; expected {expected}")


def _check_positive(name: str, value: object) -> float:
    if not _is_finite_number(value) or value <= 0:
        raise ResultsError(f"{name}: {value!r}; expected a positive finite number")
    return value


def _check_not_negative(name: str, value: object) -> None:
    if not _is_finite_number(value) or value < 0:
        raise ResultsError(f"{name}: {value!r}; expected a finite number, at least 0")


def _is_finite_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    # NaN fails the comparison too; math.isfinite raises on an int that no float can hold.
    return abs(value) <= sys.float_info.max
