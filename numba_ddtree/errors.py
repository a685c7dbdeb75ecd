"""The errors that this package raises.

Every one derives from `DDTreeError`, so that a caller can catch the package's own errors at one
place, and from the built-in class that fits, so that ordinary handlers work too.
"""

from __future__ import annotations


class DDTreeError(Exception):
    """Base class of every error that numba_ddtree raises on purpose."""


class ArgumentError(DDTreeError, ValueError):
    """An argument has a wrong shape, dtype, device, layout or value.

    Parameters
    ----------
    argument : str
        The argument's name, with an index where one element is at fault.
    got : object
        What it is.
    expected : str
        What it should be.

    Attributes
    ----------
    argument, got, expected
        As given.
    """

    def __init__(self, argument: str, got: object, expected: str) -> None:
        super().__init__(argument, got, expected)
        self.argument = argument
        self.got = got
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.argument}: got {self.got}; expected {self.expected}"


class BackendError(DDTreeError, RuntimeError):
    """The chosen backend cannot run here: no device, no driver or no toolkit library."""


class LaneError(DDTreeError, RuntimeError):
    """Work of a lane failed, or its device cannot be used.

    Parameters
    ----------
    lanes : tuple of int
        The lanes at fault, by their index in the `DeviceGroup`.
    reason : str
        What failed; it names each lane and its device.

    Attributes
    ----------
    lanes, reason
        As given.
    """

    def __init__(self, lanes: tuple[int, ...], reason: str) -> None:
        super().__init__(lanes, reason)
        self.lanes = lanes
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class BundleError(DDTreeError, ValueError):
    """A KDTR bundle is malformed, or what should be written does not fit the format."""
