"""What the command line says of sequences that an axis splits."""

from dataclasses import dataclass
from typing import Literal

from sharding.errors import ShardingError

from .pipeline_config import Pipelining

Kind = Literal["ring", "ring_self", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class Sequencing:
    """How positions attend to each other where a seq axis splits them."""

    devices: int
    """Of the seq axis."""
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class SequenceChoice:
    """What the command says of the attention, where a seq axis of the mesh splits sequences."""

    attention: Kind | None = None
    """How positions attend to each other over a seq axis: ring (keys and values go around), ring_self (keys, then
    values), ulysses (all-to-alls that split heads instead). Default: ring; ulysses in a pipeline."""

    def over(self, axes: dict[str, int], pipeline: Pipelining | None = None) -> Sequencing | None:
        """The attention on a mesh with these axes; None where it has no seq axis. All sizes must be known."""
        devices = axes.get("seq", 1)
        if devices == 1:
            if self.attention is not None:
                must = "sequences are split by an axis of the mesh"
                raise ShardingError(
                    f"--attention {self.attention}", there="no seq axis", must=must, fix="--mesh data=2,seq=2"
                )
            return None
        if pipeline is not None and self.attention in ("ring", "ring_self"):
            raise ShardingError(
                f"--attention {self.attention} --mesh pipe={pipeline.devices},seq={devices}",
                there="stages of a pipeline, which do different things at a time",
                must="all devices take part in each step of a ring",
                fix="--attention ulysses",
            )
        return Sequencing(devices=devices, kind=self.attention or ("ring" if pipeline is None else "ulysses"))
