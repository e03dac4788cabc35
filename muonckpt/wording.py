"""How numbers are written for people, on the command line and in pages."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 file``, ``2 files``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """A number of bytes in binary units, with three figures."""
    value = float(count)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")
