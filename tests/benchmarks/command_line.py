"""The command line of a benchmark: options from a dataclass, help from the module's docstring."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from sharding.launch.broken_pipe import exits_if_reader_gone

T = TypeVar("T")


def run(main: Callable[[T], None], options: type[T], description: str | None) -> None:
    """Runs `main` with the options of the command line."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    with exits_if_reader_gone():
        main(tyro.cli(options, description=description, prog=f"python -m {spec.name}" if spec else None))
