"""Checks that the options of all commands share."""

import dataclasses
from typing import Any

from sharding.errors import ShardingError


def given_options(options: Any) -> dict[str, Any]:
    """The fields of `options` that are not None."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def at_least(option: str, value: float, minimum: float) -> None:
    """Raise an error if the value of an option is below `minimum`."""
    if value < minimum:
        raise ShardingError(f"{option} {value}", required=f"at least {minimum}", fix=f"{option} {minimum}")
