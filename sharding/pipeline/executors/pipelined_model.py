"""A pipelined model: the user's functions, and the partition of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .activations import Activation, ActivationTree, Arrays

StageFn = Callable[..., Any]
"""(one stage's parameters, x) -> y of the structure, shapes and dtypes of x; with a context, (parameters, x,
context of a slice of the tokens) -> (y, the next slice's context)."""
LossFn = Callable[[Any, Any], jax.Array]
"""(the model's output for a microbatch, its target) -> the mean loss, a scalar."""
Remat = bool | Callable[..., bool] | None
"""Whether to rematerialize a stage's forward in its backward; or a ``jax.checkpoint`` policy."""

PARAM_KEYS = ("first", "stages", "last", "shared")


class Ends(NamedTuple):
    """The parameters outside of the stages; None where there are none."""

    first: Any = None
    last: Any = None
    shared: Any = None
    """Parameters of both ends, such as a tied embedding."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The computation, as functions of one microbatch or of a slice of its tokens."""

    stage_fn: StageFn
    loss_fn: LossFn
    first_fn: Callable[..., Any] | None = None
    last_fn: Callable[..., Any] | None = None
    remat: Remat = None
    context: Any = None
    """Initial context of the first slice at each stage; None without slices."""

    @property
    def stage(self) -> StageFn:
        """The stage function with rematerialization."""
        if not self.remat:
            return self.stage_fn
        return jax.checkpoint(self.stage_fn, policy=None if self.remat is True else self.remat)

    @property
    def has_ends(self) -> bool:
        """Whether the parameters are a dict of stages and ends."""
        return self.first_fn is not None or self.last_fn is not None

    def enter(self, ends: Ends, inputs: Any) -> Any:
        """The first stage's input."""
        if self.first_fn is None:
            return inputs
        return self.first_fn(ends.first, inputs, *self._shared(ends))

    def loss(self, ends: Ends, y: Any, target: Any) -> jax.Array:
        """The loss of the last stage's output."""
        if self.last_fn is not None:
            y = self.last_fn(ends.last, y, *self._shared(ends))
        return self.loss_fn(y, target)

    def loss_and_gradients(
        self, activation_tree: ActivationTree, ends: Ends, y: Activation, target: Any, microbatches: int
    ) -> tuple[jax.Array, tuple[Ends, Arrays]]:
        """The microbatch's share of the loss, and its gradients of the ends and of the last stage's output."""

        def loss(ends: Ends, floats: Arrays) -> jax.Array:
            return self.loss(ends, activation_tree.unflatten(Activation(floats, y.others)), target) / microbatches

        return jax.value_and_grad(loss, argnums=(0, 1))(ends, y.floats)

    def enter_backward(self, activation_tree: ActivationTree, ends: Ends, inputs: Any, dx: Arrays) -> Ends:
        """Gradients of the ends through the first stage's input, which is rematerialized."""
        return jax.vjp(lambda ends: activation_tree.flatten(self.enter(ends, inputs)).floats, ends)[1](dx)[0]

    def partition(self, params: Any) -> tuple[Any, Ends]:
        """The stages' parameters, and those of the ends."""
        if not self.has_ends:
            return params, Ends()
        return params["stages"], Ends(params.get("first"), params.get("last"), params.get("shared"))

    def combine(self, stages: Any, ends: Ends, like: Any) -> Any:
        """Parameters or gradients in the structure of `like`."""
        if not self.has_ends:
            return stages
        found = {"stages": stages, "first": ends.first, "last": ends.last, "shared": ends.shared}
        return {part: found[part] for part in like}

    def _shared(self, ends: Ends) -> tuple[Any, ...]:
        return () if ends.shared is None else (ends.shared,)
