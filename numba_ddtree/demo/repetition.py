"""How much a text repeats itself."""

from __future__ import annotations

WINDOW = 32


def repetition(text: bytes, window: int = WINDOW) -> float:
    """Return the share of a text's windows that stood in it before.

    Parameters
    ----------
    text : bytes
    window : int
        Bytes a window. Python source of the standard library has about 0.03 in 384 bytes at the
        default; a text that runs in a circle of c bytes comes close to 1 once it is much longer than c.

    Returns
    -------
    float
        From 0 to 1; 0 for a text shorter than a window.
    """
    seen: set[bytes] = set()
    windows = max(len(text) - window + 1, 0)
    for start in range(windows):
        seen.add(text[start : start + window])
    return 1 - len(seen) / windows if windows else 0.0
