"""One of the programs that a plan may be of: the step, or a version in stages, with what its blocks keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from .. import compat
from ..completion import Completion
from ..cost import Topology
from ..cost.topology import topology_of_sizes
from ..hardware import Devices
from ..mesh import mesh as mesh_of
from ..spec import sizes_text
from . import plan_remat
from .plan_stages import Stages


@dataclass(frozen=True, kw_only=True)
class Version:
    """A step to plan: whole or in stages, with a choice of what its blocks keep."""

    step: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stages: Stages | None = None
    policies: plan_remat.Policies = field(default_factory=dict)
    """What blocks under `remat.auto` keep."""
    known: tuple[Mapping[str, int], Completion] | None = None
    """A mesh and the program over it, if that was completed."""

    def completed(self, axes: Mapping[str, int], devices: Devices) -> tuple[Completion, Topology]:
        """The program over a mesh without a plan, and the mesh with its links."""
        on = topology_of_sizes(axes, devices, None)
        if self.known is not None and list(self.known[0].items()) == list(axes.items()):
            return self.known[1], on
        with mesh_of(dict(axes), devices=devices), plan_remat.tracing(self.policies):
            return self.step.complete(*self.args, **self.kwargs), on

    def ends(self, axes: Mapping[str, int], devices: Devices) -> list[Version]:
        """The versions that keep most and least for their backward; one if nothing chooses."""
        with mesh_of(dict(axes), devices=devices):
            choices, completion = plan_remat.ends(self.step, self.args, self.kwargs)
        if not choices:
            return [dataclasses.replace(self, known=(axes, completion))]
        return [dataclasses.replace(self, policies=policies) for policies in choices]

    def without_arrays(self) -> Version:
        """The same with shapes for arguments, so that a plan that can be asked again keeps no array alive.

        Committed ones keep their sharding, which is an annotation.
        """

        def shape(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            sharding = x.sharding if compat.is_committed(x) else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=sharding)

        return dataclasses.replace(self, args=jax.tree.map(shape, self.args))

    def name(self, axes: Mapping[str, int]) -> str:
        """The version on a mesh."""
        return sizes_text(axes) + (f", {self.stages}" if self.stages else "")
