"""Compiled code on disk, so that the next process loads what this one compiled.

Numba's own cache (``cuda.jit(cache=True)``) would serve stale code here: it knows of a change to the
kernel's own file, not to the files of the device functions and constants that the kernel uses. This one
keeps each kernel's machine code under a hash of all that went into it: every source file of the package,
the types, the launch bounds, the device's compute capability, the versions of Numba and of the toolkit, and
Numba's settings. What is not found, or not whole, is compiled. While a process runs whose source files
were changed after it started, it neither reads nor writes, since it may run the files as they were before.

The folder is ``numba_ddtree`` in ``NUMBA_CACHE_DIR``, or else in ``XDG_CACHE_HOME`` or ``~/.cache``. With
``NUMBA_DDTREE_CACHE=0`` nothing is read or written. Files are only ever added; the folder can be deleted at
any time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from numba_ddtree.bundle import atomic_file
from numba_ddtree.errors import BundleError

PACKAGES = ("numba", "numba-cuda", "llvmlite", "numpy")
LIBRARIES = ("nvvm", "nvJitLink")
CACHE_VARIABLE = "NUMBA_DDTREE_CACHE"
FOLDER_VARIABLE = "NUMBA_CACHE_DIR"
# Modules may have been imported, and files changed, this long before this one is.
IMPORTED_NS = time.time_ns() - 10 * 10**9


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's machine code.

    Attributes
    ----------
    name : str
        Of the function in it.
    code : bytes
        The cubin.
    """

    name: str
    code: bytes


def place_of(function: Callable[..., Any], compiled_for: tuple[Any, ...]) -> Path | None:
    """Return the file for a kernel's code; None where it is not kept, as of a kernel of others.

    Parameters
    ----------
    function
        The kernel's Python function.
    compiled_for : tuple
        What else its code depends on; hashed as text.
    """
    is_own = function.__module__.partition(".")[0] == "numba_ddtree"
    if not is_own or os.environ.get(CACHE_VARIABLE, "1") in ("", "0"):
        return None
    where, sources, toolchain = folder(), _sources(), _toolchain()
    if where is None or sources is None or toolchain is None:
        return None
    parts = (function.__module__, function.__qualname__, *compiled_for, _settings(), toolchain, sources)
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return where / f"{function.__name__}-{digest[:32]}.cubin"


def folder() -> Path | None:
    """Return the folder that code is kept in; None for a user without a home."""
    given = os.environ.get(FOLDER_VARIABLE) or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache") / "numba_ddtree"
    except RuntimeError:
        return None


def read(place: Path | None) -> Code | None:
    """Return the code of a file; None where there is none, or not all of it."""
    try:
        content = b"" if place is None else place.read_bytes()
    except OSError:
        return None
    name, _, rest = content.partition(b"\n")
    digest, _, code = rest.partition(b"\n")
    is_whole = digest == hashlib.sha256(name + code).hexdigest().encode()
    return Code(name.decode(), code) if is_whole else None


def write(place: Path | None, code: Code) -> None:
    """Keep code in a file, which appears at once; where that is not possible, do nothing."""
    if place is None:
        return
    name = code.name.encode()
    digest = hashlib.sha256(name + code.code).hexdigest().encode()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(place) as file:
            file.write(b"\n".join((name, digest, code.code)))
    except (OSError, BundleError):
        return


def _settings() -> str:
    """Return Numba's settings, which may change the code, bar where it is kept."""
    names = sorted(name for name in os.environ if name.startswith("NUMBA_"))
    kept = [name for name in names if name not in (CACHE_VARIABLE, FOLDER_VARIABLE)]
    return repr([(name, os.environ[name]) for name in kept])


@lru_cache(maxsize=1)
def _sources() -> str | None:
    """Hash of the package's source files, the references' among them, whose constants kernels share.

    None where one is newer than what is imported of it may be.
    """
    import numba_ddtree
    from numba_ddtree import refs

    digest = hashlib.sha256()
    for root in sorted(Path(path) for package in (numba_ddtree, refs) for path in package.__path__):
        for file in sorted(root.rglob("*.py")):
            if file.stat().st_mtime_ns > IMPORTED_NS:
                return None
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _toolchain() -> str | None:
    """Describe what compiles by versions, and the toolkit's libraries, which tell none, by their files.

    None where a library is not found.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    found = [platform.python_version()]
    for package in PACKAGES:
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("")
    for library in LIBRARIES:
        try:
            path = load_nvidia_dynamic_lib(library).abs_path
            stat = Path(path).stat()
        except (DynamicLibNotFoundError, OSError):
            return None
        found.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return repr(found)
