"""Instructions of a device's program, made by hand."""

import jax
import jax.numpy as jnp
from jax import lax

from sharding.memory.instruction import Instruction


def op(name, *operands, shape=(2**20,), role="fusible", **facts):
    """One in float32."""
    return Instruction(name, role, list(operands), shape, 4 * jnp.zeros(shape).size, **facts)


def reduction(x, *axes):
    """The one that sums an array over some axes."""
    eqn = jax.make_jaxpr(lambda y: lax.reduce_sum_p.bind(y, axes=axes, out_sharding=None))(jnp.zeros(x.shape)).eqns[0]
    shape = tuple(size for d, size in enumerate(x.shape) if d not in axes)
    return op("reduce_sum", x, shape=shape, eqn=eqn, expensive=True)
