"""Options of `sharding plan`."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from sharding import hardware
from sharding.errors import ShardingError

from .byte_size import parse_bytes
from .model_config import ModelOptions
from .option_checks import at_least


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Find a mesh and the few annotations with which a model's train step is fast and fits, without running it."""

    model: OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    devices: str = "h100:1x8"
    """Devices to plan for, such as v5p:4x8x8 or h100:16x8; they need not be attached."""
    mesh: Annotated[str | None, arg(metavar="SIZES")] = None
    """Sizes of the axes x, y and z, such as 64x8. Default: all meshes of up to three axes are tried."""
    pipeline: bool = False
    """Also plan versions of the step in 1F1B and interleaved stages, over an axis `pipe` before the others."""
    batch: int = 16
    """Global batch size in examples."""
    memory: Annotated[str | None, arg(metavar="BYTES")] = None
    """Limit on peak memory per device, such as 16GB. Default: what the chip offers."""
    algorithm: str = "auto"
    """Search for the shardings: auto, or a name that --compare lists."""
    seconds: float = 60.0
    """Seconds after which no other mesh is tried. Ctrl-C ends the search, too; the best plan so far counts."""
    seed: int = 0
    """Seed of random decisions."""
    compare: bool = False
    """Also solve the problem of the chosen mesh by each algorithm, and list cost, gap to the best bound, and time."""
    frontier: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw the least time within each limit on memory, on the chosen mesh, as an SVG."""
    code: bool = False
    """Print the plan as plain PartitionSpecs, which need no library."""
    report: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write an HTML report of the step as planned, with the plan, its next best specs and the other meshes."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the plan as JSON, for `sharding train --plan`."""

    def __post_init__(self) -> None:
        at_least("--batch", self.batch, 1)
        num_devices = hardware.parse(self.devices).num_devices
        if self.axes is not None and math.prod(self.axes.values()) != num_devices:
            raise ShardingError(
                f"--mesh {self.mesh} --devices {self.devices}",
                found=f"{num_devices} devices",
                required=f"a mesh of {num_devices} devices",
            )
        if self.pipeline and self.mesh is not None:
            raise ShardingError(
                f"--pipeline --mesh {self.mesh}",
                found="a mesh without an axis for stages",
                required="meshes that are found",
                fix="leave --mesh out",
            )
        if self.memory is not None:
            parse_bytes("--memory", self.memory)
        if self.out is not None and self.out.suffix != ".json":
            raise ShardingError(f"--out {self.out}", required="a .json file", fix=f"--out {self.out}.json")

    @property
    def axes(self) -> dict[str, int] | None:
        """The mesh; None if it is to be found."""
        if self.mesh is None:
            return None
        parts = self.mesh.lower().split("x")
        if not 1 <= len(parts) <= 3 or not all(part.isdigit() and int(part) for part in parts):
            raise ShardingError(f"--mesh {self.mesh}", required="one to three sizes", fix="--mesh 64x8")
        return dict(zip("xyz", map(int, parts), strict=False))

    @property
    def memory_bytes(self) -> float | None:
        """The limit in bytes; None for the chip's."""
        return None if self.memory is None else parse_bytes("--memory", self.memory)
