"""Sizes in bytes as text: `16GB`, `1.5 GiB`, `800MB`, `1e9`."""

import re

from sharding.errors import ShardingError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(?P<number>\d+(\.\d*)?(e\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def parse_bytes(option: str, text: str) -> float:
    """The number of bytes that a text such as `16GB` stands for.

    Args:
        option: its name, for errors.
        text: a positive number with an optional unit.
    """
    found = _SIZE.fullmatch(text.strip())
    size = float(found["number"]) * _UNITS.get(found["unit"].lower(), 0) if found else 0.0
    if not size > 0:
        raise ShardingError(f"{option} {text}", required="a positive number of bytes", fix=f"{option} 16GB")
    return size
