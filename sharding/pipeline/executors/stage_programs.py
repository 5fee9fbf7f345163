"""Programs of one stage: forward, backward, and the split backward.

Traced once for all stages, microbatches and devices. Residuals are only arrays that depend on the stage's input: the
weights are available in the backward, and arrays computed from them alone are rematerialized. So are the results of
cheap elementwise equations on other residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ... import compat
from ...graph.straight_line import Program, trace_program, variables
from ...rewrite.cpu_matmul_order import reordered
from ...rules.rule_table import ELEMENTWISE, TRANSCENDENTAL
from .activations import EMPTY, Activation, ActivationTree, Arrays, is_float

CHEAP = (ELEMENTWISE - TRANSCENDENTAL | {"broadcast_in_dim", "div", "reshape", "squeeze"}) - {"name"}
"""Primitives that are cheaper to rematerialize than to store and load."""


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """Functions of a stage's weights and of flat arrays.

    `residual_shapes` are stored by the forward for the backward, `saved_shapes` by backward-input for backward-weight.
    With sliced sequences, a context is passed from each slice to the next at this stage, such as keys and values, and
    its gradient is passed back. Without slices it has no arrays.
    """

    activation_tree: ActivationTree
    """Structure of the activations."""
    weights_tree: Any
    weights_are_float: tuple[bool, ...]
    forward_program: Program
    backward_program: Program
    input_program: Program
    weight_program: Program
    activation_shapes: Activation
    context_shapes: Activation
    after_shapes: Arrays
    """Floats of the next slice's context, which may be longer."""
    residual_shapes: Arrays
    saved_shapes: Arrays

    def forward(
        self, weights: Any, activation: Activation, context: Activation = EMPTY
    ) -> tuple[Activation, Activation, Arrays]:
        """The stage's output, the next slice's context, and the residuals."""
        given = [*activation.floats, *context.floats, *activation.others, *context.others]
        out = self.forward_program(*jax.tree.leaves(weights), *given)
        found, residuals = out[: len(given)], out[len(given) :]
        floats, others = _split_at(found, len(activation.floats) + len(context.floats))
        (y, y_others), (after, after_others) = (
            _split_at(floats, len(activation.floats)),
            _split_at(others, len(activation.others)),
        )
        return Activation(y, after), Activation(y_others, after_others), residuals

    def backward(
        self, weights: Any, residuals: Arrays, dy: Arrays, after: Sequence[Any] = ()
    ) -> tuple[Any, Arrays, Arrays]:
        """The gradients of the weights, and of the floats of the input and of the context.

        Args:
            weights: of the forward.
            residuals: of the forward.
            dy: gradient of the floats of its output.
            after: gradient of the next slice's context.
        """
        out = self.backward_program(*jax.tree.leaves(weights), *residuals, *dy, *after)
        dw, dx = _split_at(out, sum(self.weights_are_float))
        return self._gradients(weights, dw), *_split_at(dx, len(dy))

    def backward_input(
        self, weights: Any, residuals: Arrays, dy: Arrays, after: Sequence[Any] = ()
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The gradients of the floats of the input and of the context, and operands of backward_weight."""
        out = self.input_program(*jax.tree.leaves(weights), *residuals, *dy, *after)
        dx, saved = _split_at(out, len(dy) + len(after))
        return *_split_at(dx, len(dy)), saved

    def backward_weight(self, weights: Any, saved: Arrays) -> Any:
        """The gradient of the weights."""
        return self._gradients(weights, self.weight_program(*jax.tree.leaves(weights), *saved))

    def _gradients(self, weights: Any, found: Arrays) -> Any:
        rest = iter(found)
        leaves, tree = jax.tree.flatten(weights)
        return jax.tree.unflatten(
            tree,
            [next(rest) if f else jnp.zeros_like(w) for f, w in zip(self.weights_are_float, leaves, strict=True)],
        )


def trace_stage(stage_fn: Callable[..., Any], weights: Any, x: Any, context: Any = None) -> StagePrograms:
    """Traces the stage for these shapes of weights, inputs and context; no context means no slices."""
    both = ActivationTree.of((x, context))
    given, activation, before = (
        jax.eval_shape(ActivationTree.of(tree).flatten, tree) for tree in ((x, context), x, context)
    )
    weight_leaves, weights_tree = jax.tree.flatten(weights)
    are_float = tuple(is_float(leaf) for leaf in weight_leaves)
    num_weights, num_floats = len(weight_leaves), len(given.floats)
    kept: dict[str, Any] = {}

    def primal(*arrays: Any) -> Arrays:
        own, floats = arrays[:num_weights], list(arrays[num_weights:][:num_floats])
        others = list(arrays[num_weights + num_floats :])

        def run(trained: Arrays, floats: Arrays) -> Activation:
            rest = iter(trained)
            w = [next(rest) if f else leaf for f, leaf in zip(are_float, own, strict=True)]
            x, context = both.unflatten(Activation(floats, others))
            weights = jax.tree.unflatten(weights_tree, w)
            found = stage_fn(weights, x) if context is None else stage_fn(weights, x, context)
            return both.flatten(found)

        trained = [leaf for f, leaf in zip(are_float, own, strict=True) if f]
        y, vjp, y_others = jax.vjp(run, trained, floats, has_aux=True)
        residuals, kept["vjp"] = jax.tree.flatten(vjp)
        return [*y, *y_others, *residuals]

    forward = trace_program(primal, *weight_leaves, *given.floats, *given.others)
    num_out = num_floats + len(given.others)
    residuals = forward.outputs[num_out:]

    def pullback(*arrays: Any) -> Arrays:
        count = len(residuals)
        dw, dx = jax.tree.unflatten(kept["vjp"], arrays[:count])(list(arrays[count:]))
        return [*dw, *dx]

    out_floats = [atom.aval for atom in forward.outputs[:num_floats]]
    traced = trace_program(pullback, *[atom.aval for atom in residuals], *out_floats)
    backward = traced.subprogram(traced.inputs, traced.outputs, reordered(traced.eqns, traced.outputs))
    return _partition(
        forward,
        backward,
        num_weights=num_weights,
        num_out=num_out,
        fields={
            "activation_tree": ActivationTree.of(x),
            "weights_tree": weights_tree,
            "weights_are_float": are_float,
            "activation_shapes": activation,
            "context_shapes": before,
            "after_shapes": [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in out_floats[len(activation.floats) :]],
        },
    )


def _partition(
    forward: Program, backward: Program, *, num_weights: int, num_out: int, fields: dict[str, Any]
) -> StagePrograms:
    """Partitions the equations of the forward and of its transpose into the four programs."""
    own, residuals = forward.inputs[:num_weights], forward.outputs[num_out:]
    varying = forward.dependents(forward.inputs[num_weights:])
    residual_vars = list(dict.fromkeys(var for var in variables(residuals) if var in varying))
    kept = _recompute_sources(forward, residual_vars, varying)
    # Substitute the forward's variables for the backward's operands, so that both form one program.
    joint = _append(forward, backward, residuals)
    gradient = backward.inputs[len(residuals) :]
    num_gradients = sum(fields["weights_are_float"])
    dw, dx = joint.outputs[:num_gradients], joint.outputs[num_gradients:]
    given = [*own, *kept, *gradient]
    # backward-weight reuses intermediates of backward-input, but rematerializes those of the weights alone.
    made = {var for eqn in joint.required_eqns(dx, given=[*own, *residual_vars, *gradient]) for var in eqn.outvars}
    available = [*residual_vars, *gradient, *(made & joint.dependents([*residual_vars, *gradient]))]
    for_weight = joint.required_eqns(dw, given=[*own, *available])
    used = set(variables(dw)).union(*(variables(eqn.invars) for eqn in for_weight))
    inside = {var for eqn in for_weight for var in eqn.outvars}
    saved = [var for var in _in_order(joint, [*residual_vars, *gradient]) if var in used and var not in inside]
    return StagePrograms(
        forward_program=forward.subprogram(forward.inputs, [*forward.outputs[:num_out], *kept], forward.eqns),
        backward_program=joint.subprogram(given, joint.outputs, joint.required_eqns(joint.outputs, given=given)),
        input_program=joint.subprogram(given, [*dx, *saved], joint.required_eqns([*dx, *saved], given=given)),
        weight_program=joint.subprogram([*own, *saved], dw, for_weight),
        residual_shapes=[_shape(var) for var in kept],
        saved_shapes=[_shape(var) for var in saved],
        **fields,
    )


def _recompute_sources(forward: Program, residual_vars: Sequence[Any], varying: set[Any]) -> list[Any]:
    """Arrays from which cheap equations recompute the residuals; not more of them, nor larger ones."""
    cheap = {var: eqn for eqn in forward.eqns if eqn.primitive.name in CHEAP for var in eqn.outvars}

    def origin(var: Any) -> Any:
        operands = varying.intersection(variables(cheap[var].invars)) if var in cheap else ()
        if len(operands) == 1 and _num_bytes(*operands) <= _num_bytes(var):
            return origin(*operands)
        return var

    sources, made = {origin(var) for var in residual_vars}, set[Any]()
    for eqn in forward.eqns:
        missing = varying.intersection(variables(eqn.invars)) - made - sources
        if eqn.primitive.name in CHEAP and not missing:
            made.update(varying.intersection(eqn.outvars))
    return [var for var in _in_order(forward, forward.inputs) if var in sources and var not in made]


def _append(forward: Program, backward: Program, residuals: Sequence[Any]) -> Program:
    """The backward appended to the forward, with the forward's variables as its operands."""
    names = dict(zip(backward.inputs, residuals, strict=False))

    def read(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else names.get(atom, atom)

    eqns = tuple(eqn.replace(invars=[read(atom) for atom in eqn.invars]) for eqn in backward.eqns)
    return Program(
        inputs=(),
        eqns=(*forward.eqns, *eqns),
        outputs=tuple(read(atom) for atom in backward.outputs),
        values=forward.values | backward.values,
    )


def _split_at(arrays: Arrays, at: int) -> tuple[Arrays, Arrays]:
    return arrays[:at], arrays[at:]


def _in_order(program: Program, first: Sequence[Any]) -> list[Any]:
    """All variables in order, each once."""
    return list(dict.fromkeys([*first, *(var for eqn in program.eqns for var in eqn.outvars)]))


def _num_bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
