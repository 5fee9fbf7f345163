"""What the parts of the command line have in common: options that were given, and numbers that are too small."""

import dataclasses
from typing import Any

from sharding.errors import ShardingError


def given(config: Any) -> dict[str, Any]:
    """The fields of `config` that are not None."""
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def at_least(option: str, value: float, least: float) -> None:
    """Raise an error if the value of an option is too small."""
    if value < least:
        raise ShardingError(f"{option} {value}", must=f"must be at least {least}", fix=f"{option} {least}")
