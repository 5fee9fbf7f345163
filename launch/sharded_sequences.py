"""Attention, inputs and targets of a model whose sequences are sharded over the axis `seq`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import sharding
from sharding import P, ShardingError, sequence

from ..models import layouts, transformer_layers
from .config.sequence_config import SequenceConfig

AXIS = "seq"


@dataclass(frozen=True, kw_only=True)
class ShardedSequences:
    """How sequences of one length are sharded over the axis `seq`."""

    devices: int
    kind: sequence.Kind
    order: sequence.Order
    """Zig-zag where it balances a causal ring."""

    @staticmethod
    def of(sequence_config: SequenceConfig, length: int, *, in_order: bool = False) -> "ShardedSequences":
        """The sharding of sequences of this length for causal attention.

        Args:
            sequence_config: the kind of attention and the size of the axis.
            length: tokens per sequence.
            in_order: keep tokens in order, for models that depend on it outside of attention.

        Raises:
            ShardingError: the axis does not divide the length.
        """
        devices, kind = sequence_config.devices, sequence_config.kind
        if length % devices:
            raise ShardingError(
                f"--mesh seq={devices}",
                found=f"context length {length}; {length} / {devices} = {length / devices:g}",
                required="an axis size that divides the context length",
                fix=[f"--mesh seq={n}" for n in range(2, devices) if length % n == 0][-1:],
            )
        is_plain = in_order or kind == "ulysses" or length % (2 * devices)
        return ShardedSequences(devices=devices, kind=kind, order="plain" if is_plain else "zigzag")

    @property
    def attention(self) -> transformer_layers.Branch:
        """A transformer's attention branch with sequence-parallel causal attention."""
        attend = partial(sequence.attention, axis=AXIS, kind=self.kind, order=self.order)
        return partial(transformer_layers.Attention, attend=attend, token_positions=self.positions)

    def examples(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tokens [B, S + 1] -> inputs and targets [B, S], sharded and in the order of the attention."""
        inputs, targets = next_tokens(tokens)
        return self._ordered(inputs), self._ordered(targets)

    def _ordered(self, tokens: jax.Array) -> jax.Array:
        if self.order == "zigzag":
            tokens = sequence.zigzag(tokens, self.devices)
        batch = layouts.batch(jax.sharding.get_abstract_mesh().axis_names)
        return sharding.annotate(tokens, P(*batch, AXIS))

    @property
    def positions(self) -> Callable[[int], jax.Array] | None:
        """Number of tokens -> their positions; None if tokens are in order."""
        if self.order == "plain":
            return None
        return lambda length: jnp.asarray(sequence.positions(length, self.devices, self.order))


def next_tokens(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [..., S + 1] -> inputs and targets [..., S]."""
    return tokens[..., :-1], tokens[..., 1:]


def without_sequence_axis(model: nnx.Module, make: Callable[..., nnx.Module]) -> Any:
    """The model without sequence parallelism, to generate text one token at a time at lengths no axis divides.

    Args:
        model: the model with its parameters.
        make: rngs -> the same model without sequence parallelism.
    """
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))), nnx.state(model))
