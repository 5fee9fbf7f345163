"""Kernels under the pass: each device runs a kernel on its shards.

`implementations()` is the table of which implementation of an operation runs where, and why.

Example:
    >>> import jax
    >>> import sharding
    >>> from sharding import P, kernels
    >>> def softmax(x):  # or a `pallas_call`
    ...     return jax.nn.softmax(x, axis=-1)
    >>> mine = kernels.with_rule(softmax, "b k -> b k", need_replication="k")
    >>> x = jax.ShapeDtypeStruct((8, 16), "float32")
    >>> with sharding.mesh(data=2, tensor=4):
    ...     c = sharding.jit(jax.grad(lambda x: mine(x).var()), in_shardings=P("data")).complete(x)
    >>> c.out_shardings
    P('data',)
"""

from .bias_gelu_dropout import bias_gelu_dropout, dropout
from .collective_matmul import all_gather_matmul, matmul_reduce_scatter
from .dot_product_attention import attention, takes_blocks
from .gelu import gelu
from .grouped_matmul import grouped_matmul
from .implementation import runs_kernels
from .implementation_table import implementations
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .rms_norm import rms_norm
from .rotary import rotary
from .saved_names import save_all_but
from .scaled_softmax import scaled_softmax
from .with_rule import with_rule

__all__ = [
    "all_gather_matmul",
    "attention",
    "bias_gelu_dropout",
    "dropout",
    "gelu",
    "grouped_matmul",
    "implementations",
    "layer_norm",
    "linear_cross_entropy",
    "matmul_reduce_scatter",
    "rms_norm",
    "rotary",
    "runs_kernels",
    "save_all_but",
    "scaled_softmax",
    "takes_blocks",
    "with_rule",
]
