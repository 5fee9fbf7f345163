"""One stage of a model as programs of their own: forward, backward, and the backward's two parts.

Traced once for all stages, microbatches and devices. What a forward leaves for its backward are only arrays that depend
on its input: weights are at hand, and what is made of them alone is made again. So is what cheap elementwise equations
make of other arrays that are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ... import compat
from ...memory.primitives import EXPENSIVE
from ...rules.table import ELEMENTWISE
from .equations import Equations, equations, variables
from .flow import NOTHING, Arrays, Flow, Passing, is_float
from .products import ordered

CHEAP = (ELEMENTWISE - EXPENSIVE | {"broadcast_in_dim", "div", "reshape", "squeeze"}) - {"name"}
"""Equations that take less to run again than their results take to be stored and read."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Functions of a stage's weights and of flat arrays.

    Shapes: `residual_shapes` are what a forward leaves for its backward, `saved_shapes` what backward-input leaves for
    backward-weight. Where sequences are cut, a context goes from each slice of one to the next at this stage, such as
    keys and values; its gradient comes back. Without there is none: no arrays.
    """

    passing: Passing
    """What goes from stage to stage."""
    weights_tree: Any
    weights_are_float: tuple[bool, ...]
    forward_program: Equations
    backward_program: Equations
    input_program: Equations
    weight_program: Equations
    flow_shapes: Flow
    context_shapes: Flow
    after_shapes: Arrays
    """Of the floats of the next slice's context, which may be longer."""
    residual_shapes: Arrays
    saved_shapes: Arrays

    def forward(self, weights: Any, flow: Flow, context: Flow = NOTHING) -> tuple[Flow, Flow, Arrays]:
        """The stage's output, the context of the next slice, and what the backward needs."""
        given = [*flow.floats, *context.floats, *flow.others, *context.others]
        out = self.forward_program(*jax.tree.leaves(weights), *given)
        found, residuals = out[: len(given)], out[len(given) :]
        floats, others = _cut(found, len(flow.floats) + len(context.floats))
        (y, y_others), (after, after_others) = _cut(floats, len(flow.floats)), _cut(others, len(flow.others))
        return Flow(y, after), Flow(y_others, after_others), residuals

    def backward(
        self, weights: Any, residuals: Arrays, dy: Arrays, after: Sequence[Any] = ()
    ) -> tuple[Any, Arrays, Arrays]:
        """The gradients of the weights, and of the floats of the input and of the context.

        Args:
            weights: those of the forward.
            residuals: what it left.
            dy: the gradient of the floats of its output.
            after: that of the next slice's context.
        """
        out = self.backward_program(*jax.tree.leaves(weights), *residuals, *dy, *after)
        dw, dx = _cut(out, sum(self.weights_are_float))
        return self._gradients(weights, dw), *_cut(dx, len(dy))

    def backward_input(
        self, weights: Any, residuals: Arrays, dy: Arrays, after: Sequence[Any] = ()
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The gradients of the floats of the input and of the context, and what backward_weight needs."""
        out = self.input_program(*jax.tree.leaves(weights), *residuals, *dy, *after)
        dx, saved = _cut(out, len(dy) + len(after))
        return *_cut(dx, len(dy)), saved

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


def traced(stage_fn: Callable[..., Any], weights: Any, x: Any, context: Any = None) -> Stage:
    """The stage for weights, inputs and contexts of such shapes; the function gets a context where there is one."""
    both = Passing.of((x, context))
    given, flow, before = (jax.eval_shape(Passing.of(tree).flow, tree) for tree in ((x, context), x, context))
    weight_leaves, weights_tree = jax.tree.flatten(weights)
    are_float = tuple(is_float(leaf) for leaf in weight_leaves)
    num_weights, num_floats = len(weight_leaves), len(given.floats)
    kept: dict[str, Any] = {}

    def primal(*arrays: Any) -> Arrays:
        own, floats = arrays[:num_weights], list(arrays[num_weights:][:num_floats])
        others = list(arrays[num_weights + num_floats :])

        def run(trained: Arrays, floats: Arrays) -> Flow:
            rest = iter(trained)
            w = [next(rest) if f else leaf for f, leaf in zip(are_float, own, strict=True)]
            x, context = both.tree_of(Flow(floats, others))
            weights = jax.tree.unflatten(weights_tree, w)
            found = stage_fn(weights, x) if context is None else stage_fn(weights, x, context)
            return both.flow(found)

        trained = [leaf for f, leaf in zip(are_float, own, strict=True) if f]
        y, vjp, y_others = jax.vjp(run, trained, floats, has_aux=True)
        residuals, kept["vjp"] = jax.tree.flatten(vjp)
        return [*y, *y_others, *residuals]

    forward = equations(primal, *weight_leaves, *given.floats, *given.others)
    num_out = num_floats + len(given.others)
    residuals = forward.outputs[num_out:]

    def pulled(*arrays: Any) -> Arrays:
        count = len(residuals)
        dw, dx = jax.tree.unflatten(kept["vjp"], arrays[:count])(list(arrays[count:]))
        return [*dw, *dx]

    out_floats = [atom.aval for atom in forward.outputs[:num_floats]]
    backward = ordered(equations(pulled, *[atom.aval for atom in residuals], *out_floats))
    return _split(
        forward,
        backward,
        num_weights=num_weights,
        num_out=num_out,
        facts={
            "passing": Passing.of(x),
            "weights_tree": weights_tree,
            "weights_are_float": are_float,
            "flow_shapes": flow,
            "context_shapes": before,
            "after_shapes": [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in out_floats[len(flow.floats) :]],
        },
    )


def _split(forward: Equations, backward: Equations, *, num_weights: int, num_out: int, facts: dict[str, Any]) -> Stage:
    """The four programs, out of the forward's equations and those of its transposed linear part."""
    own, residuals = forward.inputs[:num_weights], forward.outputs[num_out:]
    varying = forward.reached(forward.inputs[num_weights:])
    left = list(dict.fromkeys(var for var in variables(residuals) if var in varying))
    kept = _sources(forward, left, varying)
    # The operands of the backward are named as the forward names them, so that both are one program.
    whole = _joined(forward, backward, residuals)
    gradient = backward.inputs[len(residuals) :]
    num_gradients = sum(facts["weights_are_float"])
    dw, dx = whole.outputs[:num_gradients], whole.outputs[num_gradients:]
    given = [*own, *kept, *gradient]
    # The weight part takes what the input part made, but makes again what is of the weights alone.
    made = {var for eqn in whole.needed(dx, given=[*own, *left, *gradient]) for var in eqn.outvars}
    there = [*left, *gradient, *(made & whole.reached([*left, *gradient]))]
    for_weight = whole.needed(dw, given=[*own, *there])
    used = set(variables(dw)).union(*(variables(eqn.invars) for eqn in for_weight))
    inside = {var for eqn in for_weight for var in eqn.outvars}
    saved = [var for var in _in_order(whole, [*left, *gradient]) if var in used and var not in inside]
    return Stage(
        forward_program=forward.part(forward.inputs, [*forward.outputs[:num_out], *kept], forward.eqns),
        backward_program=whole.part(given, whole.outputs, whole.needed(whole.outputs, given=given)),
        input_program=whole.part(given, [*dx, *saved], whole.needed([*dx, *saved], given=given)),
        weight_program=whole.part([*own, *saved], dw, for_weight),
        residual_shapes=[_shape(var) for var in kept],
        saved_shapes=[_shape(var) for var in saved],
        **facts,
    )


def _sources(forward: Equations, left: Sequence[Any], varying: set[Any]) -> list[Any]:
    """Arrays of which cheap equations make all that a forward leaves; not more of them, nor larger ones."""
    cheap = {var: eqn for eqn in forward.eqns if eqn.primitive.name in CHEAP for var in eqn.outvars}

    def origin(var: Any) -> Any:
        operands = varying.intersection(variables(cheap[var].invars)) if var in cheap else ()
        if len(operands) == 1 and _bytes(*operands) <= _bytes(var):
            return origin(*operands)
        return var

    wanted, made = {origin(var) for var in left}, set[Any]()
    for eqn in forward.eqns:
        missing = varying.intersection(variables(eqn.invars)) - made - wanted
        if eqn.primitive.name in CHEAP and not missing:
            made.update(varying.intersection(eqn.outvars))
    return [var for var in _in_order(forward, forward.inputs) if var in wanted and var not in made]


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


def _cut(arrays: Arrays, at: int) -> tuple[Arrays, Arrays]:
    return arrays[:at], arrays[at:]


def _in_order(program: Equations, first: Sequence[Any]) -> list[Any]:
    """Variables, each once."""
    return list(dict.fromkeys([*first, *(var for eqn in program.eqns for var in eqn.outvars)]))


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _shape(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
