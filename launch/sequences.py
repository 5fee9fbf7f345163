"""A model of sequences over the axis seq: its attention, and the tokens that come with it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import sharding
from sharding import P, ShardingError, sequence

from ..models import layouts
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
    def of(sequencing: Sequencing, length: int) -> "Sequences":
        """What was asked for, for causal attention and sequences of this length.

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
        is_plain = sequencing.kind == "ulysses" or length % (2 * sequencing.devices)
        return Sequences(devices=sequencing.devices, kind=sequencing.kind, order="plain" if is_plain else "zigzag")

    @property
    def attend(self) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
        """Causal attention."""
        return partial(sequence.attention, axis=AXIS, kind=self.kind, order=self.order)

    def ordered(self, tokens: jax.Array) -> jax.Array:
        """Of tokens [B, S] each device's part, in the order of the attention."""
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
