"""Opt-in checks before compilation: annotations that do not divide evenly, and large implicit all-gathers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from .. import compat
from ..annotations import axis_rules
from ..errors import ShardingError, raise_together, warn
from ..explain import Ledger
from ..graph import Graph
from ..spec import axis_name, indivisible, to_partition_spec
from .arguments import ref_elsewhere


def refuse_uneven(graph: Graph, sizes: Mapping[str, int], function: str) -> None:
    """Raises one error for all annotations whose axes do not divide their array."""
    failures = [
        ShardingError(
            f"{annotation.origin}: {to_partition_spec(annotation.spec)}",
            found=[f"an array of shape {graph.shapes[v]}", *faults],
            required="dims divisible by the product of their axis sizes, under strict=True",
            fix="a divisible size, fewer axes, or strict=False for padding",
        )
        for v, annotation in graph.annotations.items()
        if (faults := indivisible(annotation.spec, graph.shapes[v], sizes))
    ]
    raise_together(function, failures)


def report_unused_axis_rules(graph: Graph, function: str, *, strict: bool) -> None:
    """Notes the axis rules that no annotation of a program comes from, and warns if nothing at all is annotated.

    Flax resolves the names of its parameters itself.

    Raises:
        ShardingError: nothing is annotated, under strict.
    """
    graph.unused_axis_rules = axis_rules.unused(annotation.spec for annotation in graph.annotations.values())
    if not graph.unused_axis_rules or graph.annotations:
        return
    unused = ", ".join(graph.unused_axis_rules)
    if strict:
        raise ShardingError(
            f"{function}: axis rules",
            found=f"nothing is annotated, also not by {unused}",
            required="an annotation with a logical name, under strict=True",
            fix="names of the rules in P(...), or a call outside of sharding.axis_rules",
        )
    warn(f"{function}: nothing is annotated, also not by the axis rules {unused}")


def refuse_gathers(ledger: Ledger, limit: int, function: str) -> None:
    """Raises one error for all implicit moves that leave more than `limit` bytes of an array on every device.

    Also for sharded operands of ops that are left to XLA, which may gather them.
    """
    failures = [
        ShardingError(
            f"{c.op} at {c.source}" if c.source else c.op,
            found=f"{c.cause}: {c.kind} over {', '.join(map(axis_name, c.axes))}, {c.result_bytes} bytes per device",
            required=f"implicit all-gathers of at most max_implicit_bytes={limit}",
            fix=c.hint,
        )
        for c in ledger
        if c.is_move and c.kind in ("all-gather", "all-reduce") and c.result_bytes > limit
    ]
    failures += [
        ShardingError(
            f"{one.op} at {one.source}" if one.source else one.op,
            found=f"no rule for sharded {', '.join(one.gathered)}, {one.num_bytes} bytes per device if gathered",
            required=f"a known sharding, under max_implicit_bytes={limit}",
            fix=one.fix,
        )
        for one in ledger.unknown
        if not one.is_predicted and one.gathered
    ]
    raise_together(function, failures)


EFFECTS = {"OrderedDebugEffect": "jax.debug.print or jax.debug.callback with ordered=True"}
"""JAX's class of an effect -> what has it."""


def refuse_ordered_effects(jaxpr: Any, mesh: Mesh | AbstractMesh, function: str) -> None:
    """Raises for effects that JAX cannot order across several devices."""
    if mesh.size > 1 and (effects := compat.ordered_on_one_device(jaxpr)):
        raise ShardingError(
            f"{function}(...)",
            found=f"{', '.join(EFFECTS.get(name, name) for name in effects)} on a mesh of {mesh.size} devices",
            required="effects that JAX orders across devices, or that need no order",
            fix=["jax.debug.print(..., ordered=False)", "jax.experimental.io_callback(..., ordered=True)"],
        )


def refuse_shared_refs(refs: Mapping[int, Any], names: Sequence[str], jaxpr: Any, function: str) -> None:
    """Raises for a mutable array that comes in twice: as two arguments, or as one that the function closes over, too.

    Args:
        refs: leaf -> the mutable arrays among the arguments.
        names: of the leaves.
        jaxpr: the traced program.
        function: its name.
    """
    first: dict[int, str] = {id(x): "closed over" for x in compat.constants(jaxpr) if compat.is_ref(x)}
    found = []
    for leaf, ref in refs.items():
        if id(ref) in first:
            found.append(f"{names[leaf]} is the mutable array that is {first[id(ref)]}")
        first.setdefault(id(ref), f"also {names[leaf]}")
    if found:
        raise ShardingError(
            f"{function}(...)",
            found=found[:8],
            required="each mutable array (jax.new_ref) once: what is written to one would not be read from the other",
            fix="pass it as one argument",
        )


def refuse_refs_elsewhere(jaxpr: Any, mesh: Mesh | AbstractMesh, function: str) -> None:
    """Raises for mutable arrays that a function closes over and that are not on all devices of the mesh."""
    refs = [x for x in compat.constants(jaxpr) if compat.is_ref(x) and not isinstance(x, compat.Tracer)]
    devices = set(mesh.devices.flat) if isinstance(mesh, Mesh) else None
    if any(ref.sharding.device_set != devices for ref in refs):
        found = "a mutable array (jax.new_ref) that the function closes over, on other devices than the mesh"
        raise ref_elsewhere(f"{function}(...)", found)
