"""One step of a loop with its derivative: what it keeps for its backward, without what is at hand there anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .. import compat

Arrays = list[Any]
Step = Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
"""(constants, carry, x) -> (carry, y), flat."""


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class AtHand:
    """A residual that is one of the constants or of the step's own inputs, by its number."""

    number: int


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class Derivative:
    """A step whose derivative is taken by some of its constants and inputs."""

    step: Step
    constants: tuple[bool, ...]
    """Which constants have a gradient."""
    inputs: tuple[bool, ...]
    """Which leaves of x have one. In the carry it is all floats."""

    def record(self, constants: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Any]:
        """(carry, y, residuals): the residuals are a pytree of arrays."""
        floats = [is_float(leaf) for leaf in carry]

        def run(of_constants: Arrays, of_carry: Arrays, of_x: Arrays) -> Any:
            merged = merge(self.constants, of_constants, constants), merge(floats, of_carry, carry)
            carried, y = self.step(*merged, merge(self.inputs, of_x, x))
            return (pick(floats, carried), pick(map(is_float, y), y)), (carried, y)

        diff = pick(self.constants, constants), pick(floats, carry), pick(self.inputs, x)
        _, vjp, (carried, y) = jax.vjp(run, *diff, has_aux=True)
        leaves, tree = jax.tree.flatten(vjp)
        known = {id(leaf): number for number, leaf in enumerate([*constants, *x])}
        kept = [AtHand(known[id(leaf)]) if id(leaf) in known else leaf for leaf in leaves]
        return carried, y, jax.tree.unflatten(tree, kept)

    def backward(
        self, residuals: Any, constants: Arrays, x: Arrays, ct: tuple[Arrays, Arrays]
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The gradients by the constants, the carry and x, from those of the carry and y; floats only."""
        known = [*constants, *x]
        leaves, tree = jax.tree.flatten(residuals, is_leaf=lambda leaf: isinstance(leaf, AtHand))
        filled = [known[leaf.number] if isinstance(leaf, AtHand) else leaf for leaf in leaves]
        return jax.tree.unflatten(tree, filled)(ct)


def flat_step(
    body: Callable[[Any, Any], tuple[Any, Any]], trees: tuple[Any, Any, Any], carry: Arrays, x: Arrays
) -> tuple[Step, Arrays]:
    """The body as a function of flat arrays, and the arrays that it closes over, which become arguments."""

    def flat(carry: Arrays, x: Arrays) -> list[Any]:
        return jax.tree.leaves(body(jax.tree.unflatten(trees[0], carry), jax.tree.unflatten(trees[1], x)))

    traced = jax.make_jaxpr(flat)(carry, x)

    def step(constants: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        results = jex.jaxpr_as_fun(jex.ClosedJaxpr(compat.open_jaxpr(traced), constants))(*carry, *x)
        return results[: len(carry)], results[len(carry) :]

    return step, list(compat.constants(traced))


def cast(carry: Sequence[Any], ends: Sequence[Any]) -> Arrays:
    """A carry with the types that the body gives it: `lax.scan` promotes weak types."""
    arrays = [jnp.asarray(leaf) for leaf in carry]
    return [
        leaf if leaf.dtype == end.dtype else lax.convert_element_type(leaf, end.dtype)
        for leaf, end in zip(arrays, ends, strict=True)
    ]


def is_float(leaf: Any) -> bool:
    """Whether an array can have a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def pick(mask: Any, leaves: Sequence[Any]) -> Arrays:
    """The leaves that a mask selects."""
    return [leaf for is_picked, leaf in zip(mask, leaves, strict=True) if is_picked]


def merge(mask: Sequence[bool], picked: Sequence[Any], others: Sequence[Any]) -> Arrays:
    """`others` with those that a mask selects replaced."""
    rest = iter(picked)
    return [next(rest) if is_picked else leaf for is_picked, leaf in zip(mask, others, strict=True)]
