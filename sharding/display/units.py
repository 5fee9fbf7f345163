"""Bytes and seconds as text, to three digits: `5.84 GB`, `12.5 ms`."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def bytes_text(num_bytes: int) -> str:
    """Decimal units, as `5.84 GB`; exact below 1,000 bytes.

    >>> bytes_text(5_843_189_760), bytes_text(768), bytes_text(999_999)
    ('5.84 GB', '768 bytes', '1000 kB')
    """
    return f"{num_bytes} bytes" if num_bytes < 1000 else _scaled(num_bytes, _BYTES)


def seconds_text(seconds: float) -> str:
    """As `12.5 ms`.

    >>> seconds_text(0.0125), seconds_text(3e-6)
    ('12.5 ms', '3 us')
    """
    return _scaled(seconds, _SECONDS)


def _scaled(amount: float, units: Sequence[tuple[str, float]]) -> str:
    unit, size = next((one for one in units if amount >= one[1]), units[-1])
    digits = f"{amount / size:.3g}"
    return f"{float(digits):g} {unit}" if "e" in digits else f"{digits} {unit}"
