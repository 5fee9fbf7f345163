"""Sizes in bytes as text: `16GB`, `15.5GiB`, `800MB`."""

import re

from sharding.errors import ShardingError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(option: str, text: str) -> int:
    """The number of bytes.

    Raises:
        ShardingError: no number above 0 with a known unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS or float(found[1]) == 0:
        raise ShardingError(
            f"{option} {text}", required="bytes per device, above 0, as 16GB, 15.5GiB or 800MB", fix=f"{option} 16GB"
        )
    return int(float(found[1]) * UNITS[found[2].upper()])
