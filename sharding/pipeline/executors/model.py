"""A pipelined model: the functions that a user gives, and the parts of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .flow import Arrays, Flow, Passing

StageFn = Callable[..., Any]
"""(one stage's parameters, x) -> y of the same structure, shapes and dtypes as x; with a context, (parameters, x,
context of a slice of the tokens) -> (y, the next slice's context)."""
LossFn = Callable[[Any, Any], jax.Array]
"""(the model's output for a microbatch, its target) -> the mean loss, a scalar."""
Remat = bool | Callable[..., bool] | None
"""Whether a stage's forward is run again for its backward; a policy of ``jax.checkpoint`` says what of it."""

PARTS = ("first", "stages", "last", "shared")


class Ends(NamedTuple):
    """The parameters that are not of a stage; None where there are none."""

    first: Any = None
    last: Any = None
    shared: Any = None
    """What both ends use, such as a tied embedding."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What to compute, as functions of one microbatch, or of a slice of its tokens."""

    stage_fn: StageFn
    loss_fn: LossFn
    first_fn: Callable[..., Any] | None = None
    last_fn: Callable[..., Any] | None = None
    remat: Remat = None
    context: Any = None
    """What the first slice of a microbatch's tokens gets at each stage; None where sequences are not cut."""

    @property
    def stage(self) -> StageFn:
        """The stage as it is differentiated."""
        if not self.remat:
            return self.stage_fn
        return jax.checkpoint(self.stage_fn, policy=None if self.remat is True else self.remat)

    @property
    def has_ends(self) -> bool:
        """Whether parameters come in parts."""
        return self.first_fn is not None or self.last_fn is not None

    def enter(self, ends: Ends, inputs: Any) -> Any:
        """What the first stage gets."""
        if self.first_fn is None:
            return inputs
        return self.first_fn(ends.first, inputs, *self._shared(ends))

    def loss(self, ends: Ends, y: Any, target: Any) -> jax.Array:
        """The loss of what the last stage made."""
        if self.last_fn is not None:
            y = self.last_fn(ends.last, y, *self._shared(ends))
        return self.loss_fn(y, target)

    def share(
        self, passing: Passing, ends: Ends, y: Flow, target: Any, microbatches: int
    ) -> tuple[jax.Array, tuple[Ends, Arrays]]:
        """Its share of the loss, and its gradients for the ends and for what the last stage made."""

        def loss(ends: Ends, floats: Arrays) -> jax.Array:
            return self.loss(ends, passing.tree_of(Flow(floats, y.others)), target) / microbatches

        return jax.value_and_grad(loss, argnums=(0, 1))(ends, y.floats)

    def entered(self, passing: Passing, ends: Ends, inputs: Any, dx: Arrays) -> Ends:
        """The gradients of the ends that come through what the first stage got, which is made again."""
        return jax.vjp(lambda ends: passing.flow(self.enter(ends, inputs)).floats, ends)[1](dx)[0]

    def parts(self, params: Any) -> tuple[Any, Ends]:
        """The stages' parameters, and the others."""
        if not self.has_ends:
            return params, Ends()
        return params["stages"], Ends(params.get("first"), params.get("last"), params.get("shared"))

    def whole(self, stages: Any, ends: Ends, like: Any) -> Any:
        """Gradients in the form of the parameters `like`."""
        if not self.has_ends:
            return stages
        found = {"stages": stages, "first": ends.first, "last": ends.last, "shared": ends.shared}
        return {part: found[part] for part in like}

    def _shared(self, ends: Ends) -> tuple[Any, ...]:
        return () if ends.shared is None else (ends.shared,)
