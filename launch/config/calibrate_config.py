"""Options of `sharding calibrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from sharding.errors import ShardingError

from .mesh_config import parse_mesh
from .option_checks import at_least


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure FLOP/s, bandwidths and collectives of this machine's devices, for the cost model."""

    mesh: str = "data=-1"
    """Axes and their sizes, major axis first: data, fsdp and tensor; collectives are measured along each.
    One size may be -1: all remaining devices. Default: all devices along one axis."""
    devices: int | None = None
    """Number of virtual CPU devices. Default: as many as the mesh needs. Not for GPUs and TPUs."""
    like: Annotated[str | None, arg(metavar="CHIP")] = None
    """Chip to assume, such as h100, if the devices don't report one; its data sheet supplies what is not measured."""
    quick: bool = False
    """Measure for seconds only; the numbers may be off by a factor."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("machine.json")
    """File for the measurements."""

    def __post_init__(self) -> None:
        parse_mesh(self.mesh)
        if self.devices is not None:
            at_least("--devices", self.devices, 1)
        if self.out.suffix != ".json":
            raise ShardingError(f"--out {self.out}", required="a .json file", fix=f"--out {self.out}.json")
