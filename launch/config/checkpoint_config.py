"""Options of `sharding checkpoint`: one frozen dataclass per action."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg, subcommand

Folder = Positional[Annotated[Path, arg(metavar="DIR")]]


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """List a folder's checkpoints, and the arrays and settings of one of them. Needs no mesh."""

    folder: Folder
    """Folder of a run, or of its checkpoints."""
    step: int | None = None
    """Step of the checkpoint to show. Default: the newest."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read checkpoints and compare their checksums. Needs no mesh."""

    folder: Folder
    """Folder of a run, or of its checkpoints."""
    step: int | None = None
    """Step of the checkpoint to verify. Default: all."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint's parameters to a safetensors file. Needs no mesh."""

    folder: Folder
    """Folder of a run, or of its checkpoints."""
    out: Annotated[Path, arg(metavar="FILE")]
    """File to write."""
    step: int | None = None
    """Step of the checkpoint. Default: the newest."""
    prefix: str = "params/"
    """Write arrays whose names start with this prefix, and strip it."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Write the tensors of a safetensors file as a checkpoint; to start a run from such a file use
    `sharding train --init`."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """File to read."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder for the checkpoint."""
    step: int = 0
    """Step of the checkpoint."""
    prefix: str = "params/"
    """Prefix to add to every tensor's name."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Inspect and verify checkpoints, export and import parameters."""

    action: (
        Annotated[Inspect, subcommand("inspect")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Import, subcommand("import")]
    )
