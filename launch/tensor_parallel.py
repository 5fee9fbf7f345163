"""Activations sharded over the axis `tensor`: logits along the vocabulary, the residual stream along its length."""

from collections.abc import Callable
from functools import partial

import jax

from sharding import tensor

from ..models import transformer, transformer_block
from . import sharded_sequences

AXIS = "tensor"


def loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross entropy in nats; the vocabulary stays sharded if the mesh in context has the axis."""
    if _size(AXIS) == 1:
        return transformer.loss(logits_BSV, targets_BS)
    return tensor.cross_entropy(logits_BSV, targets_BS, axis=AXIS)


def stream() -> transformer_block.StreamHooks:
    """Hooks that shard the residual stream along its length between branches, beside the axis `seq` if it exists.

    They do nothing where the axes do not divide the length, as in text generation.
    """

    def resharded(move: Callable[..., jax.Array], x_BSM: jax.Array) -> jax.Array:
        seq = _size(sharded_sequences.AXIS)
        if x_BSM.shape[1] % (_size(AXIS) * seq):
            return x_BSM
        return move(x_BSM, axis=AXIS, length_axis=sharded_sequences.AXIS if seq > 1 else None)

    return transformer_block.StreamHooks(
        branch_input=partial(resharded, tensor.gathered), branch_output=partial(resharded, tensor.scattered)
    )


def _size(axis: str) -> int:
    """Size of an axis of the mesh in context; 1 without it."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)
