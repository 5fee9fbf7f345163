"""Tensor parallelism as in Megatron-LM: column-, row- and vocab-parallel layers, sequence parallelism.

In: activations, weights and tokens, or parameter paths with roles. Out: annotated arrays, losses and PartitionSpecs.

Example:
    >>> import jax
    >>> from jax import numpy as jnp
    >>> import sharding
    >>> from sharding import P, tensor
    >>> def loss(params, tokens, targets):
    ...     x = tensor.scattered(tensor.embed(params["table"], tokens))
    ...     h = jax.nn.gelu(tensor.column_parallel(tensor.gathered(x), params["w1"]))
    ...     x = x + tensor.scattered(tensor.row_parallel(h, params["w2"]))
    ...     return jnp.mean(tensor.losses(tensor.logits(tensor.gathered(x), params["table"]), targets))
    >>> shapes = {"table": (512, 16), "w1": (16, 64), "w2": (64, 16)}
    >>> params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    >>> tokens = jax.ShapeDtypeStruct((2, 8), "int32")
    >>> with sharding.mesh(devices=4, tensor=4):
    ...     completion = sharding.jit(loss).complete(params, tokens, tokens)
    >>> completion.spec("params/w2"), completion.communication().by_kind()["reduce-scatter"]
    (P('tensor',), (2, 2048))
"""

from .column_row_layers import column_parallel, row_parallel
from .sequence_parallel import gathered, scattered
from .vocab_parallel import embed, logits, padded_vocabulary
from .vocab_parallel_loss import cross_entropy, losses
from .weight_specs import specs, split

__all__ = [
    "column_parallel",
    "cross_entropy",
    "embed",
    "gathered",
    "logits",
    "losses",
    "padded_vocabulary",
    "row_parallel",
    "scattered",
    "specs",
    "split",
]
