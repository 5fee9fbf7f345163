"""From the arguments of a call to an executable: trace, annotate, infer, constrain."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import graph, paths, propagation
from ..completion import Completion
from ..cost.topology import byte_costs, known_topology
from ..errors import ShardingError
from ..mesh import abstract, platform, tracing_context, with_auto_axes
from ..propagation import Assignment, Policy, shardy
from ..propagation.added_annotation import named_annotations
from ..rewrite import cpu_matmul_order
from ..rewrite.host_memory import resharded_on_device
from ..rewrite.placed_reshards import with_placed_reshards
from ..spec import MeshSizes, sizes_text
from . import argument_shardings, tracing
from .arguments import Arguments
from .array_layouts import layouts
from .donation import outputs_reusing_donated
from .executable import Executable
from .explicit_mode import ExplicitMode
from .mutations import unchanged
from .saved_completion import SavedCompletion
from .simplification import simplify
from .strict_checks import (
    refuse_gathers,
    refuse_ordered_effects,
    refuse_refs_elsewhere,
    refuse_shared_refs,
    refuse_uneven,
    report_unused_axis_rules,
)
from .symbolic_shapes import example_sizes, is_symbolic, with_sizes

Engine = Literal["sharding", "shardy", "xla"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

_log = logging.getLogger("sharding")


class Planned(Protocol):
    """What a `planner.Plan` says of a program."""

    @property
    def axes(self) -> Mapping[str, int]:
        """The mesh: axis -> size."""
        ...

    @property
    def annotations(self) -> Mapping[str, P]:
        """Name, as `Completion.annotate` takes it -> spec."""
        ...

    def tracing(self) -> AbstractContextManager[None]:
        """The context that programs are traced in."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options of `sharding.jit` beside those about parameters."""

    in_shardings: Any
    out_shardings: Any
    engine: str
    policy: Policy
    strict: bool
    max_implicit_bytes: int | None
    plan: Planned | None
    of_jax: dict[str, Any]
    """Options that are passed on to `jax.jit`."""


def executable(f: Callable[..., Any], options: Options, call: Arguments, mesh: Mesh | AbstractMesh) -> Executable:
    """The program of `f` for such arguments over a mesh."""
    function, names = call.signature.function, call.leaf_names
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise ShardingError(
            f"{function}(...)",
            found=f"the body of a shard_map over {', '.join(map(repr, manual))}",
            required="a call where all axes are Auto",
            fix="sharding.jit outside the shard_map, and sharding.annotate inside",
        )
    avals = tracing.abstract_leaves(call.leaves, names, function)
    if is_symbolic(avals):
        return _of_symbolic_shapes(f, options, call, avals, mesh)
    specs = argument_shardings.of_arguments(options.in_shardings, call)
    requested = argument_shardings.leaf_annotations(specs, avals, names, mesh, what="in_shardings", function=function)
    kinds = argument_shardings.memory_kinds(specs, call.leaves, names, function)
    in_annotations = argument_shardings.with_committed_shardings(call.leaves, requested, names, mesh, function)
    in_layouts = layouts(specs)
    auto = with_auto_axes(mesh)  # as it is traced
    in_memory = tracing.in_memory(avals, [NamedSharding(auto, P(), memory_kind=kind) for kind in kinds])
    as_written = tracing.trace(f, call, in_memory, ExplicitMode(in_annotations, mesh))
    refuse_shared_refs(call.refs, names, as_written.jaxpr, function)
    refuse_refs_elsewhere(as_written.jaxpr, mesh, function)
    refuse_ordered_effects(as_written.jaxpr, mesh, function)
    with tracing_context():  # as the program was: equations are traced anew
        jaxpr = simplify(as_written.jaxpr, lowering_platform(mesh))
        jaxpr = cpu_matmul_order.reorder(jaxpr) if lowering_platform(mesh) == "cpu" else jaxpr
        traced = dataclasses.replace(as_written, jaxpr=jaxpr)
    result, updated = traced.result, traced.updated
    out_names = [*paths.of_tree(result, "out"), *(f"new/{names[leaf]}" for leaf in updated)]
    specs = argument_shardings.broadcast_specs(options.out_shardings, [result], "out_shardings", function)
    specs += [None] * len(updated)
    out_annotations = argument_shardings.leaf_annotations(
        specs, traced.out_avals, out_names, mesh, what="out_shardings", function=function
    )
    donated, kept, leaves = call.donated, unchanged(call, updated), tracing.leaf_ranges(call.tree)
    is_annotated = [annotation is not None for annotation in out_annotations]
    ties = outputs_reusing_donated(traced, avals, call.tree, donated, is_annotated)
    ties |= {traced.out_tree.num_leaves + k: leaf for k, leaf in enumerate(updated)}
    built = graph.build(
        traced.jaxpr,
        sizes=dict(mesh.shape),
        in_names=names,
        out_names=out_names,
        in_annotations=in_annotations,
        out_annotations=out_annotations,
        shared=call.ties,
        in_memory_kinds=kinds,
        out_memory_kinds=[*map(argument_shardings.memory_kind, specs)],
        ties=ties,
    )
    if options.plan is not None:
        built.annotations.update(_planned(options.plan, built, mesh, function))
    built.replicated_by_default = argument_shardings.replicated_by_default(built, call.leaves, mesh)
    if not any(argument_shardings.committed_sharding(leaf, mesh) is not None for leaf in call.leaves):
        report_unused_axis_rules(built, function, strict=options.strict)
    if options.strict:
        refuse_uneven(built, dict(mesh.shape), function)
    assignment, saved = _assignment(options, built, traced, mesh, function)
    completion = Completion(
        assignment,
        name=function,
        in_trees=call.tree.children(),
        out_tree=traced.out_tree,
        donated=[leaf for i in donated for leaf in leaves[i] if leaf not in kept],
        platform=platform(mesh),
        devices=on.devices if (on := known_topology(mesh)) is not None else None,
    )
    if options.max_implicit_bytes is not None:
        refuse_gathers(completion.communication(), options.max_implicit_bytes, function)
    found = Executable(
        function=function,
        mesh=mesh,
        traced=as_written if options.engine == "xla" else traced,
        completion=completion,
        constrained=options.engine != "xla",
        layouts=(in_layouts, layouts(specs, ties, in_layouts)),
        of_jax=options.of_jax,
        on_rewritten=saved.update if saved is not None else None,
    )
    found.reuse_argument_shardings(call.leaves)
    return found


def _planned(
    plan: Planned, built: graph.Graph, mesh: Mesh | AbstractMesh, function: str
) -> dict[int, graph.Annotation]:
    """The annotations of a plan, without those of recomputed values that the program keeps."""
    if dict(mesh.shape) != dict(plan.axes):
        raise ShardingError(
            f"{function} with a plan for mesh {sizes_text(plan.axes)}",
            found=f"the mesh {sizes_text(mesh.shape)}",
            required="the mesh of the plan",
            fix="with plan.mesh(): ...",
        )
    return named_annotations(built, graph.Places(built).without_kept(plan.annotations), dict(mesh.shape))


def _of_symbolic_shapes(
    f: Callable[..., Any], options: Options, call: Arguments, avals: Sequence[Any], mesh: Mesh | AbstractMesh
) -> Executable:
    """Completed for an example of the shapes; of the program itself only what is annotated is constrained."""
    sizes = example_sizes(avals, dict(mesh.shape))
    example = dataclasses.replace(call, leaves=with_sizes(call.leaves, sizes))
    example.dynamic = jax.tree.unflatten(call.tree, example.leaves)
    found = executable(f, options, example, mesh)
    _log.warning(
        "%s: symbolic dims: completed for %s; inside the program only annotated values are constrained",
        call.signature.function,
        sizes_text(sizes),
    )
    return dataclasses.replace(found, traced=tracing.trace(f, call, avals), constrained=False, shardings={})


def _assignment(
    options: Options, built: graph.Graph, traced: tracing.Traced, mesh: Mesh | AbstractMesh, function: str
) -> tuple[Assignment, SavedCompletion | None]:
    """The completion, and its entry in the cache on disk, if it has one."""
    sizes = MeshSizes(dict(mesh.shape), byte_costs(known_topology(mesh)))
    if options.engine == "sharding":

        def complete() -> Assignment:
            found = propagation.complete(built, sizes, policy=options.policy)
            return with_placed_reshards(found, platform(mesh))

        saved = SavedCompletion.of(
            built, sizes, mesh, platform=platform(mesh), policy=options.policy, complete=complete, function=function
        )
        return (complete(), None) if saved is None else (saved.assignment, saved)
    if options.engine == "xla":
        return propagation.unannotated(built, sizes), None
    over = abstract(with_auto_axes(mesh))
    with tracing_context():
        found = shardy.complete(built, sizes, program=traced.jaxpr, mesh=over, platform=lowering_platform(mesh))
    return resharded_on_device(found), None


def lowering_platform(mesh: Mesh | AbstractMesh | None) -> str:
    """The platform to lower for, as JAX calls it there."""
    return "cuda" if platform(mesh) == "gpu" else platform(mesh)
