"""The per-device program of an assignment: instructions with local shapes, as XLA's partitioner would emit them."""

from __future__ import annotations

from dataclasses import dataclass

from ..propagation import Assignment
from ..rewrite.executed_assignment import executed
from . import control_flow_lowering
from .compiler_traits import CompilerTraits
from .dead_results import drop_dead_results
from .dim_orders import settle_layouts
from .emitter import Emitter
from .equation_lowering import Env, Handler, Lowering
from .instruction import Body, Instruction
from .loop_layouts import transpose_in_loops
from .loop_sinking import sink_into_loops
from .orders_in_place import keep_orders
from .product_fusion import fuse_products
from .product_layouts import transpose_operands, transpose_results
from .product_merging import merge_products
from .product_rounding import settle_rounding
from .product_slicing import slice_products
from .result_orders import copy_results
from .scatter_folding import fold_scatters
from .sum_merging import merge_sums
from .sum_scattering import scatter_sums
from .tile_layouts import pad_tiles
from .tile_reshapes import move_reshapes

HANDLERS: dict[str, Handler] = {
    "cond": control_flow_lowering.cond,
    "custom_linear_solve": control_flow_lowering.linear_solve,
    "scan": control_flow_lowering.scan,
    "shard_map": control_flow_lowering.shard_map,
    "while": control_flow_lowering.while_,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProgram:
    """The program that one device runs, with its arguments and results."""

    body: Body
    inputs: tuple[Instruction, ...]
    kept: frozenset[Instruction]
    """The inputs that the compiled program has: `jax.jit` drops those that the results don't depend on."""
    outputs: tuple[Instruction, ...]


def lower(assignment: Assignment, traits: CompilerTraits) -> DeviceProgram:
    """The program of an assignment on one device, as a compiler emits it."""
    assignment = executed(assignment)
    lowering = Lowering(assignment, HANDLERS, traits)
    g, emitter = lowering.graph, Emitter(lowering.sizes, lowering.cursor, traits)
    scope = g.scope
    assert scope is not None
    env: Env = dict.fromkeys(scope.jaxpr.constvars)
    inputs = []
    for var, v in zip(scope.jaxpr.invars, g.inputs, strict=True):
        spec = assignment.boundary_spec(v)
        itemsize = 0 if v in g.memory_kinds else lowering.itemsize(var.aval)
        x = emitter.argument(emitter.local_shape(g.shapes[v], spec), itemsize, v)
        inputs.append(x)
        env[var] = emitter.reshard(x, g.shapes[v], itemsize, spec, lowering.specs[v])
    lowering.lower_equations(scope.jaxpr, scope, env, emitter)
    outputs = []
    for atom, v, kind in zip(scope.jaxpr.outvars, g.outputs, g.output_memory_kinds, strict=True):
        spec, itemsize = assignment.boundary_spec(v), lowering.itemsize(atom.aval)
        x = lowering.read(atom, env)
        if x is None:
            x = emitter.constant(emitter.local_shape(g.shapes[v], spec), itemsize)
        else:
            x = emitter.reshard(x, g.shapes[v], itemsize, lowering.spec_of(atom, scope), spec)
        if lowering.memory_kind(atom, scope) != kind:
            itemsize = 0 if kind is not None else max(1, g.itemsize(v))
            x = emitter.emit("copy", "unfusible", [x], x.shape, itemsize, value=v)
        outputs.append(x)
    emitter.body.results = outputs
    sink_into_loops(emitter.body)
    drop_dead_results(emitter.body)
    fold_scatters(emitter.body)
    if traits.slices_products:
        slice_products(emitter.body)
    if traits.merges_sums:
        merge_sums(emitter.body)
    if traits.scatters_sums:
        scatter_sums(emitter.body)
    if traits.transposes_operands:
        transpose_operands(emitter.body)
        transpose_results(emitter.body)
        keep_orders(emitter.body)
    if traits.merges_products:
        merge_products(emitter.body)
    if traits.fuses_around_products:
        fuse_products(emitter.body)
    if traits.chooses_layouts:
        settle_layouts(emitter.body)
    if traits.rounds_early:
        settle_rounding(emitter.body)
    if traits.stores_tiles:
        transpose_in_loops(emitter.body)
        copy_results(emitter.body)
        move_reshapes(emitter.body)
        pad_tiles(emitter.body)
    kept = frozenset(x for x, is_used in zip(inputs, g.inputs_used, strict=True) if is_used)
    return DeviceProgram(emitter.body, tuple(inputs), kept, tuple(emitter.body.results))
