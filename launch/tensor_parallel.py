"""What the axis `tensor` splits beside weights: the vocabulary, and the length of a residual stream."""

from collections.abc import Callable
from functools import partial

import jax

from sharding import tensor

from ..models import transformer
from . import sequences

AXIS = "tensor"


def loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross entropy in nats, over a vocabulary that stays split where the mesh around has the axis."""
    if _size(AXIS) == 1:
        return transformer.loss(logits_BSV, targets_BS)
    return tensor.cross_entropy(logits_BSV, targets_BS, axis=AXIS)


def stream() -> transformer.Stream:
    """A residual stream whose length is split between the branches, beside the axis `seq` where there is one.

    Not in the parts of a text that is generated, where the axes do not divide its length.
    """

    def moved(move: Callable[..., jax.Array], x_BSM: jax.Array) -> jax.Array:
        along = _size(sequences.AXIS)
        if x_BSM.shape[1] % (_size(AXIS) * along):
            return x_BSM
        return move(x_BSM, axis=AXIS, length_axis=sequences.AXIS if along > 1 else None)

    return transformer.Stream(into=partial(moved, tensor.gathered), out_of=partial(moved, tensor.scattered))


def _size(axis: str) -> int:
    """Of an axis of the mesh around; 1 where it has none."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)
