"""Calibration file: a chip's measured numbers, written by `sharding calibrate` and read by time estimates.

JSON with the numbers of one device, the chip they replace, the interconnect, and how they were measured. Missing
entries keep the chip's built-in numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..errors import ShardingError
from .chip import Chip, Link, MeasuredCollective, Rates
from .known_chips import CHIPS, chip

FORMAT = "sharding hardware table"
VERSION = 1

_RATES = tuple(name for name in Rates.__dataclass_fields__)
_NUMBERS = ("memory_bytes_per_second", "op_seconds", "collective_seconds")
_COLLECTIVE = ("kind", "link", "num_devices", "start_seconds", "bytes_per_second")


def save(measured: Chip, path: str | Path, *, how: Mapping[str, Any]) -> None:
    """Write the measured numbers of a chip.

    Args:
        measured: the chip with its measured numbers.
        path: of the file; its folder is created if missing.
        how: provenance, such as the machine, the versions and the number of devices; ignored by `load`.
    """
    table = {
        "format": FORMAT,
        "version": VERSION,
        "chip": measured.name,
        "measured": dict(how),
        "rates": {name: getattr(measured.rates, name) for name in _RATES},
        **{name: getattr(measured, name) for name in _NUMBERS},
        "collectives": [{name: getattr(one, name) for name in _COLLECTIVE} for one in measured.collectives],
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=2) + "\n")


def load(path: str | Path) -> Chip:
    """The chip of a calibration file: the built-in numbers, replaced by the measured ones.

    Raises:
        ShardingError: if the file is missing, not a calibration file, of another version, or has invalid entries, which
            are all listed.
    """
    table = _read(Path(path))
    faults = _faults(table)
    if faults:
        raise ShardingError(
            f"the calibration file {str(path)!r}",
            found=faults,
            required="the entries that `sharding calibrate` writes, numbers above 0",
            fix="sharding calibrate --out " + str(path),
        )
    known = CHIPS[table["chip"]]
    return replace(
        known,
        rates=replace(known.rates, **table.get("rates", {})),
        **{name: table[name] for name in _NUMBERS if name in table},
        **({"matmul_share": 1.0} if "rates" in table else {}),
        **({"memory_share": 1.0} if "memory_bytes_per_second" in table else {}),
        shares_cores=False,  # measured per device while all of them run
        collectives=tuple(MeasuredCollective(**one) for one in table.get("collectives", ())),
    )


def _read(path: Path) -> dict[str, Any]:
    asked = f"the calibration file {str(path)!r}"
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise ShardingError(
            asked,
            found=error.strerror or str(error),
            required="a readable file",
            fix=f"sharding calibrate --out {path}",
        ) from None
    except ValueError as error:
        raise ShardingError(asked, found=f"invalid JSON: {error}", required="a calibration file in JSON") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ShardingError(
            asked, found="JSON of another format", required=f'a calibration file with "format": "{FORMAT}"'
        )
    if table.get("version") != VERSION:
        raise ShardingError(
            asked,
            found=f"version {table.get('version')!r}",
            required=f"version {VERSION}, which this release reads",
            fix=f"sharding calibrate --out {path}",
        )
    if table.get("chip") not in CHIPS:
        chip(str(table.get("chip")), asked=asked)
    return table


def _faults(table: Mapping[str, Any]) -> list[str]:
    known = {"format", "version", "chip", "measured", "rates", "collectives", *_NUMBERS}
    rates, collectives = table.get("rates", {}), table.get("collectives", [])
    faults = [f"unknown entry {name!r}" for name in table.keys() - known]
    faults += [f"{name}: {table[name]!r}" for name in _NUMBERS if name in table and not _is_positive(table[name])]
    if not isinstance(rates, dict):
        faults.append("rates: not an object")
    else:
        faults += [f"rates: unknown entry {name!r}" for name in rates.keys() - set(_RATES)]
        faults += [f"rates.{name}: {rates[name]!r}" for name in _RATES if name in rates and not _is_rate(name, rates)]
    if not isinstance(collectives, list):
        return sorted([*faults, "collectives: not a list"])
    return sorted(faults) + [
        f"collectives[{i}]: {fault}" for i, one in enumerate(collectives) for fault in _collective_faults(one)
    ]


def _collective_faults(collective: Any) -> list[str]:
    """The faults of one measured collective."""
    if not isinstance(collective, dict) or collective.keys() != set(_COLLECTIVE):
        return [f"not an object with {', '.join(_COLLECTIVE)}"]
    checks = {
        "kind": isinstance(collective["kind"], str),
        "link": collective["link"] in get_args(Link),
        "num_devices": isinstance(collective["num_devices"], int) and collective["num_devices"] > 1,
        "start_seconds": _is_positive(collective["start_seconds"]) or collective["start_seconds"] == 0,
        "bytes_per_second": _is_positive(collective["bytes_per_second"]),
    }
    return [f"{name}: {collective[name]!r}" for name, is_valid in checks.items() if not is_valid]


def _is_rate(name: str, rates: Mapping[str, Any]) -> bool:
    return _is_positive(rates[name]) or (rates[name] is None and name.startswith(("int8", "float8")))


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
