"""Programs written for Explicit axes, which name the sharding of results: traced with Auto axes, JAX rejects them.

They are traced with Explicit axes, where a sharding is part of a type, and what the types say becomes annotations
(`explicit_regions.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import ShardingError
from ..graph import Annotation
from ..mesh import abstract, tracing_context
from ..spec import limited_to, to_partition_spec


@dataclass(frozen=True, slots=True)
class ExplicitMode:
    """How to trace a program with Explicit axes."""

    annotations: Sequence[Annotation | None]
    """Of the leaves of the arguments."""
    mesh: Mesh | AbstractMesh
    """The current mesh; if none of its axes is Explicit, all are for the trace."""

    @property
    def explicit_mesh(self) -> AbstractMesh:
        """The mesh to trace with."""
        mesh = abstract(self.mesh)
        if AxisType.Explicit in mesh.axis_types:
            return mesh
        return mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Explicit))

    def types(self, avals: Sequence[Any]) -> list[Any]:
        """The abstract leaves with their annotations as part of their types."""
        mesh = self.explicit_mesh
        names = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit]
        found = []
        for aval, annotation in zip(avals, self.annotations, strict=True):
            spec = P() if annotation is None else limited_to(to_partition_spec(annotation.spec), names)
            memory_kind = None if aval.sharding is None else aval.sharding.memory_kind
            sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
            found.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding))
        return found

    @contextmanager
    def tracing(self, function: str, first: ValueError) -> Iterator[None]:
        """The context to trace in, where JAX's errors say what to write instead."""
        try:
            with tracing_context(), jax.sharding.use_abstract_mesh(self.explicit_mesh):
                yield
        except Exception as error:
            if not isinstance(error, ValueError) and type(error).__name__ != "ShardingTypeError":
                raise
            raise ShardingError(
                f"{function}(...)",
                found=["a program that names the sharding of a result", _reason(first), _reason(error)],
                required="the sharding of each result where it does not follow from the operands', as of Explicit axes",
                fix=[
                    "sharding.annotate(x, P(...)) instead of out_sharding=P(...) or jax.sharding.reshard(x, P(...)), to"
                    " have all others inferred",
                    "jax.sharding.explicit_axes around the part that needs them",
                    "arrays on a mesh with Explicit axes as arguments, or created inside the function",
                ],
            ) from error


def needs_explicit_axes(error: ValueError) -> bool:
    """Whether a program could not be traced because it names the sharding of a result, or has an array that does."""
    reason = _reason(error)
    names_axes = "cannot contain axis names that are of type Auto" in reason or "of type `Explicit`" in reason
    return names_axes or ("Explicit" in reason and "should match the aval mesh" in reason)


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0]
