"""Names of what kernels save for their derivatives, by which policies of `jax.checkpoint` choose.

A name stands inside the forward pass of each derivative, where policies see it on every JAX version. JAX's own
`save_anything_except_these_names` saves everything, whatever the names; `save_all_but` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ..errors import ShardingError

NAMES = {
    "attention_output": "the output of `attention`, in blocks or by the TPU kernel",
    "attention_logsumexp": "the logsumexp of each of its queries",
    "norm_input": "the input of a norm that keeps its input",
    "norm_output": "the output of a norm",
    "norm_rate": "1 / standard deviation of each row, of a norm that keeps its output",
    "softmax_output": "the output of `scaled_softmax`",
    "gelu_input": "the input of `bias_gelu_dropout`",
    "gelu_output": "its output, which the next matmul keeps",
    "dropout_output": "the output of `dropout`, which the next matmul keeps",
}
"""Name -> the value."""


def saved(value: Any, name: str) -> Any:
    """The value, under one of `NAMES`."""
    assert name in NAMES, name
    return checkpoint_name(value, name)


def save_all_but(*names: str) -> Callable[..., Any]:
    """A policy for `jax.checkpoint`: results of matmuls and named values are saved, but not these.

    DeepSpeed's `gelu_checkpoint` is `save_all_but("gelu_output")`, its `attn_dropout_checkpoint` is
    `save_all_but("dropout_output")`, and `normalize_invertible` is `keep="output"` of the norms. What elementwise ops
    compute, and what is left out, is computed again from the rest.

    Args:
        names: of `saved_names.NAMES`, or names that the program gives by `jax.ad_checkpoint.checkpoint_name`.

    Raises:
        ShardingError: a name is no text.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from sharding import kernels
        >>> def layer(w1, w2, x):
        ...     return kernels.bias_gelu_dropout(x @ w1) @ w2
        >>> step = jax.checkpoint(layer, policy=kernels.save_all_but("gelu_output"))
        >>> jax.grad(lambda *args: step(*args).sum())(jnp.ones((4, 8)), jnp.ones((8, 4)), jnp.ones((2, 4))).shape
        (4, 8)
    """
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ShardingError(f"kernels.save_all_but({', '.join(map(repr, wrong))})", required="names of values")
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policies.dots_saveable, policies.save_any_names_but_these(*names))
