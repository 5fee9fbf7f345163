"""Options of sequence-parallel attention: how positions attend to each other over a seq axis."""

from dataclasses import dataclass

from sharding.errors import ShardingError
from sharding.sequence import Kind

from .pipeline_config import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Attention over a seq axis of known size."""

    devices: int
    """Size of the seq axis."""
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Options of attention where sequences are sharded over a seq axis."""

    attention: Kind | None = None
    """Attention over a seq axis: ring (rotate keys and values), ring_self (rotate keys, then values),
    ulysses (all-to-alls that reshard from sequence to heads). Default: ring; ulysses in a pipeline."""

    def resolve(self, axes: dict[str, int], pipeline: PipelineConfig | None = None) -> SequenceConfig | None:
        """The attention on a mesh with these axes; None without a seq axis. All sizes must be known."""
        devices = axes.get("seq", 1)
        if devices == 1:
            if self.attention is not None:
                raise ShardingError(
                    f"--attention {self.attention}",
                    found="no seq axis",
                    required="a mesh with a seq axis",
                    fix="--mesh data=2,seq=2",
                )
            return None
        if pipeline is not None and self.attention in ("ring", "ring_self"):
            raise ShardingError(
                f"--attention {self.attention} --mesh pipe={pipeline.devices},seq={devices}",
                found="pipeline stages that run different tasks at a time",
                required="all devices in every step of a ring",
                fix="--attention ulysses",
            )
        return SequenceConfig(devices=devices, kind=self.attention or ("ring" if pipeline is None else "ulysses"))
