"""A model of sequences over the axis seq: its attention, and the tokens that come with it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import sharding
from sharding import P, ShardingError, sequence

from ..models import layouts, transformer
from .sequence_config import Sequencing

AXIS = "seq"


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Sequences of one length over an axis."""

    devices: int
    kind: sequence.Kind
    order: sequence.Order
    """Zig-zag where a causal ring needs it for balance."""

    @staticmethod
    def of(sequencing: Sequencing, length: int, *, in_order: bool = False) -> "Sequences":
        """What was asked for, for causal attention and sequences of this length.

        Args:
            sequencing: what was asked for.
            length: of each sequence.
            in_order: whether the order of tokens matters to more than their attention.

        Raises:
            ShardingError: the axis doesn't divide the length.
        """
        if length % sequencing.devices:
            raise ShardingError(
                f"--mesh seq={sequencing.devices}",
                there=f"a context of {length}: {length} / {sequencing.devices} = {length / sequencing.devices:g}",
                must="each device has as many positions",
                fix=[f"--mesh seq={n}" for n in range(2, sequencing.devices) if length % n == 0][-1:],
            )
        is_plain = in_order or sequencing.kind == "ulysses" or length % (2 * sequencing.devices)
        return Sequences(devices=sequencing.devices, kind=sequencing.kind, order="plain" if is_plain else "zigzag")

    @property
    def attention(self) -> transformer.Branch:
        """Causal attention between the projections of a transformer."""
        attend = partial(sequence.attention, axis=AXIS, kind=self.kind, order=self.order)
        return partial(transformer.Attention, attend=attend, order=self.positions)

    def examples(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of tokens [B, S + 1] each device's part of inputs and targets, in the order of the attention."""
        inputs, targets = next_tokens(tokens)
        return self._ordered(inputs), self._ordered(targets)

    def _ordered(self, tokens: jax.Array) -> jax.Array:
        if self.order == "zigzag":
            tokens = sequence.zigzag(tokens, self.devices)
        batch = layouts.batch(jax.sharding.get_abstract_mesh().axis_names)
        return sharding.annotate(tokens, P(*batch, AXIS))

    @property
    def positions(self) -> Callable[[int], jax.Array] | None:
        """Number of tokens -> their positions; None where they come one after the other."""
        if self.order == "plain":
            return None
        return lambda length: jnp.asarray(sequence.positions(length, self.devices, self.order))


def next_tokens(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of tokens [..., S + 1] inputs and targets [..., S]."""
    return tokens[..., :-1], tokens[..., 1:]


def unsplit(model: nnx.Module, whole: Callable[..., nnx.Module]) -> Any:
    """A model over any axis for text that is generated: one token at a time, at lengths that no axis divides.

    Args:
        model: with the parameters.
        whole: rngs -> the same model without an axis that splits sequences.
    """
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: whole(rngs=nnx.Rngs(0)))), nnx.state(model))
