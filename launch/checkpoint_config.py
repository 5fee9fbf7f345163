"""What `sharding checkpoint` asks for: one frozen dataclass per action."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg, subcommand

Folder = Positional[Annotated[Path, arg(metavar="DIR")]]


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """List the checkpoints of a folder, and the arrays and settings of one of them. Needs no mesh."""

    folder: Folder
    """Folder of a run, or of its checkpoints."""
    step: int | None = None
    """Of the checkpoint to show. Default: the newest."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read the checkpoints of a folder and hold all that they are made of against its checksum. Needs no mesh."""

    folder: Folder
    """Folder of a run, or of its checkpoints."""
    step: int | None = None
    """Of the checkpoint to read. Default: all."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the parameters of a checkpoint to a safetensors file. Needs no mesh."""

    folder: Folder
    """Folder of a run, or of its checkpoints."""
    out: Annotated[Path, arg(metavar="FILE")]
    """The file to write."""
    step: int | None = None
    """Of the checkpoint. Default: the newest."""
    prefix: str = "params/"
    """Beginning of the names of the arrays to write; it is cut off."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Write the tensors of a safetensors file as a checkpoint; `sharding train --init` begins with such a file."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """The file to read."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder for the checkpoint."""
    step: int = 0
    """Its step."""
    prefix: str = "params/"
    """Put before the name of every tensor."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Look into checkpoints, and exchange parameters with other tools."""

    action: (
        Annotated[Inspect, subcommand("inspect")]
        | Annotated[Verify, subcommand("verify")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Import, subcommand("import")]
    )
