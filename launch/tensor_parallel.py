"""What the axis `tensor` splits beside weights: the vocabulary, and the length of a residual stream."""

import jax

from sharding import tensor

from ..models import transformer

AXIS = "tensor"


def loss(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean cross entropy in nats, over a vocabulary that stays split where the mesh around has the axis."""
    if _size() == 1:
        return transformer.loss(logits_BSV, targets_BS)
    return tensor.cross_entropy(logits_BSV, targets_BS, axis=AXIS)


def stream() -> transformer.Stream:
    """A residual stream whose length is split between the branches.

    Not in the parts of a text that is generated, where the axis does not divide its length.
    """

    def divides(x_BSM: jax.Array) -> bool:
        return x_BSM.shape[1] % _size() == 0

    return transformer.Stream(
        into=lambda x_BSM: tensor.gathered(x_BSM, axis=AXIS) if divides(x_BSM) else x_BSM,
        out_of=lambda x_BSM: tensor.scattered(x_BSM, axis=AXIS) if divides(x_BSM) else x_BSM,
    )


def _size() -> int:
    return dict(jax.sharding.get_abstract_mesh().shape).get(AXIS, 1)
