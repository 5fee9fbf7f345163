"""One stage of a model as programs of their own: forward, backward, and the backward's two parts.

Traced once for all stages, microbatches and devices. What a forward leaves for its backward are only arrays that depend
on its input: weights are at hand, and what is made of them alone is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from .equations import Equations, equations, variables
from .flow import Arrays, Flow, Passing, is_float


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Functions of a stage's weights and of flat arrays.

    Shapes: `residual_shapes` are what a forward leaves for its backward, `saved_shapes` what backward-input leaves for
    backward-weight.
    """

    passing: Passing
    weights_tree: Any
    weights_are_float: tuple[bool, ...]
    forward_program: Equations
    backward_program: Equations
    input_program: Equations
    weight_program: Equations
    flow_shapes: Flow
    residual_shapes: Arrays
    saved_shapes: Arrays

    def forward(self, weights: Any, flow: Flow) -> tuple[Flow, Arrays]:
        """The stage's output, and what its backward needs."""
        out = self.forward_program(*jax.tree.leaves(weights), *flow.floats, *flow.others)
        num_floats, num = len(flow.floats), len(flow.floats) + len(flow.others)
        return Flow(out[:num_floats], out[num_floats:num]), out[num:]

    def backward(self, weights: Any, residuals: Arrays, gradient: Arrays) -> tuple[Any, Arrays]:
        """The gradients of the weights and of the input's floats."""
        out = self.backward_program(*jax.tree.leaves(weights), *residuals, *gradient)
        num = sum(self.weights_are_float)
        return self._gradients(weights, out[:num]), out[num:]

    def backward_input(self, weights: Any, residuals: Arrays, gradient: Arrays) -> tuple[Arrays, Arrays]:
        """The gradient of the input's floats, and what backward_weight needs."""
        out = self.input_program(*jax.tree.leaves(weights), *residuals, *gradient)
        num = len(self.flow_shapes.floats)
        return out[:num], out[num:]

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


def traced(stage_fn: Callable[[Any, Any], Any], weights: Any, x: Any) -> Stage:
    """The stage for weights and inputs of such shapes."""
    passing = Passing.of(x)
    flow = jax.eval_shape(passing.flow, x)
    weight_leaves, weights_tree = jax.tree.flatten(weights)
    are_float = tuple(is_float(leaf) for leaf in weight_leaves)
    num_weights, num_floats = len(weight_leaves), len(flow.floats)
    kept: dict[str, Any] = {}

    def primal(*arrays: Any) -> Arrays:
        own, floats = arrays[:num_weights], list(arrays[num_weights:][:num_floats])
        others = list(arrays[num_weights + num_floats :])

        def run(trained: Arrays, floats: Arrays) -> Flow:
            rest = iter(trained)
            w = [next(rest) if f else leaf for f, leaf in zip(are_float, own, strict=True)]
            y = stage_fn(jax.tree.unflatten(weights_tree, w), passing.tree_of(Flow(floats, others)))
            return passing.flow(y)

        trained = [leaf for f, leaf in zip(are_float, own, strict=True) if f]
        y, vjp, y_others = jax.vjp(run, trained, floats, has_aux=True)
        residuals, kept["vjp"] = jax.tree.flatten(vjp)
        return [*y, *y_others, *residuals]

    forward = equations(primal, *weight_leaves, *flow.floats, *flow.others)
    num_out = num_floats + len(flow.others)
    residuals = forward.outputs[num_out:]

    def pulled(*arrays: Any) -> Arrays:
        count = len(residuals)
        dw, dx = jax.tree.unflatten(kept["vjp"], arrays[:count])(list(arrays[count:]))
        return [*dw, *dx]

    backward = equations(pulled, *[atom.aval for atom in residuals], *flow.floats)
    return _split(
        forward,
        backward,
        num_weights=num_weights,
        num_out=num_out,
        facts={
            "passing": passing,
            "weights_tree": weights_tree,
            "weights_are_float": are_float,
            "flow_shapes": flow,
        },
    )


def _split(forward: Equations, backward: Equations, *, num_weights: int, num_out: int, facts: dict[str, Any]) -> Stage:
    """The four programs, out of the forward's equations and those of its transposed linear part."""
    own, residuals = forward.inputs[:num_weights], forward.outputs[num_out:]
    varying = forward.reached(forward.inputs[num_weights:])
    kept = list(dict.fromkeys(var for var in variables(residuals) if var in varying))
    # The operands of the backward are named as the forward names them, so that both are one program.
    whole = _joined(forward, backward, residuals)
    gradient = backward.inputs[len(residuals) :]
    num_gradients = sum(facts["weights_are_float"])
    dw, dx = whole.outputs[:num_gradients], whole.outputs[num_gradients:]
    given = [*own, *kept, *gradient]
    for_input = whole.needed(dx, given=given)
    # The weight part takes what the input part made, but makes again what is of the weights alone.
    made = {var for eqn in for_input for var in eqn.outvars} & whole.reached([*kept, *gradient])
    for_weight = whole.needed(dw, given=[*given, *made])
    used = set(variables(dw)).union(*(variables(eqn.invars) for eqn in for_weight))
    inside = {var for eqn in for_weight for var in eqn.outvars}
    saved = [var for var in _in_order(whole, [*kept, *gradient]) if var in used and var not in inside]
    return Stage(
        forward_program=forward.part(forward.inputs, [*forward.outputs[:num_out], *kept], forward.eqns),
        backward_program=whole.part(given, whole.outputs, whole.needed(whole.outputs, given=given)),
        input_program=whole.part(given, [*dx, *saved], for_input),
        weight_program=whole.part([*own, *saved], dw, for_weight),
        residual_shapes=[_shape(var) for var in kept],
        saved_shapes=[_shape(var) for var in saved],
        **facts,
    )


def _joined(forward: Equations, backward: Equations, residuals: Sequence[Any]) -> Equations:
    """The backward behind the forward, its operands those that the forward makes."""
    names = dict(zip(backward.inputs, residuals, strict=False))

    def read(atom: Any) -> Any:
        return atom if compat.is_literal(atom) else names.get(atom, atom)

    eqns = tuple(eqn.replace(invars=[read(atom) for atom in eqn.invars]) for eqn in backward.eqns)
    return Equations(
        inputs=(),
        eqns=(*forward.eqns, *eqns),
        outputs=tuple(read(atom) for atom in backward.outputs),
        values=forward.values | backward.values,
    )


def _in_order(program: Equations, first: Sequence[Any]) -> list[Any]:
    """Variables, each once."""
    return list(dict.fromkeys([*first, *(var for eqn in program.eqns for var in eqn.outvars)]))


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
